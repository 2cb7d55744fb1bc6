"""Attention records against measured rows whose whole head layouts no fit saw."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from calibration_script import REPOSITORY, load_script
from measured import measured_file

from shapewright.hardware import load_device
from shapewright.operations import Attention
from shapewright.perf.attention import price_attention
from shapewright.perf.calibration import load_record
from shapewright.perf.price import Price

LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))["attention"]
RECORDS = sorted((REPOSITORY / "src/shapewright/perf/data/attention").glob("*.json"))
CASES = [(*path.split("/"), name) for path, limits in LIMITS.items() for name in limits]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that made the records."""
    return load_script("calibrate_attention")


@cache
def price_unseen(script: ModuleType, name: str, section: str, phase: str) -> tuple[Price, np.ndarray]:
    """Prices of all rows of held-out head layouts, as the package prices them, and their measurements."""
    folder = measured_file(f"attention_{phase}.parquet").parent
    rows = script.read_rows(folder, phase, script.DEVICES[name], section)
    rows = rows[script.folds_of(rows.num_heads, rows.num_kv_heads, rows.head_dim) == script.HELD_OUT_FOLD]
    _, dtype, cache_dtype = script.SECTIONS[section]
    columns = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "window_size")
    operation = Attention(
        name="x",
        dtype=dtype,
        kv_cache_dtype=cache_dtype,
        writes_cache=True,
        v_head_dim=rows.head_dim.to_numpy(),
        **{column: rows[column].to_numpy() for column in columns},
    )
    device = load_device(name)
    price = price_attention(operation, device, load_record("attention", device), hot_cache=True)
    return price, rows.latency_s.to_numpy()


def error(predicted: object, measured: np.ndarray) -> float:
    """Mean |predicted / measured - 1|."""
    return float(np.mean(np.abs(np.asarray(predicted) / measured - 1.0)))


@pytest.mark.parametrize(("section", "phase", "name"), CASES)
def test_unseen_head_layouts(script: ModuleType, section: str, phase: str, name: str) -> None:
    """Mean error stays within the limit."""
    price, measured = price_unseen(script, name, section, phase)

    assert error(price.time_s, measured) <= LIMITS[f"{section}/{phase}"][name]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_limits_can_fail(script: ModuleType, phase: str) -> None:
    """The plain roofline on the same rows is far outside every limit."""
    price, measured = price_unseen(script, "h100-sxm-80gb", "16bit", phase)

    assert error(price.roofline_s, measured) > 0.4


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_interval_coverage(script: ModuleType, phase: str) -> None:
    """Over all devices, 83 to 97 % of the unseen rows lie inside the 90 % interval."""
    inside = []
    for name in LIMITS[f"16bit/{phase}"]:
        price, measured = price_unseen(script, name, "16bit", phase)
        inside.append((measured >= price.low_s) & (measured <= price.high_s))

    assert 0.83 <= float(np.mean(np.concatenate(inside))) <= 0.97


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_carry_their_provenance(path: Path) -> None:
    """Each record says what it was fitted on, when, how, and how wrong it is on rows it did not see."""
    record = json.loads(path.read_text(encoding="utf-8"))
    reports = record["provenance"]["reports"]

    assert record["id"] == f"attention/{path.stem}/{record['provenance']['date']}"
    assert "calibrate_attention.py" in record["provenance"]["command"]
    assert "backward_rate_fraction" in record["provenance"]["assumptions"]
    assert set(reports) == set(record["interval"])
    assert reports["16bit/main/prefill"]["held_out"]["rows"] > 400
