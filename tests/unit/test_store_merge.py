"""Two stores into one, many processes on one, and reading without touching."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shapewright.cli.store import command
from shapewright.errors import StoreError
from shapewright.operations import Gemm
from shapewright.store import file as store_module
from shapewright.store.contents import sum_up
from shapewright.store.file import Store
from shapewright.store.merge import merge_stores
from shapewright.store.record import FAILED, OK, Case, Row, Run, row_facts

RUN = Run(
    run_id="r1", started_utc="2026-01-01", command="c", suite="smoke", device="d", device_facts={}, driver="",
    runtime="", torch_version="", library="l", shapewright_version="0",
)  # fmt: skip


def make_row(m: int, *, seconds: float = 1e-5, status: str = OK, run: Run = RUN) -> Row:
    """A row of one small product."""
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
    """New rows come over, of two good ones the target's stays, a failed one gives way; the source is not touched."""
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


def test_bad_sources_merge_nothing(tmp_path: Path) -> None:
    """A damaged, missing or identical source is refused before the target is even made."""
    damaged = make_store(tmp_path / "b", [dataclasses.replace(make_row(1), median_s=None)])
    for source, words in ((damaged, "is damaged"), (tmp_path / "none", "no store at"), (tmp_path / "a", "into itself")):
        with pytest.raises(StoreError, match=words):
            merge_stores(tmp_path / "a", [source])

        assert not (tmp_path / "a").exists()


def test_full_disk_imports_all_or_nothing(tmp_path: Path) -> None:
    """Where many rows do not fit none of them is stored, and what was there before is all there."""
    with Store(make_store(tmp_path / "a", [make_row(1)])) as store:
        store._connection.execute("PRAGMA max_page_count = 30")
        with pytest.raises(StoreError, match="free space"):
            store.add_all([RUN], (make_row(m) for m in range(2, 2000)))

        assert [row.m for row in store.rows()] == [1]
        assert store.verify() == []


def test_reading_leaves_an_older_store_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of an older schema sees today's, and the file keeps its own."""
    path = make_store(tmp_path / "a", [make_row(1)])
    before = path.read_bytes()
    added = (*store_module.MIGRATIONS, ("ALTER TABLE runs ADD COLUMN remark TEXT NOT NULL DEFAULT 'none'",))
    monkeypatch.setattr(store_module, "MIGRATIONS", added)
    with Store(path, read_only=True) as store:
        assert store._connection.execute("SELECT remark FROM runs").fetchall() == [("none",)]
        assert store.rows() == [make_row(1)]
        with pytest.raises(StoreError, match="no store at"):
            Store(tmp_path / "none", read_only=True)

    assert path.read_bytes() == before


def test_reading_refuses_to_write(tmp_path: Path) -> None:
    """A store that was opened for reading takes no row."""
    path = make_store(tmp_path / "a", [])
    with Store(path, read_only=True) as store, pytest.raises(StoreError, match="readonly"):
        store.add_run(dataclasses.replace(RUN, run_id="r3"))


WRITER = """
import sys
from shapewright.store.file import Store
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
    """Four processes make and fill one store at once: every row is there, none is there twice, nothing is damaged."""
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


def test_contents_are_summed_up(tmp_path: Path) -> None:
    """Groups count rows and failures, and span times and sizes."""
    path = make_store(tmp_path / "a", [make_row(1, seconds=2.0), make_row(3), make_row(2, status=FAILED)])
    with Store(path, read_only=True) as store:
        contents = sum_up(store)
    (group,) = contents.groups

    assert (contents.num_runs, contents.statuses) == (1, {OK: 2, FAILED: 1})
    assert (group.suite, group.rows, group.failed, group.least_s, group.most_s) == ("smoke", 3, 1, 1e-5, 2.0)
    assert (group.least_flops, group.most_flops) == (2.0 * 16 * 32, 2.0 * 3 * 16 * 32)
    assert contents.file_bytes == path.stat().st_size


def test_commands_say_what_they_did(tmp_path: Path) -> None:
    """'ls' and 'merge' print words or JSON with the same figures."""
    first, second = make_store(tmp_path / "a", [make_row(1)]), make_store(tmp_path / "b", [make_row(2)])
    runner = CliRunner()
    words = runner.invoke(command, ["merge", str(first), str(second)])
    again = runner.invoke(command, ["merge", str(first), str(second), "--json"])
    listed = json.loads(runner.invoke(command, ["ls", str(first), "--json"]).output)

    assert "1 rows added" in words.output
    assert json.loads(again.output)["kept"] == 1
    assert (listed["statuses"], listed["groups"][0]["rows"]) == ({OK: 2}, 2)
    assert listed["store_schema_version"] == len(store_module.MIGRATIONS)
    assert "2 rows (2 ok)" in runner.invoke(command, ["ls", str(first)]).output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_stores_in_read_only_folders_are_read(tmp_path: Path) -> None:
    """A folder that takes no files beside the store is no hindrance to reading it."""
    path = make_store(tmp_path / "a", [make_row(1)])
    tmp_path.chmod(0o500)
    try:
        with Store(path, read_only=True) as store:
            assert len(store.rows()) == 1
    finally:
        tmp_path.chmod(0o700)


def test_readers_see_rows_that_are_still_in_the_log(tmp_path: Path) -> None:
    """A reader beside an open writer sees what the writer has committed so far."""
    with Store(tmp_path / "a") as writer:
        writer.add_run(RUN)
        writer.add(make_row(1))
        with Store(tmp_path / "a", read_only=True) as reader:
            assert [row.m for row in reader.rows()] == [1]


def test_sqlite_knows_the_wal_of_a_store(tmp_path: Path) -> None:
    """The file is in WAL mode, which several writers need."""
    path = make_store(tmp_path / "a", [])
    connection = sqlite3.connect(path)
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    connection.close()

    assert mode == "wal"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("database or disk is full", "free space on its disk"),
        ("database is locked", "another process holds it"),
        ("database disk image is malformed", "the file is damaged or no store"),
        ("file is not a database", "the file is damaged or no store"),
        ("disk I/O error", "its disk fails"),
        ("unable to open database file", "give a file in a folder that exists"),
    ],
)
def test_what_sqlite_says_comes_with_a_way_out(words: str, advice: str, tmp_path: Path) -> None:
    """Each of its messages names the store and what to do."""
    with Store(tmp_path / "a") as store, pytest.raises(StoreError) as caught, store._explained():
        raise sqlite3.OperationalError(words)

    assert str(caught.value).startswith(f"store {tmp_path / 'a'}: {words}; {advice}")
