"""Output of ``serve-plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.formats.servers.launch import Launch
from shapewright.app.report.outputs.model import (
    DeviceSummary,
    Output,
    degree_words,
    described,
    optional,
    summarize_device,
    take,
)
from shapewright.core.records import dataclass
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.serving.adapters import Adapters
from shapewright.optimize.serving.recommend import Fleet, find_limits
from shapewright.optimize.serving.request import ServingFormat, Speculation

if TYPE_CHECKING:
    from shapewright.optimize.serving.plan import ServingPlan
    from shapewright.optimize.serving.point import OperatingPoint
    from shapewright.optimize.serving.recommend import PointLimits
    from shapewright.optimize.serving.request import ServingRequest
    from shapewright.workload.layout import ParallelLayout

MODES = ("aggregated", "disaggregated")


@dataclass(frozen=True, kw_only=True)
class ServingRequestOutput:
    """Lengths, limits and devices."""

    prompt_len: int = described("tokens of a prompt")
    output_len: int = described("tokens of an answer")
    cached_len: int = described("tokens of the prompt that are in the KV cache already")
    ttft_limit_s: float | None = described("limit of the time to the first token; null without one")
    tpot_limit_s: float | None = described("limit of the time per further token; null without one")
    num_devices: int | None = described("devices; null for instances of up to a node")
    memory_fraction: float = described("share of the device's memory that the server takes")
    block_tokens: int = described("tokens of a block of the paged KV cache")
    usd_per_hour: float | None
    requests_per_s: float | None = described("load to carry; null without one")
    images: int | None = optional("images in each prompt, whose tokens are part of it; absent without images")


@dataclass(frozen=True, kw_only=True)
class ServerOutput:
    """Inference engine, with the defaults that the plan assumes."""

    name: str = described("name and version")
    title: str = described("name for people")
    fused_projections: bool = described("queries, keys and values are one GEMM, gate and up projection another")
    cuda_graphs: bool = described("decode passes are CUDA graphs")
    chunked_prefill: bool = described("prompts are cut to the token budget of a pass")
    pass_tokens: int = described("token budget of a pass")
    most_sequences: int = described("most sequences that decode at once on a replica")
    mixes_prefill: bool = described("passes may prefill and decode together")
    reserves_answers: bool = described("a request starts only if its whole answer fits in the cache")
    fraction_of_free: bool = described("the share of the memory is of what weights leave free")
    expert_kernel: dict[str, str] = described("kernel of experts by format")
    attention_data_parallel: bool = described("experts are served with replicated attention by default (DEP)")
    host_s: float = described("time that the host adds to a pass")
    host_per_sequence_s: float = described("time that the host adds to a pass for each decoding sequence")
    host_per_rank_s: float = described("time that the host adds to a pass for each device of a tensor group")
    prefill_host_s: float = described("time that the host adds to a pass with prompts, besides that of every pass")
    sources: dict[str, str] = described("sources of these values, by field")


@dataclass(frozen=True, kw_only=True)
class InstanceLayout:
    """Degrees of one instance."""

    tensor_parallel: int = described("tensor parallel degree")
    pipeline_parallel: int = described("pipeline stages")
    data_parallel: int = described("replicas of the attention")
    expert_parallel: int = described("expert parallel degree")
    expert_tensor_parallel: int | None = described(
        "tensor parallel degree of experts; null where it is `tensor_parallel`"
    )
    num_devices: int = described("devices of the instance")


@dataclass(frozen=True, kw_only=True)
class OperatingPointOutput:
    """One way to serve."""

    mode: str = described("`aggregated` or `disaggregated`")
    format: str = described("name of the format")
    instances: str = described("instances of the unit as text, such as `1 x (TP 2) prefill + 3 x (TP 4) decode`")
    layout: InstanceLayout = described("degrees of an instance that decodes")
    prefill_layout: InstanceLayout | None = described("degrees of an instance that only prefills; null if aggregated")
    num_instances: int = described("instances of `layout` in the unit that is replicated")
    num_prefill_instances: int = described("instances of `prefill_layout` in it")
    num_devices: int = described("devices of the unit")
    batch_size: int = described("sequences of one decode pass on a replica")
    num_sequences: int = described("sequences that decode at once in the unit")
    prefill_tokens: int = described("prompt tokens of one prefill pass")
    prefill_load_fraction: float = described("share of the prefill capacity in use")
    ttft_s: float = described("time to the first token, queueing included")
    ttft_low_s: float = described("lower end of its 90 % interval")
    ttft_high_s: float = described("upper end of its 90 % interval")
    tpot_s: float = described("time per further token")
    tpot_low_s: float = described("lower end of its 90 % interval")
    tpot_high_s: float = described("upper end of its 90 % interval")
    requests_per_s: float = described("requests per second of the unit")
    tokens_per_s: float = described("tokens per second of the unit")
    tokens_per_s_per_device: float
    tokens_per_s_per_user: float = described("tokens per second of one user after the first token")
    usd_per_million_tokens: float | None = described(
        "cost of everything per million output tokens; null without a price"
    )
    usd_per_million_input_tokens: float | None = described("cost per million prompt tokens; null without a price")
    usd_per_million_output_tokens: float | None = described(
        "cost per million output tokens, without that of prompts; null without a price"
    )
    prompt_cost_fraction: float = described("share of the device time that prompts take")
    limited_by: str = described(
        "`cache` if no further sequence fits in memory, otherwise what takes most of a pass: `compute`, `memory`, "
        "`communication` or `latency` (kernel launches)"
    )
    cache_fraction: float = described("sequences over the most that fit in memory beside the passes")
    pass_fractions: dict[str, float] = described("share of a pass by `compute`, `memory`, `communication`, `latency`")


@dataclass(frozen=True, kw_only=True)
class InstanceCapacityOutput:
    """Capacity of one instance."""

    format: str = described("name of the format")
    instance: str = described("degrees of the instance as text, such as `TP 4, PP 2`")
    layout: InstanceLayout = described("degrees of the instance")
    weights_bytes: float = described("weights and resident adapters on one device of the fullest stage")
    free_bytes: float = described("memory left there for the KV cache")
    cache_bytes_per_token: float = described("KV cache of one token there")
    cache_tokens: int = described("tokens that the caches of the instance hold")
    most_sequences: int = described("sequences of prompt and answer that fit at once")


@dataclass(frozen=True, kw_only=True)
class ServePlanOutput(Output):
    """Ways to serve a model, and the recommended one."""

    device: DeviceSummary
    config: TransformerConfig
    request: ServingRequestOutput = described("lengths, limits and devices")
    server: ServerOutput = described("inference engine whose kernels, host and defaults are priced")
    speculation: Speculation | None = described("speculative decoding; null without it")
    adapters: Adapters | None = described("LoRA adapters; null without")
    attention: str = described("kind of attention")
    expert_kernel: str | None = described("kernel that prices experts in 8 and 4 bits")
    formats: list[ServingFormat] = described("element formats, that of the request first")
    keeps_limits: bool = described("whether any way to serve keeps both limits; the exit code is 1 if not")
    recommended: OperatingPointOutput | None = described(
        "the recommended point in the first format, with a first token within `recommended_ttft_limit_s`: with a load, "
        "that with fewest devices; otherwise, with a limit of the time per token, most tokens/s, without one the knee; "
        "null if none keeps the limits"
    )
    recommended_ttft_limit_s: float | None = described(
        "limit of the first token that the recommended point keeps: that of the request, or by default 1 s, or twice "
        "the shortest if that is longer; null without a point"
    )
    recommended_reason: str = described("why it is recommended; empty without one")
    launch: Launch | None = described("commands that start the recommended point; null without `--format`")
    fleet: Fleet | None = described("instances of the recommended point for the load; null without a load")
    best: OperatingPointOutput | None = described(
        "most tokens/s of the devices in the first format; null if none keeps the limits"
    )
    best_by_mode: dict[str, OperatingPointOutput | None] = described("the best by mode")
    best_by_format: dict[str, OperatingPointOutput | None] = described("the best by format")
    front: dict[str, list[OperatingPointOutput]] = described(
        "by mode, the points of the Pareto front over tokens/s of a device and of a user; none is dominated by another "
        "of either mode"
    )
    front_by_format: dict[str, list[OperatingPointOutput]] = described("by format, the Pareto front over both modes")
    shortest_ttft_s: float | None = described(
        "shortest time to the first token of any point in the first format; null if none could be priced"
    )
    shortest_tpot_s: float | None = described("shortest time per further token of any point in the first format")
    capacities: list[InstanceCapacityOutput] = described("capacity of an instance by format and layout")
    num_points: int = described("ways to serve that were priced")
    notes: list[str]


def serve_plan_output(found: ServingPlan, launch: Launch | None = None) -> ServePlanOutput:
    """Output of a serving plan.

    Args:
        launch: Commands that start its recommended point; None without.
    """
    speculation, recommendation = found.request.speculation, found.recommended
    names = [one.name for one in found.formats]
    own = [point for point in found.points if point.format.name == names[0]]
    best = {name: found.best(format_name=name) for name in names}
    best_by_mode = {mode: found.best(mode) for mode in MODES}
    fronts = {name: found.front(None, name) for name in names}
    chosen = [recommendation.point if recommendation else None, *best.values(), *best_by_mode.values()]
    shown = dict.fromkeys([*(point for front in fronts.values() for point in front), *filter(None, chosen)])
    written = {
        point: operating_point(point, found.request, limits)
        for point, limits in find_limits(list(shown), found.scenario, found.request).items()
    }

    def write(point: OperatingPoint | None) -> OperatingPointOutput | None:
        return None if point is None else written[point]

    return take(
        ServePlanOutput,
        found,
        device=summarize_device(found.device),
        request=take(ServingRequestOutput, found.request, images=found.workload.images or None),
        server=take(
            ServerOutput,
            found.request.server,
            sources=dict(found.request.server.sources),
            expert_kernel=dict(found.request.server.expert_kernel),
        ),
        speculation=speculation,
        adapters=found.request.adapters,
        attention=found.workload.attention,
        expert_kernel=found.workload.expert_kernel,
        formats=list(found.formats),
        keeps_limits=best[names[0]] is not None,
        recommended=write(recommendation.point if recommendation else None),
        recommended_ttft_limit_s=recommendation.ttft_limit_s if recommendation else None,
        recommended_reason=recommendation.reason if recommendation else "",
        launch=launch,
        fleet=recommendation.fleet if recommendation else None,
        best=write(best[names[0]]),
        best_by_mode={mode: write(point) for mode, point in best_by_mode.items()},
        best_by_format={name: write(point) for name, point in best.items()},
        front={mode: [written[point] for point in fronts[names[0]] if point.mode == mode] for mode in MODES},
        front_by_format={name: [written[point] for point in front] for name, front in fronts.items()},
        shortest_ttft_s=min((point.ttft.middle_s for point in own), default=None),
        shortest_tpot_s=min((point.tpot.middle_s for point in own), default=None),
        capacities=[
            take(
                InstanceCapacityOutput,
                capacity,
                format=capacity.format.name,
                instance=layout_words(capacity.layout),
                layout=_instance_layout(capacity.layout),
            )
            for capacity in found.capacities
        ],
        num_points=len(found.points),
    )


def _instance_layout(layout: ParallelLayout) -> InstanceLayout:
    return take(InstanceLayout, layout)


def operating_point(point: OperatingPoint, request: ServingRequest, limits: PointLimits) -> OperatingPointOutput:
    """One way to serve, at the price of a device, with what limits it."""
    per_prompt_token, per_output_token = point.usd_per_million_each(request) or (None, None)
    return take(
        OperatingPointOutput,
        point,
        format=point.format.name,
        instances=instances_words(point),
        layout=_instance_layout(point.layout),
        prefill_layout=None if point.prefill_layout is None else _instance_layout(point.prefill_layout),
        ttft_s=point.ttft.middle_s,
        ttft_low_s=point.ttft.low_s,
        ttft_high_s=point.ttft.high_s,
        tpot_s=point.tpot.middle_s,
        tpot_low_s=point.tpot.low_s,
        tpot_high_s=point.tpot.high_s,
        usd_per_million_tokens=point.usd_per_million_tokens(request.usd_per_hour),
        usd_per_million_input_tokens=per_prompt_token,
        usd_per_million_output_tokens=per_output_token,
        limited_by=limits.limited_by,
        cache_fraction=limits.cache_fraction,
        pass_fractions=dict(limits.pass_fractions),
    )


def layout_words(layout: ParallelLayout) -> str:
    """Degrees of one instance, such as ``TP 4, PP 2``.

    ``DP`` counts replicas of the attention alone; ``ETP 1`` appears where other matrices are split and experts are not.

    >>> from shapewright.workload.layout import ParallelLayout
    >>> layout_words(ParallelLayout(tensor_parallel=2)), layout_words(ParallelLayout())
    ('TP 2', 'TP 1')
    """
    return ", ".join(degree_words(layout)) or "TP 1"


def instances_words(point: OperatingPoint) -> str:
    """Instances of a unit, such as ``1 x (TP 2) prefill + 3 x (TP 4) decode``."""
    if point.prefill_layout is None:
        return layout_words(point.layout)
    return (
        f"{point.num_prefill_instances} x ({layout_words(point.prefill_layout)}) prefill + "
        f"{point.num_instances} x ({layout_words(point.layout)}) decode"
    )
