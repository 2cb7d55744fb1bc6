"""Batched GEMMs that fill a device, and the kernels that run them (gemm.batched)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shapewright.core.errors import CalibrationError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.batched import time_batches
from shapewright.pricing.gemm.kernels import DeviceRates
from shapewright.pricing.gemm.parameters import GemmParameters, read_batch_kernels, read_parameters
from shapewright.pricing.gemm.price import estimate_gemm_s, price_gemm
from shapewright.pricing.gemm.section import prepare_gemm_pricing
from shapewright.pricing.gemm.shapes import Gemms

KERNEL: dict[str, Any] = {
    "alignments_bytes": [16, 32, 64, 128],
    "tile_m": 128,
    "widths": [64, 256],
    "rates": [0.5, 1.0],
    "alignment_rates": {"16": 0.5},
    "edge_share": 0.6,
    "k_step": 32,
    "fill_k": 0.0,
    "bandwidth_fraction": 1.0,
    "write_ratio": 1.0,
    "overlap_power": 32.0,
}
# One SM of 2 TFLOP/s: a tile of 128 x 256 and k = 1000 takes 32.768 us, traffic takes nothing.
RATES = DeviceRates(flops_per_s_per_sm=2e12, bandwidth_bytes_per_s=1e18, num_sms=1.0, element_bytes=2.0)
LETTERS = {"k": True, "n": True}


def parameters_of(*kernels: dict[str, Any], least_waves: float = 1.0) -> GemmParameters:
    """A section with these kernels, without start, power loss and wave tails won back."""
    device = load_device("a100-sxm-80gb")
    raw = load_record("gemm", device).parameters["dtypes"]["bf16"]
    known = read_batch_kernels({"kernels": kernels, "kernels_least_waves": least_waves})
    return replace(read_parameters(raw), start_s=0.0, power_drop_fraction=0.0, wave_give_back=0.0, batch_kernels=known)


def one_gemm(m: float, n: float, k: float, batch: float) -> Gemms:
    """One batch as arrays."""
    return Gemms(*(np.array([size]) for size in (m, n, k, batch)), letters=LETTERS)


def time_one(parameters: GemmParameters, n: float, k: float = 1024.0, m: float = 128.0, batch: float = 2.0) -> Any:
    """Times of one batch."""
    return time_batches(one_gemm(m, n, k, batch), parameters, RATES)


def test_the_narrowest_tile_that_holds_the_columns_runs_them() -> None:
    """64 columns take a tile of 64, 65 and more the widest one, whatever a narrower one would take."""
    parameters = parameters_of(KERNEL)

    assert [float(time_one(parameters, n).tile_n[0]) for n in (8, 64, 72, 256, 264)] == [64, 64, 256, 256, 256]


def test_kernel_time_is_the_time_of_its_tiles() -> None:
    """One tile of 128 x 256 at k = 1024 is 2^25 multiply-adds at 1e12/s; two GEMMs take twice as long."""
    assert float(time_one(parameters_of(KERNEL), 256.0).time_s[0]) == pytest.approx(2.0 * 2.0**25 / 1e12)


def test_partial_tile_costs_its_edge_and_its_content() -> None:
    """320 columns are a tile and a quarter: 1 + 0.6 + 0.4 / 4 = 1.7 tiles of 2^25 / 1e12 s, in whole waves of one."""
    parameters = replace(parameters_of(KERNEL), wave_give_back=1.0)

    assert float(time_one(parameters, 320.0).time_s[0]) == pytest.approx(2.0 * 1.7 * 2.0**25 / 1e12)


def test_alignment_slows_a_kernel_or_leaves_it() -> None:
    """Rows of 16 bytes run at half the rate here; rows of 4 bytes are accepted by no kernel."""
    parameters = parameters_of(KERNEL)

    assert float(time_one(parameters, 248.0).time_s[0]) == pytest.approx(
        2.0 * float(time_one(parameters, 256.0).time_s[0])
    )
    assert not time_one(parameters, 250.0).is_run[0]


def test_tiles_wait_for_cache_bandwidth() -> None:
    """1024 columns are read once and rows by each of 4 tiles: k (128 * 4 + 1024) / 0.5 elements, twice, and C."""
    fed = parameters_of({**KERNEL, "feed_ratio": 0.5})
    rates = replace(RATES, bandwidth_bytes_per_s=2e9, flops_per_s_per_sm=1e30)

    time_s = time_batches(one_gemm(128.0, 1024.0, 1024.0, 2.0), fed, rates).time_s

    assert float(time_s[0]) == pytest.approx(2.0 * (1024 * (128 * 4 + 1024) / 0.5 + 128 * 1024) / 1e9)


@pytest.mark.parametrize("edge", [128, 256, 512])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_small_scores_are_near_their_traffic(edge: int, head_dim: int) -> None:
    """Aligned scores of short sequences, of enough heads for many waves, move their bytes at 70 % of bandwidth."""
    device = load_device("a100-sxm-40gb")
    scores = Gemm(name="x", dtype="bf16", m=edge, n=edge, k=head_dim, batch=2**28 // edge**2)

    price = price_gemm(scores, device, load_record("gemm", device))

    assert price.time_s <= price.roofline_s / 0.7


@pytest.mark.parametrize(
    ("limits", "sizes", "is_run"),
    [
        ({"last_k": 351.0}, (256.0, 352.0), False),
        ({"last_k": 351.0}, (256.0, 320.0), True),
        ({"first_n": 300.0}, (256.0, 1024.0), False),
        ({"first_n": 256.0, "last_n": 256.0, "first_k": 320.0, "last_k": 320.0}, (256.0, 320.0), True),
        ({"role": "free", "alignments_bytes": [2]}, (255.0, 1024.0), True),
        ({"role": "contracted", "alignments_bytes": [2]}, (255.0, 1024.0), False),
        ({"role": "contracted", "alignments_bytes": [2]}, (256.0, 1023.0), True),
    ],
)
def test_a_kernel_takes_its_range(limits: dict[str, Any], sizes: tuple[float, float], is_run: bool) -> None:
    """Ranges of k and n, ends included, and the least aligned dimension, decide which kernel accepts a GEMM."""
    assert bool(time_one(parameters_of({**KERNEL, **limits}), *sizes).is_run[0]) is is_run


def test_small_batches_keep_the_menu() -> None:
    """A batch of two tiles does not fill four waves, and a single GEMM is not a batch."""
    assert not time_one(parameters_of(KERNEL, least_waves=4.0), 256.0).is_run[0]
    assert not time_one(parameters_of(KERNEL), 256.0, batch=1.0).is_run[0]


def test_a_name_that_no_kernel_has_is_an_error() -> None:
    """A record with an unknown or missing number of a kernel is refused, and known ones are named."""
    for raw in ([{**KERNEL, "speed": 1.0}], [{"tile_m": 128}]):
        with pytest.raises(CalibrationError, match=r"kernels of a gemm record's batches.*edge_share"):
            read_batch_kernels({"kernels": raw, "kernels_least_waves": 1.0})
    assert read_batch_kernels({}) is None


def test_odd_heads_cost_as_measured() -> None:
    """A100 40 GB, 512 GEMMs of 2048 x 2048: an odd width costs twice an aligned one, and 145 less than 143.

    Measured: 34 us per GEMM at 143, 22 at 145, 11 at 144 (arXiv 2401.14489, slowest iterations).
    """
    device = load_device("a100-sxm-40gb")
    operation = Gemm(name="score", dtype="fp16", layout="NN", m=2048, n=2048, k=np.array([143, 144, 145]), batch=512)
    price = price_gemm(operation, device, load_record("gemm", device))
    each_us = np.asarray(price.time_s) / 512 * 1e6

    assert each_us == pytest.approx([34.0, 11.0, 22.0], rel=0.08)
    assert np.asarray(price.alignment_factor) == pytest.approx([11 / 34, 1.0, 0.5], abs=0.06)
    assert estimate_gemm_s(operation, device, load_record("gemm", device)) == pytest.approx(price.time_s, rel=1e-9)


@pytest.mark.parametrize(("name", "has_kernels"), [("a100-sxm-80gb", True), ("a30", True), ("l40s", False)])
def test_batch_kernels_are_not_transferred(name: str, has_kernels: bool) -> None:
    """Batch kernels are specific to one architecture: transferred to a sibling of A100, not to other devices."""
    device = load_device(name)
    pricing = prepare_gemm_pricing(
        "bf16", None, device, load_record("gemm", device.with_pricing(uncalibrated=name == "l40s"))
    )

    assert pricing.section is not None
    assert pricing.section.batched is not None
    assert (pricing.section.batched.batch_kernels is not None) is has_kernels
