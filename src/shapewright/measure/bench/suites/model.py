"""Cases of one model: every distinct operation that the lowering lists for a step, once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.core.errors import BenchError
from shapewright.lowering import lower
from shapewright.lowering.operations import Attention, Collective, Pointwise
from shapewright.measure.bench.operations.attention import require_sdpa_support
from shapewright.measure.bench.operations.pointwise import LOSS, require_proxy_kernel
from shapewright.measure.store.record import Case

if TYPE_CHECKING:
    from shapewright.lowering.operations import Operation
    from shapewright.models import TransformerConfig
    from shapewright.workload import ParallelLayout, Workload


@dataclass(frozen=True)
class ModelCases:
    """The measurable operations of one step of a model.

    Attributes:
        cases: Distinct operations, in the order of the step.
        repeats: Executions per step, by the case's key without device and library.
        skipped: Reason why an operation cannot be measured, by its name.
    """

    cases: tuple[Case, ...]
    repeats: dict[str, int]
    skipped: dict[str, str]

    def repeats_of(self, case: Case) -> int:
        """Executions of a case per step."""
        return self.repeats[case.key("", "")]


def list_model_cases(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> ModelCases:
    """List the operations of one step on one device as cases; collectives are skipped.

    Args:
        config: The model.
        workload: What is run.
        layout: Parallel layout.
    """
    cases: dict[str, Case] = {}
    repeats: dict[str, int] = {}
    skipped: dict[str, str] = {}
    for operation in lower(config, workload, layout):
        case = Case(operation=operation, row_width=_row_width(operation, config, workload))
        reason = _reason_to_skip(operation)
        if reason:
            skipped[operation.name] = reason
            continue
        key = case.key("", "")
        cases.setdefault(key, case)
        repeats[key] = repeats.get(key, 0) + int(operation.repeats)
    return ModelCases(tuple(cases.values()), repeats, skipped)


def largest_first(cases: Iterable[Case]) -> list[Case]:
    """Cases in descending order of FLOPs, then bytes, so that a small budget covers the most expensive ones."""
    return sorted(cases, key=lambda case: (-float(case.operation.flops), -float(case.operation.num_bytes)))


def _row_width(operation: Operation, config: TransformerConfig, workload: Workload) -> int:
    """Elements per row of a pointwise operation; 0 for other kinds."""
    if not isinstance(operation, Pointwise):
        return 0
    if operation.operation == "softmax":
        return workload.kv_len
    if operation.operation == LOSS:
        return config.vocab_size
    return config.intermediate_size if operation.operation == "activation" else config.hidden_size


def _reason_to_skip(operation: Operation) -> str:
    """Why an operation cannot be measured on one device; empty if it can."""
    if isinstance(operation, Collective):
        return "collectives need several devices"
    try:
        if isinstance(operation, Attention):
            require_sdpa_support(operation)
        elif isinstance(operation, Pointwise):
            require_proxy_kernel(operation)
    except BenchError as error:
        return str(error)
    return ""
