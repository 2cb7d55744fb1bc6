"""Stores of the bench are judged like tables: each good row against the price of its own operation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shapewright.accuracy import judge_folder
from shapewright.accuracy.context import Context
from shapewright.accuracy.judge import summarise
from shapewright.accuracy.stores import find_stores, price
from shapewright.config import TransformerConfig
from shapewright.errors import MeasuredFileError
from shapewright.hardware import load_device
from shapewright.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.perf.pricing import price_operations
from shapewright.predict import predict
from shapewright.store.file import Store
from shapewright.store.record import Case, Row, Run, row_facts
from shapewright.whole import layer_run, step_run
from shapewright.workload import Workload

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
    Pointwise(name="p", operation="norm", read_bytes=1e8, written_bytes=1e8),
    Collective(name="c", op_name="all_reduce", axis="tensor", message_bytes=1e8, num_ranks=8, ranks_per_node=8),
)


def make_run(device: str = H100.name) -> Run:
    """A run of a device."""
    return Run(
        run_id=device, started_utc="", command="", suite="s", device=device, device_facts={}, driver="", runtime="",
        torch_version="", library="torch 2", shapewright_version="",
    )  # fmt: skip


def make_row(case: Case, median_s: float, device: str = H100.name, **fields: object) -> Row:
    """A good row whose inputs were cold."""
    facts = {**row_facts(case, make_run(device)), "status": "ok", "median_s": median_s, "is_cold": True, **fields}
    return Row(**facts, measured_utc="")


@pytest.mark.parametrize("physics_only", [False, True])
def test_every_kind_is_priced_as_a_step_prices_it(physics_only: bool) -> None:
    """Rows that took what their own operations are predicted to take have no error at all, whatever their kind."""
    device = H100.by_physics if physics_only else H100
    times = [float(one.time_s) for one in price_operations(OPERATIONS, device)]
    rows = [make_row(Case(operation=one), time_s) for one, time_s in zip(OPERATIONS, times, strict=True)]
    layer = layer_run(CONFIG, WORKLOAD)
    listed = layer.operations()
    priced = zip(price_operations(listed, device), listed, strict=True)
    layer_s = sum(float(one.time_s) * int(entry.repeats) for one, entry in priced)
    rows.append(make_row(Case(operation=layer), layer_s))
    whole = predict(CONFIG, device=device, workload=WORKLOAD)
    rows.append(make_row(Case(operation=step_run(CONFIG, WORKLOAD)), whole.step_time_s))
    found = {row.table: row for row in summarise(price(rows, Context(physics_only=physics_only)))}

    assert set(found) == {
        f"store/{kind}" for kind in ("gemm", "grouped_gemm", "attention", "pointwise", "collective", "layer", "step")
    }
    assert {name: row.mape for name, row in found.items()} == dict.fromkeys(found, pytest.approx(0.0, abs=1e-9))
    assert all(row.coverage_90 == 1.0 for row in found.values())
    assert found["store/gemm"].rows == 2


def test_errors_are_those_of_the_rows() -> None:
    """Rows that took twice as long are 50 % off, and parts are names with kernels."""
    (operation,) = OPERATIONS[:1]
    (one,) = price_operations([operation], H100)
    rows = [make_row(Case(operation=operation, variant="flash"), 2.0 * float(one.time_s))]
    (chunk,) = price(rows, Context())

    assert chunk.part == "g flash"
    assert summarise([chunk])[0].mape == pytest.approx(0.5)
    assert np.all(chunk.prices.low < chunk.prices.predicted)


def test_what_cannot_be_priced_is_counted() -> None:
    """A format that the device lacks leaves out its row alone, an unknown device all of its rows."""
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
    """A store with a good row, a repetition, a failed row, and one of a CPU."""
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


def test_folders_with_stores_are_judged(tmp_path: Path) -> None:
    """A store is known by its content, whatever its name; repetitions and failures do not count, and are told."""
    fill(tmp_path)
    (tmp_path / "notes.txt").write_text("SQLite", encoding="utf-8")
    assert find_stores(tmp_path) == [tmp_path / "mine.db"]
    judgement = judge_folder(tmp_path, tables=["store"])

    assert [(row.table, row.device, row.rows) for row in judgement.rows] == [("store/gemm", "h100-sxm-80gb", 1)]
    assert judgement.skipped == {
        "mine.db": {
            "repeats a measurement, and each counts once": 1,
            "status 'failed', not 'ok'": 1,
            "no device file for 'cpu'": 1,
        }
    }


def test_rows_of_other_devices_are_not_told_of(tmp_path: Path) -> None:
    """Who asks for one device hears of its rows alone."""
    fill(tmp_path)
    with pytest.raises(MeasuredFileError):
        judge_folder(tmp_path, tables=["store"], devices=["a100-sxm-80gb"])
    judgement = judge_folder(tmp_path, tables=["store"], devices=["h100-sxm-80gb"])
    assert sum(judgement.skipped["mine.db"].values()) == 2


def test_a_row_without_a_time_is_told() -> None:
    """Every row is either judged or counted with a reason."""
    context = Context()
    case = Case(operation=OPERATIONS[0])
    rows = [make_row(case, 2.5e-4), make_row(case, 0.0)]
    (chunk,) = price(rows, context)

    assert len(chunk.measured) == 1
    assert context.skipped == {"no measured time": 1}


def test_bad_stores_are_named(tmp_path: Path) -> None:
    """Another program's database is named as unreadable beside what can be judged; alone it is an error."""
    import sqlite3

    connection = sqlite3.connect(tmp_path / "bookmarks.sqlite")
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(MeasuredFileError, match="no store of measurements"):
        judge_folder(tmp_path)
    fill(tmp_path)

    assert list(judge_folder(tmp_path).unreadable) == ["bookmarks.sqlite"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(MeasuredFileError, match="has no store of"):
        judge_folder(tmp_path / "empty", tables=["store"])


def test_rows_of_several_stores_name_their_file(tmp_path: Path) -> None:
    """Two stores beside each other are judged apart, and each row says which one it is of."""
    operation = OPERATIONS[0]
    time_s = float(price_operations([operation], H100)[0].time_s)
    for name, factor in (("first.db", 1.0), ("second.db", 2.0)):
        with Store(tmp_path / name) as store:
            store.add_run(make_run())
            store.add(make_row(Case(operation=operation), factor * time_s))
    rows = judge_folder(tmp_path).rows

    assert [(row.table, row.file) for row in rows] == [("store/gemm", "first.db"), ("store/gemm", "second.db")]
    assert [round(row.mape, 6) for row in rows] == [0.0, 0.5]
