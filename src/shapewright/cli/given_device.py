"""The devices that a command line names, with the records, nodes and physics that its other options ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shapewright.cli.nodes import given_nodes, in_given_nodes

if TYPE_CHECKING:
    from shapewright.hardware import Device

Command = TypeVar("Command", bound=Callable[..., Any])

# Where a command's context keeps the file of --calibration, and --physics-only.
_CALIBRATION = "shapewright.calibration"
_PHYSICS_ONLY = "shapewright.physics_only"


def calibration_option(command: Command) -> Command:
    """Add --calibration, whose file named_device reads, and --physics-only, which it heeds."""

    def keep(context: click.Context, _: click.Parameter, value: str | None) -> None:
        context.meta[_CALIBRATION] = value

    def keep_physics_only(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.meta[_PHYSICS_ONLY] = value

    command = click.option(
        "--physics-only",
        is_flag=True,
        expose_value=False,
        callback=keep_physics_only,
        help="leave the learned corrections of products, attention and experts aside",
    )(command)
    return click.option(
        "--calibration",
        metavar="FILE",
        expose_value=False,
        callback=keep,
        help="records of your own, as 'shapewright calibrate' writes them",
    )(command)


def given_calibration() -> str | None:
    """The file of --calibration.

    Raises:
        UsageError: --uncalibrated contradicts it.
    """
    context = click.get_current_context(silent=True)
    path: str | None = context.meta.get(_CALIBRATION) if context is not None else None
    if context is not None and path and context.params.get("uncalibrated"):
        raise click.UsageError("--uncalibrated and --calibration contradict each other: give one of them")
    return path


def named_device(name: str) -> Device:
    """The device of a --device, with the records of --calibration where that is given.

    Raises:
        DeviceError: there is no such device.
        CalibrationError: the calibration cannot be read, or is of another device.
    """
    path = given_calibration()
    if not path:
        from shapewright.hardware import load_device

        return as_asked(load_device(name))
    from shapewright.perf.calibration_file import calibrated_device

    return as_asked(calibrated_device(name, path))


def as_asked(device: Device) -> Device:
    """The device in the nodes of --node-size and --network-gbit-per-s, priced as --physics-only wants it."""
    device = in_given_nodes(device)
    return device.by_physics if _is_physics_only() else device


def _is_physics_only() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_PHYSICS_ONLY))


def compared_devices(names: list[str]) -> list[str | Device]:
    """Devices of a --devices; the one that --calibration is of has its records.

    Raises:
        CalibrationError: the calibration cannot be read, or none of them is the device it is of.
    """
    path = given_calibration()
    if not path:
        return [named_device(name) for name in names] if _is_physics_only() or given_nodes() else list(names)
    from shapewright.errors import CalibrationError
    from shapewright.hardware import load_device
    from shapewright.perf.calibration_file import calibrated_device, read_calibration

    own = read_calibration(path).device.name
    found = [
        calibrated_device(name, path) if name == own or load_device(name).name == own else load_device(name)
        for name in names
    ]
    if own not in [device.name for device in found]:
        raise CalibrationError(
            f"calibration file {path} is of {own}, which is none of the devices asked; add it to --devices"
        )
    return [as_asked(device) for device in found]
