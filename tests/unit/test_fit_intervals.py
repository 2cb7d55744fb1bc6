"""Intervals of residuals: pools that count alike, stretches that cover, and devices left out with their biases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapewright.hardware.loader import load_device
from shapewright.measure.refit.intervals.left_out import (
    LARGEST_END,
    PriorBias,
    Rows,
    bias_of,
    left_out_interval,
    left_out_widening,
    prior_bias_of,
)
from shapewright.measure.refit.intervals.residual_intervals import (
    LARGEST_SPREAD,
    fitted_interval,
    is_inside,
    leave_one_out_widening,
    pool,
    stretch,
    stretch_factors,
    stretch_scores,
)


def rows(bias: float, scatter: float = 0.1, count: int = 2000, seed: int = 0) -> Rows:
    """Rows of a device whose errors are normal about its bias, from 1 us to 10 ms."""
    rng = np.random.default_rng(seed)
    predicted = 10.0 ** rng.uniform(-6.0, -2.0, count)
    return predicted, predicted * np.exp(bias + rng.normal(0.0, scatter, count))


def test_format_interval_covers_its_rows() -> None:
    """Nine of ten rows lie inside, in every regime."""
    predicted, measured = rows(0.0, 0.1, 20_000)
    inside = is_inside(fitted_interval(predicted, measured), predicted, measured)

    assert inside.mean() == pytest.approx(0.9, abs=0.01)
    assert inside[predicted < 5e-6].mean() == pytest.approx(0.9, abs=0.02)


def test_stretch_covers_rows_that_scatter_more() -> None:
    """Held-out rows with twice the scatter stretch the fitted interval by two; it covers 90 % of others like them."""
    form = fitted_interval(*rows(0.0, 0.05, 20_000))
    unseen, others = rows(0.0, 0.1, 5_000, 1), rows(0.0, 0.1, 5_000, 2)
    factors = stretch_factors(stretch_scores(form, *unseen), unseen[0])
    stretched = stretch(form, factors)

    assert factors["factor"] == pytest.approx([2.0] * len(factors["factor"]), rel=0.15)
    assert is_inside(form, *others).mean() < 0.65
    assert is_inside(stretched, *others).mean() == pytest.approx(0.9, abs=0.02)


def test_stretch_keeps_regimes_of_both() -> None:
    """Edges of the form and of the factors are both edges of what comes out."""
    form = {"edges_s": [1e-5], "low": [0.9, 0.8], "high": [1.1, 1.2]}
    found = stretch(form, {"edges_s": [1e-4], "factor": [1.0, 2.0]})

    assert found["edges_s"] == [1e-5, 1e-4]
    assert found["low"] == pytest.approx([0.9, 0.8, 0.64])
    assert found["high"] == pytest.approx([1.1, 1.2, 1.44])


def test_parts_of_a_pool_have_equal_weight() -> None:
    """A tenth of the rows has half the weight: the ends lie between those of the parts."""
    many, few = rows(0.0, 0.05, 4_000), rows(0.5, 0.05, 800)
    found = pool([many, few])

    assert is_inside(found, *few).mean() > 0.85
    assert is_inside(found, *many).mean() > 0.85


def test_both_ways_takes_each_sign() -> None:
    """What was 30 % slow here may be 30 % fast there."""
    found = pool([rows(0.3, 0.05, 4_000)], both_ways=True)

    assert found["low"] == pytest.approx([1.0 / high for high in found["high"]], rel=1e-3)
    assert found["high"][0] == pytest.approx(np.exp(0.3 + 1.28 * 0.05), rel=0.03)


def test_spread_grows_until_parts_left_out_fit() -> None:
    """Equal parts need no spread; an outlier widens the pool up to a limit; a single part gives none."""
    alike = {name: rows(0.0, 0.1, 3_000, seed) for seed, name in enumerate("abc")}
    unmeasured = {**alike, "d": rows(0.8, 0.1, 3_000, 9)}

    assert leave_one_out_widening(alike) == pytest.approx(1.0, abs=0.05)
    assert 1.0 < leave_one_out_widening(unmeasured) <= LARGEST_SPREAD
    assert leave_one_out_widening({"a": alike["a"]}) == 1.0


def upper_end(parts: dict[str, Rows], **others: object) -> float:
    """Logarithm of the upper end of the first regime."""
    return float(np.log(left_out_interval(parts, **others)["high"][0]))


def test_ends_without_biases_hold_nine_of_ten_rows() -> None:
    """Devices that are right in the mean leave their scatter: 1.645 of a normal error's spread."""
    parts = {str(seed): rows(0.0, seed=seed) for seed in range(8)}
    found = left_out_interval(parts)

    assert np.log(found["high"]) == pytest.approx(np.full(len(found["high"]), 0.1645), rel=0.07)
    assert np.log(found["low"]) == pytest.approx(-np.log(found["high"]))


def test_one_device_gives_wider_intervals_than_four() -> None:
    """With biases as large, Student's tails shrink, by table, from 6.3 (one device) to 2.1 (four)."""
    ends = [upper_end({str(seed): rows(0.2, 1e-6, seed=seed) for seed in range(count)}) for count in (1, 2, 4)]

    assert ends == pytest.approx([0.2 * 6.31, 0.2 * 2.92, 0.2 * 2.13], rel=0.05)


def test_a_wider_class_moderates_one_device() -> None:
    """A device that happened to be right does not promise that the next will be, nor one far off that all are."""
    prior = PriorBias(0.1)

    assert upper_end({"a": rows(0.0)}, prior=prior) > upper_end({"a": rows(0.0)})
    assert upper_end({"a": rows(0.4)}, prior=prior) < upper_end({"a": rows(0.4)})


def test_biases_of_single_rows_count_as_devices() -> None:
    """Two devices with a bias of 0.5 and two without: the interval exceeds 0.5."""
    parts = {str(seed): rows(0.0, seed=seed) for seed in range(2)}

    assert upper_end(parts, biases={"a": 0.5, "b": -0.5}) > 0.5 > upper_end(parts)


def test_chips_of_one_vendor_count_as_one_device() -> None:
    """Three chips, of which two are of one maker: 0.3^2 and 0.5^2 count half, and Student's tails are those of two."""
    parts = {name: rows(bias, 1e-6) for name, bias in (("x1", 0.3), ("x2", 0.5), ("y", 0.2))}
    makers = {"x1": "x", "x2": "x", "y": "y"}
    of_two = np.sqrt((0.5 * (0.3**2 + 0.5**2) + 0.2**2) / 2.0) * 2.92

    assert upper_end(parts, causes=makers) == pytest.approx(of_two, rel=0.05)
    assert upper_end(parts, causes=makers) > upper_end(parts)
    assert upper_end({"x1": parts["x1"], "y": parts["y"]}, biases={"x2": 0.5}, causes=makers) == pytest.approx(
        of_two, rel=0.05
    )


def test_vendor_defaults_are_stated_once() -> None:
    """Of two makers, one without errors and one with three chips at 0.4: the root of half of 0.16."""
    biases = {"x1": 0.4, "x2": -0.4, "x3": 0.4, "y": 0.0}

    assert prior_bias_of(biases, {"x1": "x", "x2": "x", "x3": "x"}) == PriorBias(pytest.approx(np.sqrt(0.08)))
    assert prior_bias_of(biases) == PriorBias(pytest.approx(np.sqrt(0.12)))


def test_share_of_an_end_that_is_the_bias() -> None:
    """All of it without scatter, none without bias; with ends of 0.2 x 2.92 and 0.3 x 1.645, their squares' share."""
    parts = {str(seed): rows(0.2, 0.3, seed=seed) for seed in range(2)}
    by_hand = (0.2 * 2.92) ** 2 / ((0.2 * 2.92) ** 2 + (0.3 * 1.645) ** 2)

    assert left_out_interval(parts)["shared"] == pytest.approx([by_hand] * 4, abs=0.06)
    assert left_out_interval({"a": rows(0.2, 0.0)})["shared"] == pytest.approx([1.0] * 4)
    unbiased = {"a": (np.ones(400), np.exp(np.tile([-0.1, 0.1], 200)))}
    assert left_out_interval(unbiased)["shared"] == pytest.approx([0.0], abs=1e-9)


def test_an_unmeasured_class_takes_the_scatter_of_a_nearer_one() -> None:
    """Its biases are those that are known, its scatter is wider by a stated factor."""
    near = {"a": rows(0.0), "b": rows(0.0, seed=1)}
    once, twice = (
        upper_end({}, biases=dict.fromkeys("bcdefg", 0.01), scatter=near, scatter_factor=factor)
        for factor in (1.0, 2.0)
    )

    assert twice == pytest.approx(2.0 * once, rel=0.05)


def test_no_known_value_is_an_error() -> None:
    """Without devices or without known biases there is no interval."""
    with pytest.raises(ValueError, match="needs rows of some device and the bias of one"):
        left_out_interval({}, biases={"b": 0.1})
    with pytest.raises(ValueError, match="needs rows of some device and the bias of one"):
        left_out_interval({}, scatter={"a": rows(0.0)})


def test_ends_have_a_limit() -> None:
    """A bias beyond all bounds gives the widest interval there is, and no overflow."""
    assert upper_end({"a": rows(3.0)}) == pytest.approx(LARGEST_END)


def test_spread_asks_devices_that_scatter_unlike_each_other() -> None:
    """Alike devices need no wider ends; one of three with five times the scatter does, up to a limit."""
    alike = {str(seed): rows(0.0, seed=seed) for seed in range(3)}
    unlike = {**alike, "wild": rows(0.0, 0.5, seed=5)}

    assert left_out_widening(alike) == pytest.approx(1.0, abs=0.05)
    assert 1.05 < left_out_widening(unlike) <= LARGEST_SPREAD
    assert left_out_widening({"0": alike["0"]}) == 1.0


@settings(max_examples=20)
@given(biases=st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=4), scatter=st.floats(0.02, 0.3))
def test_larger_errors_never_narrow_it(biases: list[float], scatter: float) -> None:
    """Twice the biases are no narrower, nor twice the scatter; and it does not matter which way devices err."""
    make = [
        {str(seed): rows(sign * bias, spread, 400, seed) for seed, bias in enumerate(biases)}
        for sign, spread in ((1.0, scatter), (2.0, scatter), (1.0, 2.0 * scatter))
    ]
    mirrored = {name: (predicted, predicted**2 / measured) for name, (predicted, measured) in make[0].items()}
    once, farther, wilder = (upper_end(parts) for parts in make)

    assert farther >= 0.99 * once
    assert wilder >= 0.99 * once
    assert upper_end(mirrored) == pytest.approx(once, rel=1e-6)


def test_biases_by_hand() -> None:
    """The median of ln(measured / predicted), and the root of their mean square; of nothing nothing."""
    predicted = np.ones(3)

    assert bias_of((predicted, np.exp([0.1, 0.2, 0.9]))) == pytest.approx(0.2)
    assert prior_bias_of({"a": 0.3, "b": -0.4}) == PriorBias(pytest.approx(np.sqrt(0.125)))
    assert prior_bias_of({}) is None


def test_slow_kernels_widen_the_interval_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel in six takes twice the predicted time: the upper end of nine in ten rows is that factor."""
    import pandas as pd

    from shapewright.measure.refit.gemm import fp32

    kernel_s, launch_s, num_rows = 1e-3, 2e-5, 600
    factor = np.where(np.arange(num_rows) % 6 == 0, 2.0, 1.0)
    sizes = {"batch": 1, "m": 64, "n": np.arange(num_rows) + 1, "k": 64}
    names = np.where(np.arange(num_rows) // 6 % 2 == 0, "linear", "bmm")
    measured = pd.DataFrame({"operation": names, **sizes, "latency_s": kernel_s * factor + launch_s})
    fitted = fp32.Fitted(np.zeros(1), {}, launch_s)

    def predict(chosen: pd.DataFrame, *_: object) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(chosen), kernel_s), np.full(len(chosen), launch_s)

    monkeypatch.setattr(fp32, "fit_kernels", lambda *_: fitted)
    monkeypatch.setattr(fp32, "predict_kernels", predict)
    monkeypatch.setattr(fp32, "_forest_of", lambda *_: None)
    monkeypatch.setattr(fp32, "forest_correction", lambda _, m, *__: (np.zeros(len(m)),))
    (high,) = fp32.learn_device(measured, load_device("t4"), {}).intervals["learned"]["high"]

    assert high == pytest.approx(2.0)
