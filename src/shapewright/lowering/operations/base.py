"""Fields of every operation: block, role and gradient, the pass that runs it, and its number of executions.

An operation states its meaning in ``block``, ``role`` and ``gradient``. Its name is for display alone: no code outside
this package derives anything from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from shapewright.core.records import dataclass
from shapewright.workload.finetuning import ADAPTER_IN, ADAPTER_OUT, CONVERSION, DORA_NORM, DORA_WEIGHT
from shapewright.workload.recompute import ATTENTION_CORE_ROLES

if TYPE_CHECKING:
    from shapewright.core.numeric import Count

PASSES = ("forward", "recompute", "backward", "step")
STAGES = ("every", "first", "last")

Block = Literal[
    "",
    "embedding",
    "norm",
    "attention",
    "indexer",
    "cross_attention",
    "gated_delta_net",
    "kimi_delta_attention",
    "lightning_attention",
    "mamba2",
    "mamba",
    "short_convolution",
    "mlp",
    "router",
    "moe",
    "shared_expert",
    "residual",
    "final_norm",
    "mtp",
    "logits",
    "cross_entropy",
    "pipeline",
    "replicas",
    "offload",
    "optimizer",
]
"""Parts of a model or of a step: ``indexer`` selects the entries of compressed attention, ``moe`` contains routed
experts and the exchange of their rows, ``router`` their selection, ``norm`` and ``residual`` those of the layers,
``replicas`` the communication of gradients and weights. Empty for operations that were not lowered from a model, such
as those of a benchmark."""

Gradient = Literal["", "dgrad", "wgrad", "backward"]
"""Gradient of a forward operation: of a GEMM's first operand (``dgrad``) or second one (``wgrad``), or of everything
else in one operation (``backward``). Empty for operations that are not the gradient of a forward operation."""

_WITHOUT_WEIGHTS = (("indexer", "index_logits"), ("residual", "mix"))


@dataclass(frozen=True, kw_only=True)
class OperationBase:
    """Fields common to all operations.

    Attributes:
        name: Displayed name: module path and role, such as ``attention.qkv`` or ``mlp.up.wgrad``.
        block: Part of the model or of the step that it belongs to.
        role: Task within the block, such as ``qkv`` or ``softmax``; empty where the block has only one.
        gradient: Gradient that it computes.
        pass_name: One of PASSES; ``step`` runs once per optimizer step.
        stage: Pipeline stages that run it: ``every``, the ``first`` or the ``last``.
        repeats: Executions per step on one device of that stage, over all micro-batches and layers.
        dtype: Element format of the operands.
    """

    name: str
    block: Block = ""
    role: str = ""
    gradient: Gradient = ""
    pass_name: str = "forward"
    stage: str = "every"
    repeats: Count = 1
    dtype: str = "bf16"

    @property
    def module(self) -> str:
        """Displayed name of the forward operation that this is, or is the gradient of.

        >>> OperationBase(name="mlp.up.wgrad", gradient="wgrad").module
        'mlp.up'
        """
        return self.name.removesuffix(f".{self.gradient}") if self.gradient else self.name

    @property
    def module_path(self) -> tuple[str, ...]:
        """Parts of the module's displayed name, from the outermost one; for grouping in displays."""
        return tuple(self.module.split("."))

    @property
    def is_attention_core(self) -> bool:
        """Whether it is between the query, key and value projections and the output projection."""
        return self.role in ATTENTION_CORE_ROLES and self.block in ("attention", "cross_attention")

    @property
    def multiplies_activations(self) -> bool:
        """Whether it is a GEMM without weights, if it is a GEMM: both of its operands, and gradients, are activations.

        Those of the attention core, scores of an indexer, and the mixing of residual streams.
        """
        return self.is_attention_core or (self.block, self.role) in _WITHOUT_WEIGHTS

    @property
    def is_weight_gradient(self) -> bool:
        """Whether it computes the gradient of weights, which nothing later in the backward pass waits for."""
        return self.gradient == "wgrad" and not self.multiplies_activations

    @property
    def is_adapter(self) -> bool:
        """Whether it is one of the two GEMMs of an adapter, or a gradient of one.

        >>> OperationBase(name="attention.q.lora_a", role="q.lora_a").is_adapter
        True
        """
        return self.role.endswith((ADAPTER_IN, ADAPTER_OUT))

    @property
    def is_conversion(self) -> bool:
        """Whether it converts a stored weight to the format that a GEMM reads."""
        return self.role.endswith(CONVERSION)

    @property
    def is_weight_constant(self) -> bool:
        """Whether it computes from weights alone what the backward pass takes as a constant (DoRA)."""
        return self.role.endswith((DORA_WEIGHT, DORA_NORM))

    @property
    def is_expert_block(self) -> bool:
        """Whether it works on routed rows or shared experts; the router does not."""
        return self.block in ("moe", "shared_expert")

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values.

        Does the same as dataclasses.replace several times faster: operations validate nothing when they are made, and
        lowering a step copies a hundred of them.

        >>> OperationBase(name="mlp.up").changed(repeats=3).repeats
        3
        """
        copy = object.__new__(type(self))
        values = copy.__dict__
        values.update(self.__dict__)
        values.update(changes)
        assert len(values) == len(self.__dict__), f"{type(self).__name__} has no field {sorted(changes)}"
        return copy

    def single_sizes(self, num_sizes: int) -> list[Self]:
        """Return one operation per size of an operation whose sizes are arrays of one length."""
        arrays = {name: value.tolist() for name, value in self.__dict__.items() if hasattr(value, "tolist")}
        if not arrays:
            return [self] * num_sizes
        rows = zip(*arrays.values(), strict=True)
        return [self.changed(**dict(zip(arrays, values, strict=True))) for values in rows]


MEANING_FIELDS = frozenset({"block", "role", "gradient", "fuses_dropout"})
"""Fields that state what an operation is for; each also shows in its name, or in its sizes."""

UNPRICED_FIELDS = MEANING_FIELDS | {"name", "pass_name", "stage", "repeats"}
"""Fields that do not affect how long one execution takes."""
