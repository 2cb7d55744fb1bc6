"""One CPU to measure on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend

# The helper modules beside these tests (pytest's importlib mode leaves sys.path alone).
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def backend() -> Backend:
    """The CPU; one thread, for threads that wait for each other measure the other load of the machine."""
    torch = pytest.importorskip("torch", reason="measuring needs the bench extra")
    from shapewright.bench.open_device import open_backend

    torch.set_num_threads(1)
    return open_backend(cpu=True)
