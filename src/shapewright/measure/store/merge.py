"""Add the rows of other stores to a store: of sound ones, and what is left of a damaged one."""

from __future__ import annotations

from pathlib import Path

from shapewright.core.errors import StoreError
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import Row, Run


def rescue_store(target: str | Path, damaged: str | Path) -> tuple[dict[str, int], dict[str, int]]:
    """Add the rows of a damaged store that match their checksums to another store; the damaged one is not modified.

    Args:
        target: Store that receives the rows; it is created if it does not exist.

    Returns:
        Rows ``added``, ``replaced`` and ``kept`` in the target, and numbers of lost rows by reason.

    Raises:
        StoreError: not even the list of tables can be read, or the target cannot be written.
    """
    if _are_one_file(target, damaged):
        raise StoreError(f"{damaged} cannot be rescued into itself; give another store")
    lost: dict[str, int] = {}
    with Store(damaged, read_only=True) as store:
        runs: list[Run] = store.sound_records("runs", lost)
        rows: list[Row] = store.sound_records("measurements", lost)
    known = {run.run_id for run in runs}
    kept = [row for row in rows if row.run_id in known]
    if len(kept) < len(rows):
        lost["measurements of a run that is lost"] = len(rows) - len(kept)
    with Store(target) as store:
        return store.add_all(runs, kept), lost


def merge_stores(target: str | Path, sources: list[str] | list[Path]) -> dict[str, int]:
    """Merge the rows of some stores into one; the sources are not modified.

    Args:
        target: Store that receives the rows; it is created if it does not exist.
        sources: Stores to read; the first one wins conflicts between them.

    Returns:
        Rows ``added``, ``replaced`` (a failed row by a successful one) and ``kept`` (the target's row stayed).

    Raises:
        StoreError: a store is missing, damaged, full, from a newer version, or merged into itself. All sources are read
            before the target is opened, and each is written completely or not at all.
    """
    same = [source for source in sources if _are_one_file(source, target)]
    if same:
        raise StoreError(f"{same[0]} cannot be merged into itself; give another source")
    read = []
    for source in sources:
        with Store(source, read_only=True) as store:
            problems = store.verify()
            if problems:
                raise StoreError(
                    f"{source} is damaged ({problems[0]}); nothing was merged; 'store verify' lists all problems"
                )
            read.append((store.runs(), store.rows()))
    counts = {"added": 0, "replaced": 0, "kept": 0}
    with Store(target) as store:
        for runs, rows in read:
            for name, number in store.add_all(runs, rows).items():
                counts[name] += number
    return counts


def _are_one_file(path: str | Path, other: str | Path) -> bool:
    try:
        return Path(path).samefile(other)
    except (OSError, ValueError):  # one does not exist, or cannot be reached; opening it says why
        return False
