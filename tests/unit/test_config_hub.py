"""Hub ids, tested with a local HTTP server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shapewright.core.child_process import child_environment, python_command
from shapewright.core.errors import ConfigError, MissingExtraError, UnknownModelError
from shapewright.models import config_file
from shapewright.models.read import read_model

CONFIG = json.dumps({"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 6}).encode()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """A hub with one repository that records requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested: list[str] = []


class Handler(BaseHTTPRequestHandler):
    """Answers like the hub: metadata of a file in headers, errors by status and header."""

    def do_HEAD(self) -> None:
        """Metadata of a file."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """The file."""
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def _answer(self, *, with_body: bool) -> None:
        assert isinstance(self.server, Hub)
        self.server.requested.append(self.path)
        known = {f"/org/model/resolve/{revision}/config.json": CONFIG for revision in ("main", "v2", COMMIT)} | {
            "/org/broken/resolve/main/config.json": b"<html>busy</html>"
        }
        body = known.get(self.path)
        code, error = (200, "") if body is not None else (404, "EntryNotFound")
        if self.path.startswith("/org/nothing/"):
            error = "RepoNotFound"
        elif self.path.startswith("/org/gated/"):
            code, error = 403, "GatedRepo"
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{abs(hash(body))}"')
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if with_body:
            self.wfile.write(body or b"")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub that HF_ENDPOINT points to, with an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the hub extra: huggingface_hub")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(timeout=5)


def test_only_the_config_is_fetched(hub: Hub) -> None:
    """A hub id is read from the hub in HF_ENDPOINT, and only config.json is requested."""
    model = read_model("org/model", {"num_heads": 3})
    assert (model.config.hidden_size, model.config.head_dim, model.config.name) == (96, 32, "model")
    assert model.source == "hub org/model"
    assert hub.requested
    assert all(path.endswith("/config.json") for path in hub.requested)


def test_a_revision(hub: Hub) -> None:
    """The part after @ is the revision."""
    assert read_model("org/model@v2").config.num_layers == 3
    assert hub.requested[0] == "/org/model/resolve/v2/config.json"


@pytest.mark.parametrize(
    ("hub_id", "error", "words"),
    [
        ("org/nothing", UnknownModelError, "no config.json at 'org/nothing'"),
        ("org/weights-only", UnknownModelError, "no config.json at 'org/weights-only'"),
        ("org/gated", ConfigError, "is gated"),
        ("org/broken", ConfigError, "not valid JSON"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_errors_of_the_hub(hub_id: str, error: type[Exception], words: str) -> None:
    """No repository, no config.json, no access, invalid JSON: each is an error on one line."""
    with pytest.raises(error, match=words) as caught:
        read_model(hub_id)
    assert "\n" not in str(caught.value)


def test_unreachable_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that cannot be reached is an error that names HF_ENDPOINT."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the library waits between its attempts
    with pytest.raises(ConfigError, match="HF_ENDPOINT") as caught:
        read_model("org/model")
    assert "\n" not in str(caught.value)
    assert hub.requested == []


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without huggingface_hub the message names the extra to install, and an alternative."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shapewright\[hub\]'.*config.json"):
        read_model("org/model")


def test_presets_of_a_similar_name_are_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is gated or out of reach may have the shape of a preset."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"; did you mean 'llama-3\.1-70b'"):
        read_model("meta-llama/Llama-3.1-70B-Instruct@main")


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that accepts connections and is silent is an error after the limit, not after the library's retries."""
    monkeypatch.setattr(config_file, "HUB_LIMIT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"no answer within 0\.3 s; check the network"):
            read_model("org/silent")


def test_an_address_that_is_none_is_refused() -> None:
    """A malformed HF_ENDPOINT is an error in one line, although the hub's library fails when it is first used."""
    command = [*python_command("shapewright"), "params", "someone/something"]
    environment = {**child_environment(), "HF_ENDPOINT": "http://["}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert (outcome.returncode, outcome.stderr.count("\n")) == (2, 1)
    assert "HF_ENDPOINT" in outcome.stderr
