"""Which shape: what is wrong with one, and which of the same size run faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.errors import ConfigError, DeviceError, WorkloadError
from shapewright.perf.software import TUNED
from shapewright.question import ask, find_device, find_model

if TYPE_CHECKING:
    from shapewright.config import Model
    from shapewright.hardware import Device
    from shapewright.horizon import Horizon
    from shapewright.layout import ParallelLayout
    from shapewright.lint import CheckReport
    from shapewright.question import DeviceLike, ModelLike, Question
    from shapewright.search import SearchRequest, SearchResult
    from shapewright.workload import Workload

_PRICED_TOKENS = 10**9
"""Length of the run that a price is told for where nobody says how long it is."""


def check(
    config: ModelLike,
    *,
    device: DeviceLike,
    workload: Workload | Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    ignore: Sequence[str] = (),
    uncalibrated: bool = False,
    software: str = TUNED,
    physics_only: bool = False,
) -> CheckReport:
    """Lint a model's shape against a device: findings with their predicted cost, and nearest better shapes.

    Args:
        config: Preset name, config.json, its folder or what it holds, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        workload: Workload, or some of its fields.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        ignore: Rule codes or names to leave out; the report says how many findings that suppressed.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software, such as ``fsdp-2024``; by default a tuned stack of today.
        physics_only: Leave aside what was learned beyond the formulas.

    Returns:
        Findings, first what cannot run and then by cost, beside the prediction; that is None where a finding
        says why.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line.
    """
    from shapewright.lint import check_model

    question = ask(
        config,
        device,
        overrides=overrides,
        workload=workload,
        layout=layout,
        uncalibrated=uncalibrated,
        software=software,
        physics_only=physics_only,
    )
    return check_model(question.config, **question.terms, ignore=ignore)


def search(
    config: ModelLike = None,
    *,
    device: DeviceLike | None = None,
    devices: Sequence[DeviceLike] = (),
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
    software: str = TUNED,
    physics_only: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Find shapes of the same size that run faster.

    Args:
        config: Baseline: preset name, config.json, its folder or what it holds, hub id, Model or TransformerConfig;
            None for a public model of ``family`` scaled to ``num_parameters``.
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
        software: Generation of the training software, such as ``fsdp-2024``; by default a tuned stack of today.
        physics_only: Leave aside what was learned beyond the formulas.
        progress: Told now and then how many shapes of how many are done.

    Returns:
        Faster shapes, the fastest first, beside the baseline, the Pareto front, and what became of the other
        shapes.

    Raises:
        ShapewrightError: what is wrong with any of them, or which constraint leaves no shape, in one line.
    """
    from dataclasses import replace

    from shapewright.search import SearchRequest, phase_of, search_shapes
    from shapewright.search.request import DEFAULT_VARIED
    from shapewright.search.runners import runner_of

    request = SearchRequest(
        vary=tuple(dict.fromkeys(vary)) or DEFAULT_VARIED,
        keep=keep or {},
        num_parameters=num_parameters,
        tolerance_fraction=tolerance_fraction,
        guard=guard,
        top=top,
    )
    phase = phase_of(objective, (workload or {}).get("phase"))
    found = _find_devices(device, devices)
    horizon = _horizon(phase, objective, train_tokens, usd_per_hour, num_devices=len(found))
    model = _baseline(config, overrides, num_parameters, family, _tensor_degree(layout))
    questions = [
        ask(
            model,
            one,
            workload={**(workload or {}), "phase": phase},
            layout=layout,
            uncalibrated=uncalibrated,
            software=software,
            physics_only=physics_only,
        )
        for one in found
    ]
    first = questions[0]
    notes = dict.fromkeys(note for question in questions for note in question.notes)
    if not vary:
        request, remark = _vary_as_usual(request, first)
        notes.update(dict.fromkeys(remark))
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
            software=software,
            run=run,
            progress=progress,
        )
    return replace(result, horizon=horizon)


def _find_devices(device: DeviceLike | None, devices: Sequence[DeviceLike]) -> list[Device]:
    """The devices that are meant, each once."""
    if device is not None and devices:
        raise DeviceError("give one device or several, not both")
    asked = [device] if device is not None else [devices] if isinstance(devices, str) else devices
    found = {one.name: one for one in map(find_device, asked)}
    if not found:
        raise DeviceError("no device to search for; give at least one name, 'shapewright devices' lists all")
    return list(found.values())


def _horizon(
    phase: str, objective: str | None, train_tokens: int | None, usd_per_hour: float | None, *, num_devices: int
) -> Horizon | None:
    """The training run that savings are told for; None where none is meant."""
    from shapewright.horizon import Horizon, check_price

    check_price(usd_per_hour)
    if objective == "cost" and usd_per_hour is None:
        raise WorkloadError("--objective cost needs the price of a device: give --usd-per-hour, such as 2.5")
    if train_tokens is not None and phase != "train":
        raise WorkloadError(f"--train-tokens has no meaning in {phase}; leave it out, or use --phase train")
    if num_devices > 1 and (objective == "cost" or usd_per_hour is not None):
        raise WorkloadError(
            "over several devices shapes are ranked by regret, a ratio in which a price cancels; leave --objective "
            "cost and --usd-per-hour out, give one --device, or ask 'shapewright compare'"
        )
    if phase != "train" or (train_tokens is None and usd_per_hour is None):
        return None
    return Horizon(train_tokens=_PRICED_TOKENS if train_tokens is None else train_tokens, usd_per_hour=usd_per_hour)


def _baseline(
    config: ModelLike,
    overrides: Mapping[str, object] | None,
    num_parameters: int | None,
    family: str | None,
    tensor_parallel: int,
) -> Model:
    """The model that shapes are held against: the one given, scaled where a size is, or a usual one of that size."""
    from shapewright.search import scale_model, usual_model

    if config is None and not overrides:
        if num_parameters is None:
            raise ConfigError("nothing to search: give a model, or a number of parameters such as --params 3b")
        return usual_model(num_parameters, family or "llama", tensor_parallel)
    if family is not None:
        raise ConfigError("--family has no effect beside a model; leave it out, or leave the model out")
    model = find_model(config, overrides)
    return model if num_parameters is None else scale_model(model, num_parameters, tensor_parallel)


def _tensor_degree(layout: ParallelLayout | Mapping[str, Any] | None) -> int:
    """The tensor degree of a layout before it is checked; 1 where it says none that makes sense."""
    given = (
        (layout or {}).get("tensor_parallel")
        if isinstance(layout, Mapping) or layout is None
        else layout.tensor_parallel
    )
    return given if isinstance(given, int) and given > 0 else 1


def _vary_as_usual(request: SearchRequest, question: Question) -> tuple[SearchRequest, tuple[str, ...]]:
    """What a search varies that was not told what to, and what there is to say about it."""
    from dataclasses import replace

    from shapewright.search.request import DEFAULT_VARIED_WITH_STAGES

    if not question.workload.is_training or question.layout.pipeline_parallel == 1:
        return request, ()
    request = replace(request, vary=DEFAULT_VARIED_WITH_STAGES)
    if "micro_batch" not in request.free_fields():
        return request, ()
    return request, ("micro_batch is varied too: it decides how long stages wait; --keep micro_batch=N holds it",)
