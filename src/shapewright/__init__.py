"""Shapewright: which transformer shape fits your hardware, what a bad one costs, and what to use instead.

>>> import shapewright
>>> prediction = shapewright.predict("gpt3-2.7b", device="a100-sxm-40gb", workload={"attention": "unfused"})
>>> 0.3 < prediction.mfu < 0.5
True
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shapewright.api import check as check
    from shapewright.api import compare as compare
    from shapewright.api import fits as fits
    from shapewright.api import mfu as mfu
    from shapewright.api import plan as plan
    from shapewright.api import predict as predict
    from shapewright.api import search as search
    from shapewright.api import serve_plan as serve_plan
    from shapewright.api import sweep as sweep
    from shapewright.config import TransformerConfig as TransformerConfig
    from shapewright.errors import ShapewrightError as ShapewrightError
    from shapewright.hardware import Device as Device
    from shapewright.hardware import with_nodes as with_nodes
    from shapewright.layout import ParallelLayout as ParallelLayout
    from shapewright.perf.calibration_file import calibrated_device as calibrated_device
    from shapewright.workload import Workload as Workload

_HOMES = {
    "Device": "shapewright.hardware",
    "ParallelLayout": "shapewright.layout",
    "ShapewrightError": "shapewright.errors",
    "TransformerConfig": "shapewright.config",
    "Workload": "shapewright.workload",
    "calibrated_device": "shapewright.perf.calibration_file",
    "check": "shapewright.api",
    "compare": "shapewright.api",
    "fits": "shapewright.api",
    "mfu": "shapewright.api",
    "plan": "shapewright.api",
    "predict": "shapewright.api",
    "search": "shapewright.api",
    "serve_plan": "shapewright.api",
    "sweep": "shapewright.api",
    "with_nodes": "shapewright.hardware",
}

__all__ = [
    "Device",
    "ParallelLayout",
    "ShapewrightError",
    "TransformerConfig",
    "Workload",
    "calibrated_device",
    "check",
    "compare",
    "fits",
    "mfu",
    "plan",
    "predict",
    "search",
    "serve_plan",
    "sweep",
    "with_nodes",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: start-up stays short."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shapewright' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


class _Package(ModuleType):
    """Keeps ``shapewright.predict`` a function: importing the module of that name would put the module in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
