"""Attention records against measured rows with held-out head layouts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from judging import ALL_LIMITS, REPOSITORY, load_refit, mean_error, measured_file

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.measure.fit.shared import HELD_OUT_FOLD
from shapewright.measure.refit.attention.kernel_fit import layout_folds
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.records import load_record

LIMITS, BORROWED = ALL_LIMITS["attention"], ALL_LIMITS["attention_borrowed"]
RECORDS = sorted((REPOSITORY / "src/shapewright/pricing/data/attention").glob("*.json"))
CASES = [(*path.rsplit("/", 1), name) for path, limits in LIMITS.items() for name in limits]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The module that reads the rows."""
    return load_refit("attention.physics")


class HeldOut(NamedTuple):
    """Prices of rows of held-out head layouts, as the package prices them, and their measurements. [s]"""

    predicted: np.ndarray
    low: np.ndarray
    high: np.ndarray
    roofline: np.ndarray
    measured: np.ndarray


@cache
def price_held_out(script: ModuleType, name: str, section: str, phase: str, *, uncalibrated: bool = False) -> HeldOut:
    """Price a device's held-out rows; a section of another library begins with the library's name."""
    folder = measured_file(f"attention_{phase}.parquet").parent
    library, _, plain = section.rpartition("/")
    source = (script.OTHER_SECTIONS if library else script.SECTIONS)[plain]
    rows = script.read_rows(folder, phase, load_refit("record_files").DEVICES[name], source)
    rows = rows[layout_folds(rows) == HELD_OUT_FOLD]
    _, dtype, cache_dtype = source
    columns = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "window_size")
    device = load_device(name)
    record = load_record("attention", device.with_pricing(uncalibrated=uncalibrated))
    parts = []
    for (version, kernel), part in rows.groupby(["library", "kernel"]):
        operation = Attention(
            name="x",
            dtype=dtype,
            kv_cache_dtype=cache_dtype,
            writes_cache=True,
            v_head_dim=part.head_dim.to_numpy(),
            **{column: part[column].to_numpy() for column in columns},
        )
        price = price_attention(operation, device, record, hot_cache=True, library=version, kernel=kernel)
        parts.append((price.time_s, price.low_s, price.high_s, price.roofline_s, part.latency_s.to_numpy()))
    return HeldOut(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def error(predicted: object, measured: np.ndarray) -> float:
    """Mean |predicted / measured - 1|."""
    return mean_error(np.asarray(predicted), measured)


@pytest.mark.parametrize(("section", "phase", "name"), CASES)
def test_held_out_head_layouts(script: ModuleType, section: str, phase: str, name: str) -> None:
    """Mean error stays within the limit."""
    held_out = price_held_out(script, name, section, phase)

    assert error(held_out.predicted, held_out.measured) <= LIMITS[f"{section}/{phase}"][name]


@pytest.mark.parametrize(("phase", "name"), [(phase, name) for phase, limits in BORROWED.items() for name in limits])
def test_borrowed_records(script: ModuleType, phase: str, name: str) -> None:
    """Priced without its own record, a device stays within the limit, and most rows within the interval."""
    held_out = price_held_out(script, name, "16bit", phase, uncalibrated=True)

    assert error(held_out.predicted, held_out.measured) <= BORROWED[phase][name]
    assert float(np.mean((held_out.measured >= held_out.low) & (held_out.measured <= held_out.high))) >= 0.75


@pytest.mark.parametrize(
    ("section", "name"),
    [(section, name) for section, limits in ALL_LIMITS["attention_borrowed_decode"].items() for name in limits],
)
def test_borrowed_decode_of_other_kernels(script: ModuleType, section: str, name: str) -> None:
    """Kernels and cache formats that the nearest donor lacks are priced by the most similar decode kernel."""
    held_out = price_held_out(script, name, section, "decode", uncalibrated=True)

    assert error(held_out.predicted, held_out.measured) <= ALL_LIMITS["attention_borrowed_decode"][section][name]


@pytest.mark.parametrize(("name", "limit"), ALL_LIMITS["attention_borrowed_prefill"]["fp8"].items())
def test_borrowed_arithmetic_in_8_bits(script: ModuleType, name: str, limit: float) -> None:
    """8-bit kernels that the donor lacks are its 16-bit ones, scaled by the ratio of other families."""
    held_out = price_held_out(script, name, "fp8", "prefill", uncalibrated=True)

    assert error(held_out.predicted, held_out.measured) <= limit


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_limits_can_fail(script: ModuleType, phase: str) -> None:
    """The plain roofline on the same rows is far outside every limit."""
    held_out = price_held_out(script, "h100-sxm-80gb", "16bit", phase)

    assert error(held_out.roofline, held_out.measured) > 0.4


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("section", ["16bit", "sglang/16bit"])
def test_interval_coverage(script: ModuleType, section: str, phase: str) -> None:
    """Over all devices, 83 to 97 % of a library's held-out rows lie inside the 90 % interval."""
    inside = []
    for name in LIMITS[f"{section}/{phase}"]:
        held_out = price_held_out(script, name, section, phase)
        inside.append((held_out.measured >= held_out.low) & (held_out.measured <= held_out.high))

    assert 0.83 <= float(np.mean(np.concatenate(inside))) <= 0.97


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_libraries_are_priced_with_their_kernels(script: ModuleType, phase: str) -> None:
    """On L40S sglang runs flashinfer: the kernels that price models are at least twice as wrong about it."""
    folder = measured_file(f"attention_{phase}.parquet").parent
    source = script.OTHER_SECTIONS["16bit"]
    rows = script.read_rows(folder, phase, "l40s", source)
    rows = rows[(layout_folds(rows) == HELD_OUT_FOLD) & (rows.head_dim == 256)]
    sizes = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "window_size")
    columns = {column: rows[column].to_numpy() for column in sizes}
    operation = Attention(name="x", writes_cache=True, v_head_dim=columns["head_dim"], **columns)
    device = load_device("l40s")
    record = load_record("attention", device)
    measured = rows.latency_s.to_numpy()
    own, usual = (
        error(price_attention(operation, device, record, hot_cache=True, library=library).time_s, measured)
        for library in ("sglang 0.5.14", "")
    )

    assert usual > 2.0 * own


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_carry_their_provenance(path: Path) -> None:
    """Each record states its source, date, command and held-out errors."""
    record = json.loads(path.read_text(encoding="utf-8"))
    reports = record["provenance"]["reports"]

    assert record["id"] == f"attention/{path.stem}/{record['provenance']['date']}"
    assert "--data DIR" in record["provenance"]["command"]
    assert "backward_rate_fraction" in record["provenance"]["assumptions"]
    assert set(reports) == set(record["interval"])
    held_out = [report["held_out"] for key, report in reports.items() if key.startswith("16bit/") and "fit" in report]
    assert sum(report["rows"] for report in held_out if report) > 400
