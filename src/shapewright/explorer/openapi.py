"""What the OpenAPI document says of answers and problems, which the framework cannot know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.explorer.problems import PROBLEM_TYPE

if TYPE_CHECKING:
    from fastapi import FastAPI

OBJECT: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
"""Content of an answer in JSON."""

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status, text in {
        400: "The body is no sound JSON object.",
        403: "The request comes from another site.",
        413: "The body is too large.",
        415: "The body is no JSON.",
        421: "The Host header names another server.",
        422: "What is asked makes no sense; the detail is the command line's one line.",
    }.items()
}
NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {**PROBLEMS[422], "description": "There is nothing of this name."},
    422: {**PROBLEMS[422], "description": "No name is as long as this one."},
}
QUEUE_FULL: dict[int | str, dict[str, Any]] = {429: {**PROBLEMS[422], "description": "Too many wait."}}
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


def describe_problems(app: FastAPI) -> None:
    """Put the form of a problem into the OpenAPI document, in place of the framework's own."""
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
