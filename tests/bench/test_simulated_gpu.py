"""A campaign on a simulated H200, end to end: measure, kill, resume, calibrate, predict, evaluate."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shapewright
from command_line import run
from shapewright.hardware.loader import load_device
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import OK, Case, Row

torch = pytest.importorskip("torch", reason="measuring needs the bench extra")
pytest.importorskip("pandas", reason="calibrating needs the fit extra")

DEVICE = "h200-sxm-141gb"
PROGRAM = str(Path(__file__).with_name("simulated_gpu.py"))
# A factor of 1.12 on one alignment class, 5 % less bandwidth, 3 % noise and some outliers. The memory pools of graphs
# fill the device unless they are freed.
SETTINGS = {"class_bytes": 8, "class_factor": 1.12, "bandwidth_factor": 0.95, "noise": 0.03, "strays": 0.02,
            "oom_bytes": 60e9}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store of a campaign that was killed and resumed."""
    path = tmp_path_factory.mktemp("campaign") / "h200.sqlite"
    root = str(Path(shapewright.__file__).parents[1])
    suites = ["bench", "alignment,pointwise", "--dtype", "bf16", "--budget", "100s", "--store", str(path)]
    options: dict[str, Any] = {
        "env": {**os.environ, "SIMULATED_GPU": json.dumps(SETTINGS), "PYTHONPATH": root},
        "stdout": subprocess.PIPE,
        "text": True,
    }
    first = subprocess.Popen([sys.executable, PROGRAM, *suites], **options)
    for _ in range(1000):
        time.sleep(0.05)
        if path.exists() and count_rows(path) > 50:
            break
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = count_rows(path)
    again = subprocess.run([sys.executable, PROGRAM, *suites], **options, check=False)

    assert again.returncode == 0, again.stdout
    assert 50 < before < count_rows(path)
    return path


def count_rows(path: Path) -> int:
    """Number of committed rows."""
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        return int(connection.execute("SELECT count(*) FROM measurements").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


@pytest.fixture(scope="module")
def rows(store: Path) -> list[Row]:
    """All rows of the campaign."""
    with Store(store, read_only=True) as opened:
        assert opened.verify() == []
        return opened.rows()


def test_medians_equal_the_device_time(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row was replayed from a graph, and its time does not include the submission by the host."""
    monkeypatch.syspath_prepend(str(Path(PROGRAM).parent))
    import simulated_gpu

    monkeypatch.setattr(simulated_gpu, "SETTINGS", SETTINGS)
    device = load_device(DEVICE)
    some = rows[:: len(rows) // 100]
    true_s = [
        simulated_gpu.true_s(
            Case(operation=row.operation(), variant=row.variant, row_width=int(row.sizes.get("row_width", 0))), device
        )
        for row in some
    ]
    off = np.array([float(row.median_s or 0.0) for row in some]) / np.array(true_s) - 1.0

    assert {(row.status, row.method) for row in rows} == {(OK, "graph")}
    assert len(rows) > 900
    assert np.abs(off).max() < 0.01
    assert abs(float(np.median(off))) < 0.001
    assert all((row.launch_s or 0.0) < 2e-5 for row in rows)
    assert all(row.state_after == {"sm_clock_hz": 1.98e9, "memory_clock_hz": 1.98e9} for row in rows)


def test_a_fit_recovers_simulated_factors(store: Path, tmp_path: Path, capsys: Any) -> None:
    """A fit recovers a 12 % alignment factor and a 5 % bandwidth factor; held-out errors are close to the noise.

    Every command accepts the calibration file, and the intervals cover the measured rows.
    """
    path = str(tmp_path / "own.json")
    code, out, _ = run(["calibrate", "--store", str(store), "-o", path, "--json"], capsys)
    errors = {entry["kind"]: entry for entry in json.loads(out)["errors"]}
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    factors = content["records"]["gemm"]["parameters"]["dtypes"]["bf16"]["alignment_factor"]
    kinds = content["records"]["pointwise"]["parameters"]["kinds"]

    assert code == 0
    for role in ("contracted", "free"):
        # The packaged calibration has factors of 1 for 4 and 8 bytes.
        assert factors[role]["4"] / factors[role]["8"] == pytest.approx(1.12, abs=0.03)
    assert errors["gemm"]["mape"] < 0.045
    assert errors["pointwise"]["mape"] < 0.045

    def priced_s(*options: str) -> float:
        words = ["predict", "gpt3-2.7b", "--device", DEVICE, "--json", *options]
        return float(json.loads(run(words, capsys)[1])["step_time_s"])

    own_s, package_s = priced_s("--calibration", path), priced_s()
    assert 1.0 < own_s / package_s < 1.06
    assert kinds["residual"]["in_table"]
    code, out, _ = run(["accuracy", str(store.parent), "--table", "store", "--calibration", path, "--json"], capsys)
    judged = {entry["table"]: entry for entry in json.loads(out) if entry["dtype"] == "bf16"}
    assert code == 0
    assert judged["store/gemm"]["coverage_90"] > 0.85
    assert judged["store/pointwise"]["coverage_90"] > 0.85
