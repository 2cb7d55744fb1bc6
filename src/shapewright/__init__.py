"""Shapewright: which transformer shape fits your hardware, what a bad one costs, and what to use instead.

>>> import shapewright
>>> prediction = shapewright.predict("gpt3-2.7b", device="a100-sxm-40gb", workload={"attention": "unfused"})
>>> 0.3 < prediction.mfu < 0.5
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shapewright.app.api.designs import design as design
    from shapewright.app.api.searches import plan as plan
    from shapewright.app.api.searches import search as search
    from shapewright.app.api.serving import serve_plan as serve_plan
    from shapewright.app.api.steps import check as check
    from shapewright.app.api.steps import compare as compare
    from shapewright.app.api.steps import fits as fits
    from shapewright.app.api.steps import mfu as mfu
    from shapewright.app.api.steps import predict as predict
    from shapewright.app.api.steps import sweep as sweep
    from shapewright.app.api.steps import trace as trace
    from shapewright.app.api.traffic import serve_traffic as serve_traffic
    from shapewright.app.formats.registry import read_job
    from shapewright.app.integrations.lightning_callback import LightningCallback as LightningCallback
    from shapewright.app.integrations.measured_steps import explain_step as explain_step
    from shapewright.app.integrations.transformers_callback import TransformersCallback as TransformersCallback
    from shapewright.core.errors import ShapewrightError as ShapewrightError
    from shapewright.hardware.device import Device
    from shapewright.hardware.nodes import with_nodes
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.build import build_scenario as build_scenario
    from shapewright.prediction.loss.law import using_loss_law as using_loss_law
    from shapewright.prediction.scenario import Scenario as Scenario
    from shapewright.pricing.calibration.file import calibrated_device as calibrated_device
    from shapewright.workload.layout import ParallelLayout as ParallelLayout
    from shapewright.workload.workload import Workload as Workload

_HOMES = {
    "Device": "shapewright.hardware.device",
    "LightningCallback": "shapewright.app.integrations.lightning_callback",
    "ParallelLayout": "shapewright.workload.layout",
    "Scenario": "shapewright.prediction.scenario",
    "ShapewrightError": "shapewright.core.errors",
    "TransformerConfig": "shapewright.models.transformer",
    "TransformersCallback": "shapewright.app.integrations.transformers_callback",
    "Workload": "shapewright.workload.workload",
    "build_scenario": "shapewright.prediction.build",
    "calibrated_device": "shapewright.pricing.calibration.file",
    "check": "shapewright.app.api.steps",
    "compare": "shapewright.app.api.steps",
    "design": "shapewright.app.api.designs",
    "explain_step": "shapewright.app.integrations.measured_steps",
    "fits": "shapewright.app.api.steps",
    "mfu": "shapewright.app.api.steps",
    "plan": "shapewright.app.api.searches",
    "predict": "shapewright.app.api.steps",
    "read_job": "shapewright.app.formats.registry",
    "search": "shapewright.app.api.searches",
    "serve_plan": "shapewright.app.api.serving",
    "serve_traffic": "shapewright.app.api.traffic",
    "sweep": "shapewright.app.api.steps",
    "trace": "shapewright.app.api.steps",
    "using_loss_law": "shapewright.prediction.loss.law",
    "with_nodes": "shapewright.hardware.nodes",
}

__all__ = [
    "Device",
    "ParallelLayout",
    "Scenario",
    "ShapewrightError",
    "TransformerConfig",
    "Workload",
    "build_scenario",
    "calibrated_device",
    "check",
    "compare",
    "design",
    "explain_step",
    "fits",
    "mfu",
    "plan",
    "predict",
    "read_job",
    "search",
    "serve_plan",
    "serve_traffic",
    "sweep",
    "trace",
    "using_loss_law",
    "with_nodes",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: start-up stays short."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shapewright' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List public names, also those that are not imported yet, and none of the imports of this file."""
    return sorted({*(name for name in globals() if name.startswith("__")), *_HOMES})
