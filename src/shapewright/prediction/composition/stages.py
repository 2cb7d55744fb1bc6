"""Pipeline stages (step and bubble time, rebalanced ends), and overlap of communication with computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.core.numeric import maximum, minimum
from shapewright.core.records import dataclass
from shapewright.lowering.counts import layers_per_stage, spare_layers
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.pricing.software import EXCHANGE_HIDDEN_FRACTION, TUNED_SOFTWARE, Software
from shapewright.workload.layout import SPLIT_BACKWARD_SCHEDULES, ParallelLayout

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric
    from shapewright.lowering.operations.operation import Operation
    from shapewright.models.transformer import TransformerConfig
    from shapewright.pricing.price import Price
    from shapewright.workload.workload import Workload

GRADIENT_GEMMS = "gradient_gemms"
COMPUTE_POOLS = ("forward", "backward", GRADIENT_GEMMS)
"""Computation that communication overlaps with: the forward pass, the backward pass, and the GEMMs of the latter."""

EXPERT_EXCHANGES = "exchanges"
"""Communication of the expert axis, which may overlap with the computation of another micro-batch in both passes."""

COLLECTIVE_POOLS = (*COMPUTE_POOLS, EXPERT_EXCHANGES)
"""Communication that can be overlapped, by the computation that it overlaps with."""


@dataclass(frozen=True)
class PricedOperation:
    """An operation with its price; ``operation.repeats`` is the number of executions in a step.

    Attributes:
        operation: The operation.
        price: Time of one execution, with its breakdown.
        exposed_fraction: Share of its time that adds to the step. It is 1 except for overlapped communication, and for
            the ends of a model whose pipeline stages have fewer layers to compensate.
    """

    operation: Operation
    price: Price
    exposed_fraction: float = 1.0

    @property
    def total_time_s(self) -> float:
        """Exposed time over all executions in one step. [s]"""
        return float(self.price.time_s) * int(self.operation.repeats) * self.exposed_fraction


def index_operations(priced: Iterable[PricedOperation]) -> dict[tuple[str, str, int], PricedOperation]:
    """Operations by name, pass, and number among those of equal name and pass, from 0.

    Layers with and without a window, for instance, have attention of one name.
    """
    counts: Counter[tuple[str, str]] = Counter()
    found = {}
    for entry in priced:
        key = (entry.operation.name, entry.operation.pass_name)
        found[*key, counts[key]] = entry
        counts[key] += 1
    return found


def overlap_pools(operation: Operation, pass_name: str) -> tuple[str, ...]:
    """Return the pools of an operation: for a collective the one it overlaps with, otherwise those it belongs to.

    In the backward pass, collectives of the tensor axis overlap with the gradient GEMMs next to them. Collectives of
    the expert axis overlap with another micro-batch, if at all; all others with the whole forward or backward pass.

    Args:
        pass_name: Pass that it runs in, which may differ from its own.
    """
    side = "forward" if pass_name == "forward" else "backward"
    if isinstance(operation, Collective):
        if operation.axis == "expert":
            return (EXPERT_EXCHANGES,)
        if not operation.overlaps:
            return ()
        return (GRADIENT_GEMMS,) if operation.axis == "tensor" and side == "backward" else (side,)
    if pass_name == "step":
        return ()
    is_gradient = pass_name == "backward" and isinstance(operation, Gemm | GroupedGemm)
    return (side, GRADIENT_GEMMS) if is_gradient else (side,)


def exchange_overlap_fraction(software: Software, layout: ParallelLayout, passes: Count) -> Any:
    """Return the share of expert-axis communication that overlaps, if other micro-batches compute for long enough.

    One of the micro-batches of a step has no other one to overlap with.

    Args:
        layout: Its schedule sets a minimum: DualPipe is built for this overlap.
        passes: Micro-batches of one step.
    """
    share = software.expert_hidden_fraction
    if layout.pipeline_schedule == "dualpipe":
        share = max(share, EXCHANGE_HIDDEN_FRACTION)
    return share * (1.0 - 1.0 / passes)


def pool_compute_s(compute_s: Mapping[str, Numeric], pool: str) -> Any:
    """Return the computation that communication of a pool overlaps with; exchanges overlap with both passes. [s]"""
    return compute_s["forward"] + compute_s["backward"] if pool == EXPERT_EXCHANGES else compute_s[pool]


def exposed_fraction(
    compute_s: Numeric,
    collective_s: Numeric,
    pool: str = "backward",
    software: Software = TUNED_SOFTWARE,
    exchange_overlap: Numeric = 0.0,
) -> Numeric:
    """Return the share of overlappable communication that stays exposed.

    Args:
        compute_s: Computation of its pool. [s]
        collective_s: Overlappable communication of its pool, above zero. [s]
        pool: One of COLLECTIVE_POOLS.
    """
    if pool == EXPERT_EXCHANGES:
        return 1.0 - exchange_overlap * minimum(1.0, compute_s / collective_s)
    if pool == GRADIENT_GEMMS:
        return 1.0 - software.tensor_hidden_fraction * minimum(1.0, compute_s / collective_s)
    return maximum(0.0, 1.0 - software.overlap_share * compute_s / collective_s)


def overlap_communication(
    priced: list[PricedOperation], software: Software = TUNED_SOFTWARE, exchange_overlap: float = 0.0
) -> list[PricedOperation]:
    """Set the exposed fraction of overlapping collectives.

    Weight gathers of the forward pass overlap with it, gradient reductions with the backward pass.

    Args:
        priced: Operations of a step, with all of their time exposed.
    """
    overlapping = {
        index: pools[0]
        for index, entry in enumerate(priced)
        if isinstance(entry.operation, Collective)
        and (pools := overlap_pools(entry.operation, entry.operation.pass_name))
    }
    if not overlapping:
        return priced
    compute_s, collective_s = dict.fromkeys(COMPUTE_POOLS, 0.0), dict.fromkeys(COLLECTIVE_POOLS, 0.0)
    for index, pool in overlapping.items():
        collective_s[pool] += priced[index].total_time_s
    for entry in priced:
        if not isinstance(entry.operation, Collective):
            for pool in overlap_pools(entry.operation, entry.operation.pass_name):
                compute_s[pool] += entry.total_time_s
    exposed = {
        pool: float(exposed_fraction(pool_compute_s(compute_s, pool), seconds, pool, software, exchange_overlap))
        for pool, seconds in collective_s.items()
        if seconds > 0.0
    }
    result = list(priced)
    for index, pool in overlapping.items():
        entry = priced[index]
        result[index] = PricedOperation(entry.operation, entry.price, exposed.get(pool, 1.0))
    return result


WEIGHT_GRADIENTS = "weight_gradients"
"""Key of the weight-gradient part of the time of every stage; ``every`` includes it."""

STEP_FIRST, STEP_LAST = "step.first", "step.last"
"""Keys of the times that run once per step on the first and on the last stage alone, such as the optimizer step of the
embedding and of the logit matrix; ``step`` does not include them."""


def lacking_share(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> float:
    """Return how many stages' worth of layers the stages lack together in a single pass through all of them.

    In training the ends of the model make up for the layers that their stages lack, see rebalance_ends.
    """
    if workload.is_training or config.num_encoder_layers:
        return 0.0
    return spare_layers(config, layout) / layers_per_stage(config, layout)


FORWARD_FRACTION = 1 / 3
"""Share of the forward pass in a micro-batch without recomputation: the backward pass has twice its FLOPs."""


def combine_stages(
    sums: Mapping[str, Numeric],
    passes: Count,
    layout: ParallelLayout,
    *,
    lacking: Numeric = 0.0,
    forward_fraction: Numeric = FORWARD_FRACTION,
) -> tuple[Any, Any]:
    """Return the time of a step and of its pipeline bubble; see compose_step for the formulas.

    Args:
        sums: Times in one step of the operations of ``every`` stage, of the ``first``, of the ``last``, and of those
            that run once per ``step``, with those of STEP_FIRST and STEP_LAST if any. Where the schedule is one of
            SPLIT_BACKWARD_SCHEDULES also WEIGHT_GRADIENTS, the operations of ``every`` stage that compute weight
            gradients. Numbers, or arrays of one shape. [s]
        passes: Micro-batches of one step.
        lacking: Stages' worth of layers that the other stages lack, see lacking_share.
        forward_fraction: Share of the forward pass in a micro-batch, the same on all stages.

    Returns:
        Step and bubble. [s]
    """
    ends_s = _combine_ends(sums["first"], sums["last"], layout)
    step_ends_s = _combine_ends(sums.get(STEP_FIRST, 0.0), sums.get(STEP_LAST, 0.0), layout)
    waited_s, waited_passes = sums["every"], (layout.pipeline_parallel - 1 - lacking) / layout.virtual_pipeline
    if layout.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES:
        waited_s = maximum(0.0, waited_s - 2.0 * sums[WEIGHT_GRADIENTS])
    if layout.pipeline_schedule == "dualpipe":
        waited_passes = layout.pipeline_parallel - 2
    bubble_s: Any = 0.0
    if layout.pipeline_parallel > 1:
        bubble_s = waited_passes * waited_s / passes
    if layout.pipeline_parallel > 1 and layout.pipeline_schedule != "dualpipe":
        # The busiest stage waits until one micro-batch has passed the other end of the model, too.
        faster_end_s = minimum(sums["first"], sums["last"]) / passes
        if layout.virtual_pipeline > 1:
            bubble_s = maximum(bubble_s + _wait_for_first_chunk(sums, passes, layout), faster_end_s)
        else:
            bubble_s = bubble_s + faster_end_s
    if alternates_passes(layout):
        bubble_s = bubble_s + _change_of_bubble(sums, passes, layout, forward_fraction)
    step_s = sums["every"]
    for part_s in (ends_s, bubble_s, sums["step"], step_ends_s):
        if not (isinstance(part_s, float) and part_s == 0.0):  # saves adding zero to large arrays
            step_s = step_s + part_s
    return step_s, bubble_s


def _wait_for_first_chunk(sums: Mapping[str, Numeric], passes: Count, layout: ParallelLayout) -> Any:
    """Return what the first stage adds to the bubble of interleaved stages; below 0 where it is the busiest. [s]

    Stages run a chunk for p micro-batches before the next chunk, so that the last one waits for p passes of the first
    chunk. Exact where the last stage is not faster than the first; otherwise the step is 6 % too short to 2 % too long,
    on average 0.7 % off, in 336 random schedules (docs/decisions/0011).
    """
    waited_s = minimum(sums["first"], layout.pipeline_parallel * sums["first"] / passes)
    return waited_s - maximum(sums["first"] - sums["last"], 0.0)


def alternates_passes(layout: ParallelLayout) -> bool:
    """Whether the stages alternate forward and backward passes of one chunk: 1F1B and ZB-H1."""
    schedules = ("1f1b", "zero-bubble")
    return layout.pipeline_parallel > 1 and layout.virtual_pipeline == 1 and layout.pipeline_schedule in schedules


def _change_of_bubble(
    sums: Mapping[str, Numeric], passes: Count, layout: ParallelLayout, forward_fraction: Numeric
) -> Any:
    """Return how much longer than by the usual formula the bubble of 1F1B or ZB-H1 is; below 0 if shorter. [s]

    With T the time of a micro-batch on a middle stage, W its gradients of weights if they are split off (else 0), e and
    l what a micro-batch takes longer on the first and on the last stage, f the forward share of T, e and l:

    With m >= p micro-batches, a first stage slower than the last waits twice: for its first backward pass, while it
    runs p - 1 further forward passes, and for its last one, while it runs p - 1 further backward passes and their W.
    The longer its own passes, the more of the wait they fill:

        waits = max(0, (p - 1) ((1 - f) T - W - f e) + l) + max(0, (p - 1) (f T - W - (1 - f) e) + l)

    The step is m (T + e) and the waits, but at least m passes of the last stage with one through all the others.

    With fewer, the first stage has run all forward passes before its first backward pass, and all W of the last stage
    come after its backward passes. A single micro-batch takes p (T - W) + W + e + l, each further one the longest of
    a pass of the last stage and either half of the first stage's: max(T - W + l, (1 - f) (T + e), f (T + e)). It
    waits at least for the stage that is m - 1 before the last, which runs all forward passes first as well:
    (p - m) (T - W).
    """
    layer_s, first_s, last_s = (sums[name] / passes for name in ("every", "first", "last"))
    is_split = layout.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES
    weights_s = sums[WEIGHT_GRADIENTS] / passes if is_split else 0.0
    further, forward, backward = layout.pipeline_parallel - 1, forward_fraction, 1.0 - forward_fraction

    usual_s = further * maximum(layer_s - 2.0 * weights_s, 0.0) + minimum(first_s, last_s)
    start_s = further * (backward * layer_s - weights_s - forward * first_s) + last_s
    end_s = further * (forward * layer_s - weights_s - backward * first_s) + last_s
    waits_s = maximum(start_s, 0.0) + maximum(end_s, 0.0)
    saved_s = minimum((passes - 1) * (first_s - last_s), usual_s - waits_s)

    longest_s = maximum(layer_s - weights_s + last_s, maximum(forward, backward) * (layer_s + first_s))
    faster_s = (passes - 1) * (layer_s + maximum(first_s, last_s) - longest_s)
    few_s = further * minimum(weights_s, layer_s - weights_s) - faster_s
    few_s = maximum(few_s, (layout.pipeline_parallel - passes) * (layer_s - weights_s) - usual_s)
    is_few = passes < layout.pipeline_parallel
    return is_few * few_s - (1 - is_few) * maximum(saved_s, 0.0)


def _combine_ends(first_s: Numeric, last_s: Numeric, layout: ParallelLayout) -> Any:
    """Return the time of both ends of the model: the slower one's, as they are different stages. [s]

    With DualPipe both are on one device, which processes half of the micro-batches in each and has half of their
    optimizer states.
    """
    if layout.pipeline_parallel == 1:
        return first_s + last_s
    return 0.5 * (first_s + last_s) if layout.pipeline_schedule == "dualpipe" else maximum(first_s, last_s)


def rebalance_ends(
    first_s: Numeric,
    last_s: Numeric,
    layer_s: Numeric,
    num_spare: Count,
    layers_per_stage: Count,
    ends_as_layers: tuple[bool, bool] = (False, False),
) -> tuple[Any, Any]:
    """Return the time that both ends of the model add to a full stage, where their stages have fewer layers.

    Where the layers do not divide over the stages, some stages lack a layer. Each missing layer is taken from the end
    that is slower at that point, as pipelines are split in practice: Megatron-DeepSpeed counts embeddings as layers,
    and Megatron-LM sets the number of layers of the first and the last stage. In an even split no layer is missing.
    Ends that count as a layer lack one layer each, regardless of their time.

    Args:
        first_s: Time of the first stage besides its layers. [s]
        last_s: Time of the last stage besides its layers. [s]
        layer_s: Time of one layer. [s]
        num_spare: Number of missing layers, see spare_layers.
        layers_per_stage: Layers of the busiest stage, of which an end can lack all. Numbers, or arrays of one shape.
        ends_as_layers: Whether embedding and loss count as a layer where stages are split.

    >>> rebalance_ends(1.0, 6.0, 2.0, 3, 8), rebalance_ends(1.0, 6.0, 2.0, 3, 2), rebalance_ends(1.0, 6.0, 2.0, 0, 8)
    ((1.0, 0.0), (1.0, 2.0), (1.0, 6.0))
    """
    if any(ends_as_layers):
        saved_s = layer_s * (num_spare > 0)
        return maximum(first_s - ends_as_layers[0] * saved_s, 0.0), maximum(last_s - ends_as_layers[1] * saved_s, 0.0)
    if isinstance(first_s, float | int) and isinstance(last_s, float | int) and isinstance(layer_s, float | int):
        missing = [0, 0]
        ends_s = [first_s, last_s]
        for _ in range(int(num_spare)):
            slower = 1 if ends_s[1] >= ends_s[0] else 0
            if missing[slower] == layers_per_stage:
                break
            ends_s[slower] -= layer_s
            missing[slower] += 1
        return max(ends_s[0], 0.0), max(ends_s[1], 0.0)
    import numpy as np

    first, last, layer, spare, most = np.broadcast_arrays(first_s, last_s, layer_s, num_spare, layers_per_stage)
    missing_first, missing_last = np.zeros(first.shape, dtype=int), np.zeros(first.shape, dtype=int)
    is_open = spare > 0
    while is_open.any():
        is_last = last >= first
        has_room = np.where(is_last, missing_last, missing_first) < most
        is_open = is_open & has_room & (np.maximum(first, last) > 0.0) & (missing_first + missing_last < spare)
        to_last, to_first = is_open & is_last, is_open & ~is_last
        first, last = first - np.where(to_first, layer, 0.0), last - np.where(to_last, layer, 0.0)
        missing_first, missing_last = missing_first + to_first, missing_last + to_last
    return np.maximum(first, 0.0), np.maximum(last, 0.0)


def rebalance_priced_ends(
    priced: list[PricedOperation], config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> list[PricedOperation]:
    """Reduce the exposed time of embedding and logits where their pipeline stages have fewer layers.

    This applies to training only: in a single pass the stages run one after the other.
    """
    num_spare = spare_layers(config, layout)
    if not workload.is_training or not num_spare or config.num_encoder_layers:
        return priced
    times_s = dict.fromkeys(("every", "first", "last"), 0.0)
    for entry in priced:
        if entry.operation.pass_name != "step":
            times_s[entry.operation.stage] += entry.total_time_s
    per_stage = layers_per_stage(config, layout)
    layer_s = times_s["every"] / per_stage
    left = rebalance_ends(times_s["first"], times_s["last"], layer_s, num_spare, per_stage, layout.ends_as_layers)
    shares = {
        stage: left_s / max(times_s[stage], 1e-300) for stage, left_s in zip(("first", "last"), left, strict=True)
    }
    return [
        replace(entry, exposed_fraction=entry.exposed_fraction * shares[entry.operation.stage])
        if entry.operation.stage in shares and entry.operation.pass_name != "step"
        else entry
        for entry in priced
    ]
