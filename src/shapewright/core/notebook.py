"""Display and conversion of results: short repr, HTML in notebooks, dicts and DataFrames.

The printers live in ``shapewright.app``, which core must not import. They are therefore looked up by name when a
notebook displays a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from io import StringIO
from typing import Any

# Class name -> module and function under shapewright.app.report that print its output on a console, those that make
# the output, and the key of its rows; a trace has no output and is printed itself.
PRINTERS: dict[str, tuple[str, str, str]] = {
    "Prediction": ("predict:print_prediction", "outputs.predict:prediction_output", "operations"),
    "CheckReport": ("check:print_check", "outputs.check:report_output", "findings"),
    "Capacity": ("memory:print_memory_report", "outputs.memory:memory_output", "stages"),
    "PlanResult": ("optimize.plan:print_plan", "outputs.plan:plans_output", "plans"),
    "DesignResult": ("optimize.design:print_design", "outputs.design:design_output", "designs"),
    "Comparison": ("compare:print_comparison", "outputs.compare:compare_output", "devices"),
    "Sweep": ("predict:print_sweep", "outputs.compare:sweep_output", "rows"),
    "ServingPlan": ("optimize.serving:print_serving", "outputs.serving:serve_plan_output", "front"),
    "TrafficPlan": ("optimize.traffic:print_traffic", "outputs.traffic:traffic_output", "runs"),
    "SearchResult": ("optimize.search:print_search", "outputs.search:search_output", "candidates"),
    "Trace": ("traced.report:print_trace", "", ""),
    "TracedPrediction": ("traced.report:print_traced_prediction", "traced.outputs:traced_predict_output", "operations"),
    "TracedCheck": ("traced.report:print_traced_check", "traced.outputs:traced_check_output", "findings"),
    "Utilization": ("mfu:print_utilization", "outputs.mfu:mfu_output", "conventions"),
}

_LONGEST_VALUE = 80  # characters of a value in a repr
_NUM_COLUMNS = 120
# Sets no colours of its own, so that it is readable on light and dark backgrounds.
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.35;font-family:ui-monospace,monospace">{code}</pre>'


def _load(name: str) -> Callable[..., Any]:
    """Import a function of shapewright.app.report by ``module:function``."""
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(f"shapewright.app.report.{module}"), function)
    return loaded


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | tuple | list | dict) and not value)


def _short(value: Any) -> str:
    """A value in a few characters."""
    if isinstance(value, tuple | list | Mapping):
        return f"<{len(value)}>"
    if is_dataclass(value):
        name = getattr(value, "name", "") or getattr(value, "title", "")
        return str(name) if name else f"<{type(value).__name__}>"
    text = f"{value:.4g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


class NotebookDisplay:
    """Mixin: a short repr, the display of the command line in Jupyter, and conversion to a dict or a DataFrame."""

    def __repr__(self) -> str:
        """Show numbers and texts in full, models and devices by name, rows by their number."""
        values = ((spec.name, getattr(self, spec.name)) for spec in fields(self) if spec.repr)  # type: ignore[arg-type]
        shown = [f"{name}={_short(value)}" for name, value in values if not _is_empty(value)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values: the object that ``--json`` prints; a Trace has none."""
        values: dict[str, Any] = _load(PRINTERS[type(self).__name__][1])(self).to_json()
        return values

    def to_frame(self) -> Any:
        """Convert the rows (operations, findings, plans, shapes, ...) to a pandas DataFrame; needs pandas.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            from shapewright.core.errors import MissingExtraError

            raise MissingExtraError("to_frame needs pandas, which is not installed; pip install pandas") from None
        rows = self.to_dict()[PRINTERS[type(self).__name__][2]]
        if isinstance(rows, dict):  # by name, one row or several
            named = ((name, row if isinstance(row, list) else [row]) for name, row in rows.items())
            rows = [{"group": name, **row} for name, listed in named for row in listed]
        return pd.json_normalize(rows)

    def _repr_html_(self) -> str:
        from rich.console import Console

        printer, maker, _ = PRINTERS[type(self).__name__]
        console = Console(
            file=StringIO(),
            record=True,
            width=_NUM_COLUMNS,
            force_terminal=True,
            emoji=False,
            markup=False,
            highlight=False,
        )
        _load(printer)(_load(maker)(self) if maker else self, console)
        return console.export_html(inline_styles=True, code_format=_HTML)
