"""GEMM suites: alignment, random sizes, tiles and waves, batches of attention, groups of experts, best rate.

Legend: b GEMMs of a batch, s tokens per sequence, d head dimension, h hidden size, f intermediate size, t tokens,
i input features, o output features; C[m,n] = A[m,k] B[k,n].

The maximum achievable matmul FLOP/s (MAMF) is searched with 1 % of the runs of an exhaustive sweep. A Gaussian process
is fitted to the logarithm of the measured rates; its features are the logarithms of m, n and k, and how full the last
wave is for common tiles. The next shapes are those with the highest predicted mean plus one standard deviation. On
recorded sweeps of 24,000 shapes (A100, H100, H200, B200, L40S, two libraries each), 1 % of the runs reach 99 % of the
best recorded rate in the median; where the recorded best is a single noisy run, the result is lower.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.measure.bench.operations.gemm import GROUPED
from shapewright.measure.store.record import Case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int

LINEAR_LAYOUTS = ("NT", "NN", "TN")
"""Layouts of a linear layer's forward GEMM, its input gradient (dgrad) and its weight gradient (wgrad)."""

# torch multiplies 8-bit operands in the NT layout only, with dimensions that are multiples of these.
# Source: checks of torch._scaled_mm and torch._int_mm (aten/src/ATen/native/cuda/Blas.cpp).
_EIGHT_BIT_MULTIPLES = {"fp8": 16, "int8": 8}
# Upper limit for random GEMMs, so that none takes longer than a few milliseconds. [flop]
_MAX_RANDOM_FLOPS = 4e12
# Fixed, so that the held-out half of the suite is the same everywhere.
_RANDOM_SIZES_SEED = 20241114
# Head dimensions: multiples of 8, 16, 32 and 64, and unaligned ones between them.
_HEAD_DIMS = (
    32, 40, 48, 56, 60, 63, 64, 65, 66, 68, 72, 80, 88, 96, 100, 104, 108, 112, 120, 124, 128, 129, 130, 132, 136, 144,
    160, 176, 192, 208, 224, 240, 256,
)  # fmt: skip
# Sequence lengths around 1024 and 2048: they are the row length of the score matrix, the contiguous dimension.
_SEQUENCE_LENGTHS = (
    1000, 1008, 1016, 1020, 1023, 1024, 1025, 1026, 1028, 1032, 1040, 1088, 2046, 2047, 2048, 2049, 2056,
)  # fmt: skip
# Hidden size, intermediate size and experts per device: Mixtral 8x7B, Qwen3 30B-A3B, DeepSeek-V2 Lite, and one whose
# sizes are not multiples of 64.
_EXPERTS = ((4096, 14336, 8), (2048, 768, 128), (2048, 1408, 64), (2880, 1368, 32))
_EXPERT_TOKENS = (512, 2048, 8192, 32768)


def gemm_case(name: str, dtype: str, m: int, n: int, k: int, *, batch: int = 1, layout: str = "NT") -> Case:
    """A GEMM as a case."""
    return Case(operation=Gemm(name=name, dtype=dtype, m=m, n=n, k=k, batch=batch, layout=layout))


def alignment_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Sizes around multiples of 1 to 128, one dimension at a time, in the layouts of forward, dgrad and wgrad."""
    bases = [(256, 192, 256)] if small else [(8192, 4096, 4096), (8192, 2560, 10240), (2048, 4096, 14336)]
    offsets = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 120, 127, 128]
    multiple, layouts = _supported_sizes(dtype)
    sweeps = []
    for tokens, fan_in, fan_out in bases:
        for position, dimension in enumerate(("tokens", "in", "out")):
            for layout in layouts:
                sweep = []
                for offset in offsets:
                    if dimension != "tokens" and offset % multiple:
                        continue
                    t, i, o = (
                        size + offset * (index == position) for index, size in enumerate((tokens, fan_in, fan_out))
                    )
                    m, n, k = _linear_sizes(layout, t, i, o)
                    sweep.append(gemm_case(f"alignment.{dimension}", dtype, m, n, k, layout=layout))
                sweeps.append(sweep)
    # Widths of real models: vocabularies, padded and unpadded, and intermediate sizes near 8/3 of the hidden size.
    vocabularies = (
        (331, 336)
        if small
        else (32000, 32001, 50257, 50258, 50260, 50264, 50272, 50288, 50304, 50432, 65024, 128256, 128257, 151936)
    )
    intermediate = (171, 172) if small else (10880, 10912, 10920, 10922, 10923, 10924, 10928, 10944, 11008)
    t = bases[0][0]
    hidden = (64, 64) if small else (2560, 4096)
    for name, widths, i in zip(("vocabulary", "swiglu"), (vocabularies, intermediate), hidden, strict=True):
        for layout in layouts:
            sizes = [_linear_sizes(layout, t, i, o) for o in widths if o % multiple == 0]
            sweeps.append([gemm_case(f"alignment.{name}", dtype, *mnk, layout=layout) for mnk in sizes])
    return sweeps


def random_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Random sizes in the three layouts, each a multiple of a random power of two; the same sizes for every seed.

    The half with an even hash of m, n and k is held out: it evaluates fits and is never fitted (see docs/measuring.md).
    """
    octaves = (5.0, 9.0) if small else (5.0, 14.6)
    return [_random_gemms("random", dtype, 60 if small else 2500, tokens=octaves, features=octaves)]


def calibration_cases(dtype: str, *, small: bool) -> list[Case]:
    """Random GEMMs from which a calibration takes its rows: from one token to more than a model's usual batch."""
    tokens, features = ((0.0, 10.0), (5.0, 12.0)) if small else ((0.0, 14.6), (6.0, 15.0))
    return _random_gemms("calibration", dtype, 1000 if small else 4000, tokens=tokens, features=features)


def _random_gemms(
    name: str, dtype: str, count: int, *, tokens: tuple[float, float], features: tuple[float, float]
) -> list[Case]:
    """GEMMs of linear layers in random layouts.

    Args:
        tokens: Range of the logarithm of the tokens. [octave]
        features: Range of the logarithms of input and output features. [octave]
    """
    generator = random.Random(_RANDOM_SIZES_SEED)
    spans = (tokens, features, features)
    found: list[Case] = []
    multiple, layouts = _supported_sizes(dtype)
    while len(found) < count:
        t, fan_in, fan_out = (max(int(2**low), int(2 ** generator.uniform(low, high))) for low, high in spans)
        granularity = max(multiple, generator.choice((1, 1, 2, 4, 8, 8, 16, 32, 64, 64, 128, 256)))
        i, o = (max(granularity, size // granularity * granularity) for size in (fan_in, fan_out))
        layout = generator.choice(layouts)
        m, n, k = _linear_sizes(layout, t, i, o)
        if 2.0 * m * n * k <= _MAX_RANDOM_FLOPS:
            found.append(gemm_case(name, dtype, m, n, k, layout=layout))
    return found


def tiles_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Fine sweeps of n and m that cross tile and wave boundaries."""
    if small:
        return [[gemm_case("tiles.n", dtype, 144, n, 128) for n in range(16, 513, 16)],
                [gemm_case("tiles.m", dtype, m, 128, 128) for m in range(8, 257, 8)]]  # fmt: skip
    sweeps = [
        [gemm_case("tiles.n", dtype, m, n, k) for n in range(64, 9217, 64)]
        for m, k in ((2304, 4096), (2048, 4096), (4096, 4096), (8192, 2048))
    ]
    return [*sweeps, [gemm_case("tiles.m", dtype, m, 4096, 4096) for m in range(64, 8193, 64)]]


def batched_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Batched GEMMs of unfused attention: scores Q K^T, values P V, and the gradients dV = P^T dO and dK = dS^T Q."""
    groups = ((4, 64), (8, 32)) if small else ((128, 2048), (32, 2048), (128, 1024), (512, 512))
    head_dims = (16, 20, 24, 31, 32) if small else _HEAD_DIMS
    usual_head_dims = (16, 32) if small else (64, 128)
    lengths = (60, 63, 64, 65) if small else _SEQUENCE_LENGTHS
    sweeps = [[case for d in head_dims for case in _attention_gemms(dtype, b, s, d)] for b, s in groups]
    b = groups[0][0]
    sweeps += [[case for s in lengths for case in _attention_gemms(dtype, b, s, d)] for d in usual_head_dims]
    return sweeps


def experts_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Grouped GEMMs of expert layers with evenly spread tokens: one call per expert, and torch's grouped kernel."""
    shapes, tokens = (((32, 48, 4), (64, 24, 2)), (16, 64)) if small else (_EXPERTS, _EXPERT_TOKENS)
    # torch has the grouped kernel for bf16 only.
    variants = ("", GROUPED) if dtype == "bf16" else ("",)
    return [
        [
            Case(
                operation=GroupedGemm(
                    name=f"experts.{name}", dtype=dtype, m=m, n=n, k=k, groups=groups, layout=layout, is_training=True
                ),
                variant=variant,
            )
            for t in tokens
            if t >= groups
            for name, m, n, k, layout in (
                ("up", t, 2 * f, h, "NT"),
                ("down", t, h, f, "NT"),
                ("up.dgrad", t, h, 2 * f, "NN"),
                ("up.wgrad", 2 * f, h, t, "TN"),
            )
        ]
        for h, f, groups in shapes
        for variant in variants
    ]


def _supported_sizes(dtype: str) -> tuple[int, tuple[str, ...]]:
    """Multiple of input and output features that torch needs for a format, and the layouts that it supports."""
    if dtype in _EIGHT_BIT_MULTIPLES:
        return _EIGHT_BIT_MULTIPLES[dtype], LINEAR_LAYOUTS[:1]
    return 1, LINEAR_LAYOUTS


def _linear_sizes(layout: str, t: int, i: int, o: int) -> tuple[int, int, int]:
    """m, n and k of a linear layer's GEMM in one of LINEAR_LAYOUTS."""
    return {"NT": (t, o, i), "NN": (t, i, o), "TN": (o, i, t)}[layout]


def _attention_gemms(dtype: str, b: int, s: int, d: int) -> list[Case]:
    sizes = {"score": (s, s, d, "NT"), "value": (s, d, s, "NN"), "gradient": (s, d, s, "TN")}
    return [
        gemm_case(f"batched.{name}", dtype, m, n, k, batch=b, layout=layout)
        for name, (m, n, k, layout) in sizes.items()
    ]


RUNS_FRACTION = 0.01
"""Share of all shapes that the search measures."""

# Tiles whose last wave is a feature; the libraries of all current GPUs have them. [element x element]
_TILES = ((128, 256), (256, 128), (128, 128), (256, 256))
# Share of the runs that are drawn from large shapes with full waves before the first fit.
_INITIAL_FRACTION = 0.2
# Quantiles of m n k below which shapes are too small to be the best: for the initial draw, and for all later runs.
_MIN_WORK_QUANTILE_INITIAL, _MIN_WORK_QUANTILE = 0.6, 0.45
_FULL_WAVES_FRACTION_INITIAL = 0.25
# Shapes whose mean is predicted, and those of them whose standard deviation is predicted as well.
_MAX_MEANS, _MAX_DEVIATIONS = 6000, 800
# Log rates relative to the best are clipped here: slower shapes need not be distinguished.
_MIN_LOG_RATE = -0.5
# Kernel of the process: variance and length scale of the terms for all sizes, nearby sizes, the same m, the same n and
# k (lengths in octaves), and the same wave fill (length in log units); then the measurement noise. Chosen on the
# recorded sweeps.
_SHARED, _NEAR, _SAME_M, _SAME_NK, _SAME_FILL = (0.4, 2.0), (0.2, 0.5), (0.1, 0.05), (0.1, 0.2), (0.3, 0.15)
_NOISE_VARIANCE = 0.02

_GPU_MULTIPLE, _CPU_MULTIPLE = 256, 16
_GPU_STEPS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64)
_CPU_STEPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20)


class BestRateSearch:
    """Suggests which GEMM shapes to measure next.

    Args:
        shapes: m, n, k of each shape.
        num_sms: SMs over which tiles are spread; 1 on a device without waves.
        seed: Seed of the initial draw.
    """

    def __init__(self, shapes: Int[np.ndarray, "count 3"], *, num_sms: int, seed: int) -> None:
        self.shapes = shapes
        sizes = shapes.astype(float)
        self._logs = np.log2(sizes)
        self._fills = np.stack([_log_wave_fill(sizes, tile, num_sms) for tile in _TILES], axis=1)
        self.num_runs = max(1, round(RUNS_FRACTION * len(shapes)))
        work, fullest = self._logs.sum(1), self._fills.max(1)
        self._large = np.flatnonzero(work >= np.quantile(work, _MIN_WORK_QUANTILE))
        initial = np.flatnonzero(work >= np.quantile(work, _MIN_WORK_QUANTILE_INITIAL))
        num_full = max(1, int(len(initial) * _FULL_WAVES_FRACTION_INITIAL))
        initial = initial[np.argsort(-fullest[initial], kind="stable")[:num_full]]
        order = np.random.default_rng(seed).permutation(initial)
        self._initial = [int(index) for index in order[: max(3, int(self.num_runs * _INITIAL_FRACTION))]]
        self._fullest = fullest

    def suggest(self, rates: Mapping[int, float], count: int) -> list[int]:
        """Indices of the shapes to measure next; empty once all runs are used.

        Args:
            rates: Measured rates by index, 0 where a measurement failed. [flop/s]
            count: Upper limit of the number of suggestions.
        """
        count = min(count, self.num_runs - len(rates))
        if count <= 0:
            return []
        remaining = [index for index in self._initial if index not in rates]
        if remaining:
            return remaining[:count]
        seen = np.array(list(rates))
        measured = np.maximum(np.array([rates[index] for index in rates]), 1e-9)
        target = np.maximum(np.log(measured / measured.max()), _MIN_LOG_RATE)
        target = (target - target.mean()) / (target.std() + 1e-9)
        factor = np.linalg.cholesky(self._covariance(seen, seen) + _NOISE_VARIANCE * np.eye(len(seen)))
        weights = np.linalg.solve(factor.T, np.linalg.solve(factor, target))
        rest = np.setdiff1d(self._large, seen)
        rest = rest[np.argsort(-self._fullest[rest], kind="stable")[:_MAX_MEANS]]
        covariance = self._covariance(rest, seen)
        mean = covariance @ weights
        top = np.argsort(-mean, kind="stable")[:_MAX_DEVIATIONS]
        explained = (np.linalg.solve(factor, covariance[top].T) ** 2).sum(0)
        variance = sum(term[0] for term in (_SHARED, _NEAR, _SAME_M, _SAME_NK, _SAME_FILL))
        upper_bound = mean[top] + np.sqrt(np.maximum(variance - explained, 1e-6))
        return [int(index) for index in rest[top[np.argsort(-upper_bound, kind="stable")[:count]]]]

    def _covariance(
        self, rows: Int[np.ndarray, " rows"], columns: Int[np.ndarray, " columns"]
    ) -> Float[np.ndarray, "rows columns"]:
        """Prior covariance of the rates of two sets of shapes, given by index."""
        squares = [(self._logs[rows, axis, None] - self._logs[columns, axis]) ** 2 for axis in range(3)]
        fills = sum((self._fills[rows, tile, None] - self._fills[columns, tile]) ** 2 for tile in range(len(_TILES)))
        m, nk = squares[0], squares[1] + squares[2]
        terms = ((_SHARED, m + nk), (_NEAR, m + nk), (_SAME_M, m), (_SAME_NK, nk), (_SAME_FILL, fills))
        total: Float[np.ndarray, "rows columns"] = sum(
            (variance * np.exp(-0.5 * distance / length**2) for (variance, length), distance in terms),
            start=np.zeros_like(m),
        )
        return total


def candidate_shapes(*, small: bool) -> Int[np.ndarray, "count 3"]:
    """m, n and k of every shape of the search grid; ``small`` selects the grid for a CPU."""
    multiple, steps = (_CPU_MULTIPLE, _CPU_STEPS) if small else (_GPU_MULTIPLE, _GPU_STEPS)
    axis = multiple * np.array(steps, dtype=np.int64)
    return np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1).reshape(-1, 3)


def shape_case(shape: Sequence[int] | Int[np.ndarray, " 3"], dtype: str) -> Case:
    """The GEMM of one shape, with both operands contiguous along k."""
    m, n, k = (int(size) for size in shape)
    return Case(operation=Gemm(name="mamf", dtype=dtype, m=m, n=n, k=k))


def _log_wave_fill(
    sizes: Float[np.ndarray, "count 3"], tile: tuple[int, int], num_sms: int
) -> Float[np.ndarray, " count"]:
    """Logarithm of the share of a GEMM's waves that is output: its elements over those of full waves of tiles."""
    num_tiles = np.ceil(sizes[:, 0] / tile[0]) * np.ceil(sizes[:, 1] / tile[1])
    slots = np.ceil(num_tiles / num_sms) * num_sms * tile[0] * tile[1]
    fill: Float[np.ndarray, " count"] = np.log(sizes[:, 0] * sizes[:, 1] / slots)
    return fill
