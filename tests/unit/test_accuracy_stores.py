"""Stores of the bench are evaluated like tables: each valid row is compared with the price of its operation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shapewright.core.errors import MeasuredFileError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.evaluate import evaluate_folder, summarize
from shapewright.measure.accuracy.stores import find_stores, price
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import Case, Row, Run, row_facts
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.model_runs import layer_run, step_run
from shapewright.prediction.predict import predict
from shapewright.pricing.operations import price_operations
from shapewright.workload.workload import Workload

H100 = load_device("h100-sxm-80gb")
CONFIG = TransformerConfig(hidden_size=1024, num_layers=2, num_heads=16, vocab_size=1024, name="small")
WORKLOAD = Workload(seq_len=512, attention="flash")
OPERATIONS = (
    Gemm(name="g", m=4096, n=4096, k=4096),
    Gemm(name="g", m=4096, n=4097, k=4096, layout="NN"),
    GroupedGemm(name="e", m=4096, n=1024, k=1024, groups=8),
    Attention(
        name="a", batch_size=4, query_len=1024, kv_len=1024, num_heads=16, num_kv_heads=4, head_dim=64, v_head_dim=64
    ),
    Pointwise(name="p", operation="residual", read_bytes=2e8, written_bytes=1e8),
    Collective(name="c", op_name="all_reduce", axis="tensor", message_bytes=1e8, num_ranks=8, ranks_per_node=8),
)


def make_run(device: str = H100.name) -> Run:
    """A run of a device."""
    return Run(
        run_id=device, started_utc="", command="", suite="s", device=device, device_facts={}, driver="", runtime="",
        torch_version="", library="torch 2", shapewright_version="",
    )  # fmt: skip


def make_row(case: Case, median_s: float, device: str = H100.name, **fields: object) -> Row:
    """Return a valid row with cold inputs."""
    facts = {**row_facts(case, make_run(device)), "status": "ok", "median_s": median_s, "is_cold": True, **fields}
    return Row(**facts, measured_utc="")


@pytest.mark.parametrize("physics_only", [False, True])
def test_every_kind_is_priced_as_a_step_prices_it(physics_only: bool) -> None:
    """Rows with the predicted times of their operations have no error, whatever their kind."""
    device = H100.without_residuals if physics_only else H100
    times = [float(one.time_s) for one in price_operations(OPERATIONS, device)]
    rows = [make_row(Case(operation=one), time_s) for one, time_s in zip(OPERATIONS, times, strict=True)]
    layer = layer_run(CONFIG, WORKLOAD)
    listed = layer.operations()
    priced = zip(price_operations(listed, device), listed, strict=True)
    layer_s = sum(float(one.time_s) * int(entry.repeats) for one, entry in priced)
    rows.append(make_row(Case(operation=layer), layer_s))
    whole = predict(CONFIG, device=device, workload=WORKLOAD)
    rows.append(make_row(Case(operation=step_run(CONFIG, WORKLOAD)), whole.step_time_s))
    found = {row.table: row for row in summarize(price(rows, Context(physics_only=physics_only)))}

    assert set(found) == {
        f"store/{kind}" for kind in ("gemm", "grouped_gemm", "attention", "pointwise", "collective", "layer", "step")
    }
    assert {name: row.mape for name, row in found.items()} == dict.fromkeys(found, pytest.approx(0.0, abs=1e-9))
    assert all(row.coverage_90 == 1.0 for row in found.values())
    assert found["store/gemm"].rows == 2


def test_norms_are_priced_as_the_kernel_that_ran() -> None:
    """The bench runs LayerNorm for a norm, and RMSNorm for its variant: each is priced as its own kernel."""
    norms = [Pointwise(name="n", operation=kind, read_bytes=1e8, written_bytes=1e8) for kind in ("layernorm", "norm")]
    times = [float(one.time_s) for one in price_operations(norms, H100)]
    rows = [
        make_row(Case(operation=norms[1], variant=variant), time_s)
        for variant, time_s in zip(("", "rms_norm"), times, strict=True)
    ]
    (found,) = summarize(price(rows, Context()), by=())

    assert times[0] > 1.2 * times[1]
    assert (found.rows, found.mape) == (2, pytest.approx(0.0, abs=1e-12))


def test_errors_are_those_of_the_rows() -> None:
    """Rows that took twice as long have 50 % error, and parts are names with kernels."""
    (operation,) = OPERATIONS[:1]
    (one,) = price_operations([operation], H100)
    rows = [make_row(Case(operation=operation, variant="flash"), 2.0 * float(one.time_s))]
    (chunk,) = price(rows, Context())

    assert chunk.part == "g flash"
    assert summarize([chunk])[0].mape == pytest.approx(0.5)
    assert np.all(chunk.prices.low < chunk.prices.predicted)


def test_unpriced_rows_are_counted() -> None:
    """A format that the device lacks skips its row only, an unknown device all of its rows."""
    context = Context()
    rows = [
        make_row(Case(operation=Gemm(name="x", m=64, n=64, k=64, dtype="fp4")), 1e-5),
        make_row(Case(operation=Gemm(name="x", m=64, n=64, k=64)), 1e-5),
        make_row(Case(operation=Gemm(name="x", m=64, n=64, k=64)), 1e-5, device="cpu"),
    ]
    (chunk,) = price(rows, context)

    assert len(chunk.measured) == 1
    assert any("no fp4 rate" in reason for reason in context.skipped)
    assert context.skipped["no device file for 'cpu'"] == 1


def fill(folder: Path) -> None:
    """Write a store with a valid row, a repetition, a failed row, and one of a CPU."""
    case = Case(operation=OPERATIONS[0])
    other = Case(operation=OPERATIONS[1])
    with Store(folder / "mine.db") as store:
        store.add_all(
            [make_run(), make_run("cpu")],
            [
                make_row(case, 2.5e-4),
                make_row(Case(operation=OPERATIONS[0], repetition=1), 2.5e-4, repetition=1),
                make_row(other, 1.0, status="failed"),
                make_row(case, 1.0, device="cpu"),
            ],
        )


def test_folders_with_stores_are_evaluated(tmp_path: Path) -> None:
    """A store is recognized by its content; repetitions and failures are counted as skipped."""
    fill(tmp_path)
    (tmp_path / "notes.txt").write_text("SQLite", encoding="utf-8")
    assert find_stores(tmp_path) == [tmp_path / "mine.db"]
    evaluation = evaluate_folder(tmp_path, tables=["store"])

    assert [(row.table, row.device, row.rows) for row in evaluation.rows] == [("store/gemm", "h100-sxm-80gb", 1)]
    assert evaluation.skipped == {
        "mine.db": {
            "a repetition: each measurement is counted once": 1,
            "status 'failed', not 'ok'": 1,
            "no device file for 'cpu'": 1,
        }
    }


def test_rows_of_other_devices_are_not_reported(tmp_path: Path) -> None:
    """With one selected device, only its rows are reported."""
    fill(tmp_path)
    with pytest.raises(MeasuredFileError):
        evaluate_folder(tmp_path, tables=["store"], devices=["a100-sxm-80gb"])
    evaluation = evaluate_folder(tmp_path, tables=["store"], devices=["h100-sxm-80gb"])
    assert sum(evaluation.skipped["mine.db"].values()) == 2


def test_a_row_without_a_time_is_counted() -> None:
    """Every row is either evaluated or counted with a reason."""
    context = Context()
    case = Case(operation=OPERATIONS[0])
    rows = [make_row(case, 2.5e-4), make_row(case, 0.0)]
    (chunk,) = price(rows, context)

    assert len(chunk.measured) == 1
    assert context.skipped == {"no measured time": 1}


def test_bad_stores_are_named(tmp_path: Path) -> None:
    """Another program's database is named as unreadable next to valid files; alone it is an error."""
    import sqlite3

    connection = sqlite3.connect(tmp_path / "bookmarks.sqlite")
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(MeasuredFileError, match="not a store of measurements"):
        evaluate_folder(tmp_path)
    fill(tmp_path)

    assert list(evaluate_folder(tmp_path).unreadable) == ["bookmarks.sqlite"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(MeasuredFileError, match="has no store of"):
        evaluate_folder(tmp_path / "empty", tables=["store"])


def test_rows_of_several_stores_name_their_file(tmp_path: Path) -> None:
    """Two stores in a folder are evaluated separately, and each row names its file."""
    operation = OPERATIONS[0]
    time_s = float(price_operations([operation], H100)[0].time_s)
    for name, factor in (("first.db", 1.0), ("second.db", 2.0)):
        with Store(tmp_path / name) as store:
            store.add_run(make_run())
            store.add(make_row(Case(operation=operation), factor * time_s))
    rows = evaluate_folder(tmp_path).rows

    assert [(row.table, row.file) for row in rows] == [("store/gemm", "first.db"), ("store/gemm", "second.db")]
    assert [round(row.mape, 6) for row in rows] == [0.0, 0.5]
