"""Worker process of answers that take many predictions, so that single predictions of the server wait for none.

The first line of standard input names the server's files. Each request is a JSON line with the name of an answer, its
time limit and the length of its body, followed by the body. Each reply is a JSON line with ``length``, followed by the
answer, or with ``status``, ``title`` and ``detail`` of a problem. An interrupt (SIGINT) ends the current request.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from shapewright.app.explorer.device_lookup import DeviceLookup
from shapewright.app.explorer.measured import Measurements, read_measurements
from shapewright.app.explorer.requests import SLOW_REQUESTS, build_job_scenario
from shapewright.app.explorer.views import answers, figures, plans, serving
from shapewright.core.deadline import Deadline, TimeLimitError
from shapewright.core.errors import ShapewrightError

if TYPE_CHECKING:
    from shapewright.app.explorer.views.answers import Answer
    from shapewright.prediction.scenario import Scenario

# Lower priority than the server, so that the page stays responsive.
_NICENESS = 5


class Files(NamedTuple):
    """What the server was started with."""

    devices: DeviceLookup
    measured: Measurements


def main() -> None:
    """Answer requests until standard input ends."""
    os.nice(_NICENESS)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not be read as a reply
    requests = sys.stdin.buffer
    current = Deadline(0.0)
    signal.signal(signal.SIGINT, lambda *_: current.cancel())
    given = json.loads(requests.readline())
    measured = read_measurements(given["store"]) if given["store"] else Measurements()
    files = Files(DeviceLookup(given["calibration"]), measured)
    _reply(replies, {"length": 0})
    while line := requests.readline():
        head = json.loads(line)
        current = Deadline(head["limit_s"])
        _reply(replies, *answer(head["name"], requests.read(head["length"]), files, current))


def answer(name: str, body: bytes, files: Files, deadline: Deadline) -> tuple[dict[str, Any], bytes]:
    """Head and content of the reply to one request; errors are those of the server."""
    try:
        with deadline.running():
            found = compute(name, SLOW_REQUESTS[name].model_validate(json.loads(body)), files)
        content = (found if isinstance(found, str) else json.dumps(found, allow_nan=False)).encode()
        return {"length": len(content)}, content
    except ShapewrightError as error:
        status = 503 if isinstance(error, TimeLimitError) else 422
        return {"status": status, "title": type(error).__name__, "detail": str(error)}, b""
    except Exception:
        return {"status": 500, "title": "InternalError", "detail": traceback.format_exc()}, b""


def compute(name: str, body: Any, files: Files) -> Answer | str:
    """Compute an answer.

    Args:
        name: Its name in SLOW_REQUESTS.
        body: Its validated request.
        files: What the server was started with.

    Raises:
        ShapewrightError: the request is not valid.
    """
    devices = files.devices
    match name:
        case "compare":
            return answers.answer_compare(body.job, body.devices, body.usd_per_hour, devices)
        case "plan":
            return plans.answer_plan(body, devices)
        case "serving":
            return serving.answer_serving(body, devices)
    scenario = build_job_scenario(body.job, devices)
    match name:
        case "sweep":
            return figures.answer_sweep(scenario, body.field, body.measure, body.values, files.measured)
    return _OF_A_SCENARIO[name](scenario)


_OF_A_SCENARIO: dict[str, Callable[[Scenario], Answer | str]] = {
    "check": answers.answer_check,
    "memory": answers.answer_capacity,
    "breakdown": figures.answer_breakdown,
    "heat-map": figures.answer_head_grid,
    "report.html": answers.answer_report,
}


def _reply(replies: IO[bytes], head: dict[str, Any], content: bytes = b"") -> None:
    replies.write(json.dumps(head).encode() + b"\n" + content)
    replies.flush()


if __name__ == "__main__":
    main()
