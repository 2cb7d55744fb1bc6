"""Import of files from other collectors: dimensions, layouts, bytes and repetitions."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shapewright.app.cli.commands.store import command
from shapewright.core.errors import MeasuredFileError, ShapewrightError
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.store.database import Store
from shapewright.measure.store.export import export_store
from shapewright.measure.store.imports.files import import_files
from shapewright.measure.store.imports.measured import Overrides
from shapewright.measure.store.record import FAILED, OK, Row
from shapewright.prediction.model_runs import LayerRun, StepRun

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "num_sms": 132, "memory_bytes": 85e9, "torch": "2.9.0", "cuda": "13.0"}


def imported(tmp_path: Path, name: str, text: str, **overrides: str) -> list[Row]:
    """Rows of one file of text."""
    source = tmp_path / name
    source.write_text(text, encoding="utf-8")
    import_files(tmp_path / "s.sqlite", [source], Overrides(**overrides))
    with Store(tmp_path / "s.sqlite", read_only=True) as store:
        return store.rows()


def sizes_of(row: Row) -> tuple[int | None, ...]:
    """Dimensions of a GEMM."""
    return row.batch, row.m, row.n, row.k


def test_cookbook_letters_are_renamed(tmp_path: Path) -> None:
    """The cookbook's (m, n) x (n, k) is renamed to BLAS letters; sequences that share a weight are one GEMM."""
    text = (
        "Elapsed time for 1024x1280x512: 0.000\n"
        "Throughput (in TFLOP/s) for 1024x1280x512: 50.0\n" + "-" * 80 + "\n"
        "Throughput (in TFLOP/s) for mlp_h_to_4h (4x4096x16384, b=2048): 241.128\n"
        "Throughput (in TFLOP/s) for bmm (128x1024x2048x256): 200\n"
        "Attention throughput (in TFLOP/s): 48.167\n"
    )
    rows = imported(tmp_path, "mm.out", text, device="a100", library="torch 1.13")

    expected = [("mm", (1, 1024, 512, 1280), "NN"), ("mlp_h_to_4h", (1, 8192, 16384, 4096), "NT"),
                ("bmm", (128, 1024, 256, 2048), "NN")]  # fmt: skip
    assert [(row.name, sizes_of(row), row.layout) for row in rows] == expected
    # 2 x 1024 x 512 x 1280 = 1.342e9 FLOPs at 50 TFLOP/s
    assert rows[0].median_s == pytest.approx(2 * 1024 * 512 * 1280 / 50e12)
    assert {(row.device, row.dtype, row.library) for row in rows} == {("a100-sxm-40gb", "fp16", "torch 1.13")}


def test_a_missing_library_is_named_after_the_file(tmp_path: Path) -> None:
    """Logs without a library get one named after the file, so that their rows are not mixed."""
    text = "Throughput (in TFLOP/s) for 1024x1280x512: 50.0\n"

    assert [row.library for row in imported(tmp_path, "mm.out", text, device="a100")] == ["unknown, from mm.out"]


MAMF_HEAD = (
    "** Dtype: torch.bfloat16\n"
    "- _CudaDeviceProperties(name='NVIDIA H100 80GB HBM3', major=9, total_memory=81110MB, multi_processor_count=132)\n"
    "- torch=2.6.0\n"
)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("     1 |  756.1(mean)  700(median)  762.3(max) @ 256x4096x2048   | best:  756.1(mean)\r", (256, 4096, 2048)),
        ("     1 |  700.0 TFLOPS @ 256x4096x2048    | best:  700.0 TFLOPS @ 256x4096x2048", (256, 4096, 2048)),
        ("    18  256x4096x2048   698.4  700.0  701.6  698.4   506  1980  <- best mean", (256, 4096, 2048)),
        ("Tried 7 shapes => the best outcomes were:\nmean:   700.0 TFLOPS @ 256x4096x2048 (MxNxK)", (256, 4096, 2048)),
    ],
    ids=["second version", "first version", "later versions", "summary alone"],
)
def test_mamf_output_is_read(lines: str, expected: tuple[int, int, int], tmp_path: Path) -> None:
    """Each version of mamf-finder's output is read, with medians if available, and device and torch from its header."""
    (row,) = imported(tmp_path, "mamf.txt", MAMF_HEAD + lines + "\n")

    assert (row.m, row.n, row.k) == expected
    assert row.median_s == pytest.approx(2 * 256 * 4096 * 2048 / 700e12)
    assert (row.device, row.library, row.dtype, row.layout) == ("h100-sxm-80gb", "torch 2.6.0", "bf16", "NT")


def test_other_lines_of_a_log_take_no_memory(tmp_path: Path) -> None:
    """GEMMs in a long training log are found without loading the whole file into memory."""
    noise = "iteration 1234/5000 | elapsed time per iteration (ms): 1234.5 | loss: 3.14\n" * 20_000
    rates = [f"Throughput (in TFLOP/s) for 1024x{64 * n}x1024: 100.0\n" for n in (1, 2, 3)]
    log = tmp_path / "job.out"
    log.write_text("".join(noise + rate for rate in rates), encoding="utf-8")

    tracemalloc.start()
    result = import_files(tmp_path / "s.sqlite", [log], Overrides(device="a100", library="torch 2.0"))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert result.counts["added"] == 3
    assert peak_bytes < 0.5 * log.stat().st_size


def campaign(tmp_path: Path, records: list[dict[str, Any]], environment: dict[str, Any]) -> Path:
    """A folder of records in the format of the older script."""
    (tmp_path / "environment.jsonl").write_text(json.dumps(environment) + "\n", encoding="utf-8")
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


LINEAR = {"tokens": 128, "fan_in": 64, "fan_out": 96, "dtype": "bf16"}
ATTENTION = {"micro_batch": 2, "seq": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "backend": "flash",
             "causal": True}  # fmt: skip
BLOCK = {"hidden": 64, "num_heads": 4, "num_kv_heads": 2, "ffn": 256, "micro_batch": 1, "seq": 32, "attention": "fused"}
RECORDS: list[dict[str, Any]] = [
    {"block": "linear_odd", "case": {**LINEAR, "kind": "forward"}, "time_s": 1e-5, "samples": 7, "method": "graph"},
    {"block": "linear_odd", "case": {**LINEAR, "kind": "dgrad"}, "time_s": 2e-5},
    {"block": "linear_odd", "case": {**LINEAR, "kind": "wgrad"}, "time_s": 3e-5},
    {"block": "batched", "case": {"batch": 3, "seq": 32, "head_dim": 20, "which": "value"}, "time_s": 4e-6},
    {"block": "attention", "case": {**ATTENTION, "backward": False}, "time_s": 1e-5},
    {"block": "attention", "case": {**ATTENTION, "backward": True}, "time_s": 4e-5},
    {"block": "pointwise", "case": {"operation": "add", "tokens": 8, "width": 16}, "time_s": 1e-6},
    {"block": "pointwise", "case": {"operation": "softmax", "tokens": 8, "width": 16}, "error": "out of memory"},
    {"block": "layer", "case": {**BLOCK, "gated": True, "backward": True, "compiled": True}, "time_s": 1e-3},
    {
        "block": "model",
        "case": {**BLOCK, "gated": False, "num_layers": 2, "vocab": 257},
        "time_s": 1e-2,
        "peak_memory_bytes": 1e6,
    },
    {"block": "laser", "case": {}, "time_s": 1e-3},
]


def test_campaign_records_are_read(tmp_path: Path) -> None:
    """Records are read with the shape and layout of each pass; backward times exclude forward; errors are kept."""
    result = import_files(tmp_path / "s.sqlite", [campaign(tmp_path, RECORDS, H100)])
    with Store(tmp_path / "s.sqlite", read_only=True) as store:
        rows, (run, *_) = store.rows(), store.runs()

    gemms = [(row.name, sizes_of(row), row.layout) for row in rows if row.kind == "gemm"]
    assert gemms == [
        ("linear.forward", (1, 128, 96, 64), "NT"),
        ("linear.dgrad", (1, 128, 64, 96), "NN"),
        ("linear.wgrad", (1, 96, 64, 128), "TN"),
        ("attention.value", (3, 32, 20, 32), "NN"),
    ]
    forward, backward = (row for row in rows if row.kind == "attention")
    assert (forward.median_s, backward.median_s) == (1e-5, pytest.approx(3e-5))
    assert isinstance(operation := backward.operation(), Attention)
    assert (operation.is_backward, operation.num_kv_heads, backward.variant) == (True, 2, "flash")
    added, failed = (row for row in rows if row.kind == "pointwise")
    assert (added.variant, failed.variant) == ("", "")  # both run under their own name
    assert isinstance(moved := added.operation(), Pointwise)
    assert (moved.read_bytes, moved.written_bytes, added.status) == (2 * 8 * 16 * 2, 8 * 16 * 2, OK)
    assert (failed.status, failed.error, failed.median_s) == (FAILED, "out of memory", None)
    assert (run.device, run.library) == ("h100-sxm-80gb", "torch 2.9.0 cuda 13.0")
    layer, step = (row.operation() for row in rows if row.kind in ("layer", "step"))
    assert isinstance(layer, LayerRun)
    assert isinstance(step, StepRun)
    assert (layer.config_and_workload()[0].norm, layer.passes) == ("rmsnorm", "forward+backward")
    assert step.config_and_workload()[0].norm == "layernorm"
    assert [row.variant for row in rows if row.kind == "layer"] == ["compiled"]
    assert [row.figures for row in rows if row.kind == "step"] == [{"peak_memory_bytes": 1e6}]
    assert list(result.skipped.values()) == [{"laser: unknown block": 1}]


def test_campaign_records_have_formats_and_positions(tmp_path: Path) -> None:
    """The format of a record is read, bf16 by default; gated models have no learned positions."""
    model = {**BLOCK, "num_layers": 2, "vocab": 257}
    records = [
        {"block": "linear", "case": {**LINEAR, "kind": "forward", "dtype": "fp16"}, "time_s": 1e-5, "samples": 7},
        {"block": "attention", "case": {**ATTENTION, "backward": True}, "time_s": 4e-5},
        *({"block": "model", "case": {**model, "gated": is_gated}, "time_s": 1e-2} for is_gated in (False, True)),
    ]
    result = import_files(tmp_path / "s.sqlite", [campaign(tmp_path, records, H100)])
    with Store(tmp_path / "s.sqlite", read_only=True) as store:
        gemm, *models = store.rows()

    assert list(result.skipped.values()) == [{"attention backward without its forward row": 1}]
    assert (gemm.dtype, gemm.num_samples, {row.dtype for row in models}) == ("fp16", 7, {"bf16"})
    positions = []
    for row in models:
        operation = row.operation()
        assert isinstance(operation, StepRun)
        positions.append(operation.config_and_workload()[0].position_embedding)
        assert (row.num_samples, row.calls_per_sample, row.num_inputs) == (0, 0, 0)
    assert positions == ["learned", "none"]


def test_campaign_parquet_equals_json_lines(tmp_path: Path) -> None:
    """Records in parquet, with the case as a struct or as text, give the same rows as JSON lines."""
    pq = pytest.importorskip("pyarrow.parquet", reason="parquet needs the fit extra")
    import pyarrow as pa

    found = []
    for number, records in enumerate((RECORDS, [{**one, "case": json.dumps(one["case"])} for one in RECORDS])):
        campaign(tmp_path, [], H100)
        names = ("block", "case", "time_s", "error", "peak_memory_bytes")
        columns = {name: [record.get(name) for record in records] for name in names}
        pq.write_table(pa.table(columns), tmp_path / "r.parquet")
        import_files(tmp_path / f"{number}", [tmp_path / "r.parquet"])
        with Store(tmp_path / f"{number}", read_only=True) as store:
            found.append([(row.key, row.median_s) for row in store.rows()])

    assert len(found[0]) == 10
    assert found[0] == found[1]


def test_cpu_records_are_fp32(tmp_path: Path) -> None:
    """Records of a CPU are fp32, whatever their dtype."""
    import_files(tmp_path / "s", [campaign(tmp_path, RECORDS[:1], {"torch": "2.9.0"})])
    with Store(tmp_path / "s", read_only=True) as store:
        (row,) = store.rows()

    assert (row.device, row.dtype) == ("cpu", "fp32")


TABLES = {
    "gemm.csv": (
        "device,library,kernel,dtype,m,n,k,latency_s\nh100_sxm,vllm 1,default,bf16,8,16,32,1e-5\n",
        Gemm(name="gemm", dtype="bf16", m=8, n=16, k=32, layout="NT"),
    ),
    "paper_gemm.csv": (
        "sweep,gpu,batch,m,n,k,tflops\nbmm_x,v100,2,8,16,32,0.5\n",
        Gemm(name="bmm_x", dtype="fp16", m=8, n=16, k=32, batch=2, layout="NN"),
    ),
    "attention_decode.csv": (
        "device,library,kernel,dtype,kv_cache_dtype,batch_size,query_len,num_heads,num_kv_heads,head_dim,window_size,"
        "latency_s,context_len\nl40s,vllm 1,fa,bf16,fp8,2,1,8,2,64,0,1e-5,100\n",
        Attention(
            name="attention.decode", dtype="bf16", kv_cache_dtype="fp8", batch_size=2, query_len=1, kv_len=100,
            num_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, writes_cache=True,
        ),
    ),
    "pointwise.csv": (
        "device,library,model,operation,dtype,num_tokens,hidden_size,intermediate_size,gated,num_heads,num_kv_heads,"
        "tensor_parallel,latency_s\na100_sxm,vidur,llama,mlp_act,fp16,4,8,16,1,2,2,2,1e-5\n",
        # 4 tokens of 16 / 2 elements of 2 bytes, written once, read twice for the gate
        Pointwise(name="mlp_act", dtype="fp16", operation="activation", read_bytes=128.0, written_bytes=64.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_become_operations(name: str, tmp_path: Path) -> None:
    """Rows of measured tables become operations."""
    text, expected = TABLES[name]
    (row,) = imported(tmp_path, name, text)

    assert row.operation() == expected


def test_phi_s_rows_are_those_of_its_layers(tmp_path: Path) -> None:
    """phi-2 adds attention and MLP to its residual stream, each in a kernel, and has LayerNorm."""
    head, _ = TABLES["pointwise.csv"][0].split("\n", 1)
    row = "a100_sxm,vidur,phi-2,{},fp16,4,16,32,0,2,2,1,1e-5"
    added, norm = imported(
        tmp_path, "pointwise.csv", "\n".join([head, row.format("add"), row.format("input_layernorm")])
    )
    # 4 tokens of 16 elements of 2 bytes: read twice and written once by each addition, read and written by the norm
    sizes = {"read_bytes": 512.0, "written_bytes": 256.0, "num_kernels": 2}

    assert added.operation() == Pointwise(name="add", dtype="fp16", operation="residual", **sizes)  # type: ignore[arg-type]
    assert norm.operation() == Pointwise(
        name="input_layernorm", dtype="fp16", operation="layernorm", read_bytes=128.0, written_bytes=128.0
    )
    assert {entry.sizes["row_width"] for entry in (added, norm)} == {16}


def test_paper_layers_become_gemms(tmp_path: Path) -> None:
    """Each rate of a paper layer becomes a GEMM, divided by tensor parallelism."""
    head = "log,gpu,num_heads,hidden_size,micro_batch_size,seq_len,tensor_parallel,qkv_tflops,score_tflops,aov_tflops"
    (qkv, score) = imported(tmp_path, "l.csv", f"{head}\nx,a100,8,64,2,16,2,100,50,\n")

    # q, k and v of 64 / 2 columns each; 2 sequences x 8 heads / 2 of width 8
    assert (sizes_of(qkv), sizes_of(score)) == ((1, 32, 96, 64), (8, 16, 16, 8))


def test_equal_rows_become_repetitions(tmp_path: Path) -> None:
    """Repeated measurements in a file become repetitions; importing the file again adds nothing."""
    text = "sweep,gpu,batch,m,n,k,tflops\nx,v100,1,8,16,32,0.5\nx,v100,1,8,16,32,0.4\nx,v100,1,8,16,32,\n"
    rows = imported(tmp_path, "p.csv", text)

    assert [row.repetition for row in rows] == [0, 1]
    again = import_files(tmp_path / "s.sqlite", [tmp_path / "p.csv"])
    assert again.counts == {"added": 0, "replaced": 0, "kept": 2}
    assert again.skipped == {str(tmp_path / "p.csv"): {"no time above zero": 1}}


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_an_export_is_imported_completely(form: str, tmp_path: Path) -> None:
    """An exported store is restored with all rows and runs."""
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="parquet needs the fit extra")
    import_files(tmp_path / "a", [campaign(tmp_path, RECORDS, H100)])
    with Store(tmp_path / "a", read_only=True) as store:
        export_store(store, tmp_path / "t", format_name=form)
        expected = store.rows(), store.runs()
    import_files(tmp_path / "b", [tmp_path / "t" / f"measurements.{form}"])
    with Store(tmp_path / "b", read_only=True) as store:
        assert (store.rows(), {run.run_id: run for run in store.runs()}) == (
            expected[0],
            {run.run_id: run for run in expected[1]},
        )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.out", "Throughput (in TFLOP/s) for 8x8x8: 1.0\n", "does not name the measured device"),
        ("x.txt", "hello\n", "not a log of"),
        ("x.csv", "a,b\n1,2\n", "columns of no supported table"),
        ("x.csv", "device,moe_ep_size\nx,1\n", "whole expert blocks"),
        ("x.jsonl", '{"block": 1}\n', "lacks block or case"),
        ("x.jsonl", '{"block": "batched", "case": {}}\n{"block": 1}\n', "lacks block or case"),
        ("x.csv", "sweep,gpu,batch,m,n,k,tflops\n", "no rows"),
        ("x.jsonl", "{broken\n{}\n", "line 1 is not JSON"),
        ("x.jsonl", "[" * 100_000 + "\n{}\n", "line 1 is not JSON"),
        ("x.jsonl", "5\n{}\n", "lacks block or case"),
        ("x.jsonl", " " * (65 << 20), "more than 64 Mi characters"),
        ("x.parquet", "no parquet", "cannot be read as parquet"),
        ("x.csv", "sweep,gpu,batch,m,n,k,tflops\nx,v100,1,8,x,32,0.5\n", "a cell is not a number"),
    ],
)
def test_invalid_files_are_not_imported(name: str, text: str, words: str, tmp_path: Path) -> None:
    """Unreadable files are a one-line error, and no store is created."""
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="parquet needs the fit extra")
    with pytest.raises(MeasuredFileError, match=words) as caught:
        imported(tmp_path, name, text)

    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s.sqlite").exists()


def test_one_bad_file_prevents_the_import(tmp_path: Path) -> None:
    """If one file cannot be read, none is imported."""
    good = campaign(tmp_path, RECORDS[:1], H100)
    bad = tmp_path / "bad.txt"
    bad.write_text("hello", encoding="utf-8")
    outcome = CliRunner().invoke(command, ["import", str(tmp_path / "s"), str(good), str(bad)])

    assert isinstance(outcome.exception, MeasuredFileError)
    assert not (tmp_path / "s").exists()
    outcome = CliRunner().invoke(command, ["import", str(tmp_path / "s"), str(good), "--json"])
    assert json.loads(outcome.output)["added"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"case": "x"},
        {"case": {"kind": "forward"}},
        {"case": {**LINEAR, "kind": "k" * 5000}},
        {"case": {**LINEAR, "kind": "forward", "tokens": 10**400}},
        {"time_s": "fast"},
        {"time_s": [1]},
        {"time_s": 10**400},
        {"samples": 10**30},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_malformed_records_are_not_stored(changes: dict[str, Any], tmp_path: Path) -> None:
    """Values of another type, beyond a format or missing are an error in one short line, and nothing is stored."""
    path = campaign(tmp_path, [{**RECORDS[0], **changes}], H100)
    with pytest.raises(ShapewrightError) as caught:
        import_files(tmp_path / "s.sqlite", [path], Overrides())

    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    with Store(tmp_path / "s.sqlite") as store:
        assert store.rows() == []
