"""The shapes of one model: exactly what lowering lists for it, each different operation once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.bench.attention import require_plain
from shapewright.bench.pointwise import LOSS, require_stand_in
from shapewright.errors import BenchError
from shapewright.lowering import lower
from shapewright.operations import Attention, Collective, Pointwise
from shapewright.store.record import Case

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.operations import Operation
    from shapewright.workload import Workload


@dataclass(frozen=True)
class ModelShapes:
    """What of a model's step can be measured.

    Attributes:
        cases: Different operations, in the order of the step.
        repeats: Executions per step, by the case's key without device.
        left_out: Operations that are not measured, with the reason of each.
    """

    cases: tuple[Case, ...]
    repeats: dict[str, int]
    left_out: dict[str, str]

    def repeats_of(self, case: Case) -> int:
        """Executions of a case per step."""
        return self.repeats[case.key("", "")]


def model_shapes(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> ModelShapes:
    """List the operations of one step on one device as cases.

    Args:
        config: The model.
        workload: What is run.
        layout: How it is spread; collectives are left out.
    """
    cases: dict[str, Case] = {}
    repeats: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for operation in lower(config, workload, layout):
        case = Case(operation=operation, row_width=_row_width(operation, config, workload))
        reason = _why_not(operation)
        if reason:
            left_out[operation.name] = reason
            continue
        key = case.key("", "")
        cases.setdefault(key, case)
        repeats[key] = repeats.get(key, 0) + int(operation.repeats)
    return ModelShapes(tuple(cases.values()), repeats, left_out)


def largest_first(cases: Iterable[Case]) -> list[Case]:
    """Cases by their FLOPs and then bytes, so that a small budget reaches what the step spends its time on."""
    return sorted(cases, key=lambda case: (-float(case.operation.flops), -float(case.operation.num_bytes)))


def _row_width(operation: Operation, config: TransformerConfig, workload: Workload) -> int:
    """Elements of a row of a pointwise operation."""
    if not isinstance(operation, Pointwise):
        return 0
    if operation.operation == "softmax":
        return workload.kv_len
    if operation.operation == LOSS:
        return config.vocab_size
    return config.intermediate_size if operation.operation == "activation" else config.hidden_size


def _why_not(operation: Operation) -> str:
    """Why an operation cannot be measured; empty if it can."""
    if isinstance(operation, Collective):
        return "collectives need several devices"
    try:
        if isinstance(operation, Attention):
            require_plain(operation)
        elif isinstance(operation, Pointwise):
            require_stand_in(operation)
    except BenchError as error:
        return str(error)
    return ""
