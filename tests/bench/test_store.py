"""The store of measurements: committed rows survive killed processes, full disks and damaged files."""

from __future__ import annotations

import dataclasses
import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shapewright.core.errors import StoreError
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import FAILED, OK, Case, Row, Run, row_facts
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.model_runs import layer_run
from shapewright.workload.workload import Workload

RUN = Run(
    run_id="r1",
    started_utc="2026-01-01T00:00:00+00:00",
    command="shapewright bench smoke",
    suite="smoke",
    device="h200-sxm-141gb",
    device_facts={"num_sms": 132},
    driver="580.1",
    runtime="cuda 13.0",
    torch_version="2.13.0",
    library="torch 2.13.0 cuda 13.0",
    shapewright_version="0.1.0",
)


def make_row(m: int = 8, *, status: str = OK, run: Run = RUN) -> Row:
    """A row of one small GEMM."""
    case = Case(operation=Gemm(name="x", m=m, n=16, k=32))
    measured = {"median_s": 1e-5, "num_samples": 10, "launch_s": 3e-6} if status == OK else {"error": "out of memory"}
    now = "2026-01-01T00:00:01+00:00"
    return Row(**row_facts(case, run), measured_utc=now, status=status, state_before={"power_watts": 80.5}, **measured)


def open_store(folder: Path) -> Store:
    """A store with its run."""
    store = Store(folder / "s.sqlite")
    store.add_run(RUN)
    return store


def test_rows_are_restored_exactly(tmp_path: Path) -> None:
    """A row and its run are read from a new connection exactly as they were written."""
    with open_store(tmp_path) as store:
        assert store.add(make_row())
    with Store(tmp_path / "s.sqlite", read_only=True) as store:
        assert store.rows() == [make_row()]
        assert store.runs() == [RUN]
        assert store.verify() == []


def test_commits_are_synchronized_to_disk(tmp_path: Path) -> None:
    """Each commit is synchronized to disk, so that it survives a power failure; killing a process cannot test this.

    Source: sqlite.org/pragma.html#pragma_synchronous, FULL is 2; NORMAL may lose commits in WAL mode.
    """
    with open_store(tmp_path) as store:
        connection = store._connection
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA foreign_keys").fetchone() == (1,)
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")


def test_a_row_restores_its_operation() -> None:
    """A row restores the operation that was measured."""
    operations = (
        Gemm(name="a", m=3, n=5, k=7, batch=2, layout="TN", dtype="fp16"),
        Attention(name="b", batch_size=1, query_len=4, kv_len=4, num_heads=2, num_kv_heads=1, head_dim=8, v_head_dim=8),
    )
    for operation in operations:
        row = Row(**row_facts(Case(operation=operation), RUN), measured_utc="", status=OK)

        assert row.operation() == operation


def test_keys_of_stored_rows_do_not_change() -> None:
    """Keys are the stored identity of rows: a changed key would orphan every row measured before."""
    head = '{"device": "d", "dtype": "bf16", '
    gemm = Case(operation=Gemm(name="x", dtype="bf16", m=1, n=2, k=3, layout="NT"))
    norm = Pointwise(name="x", dtype="bf16", operation="norm", read_bytes=8.0, written_bytes=8.0)
    config = TransformerConfig(hidden_size=64, num_layers=2, num_heads=4, vocab_size=9)
    layer = Case(operation=layer_run(config, Workload(seq_len=16, micro_batch_size=1), passes="forward"))

    assert gemm.key("d", "l") == (
        f'{head}"kind": "gemm", "layout": "NT", "library": "l", "repetition": 0, '
        '"sizes": {"batch": 1, "k": 3, "m": 1, "n": 2, "weight_dtype": null}, "variant": ""}'
    )
    assert Case(operation=norm, row_width=4).key("d", "l") == (
        f'{head}"kind": "pointwise", "layout": "", "library": "l", "repetition": 0, "sizes": {{"num_kernels": 1, '
        '"operation": "norm", "read_bytes": 8.0, "row_width": 4, "written_bytes": 8.0}, "variant": ""}'
    )
    assert json.loads(layer.key("d", "l"))["sizes"] == {
        "config": {
            "embedding_size": 64,
            "head_dim": 16,
            "hidden_size": 64,
            "intermediate_size": 256,
            "max_position_embeddings": 16,
            "num_heads": 4,
            "num_kv_heads": 4,
            "num_layers": 1,
            "v_head_dim": 16,
            "vocab_size": 1,
        },
        "passes": "forward",
        "workload": {"attention": "flash", "micro_batch_size": 1, "phase": "train", "seq_len": 16},
    }


def test_key_contains_what_affects_the_time() -> None:
    """The key ignores the name, and depends on size, layout, dtype, kernel, repetition and device."""
    base = Gemm(name="x", m=8, n=16, k=32)
    same = Case(operation=dataclasses.replace(base, name="y", repeats=7, pass_name="backward"))
    others = [
        Case(operation=dataclasses.replace(base, m=9)),
        Case(operation=dataclasses.replace(base, layout="NN")),
        Case(operation=dataclasses.replace(base, dtype="fp16")),
        Case(operation=base, variant="flash"),
        Case(operation=base, repetition=1),
    ]
    key = Case(operation=base).key("d", "l")

    assert same.key("d", "l") == key
    assert len({case.key("d", "l") for case in others} | {key, same.key("e", "l"), same.key("d", "k")}) == 8


def test_good_rows_are_never_replaced(tmp_path: Path) -> None:
    """A failed row is replaced by a successful one; a successful row is never replaced."""
    with open_store(tmp_path) as store:
        assert store.add(make_row(status=FAILED))
        assert store.finished_keys(statuses=(OK,)) == set()
        assert store.add(make_row())
        assert not store.add(make_row(status=FAILED))
        assert not store.add(dataclasses.replace(make_row(), median_s=2e-5))
        assert [(row.status, row.median_s) for row in store.rows()] == [(OK, 1e-5)]


def test_two_writers_share_a_store(tmp_path: Path) -> None:
    """Two open connections both write rows, and each reads those of the other."""
    with open_store(tmp_path) as first, Store(tmp_path / "s.sqlite") as second:
        first.add(make_row(1))
        second.add(make_row(2))
        first.add(make_row(3))

        assert first.finished_keys() == second.finished_keys()
        assert sorted(row.m or 0 for row in first.rows()) == [1, 2, 3]


LARGE = "hex(zeroblob(300000000))"  # 600 MB for each row
PROGRAMS = {
    "generated": f"state_before TEXT GENERATED ALWAYS AS ({LARGE})",
    "generated-short": f"state_before TEXT aS\n({LARGE})",
    "check": f"state_before TEXT CHECK (length({LARGE}) > 0)",
    "default": f"state_before TEXT, more TEXT DEFAULT ({LARGE})",
    "index": f"CREATE INDEX i ON measurements (length({LARGE}))",
    "partial": f"CREATE INDEX i ON measurements (m) WHERE length({LARGE}) > 0",
}
"""Expressions of SQL that are computed where rows are read, written or verified."""


def spoil(path: Path, how: str) -> None:
    """Create a file that is not a usable store."""
    if how in ("newer", "older"):
        Store(path).close()
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA user_version = {99 if how == 'newer' else 1}")
        connection.close()
    elif how == "garbage":
        path.write_bytes(b"not a database" * 500)
    elif how == "foreign":
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
        connection.commit()
        connection.close()
    elif how in ("trigger", "view"):
        Store(path).close()
        connection = sqlite3.connect(path)
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
        connection.execute(
            f"CREATE TRIGGER t BEFORE INSERT ON runs BEGIN SELECT ({endless}); END"
            if how == "trigger"
            else f"CREATE VIEW v AS {endless}"
        )
        connection.close()
    elif how in PROGRAMS:
        Store(path).close()
        with closing(sqlite3.connect(path)) as connection, connection:
            statement, (table,) = (
                PROGRAMS[how],
                connection.execute("SELECT sql FROM sqlite_master WHERE name = 'measurements'").fetchone(),
            )
            if statement.startswith("CREATE INDEX"):
                connection.execute(statement)
            else:
                connection.execute("DROP TABLE measurements")
                connection.execute(table.replace("state_before TEXT NOT NULL", statement))
    elif how == "folder":
        path.mkdir()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("newer", "schema version 99, and this version of shapewright reads and writes 3; upgrade"),
        ("older", "schema version 1, and this version of shapewright reads and writes 3; measure again"),
        ("garbage", "damaged or not a store"),
        ("foreign", "not a store of measurements"),
        ("trigger", "not a store of measurements"),
        ("view", "not a store of measurements"),
        *((how, "not a store of measurements") for how in PROGRAMS),
        ("folder", "unable to open"),
    ],
)
def test_bad_stores_are_rejected_and_not_modified(how: str, words: str, tmp_path: Path) -> None:
    """A newer schema, a damaged file or another database is a one-line error, and the file is not modified."""
    path = tmp_path / "s.sqlite"
    spoil(path, how)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError, match=words) as caught:
        Store(path)

    assert "\n" not in str(caught.value)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_store_named_as_one_in_memory_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite keeps ``:memory:`` nowhere: what was measured would be lost when the command ends."""
    monkeypatch.chdir(tmp_path)
    with Store(":memory:") as store:
        store.add_run(RUN)
        store.add(make_row())

    with Store(":memory:", read_only=True) as store:
        assert store.rows() == [make_row()]


def test_a_link_finds_the_log_of_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that cannot be written, rows in the log of a store are read through a link as well."""
    (tmp_path / "link").symlink_to("s.sqlite")
    with open_store(tmp_path) as writer:
        writer.add(make_row())
        monkeypatch.setattr("os.access", lambda *_: False)
        with Store(tmp_path / "link", read_only=True) as store:
            assert store.rows() == [make_row()]


def test_indices_of_columns_are_no_programs(tmp_path: Path) -> None:
    """An index that a user adds on columns, or statistics of ANALYZE, leave a store as it is."""
    with open_store(tmp_path) as store:
        store.add(make_row())
    with closing(sqlite3.connect(tmp_path / "s.sqlite")) as connection, connection:
        connection.execute('CREATE UNIQUE INDEX "by name" ON measurements (name COLLATE NOCASE, "key" DESC)')
        connection.execute("ANALYZE")

    with Store(tmp_path / "s.sqlite") as store:
        assert store.rows() == [make_row()]


def fill(store: Store) -> None:
    """Add rows until an error occurs."""
    for m in range(1, 10_000):
        store.add(make_row(m))


def test_full_disk_keeps_stored_rows(tmp_path: Path) -> None:
    """On a full disk adding a row is a one-line error, and earlier rows are kept."""
    with open_store(tmp_path) as store:
        store._connection.execute("PRAGMA max_page_count = 20")
        with pytest.raises(StoreError, match="free space"):
            fill(store)
        stored = [row.m for row in store.rows()]

        assert stored == list(range(1, len(stored) + 1))
        assert stored
        assert store.verify() == []


def test_verify_reports_damage(tmp_path: Path) -> None:
    """A successful row without a time is reported."""
    with open_store(tmp_path) as store:
        store.add(dataclasses.replace(make_row(), median_s=None))

        assert store.verify() == ["1 rows are marked ok without a time"]


def test_changed_bits_are_never_shown_as_values(tmp_path: Path) -> None:
    """Of single flipped bits none changes a row or run that is read; each is an error in one line, or harmless."""
    path, damaged, chance = tmp_path / "s.sqlite", tmp_path / "damaged.sqlite", random.Random(22)
    with Store(path) as store:
        store.add_run(RUN)
        for size in range(1, 31):
            store.add(make_row(size))
        truth = store.rows(), store.runs()
    whole = path.read_bytes()
    num_refused = 0
    for _ in range(300):
        content = bytearray(whole)
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        for old in tmp_path.glob("damaged*"):
            old.unlink()
        damaged.write_bytes(content)
        try:
            with Store(damaged, read_only=True) as store:
                problems, found = store.verify(), (store.rows(), store.runs())
        except StoreError as error:
            num_refused += 1
            message = str(error)
            assert message.isprintable()
        else:
            assert found == truth or problems
            # A damaged index can change the order of rows, which verify reports.
            assert (sorted(found[0], key=repr), found[1]) == (sorted(truth[0], key=repr), truth[1])

    assert num_refused > 30


def test_changed_values_are_reported(tmp_path: Path) -> None:
    """A time that another program changed is refused on reading, and listed by verify."""
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.add_run(RUN)
        store.add(make_row())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE measurements SET median_s = median_s * 16")
        connection.commit()
    with Store(path, read_only=True) as store:
        assert store.verify() == ["1 measurements differ from their checksums"]
        with pytest.raises(StoreError, match="1 of 1 measurements differ from their checksums"):
            store.rows()
