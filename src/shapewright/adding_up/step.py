"""Add operations up to a step: its time, the pipeline's bubble, and the interval that errors of operations leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from shapewright.adding_up.hiding import hide_communication
from shapewright.adding_up.priced import PricedOperation
from shapewright.adding_up.stages import WEIGHT_GRADIENTS, join_stages
from shapewright.lowering import is_weight_gradient, layers_per_stage, num_microbatches
from shapewright.perf.calibration import UNCALIBRATED
from shapewright.perf.pricing import price_operations

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.operations import Operation
    from shapewright.perf.price import Price
    from shapewright.workload import Workload

ERROR_CORRELATION = 0.3
"""Correlation of the errors of one step's operations: what a record gets wrong alike for all, and not shape by shape.

Measured as the share of variance between libraries: 0.19 for products priced for no library in particular, 0.29 priced
for another one; whole layers of the paper ask for 0.15 to 0.3 (docs/decisions/0012-intervals.md).
"""

BORROWED_ERROR_CORRELATION = 0.5
"""The same with another device's record: 0.3 for attention, 0.5 for products, 0.7 for experts where each measured
device is left out in turn. Where most of an interval is the device's own bias, errors correlate more than that: a chip
of another maker is slower than its lender says in all its products, or faster."""


@dataclass(frozen=True)
class StepTimes:
    """Times of a step, added up from its operations. [s]"""

    step_s: float
    step_low_s: float
    step_high_s: float
    bubble_s: float
    layer_forward_s: float


def add_up(
    priced: Iterable[PricedOperation], config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> StepTimes:
    """Add the operations of the busiest stage, the pipeline's bubble and the once-per-step work.

    With m micro-batches, p stages and v chunks each, the busiest stage works m passes and waits (p - 1) / v passes of
    an average stage; so prefill and decode (m = 1) take all p stages one after the other. GPipe waits as long as 1F1B.
    The zero-bubble schedule ZB-H1 waits for (p - 1) (T_F + T_B - T_W), where 1F1B has (p - 1) (T_F + T_B + T_W):
    gradients of weights, W, fill the end. DualPipe, whose devices have a stage from either end, waits for
    (p / 2 - 1) (T_F&B + T_B - 2 T_W), with T_B - T_W taken as long as T_F; so (p - 2) (T_F + T_B - T_W).

    Source: arXiv 2104.04473, section 2.2; arXiv 2401.10241, section 2 (ZB-H1); arXiv 2412.19437, table 2 (DualPipe).
    """
    layer_forward_s = 0.0
    sums = dict.fromkeys(("every", "first", "last", "step", WEIGHT_GRADIENTS), 0.0)
    below, above = _Spread(), _Spread()
    for entry in priced:
        operation, price, total_s = entry.operation, entry.price, entry.total_time_s
        sums["step" if operation.pass_name == "step" else operation.stage] += total_s
        if operation.stage == "every":
            if operation.pass_name == "forward":
                layer_forward_s += total_s
            elif is_weight_gradient(operation):
                sums[WEIGHT_GRADIENTS] += total_s
        if total_s > 0.0:
            shared, times = error_correlation(price), total_s / float(price.time_s)
            below.add(times * abs(float(price.low_s - price.time_s)), shared)
            above.add(times * abs(float(price.high_s - price.time_s)), shared)
    passes = num_microbatches(workload, layout)
    step_s, bubble_s = join_stages(sums, passes, layout)
    scale = step_s / max(sum(sums[part] for part in sums if part != WEIGHT_GRADIENTS), 1e-30)
    return StepTimes(
        step_s=step_s,
        step_low_s=max(step_s - scale * below.width_s, 0.0),
        step_high_s=step_s + scale * above.width_s,
        bubble_s=bubble_s,
        layer_forward_s=layer_forward_s / (passes * layers_per_stage(config, layout)),
    )


@dataclass
class _Spread:
    """Half-width of an interval of a sum, of whose parts each pair is correlated as its own correlations say.

    Attributes:
        alone: Squares of what each part adds by itself. [s^2]
        together_s: What all parts have in common. [s]
    """

    alone: float = 0.0
    together_s: float = 0.0

    def add(self, width_s: float, shared: float) -> None:
        """Add a part with a half-width and a correlation."""
        self.alone += (1.0 - shared) * width_s * width_s
        self.together_s += sqrt(shared) * width_s

    @property
    def width_s(self) -> float:
        """Half-width of the sum. [s]"""
        return sqrt(self.alone + self.together_s**2)


def error_correlation(price: Price) -> float:
    """Correlation of an operation's error with those of the others of its step."""
    if not price.calibration.startswith(UNCALIBRATED):
        return ERROR_CORRELATION
    # What a device's bias leaves correlates as the errors of an own record do.
    shared = float(price.shared_error)
    return max(BORROWED_ERROR_CORRELATION, shared + (1.0 - shared) * ERROR_CORRELATION)


def add_up_passes(
    passes: Sequence[tuple[Sequence[Operation], Workload, ParallelLayout]],
    config: TransformerConfig,
    device: Device,
    *,
    uncalibrated: bool = False,
) -> list[StepTimes]:
    """Times of many passes of one model, as predict has them, with all their operations priced at once.

    Args:
        passes: Operations of each with the workload and the layout that they were lowered from.
        config: The model.
        device: What they run on.
        uncalibrated: Price as if nobody had measured this device.
    """
    listed = [operation for operations, _, _ in passes for operation in operations]
    prices = iter(price_operations(listed, device, uncalibrated=uncalibrated))
    return [
        add_up(
            hide_communication([PricedOperation(operation, next(prices)) for operation in operations]),
            config,
            workload,
            layout,
        )
        for operations, workload, layout in passes
    ]
