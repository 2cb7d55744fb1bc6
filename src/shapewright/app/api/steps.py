"""Functions about one step or run: predict, check, fits, mfu, sweep, compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack, overload

from shapewright.app.api.parts import ScenarioLike, ScenarioParts, given_fields, takes_scenario
from shapewright.core.errors import (
    CalibrationError,
    DeviceError,
    LayoutError,
    ShapewrightError,
    WorkloadError,
    short_repr,
)
from shapewright.core.texts import FieldName, joined, with_fields
from shapewright.lowering.torch_trace.trace import Trace
from shapewright.models.read import read_model
from shapewright.prediction.build import DeviceLike, build_scenario, find_device, plain_value
from shapewright.prediction.scenario import Scenario
from shapewright.prediction.traced import predict_trace
from shapewright.pricing.software import TUNED, load_software
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lint.check import CheckReport
    from shapewright.lint.traced import TracedCheck
    from shapewright.prediction.capacity.fit import Capacity
    from shapewright.prediction.compare import Comparison
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.sweep import Sweep
    from shapewright.prediction.traced import TracedPrediction
    from shapewright.prediction.utilization.explain import Utilization


@overload
def predict(config: Trace, **parts: Unpack[ScenarioParts]) -> TracedPrediction: ...
@overload
def predict(config: ScenarioLike, **parts: Unpack[ScenarioParts]) -> Prediction: ...
@takes_scenario
def predict(config: ScenarioLike | Trace, **parts: Unpack[ScenarioParts]) -> Prediction | TracedPrediction:
    """Predict the time, throughput and memory of one step.

    Args:
        config: A model or a Scenario, see ScenarioLike; or a Trace, of whose workload only ``optimizer`` can be given.
        parts: See ScenarioParts.

    Returns:
        The step: its time with a 90 % interval, throughput, memory, and every operation with its price.

    Raises:
        ShapewrightError: an argument is invalid, or the arguments contradict each other.
    """
    if isinstance(config, Trace):
        return predict_trace(config, **_parts_of_trace(parts))
    return build_scenario(config, **parts).predict()


@overload
def check(config: Trace, *, ignore: Sequence[str] = (), **parts: Unpack[ScenarioParts]) -> TracedCheck: ...
@overload
def check(
    config: ScenarioLike,
    *,
    ignore: Sequence[str] = (),
    train_tokens: float | None = None,
    **parts: Unpack[ScenarioParts],
) -> CheckReport: ...
@takes_scenario
def check(
    config: ScenarioLike | Trace,
    *,
    ignore: Sequence[str] = (),
    train_tokens: float | None = None,
    **parts: Unpack[ScenarioParts],
) -> CheckReport | TracedCheck:
    """Check the shape of a model on a device: findings with their predicted cost, and nearest better shapes.

    Args:
        config: A model or a Scenario, see ScenarioLike; or a Trace, whose findings name linear layers by module path.
        ignore: Rules to suppress, by code or name; the report counts the suppressed findings.
        train_tokens: Tokens of the training run, after which losses of better shapes are compared; default: 20 per
            parameter. Not for a Trace.
        parts: See ScenarioParts.

    Returns:
        Findings, first those that prevent the step from running and then by cost, and the prediction; that is None
        where the step cannot run.

    Raises:
        ShapewrightError: an argument is invalid, or the arguments contradict each other.
    """
    from shapewright.lint.check import check_scenario
    from shapewright.lint.traced import check_trace

    if isinstance(config, Trace):
        return check_trace(config, ignore=ignore, **_parts_of_trace(parts))
    return check_scenario(build_scenario(config, **parts), ignore=ignore, train_tokens=train_tokens)


def trace(
    module: Any,
    inputs: str | Mapping[str, Any] | Sequence[Any],
    *,
    phase: str = "train",
    dtype: str | None = None,
    fused: bool = False,
    values: Mapping[str, int] | None = None,
) -> Trace:
    """Trace a PyTorch module: run it on the meta device, and list its operations, linear layers and memory.

    Nothing is computed and the module is not changed; its parameters may have memory. ``predict`` and ``check`` take
    the result in place of a model.

    Args:
        module: A torch.nn.Module.
        inputs: Inputs as text, such as ``tokens=int64[4,2048]``, or tensors and numbers by name or in order.
        phase: ``train`` for forward and backward pass, ``prefill`` for the forward pass alone.
        dtype: Element format to convert floating parameters and inputs to; None leaves them as they are.
        fused: Whether chains of pointwise operations are merged as torch.compile merges them.
        values: Values that the control flow depends on, by line: ``{"model.py:33": 512}``.

    Raises:
        MissingExtraError: PyTorch is not installed.
        TraceError: the module cannot run on the meta device, or the inputs do not fit it.
    """
    from shapewright.lowering.torch_trace.run import trace_module

    return trace_module(module, inputs, phase=phase, dtype=dtype, fused=fused, values=values)


def _parts_of_trace(parts: ScenarioParts) -> dict[str, Any]:
    """Device and optimizer of a traced step; other parts have no effect on a trace."""
    given = given_fields(parts.get("workload"))
    idle = [name for name in ("layout", "overrides", "software") if parts.get(name)]
    idle += [name for name in given if name != "optimizer"]
    if idle:
        raise WorkloadError(
            joined(map(FieldName, idle), ", ") + " cannot be given with a trace, which is of one run on one device"
        )
    device = parts.get("device")
    if device is None:
        raise DeviceError("no device given; 'shapewright devices' lists all")
    found = find_device(
        device, uncalibrated=parts.get("uncalibrated", False), physics_only=parts.get("physics_only", False)
    )
    return {"device": found, "optimizer": given.get("optimizer")}


@takes_scenario
def sweep(config: ScenarioLike, *, axes: Mapping[str, Sequence[Any]], **parts: Unpack[ScenarioParts]) -> Sweep:
    """Predict a step for every combination of values of some fields.

    Args:
        config: A model or a Scenario, see ScenarioLike.
        axes: Values by field of Workload or ParallelLayout, or of a size of the model, such as
            ``{"micro_batch_size": [1, 2, 4]}`` or ``{"hidden_size": [4096, 4097]}``.
        parts: See ScenarioParts.

    Returns:
        A row for each combination, the last field fastest; a row that cannot run has the reason.

    Raises:
        ShapewrightError: an argument is invalid, or no combination can run.
    """
    from shapewright.prediction.sweep import predict_sweep

    return predict_sweep(build_scenario(config, **parts), {name: _axis(name, axes[name]) for name in axes})


def _axis(name: str, given: Iterable[Any]) -> list[Any]:
    """Values of an axis, of which no more are made than a sweep may have.

    Raises:
        WorkloadError: there are more, or they are no list.
    """
    from shapewright.prediction.sweep import MOST_ROWS

    if isinstance(given, str) or not isinstance(given, Iterable):
        raise WorkloadError(f"{name}={short_repr(given)} must be a list of values to sweep", field=name)
    values = [plain_value(value) for value in islice(given, MOST_ROWS + 1)]
    if len(values) > MOST_ROWS:
        words = with_fields("{name} has", name=FieldName(name)) + f" more than {MOST_ROWS} values; give fewer"
        raise WorkloadError(words, field=name)
    return values


@takes_scenario
def fits(config: ScenarioLike, *, optimizer: str | None = None, **parts: Unpack[ScenarioParts]) -> Capacity:
    """Estimate whether a job fits in memory, the largest one that does, and what to change if it does not.

    Args:
        config: A model or a Scenario, see ScenarioLike.
        optimizer: A key of ``shapewright.workload.optimizers.OPTIMIZERS``, instead of that of the workload.
        parts: See ScenarioParts.

    Returns:
        Memory of each pipeline stage against the device, the largest micro-batch and sequence that fit, and changes
        that make the job fit where it does not.

    Raises:
        ShapewrightError: an argument is invalid, or the arguments contradict each other.
    """
    from shapewright.prediction.capacity.fit import estimate_capacity

    return estimate_capacity(build_scenario(config, **parts), optimizer=optimizer)


@takes_scenario
def mfu(
    config: ScenarioLike,
    *,
    seconds: float | None = None,
    tokens_per_s: float | None = None,
    tokens_per_s_per_device: float | None = None,
    steps_per_s: float | None = None,
    images_per_s: float | None = None,
    num_devices: int | None = None,
    global_batch_size: int | None = None,
    convention: str = "megatron",
    trace: str | PathLike[str] | None = None,
    **parts: Unpack[ScenarioParts],
) -> Utilization:
    """Compute MFU and HFU of a measured training step by every convention, and attribute the rest of the peak.

    Exactly one of ``seconds``, ``tokens_per_s``, ``tokens_per_s_per_device``, ``steps_per_s`` and ``images_per_s`` is
    required. Without parallel degrees in the layout, the fastest plain layout that fits is assumed. A trace of
    torch.profiler states what is not given: time, devices, micro-batch, sequence length and batch of a step; the result
    then says where the step loses.

    Args:
        config: A model or a Scenario, see ScenarioLike.
        seconds: Measured time of one optimizer step. [s]
        tokens_per_s: Measured tokens per second of the whole job. [token/s]
        tokens_per_s_per_device: The same, divided by the devices. [token/s]
        steps_per_s: Measured optimizer steps per second. [1/s]
        images_per_s: Measured images per second of the whole job. [image/s]
        num_devices: Devices of the whole job; required without a trace.
        global_batch_size: Sequences of the step over all replicas; required without a trace.
        trace: File of torch.profiler (``export_chrome_trace``), plain or gzip, of one rank.
        convention: FLOP convention of the headline, a key of ``shapewright.models.flop_conventions.CONVENTIONS``.
        parts: See ScenarioParts.

    Returns:
        Utilization by every convention, and a waterfall of parts that add up to the measured time where a layout is
        known.

    Raises:
        ShapewrightError: an argument is invalid, or the arguments contradict each other.
    """
    from shapewright.prediction.assumed_layout import assume_layout
    from shapewright.prediction.utilization.explain import explain_utilization
    from shapewright.prediction.utilization.kineto import read_trace
    from shapewright.prediction.utilization.rates import read_measurement
    from shapewright.workload.images import count_images

    rates = {"tokens_per_s": tokens_per_s, "tokens_per_s_per_device": tokens_per_s_per_device}
    rates |= {"seconds": seconds, "steps_per_s": steps_per_s, "images_per_s": images_per_s}
    measured = {name: plain_value(value) for name, value in rates.items()}
    profile = None if trace is None else read_trace(trace)
    layout = _given_layout(config, parts.pop("layout", None))
    own = given_fields(parts.get("workload"))
    if profile is not None:
        if profile.batch is not None:
            own = dict(zip(("micro_batch_size", "seq_len"), profile.batch, strict=True)) | own
        num_devices = num_devices or profile.world_size or 1
        degrees = [layout.get(f"{axis}_parallel") or 1 for axis in ("tensor", "pipeline", "context")]
        replicas = max(num_devices // prod(degrees), 1)
        if global_batch_size is None and own.get("micro_batch_size") is not None:
            global_batch_size = own["micro_batch_size"] * max(profile.num_microbatches, 1) * replicas
        if all(value is None for value in measured.values()):
            measured["seconds"] = profile.span_s / profile.num_steps
    for name, value in (("num_devices", num_devices), ("global_batch_size", global_batch_size)):
        if value is None:
            raise WorkloadError(
                with_fields("{name}", name=FieldName(name))
                + f" is not given{', and the trace does not state it' if profile else ''}",
                advice=with_fields("set {name}", name=FieldName(name)),
                field=name,
            )
    assert num_devices is not None
    given = own | {"global_batch_size": global_batch_size}
    parts["workload"] = given
    scenario = build_scenario(config, **parts)
    num_images = count_images(scenario.config, scenario.workload)
    # Before the search for a layout, which is slower.
    read_measurement(scenario.workload, num_devices, num_images=num_images, **measured)
    has_micro_batch = isinstance(config, Scenario) or given.get("micro_batch_size") is not None
    scenario, has_layout = assume_layout(scenario, num_devices, layout, keep_micro_batch=has_micro_batch)
    return explain_utilization(
        scenario,
        **measured,
        num_devices=num_devices,
        has_layout=has_layout,
        convention=convention,
        trace=profile,
    )


def _given_layout(config: ScenarioLike, layout: ParallelLayout | Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of the layout that the user chose: given ones, and those of a given Scenario that are not the default."""
    chosen: dict[str, Any] = {}
    if isinstance(config, Scenario):
        chosen = {
            spec.name: getattr(config.layout, spec.name)
            for spec in fields(config.layout)
            if getattr(config.layout, spec.name) != spec.default
        }
    return chosen | given_fields(layout)


@takes_scenario
def compare(
    config: ScenarioLike,
    *,
    devices: Sequence[DeviceLike],
    usd_per_hour: Mapping[str, float] | None = None,
    **parts: Unpack[ScenarioParts],
) -> Comparison:
    """Predict the same job on several devices.

    Args:
        config: A model or a Scenario, see ScenarioLike.
        devices: Device names, aliases, files, or Devices, each used once; ``device`` has no effect.
        usd_per_hour: Price of one device by its name. [USD/h]
        parts: See ScenarioParts.

    Returns:
        A row for each device; one that cannot run the job has the reason.

    Raises:
        ShapewrightError: an argument is invalid, or the job can run on no device at all.
    """
    from shapewright.prediction.compare import compare_outcomes

    load_software(parts.get("software") or TUNED)  # an unknown name is not the fault of a device
    source = config if isinstance(config, Scenario) else read_model(config, parts.pop("overrides", None))
    found = {device.name: device for device in map(find_device, [devices] if isinstance(devices, str) else devices)}
    if not found:
        raise DeviceError("no device to compare; give at least one name, 'shapewright devices' lists all")
    notes: dict[str, None] = {}
    outcomes: list[tuple[Device, Prediction | ShapewrightError]] = []
    for device in found.values():
        try:
            parts["device"] = device
            scenario = build_scenario(source, **parts)
            outcomes.append((device, scenario.predict()))
            notes.update(dict.fromkeys(scenario.notes))
        except ShapewrightError as error:
            outcomes.append((device, error))
    _refuse_if_no_device_is_at_fault([outcome for _, outcome in outcomes])
    # A device that is described by its measurements alone has no file to look its name up in.
    prices = {name if name in found else find_device(name).name: usd for name, usd in (usd_per_hour or {}).items()}
    return compare_outcomes(outcomes, prices, tuple(notes))


def _refuse_if_no_device_is_at_fault(outcomes: Sequence[Prediction | ShapewrightError]) -> None:
    """Raise the error that all devices have in common, unless it is about devices, and layouts that none can run."""
    refusals = [outcome for outcome in outcomes if isinstance(outcome, ShapewrightError)]
    if len(refusals) < len(outcomes):
        return
    if all(isinstance(refusal, LayoutError) for refusal in refusals):
        raise refusals[0]
    if len({str(refusal) for refusal in refusals}) > 1:
        return
    if not isinstance(refusals[0], DeviceError | CalibrationError):
        raise refusals[0]
