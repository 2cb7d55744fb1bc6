"""Worker process of one search or design: reads a request from standard input, writes JSON lines to standard output.

A separate process can be killed without harm to the server. Progress lines are ``{"done": n, "of": m}``; the last line
is ``{"result": ..., "of": m}`` or ``{"error": ..., "kind": ...}``. An interrupt (SIGINT) ends the search with the best
so far.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from shapewright.core.errors import ShapewrightError

_PROGRESS_EVERY_S = 0.1
# Lower priority than the server, so that the page stays responsive.
_NICENESS = 5


def main() -> None:
    """Run the search or design requested on standard input."""
    import os

    os.nice(_NICENESS)
    try:
        request = json.loads(sys.stdin.readline())
        if request["kind"] == "design":
            result = run_design(request)
            _write_line({"result": result, "of": result["num_planned"]})
        else:
            result = run_search(request)
            _write_line({"result": result, "of": result["space"]["size"]})
    except ShapewrightError as error:
        _write_line({"error": str(error), "kind": type(error).__name__})
    except KeyboardInterrupt:
        _write_line({"error": "stopped before a shape was found", "kind": "Stopped"})


def run_search(request: dict[str, Any]) -> dict[str, Any]:
    """Run a search and return the JSON output of the command with its text.

    Args:
        request: Fields of SearchRequestBody, and ``calibration``, the path of the server's calibration file.

    Raises:
        ShapewrightError: the request is not valid.
    """
    from shapewright.app.api.searches import search
    from shapewright.app.explorer.device_lookup import DeviceLookup
    from shapewright.app.explorer.requests import Job, job_fields, read_job_model
    from shapewright.app.explorer.views.answers import columns_to_json
    from shapewright.app.explorer.views.figures import speedup_figure
    from shapewright.app.report.optimize.candidates import candidate_columns, describe_letters
    from shapewright.app.report.optimize.search import describe_space
    from shapewright.app.report.outputs.model import plain
    from shapewright.app.report.outputs.search import describe_changes, search_output
    from shapewright.app.report.predict import describe
    from shapewright.optimize.search.request import notes_on_fixed, split_expressible

    _write_line({"done": 0, "of": 0})
    job = Job.model_validate(request["job"])
    fields = job_fields(job)
    model = read_job_model(job)
    # The page offers the same fields for every model: those that this one's format has no key for are left out.
    vary, fixed = split_expressible(model, request["vary"], request["guard"])
    devices = DeviceLookup(request["calibration"])
    device = devices.find(job.device, **job.node_options).with_pricing(uncalibrated=job.uncalibrated)
    result = search(
        model,
        device=device,
        num_parameters=request["num_parameters"],
        tolerance_fraction=request["tolerance_fraction"],
        vary=vary or request["vary"],
        keep=request["keep"],
        guard=request["guard"],
        top=request["top"],
        objective=request["objective"],
        train_tokens=request["train_tokens"],
        workload=fields["workload"],
        layout=fields["layout"],
        software=job.software,
        progress=_progress_writer(),
    )
    found = search_output(result)
    columns = candidate_columns(found.candidates)
    answer = found.to_json()
    return {
        **answer,
        "notes": [
            *answer["notes"],
            *notes_on_fixed(fixed),
            *([] if job.uncalibrated else devices.calibration_notes(device)),
        ],
        "text": {
            "request": describe(found.step),
            "candidates": columns_to_json(columns),
            "pareto": columns_to_json(candidate_columns(found.pareto)),
            "letters": describe_letters([*found.candidates, *found.pareto], columns) if found.candidates else "",
            "changes": [describe_changes(candidate) for candidate in found.candidates],
            "space": describe_space(found),
        },
        "figure": plain(speedup_figure(found)),
    }


# Fields of the workload that a design keeps; its plan chooses the others.
_DESIGN_WORKLOAD = ("seq_len", "dtype", "attention", "optimizer")


def run_design(request: dict[str, Any]) -> dict[str, Any]:
    """Run a design and return the JSON output of the command with its text, its figure, and what to apply.

    Args:
        request: Fields of DesignRequestBody, and ``calibration``, the path of the server's calibration file.

    Raises:
        ShapewrightError: the request is not valid, or nothing fits.
    """
    from shapewright.app.api.designs import design
    from shapewright.app.explorer.device_lookup import DeviceLookup
    from shapewright.app.explorer.requests import Job, job_fields, read_job_model
    from shapewright.app.explorer.views.answers import columns_to_json
    from shapewright.app.explorer.views.figures import design_figure
    from shapewright.app.report.optimize.design import answer_facts, describe_request, describe_space, design_columns
    from shapewright.app.report.outputs.design import design_output
    from shapewright.app.report.outputs.model import plain
    from shapewright.models.write import to_config_json

    _write_line({"done": 0, "of": 0})
    job = Job.model_validate(request["job"])
    devices = DeviceLookup(request["calibration"])
    device = devices.find(job.device, **job.node_options).with_pricing(uncalibrated=job.uncalibrated)
    given = job_fields(job)["workload"]
    workload = {name: value for name, value in given.items() if name in _DESIGN_WORKLOAD}
    result = design(
        read_job_model(job),
        device=device,
        num_devices=request["num_devices"],
        num_parameters=request["num_parameters"],
        train_tokens=request["train_tokens"],
        guard=request["guard"],
        top=request["top"],
        workload=workload,
        software=job.software,
        progress=_progress_writer(),
    )
    found = design_output(result)
    answer = found.to_json()
    return {
        **answer,
        "notes": [*answer["notes"], *([] if job.uncalibrated else devices.calibration_notes(device))],
        "text": {
            "request": describe_request(found),
            "answer": answer_facts(found),
            "designs": columns_to_json(design_columns(found)),
            "space": describe_space(found),
        },
        "figure": plain(design_figure(found)),
        "kept_workload": workload,
        "configs": [to_config_json(result.model, one.config) for one in result.designs],
    }


def _progress_writer() -> Any:
    last_s = time.monotonic()

    def write(done: int, num_shapes: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _PROGRESS_EVERY_S:
            last_s = time.monotonic()
            _write_line({"done": done, "of": num_shapes})

    return write


def _write_line(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
