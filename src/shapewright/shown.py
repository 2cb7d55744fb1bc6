"""Results that show themselves in a notebook, in the words of the command line.

A result knows no renderer: the one for its class is found by name when a notebook asks, so that imports keep pointing
downward.
"""

from __future__ import annotations

from importlib import import_module
from io import StringIO

# Class -> module and function that prints it on a console.
PRINTERS = {
    "Prediction": ("shapewright.report.prediction_text", "print_prediction"),
    "CheckReport": ("shapewright.report.check_text", "print_check"),
    "Capacity": ("shapewright.report.capacity", "print_capacity"),
    "PlanResult": ("shapewright.report.plan_text", "print_plan"),
    "Comparison": ("shapewright.report.compare", "print_comparison"),
    "Sweep": ("shapewright.report.sweep", "print_sweep"),
    "ServingPlan": ("shapewright.report.serving_text", "print_serving"),
    "SearchResult": ("shapewright.report.search_text", "print_search"),
    "Utilization": ("shapewright.report.utilization", "print_utilization"),
}

_NUM_COLUMNS = 120
# Notebooks of light and dark background alike: only what the words themselves ask for is coloured.
_FORM = '<pre style="white-space:pre;overflow-x:auto;line-height:1.35;font-family:ui-monospace,monospace">{code}</pre>'


class ShownInNotebook:
    """Gives a result the HTML that Jupyter shows under a cell: what the command line prints."""

    def _repr_html_(self) -> str:
        from rich.console import Console

        module, function = PRINTERS[type(self).__name__]
        printer = getattr(import_module(module), function)
        console = Console(
            file=StringIO(),
            record=True,
            width=_NUM_COLUMNS,
            force_terminal=True,
            emoji=False,
            markup=False,
            highlight=False,
        )
        printer(self, console)
        return console.export_html(inline_styles=True, code_format=_FORM)
