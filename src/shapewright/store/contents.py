"""What a store holds, summed up: rows by suite, device, library, kind and dtype, and the sizes they span."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.store.record import OK

if TYPE_CHECKING:
    from shapewright.store.file import Store
    from shapewright.store.record import Row


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that share their words.

    Attributes:
        suite: Suite that they were measured for.
        device: Device.
        library: Library and versions.
        kind: Kind of operation.
        dtype: Element format.
        rows: How many there are.
        failed: How many of them failed or were wrong.
        first_utc: When the first was measured; empty where no row says.
        last_utc: When the last was measured; empty where no row says.
        least_s: Shortest median; None where none was timed. [s]
        most_s: Longest median. [s]
        least_flops: Smallest arithmetic of an operation. [flop]
        most_flops: Largest arithmetic of an operation. [flop]
    """

    suite: str
    device: str
    library: str
    kind: str
    dtype: str
    rows: int
    failed: int
    first_utc: str
    last_utc: str
    least_s: float | None
    most_s: float | None
    least_flops: float
    most_flops: float


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A store, summed up.

    Attributes:
        path: The file.
        schema_version: Version of its schema, as it is read.
        file_bytes: Size of the file and of what was not yet folded into it. [byte]
        num_runs: Runs that wrote to it.
        statuses: Rows by status.
        groups: Rows by suite, device, library, kind and dtype.
    """

    path: str
    schema_version: int
    file_bytes: int
    num_runs: int
    statuses: dict[str, int]
    groups: tuple[Group, ...]


def sum_up(store: Store) -> Contents:
    """Read a store and count."""
    rows = store.rows()
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.suite, row.device, row.library, row.kind, row.dtype), []).append(row)
    log = store.path.with_name(f"{store.path.name}-wal")
    return Contents(
        path=str(store.path),
        schema_version=store.schema_version,
        file_bytes=sum(path.stat().st_size for path in (store.path, log) if path.is_file()),
        num_runs=len(store.runs()),
        statuses=dict(Counter(row.status for row in rows)),
        groups=tuple(_group(words, groups[words]) for words in sorted(groups)),
    )


def _group(words: tuple[str, ...], rows: Iterable[Row]) -> Group:
    listed = list(rows)
    times = [row.median_s for row in listed if row.median_s is not None]
    moments = [row.measured_utc for row in listed if row.measured_utc]
    suite, device, library, kind, dtype = words
    return Group(
        suite=suite,
        device=device,
        library=library,
        kind=kind,
        dtype=dtype,
        rows=len(listed),
        failed=sum(row.status != OK for row in listed),
        first_utc=min(moments, default=""),
        last_utc=max(moments, default=""),
        least_s=min(times, default=None),
        most_s=max(times, default=None),
        least_flops=min(row.flops for row in listed),
        most_flops=max(row.flops for row in listed),
    )
