"""Pipeline stages: step and bubble time, and the rebalancing of embedding and logits over the stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.core.numeric import maximum
from shapewright.lowering import layers_per_stage, spare_layers
from shapewright.workload.layout import SPLIT_BACKWARD_SCHEDULES, ParallelLayout

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric
    from shapewright.models import TransformerConfig
    from shapewright.prediction.composition.overlap import PricedOperation
    from shapewright.workload import Workload

WEIGHT_GRADIENTS = "weight_gradients"
"""Key of the weight-gradient part of the time of every stage; ``every`` includes it."""


def combine_stages(sums: Mapping[str, Numeric], passes: Count, layout: ParallelLayout) -> tuple[Any, Any]:
    """Return the time of a step and of its pipeline bubble; see compose_step for the formulas.

    Args:
        sums: Times in one step of the operations of ``every`` stage, of the ``first``, of the ``last``, and of those
            that run once per ``step``. Where the schedule is one of SPLIT_BACKWARD_SCHEDULES also WEIGHT_GRADIENTS, the
            operations of ``every`` stage that compute weight gradients. Numbers, or arrays of one shape. [s]
        passes: Micro-batches of one step.
        layout: Parallel layout.

    Returns:
        Step and bubble. [s]
    """
    first_s, last_s = sums["first"], sums["last"]
    ends_s = maximum(first_s, last_s) if layout.pipeline_parallel > 1 else first_s + last_s
    waited_s, waited_passes = sums["every"], (layout.pipeline_parallel - 1) / layout.virtual_pipeline
    if layout.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES:
        waited_s = maximum(0.0, waited_s - 2.0 * sums[WEIGHT_GRADIENTS])
    if layout.pipeline_schedule == "dualpipe":
        # Both ends of the model are on one device, each processing half of the micro-batches.
        ends_s, waited_passes = 0.5 * (first_s + last_s), layout.pipeline_parallel - 2
    bubble_s = waited_passes * waited_s / passes
    return sums["every"] + ends_s + bubble_s + sums["step"], bubble_s


def rebalance_ends(
    first_s: Numeric,
    last_s: Numeric,
    layer_s: Numeric,
    num_spare: Count,
    layers_per_stage: Count,
    ends_as_layers: tuple[bool, bool] = (False, False),
) -> tuple[Any, Any]:
    """Return the time of both model ends that remains after their stages got fewer layers.

    Where the layers do not divide over the stages, some stages have one layer less. Each such gap goes to the end that
    is slower at that point, as pipelines are split in practice: Megatron-DeepSpeed counts embeddings as layers, and
    Megatron-LM sets the number of layers of the first and the last stage. An even split has no gaps. Ends that count
    as a layer have one gap each, whatever their time.

    Args:
        first_s: Time of the first stage besides its layers. [s]
        last_s: Time of the last stage besides its layers. [s]
        layer_s: Time of one layer. [s]
        num_spare: Number of gaps, see spare_layers.
        layers_per_stage: Layers of the busiest stage, the most that an end can do without. Numbers, or arrays of one
            shape.
        ends_as_layers: Whether embedding and loss count as a layer where stages are split.

    >>> rebalance_ends(1.0, 6.0, 2.0, 3, 8), rebalance_ends(1.0, 6.0, 2.0, 3, 2), rebalance_ends(1.0, 6.0, 2.0, 0, 8)
    ((1.0, 0.0), (1.0, 2.0), (1.0, 6.0))
    """
    if any(ends_as_layers):
        given_s = layer_s * (num_spare > 0)
        return maximum(first_s - ends_as_layers[0] * given_s, 0.0), maximum(last_s - ends_as_layers[1] * given_s, 0.0)
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
