"""Which device: the same job on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.errors import CalibrationError, DeviceError, LayoutError, ShapewrightError
from shapewright.perf.software import TUNED, load_software
from shapewright.question import ask, find_device, find_model

if TYPE_CHECKING:
    from shapewright.compare import Comparison
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.predict import Prediction
    from shapewright.question import DeviceLike, ModelLike
    from shapewright.workload import Workload


def compare(
    config: ModelLike,
    *,
    devices: Sequence[DeviceLike],
    usd_per_hour: Mapping[str, float] | None = None,
    workload: Workload | Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
    software: str = TUNED,
    physics_only: bool = False,
) -> Comparison:
    """Predict the same job on several devices.

    Args:
        config: Preset name, config.json, its folder or what it holds, hub id, Model or TransformerConfig.
        devices: Device names, aliases, files, or Devices; each is taken once, and a name alone is one.
        usd_per_hour: Price of one device by its name. [USD/h]
        workload: Workload, or some of its fields; what is left out is completed for each device.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the devices.
        software: Generation of the training software, such as ``fsdp-2024``; by default a tuned stack of today.
        physics_only: Leave aside what was learned beyond the formulas.

    Returns:
        A row for each device; one that cannot run the job has the reason in its row.

    Raises:
        ShapewrightError: a name is not known, or the job makes no sense on any device.
    """
    from shapewright.compare import compare_outcomes

    load_software(software)  # an unknown name is no device's fault
    model = find_model(config, overrides)
    found = {device.name: device for device in map(find_device, [devices] if isinstance(devices, str) else devices)}
    if not found:
        raise DeviceError("no device to compare; give at least one name, 'shapewright devices' lists all")
    notes: dict[str, None] = {}
    outcomes: list[tuple[Device, Prediction | ShapewrightError]] = []
    for device in found.values():
        try:
            question = ask(
                model,
                device,
                workload=workload,
                layout=layout,
                uncalibrated=uncalibrated,
                software=software,
                physics_only=physics_only,
            )
            outcomes.append((device, question.predict()))
            notes.update(dict.fromkeys(question.notes))
        except ShapewrightError as error:
            outcomes.append((device, error))
    _refuse_if_no_device_is_at_fault([outcome for _, outcome in outcomes])
    # A device that is described by its measurements alone has no file to look its name up in.
    prices = {name if name in found else find_device(name).name: usd for name, usd in (usd_per_hour or {}).items()}
    return compare_outcomes(outcomes, prices, tuple(notes))


def _refuse_if_no_device_is_at_fault(outcomes: Sequence[Prediction | ShapewrightError]) -> None:
    """Raise what every device answers alike, unless it is about devices; or a layout that none of them can have."""
    refusals = [outcome for outcome in outcomes if isinstance(outcome, ShapewrightError)]
    if len(refusals) < len(outcomes):
        return
    if all(isinstance(refusal, LayoutError) for refusal in refusals):
        raise refusals[0]
    if len({str(refusal) for refusal in refusals}) > 1:
        return
    if not isinstance(refusals[0], DeviceError | CalibrationError):
        raise refusals[0]
