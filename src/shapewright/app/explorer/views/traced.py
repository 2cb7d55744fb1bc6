"""Answer on a traced module: its step, findings and memory on one device, as the commands print them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.app.explorer.views.answers import Answer, columns_to_json
from shapewright.app.explorer.views.outputs import figure
from shapewright.app.report.check import finding_words
from shapewright.app.report.outputs.model import plain
from shapewright.app.report.predict import operation_columns
from shapewright.app.report.traced.outputs import traced_check_output
from shapewright.app.report.traced.report import (
    component_facts,
    describe_trace,
    memory_columns,
    prediction_facts,
    timeline_chart,
)
from shapewright.lint.traced import check_trace

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.lowering.torch_trace.trace import Trace


class TracedModule(NamedTuple):
    """A traced module, and the optimizer of its training step; None for the default."""

    trace: Trace
    optimizer: str | None = None


def answer_trace(trace: Trace, device: Device, optimizer: str | None) -> Answer:
    """JSON output of ``check`` for a trace, with ``predict`` under ``step`` and ``memory`` under ``by_module``."""
    output = traced_check_output(check_trace(trace, device, optimizer=optimizer))
    return {
        **output.to_json(),
        "step": output.step.to_json(),
        "by_module": output.memory.to_json(),
        "text": {
            "title": describe_trace(output),
            "verdict": prediction_facts(output.step),
            "findings": [finding_words(finding) for finding in output.findings],
            "operations": columns_to_json(operation_columns(output.step)),
            "components": component_facts(output.memory),
            "modules": columns_to_json(memory_columns(output.memory)),
        },
        "figure": plain(figure(timeline_chart(output.memory))),
    }
