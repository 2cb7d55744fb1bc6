"""The store: one SQLite file, one committed transaction per finished row.

The file is in WAL mode, so that a process killed at any moment leaves every committed row readable and two benches can
write at once. The schema has a version; older files are brought up to date when they are opened, newer ones refused.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
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

_WRITABLE_FOLDER = "give a file in a folder that exists and that you can write to"

_AS_JSON = {"sizes", "device_facts", "state_before", "state_after", "figures"}
_ROW_NAMES = tuple(spec.name for spec in fields(Row))
_RUN_NAMES = tuple(spec.name for spec in fields(Run))
_REPLACE = "ON CONFLICT (key) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in _ROW_NAMES if name != "key"
)


class Store:
    """An open store.

    Args:
        path: The file; it is made where it is not there, unless it is only read.
        read_only: Leave the file exactly as it is: an older schema is brought up to date in a copy in memory.

    Raises:
        StoreError: the file is missing, no store, broken, or of a newer version of this package.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        if read_only and not self.path.is_file():
            raise StoreError(f"no store at {self.path}; give the file that 'shapewright bench --store' wrote")
        try:
            self._connection = _connect(_read_only_uri(self.path) if read_only else str(self.path))
        except sqlite3.Error as error:
            raise self._explain(error) from error
        try:
            with self._explained():
                self._open(read_only=read_only)
        except BaseException:
            self._connection.close()
            raise

    def _open(self, *, read_only: bool) -> None:
        execute = self._connection.execute
        # Looked at before anything is written, so that a file of someone else's stays as it is; in one transaction,
        # since another process may be making the very same store.
        execute("BEGIN")
        tables = {name for (name,) in execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        version = self._version()
        execute("COMMIT")
        if version > len(MIGRATIONS):
            raise StoreError(
                f"{self.path} has schema version {version}, newer than {len(MIGRATIONS)}, the latest known here; "
                "upgrade shapewright or give another --store"
            )
        if (version == 0 and tables) or (version > 0 and not {"runs", "measurements"} <= tables):
            raise StoreError(f"{self.path} is an SQLite file but no store of measurements; give another --store")
        if read_only:
            if version == len(MIGRATIONS):
                return
            copy = _connect(":memory:")
            self._connection.backup(copy)
            self._connection.close()
            self._connection = copy
            execute = copy.execute
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
        with self._explained(), self._transaction():
            return self._insert("measurements", _ROW_NAMES, row, f"{_REPLACE} WHERE measurements.status <> '{OK}'") == 1

    def add_all(self, runs: Iterable[Run], rows: Iterable[Row]) -> dict[str, int]:
        """Keep many finished rows with their runs: all of them, or none if anything goes wrong.

        Where a key is there already, a good row stays as it is, and one that failed gives way to one that is good.

        Returns:
            Rows that were ``added``, that ``replaced`` a failed one, and that were ``kept`` out.
        """
        counts = {"added": 0, "replaced": 0, "kept": 0}
        with self._explained(), self._transaction():
            known = dict(self._connection.execute("SELECT key, status FROM measurements"))
            for run in runs:
                self._insert("runs", _RUN_NAMES, run, "ON CONFLICT (run_id) DO NOTHING")
            for row in rows:
                status = known.get(row.key)
                if status is not None and (status == OK or row.status != OK):
                    counts["kept"] += 1
                    continue
                self._insert("measurements", _ROW_NAMES, row, _REPLACE)
                counts["added" if status is None else "replaced"] += 1
                known[row.key] = row.status
        return counts

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

    @property
    def schema_version(self) -> int:
        """Version of the schema as it is read here; older files are brought up to date."""
        return len(MIGRATIONS)

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
        elif "disk I/O" in words:
            advice = "its disk fails, or may hold no larger file; what was stored before is kept"
        else:
            advice = _WRITABLE_FOLDER
        return StoreError(f"store {self.path}: {words}; {advice}")


def require_usable(path: str | Path) -> None:
    """Check that rows can be stored, before the work that makes them; no store is made.

    Raises:
        StoreError: the folder is missing or takes no files, or what is there is no store or must not be written.
    """
    target = Path(path)
    if target.exists():
        with Store(target):
            pass
    try:
        # SQLite writes its log beside the store, so a store that is there needs such a folder too.
        with tempfile.TemporaryFile(dir=target.parent):
            pass
        if target.exists():
            target.open("r+b").close()
    except OSError as error:
        raise StoreError(f"store {target}: {error.strerror or error}; {_WRITABLE_FOLDER}") from error


def _connect(target: str) -> sqlite3.Connection:
    return sqlite3.connect(target, timeout=_BUSY_WAIT_S, isolation_level=None, uri=target.startswith("file:"))


def _read_only_uri(path: Path) -> str:
    """The file, never to be written; in a folder that takes no files beside it, also not to be shared."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    log = path.with_name(f"{path.name}-wal")
    has_log = log.is_file() and log.stat().st_size > 0
    return uri if has_log or os.access(path.resolve().parent, os.W_OK) else f"{uri}&immutable=1"


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
