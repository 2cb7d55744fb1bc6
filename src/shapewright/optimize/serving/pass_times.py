"""Times of the passes of a server, given their prompt tokens and decoding sequences.

    time of a pass = device time of its operations, as the server runs them + time that the host adds

The plan, the simulation of traffic and the comparison with published throughput all price passes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shapewright.optimize.serving.point import Span, span_of
from shapewright.prediction.composition.step import compose_passes

if TYPE_CHECKING:
    from shapewright.optimize.serving.passes import Pass
    from shapewright.optimize.serving.point import Instance
    from shapewright.prediction.composition.step import StepTimes
    from shapewright.prediction.scenario import Scenario
    from shapewright.pricing.servers import Server


class PassShape(NamedTuple):
    """Sizes of one pass of an instance, on each replica of its attention.

    Attributes:
        decode_batch: Sequences that decode one token each.
        decode_context: Tokens that each of them has in the cache.
        prefill_tokens: New tokens of each prompt in the pass.
        prefill_context: Tokens that each prompt has in the cache.
        prompts: Prompts of the pass.
    """

    decode_batch: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0
    prompts: int = 1


def predict_passes(instance: Instance, shapes: Sequence[PassShape]) -> list[Span]:
    """Return the time of each pass with its interval; equal passes are priced once.

    Args:
        instance: Model, device, layout, formats and server.
        shapes: Sizes of the passes; each decodes, prefills, or both.

    Raises:
        UnknownRateError: the device has no rate for a format.
        WorkloadError: the device has no kernel for an operation.
    """
    distinct = {shape: lower_pass(instance, shape) for shape in shapes}
    times = time_passes(list(distinct.values()), instance.scenario, instance.request.server)
    spans = dict(zip(distinct, map(span_of, times), strict=True))
    return [spans[shape] for shape in shapes]


def lower_pass(instance: Instance, shape: PassShape) -> Pass:
    """Return the operations of a pass."""
    passes = instance.passes
    decode = passes.decode(shape.decode_batch, shape.decode_context) if shape.decode_batch else None
    if not shape.prefill_tokens:
        assert decode is not None, "a pass decodes, prefills, or both"
        return decode
    prefill = passes.prefill(shape.prompts, shape.prefill_tokens, shape.prefill_context)
    return passes.mixed(decode, prefill) if decode else prefill


def time_passes(passes: Sequence[Pass], scenario: Scenario, server: Server) -> list[StepTimes]:
    """Return the times of many passes of one model as a server runs them; all operations are priced in one call."""
    times = time_on_device(passes, scenario, server)
    return [_add_host(one, alone, server) for one, alone in zip(passes, times, strict=True)]


def time_on_device(passes: Sequence[Pass], scenario: Scenario, server: Server) -> list[StepTimes]:
    """Return the times of many passes of one model without the host, their shares of the vision tower included."""
    adjust = server.adjust if server.changes_prices(scenario.device) else None
    towers = {id(one.tower): one.tower for one in passes if one.tower}  # layouts and formats have towers of their own
    times = compose_passes([*passes, *towers.values()], scenario.config, scenario.device, adjust=adjust)
    tower_times = dict(zip(towers, times[len(passes) :], strict=True))
    return [
        _add(alone, tower_times[id(one.tower)], one.tower_share) if one.tower else alone
        for one, alone in zip(passes, times, strict=False)
    ]


def _add(times: StepTimes, more: StepTimes, share: float) -> StepTimes:
    """Add a share of another time, with fully correlated errors."""
    return replace(
        times,
        step_s=times.step_s + share * more.step_s,
        step_low_s=times.step_low_s + share * more.step_low_s,
        step_high_s=times.step_high_s + share * more.step_high_s,
    )


def _add_host(one: Pass, device_times: StepTimes, server: Server) -> StepTimes:
    """Add the time of the host to that of the device; a pass without decoding sequences samples one token."""
    is_decode = one.key[0] == "decode"
    host_s = server.pass_host_s(
        one.num_decoding,
        one.num_kernels,
        device_times.step_s,
        is_decode=is_decode,
        num_ranks=one.layout.tensor_parallel,
    )
    if not host_s:
        return device_times
    return replace(
        device_times,
        step_s=device_times.step_s + host_s,
        step_low_s=device_times.step_low_s + host_s,
        step_high_s=device_times.step_high_s + host_s,
    )
