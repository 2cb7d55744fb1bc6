"""Copy the sound rows of a damaged store into another one."""

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
    if Path(target).resolve() == Path(damaged).resolve():
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
