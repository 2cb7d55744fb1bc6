"""``serve --calibration``: all views price the file's device with its records, and the page states that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from explorer_jobs import ADDRESS
from fastapi.testclient import TestClient

import shapewright
from calibration_files import H100, write_late_calibration
from shapewright.app.cli.commands.serve import command
from shapewright.app.explorer.app import create_app
from shapewright.app.explorer.device_lookup import DeviceLookup
from shapewright.core.errors import CalibrationError
from shapewright.pricing.calibration.file import calibrated_device

JOB: dict[str, Any] = {"preset": "gpt3-125m", "device": "h100_sxm"}


@pytest.fixture
def late(tmp_path: Path) -> Path:
    """A calibration of a device of the package."""
    return write_late_calibration(tmp_path / "late.json", 10.0)


@pytest.fixture
def client(late: Path) -> Iterator[TestClient]:
    """The application with that calibration."""
    with TestClient(create_app(devices=DeviceLookup(str(late))), base_url=ADDRESS) as client:
        yield client


def post(client: TestClient, path: str, **body: Any) -> Any:
    """Post a request and expect success."""
    answer = client.post(f"/api/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_view_is_priced_with_the_records(client: TestClient, late: Path) -> None:
    """By alias too; another device, and a job without records, are priced as ever."""
    own_s = shapewright.predict("gpt3-125m", device=calibrated_device(H100, late)).step_time_s
    usual_s = shapewright.predict("gpt3-125m", device=H100).step_time_s
    remark = "h100-sxm-80gb is priced with the records of late.json: gemm"

    step = post(client, "predict", job=JOB)
    bare = post(client, "predict", job={**JOB, "uncalibrated": True})
    other = post(client, "predict", job={**JOB, "device": "h200-sxm-141gb"})
    swept = post(client, "sweep", job=JOB, field="micro_batch_size", values=[4])
    compared = post(client, "compare", job=JOB, devices=["h100-sxm-80gb", "l40s"])

    assert own_s > 1.05 * usual_s
    assert (step["step_time_s"], step["notes"]) == (own_s, [remark])
    assert remark not in bare["notes"] + other["notes"]
    assert bare["step_time_s"] < own_s
    assert swept["points"][0]["step_time_s"] == own_s
    assert compared["devices"][0]["step_time_s"] == own_s
    assert remark in compared["notes"]


def test_a_search_is_priced_with_the_records(client: TestClient, late: Path) -> None:
    """The process that searches reads the same file."""
    run = client.post("/api/v1/searches", json={"job": JOB, "vary": ["vocab"], "top": 1}).json()
    until_s = time.monotonic() + 60.0
    while run["state"] in ("waiting", "running") and time.monotonic() < until_s:
        time.sleep(0.05)
        run = client.get(f"/api/v1/searches/{run['id']}").json()

    own = shapewright.predict("gpt3-125m", device=calibrated_device(H100, late))
    assert run["state"] == "done", run["error"]
    assert run["result"]["baseline"]["step_time_s"] == own.step_time_s
    assert "late.json" in " ".join(run["result"]["notes"])


def test_page_names_the_calibrated_device(client: TestClient) -> None:
    """The page data name the device and the calibration file."""
    about = client.get("/api/v1").json()

    assert about["calibration"]["text"] == "h100-sxm-80gb is priced with the records of late.json: gemm"
    assert "gemm" in next(one["measured"] for one in about["devices"] if one["name"] == "h100-sxm-80gb")


def test_a_device_that_no_file_describes_can_be_chosen(tmp_path: Path) -> None:
    """It is last in the list, and priced by its calibration."""
    path = write_late_calibration(tmp_path / "mine.json", 10.0, replace(H100, name="my-gpu", title="Mine", aliases=()))
    with TestClient(create_app(devices=DeviceLookup(str(path))), base_url=ADDRESS) as client:
        listed = client.get("/api/v1").json()["devices"]
        step = post(client, "predict", job={**JOB, "device": "My-GPU"})

    assert listed[-1]["name"] == "my-gpu"
    assert step["device"]["title"] == "Mine"


def test_a_calibration_that_is_none_is_refused_at_start(tmp_path: Path) -> None:
    """Before anything listens, in one line that names the file."""
    result = CliRunner().invoke(command, ["--no-browser", "--port", "0", "--calibration", str(tmp_path / "no.json")])

    assert isinstance(result.exception, CalibrationError)
    assert "no.json cannot be read" in str(result.exception)
