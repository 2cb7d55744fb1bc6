"""Judging measured tables, on small ones whose answers are known."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapewright.accuracy import TABLES, Accuracy, judge_folder
from shapewright.accuracy.moe import _SIZES as MOE_SIZES
from shapewright.errors import MeasuredFileError
from shapewright.hardware import load_device
from shapewright.operations import Attention, Collective, Gemm, Pointwise
from shapewright.perf.attention import price_attention
from shapewright.perf.calibration import load_record
from shapewright.perf.collectives import price_collective
from shapewright.perf.experts import read_idle_row_share
from shapewright.perf.gemm import price_gemm
from shapewright.perf.pointwise import price_pointwise
from shapewright.question import ask

pa = pytest.importorskip("pyarrow", reason="parquet needs the fit extra")
pq = pytest.importorskip("pyarrow.parquet", reason="parquet needs the fit extra")

H100 = load_device("h100-sxm-80gb")
GEMM_SHAPES = [(1, 4096, 4096), (64, 8192, 1024), (2048, 4096, 4096), (4096, 11008, 4096), (8192, 8192, 8192)]


def write_parquet(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write a table."""
    pq.write_table(pa.table(dict(columns)), path)
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def gemm_columns(latency_s: Any = None, **others: Any) -> dict[str, Any]:
    """Rows of gemm.parquet; as fast as predicted if no times are given."""
    m, n, k = (list(letters) for letters in zip(*GEMM_SHAPES, strict=True))
    if latency_s is None:
        dims = {"m": np.array(m), "n": np.array(n), "k": np.array(k)}
        price = price_gemm(Gemm(name="x", dtype="bf16", **dims), H100, load_record("gemm", H100), library="lib 1")
        latency_s = price.time_s
    words = {"device": "h100_sxm", "library": "lib 1", "kernel": "k", "dtype": "bf16"}
    columns = {"m": m, "n": n, "k": k, "latency_s": latency_s, **{key: [word] * len(m) for key, word in words.items()}}
    return columns | others


def only_row(folder: Path, **keywords: Any) -> Accuracy:
    """Judge a folder that gives one row."""
    rows = judge_folder(folder, **keywords).rows
    assert len(rows) == 1
    return rows[0]


def test_perfect_times_have_no_error(tmp_path: Path) -> None:
    """Measured as predicted: error 0, order perfect, all inside the interval; the roofline is off."""
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    row = only_row(tmp_path)

    assert (row.table, row.device, row.dtype, row.library, row.rows) == ("gemm", H100.name, "bf16", "lib 1", 5)
    assert row.mape == pytest.approx(0.0, abs=1e-12)
    assert row.bias == pytest.approx(0.0, abs=1e-12)
    assert row.kendall_tau == 1.0
    assert row.coverage_90 == 1.0
    assert row.roofline_mape > 0.05


def test_doubled_times(tmp_path: Path) -> None:
    """Measured at twice the prediction: half too small everywhere, bias -ln 2, order still perfect."""
    columns = gemm_columns()
    write_parquet(tmp_path / "gemm.parquet", columns | {"latency_s": 2.0 * columns["latency_s"]})
    row = only_row(tmp_path)

    assert (row.mape, row.median_ape, row.p90_ape) == pytest.approx((0.5, 0.5, 0.5))
    assert row.bias == pytest.approx(-math.log(2.0))
    assert row.kendall_tau == 1.0


def test_shuffled_times_lose_their_order(tmp_path: Path) -> None:
    """Times that belong to other shapes have a tau near 0."""
    random = np.random.default_rng(1)
    m, n, k = (random.integers(1, 128, 2000) * 64 for _ in range(3))
    price = price_gemm(Gemm(name="x", m=m, n=n, k=k), H100, load_record("gemm", H100))
    words = {name: [word] * 2000 for name, word in (("device", "h100_sxm"), ("library", ""), ("kernel", ""))}
    columns = {"m": m, "n": n, "k": k, "latency_s": random.permutation(price.time_s), "dtype": ["bf16"] * 2000, **words}
    write_parquet(tmp_path / "gemm.parquet", columns)

    assert abs(only_row(tmp_path).kendall_tau or 1.0) < 0.1


def test_coverage_is_counted(tmp_path: Path) -> None:
    """Two of five times far above their interval: three fifths are covered."""
    columns = gemm_columns()
    times = columns["latency_s"] * np.array([1.0, 30.0, 1.0, 30.0, 1.0])
    write_parquet(tmp_path / "gemm.parquet", columns | {"latency_s": times})

    assert only_row(tmp_path).coverage_90 == pytest.approx(0.6)


def test_uncalibrated_prices_as_a_sibling_would(tmp_path: Path) -> None:
    """Without its own record a device measured as predicted is predicted differently."""
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())

    assert only_row(tmp_path, uncalibrated=True).mape > 0.01


def test_groupings(tmp_path: Path) -> None:
    """Devices, dtypes, parts and decades are told apart only where asked for."""
    columns = gemm_columns(device=["h100_sxm"] * 3 + ["a100_sxm"] * 2, kernel=["a", "b", "a", "b", "a"])
    columns["latency_s"] = [2e-6, 5e-6, 5e-5, 2e-3, 3e-3]
    write_parquet(tmp_path / "gemm.parquet", columns)

    assert [row.rows for row in judge_folder(tmp_path, by=()).rows] == [5]
    assert {row.device: row.rows for row in judge_folder(tmp_path, by=("device",)).rows} == {
        "a100-sxm-80gb": 2,
        H100.name: 3,
    }
    assert {row.part: row.rows for row in judge_folder(tmp_path, by=("part",)).rows} == {"a": 3, "b": 2}
    decades = {row.decade: row.rows for row in judge_folder(tmp_path, by=("size",)).rows}
    assert decades == {"1-10 us": 2, "10-100 us": 1, "1-10 ms": 2}
    assert list(decades) == ["1-10 us", "10-100 us", "1-10 ms"]
    assert only_row(tmp_path, devices=["a100-sxm-80gb"]).rows == 2


def test_bad_rows_are_counted_and_the_rest_judged(tmp_path: Path) -> None:
    """A negative time, a size of 0, a missing time, an unknown device and an unknown dtype leave their rows out."""
    columns = gemm_columns()
    bad = {key: list(values) * 2 for key, values in columns.items()}
    bad["latency_s"][5], bad["m"][6], bad["latency_s"][7] = -1.0, 0, None
    bad["device"][8], bad["dtype"][9] = "abacus", "fp3"
    write_parquet(tmp_path / "gemm.parquet", bad)
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows] == [5]
    reasons = judgement.skipped["gemm"]
    assert sum(reasons.values()) == 5
    for words in ("latency_s is not a number above 0", "m is not a whole number of at least 1", "'abacus'", "'fp3'"):
        assert any(words in reason for reason in reasons), words


def test_rate_that_a_device_lacks_is_a_reason(tmp_path: Path) -> None:
    """bf16 rows of a device without such products are counted with the reason, others judged."""
    columns = gemm_columns(dtype=["fp16", "fp16", "fp16", "bf16", "bf16"], device=["v100"] * 5)
    write_parquet(tmp_path / "gemm.parquet", columns)
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows] == [3]
    assert [(count, "no bf16 rate" in reason) for reason, count in judgement.skipped["gemm"].items()] == [(2, True)]


def test_a_broken_file_does_not_stop_the_others(tmp_path: Path) -> None:
    """It is named with its reason; alone it is an error."""
    (tmp_path / "moe.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(MeasuredFileError, match=r"moe\.parquet cannot be read as parquet"):
        judge_folder(tmp_path)
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    judgement = judge_folder(tmp_path)

    assert [row.table for row in judgement.rows] == ["gemm"]
    assert "cannot be read" in judgement.unreadable["moe"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m": None}, "gemm.parquet lacks column m"),
        ({"m": ["a"] * 5}, "m is not a whole number of at least 1 .such as 'a'."),
        ({"m": [[1]] * 5}, "column 'm' holds"),
        ({"device": ["abacus"] * 5}, "no device file for 'abacus'"),
    ],
)
def test_nothing_to_judge(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """A file without its columns, with words for numbers, or of unknown devices only is one error that says so."""
    columns = {key: values for key, values in (gemm_columns() | change).items() if values is not None}
    write_parquet(tmp_path / "gemm.parquet", columns)

    with pytest.raises(MeasuredFileError, match=words):
        judge_folder(tmp_path)


def test_folders_without_files(tmp_path: Path) -> None:
    """A folder that is not there, an empty one, a table that is not there and an unknown one are errors."""
    with pytest.raises(MeasuredFileError, match="is not a folder"):
        judge_folder(tmp_path / "nowhere")
    with pytest.raises(MeasuredFileError, match="no measured file"):
        judge_folder(tmp_path)
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    with pytest.raises(MeasuredFileError, match=r"has no moe\.parquet"):
        judge_folder(tmp_path, tables=["moe"])
    with pytest.raises(MeasuredFileError, match="did you mean 'gemm'"):
        judge_folder(tmp_path, tables=["gem"])
    with pytest.raises(MeasuredFileError, match="--by 'colour' is not known"):
        judge_folder(tmp_path, by=["colour"])


def test_attention_decode(tmp_path: Path) -> None:
    """Rows timed as the package prices fused attention with a cache write have no error; a narrow cache is named."""
    context = np.array([128, 4096, 65536])
    operation = Attention(
        name="x",
        batch_size=8,
        query_len=1,
        kv_len=context,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        kv_cache_dtype="fp8",
        writes_cache=True,
    )
    price = price_attention(operation, H100, load_record("attention", H100), hot_cache=True)
    same = {"batch_size": 8, "query_len": 1, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window_size": 0}
    words = {"device": "h100_sxm", "library": "v", "kernel": "k", "dtype": "bf16", "kv_cache_dtype": "fp8"}
    columns = {key: [value] * 3 for key, value in (same | words).items()}
    write_parquet(tmp_path / "attention_decode.parquet", columns | {"context_len": context, "latency_s": price.time_s})
    row = only_row(tmp_path)

    assert (row.table, row.dtype) == ("attention_decode", "bf16+fp8kv")
    assert row.mape == pytest.approx(0.0, abs=1e-12)


def test_collectives(tmp_path: Path) -> None:
    """Rows timed as the package prices them have no error; operations that no one knows are a reason."""
    message = np.array([1e4, 1e6, 1e8])
    operation = Collective(
        name="x", op_name="all_reduce", axis="tensor", message_bytes=message, num_ranks=8, ranks_per_node=8
    )
    price = price_collective(operation, H100, load_record("collectives", H100))
    columns = {
        "op_name": ["all_reduce"] * 3 + ["gossip"],
        "num_gpus": [8] * 4,
        "device": ["h100_sxm"] * 4,
        "library": ["nccl"] * 4,
        "message_bytes": [*message, 1e4],
        "latency_s": [*np.asarray(price.time_s), 1.0],
    }
    write_parquet(tmp_path / "collectives.parquet", columns)
    judgement = judge_folder(tmp_path, by=("part",))

    assert [(row.part, row.rows) for row in judgement.rows] == [("all_reduce x8", 3)]
    assert judgement.rows[0].mape == pytest.approx(0.0, abs=1e-12)
    assert "unknown op_name 'gossip'" in next(iter(judgement.skipped["collectives"]))


def test_pointwise_bytes(tmp_path: Path) -> None:
    """A gated activation of f = 1000 over t = 2 reads 2 x 500 and writes 500 elements a token."""
    tokens = 4096
    device = load_device("a100-sxm-80gb")
    operation = Pointwise(
        name="x", operation="activation", read_bytes=2.0 * tokens * 1000, written_bytes=2.0 * tokens * 500
    )
    price = price_pointwise(operation, device, load_record("pointwise", device))
    row = {"device": "a100_sxm", "library": "v", "model": "m", "operation": "mlp_act", "dtype": "fp16", "gated": True}
    row |= {"num_tokens": tokens, "hidden_size": 256, "intermediate_size": 1000, "num_heads": 2, "num_kv_heads": 1}
    row |= {"tensor_parallel": 2, "latency_s": price.time_s}
    write_parquet(tmp_path / "pointwise.parquet", {key: [value] for key, value in row.items()})

    assert only_row(tmp_path).mape == pytest.approx(0.0, abs=1e-12)


def test_a_record_that_cannot_be_left_aside_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where --uncalibrated finds nobody else's record and prices with the device's own, it says so."""
    monkeypatch.setattr("shapewright.accuracy.context.load_record", lambda kind, device, **_: load_record(kind, device))
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    notes = judge_folder(tmp_path, uncalibrated=True).notes

    assert f"gemm on {H100.name}: no other device has a record, so its own is used after all" in notes


def test_older_software_is_judged_again_after_one_factor(tmp_path: Path) -> None:
    """All rows 1.2 times slower than predicted: no error is left after the factor."""
    device = load_device("a100-sxm-80gb")
    m = np.array([256, 1024, 4096])
    record = load_record("gemm", device, physics_only=True)
    price = price_gemm(Gemm(name="x", dtype="fp16", m=m, n=4096, k=4096), device, record)
    words = {"device": "a100_sxm", "library": "vidur", "model": "m", "kernel": "up", "dtype": "fp16"}
    columns = {key: [value] * 3 for key, value in ({"n": 4096, "k": 4096} | words).items()}
    write_parquet(tmp_path / "linear_layers.parquet", columns | {"m": m, "latency_s": 1.2 * price.time_s})
    rows = {row.table: row for row in judge_folder(tmp_path).rows}

    assert rows["linear_layers"].bias == pytest.approx(-math.log(1.2))
    assert rows["linear_layers/scaled"].mape == pytest.approx(0.0, abs=1e-12)


def test_experts_under_sharding(tmp_path: Path) -> None:
    """Two tensor shards halve the inner width; four devices share experts and rows, and clear those of the others."""
    shared = {"num_tokens": 512, "hidden_size": 2048, "inter_size": 1024, "topk": 8, "num_experts": 32}
    shared |= {"moe_tp_size": 2, "moe_ep_size": 4}
    alone = {**shared, "num_tokens": 128, "inter_size": 512, "num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 1}
    words = {"device": "h100_sxm", "library": "v", "kernel": "k", "dtype": "bf16", "distribution": "balanced"}
    found_s = []
    for row in (shared, alone):
        assert set(row) == set(MOE_SIZES)
        columns = {key: [value] for key, value in (row | words | {"latency_s": 1e-3}).items()}
        write_parquet(tmp_path / "moe.parquet", columns)
        found_s.append(1e-3 * math.exp(only_row(tmp_path).bias))
    # 512 x 8 rows less a quarter; gate and up (2 x 512), activation (512) and output (2048) of each, in 2 bytes; what
    # products wrote is read again.
    idle_bytes = 3072 * (2 * 2 * 512 + 512 + 2 * 2048) * 2
    idle_s = idle_bytes / H100.memory_bandwidth_bytes_per_s * read_idle_row_share(load_record("moe", H100), "bf16")

    assert found_s[0] - found_s[1] == pytest.approx(idle_s)


def test_experts_of_a_skewed_router(tmp_path: Path) -> None:
    """A power law makes the busiest of eight devices slower than even rows do, for the same shape."""
    row = {"num_tokens": 8192, "hidden_size": 4096, "inter_size": 14336, "topk": 2, "num_experts": 8}
    row |= {"moe_tp_size": 1, "moe_ep_size": 8, "latency_s": 1e-3}
    words = {"device": "h100_sxm", "library": "v", "kernel": "k", "dtype": "bf16"}
    columns = {key: [value] * 2 for key, value in (row | words).items()}
    write_parquet(tmp_path / "moe.parquet", columns | {"distribution": ["balanced", "power_law_1.2"]})
    bias = {found.part: found.bias for found in judge_folder(tmp_path, by=["part"]).rows}

    assert bias["power_law_1.2"] > bias["balanced"] + math.log(1.5)


def test_paper_sweeps_add_the_collector_s_cost(tmp_path: Path) -> None:
    """A tiny product of the paper's A100 is priced above its record by the time of one synchronisation, and said so."""
    device = load_device("a100-sxm-40gb")
    record = load_record("gemm", device)
    plain = price_gemm(Gemm(name="x", dtype="fp16", layout="NN", m=64, n=64, k=64), device, record)
    tflops = 2.0 * 64**3 / plain.time_s / 1e12
    row = {"sweep": "mm", "gpu": "a100", "batch": 1, "m": 64, "n": 64, "k": 64, "tflops": tflops}
    write_csv(tmp_path / "paper_gemm.csv", [row])
    judgement = judge_folder(tmp_path)

    assert judgement.rows[0].bias > math.log(2.0)
    assert any("synchronisation" in note for note in judgement.notes)


def paper_layer(**changes: Any) -> dict[str, Any]:
    """A row of paper_layers.csv, empty but for its shape."""
    shape = {"num_heads": 20, "hidden_size": 2560, "micro_batch_size": 4, "seq_len": 2048, "tensor_parallel": 1}
    empty = dict.fromkeys(
        [f"{name}_tflops" for name in ("qkv", "score", "aov", "proj", "mlp_up", "mlp_down")]
        + [f"{name}_{unit}" for name in ("attention", "mlp", "layer") for unit in ("s", "tflops")],
        "",
    )
    return {"log": "l", "gpu": "a100", "flash_attention": 0, **shape, **empty, **changes}


def test_paper_layers(tmp_path: Path) -> None:
    """The paper's own 2.7B layer is within 12 %; placeholders and layers that ran unsharded are left out."""
    rows = [
        paper_layer(layer_s=0.0104, layer_tflops=140.7, mlp_up_tflops=220.0),
        paper_layer(layer_s=0.0104, layer_tflops=1.0),
        paper_layer(layer_s=0.0104, layer_tflops=70.0, tensor_parallel=2),
    ]
    write_csv(tmp_path / "paper_layers.csv", rows)
    judgement = judge_folder(tmp_path)
    found = {row.table: row for row in judgement.rows}

    assert {name: row.rows for name, row in found.items()} == {"paper_layers/mlp_up": 1, "paper_layers/layer": 1}
    assert found["paper_layers/layer"].mape < 0.12
    assert sum(judgement.skipped["paper_layers"].values()) == 2


PUBLISHED_ROW = {
    "source": "lab report", "model": "m", "gpu": "H100-SXM-80GB", "dtype": "bf16", "fsdp_zero": "FSDP",
    "activation_checkpointing": "full", "flash_attention": 1, "num_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 14336, "gated_mlp": 1, "moe": 0,
    "vocab_size": 128256, "seq_len": 4096, "micro_batch": 1, "global_batch": 32, "num_gpus": 16, "tp": 2, "pp": 1,
    "vp": "", "cp": "", "ep": "", "sequence_parallel": "", "iter_time_s": "",
}  # fmt: skip


def test_published_training(tmp_path: Path) -> None:
    """Tokens per second as predicted have no error; rows without a field, and unknown experts, are counted."""
    prediction = ask(
        "llama-3-8b",
        "h100-sxm-80gb",
        overrides={"fused_qkv": True, "fused_gate_up": True},
        workload={
            "micro_batch_size": 1, "global_batch_size": 32, "seq_len": 4096, "dtype": "bf16", "recompute": "full",
        },
        layout={"tensor_parallel": 2, "data_parallel": 8, "zero_stage": 3},
    ).predict()  # fmt: skip
    full = PUBLISHED_ROW | {"tokens_per_s_per_gpu": prediction.tokens_per_s_per_device}
    tokens = 32 * 4096
    timed = PUBLISHED_ROW | {"tokens_per_s_per_gpu": "", "iter_time_s": prediction.step_time_s}
    write_csv(
        tmp_path / "published_training_throughput.csv", [full, timed, full | {"micro_batch": ""}, full | {"moe": 1}]
    )
    judgement = judge_folder(tmp_path)

    assert tokens == prediction.tokens_per_step
    assert (judgement.rows[0].rows, judgement.rows[0].library) == (2, "lab")
    assert judgement.rows[0].mape == pytest.approx(0.0, abs=1e-3)
    assert judgement.skipped["published_training_throughput"] == {
        "not stated: micro_batch": 1,
        "mixture of experts whose shape is not stated and that names no preset as it is": 1,
    }


def test_published_experts_are_a_table_of_their_own(tmp_path: Path) -> None:
    """A mixture of experts takes the shape of the preset it names and its expert axis; dropping tokens is another."""
    layout = {"data_parallel": 64, "expert_parallel": 8, "zero_stage": 1}
    workload = {"micro_batch_size": 2, "global_batch_size": 256, "seq_len": 4096, "dtype": "fp8"}
    prediction = ask("mixtral-8x7b", "b200-sxm-180gb", workload=workload, layout=layout).predict()
    shapeless = dict.fromkeys(
        ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size"), ""
    )
    row = PUBLISHED_ROW | shapeless | {
        "model": "Mixtral-8x7B", "source": "NVIDIA NeMo 25.02", "gpu": "B200-SXM", "dtype": "fp8", "moe": 1, "tp": 1,
        "micro_batch": 2, "global_batch": 256, "num_gpus": 64, "ep": 8, "fsdp_zero": "", "activation_checkpointing": "",
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_device,
    }  # fmt: skip
    rows = [row, row | {"model": "Mixtral-8x7B (tokendrop)"}]
    write_csv(tmp_path / "published_training_throughput.csv", rows)
    judgement = judge_folder(tmp_path)

    (judged,) = judgement.rows
    assert (judged.table, judged.rows, judged.coverage_90) == ("published_training_throughput/moe", 1, 1.0)
    assert judged.mape == pytest.approx(0.0, abs=1e-9)
    assert sum(judgement.skipped["published_training_throughput"].values()) == 1


def test_every_table_has_its_file_s_name() -> None:
    """--table takes the name of the file without its ending."""
    assert {Path(table.file_name).stem for table in TABLES.values()} == set(TABLES)


def test_times_stuck_at_a_floor_are_left_out(tmp_path: Path) -> None:
    """Two dozen layers of one log that take the same 289 ms at every size say nothing of their size; one apart does."""
    columns = [
        paper_layer(num_heads=1, hidden_size=128 * (1 + index), layer_s=0.2888, layer_tflops=2.0) for index in range(24)
    ]
    columns.append(paper_layer(num_heads=64, hidden_size=8192, layer_s=0.4, layer_tflops=50.0))
    write_csv(tmp_path / "paper_layers.csv", columns)
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows if row.table == "paper_layers/layer"] == [1]
    assert (
        judgement.skipped["paper_layers"][
            "layer_s is the floor of its log, whatever the size: a slow start in the slowest iteration"
        ]
        == 24
    )


def test_words_and_fractions_among_numbers_cost_their_rows_alone(tmp_path: Path) -> None:
    """A csv cell with a word, or half a token, leaves its row out under a reason that names the column."""
    rows = [paper_layer(mlp_up_tflops=220.0) for _ in range(4)]
    rows[0]["hidden_size"], rows[1]["seq_len"], rows[2]["mlp_up_tflops"] = "wide", 2048.5, "n/a"
    write_csv(tmp_path / "paper_layers.csv", rows)
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows] == [1]
    reasons = " ".join(judgement.skipped["paper_layers"])
    for words in ("hidden_size is not a whole number", "seq_len is not a whole number", "mlp_up_tflops holds 'n/a'"):
        assert words in reasons


def test_expert_blocks_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    """More chosen experts than there are, or more devices than experts, are counted; the other block is judged."""
    block = {
        "device": "h100_sxm", "library": "vllm 0.24.0", "kernel": "fused", "dtype": "bf16", "distribution": "balanced",
        "num_tokens": 64, "hidden_size": 4096, "inter_size": 14336, "topk": 2, "num_experts": 8, "moe_tp_size": 1,
        "moe_ep_size": 1, "latency_s": 1e-3,
    }  # fmt: skip
    blocks = [block, {**block, "topk": 9}, {**block, "moe_ep_size": 16}]
    write_parquet(tmp_path / "moe.parquet", {name: [each[name] for each in blocks] for name in block})
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows] == [1]
    assert judgement.skipped["moe"] == {"topk or moe_ep_size is above num_experts": 2}


def test_published_rows_with_impossible_numbers_are_named(tmp_path: Path) -> None:
    """An endless sequence and half a micro-batch are named with their value; the whole row is judged."""
    row = PUBLISHED_ROW | {"tokens_per_s_per_gpu": 8000.0}
    rows = [row, row | {"seq_len": "inf"}, row | {"micro_batch": 1.5}]
    write_csv(tmp_path / "published_training_throughput.csv", rows)
    judgement = judge_folder(tmp_path)

    assert judgement.rows[0].rows == 1
    assert judgement.skipped["published_training_throughput"] == {
        "seq_len=inf is no whole number from 1 to 1e+09": 1,
        "micro_batch=1.5 is no whole number from 1 to 1e+09": 1,
    }


def test_regret_of_choosing_heads(tmp_path: Path) -> None:
    """Two layers of one size: the one predicted faster (fewer, wider heads) was twice as slow, which is the regret."""
    rows = [
        paper_layer(num_heads=20, layer_s=0.02, layer_tflops=70.0),
        paper_layer(num_heads=80, layer_s=0.01, layer_tflops=140.0),
        paper_layer(hidden_size=5120, num_heads=40, layer_s=0.04, layer_tflops=140.0),
    ]
    write_csv(tmp_path / "paper_layers.csv", rows)
    (found,) = judge_folder(tmp_path).rows

    assert (found.regret_groups, found.regret_median, found.regret_p90) == (1, pytest.approx(1.0), pytest.approx(1.0))
