"""A Ray cluster: the one that is there, or one started here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shapewright.errors import ClusterError, MissingExtraError

ENGINES = ("local", "ray")
"""Where searches and measurements run: in processes of this machine, or on the devices of a Ray cluster."""

# Long enough for a cluster on another continent.
_ANSWERS_WITHIN_S = 5.0
# The least that Ray accepts is 75 MiB; what is kept in it here is a few findings of some hundred kilobytes. [byte]
_OBJECT_STORE_BYTES = 128 * 2**20


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """Connect to a cluster for as long as it is needed.

    Args:
        address: ``auto`` for the cluster of this machine, ``host:port`` or ``ray://host:port`` for another; None or
            ``local`` to start one here, which ends with it.

    Yields:
        The ray module.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: nothing answers at the address.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError(
            "--engine ray needs Ray; install it with: pip install 'shapewright[ray]', or leave --engine out"
        ) from None
    if ray.is_initialized():  # whoever connected before us also disconnects
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address in (None, "local"):
        ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, **quiet)
    else:
        assert address is not None
        _check_answers(address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            words = " ".join(str(error).split())[:160]
            raise _no_answer(address, words) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Knock before Ray does: it waits for minutes, and ends the process where nobody answers.

    Raises:
        ClusterError: nothing listens there.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"--address {address!r} is no address of a cluster; give auto, local, HOST:PORT or ray://HOST:PORT"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        raise _no_answer(address, getattr(error, "strerror", None) or str(error)) from None


def _no_answer(address: str, words: str) -> ClusterError:
    return ClusterError(
        f"--address {address}: no Ray cluster answers ({words}); start one with 'ray start --head', or give "
        f"--address local"
    )
