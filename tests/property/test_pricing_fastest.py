"""The fast ways of pricing GEMMs agree with the reference formula, kernel by kernel, for any input."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.experts.price import estimate_grouped_gemm_s, price_grouped_gemm
from shapewright.pricing.gemm import price as gemm_module
from shapewright.pricing.gemm.alignment import contiguous_letters
from shapewright.pricing.gemm.fastest import (
    AGREEMENT,
    count_threads,
    fastest_s,
    find_fastest,
    has_compiler,
    run_over_threads,
)
from shapewright.pricing.gemm.kernels import (
    DeviceRates,
    alignment_factor,
    estimate_kernels,
    every_kernel,
    join_s,
    rates_of,
)
from shapewright.pricing.gemm.parameters import GemmParameters, read_parameters
from shapewright.pricing.gemm.price import COMPILED_FROM_SHAPES, estimate_gemm_s, price_gemm, price_gemms
from shapewright.pricing.gemm.shapes import Gemms

# Devices with dtypes that their records have, and a dtype that one must borrow.
MENUS = [
    ("a100-sxm-80gb", "bf16"),
    ("h100-sxm-80gb", "bf16"),
    ("h100-sxm-80gb", "fp8"),
    ("b200-sxm-180gb", "fp4"),
    ("l40s", "fp8"),
    ("v100-sxm2-16gb", "fp16"),
    ("mi250x-gcd", "fp16"),
    ("h100-pcie-80gb", "int8"),
]
sizes = st.one_of(st.integers(1, 2**22), st.integers(1, 2**15).map(lambda size: 64 * size))
shapes = st.tuples(sizes, sizes, sizes, st.one_of(st.just(1), st.integers(1, 4096)))
layouts = st.sampled_from(["NT", "NN", "TN", "TT"])


def parameters_and_rates_of(name: str, dtype: str) -> tuple[GemmParameters, DeviceRates]:
    """Constants and rates of a section of a record, or of its fallback format."""
    device = load_device(name)
    sections = load_record("gemm", device).parameters["dtypes"]
    section = sections.get(dtype, sections.get("bf16", sections.get("fp16")))
    return read_parameters(section), rates_of(device, dtype)


def columns(rows: list[tuple[int, int, int, int]]) -> list[np.ndarray[Any, Any]]:
    """Rows of m, n, k, batch as float columns."""
    return [np.array(column, dtype=float) for column in zip(*rows, strict=True)]


def gemms_of(dims: Iterable[np.ndarray[Any, Any]], layout: str = "NT") -> Gemms:
    """GEMMs with these columns of m, n, k and batch."""
    m, n, k, batch = dims
    return Gemms(m, n, k, batch, contiguous_letters(layout))


def many(number: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Many shapes of all sizes, a third of them batches, half of them round."""
    random = np.random.default_rng(seed)
    m, n, k = (np.floor(2.0 ** random.uniform(0.0, 20.0, number)) for _ in range(3))
    round_up = random.random(number) < 0.5
    n, k = (np.where(round_up, 64.0 * np.ceil(dim / 64.0), dim) for dim in (n, k))
    return [m, n, k, np.where(random.random(number) < 1 / 3, np.floor(2.0 ** random.uniform(0.0, 10.0, number)), 1.0)]


@pytest.mark.parametrize(("name", "dtype"), MENUS)
@given(rows=st.lists(shapes, min_size=1, max_size=30), layout=layouts)
def test_fastest_is_the_least_of_all_kernels(
    name: str, dtype: str, rows: list[tuple[int, int, int, int]], layout: str
) -> None:
    """No candidate kernel takes less time than the chosen one, whose reported time equals the formula's."""
    parameters, rates = parameters_and_rates_of(name, dtype)
    gemms = gemms_of(columns(rows), layout)
    factor, _ = alignment_factor(gemms, rates.element_bits, parameters)

    chosen = find_fastest(gemms, factor, parameters, rates)

    times = estimate_kernels(gemms, factor, every_kernel(parameters), parameters, rates)
    every_s = join_s(times.compute_s, times.memory_s, parameters.overlap_power) + times.added_s
    np.testing.assert_allclose(chosen.time_s, every_s.min(axis=0), rtol=AGREEMENT)
    place = chosen.tile * len(parameters.split_k) + chosen.split
    np.testing.assert_allclose(every_s[place, np.arange(len(rows))], chosen.time_s, rtol=AGREEMENT)


@given(shapes, st.sampled_from(MENUS))
def test_formula_of_one_kernel_as_written(shape: tuple[int, int, int, int], menu: tuple[str, str]) -> None:
    """The text at the head of pricing/gemm/kernels.py, in plain Python, gives the compute time of the chosen kernel."""
    p, rates = parameters_and_rates_of(*menu)
    m, n, k, batch = (float(size) for size in shape)

    tile, split, *_ = (column[0] for column in find_fastest(gemms_of(columns([shape])), np.ones(1), p, rates))

    bm, bn, s = p.tile_m[tile], p.tile_n[tile], p.split_k[split]
    waves = batch * math.ceil(m / bm) * math.ceil(n / bn) * s / rates.num_sms
    soft = math.ceil(waves) - p.wave_give_back * (math.ceil(waves) - max(waves, 1.0))
    part = 32.0 * math.ceil(math.ceil(k / s) / 32.0)
    flops = 2.0 * batch * m * n * k
    rate = rates.flops_per_s_per_sm * p.tile_rate_fraction[tile]
    rate *= 1.0 - p.power_drop_fraction * flops / (flops + p.power_half_flops)
    tile_s = (part + p.fill_k[tile]) * 2.0 * bm * bn / rate
    feed_bytes = (min(bm, m) + min(bn, n)) * part * rates.element_bytes
    feed_s = feed_bytes / (p.feed_ratio * rates.bandwidth_bytes_per_s / rates.num_sms)
    kernels = every_kernel(p)
    place = tile * len(p.split_k) + split
    one = type(kernels)(*(column[place] for column in kernels))
    found = estimate_kernels(gemms_of(columns([shape])), np.ones(1), one, p, rates)
    assert found.compute_s[0] == pytest.approx(soft * max(tile_s, feed_s), rel=AGREEMENT)


@pytest.mark.parametrize(("name", "dtype"), MENUS)
def test_large_blocks_equal_small_blocks(name: str, dtype: str) -> None:
    """Going through splits one by one or all at once gives the same bits."""
    parameters, rates = parameters_and_rates_of(name, dtype)
    gemms, ones = gemms_of(many(1000)), np.ones(1000)

    together = fastest_s(gemms, ones, parameters, rates)

    parts = [gemms.rows(slice(start, start + 5)) for start in range(0, 1000, 5)]
    apart = [fastest_s(part, ones[:5], parameters, rates) for part in parts]
    np.testing.assert_array_equal(together, np.concatenate(apart))


@pytest.mark.parametrize(("name", "dtype"), MENUS)
def test_compiled_equals_numpy(name: str, dtype: str) -> None:
    """Numba's loop finds the same times."""
    pytest.importorskip("numba")
    parameters, rates = parameters_and_rates_of(name, dtype)
    gemms = gemms_of(many(20_000))
    factor = 2.0 ** np.random.default_rng(1).uniform(-3.0, 0.0, 20_000)

    found = fastest_s(gemms, factor, parameters, rates, compiled=True)

    np.testing.assert_allclose(found, fastest_s(gemms, factor, parameters, rates), rtol=AGREEMENT)


@pytest.mark.parametrize("physics_only", [True, False])
def test_many_gemms_are_compiled_to_the_same_times(monkeypatch: pytest.MonkeyPatch, physics_only: bool) -> None:
    """A call above the limit uses Numba in threads, and an array of two dimensions keeps its shape."""
    pytest.importorskip("numba")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    device = load_device("h200-sxm-141gb")
    record = load_record("gemm", device.with_pricing(physics_only=physics_only))
    m, n, k, batch = (np.resize(dim, (2, COMPILED_FROM_SHAPES // 2)) for dim in many(50_000))
    operation = Gemm(name="x", m=m, n=n, k=k, batch=batch, layout="NN")

    found = estimate_gemm_s(operation, device, record)

    monkeypatch.setattr(gemm_module, "has_compiler", lambda: False)
    np.testing.assert_allclose(found, estimate_gemm_s(operation, device, record), rtol=AGREEMENT)


@given(
    rows=st.lists(shapes, min_size=1, max_size=20),
    menu=st.sampled_from(MENUS),
    layout=layouts,
    hot=st.booleans(),
    stored=st.sampled_from([None, "int4"]),
    uncalibrated=st.booleans(),
)
def test_time_alone_is_that_of_the_price(
    rows: list[tuple[int, int, int, int]],
    menu: tuple[str, str],
    layout: str,
    hot: bool,
    stored: str | None,
    uncalibrated: bool,
) -> None:
    """Leaving reasons out changes no time."""
    device = load_device(menu[0])
    record = load_record("gemm", device.with_pricing(uncalibrated=uncalibrated))
    m, n, k, batch = columns(rows)
    dims: dict[str, Any] = {"m": m, "n": n, "k": k, "batch": batch}
    operation = Gemm(name="x", dtype=menu[1], layout=layout, weight_dtype=stored, **dims)

    found = estimate_gemm_s(operation, device, record, hot_cache=hot)

    np.testing.assert_array_equal(found, price_gemm(operation, device, record, hot_cache=hot).time_s)


def test_many_gemms_are_priced_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing or unfit Numba is no error: NumPy does the work."""
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "shapewright.pricing.gemm.compiled", raising=False)
    has_compiler.cache_clear()
    device = load_device("a100-sxm-80gb")
    m = np.resize(np.arange(1.0, 9.0), COMPILED_FROM_SHAPES)
    try:
        found = estimate_gemm_s(Gemm(name="x", m=m, n=64, k=64), device, load_record("gemm", device))
        assert not has_compiler()
    finally:
        has_compiler.cache_clear()

    np.testing.assert_array_equal(found, np.resize(found[:8], COMPILED_FROM_SHAPES))


def test_time_of_one_gemm_is_a_float() -> None:
    """Ints in, a float out, on a device with tiles and on one that has only a roofline."""
    for name in ("a100-sxm-80gb", "graphcore-bow"):
        device = load_device(name)
        record = load_record("gemm", device)
        operation = Gemm(name="x", m=512, n=4096, k=4096, dtype="fp16")
        found = estimate_gemm_s(operation, device, record)

        assert isinstance(found, float)
        assert found == price_gemm(operation, device, record).time_s


def test_time_of_experts_is_that_of_their_price() -> None:
    """The time-only function of grouped GEMMs equals the time of their price."""
    device = load_device("h200-sxm-141gb")
    record = load_record("moe", device)
    rows = np.array([8, 1024, 65536])
    operation = GroupedGemm(name="x", m=rows, n=2048, k=7168, groups=32)

    found = estimate_grouped_gemm_s(operation, device, record)

    np.testing.assert_array_equal(found, price_grouped_gemm(operation, device, record).time_s)


@given(st.lists(st.tuples(shapes, layouts), min_size=1, max_size=12))
def test_layouts_priced_together_equal_each_alone(requested: list[tuple[tuple[int, int, int, int], str]]) -> None:
    """GEMMs of several layouts evaluated together equal separate evaluations."""
    device = load_device("a100-sxm-80gb")
    record = load_record("gemm", device)
    operations = [Gemm(name="x", m=m, n=n, k=k, batch=batch, layout=layout) for (m, n, k, batch), layout in requested]

    assert price_gemms(operations, device, record) == [price_gemm(one, device, record) for one in operations]


def test_threads_share_every_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads process fifty blocks once each; OMP_NUM_THREADS is respected."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    done: list[int] = []
    workers: set[int] = set()
    lock = threading.Lock()

    def work(block: int) -> None:
        with lock:
            done.append(block)
            workers.add(threading.get_ident())

    run_over_threads(work, range(50), num_threads=count_threads())

    assert count_threads() == 3
    assert sorted(done) == list(range(50))
    assert threading.get_ident() not in workers


def test_failure_of_a_thread_is_raised() -> None:
    """A block that cannot be done is no block that is left empty."""

    def work(block: int) -> None:
        if block == 37:
            raise ValueError(f"block {block}")

    with pytest.raises(ValueError, match="block 37"):
        run_over_threads(work, range(50), num_threads=2)
