"""The plan: every layout, format, batch and way to prefill, priced together; the best, the fronts, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shapewright.errors import UnknownRateError, WorkloadError
from shapewright.perf.calibration import load_record
from shapewright.perf.expert_kernels import say_expert_kernel
from shapewright.serving.holding import InstanceCapacity, InstanceFinder
from shapewright.serving.layouts import check_given
from shapewright.serving.point import OperatingPoint, pareto_front
from shapewright.serving.pricing import price_points
from shapewright.shown import ShownInNotebook

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.serving.request import ServingFormat, ServingRequest
    from shapewright.workload import Workload

# Points closer to the best than this cannot be told from it by a prediction.
_ALIKE_FRACTION = 0.98


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
    check_given(config, given)
    said = list(notes)
    kept = _usable(formats, device, said)
    finder = InstanceFinder(config=config, device=device, workload=workload, request=request, given=given)
    instances, capacities = finder.find(kept, said)
    points = price_points(instances, said, uncalibrated=uncalibrated)
    if config.is_moe:
        record = load_record("moe", device, uncalibrated=uncalibrated)
        is_own = workload.expert_kernel == "as-16-bit"
        words = dict.fromkeys(say_expert_kernel(record, one.dtype, is_own=is_own) for one in kept)
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
