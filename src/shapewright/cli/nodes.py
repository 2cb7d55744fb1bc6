"""--node-size and --network-gbit-per-s: machines that differ from the reference system of a device's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from shapewright.hardware import Device

Command = TypeVar("Command", bound=Callable[..., Any])

# Where a command's context keeps them.
_NODE_SIZE, _NETWORK = "shapewright.node_size", "shapewright.network_gbit_per_s"
_BYTES_PER_GBIT = 1e9 / 8


def node_options(command: Command) -> Command:
    """Add --node-size and --network-gbit-per-s, which in_given_nodes heeds."""

    def keep(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
        def store(context: click.Context, _: click.Parameter, value: Any) -> None:
            context.meta[key] = value

        return store

    command = click.option(
        "--network-gbit-per-s",
        type=float,
        metavar="GBIT",
        expose_value=False,
        callback=keep(_NETWORK),
        help="network between your nodes, for each device and in one direction, such as 400; default: that of the "
        "device's reference system",
    )(command)
    return click.option(
        "--node-size",
        type=int,
        metavar="N",
        expose_value=False,
        callback=keep(_NODE_SIZE),
        help="devices of one of your nodes, such as 4; default: that of the device's reference system",
    )(command)


def in_given_nodes(device: Device) -> Device:
    """The device in the nodes that the command line gave.

    Raises:
        DeviceError: there can be no such nodes.
    """
    node_size, network_bytes_per_s = _given()
    if node_size is None and network_bytes_per_s is None:
        return device
    from shapewright.hardware import with_nodes

    return with_nodes(device, node_size=node_size, inter_node_bandwidth_bytes_per_s=network_bytes_per_s)


def given_nodes() -> str:
    """The nodes that the command line gave, in words; empty where it gave none."""
    from shapewright.hardware.nodes import describe_nodes

    return describe_nodes(*_given())


def _given() -> tuple[int | None, float | None]:
    """Size of a node, and bandwidth of the network. [-, byte/s]"""
    context = click.get_current_context(silent=True)
    if context is None:
        return None, None
    network = context.meta.get(_NETWORK)
    return context.meta.get(_NODE_SIZE), None if network is None else network * _BYTES_PER_GBIT
