"""Instances of a server (memory, sequences, passes), and operating points with their latency and throughput."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import floor
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.records import dataclass
from shapewright.memory.estimate import estimate_stage_caches, estimate_stages
from shapewright.optimize.serving.passes import Passes
from shapewright.prediction.composition.step import StepTimes

if TYPE_CHECKING:
    from shapewright.core.numeric import Count
    from shapewright.memory.estimate import MemoryEstimate
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.serving.passes import Pass
    from shapewright.optimize.serving.request import ServingFormat, ServingRequest
    from shapewright.prediction.scenario import Scenario
    from shapewright.pricing.servers import Server
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_SECONDS_PER_HOUR = 3600.0
_LARGEST_NODE_WITHOUT_RACK = 8
"""Most devices of a node that is not a rack (NVL72). In a rack, devices exchange the rows of experts over multi-node
NVLink instead of gathering tokens."""

USUAL_TTFT_LIMIT_S = 1.0
"""Limit of the first token of a recommended point if the request has none: a delay of up to about a second does not
interrupt a user's flow of thought. Source: J. Nielsen, Usability Engineering (1993), section 5.5. [s]"""
_LONG_PROMPT_FACTOR = 2.0
"""The limit is at least this multiple of the shortest first token: long prompts may take more than a second, and
requests wait for each other."""


@dataclass(frozen=True)
class Span:
    """A time with the ends of its 90 % interval. [s]"""

    middle_s: float
    low_s: float
    high_s: float

    def scaled(self, factor: float) -> Span:
        """Return the time multiplied by a number."""
        return Span(self.middle_s * factor, self.low_s * factor, self.high_s * factor)

    def plus(self, other: Span) -> Span:
        """Return the sum of two times whose errors are fully correlated."""
        return Span(self.middle_s + other.middle_s, self.low_s + other.low_s, self.high_s + other.high_s)


def span_of(times: StepTimes) -> Span:
    """Return the time of a pass with its interval."""
    return Span(times.step_s, times.step_low_s, times.step_high_s)


def mean_span(spans: Sequence[Span]) -> Span:
    """Return the mean of times whose errors are fully correlated."""
    total = spans[0]
    for span in spans[1:]:
        total = total.plus(span)
    return total.scaled(1.0 / len(spans))


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """One way to serve, with its latency and throughput.

    Attributes:
        mode: ``aggregated`` (each instance prefills and decodes) or ``disaggregated``.
        format: Element formats.
        layout: Layout of an instance; of a decoding one if disaggregated.
        prefill_layout: Layout of a prefilling instance; None if aggregated.
        num_instances: Instances of ``layout`` in one unit; units are replicated over the devices.
        num_prefill_instances: Instances of ``prefill_layout`` in it.
        batch_size: Sequences that one pass decodes on each replica of an instance.
        num_sequences: Sequences that the unit decodes at once.
        prefill_tokens: Prompt tokens of one prefill pass, on each replica.
        prefill_load_fraction: Used share of the prefill capacity: share of passes with prefill, or of the time of
            prefill instances.
        prompt_cost_fraction: Share of the device time that prompts take: the time that mixed passes take in addition to
            decode passes, or the share of the devices that prefill. The rest is for answers.
        ttft: Time to first token, queueing included.
        tpot: Time per further token.
        requests_per_s: Requests per second of the unit.
        output_len: Tokens of an answer.
    """

    mode: str
    format: ServingFormat
    layout: ParallelLayout
    prefill_layout: ParallelLayout | None = None
    num_instances: int = 1
    num_prefill_instances: int = 0
    batch_size: int
    num_sequences: int
    prefill_tokens: int
    prefill_load_fraction: float
    prompt_cost_fraction: float
    ttft: Span
    tpot: Span
    requests_per_s: float
    output_len: int

    @property
    def num_devices(self) -> int:
        """Devices of the unit."""
        prefill = self.prefill_layout.num_devices if self.prefill_layout else 0
        return self.num_instances * self.layout.num_devices + self.num_prefill_instances * prefill

    @property
    def tokens_per_s(self) -> float:
        """Answered tokens per second of the unit."""
        return self.requests_per_s * self.output_len

    @property
    def tokens_per_s_per_device(self) -> float:
        """Answered tokens per second and device."""
        return self.tokens_per_s / self.num_devices

    @property
    def tokens_per_s_per_user(self) -> float:
        """Tokens per second that one user sees after the first."""
        return 1.0 / self.tpot.middle_s

    def usd_per_million_tokens(self, usd_per_hour: float | None) -> float | None:
        """Return the cost of a million answered tokens under full load. [USD]

        Args:
            usd_per_hour: Price of one device; None gives None. [USD/h]
        """
        if usd_per_hour is None:
            return None
        return 1e6 * usd_per_hour / _SECONDS_PER_HOUR / self.tokens_per_s_per_device

    def usd_per_million_each(self, request: ServingRequest) -> tuple[float, float] | None:
        """Return the cost of a million prompt tokens and of a million answered tokens under full load. [USD]

        Together they cover all devices: prompts cost the share ``prompt_cost_fraction`` of the device time.

        Args:
            request: Lengths, and the price of one device; None without a price. Cached prompt tokens count as others.
        """
        if request.usd_per_hour is None:
            return None
        per_request = request.usd_per_hour / _SECONDS_PER_HOUR * self.num_devices / self.requests_per_s
        prompts = self.prompt_cost_fraction * per_request / request.prompt_len
        return 1e6 * prompts, 1e6 * (1.0 - self.prompt_cost_fraction) * per_request / request.output_len

    def total_tokens_per_s(self, num_devices: int | None) -> float:
        """Return the tokens per second of as many units as fit on the devices; per device if num_devices is None."""
        if num_devices is None:
            return self.tokens_per_s_per_device
        return num_devices // self.num_devices * self.tokens_per_s

    def meets(self, request: ServingRequest) -> bool:
        """Return whether the predicted times keep both limits."""
        return _within(self.ttft.middle_s, request.ttft_limit_s) and _within(self.tpot.middle_s, request.tpot_limit_s)


def recommended_ttft_limit_s(points: Iterable[OperatingPoint], request: ServingRequest) -> float:
    """Return the limit of the first token that a recommended point keeps. [s]

    It is that of the request. Without one, it is USUAL_TTFT_LIMIT_S, or twice the shortest first token of the points
    that keep the other limit if that is longer.
    """
    if request.ttft_limit_s is not None:
        return request.ttft_limit_s
    shortest_s = min((point.ttft.middle_s for point in points if point.meets(request)), default=0.0)
    return max(USUAL_TTFT_LIMIT_S, _LONG_PROMPT_FACTOR * shortest_s)


def _within(value_s: float, limit_s: float | None) -> bool:
    return limit_s is None or value_s <= limit_s


def pareto_front(points: Iterable[OperatingPoint]) -> tuple[OperatingPoint, ...]:
    """Return the Pareto front of points in tokens per second of a device and of a user.

    Returns:
        Points of the front, the fastest for a user first. Of equal points, the one with fewest devices.
    """
    ranked: Sequence[OperatingPoint] = sorted(
        points, key=lambda point: (-point.tokens_per_s_per_user, -point.tokens_per_s_per_device, point.num_devices)
    )
    front: list[OperatingPoint] = []
    for point in ranked:
        if not front or point.tokens_per_s_per_device > front[-1].tokens_per_s_per_device:
            front.append(point)
    return tuple(front)


def waiting_s(service_s: float, load_fraction: float) -> float:
    """Return the mean waiting time of a queue with a fixed service time and random arrivals. [s]

    rho S / (2 (1 - rho)): the Pollaczek-Khinchine formula for M/D/1.

    Source: L. Kleinrock, Queueing Systems, volume 1 (1975), section 5.7.

    >>> round(waiting_s(0.1, 0.5), 9)
    0.05
    """
    return load_fraction * service_s / (2.0 * (1.0 - load_fraction))


def model_as_served(config: TransformerConfig, server: Server) -> TransformerConfig:
    """Return the model as a server runs it: fused projections (not of MLA), and no windows that it ignores."""
    if config.attention_window_kind not in server.read_windows:
        config = _with_full_attention(config)
    return _with_fused_projections(config) if server.fused_projections else config


@lru_cache(maxsize=64)
def _with_fused_projections(config: TransformerConfig) -> TransformerConfig:
    return replace(config, fused_qkv=config.fused_qkv or not config.is_mla, fused_gate_up=config.gated_mlp)


def _with_full_attention(config: TransformerConfig) -> TransformerConfig:
    """Return the model with all layers attending to all positions."""
    return replace(config, attention_windows=()) if any(config.attention_windows) else config


@dataclass(frozen=True)
class Instance:
    """One copy of a model on its devices, in one format.

    Attributes:
        scenario: Model, device, layout, and any inference workload; its formats are replaced.
        format: Element formats.
        request: Lengths and limits.
    """

    scenario: Scenario
    format: ServingFormat
    request: ServingRequest

    @cached_property
    def layout(self) -> ParallelLayout:
        """Layout of the model."""
        return self.scenario.layout

    @cached_property
    def config(self) -> TransformerConfig:
        """The model as the server runs it."""
        return model_as_served(self.scenario.config, self.request.server)

    @cached_property
    def workload(self) -> Workload:
        """The workload in the formats of the instance."""
        return replace(
            self.scenario.workload,
            phase="decode",
            dtype=self.format.dtype,
            weight_dtype=self.format.weight_dtype,
            kv_cache_dtype=self.format.kv_cache_dtype,
            kv_block_tokens=self.request.block_tokens,
        )

    @cached_property
    def passes(self) -> Passes:
        """The passes of the instance, lowered when first used."""
        model = replace(self.scenario.model, config=self.config)
        return Passes(
            self.scenario.replace(model=model, workload=self.workload),
            self.request.adapters,
            gathers_experts=self._gathers_experts,
            gemm_library=self.request.server.gemm_library,
            images_per_token=self.workload.images / self.request.new_len,
        )

    @property
    def _gathers_experts(self) -> bool:
        """Whether devices gather the tokens of experts, instead of exchanging rows."""
        return self.request.server.gathers_experts and self.scenario.device.node_size <= _LARGEST_NODE_WITHOUT_RACK

    def lower_batches(self, batch_sizes: Collection[int], num_tokens: Collection[int]) -> None:
        """Lower at once the decode passes of some batches, and what depends on tokens alone in mixed passes."""
        request = self.request
        context_len, answer_len = request.prompt_len + request.output_len // 2, request.output_len
        self.passes.lower_decode_passes(batch_sizes, context_len, {1, request.query_len}, answer_len)
        self.passes.lower_token_operations(num_tokens)

    def decode_passes(self, batch_size: int) -> tuple[Pass, Pass]:
        """Return a plain decode pass in the middle of the answers, and the one that runs (it may verify drafts)."""
        request = self.request
        context_len, answer_len = request.prompt_len + request.output_len // 2, request.output_len
        plain = self.passes.decode(batch_size, context_len, answer_len=answer_len)
        if not request.speculation:
            return plain, plain
        return plain, self.passes.decode(batch_size, context_len, request.query_len, answer_len=answer_len)

    @property
    def num_streams(self) -> int:
        """Batches in progress at once: one per replica and pipeline stage."""
        return self.layout.data_parallel * self.layout.pipeline_parallel

    @cached_property
    def _known_cache_bytes(self) -> dict[int, tuple[float, ...]]:
        """Caches of sequences that were estimated, by their tokens. [byte]"""
        return {}

    @cached_property
    def _known_stages(self) -> dict[int, tuple[MemoryEstimate, ...]]:
        """Memory of each stage that was estimated, by the tokens of the pass. [byte]"""
        return {}

    def stage_estimates(self, num_tokens: int) -> tuple[MemoryEstimate, ...]:
        """Return the memory of each stage in a pass over some tokens; its KV cache holds the pass only. [byte]"""
        known = self._known_stages
        if num_tokens not in known:
            known[num_tokens] = self._estimate_stages(num_tokens)
        return known[num_tokens]

    def _estimate_stages(self, num_tokens: Count) -> tuple[MemoryEstimate, ...]:
        workload = self._prefill_workload.resized(seq_len=num_tokens)
        if workload.attention == "unfused":
            # Scores are of the keys of a prompt, with those before a chunk and without those of other prompts.
            workload = workload.resized(context_len=self.request.prompt_len - num_tokens)
        return estimate_stages(self.config, workload, self.layout)

    @cached_property
    def _prefill_workload(self) -> Workload:
        return replace(self.workload, phase="prefill", micro_batch_size=1, seq_len=1, context_len=0)

    def cache_bytes(self, num_tokens: int) -> tuple[float, ...]:
        """Return the cache of one sequence on one device of each stage, that of a draft model included. [byte]

        The server stores all tokens of windows whose kind it does not keep.
        """
        known = self._known_cache_bytes
        if num_tokens not in known:
            workload = self.workload.resized(micro_batch_size=1, context_len=num_tokens - 1)
            is_kept = self.config.attention_window_kind in self.request.server.kept_windows
            config = self.config if is_kept else _with_full_attention(self.config)
            own = estimate_stage_caches(config, workload, self.layout)
            known[num_tokens] = tuple((1.0 + self.request.draft_memory_fraction) * each for each in own)
        return known[num_tokens]

    @cached_property
    def adapters_bytes(self) -> float:
        """Resident LoRA adapters on one device. [byte]"""
        adapters = self.request.adapters
        return adapters.weights_bytes(self.scenario.config, self.layout) if adapters else 0.0

    def free_bytes(self, num_tokens: int) -> tuple[float, ...]:
        """Return the memory left for the cache on one device of each stage in a pass over some tokens. [byte]"""
        return tuple(map(self._free_beside, self.stage_estimates(num_tokens)))

    def _free_beside(self, stage: MemoryEstimate) -> float:
        """Return the memory left for the cache on one device of a stage. [byte]"""
        fraction, memory_bytes = self.request.memory_fraction, self.scenario.device.memory_bytes
        draft_bytes = self.request.draft_memory_fraction * stage.weights_bytes
        used_bytes = stage.total_bytes - stage.kv_cache_bytes + self.adapters_bytes + draft_bytes
        if self.request.server.fraction_of_free:
            return fraction * (memory_bytes - used_bytes)
        return fraction * memory_bytes - used_bytes

    def most_sequences(self, num_tokens: int, length: int | None = None) -> int:
        """Return the sequences of a length that one replica holds beside a pass over some tokens.

        Args:
            length: Tokens of each sequence; by default prompt and answer.
        """
        return _count_sequences(self.free_bytes(num_tokens), self.cache_bytes(length or self.request.total_len))

    def list_most_sequences(self, num_tokens: Sequence[int], length: int | None = None) -> list[int]:
        """Return most_sequences beside each of some passes, whose memory is estimated at once."""
        free = map(self._free_beside, self._estimate_stages(np.array(num_tokens)))
        columns = (np.broadcast_to(each, len(num_tokens)).tolist() for each in free)
        cache = self.cache_bytes(length or self.request.total_len)
        return [_count_sequences(row, cache) for row in zip(*columns, strict=True)]

    def cache_tokens(self, num_tokens: int) -> int:
        """Return the tokens that the caches of the instance hold, in sequences of prompt and answer."""
        length = self.request.total_len
        shares = (
            free / each
            for free, each in zip(self.free_bytes(num_tokens), self.cache_bytes(length), strict=True)
            if each
        )
        return max(0, floor(min(shares) * length)) * self.layout.data_parallel


def _count_sequences(free: Sequence[float], cache: Sequence[float]) -> int:
    """Return the sequences that the memory of every stage holds, given the cache of one on each. [byte]"""
    return max(0, min(floor(free_bytes / each) for free_bytes, each in zip(free, cache, strict=True) if each))


def batch_sizes(most: int) -> Sequence[int]:
    """Return the batch sizes to try: 1, 2, 3, 4, 6, 8, 12, ... and the largest.

    >>> batch_sizes(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    sizes = {most}
    power = 1
    while power <= most:
        sizes |= {power, power + power // 2}
        power *= 2
    return sorted(size for size in sizes if 0 < size <= most)
