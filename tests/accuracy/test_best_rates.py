"""A best rate beside a record of older software: does it bring all products nearer, on devices that were measured?"""

from __future__ import annotations

import importlib
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from measured import measured_file

from shapewright.hardware import load_device
from shapewright.operations import Gemm
from shapewright.perf.best_rates import speed_up
from shapewright.perf.calibration import list_records
from shapewright.perf.gemm import flatten, price_products
from shapewright.perf.gemm_job import make_gemm_job

REPOSITORY = Path(__file__).parents[2]
LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))["gemm_best_rate"]
# Rows of each device that are judged.
_ROWS = 4000
# Whose best product is whose: the finder's H200 was as fast as its H100.
_SAME_BEST = {"h200-sxm-141gb": "h100-sxm-80gb"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that finds factors."""
    pytest.importorskip("pandas", reason="judging needs the fit extra")
    pytest.importorskip("scipy", reason="judging needs the fit extra")
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    return importlib.import_module("calibrate_best_rates")


@pytest.fixture(scope="module")
def best(script: ModuleType) -> dict[str, Any]:
    """Best products by device."""
    return {row.device.name: row for row in script.best_products(measured_file("mamf.csv").parent).itertuples()}


@pytest.mark.parametrize("name", ["mi300x", "mi325x", "mi355x"])
def test_factors_are_those_of_todays_rules(name: str, script: ModuleType, best: dict[str, Any]) -> None:
    """With the factor that ships, a device's best product is as near to its best rate as measured devices' are."""
    exact = [script.ratio_at_best(row) for row in best.values() if row.record.transfer == "exact"]

    assert len(exact) == 3
    assert script.ratio_at_best(best[name]) == pytest.approx(np.exp(np.mean(np.log(exact))), rel=2e-3)


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_best_rate_mends_an_older_record(name: str, script: ModuleType, best: dict[str, Any]) -> None:
    """MI250X's record, lent to a device that was measured: error of all its products with its best rate known.

    The usual ratio is that of the other devices, so that nothing of the judged one but its best product is known.
    """
    pandas = pytest.importorskip("pandas", reason="judging needs the fit extra")
    device = load_device(name)
    older = next(record for record in list_records("gemm") if record.device == "mi250x-gcd")
    lent = replace(older, transfer="generic", borrower=name)
    other = _SAME_BEST.get(name, name)
    exact = {key: script.ratio_at_best(row) for key, row in best.items() if row.record.transfer == "exact"}
    usual = float(np.exp(np.mean([np.log(ratio) for key, ratio in exact.items() if key != other])))
    row = SimpleNamespace(**{**best[other]._asdict(), "device": device, "record": lent})
    scale = script.scale_for(row, usual)

    path = measured_file("gemm.parquet")
    alias = name.rpartition("-")[0].replace("-", "_")
    rows = pandas.read_parquet(path, filters=[("device", "==", alias), ("dtype", "==", "bf16")])
    rows = rows.sample(_ROWS, random_state=0)
    job = make_gemm_job("bf16", None, device, lent)
    assert job.section is not None
    dims = {letter: rows[letter].to_numpy() for letter in "mnk"}
    errors = []
    for factor in (1.0, scale):
        section = job.section.carried(lambda kernels, factor=factor: speed_up(kernels, factor))
        price = price_products(*flatten(Gemm(name="x", dtype="bf16", **dims)), job._replace(section=section))
        errors.append(float(np.abs(price.time_s / rows.latency_s.to_numpy() - 1.0).mean()))

    assert errors[1] <= LIMITS[name] < errors[0]
