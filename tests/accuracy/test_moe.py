"""Expert-layer records against measured blocks with held-out layouts (experts, top k, widths)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from judging import ALL_LIMITS, REPOSITORY, load_refit, measured_file

from shapewright.measure.accuracy.chunk import Chunk, Columns, Labels
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.tables import moe

LIMITS, BORROWED = ALL_LIMITS["moe"], ALL_LIMITS["moe_borrowed"]
RECORDS = sorted((REPOSITORY / "src/shapewright/pricing/data/moe").glob("*.json"))
CASES, BORROWED_CASES = (
    [
        (library, name, dtype)
        for library, devices in limits.items()
        for name, dtypes in devices.items()
        for dtype in dtypes
    ]
    for limits in (LIMITS, BORROWED)
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The refit of the records; its folds select the held-out layouts."""
    return load_refit("experts.physics")


@cache
def price_held_out(script: ModuleType, uncalibrated: bool = False) -> tuple[Chunk, ...]:
    """Rows of held-out layouts that are in the training rows of some kernel, priced as the package prices new ones."""
    table = script.read_table(measured_file("moe.parquet").parent)
    layouts = table.drop_duplicates([*script.LAYOUT, "kernel", "device"]).groupby(["device", "kernel"]).size()
    fitted = layouts[layouts >= script.FEWEST_LAYOUTS].index
    table = table[table.set_index(["device", "kernel"]).index.isin(fitted) & (table.fold == script.HELD_OUT_FOLD)]
    columns = Columns(
        len(table),
        {name: table[name].to_numpy(float) for name in (*moe.FORMAT.numbers, "latency_s")},
        {name: Labels.of(table[name].to_numpy(str)) for name in moe.FORMAT.labels},
    )
    return tuple(moe.price(columns, Context(uncalibrated=uncalibrated, as_new_shapes=True)))


def chosen(script: ModuleType, library: str, name: str, dtype: str, *, uncalibrated: bool = False) -> Iterator[Chunk]:
    """Chunks of one library, device and dtype."""
    chunks = price_held_out(script, uncalibrated)
    found = [each for each in chunks if (each.library, each.device, each.dtype) == (library, name, dtype)]
    assert found
    yield from found


def error(chunks: Iterator[Chunk], field: str = "predicted") -> float:
    """Mean |predicted / measured - 1|."""
    ratios = [np.asarray(getattr(each.prices, field)) / each.measured for each in chunks]
    return float(np.mean(np.abs(np.concatenate(ratios) - 1.0)))


@pytest.mark.parametrize(("library", "name", "dtype"), CASES)
def test_held_out_layouts(script: ModuleType, library: str, name: str, dtype: str) -> None:
    """Mean error stays within the limit, over token counts, shardings and distributions."""
    assert error(chosen(script, library, name, dtype)) <= LIMITS[library][name][dtype]


@pytest.mark.parametrize(("library", "name", "dtype"), BORROWED_CASES)
def test_borrowed_records(script: ModuleType, library: str, name: str, dtype: str) -> None:
    """Priced without its own record, a device stays within the limit."""
    held_out = chosen(script, library, name, dtype, uncalibrated=True)

    assert error(held_out) <= BORROWED[library][name][dtype]


def test_the_limits_can_fail(script: ModuleType) -> None:
    """The plain roofline on the same rows is outside every limit."""
    for library, name, dtype in CASES:
        assert error(chosen(script, library, name, dtype), "roofline") > LIMITS[library][name][dtype]


def test_interval_coverage(script: ModuleType) -> None:
    """Of the held-out rows 80 to 97 % lie inside the 90 % interval."""
    inside = [
        (each.measured >= each.prices.low) & (each.measured <= each.prices.high) for each in price_held_out(script)
    ]

    assert 0.80 <= float(np.mean(np.concatenate(inside))) <= 0.97


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_carry_their_provenance(path: Path) -> None:
    """Each record states its source, date, command, held-out errors and default sections."""
    record = json.loads(path.read_text(encoding="utf-8"))
    reports = record["provenance"]["reports"]

    assert record["id"] == f"moe/{path.stem}/{record['provenance']['date']}"
    assert "--data DIR" in record["provenance"]["command"]
    assert set(record["parameters"]["dtypes"]) == set(record["interval"]["dtypes"])
    assert set(record["parameters"]["libraries"]) == set(record["interval"]["libraries"])
    assert len(reports) == sum(map(len, record["parameters"]["libraries"].values()))
    assert set(record["provenance"]["defaults"]) == set(record["parameters"]["dtypes"])
    assert set(record["provenance"]["defaults"].values()) <= set(reports)
    for report in reports.values():
        assert report["held_out"]["rows"] == report["rows"] > 900
        assert report["held_out_of_the_record"]["rows"] > 100
