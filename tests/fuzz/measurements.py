"""Hostile stores, measured tables and traces of kernels."""

from __future__ import annotations

import math
import sqlite3
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path
from random import Random

from fuzz.spoil import as_json, spoil_bytes, spoil_object
from measured_tables import gemm_columns, write_parquet
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import OK, Case, Row, Run, row_facts
from shapewright.prediction.utilization.kineto import read_trace

RUN = Run(
    run_id="r1", started_utc="2026-01-01T00:00:00+00:00", command="shapewright bench smoke", suite="smoke",
    device="h200-sxm-141gb", device_facts={"num_sms": 132}, driver="580.1", runtime="cuda 13.0", torch_version="2.13.0",
    library="torch 2.13.0", shapewright_version="0.1.0",
)  # fmt: skip


def stored_row(m: int) -> Row:
    """A row of a measured GEMM."""
    facts = row_facts(Case(operation=Gemm(name="x", m=m, n=16, k=32)), RUN)
    now = "2026-01-01T00:00:01+00:00"
    return Row(**facts, measured_utc=now, status=OK, median_s=1e-5, num_samples=10, launch_s=3e-6)


@cache
def sound_store() -> bytes:
    """A store of 40 rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.sqlite"
        with Store(path) as store:
            store.add_run(RUN)
            for m in range(1, 41):
                store.add(stored_row(m))
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        return path.read_bytes()


def make_store(chance: Random) -> bytes:
    """A store with flipped bits, swapped, torn or zeroed pages, or another schema version."""
    content = bytearray(sound_store())
    size = 4096
    for _ in range(chance.choice((1, 1, 2, 5))):
        way, pages = chance.randrange(5), len(content) // size
        if way == 0 or not pages:
            bit = chance.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
        elif way == 1:
            one, two = (size * chance.randrange(pages) for _ in range(2))
            content[one : one + size], content[two : two + size] = content[two : two + size], content[one : one + size]
        elif way == 2:
            start = size * chance.randrange(pages) + 512 * chance.randrange(8)
            content[start : start + 512] = bytes(512)
        elif way == 3:
            content[60:64] = chance.randrange(2**16).to_bytes(4, "big")
        elif len(content) > size:
            del content[chance.randrange(size, len(content)) :]
    return bytes(content)


@cache
def true_rows() -> dict[str, Row]:
    """Rows of the sound store by key."""
    return {row.key: row for row in map(stored_row, range(1, 41))}


def use_store(path: Path, _chance: Random) -> None:
    """Read every row; none may differ from what was stored."""
    with Store(path, read_only=True) as store:
        problems, rows = store.verify(), store.rows()
    assert problems or {row.key for row in rows} == true_rows().keys()
    assert all(row == true_rows().get(row.key) for row in rows)


@cache
def tables() -> dict[str, bytes]:
    """A measured table in both formats."""
    columns = gemm_columns([1e-5] * 5)
    with tempfile.TemporaryDirectory() as folder:
        parquet = write_parquet(Path(folder) / "gemm.parquet", columns).read_bytes()
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    return {"parquet": parquet, "csv": "\n".join(rows).encode()}


def make_csv(chance: Random) -> bytes:
    """A measured table with spoilt bytes."""
    return spoil_bytes(tables()["csv"], chance)


def make_parquet(chance: Random) -> bytes:
    """A measured table with some values replaced, or with spoilt bytes."""
    if chance.random() < 0.5:
        return spoil_bytes(tables()["parquet"], chance)
    columns = dict(gemm_columns([1e-5] * 5))
    name = chance.choice(sorted(columns))
    column = list(columns[name])
    column[chance.randrange(5)] = chance.choice((None, 0, -1, 2**40, 2**62))
    columns[name] = chance.choice(
        (
            column,
            [math.nan] * 5,
            [math.inf] * 5,
            [-1e-5] * 5,
            [1e300] * 5,
            [0] * 5,
            ["\x1b"] * 5,
            [[1]] * 5,
            [b"\0"] * 5,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            return write_parquet(Path(folder) / "gemm.parquet", columns).read_bytes()
        except (TypeError, ValueError, OverflowError):  # mixed types, which the format cannot hold
            return tables()["parquet"]


def use_table(path: Path, _chance: Random) -> None:
    """Judge predictions on the table."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / f"gemm{path.suffix}"
        target.write_bytes(path.read_bytes())
        for row in evaluate_folder(folder).rows:
            assert all(math.isfinite(each) for each in (row.mape, row.bias) if each is not None)


def make_kernels(chance: Random) -> bytes:
    """A trace of kernels with spoilt values."""
    args = {"External id": 1, "Input Dims": [[64, 64], [64, 256]], "Input type": ["float", "float"], "device": 0}
    event = {"ph": "X", "cat": "kernel", "name": "sgemm", "ts": 1.0, "dur": 5.0, "pid": 0, "tid": 1, "args": args}
    kinds = {"ProfilerStep#3": "user_annotation", "aten::mm": "cpu_op", "sgemm": "kernel", "ncclKernel": "kernel"}
    events = [event | {"cat": kind, "name": name} for name, kind in kinds.items()]
    content = as_json(spoil_object({"schemaVersion": 1, "traceEvents": events}, chance, [event, args]))
    return spoil_bytes(content, chance) if chance.random() < 0.3 else content


def use_kernels(path: Path, _chance: Random) -> None:
    """Read the trace; its times are finite."""
    found = read_trace(path)
    assert math.isfinite(found.span_s)
    assert found.span_s >= 0.0
