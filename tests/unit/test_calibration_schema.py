"""Calibration files are checked when they are read: damaged ones are errors that name the key, never later failures."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import shapewright
from calibration_files import H100
from shapewright.core.errors import CalibrationError, ShapewrightError
from shapewright.hardware.device import Device
from shapewright.pricing.calibration.file import FILE_KIND, SCHEMA_VERSION, calibrated_device, device_table
from shapewright.pricing.calibration.records import RECORD_KINDS
from shapewright.pricing.calibration.schema import check_record

DATA = resources.files("shapewright.pricing") / "data"
REPLACEMENTS: tuple[Any, ...] = (
    None, -1, 0, math.nan, math.inf, 10**400, 1e300, "", "x", "\x1b[31m", True, [], {}, [[]], {"x": None}, "\ud800",
)  # fmt: skip
SAMPLES = 400


def packaged(kind: str) -> list[dict[str, Any]]:
    """Records of the package."""
    files = sorted((DATA / kind).iterdir(), key=lambda entry: entry.name)
    return [json.loads(entry.read_text(encoding="utf-8")) for entry in files if entry.name.endswith(".json")]


def own_file() -> dict[str, Any]:
    """A calibration file of an H100 with small records of all kinds."""
    records: dict[str, Any] = {}
    for kind in RECORD_KINDS:
        found = next((each for each in packaged(kind) if H100.name in each["devices"]), packaged(kind)[0])
        records[kind] = {**found, "devices": [H100.name], "provenance": {"date": "2026-01-01"}}
        records[kind].pop("residual", None)
        for part in ("parameters", "interval"):
            if "libraries" in records[kind][part]:
                records[kind][part] = {**records[kind][part], "libraries": {}}
    attention = records["attention"]
    section = attention["parameters"]["sections"]["16bit"]
    kept = {"usual_kernel": "flash_128", "kernel_of_head_dim": {"128": "flash_128"},
            "kernels": {"flash_128": section["kernels"]["flash_128"]}}  # fmt: skip
    attention["parameters"] = {"sections": {"16bit": kept}, "libraries": {}}
    return {"schema_version": SCHEMA_VERSION, "kind": FILE_KIND, "device": device_table(H100), "records": records}


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every value in nested objects and lists."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*above, key)
        yield from paths(inner, (*above, key))


def distinct_paths(content: dict[str, Any]) -> list[tuple[Any, ...]]:
    """One path of each kind: of the entries of a list only one."""
    return list({tuple("#" if isinstance(key, int) else key for key in path): path for path in paths(content)}.values())


def damage(content: dict[str, Any], chance: random.Random, known: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Delete or replace one value in place, and return its path."""
    path = chance.choice(known)
    inner: Any = content
    for key in path[:-1]:
        inner = inner[key]
    if chance.random() < 0.3:
        del inner[path[-1]]
    else:
        inner[path[-1]] = chance.choice(REPLACEMENTS)
    return path


def use(device: Device) -> None:
    """Predict training and decode with every kind of record; the times are finite."""
    for model, options in (
        ("mixtral-8x7b", {"layout": {"tensor_parallel": 8}}),
        ("gpt3-1.3b", {"workload": {"phase": "decode", "seq_len": 500}}),
    ):
        found = shapewright.predict(model, device=device, **options)
        assert math.isfinite(found.step_time_s)
        assert found.step_time_s > 0.0
        assert all(math.isfinite(end) for end in (found.step_time_low_s, found.step_time_high_s))


def test_records_of_the_package_match_the_schema() -> None:
    """Every record that is shipped passes."""
    checked = 0
    for kind in RECORD_KINDS:
        for record in packaged(kind):
            check_record(kind, record, where=kind)
            checked += 1

    assert checked > 20


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("gemm", "parameters", "dtypes", "bf16", "start_s"), -1e-6, "bf16.start_s=-1e-06 must be a number from 0 to"),
        (("gemm", "parameters", "dtypes", "bf16", "start_s"), math.nan, "start_s=nan must be"),
        (("gemm", "parameters", "dtypes", "bf16", "tiles", 0, "rate"), 0, r"tiles\[0\].rate=0 must be"),
        (("gemm", "parameters", "dtypes", "bf16", "splits"), None, "splits=None must be a list"),
        (("gemm", "interval", "dtypes", "bf16", "low"), [1.0], "low=.1.0. must be a list of 5 numbers"),
        (("attention", "parameters", "sections", "16bit", "usual_kernel"), "none", "must be one of flash_128"),
        (("pointwise", "parameters", "kinds", "other"), {}, "kinds.other lacks 'bandwidth_fraction'"),
        (("collectives", "devices"), [], "records.collectives.devices is empty"),
        (("moe", "residual"), {"file": "../../../etc/passwd"}, "residual belongs to records of the package"),
    ],
)
def test_the_message_names_the_key(path: tuple[Any, ...], value: Any, words: str, tmp_path: Path) -> None:
    """A wrong value is an error with its path, the value and what is allowed."""
    content = own_file()
    inner = content["records"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "own.json"
    file.write_text(json.dumps(content), encoding="utf-8")

    with pytest.raises(CalibrationError, match=words):
        calibrated_device(H100.name, file)


def test_damaged_files_are_refused_or_usable(tmp_path: Path) -> None:
    """Of random damages each is an error in one printable line, or leaves a file with finite predictions."""
    chance = random.Random(22)
    whole = own_file()
    known = distinct_paths(whole)
    file = tmp_path / "own.json"
    refused = 0
    for _ in range(SAMPLES):
        content = copy.deepcopy(whole)
        damaged = damage(content, chance, known)
        file.write_text(json.dumps(content), encoding="utf-8")
        message = ""
        try:
            use(calibrated_device(H100.name, file))
        except ShapewrightError as error:
            message = str(error)
            refused += 1
        assert not message or message.isprintable(), damaged

    assert refused > SAMPLES / 2
