"""HTML display of results in notebooks: the same text as on the command line.

The printers live in ``shapewright.app``, which core must not import. They are therefore looked up by name when a
notebook displays a result.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from io import StringIO
from typing import Any

# Class name -> module and function under shapewright.app.report that print it on a console, and those that first make
# an output of it.
PRINTERS: dict[str, tuple[str, ...]] = {
    "Prediction": ("predict:print_prediction",),
    "CheckReport": ("check:print_check",),
    "Capacity": ("memory:print_memory_report", "outputs.memory:memory_output"),
    "PlanResult": (
        "optimize.plan:print_plan",
        "outputs.plan:plans_output",
    ),
    "DesignResult": ("optimize.design:print_design", "outputs.plan:design_output"),
    "Comparison": (
        "compare:print_comparison",
        "outputs.compare:compare_output",
    ),
    "Sweep": ("predict:print_sweep", "outputs.predict:sweep_output"),
    "ServingPlan": (
        "optimize.serving:print_serving",
        "outputs.serving:serve_plan_output",
    ),
    "TrafficPlan": (
        "optimize.traffic:print_traffic",
        "outputs.traffic:traffic_output",
    ),
    "SearchResult": ("optimize.search_text:print_search",),
    "Trace": ("traced.text:print_trace",),
    "TracedPrediction": ("traced.text:print_traced_prediction",),
    "TracedCheck": ("traced.text:print_traced_check",),
    "Utilization": ("mfu:print_utilization", "outputs.mfu:mfu_output"),
}

_NUM_COLUMNS = 120
# Sets no colours of its own, so that it is readable on light and dark backgrounds.
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.35;font-family:ui-monospace,monospace">{code}</pre>'


def _load(name: str) -> Callable[..., Any]:
    """Import a function of shapewright.app.report by ``module:function``."""
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(f"shapewright.app.report.{module}"), function)
    return loaded


class NotebookDisplay:
    """Mixin: Jupyter displays the result as the command line prints it."""

    def _repr_html_(self) -> str:
        from rich.console import Console

        printer, *makers = map(_load, PRINTERS[type(self).__name__])
        console = Console(
            file=StringIO(),
            record=True,
            width=_NUM_COLUMNS,
            force_terminal=True,
            emoji=False,
            markup=False,
            highlight=False,
        )
        printer(makers[0](self) if makers else self, console)
        return console.export_html(inline_styles=True, code_format=_HTML)
