"""Merging stores, concurrent writers, and reading without modification."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from shapewright.app.cli.commands.store import command
from shapewright.core.errors import StoreError
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.store.database import Store
from shapewright.measure.store.merge import merge_stores, rescue_store
from shapewright.measure.store.record import FAILED, OK, Case, Row, Run, row_facts
from shapewright.measure.store.summary import summarize_store

RUN = Run(
    run_id="r1", started_utc="2026-01-01", command="c", suite="smoke", device="d", device_facts={}, driver="",
    runtime="", torch_version="", library="l", shapewright_version="0",
)  # fmt: skip


def make_row(m: int, *, seconds: float = 1e-5, status: str = OK, run: Run = RUN) -> Row:
    """A row of one small GEMM."""
    facts = row_facts(Case(operation=Gemm(name="x", m=m, n=16, k=32)), run)
    median_s = seconds if status == OK else None
    return Row(**facts, measured_utc="2026-01-01T00:00:01", status=status, median_s=median_s)


def make_store(path: Path, rows: list[Row], run: Run = RUN) -> Path:
    """A store of some rows."""
    with Store(path) as store:
        store.add_run(run)
        for row in rows:
            store.add(row)
    return path


def test_merging_keeps_the_targets_good_rows(tmp_path: Path) -> None:
    """Merging adds new rows, keeps the target's successful rows and replaces failed ones; the source is unchanged."""
    other = dataclasses.replace(RUN, run_id="r2")
    target = make_store(tmp_path / "a", [make_row(1), make_row(2, status=FAILED), make_row(3, status=FAILED)])
    rows = [make_row(1, seconds=9.0, run=other), make_row(2, seconds=2.0, run=other), make_row(4, run=other)]
    source = make_store(tmp_path / "b", [*rows, make_row(3, status=FAILED, run=other)], other)
    before = source.read_bytes()

    assert merge_stores(target, [source]) == {"added": 1, "replaced": 1, "kept": 2}
    with Store(target, read_only=True) as store:
        found = {row.m: (row.status, row.median_s, row.run_id) for row in store.rows()}
    assert found == {1: (OK, 1e-5, "r1"), 2: (OK, 2.0, "r2"), 3: (FAILED, None, "r1"), 4: (OK, 1e-5, "r2")}
    assert source.read_bytes() == before
    assert merge_stores(target, [source])["added"] == 0


def test_invalid_sources_are_not_merged(tmp_path: Path) -> None:
    """A damaged, missing or identical source, or a loop of links, is an error before the target is created."""
    damaged = make_store(tmp_path / "b", [dataclasses.replace(make_row(1), median_s=None)])
    (tmp_path / "loop").symlink_to("loop")
    for source, words in (
        (damaged, "is damaged"),
        (tmp_path / "none", "no store at"),
        (tmp_path / "loop", "no store at"),
    ):
        with pytest.raises(StoreError, match=words):
            merge_stores(tmp_path / "a", [source])
        with pytest.raises(StoreError, match="into itself" if source == damaged else "no store at"):
            rescue_store(source, source)

        assert not (tmp_path / "a").exists()

    (tmp_path / "link").symlink_to("b")
    with pytest.raises(StoreError, match="into itself"):
        merge_stores(damaged, [tmp_path / "link"])


def test_full_disk_imports_all_or_nothing(tmp_path: Path) -> None:
    """If an import does not fit on the disk, none of its rows is stored, and earlier rows are kept."""
    with Store(make_store(tmp_path / "a", [make_row(1)])) as store:
        store._connection.execute("PRAGMA max_page_count = 30")
        with pytest.raises(StoreError, match="free space"):
            store.add_all([RUN], (make_row(m) for m in range(2, 2000)))

        assert [row.m for row in store.rows()] == [1]
        assert store.verify() == []


def test_reading_does_not_change_the_file(tmp_path: Path) -> None:
    """Reading leaves the file as it is, and needs one that exists and holds a store."""
    path = make_store(tmp_path / "a", [make_row(1)])
    before = path.read_bytes()
    (tmp_path / "empty").touch()
    with Store(path, read_only=True) as store:
        assert store.rows() == [make_row(1)]
    for name, words in (("none", "no store at"), ("empty", "is empty")):
        with pytest.raises(StoreError, match=words):
            Store(tmp_path / name, read_only=True)

    assert path.read_bytes() == before
    assert not (tmp_path / "none").exists()


def test_read_only_stores_reject_rows(tmp_path: Path) -> None:
    """A store opened read-only rejects new rows."""
    path = make_store(tmp_path / "a", [])
    with Store(path, read_only=True) as store, pytest.raises(StoreError, match="readonly"):
        store.add_run(dataclasses.replace(RUN, run_id="r3"))


WRITER = """
import sys
import threading
from shapewright.measure.store.database import Store
sys.path.insert(0, sys.argv[1])
from test_store_merge import RUN, make_row
import dataclasses
run = dataclasses.replace(RUN, run_id=sys.argv[3])
with Store(sys.argv[2]) as store:
    store.add_run(run)
    for m in range(int(sys.argv[4]), int(sys.argv[4]) + 60):
        assert store.add(make_row(m, run=run))
"""


def test_processes_share_a_fresh_store(tmp_path: Path) -> None:
    """Four processes create and fill one store concurrently: all rows are stored once, without damage."""
    path = tmp_path / "s.sqlite"
    here = str(Path(__file__).parent)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, here, str(path), f"r{number}", str(1000 * number)], stderr=subprocess.PIPE
        )
        for number in range(4)
    ]
    assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [(b"", 0)] * 4
    with Store(path, read_only=True) as store:
        assert sorted(row.m or 0 for row in store.rows()) == [1000 * i + m for i in range(4) for m in range(60)]
        assert len(store.runs()) == 4
        assert store.verify() == []


def test_a_store_that_another_process_creates_is_waited_for(tmp_path: Path) -> None:
    """Before the file is in WAL mode SQLite fails at once where another connection writes; opening waits."""
    path = tmp_path / "s.sqlite"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("VACUUM")  # a file of its own, without tables
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.2, other.execute, ["COMMIT"])
    timer.start()
    with Store(path) as store:
        assert store.rows() == []
    timer.join()
    other.close()


def test_stores_are_summarized(tmp_path: Path) -> None:
    """Groups contain counts of rows and failures, and ranges of times and sizes."""
    path = make_store(tmp_path / "a", [make_row(1, seconds=2.0), make_row(3), make_row(2, status=FAILED)])
    with Store(path, read_only=True) as store:
        contents = summarize_store(store)
    (group,) = contents.groups

    assert (contents.num_runs, contents.statuses) == (1, {OK: 2, FAILED: 1})
    assert (group.suite, group.rows, group.failed, group.least_s, group.most_s) == ("smoke", 3, 1, 1e-5, 2.0)
    assert (group.least_flops, group.most_flops) == (2.0 * 16 * 32, 2.0 * 3 * 16 * 32)
    assert contents.file_bytes == path.stat().st_size


def test_commands_print_text_and_json(tmp_path: Path) -> None:
    """'ls' and 'merge' print the same numbers as text and as JSON."""
    first, second = make_store(tmp_path / "a", [make_row(1)]), make_store(tmp_path / "b", [make_row(2)])
    runner = CliRunner()
    words = runner.invoke(command, ["merge", str(first), str(second)])
    again = runner.invoke(command, ["merge", str(first), str(second), "--json"])
    listed = json.loads(runner.invoke(command, ["ls", str(first), "--json"]).output)

    assert "1 row added" in words.output
    assert json.loads(again.output)["kept"] == 1
    assert (listed["statuses"], listed["groups"][0]["rows"]) == ({OK: 2}, 2)
    assert listed["store_schema_version"] == 3
    assert "2 rows (2 ok)" in runner.invoke(command, ["ls", str(first)]).output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_stores_in_read_only_folders_are_read(tmp_path: Path) -> None:
    """A store in a read-only folder can be read."""
    path = make_store(tmp_path / "a", [make_row(1)])
    tmp_path.chmod(0o500)
    try:
        with Store(path, read_only=True) as store:
            assert len(store.rows()) == 1
    finally:
        tmp_path.chmod(0o700)


def test_readers_see_rows_in_the_write_ahead_log(tmp_path: Path) -> None:
    """A reader sees the committed rows of an open writer."""
    with Store(tmp_path / "a") as writer:
        writer.add_run(RUN)
        writer.add(make_row(1))
        with Store(tmp_path / "a", read_only=True) as reader:
            assert [row.m for row in reader.rows()] == [1]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (sqlite3.SQLITE_FULL, "free space on its disk"),
        (sqlite3.SQLITE_BUSY, "another process has locked it"),
        (sqlite3.SQLITE_BUSY_RECOVERY, "another process has locked it"),
        (sqlite3.SQLITE_CORRUPT, "the file is damaged or not a store"),
        (sqlite3.SQLITE_NOTADB, "the file is damaged or not a store"),
        (sqlite3.SQLITE_IOERR_WRITE, "its disk fails"),
        (sqlite3.SQLITE_CANTOPEN, "give a file in an existing, writable folder"),
    ],
)
def test_sqlite_errors_come_with_advice(code: int, advice: str, tmp_path: Path) -> None:
    """The message names the store, SQLite's error and what to do about it."""
    error = sqlite3.OperationalError("something failed")
    error.sqlite_errorcode = code
    with Store(tmp_path / "a") as store, pytest.raises(StoreError) as caught, store._explained():
        raise error

    assert str(caught.value).startswith(f"store {tmp_path / 'a'}: something failed; {advice}")
