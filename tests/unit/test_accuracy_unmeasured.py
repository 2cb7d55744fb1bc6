"""Evaluation of foreign files: their spellings, their column types, and unmeasured devices and libraries in them."""

from __future__ import annotations

import csv
import decimal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from measured_tables import write_parquet
from shapewright.core.errors import MeasuredFileError, UnknownDeviceError
from shapewright.hardware.loader import find_measured_device, load_device
from shapewright.measure.accuracy.context import Context, ElementFormat, read_format, read_stored_format
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.accuracy.tables.moe import busiest_load, busiest_loads
from shapewright.pricing.calibration.records import load_record

pa = pytest.importorskip("pyarrow", reason="parquet needs the fit extra")

ROWS = 4
GEMM: Mapping[str, list[Any]] = {
    "device": ["h100_sxm"] * ROWS,
    "library": ["vllm 0.24.0"] * ROWS,
    "kernel": ["k"] * ROWS,
    "dtype": ["bf16"] * ROWS,
    "m": [1, 64, 512, 4096],
    "n": [4096] * ROWS,
    "k": [4096] * ROWS,
    "latency_s": [2e-5, 2e-5, 4e-5, 2.2e-4],
}


def evaluated_rows(folder: Path, **changes: Any) -> int:
    """Return the number of evaluated rows of a gemm.parquet with changed columns."""
    write_parquet(folder / "gemm.parquet", dict(GEMM) | changes)
    return sum(row.rows for row in evaluate_folder(folder).rows)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("gb200_sxm", "gb200"),
        ("b200_sxm", "b200-sxm-180gb"),
        ("B200_HGX", "b200-sxm-180gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 SXM5 80GB", "h100-sxm-80gb"),
        ("h20-sxm", "h20-96gb"),
        ("H20-141GB", "h20-141gb"),
        ("h800", "h800-sxm-80gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm-80gb"),
        ("rtx_pro_6000_server", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("a100", "a100-sxm-40gb"),
        ("a100_80gb", "a100-sxm-80gb"),
        ("A100-80GB-PCIe", "a100-pcie-80gb"),
        ("h100_pcie", "h100-pcie-80gb"),
        ("MI250X (card)", "mi250x-card"),
        ("MI250X (one die)", "mi250x-gcd"),
        ("GB300 (per GPU)", "gb300"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI325X 256GB HBM3E DLC", "mi325x"),
        ("L20", "l20"),
    ],
)
def test_names_of_devices(name: str, device: str) -> None:
    """A device name is matched by its parts, in any order and with any vendor and separators."""
    assert find_measured_device(name).name == device


@pytest.mark.parametrize("name", ["quantum9000", "", "nvidia", "80gb", "gpu", "h1000"])
def test_names_of_no_device(name: str) -> None:
    """A name that determines no board is an error."""
    with pytest.raises(UnknownDeviceError):
        find_measured_device(name)


def test_the_reading_of_a_name_is_noted(tmp_path: Path) -> None:
    """A note states how a name was read if it is not a device file's own."""
    evaluated_rows(tmp_path, device=["A100 80GB"] * ROWS)

    assert "'A100 80GB' is read as a100-sxm-80gb" in evaluate_folder(tmp_path).notes


@pytest.mark.parametrize(
    ("word", "dtype", "stored"),
    [
        ("bfloat16", "bf16", None),
        ("fp8_block", "fp8", None),
        ("float8_e4m3fn", "fp8", None),
        ("nvfp4", "fp4", None),
        ("mxfp4", "fp4", None),
        ("nvfp4_awq", "fp4", None),
        ("int8_wo", "bf16", "int8"),
        ("int4_wo", "bf16", "int4"),
        ("w4a16", "bf16", "int4"),
        ("w4a16_mxfp4", "bf16", "int4"),
        ("w8a8", "fp8", None),
        ("w8a8_int8", "int8", None),
        ("sq", "int8", None),
        ("w4afp8", "fp8", "int4"),
        ("w4a8_mxfp4_mxfp8", "fp8", "int4"),
        ("w4a4", "fp4", None),
        ("w16a16", "bf16", None),
        ("GPTQ", "bf16", "int4"),
    ],
)
def test_words_of_formats(word: str, dtype: str, stored: str | None) -> None:
    """A scheme is priced by its compute and storage formats; an inexact match is noted."""
    found = read_format(word, load_device("b200-sxm-180gb"))

    assert (found.dtype, found.weight_dtype) == (dtype, stored)
    assert bool(found.assumption) == (word not in ("bfloat16", "nvfp4", "mxfp4"))


def test_a_device_without_the_format_stores_it() -> None:
    """fp8 on A100 is stored and widened, as libraries do; an fp8 cache is fp8 on any device."""
    found = read_format("fp8", load_device("a100-sxm-80gb"))

    assert (found.dtype, found.weight_dtype) == ("bf16", "int8")
    assert "a100-sxm-80gb" in found.assumption
    assert read_stored_format("fp8") == ElementFormat("fp8")
    with pytest.raises(MeasuredFileError, match="unknown format 'posit16'"):
        read_format("posit16", load_device("a100-sxm-80gb"))


def test_borrowed_records_are_noted(tmp_path: Path) -> None:
    """Notes state what prices another version, an unknown library and a device without a record."""
    evaluated_rows(tmp_path, library=["vllm 0.19.0", "trtllm 1.2.0", "vllm 0.24.0", ""])
    notes = evaluate_folder(tmp_path).notes

    assert "gemm: 'vllm 0.19.0' is an unmeasured version, priced as vllm 0.24.0" in notes
    assert "gemm: 'trtllm 1.2.0' is an unmeasured library" in notes
    assert sum(note.startswith("gemm: ") for note in notes) == 2
    evaluated_rows(tmp_path, device=["gb300"] * ROWS)
    assert "gemm on gb300: unmeasured, priced by the record of b200-sxm-180gb" in evaluate_folder(tmp_path).notes


def test_note_names_the_tiles_of_older_experts() -> None:
    """A vllm with two default tiles is priced as a later one, and its triton kernels as sglang's."""
    context = Context()
    record = load_record("moe", load_device("h100-sxm-80gb"))
    for library in ("vllm 0.14.0", "vllm 0.19.0", "sglang 0.5.14"):
        context.note_library("moe", library, record)

    assert context.notes == [
        "moe: 'vllm 0.14.0' is an unmeasured version, priced as vllm 0.24.0; "
        "triton's kernels are those of sglang 0.5.14, with the same default tiles",
        "moe: 'vllm 0.19.0' is an unmeasured version, priced as vllm 0.24.0",
    ]


def test_the_measured_library_is_not_called_unmeasured(tmp_path: Path) -> None:
    """The library of a record's default sections is not called unmeasured."""
    prefill = {
        "device": ["h100_sxm"] * 2,
        "library": ["vllm 0.24.0", "trtllm 1.2.0"],
        "kernel": ["k"] * 2,
        "dtype": ["bf16"] * 2,
        "kv_cache_dtype": ["bf16"] * 2,
        "batch_size": [1] * 2,
        "query_len": [4096] * 2,
        "num_heads": [32] * 2,
        "num_kv_heads": [8] * 2,
        "head_dim": [128] * 2,
        "window_size": [0] * 2,
        "latency_s": [3e-4] * 2,
    }
    write_parquet(tmp_path / "attention_prefill.parquet", prefill)

    unmeasured = [note for note in evaluate_folder(tmp_path).notes if "is an unmeasured library" in note]
    assert unmeasured == ["attention: 'trtllm 1.2.0' is an unmeasured library"]


def test_notes_are_limited(tmp_path: Path) -> None:
    """A file of unknown libraries only yields a limited number of notes."""
    many = {name: column * 50 for name, column in GEMM.items()} | {"library": [f"lib {row}" for row in range(200)]}
    evaluated_rows(tmp_path, **many)

    assert len(evaluate_folder(tmp_path).notes) < 80


def test_assumed_formats_are_less_certain(tmp_path: Path) -> None:
    """fp8_block is priced as fp8 with a wider interval, which is noted."""
    slow = [5.0 * time for time in GEMM["latency_s"]]
    evaluated_rows(tmp_path, dtype=["fp8"] * ROWS, latency_s=slow)
    plain = evaluate_folder(tmp_path).rows[0]
    evaluated_rows(tmp_path, dtype=["fp8_block"] * ROWS, latency_s=slow)
    evaluation = evaluate_folder(tmp_path)

    assert evaluation.rows[0].mape == plain.mape
    assert "assumed, with wider intervals: fp8_block as fp8" in evaluation.notes
    assert evaluation.rows[0].dtype == "fp8_block"


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 64, 512, 4096], pa.uint16()),
        pa.array([1.0, 64.0, 512.0, 4096.0], pa.float32()),
        pa.array(["1", "64", " 512 ", "4.096e3"], pa.large_string()),
        pa.array([decimal.Decimal(m) for m in (1, 64, 512, 4096)], pa.decimal128(20, 4)),
        pa.array([1, 64, 512, 4096], pa.int64()).dictionary_encode(),
    ],
    ids=["uint16", "float32", "text", "decimal", "dictionary"],
)
def test_any_type_of_numbers(tmp_path: Path, column: Any) -> None:
    """Numeric columns of any type are read."""
    assert evaluated_rows(tmp_path, m=column) == ROWS


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([1, 10**18, -3, None], pa.int64()), "such as 1e+18"),
        (pa.array(["1", "many", None, "nan"]), "such as 'many'"),
        (pa.array([1.0, float("nan"), float("inf"), 0.5]), "such as nan"),
    ],
    ids=["too large", "words", "not finite"],
)
def test_invalid_sizes_are_counted(tmp_path: Path, column: Any, words: str) -> None:
    """Sizes beyond any device, text and fractions skip their rows, with an example; the rest is evaluated."""
    assert evaluated_rows(tmp_path, m=column) == 1
    reasons = evaluate_folder(tmp_path).skipped["gemm"]
    assert sum(reasons.values()) == ROWS - 1
    assert any(words in reason for reason in reasons)


@pytest.mark.parametrize("column", [pa.array([[1]] * ROWS), pa.array([0] * ROWS, pa.date32())], ids=["list", "date"])
def test_columns_of_something_else(tmp_path: Path, column: Any) -> None:
    """A list or a date is not a number, and a list is not a label."""
    with pytest.raises(MeasuredFileError, match="column 'm' holds"):
        evaluated_rows(tmp_path, m=column)
    if pa.types.is_list(column.type):
        with pytest.raises(MeasuredFileError, match="column 'library' holds"):
            evaluated_rows(tmp_path, library=column)


def test_tables_as_csv(tmp_path: Path) -> None:
    """A csv with a byte order mark, other order, further columns and short lines is read as the parquet file is."""
    with (tmp_path / "gemm.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        names = [*reversed(GEMM), "remark"]
        writer.writerow(names)
        for row in range(ROWS):
            writer.writerow([GEMM[name][row] for name in reversed(GEMM)])
        writer.writerow(["1e-5"])
    evaluation = evaluate_folder(tmp_path)

    assert [(row.rows, row.file) for row in evaluation.rows] == [(ROWS, "gemm.csv")]
    assert sum(evaluation.skipped["gemm"].values()) == 1


def test_one_file_of_a_table_counts(tmp_path: Path) -> None:
    """A csv is ignored if there is a parquet file of the same table, which is noted."""
    (tmp_path / "gemm.csv").write_text("m,n\n1,2\n")

    assert evaluated_rows(tmp_path) == ROWS
    assert "gemm.csv is ignored: gemm.parquet holds the table" in evaluate_folder(tmp_path).notes


def test_invalid_files_are_named(tmp_path: Path) -> None:
    """A folder or a dead link in place of a table is reported."""
    evaluated_rows(tmp_path)
    (tmp_path / "moe.parquet").mkdir()
    (tmp_path / "collectives.parquet").symlink_to(tmp_path / "nowhere")

    assert set(evaluate_folder(tmp_path).unreadable) == {"moe", "collectives"}


def test_duplicate_rows_are_noted(tmp_path: Path) -> None:
    """Duplicate rows are counted again and noted; rows that differ in one column are not duplicates."""
    twice = {name: column * 2 for name, column in GEMM.items()}
    assert evaluated_rows(tmp_path, **twice) == 2 * ROWS
    assert any(f": {ROWS} rows equal" in note for note in evaluate_folder(tmp_path).notes)

    other = twice | {"latency_s": [*GEMM["latency_s"], *(1.01 * time for time in GEMM["latency_s"])]}
    evaluated_rows(tmp_path, **other)
    assert not any("rows equal" in note for note in evaluate_folder(tmp_path).notes)


def test_an_unknown_distribution_leaves_the_others(tmp_path: Path) -> None:
    """Expert rows of an unknown distribution are counted; power_law_1 is the limit of its neighbors."""
    words = ["balanced", "zipf_2", "uniform", "power_law_1.0"]
    sizes = {
        "num_tokens": 256, "hidden_size": 4096, "inter_size": 1536, "topk": 8, "num_experts": 128, "moe_tp_size": 1,
        "moe_ep_size": 1, "latency_s": 5e-4,
    }  # fmt: skip
    labels = {"device": "gb300", "library": "trtllm 1.2.0", "kernel": "moe_torch_flow", "dtype": "fp8_block"}
    columns = {name: [value] * ROWS for name, value in (sizes | labels).items()}
    write_parquet(tmp_path / "moe.parquet", columns | {"distribution": words})
    evaluation = evaluate_folder(tmp_path, by=("part",))

    assert {row.part: row.rows for row in evaluation.rows} == {"balanced": 1, "uniform": 1, "power_law_1.0": 1}
    assert [count for reason, count in evaluation.skipped["moe"].items() if "'zipf_2'" in reason] == [1]
    near = [busiest_load(4096, 8, 128, 8, f"power_law_{alpha}").rows for alpha in ("0.999", "1.0", "1.001")]
    assert near[0] == pytest.approx(near[1], rel=0.01) == near[2]


def test_many_expert_groups_are_rounded() -> None:
    """With many distinct groups, rounded loads stay within 2 % of the exact ones."""
    import numpy as np

    tokens = np.arange(1.0, 8000.0)
    ones = np.ones_like(tokens)
    found = busiest_loads([tokens, 8 * ones, 128 * ones, 8 * ones], "power_law_1.2")
    for place in (10, 63, 700, 7000):
        exact = busiest_load(int(tokens[place]), 8, 128, 8, "power_law_1.2")
        assert found[0, place] == pytest.approx(exact.rows, rel=0.02)


@pytest.mark.parametrize(
    ("device", "ranks", "reason"),
    [
        ("gb200", [2, 8, 32, 72], ""),
        ("b200_sxm", [2, 8, 32, 72], ""),
        ("h100_pcie", [16, 4, 8, 2], "gives no network bandwidth"),
        ("l4", [2, 4, 8, 16], ""),
    ],
)
def test_groups_beyond_a_node(tmp_path: Path, device: str, ranks: list[int], reason: str) -> None:
    """Groups larger than a node cross the network; without a data-sheet rate for it, they are counted."""
    columns = {
        "device": [device] * ROWS, "library": ["nccl 3"] * ROWS, "op_name": ["AllReduce", "all2all", "p2p", "gossip"],
        "num_gpus": ranks, "message_bytes": [1 << 20] * ROWS, "latency_s": [1e-4] * ROWS,
    }  # fmt: skip
    write_parquet(tmp_path / "collectives.parquet", columns)
    evaluation = evaluate_folder(tmp_path)
    reasons = evaluation.skipped["collectives"]

    assert any("unknown op_name 'gossip'" in words for words in reasons)
    assert any(reason in words for words in reasons) if reason else len(reasons) == 1
    assert sum(row.rows for row in evaluation.rows) + sum(reasons.values()) == ROWS
