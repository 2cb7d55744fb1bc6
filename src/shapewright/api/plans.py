"""How to spread a job: training over devices, and serving."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from shapewright.dtypes import get_dtype
from shapewright.errors import WorkloadError
from shapewright.hardware.nodes import check_units
from shapewright.lowering import validate_lengths
from shapewright.perf.software import TUNED
from shapewright.question import ask, say_idle_cut, say_idle_modules
from shapewright.workload import RECOMPUTE_MODES

if TYPE_CHECKING:
    from shapewright.plan import PlanResult
    from shapewright.question import DeviceLike, ModelLike
    from shapewright.serving import ServingPlan, Speculation


def plan(
    config: ModelLike,
    *,
    device: DeviceLike,
    num_devices: int,
    global_batch_size: int | None = None,
    objective: str = "time",
    top: int = 10,
    keep: Mapping[str, Sequence[Any]] | None = None,
    headroom_fraction: float = 0.0,
    optimizer: str | None = None,
    usd_per_hour: float | None = None,
    straggler_factor: float = 1.0,
    try_offload: bool = False,
    workload: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
    software: str = TUNED,
    physics_only: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PlanResult:
    """Find how to spread a training job over devices.

    Args:
        config: Preset name, config.json, its folder or what it holds, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        num_devices: Devices of the job: fewer than a node has, or whole nodes.
        global_batch_size: Sequences of one optimiser step; may stand in ``workload`` instead.
        objective: A key of ``shapewright.plan.OBJECTIVES``: time, cost or memory.
        top: How many plans to list.
        keep: Values that searched fields may take, by field: those of ParallelLayout, micro_batch_size,
            recompute, offload_activations and offload_optimizer.
        headroom_fraction: Share of a device's memory that a plan must leave free.
        optimizer: A key of ``shapewright.memory.OPTIMIZERS``; may stand in ``workload`` instead.
        usd_per_hour: Price of one device. [USD/h]
        straggler_factor: Expected step over the predicted one.
        try_offload: Try keeping activations and optimiser states in the host's memory too.
        workload: Some fields of Workload; those that a plan chooses keep their values.
        layout: Some fields of ParallelLayout; each keeps its value.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software, such as ``nemo-2024``; by default a tuned stack of today.
        physics_only: Leave aside what was learned beyond the formulas.
        progress: Told now and then how many splits of the devices are done, of how many.

    Returns:
        The best plans, best first, the Pareto front, and how many plans went where.

    Raises:
        ShapewrightError: what is wrong with any of them, or what a model that does not fit needs, in one line.
    """
    from shapewright.plan import PlanRequest, keep_given, offload_choices, plan_job

    named = {"global_batch_size": global_batch_size, "optimizer": optimizer}
    given = {**(workload or {}), **{name: value for name, value in named.items() if value is not None}}
    kept = keep_given(keep or {}, given, layout or {})
    question = ask(
        config,
        device,
        overrides=overrides,
        workload=given,
        uncalibrated=uncalibrated,
        software=software,
        physics_only=physics_only,
    )
    cut = {name: ",".join(map(str, kept[name])) for name in ("expert_tensor_parallel",) if name in kept}
    notes = (*question.notes, *say_idle_cut(question.config, cut))
    modules = given.get("recompute_modules")
    if modules is not None and "selective" in kept.get("recompute", RECOMPUTE_MODES):
        # A plan chooses how much is computed again: the parts count wherever it tries the selective one.
        notes = tuple(line for line in notes if not line.startswith("recompute_modules="))
        notes += say_idle_modules(question.config, modules)
    request = PlanRequest(
        num_devices=num_devices,
        objective=objective,
        kept=offload_choices(kept, question.workload) if try_offload else kept,
        top=top,
        usd_per_hour=usd_per_hour,
        straggler_factor=straggler_factor,
        headroom_fraction=headroom_fraction,
    )
    return plan_job(
        question.config,
        device=question.device,
        workload=question.workload,
        request=request,
        notes=notes,
        uncalibrated=uncalibrated,
        software=software,
        progress=progress,
    )


def serve_plan(
    config: ModelLike,
    *,
    device: DeviceLike,
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
    workload: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
    physics_only: bool = False,
) -> ServingPlan:
    """Find how to serve a model: layout, batch, element format, prefill with or apart from decoding.

    Args:
        config: Preset name, config.json, its folder or what it holds, hub id, Model or TransformerConfig; a decoder.
        device: Device name, alias, file, or Device.
        prompt_len: Tokens of a prompt.
        output_len: Tokens of an answer.
        cached_len: Tokens of a prompt that the cache holds already: earlier turns, a shared prefix.
        ttft_limit_s: Longest time to the first token. [s]
        tpot_limit_s: Longest time per further token. [s]
        num_devices: Devices that there are; None for instances of up to a node.
        formats: Formats to compare with that of ``workload``, such as ``bf16:int4``; None for the usual ones.
        memory_fraction: Share of a device's memory that the server takes.
        block_tokens: Tokens of a block of the paged cache.
        speculation: num_draft_tokens, acceptance_fraction and draft_cost_fraction; None without speculative decoding.
        usd_per_hour: Price of one device, for the cost of a token; None without. [USD/h]
        workload: dtype, weight_dtype, kv_cache_dtype, attention and expert_kernel, each if not the default.
        layout: tensor_parallel, pipeline_parallel, data_parallel (replicas of the attention beside experts that are
            there once), expert_parallel and expert_tensor_parallel, each if fixed.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.
        physics_only: Leave aside what was learned beyond the formulas.

    Returns:
        Every way to serve that was priced, and what an instance of each layout and format holds; ``best()`` of it
        is the fastest way that keeps the limits.

    Raises:
        ShapewrightError: what is wrong with any of them, or what a model that does not fit needs, in one line.
    """
    from shapewright.serving import (
        ServingFormat,
        ServingRequest,
        plan_serving,
        read_format,
        usual_formats,
    )

    given: dict[str, Any] = {"ttft_limit_s": ttft_limit_s, "tpot_limit_s": tpot_limit_s, "num_devices": num_devices}
    given |= {"memory_fraction": memory_fraction, "block_tokens": block_tokens}
    request = ServingRequest(
        prompt_len=prompt_len,
        output_len=output_len,
        cached_len=cached_len,
        speculation=_read_speculation(speculation),
        usd_per_hour=usd_per_hour,
        **{name: value for name, value in given.items() if value is not None},
    )
    question = ask(
        config,
        device,
        overrides=overrides,
        workload={**(workload or {}), "phase": "prefill"},
        uncalibrated=uncalibrated,
        physics_only=physics_only,
    )
    if num_devices is not None:
        check_units(num_devices, question.device)
    asked = question.workload
    validate_lengths(question.config, replace(asked, seq_len=request.total_len))
    wanted = ServingFormat(asked.dtype, asked.weight_dtype or asked.dtype, asked.kv_cache_dtype or asked.dtype)
    if isinstance(formats, str):
        raise WorkloadError(f"formats={formats!r} must be a list of formats; give {formats.split(',')!r}")
    others = usual_formats(wanted, question.device) if formats is None else [read_format(text) for text in formats]
    notes = question.notes
    if question.config.is_moe and any(get_dtype(one.dtype).bits < 16 for one in others):
        # What has no effect on the format that was asked for has one on others beside it.
        notes = tuple(line for line in notes if not line.startswith("expert_kernel="))
    return plan_serving(
        question.config,
        device=question.device,
        workload=question.workload,
        request=request,
        formats=[wanted, *others],
        layout=layout,
        notes=(*notes, *say_idle_cut(question.config, layout or {})),
        uncalibrated=uncalibrated,
    )


def _read_speculation(given: Mapping[str, Any] | None) -> Speculation | None:
    """Speculative decoding from its three numbers."""
    from shapewright.serving import Speculation

    if not given:
        return None
    wanted = [spec.name for spec in fields(Speculation)]
    if sorted(given) != sorted(wanted):
        raise WorkloadError(f"speculation has {', '.join(map(str, given))}; give {', '.join(wanted)}, and no more")
    return Speculation(**given)
