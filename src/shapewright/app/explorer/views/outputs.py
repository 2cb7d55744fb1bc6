"""Outputs of the explorer's own views, which no command has.

Tiles, one field swept, heads and widths, one step; what the forms offer, one preset, rules, a search that is running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shapewright.app.figures.chart import Chart
from shapewright.app.figures.echarts import chart_option
from shapewright.app.figures.tiles import TileGrid
from shapewright.app.report.outputs.model import Output, described, optional
from shapewright.core.records import dataclass


@dataclass(frozen=True, kw_only=True)
class FigureOutput:
    """A chart as the page draws it."""

    title: str = described("heading")
    alt: str = described("description for readers who do not see it")
    option: Mapping[str, Any] = described("option of Apache ECharts")
    texts: Mapping[str, Sequence[str]] = described("tooltip of each point, by series")
    rows: list[list[str]] | None = optional("the figure as a table")
    words: str | None = optional("line under the figure")


def figure(chart: Chart, texts: Mapping[str, Sequence[str]] | None = None, **more: Any) -> FigureOutput:
    """A chart as the page draws it.

    Args:
        texts: Tooltip of each point, by series.
        more: ``rows`` or ``words``.
    """
    return FigureOutput(title=chart.title, alt=chart.alt, option=chart_option(chart), texts=texts or {}, **more)


@dataclass(frozen=True, kw_only=True)
class FigureProblem:
    """Why a figure cannot be drawn."""

    problem: str = described("the reason")


@dataclass(frozen=True, kw_only=True)
class AboutOutput(Output):
    """What the forms of the page offer."""

    name: str = described("name of the package")
    version: str = described("version of the package")
    fields: Mapping[str, Sequence[Mapping[str, Any]]] = described("fields of model, workload and layout")
    optimizers: Sequence[str] = described("names of optimizers")
    vary: Sequence[str] = described("fields that a search can vary")
    vary_default: Sequence[str] = described("those that it varies if none are named")
    swept: Sequence[str] = described("fields that the first figure can sweep")
    software: Sequence[Mapping[str, str]] = described("name and title of software generations")
    models: Sequence[Mapping[str, str]] = described("name, title, family and size of presets")
    rules: Sequence[Mapping[str, str]] = described("code, name and summary of rules")


@dataclass(frozen=True, kw_only=True)
class PresetPage(Output):
    """One preset with its config.json object."""

    name: str = described("name of the preset")
    title: str = described("name in reports")
    source: str = described("where the preset was taken from")
    notes: str = described("remarks on the preset")
    config: Mapping[str, Any] = described("config.json object")


@dataclass(frozen=True, kw_only=True)
class RulePages(Output):
    """All rules with their pages."""

    rules: Sequence[Mapping[str, str]] = described("code, name, summary and page of each rule")


@dataclass(frozen=True, kw_only=True)
class ConfigOutput(Output):
    """A model as a config.json object."""

    config: Mapping[str, Any] = described("the object, in the format of the input")


@dataclass(frozen=True, kw_only=True)
class SearchRunOutput(Output):
    """State, progress and result of a search or design."""

    id: str = described("identifier")
    state: str = described("waiting, running, done, failed or cancelled")
    done: int = described("shapes evaluated")
    num_shapes: int = described("shapes to evaluate; 0 until known")
    progress_fraction: float = described("share of the shapes that are evaluated")
    result: Mapping[str, Any] | None = described("output of the command; the best so far for a cancelled search")
    error: str = described("reason of a failure")
    error_kind: str = described("name of the error class")


@dataclass(frozen=True, kw_only=True)
class TilesOutput(Output):
    """Tiles and waves of one GEMM."""

    grid: TileGrid = described("sizes of the grid of tiles", is_flat=True)
    name: str = described("name of the GEMM")
    pass_name: str = described("pass of the GEMM", key="pass")
    text: dict[str, str] = described("the same as texts by name")


@dataclass(frozen=True, kw_only=True)
class BreakdownOutput(Output):
    """Figures of one step."""

    layer: FigureOutput | FigureProblem = described("time of all layers by pass")
    roofline: FigureOutput | FigureProblem = described("operations on the roofline")
    waterfall: FigureOutput | FigureProblem = described("from the dense peak to the step")
    pipeline: FigureOutput | FigureProblem = described("passes of the pipeline")


@dataclass(frozen=True, kw_only=True)
class SweepPointOutput:
    """One value of the swept field."""

    value: int = described("the value")
    model_flops_per_s: float = described("model FLOP/s per device")
    tokens_per_s_per_device: float
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    speedup: float | None = described("time per token of the current value over this one's; null without a current one")
    speedup_low: float | None = described("lower end of its 90 % interval")
    speedup_high: float | None = described("upper end of its 90 % interval")
    probability_faster: float | None = described("probability that it is above 1")
    measured_step_time_s: float | None = described("measured time of this step; null without one")
    alignment_bytes: int | None = described("smallest alignment of the GEMMs whose alignment changes")
    num_waves: int | None = described("waves of `watched`")
    text: str = described("the point in one line")


@dataclass(frozen=True, kw_only=True)
class LocalMaximum:
    """A value with a higher model rate than its neighbours."""

    value: int = described("the value")
    text: str = described("its point in one line")
    gain_text: str = described("change of the model rate from the current value")


@dataclass(frozen=True, kw_only=True)
class SweepVerdict:
    """What to do about the current value."""

    text: str = described("one sentence")
    value: int | None = described("the value to use instead; null where the current one is good")


@dataclass(frozen=True, kw_only=True)
class FieldSweepOutput(Output):
    """The step over the values of one field."""

    field: str = described("the swept field")
    fields: list[str] = described("fields that can be swept")
    current: int = described("value of the scenario")
    verdict: SweepVerdict = described("the current value against those near it")
    watched: str = described("GEMM whose waves are counted; empty without one")
    wave_ends: list[int] = described("last values before another wave")
    local_maxima: list[LocalMaximum] = described("local maxima, best first")
    points: list[SweepPointOutput] = described("the values in ascending order")
    figure: FigureOutput = described("the curve")


@dataclass(frozen=True, kw_only=True)
class HeadGridCell:
    """One number of heads at one hidden size."""

    num_heads: int = described("number of heads")
    hidden_size: int = described("hidden size")
    text: str = described("the cell in one line; empty where it cannot run")
    changes: dict[str, int] | None = described("fields to set; null where it cannot run")


@dataclass(frozen=True, kw_only=True)
class HeadGridOutput(Output):
    """Model rate over numbers of heads and hidden sizes."""

    cells: list[HeadGridCell] = described("cells, row by row")
    figure: FigureOutput = described("the heat map")
