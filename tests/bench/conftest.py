"""Fixture with the CPU as the device under test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend

# For the helper modules in this folder, since pytest's importlib mode does not change sys.path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def backend() -> Backend:
    """The CPU with one thread, since several threads would be slowed down by other load on the machine."""
    torch = pytest.importorskip("torch", reason="measuring needs the bench extra")
    from shapewright.measure.bench.device.open_device import open_backend

    torch.set_num_threads(1)
    return open_backend(cpu=True)
