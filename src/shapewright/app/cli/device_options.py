"""Options on devices: calibration, node size, network, pricing by the formulas alone; and the devices they apply to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shapewright.app.cli.defaults import add_note, device_callback
from shapewright.app.cli.names import complete_device

if TYPE_CHECKING:
    from shapewright.hardware.device import Device

Command = TypeVar("Command", bound=Callable[..., Any])


def device_option(command: Command) -> Command:
    """Add --device; without it, the device of SHAPEWRIGHT_DEVICE, of pyproject.toml or of this machine is used."""
    return click.option(
        "--device",
        metavar="NAME",
        callback=device_callback,
        shell_complete=complete_device,
        help="device name, alias or TOML file; see 'shapewright devices'; default: that of SHAPEWRIGHT_DEVICE, of "
        "[tool.shapewright] in pyproject.toml, or this machine's GPU",
    )(command)


# Keys in the context of a command.
_NODE_SIZE, _NETWORK = "shapewright.node_size", "shapewright.network_gbit_per_s"
_CALIBRATION = "shapewright.calibration"
_UNCALIBRATED = "shapewright.uncalibrated"
_PHYSICS_ONLY = "shapewright.physics_only"
_BYTES_PER_GBIT = 1e9 / 8


def _kept(flag: str, key: str, **keywords: Any) -> Callable[[Command], Command]:
    """Add an option whose value is kept in the context, where the functions below read it."""

    def keep(context: click.Context, _: click.Parameter, value: Any) -> None:
        context.meta[key] = value

    return click.option(flag, expose_value=False, callback=keep, **keywords)


def node_options(command: Command) -> Command:
    """Add --node-size and --network-gbit-per-s, which in_given_nodes applies."""
    network = _kept(
        "--network-gbit-per-s",
        _NETWORK,
        type=float,
        metavar="GBIT",
        help="network between your nodes, for each device and in one direction, such as 400; default: that of the "
        "device's reference system",
    )
    size = _kept(
        "--node-size",
        _NODE_SIZE,
        type=int,
        metavar="N",
        help="devices of one of your nodes, such as 4; default: that of the device's reference system",
    )
    return size(network(command))


def calibration_option(command: Command) -> Command:
    """Add --calibration and --physics-only, which named_device applies."""
    physics = _kept(
        "--physics-only",
        _PHYSICS_ONLY,
        is_flag=True,
        help="ignore the learned residuals of GEMMs, attention and experts",
    )
    file = _kept(
        "--calibration",
        _CALIBRATION,
        metavar="FILE",
        help="calibration file of your device, written by 'shapewright calibrate'",
    )
    return file(physics(command))


def uncalibrated_option(command: Command) -> Command:
    """Add --uncalibrated, which named_device applies."""
    words = "ignore the device's own calibration"
    return _kept("--uncalibrated", _UNCALIBRATED, is_flag=True, help=words)(command)


def loss_law_option(command: Command) -> Command:
    """Add --loss-law, in use until the command ends."""

    def use(context: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            from shapewright.prediction.loss.law import using_loss_law

            context.with_resource(using_loss_law(value))

    return click.option(
        "--loss-law",
        metavar="FILE",
        expose_value=False,
        callback=use,
        help="your own law of loss, written by 'shapewright calibrate --losses'",
    )(command)


def in_given_nodes(device: Device) -> Device:
    """Apply the node options to a device.

    Raises:
        DeviceError: there can be no such nodes.
    """
    node_size, network_bytes_per_s = _given()
    if node_size is None and network_bytes_per_s is None:
        return device
    from shapewright.hardware.nodes import with_nodes

    return with_nodes(device, node_size=node_size, inter_node_bandwidth_bytes_per_s=network_bytes_per_s)


def given_nodes() -> str:
    """Describe the node options; empty where none was given."""
    from shapewright.hardware.nodes import describe_nodes

    return describe_nodes(*_given())


def _given() -> tuple[int | None, float | None]:
    """Size of a node, and bandwidth of the network. [-, byte/s]"""
    context = click.get_current_context(silent=True)
    if context is None:
        return None, None
    network = context.meta.get(_NETWORK)
    return context.meta.get(_NODE_SIZE), None if network is None else network * _BYTES_PER_GBIT


def given_calibration() -> str | None:
    """Path given with --calibration.

    Raises:
        UsageError: --uncalibrated contradicts it.
    """
    context = click.get_current_context(silent=True)
    path: str | None = context.meta.get(_CALIBRATION) if context is not None else None
    if path and _is_given(_UNCALIBRATED):
        raise click.UsageError("--uncalibrated and --calibration cannot be combined; give one of them")
    return path


def named_device(name: str) -> Device:
    """Load the device of --device, with --calibration applied.

    Raises:
        DeviceError: there is no such device.
        CalibrationError: the calibration cannot be read, or is of another device.
    """
    from shapewright.hardware.loader import load_device, note_on_board

    path = given_calibration()
    board = note_on_board(name)
    if board:
        add_note(board, "device")
    if not path:
        return with_pricing_options(load_device(name))
    from shapewright.pricing.calibration.file import calibrated_device

    return with_pricing_options(calibrated_device(name, path))


def with_pricing_options(device: Device) -> Device:
    """Apply --node-size, --network-gbit-per-s, --uncalibrated and --physics-only to a device."""
    return in_given_nodes(device).with_pricing(
        uncalibrated=_is_given(_UNCALIBRATED), physics_only=_is_given(_PHYSICS_ONLY)
    )


def _is_given(flag: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(flag))


def compared_devices(names: list[str]) -> list[str | Device]:
    """Load the devices of --devices; --calibration applies to the one it describes.

    Raises:
        CalibrationError: the calibration cannot be read, or none of them is the device it is of.
    """
    from shapewright.hardware.loader import note_on_board

    for board in filter(None, map(note_on_board, names)):
        add_note(board, "device")
    path = given_calibration()
    if not path:
        has_options = _is_given(_PHYSICS_ONLY) or _is_given(_UNCALIBRATED) or bool(given_nodes())
        return [named_device(name) for name in names] if has_options else list(names)
    from shapewright.core.errors import CalibrationError
    from shapewright.hardware.loader import load_device
    from shapewright.pricing.calibration.file import calibrated_device, read_calibration

    own = read_calibration(path).device.name
    found = [
        calibrated_device(name, path) if name == own or load_device(name).name == own else load_device(name)
        for name in names
    ]
    if own not in [device.name for device in found]:
        raise CalibrationError(
            f"calibration file {path} is of {own}, which is not among the compared devices; add it to --devices"
        )
    return [with_pricing_options(device) for device in found]
