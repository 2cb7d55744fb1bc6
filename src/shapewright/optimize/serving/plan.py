"""plan_serving: operating points of all layouts, formats, batches and chunkings; the best, and Pareto fronts.

Batches and chunkings are priced in serving.batches.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import UnknownRateError, WorkloadError
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.optimize.serving.batches import price_points
from shapewright.optimize.serving.capacity import InstanceCapacity, InstanceSearch, check_given
from shapewright.optimize.serving.point import OperatingPoint, pareto_front
from shapewright.optimize.serving.recommend import Recommendation, most_tokens, recommend
from shapewright.prediction.scenario import ScenarioResult
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.transfer import without_link
from shapewright.pricing.experts.kernels import describe_expert_kernel
from shapewright.pricing.servers import CURRENT_SERVER, is_linked

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.optimize.serving.request import ServingFormat, ServingRequest
    from shapewright.prediction.scenario import Scenario
    from shapewright.pricing.servers import Server
    from shapewright.workload.layout import ParallelLayout


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingPlan(ScenarioResult, NotebookDisplay):
    """Result of plan_serving: capacities of instances, and operating points.

    Attributes:
        scenario: Model and device, and a workload with the requested formats and kind of attention.
        request: Lengths and limits.
        formats: Element formats that were tried; the first is the requested one.
        capacities: Capacity of an instance of each layout and format.
        points: All operating points that were priced.
        notes: Notes for the reader, one line each.
    """

    scenario: Scenario
    request: ServingRequest
    formats: tuple[ServingFormat, ...]
    capacities: tuple[InstanceCapacity, ...]
    points: tuple[OperatingPoint, ...]
    notes: tuple[str, ...]

    def best(self, mode: str | None = None, format_name: str | None = None) -> OperatingPoint | None:
        """Return the point with most tokens per second of the devices that keeps the limits; None if none does.

        Of points within 2 % of it, the one with fewest devices is taken.

        Args:
            mode: ``aggregated`` or ``disaggregated``; None for either.
            format_name: Name of a format; None for the requested one.
        """
        return most_tokens(self._points_of(mode, format_name), self.request)

    def front(self, mode: str | None = None, format_name: str | None = None) -> tuple[OperatingPoint, ...]:
        """Return the Pareto front of tokens/s of a device and of a user, within the limit of the first token."""
        request = replace(self.request, tpot_limit_s=None)
        return pareto_front(point for point in self._points_of(mode, format_name) if point.meets(request))

    def _points_of(self, mode: str | None, format_name: str | None) -> list[OperatingPoint]:
        name = format_name or self.formats[0].name
        return [point for point in self.points if point.format.name == name and mode in (None, point.mode)]

    @cached_property
    def recommended(self) -> Recommendation | None:
        """The recommended operating point in the requested format; None if no point keeps the limits.

        Without a limit of the first token it keeps a default one, which ``best`` and ``front`` do not.

        Raises:
            WorkloadError: the devices do not carry the load.
        """
        return recommend(self._points_of(None, None), self.request, self.device.node_size)


def plan_serving(
    scenario: Scenario,
    request: ServingRequest,
    *,
    formats: Sequence[ServingFormat],
    layout: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] | None = None,
) -> ServingPlan:
    """Plan how to serve a model: layout, format, batch, and whether the same instances prefill and decode.

    Args:
        scenario: Model, a decoder, and device; of the workload, the kind of attention is used.
        formats: Element formats to try, the requested one first.
        notes: Notes kept with the result, instead of those of the scenario.

    Raises:
        WorkloadError: the model is not a decoder, its context is too short, or it does not fit on the devices.
        LayoutError: no layout divides the model.
        UnknownRateError: the device has no rate for the requested format.
    """
    config, device, workload = scenario.config, scenario.device, scenario.workload
    if config.stack != "decoder":
        raise WorkloadError(
            f"a serving plan needs a decoder, and this model is an {config.stack}; predict its prefill instead"
        )
    if config.attends_to_images and workload.images:
        raise WorkloadError(
            f"serving plans of {config.title}, whose layers attend to images, are modelled without them; omit images, "
            "or predict its prefill and decode",
            field="images",
        )
    if request.total_len > config.max_position_embeddings:
        raise WorkloadError(
            with_fields("{prompt_len} + {output_len}")
            + f" = {request.total_len} tokens exceed the model's max_position_embeddings="
            f"{config.max_position_embeddings}, beyond which no engine starts",
            advice=with_fields(
                "give shorter ones, or {max_position_embeddings} {number} for a checkpoint with scaled positions",
                number=request.total_len,
            ),
            field="prompt_len",
        )
    if request.adapters:
        request.adapters.check(config)
    given = {name: value for name, value in (layout or {}).items() if value is not None}
    check_given(config, given)
    found_notes = list(scenario.notes if notes is None else notes)
    kept = _list_usable(formats, device, found_notes)
    if request.server == CURRENT_SERVER:
        found_notes.append(
            "no server is named: fused projections, CUDA graphs, chunked prefill, no time of the host; "
            + with_fields("set {server}, such as trtllm-1.0, vllm-0.19 or sglang-0.5, for those of an engine")
        )
    search = InstanceSearch(scenario=scenario, request=request, given=given)
    instances, capacities = search.find(kept, found_notes)
    with paused_garbage_collection():
        points = price_points(instances, found_notes)
    found_notes += _describe_pcie(device, request.server, (one.layout for one in instances))
    if config.is_moe:
        record = load_record("moe", device)
        is_own = workload.expert_kernel == "as-16-bit"
        kernels = dict.fromkeys(describe_expert_kernel(record, one.dtype, is_own=is_own) for one in kept)
        found_notes += [note for note in kernels if note]
    if request.adapters and config.is_moe:
        found_notes.append("routed experts have no LoRA adapters, as in vLLM 0.10 and SGLang 0.5")
    return ServingPlan(
        scenario=scenario,
        request=request,
        formats=tuple(kept),
        capacities=tuple(capacities),
        points=tuple(points),
        notes=tuple(found_notes),
    )


def _describe_pcie(device: Device, server: Server, layouts: Iterable[ParallelLayout]) -> list[str]:
    """Note that all-reduces over PCIe are those of one measured host, where a server's own were not measured."""
    own = any(name.startswith("all_reduce.pcie") for name in server.kernels)
    degrees = {layout.tensor_parallel for layout in layouts}
    if own or all(degree == 1 or is_linked(device, degree) for degree in degrees):
        return []
    host = load_record("collectives", without_link(device)).device
    return [
        f"all-reduces over PCIe are priced as NCCL ran on one host of {host}; they depend on a host's switches and "
        f"sockets, so a larger tensor degree may be faster on yours: measure its collectives"
    ]


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which would scan hundreds of thousands of objects that form no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _list_usable(formats: Sequence[ServingFormat], device: Device, notes: list[str]) -> list[ServingFormat]:
    """Return the formats whose GEMMs the device has a rate for; the first must be one of them."""
    device.peak_flops_per_s(formats[0].dtype)
    kept: dict[str, ServingFormat] = {}
    for one in formats:
        try:
            device.peak_flops_per_s(one.dtype)
            kept.setdefault(one.name, one)
        except UnknownRateError as error:
            notes.append(f"{one.name} is left out: " + error.text)
    return list(kept.values())
