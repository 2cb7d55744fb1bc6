"""Memory and traffic of optimizers per parameter, with the source of each number.

In mixed precision GEMMs read 16-bit weights, and the optimizer updates an fp32 master weight of each; gradients are
accumulated in fp32, as in Megatron-LM. In fp32 training there is no separate master weight.
"""

from __future__ import annotations

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import WorkloadError, close_names
from shapewright.core.records import dataclass

_FP32_BYTES = 4.0
_NARROW_BYTES = 2.0
_BITS_OF_FP32 = 32


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """Bytes per parameter of weights, gradients and optimizer states.

    Attributes:
        weight_bytes: Weights that the GEMMs read. [byte]
        gradient_bytes: Accumulated gradients. [byte]
        optimizer_bytes: Master weights and moments. [byte]
        embedding_optimizer_bytes: The same for embeddings and logits if another optimizer updates them; None if not.
            [byte]
        has_master: Whether there is an fp32 master weight, which is part of optimizer_bytes.
        keeps_gradients: Whether all gradients exist at once; otherwise those of one layer, which is updated in the
            backward pass.
    """

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    embedding_optimizer_bytes: float | None = None
    has_master: bool = True
    keeps_gradients: bool = True

    @property
    def step_read_bytes(self) -> float:
        """Bytes read per parameter by the step: gradient, states, and the weight if it has no master. [byte]

        >>> adamw = find_recipe("adamw", "bf16")
        >>> adamw.step_read_bytes, adamw.step_written_bytes
        (16.0, 14.0)
        """
        return self.gradient_bytes + self.optimizer_bytes + (0.0 if self.has_master else self.weight_bytes)

    @property
    def step_written_bytes(self) -> float:
        """Bytes written per parameter by the step: states, master, and the weight that GEMMs read. [byte]"""
        return self.optimizer_bytes + self.weight_bytes


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer and its memory per parameter.

    Attributes:
        name: Name to select it by.
        title: Description of its states.
        state_bytes: Moments and corrections. [byte]
        source: Source of these numbers.
        embedding_state_bytes: The same for embeddings and logits if another optimizer updates them. [byte]
        gradient_bytes: Gradient in mixed precision. [byte]
        keeps_master: Whether mixed precision keeps an fp32 master weight; otherwise weights exist in 16 bits only.
        newton_schulz_steps: Steps of the Newton-Schulz iteration that orthogonalizes the updates of matrices.
        projection_bytes: Element width of the projections of gradients, whose moments it keeps; 0 without. [byte]
        svd_fraction: Share of the projections that are updated when it is their time.
        weight_bytes: Weights in mixed precision. [byte]
        keeps_gradients: Whether all gradients exist at once; without it there is no gradient accumulation.
    """

    name: str
    title: str
    state_bytes: float
    source: str
    embedding_state_bytes: float | None = None
    gradient_bytes: float = _FP32_BYTES
    keeps_master: bool = True
    newton_schulz_steps: int = 0
    projection_bytes: float = 0.0
    svd_fraction: float = 1.0
    weight_bytes: float = _NARROW_BYTES
    keeps_gradients: bool = True

    @property
    def works_on_matrices(self) -> bool:
        """Whether a step runs GEMMs on each matrix of the layers."""
        return self.newton_schulz_steps > 0 or self.projection_bytes > 0.0


OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(
            name="adamw",
            title="two fp32 moments",
            state_bytes=8.0,
            source="arXiv 1910.02054, section 3.1; NVIDIA/Megatron-LM, distributed optimizer: 18 bytes in all",
        ),
        Optimizer(
            name="adam",
            title="two fp32 moments, as adamw",
            state_bytes=8.0,
            source="arXiv 1412.6980, algorithm 1; weight decay has no state",
        ),
        Optimizer(
            name="lora-plus",
            title="two fp32 moments, as adamw: LoRA+ differs in the learning rates of A and B alone",
            state_bytes=8.0,
            source="arXiv 2402.12354, section 1",
        ),
        Optimizer(
            name="adamw-narrow-gradients",
            title="two fp32 moments, 16-bit gradients",
            state_bytes=8.0,
            gradient_bytes=_NARROW_BYTES,
            source="arXiv 1910.02054, section 3.1: 16 bytes in all",
        ),
        Optimizer(
            name="adamw-bf16",
            title="two bf16 moments, bf16 weights without a master",
            state_bytes=4.0,
            gradient_bytes=_NARROW_BYTES,
            keeps_master=False,
            source="stas00/ml-engineering, anatomy of a model's memory: AnyPrecision in bf16, 8 bytes in all",
        ),
        Optimizer(
            name="adamw-bf16-kahan",
            title="two bf16 moments and a bf16 Kahan correction, bf16 weights without a master",
            state_bytes=6.0,
            gradient_bytes=_NARROW_BYTES,
            keeps_master=False,
            source="arXiv 2010.06192, section 3: one 16-bit correction per weight",
        ),
        Optimizer(
            name="adamw-8bit",
            title="two 8-bit moments",
            state_bytes=2.0,
            source="arXiv 2110.02861, section 2; scales of blocks of 2048 are below 0.01 bytes",
        ),
        Optimizer(
            name="adafactor",
            title="fp32 first moment, second moment factored into rows and columns",
            state_bytes=4.0,
            source="stas00/ml-engineering, anatomy of a model's memory: 4 bytes",
        ),
        Optimizer(
            name="adafactor-factored",
            title="second moment factored into rows and columns, no first moment",
            state_bytes=0.0,
            source="arXiv 1804.04235, section 3: sublinear, below 0.01 bytes at usual widths",
        ),
        Optimizer(name="lion", title="one fp32 momentum", state_bytes=4.0, source="arXiv 2302.06675, section 3"),
        Optimizer(
            name="sgd-momentum",
            title="one fp32 momentum",
            state_bytes=4.0,
            source="stas00/ml-engineering, anatomy of a model's memory: 4 bytes",
        ),
        Optimizer(
            name="muon",
            title="one fp32 momentum for the layers' matrices, AdamW for embeddings and logits",
            state_bytes=4.0,
            embedding_state_bytes=8.0,
            newton_schulz_steps=5,
            source="arXiv 2502.16982, section 2; AdamW of norms and biases is left out",
        ),
        Optimizer(
            name="galore",
            title="two bf16 moments of gradients projected to a low rank, bf16 projections, no master",
            state_bytes=4.0,
            gradient_bytes=_NARROW_BYTES,
            keeps_master=False,
            projection_bytes=_NARROW_BYTES,
            source="arXiv 2403.03507, algorithm 2",
        ),
        Optimizer(
            name="galore-8bit",
            title="two 8-bit moments of projected gradients, 8-bit projections, no master, gradients layer by layer",
            state_bytes=2.0,
            gradient_bytes=_NARROW_BYTES,
            keeps_master=False,
            projection_bytes=1.0,
            keeps_gradients=False,
            source="arXiv 2403.03507, sections 4.3 and 5.5; one byte per projection reproduces its 82.5 %",
        ),
        Optimizer(
            name="q-galore",
            title="two 8-bit moments of projected gradients, INT4 projections, INT8 weights, gradients layer by layer",
            state_bytes=2.0,
            gradient_bytes=_NARROW_BYTES,
            keeps_master=False,
            projection_bytes=0.5,
            svd_fraction=0.4,
            weight_bytes=1.0,
            keeps_gradients=False,
            source="arXiv 2407.08296, section 3; over 60 % of the SVDs are saved",
        ),
    )
}
"""Optimizers by name."""


def find_recipe(name: str, dtype: str) -> TrainingRecipe:
    """Look up the bytes per parameter of an optimizer for a training dtype.

    Args:
        name: One of OPTIMIZERS.
        dtype: Element format of the GEMMs; weights have 16 bits if it is narrower.

    Raises:
        WorkloadError: the optimizer is unknown, or does not support the dtype.

    >>> recipe = find_recipe("adamw", "bf16")
    >>> recipe.weight_bytes, recipe.gradient_bytes, recipe.optimizer_bytes
    (2.0, 4.0, 12.0)
    """
    optimizer = OPTIMIZERS.get(name)
    if optimizer is None:
        hint = close_names(name, OPTIMIZERS)
        raise WorkloadError(
            f"unknown optimizer {name!r}; {hint + ' ' if hint else ''}choose one of {', '.join(OPTIMIZERS)}"
        )
    is_wide = get_dtype(dtype).bits >= _BITS_OF_FP32
    if is_wide and not optimizer.keeps_master:
        raise WorkloadError(
            f"optimizer={name!r} keeps weights in 16 bits only and cannot train in dtype={dtype}; use dtype='bf16' or "
            f"optimizer='adamw'",
            field="optimizer",
        )
    master_bytes = _FP32_BYTES if optimizer.keeps_master and not is_wide else 0.0
    embedding = optimizer.embedding_state_bytes
    return TrainingRecipe(
        weight_bytes=_FP32_BYTES if is_wide else optimizer.weight_bytes,
        gradient_bytes=_FP32_BYTES if is_wide else optimizer.gradient_bytes,
        optimizer_bytes=master_bytes + optimizer.state_bytes,
        embedding_optimizer_bytes=None if embedding is None else master_bytes + embedding,
        has_master=master_bytes > 0.0,
        keeps_gradients=optimizer.keeps_gradients,
    )
