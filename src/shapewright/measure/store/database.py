"""The SQLite file of a store: add, read, verify and merge measured rows.

Every finished row is one committed transaction. The file is in WAL mode, so that committed rows survive a killed
process and several benches can write concurrently. The schema has a version; files of another one are refused.

Two rows with the same key (device, library, operation, dtype, layout, variant and repetition) are the same measurement.
A successful row is never replaced; a failed or wrong row is replaced by a successful one.

Every row and run has a checksum of its values, which is verified whenever they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from math import isnan
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shapewright.core.errors import StoreError
from shapewright.measure.store.record import OK, SCHEMA_VERSION, STATUSES, Row, Run

# Time that a writer waits for another one. [s]
_BUSY_TIMEOUT_S = 30.0
# Pause between attempts where SQLite itself does not wait. [s]
_BUSY_RETRY_S = 0.01

_SCHEMA = (
    """CREATE TABLE runs (
        run_id TEXT PRIMARY KEY, started_utc TEXT NOT NULL, command TEXT NOT NULL, suite TEXT NOT NULL,
        device TEXT NOT NULL, device_facts TEXT NOT NULL, driver TEXT NOT NULL, runtime TEXT NOT NULL,
        torch_version TEXT NOT NULL, library TEXT NOT NULL, shapewright_version TEXT NOT NULL,
        checksum TEXT NOT NULL) STRICT""",
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
        state_after TEXT NOT NULL, figures TEXT NOT NULL, checksum TEXT NOT NULL) STRICT""",
    "CREATE INDEX measurements_by_shape ON measurements (device, kind, dtype, m, n, k)",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

_DAMAGED = "the file is damaged or not a store; give another store"
_WRITABLE_FOLDER = "give a file in an existing, writable folder"
_ADVICE_BY_SQLITE_CODE = {
    sqlite3.SQLITE_FULL: "free space on its disk; rows stored before are kept",
    sqlite3.SQLITE_BUSY: "another process has locked it; wait for that process, or give another store",
    sqlite3.SQLITE_LOCKED: "another process has locked it; wait for that process, or give another store",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_ERROR: _DAMAGED,  # a damaged table definition: the statements here are correct
    sqlite3.SQLITE_IOERR: "its disk fails, or does not allow larger files; rows stored before are kept",
}
# The low byte of an extended result code is the primary code.
_PRIMARY_CODE_MASK = 0xFF

_MOST_ROWS = 10**7
"""Rows that are looked up one by one in a damaged file, whose largest number may be damaged too."""

_AS_JSON = {"sizes", "device_facts", "state_before", "state_after", "figures"}
_RECORDS: dict[str, type[Row] | type[Run]] = {"runs": Run, "measurements": Row}
_NAMES = {table: tuple(spec.name for spec in fields(record)) for table, record in _RECORDS.items()}
_REAL_NAMES = {spec.name for spec in fields(Row) if str(spec.type) in ("float", "float | None")}
_REPLACE = "ON CONFLICT (key) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in (*_NAMES["measurements"], "checksum") if name != "key"
)


_CHECK = "CHECK (status IN ('ok', 'failed', 'wrong'))"
_EXPRESSION = re.compile(r"\b(as|check|default|virtual)\b", re.IGNORECASE)
_INDEX_OF_COLUMNS = re.compile(r"[^(]*\([\w\s,\"'`\[\]]*\)\s*", re.ASCII)


def _has_program(kind: str, definition: str) -> bool:
    """Whether a part of a file could do any work, without end, where rows are written, read or verified.

    Those are triggers and views, and expressions of checks, defaults, generated columns and indices; ``hex(zeroblob(
    300000000))`` has 600 MB in each row.

    Args:
        kind: Its type in the list of SQLite.
        definition: The statement that created it; empty for an index of a key.
    """
    if kind == "index":
        return definition != "" and not _INDEX_OF_COLUMNS.fullmatch(definition)
    return kind != "table" or _EXPRESSION.search(definition.replace(_CHECK, "")) is not None


class Store:
    """An open store of measurements.

    Args:
        path: The file; it is created if it does not exist, unless it is opened read-only.
        read_only: Leave the file unchanged.

    Raises:
        StoreError: the file is missing, not a store, damaged, or has the schema of another version of this package.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        if read_only and not self.path.is_file():
            raise StoreError(f"no store at {self.path}; give a file that 'shapewright bench' has written")
        try:
            self._connection = sqlite3.connect(
                # With its folder: a store named ":memory:" would be kept nowhere.
                _read_only_uri(self.path) if read_only else os.path.join(os.curdir, self.path),  # noqa: PTH118
                timeout=_BUSY_TIMEOUT_S,
                isolation_level=None,
                uri=read_only,
            )
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
        # Checked before anything is written, so that other SQLite files are never modified; in one transaction, since
        # another process may be creating the same store.
        execute("BEGIN")
        found = execute("SELECT name, type, coalesce(sql, '') FROM sqlite_master").fetchall()
        version = self._version()
        execute("COMMIT")
        tables = {name for name, kind, _ in found if kind == "table"}
        has_programs = any(_has_program(kind, definition) for _, kind, definition in found)
        if has_programs or (version == 0 and tables) or (version > 0 and not {"runs", "measurements"} <= tables):
            raise StoreError(f"{self.path} is an SQLite file, but not a store of measurements; give another store")
        if version not in (0, SCHEMA_VERSION):
            advice = "upgrade shapewright" if version > SCHEMA_VERSION else "measure again"
            raise StoreError(
                f"{self.path} has schema version {version}, and this version of shapewright reads and writes "
                f"{SCHEMA_VERSION}; {advice} or give another store"
            )
        if read_only:
            if version == 0:
                raise StoreError(f"{self.path} is empty; give a file that 'shapewright bench' has written")
            return
        self._use_write_ahead_log()
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA foreign_keys = ON")
        if version == 0:
            with self._transaction():
                if self._version() == 0:  # read again: another process may have created it
                    for statement in _SCHEMA:
                        execute(statement)

    def _use_write_ahead_log(self) -> None:
        """Switch the file to WAL mode; where a process creates the same store, SQLite fails here instead of waiting."""
        end_s = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & _PRIMARY_CODE_MASK != sqlite3.SQLITE_BUSY or time.monotonic() > end_s:
                    raise
            time.sleep(_BUSY_RETRY_S)

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
        """Store a run; its rows refer to it."""
        with self._explained(), self._transaction():
            self._insert("runs", run, "ON CONFLICT (run_id) DO NOTHING")

    def add(self, row: Row) -> bool:
        """Store a finished row in a transaction of its own.

        Returns:
            Whether it was stored: an existing successful row is not replaced, a failed or wrong one is.
        """
        with self._explained(), self._transaction():
            return self._insert("measurements", row, f"{_REPLACE} WHERE measurements.status <> '{OK}'") == 1

    def add_all(self, runs: Iterable[Run], rows: Iterable[Row]) -> dict[str, int]:
        """Store many finished rows and their runs in one transaction.

        An existing row is replaced only if it is failed or wrong and the new one is successful.

        Returns:
            Numbers of rows that were ``added``, that ``replaced`` an existing row, and whose existing row was ``kept``.
        """
        counts = {"added": 0, "replaced": 0, "kept": 0}
        with self._explained(), self._transaction():
            known = dict(self._connection.execute("SELECT key, status FROM measurements"))
            for run in runs:
                self._insert("runs", run, "ON CONFLICT (run_id) DO NOTHING")
            for row in rows:
                status = known.get(row.key)
                if status is not None and (status == OK or row.status != OK):
                    counts["kept"] += 1
                    continue
                self._insert("measurements", row, _REPLACE)
                counts["added" if status is None else "replaced"] += 1
                known[row.key] = row.status
        return counts

    def finished_keys(self, *, statuses: Sequence[str] = STATUSES) -> set[str]:
        """Keys of the rows that have one of some statuses."""
        marks = ", ".join("?" * len(statuses))
        with self._explained():
            found = self._connection.execute(f"SELECT key FROM measurements WHERE status IN ({marks})", tuple(statuses))
            return {key for (key,) in found}

    def rows(self, *, keys: Iterable[str] | None = None) -> list[Row]:
        """All rows, or those with some keys, in the order of measurement.

        Raises:
            StoreError: the file is damaged, or a row differs from its checksum.
        """
        wanted = None if keys is None else set(keys)
        found = self._read("measurements", "measured_utc")
        decoded = (_decode("measurements", values) for values in found)
        return [Row(**values) for values in decoded if wanted is None or values["key"] in wanted]

    def runs(self) -> list[Run]:
        """All runs, in the order of their start.

        Raises:
            StoreError: the file is damaged, or a run differs from its checksum.
        """
        return [Run(**_decode("runs", values)) for values in self._read("runs", "started_utc")]

    def _read(self, table: str, order: str) -> list[tuple[Any, ...]]:
        """Values of a table's rows in some order, verified by their checksums and their number."""
        sound, num_damaged = self._verified(table, order)
        if num_damaged:
            raise StoreError(
                f"store {self.path}: {num_damaged} of {len(sound) + num_damaged} {table} differ from their checksums, "
                f"so a disk or another program has changed them; {_DAMAGED}"
            )
        return sound

    def _verified(self, table: str, order: str) -> tuple[list[tuple[Any, ...]], int]:
        """Values of the rows that match their checksums, and the number of those that do not or are missing."""
        with self._explained():
            execute = self._connection.execute
            found = execute(
                f"SELECT {', '.join(_NAMES[table])}, checksum FROM {table} NOT INDEXED ORDER BY {order}, rowid"
            ).fetchall()
            # Counted in the index of the primary key: rows that a damaged page hides are missing from one of the two.
            (indexed,) = execute(f"SELECT count(*) FROM {table} INDEXED BY sqlite_autoindex_{table}_1").fetchone()
        sound = [values for *values, checksum in found if checksum == _checksum(values)]
        return [tuple(values) for values in sound], max(indexed, len(found)) - len(sound)

    def sound_records(self, table: str, lost: dict[str, int]) -> list[Any]:
        """Records of ``runs`` or ``measurements`` that can be read and match their checksums, each looked up alone.

        Args:
            lost: Receives the number of records that cannot be read or differ.
        """
        execute = self._connection.execute
        last = 0
        # Either the table or the index of its key may be damaged; both know the numbers of rows.
        for source in ("NOT INDEXED", f"INDEXED BY sqlite_autoindex_{table}_1"):
            with suppress(sqlite3.DatabaseError):
                numbers = execute(f"SELECT rowid FROM {table} {source} ORDER BY rowid DESC LIMIT 1").fetchone() or (0,)
                last = max(last, *numbers)
        query = f"SELECT {', '.join(_NAMES[table])}, checksum FROM {table} WHERE rowid = ?"
        sound: list[Any] = []
        for number in range(1, min(last, _MOST_ROWS) + 1):
            with suppress(sqlite3.DatabaseError, ValueError):  # a page, or a text, that cannot be read
                *values, checksum = execute(query, (number,)).fetchone() or (None,)
                if values and checksum == _checksum(values):
                    sound.append(_RECORDS[table](**_decode(table, values)))
        if len(sound) < last:
            lost[f"damaged {table}"] = last - len(sound)
        return sound

    def verify(self) -> list[str]:
        """Check the file for damage; returns the problems found."""
        with self._explained():
            execute = self._connection.execute
            problems = [result for (result,) in execute("PRAGMA integrity_check") if result != "ok"]
            orphans = execute("PRAGMA foreign_key_check").fetchall()
            if orphans:
                problems.append(f"{len(orphans)} rows belong to no run")
            query = "SELECT count(*) FROM measurements WHERE status = 'ok' AND coalesce(median_s, 0) <= 0"
            (timeless,) = execute(query).fetchone()
            if timeless:
                problems.append(f"{timeless} rows are marked ok without a time")
        for table, order in (("measurements", "measured_utc"), ("runs", "started_utc")):
            num_damaged = self._verified(table, order)[1]
            if num_damaged:
                problems.append(f"{num_damaged} {table} differ from their checksums")
        return problems

    def _insert(self, table: str, record: Row | Run, conflict: str) -> int:
        names = _NAMES[table]
        values = [_encode(name, getattr(record, name)) for name in names]
        marks = ", ".join("?" * (len(names) + 1))
        statement = f"INSERT INTO {table} ({', '.join(names)}, checksum) VALUES ({marks}) {conflict}"
        return self._connection.execute(statement, [*values, _checksum(values)]).rowcount

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
        except StoreError:
            raise
        except (sqlite3.Error, ValueError) as error:  # ValueError: a text is not UTF-8, or a cell not JSON
            raise self._explain(error) from error
        except OverflowError as error:
            raise StoreError(f"store {self.path} holds no number beyond 64 bits; correct the measurement") from error

    def _explain(self, error: Exception) -> StoreError:
        """A StoreError with SQLite's message and advice on what to do."""
        code = sqlite3.SQLITE_CORRUPT  # of a cell that is not JSON
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & _PRIMARY_CODE_MASK
        return StoreError(f"store {self.path}: {error}; {_ADVICE_BY_SQLITE_CODE.get(code, _WRITABLE_FOLDER)}")


def require_writable(path: str | Path) -> None:
    """Check that rows can be stored, before they are measured; does not create a store.

    Raises:
        StoreError: the folder is missing or not writable, or the file is not a store or not writable.
    """
    target = Path(path)
    if target.exists():
        with Store(target):
            pass
    try:
        # SQLite writes its log into the same folder, so an existing store needs a writable folder too.
        with tempfile.TemporaryFile(dir=target.parent):
            pass
        if target.exists():
            target.open("r+b").close()
    except OSError as error:
        raise StoreError(f"store {target}: {error.strerror or error}; {_WRITABLE_FOLDER}") from error


def _read_only_uri(path: Path) -> str:
    """URI that opens a file read-only, and as immutable if its folder is not writable."""
    file = path.resolve()  # SQLite keeps the log beside the file that a link leads to
    uri = f"{file.as_uri()}?mode=ro"
    log = file.with_name(f"{file.name}-wal")
    has_log = log.is_file() and log.stat().st_size > 0
    return uri if has_log or os.access(file.parent, os.W_OK) else f"{uri}&immutable=1"


def _encode(name: str, value: Any) -> Any:
    if name in _AS_JSON:
        return json.dumps(value, sort_keys=True)
    if name in _REAL_NAMES and value is not None:
        # As SQLite returns it: NaN is stored as NULL, and a negative zero as zero.
        return None if isnan(value) else float(value) + 0.0
    return int(value) if isinstance(value, bool) else value


def _checksum(values: Sequence[Any]) -> str:
    """Checksum of stored values and their types. Never change it: files hold its results."""
    content = "\x1f".join(f"{type(value).__name__}:{value!r}" for value in values)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _decode(table: str, values: Sequence[Any]) -> dict[str, Any]:
    named = zip(_NAMES[table], values, strict=True)
    decoded = {name: json.loads(value) if name in _AS_JSON else value for name, value in named}
    if "is_cold" in decoded:
        decoded["is_cold"] = bool(decoded["is_cold"])
    return decoded
