"""Kernels of the regression grid: random operations of every kind, which every device prices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from regression_answers import Answer, checksum, list_columns, shorten

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import ShapewrightError
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import COLLECTIVE_OPS, Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import POINTWISE_KINDS, Pointwise
from shapewright.lowering.operations.scan import SCAN_RULES, CausalConv, Scan
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.pricing.operations import price_operations

_KERNELS_OF_A_KIND = 60
KERNEL_DEVICES = (
    "a100-sxm-80gb", "a40", "arc-pro-b60", "b200-sxm-180gb", "b300-sxm-288gb", "gaudi3", "gb200", "h100-pcie-80gb",
    "h100-sxm-80gb", "h200-sxm-141gb", "l4", "l40s", "mi210", "mi250x-gcd", "mi300x", "mi355x", "p100-pcie-16gb",
    "rtx-4090", "rtx-pro-6000", "t4", "tpu-v5p", "trainium2", "v100-sxm2-32gb",
)  # fmt: skip
_TIMES = ("time_s", "low_s", "high_s", "compute_s", "memory_s", "start_s", "roofline_s", "shared_error")

_ROWS = (1, 3, 16, 77, 200, 512, 1000, 2048, 4096, 16384)
_WIDTHS = (77, 128, 512, 1000, 1024, 1536, 2048, 4096, 4100, 8192, 11008, 50257)
_NO, _YES = (False,), (True,)
# Values of each field, of which one is drawn for each operation; a value that is there twice is drawn twice as often.
_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "gemm": {
        "m": _ROWS, "n": _WIDTHS, "k": _WIDTHS, "batch": (1, 1, 1, 8, 33), "layout": ("NT", "NN", "TN"),
        "is_training": _NO + _YES, "weight_dtype": (None, None, None, "int4", "fp8"),
    },
    "gemm in fewer bits": {
        "m": _ROWS, "n": _WIDTHS, "k": _WIDTHS, "layout": ("NT", "NN", "TN"), "is_training": _NO + _YES,
    },
    "attention of prompts": {
        "batch_size": (1, 2, 16), "query_len": (64, 512, 1000, 2048, 8192), "num_heads": (8, 12, 32, 40),
        "num_kv_heads": (1, 4, 0), "head_dim": (64, 80, 96, 128, 192, 256), "causal": _YES + _YES + _NO,
        "window_size": (0, 0, 256), "is_training": _NO + _YES, "is_backward": _NO + _YES,
        "is_deterministic": _NO + _YES, "narrow": _NO + _NO + _YES,
    },
    "attention in decode": {
        "batch_size": (1, 5, 64, 256), "query_len": (1, 1, 3), "kv_len": (100, 1024, 4096, 30000),
        "num_heads": (8, 12, 32, 40), "num_kv_heads": (1, 4, 0), "head_dim": (64, 96, 128, 256),
        "kv_cache_dtype": (None, "fp8"), "window_size": (0, 0, 512), "narrow": _NO + _NO + _YES,
    },
    "latent attention": {
        "batch_size": (1, 5, 64, 256), "query_len": (1, 1, 512), "kv_len": (512, 4096, 30000), "num_heads": (16, 128),
        "num_kv_heads": (1,), "head_dim": (576,), "v_head_dim": (512,), "values_in_keys": _YES,
        "kv_cache_dtype": (None, "fp8"),
    },
    "sparse attention": {
        "part": ("logits", "selection", "attention"), "batch_size": (1, 8, 64), "query_len": (1, 1, 1024),
        "kv_len": (2048, 16384), "num_heads": (64, 128), "head_dim": (128, 576), "v_head_dim": (128, 512),
        "selected": (512, 2048), "narrow": _NO + _YES,
    },
    "experts": {
        "tokens": (1, 8, 100, 1024, 8192), "k": (2048, 4096, 7168), "experts": (8, 60, 128, 256),
        "inner": (768, 1408, 2048, 14336), "top": (1, 2, 6, 8), "is_training": _NO + _NO + _YES,
        "leaves_poor_kernel": _NO + _YES, "narrow": _NO + _YES,
    },
    "pointwise": {
        "operation": POINTWISE_KINDS, "read_bytes": (1e3, 3e5, 1e6, 4e7, 1e9), "written_bytes": (1e2, 1e6, 1e9),
        "num_kernels": (1, 1, 3), "is_chain": _NO + _NO + _YES, "fuses_dropout": _NO + _NO + _YES,
    },
    "causal convolution": {
        "rule": ("mamba2", "gated_delta_net"), "batch_size": (1, 8), "seq_len": (1, 512, 4096),
        "channels": (2048, 8192), "width": (3, 4), "has_cache": _NO + _YES, "is_backward": _NO + _YES,
    },
    "scan": {
        "rule": tuple(SCAN_RULES), "batch_size": (1, 8, 64), "seq_len": (1, 512, 4096), "num_k_heads": (1, 8, 16),
        "num_v_heads": (32, 64), "k_head_dim": (64, 128), "v_head_dim": (64, 128), "has_cache": _NO + _YES,
        "is_backward": _NO + _YES,
    },
    "collective": {
        "op_name": COLLECTIVE_OPS, "axis": ("tensor", "data", "expert", "pipeline", "context"),
        "message_bytes": (1e2, 1e4, 1e5, 1e6, 3e7, 1e9), "num_ranks": (2, 3, 4, 8, 16, 64, 512),
        "ranks_per_node": (1, 4, 8), "is_served": _NO + _NO + _YES, "crossing_fraction": (1.0, 1.0, 0.5),
    },
}  # fmt: skip
_KINDS: dict[str, type[Operation]] = {
    "gemm": Gemm, "gemm in fewer bits": Gemm, "experts": GroupedGemm, "pointwise": Pointwise, "collective": Collective,
    "causal convolution": CausalConv, "scan": Scan, "sparse attention": SparseAttention,
}  # fmt: skip


def answer_kernels(name: str) -> dict[str, Answer]:
    """Price random operations of every kind on a device."""
    device = load_device(name)
    answers: dict[str, Answer] = {}
    for kind in _FIELDS:
        rows: list[Answer] = []
        refused: list[str] = []
        for operation in _draw_operations(kind, device):
            try:
                (price,) = price_operations([operation], device)
            except ShapewrightError as error:
                refused.append(shorten(error))
                continue
            row: Answer = {each: float(getattr(price, each)) for each in _TIMES}
            rows.append(row | {"bound_by": price.bound_by})
        told = {"refused": f"{len(refused)} {checksum(' '.join(refused))}"} if refused else {}
        answers[f"{name}: {kind}"] = dict(list_columns(rows)) | told
    return answers


def _draw_operations(kind: str, device: Device) -> Iterator[Operation]:
    random = Random(kind)
    formats = sorted(device.dense_flops_per_s, key=lambda name: (-get_dtype(name).bits, name))
    for _ in range(_KERNELS_OF_A_KIND):
        drawn = {field: values[int(random.random() * len(values))] for field, values in _FIELDS[kind].items()}
        is_narrow = drawn.pop("narrow", kind == "gemm in fewer bits")
        known = [name for name in formats if (get_dtype(name).bits < 16) == is_narrow] or [
            "fp8" if is_narrow else "bf16"
        ]
        dtype = known[int(random.random() * len(known))]
        yield _KINDS.get(kind, Attention)(name="x", dtype=dtype, **_complete(kind, drawn, device))


def _complete(kind: str, drawn: dict[str, Any], device: Device) -> Mapping[str, Any]:
    """Add the fields of an operation that follow from others."""
    if kind == "experts":
        top = drawn.pop("top")
        return drawn | {"m": drawn["tokens"] * top, "n": 2 * drawn["inner"], "groups": drawn["experts"]}
    if kind == "collective":
        return drawn | {"ranks_per_node": min(drawn["num_ranks"], device.node_size, drawn["ranks_per_node"])}
    if "num_kv_heads" in drawn:
        drawn["num_kv_heads"] = drawn["num_kv_heads"] or drawn["num_heads"]
        drawn["is_backward"] = drawn.get("is_backward", False) and drawn["is_training"]
        return {"v_head_dim": drawn["head_dim"], "kv_len": drawn["query_len"]} | drawn
    return drawn
