"""The record files of the package, which the calibration scripts write. Not a script itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shapewright.fit.logs import tidy

RECORDS = Path(__file__).resolve().parent.parent / "src" / "shapewright" / "perf" / "data"


def write_record(kind: str, name: str, record: Mapping[str, Any]) -> Path:
    """Write one calibration record; the date of the fit is part of its id."""
    today = datetime.now(UTC).date().isoformat()
    content = {"id": f"{kind}/{name}/{today}", "kind": kind, **record}
    content["provenance"] = {"date": today, **record["provenance"]}
    path = RECORDS / kind / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tidy(content), indent=1) + "\n", encoding="utf-8")
    return path
