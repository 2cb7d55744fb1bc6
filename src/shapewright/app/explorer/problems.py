"""Errors as problem+json (RFC 9457), with the messages of the command line, and their OpenAPI description."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shapewright.app.explorer.search_jobs import QueueFullError
from shapewright.core.deadline import TimeLimitError
from shapewright.core.errors import ShapewrightError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import Scope

PROBLEM_TYPE = "application/problem+json"
_MAX_DETAIL_LENGTH = 1000

OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
"""Content of an answer in JSON, for OpenAPI."""

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status, text in {
        400: "The body is not a valid JSON object.",
        403: "The request comes from another origin.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        421: "The Host header names another server.",
        422: "The request is not valid; the detail is the message of the command line.",
        503: "The answer takes longer than the server allows.",
    }.items()
}
NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {**PROBLEMS[422], "description": "Not found."},
    422: {**PROBLEMS[422], "description": "The name is too long."},
}
QUEUE_FULL: dict[int | str, dict[str, Any]] = {429: {**PROBLEMS[422], "description": "Too many requests are waiting."}}
_PROBLEM_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}

_LOG = logging.getLogger("shapewright.app.explorer")


def problem(status: int, title: str, detail: str) -> Response:
    """Make a problem response.

    Args:
        title: Name of the error class, such as ``ConfigError``.
        detail: Message: what is wrong, the value, what is allowed and what to do, in one line.
    """
    facts = {"type": "about:blank", "title": title, "status": status, "detail": " ".join(detail.split())}
    facts["detail"] = str(facts["detail"])[:_MAX_DETAIL_LENGTH]
    return Response(json.dumps(facts), status_code=status, media_type=PROBLEM_TYPE)


def install_handlers(app: FastAPI) -> None:
    """Make an application answer every error with a problem response."""
    app.add_exception_handler(ShapewrightError, _bad_input)
    app.add_exception_handler(TimeLimitError, _too_long)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(QueueFullError, _queue_full)
    app.add_exception_handler(Exception, _unexpected)


async def _bad_input(_request: Request, error: Exception) -> Response:
    return problem(422, type(error).__name__, str(error))


async def _too_long(_request: Request, error: Exception) -> Response:
    return problem(503, type(error).__name__, str(error))


async def _malformed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem(422, "MalformedRequest", describe_validation(error.errors()))


def describe_validation(errors: Any) -> str:
    """First validation error of a request, in one line."""
    first = errors[0]
    where = ".".join(str(step) for step in first["loc"] if step != "body") or "request body"
    more = f"; {len(errors) - 1} more errors" if len(errors) > 1 else ""
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
    return internal_error(request.scope, error)


def internal_error(scope: Scope, error: Exception) -> Response:
    """Log an unexpected error with its traceback, and answer without details."""
    _LOG.error("%s %s failed", scope["method"], ascii(scope["path"])[:200], exc_info=error)
    return problem(500, "InternalError", "internal error of shapewright; see the traceback in the server's output")


def describe_problems(app: FastAPI) -> None:
    """Replace the framework's validation errors in the OpenAPI document by the schema of a problem."""
    document = app.openapi()
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = _PROBLEM_SCHEMA
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for methods in document["paths"].values():
        for operation in methods.values():
            wrong = operation.get("responses", {}).get("422", {})
            wrong.get("content", {}).pop("application/json", None)
            if not wrong.get("content"):
                operation["responses"].pop("422", None)
    app.openapi_schema = document
