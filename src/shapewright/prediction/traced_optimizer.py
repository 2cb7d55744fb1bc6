"""Optimizer step of a traced module: its operations, its states, and what it saves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import WorkloadError
from shapewright.lowering.operations import Gemm, GroupedGemm, Operation, Pointwise
from shapewright.lowering.optimizer_step import matrix_gemms
from shapewright.workload.optimizers import OPTIMIZERS, find_recipe
from shapewright.workload.projection import DEFAULT_INTERVAL, RANK_DIVISOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shapewright.lowering.torch_trace.trace import Trace
    from shapewright.workload.optimizers import Optimizer

_DEFAULT_OPTIMIZER = "adamw"


def optimizer_step(trace: Trace, optimizer: str | None) -> tuple[list[Operation], str, float, float]:
    """Operations of the optimizer step, its name, the bytes of its states, and those that the trace has in excess.

    Args:
        optimizer: One of OPTIMIZERS; ``adamw`` by default.

    Raises:
        WorkloadError: the optimizer is unknown, cannot train in the format of the weights, or has no effect.
    """
    if not trace.is_training:
        if optimizer is not None:
            raise WorkloadError(f"optimizer={optimizer} has no effect in a forward pass", field="optimizer")
        return [], "", 0.0, 0.0
    name = optimizer or _DEFAULT_OPTIMIZER
    dtype = trace.parameter_dtype if trace.parameter_dtype in ("fp32", "fp16", "bf16") else "bf16"
    recipe = find_recipe(name, dtype)
    matrices = list(_matrices(trace)) if OPTIMIZERS[name].works_on_matrices else []
    weights = float(trace.num_trainable if trace.num_updated is None else trace.num_updated)
    rank = _rank(matrices)
    if matrices and trace.num_trainable:
        in_matrices = sum(float(one.num_weights) for one in matrices)
        share = min(in_matrices / trace.num_trainable, 1.0)
        own_bytes, others_bytes = recipe.optimizer_bytes, recipe.embedding_optimizer_bytes or recipe.optimizer_bytes
        if OPTIMIZERS[name].projection_bytes:
            own_bytes = sum(_moment_bytes(one, OPTIMIZERS[name], rank) for one in matrices) / in_matrices
        recipe = replace(recipe, optimizer_bytes=share * own_bytes + (1.0 - share) * others_bytes)
    updates: list[Operation] = [
        Pointwise(
            name=role,
            block="optimizer",
            role=role,
            pass_name="step",
            dtype="fp32",
            operation="optimizer",
            read_bytes=weights * read_bytes,
            written_bytes=weights * written_bytes,
        )
        for role, read_bytes, written_bytes in (
            ("gradient_norm", recipe.gradient_bytes, 0.0),
            ("optimizer", recipe.step_read_bytes, recipe.step_written_bytes),
        )
        if weights
    ]
    updates += [gemm for one in matrices for gemm in _matrix_gemms(one, OPTIMIZERS[name], trace.dtype, rank)]
    # The trace has gradients as wide as the weights, as they are computed. A wider buffer that accumulates them exists
    # over the whole step.
    is_wider = recipe.gradient_bytes > recipe.weight_bytes and recipe.keeps_gradients
    buffer_bytes = recipe.gradient_bytes if is_wider else 0.0
    freed_bytes = 0.0
    if not recipe.keeps_gradients:
        # Layers are updated one by one, in the backward pass: one gradient exists at a time.
        memory = trace.memory
        largest = max((one.short * one.long for one in matrices), default=0) * recipe.gradient_bytes
        lowest = memory.weights_bytes + memory.inputs_bytes + memory.saved_bytes
        freed_bytes = min(max(memory.gradients_bytes - largest, 0.0), max(memory.peak_bytes - lowest, 0.0))
    stored_bytes = get_dtype(dtype).num_bytes - recipe.weight_bytes
    if matrices and stored_bytes > 0.0:
        freed_bytes += stored_bytes * min(sum(float(one.num_weights) for one in matrices), weights)
    return updates, name, weights * (recipe.optimizer_bytes + buffer_bytes), freed_bytes


class _Matrix(NamedTuple):
    """Equal matrices that have gradients: name of their gradient, sides, and number."""

    name: str
    short: int
    long: int
    copies: int

    @property
    def num_weights(self) -> int:
        return self.short * self.long * self.copies


def _rank(matrices: Sequence[_Matrix]) -> int:
    """Rank of GaLore's projections: a quarter of the side that most weights share, as of the hidden size in a model."""
    weights: Counter[int] = Counter()
    for one in matrices:
        weights[one.short] += one.num_weights
    return max(max(weights, key=weights.__getitem__, default=0) // RANK_DIVISOR, 1)


def _moment_bytes(matrix: _Matrix, optimizer: Optimizer, rank: int) -> float:
    """Moments of equal matrices' projected gradients, with the projections. [byte]"""
    rank = min(rank, matrix.short)
    one = matrix.short * rank * optimizer.projection_bytes + rank * matrix.long * optimizer.state_bytes
    return matrix.copies * one


def _matrices(trace: Trace) -> Iterator[_Matrix]:
    """Yield the matrices whose updates Muon orthogonalizes, or whose gradients GaLore projects.

    The last linear layer is left to AdamW, as embeddings are, if it has as many weights as one of those.

    Assumes: a matrix that runs twice in a step counts twice.
    """
    tables = {one.num_parameters for one in trace.modules if "Embedding" in one.type_name}
    head = trace.linears[-1] if trace.linears else None
    is_head = head is not None and head.in_features * head.out_features in tables
    skipped = f"{head.operation_name}.wgrad" if head is not None and is_head else ""
    for one in trace.operations:
        if not isinstance(one, Gemm | GroupedGemm) or one.gradient != "wgrad" or one.name == skipped:
            continue
        copies = one.groups if isinstance(one, GroupedGemm) else one.batch
        short, long = sorted((int(one.m), int(one.n)))
        yield _Matrix(one.name.removesuffix(".wgrad"), short, long, int(copies) * int(one.repeats))


def _matrix_gemms(matrix: _Matrix, optimizer: Optimizer, dtype: str, rank: int) -> Iterator[Gemm]:
    """Yield the GEMMs of the optimizer's step on equal matrices."""
    steps = optimizer.newton_schulz_steps
    method = "newton_schulz" if steps else "galore"
    for part, part_dtype, m, n, k in matrix_gemms(optimizer, dtype, matrix.short, matrix.long, rank, DEFAULT_INTERVAL):
        yield Gemm(
            name=f"{method}.{matrix.name}.{part}",
            block="optimizer",
            role=f"{method}_{part}",
            pass_name="step",
            repeats=max(steps, 1) * matrix.copies,
            dtype=part_dtype,
            m=m,
            n=n,
            k=k,
        )
