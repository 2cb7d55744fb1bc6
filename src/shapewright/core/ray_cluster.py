"""Connect to a Ray cluster, or start one on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir, contextmanager
from typing import Any

from shapewright import __version__
from shapewright.core.child_process import SOURCE_FOLDER
from shapewright.core.errors import ClusterError, ConfigError, MissingExtraError, short_repr

ENGINES = ("local", "ray")
"""Execution engines of searches and measurements: local processes, or a Ray cluster."""

MOST_RETRIES = 5
"""Attempts of a task after the first if a worker or its node is lost."""
# Long enough for a cluster on another continent.
_CONNECT_TIMEOUT_S = 5.0
# Ray accepts no less than 75 MiB; the results stored here are a few hundred kilobytes each. [byte]
_OBJECT_STORE_BYTES = 128 * 2**20


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """Connect to a cluster for the duration of the context.

    Args:
        address: ``auto`` for the cluster of this machine, ``host:port`` or ``ray://host:port`` for another; None or
            ``local`` to start one on this machine, which is shut down at exit.

    Yields:
        The ray module.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: no cluster answers at the address.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError(
            "engine='ray' needs Ray; install it with: pip install 'shapewright[ray]', or use engine='local'"
        ) from None
    if ray.is_initialized():  # the caller owns this connection and closes it
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    # Ray puts the driver's working directory on the search path of its workers.
    if address in (None, "local"):
        with chdir(SOURCE_FOLDER):
            ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, **quiet)
    else:
        assert address is not None
        _check_reachable(address)
        try:
            with chdir(SOURCE_FOLDER):
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            words = " ".join(str(error).split())[:160]
            raise _no_answer(address, words) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def fetch_result(ray: Any, reference: Any) -> Any:
    """Return the result of a finished task; an error raised in it is raised again.

    Raises:
        ClusterError: the task was lost.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())[:200]
        raise ClusterError(f"a task was lost {MOST_RETRIES + 1} times ({reason}); check the cluster") from error


def check_version(version: str) -> None:
    """Check that a worker has the driver's version of this package: another one could give another result.

    Raises:
        ClusterError: it has another one.
    """
    if version != __version__:
        raise ClusterError(f"a worker has shapewright {__version__} and not {version}; install the same everywhere")


def check_engine(engine: str, address: str | None) -> None:
    """Check an execution engine and the address of its cluster.

    Raises:
        ConfigError: the engine is not known, or an address is given without Ray.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} is not known; choose {' or '.join(ENGINES)}")
    if engine != "ray" and address is not None:
        raise ConfigError(f"address={address!r} has no effect without engine='ray'; leave it out")


def _check_reachable(address: str) -> None:
    """Check that the address accepts connections: for an unreachable one ``ray.init`` hangs, then ends the process.

    Raises:
        ClusterError: the address is malformed, or nothing listens there.
    """
    if address == "auto":
        return
    import socket  # imported here, because help pages name ENGINES

    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"address={short_repr(address)} is not a cluster address; give auto, local, HOST:PORT or ray://HOST:PORT",
            field="address",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, ValueError) as error:  # a name that is no host name is a ValueError
        raise _no_answer(address, getattr(error, "strerror", None) or str(error)) from None


def _no_answer(address: str, words: str) -> ClusterError:
    return ClusterError(
        f"no Ray cluster answers at address={address!r} ({words}); start one with 'ray start --head', or use "
        f"address='local'"
    )
