"""Checks of every request before it is handled: host, origin, token, and size and format of its body.

A page of another site can make a browser send requests to 127.0.0.1, and can resolve its own name to that address (DNS
rebinding). So the Host header must name this server, an Origin must be this server's own, and a body must be JSON,
which another origin cannot send without a CORS preflight.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response

from shapewright.app.explorer.problems import internal_error, problem
from shapewright.core.errors import ConfigError
from shapewright.models.config_file import parse_json_object

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 256 * 1024
# Time for a client to send its body, and to take each part of an answer. [s]
_BODY_LIMIT_S = 15.0
_SEND_LIMIT_S = 60.0
COOKIE = "shapewright_token"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

# Same-origin resources only: nothing inline, no frames, no form submissions.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """ASGI middleware that rejects invalid requests and adds security headers to every response.

    Args:
        app: The application.
        host: Name or address of the server.
        token: Token that every request must carry; None for loopback and for public servers.
        public_names: Host names of a public server, which needs no token.
        frame_origins: Origins whose pages may show this one in a frame, such as ``https://huggingface.co``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        token: str | None = None,
        public_names: Collection[str] = (),
        frame_origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._token = token
        self._names = LOOPBACK_NAMES if token is None else LOOPBACK_NAMES | {host, *_own_names()}
        self._names |= {name.casefold() for name in public_names}
        self._headers = dict(SECURITY_HEADERS)
        if frame_origins:
            allowed = f"frame-ancestors {' '.join(frame_origins)}"
            self._headers["Content-Security-Policy"] = _POLICY.replace("frame-ancestors 'none'", allowed)
            del self._headers["X-Frame-Options"]  # has no form for several origins, and the policy replaces it
        self._allows_ip_addresses = token is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject an invalid request; pass a valid one on, its body read and checked."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            with anyio.fail_after(_SEND_LIMIT_S):
                await send(message)

        try:
            headers = Headers(scope=scope)
            refusal = self._refuse(scope, headers)
            if refusal is None and scope["method"] in ("POST", "PUT", "PATCH"):
                body, refusal = await _read_body(headers, receive)
                receive = _replay(body, receive)
            await (refusal or self._app)(scope, receive, send_with_headers)
        except TimeoutError:
            return  # the client does not read its answer: the server closes the connection
        except Exception as error:  # answered here, so that it has the headers too
            if has_started:
                raise
            await internal_error(scope, error)(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if not self._is_own(host):
            return problem(
                421, "WrongHost", f"this server is not {host[:100]!r}; open the address that the server printed"
            )
        origin = headers.get("origin")
        if origin is not None and _host_of(origin) != host.casefold():
            return problem(
                403, "WrongOrigin", f"pages of {origin[:100]!r} may not access this server; open its own page"
            )
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and not _is_link(scope, headers):
            return problem(403, "WrongOrigin", "other sites may not access this server; open its own page")
        return None if self._token is None else self._check_token(scope, headers)

    def _is_own(self, host: str) -> bool:
        """Whether a Host header names this server: one of its names or, with a token, any IP address."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            _ = urlsplit(f"//{host}").port
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._allows_ip_addresses  # DNS rebinding needs a name

    def _check_token(self, scope: Scope, headers: Headers) -> Response | None:
        """Accept the token from the header or cookie; a token in the page's URL is exchanged for the cookie."""
        assert self._token is not None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.casefold() == "bearer" and _same(given, self._token):
            return None
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        if cookie is not None and _same(cookie.value, self._token):
            return None
        if scope["path"] == "/" and _same(_token_of(scope.get("query_string", b"")), self._token):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", path="/")
            return answer
        refusal = problem(
            401, "TokenNeeded", "this server requires a token; open the address that it printed at startup"
        )
        refusal.headers["WWW-Authenticate"] = "Bearer"
        return refusal


def _host_of(origin: str) -> str:
    """Host and port of an origin; empty where it is malformed."""
    try:
        return urlsplit(origin).netloc.casefold()
    except ValueError:
        return ""


def _token_of(query: bytes) -> str:
    """Token of a page's URL; empty where there is none or too many fields."""
    try:
        return parse_qs(query.decode("latin-1"), max_num_fields=16).get("token", [""])[0]
    except ValueError:
        return ""


def _is_link(scope: Scope, headers: Headers) -> bool:
    """Whether the request follows a link to the page, which other sites may contain."""
    return bool(
        scope["method"] == "GET" and scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
    )  # fmt: skip


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _own_names() -> set[str]:
    """Host names of this machine."""
    return {socket.gethostname().casefold(), socket.getfqdn().casefold()} - {""}


async def _read_body(headers: Headers, receive: Receive) -> tuple[bytes, Response | None]:
    """Read a body up to the size limit, and check that it is a valid JSON object."""
    too_large = problem(
        413,
        "BodyTooLarge",
        f"the request body is larger than {MAX_BODY_BYTES // 1024} KiB; a config.json has a few",
    )
    kind = headers.get("content-type", "").partition(";")[0].strip().casefold()
    if kind != "application/json":
        return b"", problem(415, "NotJson", f"content type {kind[:60]!r} is not accepted; send application/json")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > MAX_BODY_BYTES:
        return b"", too_large
    body = bytearray()
    stop_s = anyio.current_time() + _BODY_LIMIT_S
    while True:
        with anyio.move_on_after(stop_s - anyio.current_time()) as waiting:
            message = await receive()
        if waiting.cancelled_caught:
            return b"", problem(408, "TooSlow", f"the request body took longer than {_BODY_LIMIT_S:g} s; send it again")
        if message["type"] != "http.request":
            return b"", problem(400, "Incomplete", "the request body is incomplete; send it again")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return b"", too_large
        if not message.get("more_body", False):
            break
    try:
        parse_json_object(bytes(body), "request body")
    except ConfigError as error:
        return b"", problem(400, "BadJson", str(error))
    return bytes(body), None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Replay the body that was read to the application, then forward further messages."""
    is_replayed = False

    async def replay() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
