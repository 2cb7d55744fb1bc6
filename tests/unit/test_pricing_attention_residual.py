"""The learned correction of attention times: interpolation by hand, fading, windows, and where it is left out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shapewright.core.errors import CalibrationError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.measure.refit.attention.residual import fade_past_most_heads
from shapewright.pricing.attention.kernels import AttentionShape
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.attention.residual import LOG_STEP, AttentionResidual, load_residual, log_correction
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.price import AttentionPrice

# Two knots two doublings apart on each axis; one number for a window of 128, two for none, by sequences.
KNOTS = np.log2(np.array([4.0, 16.0]))
STEPS = np.stack([np.full((2, 2, 2, 2), 10), np.full((2, 2, 2, 2), 30)]).astype(np.int8)
STEPS[0, :, :, 1, :] = 20
TABLE = AttentionResidual(knots_log2=(KNOTS, KNOTS, KNOTS, KNOTS), windows=(0, 128), log_steps=STEPS)
SIZES = {
    "batch_size": 4,
    "query_len": 1,
    "kv_len": 16,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 128,
    "v_head_dim": 128,
    "window_size": 0,
}


def correct(*, is_decode: bool = True, causal: bool = True, **sizes: float) -> tuple[float, float]:
    """Correction, in steps, and weight of one call by TABLE."""
    columns: dict[str, Any] = {name: np.asarray(float(value)) for name, value in (SIZES | sizes).items()}
    shape = AttentionShape(causal=causal, element_bytes=2.0, kv_element_bytes=2.0, **columns)
    logs, weight = log_correction(TABLE, shape, 128.0, is_decode=is_decode)
    return float(logs) / LOG_STEP, float(weight)


def price(
    *, physics_only: bool, uncalibrated: bool = False, name: str = "h100-sxm-80gb", **sizes: Any
) -> AttentionPrice:
    """Price one call that the tables of every device hold."""
    chip = load_device(name)
    record = load_record("attention", chip.with_pricing(uncalibrated=uncalibrated, physics_only=physics_only))
    usual = {"batch_size": 32, "query_len": 128, "kv_len": 128, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    call = Attention(name="call", **{**usual, "v_head_dim": 128, "window_size": 0, **sizes})
    return price_attention(call, chip, record)


def test_knots_are_exact_and_cells_are_linear_in_the_logarithm() -> None:
    """8 sequences lie halfway between 4 and 16: the mean of both knots."""
    assert correct() == pytest.approx((10.0, 1.0))
    assert correct(batch_size=16) == pytest.approx((20.0, 1.0))
    assert correct(batch_size=8) == pytest.approx((15.0, 1.0))


@pytest.mark.parametrize(
    ("sizes", "weight"),
    [
        ({"batch_size": 2}, 0.5),
        ({"kv_len": 64}, 0.0),
        ({"num_heads": 4, "num_kv_heads": 2}, 0.0),
        ({"head_dim": 64, "v_head_dim": 64}, 0.5),
        ({"query_len": 2}, 0.5),
        ({"v_head_dim": 64}, 0.0),
    ],
)
def test_correction_fades_with_distance(sizes: dict[str, float], weight: float) -> None:
    """One doubling away from what was measured half is left, two doublings nothing; latent heads get none."""
    logs, found = correct(**sizes)

    assert found == pytest.approx(weight)
    assert logs == pytest.approx(10.0 * weight)


def test_a_chunk_against_a_longer_cache_fades() -> None:
    """Whole sequences were measured: a chunk of half its keys keeps half, and a mask that is not causal nothing."""
    assert correct(is_decode=False, query_len=16)[1] == pytest.approx(1.0)
    assert correct(is_decode=False, query_len=8)[1] == pytest.approx(0.5)
    assert correct(causal=False)[1] == 0.0


def test_windows_take_the_nearest_table() -> None:
    """A measured window has its own table, twice its width half of it; a window that masks no key counts as none."""
    assert correct(window_size=128) == pytest.approx((30.0, 1.0))
    assert correct(window_size=256, kv_len=16) == pytest.approx((10.0, 1.0))
    assert correct(window_size=8, kv_len=16)[1] == 0.0


def test_many_calls_equal_one_by_one() -> None:
    """Blocks change nothing: ten thousand calls are corrected as each of them alone."""
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(1, 64, 10_000).astype(float) for name in SIZES}
    columns |= {"head_dim": np.full(10_000, 128.0), "v_head_dim": np.full(10_000, 128.0)}
    shape = AttentionShape(causal=True, element_bytes=2.0, kv_element_bytes=2.0, **columns)

    logs, _ = log_correction(TABLE, shape, 128.0, is_decode=True)

    for row in range(0, 10_000, 997):
        alone, _ = correct(**{name: values[row] for name, values in columns.items()})
        assert logs[row] / LOG_STEP == pytest.approx(alone)


def test_more_heads_than_any_model_has_keep_less_and_less() -> None:
    """From 64 key-value heads on, two queries each are the last layout within 128; a doubling later half is left."""
    faded = fade_past_most_heads(np.full((1, 4), 40, dtype=np.int8), np.array([64.0]), np.array([1.0, 2.0, 4.0, 8.0]))

    assert faded.tolist() == [[40, 40, 20, 0]]


@pytest.mark.parametrize("group", [1, 2, 4])
def test_tables_end_without_a_cliff(group: int) -> None:
    """Twice the heads never decode a fifth faster, be they more than any table holds."""
    times = [
        float(
            price(
                physics_only=False,
                name="b200-sxm-180gb",
                batch_size=1,
                query_len=1,
                num_heads=heads * group,
                num_kv_heads=heads,
                kv_cache_dtype="fp8",
            ).time_s
        )
        for heads in (16, 32, 64, 128, 256)
    ]

    assert all(after > 0.8 * before for before, after in pairwise(times))


def test_price_is_physics_times_the_correction() -> None:
    """A price contains its correction; without a table the correction is 1 and the interval wider."""
    learned, physics = price(physics_only=False), price(physics_only=True)

    assert physics.correction == 1.0
    assert learned.correction != 1.0
    assert learned.time_s == pytest.approx(physics.time_s * learned.correction)
    assert learned.high_s / learned.low_s < physics.high_s / physics.low_s


@pytest.mark.parametrize("words", [{"is_backward": True}, {"causal": False}])
def test_unmeasured_sizes_are_priced_by_physics(words: dict[str, bool]) -> None:
    """Backward passes and masks that are not causal are in no table."""
    assert price(physics_only=False, **words).time_s == price(physics_only=True, **words).time_s


def test_corrections_transfer_to_siblings_only() -> None:
    """An H100 uses the H200's table; an uncalibrated A100 uses the formulas of Hopper's record alone."""
    assert price(physics_only=False, uncalibrated=True).correction != 1.0
    assert price(physics_only=False, uncalibrated=True, name="a100-sxm-80gb").correction == 1.0


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s"])
def test_tables_are_those_of_the_record(name: str) -> None:
    """Every table that a record names is in its file, small, and has an interval."""
    record = load_record("attention", load_device(name))
    assert record.residual is not None

    for path, table in record.residual["tables"].items():
        found = load_residual(record.residual["file"], table)
        assert path in record.interval
        assert set(record.residual["interval"][table]) == {"edges_s", "low", "high"}
        assert found.log_steps.shape == (len(found.windows), *map(len, found.knots_log2))


def test_missing_tables_are_an_error() -> None:
    """A record that names a file which is not there cannot be priced with."""
    with pytest.raises(CalibrationError, match=r"residuals nobody\.npz"):
        load_residual("nobody.npz", "x/decode")
