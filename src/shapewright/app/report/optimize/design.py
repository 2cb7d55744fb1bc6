"""A design as text and as a page: verdict, answer, runners-up and why they lose, loss against time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_fact_lines, print_notes, print_table, spread
from shapewright.app.report.outputs.search import describe_changes
from shapewright.app.report.proxies import print_experiments
from shapewright.core.units import (
    energy_unit,
    format_amount,
    format_bytes,
    format_count,
    format_number_of,
    format_percent,
    format_seconds,
)

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.design import DesignedShape, DesignOutput
    from shapewright.app.report.page import Section

_FRONT_SHOWN = 8


def _difference_words(shape: DesignedShape) -> str:
    return "" if shape.is_baseline else "none" if shape.is_free else f"{shape.loss_difference_nats.mean:+.4f}"


def _describe_baseline(shape: DesignedShape) -> str:
    """Return name and size of the family's shape; where it is scaled, the size is not that of the name."""
    return f"{shape.config.title} ({format_count(shape.parameters)}), unchanged"


_DESIGN_COLUMNS = (
    Column("rank", "{rank}"),
    Column("shape", lambda one: describe_changes(one) or _describe_baseline(one), is_text=True),
    Column("speed", "{speedup.mean:.3f}x"),
    Column("loss difference", _difference_words),
    Column("net speed-up", "{net_speedup.mean:.3f}x"),
    Column("90 % interval", "{net_speedup.low:.3f} to {net_speedup.high:.3f}"),
    Column("better", lambda one: "" if one.is_baseline else format_percent(one.chance_better), rank=2),
    Column("why it loses", "{why}", is_text=True),
    Column("plan", "{plan.plan}", is_text=True, rank=3),
)
_FRONT_COLUMNS = (
    Column("parameters", "{num_parameters:count}"),
    Column("tokens", "{train_tokens:count}"),
    Column("tokens/parameter", lambda point: format_amount(point.train_tokens / point.num_parameters)),
    Column("hours", "{hours:amount}"),
    Column("loss", "{loss_nats:.3f}"),
    Column("90 % interval", "{loss_low_nats:.3f} to {loss_high_nats:.3f}"),
)
_FRONT_NOTE = (
    "losses are those of the data and recipe that the law was fitted to; on yours their differences count, not their "
    "values"
)


def print_design(found: DesignOutput, console: Console) -> None:
    """Print a whole result."""
    console.print(describe_request(found), style="bold", soft_wrap=True)
    console.print(found.verdict.text, style="bold", soft_wrap=True)
    console.print()
    print_fact_lines(answer_facts(found), console)
    console.print()
    console.print("Answer and runners-up, compared with the shape of the family on its own best plan", style="bold")
    print_table(design_columns(found), console)
    console.print()
    if found.front:
        console.print("Loss against time: runs of the family that no other run beats", style="bold")
        print_table(front_columns(found), console)
        console.print(_FRONT_NOTE, style="dim", soft_wrap=True)
        console.print()
    console.print(describe_space(found), style="dim", soft_wrap=True)
    print_notes(found.notes, console)
    if found.experiments is not None:
        print_experiments(found.experiments, console)


def describe_request(found: DesignOutput) -> str:
    """One line: size, tokens, devices, batch."""
    request, workload = found.request, found.workload
    batch, seq_len = workload["global_batch_size"], workload["seq_len"]
    return (
        f"{format_count(request.num_parameters)} parameters, {format_count(request.train_tokens)} tokens on "
        f"{request.num_devices} x {found.device.title}: s={seq_len}, global batch {batch:,} "
        f"({format_count(batch * seq_len)} tokens), {workload['dtype']}, {workload['attention']} attention"
    )


def describe_shape(shape: DesignedShape) -> str:
    """Sizes of a shape, by symbol."""
    config = shape.config
    kv = f" a_kv={config.num_kv_heads}" if config.num_kv_heads != config.num_heads else ""
    experts = f" E={config.num_experts} k_e={config.num_experts_per_token}" if config.is_moe else ""
    width = config.moe_intermediate_size if config.is_moe else config.intermediate_size
    return (
        f"h={config.hidden_size} L={config.num_layers} a={config.num_heads}{kv} d={config.head_dim} f={width}{experts} "
        f"v={config.vocab_size}, {format_count(shape.parameters)} parameters"
    )


def answer_facts(found: DesignOutput) -> dict[str, str]:
    """The answer by its parts: shape, plan, step, run, loss, memory."""
    best = found.designs[0]
    plan, mfu = best.plan, best.mfu
    return {
        "shape": describe_shape(best),
        "plan": plan.plan,
        "step": f"{format_seconds(plan.step_time_s)} ({format_seconds(plan.step_time_low_s)} to "
        f"{format_seconds(plan.step_time_high_s)}), MFU {format_percent(mfu.mean)} ({format_percent(mfu.low)} to "
        f"{format_percent(mfu.high)})",
        "run": _run_words(best),
        "loss": _loss_words(best),
        "memory": f"{format_bytes(plan.total_bytes)} of {format_bytes(found.device.memory_bytes)}"
        + (" (tight)" if plan.tight else ""),
    }


def _loss_words(shape: DesignedShape) -> str:
    if shape.is_baseline:
        return "that of the family"
    if shape.is_free:
        return "the same as that of the family"
    nats = shape.loss_difference_nats
    return (
        f"{nats.mean:+.4f} nats ({nats.low:+.4f} to {nats.high:+.4f}) against the shape of the family, after the same "
        f"tokens and at its size"
    )


def _run_words(shape: DesignedShape) -> str:
    run = shape.run
    costs = run.cost, run.cost_low, run.cost_high
    parts = [
        f"{format_count(run.train_tokens)} tokens in {format_number_of(run.num_steps, 'step')}",
        f"{_interval(run.hours.mean, run.hours.low, run.hours.high)} hours",
        f"{_interval(*(cost.device_hours for cost in costs))} GPU hours",
    ]
    if run.cost.energy_kwh is not None:
        unit, unit_kwh = energy_unit(run.cost.energy_kwh)
        energies = ((cost.energy_kwh or 0.0) / unit_kwh for cost in costs)
        parts.append(f"at most {_interval(*energies)} {unit} at the board power")
    if run.cost.usd is not None:
        parts.append(f"{_interval(*(cost.usd or 0.0 for cost in costs))} USD")
    return ", ".join(parts)


def _interval(mean: float, low: float, high: float) -> str:
    return f"{format_amount(mean)} ({format_amount(low)} to {format_amount(high)})"


def design_columns(found: DesignOutput) -> list[Column]:
    """Answer and runners-up, one row each, as the columns of a table."""
    return columns_of(found.designs, _DESIGN_COLUMNS)


def front_columns(found: DesignOutput) -> list[Column]:
    """The frontier of loss against time, thinned out to a few rows."""
    return columns_of(spread([point for point in found.front if point.is_on_front], _FRONT_SHOWN), _FRONT_COLUMNS)


def describe_space(found: DesignOutput) -> str:
    """Numbers of shapes and plans, in one line."""
    text = (
        f"{format_number_of(found.num_shapes, 'shape')} and {format_number_of(found.num_plans, 'plan')} of "
        f"{found.num_planned} of them in {format_seconds(found.elapsed_s)}"
    )
    return text if found.is_complete else f"interrupted, best so far: {text}"


def design_page(found: DesignOutput) -> str:
    """Render a result as one HTML document."""
    from shapewright.app.report.page import render_page

    return render_page("Design", design_sections(found), subtitle=describe_request(found))


def design_sections(found: DesignOutput) -> list[Section]:
    """Sections of the page."""
    from shapewright.app.figures.shapes import loss_against_time_chart
    from shapewright.app.report.page import Figure, Table, Words, sentence, table_of

    plan = found.designs[0].plan
    sections: list[Section] = [
        Words("Verdict", [found.verdict.text]),
        Table("Answer", ("part", "value"), list(answer_facts(found).items()), words=("part", "value")),
        table_of("Answer and runners-up, compared with the shape of the family", design_columns(found)),
    ]
    if found.front:
        sections += [
            Figure(loss_against_time_chart(found), sentence(_FRONT_NOTE)),
            table_of("Runs that no other run of the family beats", front_columns(found)),
        ]
    parts = [
        (name, format_seconds(part_s), format_percent(part_s / plan.step_time_s))
        for name, part_s in plan.breakdown_s.items()
    ]
    sections += [
        Table("Where the step goes", ("part", "time", "share"), parts, words=("part",)),
        Words("Notes", [describe_space(found), *found.notes]),
    ]
    return sections
