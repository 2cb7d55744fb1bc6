"""Residual forests: a tree by hand, blocks, fading, files, and the fp32 GEMMs that they correct."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shapewright.pricing.calibration.forest as forest_module
from shapewright.core.errors import CalibrationError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration.forest import (
    ResidualForest,
    forest_correction,
    load_forests,
    save_forests,
)
from shapewright.pricing.calibration.records import FP32_GEMM, list_records, load_record
from shapewright.pricing.gemm.price import estimate_gemm_s, price_flat, price_gemm, stack
from shapewright.pricing.gemm.section import prepare_gemm_pricing
from shapewright.pricing.operations import price_operations

# k (feature 2) <= 2**7: leaf 0.5; otherwise m (feature 0) <= 2**6: leaf -0.25, else 1.0.
TREE = ResidualForest(
    feature=np.array([[2, 0, 0, 0, 0]]),
    threshold=np.array([[7.0, 0.0, 6.0, 0.0, 0.0]]),
    left=np.array([[1, 1, 3, 3, 4]]),
    right=np.array([[2, 1, 4, 3, 4]]),
    value=np.array([[0.0, 0.5, 0.0, -0.25, 1.0]]),
    depth=2,
    least_log2=np.array([4.0, 4.0, 4.0, 0.0]),
    most_log2=np.array([12.0, 12.0, 12.0, 8.0]),
)


def correct(m: float, n: float, k: float, batch: float = 1.0) -> tuple[float, float]:
    """Correction and weight of one shape by TREE."""
    sizes = (np.array([value]) for value in (m, n, k, batch, 1e-3))
    logs, weight = forest_correction(TREE, *sizes)
    return float(logs[0]), float(weight[0])


def test_a_tree_by_hand() -> None:
    """Each leaf is reached by its comparisons; a value on the threshold goes left."""
    assert correct(64, 64, 128) == (0.5, 1.0)
    assert correct(64, 64, 129) == (-0.25, 1.0)
    assert correct(65, 64, 4096) == (1.0, 1.0)


def test_correction_fades_outside_the_learned_range() -> None:
    """One doubling beyond the largest n leaves half of the correction, two leave nothing; a batch counts too."""
    assert correct(64, 8192, 128) == (0.25, 0.5)
    assert correct(64, 8192, 128, batch=512) == (0.0, 0.0)


def test_trees_sum_up_independent_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal trees correct twice as much, and shapes are corrected alike in blocks of any length."""
    names = ("feature", "threshold", "left", "right", "value")
    twice = replace(TREE, **{name: np.repeat(getattr(TREE, name), 2, axis=0) for name in names})
    sizes = [np.random.default_rng(seed).integers(16, 4096, 100).astype(float) for seed in range(3)]
    columns = (*sizes, np.ones(100), np.full(100, 1e-3))
    logs = forest_correction(TREE, *columns)[0]
    monkeypatch.setattr(forest_module, "_ROWS_PER_BLOCK", 7)

    assert forest_correction(twice, *columns)[0] == pytest.approx(2.0 * logs)


def test_files_keep_forests(tmp_path: Path) -> None:
    """A saved forest is read as it was, in narrow types; a missing file is a calibration error."""
    save_forests(tmp_path / "x.npz", {"fp32": TREE})
    with np.load(tmp_path / "x.npz") as stored:
        read = forest_module._read(stored, 0)

    assert all(np.array_equal(getattr(read, name), getattr(TREE, name)) for name in TREE.__dataclass_fields__)
    with pytest.raises(CalibrationError, match=r"nobody\.npz"):
        load_forests("nobody.npz", FP32_GEMM)


@pytest.mark.parametrize("record", list_records(FP32_GEMM), ids=lambda record: record.device)
def test_packaged_forests(record: object) -> None:
    """Every fp32 record has a forest whose leaves are leaves, and corrections within a factor of ten."""
    (forest,) = load_forests(record.residual["file"], FP32_GEMM).values()  # type: ignore[attr-defined]
    grid = [2.0 ** np.arange(4, 13)] * 3
    m, n, k = (axis.reshape(-1) for axis in np.meshgrid(*grid))
    logs, _ = forest_correction(forest, m, n, k, np.ones_like(m), np.full_like(m, 1e-3))

    assert np.abs(logs).max() < np.log(10.0)
    assert forest.left.max() < forest.feature.shape[1]


def test_fp32_is_priced_with_fp32_records() -> None:
    """An fp32 GEMM takes the record of the ordinary cores, whichever record is given; fp16 does not."""
    device = load_device("t4")
    wide, narrow = (Gemm(name="x", dtype=dtype, m=2048, n=2048, k=2048) for dtype in ("fp32", "fp16"))
    given = load_record("gemm", device)
    price = price_gemm(wide, device, given)

    assert price.calibration.record_id.startswith("gemm-fp32/t4/")
    assert price_operations([wide], device)[0].time_s == price.time_s
    assert estimate_gemm_s(wide, device, given) == pytest.approx(price.time_s)
    assert price_gemm(narrow, device, given).calibration.record_id == given.id


@pytest.mark.parametrize(
    ("name", "means_over"),
    [
        (
            "l4",
            [
                ["a100-pcie-40gb", "a100-pcie-80gb"],
                ["h100-sxm-80gb"],
                ["p100-pcie-16gb", "p4"],
                ["t4"],
                ["v100-pcie-16gb"],
            ],
        ),
        ("mi210", [["mi100"]]),
    ],
)
def test_an_unmeasured_architecture_takes_the_mean_over_its_vendors_fp32_records(
    name: str, means_over: list[list[str]]
) -> None:
    """The price is the geometric mean over a vendor's architectures, of which each counts once."""
    device, gemm = load_device(name), Gemm(name="x", dtype="fp32", m=4096, n=4096, k=4096)
    donors = [record.device for record in list_records(FP32_GEMM)]
    means = []
    for architecture in means_over:
        times = []
        for donor in architecture:
            record = load_record(FP32_GEMM, device, without=tuple(name for name in donors if name != donor))
            alone = prepare_gemm_pricing("fp32", None, device, record, is_alone=True)
            times.append(float(price_flat(stack([gemm]), alone)["time_s"][0]))
        means.append(sum(map(math.log, times)) / len(times))
    price = price_gemm(gemm, device, load_record("gemm", device))

    assert price.time_s == pytest.approx(math.exp(sum(means) / len(means)))
    assert price.low_s < price.time_s < price.high_s
    assert estimate_gemm_s(gemm, device, load_record("gemm", device)) == pytest.approx(price.time_s)
