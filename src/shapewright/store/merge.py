"""Merge: the rows of one store into another.

A row is the same measurement if its key is: device, library, operation, dtype, layout, kernel and repetition. Of two
good rows the one of the store that is merged into stays; one that failed gives way to one that is good.
"""

from __future__ import annotations

from pathlib import Path

from shapewright.errors import StoreError
from shapewright.store.file import Store


def merge_stores(target: str | Path, sources: list[str] | list[Path]) -> dict[str, int]:
    """Bring the rows of some stores into one; the sources stay as they are.

    Args:
        target: Store that takes the rows; it is made where it is not there.
        sources: Stores to read; a conflict between them is won by the first.

    Returns:
        Rows ``added``, ``replaced`` (a failed row by a good one) and ``kept`` (the target's own row stayed).

    Raises:
        StoreError: a store is missing, damaged, newer than this program, full, or merged into itself. Sources are all
            read before the target is opened, and each is written whole or not at all.
    """
    same = [source for source in sources if Path(source).resolve() == Path(target).resolve()]
    if same:
        raise StoreError(f"{same[0]} cannot be merged into itself; give another store to read")
    read = []
    for source in sources:
        with Store(source, read_only=True) as store:
            problems = store.verify()
            if problems:
                raise StoreError(f"{source} is damaged ({problems[0]}); nothing was merged, 'store verify' says more")
            read.append((store.runs(), store.rows()))
    counts = {"added": 0, "replaced": 0, "kept": 0}
    with Store(target) as store:
        for runs, rows in read:
            for name, number in store.add_all(runs, rows).items():
                counts[name] += number
    return counts
