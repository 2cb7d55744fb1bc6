"""Suites of products that are many in one call: those of attention, and those of experts.

Legend: b products of a batch, s tokens of a sequence, d head width, h hidden size, f inner width; m, n, k are BLAS.
"""

from __future__ import annotations

from shapewright.bench.gemm import GROUPED
from shapewright.operations import Gemm, GroupedGemm
from shapewright.store.record import Case

# Head widths: multiples of 8, 16, 32 and 64, and what lies between.
_HEAD_DIMS = (
    32, 40, 48, 56, 60, 63, 64, 65, 66, 68, 72, 80, 88, 96, 100, 104, 108, 112, 120, 124, 128, 129, 130, 132, 136, 144,
    160, 176, 192, 208, 224, 240, 256,
)  # fmt: skip
# Lengths of sequences around 1024 and 2048: rows of the scores are as long, and a kernel reads them along.
_LENGTHS = (1000, 1008, 1016, 1020, 1023, 1024, 1025, 1026, 1028, 1032, 1040, 1088, 2046, 2047, 2048, 2049, 2056)
# Hidden size, inner width and experts on one device: Mixtral 8x7B, Qwen3 30B-A3B, DeepSeek-V2 Lite, and one that no
# multiple of 64 divides.
_EXPERTS = ((4096, 14336, 8), (2048, 768, 128), (2048, 1408, 64), (2880, 1368, 32))
_EXPERT_ROWS = (512, 2048, 8192, 32768)


def batched_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Products of unfused attention: scores Q K^T, values P V, and the gradients dV = P^T dO and dK = dS^T Q."""
    groups = ((4, 64), (8, 32)) if small else ((128, 2048), (32, 2048), (128, 1024), (512, 512))
    widths = (16, 20, 24, 31, 32) if small else _HEAD_DIMS
    usual_widths = (16, 32) if small else (64, 128)
    lengths = (60, 63, 64, 65) if small else _LENGTHS
    sweeps = [[case for d in widths for case in _attention_products(dtype, b, s, d)] for b, s in groups]
    b = groups[0][0]
    sweeps += [[case for s in lengths for case in _attention_products(dtype, b, s, d)] for d in usual_widths]
    return sweeps


def _attention_products(dtype: str, b: int, s: int, d: int) -> list[Case]:
    sizes = {"score": (s, s, d, "NT"), "value": (s, d, s, "NN"), "gradient": (s, d, s, "TN")}
    return [
        Case(operation=Gemm(name=f"batched.{name}", dtype=dtype, m=m, n=n, k=k, batch=b, layout=layout))
        for name, (m, n, k, layout) in sizes.items()
    ]


def experts_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Products of expert layers, rows spread evenly: one call each, and torch's kernel for all of them."""
    shapes, rows = (((32, 48, 4), (64, 24, 2)), (16, 64)) if small else (_EXPERTS, _EXPERT_ROWS)
    # Torch has the kernel in bf16 alone.
    variants = ("", GROUPED) if dtype == "bf16" else ("",)
    return [
        [
            Case(
                operation=GroupedGemm(
                    name=f"experts.{name}", dtype=dtype, m=m, n=n, k=k, groups=groups, layout=layout, is_training=True
                ),
                variant=variant,
            )
            for t in rows
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
