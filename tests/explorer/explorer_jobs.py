"""Jobs that the explorer's tests send, and servers that answer them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shapewright.app.explorer.serve import open_socket

ADDRESS = "http://127.0.0.1:8265"
GPT3: dict[str, Any] = {
    "preset": "gpt3-2.7b",
    "device": "a100-sxm-40gb",
    "workload": {"dtype": "fp16", "attention": "unfused"},
}


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """Run an application on a free port of this machine; gives its address."""
    import uvicorn

    listener = open_socket("127.0.0.1", 0)
    config = uvicorn.Config(app, **{"log_level": "warning", "access_log": False} | options)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    running.should_exit = True
    thread.join(timeout=10)
    listener.close()
