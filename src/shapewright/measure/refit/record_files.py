"""Read, write and compare the package's calibration records; boosted trees that their learned tables come from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import shapewright.pricing
from shapewright.measure.fit.shared import round_numbers

if TYPE_CHECKING:
    from shapewright.measure.fit.shared import Array

RECORDS = Path(shapewright.pricing.__file__).parent / "data"
# Source of the measured tables, and its name for each device that has a record.
SOURCE = "ai-dynamo/aiconfigurator @095f58a, Apache-2.0"
DEVICES = {
    "a100-sxm-80gb": "a100_sxm",
    "h100-sxm-80gb": "h100_sxm",
    "h200-sxm-141gb": "h200_sxm",
    "b200-sxm-180gb": "b200_sxm",
    "l40s": "l40s",
}
# Devices with the same chip, clocks and links and another memory size, which share the records.
SAME_CHIP = {"a100-sxm-80gb": ("a100-sxm-40gb",), "v100-sxm2-16gb": ("v100-sxm2-32gb",)}


def command(step: str, *options: str) -> str:
    """Return the command line of a refit, for the provenance of what it writes."""
    return " ".join(("python -m shapewright.measure.refit --data DIR", *options, step))


def record_path(kind: str, name: str) -> Path:
    """Return the file of a record."""
    return RECORDS / kind / f"{name}.json"


def read_record(kind: str, name: str) -> dict[str, Any]:
    """Read the content of a committed record."""
    content: dict[str, Any] = json.loads(record_path(kind, name).read_text(encoding="utf-8"))
    return content


def save_record(kind: str, name: str, content: Mapping[str, Any], *, digits: int = 0) -> Path:
    """Write a record atomically, so that an interrupted fit leaves the old one; ``digits`` 0 keeps all digits."""
    content = round_numbers(content, digits) if digits else content
    path = record_path(kind, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return draft.replace(path)


def write_record(kind: str, name: str, record: Mapping[str, Any], *, digits: int = 4) -> Path:
    """Write a new record with some significant digits; its id contains the date of the fit."""
    today = datetime.now(UTC).date().isoformat()
    content = {"id": f"{kind}/{name}/{today}", "kind": kind, **record}
    content["provenance"] = {"date": today, **record["provenance"]}
    return save_record(kind, name, content, digits=digits)


# The same rows give the same trees, in one thread.
REPEATABLE: dict[str, Any] = {
    "subsample": 0.7,
    "subsample_freq": 1,
    "deterministic": True,
    "force_row_wise": True,
    "random_state": 0,
    "n_jobs": 1,
    "verbose": -1,
}


def fit_trees(features: Array, target: Array, parameters: Mapping[str, Any], weight: Array | None = None) -> Any:
    """Fit trees to ln(measured / physics).

    Args:
        features: Features; shape [rows, features].
        target: Values to learn; shape [rows].
        parameters: LightGBM parameters in addition to REPEATABLE.
        weight: Weight of each row; equal by default.
    """
    from lightgbm import LGBMRegressor

    return LGBMRegressor(**REPEATABLE, **parameters).fit(features, target, sample_weight=weight)


# Fields that tell when and how a record was fitted.
CHANGING_FIELDS = ("id", "date", "command")
# Parts of a record that later steps complete.
REPORT_FIELDS = ("provenance", "residual")


def compare_folders(committed: Path, refitted: Path, *, compares_reports: bool) -> list[str]:
    """List the differences between two folders of records, one line each.

    Args:
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
