"""Price operations of every kind with jaxtyping's annotations of shapewright.pricing checked at every call.

    python tests/checked_pricing.py [--wrong-shape]

The package imports its annotations under TYPE_CHECKING only, so that users need not install jaxtyping. Here
TYPE_CHECKING is true while the package is imported, and jaxtyping's import hook lets beartype check every function.
Prints the number of operations priced. With --wrong-shape a function gets arrays of different lengths, which must fail.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CHECKED = "shapewright.pricing"
# Needs Numba, which compiles plain functions only.
_COMPILED = "shapewright.pricing.gemm.compiled"
_DEVICES = ("h100-sxm-80gb", "a100-sxm-40gb", "v100-sxm2-16gb", "mi300x", "rtx-5090", "l4", "gaudi2", "b300")


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check a function's annotations; an int is accepted where a float is annotated."""
    return beartype(function, conf=BeartypeConf(is_pep484_tower=True))


def import_checked() -> None:
    """Import every module of the checked package with its annotations enforced."""
    importlib.import_module("shapewright")  # what it imports for type checkers alone needs packages of the extras
    typeshed = types.ModuleType("_typeshed")  # exists for type checkers only
    typeshed.DataclassInstance = object  # type: ignore[attr-defined]
    sys.modules["_typeshed"] = typeshed
    sys.modules["checked_pricing"] = sys.modules[__name__]
    typing.TYPE_CHECKING = True
    try:
        with install_import_hook(CHECKED, "checked_pricing.check"):
            package = importlib.import_module(CHECKED)
            for module in pkgutil.walk_packages(package.__path__, f"{CHECKED}."):
                if module.name != _COMPILED:
                    importlib.import_module(module.name)
    finally:
        typing.TYPE_CHECKING = False


def price_all() -> int:
    """Price whole steps on several devices, and arrays of each kind of operation; return how many there were."""
    import shapewright
    from shapewright.hardware.loader import load_device
    from shapewright.lowering.operations.attention import Attention
    from shapewright.lowering.operations.collective import Collective
    from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
    from shapewright.lowering.operations.pointwise import Pointwise
    from shapewright.pricing.attention.price import price_attention
    from shapewright.pricing.calibration.records import load_record
    from shapewright.pricing.collectives import price_collective
    from shapewright.pricing.experts.price import price_grouped_gemm
    from shapewright.pricing.gemm.price import estimate_gemm_s, price_gemm
    from shapewright.pricing.pointwise import price_pointwise

    steps = [
        ("gpt2", {"phase": "train"}, {}),
        ("llama-3-8b", {"phase": "decode", "micro_batch_size": 16, "context_len": 3000}, {"tensor_parallel": 2}),
        ("mixtral-8x7b", {"phase": "prefill", "seq_len": 1024}, {"data_parallel": 2, "expert_parallel": 2}),
    ]
    count = 0
    for name in _DEVICES:
        device = load_device(name)
        usable = [step for step in steps if device.node_size > 1 or not step[2]]
        for model, workload, layout in usable:
            for each in (device, device.without_calibration):
                found = shapewright.predict(model, device=each, workload=workload, layout=layout)
                count += len(found.operations)
    device, sizes = load_device("h100-sxm-80gb"), np.array([[64.0, 512.0, 4097.0], [128.0, 1000.0, 16.0]])
    gemm = Gemm(name="x", m=sizes, n=1024, k=2048, batch=np.array([1.0, 4.0, 1.0]))
    price_gemm(gemm, device, load_record("gemm", device), hot_cache=True, library="cublas")
    estimate_gemm_s(gemm, device.without_calibration, load_record("gemm", device.without_calibration))
    experts = GroupedGemm(name="x", m=sizes, n=1024, k=2048, groups=8)
    price_grouped_gemm(experts, device, load_record("moe", device))
    call = Attention(
        name="x",
        batch_size=sizes,
        query_len=128,
        kv_len=2048,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        v_head_dim=128,
    )
    price_attention(call, device, load_record("attention", device))
    pointwise = Pointwise(name="x", operation="norm", read_bytes=sizes, written_bytes=sizes)
    price_pointwise(pointwise, device, load_record("pointwise", device))
    collective = Collective(
        name="x", op_name="all_reduce", axis="tensor", message_bytes=sizes, num_ranks=16, ranks_per_node=8
    )
    price_collective(collective, device, load_record("collectives", device))
    return count + 6


def pass_wrong_shape() -> None:
    """Pass two sizes of m and three of n where one number of GEMMs is annotated."""
    from shapewright.pricing.gemm.slow_cases import SlowCases, is_idle_case

    is_idle_case(np.ones(2), np.ones(3), np.ones(3), 132.0, SlowCases())


if __name__ == "__main__":
    import_checked()
    if "--wrong-shape" in sys.argv:
        pass_wrong_shape()
    print(price_all())
