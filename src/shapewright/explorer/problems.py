"""Errors as problem+json (RFC 9457), with the words of the command line."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shapewright.errors import ShapewrightError
from shapewright.explorer.search_jobs import QueueFullError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

PROBLEM_TYPE = "application/problem+json"
_LONGEST_DETAIL = 1000

_LOG = logging.getLogger("shapewright.explorer")


def problem(status: int, title: str, detail: str) -> Response:
    """One problem.

    Args:
        status: HTTP status.
        title: Name of the kind of error, such as ``ConfigError``.
        detail: What is wrong, the value got, what is allowed and what to do, in one line.
    """
    facts = {"type": "about:blank", "title": title, "status": status, "detail": " ".join(detail.split())}
    facts["detail"] = str(facts["detail"])[:_LONGEST_DETAIL]
    return Response(json.dumps(facts), status_code=status, media_type=PROBLEM_TYPE)


def install(app: FastAPI) -> None:
    """Let an application answer every error as a problem."""
    app.add_exception_handler(ShapewrightError, _bad_input)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(QueueFullError, _queue_full)
    app.add_exception_handler(Exception, _unexpected)


async def _bad_input(_request: Request, error: Exception) -> Response:
    return problem(422, type(error).__name__, str(error))


async def _malformed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem(422, "MalformedRequest", describe_validation(error.errors()))


def describe_validation(errors: Any) -> str:
    """The first thing that is wrong with a request's form, in one line."""
    first = errors[0]
    where = ".".join(str(step) for step in first["loc"] if step != "body") or "request body"
    more = f"; {len(errors) - 1} more like it" if len(errors) > 1 else ""
    value = first.get("input")
    got = f", got {ascii(value)[:60]}" if isinstance(value, str | int | float | bool | None) else ""
    return f"{where}: {first['msg']}{got}; see /api/v1/openapi.json{more}"


async def _http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = problem(error.status_code, "HTTP error", str(error.detail))
    for name, value in (error.headers or {}).items():
        found.headers[name] = value
    return found


async def _queue_full(_request: Request, error: Exception) -> Response:
    found = problem(429, "QueueFull", str(error))
    found.headers["Retry-After"] = "5"
    return found


async def _unexpected(request: Request, error: Exception) -> Response:
    _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem(500, "InternalError", "this request found a fault in shapewright; the server's output has its trace")
