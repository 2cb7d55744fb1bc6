"""Borrowed GEMM records: alignment factors carried to another SM, and rate factors from best measured GEMMs."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from judging import ALL_LIMITS, load_refit, mean_error, measured_file

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.fit.gemm_section import device_rates, predict_rows
from shapewright.pricing.calibration.records import list_records, load_record
from shapewright.pricing.calibration.transfer import tensor_rate_ratio
from shapewright.pricing.gemm.alignment import WIDEST_LOAD_BYTES, alignment_bytes, transfer_alignment_factors
from shapewright.pricing.gemm.parameters import read_parameters
from shapewright.pricing.gemm.price import flatten, price_shaped
from shapewright.pricing.gemm.section import prepare_gemm_pricing
from shapewright.pricing.gemm.transfer import scale_rates

# Rows of each device that are judged.
_ROWS = 4000
# Whose best GEMM is whose: the finder's H200 was as fast as its H100.
_SAME_BEST = {"h200-sxm-141gb": "h100-sxm-80gb"}


@pytest.mark.parametrize("name", sorted(ALL_LIMITS["gemm_carried_alignment"]))
def test_narrow_loads_cost_cycles(name: str) -> None:
    """Single misaligned GEMMs, by the device's own kernels and A100's factors, scaled and as they are."""
    device, donor = load_device(name), load_device("a100-sxm-80gb")
    own, borrowed = load_record("gemm", device).parameters, load_record("gemm", donor).parameters["dtypes"]["bf16"]
    own = next(iter(own["dtypes"].values()))
    rates = [float(read_parameters(each).tile_rate_fraction.max()) for each in (own, borrowed)]
    ratio = tensor_rate_ratio(device, donor) * rates[0] / rates[1]

    rows = load_refit("gemm.rows").paper_rows(measured_file("paper_gemm.csv").parent, name.partition("-")[0])
    rows = rows[(rows.batch == 1) & (alignment_bytes(rows.n.to_numpy(), 16) < WIDEST_LOAD_BYTES)]
    overhead_s = load_record("gemm", device).provenance["sections"]["fp16"]["collector_overhead_s"]
    errors = {}
    for word, of in (("carried", lambda row: transfer_alignment_factors(row, ratio)), ("as lent", lambda row: row)):
        table = borrowed["alignment_factor"]
        factors = {
            role: dict(zip(own_row, of(np.array(list(own_row.values()))).tolist(), strict=True))
            for role, own_row in table.items()
        }
        section = {**own, "alignment_factor": factors}
        predicted = predict_rows(rows, section, device_rates(device, "fp16", hot=False), "NN") + overhead_s
        errors[word] = mean_error(predicted, rows.latency_s)

    assert len(rows) > 100
    assert errors["carried"] <= ALL_LIMITS["gemm_carried_alignment"][name] < errors["as lent"] / 2.0


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


@pytest.mark.parametrize("name", sorted(ALL_LIMITS["gemm_best_rate"]))
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
        errors.append(mean_error(price.time_s, rows.latency_s))

    assert errors[1] <= ALL_LIMITS["gemm_best_rate"][name] < errors[0]
