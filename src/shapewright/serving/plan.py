"""The plan: every layout, format, batch and way to prefill, priced together; the best, the fronts, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shapewright.adding_up import add_up_passes
from shapewright.errors import LayoutError, ShapewrightError, UnknownRateError, WorkloadError
from shapewright.perf.calibration import load_record
from shapewright.perf.expert_kernels import say_expert_kernel
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
from shapewright.serving.instance import Instance
from shapewright.serving.layouts import MOST_STAGES, candidate_layouts, check_divides, check_given
from shapewright.serving.point import OperatingPoint, pareto_front
from shapewright.shown import ShownInNotebook
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.adding_up import StepTimes
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.serving.passes import Pass
    from shapewright.serving.request import ServingFormat, ServingRequest
    from shapewright.workload import Workload

_LARGEST_INSTANCE = 1024
"""Devices up to which a model that does not fit is spread, to say what it would need."""
_MOST_LAYOUTS_PRICED = 24
_ALIKE_FRACTION = 0.98


@dataclass(frozen=True, kw_only=True)
class InstanceCapacity:
    """What one instance holds.

    Attributes:
        format: Element formats.
        layout: How the model is spread.
        weights_bytes: Weights on one device of the fullest stage. [byte]
        free_bytes: What weights and a pass leave for the cache there. [byte]
        cache_bytes_per_token: Cache of one token on one device of that stage. [byte]
        cache_tokens: Tokens that the caches of the instance hold.
        most_sequences: Sequences of prompt and answer that fit at once in the instance.
    """

    format: ServingFormat
    layout: Any
    weights_bytes: float
    free_bytes: float
    cache_bytes_per_token: float
    cache_tokens: int
    most_sequences: int


@dataclass(frozen=True, kw_only=True)
class ServingPlan(ShownInNotebook):
    """How to serve a model.

    Attributes:
        config: The model.
        device: What it runs on.
        workload: Formats and kind of attention that were asked for.
        request: Lengths and limits.
        formats: Element formats that were looked at; the first is the one that was asked for.
        capacities: What an instance of each layout and format holds.
        points: Every way to serve that was priced.
        notes: What needs to be said, one line each.
    """

    config: TransformerConfig
    device: Device
    workload: Workload
    request: ServingRequest
    formats: tuple[ServingFormat, ...]
    capacities: tuple[InstanceCapacity, ...]
    points: tuple[OperatingPoint, ...]
    notes: tuple[str, ...]

    def best(self, mode: str | None = None, format_name: str | None = None) -> OperatingPoint | None:
        """The point with most tokens per second of the devices among those that keep the limits; None if none does.

        Of points within 2 % of it, which the prediction cannot tell apart, the one of the smallest unit is taken.

        Args:
            mode: ``aggregated`` or ``disaggregated``; None for either.
            format_name: Name of a format; None for the one that was asked for.
        """
        wanted = format_name or self.formats[0].name
        fitting = [
            point
            for point in self.points
            if point.format.name == wanted and mode in (None, point.mode) and point.meets(self.request)
        ]
        most = max((point.total_tokens_per_s(self.request.num_devices) for point in fitting), default=0.0)
        close = [
            point for point in fitting if point.total_tokens_per_s(self.request.num_devices) >= _ALIKE_FRACTION * most
        ]
        return min(close, key=lambda point: (point.num_devices, point.tpot.middle_s), default=None)

    def front(self, mode: str | None = None, format_name: str | None = None) -> tuple[OperatingPoint, ...]:
        """Pareto front of tokens/s of the devices against tokens/s of a user; a limit on the first token is kept.

        Args:
            mode: As for best.
            format_name: As for best.
        """
        wanted = format_name or self.formats[0].name
        limit_s = self.request.ttft_limit_s
        return pareto_front(
            (
                point
                for point in self.points
                if point.format.name == wanted
                and mode in (None, point.mode)
                and (limit_s is None or point.ttft.middle_s <= limit_s)
            ),
            self.request.num_devices,
        )


def plan_serving(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    request: ServingRequest,
    formats: Sequence[ServingFormat],
    layout: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
) -> ServingPlan:
    """Find how to serve a model.

    Args:
        config: The model, a decoder.
        device: What it runs on.
        workload: Kind of attention; its phase, batch and lengths are replaced.
        request: Lengths, limits and devices.
        formats: Element formats to look at, the wanted one first.
        layout: Degrees that are fixed.
        notes: What the caller has to say, kept beside the result.
        uncalibrated: Price as if nobody had measured the device.

    Raises:
        WorkloadError: the model is no decoder, or it does not fit on the devices.
        LayoutError: no layout divides the model.
        UnknownRateError: the device has no rate for the wanted format.
    """
    if config.stack != "decoder":
        raise WorkloadError(
            f"serve-plan is for decoders, and this model is an {config.stack}; use predict --phase prefill"
        )
    given = {name: value for name, value in (layout or {}).items() if value is not None}
    check_given(given)
    said = list(notes)
    kept = _usable(formats, device, said)
    instances, capacities = _fit_instances(config, device, workload, request, kept, given, said)
    points = _price(instances, config, device, uncalibrated, said)
    if config.is_moe:
        record = load_record("moe", device, uncalibrated=uncalibrated)
        words = dict.fromkeys(say_expert_kernel(record, one.dtype) for one in kept)
        said += [each for each in words if each]
    if request.total_len > config.max_position_embeddings:
        said.append(
            f"isl + osl = {request.total_len} tokens are more than the max_position_embeddings="
            f"{config.max_position_embeddings} that the model is made for"
        )
    return ServingPlan(
        config=config,
        device=device,
        workload=workload,
        request=request,
        formats=tuple(kept),
        capacities=tuple(capacities),
        points=tuple(points),
        notes=tuple(said),
    )


def _usable(formats: Sequence[ServingFormat], device: Device, said: list[str]) -> list[ServingFormat]:
    """Formats whose products the device has a rate for; the first has to be one of them."""
    device.peak_flops_per_s(formats[0].dtype)
    kept: dict[str, ServingFormat] = {}
    for one in formats:
        try:
            device.peak_flops_per_s(one.dtype)
            kept.setdefault(one.name, one)
        except UnknownRateError as error:
            said.append(f"{one.name} is left out: {error}")
    return list(kept.values())


def _fit_instances(
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    request: ServingRequest,
    formats: Sequence[ServingFormat],
    given: Mapping[str, Any],
    said: list[str],
) -> tuple[list[Instance], list[InstanceCapacity]]:
    """Instances that hold a sequence at least, and what each holds.

    Where no number of devices is given and a node is not enough for a format, twice as many are looked at, and so on.

    Raises:
        LayoutError: no layout divides the model.
        WorkloadError: none holds a sequence in the wanted format.
    """
    most = request.num_devices or _largest_given(device.node_size, given)
    instances: list[Instance] = []
    capacities: list[InstanceCapacity] = []
    for one in formats:
        limit = most
        held = _hold(config, device, workload, request, one, given, limit)
        while not held and request.num_devices is None and limit < _LARGEST_INSTANCE:
            limit *= 2
            held = _hold(config, device, workload, request, one, given, limit)
        if not held:
            words = _misfit_words(config, device, workload, request, one, given, most)
            if one is formats[0]:
                raise WorkloadError(words)
            said.append(words)
        if len(held) > _MOST_LAYOUTS_PRICED:
            said.append(
                f"{one.name}: the {_MOST_LAYOUTS_PRICED} smallest of {len(held)} layouts are priced; fix --tp, --pp or "
                f"--ep to look at others"
            )
        for instance, capacity in held[:_MOST_LAYOUTS_PRICED]:
            instances.append(instance)
            capacities.append(capacity)
    return instances, capacities


def _largest_given(node_size: int, given: Mapping[str, Any]) -> int:
    """A node, or as many devices as the fixed degrees need."""
    needed = 1
    for value in given.values():
        needed *= value
    return max(node_size, needed)


def _hold(
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    request: ServingRequest,
    one: ServingFormat,
    given: Mapping[str, Any],
    most_devices: int,
) -> list[tuple[Instance, InstanceCapacity]]:
    """Instances of a format that hold a sequence for each pipeline stage, fewest devices first."""
    layouts = list(candidate_layouts(config, device, workload, most_devices, given))
    if not layouts and given:
        check_divides(config, workload, given)
        words = ", ".join(f"{name}={value}" for name, value in given.items())
        raise LayoutError(
            f"no layout of at most {most_devices} devices with {words} divides this model; leave a degree out, or give "
            f"more --gpus"
        )
    held = []
    for layout in layouts:
        instance = Instance(config, device, workload, layout, one, request)
        capacity = _capacity_of(instance)
        if capacity.most_sequences >= instance.num_streams:
            held.append((instance, capacity))
    return held


def _capacity_of(instance: Instance) -> InstanceCapacity:
    pass_tokens = min(instance.request.prompt_len, _CAPACITY_PASS_TOKENS)
    stages = instance.stage_estimates(pass_tokens)
    free = instance.free_bytes(pass_tokens)
    cache = instance.cache_bytes(instance.request.total_len)
    tightest = min(range(len(stages)), key=lambda stage: free[stage] / cache[stage] if cache[stage] else float("inf"))
    return InstanceCapacity(
        format=instance.format,
        layout=instance.layout,
        weights_bytes=stages[tightest].weights_bytes,
        free_bytes=free[tightest],
        cache_bytes_per_token=cache[tightest] / instance.request.total_len,
        cache_tokens=instance.cache_tokens(pass_tokens),
        most_sequences=instance.most_sequences(pass_tokens) * instance.layout.data_parallel,
    )


_CAPACITY_PASS_TOKENS = 2048
"""Tokens of the pass that the table of capacities leaves room for."""


def _misfit_words(
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    request: ServingRequest,
    one: ServingFormat,
    given: Mapping[str, Any],
    most: int,
) -> str:
    """What a model that does not fit would need."""
    name = config.name or config.model_type or "the model"
    limit = most
    while limit < _LARGEST_INSTANCE:
        limit *= 2
        held = _hold(config, device, workload, request, one, given, limit)
        if held:
            nearest = held[0][0].layout
            return (
                f"{name} with one sequence of {request.total_len} tokens in {one.name} does not fit on {most} x "
                f"{device.name} ({format_bytes(device.memory_bytes)} each); it needs {nearest.num_devices} "
                f"(tensor_parallel={nearest.tensor_parallel}, pipeline_parallel={nearest.pipeline_parallel}, "
                f"expert_parallel={nearest.expert_parallel}): give --gpus {nearest.num_devices}, or narrower --formats"
            )
    return (
        f"{name} with one sequence of {request.total_len} tokens in {one.name} fits on none of up to "
        f"{_LARGEST_INSTANCE} x {device.name}, in tensor groups inside a node of {device.node_size} and at most "
        f"{MOST_STAGES} stages; give --tp or --pp for more, a shorter --isl or --osl, or a device with more memory"
    )


def _price(
    instances: Sequence[Instance],
    config: TransformerConfig,
    device: Device,
    uncalibrated: bool,
    said: list[str],
) -> list[OperatingPoint]:
    """Price the passes of all candidates together, format by format."""
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
        name = config.name or config.model_type or "the model"
        raise WorkloadError(f"{name} needs {fewest} x {device.name} at least, which have no price: {reasons[0]}")
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
