"""Where the jobs of a search run: in this process, or on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shapewright.cluster import ENGINES
from shapewright.errors import ConfigError
from shapewright.search.engine import run_here

if TYPE_CHECKING:
    from shapewright.search.engine import Runner


@contextmanager
def runner_of(engine: str, address: str | None) -> Iterator[Runner]:
    """Something that runs jobs: in this process, or on Ray.

    Args:
        engine: One of ``shapewright.cluster.ENGINES``.
        address: Address of a Ray cluster.

    Raises:
        ConfigError: no such engine, or an address that nobody asked for.
        MissingExtraError: Ray is not installed.
    """
    if engine == "ray":
        from shapewright.search.on_ray import ray_runner

        with ray_runner(address) as run:
            yield run
    elif engine == "local":
        if address is not None:
            raise ConfigError(f"--address {address!r} has no effect without --engine ray; leave it out")
        yield run_here
    else:
        raise ConfigError(f"--engine {engine!r} is not known; choose {' or '.join(ENGINES)}")
