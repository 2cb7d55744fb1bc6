"""Request logs of servers against the simulation, in accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.evaluate import evaluate_folder

RUNS = (
    "run_id,model,device,framework_version,weight_dtype,tp,dp,ep,max_num_seqs,max_num_batched_tokens,kv_cache_tokens\n"
)
ROWS = "run_id,queued_s,input_len,output_len,ttft_s,latency_s\n"


def write_run(folder: Path, model: str = "llama3-8b", *, wait_s: float = 0.0) -> None:
    """Two requests that arrive minutes apart, in rows that are not in order, with the times of an idle H100."""
    (folder / "serving_runs.csv").write_text(
        f"{RUNS}a,{model},h100_sxm,vLLM 0.19.0,bf16,1,1,1,8,2048,100000\n", encoding="utf-8"
    )
    rows = [f"a,{arrival},1000,101,{0.024 + wait_s},{0.024 + wait_s + 0.68}" for arrival in (300.0, 0.0)]
    (folder / "serving_requests.csv").write_text(ROWS + "\n".join(rows), encoding="utf-8")


def test_runs_are_simulated(tmp_path: Path) -> None:
    """Each quantity is a table; an idle server is predicted within 15 %, and a wait that nothing explains is not."""
    write_run(tmp_path)
    rows = {row.table: row for row in evaluate_folder(tmp_path, by=("part",)).rows}
    write_run(tmp_path, wait_s=0.1)
    waited = {row.table: row for row in evaluate_folder(tmp_path).rows}

    assert list(rows) == [
        f"serving_runs/{name}" for name in ("time_per_token", "first_token_p90", "latency", "tokens_per_s")
    ]
    assert all(row.rows == 1 and row.mape < 0.15 for row in rows.values())
    assert rows["serving_runs/latency"].part == "llama-3.1-8b"
    assert waited["serving_runs/first_token_p90"].mape > 0.7
    assert rows["serving_runs/latency"].roofline_mape is not None


def test_runs_that_cannot_be_simulated_are_counted(tmp_path: Path) -> None:
    """An unknown model is named; without its log, the table is unreadable."""
    write_run(tmp_path, model="unknown-1b")
    with pytest.raises(MeasuredFileError, match="no preset of 'unknown-1b'"):
        evaluate_folder(tmp_path)
    (tmp_path / "serving_requests.csv").unlink()
    with pytest.raises(MeasuredFileError, match=r"needs serving_requests\.parquet or \.csv beside it"):
        evaluate_folder(tmp_path)
