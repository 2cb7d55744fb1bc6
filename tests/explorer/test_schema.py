"""Requests generated from the OpenAPI document, valid and invalid: none makes the server fail.

SHAPEWRIGHT_SCHEMA_EXAMPLES says how many requests each operation gets; the default keeps a test run short.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis", reason="fuzzing the API needs schemathesis")

from explorer_jobs import GPT3
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from shapewright.app.explorer.app import create_app

NUM_EXAMPLES = int(os.environ.get("SHAPEWRIGHT_SCHEMA_EXAMPLES", "12"))

# The many requests that walk along each bound of the document are for the long run.
PHASES = {"phases": {"coverage": {"enabled": NUM_EXAMPLES > 100}}}
schema = schemathesis.openapi.from_dict(create_app().openapi(), config=schemathesis.Config.from_dict(PHASES))


@pytest.fixture(scope="module")
def documents(client: TestClient) -> Any:
    """The application's own document."""
    return client.get("/api/v1/openapi.json").json()


def test_the_document_describes_every_answer(documents: Any) -> None:
    """Each request lists its errors, and paths that serve the page are not documented."""
    questions = [operation for methods in documents["paths"].values() for operation in methods.values()]

    assert all(path.startswith("/api/v1") for path in documents["paths"])
    assert all(
        "application/problem+json" in one["responses"]["422"]["content"] for one in questions if "requestBody" in one
    )


@schema.parametrize()
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case: Any, server: str) -> None:
    """Every answer has a status and a content type that the document names, and none is a server error."""
    if isinstance(case.body, dict) and isinstance(case.body.get("job"), dict):
        # Half of the questions get past the names, which random text never would.
        job = case.body["job"]
        if len(str(job)) % 2:
            job["device"], job["preset"], _ = GPT3["device"], GPT3["preset"], job.pop("config", None)
    case.call_and_validate(
        base_url=server.rstrip("/"),
        checks=(not_a_server_error, status_code_conformance, content_type_conformance),
    )
