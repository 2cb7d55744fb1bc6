"""Suites: what is measured under one name, as data.

Legend: h hidden size, a heads, s tokens per sequence, b sequences, v vocabulary; m, n, k of products are BLAS letters.

A suite is a list of sweeps, which ``shapewright.bench.order`` walks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from shapewright.bench.order import drop_repeated, interleave, take_turns, walked_coarse_first
from shapewright.bench.pointwise import ADAMW, LOSS, LOSS_BACKWARD, RMS_NORM
from shapewright.bench.product_suites import batched_suite, experts_suite
from shapewright.bench.whole_suites import compiled_suite, decode_suite, layer_suite, memory_suite, model_suite
from shapewright.dtypes import get_dtype
from shapewright.errors import BenchError, close_names
from shapewright.operations import Attention, Collective, Gemm, Pointwise
from shapewright.operations.collective import COLLECTIVE_OPS
from shapewright.store.record import Case

LINEAR_LAYOUTS = ("NT", "NN", "TN")
# Formats that are measured where none is asked for, as far as the device has them.
_DEFAULT_GPU_DTYPES = ("bf16", "fp16")
# Suites of one format, and those of every format that the device has.
_OF_ONE_DTYPE = {
    "smoke", "tiles", "attention", "pointwise", "layer", "model", "decode", "memory", "mamf", "collectives", "batched",
    "experts", "compiled",
}  # fmt: skip
_OF_ALL_DTYPES = {"alignment"}
# torch multiplies 8-bit operands in one layout, in multiples of so many elements.
# Source: checks of torch._scaled_mm and torch._int_mm (aten/src/ATen/native/cuda/Blas.cpp).
_NARROW_STEPS = {"fp8": 16, "int8": 8}
# Random products stay below this, so that none takes longer than a few milliseconds. [flop]
_MOST_RANDOM_FLOPS = 4e12
MAMF, COLLECTIVES = "mamf", "collectives"

Sweep = list[Case]


def suite_names() -> tuple[str, ...]:
    """Every suite."""
    return (*_SUITES, MAMF, COLLECTIVES)


def require_suite(name: str) -> None:
    """Refuse a suite that is not there.

    Raises:
        BenchError: there is none of this name.
    """
    known = suite_names()
    if name not in known:
        raise BenchError(f"unknown suite {name!r}; {close_names(name, known) or 'choose one of ' + ', '.join(known)}")


def default_dtypes(suite: str, device_dtypes: Sequence[str], *, cpu: bool) -> tuple[str, ...]:
    """Element formats that a suite is measured in where none is asked for."""
    if cpu:
        return ("fp32",)
    if suite in _OF_ALL_DTYPES:
        return tuple(device_dtypes)
    wanted = ("bf16",) if suite in _OF_ONE_DTYPE else _DEFAULT_GPU_DTYPES
    return tuple(dtype for dtype in wanted if dtype in device_dtypes) or tuple(device_dtypes[:1])


def make_suite(name: str, dtypes: Sequence[str], *, small: bool, seed: int) -> list[Case]:
    """List the cases of a suite in the order of measuring.

    Args:
        name: One of suite_names().
        dtypes: Element formats.
        small: Whether it is for a CPU: the same sweeps on shapes that a few cores finish.
        seed: Of the shuffle within blocks.

    Raises:
        BenchError: there is no such suite.
    """
    require_suite(name)
    sweeps = [sweep for dtype in dtypes for sweep in _SUITES[name](dtype, small=small)]
    cases = list(take_turns(walked_coarse_first(sweeps)))
    return interleave(drop_repeated(cases), seed)


def _gemm(name: str, dtype: str, m: int, n: int, k: int, *, batch: int = 1, layout: str = "NT") -> Case:
    return Case(operation=Gemm(name=name, dtype=dtype, m=m, n=n, k=k, batch=batch, layout=layout))


def _attention(
    name: str, dtype: str, *, b: int, s: int, a: int, a_kv: int, d: int, variant: str = "",
    causal: bool = True, backward: bool = False, queries: int | None = None,
) -> Case:  # fmt: skip
    operation = Attention(
        name=name,
        dtype=dtype,
        batch_size=b,
        query_len=queries or s,
        kv_len=s,
        num_heads=a,
        num_kv_heads=a_kv,
        head_dim=d,
        v_head_dim=d,
        causal=causal,
        is_backward=backward,
    )
    return Case(operation=operation, variant=variant)


def _pointwise(name: str, kind: str, dtype: str, rows: int, width: int) -> Case:
    """Reads and writes as the lowering counts them for this kind."""
    if kind == ADAMW:  # gradient, weight and two moments in fp32; all but the gradient are written again
        operation = Pointwise(name=name, dtype="fp32", operation="optimizer", read_bytes=16.0 * rows * width,
                              written_bytes=12.0 * rows * width)  # fmt: skip
        return Case(operation=operation, row_width=width)
    if kind in (LOSS, LOSS_BACKWARD):  # as lowering.head counts them
        element_bytes, backward = get_dtype(dtype).num_bytes, kind == LOSS_BACKWARD
        operation = Pointwise(
            name=name,
            dtype=dtype,
            operation=LOSS,
            read_bytes=rows * width * (12.0 if backward else element_bytes + 4.0),
            written_bytes=rows * width * (8.0 + element_bytes * backward),
            num_kernels=3 if backward else 2,
        )
        return Case(operation=operation, row_width=width)
    reads = {"residual": 2.0, "glu": 2.0}.get(kind, 1.0)
    element_bytes = get_dtype(dtype).num_bytes
    written_bytes = rows * width * (element_bytes + (1.0 if kind == "dropout" else 0.0))
    operation = Pointwise(
        name=name,
        dtype=dtype,
        operation={"glu": "activation", RMS_NORM: "norm"}.get(kind, kind),
        read_bytes=reads * rows * width * element_bytes,
        written_bytes=written_bytes,
    )
    return Case(operation=operation, row_width=width, variant=kind if kind == RMS_NORM else "")


def _repeated(cases: Sweep) -> Sweep:
    """Each case twice, so that one run shows by how much a median moves."""
    return cases + [replace(case, repetition=1) for case in cases]


def _smoke(dtype: str, *, small: bool) -> list[Sweep]:
    top = 256 if small else 4096
    squares = [_gemm("square", dtype, top // part, top // part, top // part) for part in (1, 2, 4)]
    widths = [_gemm(f"linear.{layout}", dtype, top, top + extra, top, layout=layout)
              for layout in LINEAR_LAYOUTS for extra in (0, 1, 2, 4, 8, 64)]  # fmt: skip
    batched = [_gemm("score", dtype, top // 2, top // 2, d, batch=8) for d in (32, 40, 64, 128)]
    attention = [
        _attention("attention", dtype, b=1, s=top // 2, a=8, a_kv=kv, d=d, backward=backward)
        for d in (32, 64) for kv in (8, 2) for backward in (False, True)
    ]  # fmt: skip
    kinds = ("norm", "activation", "glu", "residual", "softmax", "dropout", "bias")
    pointwise = [_pointwise(kind, kind, dtype, top, width) for kind in kinds for width in (top, 4 * top)]
    return [_repeated(squares), _repeated(widths[::6]), _repeated(attention[:2]), _repeated(pointwise[::5]),
            widths, batched, attention, pointwise]  # fmt: skip


def _paper(dtype: str, *, small: bool) -> list[Sweep]:
    """The sweeps of arXiv 2401.14489: figures 5 to 11 and 16 to 20 of its sizes, in BLAS letters."""
    scale = 16 if small else 1
    steps = range(64 // min(scale, 8), 8192 // scale + 1, 128 // min(scale, 8))
    long, middle, square = 27648 // scale, 4096 // scale, 2304 // scale
    sweeps = [
        [_gemm("paper.k", dtype, long, middle, k, layout="NN") for k in steps],
        [_gemm("paper.n", dtype, square, n, middle, layout="NN") for n in steps],
        [_gemm("paper.m", dtype, m, middle, middle, layout="NN") for m in steps],
        [_gemm("paper.batched", dtype, 2048 // scale, 2048 // scale, k, batch=batch, layout="NN")
         for batch in (4, 32, 128) for k in (16, 32, 48, 60, 64, 72, 80, 96, 100, 128, 192, 256)],
        [_gemm("paper.vocabulary", dtype, 8192 // scale, v // scale + extra, 2560 // scale)
         for v in (32000, 50176, 51200) for extra in (0, 1, 2, 4, 8, 16, 17, 32, 48, 63, 64, 81)],
    ]  # fmt: skip
    tokens, sequences = 2048 // scale, 4
    for a in (8, 12, 16, 20, 24, 32, 40, 64, 80):
        score, value, fused = [], [], []
        for h in range(128 * a // scale, 8192 // scale + 1, max(a, (512 // scale) // a * a)):
            if h % a == 0:
                d = h // a
                score.append(_gemm(f"paper.score.a{a}", dtype, tokens, tokens, d, batch=sequences * a))
                value.append(_gemm(f"paper.value.a{a}", dtype, tokens, d, tokens, batch=sequences * a, layout="NN"))
                if d <= 256 and d % 8 == 0:
                    fused.append(_attention(f"paper.flash.a{a}", dtype, b=sequences, s=tokens, a=a, a_kv=a, d=d))
        sweeps += [score, value, fused]
    return [sweep for sweep in sweeps if sweep]


def _alignment(dtype: str, *, small: bool) -> list[Sweep]:
    """Sizes around multiples of 1 to 128, one dimension at a time, in the layouts of forward, dgrad and wgrad."""
    bases = [(256, 192, 256)] if small else [(8192, 4096, 4096), (8192, 2560, 10240), (2048, 4096, 14336)]
    offsets = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 120, 127, 128]
    step = _NARROW_STEPS.get(dtype, 1)
    sweeps = []
    for tokens, fan_in, fan_out in bases:
        for place in range(3):
            for layout in LINEAR_LAYOUTS if step == 1 else LINEAR_LAYOUTS[:1]:
                sweep = []
                for offset in offsets:
                    if place > 0 and offset % step:
                        continue
                    t, i, o = (size + offset * (place == at) for at, size in enumerate((tokens, fan_in, fan_out)))
                    m, n, k = {"NT": (t, o, i), "NN": (t, i, o), "TN": (o, i, t)}[layout]
                    sweep.append(_gemm(f"alignment.{('tokens', 'in', 'out')[place]}", dtype, m, n, k, layout=layout))
                sweeps.append(sweep)
    # Widths that models have: vocabularies, padded and not, and inner widths near 8/3 of the hidden size.
    vocabularies = (
        (331, 336)
        if small
        else (32000, 32001, 50257, 50258, 50260, 50264, 50272, 50288, 50304, 50432, 65024, 128256, 128257, 151936)
    )
    inner = (171, 172) if small else (10880, 10912, 10920, 10922, 10923, 10924, 10928, 10944, 11008)
    t = bases[0][0]
    hidden = (64, 64) if small else (2560, 4096)
    for name, widths, i in zip(("vocabulary", "swiglu"), (vocabularies, inner), hidden, strict=True):
        for layout in LINEAR_LAYOUTS if step == 1 else LINEAR_LAYOUTS[:1]:
            dims = [{"NT": (t, o, i), "NN": (t, i, o), "TN": (o, i, t)}[layout] for o in widths if o % step == 0]
            sweeps.append([_gemm(f"alignment.{name}", dtype, *sizes, layout=layout) for sizes in dims])
    return sweeps


def _random(dtype: str, *, small: bool) -> list[Sweep]:
    """Random sizes in the three layouts, widths multiples of random grains; the same ones whatever the seed.

    Half of them, those with an even hash of m, n and k, are for judging and never for fitting (see docs).
    """
    generator = random.Random(20241114)
    sweep: Sweep = []
    step = _NARROW_STEPS.get(dtype, 1)
    while len(sweep) < (60 if small else 2500):
        tokens, fan_in, fan_out = (max(32, int(2 ** generator.uniform(5, 9 if small else 14.6))) for _ in range(3))
        grain = max(step, generator.choice((1, 1, 2, 4, 8, 8, 16, 32, 64, 64, 128, 256)))
        i, o = (max(grain, size // grain * grain) for size in (fan_in, fan_out))
        layout = generator.choice(LINEAR_LAYOUTS if step == 1 else LINEAR_LAYOUTS[:1])
        m, n, k = {"NT": (tokens, o, i), "NN": (tokens, i, o), "TN": (o, i, tokens)}[layout]
        if 2.0 * m * n * k <= _MOST_RANDOM_FLOPS:
            sweep.append(_gemm("random", dtype, m, n, k, layout=layout))
    return [sweep]


def collective_cases(num_ranks: int, dtypes: Sequence[str], *, small: bool, seed: int) -> list[Case]:
    """Every collective over messages of 1 KiB to 1 GiB (a CPU: 4 MiB), in the order of measuring."""
    sizes = [2**power for power in range(10, 23 if small else 31, 2 if small else 1)]
    sweeps = [
        [
            Case(
                operation=Collective(
                    name=op_name,
                    dtype=dtype,
                    op_name=op_name,
                    axis="data",
                    message_bytes=float(size),
                    num_ranks=num_ranks,
                    ranks_per_node=num_ranks,
                )
            )
            for size in sizes
        ]
        for dtype in dtypes
        for op_name in COLLECTIVE_OPS
    ]
    return interleave(list(take_turns(walked_coarse_first(sweeps))), seed)


def _tiles(dtype: str, *, small: bool) -> list[Sweep]:
    """Fine sweeps of n and m, whose steps are those of tiles and waves."""
    if small:
        return [[_gemm("tiles.n", dtype, 144, n, 128) for n in range(16, 513, 16)],
                [_gemm("tiles.m", dtype, m, 128, 128) for m in range(8, 257, 8)]]  # fmt: skip
    sweeps = [
        [_gemm("tiles.n", dtype, m, n, k) for n in range(64, 9217, 64)]
        for m, k in ((2304, 4096), (2048, 4096), (4096, 4096), (8192, 2048))
    ]
    return [*sweeps, [_gemm("tiles.m", dtype, m, 4096, 4096) for m in range(64, 8193, 64)]]


def _attention_suite(dtype: str, *, small: bool) -> list[Sweep]:
    """Kernels of scaled_dot_product_attention over head_dim, length, shared heads; forward and backward."""
    sweeps = []
    s, h, b = (64, 256, 1) if small else (2048, 4096, 4)
    for variant in ("", "math") if small else ("flash", "cudnn", "efficient"):
        shares = (1,) if variant == "efficient" else (1, 2 if small else 4)  # that kernel knows no shared heads
        for backward in (False, True):
            name = f"attention.{variant or 'default'}{'.backward' if backward else ''}"
            heads = [(d, max(1, h // d)) for d in range(32, 257, 32 if small else 8)]
            sweeps.append([_attention(name, dtype, b=b, s=s, a=a, a_kv=a, d=d, variant=variant, backward=backward)
                           for d, a in heads])  # fmt: skip
            lengths = (32, 64, 128) if small else (512, 1024, 4096, 8192, 16384)
            sweeps.append([_attention(name, dtype, b=max(1, b * s // length), s=length, a=h // d, a_kv=h // d // share,
                                      d=d, variant=variant, backward=backward)
                           for length in lengths for d in (64, 128)
                           for share in shares])  # fmt: skip
            sweeps.append([_attention(name, dtype, b=b, s=s, a=h // 64, a_kv=h // 64, d=64, causal=False,
                                      variant=variant, backward=backward)])  # fmt: skip
    caches = (64, 256) if small else (512, 2048, 8192, 32768)
    for share in (1, 4):
        sweeps.append([_attention("attention.decode", dtype, b=8, s=cached, a=h // 64, a_kv=h // 64 // share, d=64,
                                  queries=1) for cached in caches])  # fmt: skip
    return sweeps


def _pointwise_suite(dtype: str, *, small: bool) -> list[Sweep]:
    """Achieved bandwidth by kind, rows and width."""
    rows = (16, 128, 512) if small else (64, 512, 2048, 8192, 32768)
    widths = (64, 256, 1000, 1024) if small else (768, 1024, 2048, 2560, 4096, 5120, 8192, 11008, 16384)
    kinds = ("norm", RMS_NORM, "activation", "glu", "residual", "softmax", "dropout", "bias", ADAMW)
    sweeps = [[_pointwise(kind, kind, dtype, count, width) for count in rows for width in widths] for kind in kinds]
    vocabularies = (331, 1000) if small else (32000, 50257, 50304, 128256, 151936)
    few = (16, 64) if small else (1024, 8192)
    losses = (LOSS, LOSS_BACKWARD)
    # Scores of unfused attention: as many rows as there are queries, over keys whose number may be odd.
    keys = (63, 64, 127) if small else (1000, 1023, 1024, 2047, 2048, 4096, 8192)
    queries = (64, 256) if small else (8192, 65536)
    return [
        *sweeps,
        *([_pointwise(kind, kind, dtype, count, width) for count in few for width in vocabularies] for kind in losses),
        [_pointwise("softmax.scores", "softmax", dtype, count, width) for count in queries for width in keys],
    ]


class _Suite(Protocol):
    """Sweeps of one element format."""

    def __call__(self, dtype: str, *, small: bool) -> list[Sweep]:
        """The sweeps; see make_suite."""


_SUITES: Mapping[str, _Suite] = {
    "smoke": _smoke,
    "paper": _paper,
    "alignment": _alignment,
    "tiles": _tiles,
    "attention": _attention_suite,
    "pointwise": _pointwise_suite,
    "random": _random,
    "batched": batched_suite,
    "experts": experts_suite,
    "layer": layer_suite,
    "compiled": compiled_suite,
    "model": model_suite,
    "decode": decode_suite,
    "memory": memory_suite,
}
