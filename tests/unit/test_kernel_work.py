"""Kernels priced by their work: the formula, the choice of a kernel, its table, and the fit of both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.core.errors import CalibrationError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.measure.refit.kernels import KernelRows, coverage_left_out, fit_kernel, intervals_of, tabulate
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.records import CalibrationRecord, load_record
from shapewright.pricing.kernels.price import (
    GAP_ERROR,
    correct_kernel,
    doublings_from_knots,
    kernel_rates,
    match_kernel,
    price_kernel,
)
from shapewright.pricing.kernels.work import KernelWork, estimate_kernel
from shapewright.pricing.operations import price_operations

pytest.importorskip("scipy", reason="refits need the fit extra")

H200 = load_device("h200-sxm-141gb")


def work_of(heads: np.ndarray, keys: np.ndarray) -> KernelWork:
    """Work that grows with heads and keys."""
    product = heads * keys
    return KernelWork(
        compute={"gemm": 1e-8 * product},
        memory={"bytes": 1e-7 * keys},
        serial={"start": np.full_like(keys, 1e-6)},
        roofline_s=1e-8 * product,
        places={"heads": heads, "keys": keys},
    )


def grid() -> tuple[np.ndarray, np.ndarray]:
    """Heads and keys of every combination."""
    heads, keys = np.meshgrid([2.0, 4.0, 8.0, 16.0, 32.0], 2.0 ** np.arange(6, 14), indexing="ij")
    return heads.ravel(), keys.ravel()


def record_of(*names: str) -> CalibrationRecord:
    """A record with kernels of these names, one weight each."""
    kernels = {name: {"weights": {"gemm": 2.0, "bytes": 1.0, "start": 1.0, "power": 8.0}, "axes": []} for name in names}
    interval = {name: {"edges_s": [], "low": [0.9], "high": [1.1]} for name in names}
    return CalibrationRecord(
        id="mla/x",
        kind="mla",
        device=H200.name,
        devices=(H200.name,),
        architecture=H200.architecture,
        parameters={"kernels": kernels},
        interval=interval,
        provenance={},
    )


def test_parts_overlap_and_starts_do_not() -> None:
    """3 us of arithmetic and 4 us of traffic with p = 2 take 5 us, and a start of 2 us comes on top."""
    one = np.ones(1)
    work = KernelWork(
        compute={"a": 1e-6 * one, "b": 1e-6 * one},
        memory={"c": 4e-6 * one},
        serial={"d": 1e-6 * one},
        roofline_s=one,
        places={},
    )
    parts = estimate_kernel(work, {"a": 1.0, "b": 2.0, "c": 1.0, "d": 2.0, "power": 2.0})

    assert parts.total_s[0] == pytest.approx(7e-6)
    assert (parts.compute_s[0], parts.memory_s[0], parts.start_s[0]) == pytest.approx((3e-6, 4e-6, 2e-6))


@pytest.mark.parametrize(
    ("labels", "expected", "is_same"),
    [
        (("vllm 2.0", "kernel", "fa"), "vllm 2.0|kernel|fa", True),
        (("vllm 1.5", "kernel", "fa"), "vllm 1.0|kernel|fa", True),
        (("trtllm 1.0", "kernel", "fa"), "vllm 2.0|kernel|fa", False),
        (("vllm 2.0", "kernel", "new"), "vllm 2.0|kernel|fa", False),
        (("", "kernel", "fa"), "vllm 2.0|kernel|fa", True),
    ],
)
def test_the_most_similar_kernel_prices(labels: tuple[str, ...], expected: str, *, is_same: bool) -> None:
    """Another version of a library is preferred to another library; an unknown kernel takes one of its operation."""
    record = record_of("vllm 1.0|kernel|fa", "vllm 2.0|kernel|fa", "vllm 2.0|module|fa")
    match = match_kernel(record, labels)

    assert (match.name, match.is_same) == (expected, is_same)


def test_another_operation_does_not_price() -> None:
    """A record without the operation is an error that names it."""
    with pytest.raises(CalibrationError, match=r"no measured kernel of mla resembles vllm 2\.0 bmm"):
        match_kernel(record_of("vllm 2.0|kernel|fa"), ("vllm 2.0", "bmm"))


def test_another_kernel_widens_the_interval() -> None:
    """The price is the same, and its ends lie further away as logarithms."""
    record, work = record_of("vllm 2.0|kernel|fa"), work_of(np.array([8.0]), np.array([4096.0]))
    same, other = (
        price_kernel(work, H200, record, match_kernel(record, (library, "kernel", "fa")))
        for library in ("vllm 2.0", "other 1.0")
    )

    assert same.time_s == other.time_s
    assert other.high_s > same.high_s


def test_table_returns_residuals_and_fades() -> None:
    """Inside, the table holds smoothed residuals; four doublings beyond it corrects nothing."""
    heads, keys = grid()
    work = work_of(heads, keys)
    table = tabulate(work, np.full(len(heads), 0.3), ("heads", "keys"))

    assert correct_kernel(table, work, ("heads", "keys")) == pytest.approx(0.3, abs=0.01)
    beyond = work_of(np.array([8.0]), np.array([16.0 * keys.max()]))
    assert correct_kernel(table, beyond, ("heads", "keys")).tolist() == [0.0]


def test_empty_cells_take_their_neighbors() -> None:
    """A cell without rows gets nine tenths of the mean around it."""
    heads, keys = grid()
    kept = ~((heads == 8.0) & (keys == 1024.0))
    table = tabulate(work_of(heads[kept], keys[kept]), np.full(int(kept.sum()), 0.4), ("heads", "keys"))

    logs = correct_kernel(table, work_of(np.array([8.0]), np.array([1024.0])), ("heads", "keys"))
    assert logs[0] == pytest.approx(0.37, abs=0.02)


def test_fit_recovers_weights_and_judges_held_out_layouts() -> None:
    """Times made of known weights are fitted exactly, and need no table."""
    heads, keys = grid()
    work = work_of(heads, keys)
    true = {"gemm": 1.7, "bytes": 2.5, "start": 3.0, "power": 3.0}
    fit = fit_kernel(work, estimate_kernel(work, true).total_s, [heads], [("heads", "keys")])

    assert fit.axes == ()
    assert fit.report["left_out"]["mean_absolute_error"] < 0.01
    assert fit.weights["gemm"] == pytest.approx(1.7, rel=0.05)


def test_fit_takes_a_table_where_held_out_layouts_gain() -> None:
    """A factor that depends on the keys alone is learned for heads that were left out."""
    heads, keys = grid()
    work = work_of(heads, keys)
    factor = np.where(keys == 1024.0, 1.5, 1.0)
    weights = {"gemm": 1.5, "bytes": 1.3, "start": 1.0, "power": 2.0}
    fit = fit_kernel(work, estimate_kernel(work, weights).total_s * factor, [heads], [("heads", "keys")])

    assert fit.axes == ("heads", "keys")
    assert fit.report["left_out"]["mean_absolute_error"] < fit.report["left_out_terms_alone"]["mean_absolute_error"]


def test_two_layouts_take_a_table_for_those_between() -> None:
    """Of two head counts neither tells the other, but a table over both predicts one between."""
    heads, keys, sequences = (
        each.ravel() for each in np.meshgrid([16.0, 128.0], 2.0 ** np.arange(8, 15), [1.0, 4.0, 16.0])
    )

    def build(heads: np.ndarray, keys: np.ndarray, sequences: np.ndarray) -> KernelWork:
        work = work_of(heads * sequences, keys)
        return replace(work, places={"heads": heads, "keys": keys, "sequences": sequences})

    weights = {"gemm": 1.5, "bytes": 1.3, "start": 1.0, "power": 2.0}
    times = estimate_kernel(build(heads, keys, sequences), weights).total_s * heads**0.5
    fit = fit_kernel(build(heads, keys, sequences), times, [heads], [("heads", "sequences", "keys")])

    assert fit.axes == ("heads", "sequences", "keys")
    assert len(np.unique(fit.rows.layouts)) == 2
    assert len(np.unique(fit.rows.folds)) == 3


def test_kernels_with_few_rows_share_an_interval() -> None:
    """Two kernels of some rows each have one interval, made of the errors of both."""
    heads, keys = grid()
    few = np.flatnonzero(keys >= 4096.0)
    work, times = work_of(heads, keys).take(few), np.full(len(few), 1e-4)
    rows = fit_kernel(work, times, [heads[few]], []).rows
    found = intervals_of(
        {
            name: rows._replace(unseen_s=times, measured_s=times * ratio, doublings=np.zeros(len(times)))
            for name, ratio in (("slow", 1.2), ("fast", 0.8))
        }
    )

    assert found["slow"] == found["fast"]
    assert (found["slow"]["low"], found["slow"]["high"]) == ([0.8], [1.2])


def rows_with_errors(doublings: float, error: float) -> KernelRows:
    """Two hundred rows of five layouts: 1 % off where fitted, off by a factor where their layout was left out."""
    times, sign = np.full(200, 5e-4), np.where(np.arange(200) % 2, 1.0, -1.0)
    return KernelRows(
        measured_s=times * np.exp(error * sign),
        fitted_s=times * np.exp((error - 0.01) * sign),
        unseen_s=times,
        doublings=np.full(200, doublings),
        folds=np.arange(200) // 40,
        layouts=np.arange(200) // 40,
    )


def test_interval_grows_with_the_distance_from_the_table() -> None:
    """Rows 0.5 doublings from the table and off by 0.2 need sqrt(0.2^2 - 0.01^2) / sqrt(0.5) at one doubling."""
    found = intervals_of({"kernel": rows_with_errors(0.5, 0.2)})["kernel"]

    assert found["high"] == pytest.approx([np.exp(0.01)], rel=1e-3)
    assert found[GAP_ERROR] == pytest.approx(np.sqrt((0.2**2 - 0.01**2) / 0.5), rel=1e-3)


def test_rows_left_out_at_the_table_give_the_spread_itself() -> None:
    """Where leaving a layout out leads nowhere, its error is the spread everywhere."""
    found = intervals_of({"kernel": rows_with_errors(0.0, 0.2)})["kernel"]

    assert found["high"] == pytest.approx([np.exp(0.2)], rel=1e-3)
    assert found[GAP_ERROR] == 0.0


def test_coverage_left_out_judges_each_layout_by_the_others() -> None:
    """A layout whose errors are ten times those of the others lies outside the interval that they give."""
    rows = rows_with_errors(0.5, 0.02)
    odd = rows._replace(measured_s=np.where(rows.folds == 0, rows.unseen_s * 1.5, rows.measured_s))
    inside = coverage_left_out({"kernel": odd})["kernel"]

    assert inside[rows.folds == 0].tolist() == [0.0] * 40
    assert inside[rows.folds > 0].tolist() == [1.0] * 160


def test_distance_from_the_table_is_that_of_a_bridge() -> None:
    """Halfway between two knots an octave apart a quarter of a doubling, at a knot none, beyond the last all of it."""
    heads, keys = grid()
    table = tabulate(work_of(heads, keys), np.zeros(len(heads)), ("heads",))
    asked = np.array([4.0, 4.0 * 2.0**0.5, 4.0 * heads.max()])
    found = doublings_from_knots(table, work_of(asked, np.full(3, 1024.0)), ("heads",))

    assert found == pytest.approx([0.0, 0.25, 2.0], abs=1e-3)


def call(**changes: object) -> Attention:
    """A causal call of training."""
    sizes = {"batch_size": 2, "query_len": 4096, "kv_len": 4096, "num_heads": 64, "num_kv_heads": 8}
    return Attention(name="x", head_dim=128, v_head_dim=128, is_training=True, **sizes).changed(**changes)


def test_training_kernels_price_devices_that_have_them() -> None:
    """H200 and its sibling use cuDNN's kernels, A100 those of serving libraries with an assumed backward pass."""
    records = {
        name: price_operations([call(is_backward=True)], load_device(name))[0].calibration.record_id.partition("/")[0]
        for name in ("h200-sxm-141gb", "h100-sxm-80gb", "a100-sxm-80gb")
    }

    assert records == {
        "h200-sxm-141gb": "attention_training",
        "h100-sxm-80gb": "attention_training",
        "a100-sxm-80gb": "attention",
    }


def test_training_calls_priced_together_equal_those_priced_alone() -> None:
    """Forward, backward and serving calls in one list have the prices that each has alone."""
    calls = [call(), call(is_backward=True), call(is_training=False), call(causal=False)]
    together = price_operations(calls, H200)
    record = load_record("attention", H200)

    assert [float(price.time_s) for price in together] == pytest.approx(
        [float(price_attention(each, H200, record).time_s) for each in calls]
    )


def test_a_fixed_order_of_gradients_costs_time_on_blackwell() -> None:
    """CuDNN's deterministic backward pass takes a sixth longer on GB200 at head width 128."""
    plain, fixed = price_operations(
        [call(is_backward=True), call(is_backward=True, is_deterministic=True)], load_device("gb200")
    )

    assert 1.08 < float(fixed.time_s) / float(plain.time_s) < 1.3


@pytest.mark.parametrize("sizes", [{"window_size": 128}, {"batch_size": 32, "query_len": 512, "kv_len": 512}, {}])
@pytest.mark.parametrize("device", ["h200-sxm-141gb", "h100-sxm-80gb", "gb200", "b300-sxm-288gb"])
def test_a_fixed_order_of_gradients_never_saves_time(device: str, sizes: dict[str, int]) -> None:
    """H200's deterministic pass has one measured size, whose fit alone halves the time of short sequences."""
    backward = call(is_backward=True, **sizes)
    plain, fixed = price_operations([backward, backward.changed(is_deterministic=True)], load_device(device))

    assert fixed.time_s >= plain.time_s
    assert fixed.low_s < fixed.time_s < fixed.high_s


def test_a_sibling_keeps_the_cycles_beyond_its_traffic() -> None:
    """Time of H200 beyond full-bandwidth traffic is cycles: H100, with 0.7 of its bandwidth, is as fast."""
    h100 = load_device("h100-sxm-80gb")
    backward = call(is_backward=True, batch_size=1, query_len=2048, kv_len=2048, num_heads=32)
    here, there = (float(price_operations([backward], device)[0].time_s) for device in (H200, h100))

    assert 0.95 < there / here < 1.15
    assert kernel_rates(h100).bytes_per_s < 0.75 * kernel_rates(H200).bytes_per_s
