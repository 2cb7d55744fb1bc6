"""Outputs by command, for documentation and tests."""

from __future__ import annotations

from shapewright.app.report.outputs.calculators import BatchOutput, FlopsOutput, ParamsOutput
from shapewright.app.report.outputs.catalogue import DeviceOutput, DevicesOutput, ModelsOutput, RulesOutput
from shapewright.app.report.outputs.check import CheckOutput
from shapewright.app.report.outputs.compare import CompareOutput, SweepOutput
from shapewright.app.report.outputs.design import DesignOutput
from shapewright.app.report.outputs.loss import LossCalibrationOutput, ProxyOutput
from shapewright.app.report.outputs.measure import (
    AccuracyRow,
    AccuracyRowWithRegret,
    BenchOutput,
    CalibrateOutput,
    StoreChangesOutput,
    StoreContentsOutput,
    StoreRowsOutput,
)
from shapewright.app.report.outputs.memory import MemoryOutput
from shapewright.app.report.outputs.mfu import MfuOutput
from shapewright.app.report.outputs.plan import PlansOutput
from shapewright.app.report.outputs.predict import ExplainOutput, PredictOutput
from shapewright.app.report.outputs.search import ExplainedShapeOutput, SearchOutput
from shapewright.app.report.outputs.serving import ServePlanOutput
from shapewright.app.report.outputs.traffic import TrafficOutput
from shapewright.app.report.traced.outputs import (
    TracedCheckOutput,
    TracedMemoryOutput,
    TracedMfuOutput,
    TracedPredictOutput,
)

COMMAND_OUTPUTS: dict[str, dict[str, type]] = {
    "predict": {
        "predict": PredictOutput,
        "predict --explain": ExplainOutput,
        "predict --sweep": SweepOutput,
        "predict --inputs": TracedPredictOutput,
    },
    "check": {"check": CheckOutput, "check --inputs": TracedCheckOutput},
    "search": {"search": SearchOutput, "search --explain": ExplainedShapeOutput},
    "memory": {"memory": MemoryOutput, "memory --inputs": TracedMemoryOutput},
    "design": {"design": DesignOutput},
    "plan": {"plan": PlansOutput},
    "serve-plan": {"serve-plan": ServePlanOutput, "serve-plan --arrivals": TrafficOutput},
    "compare": {"compare": CompareOutput},
    "mfu": {"mfu": MfuOutput, "mfu --inputs": TracedMfuOutput},
    "params": {"params": ParamsOutput},
    "flops": {"flops": FlopsOutput},
    "batch": {"batch": BatchOutput},
    "devices": {"devices": DevicesOutput, "devices show": DeviceOutput},
    "models": {"models": ModelsOutput},
    "rule": {"rule": RulesOutput},
    "bench": {"bench": BenchOutput},
    "proxy": {"proxy": ProxyOutput},
    "store": {
        "store ls": StoreContentsOutput,
        "store show": StoreRowsOutput,
        "store merge": StoreChangesOutput,
        "store import": StoreChangesOutput,
    },
    "accuracy": {"accuracy": AccuracyRow, "accuracy --regret": AccuracyRowWithRegret},
    "calibrate": {"calibrate": CalibrateOutput, "calibrate --losses": LossCalibrationOutput},
}
"""Output classes by command, and by variant of the command where it has several."""
