"""A client of the application, and for the browser a server that runs it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# The helper modules beside these tests (pytest's importlib mode leaves sys.path alone).
sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("fastapi", reason="the explorer needs the serve extra")
pytest.importorskip("httpx", reason="the explorer's tests need httpx")

import uvicorn
from explorer_jobs import ADDRESS
from fastapi.testclient import TestClient

from shapewright.explorer.app import create_app
from shapewright.explorer.serve import open_socket


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """The application without a network."""
    with TestClient(create_app(), base_url=ADDRESS, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Address of a server on a free port of this machine."""
    listener = open_socket("127.0.0.1", 0)
    running = uvicorn.Server(uvicorn.Config(create_app(), log_level="warning", access_log=False))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    running.should_exit = True
    thread.join(timeout=10)
    listener.close()
