"""Access control of the server: host, origin, token, request size and form; text is never returned as HTML."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from explorer_jobs import ADDRESS, GPT3
from fastapi.testclient import TestClient

from shapewright.app.explorer.app import create_app
from shapewright.app.explorer.guard import COOKIE, MAX_BODY_BYTES, SECURITY_HEADERS
from shapewright.app.explorer.serve import is_loopback, make_token, open_socket, page_address
from shapewright.core.errors import ShapewrightError

PLANTED = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def guarded() -> Iterator[TestClient]:
    """The application as other machines reach it."""
    app = create_app(host="192.0.2.7", token="secret-token")
    with TestClient(app, base_url="http://192.0.2.7:8265", follow_redirects=False) as client:
        yield client


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8265", "127.0.0.1.evil.example", "[::1", "", "192.0.2.7"]
)
def test_other_hosts_are_refused(host: str, client: TestClient) -> None:
    """A DNS name rebound to this machine is refused, and so is an address that is not the server's."""
    assert client.get("/", headers={"host": host}).status_code == 421
    assert client.post("/api/v1/predict", json={"job": GPT3}, headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:8265", "127.0.0.1:9", "[::1]:8265", "LOCALHOST"])
def test_local_names_are_allowed(host: str, client: TestClient) -> None:
    """Every name of this machine is accepted."""
    assert client.get("/api/v1", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8265"])
def test_other_origins_are_refused(origin: str, client: TestClient) -> None:
    """A page of another origin is refused, even from another port of this machine."""
    answer = client.post("/api/v1/predict", json={"job": GPT3}, headers={"origin": origin})
    assert (answer.status_code, answer.json()["title"]) == (403, "WrongOrigin")


def test_same_origin_is_allowed(client: TestClient) -> None:
    """The page itself may."""
    assert client.post("/api/v1/predict", json={"job": GPT3}, headers={"origin": ADDRESS}).status_code == 200


def test_fetches_from_other_sites_are_refused_and_links_are_not(client: TestClient) -> None:
    """A link on another site may open the page; nothing else may come from there."""
    other = {"sec-fetch-site": "cross-site"}
    assert client.get("/", headers={**other, "sec-fetch-mode": "navigate"}).status_code == 200
    assert client.get("/", headers={**other, "sec-fetch-mode": "no-cors"}).status_code == 403
    assert client.get("/api/v1", headers={**other, "sec-fetch-mode": "navigate"}).status_code == 403


def test_forms_of_other_sites_cannot_ask(client: TestClient) -> None:
    """Content types that an HTML form can send without a preflight are rejected."""
    body = json.dumps({"job": GPT3})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = client.post("/api/v1/predict", content=body, headers={"content-type": kind})
        assert answer.status_code == 415


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"job": NaN}', 400),
        (b'{"a": 1, "a": 2}', 400),
        (b"\xff\xfe", 400),
        (b'{"job": ' + b"[" * 100 + b"]" * 100 + b"}", 400),
        (b'{"job": 1' + b"0" * 1000 + b"}", 400),
        (b'{"job": "' + b"x" * MAX_BODY_BYTES + b'"}', 413),
    ],
)
def test_unsound_bodies_are_refused(body: bytes, status: int, client: TestClient) -> None:
    """Too large, too deep, no object, no JSON: refused before anything reads it."""
    answer = client.post("/api/v1/predict", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_body_without_a_length_is_measured_too(client: TestClient) -> None:
    """Chunks are counted as they come."""

    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1024 + 2):
            yield b" " * 1024

    answer = client.post("/api/v1/predict", content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/v1", "/nowhere", "/api/v1/models/none"])
def test_every_answer_carries_the_policy(path: str, client: TestClient) -> None:
    """No inline script, nothing from elsewhere, no frames: on pages, data and refusals alike."""
    headers = client.get(path).headers
    assert {name: headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    assert "unsafe" not in headers["content-security-policy"]


@pytest.mark.parametrize(
    "path", ["/static/../guard.py", "/static/%2e%2e/guard.py", "/static/", "/static", "//etc/passwd"]
)
def test_only_known_files_are_served(path: str, client: TestClient) -> None:
    """No path of a request leads anywhere."""
    assert client.get(path).status_code == 404


def test_files_are_packed_and_remembered(client: TestClient) -> None:
    """The whole page is below 1.5 MB, and cached files are answered with 304."""
    page = client.get("/static/echarts.min.js")
    assert page.headers["content-encoding"] == "gzip"
    assert int(page.headers["content-length"]) < 500_000
    again = client.get("/static/echarts.min.js", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_other_machines_need_the_token(guarded: TestClient) -> None:
    """Without it nothing is shown; the printed address sets it as a cookie, and scripts may send it as a header."""
    assert guarded.get("/").status_code == 401
    assert guarded.get("/?token=wrong").status_code == 401
    assert guarded.get("/api/v1", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert guarded.get("/api/v1", headers={"cookie": f"{COOKIE}=wrong"}).status_code == 401
    assert guarded.get("/api/v1", headers={"authorization": "Bearer secret-token"}).status_code == 200
    arrival = guarded.get("/?token=secret-token")
    cookie = arrival.headers["set-cookie"]
    assert (arrival.status_code, arrival.headers["location"]) == (303, "/")
    assert f"{COOKIE}=secret-token" in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert guarded.get("/", headers={"cookie": f"{COOKIE}=secret-token"}).status_code == 200


def test_a_token_does_not_let_other_names_in(guarded: TestClient) -> None:
    """A rebound name is refused even with the token; a plain address cannot be rebound and is taken."""
    token = {"authorization": "Bearer secret-token"}
    assert guarded.get("/api/v1", headers={**token, "host": "evil.example"}).status_code == 421
    assert guarded.get("/api/v1", headers={**token, "host": "198.51.100.9:8265"}).status_code == 200


def test_loopback_needs_no_token_and_all_else_does() -> None:
    """Which addresses are this machine's own, and what is printed for each."""
    assert is_loopback("127.0.0.1")
    assert make_token("127.0.0.1") is None
    token = make_token("0.0.0.0")
    assert token is not None
    assert len(token) >= 32
    assert page_address("192.0.2.7", 80, "abc") == "http://192.0.2.7:80/?token=abc"


def test_a_port_in_use_is_a_one_line_error() -> None:
    """Starting on a port in use prints one line with a remedy."""
    with open_socket("127.0.0.1", 0) as first, pytest.raises(ShapewrightError, match="choose another port"):
        open_socket("127.0.0.1", first.getsockname()[1])


def test_answers_do_not_wait_for_more() -> None:
    """Connections are known to be TCP, so that the event loop sends small answers at once."""
    with open_socket("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_too_many_long_requests_are_rejected(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full queue one more long request is rejected, while short ones are still answered."""
    app: Any = client.app
    monkeypatch.setattr(app.state.slow, "max_waiting", 0)
    refused = client.post("/api/v1/check", json={"job": GPT3})

    assert (refused.status_code, refused.json()["title"]) == (429, "QueueFull")
    assert refused.headers["retry-after"]
    assert client.post("/api/v1/predict", json={"job": GPT3}).status_code == 200


def plant(value: Any) -> Any:
    """The same object with markup in every text."""
    if isinstance(value, dict):
        return {key: plant(item) for key, item in value.items()}
    return PLANTED if isinstance(value, str) else value


@pytest.mark.parametrize("place", ["name", "model_type", "torch_dtype"])
def test_markup_in_a_config_is_no_markup_in_the_report(place: str, client: TestClient) -> None:
    """The only HTML response escapes text from a config."""
    config = {"n_embd": 768, "n_layer": 2, "n_head": 12, "vocab_size": 50304, place: PLANTED}
    config.setdefault("model_type", "gpt2" if place != "model_type" else PLANTED)
    answer = client.post("/api/v1/report.html", json={"job": {"config": config, "device": "h100-sxm-80gb"}})

    assert answer.status_code in (200, 422)
    assert "<script>alert" not in answer.text
    assert "<img src=x" not in answer.text


@pytest.mark.parametrize("field", ["preset", "device", "operation"])
def test_markup_in_names_comes_back_as_json(field: str, client: TestClient) -> None:
    """An error repeats its input as JSON, never as HTML."""
    body: dict[str, Any] = {"job": dict(GPT3), "operation": "logits"}
    (body if field == "operation" else body["job"])[field] = PLANTED
    answer = client.post("/api/v1/explain", json=body)

    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-content-type-options"] == "nosniff"
