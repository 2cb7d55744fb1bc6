"""Published rows of serving throughput, by metric: which are priced, and with what assumptions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.evaluate import Accuracy, evaluate_folder
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.serving.rows import FORMAT, read_served, server_of

COLUMNS = (*FORMAT.labels, *FORMAT.numbers, *FORMAT.optional)
USUAL = {
    "framework": "vLLM",
    "framework_version": "0.10.0",
    "model_id": "llama3-8b",
    "weight_dtype": "bf16",
    "device": "h100_sxm",
    "num_gpus": 1,
    "tp": 1,
    "input_len": 500,
    "output_len": 100,
    "num_requests": 400,
    "output_tokens_per_s": 4000,
}


def write(folder: Path, *rows: dict[str, object]) -> Path:
    """A table of rows with changed columns; values that hold a comma are quoted."""
    lines = [",".join(str({**USUAL, **row}.get(name, "")) for name in COLUMNS) for row in rows]
    path = folder / "serving_throughput.csv"
    path.write_text("\n".join([",".join(COLUMNS), *lines, ""]), encoding="utf-8")
    return path


def evaluate(folder: Path, **changes: object) -> dict[str, Accuracy]:
    """Errors by table of one row with changed columns."""
    write(folder, changes)
    return {each.table: each for each in evaluate_folder(folder, tables=("serving_throughput",), by=("library",)).rows}


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.9.2", "vllm-0.10"), ("0.6.3.post1", "vllm-0.6"), ("0.30", "vllm-0.19"), ("nightly 2026-02", "vllm-0.16")],
)
def test_a_version_that_is_not_known_is_the_nearest(version: str, name: str) -> None:
    """Rows of any version are priced."""
    assert server_of("vLLM", version).name == name


def test_major_versions_follow_the_minor_ones() -> None:
    """TensorRT-LLM 0.20 is nearer to 1.0 than to 0.17."""
    assert server_of("TensorRT-LLM", "0.20").name == "trtllm-1.0"
    assert server_of("TensorRT-LLM", "0.18").name == "trtllm-0.17"


def test_results_of_mlperf_are_tables_of_their_own(tmp_path: Path) -> None:
    """Lengths are those of the data set; a scenario with limits is predicted to serve no more than offline."""
    offline, server = (
        evaluate(tmp_path, metric=f"mlperf_{scenario}", input_len="", num_requests="", tp="")
        for scenario in ("offline", "server")
    )

    assert list(offline) == list(server) == ["serving_throughput/mlperf"]
    # bias is ln(predicted / measured) of the same measured value
    assert server["serving_throughput/mlperf"].bias <= offline["serving_throughput/mlperf"].bias


def test_an_unknown_task_of_mlperf_is_counted(tmp_path: Path) -> None:
    """A model without a data set is not priced."""
    with pytest.raises(MeasuredFileError, match=r"mlperf_offline: lengths and limits of llama-3\.1-70b are not known"):
        evaluate(tmp_path, metric="mlperf_offline", model_id="llama3-70b", num_gpus=8)


def test_disaggregated_rows_need_their_instances(tmp_path: Path) -> None:
    """Numbers of prefill and decode instances are in the notes."""
    row = {"metric": "online_concurrency", "disaggregated": 1, "num_gpus": 4, "concurrency": 32, "ttft_s": 0.1}
    priced = evaluate(tmp_path, **row, notes="1 prefill + 3 decode workers of TP 1")

    assert set(priced) == {"serving_throughput", "serving_throughput/first_token"}
    with pytest.raises(MeasuredFileError, match="instances that prefill and decode are not stated"):
        evaluate(tmp_path, **row)


def test_devices_beyond_an_instance_hold_replicas(tmp_path: Path) -> None:
    """Eight devices with TP 4 are two replicas; the steps of the scheduler are in version or notes."""
    row = {"metric": "online_request_rate", "request_rate": 4, "num_gpus": 8, "tp": 4}
    columns = read_columns(
        write(
            tmp_path,
            {**row, "framework_version": "0.6.0 (num-scheduler-steps 10)"},
            {**row, "notes": "num-scheduler-steps 15: times are not those of steps"},
            {**row, "tp": 8},
        ),
        FORMAT,
        Counter(),
    )
    first, second, alone = read_served(columns, Context())

    assert first.instance.layout == second.instance.layout
    assert (first.instance.layout.tensor_parallel, first.instance.layout.data_parallel) == (4, 2)
    assert alone.instance.layout.data_parallel == 1
    assert [each.instance.request.server.scheduler_steps for each in (first, second, alone)] == [10, 15, 1]


def test_sharegpt_has_known_lengths(tmp_path: Path) -> None:
    """Rows of that data set are priced without lengths; those of others are not."""
    row = {"metric": "online_request_rate", "request_rate": 4, "input_len": "", "output_len": "", "tpot_s": 0.02}
    priced = evaluate(tmp_path, **row, input_kind="ShareGPT", lengths="dataset")

    assert "serving_throughput/time_per_token" in priced
    with pytest.raises(MeasuredFileError, match="not stated: input_len or output_len"):
        evaluate(tmp_path, **row, input_kind="other")


def test_prompts_of_the_run_before_are_cached(tmp_path: Path) -> None:
    """One source sends the same prompts again at twice the concurrency; a cache that cannot hold them has none."""
    run = {
        "source": "InferenceX token_position_decode_slo (experimental)",
        "framework_version": "nightly 2026-02",
        "metric": "online_concurrency",
    }
    rows = [
        {**run, "input_len": length, "concurrency": level, "num_requests": 10 * level}
        for length in (1000, 100_000)
        for level in (4, 8)
    ]
    other = {**rows[1], "source": "another"}
    table = read_columns(write(tmp_path, *rows, other), FORMAT, Counter())

    cached = [row.instance.request.cached_len for row in read_served(table, Context())]
    assert cached == [0, 325, 0, 0, 0]


def test_states_of_known_prompts_need_room_too(tmp_path: Path) -> None:
    """Caches keep states of recurrent layers of each known prompt, however short: of 80 prompts, but not of 160."""
    run = {
        "source": "InferenceX token_position_decode_slo (experimental)",
        "framework_version": "nightly 2026-02",
        "metric": "online_concurrency",
        "model_id": "qwen3.5-397b-a17b",
        "device": "h200_sxm",
        "num_gpus": 8,
        "tp": 8,
        "input_len": 1024,
        "output_len": 128,
    }
    rows = [{**run, "concurrency": level, "num_requests": 10 * level} for level in (8, 16, 32)]
    table = read_columns(write(tmp_path, *rows), FORMAT, Counter())

    assert [row.instance.request.cached_len for row in read_served(table, Context())] == [0, 332, 0]
