"""Alignment factors of A100 transferred to another SM, evaluated on sweeps that A100 was not part of."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from measured import measured_file
from refit_module import load_refit

from shapewright.hardware import load_device
from shapewright.measure.fit.gemm_section import device_rates, predict_rows
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.transfer import tensor_rate_ratio
from shapewright.pricing.gemm.alignment import WIDEST_LOAD_BYTES, alignment_bytes, transfer_alignment_factors
from shapewright.pricing.gemm.parameters import read_parameters

REPOSITORY = Path(__file__).parents[2]
LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))["gemm_carried_alignment"]
_DONOR = "a100-sxm-80gb"


@pytest.fixture(scope="module")
def rows_of() -> ModuleType:
    """The module that reads the paper's sweeps."""
    return load_refit("gemm.rows")


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_narrow_loads_cost_cycles(name: str, rows_of: ModuleType) -> None:
    """Single misaligned GEMMs, by the device's own kernels and A100's factors, scaled and as they are."""
    device, donor = load_device(name), load_device(_DONOR)
    own, borrowed = load_record("gemm", device).parameters, load_record("gemm", donor).parameters["dtypes"]["bf16"]
    own = next(iter(own["dtypes"].values()))
    rates = [float(read_parameters(each).tile_rate_fraction.max()) for each in (own, borrowed)]
    ratio = tensor_rate_ratio(device, donor) * rates[0] / rates[1]

    rows = rows_of.paper_rows(measured_file("paper_gemm.csv").parent, name.partition("-")[0])
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
        errors[word] = float(np.abs(predicted / rows.latency_s.to_numpy() - 1.0).mean())

    assert len(rows) > 100
    assert errors["carried"] <= LIMITS[name] < errors["as lent"] / 2.0
