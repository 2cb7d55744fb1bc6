"""Servers to simulate: the layouts with most throughput by the closed form, with priced tables of their passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import WorkloadError
from shapewright.core.ranges import check_integer
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.core.units import format_number_of
from shapewright.optimize.serving.batches import refuse_short_answers
from shapewright.optimize.serving.disaggregated import transfer_span
from shapewright.optimize.serving.plan import plan_serving
from shapewright.optimize.serving.point import Instance, batch_sizes
from shapewright.optimize.serving.traffic.pass_table import PricedTable, price_table
from shapewright.optimize.serving.traffic.state import Limits
from shapewright.optimize.serving.traffic.unit import SimulatedUnit, Streams
from shapewright.pricing.servers import CURRENT_SERVER

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.optimize.serving.point import OperatingPoint
    from shapewright.optimize.serving.request import ServingFormat, ServingRequest
    from shapewright.prediction.scenario import Scenario
    from shapewright.pricing.servers import Server
    from shapewright.workload.layout import ParallelLayout

DEFAULT_LAYOUTS = 3
MOST_LAYOUTS = 32
_LARGE_DEVICE_BYTES = 70 * 2**30
_MOST_SEQUENCES, _MOST_PASS_TOKENS = 65536, 2**20


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Limits of a server's scheduler.

    Attributes:
        max_num_seqs: Most sequences of a batch; None for the default of the server.
        max_num_batched_tokens: Most tokens of a pass; None for the default of the server.

    Raises:
        WorkloadError: a value is out of range.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("max_num_seqs", _MOST_SEQUENCES), ("max_num_batched_tokens", _MOST_PASS_TOKENS)):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, 1, most, error=WorkloadError, hint="leave it out for the server's default")
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_batched_tokens < self.max_num_seqs:
            raise WorkloadError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least max_num_seqs="
                f"{self.max_num_seqs}: a pass decodes a token of every sequence",
                field="max_num_batched_tokens",
            )

    def limits_on(self, device: Device, server: Server) -> tuple[int, int]:
        """Return most sequences and most tokens of a pass on a device.

        Source: vllm/engine/arg_utils.py, get_batch_defaults for the API server (v0.10): 1024 and 8192 with 70 GiB of
        memory or more except on A100, else 256 and 2048.
        """
        is_small = device.memory_bytes < _LARGE_DEVICE_BYTES or "a100" in device.name
        is_reduced = is_small and server.engine in ("vllm", CURRENT_SERVER.name)
        default = min(server.pass_tokens, 2048) if is_reduced else server.pass_tokens
        tokens = self.max_num_batched_tokens or max(default, self.max_num_seqs or 0)
        sequences = min(server.most_sequences, 256) if is_reduced else server.most_sequences
        return self.max_num_seqs or min(sequences, tokens), tokens


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A server to simulate.

    Attributes:
        scenario: Model and device.
        point: Its best operating point by the closed form, which describes one unit.
        num_units: Units on the devices.
        unit: Streams of all units.
        max_num_seqs: Most sequences of a batch.
        max_num_batched_tokens: Most tokens of a pass.
        cache_tokens: Tokens that the caches of all decoding instances hold.
        priced: Times of passes of decoding instances, with error and interval.
    """

    scenario: Scenario = field(repr=False)
    point: OperatingPoint
    num_units: int
    unit: SimulatedUnit = field(repr=False)
    max_num_seqs: int
    max_num_batched_tokens: int
    cache_tokens: int
    priced: PricedTable = field(repr=False)

    @property
    def num_devices(self) -> int:
        """Devices of all units."""
        return self.num_units * self.point.num_devices


def find_candidates(
    scenario: Scenario,
    request: ServingRequest,
    scheduler: Scheduler,
    *,
    format_: ServingFormat,
    layout: Mapping[str, Any],
    num_layouts: int,
    longest_len: int,
    notes: list[str],
) -> list[Candidate]:
    """Return the servers to simulate: the best aggregated layouts, and the best disaggregated one.

    Args:
        request: Mean lengths, devices, memory and cache blocks.
        longest_len: Tokens of the longest request.
        notes: Receives the notes of the plan, and why layouts are left out.

    Raises:
        ShapewrightError: no server holds the longest request, or none can be priced.
    """
    plan = plan_serving(scenario, request, formats=[format_], layout=layout)
    notes += [note for note in plan.notes if note not in notes]
    points = _best_by_layout(plan.points, request)
    found: list[Candidate] = []
    refusals: list[str] = []
    tables: dict[ParallelLayout, tuple[PricedTable, Limits]] = {}
    for point in points:
        if len(found) == num_layouts:
            break
        try:
            found.append(make_candidate(plan.scenario, request, scheduler, point, longest_len, tables))
        except WorkloadError as error:
            refusals.append(error.text)
    if not found:
        raise WorkloadError(refusals[0]) if refusals else refuse_short_answers(request)
    return found


def _best_by_layout(points: Sequence[OperatingPoint], request: ServingRequest) -> list[OperatingPoint]:
    """Return the best point of each aggregated layout, and as the second the best disaggregated point.

    Points that keep the limits come first, and layouts with more pipeline stages than needed last: stages do not
    shorten latency.
    """

    def rank(point: OperatingPoint) -> tuple[bool, float, int]:
        return not point.meets(request), -point.total_tokens_per_s(request.num_devices), point.num_devices

    ranked = sorted(points, key=rank)
    aggregated: dict[ParallelLayout, OperatingPoint] = {}
    for point in ranked:
        if point.mode == "aggregated":
            aggregated.setdefault(point.layout, point)
    # Without a number of devices, a unit is at most as large as the largest aggregated instance.
    most = max((point.num_devices for point in aggregated.values()), default=1)
    disaggregated = [
        point
        for point in ranked
        if point.mode == "disaggregated" and (request.num_devices or most) >= point.num_devices
    ]
    fewest = min((layout.pipeline_parallel for layout in aggregated), default=1)
    listed = sorted(aggregated.values(), key=lambda point: point.layout.pipeline_parallel > fewest)
    return [*listed[:1], *disaggregated[:1], *listed[1:]]


def make_candidate(
    scenario: Scenario,
    request: ServingRequest,
    scheduler: Scheduler,
    point: OperatingPoint,
    longest_len: int,
    tables: dict[ParallelLayout, tuple[PricedTable, Limits]],
) -> Candidate:
    """Return the server of an operating point, with its passes priced.

    Args:
        request: Mean lengths, devices, memory and cache blocks.
        point: Its operating point by the closed form.
        longest_len: Tokens of the longest request.
        tables: Times of passes and limits of layouts priced so far; extended.

    Raises:
        WorkloadError: the cache of a stream does not hold the longest request.
    """
    num_units = max(1, (request.num_devices or 0) // point.num_devices)

    def streams(layout: ParallelLayout, num_instances: int) -> tuple[Streams, PricedTable, Instance]:
        instance = Instance(scenario.replace(layout=layout), point.format, request)
        if layout not in tables:
            tables[layout] = price_streams(instance, scheduler, longest_len)
        priced, limits = tables[layout]
        return Streams(priced.table, limits, num_units * num_instances * layout.pipeline_parallel), priced, instance

    decode, priced, receiver = streams(point.layout, point.num_instances)
    interval = pass_interval(request.server, priced, is_moe=scenario.config.is_moe)
    unit = SimulatedUnit(decode, interval=interval)
    if point.prefill_layout is not None:
        prefill, _, sender = streams(point.prefill_layout, point.num_prefill_instances)
        lengths = batch_sizes(longest_len)
        num_devices = request.num_devices or point.num_devices
        spans = [transfer_span(sender, receiver, num_devices, length) for length in lengths]
        times = tuple(span.middle_s for span in spans if span)
        unit = SimulatedUnit(decode, prefill, tuple(float(length) for length in lengths), times, interval)
    return Candidate(
        scenario=scenario.replace(layout=point.layout),
        point=point,
        num_units=num_units,
        unit=unit,
        max_num_seqs=decode.limits.max_sequences,
        max_num_batched_tokens=decode.limits.max_tokens,
        cache_tokens=decode.limits.num_blocks * decode.limits.block_tokens * decode.num_streams,
        priced=priced,
    )


def pass_interval(server: Server, priced: PricedTable, *, is_moe: bool) -> tuple[float, float]:
    """Return the ends of the 90 % interval of the times of passes over their middle.

    It is the interval of the server's published throughput if that is known, else that of the passes.

    Args:
        is_moe: Whether the model is a mixture of experts.
    """
    ends = server.interval.get("moe" if is_moe else "dense")
    return (1.0 / ends[1], 1.0 / ends[0]) if ends else (priced.low_fraction, priced.high_fraction)


def price_streams(instance: Instance, scheduler: Scheduler, longest_len: int) -> tuple[PricedTable, Limits]:
    """Return the times of passes and the limits of the streams of an instance.

    Raises:
        WorkloadError: the cache of a stream does not hold the longest request.
    """
    server = instance.request.server
    max_sequences, max_tokens = scheduler.limits_on(instance.scenario.device, server)
    if not server.chunked_prefill:
        max_tokens = max(max_tokens, longest_len)
    block_tokens = instance.request.block_tokens
    replicas, stages = instance.layout.data_parallel, instance.layout.pipeline_parallel
    cache_tokens = instance.cache_tokens(max_tokens) // (replicas * stages)
    if cache_tokens // block_tokens * block_tokens < longest_len:
        raise WorkloadError(
            f"a request of {longest_len} tokens does not fit into the cache of {cache_tokens} tokens beside a pass of "
            + format_number_of(max_tokens, "token"),
            advice=with_fields("give shorter ones, fewer {max_num_batched_tokens}, or more {num_devices}"),
        )
    max_sequences = min(max_sequences, cache_tokens // block_tokens)
    priced = price_table(instance, max_sequences=max_sequences, max_tokens=max_tokens, longest_len=longest_len)
    limits = Limits(
        max_sequences,
        max_tokens,
        block_tokens,
        cache_tokens // block_tokens * replicas,
        is_chunked=server.chunked_prefill,
        is_mixed=server.chunked_prefill and server.mixes_prefill,
        reserves_answers=server.reserves_answers,
        keeps_preempted=server.chunked_prefill,  # engines of that time cache blocks by default too
        num_replicas=replicas,
    )
    return priced, limits
