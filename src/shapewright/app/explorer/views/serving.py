"""The Serving view: front, latency over load, what limits, and the launch lines of one engine."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Any

from shapewright.app.api.serving import serve_plan
from shapewright.app.explorer.requests import job_fields, read_job_model
from shapewright.app.explorer.views.answers import columns_to_json
from shapewright.app.explorer.views.outputs import FigureOutput, FigureProblem, figure
from shapewright.app.figures.chart import BarChart, BarPart, Line, Mark, Points, XYChart
from shapewright.app.figures.plan import serving_chart
from shapewright.app.formats.servers.launch import choose_expressible, find_engine, write_launch
from shapewright.app.report.columns import spread
from shapewright.app.report.optimize.serving import (
    describe_serving,
    mode_columns,
    no_plan_words,
    point_columns,
    recommendation_facts,
)
from shapewright.app.report.outputs.model import plain
from shapewright.app.report.outputs.serving import serve_plan_output
from shapewright.core.errors import ShapewrightError
from shapewright.core.units import format_amount, format_percent, format_seconds
from shapewright.lowering.checks import max_sequence_length
from shapewright.optimize.serving.recommend import PASS_LIMITS
from shapewright.optimize.serving.traffic.sweep import simulate_loads

if TYPE_CHECKING:
    from shapewright.app.explorer.device_lookup import DeviceLookup
    from shapewright.app.explorer.requests import ServingRequestBody
    from shapewright.app.report.outputs.serving import OperatingPointOutput, ServePlanOutput
    from shapewright.optimize.serving.plan import ServingPlan
    from shapewright.optimize.serving.traffic.figures import TrafficFigures

Answer = dict[str, Any]

# Fields of a workload that a served model has.
_SERVED = ("dtype", "weight_dtype", "kv_cache_dtype", "attention", "expert_kernel")
# Lengths where none are given; shorter where the model has fewer positions. [token]
_USUAL_PROMPT_LEN, _USUAL_OUTPUT_LEN = 1000, 200
LOAD_FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
_NUM_REQUESTS = 600
_LIMIT_BARS = 12


def answer_serving(body: ServingRequestBody, devices: DeviceLookup) -> Answer:
    """JSON output of ``serve-plan --format``, with its text, figures, and latency over simulated load."""
    job, engine = body.job, find_engine(body.engine)
    workload = job_fields(job)["workload"]
    model = read_job_model(job)
    most_tokens = max_sequence_length(model.config)
    device = devices.find(job.device, **job.node_options).with_pricing(uncalibrated=job.uncalibrated)
    plan = choose_expressible(
        serve_plan(
            model,
            prompt_len=body.prompt_len or min(_USUAL_PROMPT_LEN, most_tokens * 3 // 4),
            output_len=body.output_len or min(_USUAL_OUTPUT_LEN, most_tokens // 8),
            device=device,
            workload={name: workload[name] for name in _SERVED if name in workload},
            server=engine.server_name,
            **body.question(),
        ),
        engine,
    )
    launch, problem = None, ""
    try:
        launch = write_launch(plan, engine.name)
    except ShapewrightError as error:
        problem = str(error)
    output = serve_plan_output(plan, launch)
    front = output.front_by_format[output.formats[0].name]
    return {
        **output.to_json(),
        "launch_problem": problem,
        "text": {
            "request": describe_serving(output),
            "verdict": _verdict(output.recommended) or no_plan_words(output, with_advice=False),
            "facts": recommendation_facts(output),
            "best": columns_to_json(mode_columns(output)),
            "front": columns_to_json(point_columns(front)),
        },
        "figures": {
            "front": plain(front_figure(output)),
            "limits": plain(limits_figure(front)),
            **{name: plain(found) for name, found in latency_figures(plan).items()},
        },
    }


def _verdict(point: OperatingPointOutput | None) -> str:
    """The recommended point in one line; empty without one."""
    if point is None:
        return ""
    return (
        f"{point.instances}: {point.tokens_per_s_per_user:,.0f} tokens/s for a user, "
        f"{point.tokens_per_s_per_device:,.0f} tokens/s of a GPU"
    )


def front_figure(output: ServePlanOutput) -> FigureOutput:
    """Fronts of tokens/s of a GPU over tokens/s of a user, with the recommended point."""
    chart = serving_chart(output)
    front = sorted(output.front_by_format[output.formats[0].name], key=lambda point: point.tokens_per_s_per_user)
    texts = {}
    for series in chart.series:
        assert isinstance(series, Line | Points)
        labels = series.labels if isinstance(series, Points) else [point.instances for point in front]
        texts[series.name] = [
            f"{label}: {user:,.1f} tokens/s for a user, {rate:,.0f} of a GPU"
            for label, user, rate in zip(labels, series.x, series.y, strict=True)
            if rate is not None
        ]
    return figure(chart, texts)


def limits_figure(front: list[OperatingPointOutput]) -> FigureOutput | FigureProblem:
    """Shares of a pass by what limits it, for points of the front, and how full the cache is."""
    if not front:
        return FigureProblem(problem="no point keeps the limit of the first token")
    shown = sorted(spread(front, _LIMIT_BARS), key=lambda point: point.tokens_per_s_per_user)
    names = [f"{point.tokens_per_s_per_user:,.0f} tokens/s" for point in shown]
    chart = BarChart(
        title="What limits a pass, by tokens/s of a user",
        value_label="share of a pass, %",
        categories=names,
        parts=[
            BarPart(limit, [floor(1000.0 * point.pass_fractions[limit]) / 10.0 for point in shown])
            for limit in PASS_LIMITS
        ],
        alt=f"Shares of a pass by compute, memory, communication and latency for {len(shown)} points of the front.",
    )
    texts = {
        limit: [f"{point.instances}: {limit} {format_percent(point.pass_fractions[limit])}" for point in shown]
        for limit in PASS_LIMITS
    }
    rows = [
        [name, point.instances, f"{point.limited_by}; cache {format_percent(point.cache_fraction)} full"]
        for name, point in zip(names, shown, strict=True)
    ]
    return figure(chart, texts, rows=rows)


def latency_figures(plan: ServingPlan) -> dict[str, FigureOutput | FigureProblem]:
    """Percentiles of the time to first token and per token over the load of the recommended point."""
    recommended, request = plan.recommended, plan.request
    if recommended is None:
        problem = FigureProblem(problem="no point keeps the limits")
        return {"ttft": problem, "tpot": problem}
    try:
        found = simulate_loads(plan, recommended.point, LOAD_FRACTIONS, num_requests=_NUM_REQUESTS)
    except ShapewrightError as error:
        problem = FigureProblem(problem=str(error))
        return {"ttft": problem, "tpot": problem}
    return {
        "ttft": _percentile_figure("Time to first token", found, "ttft", request.ttft_limit_s),
        "tpot": _percentile_figure("Time per token", found, "tpot", request.tpot_limit_s),
    }


def _percentile_figure(
    title: str, found: list[tuple[float, TrafficFigures]], name: str, limit_s: float | None
) -> FigureOutput:
    quantiles = {"median": "p50_s", "90 %": "p90_s", "99 %": "p99_s"}
    rates = [rate for rate, _ in found]
    times = {
        label: [float(getattr(getattr(figures, name), quantile)) for _, figures in found]
        for label, quantile in quantiles.items()
    }
    chart = XYChart(
        title=f"{title} over load",
        x_label="requests/s of a unit",
        y_label="ms",
        series=[
            Line(label, [round(rate, 3) for rate in rates], [1e3 * one for one in each])
            for label, each in times.items()
        ],
        marks=(Mark("y", 1e3 * limit_s, f"limit {format_seconds(limit_s)}"),) if limit_s else (),
        alt=f"{title} at {len(rates)} loads up to {format_amount(rates[-1])} requests/s: the median rises from "
        f"{format_seconds(times['median'][0])} to {format_seconds(times['median'][-1])}.",
        y_log=True,
    )
    texts = {
        label: [
            f"{format_amount(rate)} requests/s: {label} {format_seconds(one)}"
            for rate, one in zip(rates, each, strict=True)
        ]
        for label, each in times.items()
    }
    return figure(chart, texts)
