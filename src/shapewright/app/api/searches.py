"""Functions that search: search for shapes, plan for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from shapewright.app.api.parts import ScenarioLike, ScenarioParts, given_fields, takes_scenario
from shapewright.core.errors import ConfigError, DeviceError, ShapewrightError, WorkloadError
from shapewright.core.notes import Note
from shapewright.core.ranges import whole_number
from shapewright.core.texts import with_fields
from shapewright.models.hf_config import REQUIRED_FIELDS
from shapewright.models.read import read_model
from shapewright.prediction.build import build_scenario, find_device, find_ignored_expert_split, find_ignored_modules
from shapewright.prediction.scenario import Scenario
from shapewright.workload.workload import RECOMPUTE_MODES

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.models.read import Model, ModelLike
    from shapewright.optimize.plan.result import PlanResult
    from shapewright.optimize.search.request import SearchRequest
    from shapewright.optimize.search.result import SearchResult
    from shapewright.prediction.build import DeviceLike

# Batch and context of a served model, for the cost of a generated token: a loaded server and an average conversation.
_SERVED_SEQUENCES, _SERVED_CONTEXT_TOKENS = 64, 2048


@takes_scenario
def search(
    config: ScenarioLike = None,
    *,
    devices: Sequence[DeviceLike] = (),
    num_parameters: int | None = None,
    family: str | None = None,
    tolerance_fraction: float = 0.02,
    vary: Sequence[str] = (),
    keep: Mapping[str, int] | None = None,
    objective: str | None = None,
    guard: str = "usual",
    top: int = 20,
    train_tokens: float | None = None,
    gpu_hours: float | None = None,
    target_loss_nats: float | None = None,
    serve_tokens: float | None = None,
    usd_per_hour: float | None = None,
    engine: str = "local",
    address: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    **parts: Unpack[ScenarioParts],
) -> SearchResult:
    """Find shapes of the same size that reach a loss sooner, or run faster.

    Args:
        config: Baseline: a model or a Scenario, see ScenarioLike; None for a public model of ``family`` scaled to
            ``num_parameters``.
        devices: Several devices instead of ``device``: shapes are ranked by their worst regret over them.
        num_parameters: Parameters that shapes should have; the baseline is scaled to them. None: as many as it has.
        family: Prefix of preset names, such as ``llama`` (the default) or ``gpt``.
        tolerance_fraction: Largest deviation from that size.
        vary: Fields to vary, of ``VARIED`` and ``VARIED_IN_BRANCHES`` in ``shapewright.optimize.search.request``; by
            default the usual ones.
        keep: Values that fields must have.
        objective: What to optimize, a key of ``shapewright.optimize.search.objective.OBJECTIVES``. By default
            ``time-to-loss`` where the length of the run is given (``loss-at-budget`` with gpu_hours), else the speed of
            the phase.
        guard: Quality guard: ``usual``, ``strict`` or ``free``.
        top: Number of shapes to list.
        train_tokens: Tokens that the baseline is trained on; losses are compared there. Without it, gpu_hours and
            target_loss_nats, 20 per parameter.
        gpu_hours: Device hours that the baseline is trained for, instead of tokens.
        target_loss_nats: Loss that the baseline is trained to, instead of tokens. [nat]
        serve_tokens: Tokens that the model generates in its life; the objective ``cost`` adds what they cost.
        usd_per_hour: Price of one device for an hour; required by the objective ``cost``. [USD/h]
        engine: ``local``, or ``ray`` (extra ``ray``).
        address: Address of a Ray cluster, ``auto`` for the one of this machine; None or ``local`` starts one here.
        progress: Called with the number of shapes done and the number of all shapes.
        parts: See ScenarioParts.

    Returns:
        Better shapes, the best first, with the verdict, the baseline, the Pareto front, and how many shapes were
        excluded why.

    Raises:
        ShapewrightError: an argument is invalid, or a constraint leaves no shape.
    """
    from shapewright.optimize.search.objective import Goal
    from shapewright.optimize.search.request import DEFAULT_VARIED, SearchRequest
    from shapewright.optimize.search.runners import runner_of
    from shapewright.optimize.search.search import search_shapes

    num_parameters = whole_number(num_parameters)
    request = SearchRequest(
        vary=tuple(dict.fromkeys(vary)) or DEFAULT_VARIED,
        keep=keep or {},
        num_parameters=num_parameters,
        tolerance_fraction=tolerance_fraction,
        guard=guard,
        top=top,
        goal=Goal(
            objective=objective,
            train_tokens=train_tokens,
            gpu_hours=gpu_hours,
            target_loss_nats=target_loss_nats,
            serve_tokens=serve_tokens,
            usd_per_hour=usd_per_hour,
        ),
    )
    base = config if isinstance(config, Scenario) else None
    workload, layout = parts.get("workload"), parts.get("layout")
    given_phase = _field(workload, "phase") or (base.workload.phase if base and objective is None else None)
    phase = request.goal.resolve(given_phase).phase
    device = parts.pop("device", None)
    found = _find_devices(base.device if base and device is None and not devices else device, devices)
    degree = _field(layout, "tensor_parallel") or (base.layout.tensor_parallel if base else 1)
    model = _baseline(
        base.model if base else config,  # type: ignore[arg-type]
        parts.pop("overrides", None),
        num_parameters,
        family,
        degree if isinstance(degree, int) and degree > 0 else 1,
    )
    if workload is None or isinstance(workload, Mapping):
        parts["workload"] = {**(workload or {}), "phase": phase}
    source = base.replace(model=model) if base else model
    scenarios = []
    for one in found:
        parts["device"] = one
        scenarios.append(build_scenario(source, **parts))
    first = scenarios[0]
    notes: dict[str, None] = dict.fromkeys(note for scenario in scenarios for note in scenario.notes)
    if not vary:
        request, remark = _vary_defaults(request, first)
        notes.update(dict.fromkeys(remark))
    with runner_of(engine, address) as run:
        return search_shapes(
            first,
            request,
            others=scenarios[1:],
            serving=_serving_scenario(first) if serve_tokens is not None else None,
            notes=tuple(notes),
            run=run,
            progress=progress,
        )


def _serving_scenario(trained: Scenario) -> Scenario:
    """The scenario that a trained model is served in: decoding on as few devices as hold it.

    Raises:
        ShapewrightError: no tensor parallel degree of up to a node holds it.
    """
    context_len = min(_SERVED_CONTEXT_TOKENS, max(1, trained.config.max_position_embeddings // 2))
    workload = {
        "phase": "decode",
        "micro_batch_size": _SERVED_SEQUENCES,
        "context_len": context_len,
        "dtype": trained.workload.dtype,
    }
    degree, last = 1, None
    while degree <= trained.device.node_size:
        try:
            served = build_scenario(
                trained.model, trained.device, workload=workload, layout={"tensor_parallel": degree}
            )
            if served.fits:
                return served
        except ShapewrightError as error:
            last = error
        degree *= 2
    raise last or WorkloadError(
        f"serving needs more memory than a node of {trained.device.name} has",
        advice=with_fields("omit {serve_tokens}, or give another device"),
    )


def _field(given: object, name: str) -> Any:
    """One field of a workload or layout that is given as a whole or in part; None without it."""
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


def _find_devices(device: DeviceLike | None, devices: Sequence[DeviceLike]) -> list[Device]:
    """Load the given devices, each once."""
    if device is not None and devices:
        raise DeviceError("give one device or several, not both")
    given = [device] if device is not None else [devices] if isinstance(devices, str) else devices
    found = {one.name: one for one in map(find_device, given)}
    if not found:
        raise DeviceError("no device to search for; give at least one name, 'shapewright devices' lists all")
    return list(found.values())


def _baseline(
    config: ModelLike,
    overrides: Mapping[str, object] | None,
    num_parameters: int | None,
    family: str | None,
    tensor_parallel: int,
) -> Model:
    """The model that shapes are compared with: the given one, scaled to a given size, or a public one of that size."""
    from shapewright.optimize.search.baseline import scale_model, usual_model

    given = overrides or {}
    is_scaled = family is not None or num_parameters is not None
    if config is None and (not given or (is_scaled and any(given.get(name) is None for name in REQUIRED_FIELDS))):
        if num_parameters is None:
            raise ConfigError("nothing to search: give a model, or a number of parameters, such as 3b")
        return usual_model(num_parameters, family or "llama", tensor_parallel, overrides=overrides)
    if family is not None:
        raise ConfigError("family has no effect with a model; omit one of them")
    model = read_model(config, overrides)
    return model if num_parameters is None else scale_model(model, num_parameters, tensor_parallel)


def _vary_defaults(request: SearchRequest, scenario: Scenario) -> tuple[SearchRequest, tuple[str, ...]]:
    """The request with the default fields to vary, and a note about them."""
    from shapewright.optimize.search.request import DEFAULT_VARIED_WITH_STAGES

    if not scenario.workload.is_training or scenario.layout.pipeline_parallel == 1:
        return request, ()
    request = replace(request, vary=DEFAULT_VARIED_WITH_STAGES)
    if "micro_batch" not in request.free_fields():
        return request, ()
    return request, (
        with_fields(
            "micro_batch is varied too, because it determines the pipeline bubble; {keep} micro_batch=N to fix it"
        ),
    )


@takes_scenario
def plan(
    config: ScenarioLike,
    *,
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
    progress: Callable[[int, int], None] | None = None,
    **parts: Unpack[ScenarioParts],
) -> PlanResult:
    """Find how to distribute a training job over devices.

    Layout, micro-batch, recomputation and offloading are searched. Fields of them in ``workload`` and ``layout`` keep
    their values; those of a Scenario do not, except where they are given again.

    Args:
        config: A model or a Scenario, see ScenarioLike.
        num_devices: Devices of the job: fewer than a node has, or whole nodes.
        global_batch_size: Sequences of one optimizer step, unless ``workload`` has it.
        objective: A key of ``shapewright.optimize.plan.request.OBJECTIVES``: time, cost or memory.
        top: Number of plans to list.
        keep: Values that searched fields may take, by field: those of ParallelLayout, micro_batch_size,
            recompute, offload_activations and offload_optimizer.
        headroom_fraction: Share of a device's memory that a plan must leave free.
        optimizer: A key of ``shapewright.workload.optimizers.OPTIMIZERS``, unless ``workload`` has it.
        usd_per_hour: Price of one device. [USD/h]
        straggler_factor: Expected over predicted step time.
        try_offload: Try keeping activations and optimizer states in host memory too.
        progress: Called with the number of splits done and the number of all splits.
        parts: See ScenarioParts.

    Returns:
        The best plans, best first, the Pareto front, and how many plans were excluded why.

    Raises:
        ShapewrightError: an argument is invalid, or the model fits in no plan.
    """
    from shapewright.optimize.plan.plan import plan_job
    from shapewright.optimize.plan.request import PlanRequest, combine_kept, offload_choices

    named = {"global_batch_size": global_batch_size, "optimizer": optimizer}
    layout = given_fields(parts.pop("layout", None))
    given = {
        **given_fields(parts.get("workload")),
        **{name: value for name, value in named.items() if value is not None},
    }
    kept = combine_kept(keep or {}, given, layout)
    parts["workload"] = given
    scenario = build_scenario(config, **parts)
    cut = {name: ",".join(map(str, kept[name])) for name in ("expert_tensor_parallel",) if name in kept}
    notes = (*scenario.notes, *find_ignored_expert_split(scenario.config, cut))
    modules = given.get("recompute_modules")
    if modules is not None and "selective" in kept.get("recompute", RECOMPUTE_MODES):
        # Plans choose the recomputation: the modules matter wherever a plan tries the selective mode.
        notes = tuple(note for note in notes if note.field != "recompute_modules")
        notes += find_ignored_modules(scenario.config, modules)
    request = PlanRequest(
        num_devices=num_devices,
        objective=objective,
        kept=offload_choices(kept, scenario.workload) if try_offload else kept,
        top=top,
        usd_per_hour=usd_per_hour,
        straggler_factor=straggler_factor,
        headroom_fraction=headroom_fraction,
    )
    return plan_job(scenario, request, notes=(*notes, *_note_on_shape(scenario)), progress=progress)


def _note_on_shape(scenario: Scenario) -> tuple[Note, ...]:
    """Point to check where a plan cannot make up for the shape: dimensions that are not aligned."""
    from shapewright.lint.rules import alignment, heads

    rules = (
        alignment.vocab_not_aligned,
        alignment.hidden_size_not_aligned,
        heads.head_dim_not_aligned,
        alignment.mlp_width_not_aligned,
        alignment.swiglu_width_not_aligned,
        alignment.adapter_rank_not_aligned,
    )
    odd = [violation for check in rules for violation in check(scenario)]
    if not odd:
        return ()
    named = ", ".join(f"{violation.field.rpartition('.')[2]}={violation.actual}" for violation in odd)
    text = f"the shape has dimensions that are not aligned ({named}): check says what they cost"
    return (Note(text, "shape"),)
