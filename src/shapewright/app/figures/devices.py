"""Charts of a job compared across devices."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from shapewright.app.figures.chart import BarChart, BarPart

if TYPE_CHECKING:
    from shapewright.prediction.compare import Comparison

_MILLISECOND_S = 1e-3


def comparison_chart(found: Comparison) -> BarChart:
    """Step time on each device, split by the bound of its operations."""
    rows = [row for row in found.rows if row.prediction is not None]
    bounds = [
        name for name in (rows[0].bound_fractions if rows else {}) if any(row.bound_fractions[name] for row in rows)
    ]
    fitting = [row for row in rows if row.fits]
    fastest = max(fitting or rows, key=lambda row: row.tokens_per_s or 0.0, default=None)
    return BarChart(
        title="The same job on each device",
        value_label="step (ms)",
        categories=[row.device.name + ("" if row.fits else " (does not fit)") for row in rows],
        parts=[
            BarPart(
                name,
                [
                    row.bound_fractions[name] * row.prediction.step_time_s / _MILLISECOND_S if row.prediction else 0.0
                    for row in rows
                ],
            )
            for name in bounds
        ],
        alt=f"{fastest.device.name} is fastest{' of those it fits on' if fitting else ''}."
        if fastest is not None
        else "No device runs the job.",
    )


def worth_charts(found: Comparison) -> list[BarChart]:
    """Tokens per dollar and per joule, each if known for at least two devices."""
    charts = []
    for title, value_of in (
        ("Tokens for a dollar", attrgetter("tokens_per_usd")),
        ("Tokens for a joule, at board power", attrgetter("tokens_per_joule")),
    ):
        known = [(row, float(value_of(row))) for row in found.rows if value_of(row) is not None]
        if len(known) < 2:
            continue
        best = max((pair for pair in known if pair[0].fits), key=lambda pair: pair[1], default=None)
        charts.append(
            BarChart(
                title=title,
                value_label="tokens",
                categories=[row.device.name + ("" if row.fits else " (does not fit)") for row, _ in known],
                parts=[BarPart(title.lower(), [value for _, value in known])],
                alt=f"{best[0].device.name} has most of those it fits on." if best is not None else "It fits on none.",
            )
        )
    return charts


def throughput_chart(found: Comparison) -> BarChart:
    """Tokens per second of the whole job on each device that runs it."""
    rows = [row for row in found.rows if row.prediction is not None]
    return BarChart(
        title="Devices",
        value_label="tokens/s of the whole job",
        categories=[row.device.name for row in rows],
        parts=[
            BarPart("fits", [(row.tokens_per_s or 0.0) if row.fits else 0.0 for row in rows], color="#0072b2"),
            BarPart("does not fit", [0.0 if row.fits else row.tokens_per_s or 0.0 for row in rows], color="#cc79a7"),
        ],
        alt="Tokens per second of the same job on each device.",
    )
