"""Operating points of instances: the passes of all candidates priced together, format by format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.adding_up import add_up_passes
from shapewright.errors import ShapewrightError, WorkloadError
from shapewright.serving.aggregated import AggregatedCandidate, aggregated_candidates
from shapewright.serving.disaggregated import (
    DecodeCandidate,
    PrefillCandidate,
    decode_candidates,
    make_decoder,
    make_prefiller,
    pair_up,
    prefill_candidates,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.adding_up import StepTimes
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.serving.instance import Instance
    from shapewright.serving.passes import Pass
    from shapewright.serving.point import OperatingPoint


def price_points(instances: Sequence[Instance], said: list[str], *, uncalibrated: bool) -> list[OperatingPoint]:
    """Every way to serve with some instances of one model on one device, priced.

    Args:
        instances: Instances that hold a sequence, of any layouts and formats.
        said: Gets the reasons of formats that are left out.
        uncalibrated: Price as if nobody had measured the device.

    Raises:
        WorkloadError: nothing can be priced.
    """
    config, device = instances[0].config, instances[0].device
    points: list[OperatingPoint] = []
    reasons: list[str] = []
    for name in dict.fromkeys(instance.format.name for instance in instances):
        own = [instance for instance in instances if instance.format.name == name]
        together: list[AggregatedCandidate] = [one for instance in own for one in aggregated_candidates(instance)]
        prefill: list[PrefillCandidate] = [one for instance in own for one in prefill_candidates(instance)]
        decode: list[DecodeCandidate] = [one for instance in own for one in decode_candidates(instance)]
        try:
            times = _times([*together, *prefill, *decode], config, device, uncalibrated)
        except ShapewrightError as error:
            said.append(f"{name} is left out: {error}")
            reasons.append(str(error))
            continue
        timed = iter(times)
        points += [one.point(_three(next(timed))) for one in together]
        prefillers = [make_prefiller(one, next(timed)) for one in prefill]
        decoders = [make_decoder(one, next(timed)) for one in decode]
        points += pair_up(prefillers, decoders)
    if not points:
        if not reasons:
            raise WorkloadError("nothing could be priced; give another --isl or --osl")
        fewest = min(instance.layout.num_devices for instance in instances)
        raise WorkloadError(
            f"{config.title} needs {fewest} x {device.name} at least, which have no price: {reasons[0]}"
        )
    return points


def _times(
    candidates: Sequence[AggregatedCandidate | PrefillCandidate | DecodeCandidate],
    config: TransformerConfig,
    device: Device,
    uncalibrated: bool,
) -> list[list[StepTimes]]:
    """Times of the passes of each candidate; a pass that several have is priced once."""
    known: dict[int, int] = {}
    distinct: list[Pass] = []
    wanted: list[list[int]] = []
    for candidate in candidates:
        row = []
        for one in candidate.passes():
            if id(one) not in known:
                known[id(one)] = len(distinct)
                distinct.append(one)  # which also keeps its identity its own
            row.append(known[id(one)])
        wanted.append(row)
    times = add_up_passes(distinct, config, device, uncalibrated=uncalibrated)
    return [[times[index] for index in row] for row in wanted]


def _three(times: list[StepTimes]) -> tuple[StepTimes, StepTimes, StepTimes]:
    plain, decode, mixed = times
    return plain, decode, mixed
