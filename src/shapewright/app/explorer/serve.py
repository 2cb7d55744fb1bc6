"""Run the explorer: listen on a local address, open a browser, serve until Ctrl-C."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from shapewright.app.explorer.guard import LOOPBACK_NAMES
from shapewright.core.errors import ShapewrightError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from shapewright.app.explorer.views.answers import TracedModule

_BACKLOG = 512  # pending connections
_STOP_LIMIT_S = 6.0


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    return host in LOOPBACK_NAMES


def make_token(host: str) -> str | None:
    """Make an access token for an address that other machines can reach; None for loopback."""
    return None if is_loopback(host) else secrets.token_urlsafe(24)


def open_socket(host: str, port: int) -> socket.socket:
    """Bind the listening socket, before its address is printed.

    Raises:
        ShapewrightError: the address is in use or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is given; with it an answer takes 40 ms longer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ShapewrightError(
            f"cannot listen on {host} port {port}: {reason}; choose another port (0 for any free one) or host"
        ) from None
    return listener


def page_address(host: str, port: int, token: str | None, page: str = "") -> str:
    """URL of the page, with the token, which the server exchanges for a cookie.

    >>> page_address("127.0.0.1", 8265, None), page_address("::1", 80, None)
    ('http://127.0.0.1:8265/', 'http://[::1]:80/')
    """
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    shown = f"[{shown}]" if ":" in shown else shown
    query = f"{'&' if '?' in page else '?'}token={token}" if token else ""
    return f"http://{shown}:{port}/{page}{query}"


def serve(
    host: str,
    port: int,
    *,
    open_browser: bool,
    say: Callable[[str], None],
    store_path: str = "",
    calibration: str = "",
    public_names: Sequence[str] = (),
    frame_origins: Sequence[str] = (),
    traced: TracedModule | None = None,
    first_device: str = "",
) -> None:
    """Serve until interrupted.

    Args:
        host: Address to listen on; addresses other than loopback require a token, unless the server is public.
        port: Port; 0 for any free one.
        say: Called with every line to print.
        store_path: Store whose measurements are shown with predictions; empty for none.
        calibration: Path of a calibration file whose device is priced with its records; empty for none.
        public_names: Host names under which everyone may use the server, without a token; it then reads no files.
        frame_origins: Origins whose pages may show the page in a frame.
        traced: A traced module, whose page is opened instead of that of presets.
        first_device: Device that this page shows first.

    Raises:
        ShapewrightError: the address is not available, the store or calibration file cannot be read, or a public server
            is given files or a module.
    """
    import uvicorn

    if public_names and (store_path or calibration or traced):
        raise ShapewrightError(
            "a public server shows no files of its machine; omit the store, the calibration and the module"
        )

    from shapewright.app.explorer.app import create_app
    from shapewright.app.explorer.assets import TRACED_PAGE
    from shapewright.app.explorer.device_lookup import DeviceLookup
    from shapewright.app.explorer.measured import read_measurements
    from shapewright.app.explorer.protocol import LimitedProtocol, max_connections

    measured = read_measurements(store_path) if store_path else None
    devices = DeviceLookup(calibration)
    token = None if public_names else make_token(host)
    listener = open_socket(host, port)
    page = f"{TRACED_PAGE[1:]}?device={first_device}" if traced else ""
    address = page_address(host, listener.getsockname()[1], token, page)
    app = create_app(
        host=host,
        token=token,
        measured=measured,
        devices=devices,
        public_names=public_names,
        frame_origins=frame_origins,
        traced=traced,
    )
    say(f"Shapewright explorer at {address}")
    if measured is not None:
        say(f"{len(measured):,} measured GEMMs and steps of {store_path} are shown for identical shapes")
    for line in devices.calibration_notes(devices.calibrated) if devices.calibrated is not None else ():
        say(line)
    say("stop with Ctrl-C" if token is None else "anyone with this address has access; stop with Ctrl-C")
    if open_browser:
        timer = threading.Timer(0.5, webbrowser.open, [address])
        timer.daemon = True
        timer.start()
    # asyncio warns of every search whose end another thread saw first.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    LimitedProtocol.most = max_connections()
    server = _server_class(app)(
        uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            backlog=_BACKLOG,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=16 * 1024,
        )
    )
    with listener:
        server.run(sockets=[listener])


def _server_class(app: FastAPI) -> type[uvicorn.Server]:
    """Server that ends its requests and then itself when it is interrupted."""
    import uvicorn

    class StoppableServer(uvicorn.Server):
        """A server whose running answers are cancelled first."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Stop accepting, cancel what runs, and set a last deadline."""
            super().handle_exit(sig, frame)
            for lane in app.state.lanes:
                lane.cancel_all()
            # A thread that does not end would keep the interpreter alive.
            last = threading.Timer(_STOP_LIMIT_S, os._exit, [128 + sig])
            last.daemon = True
            last.start()

    return StoppableServer
