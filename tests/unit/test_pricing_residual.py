"""The learned correction of GEMM times: interpolation by hand, fading, and where it is left out."""

from __future__ import annotations

import numpy as np
import pytest

from shapewright.app.cli import main
from shapewright.core.errors import CalibrationError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.tables.gemm import PAPER_SECTION
from shapewright.prediction.build import build_scenario
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.residual import (
    LOG_STEP,
    ResidualTable,
    load_residuals,
    log_correction,
    section_name,
)
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.price import GemmPrice

H100 = load_device("h100-sxm-80gb")


def table_of(steps: list[list[list[int]]]) -> ResidualTable:
    """A table over m, n, k = 64, 256: two knots two doublings apart on each axis."""
    knots = np.log2(np.array([64.0, 256.0]))
    return ResidualTable(knots_log2=(knots, knots, knots), log_steps=np.array(steps, dtype=np.int8))


def correct(table: ResidualTable, m: float, n: float, k: float) -> tuple[float, float]:
    """Correction and weight of one shape."""
    logs, weight = log_correction(table, np.array([m]), np.array([n]), np.array([k]))
    return float(logs[0]), float(weight[0])


def price(
    *, physics_only: bool, uncalibrated: bool = False, device: str = "h100-sxm-80gb", batch: int = 1
) -> GemmPrice:
    """Price one GEMM that lies inside the tables of every device."""
    chip = load_device(device)
    record = load_record("gemm", chip.with_pricing(uncalibrated=uncalibrated, physics_only=physics_only))
    return price_gemm(Gemm(name="x", m=4096, n=3584, k=1024, batch=batch), chip, record)


def test_knots_are_exact_and_cells_are_linear_in_the_logarithm() -> None:
    """128 lies halfway between 64 and 256: the mean of two knots, of four for two such axes, of eight for three."""
    table = table_of([[[0, 8], [16, 24]], [[32, 40], [48, 56]]])

    assert correct(table, 64, 256, 64) == pytest.approx((16 * LOG_STEP, 1.0))
    assert correct(table, 128, 64, 64)[0] == pytest.approx((0 + 32) / 2 * LOG_STEP)
    assert correct(table, 128, 128, 64)[0] == pytest.approx((0 + 16 + 32 + 48) / 4 * LOG_STEP)
    assert correct(table, 128, 128, 128)[0] == pytest.approx(28 * LOG_STEP)


def test_correction_fades_beyond_the_table() -> None:
    """One doubling beyond an edge half is left, two doublings nothing; two axes add up."""
    table = table_of([[[10, 10], [10, 10]], [[10, 10], [10, 10]]])

    assert correct(table, 512, 64, 64) == pytest.approx((5 * LOG_STEP, 0.5))
    assert correct(table, 512, 32, 64) == (0.0, 0.0)
    assert correct(table, 64, 64, 2**20) == (0.0, 0.0)


def test_many_shapes_equal_one_by_one() -> None:
    """Blocks change nothing: ten thousand shapes are corrected as each of them alone."""
    table = next(iter(load_residuals("h100-sxm-80gb.npz").values()))
    m, n, k = (np.random.default_rng(seed).integers(1, 10**5, 10_000).astype(float) for seed in range(3))

    logs, _ = log_correction(table, m, n, k)

    picked = range(0, 10_000, 997)
    assert [correct(table, m[i], n[i], k[i])[0] for i in picked] == logs[list(picked)].tolist()


def test_price_is_physics_times_the_correction() -> None:
    """A price contains its correction; without a table the correction is 1 and the interval wider."""
    learned, physics = price(physics_only=False), price(physics_only=True)

    assert physics.correction == 1.0
    assert learned.correction != 1.0
    assert learned.time_s == pytest.approx(physics.time_s * learned.correction)
    assert learned.high_s / learned.low_s < physics.high_s / physics.low_s


def test_batches_are_left_to_physics() -> None:
    """Tables were learned from single GEMMs and do not apply to batches."""
    assert price(physics_only=False, batch=8) == price(physics_only=True, batch=8)


def test_corrections_transfer_to_siblings_only() -> None:
    """An H100 uses the H200's table; an uncalibrated A100 uses the formulas of Hopper's record alone."""
    assert price(physics_only=False, uncalibrated=True).correction != 1.0
    assert price(physics_only=False, uncalibrated=True, device="a100-sxm-80gb").correction == 1.0


def test_whole_steps_can_be_predicted_by_physics_alone() -> None:
    """The ``physics_only`` option applies to every GEMM of a step."""

    def corrections(physics_only: bool) -> set[float]:
        step = build_scenario("gpt3-2.7b", "h100-sxm-80gb", physics_only=physics_only).predict()
        return {float(entry.price.correction) for entry in step.operations if isinstance(entry.price, GemmPrice)}

    assert corrections(True) == {1.0}
    assert len(corrections(False)) > 1


@pytest.mark.parametrize(
    "words",
    [
        "check llama-3-8b --device h100-sxm-80gb",
        "mfu llama-3-8b --device h100-sxm-80gb --seconds 20 --gpus 8 --global-batch 32",
        "compare llama-3-8b --devices h100-sxm-80gb,l40s",
        "serve-plan llama-3-8b --device h100-sxm-80gb --gpus 1 --isl 1000 --osl 100",
    ],
)
def test_every_command_that_prices_can_leave_it_aside(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--physics-only changes what a command finds, whichever it is, and leaves the next one alone."""
    outputs = []
    for own in ([], ["--physics-only"], []):
        with pytest.raises(SystemExit) as stop:
            main([*words.split(), "--json", *own])
        assert stop.value.code in {0, 1}
        outputs.append(capsys.readouterr().out)

    assert outputs[0] == outputs[2]
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s"])
def test_every_section_has_its_table(name: str) -> None:
    """Each dtype and library that was fitted to today's software has what its formulas leave over."""
    record = load_record("gemm", load_device(name))
    assert record.residual is not None
    sections = {section_name(dtype, "") for dtype in record.parameters["dtypes"]}
    for library, dtypes in record.parameters["libraries"].items():
        if library in (PAPER_SECTION, "vidur"):  # older software, priced by its formulas alone
            continue
        sections |= {section_name(dtype, library) for dtype in dtypes}

    assert set(load_residuals(record.residual["file"])) == sections


@pytest.mark.parametrize(("device", "uncalibrated"), [("h100-sxm-80gb", False), ("h200-sxm-141gb", True)])
def test_shapes_can_be_priced_as_new_ones(device: str, uncalibrated: bool) -> None:
    """Of a record without its own shapes some hundredth steps differ, at held-out shapes and nowhere else."""
    found = load_device(device).with_pricing(uncalibrated=uncalibrated)
    record = load_record("gemm", found)
    assert record.residual is not None
    seen, unseen = (
        load_residuals(record.residual["file"], without_own_shapes=leaves_out)["bf16"] for leaves_out in (False, True)
    )
    changed = (seen.log_steps != unseen.log_steps).any(axis=0)
    assert 0.05 < changed.mean() < 0.25

    n_places, k_places = np.nonzero(changed)
    knots = [np.exp2(axis) for axis in seen.knots_log2]
    operation = Gemm(name="g", m=knots[0][-1], n=knots[1][n_places], k=knots[2][k_places])
    shipped, as_new = (price_gemm(operation, found, one).correction for one in (record, record.without_own_shapes))
    assert np.ptp(np.log(as_new / shipped)) > 0.0
    fitted = Gemm(name="g", m=4096, n=knots[1][np.argwhere(~changed)[0][0]], k=knots[2][np.argwhere(~changed)[0][1]])
    assert price_gemm(fitted, found, record) == price_gemm(fitted, found, record.without_own_shapes)


def test_missing_tables_are_an_error() -> None:
    """A record that names a file which is not there cannot be priced with."""
    with pytest.raises(CalibrationError, match=r"residuals nobody\.npz"):
        load_residuals("nobody.npz")
