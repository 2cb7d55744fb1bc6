"""HTML display of results in notebooks: the same text as on the command line.

The printers live in ``shapewright.app``, which core must not import. They are therefore looked up by name when a
notebook displays a result.
"""

from __future__ import annotations

from importlib import import_module
from io import StringIO

# Class name -> module and function that print it on a console.
PRINTERS = {
    "Prediction": ("shapewright.app.report.predict", "print_prediction"),
    "CheckReport": ("shapewright.app.report.check", "print_check"),
    "Capacity": ("shapewright.app.report.memory", "print_capacity"),
    "PlanResult": ("shapewright.app.report.optimize.plan", "print_plan"),
    "Comparison": ("shapewright.app.report.compare", "print_comparison"),
    "Sweep": ("shapewright.app.report.predict", "print_sweep"),
    "ServingPlan": ("shapewright.app.report.optimize.serving", "print_serving"),
    "SearchResult": ("shapewright.app.report.optimize.search_text", "print_search"),
    "Utilization": ("shapewright.app.report.mfu", "print_utilization"),
}

_NUM_COLUMNS = 120
# Sets no colours of its own, so that it is readable on light and dark backgrounds.
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.35;font-family:ui-monospace,monospace">{code}</pre>'


class NotebookDisplay:
    """Mixin: Jupyter displays the result as the command line prints it."""

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
        return console.export_html(inline_styles=True, code_format=_HTML)
