"""Measurements of a store next to predictions: only those of the same shape on the same device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from explorer_jobs import ADDRESS
from fastapi.testclient import TestClient

import shapewright
from shapewright.app.cli.commands.serve import command
from shapewright.app.explorer.app import create_app
from shapewright.app.explorer.measured import Measurements, read_measurements
from shapewright.core.errors import StoreError
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import FAILED, OK, Case, Row, Run, row_facts
from shapewright.prediction.model_runs import step_run

JOB = {"preset": "gpt3-2.7b", "device": "h200-sxm-141gb"}
RUN = Run(
    run_id="r1", started_utc="2026-01-01T00:00:00Z", command="bench", suite="models", device="h200-sxm-141gb",
    device_facts={}, driver="1", runtime="CUDA 12.8", torch_version="2.9", library="torch 2.9 CUDA 12.8",
    shapewright_version="0.1.0",
)  # fmt: skip
STEP_S, GEMM_S = 0.5, 0.001


def row(operation: Any, median_s: float, status: str = OK) -> Row:
    """A measurement."""
    facts = row_facts(Case(operation=operation), RUN)
    known = {name: facts[name] for name in facts if name in Row.__dataclass_fields__}
    missing: dict[str, Any] = {
        "measured_utc": "2026-01-01T00:00:00Z", "kernel": "", "error": "", "relative_error": None, "method": "eager",
        "min_s": median_s, "max_s": median_s, "q1_s": median_s, "q3_s": median_s, "ci_half_width_s": 0.0,
        "num_samples": 3, "calls_per_sample": 1, "launch_s": None, "num_inputs": 1, "is_cold": True,
    }  # fmt: skip
    return Row(**{**missing, **known, "status": status, "median_s": median_s})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with steps of 40 heads, a failed step, and a GEMM of the unmodified step."""
    heads = shapewright.predict(**_asked(num_heads=40))
    own = shapewright.predict(**_asked(num_heads=32))
    up = next(one.operation for one in own.operations if one.operation.name == "mlp.up")
    assert isinstance(up, Gemm)
    path = tmp_path / "store.sqlite"
    with Store(path) as made:
        made.add_run(RUN)
        made.add(row(step_run(heads.config, heads.workload), STEP_S))
        made.add(row(step_run(own.config, own.workload), 1e-6, FAILED))
        made.add(row(up, GEMM_S))
    return path


def _asked(num_heads: int) -> dict[str, Any]:
    return {"config": JOB["preset"], "device": JOB["device"], "overrides": {"num_heads": num_heads}}


def test_measured_steps_are_in_the_sweep_view(store: Path) -> None:
    """The measured shape has a point at its measured rate; others, and failed ones, have none."""
    with TestClient(create_app(measured=read_measurements(store)), base_url=ADDRESS) as client:
        body = {"job": JOB, "field": "num_heads", "values": [20, 32, 40], "measure": "tokens"}
        answer = client.post("/api/v1/sweep", json=body).json()
        other = client.post("/api/v1/sweep", json={**body, "job": {**JOB, "device": "h100-sxm-80gb"}}).json()

    assert {point["value"]: point["measured_step_time_s"] for point in answer["points"]} == {
        20: None,
        32: None,
        40: STEP_S,
    }
    (drawn,) = [one for one in answer["figure"]["option"]["series"] if one["name"] == "measured"]
    tokens = shapewright.predict(**_asked(40)).workload
    expected = tokens.micro_batch_size * tokens.seq_len / STEP_S
    assert drawn["data"][0]["value"] == [40, pytest.approx(expected)]
    assert answer["figure"]["texts"]["measured"] == ["num_heads=40: step of 500 ms measured with torch 2.9 CUDA 12.8"]
    assert all(one["name"] != "measured" for one in other["figure"]["option"]["series"])


def test_measured_gemms_are_in_the_tile_view(store: Path) -> None:
    """The tile view of a GEMM includes its measurement if the store has one."""
    with TestClient(create_app(measured=read_measurements(store)), base_url=ADDRESS) as client:
        texts = {
            name: client.post("/api/v1/tiles", json={"job": JOB, "operation": name}).json()["text"]
            for name in ("mlp.up", "mlp.down")
        }

    assert texts["mlp.up"]["measured"] == "1 ms, torch 2.9 CUDA 12.8"
    assert "measured" not in texts["mlp.down"]


def test_of_several_measurements_the_fastest_counts() -> None:
    """Libraries and kernels compete, as they do where a stack chooses among them."""
    gemm = Gemm(name="x", m=128, n=256, k=512)
    found = Measurements([row(gemm, 3.0), row(gemm, 2.0), row(gemm, 4.0)])

    assert len(found) == 1
    best = found.find_gemm(gemm, RUN.device)
    assert best is not None
    assert best.time_s == 2.0


def test_a_store_that_is_none_is_refused_at_start(tmp_path: Path) -> None:
    """Before anything listens, in one line that names the file."""
    result = CliRunner().invoke(command, ["--no-browser", "--port", "0", "--store", str(tmp_path / "none.sqlite")])

    assert isinstance(result.exception, StoreError)
    assert "no store at" in str(result.exception)
