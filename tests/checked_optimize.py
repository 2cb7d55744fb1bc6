"""Search shapes and plan jobs with jaxtyping's annotations of search and plan checked at every call.

    python tests/checked_optimize.py [--wrong-shape]

As in checked_pricing.py, TYPE_CHECKING is true while the packages are imported, so that their annotations exist. Their
dependencies are imported before, unchecked. Prints the number of shapes and plans. With --wrong-shape a
function gets arrays of different lengths, which must fail.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import typing

import numpy as np
from jaxtyping import install_import_hook

from checked_pricing import check

__all__ = ["check"]  # the import hook looks it up here
CHECKED = ("shapewright.optimize.search", "shapewright.optimize.plan")
_PACKAGES = ("core", "hardware", "models", "workload", "memory", "lowering", "pricing", "prediction")


def import_checked() -> None:
    """Import every module of the checked packages with their annotations enforced."""
    for name in _PACKAGES:
        package = importlib.import_module(f"shapewright.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"shapewright.{name}."):
            importlib.import_module(module.name)
    sys.modules["checked_optimize"] = sys.modules[__name__]
    typing.TYPE_CHECKING = True
    try:
        with install_import_hook(list(CHECKED), "checked_optimize.check"):
            for name in CHECKED:
                package = importlib.import_module(name)
                for module in pkgutil.walk_packages(package.__path__, f"{name}."):
                    importlib.import_module(module.name)
    finally:
        typing.TYPE_CHECKING = False


def search_and_plan() -> int:
    """Search shapes in training and decode, and plan dense, expert and encoder-decoder models; return their number."""
    import shapewright

    count = 0
    layout = {"tensor_parallel": 2, "pipeline_parallel": 2}
    for model, given in (
        ("gpt2", {}),
        ("llama-3.2-1b", {"layout": layout}),
        ("mixtral-8x7b", {"workload": {"phase": "decode", "context_len": 1000}, "vary": ("ffn", "heads")}),
    ):
        count += shapewright.search(model, device="h100-sxm-80gb", **given).tally.num_shapes
    for model, given in (
        ("gpt2", {}),
        ("mixtral-8x7b", {"try_offload": True}),
        ("t5-base", {"optimizer": "muon"}),
    ):
        found = shapewright.plan(model, device="h100-sxm-80gb", num_devices=16, global_batch_size=32, **given)
        count += found.tally.num_plans
    return count


def pass_wrong_shape() -> None:
    """Add times of two shardings to three."""
    from shapewright.optimize.plan.layers import COLUMNS, add_to_step

    add_to_step(np.zeros((3, len(COLUMNS))), np.zeros(2))


if __name__ == "__main__":
    import_checked()
    if "--wrong-shape" in sys.argv:
        pass_wrong_shape()
    print(search_and_plan())
