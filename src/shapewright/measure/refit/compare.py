"""Comparison of refitted records with the committed ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Fields that tell when and how a record was fitted.
CHANGING_FIELDS = ("id", "date", "command")
# Parts of a record that later steps complete.
REPORT_FIELDS = ("provenance", "residual")


def compare_folders(committed: Path, refitted: Path, *, compares_reports: bool) -> list[str]:
    """List the differences between two folders of records, one line each.

    Args:
        committed: Folder of the committed records.
        refitted: Folder of the refitted ones.
        compares_reports: Compare all fields. Otherwise fields that a step writes from scratch and later steps extend
            may lack entries, and reports and learned tables are left out.
    """
    found: list[str] = []
    for path in sorted(refitted.rglob("*.json")):
        name = path.relative_to(refitted)
        if not (committed / name).is_file():
            found.append(f"{name}: not committed")
            continue
        old, new = (json.loads((folder / name).read_text(encoding="utf-8")) for folder in (committed, refitted))
        found += [
            f"{name}: {difference}" for difference in compare_values(old, new, "", compares_reports=compares_reports)
        ]
    if compares_reports:
        for path in sorted(refitted.rglob("*.npz")):
            name = path.relative_to(refitted)
            with np.load(committed / name) as old_arrays, np.load(path) as new_arrays:
                names = sorted({*old_arrays.files, *new_arrays.files})
                found += [
                    f"{name}: {array} differs"
                    for array in names
                    if array not in old_arrays
                    or array not in new_arrays
                    or not np.array_equal(old_arrays[array], new_arrays[array])
                ]
    return found


def compare_values(old: Any, new: Any, path: str, *, compares_reports: bool) -> Iterator[str]:
    """Yield a line for each field in which two JSON values differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in {**old, **new}:
            if name in CHANGING_FIELDS or (not compares_reports and (name in REPORT_FIELDS or name not in new)):
                continue
            place = f"{path}.{name}" if path else str(name)
            if name not in old or name not in new:
                yield f"{place} is {'new' if name in new else 'missing'}"
            else:
                yield from compare_values(old[name], new[name], place, compares_reports=compares_reports)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from compare_values(one, other, f"{path}[{index}]", compares_reports=compares_reports)
    elif old != new:
        yield f"{path} was {str(old)[:80]}, is {str(new)[:80]}"
