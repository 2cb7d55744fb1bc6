"""Rate factors from best measured GEMMs reduce the error of a borrowed older record on measured devices."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from measured import measured_file
from refit_module import load_refit

from shapewright.hardware import load_device
from shapewright.lowering.operations import Gemm
from shapewright.pricing.calibration.records import list_records
from shapewright.pricing.gemm.price import flatten, price_shaped
from shapewright.pricing.gemm.section import prepare_gemm_pricing
from shapewright.pricing.gemm.transfer import scale_rates

REPOSITORY = Path(__file__).parents[2]
LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))["gemm_best_rate"]
# Rows of each device that are judged.
_ROWS = 4000
# Whose best GEMM is whose: the finder's H200 was as fast as its H100.
_SAME_BEST = {"h200-sxm-141gb": "h100-sxm-80gb"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The refit of the factors."""
    return load_refit("gemm.best_rates")


@pytest.fixture(scope="module")
def best(script: ModuleType) -> dict[str, Any]:
    """Best GEMMs by device."""
    return {row.device.name: row for row in script.best_gemms(measured_file("mamf.csv").parent).itertuples()}


@pytest.mark.parametrize("name", ["mi300x", "mi325x", "mi355x"])
def test_factors_equal_the_current_rules(name: str, script: ModuleType, best: dict[str, Any]) -> None:
    """With the packaged factor, the best GEMM of a device is as close to its best rate as on measured devices."""
    exact = [script.ratio_at_best(row) for row in best.values() if row.record.transfer == "exact"]

    assert len(exact) == 3
    assert script.ratio_at_best(best[name]) == pytest.approx(np.exp(np.mean(np.log(exact))), rel=2e-3)


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_best_rate_corrects_an_older_record(name: str, script: ModuleType, best: dict[str, Any]) -> None:
    """MI250X's record, borrowed by a measured device: error of all its GEMMs with its best rate known.

    The usual ratio is that of the other devices, so that nothing of the judged one but its best GEMM is known.
    """
    pandas = pytest.importorskip("pandas", reason="judging needs the fit extra")
    device = load_device(name)
    older = next(record for record in list_records("gemm") if record.device == "mi250x-gcd")
    borrowed = replace(older, transfer="generic", recipient=name)
    other = _SAME_BEST.get(name, name)
    exact = {key: script.ratio_at_best(row) for key, row in best.items() if row.record.transfer == "exact"}
    usual = float(np.exp(np.mean([np.log(ratio) for key, ratio in exact.items() if key != other])))
    row = SimpleNamespace(**{**best[other]._asdict(), "device": device, "record": borrowed})
    scale = script.scale_for(row, usual)

    path = measured_file("gemm.parquet")
    alias = name.rpartition("-")[0].replace("-", "_")
    rows = pandas.read_parquet(path, filters=[("device", "==", alias), ("dtype", "==", "bf16")])
    rows = rows.sample(_ROWS, random_state=0)
    pricing = prepare_gemm_pricing("bf16", None, device, borrowed)
    assert pricing.section is not None
    dims = {letter: rows[letter].to_numpy() for letter in "mnk"}
    errors = []
    for factor in (1.0, scale):
        section = pricing.section.map_parameters(lambda kernels, factor=factor: scale_rates(kernels, factor))
        price = price_shaped(*flatten(Gemm(name="x", dtype="bf16", **dims)), pricing._replace(section=section))
        errors.append(float(np.abs(price.time_s / rows.latency_s.to_numpy() - 1.0).mean()))

    assert errors[1] <= LIMITS[name] < errors[0]
