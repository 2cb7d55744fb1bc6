"""One search in a process of its own: a request on standard input, lines of JSON on standard output.

A process can be stopped, and what it holds goes with it. Lines are ``{"done": n, "of": m}`` now and then, and at last
``{"result": ...}`` or ``{"error": ..., "kind": ...}``. An interrupt (SIGINT) ends the search with the best so far.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from shapewright.errors import ShapewrightError

_PROGRESS_EVERY_S = 0.1
# Below the server that waits for it.
_NICENESS = 5


def main() -> None:
    """Run the search that standard input asks for."""
    import os

    os.nice(_NICENESS)
    try:
        _say({"result": run_search(json.loads(sys.stdin.readline()))})
    except ShapewrightError as error:
        _say({"error": str(error), "kind": type(error).__name__})
    except KeyboardInterrupt:
        _say({"error": "stopped before anything was found", "kind": "Stopped"})


def run_search(request: dict[str, Any]) -> dict[str, Any]:
    """Search, and give the result as the command prints it, with its text.

    Args:
        request: The fields of explorer.api_models.SearchRequestBody, and the server's ``calibration``.

    Raises:
        ShapewrightError: what is wrong with it.
    """
    from shapewright.api import search
    from shapewright.explorer.answers import columns_to_json
    from shapewright.explorer.figures import front_figure
    from shapewright.explorer.job import Job, job_fields, read_job_model
    from shapewright.explorer.known_devices import KnownDevices
    from shapewright.report.search_json import search_to_json
    from shapewright.report.search_text import candidate_columns, describe_changes, describe_space

    _say({"done": 0, "of": 0})
    job = Job.model_validate(request["job"])
    fields = job_fields(job)
    devices = KnownDevices(request["calibration"])
    device = devices.named(job.device, **job.nodes)
    result = search(
        read_job_model(job),
        device=device,
        num_parameters=request["num_parameters"],
        tolerance_fraction=request["tolerance_fraction"],
        vary=request["vary"],
        keep=request["keep"],
        guard=request["guard"],
        top=request["top"],
        objective=request["objective"],
        workload=fields["workload"],
        layout=fields["layout"],
        uncalibrated=job.uncalibrated,
        software=job.software,
        progress=_show_progress(),
    )
    answer = search_to_json(result)
    return {
        **answer,
        "notes": [*answer["notes"], *([] if job.uncalibrated else devices.remark(device))],
        "text": {
            "candidates": columns_to_json(candidate_columns(result.candidates)),
            "pareto": columns_to_json(candidate_columns(result.front)),
            "changes": [describe_changes(candidate) for candidate in result.candidates],
            "space": describe_space(result),
        },
        "figure": front_figure(result),
    }


def _show_progress() -> Any:
    last_s = time.monotonic()

    def show(done: int, num_shapes: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _PROGRESS_EVERY_S:
            last_s = time.monotonic()
            _say({"done": done, "of": num_shapes})

    return show


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
