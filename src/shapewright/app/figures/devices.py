"""Charts of a job compared across devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shapewright.app.figures.chart import BarChart, BarPart
from shapewright.core.units import format_amount

if TYPE_CHECKING:
    from shapewright.app.report.outputs.compare import ComparedDeviceOutput, CompareOutput

_MILLISECOND_S = 1e-3


def comparison_chart(output: CompareOutput) -> BarChart:
    """Step time on each device, split by the bound of its operations."""
    rows = [row for row in output.devices if row.step_time_s is not None]
    bounds = [
        name for name in (rows[0].bound_fractions if rows else {}) if any(row.bound_fractions[name] for row in rows)
    ]
    fitting = [row for row in rows if row.fits]
    fastest = max(fitting or rows, key=lambda row: row.tokens_per_s or 0.0, default=None)
    return BarChart(
        title="The same job on each device",
        value_label="step (ms)",
        categories=[_label(row) for row in rows],
        parts=[
            BarPart(name, [row.bound_fractions[name] * (row.step_time_s or 0.0) / _MILLISECOND_S for row in rows])
            for name in bounds
        ],
        alt=f"{fastest.name} is fastest{' of those it fits on' if fitting else ''}."
        if fastest is not None
        else "No device runs the job.",
    )


def _label(row: ComparedDeviceOutput) -> str:
    return row.name + ("" if row.fits else " (does not fit)")


def worth_charts(output: CompareOutput) -> list[BarChart]:
    """Tokens per dollar and per joule, each if known for at least two devices."""
    charts = []
    for title, values in (
        ("Tokens for a dollar", [row.tokens_per_usd for row in output.devices]),
        ("Tokens for a joule, at board power", [row.tokens_per_joule for row in output.devices]),
    ):
        known = [(row, value) for row, value in zip(output.devices, values, strict=True) if value is not None]
        if len(known) < 2:
            continue
        best = max((pair for pair in known if pair[0].fits), key=lambda pair: pair[1], default=None)
        charts.append(
            BarChart(
                title=title,
                value_label="tokens",
                categories=[_label(row) for row, _ in known],
                parts=[_tokens_part(title.lower(), [value for _, value in known])],
                texts_inside=False,
                alt=f"{best[0].name} has most of those it fits on." if best is not None else "It fits on none.",
            )
        )
    return charts


def _tokens_part(name: str, values: Sequence[float | None], color: str | None = None) -> BarPart:
    """Bars with their values beside them; none where there is no value."""
    texts = ["" if value is None else format_amount(value) for value in values]
    return BarPart(name, [value or 0.0 for value in values], color=color, texts=texts)


def throughput_chart(output: CompareOutput) -> BarChart:
    """Tokens per second of the whole job on each device that runs it."""
    rows = [row for row in output.devices if row.runs]
    return BarChart(
        title="Devices",
        value_label="tokens/s of the whole job",
        categories=[row.name for row in rows],
        parts=[
            _tokens_part("fits", [row.tokens_per_s if row.fits else None for row in rows], "#0072b2"),
            _tokens_part("does not fit", [None if row.fits else row.tokens_per_s for row in rows], "#cc79a7"),
        ],
        texts_inside=False,
        alt="Tokens per second of the same job on each device.",
    )
