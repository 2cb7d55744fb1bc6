"""Fit of residuals: runner-up kernels by hand, separate sections, held-out shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from shapewright.hardware.loader import load_device
from shapewright.measure.refit import record_files
from shapewright.measure.refit.gemm.residual import write_record
from shapewright.measure.refit.gemm.trees import (
    NO_FOLD,
    NUM_FITTED_FOLDS,
    NUM_RUNNERS_UP,
    OWN_TREES,
    LearnedSection,
    combined_section,
    kernel_columns,
    learn_section,
    learn_together,
    operand_columns,
    shape_folds,
)
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.alignment import contiguous_letters
from shapewright.pricing.gemm.section import prepare_gemm_pricing
from shapewright.pricing.gemm.shapes import Gemms

KNOTS = pd.DataFrame(
    [(m, n, k) for m in range(1, 41) for n in (256, 512, 1024, 2048) for k in (256, 512, 1024)], columns=["m", "n", "k"]
)
EVERY_KNOT = np.ones(len(KNOTS), dtype=bool)
FOLDS = shape_folds(KNOTS, EVERY_KNOT, ((KNOTS.n == 512) & (KNOTS.k > 256)).to_numpy())
SMALL_TREES = {**OWN_TREES, "n_estimators": 100, "colsample_bytree": 1.0, "num_leaves": 15}


def section_of(offset: float) -> LearnedSection:
    """Measured times that are e^offset of physics everywhere, give or take a percent."""
    physics_s = np.full(len(KNOTS), 1e-5)
    offset = offset + 0.01 * np.random.default_rng(0).standard_normal(len(KNOTS))
    return LearnedSection(
        physics_s=physics_s, seen=np.log2(KNOTS.to_numpy(float)), measured_s={"some": physics_s * np.exp(offset)}
    )


@pytest.fixture(scope="module")
def menu() -> np.ndarray:
    """Of the H100's bf16 menu: a GEMM of two full waves of 128 x 256, and one that needs split-k to fill the device."""
    device = load_device("h100-sxm-80gb")
    pricing = prepare_gemm_pricing("bf16", None, device, load_record("gemm", device.with_pricing(physics_only=True)))
    assert pricing.section is not None
    assert pricing.rates is not None
    m, n, k = np.array([[4096.0, 64.0], [8192.0, 128.0], [4096.0, 65536.0]])
    gemms = Gemms(m, n, k, np.ones(2), contiguous_letters("NT"))
    return kernel_columns(gemms, pricing.section.parameters, pricing.rates)


def test_runners_up_are_ordered(menu: np.ndarray) -> None:
    """Each is no faster than the one before, none faster than the best, and its last wave is a share of a wave."""
    behind = menu[:, 3 : 5 * NUM_RUNNERS_UP : 5]

    assert (np.diff(behind, axis=1) >= 0.0).all()
    assert (behind[:, 0] >= 0.0).all()
    assert ((last := menu[:, 4 : 5 * NUM_RUNNERS_UP : 5]) >= 0.0).all()
    assert (last < 1.0).all()


def test_value_of_a_split(menu: np.ndarray) -> None:
    """A large GEMM needs no split; 64 x 128 outputs of k = 65536 keep one or two SMs busy without one."""
    assert menu[0, 5 * NUM_RUNNERS_UP] == 0.0
    assert menu[1, 5 * NUM_RUNNERS_UP] > np.log(2.0)


def test_fill_of_the_waves_of_every_tile(menu: np.ndarray) -> None:
    """The H100 has 132 SMs. 4096 x 8192 outputs are 1,024 tiles of 128 x 256, 7.76 waves of 8; 64 x 128 are one."""
    tiles = load_device("h100-sxm-80gb").architecture_facts.gemm_tiles
    fill = menu[:, 5 * NUM_RUNNERS_UP + 1 :][:, tiles.index((128, 256))]

    assert fill == pytest.approx([1024 / 132 / 8, 1 / 132])
    assert menu.shape == (2, 5 * NUM_RUNNERS_UP + 1 + len(tiles) + 5)


def test_operands_in_elements() -> None:
    """8 x 4 x 16: A has 128 elements, B 64 and C 32, 224 together; 1,024 operations."""
    gemms = Gemms(np.array([8.0]), np.array([4.0]), np.array([16.0]), np.ones(1), contiguous_letters("NT"))

    assert np.exp2(operand_columns(gemms))[0] == pytest.approx([224.0, 128.0, 4.0, 192.0, 1024 / 224])


def test_sections_learned_together_are_distinguished_by_indicator_columns() -> None:
    """Two sections with the same shapes, one 20 % slower and one 20 % faster than physics."""
    slow, fast = learn_together(
        [section_of(0.2), section_of(-0.2)],
        np.array([[0.0], [1.0]]),
        FOLDS,
        trees=SMALL_TREES,
    )

    assert slow.of_all == pytest.approx(0.2, abs=0.02)
    assert slow.left_out == pytest.approx(0.2, abs=0.02)
    assert fast.of_all == pytest.approx(-0.2, abs=0.02)


def test_a_shape_left_out_is_not_learned() -> None:
    """Rows of one (n, k) take e times as long: only trees fitted to them predict that."""
    odd = ((KNOTS.n == 2048) & (KNOTS.k == 1024)).to_numpy()
    section = section_of(0.0)
    section.measured_s["some"][odd] *= np.e
    (found,) = learn_together([section], np.zeros((1, 0)), FOLDS, trees=SMALL_TREES)

    assert found.of_all[odd].mean() > 0.8
    assert np.abs(found.left_out[odd]).max() < 0.1


def test_knots_that_were_not_measured_have_no_effect() -> None:
    """They are predicted by the trees of all measured shapes, left out or not."""
    odd = ((KNOTS.n == 2048) & (KNOTS.k == 1024)).to_numpy()
    section = section_of(0.3)
    section.measured_s["some"][odd] = np.nan
    folds = shape_folds(KNOTS, ~odd, ~EVERY_KNOT)
    (found,) = learn_together([section], np.zeros((1, 0)), folds, trees=SMALL_TREES)

    assert set(folds[odd]) == {NO_FOLD}
    assert found.of_all[odd] == pytest.approx(0.3, abs=0.02)
    assert found.left_out[odd].tolist() == found.of_all[odd].tolist()


def test_folds_hold_whole_shapes_and_keep_held_out_ones_apart() -> None:
    """A shape is in one fold, and no fold has shapes that the formulas saw beside shapes that they did not."""
    shapes = KNOTS.assign(fold=FOLDS, held_out=(KNOTS.n == 512) & (KNOTS.k > 256))

    assert (shapes.groupby(["n", "k"]).fold.nunique() == 1).all()
    assert (shapes.groupby("fold").held_out.nunique() == 1).all()
    assert sorted(shapes[shapes.held_out].fold.unique()) == [NUM_FITTED_FOLDS, NUM_FITTED_FOLDS + 1]


def test_a_section_is_priced_at_all_knots() -> None:
    """Times and features have a row per knot; the section of all libraries has sizes and their corrections."""
    device = load_device("a100-sxm-80gb")
    record = load_record("gemm", device.with_pricing(physics_only=True))
    words = {"dtype": "bf16", "layout": "NT", "hot_cache": False, "library": "", "uses_kernels": True}
    section = learn_section(KNOTS, {}, device, record, **words)
    middle = combined_section(section, KNOTS, np.ones((len(KNOTS), 2)))

    assert section.physics_s.shape == (len(KNOTS),)
    assert np.isfinite(section.seen).all()
    assert middle.seen[0].tolist() == [0.0, 8.0, 8.0, 1.0, 1.0]


class _Constant:
    """A learner whose every correction is one step."""

    dtype = "bf16"

    def libraries(self, device: str) -> list[str]:
        """One library."""
        return [f"{device} server"]

    def report(self, device: str, library: str) -> tuple[dict[str, float], dict[str, object]]:
        """An interval, and held-out errors."""
        return {"low": 0.9 if library else 0.8}, {"held_out": {"rows": len(device)}}

    def tables(self, *_: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and what leaves the shape out of them."""
        return np.ones(1, np.int8), np.array([-200], np.int16)


def test_tables_are_added_to_a_record_without_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before writes records anew, without learned tables or intervals."""
    monkeypatch.setattr(record_files, "RECORDS", tmp_path)
    record_files.save_record("gemm", "some", {"provenance": {"sections": {"bf16": {"libraries": {}}}}})
    axes = {letter: np.array([1]) for letter in "mnk"}
    np.savez(tmp_path / "gemm" / "some.npz", **axes)

    write_record("some", axes, [_Constant()], "a command")  # type: ignore[list-item]

    written = record_files.read_record("gemm", "some")
    assert written["residual"]["interval"] == {
        "dtypes": {"bf16": {"low": 0.8}},
        "libraries": {"some server": {"bf16": {"low": 0.9}}},
    }
    assert written["provenance"]["sections"]["bf16"]["libraries"] == {"some server": {"rows": 4}}
    with np.load(tmp_path / "gemm" / "some.npz") as tables:
        assert {"residual:bf16", "residual:bf16 of some server"} <= set(tables.files)
        assert tables["left_out:bf16"].reshape(-1).tolist() == [-200]
