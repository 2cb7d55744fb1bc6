"""Export of a store, and import of the exported tables."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from full_disk import full_after
from shapewright.core.errors import StoreError
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.store.database import Store
from shapewright.measure.store.export import export_store
from shapewright.measure.store.imports.files import import_files
from shapewright.measure.store.imports.measured import Overrides
from shapewright.measure.store.record import FAILED, OK, Case, Row, Run, row_facts
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.model_runs import ProxyRun, proxy_run
from shapewright.workload.workload import Workload

RUN = Run(
    run_id="r", started_utc="2026-01-01", command="c", suite="smoke", device="h100-sxm-80gb", device_facts={},
    driver="", runtime="", torch_version="", library="torch 2.9.0", shapewright_version="0",
)  # fmt: skip
GEMM = Gemm(name="gemm", m=8, n=16, k=32)
PREFILL = Attention(
    name="attention.prefill", batch_size=2, query_len=64, kv_len=64, num_heads=8, num_kv_heads=2, head_dim=64,
    v_head_dim=64, window_size=16, writes_cache=True,
)  # fmt: skip
DECODE = replace(PREFILL, name="attention.decode", query_len=1, kv_len=100, kv_cache_dtype="fp8", window_size=0)


def measured(operation: Any, *, kernel: str = "k", row_width: int = 0, **fields: Any) -> Row:
    """A row of a measurement of 1 us."""
    case = Case(operation=operation, row_width=row_width, repetition=fields.pop("repetition", 0))
    facts = {"measured_utc": "", "status": OK, "median_s": 1e-6, "kernel": kernel, **fields}
    return Row(**row_facts(case, RUN), **facts)


def exported(tmp_path: Path, *rows: Row) -> dict[str, int]:
    """Rows by table of an export into the folder."""
    with Store(tmp_path / "s.sqlite") as store:
        store.add_run(RUN)
        for row in rows:
            store.add(row)
        return export_store(store, tmp_path, format_name="csv")


def imported(tmp_path: Path, name: str) -> list[Row]:
    """Rows of one file of the folder."""
    import_files(tmp_path / "back.sqlite", [tmp_path / name], Overrides())
    with Store(tmp_path / "back.sqlite", read_only=True) as store:
        return store.rows()


@pytest.mark.parametrize(
    ("table", "operation"),
    [("gemm", GEMM), ("attention_prefill", PREFILL), ("attention_decode", DECODE)],
    ids=["gemm", "prefill", "decode"],
)
def test_exported_rows_are_restored(table: str, operation: Any, tmp_path: Path) -> None:
    """Operation, time, device, library and kernel are restored from exactly one table."""
    assert exported(tmp_path, measured(operation)) == {f"{table}.csv": 1, "measurements.csv": 1}
    (row,) = imported(tmp_path, f"{table}.csv")

    assert row.operation() == operation
    assert (row.median_s, row.device, row.library, row.kernel) == (1e-6, "h100-sxm-80gb", "torch 2.9.0", "k")


@pytest.mark.parametrize(
    "row",
    [
        measured(GEMM, status=FAILED),
        measured(GEMM, repetition=1),
        measured(replace(GEMM, layout="NN")),
        measured(replace(GEMM, batch=2)),
        measured(replace(PREFILL, is_backward=True)),
        measured(replace(PREFILL, v_head_dim=32)),
        measured(replace(PREFILL, writes_cache=False)),
        measured(replace(PREFILL, causal=False)),
        measured(replace(PREFILL, kv_len=128)),
        measured(Pointwise(name="x", operation="softmax", read_bytes=8.0, written_bytes=8.0), kernel="softmax"),
    ],
    ids=lambda row: row.kind,
)
def test_rows_without_a_table_are_in_measurements_only(row: Row, tmp_path: Path) -> None:
    """Failed rows, repetitions, other layouts, gradients and unusual attention are in measurements only."""
    assert exported(tmp_path, row) == {"measurements.csv": 1}


@pytest.mark.parametrize(
    ("kernel", "dtype", "element_bytes", "expected"),
    [
        ("layer_norm", "bf16", 2, ("input_layernorm", "0")),
        ("gelu", "fp32", 4, ("mlp_act", "0")),
        ("glu", "fp16", 2, ("mlp_act", "1")),
        ("residual", "bf16", 2, ("add", "0")),
    ],
)
def test_pointwise_rows_are_counted_from_their_bytes(
    kernel: str, dtype: str, element_bytes: int, expected: tuple[str, str], tmp_path: Path
) -> None:
    """The number of rows of a pointwise operation is derived from the bytes written."""
    written_bytes = 24.0 * 64 * element_bytes
    operation = Pointwise(
        name="x", operation="norm", dtype=dtype, read_bytes=2.0 * written_bytes, written_bytes=written_bytes
    )
    assert exported(tmp_path, measured(operation, kernel=kernel, row_width=64))["pointwise.csv"] == 1
    with (tmp_path / "pointwise.csv").open(encoding="utf-8") as file:
        (found,) = csv.DictReader(file)

    assert (found["operation"], found["gated"]) == expected
    assert (found["num_tokens"], found["hidden_size"], found["intermediate_size"]) == ("24", "64", "64")


@pytest.mark.parametrize(
    ("name", "gated", "width", "reads"),
    [("input_layernorm", 0, 64, 1), ("add", 0, 64, 2), ("mlp_act", 0, 96, 1), ("mlp_act", 1, 96, 2),
     ("attn_rope", 0, (8 + 2) * 8 // 2, 1), ("emb", 0, 64, 1)],
)  # fmt: skip
def test_pointwise_tables_are_converted_to_bytes(name: str, gated: int, width: int, reads: int, tmp_path: Path) -> None:
    """Bytes follow from tokens, widths, heads and tensor parallelism; an addition reads two inputs."""
    head = "device,library,model,operation,dtype,num_tokens,hidden_size,intermediate_size,gated,num_heads,num_kv_heads"
    (tmp_path / "p.csv").write_text(
        f"{head},tensor_parallel,latency_s\na100_sxm,vidur,llama,{name},fp16,4,64,192,{gated},8,2,2,1e-5\n",
        encoding="utf-8",
    )
    (row,) = imported(tmp_path, "p.csv")
    operation = row.operation()

    assert isinstance(operation, Pointwise)
    assert operation.written_bytes == 4 * width * 2
    assert operation.read_bytes == reads * operation.written_bytes
    assert row.sizes["row_width"] == width


def test_paper_layers_are_read_as_six_gemms(tmp_path: Path) -> None:
    """Each of a layer's six GEMMs is read with its shape and time: at 1 TFLOP/s it takes 2 m n k picoseconds."""
    names = ("qkv", "score", "aov", "proj", "mlp_up", "mlp_down")
    head = ",".join(f"{name}_tflops" for name in names)
    (tmp_path / "l.csv").write_text(
        f"log,gpu,num_heads,hidden_size,micro_batch_size,seq_len,tensor_parallel,{head}\n"
        f"x,a100,8,64,2,16,2{',1' * 6}\n",
        encoding="utf-8",
    )
    rows = {row.name: row for row in imported(tmp_path, "l.csv")}

    assert {name: (row.batch, row.m, row.n, row.k) for name, row in rows.items()} == {
        "qkv": (1, 32, 96, 64),
        "score": (8, 16, 16, 8),
        "aov": (8, 16, 8, 16),
        "proj": (1, 32, 64, 32),
        "mlp_up": (1, 32, 128, 64),
        "mlp_down": (1, 32, 64, 128),
    }
    assert rows["mlp_up"].median_s == pytest.approx(2 * 32 * 128 * 64 * 1e-12)
    assert rows["score"].median_s == pytest.approx(8 * 2 * 16 * 16 * 8 * 1e-12)


def test_mamf_and_collectives_tables_are_read(tmp_path: Path) -> None:
    """mamf.csv contains GEMMs in layout NT; the ranks of a collective are on one node."""
    (tmp_path / "m.csv").write_text(
        "accelerator,mamf_tflops,M,N,K,dtype,torch_version\na100,250,64,128,256,bf16,2.5\n", encoding="utf-8"
    )
    (tmp_path / "c.csv").write_text(
        "device,library,dtype,op_name,num_gpus,message_bytes,latency_s\nh100_sxm,nccl 2,bf16,all_reduce,4,1024,1e-5\n",
        encoding="utf-8",
    )
    (gemm,) = imported(tmp_path, "m.csv")
    operation = next(row.operation() for row in imported(tmp_path, "c.csv") if row.kind == "collective")

    assert (gemm.m, gemm.n, gemm.k, gemm.layout, gemm.library) == (64, 128, 256, "NT", "torch 2.5")
    assert gemm.median_s == pytest.approx(2 * 64 * 128 * 256 / 250e12)
    assert isinstance(operation, Collective)
    assert (operation.op_name, operation.message_bytes) == ("all_reduce", 1024.0)
    assert operation.num_ranks == operation.ranks_per_node == 4


def proxy(trained_tokens: int, **fields: Any) -> ProxyRun:
    """A run of a proxy model up to some of its 2000 tokens."""
    recipe = {
        "batch_tokens": 100, "learning_rate": 0.01, "warmup_fraction": 0.1, "final_fraction": 0.1, "weight_decay": 0.1,
        "text": "abc", "train_tokens": 2000, "trained_tokens": trained_tokens,
    }  # fmt: skip
    shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 256, "gated_mlp": True, **fields}
    return proxy_run(
        TransformerConfig(**shape, name="base"), Workload(seq_len=50, micro_batch_size=2, dtype="fp32"), recipe
    )


def test_final_losses_are_means_over_seeds(tmp_path: Path) -> None:
    """Each model is one row with the mean of its seeds; losses before the end and failed runs are left out."""
    rows = [
        measured(proxy(1000), figures={"loss_nats": 9.0}),
        measured(proxy(2000), figures={"loss_nats": 2.5}, repetition=1),  # whose process was faster
        measured(proxy(2000), figures={"loss_nats": 2.0}),
        measured(proxy(2000, num_kv_heads=1), figures={"loss_nats": 3.0}),
        measured(proxy(2000, num_kv_heads=2), status=FAILED),
    ]
    assert exported(tmp_path, *rows)["loss_by_shape.csv"] == 2

    with (tmp_path / "loss_by_shape.csv").open(encoding="utf-8") as file:
        found = {int(row["num_kv_heads"]): row for row in csv.DictReader(file)}
    assert {heads: float(row["loss"]) for heads, row in found.items()} == {4: 2.25, 1: 3.0}
    assert found[4]["losses"] == "2.000000 2.500000"
    assert (found[4]["tokens"], found[4]["data"], found[4]["gated_mlp"]) == ("2000", "bytes abc, fp32", "1")


def test_cells_are_no_formulas(tmp_path: Path) -> None:
    """Names that a spreadsheet would run as formulas are texts in the tables."""
    name = "=HYPERLINK(A1)"
    exported(tmp_path, measured(GEMM, kernel=name))

    for table in ("gemm.csv", "measurements.csv"):
        with (tmp_path / table).open(encoding="utf-8", newline="") as file:
            cells = {cell for record in csv.DictReader(file) for cell in record.values()}
        assert f"'{name}" in cells
        assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)


@pytest.mark.parametrize("format_name", ["csv", "parquet"])
def test_a_full_disk_leaves_no_part_of_a_table(format_name: str, tmp_path: Path) -> None:
    """An export that cannot be written is an error, and leaves no temporary file."""
    if format_name == "parquet":
        pytest.importorskip("pyarrow", reason="needs the fit extra")
    exported(tmp_path, measured(GEMM))
    with Store(tmp_path / "s.sqlite", read_only=True) as store, full_after(50), pytest.raises(StoreError):
        export_store(store, tmp_path / "tables", format_name=format_name)

    assert list((tmp_path / "tables").iterdir()) == []
