"""Run the explorer: listen on a local address, open a browser, serve until Ctrl-C."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable

from shapewright.app.explorer.guard import LOOPBACK_NAMES
from shapewright.core.errors import ShapewrightError

_BACKLOG = 512  # pending connections


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


def page_address(host: str, port: int, token: str | None) -> str:
    """URL of the page, with the token, which the server exchanges for a cookie.

    >>> page_address("127.0.0.1", 8265, None), page_address("::1", 80, None)
    ('http://127.0.0.1:8265/', 'http://[::1]:80/')
    """
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


def serve(
    host: str,
    port: int,
    *,
    open_browser: bool,
    say: Callable[[str], None],
    store_path: str = "",
    calibration: str = "",
) -> None:
    """Serve until interrupted.

    Args:
        host: Address to listen on; addresses other than loopback require a token.
        port: Port; 0 for any free one.
        open_browser: Whether to open the page.
        say: Called with every line to print.
        store_path: Store whose measurements are shown with predictions; empty for none.
        calibration: Path of a calibration file whose device is priced with its records; empty for none.

    Raises:
        ShapewrightError: the address is not available, or the store or calibration file cannot be read.
    """
    import uvicorn

    from shapewright.app.explorer.app import create_app
    from shapewright.app.explorer.device_lookup import DeviceLookup
    from shapewright.app.explorer.measured import read_measurements

    measured = read_measurements(store_path) if store_path else None
    devices = DeviceLookup(calibration)
    token = make_token(host)
    listener = open_socket(host, port)
    address = page_address(host, listener.getsockname()[1], token)
    app = create_app(host=host, token=token, measured=measured, devices=devices)
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
    server = uvicorn.Server(
        uvicorn.Config(
            app,
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
