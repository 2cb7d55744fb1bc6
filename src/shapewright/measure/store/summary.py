"""Summary of a store: rows by suite, device, library, kind and dtype, with the range of their times and sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.measure.store.record import OK, SCHEMA_VERSION

if TYPE_CHECKING:
    from shapewright.measure.store.database import Store
    from shapewright.measure.store.record import Row


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Rows of one suite, device, library, kind and dtype.

    Attributes:
        suite: Suite that they were measured for.
        device: Canonical device name.
        library: Library and versions.
        kind: Kind of operation.
        dtype: Element format.
        rows: Number of rows.
        failed: Number of failed and wrong rows.
        first_utc: Time of the first measurement; empty if unknown.
        last_utc: Time of the last measurement; empty if unknown.
        least_s: Shortest median; None if no row has one. [s]
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
class StoreSummary:
    """Counts of a store's runs and rows.

    Attributes:
        path: The file.
        store_schema_version: Version of the store's schema.
        file_bytes: Size of the file and its write-ahead log. [byte]
        num_runs: Number of runs.
        statuses: Rows by status.
        groups: Rows by suite, device, library, kind and dtype.
    """

    path: str
    store_schema_version: int
    file_bytes: int
    num_runs: int
    statuses: dict[str, int]
    groups: tuple[RowGroup, ...]


def summarize_store(store: Store) -> StoreSummary:
    """Count the rows of a store."""
    rows = store.rows()
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.suite, row.device, row.library, row.kind, row.dtype), []).append(row)
    wal_path = store.path.with_name(f"{store.path.name}-wal")
    return StoreSummary(
        path=str(store.path),
        store_schema_version=SCHEMA_VERSION,
        file_bytes=sum(path.stat().st_size for path in (store.path, wal_path) if path.is_file()),
        num_runs=len(store.runs()),
        statuses=dict(Counter(row.status for row in rows)),
        groups=tuple(_make_group(labels, groups[labels]) for labels in sorted(groups)),
    )


def _make_group(labels: tuple[str, ...], rows: Sequence[Row]) -> RowGroup:
    medians_s = [row.median_s for row in rows if row.median_s is not None]
    dates = [row.measured_utc for row in rows if row.measured_utc]
    suite, device, library, kind, dtype = labels
    return RowGroup(
        suite=suite,
        device=device,
        library=library,
        kind=kind,
        dtype=dtype,
        rows=len(rows),
        failed=sum(row.status != OK for row in rows),
        first_utc=min(dates, default=""),
        last_utc=max(dates, default=""),
        least_s=min(medians_s, default=None),
        most_s=max(medians_s, default=None),
        least_flops=min(row.flops for row in rows),
        most_flops=max(row.flops for row in rows),
    )
