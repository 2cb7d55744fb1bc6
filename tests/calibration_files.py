"""Calibration files for tests: a device whose GEMMs have a longer start time than the package's records."""

from __future__ import annotations

import json
from pathlib import Path

from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.file import device_table
from shapewright.pricing.calibration.records import load_record

H100 = load_device("h100-sxm-80gb")


def write_late_calibration(path: Path, factor: float, device: Device = H100) -> Path:
    """Write a calibration that multiplies the start time of every GEMM on an H100."""
    record = load_record("gemm", H100)
    sections = {
        name: {**section, "start_s": section["start_s"] * factor}
        for name, section in record.parameters["dtypes"].items()
    }
    own = {
        "id": f"own/gemm/{factor}", "devices": [device.name], "architecture": "hopper",
        "parameters": {"dtypes": sections, "libraries": {}}, "interval": record.interval, "provenance": {},
    }  # fmt: skip
    content = {
        "schema_version": 2,
        "kind": "shapewright calibration",
        "device": device_table(device),
        "records": {"gemm": own},
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
