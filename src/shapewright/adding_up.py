"""Add operations up to a step: stages of a pipeline, communication that computation hides, ends, intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from shapewright.layout import SPLIT_SCHEDULES, ParallelLayout
from shapewright.lowering import (
    is_weight_gradient,
    layers_per_stage,
    num_microbatches,
    spare_layers,
)
from shapewright.operations import Collective, Gemm, GroupedGemm
from shapewright.perf.calibration import UNCALIBRATED
from shapewright.perf.pricing import price_operations
from shapewright.perf.software import EXCHANGE_HIDDEN_FRACTION, TUNED_SOFTWARE, Software

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.operations import Operation
    from shapewright.operations.base import Count, Numeric
    from shapewright.perf.price import Price
    from shapewright.workload import Workload


ERROR_CORRELATION = 0.3
"""Correlation of the errors of one step's operations: what a record gets wrong alike for all, and not shape by shape.

Measured as the share of variance between libraries: 0.19 for products priced for no library in particular, 0.29 priced
for another one; whole layers of the paper ask for 0.15 to 0.3 (docs/decisions/0012-intervals.md).
"""

BORROWED_ERROR_CORRELATION = 0.5
"""The same with another device's record: 0.3 for attention, 0.5 for products, 0.7 for experts where each measured
device is left out in turn."""


BESIDE_PRODUCTS = "products"
POOLS = ("forward", "backward", BESIDE_PRODUCTS)
"""Computation that hides communication: forward and backward pass, and in the latter gradients of products alone."""

EXCHANGES = "exchanges"
"""Communication of the expert axis, which the computation of another micro-batch may hide: that of both passes."""

WANTED_POOLS = (*POOLS, EXCHANGES)
"""Communication that can be hidden, by what hides it."""

WEIGHT_GRADIENTS = "weight_gradients"
"""Key of the part of every stage's time that gradients of its weights take; a part of ``every``, not beside it."""


@dataclass(frozen=True)
class PricedOperation:
    """An operation with its price; ``operation.repeats`` says how often it runs in a step.

    Attributes:
        operation: What runs.
        price: Time of one execution, and why.
        exposed_fraction: Share of its time that nothing hides: 1 for all but overlapped communication, and the ends of
            a model whose stages have fewer layers for them.
    """

    operation: Operation
    price: Price
    exposed_fraction: float = 1.0

    @property
    def total_time_s(self) -> float:
        """Exposed time over all its executions in one step. [s]"""
        return float(self.price.time_s) * int(self.operation.repeats) * self.exposed_fraction


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
    spread_alone, spread_together = [0.0, 0.0], [0.0, 0.0]
    layer_forward_s = 0.0
    sums = dict.fromkeys(("every", "first", "last", "step", WEIGHT_GRADIENTS), 0.0)
    for entry in priced:
        operation, price, total_s = entry.operation, entry.price, entry.total_time_s
        sums["step" if operation.pass_name == "step" else operation.stage] += total_s
        if operation.stage == "every" and is_weight_gradient(operation):
            sums[WEIGHT_GRADIENTS] += total_s
        if total_s > 0.0:
            shared = error_correlation(price)
            for side, end in enumerate((price.low_s, price.high_s)):
                width = total_s * abs(float(end) / float(price.time_s) - 1.0)
                spread_alone[side] += (1.0 - shared) * width**2
                spread_together[side] += sqrt(shared) * width
        if operation.pass_name == "forward" and operation.stage == "every":
            layer_forward_s += total_s
    passes = num_microbatches(workload, layout)
    step_s, bubble_s = join_stages(sums, passes, layout)
    scale = step_s / max(sum(sums[part] for part in sums if part != WEIGHT_GRADIENTS), 1e-30)
    below, above = (
        scale * sqrt(alone + together**2) for alone, together in zip(spread_alone, spread_together, strict=True)
    )
    return StepTimes(
        step_s=step_s,
        step_low_s=max(step_s - below, 0.0),
        step_high_s=step_s + above,
        bubble_s=bubble_s,
        layer_forward_s=layer_forward_s / (passes * layers_per_stage(config, layout)),
    )


def error_correlation(price: Price) -> float:
    """Correlation of an operation's error with those of the others of its step."""
    return BORROWED_ERROR_CORRELATION if price.calibration.startswith(UNCALIBRATED) else ERROR_CORRELATION


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


def join_stages(sums: Mapping[str, Numeric], passes: Count, layout: ParallelLayout) -> tuple[Any, Any]:
    """Time of a step and of its bubble, from what each stage adds up to; see add_up.

    Args:
        sums: Times of one step of the operations of ``every`` stage, of the ``first``, of the ``last``, and of those
            that run once per ``step``; where the schedule is one of SPLIT_SCHEDULES also WEIGHT_GRADIENTS, those of
            ``every`` stage that compute gradients of weights; numbers, or arrays of one shape. [s]
        passes: Micro-batches of one step.
        layout: How the model is spread.

    Returns:
        Step and bubble. [s]
    """
    first_s, last_s = sums["first"], sums["last"]
    ends_s = larger(first_s, last_s) if layout.pipeline_parallel > 1 else first_s + last_s
    waited_s, waited_passes = sums["every"], (layout.pipeline_parallel - 1) / layout.virtual_pipeline
    if layout.pipeline_schedule in SPLIT_SCHEDULES:
        waited_s = larger(0.0, waited_s - 2.0 * sums[WEIGHT_GRADIENTS])
    if layout.pipeline_schedule == "dualpipe":
        # Both ends of the model are on one device, each for half of the micro-batches.
        ends_s, waited_passes = 0.5 * (first_s + last_s), layout.pipeline_parallel - 2
    bubble_s = waited_passes * waited_s / passes
    return sums["every"] + ends_s + bubble_s + sums["step"], bubble_s


def settle_ends(
    first_s: Numeric, last_s: Numeric, layer_s: Numeric, num_spare: Count, layers_per_stage: Count
) -> tuple[Any, Any]:
    """Times of the ends of the model that their stages do not make up for with fewer layers.

    Where the layers do not divide over the stages, some stages have fewer. Each such gap is given to the end that is
    slower at that point, as pipelines are cut in practice (Megatron-DeepSpeed counts embeddings as layers, Megatron-LM
    has numbers of layers for the first and the last stage). An even split has no gaps.

    Args:
        first_s: What the first stage has besides its layers. [s]
        last_s: The same of the last stage. [s]
        layer_s: Time of one layer. [s]
        num_spare: Gaps, see spare_layers.
        layers_per_stage: Layers of the busiest stage: an end cannot do with fewer than none. Numbers, or arrays of one
            shape.

    >>> settle_ends(1.0, 6.0, 2.0, 3, 8), settle_ends(1.0, 6.0, 2.0, 3, 2), settle_ends(1.0, 6.0, 2.0, 0, 8)
    ((1.0, 0.0), (1.0, 2.0), (1.0, 6.0))
    """
    if isinstance(first_s, float | int) and isinstance(last_s, float | int) and isinstance(layer_s, float | int):
        given = [0, 0]
        ends_s = [first_s, last_s]
        for _ in range(int(num_spare)):
            slower = 1 if ends_s[1] >= ends_s[0] else 0
            if ends_s[slower] <= 0.0 or given[slower] == layers_per_stage:
                break
            ends_s[slower] -= layer_s
            given[slower] += 1
        return max(ends_s[0], 0.0), max(ends_s[1], 0.0)
    import numpy as np

    first, last, layer, gaps, most = np.broadcast_arrays(first_s, last_s, layer_s, num_spare, layers_per_stage)
    given_first, given_last = np.zeros(first.shape, dtype=int), np.zeros(first.shape, dtype=int)
    is_open = gaps > 0
    while is_open.any():
        is_last = last >= first
        has_room = np.where(is_last, given_last, given_first) < most
        is_open = is_open & has_room & (np.maximum(first, last) > 0.0) & (given_first + given_last < gaps)
        to_last, to_first = is_open & is_last, is_open & ~is_last
        first, last = first - np.where(to_first, layer, 0.0), last - np.where(to_last, layer, 0.0)
        given_first, given_last = given_first + to_first, given_last + to_last
    return np.maximum(first, 0.0), np.maximum(last, 0.0)


def pools_of(operation: Operation, pass_name: str) -> tuple[str, ...]:
    """Pools that an operation belongs to: a collective to the one that hides it, any other to those that it covers.

    Collectives of the tensor axis hide behind the gradients of the products that they stand beside, those of the expert
    axis behind another micro-batch if at all, all others behind the whole forward or backward pass.

    Args:
        operation: What runs.
        pass_name: Pass that it runs in, where that is not its own.
    """
    side = "forward" if pass_name == "forward" else "backward"
    if isinstance(operation, Collective):
        if operation.axis == "expert":
            return (EXCHANGES,)
        if not operation.overlaps:
            return ()
        return (BESIDE_PRODUCTS,) if operation.axis == "tensor" and side == "backward" else (side,)
    if pass_name == "step":
        return ()
    is_gradient = pass_name == "backward" and isinstance(operation, Gemm | GroupedGemm)
    return (side, BESIDE_PRODUCTS) if is_gradient else (side,)


def hidden_exchange_fraction(software: Software, layout: ParallelLayout, passes: Count) -> Any:
    """Share of the expert axis' communication that computation of another micro-batch hides where it takes as long.

    The first micro-batch of a step has none before it, and the last none after it.

    Args:
        software: What runs beside what.
        layout: The schedule; DualPipe is made for it.
        passes: Micro-batches of one step.
    """
    share = software.expert_hidden_fraction
    if layout.pipeline_schedule == "dualpipe":
        share = max(share, EXCHANGE_HIDDEN_FRACTION)
    return share * (1.0 - 1.0 / passes)


def cover_of(cover_s: Mapping[str, Numeric], pool: str) -> Any:
    """Computation that communication of a pool hides behind: its own, and for exchanges that of both passes. [s]"""
    return cover_s["forward"] + cover_s["backward"] if pool == EXCHANGES else cover_s[pool]


def exposed_fraction(
    cover_s: Numeric,
    wanted_s: Numeric,
    pool: str = "backward",
    software: Software = TUNED_SOFTWARE,
    hidden_exchanges: Numeric = 0.0,
) -> Numeric:
    """Share of overlapping communication that nothing hides.

    Args:
        cover_s: Computation of its pool. [s]
        wanted_s: Overlapping communication of its pool, above zero. [s]
        pool: One of WANTED_POOLS.
        software: What it can hide behind.
        hidden_exchanges: See hidden_exchange_fraction.
    """
    if pool == EXCHANGES:
        return 1.0 - hidden_exchanges * smaller(1.0, cover_s / wanted_s)
    if pool == BESIDE_PRODUCTS:
        return 1.0 - software.tensor_hidden_fraction * smaller(1.0, cover_s / wanted_s)
    return larger(0.0, 1.0 - software.overlap_share * cover_s / wanted_s)


def smaller(one: Numeric, other: Numeric) -> Numeric:
    """The smaller of two numbers, or of each pair where one is an array."""
    return -larger(-one, -other)


def larger(one: Numeric, other: Numeric) -> Numeric:
    """The larger of two numbers, or of each pair where one is an array."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return max(one, other)
    import numpy as np

    return np.maximum(one, other)


def hide_communication(
    priced: list[PricedOperation], software: Software = TUNED_SOFTWARE, hidden_exchanges: float = 0.0
) -> list[PricedOperation]:
    """Give overlapping collectives the share of their time that the computation of their pass cannot hide.

    Weights gathered for the forward pass hide behind it, gradients behind the backward pass.

    Args:
        priced: Operations of a step.
        software: What communication can hide behind.
        hidden_exchanges: See hidden_exchange_fraction.
    """
    cover_s, wanted_s = dict.fromkeys(POOLS, 0.0), dict.fromkeys(WANTED_POOLS, 0.0)
    pools_of_each = [pools_of(entry.operation, entry.operation.pass_name) for entry in priced]
    for entry, pools in zip(priced, pools_of_each, strict=True):
        for pool in pools:
            (wanted_s if isinstance(entry.operation, Collective) else cover_s)[pool] += entry.total_time_s
    exposed = {
        pool: float(exposed_fraction(cover_of(cover_s, pool), wanted, pool, software, hidden_exchanges))
        if wanted > 0.0
        else 1.0
        for pool, wanted in wanted_s.items()
    }
    shares = [
        exposed[pools[0]] if isinstance(entry.operation, Collective) and pools else 1.0
        for entry, pools in zip(priced, pools_of_each, strict=True)
    ]
    return [
        entry if share == entry.exposed_fraction else PricedOperation(entry.operation, entry.price, share)
        for entry, share in zip(priced, shares, strict=True)
    ]


def settle_priced_ends(
    priced: list[PricedOperation], config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> list[PricedOperation]:
    """Give the ends of a pipelined model the share of their time that fewer layers of their stages do not make up for.

    Training alone: a single pass waits for every stage anyway.
    """
    num_spare = spare_layers(config, layout)
    if not workload.is_training or not num_spare or config.num_encoder_layers:
        return priced
    times_s = dict.fromkeys(("every", "first", "last"), 0.0)
    for entry in priced:
        if entry.operation.pass_name != "step":
            times_s[entry.operation.stage] += entry.total_time_s
    per_stage = layers_per_stage(config, layout)
    left = settle_ends(times_s["first"], times_s["last"], times_s["every"] / per_stage, num_spare, per_stage)
    shares = {
        stage: left_s / max(times_s[stage], 1e-300) for stage, left_s in zip(("first", "last"), left, strict=True)
    }
    return [
        replace(entry, exposed_fraction=entry.exposed_fraction * shares[entry.operation.stage])
        if entry.operation.stage in shares and entry.operation.pass_name != "step"
        else entry
        for entry in priced
    ]
