"""Static files of the page, read and compressed once; requests are never used as paths."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from starlette.responses import Response

from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from starlette.requests import Request

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
# The plotting library and its drawing functions, shared with the reports.
_SHARED = ("echarts.min.js", "charts.js", "echarts-LICENSE.txt", "echarts-NOTICE.txt", "echarts-LICENSE-d3.txt")

TRACED_PAGE = "/traced"
"""Path of the page of a traced module, which only a server with one has."""


@dataclass(frozen=True)
class Asset:
    """One static file.

    Attributes:
        content: Bytes of the file.
        compressed: The same, gzipped.
        media_type: Media type.
        etag: Hash of the content.
    """

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


@cache
def load_assets() -> dict[str, Asset]:
    """Load all files of the page, by URL path."""
    own = resources.files("shapewright.app.explorer") / "static"
    found = dict(_walk(own, ""))
    shared = resources.files("shapewright.app.report") / "assets"
    for name in _SHARED:
        found[f"/static/{name}"] = _read(shared / name)
    found["/"] = found.pop("/static/index.html")
    body = found.pop("/static/traced.html").content
    found[TRACED_PAGE] = _asset(_traced_head(found["/"].content) + body, "html")
    return found


def _traced_head(index: bytes) -> bytes:
    """Head of the page of a traced module: that of the other page, with its own title and script."""
    head = index[: index.index(b"<body>")]
    return head.replace(b"<title>", b"<title>Traced module - ").replace(b"/static/main.js", b"/static/traced.js")


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    found = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _walk(entry, f"{name}/")
        elif entry.name.rpartition(".")[2] in _TYPES:
            found.append((f"/static/{name}", _read(entry)))
    return found


def _read(file: Traversable) -> Asset:
    return _asset(file.read_bytes(), file.name.rpartition(".")[2])


def _asset(content: bytes, ending: str) -> Asset:
    return Asset(
        content=content,
        compressed=gzip.compress(content, compresslevel=9, mtime=0),
        media_type=_TYPES[ending],
        etag=f'"{hashlib.sha256(content).hexdigest()[:20]}"',
    )


def serve_asset(asset: Asset, request: Request) -> Response:
    """Respond with a file, gzipped if the browser accepts it, or with 304 if it is cached."""
    headers = {"ETag": asset.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(asset.compressed, media_type=asset.media_type, headers={**headers, "Content-Encoding": "gzip"})
    return Response(asset.content, media_type=asset.media_type, headers=headers)
