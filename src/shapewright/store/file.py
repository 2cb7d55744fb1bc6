"""The store: one SQLite file, one committed transaction per finished row.

The file is in WAL mode, so that a process killed at any moment leaves every committed row readable and two benches can
write at once. The schema has a version; older files are brought up to date when they are opened, newer ones refused.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shapewright.errors import StoreError
from shapewright.store.record import OK, STATUSES, Row, Run

# How long a writer waits for another one. [s]
_BUSY_WAIT_S = 30.0

# Step i brings a file from schema version i to i + 1; steps are never changed, only added.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE runs (
            run_id TEXT PRIMARY KEY, started_utc TEXT NOT NULL, command TEXT NOT NULL, suite TEXT NOT NULL,
            device TEXT NOT NULL, device_facts TEXT NOT NULL, driver TEXT NOT NULL, runtime TEXT NOT NULL,
            torch_version TEXT NOT NULL, library TEXT NOT NULL, shapewright_version TEXT NOT NULL) STRICT""",
        """CREATE TABLE measurements (
            key TEXT PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs (run_id), measured_utc TEXT NOT NULL,
            suite TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, dtype TEXT NOT NULL, layout TEXT NOT NULL,
            variant TEXT NOT NULL, repetition INTEGER NOT NULL, sizes TEXT NOT NULL,
            m INTEGER, n INTEGER, k INTEGER, batch INTEGER, flops REAL NOT NULL, num_bytes REAL NOT NULL,
            device TEXT NOT NULL, library TEXT NOT NULL, kernel TEXT NOT NULL,
            status TEXT NOT NULL CHECK (status IN ('ok', 'failed', 'wrong')), error TEXT NOT NULL, relative_error REAL,
            method TEXT NOT NULL, median_s REAL, min_s REAL, max_s REAL, q1_s REAL, q3_s REAL, ci_half_width_s REAL,
            num_samples INTEGER NOT NULL, calls_per_sample INTEGER NOT NULL, launch_s REAL,
            num_inputs INTEGER NOT NULL, is_cold INTEGER NOT NULL, state_before TEXT NOT NULL,
            state_after TEXT NOT NULL) STRICT""",
        "CREATE INDEX measurements_by_shape ON measurements (device, kind, dtype, m, n, k)",
    ),
    ("ALTER TABLE measurements ADD COLUMN figures TEXT NOT NULL DEFAULT '{}'",),
)

_AS_JSON = {"sizes", "device_facts", "state_before", "state_after", "figures"}
_ROW_NAMES = tuple(spec.name for spec in fields(Row))
_RUN_NAMES = tuple(spec.name for spec in fields(Run))


class Store:
    """An open store.

    Args:
        path: The file; it is made where it is not there.
        must_exist: Refuse to make it.

    Raises:
        StoreError: the file is missing, no store, broken, or of a newer version of this package.
    """

    def __init__(self, path: str | Path, *, must_exist: bool = False) -> None:
        self.path = Path(path)
        if must_exist and not self.path.is_file():
            raise StoreError(f"no store at {self.path}; give the file that 'shapewright bench --store' wrote")
        try:
            self._connection = sqlite3.connect(self.path, timeout=_BUSY_WAIT_S, isolation_level=None)
        except sqlite3.Error as error:
            raise self._explain(error) from error
        try:
            with self._explained():
                self._open()
        except BaseException:
            self._connection.close()
            raise

    def _open(self) -> None:
        execute = self._connection.execute
        # Looked at before anything is written, so that a file of someone else's stays as it is.
        tables = {name for (name,) in execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        version = self._version()
        if version > len(MIGRATIONS):
            raise StoreError(
                f"{self.path} has schema version {version}, newer than {len(MIGRATIONS)}, the latest known here; "
                "upgrade shapewright or give another --store"
            )
        if (version == 0 and tables) or (version > 0 and not {"runs", "measurements"} <= tables):
            raise StoreError(f"{self.path} is an SQLite file but no store of measurements; give another --store")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA foreign_keys = ON")
        if version < len(MIGRATIONS):
            with self._transaction():
                for step in MIGRATIONS[self._version() :]:  # asked again: another process may have been quicker
                    for statement in step:
                        execute(statement)
                execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def add_run(self, run: Run) -> None:
        """Keep what all rows of a run share."""
        with self._explained(), self._transaction():
            self._insert("runs", _RUN_NAMES, run, "ON CONFLICT (run_id) DO NOTHING")

    def add(self, row: Row) -> bool:
        """Keep a finished row, at once and for good.

        Returns:
            Whether it was kept: a row that is fine is never replaced, one that failed is.
        """
        updates = ", ".join(f"{name} = excluded.{name}" for name in _ROW_NAMES if name != "key")
        with self._explained(), self._transaction():
            conflict = f"ON CONFLICT (key) DO UPDATE SET {updates} WHERE measurements.status <> '{OK}'"
            return self._insert("measurements", _ROW_NAMES, row, conflict) == 1

    def finished_keys(self, *, statuses: Sequence[str] = STATUSES) -> set[str]:
        """Keys that need no measuring."""
        marks = ", ".join("?" * len(statuses))
        with self._explained():
            found = self._connection.execute(f"SELECT key FROM measurements WHERE status IN ({marks})", tuple(statuses))
            return {key for (key,) in found}

    def rows(self, *, keys: Iterable[str] | None = None) -> list[Row]:
        """All rows in the order in which they were measured, or those of some keys."""
        wanted = None if keys is None else set(keys)
        with self._explained():
            found = self._connection.execute(
                f"SELECT {', '.join(_ROW_NAMES)} FROM measurements ORDER BY measured_utc, rowid"
            ).fetchall()
            decoded = (_decode(_ROW_NAMES, values) for values in found)
            return [Row(**values) for values in decoded if wanted is None or values["key"] in wanted]

    def runs(self) -> list[Run]:
        """All runs, the first one first."""
        with self._explained():
            found = self._connection.execute(f"SELECT {', '.join(_RUN_NAMES)} FROM runs ORDER BY started_utc, rowid")
            return [Run(**_decode(_RUN_NAMES, values)) for values in found]

    def verify(self) -> list[str]:
        """Look for damage; an empty list means that there is none."""
        with self._explained():
            execute = self._connection.execute
            problems = [words for (words,) in execute("PRAGMA integrity_check") if words != "ok"]
            orphans = execute("PRAGMA foreign_key_check").fetchall()
            if orphans:
                problems.append(f"{len(orphans)} rows belong to no run")
            query = "SELECT count(*) FROM measurements WHERE status = 'ok' AND coalesce(median_s, 0) <= 0"
            (timeless,) = execute(query).fetchone()
            if timeless:
                problems.append(f"{timeless} rows are marked ok without a time")
        return problems

    def _insert(self, table: str, names: Sequence[str], record: Row | Run, conflict: str) -> int:
        values = [_encode(name, getattr(record, name)) for name in names]
        marks = ", ".join("?" * len(names))
        statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks}) {conflict}"
        return self._connection.execute(statement, values).rowcount

    def _version(self) -> int:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        assert isinstance(version, int)
        return version

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.rollback()
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, json.JSONDecodeError) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> StoreError:
        """One line for what SQLite has to say."""
        words = str(error)
        if "full" in words:
            advice = "free space on its disk; what was stored before is kept"
        elif "locked" in words:
            advice = "another process holds it; wait for it, or give another --store"
        elif "malformed" in words or "not a database" in words or isinstance(error, json.JSONDecodeError):
            advice = "the file is damaged or no store; give another --store"
        else:
            advice = "give a file in a folder that exists and that you can write to"
        return StoreError(f"store {self.path}: {words}; {advice}")


def _encode(name: str, value: Any) -> Any:
    if name in _AS_JSON:
        return json.dumps(value, sort_keys=True)
    return int(value) if isinstance(value, bool) else value


def _decode(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    decoded = {
        name: json.loads(value) if name in _AS_JSON else value for name, value in zip(names, values, strict=True)
    }
    if "is_cold" in decoded:
        decoded["is_cold"] = bool(decoded["is_cold"])
    return decoded
