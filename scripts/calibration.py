"""What calibration scripts share: arguments, devices of the measured tables, record files. Not a script itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shapewright.fit.logs import tidy

RECORDS = Path(__file__).resolve().parent.parent / "src" / "shapewright" / "perf" / "data"
# The tables of one collector, and its name for each device that has a record.
SOURCE = "ai-dynamo/aiconfigurator @095f58a, Apache-2.0"
DEVICES = {
    "a100-sxm-80gb": "a100_sxm",
    "h100-sxm-80gb": "h100_sxm",
    "h200-sxm-141gb": "h200_sxm",
    "b200-sxm-180gb": "b200_sxm",
    "l40s": "l40s",
}
# Devices that share a measured chip, its clocks and its links, and differ in memory alone: its records are theirs too.
SAME_CHIP = {"a100-sxm-80gb": ("a100-sxm-40gb",), "v100-sxm2-16gb": ("v100-sxm2-32gb",)}


def argument_parser(description: str | None, devices: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Parser of ``--data``, and of ``--device`` where devices are fitted one by one.

    Args:
        description: The script's docstring.
        devices: Names that ``--device`` takes; None are given where the script has no such option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the measured tables named above")
    if choices := sorted(set(devices)):
        parser.add_argument(
            "--device", choices=choices, action="append", help="only this one; may be given again; default: all"
        )
    return parser


def record_path(kind: str, name: str) -> Path:
    """Where the record of a kind and device lies."""
    return RECORDS / kind / f"{name}.json"


def read_record(kind: str, name: str) -> dict[str, Any]:
    """Content of a record that was fitted before."""
    content: dict[str, Any] = json.loads(record_path(kind, name).read_text(encoding="utf-8"))
    return content


def save_record(kind: str, name: str, content: Mapping[str, Any]) -> Path:
    """Write a record as it is, whole, so that an interrupted fit leaves the old one."""
    path = record_path(kind, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return draft.replace(path)


def write_record(kind: str, name: str, record: Mapping[str, Any]) -> Path:
    """Write a fresh record with the digits that a fit knows; the date of the fit is part of its id."""
    today = datetime.now(UTC).date().isoformat()
    content = {"id": f"{kind}/{name}/{today}", "kind": kind, **record}
    content["provenance"] = {"date": today, **record["provenance"]}
    return save_record(kind, name, tidy(content))
