"""The Python face: the same verbs as the command line, taking names as well as objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from shapewright.errors import CalibrationError, ConfigError, DeviceError, ShapewrightError, WorkloadError
from shapewright.question import ask

if TYPE_CHECKING:
    from shapewright.capacity import Capacity
    from shapewright.compare import Comparison
    from shapewright.config import Model, TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.lint import CheckReport
    from shapewright.plan import PlanResult
    from shapewright.predict import Prediction
    from shapewright.search import SearchResult
    from shapewright.serving import ServingPlan
    from shapewright.sweep import Sweep
    from shapewright.utilization import Utilization
    from shapewright.workload import Workload


def predict(
    config: str | PathLike[str] | Model | TransformerConfig | None,
    *,
    device: str | PathLike[str] | Device,
    workload: Workload | Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
    software: str = "tuned",
    physics_only: bool = False,
) -> Prediction:
    """Predict the time, throughput and memory of one step.

    Args:
        config: Preset name, config.json or its folder, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        workload: Workload, or some of its fields.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software, such as ``fsdp-2024``; by default a tuned stack of today.
        physics_only: Leave aside what was learned beyond the formulas.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line.
    """
    question = ask(config, device, overrides=overrides, workload=workload, layout=layout)
    return question.predict(uncalibrated=uncalibrated, physics_only=physics_only, software=software)


def check(
    config: str | PathLike[str] | Model | TransformerConfig | None,
    *,
    device: str | PathLike[str] | Device,
    workload: Workload | Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    ignore: Sequence[str] = (),
    uncalibrated: bool = False,
) -> CheckReport:
    """Lint a model's shape against a device: findings with their predicted cost, and nearest better shapes.

    Args:
        config: Preset name, config.json or its folder, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        workload: Workload, or some of its fields.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        ignore: Rule codes or names to leave out; the report says how many findings that suppressed.
        uncalibrated: Price as if nobody had measured the device.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line.
    """
    from shapewright.lint import check_model

    question = ask(config, device, overrides=overrides, workload=workload, layout=layout)
    return check_model(
        question.config,
        device=question.device,
        workload=question.workload,
        layout=question.layout,
        ignore=ignore,
        uncalibrated=uncalibrated,
    )


def mfu(
    config: str | PathLike[str] | Model | TransformerConfig | None,
    *,
    device: str | PathLike[str] | Device,
    seconds: float,
    num_devices: int,
    global_batch_size: int,
    workload: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    convention: str = "megatron",
    uncalibrated: bool = False,
) -> Utilization:
    """Say what a measured training step means: MFU and HFU by every convention, and where the rest went.

    Args:
        config: Preset name, config.json or its folder, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        seconds: Measured time of one optimiser step. [s]
        num_devices: Devices of the whole job.
        global_batch_size: Sequences of the step over all replicas.
        workload: Some fields of Workload, such as seq_len and recompute.
        layout: Some fields of ParallelLayout; without degrees the fastest plain layout that fits is assumed.
        overrides: TransformerConfig fields to change on top of ``config``.
        convention: FLOP convention of the headline, a key of ``shapewright.lowering.conventions.CONVENTIONS``.
        uncalibrated: Price as if nobody had measured the device.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line.
    """
    from shapewright.assumed_layout import assume_layout
    from shapewright.utilization import check_measurement, explain_utilization

    fields = {**(workload or {}), "global_batch_size": global_batch_size}
    question = ask(config, device, overrides=overrides, workload=fields)
    check_measurement(question.workload, seconds, num_devices)
    job = assume_layout(
        question.config,
        question.device,
        question.workload,
        num_devices,
        layout or {},
        keep_micro_batch=fields.get("micro_batch_size") is not None,
    )
    return explain_utilization(
        question.config,
        device=question.device,
        workload=job.workload,
        seconds=seconds,
        num_devices=num_devices,
        layout=job.layout,
        convention=convention,
        notes=(*question.notes, *job.notes),
        uncalibrated=uncalibrated,
    )


def fits(
    config: str | PathLike[str] | Model | TransformerConfig | None,
    *,
    device: str | PathLike[str] | Device,
    workload: Workload | Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    optimizer: str | None = None,
    uncalibrated: bool = False,
) -> Capacity:
    """Say whether a job fits in memory, what is the largest that does, and what to change if it does not.

    Args:
        config: Preset name, config.json or its folder, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        workload: Workload, or some of its fields.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        optimizer: A key of ``shapewright.memory.OPTIMIZERS``, instead of the workload's.
        uncalibrated: Price remedies as if nobody had measured the device.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line.
    """
    from shapewright.capacity import estimate_capacity

    question = ask(config, device, overrides=overrides, workload=workload, layout=layout)
    return estimate_capacity(
        question.config,
        device=question.device,
        workload=question.workload,
        layout=question.layout,
        optimizer=optimizer,
        notes=question.notes,
        uncalibrated=uncalibrated,
    )


def compare(
    config: str | PathLike[str] | Model | TransformerConfig | None,
    *,
    devices: Sequence[str | PathLike[str] | Device],
    usd_per_hour: Mapping[str, float] | None = None,
    workload: Workload | Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
) -> Comparison:
    """Predict the same job on several devices.

    Args:
        config: Preset name, config.json or its folder, hub id, Model or TransformerConfig.
        devices: Device names, aliases, files, or Devices; each is taken once.
        usd_per_hour: Price of one device by its name. [USD/h]
        workload: Workload, or some of its fields; what is left out is completed for each device.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the devices.

    Returns:
        A row for each device; one that cannot run the job has the reason in its row.

    Raises:
        ShapewrightError: a name is not known, or the job makes no sense on any device.
    """
    from shapewright.compare import compare_outcomes
    from shapewright.config import Model, TransformerConfig, read_model
    from shapewright.hardware import Device, load_device

    model = config if isinstance(config, Model | TransformerConfig) else read_model(config, overrides)
    found = [device if isinstance(device, Device) else load_device(str(device)) for device in devices]
    if not found:
        raise DeviceError("no device to compare; give at least one name, 'shapewright devices' lists all")
    notes: dict[str, None] = {}
    outcomes: list[tuple[Device, Prediction | ShapewrightError]] = []
    for device in {device.name: device for device in found}.values():
        try:
            question = ask(model, device, workload=workload, layout=layout)
            outcomes.append((device, question.predict(uncalibrated=uncalibrated)))
            notes.update(dict.fromkeys(question.notes))
        except ShapewrightError as error:
            outcomes.append((device, error))
    refusals = [outcome for _, outcome in outcomes if isinstance(outcome, ShapewrightError)]
    is_alike = len(refusals) == len(outcomes) and len({str(refusal) for refusal in refusals}) == 1
    if is_alike and not isinstance(refusals[0], DeviceError | CalibrationError):
        raise refusals[0]  # no device's fault
    names = {device.name for device in found}  # among them what is described by its measurements alone
    prices = {name if name in names else load_device(name).name: usd for name, usd in (usd_per_hour or {}).items()}
    return compare_outcomes(outcomes, prices, tuple(notes))


def search(
    config: str | PathLike[str] | Model | TransformerConfig | None = None,
    *,
    device: str | PathLike[str] | Device | None = None,
    devices: Sequence[str | PathLike[str] | Device] = (),
    num_parameters: int | None = None,
    family: str | None = None,
    tolerance_fraction: float = 0.02,
    vary: Sequence[str] = (),
    keep: Mapping[str, int] | None = None,
    objective: str | None = None,
    guard: str = "usual",
    top: int = 20,
    train_tokens: int | None = None,
    usd_per_hour: float | None = None,
    engine: str = "local",
    address: str | None = None,
    workload: Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Find shapes of the same size that run faster.

    Args:
        config: Baseline: preset name, config.json or its folder, hub id, Model or TransformerConfig; None for a public
            model of ``family`` scaled to ``num_parameters``.
        device: Device name, alias, file, or Device.
        devices: Several of them, instead: shapes are ranked by their worst regret over them.
        num_parameters: Parameters that shapes should have; the baseline is scaled to them. None: as many as it has.
        family: Beginning of preset names, such as ``llama`` (the default) or ``gpt``.
        tolerance_fraction: How far from that size shapes may be.
        vary: Fields to vary, of ``shapewright.search.VARIED`` and ``VARIED_IN_BRANCHES``; empty for the default ones.
        keep: Values that fields must have.
        objective: What is to be fast, a key of ``shapewright.search.OBJECTIVES``; by default what the phase says.
        guard: Quality guard: ``usual``, ``strict`` or ``free``.
        top: How many shapes to list.
        train_tokens: Tokens of the training run whose savings are told.
        usd_per_hour: Price of one device for an hour; the objective ``cost`` needs it. [USD/h]
        engine: ``local``, or ``ray`` (extra ``ray``).
        address: Address of a Ray cluster, ``auto`` for the one of this machine; None or ``local`` starts one here.
        workload: Some fields of Workload.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.
        progress: Told now and then how many shapes of how many are done.

    Raises:
        ShapewrightError: what is wrong with any of them, or which constraint leaves no shape, in one line.
    """
    from dataclasses import replace

    from shapewright.config import Model, TransformerConfig, read_model
    from shapewright.hardware import Device, load_device
    from shapewright.horizon import Horizon, check_price
    from shapewright.search import (
        DEFAULT_VARIED,
        DEFAULT_VARIED_WITH_STAGES,
        SearchRequest,
        phase_of,
        scale_model,
        search_shapes,
        usual_model,
    )
    from shapewright.search.engine import runner_of

    request = SearchRequest(
        vary=tuple(dict.fromkeys(vary)) or DEFAULT_VARIED,
        keep=keep or {},
        num_parameters=num_parameters,
        tolerance_fraction=tolerance_fraction,
        guard=guard,
        top=top,
    )
    phase = phase_of(objective, (workload or {}).get("phase"))
    check_price(usd_per_hour)
    if objective == "cost" and usd_per_hour is None:
        raise WorkloadError("--objective cost needs the price of a device: give --usd-per-hour, such as 2.5")
    if train_tokens is not None and phase != "train":
        raise WorkloadError(f"--train-tokens has no meaning in {phase}; leave it out, or use --phase train")
    asked = [device] if device is not None else list(devices)
    if device is not None and devices:
        raise DeviceError("give one device or several, not both")
    found = {one.name: one for one in (each if isinstance(each, Device) else load_device(str(each)) for each in asked)}
    if not found:
        raise DeviceError("no device to search for; give at least one name, 'shapewright devices' lists all")
    if len(found) > 1 and (objective == "cost" or usd_per_hour is not None):
        raise WorkloadError("a price belongs to one device; give --device, or ask 'shapewright compare' for several")
    if config is None and not overrides:
        if num_parameters is None:
            raise ConfigError("nothing to search: give a model, or a number of parameters such as --params 3b")
        model = usual_model(num_parameters, family or "llama")
    else:
        if family is not None:
            raise ConfigError("--family has no effect beside a model; leave it out, or leave the model out")
        if isinstance(config, TransformerConfig):
            config = Model(config=config, raw=None, source="TransformerConfig")
        model = config if isinstance(config, Model) else read_model(config, overrides)
        model = model if num_parameters is None else scale_model(model, num_parameters)
    questions = [
        ask(model, one, workload={**(workload or {}), "phase": phase}, layout=layout) for one in found.values()
    ]
    first = questions[0]
    notes = dict.fromkeys(note for question in questions for note in question.notes)
    if not vary and first.workload.is_training and first.layout.pipeline_parallel > 1:
        request = replace(request, vary=DEFAULT_VARIED_WITH_STAGES)
        if "micro_batch" in request.free_fields():
            notes["micro_batch is varied too: it decides how long stages wait; --keep micro_batch=N holds it"] = None
    with runner_of(engine, address) as run:
        result = search_shapes(
            first.model,
            first.device,
            first.workload,
            first.layout,
            request,
            others=[(question.device, question.workload) for question in questions[1:]],
            per_step=phase == "decode",
            notes=tuple(notes),
            uncalibrated=uncalibrated,
            run=run,
            progress=progress,
        )
    if train_tokens is None and usd_per_hour is not None:
        train_tokens = 10**9  # what a price is told for where nobody says how long the run is
    if train_tokens is None or phase != "train":
        return result
    return replace(result, horizon=Horizon(train_tokens=train_tokens, usd_per_hour=usd_per_hour))


def plan(
    config: str | PathLike[str] | Model | TransformerConfig | None,
    *,
    device: str | PathLike[str] | Device,
    num_devices: int,
    global_batch_size: int | None = None,
    objective: str = "time",
    top: int = 10,
    keep: Mapping[str, Sequence[Any]] | None = None,
    headroom_fraction: float = 0.0,
    optimizer: str = "adamw",
    usd_per_hour: float | None = None,
    straggler_factor: float = 1.0,
    workload: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
    software: str = "tuned",
    progress: Callable[[int, int], None] | None = None,
) -> PlanResult:
    """Find how to spread a training job over devices.

    Args:
        config: Preset name, config.json or its folder, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        num_devices: Devices of the job: fewer than a node has, or whole nodes.
        global_batch_size: Sequences of one optimiser step; may stand in ``workload`` instead.
        objective: A key of ``shapewright.plan.OBJECTIVES``: time, cost or memory.
        top: How many plans to list.
        keep: Values that searched fields may take, by field: those of ParallelLayout, micro_batch_size and recompute.
        headroom_fraction: Share of a device's memory that a plan must leave free.
        optimizer: A key of ``shapewright.memory.OPTIMIZERS``; counts for memory alone.
        usd_per_hour: Price of one device. [USD/h]
        straggler_factor: Expected step over the predicted one.
        workload: Some fields of Workload; micro_batch_size and recompute keep those values.
        layout: Some fields of ParallelLayout; each keeps its value.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software, such as ``nemo-2024``; by default a tuned stack of today.
        progress: Told now and then how many splits of the devices are done, of how many.

    Raises:
        ShapewrightError: what is wrong with any of them, or what a model that does not fit needs, in one line.
    """
    from shapewright.plan import PlanRequest, keep_given, plan_job

    fields = {**(workload or {}), **({} if global_batch_size is None else {"global_batch_size": global_batch_size})}
    request = PlanRequest(
        num_devices=num_devices,
        objective=objective,
        kept=keep_given(keep or {}, fields, layout or {}),
        top=top,
        usd_per_hour=usd_per_hour,
        straggler_factor=straggler_factor,
        headroom_fraction=headroom_fraction,
    )
    question = ask(config, device, overrides=overrides, workload=fields)
    return plan_job(
        question.config,
        device=question.device,
        workload=question.workload,
        request=request,
        optimizer=optimizer,
        notes=question.notes,
        uncalibrated=uncalibrated,
        software=software,
        progress=progress,
    )


def serve_plan(
    config: str | PathLike[str] | Model | TransformerConfig | None,
    *,
    device: str | PathLike[str] | Device,
    prompt_len: int,
    output_len: int,
    ttft_limit_s: float | None = None,
    tpot_limit_s: float | None = None,
    num_devices: int | None = None,
    formats: Sequence[str] | None = None,
    memory_fraction: float | None = None,
    block_tokens: int | None = None,
    speculation: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
) -> ServingPlan:
    """Find how to serve a model: layout, batch, element format, prefill with or apart from decoding.

    Args:
        config: Preset name, config.json or its folder, hub id, Model or TransformerConfig; a decoder.
        device: Device name, alias, file, or Device.
        prompt_len: Tokens of a prompt.
        output_len: Tokens of an answer.
        ttft_limit_s: Longest time to the first token. [s]
        tpot_limit_s: Longest time per further token. [s]
        num_devices: Devices that there are; None for instances of up to a node.
        formats: Formats to compare with that of ``workload``, such as ``bf16:int4``; None for the usual ones.
        memory_fraction: Share of a device's memory that the server takes.
        block_tokens: Tokens of a block of the paged cache.
        speculation: num_draft_tokens, acceptance_fraction and draft_cost_fraction; None without speculative decoding.
        workload: dtype, weight_dtype, kv_cache_dtype and attention, each if not the default.
        layout: tensor_parallel, pipeline_parallel and expert_parallel, each if fixed.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.

    Raises:
        ShapewrightError: what is wrong with any of them, or what a model that does not fit needs, in one line.
    """
    from shapewright.serving import (
        ServingFormat,
        ServingRequest,
        Speculation,
        plan_serving,
        read_format,
        usual_formats,
    )

    given = {"ttft_limit_s": ttft_limit_s, "tpot_limit_s": tpot_limit_s, "num_devices": num_devices}
    given |= {"memory_fraction": memory_fraction, "block_tokens": block_tokens}
    request = ServingRequest(
        prompt_len=prompt_len,
        output_len=output_len,
        speculation=Speculation(**speculation) if speculation else None,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )
    question = ask(config, device, overrides=overrides, workload={**(workload or {}), "phase": "prefill"})
    asked = question.workload
    wanted = ServingFormat(asked.dtype, asked.weight_dtype or asked.dtype, asked.kv_cache_dtype or asked.dtype)
    others = usual_formats(wanted, question.device) if formats is None else [read_format(text) for text in formats]
    return plan_serving(
        question.config,
        device=question.device,
        workload=question.workload,
        request=request,
        formats=[wanted, *others],
        layout=layout,
        notes=question.notes,
        uncalibrated=uncalibrated,
    )


def sweep(
    config: str | PathLike[str] | Model | TransformerConfig | None,
    *,
    device: str | PathLike[str] | Device,
    axes: Mapping[str, Sequence[Any]],
    workload: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
) -> Sweep:
    """Predict a step for every combination of some fields' values.

    Args:
        config: Preset name, config.json or its folder, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        axes: Values by field name of Workload or ParallelLayout, such as ``{"micro_batch_size": [1, 2, 4]}``.
        workload: Some fields of Workload.
        layout: Some fields of ParallelLayout.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line; a combination that cannot run has its reason in
            its row, unless none can.
    """
    from shapewright.sweep import predict_sweep

    question = ask(config, device, overrides=overrides, workload=workload, layout=layout)
    return predict_sweep(
        question.config,
        device=question.device,
        workload=question.workload,
        layout=question.layout,
        axes=axes,
        notes=question.notes,
        uncalibrated=uncalibrated,
    )
