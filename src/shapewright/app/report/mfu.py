"""Utilization of a measured step as text, in one line for logs, and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_facts, print_notes, print_table
from shapewright.core.units import GIGA, TERA, format_count, format_percent, format_rate, format_seconds
from shapewright.prediction.utilization.rates import MODEL_PART, SECONDS
from shapewright.pricing.software import TUNED

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.mfu import MfuOutput, TraceOutput
    from shapewright.app.report.page import Figure

# Losses below this share of the step are omitted from the table; the JSON has all.
_SHOWN_FROM_FRACTION = 0.0005
_BAR_CHARACTERS = 40
_SHOWN_GROUPS = 15  # the JSON has all
# Units of a measured rate.
GIVEN_WORDS = {
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_device": "tokens/s/device",
    "steps_per_s": "steps/s",
    "images_per_s": "images/s",
}


def utilization_line(output: MfuOutput) -> str:
    """One line of name=value pairs for logs and scripts."""
    facts = {
        "mfu": f"{output.mfu:.4f}",
        "hfu": "none" if output.hfu is None else f"{output.hfu:.4f}",
        "model_tflops_per_s_per_device": f"{output.model_flops_per_s_per_device / TERA:.1f}",
        "tokens_per_s_per_device": f"{output.tokens_per_s_per_device:.1f}",
        "convention": output.convention,
        "peak_tflops_per_s": f"{output.peak_flops_per_s / TERA:.1f}",
    }
    if output.reachable is not None:
        facts["reachable_mfu"] = f"{output.reachable.mfu:.4f}"
        largest = max(output.waterfall[1:], key=lambda part: part.time_s)
        facts["largest_loss"] = f"{largest.name}:{largest.fraction:.4f}"
    return " ".join(f"{name}={value}" for name, value in facts.items())


def print_utilization(output: MfuOutput, console: Console) -> None:
    """Print headline, conventions, waterfall and the predicted step."""
    name = output.config.title
    source = "" if output.given == SECONDS else f" (from {GIVEN_WORDS[output.given]})"
    console.print(
        f"{name} on {output.num_devices} x {output.device.title}: {format_seconds(output.seconds)} per step{source} of "
        f"{output.workload.global_batch_size} x {output.workload.seq_len} tokens, {output.workload.dtype}, "
        f"{output.workload.recompute_text}",
        style="bold",
        soft_wrap=True,
    )
    print_facts(utilization_facts(output), console)
    console.print()
    print_table(convention_columns(output), console)
    console.print()
    print_table(peak_columns(output), console)
    if output.waterfall:
        console.print()
        print_table(waterfall_columns(output), console)
        console.print()
        console.print(reachable_words(output), style="bold", soft_wrap=True)
        print_table(reachable_columns(output), console)
    print_trace_comparison(output.trace, console)
    print_notes(output.notes, console)


def print_trace_comparison(trace: TraceOutput | None, console: Console) -> None:
    """Print where a traced step loses, if a trace was given."""
    if trace is None:
        return
    console.print()
    console.print(trace_words(trace), style="bold", soft_wrap=True)
    print_table(trace_loss_columns(trace), console)
    console.print()
    print_table(trace_group_columns(trace), console)
    if trace.best_fix is not None:
        best = trace.best_fix
        console.print()
        console.print(
            f"gains most, up to {format_seconds(best.gain_s)} a step: {best.fix}", style="bold", soft_wrap=True
        )


def utilization_facts(output: MfuOutput) -> dict[str, str]:
    """The headline as texts by name."""
    return {
        "MFU": format_percent(output.mfu),
        "HFU": "" if output.hfu is None else format_percent(output.hfu),
        "model rate": format_rate(output.model_flops_per_s_per_device),
        "tokens/s": format_count(output.tokens_per_s),
        "tokens/s/device": f"{output.tokens_per_s_per_device:,.0f}",
        **_image_facts(output),
        "peak": f"{format_rate(output.peak_flops_per_s)}, {output.peak_kind}",
    }


def _image_facts(output: MfuOutput) -> dict[str, str]:
    if output.images_per_s is None or output.model_flops_per_image is None:
        return {}
    flops = f"{output.model_flops_per_image / GIGA:,.1f} GFLOP"
    return {"images/s": f"{output.images_per_s:,.1f}", "per image": flops}


def peak_columns(output: MfuOutput) -> list[Column]:
    """The peak that MFU refers to and other peaks in use, as the columns of a table."""
    rows = [
        [f"{output.peak_kind} *", format_rate(output.peak_flops_per_s), format_percent(output.mfu)],
        *(
            [kind, format_rate(peak.peak_flops_per_s), format_percent(peak.mfu)]
            for kind, peak in output.other_peaks.items()
        ),
    ]
    return columns_of(rows, (Column("peak", is_text=True), Column("rate"), Column("MFU")))


_CONVENTION_COLUMNS = (
    Column("TFLOP/s", lambda result: _tera(result.model_flops_per_s_per_device)),
    Column("MFU", "{mfu}"),
    Column("with recompute", lambda result: _tera(result.hardware_flops_per_s_per_device), rank=2),
    Column("HFU", "{hfu}", rank=1),
    Column("FLOPs per token", "{formula}", rank=3, is_text=True),
    Column("used by", "{used_by}", rank=4, is_text=True),
)


def convention_columns(output: MfuOutput) -> list[Column]:
    """Rates by FLOP convention, as the columns of a table."""
    names = tuple(name + (" *" if name == output.convention else "") for name in output.conventions)
    columns = columns_of(output.conventions.values(), _CONVENTION_COLUMNS)
    return [Column("FLOP convention", is_text=True, cells=names), *columns]


def _tera(rate: float | None) -> str:
    return "" if rate is None else f"{rate / TERA:.1f}"


def waterfall_columns(output: MfuOutput) -> list[Column]:
    """Parts from peak to measured, as the columns of a table."""
    rows = []
    for part in output.waterfall:
        fraction = part.fraction
        if part.name not in (MODEL_PART, "unexplained") and abs(fraction) < _SHOWN_FROM_FRACTION:
            continue
        bar = ("#" if fraction > 0 else "-") * min(round(abs(fraction) * _BAR_CHARACTERS), _BAR_CHARACTERS)
        rows.append([part.name.replace("_", " "), format_seconds(part.time_s), format_percent(fraction), bar, part.why])
    rows.append(["measured", format_seconds(output.seconds), "100 %", "", ""])
    headings = (
        Column("from peak to measured", is_text=True),
        Column("time"),
        Column("share"),
        Column("", rank=1, is_text=True),
        Column("cause", rank=2, is_text=True),
    )
    return columns_of(rows, headings)


def reachable_words(output: MfuOutput) -> str:
    """The predicted step with its interval, in one line."""
    step = output.reachable
    if step is None:
        return ""
    middle, low, high = map(format_seconds, (step.step_time_s, step.step_time_low_s, step.step_time_high_s))
    best, least, most = map(format_percent, (step.mfu, step.mfu_low, step.mfu_high))
    stack = "" if step.software == TUNED else f" with software of {step.software}"
    return f"reachable{stack}: {middle} per step ({low} to {high}), MFU {best} ({least} to {most})"


_REACHABLE_COLUMNS = (
    Column("without", lambda step: step.without.replace("_", " "), is_text=True),
    Column("step", "{step_time_s}"),
    Column("MFU", "{mfu}"),
    Column("how", "{way_out}", rank=1, is_text=True),
)


def reachable_columns(output: MfuOutput) -> list[Column]:
    """The predicted step without each loss alone, as the columns of a table."""
    reachable = output.reachable
    if reachable is None:
        return []
    least_s = (1.0 - _SHOWN_FROM_FRACTION) * reachable.step_time_s
    shown = [step for step in reachable.without if step.without == "unexplained" or step.step_time_s < least_s]
    return columns_of(shown, _REACHABLE_COLUMNS)


def trace_words(trace: TraceOutput) -> str:
    """Steps, times and matched share of a trace, in one line."""
    steps = "one step" if trace.num_steps == 1 else f"{trace.num_steps} steps"
    device = f" of {trace.device_name}" if trace.device_name else " of a CPU" if trace.is_cpu else ""
    return (
        f"trace{device}: {steps} of {format_seconds(trace.step_s)}, predicted "
        f"{format_seconds(trace.predicted_step_s)}; {format_percent(trace.matched_fraction)} of the kernels' time "
        "matched to predicted operations"
    )


_LOSS_COLUMNS = (
    Column("the step loses by", lambda loss: loss.name.replace("_", " "), is_text=True),
    Column("time", "{time_s}"),
    Column("share", "{fraction}"),
    Column("gain", "{gain_s}"),
    Column("trace", "{why}", rank=1, is_text=True),
    Column("fix", "{fix}", rank=2, is_text=True),
)
_GROUP_COLUMNS = (
    Column("operations", "{name}", is_text=True),
    Column("measured", "{measured_s}"),
    Column("predicted", lambda group: format_seconds(group.predicted_s) if group.num_predicted else ""),
    Column("kernels", "{num_measured:g}", rank=1),
    Column("runs", lambda group: str(group.num_predicted or ""), rank=1),
)


def trace_loss_columns(trace: TraceOutput) -> list[Column]:
    """Losses of a trace with their fixes, as the columns of a table."""
    return columns_of(trace.losses, _LOSS_COLUMNS)


def trace_group_columns(trace: TraceOutput) -> list[Column]:
    """Kernels against their predictions, those that lose most, as the columns of a table."""
    return columns_of(trace.groups[:_SHOWN_GROUPS], _GROUP_COLUMNS)


def utilization_page(output: MfuOutput) -> str:
    """Render the utilization of a step as one HTML document."""
    from shapewright.app.report.page import Section, Table, Words, render_page, table_of

    facts = Table(
        "Utilization", ("what", "measured"), tuple(utilization_facts(output).items()), words=("what", "measured")
    )
    sections: list[Section] = [
        facts,
        table_of("By FLOP convention", convention_columns(output)),
        table_of("By peak", peak_columns(output)),
    ]
    if output.waterfall:
        sections.append(waterfall_figure(output))
        named = [column for column in waterfall_columns(output) if column.name]  # the figure has its own bars
        sections.append(table_of("From peak to measured", named))
        sections.append(table_of("What is reachable", reachable_columns(output), note=reachable_words(output)))
    if output.trace is not None:
        sections.append(
            table_of("Where the traced step loses", trace_loss_columns(output.trace), note=trace_words(output.trace))
        )
        sections.append(table_of("Kernels against predictions", trace_group_columns(output.trace)))
    if output.notes:
        sections.append(Words("Notes", list(output.notes)))
    title = f"Where the peak went: {output.config.title} on {output.num_devices} x {output.device.title}"
    return render_page(title, sections)


def waterfall_figure(output: MfuOutput) -> Figure:
    """The waterfall with the cause of each part."""
    from shapewright.app.figures.step import shown_waterfall_parts, waterfall_chart
    from shapewright.app.report.page import Figure

    chart, parts = waterfall_chart(output), shown_waterfall_parts(output)
    why = "; ".join(f"{part.name.replace('_', ' ')}: {part.why}" for part in parts)
    return Figure(chart, caption=f"{chart.alt} {why}.", chart_height_px=110 + 28 * len(parts))
