"""The Python face: the same verbs as the command line, taking names as well as objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from shapewright.question import ask

if TYPE_CHECKING:
    from shapewright.config import Model, TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.lint import CheckReport
    from shapewright.predict import Prediction
    from shapewright.workload import Workload


def predict(
    config: str | PathLike[str] | Model | TransformerConfig | None,
    *,
    device: str | PathLike[str] | Device,
    workload: Workload | Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
) -> Prediction:
    """Predict the time, throughput and memory of one step.

    Args:
        config: Preset name, config.json or its folder, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        workload: Workload, or some of its fields.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line.
    """
    question = ask(config, device, overrides=overrides, workload=workload, layout=layout)
    return question.predict(uncalibrated=uncalibrated)


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
