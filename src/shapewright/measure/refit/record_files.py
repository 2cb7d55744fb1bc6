"""Read and write the package's calibration records, and name the measured devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import shapewright.pricing
from shapewright.measure.fit.shared import round_to_4_digits

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


def save_record(kind: str, name: str, content: Mapping[str, Any]) -> Path:
    """Write a record atomically, so that an interrupted fit leaves the old one."""
    path = record_path(kind, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return draft.replace(path)


def write_record(kind: str, name: str, record: Mapping[str, Any]) -> Path:
    """Write a new record with four significant digits; its id contains the date of the fit."""
    today = datetime.now(UTC).date().isoformat()
    content = {"id": f"{kind}/{name}/{today}", "kind": kind, **record}
    content["provenance"] = {"date": today, **record["provenance"]}
    return save_record(kind, name, round_to_4_digits(content))
