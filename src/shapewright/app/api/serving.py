"""serve_plan: ways to serve a model, and the scenario of a served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Unpack

from shapewright.app.api.parts import ScenarioLike, ScenarioParts, given_fields, takes_scenario
from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import WorkloadError
from shapewright.core.notes import Note
from shapewright.hardware.nodes import check_allocation
from shapewright.lowering.checks import validate_lengths
from shapewright.prediction.build import build_scenario, find_device, find_ignored_expert_split
from shapewright.prediction.scenario import Scenario
from shapewright.pricing.servers import CURRENT_SERVER, Server, kind_without, load_server

if TYPE_CHECKING:
    from shapewright.optimize.serving.adapters import Adapters
    from shapewright.optimize.serving.plan import ServingPlan
    from shapewright.optimize.serving.request import ServingFormat, Speculation

# Fields of a scenario's workload that matter for serving; a plan has a default of its own for the kernel of experts.
_SERVING_FIELDS = ("dtype", "weight_dtype", "kv_cache_dtype", "attention", "images", "image_size")


@takes_scenario
def serve_plan(
    config: ScenarioLike,
    *,
    prompt_len: int,
    output_len: int,
    cached_len: int = 0,
    ttft_limit_s: float | None = None,
    tpot_limit_s: float | None = None,
    num_devices: int | None = None,
    formats: Sequence[str] | None = None,
    memory_fraction: float | None = None,
    block_tokens: int | None = None,
    speculation: Mapping[str, Any] | None = None,
    usd_per_hour: float | None = None,
    requests_per_s: float | None = None,
    adapters: Mapping[str, Any] | None = None,
    server: str | Server | None = None,
    **parts: Unpack[ScenarioParts],
) -> ServingPlan:
    """Find how to serve a model: layout, batch, element format, prefill with or apart from decoding.

    Of the workload, dtype, weight_dtype, kv_cache_dtype, attention, expert_kernel, images (of each prompt, whose tokens
    are part of it) and image_size count. Degrees in ``layout`` are kept: tensor_parallel, pipeline_parallel,
    data_parallel (replicas of the attention), expert_parallel and expert_tensor_parallel.

    Args:
        config: A decoder model or a Scenario, see ScenarioLike.
        prompt_len: Tokens of a prompt.
        output_len: Tokens of an answer.
        cached_len: Tokens of a prompt that are in the KV cache already, such as earlier turns or a shared prefix.
        ttft_limit_s: Limit of the time to the first token. [s]
        tpot_limit_s: Limit of the time per further token. [s]
        num_devices: Devices; None for instances of up to a node.
        formats: Formats to compare with that of ``workload``, such as ``bf16:int4``; None for the usual ones.
        memory_fraction: Share of a device's memory that the server takes; None for the server's default.
        block_tokens: Tokens of a block of the paged cache; None for the server's default.
        speculation: num_draft_tokens, acceptance_fraction and draft_cost_fraction, and optionally draft_size_fraction;
            None without speculative decoding.
        usd_per_hour: Price of one device, for the cost of a token; None without. [USD/h]
        requests_per_s: Load to carry, for the number of instances; None without. [1/s]
        adapters: rank and num_resident of LoRA adapters, and optionally their targets; None without.
        server: Inference engine and version, such as ``trtllm-1.0``; None for what current engines share.
        parts: See ScenarioParts.

    Returns:
        Every way to serve that was priced, and the capacity of an instance by layout and format; ``recommended`` of it
        is the recommended operating point, ``best()`` the one with most tokens per second that keeps the limits.

    Raises:
        ShapewrightError: an argument is invalid, or the model does not fit.
    """
    from shapewright.optimize.serving.plan import plan_serving
    from shapewright.optimize.serving.request import ServingRequest, read_format, usual_formats

    given: dict[str, Any] = {"ttft_limit_s": ttft_limit_s, "tpot_limit_s": tpot_limit_s, "num_devices": num_devices}
    engine = find_server(server)
    given |= {"memory_fraction": engine.memory_fraction if memory_fraction is None else memory_fraction}
    given |= {"block_tokens": engine.block_tokens if block_tokens is None else block_tokens, "server": engine}
    request = ServingRequest(
        prompt_len=prompt_len,
        output_len=output_len,
        cached_len=cached_len,
        speculation=_read_speculation(speculation),
        usd_per_hour=usd_per_hour,
        requests_per_s=requests_per_s,
        adapters=_read_adapters(adapters),
        **{name: value for name, value in given.items() if value is not None},
    )
    layout = given_fields(parts.pop("layout", None))
    scenario = build_served(config, parts, engine, new_len=request.new_len)
    if num_devices is not None:
        check_allocation(num_devices, scenario.device)
    base = scenario.workload
    validate_lengths(scenario.config, replace(base, seq_len=request.total_len))
    wanted = served_format(scenario, engine)
    if isinstance(formats, str):
        raise WorkloadError(
            f"formats={formats!r} must be a list of formats; give {formats.split(',')!r}", field="formats"
        )
    narrow = "fp4" if scenario.model.quantization == "mxfp4" else "int4"
    usual = usual_formats(wanted, scenario.device, narrow)
    others = usual if formats is None else [read_format(text) for text in formats]
    notes = scenario.notes
    if scenario.config.is_moe and any(get_dtype(one.dtype).bits < 16 for one in others):
        # The kernel has no effect on the first format, but on the others.
        notes = tuple(note for note in notes if note.field != "expert_kernel")
    return plan_serving(
        scenario,
        request,
        formats=[wanted, *others],
        layout=layout,
        notes=(*notes, *find_ignored_expert_split(scenario.config, layout)),
    )


def build_served(
    config: ScenarioLike, parts: ScenarioParts, server: Server = CURRENT_SERVER, *, new_len: int
) -> Scenario:
    """Build the scenario of a served model; the workload sets its formats, kinds of kernels and images alone.

    On a device that cannot multiply fp4, that format means stored weights (MXFP4) under 16-bit activations. Servers
    run other expert kernels than the slow one that was measured for fp8 on Hopper (FlashInfer's CUTLASS): those of a
    named server are fitted as differences from the 16-bit kernels of the records.
    """
    from shapewright.optimize.serving.request import is_stored_only, wide_dtype

    served = given_fields(parts.get("workload"))
    if isinstance(config, Scenario):
        served = {name: getattr(config.workload, name) for name in _SERVING_FIELDS} | served
        parts.setdefault("device", config.device)
    source = config.model if isinstance(config, Scenario) else config
    device = parts.get("device")
    found = None if device is None else find_device(device)
    remarks: tuple[Note, ...] = ()
    if found is not None and is_stored_only(served.get("dtype"), found):
        served |= {"dtype": wide_dtype(found), "weight_dtype": served.get("weight_dtype") or "fp4"}
        words = f"fp4 on {found.name}, which cannot multiply it: stored weights (MXFP4), GEMMs in {served['dtype']}"
        remarks = (Note(words, "stored-format", "dtype"),)
    if found is not None and (kind := kind_without(server.engine, found)):
        words = f"{server.name} does not run on {kind}; times on {found.name} are as if it did"
        remarks += (Note(words, "server-elsewhere", "server"),)
    if found is not None and not found.architecture_facts.has_fused_attention and served.get("attention") is None:
        words = (
            f"attention on {found.name} is priced as PyTorch's, which copies keys and values for each query head; "
            f"paged attention of engines reads them once, so that large batches answer faster than predicted"
        )
        remarks += (Note(words, "unfused-serving", "attention"),)
    parts["workload"] = {**served, "phase": "prefill", **({"seq_len": new_len} if served.get("images") else {})}
    scenario = build_scenario(source, **parts)
    if scenario.config.is_moe and served.get("expert_kernel") is None:
        scenario = scenario.replace(expert_kernel="as-16-bit")
    return scenario.replace(remarks=(*scenario.remarks, *remarks)) if remarks else scenario


def served_format(scenario: Scenario, server: Server) -> ServingFormat:
    """Return the element formats of a served model."""
    from shapewright.optimize.serving.request import ServingFormat

    base = scenario.workload
    weight_dtype = base.weight_dtype or base.dtype
    cache_dtype = base.kv_cache_dtype or server.cache_dtype(base.dtype, weight_dtype)
    return ServingFormat(base.dtype, weight_dtype, cache_dtype)


def find_server(server: str | Server | None) -> Server:
    """Return a server by name, or the given one; None gives the defaults of current engines."""
    if isinstance(server, Server):
        return server
    return load_server(server) if server else CURRENT_SERVER


def _read_adapters(given: Mapping[str, Any] | None) -> Adapters | None:
    """Build Adapters from a mapping of its fields."""
    from shapewright.optimize.serving.adapters import Adapters

    if not given:
        return None
    wanted, known = {"rank", "num_resident"}, {"rank", "num_resident", "targets"}
    if not wanted <= set(given) <= known:
        raise WorkloadError(
            f"adapters has {', '.join(map(str, given))}; give rank and num_resident, and targets if not all-linear",
            field="adapters",
        )
    return Adapters(**given)


def _read_speculation(given: Mapping[str, Any] | None) -> Speculation | None:
    """Build Speculation from a mapping of its fields, of which the size of the draft may be left out."""
    from shapewright.optimize.serving.request import Speculation

    if not given:
        return None
    wanted = [spec.name for spec in fields(Speculation)]
    if set(given) | {"draft_size_fraction"} != set(wanted):
        raise WorkloadError(f"speculation has {', '.join(map(str, given))}; give {', '.join(wanted)}, and no more")
    return Speculation(**given)
