"""Run the explorer: a socket on loopback, a browser, a server until Ctrl-C."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable

from shapewright.errors import ShapewrightError
from shapewright.explorer.guard import LOOPBACK_NAMES

_BACKLOG = 512  # clients that may wait to be let in


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    return host in LOOPBACK_NAMES


def make_token(host: str) -> str | None:
    """A token for addresses that others reach; none is needed on loopback."""
    return None if is_loopback(host) else secrets.token_urlsafe(24)


def open_socket(host: str, port: int) -> socket.socket:
    """Bind before anything is printed, so that an address that is shown is one that works.

    Raises:
        ShapewrightError: the address is taken, or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named, for asyncio turns Nagle's algorithm off only where it is: 40 ms an answer otherwise.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ShapewrightError(
            f"cannot listen on {host} port {port}: {reason}; give another --port (0 takes a free one) or --host"
        ) from None
    return listener


def page_address(host: str, port: int, token: str | None) -> str:
    """Where the page is; with the token, which the page turns into a cookie.

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
        host: Address to listen on; others than loopback are guarded by a token.
        port: Port; 0 takes a free one.
        open_browser: Whether to open the page.
        say: Prints a line.
        store_path: Store whose measurements are shown beside predictions; empty for none.
        calibration: Calibration file whose device is priced with its records; empty for none.

    Raises:
        ShapewrightError: the address cannot be had, or the store or the calibration cannot be read.
    """
    import uvicorn

    from shapewright.explorer.app import create_app
    from shapewright.explorer.known_devices import KnownDevices
    from shapewright.explorer.measured import read_measurements

    measured = read_measurements(store_path) if store_path else None
    devices = KnownDevices(calibration)
    token = make_token(host)
    listener = open_socket(host, port)
    address = page_address(host, listener.getsockname()[1], token)
    app = create_app(host=host, token=token, measured=measured, devices=devices)
    say(f"Shapewright explorer at {address}")
    if measured is not None:
        say(f"{len(measured):,} measured products and steps of {store_path} are shown where the shape is the same")
    for line in devices.remark(devices.own) if devices.own is not None else ():
        say(line)
    say("stop it with Ctrl-C" if token is None else "whoever has this address can use it; stop it with Ctrl-C")
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
