"""Compose operation times into a step: sums by part, step time, pipeline bubble and interval; or many passes at once.

An operation's time is added to a pipeline stage (``every``, ``first``, ``last``) or to the once-per-step time. The
computation that communication may overlap with, and that communication, are summed by pool in parts of their own.

Search and plans compose these sums, for many steps at once. Predict and serving compose priced operations one by one,
because their breakdown and interval need the exposed fraction of each operation; for a search that would be a hundred
times slower. Both forms use the same functions for pools, overlap, the ends of the model and the pipeline
(composition.stages), and property tests compare their results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import sqrt
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shapewright.core.numeric import maximum
from shapewright.core.records import dataclass
from shapewright.lowering.counts import layers_per_stage, num_microbatches
from shapewright.lowering.operations.base import STAGES
from shapewright.lowering.operations.collective import Collective
from shapewright.prediction.composition.stages import (
    COLLECTIVE_POOLS,
    COMPUTE_POOLS,
    EXPERT_EXCHANGES,
    FORWARD_FRACTION,
    STEP_FIRST,
    STEP_LAST,
    WEIGHT_GRADIENTS,
    PricedOperation,
    combine_stages,
    exchange_overlap_fraction,
    exposed_fraction,
    lacking_share,
    overlap_communication,
    overlap_pools,
    pool_compute_s,
    rebalance_ends,
)
from shapewright.pricing.operations import price_operations, price_rows

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.core.numeric import Count, Numeric
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.operations.rows import OperationRows
    from shapewright.models.transformer import TransformerConfig
    from shapewright.pricing.price import Price
    from shapewright.pricing.software import Software
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload


ERROR_CORRELATION = 0.3
"""Correlation between the errors of the operations of one step.

Measured as the share of variance between libraries: 0.19 for GEMMs priced without a library, 0.29 for GEMMs priced for
another library; whole layers of the paper need 0.15 to 0.3 (docs/decisions/0012-intervals.md).
"""

BORROWED_ERROR_CORRELATION = 0.5
"""The same correlation with borrowed calibration: 0.3 for attention, 0.5 for GEMMs, 0.7 for experts, measured by
leaving out one device at a time. Errors correlate more where most of the interval is a bias of the device: a chip of
another vendor may be slower, or faster, than its calibration donor in all GEMMs."""


@dataclass(frozen=True)
class StepTimes:
    """Times of a step, composed from its operations. [s]"""

    step_s: float
    step_low_s: float
    step_high_s: float
    bubble_s: float
    layer_forward_s: float


def compose_step(
    priced: Iterable[PricedOperation], config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> StepTimes:
    """Compose the step time: operations of the busiest stage, pipeline bubble and once-per-step operations.

    With m micro-batches, p stages and v chunks per stage, the busiest stage computes m passes and waits (p - 1) / v
    passes of an average stage, and for one micro-batch at the faster end of the model; prefill and decode (m = 1)
    therefore run all p stages one after the other. GPipe has the same bubble as 1F1B. The bubble of the zero-bubble
    schedule ZB-H1 is (p - 1) (T_F + T_B - T_W), that of 1F1B (p - 1) (T_F + T_B + T_W): weight gradients, W, fill the
    end. DualPipe, whose devices hold one stage from either end, has a bubble of (p / 2 - 1) (T_F&B + T_B - 2 T_W); with
    T_B - T_W = T_F this is (p - 2) (T_F + T_B - T_W).

    Source: arXiv 2104.04473, section 2.2; arXiv 2401.10241, section 2 (ZB-H1); arXiv 2412.19437, table 2 (DualPipe).
    """
    layer_forward_s = 0.0
    sums = dict.fromkeys(EXPOSED_PARTS, 0.0)
    compute_s = dict.fromkeys(COMPUTE_POOLS, 0.0)
    below, above = _Spread(), _Spread()
    for entry in priced:
        operation, total_s = entry.operation, entry.total_time_s
        sums[_STEP_PART[operation.stage] if operation.pass_name == "step" else operation.stage] += total_s
        if operation.stage == "every":
            if operation.pass_name == "forward":
                layer_forward_s += total_s
            elif operation.is_weight_gradient:
                sums[WEIGHT_GRADIENTS] += total_s
        if not isinstance(operation, Collective):
            for pool in overlap_pools(operation, operation.pass_name):
                compute_s[pool] += total_s
        if total_s > 0.0:
            _add_interval(entry, below, above)
    return finish_step(
        sums,
        layer_forward_s,
        (below.width_s, above.width_s),
        config,
        workload,
        layout,
        forward_fraction=_forward_fraction(compute_s["forward"], compute_s["backward"]),
    )


def _forward_fraction(forward_s: Numeric, backward_s: Numeric) -> Any:
    """Return the share of the forward pass in the computation of a micro-batch."""
    return forward_s / maximum(forward_s + backward_s, 1e-300)


def finish_step(
    sums: Mapping[str, float],
    layer_forward_s: float,
    widths_s: tuple[float, float],
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    forward_fraction: float = FORWARD_FRACTION,
) -> StepTimes:
    """Return the times of a step from the sums over its operations; see compose_step.

    Args:
        sums: Times as of combine_stages. [s]
        layer_forward_s: Forward time of the layers. [s]
        widths_s: Half-widths of the interval of all sums together, below and above. [s]
        forward_fraction: Share of the forward pass in a micro-batch.
    """
    passes = num_microbatches(workload, layout)
    step_s, bubble_s = combine_stages(
        sums,
        passes,
        layout,
        lacking=lacking_share(config, workload, layout),
        forward_fraction=forward_fraction,
    )
    scale = step_s / max(sum(sums[part] for part in sums if part != WEIGHT_GRADIENTS), 1e-30)
    return StepTimes(
        step_s=step_s,
        step_low_s=max(step_s - scale * widths_s[0], 0.0),
        step_high_s=step_s + scale * widths_s[1],
        bubble_s=bubble_s,
        layer_forward_s=layer_forward_s / (passes * layers_per_stage(config, layout)),
    )


def compose_sequence(priced: Iterable[PricedOperation]) -> StepTimes:
    """Compose the step of one device that runs its operations one after the other."""
    step_s = 0.0
    below, above = _Spread(), _Spread()
    for entry in priced:
        if entry.total_time_s > 0.0:
            step_s += entry.total_time_s
            _add_interval(entry, below, above)
    return StepTimes(
        step_s=step_s,
        step_low_s=max(step_s - below.width_s, 0.0),
        step_high_s=step_s + above.width_s,
        bubble_s=0.0,
        layer_forward_s=0.0,
    )


def _add_interval(entry: PricedOperation, below: _Spread, above: _Spread) -> None:
    """Add the interval of an operation to that of its step."""
    price = entry.price
    time_s, times = float(price.time_s), int(entry.operation.repeats) * entry.exposed_fraction
    correlation = error_correlation(price)
    root = sqrt(correlation)
    below.add(times * abs(float(price.low_s) - time_s), correlation, root)
    above.add(times * abs(float(price.high_s) - time_s), correlation, root)


@dataclass
class _Spread:
    """Half-width of the interval of a sum with partly correlated terms.

    Attributes:
        independent: Sum of squares of the independent parts. [s^2]
        correlated_s: Sum of the correlated parts. [s]
    """

    independent: float = 0.0
    correlated_s: float = 0.0

    def add(self, width_s: float, correlation: float, root: float) -> None:
        """Add a term with its half-width, its correlation and the square root of its correlation."""
        self.independent += (1.0 - correlation) * width_s * width_s
        self.correlated_s += root * width_s

    @property
    def width_s(self) -> float:
        """Half-width of the sum. [s]"""
        return sqrt(self.independent + self.correlated_s**2)


def error_correlation(price: Price) -> float:
    """Return the correlation of an operation's error with the other errors of its step."""
    if not price.calibration.is_uncalibrated:
        return ERROR_CORRELATION
    # The share of the error beyond the bias of the device correlates as with the device's own record.
    shared = float(price.shared_error)
    return max(BORROWED_ERROR_CORRELATION, shared + (1.0 - shared) * ERROR_CORRELATION)


def bound_of(entry: PricedOperation) -> str:
    """Return what limits an operation: ``communication``, ``compute``, ``memory`` or ``latency``."""
    return "communication" if isinstance(entry.operation, Collective) else entry.price.bound_by


_STEP_PART = {"every": "step", "first": STEP_FIRST, "last": STEP_LAST}
"""Part of the operations of a stage that run once per step."""
EXPOSED_PARTS = (*STAGES, *_STEP_PART.values(), WEIGHT_GRADIENTS)
"""Parts without overlappable communication; WEIGHT_GRADIENTS is contained in ``every``."""


def compute_part(pool: str) -> str:
    """Return the name of the part with the computation of a pool."""
    return f"compute.{pool}"


def collective_part(pool: str, stage: str) -> str:
    """Return the name of the part with a stage's overlappable communication of a pool."""
    return f"collective.{pool}.{stage}"


STEP_PARTS = (
    *EXPOSED_PARTS,
    *(compute_part(pool) for pool in COMPUTE_POOLS),
    *(collective_part(pool, stage) for pool in COLLECTIVE_POOLS for stage in STAGES),
)
"""Names of all parts."""


def parts_of(operation: Operation, pass_name: str = "", *, overlaps_exchanges: bool = True) -> tuple[str, ...]:
    """Return the parts of a step that an operation's time is added to.

    Args:
        pass_name: Pass that it runs in, if not its own: recomputation runs forward operations in the backward pass.
        overlaps_exchanges: False if expert exchanges overlap with nothing, so that they are exposed.
    """
    pass_name = pass_name or operation.pass_name
    pools = overlap_pools(operation, pass_name)
    is_collective = isinstance(operation, Collective)
    if is_collective and not overlaps_exchanges and pools == (EXPERT_EXCHANGES,):
        pools = ()
    return _list_parts(
        pools,
        pass_name,
        operation.stage,
        is_collective=is_collective,
        is_weight_gradient=operation.is_weight_gradient,
    )


@cache
def _list_parts(
    pools: tuple[str, ...], pass_name: str, stage: str, *, is_collective: bool, is_weight_gradient: bool
) -> tuple[str, ...]:
    if is_collective and pools:
        return (collective_part(pools[0], stage),)
    if pass_name == "step":
        return (_STEP_PART[stage],)
    parts = (stage, *map(compute_part, pools))
    return (*parts, WEIGHT_GRADIENTS) if stage == "every" and is_weight_gradient else parts


def compose_parts(
    parts: Mapping[str, Numeric],
    passes: Count,
    layout: ParallelLayout,
    software: Software,
    *,
    layers_per_stage: Count = 1,
    num_spare: Count = 0,
    lacking: Numeric = 0.0,
) -> tuple[Any, Any]:
    """Compose the parts of a step into its time and its bubble.

    Args:
        parts: Times by name of the part, numbers or arrays that broadcast together; a missing part takes no time. [s]
        passes: Micro-batches of a step.
        layout: Pipeline degree, chunks and schedule; its other degrees have no effect.
        num_spare: Layers that the other stages lack in total compared with the busiest one, see rebalance_ends.
        lacking: Stages' worth of layers that they lack in a single pass, see lacking_share.

    Returns:
        Step and bubble. [s]
    """
    times_s = add_exposed_communication(parts, software, exchange_overlap_fraction(software, layout, passes))
    if np.any(num_spare):
        layer_s = times_s["every"] / layers_per_stage
        times_s["first"], times_s["last"] = rebalance_ends(
            times_s["first"], times_s["last"], layer_s, num_spare, layers_per_stage, layout.ends_as_layers
        )
    forward_fraction = _forward_fraction(*(parts.get(compute_part(side), 0.0) for side in ("forward", "backward")))
    return combine_stages(times_s, passes, layout, lacking=lacking, forward_fraction=forward_fraction)


def add_exposed_communication(
    parts: Mapping[str, Numeric],
    software: Software,
    exchange_overlap: Numeric = 0.0,
    pools: Sequence[str] = COLLECTIVE_POOLS,
) -> dict[str, Any]:
    """Add the exposed share of overlappable communication to the times of the stages.

    Args:
        parts: Times by name of the part. [s]

    Returns:
        Times of the parts in EXPOSED_PARTS. [s]
    """
    times_s: dict[str, Any] = {name: parts.get(name, 0.0) for name in EXPOSED_PARTS}
    compute_s = {pool: parts.get(compute_part(pool), 0.0) for pool in COMPUTE_POOLS}
    for pool in pools:
        names = {stage: collective_part(pool, stage) for stage in STAGES}
        collective_s = {stage: parts[name] for stage, name in names.items() if name in parts}
        if not collective_s:
            continue
        exposed: Any = 1.0
        if pool != EXPERT_EXCHANGES or np.any(exchange_overlap):
            total_s: Any = sum(collective_s.values())
            # Without communication its exposed time is zero, whatever the fraction.
            exposed = exposed_fraction(
                pool_compute_s(compute_s, pool), np.maximum(total_s, 1e-300), pool, software, exchange_overlap
            )
        for stage, part_s in collective_s.items():
            times_s[stage] = times_s[stage] + exposed * part_s
    return times_s


Adjust = Callable[["Operation", "Price", "Device"], "Price"]
"""Changes the price of an operation to that with the software that runs the passes."""


class LoweredPass(Protocol):
    """Operations of one inference pass, with the workload and the layout that they are lowered from."""

    @property
    def parts(self) -> Sequence[tuple[OperationRows, int]]:
        """The operations, in order: each part is a table of operations and the index of one row."""

    @property
    def operations(self) -> Sequence[Operation]:
        """The same, one by one."""

    @property
    def workload(self) -> Workload:
        """The workload."""

    @property
    def layout(self) -> ParallelLayout:
        """The layout."""


def compose_passes(
    passes: Sequence[LoweredPass], config: TransformerConfig, device: Device, adjust: Adjust | None = None
) -> list[StepTimes]:
    """Price and compose many inference passes of one model, to the times that compose_step returns for each.

    In such a pass no communication overlaps and no operation computes a gradient.

    Args:
        adjust: Changes the price of each operation; None leaves the prices of current kernels.
    """
    if not passes:
        return []
    groups = {id(rows): rows for each in passes for rows, _ in each.parts}
    operations, prices, indices = price_rows(groups.values(), device)
    if adjust:
        prices = [adjust(operation, price, device) for operation, price in zip(operations, prices, strict=True)]
    indices_of_group = dict(zip(groups, indices, strict=True))
    parts = [part for each in passes for part in each.parts]
    price_index = np.concatenate([indices_of_group[id(rows)][row] for rows, row in parts])
    repeats = np.concatenate([rows.repeats for rows, _ in parts])
    stage = np.concatenate([rows.stages for rows, _ in parts])
    lengths = [sum(len(rows.operations) for rows, _ in each.parts) for each in passes]
    pass_index = np.repeat(np.arange(len(passes)), lengths)

    time_s, low_s, high_s = (
        np.array([float(getattr(price, name)) for price in prices]) for name in ("time_s", "low_s", "high_s")
    )
    correlation = np.array([error_correlation(price) for price in prices])
    total_s = time_s[price_index] * repeats
    stage_s = np.bincount(pass_index * len(STAGES) + stage, total_s, len(passes) * len(STAGES))

    def spread_s(end_s: Float[np.ndarray, " prices"]) -> Float[np.ndarray, " passes"]:
        """Return the half-width of the interval of each pass, as _Spread computes it."""
        width_s = np.where(total_s > 0.0, repeats * np.abs(end_s - time_s)[price_index], 0.0)
        independent = np.bincount(pass_index, (1.0 - correlation)[price_index] * width_s * width_s, len(passes))
        correlated_s = np.bincount(pass_index, np.sqrt(correlation)[price_index] * width_s, len(passes))
        return np.asarray(np.sqrt(independent + correlated_s**2))

    rows_s = zip(
        passes,
        stage_s.reshape(len(passes), len(STAGES)).tolist(),
        zip(spread_s(low_s).tolist(), spread_s(high_s).tolist(), strict=True),
        strict=True,
    )
    return [
        finish_step(
            {**dict(zip(STAGES, sums_s, strict=True)), "step": 0.0, WEIGHT_GRADIENTS: 0.0},
            sums_s[0],
            widths_s,
            config,
            each.workload,
            each.layout,
        )
        for each, sums_s, widths_s in rows_s
    ]


def price_passes(
    passes: Sequence[LoweredPass], device: Device, adjust: Adjust | None = None
) -> Iterator[list[PricedOperation]]:
    """Yield the priced operations of each pass, with overlapped communication, from one pricing call."""
    listed = [operation for each in passes for operation in each.operations]
    priced = price_operations(listed, device)
    if adjust:
        priced = [adjust(operation, price, device) for operation, price in zip(listed, priced, strict=True)]
    prices = iter(priced)
    for each in passes:
        yield overlap_communication([PricedOperation(operation, next(prices)) for operation in each.operations])
