"""Utilization of a measured step as text, and in one line for logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_facts, print_notes, print_table
from shapewright.core.units import TERA, format_count, format_percent, format_rate, format_seconds
from shapewright.prediction.utilization import MODEL_PART, SECONDS, describe_peak
from shapewright.pricing.software import TUNED

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.prediction.utilization import Utilization

# Losses below this share of the step are omitted from the table; the JSON has all.
_SHOWN_FROM_FRACTION = 0.0005
_BAR_CHARACTERS = 40
# Units of a measured rate.
GIVEN_WORDS = {"tokens_per_s": "tokens/s", "tokens_per_s_per_device": "tokens/s/device"}


def utilization_line(found: Utilization) -> str:
    """One line of name=value pairs for logs and scripts."""
    chosen, prediction = found.result, found.prediction
    facts = {
        "mfu": f"{chosen.mfu:.4f}",
        "hfu": "none" if chosen.hfu is None else f"{chosen.hfu:.4f}",
        "model_tflops_per_s_per_device": f"{chosen.model_flops_per_s_per_device / TERA:.1f}",
        "tokens_per_s_per_device": f"{found.tokens_per_s / found.num_devices:.1f}",
        "convention": found.convention,
        "peak_tflops_per_s": f"{found.peak_flops_per_s / TERA:.1f}",
    }
    if prediction is not None:
        facts["reachable_mfu"] = f"{found.mfu_at(prediction.step_time_s):.4f}"
        largest = max(found.waterfall[1:], key=lambda part: part.time_s)
        facts["largest_loss"] = f"{largest.name}:{largest.time_s / found.seconds:.4f}"
    return " ".join(f"{name}={value}" for name, value in facts.items())


def print_utilization(found: Utilization, console: Console) -> None:
    """Print headline, conventions, waterfall and the predicted step."""
    name = found.config.title
    source = "" if found.given == SECONDS else f" (from {GIVEN_WORDS[found.given]})"
    console.print(
        f"{name} on {found.num_devices} x {found.device.title}: {format_seconds(found.seconds)} per step{source} of "
        f"{found.workload.global_batch_size} x {found.workload.seq_len} tokens, {found.workload.dtype}, "
        f"{found.workload.recompute_text}",
        style="bold",
        soft_wrap=True,
    )
    print_facts(utilization_facts(found), console)
    console.print()
    _print_conventions(found, console)
    if found.waterfall:
        console.print()
        print_table(waterfall_columns(found), console)
        console.print()
        console.print(reachable_words(found), style="bold", soft_wrap=True)
        print_table(reachable_columns(found), console)
    print_notes(found.notes, console)


def utilization_facts(found: Utilization) -> dict[str, str]:
    """The headline as texts by name."""
    chosen = found.result
    return {
        "MFU": format_percent(chosen.mfu),
        "HFU": "" if chosen.hfu is None else format_percent(chosen.hfu),
        "model rate": format_rate(chosen.model_flops_per_s_per_device),
        "tokens/s": format_count(found.tokens_per_s),
        "tokens/s/device": f"{found.tokens_per_s / found.num_devices:,.0f}",
        "peak": f"{format_rate(found.peak_flops_per_s)}, {describe_peak(found.device, found.workload.dtype)}",
    }


def _print_conventions(found: Utilization, console: Console) -> None:
    print_table(convention_columns(found), console)
    console.print()
    print_table(peak_columns(found), console)


def peak_columns(found: Utilization) -> list[Column]:
    """The peak that MFU refers to and other peaks in use, as the columns of a table."""
    peaks = {f"{describe_peak(found.device, found.workload.dtype)} *": found.peak_flops_per_s, **found.other_peaks}
    rate = found.result.model_flops_per_s_per_device
    rows = [[kind, format_rate(peak), format_percent(rate / peak)] for kind, peak in peaks.items()]
    return columns_of(rows, (Column("peak", is_text=True), Column("rate"), Column("MFU")))


def convention_columns(found: Utilization) -> list[Column]:
    """Rates by FLOP convention, as the columns of a table."""
    rows = []
    for result in found.conventions:
        hardware = result.hardware_flops_per_s_per_device
        rows.append(
            [
                result.name + (" *" if result.name == found.convention else ""),
                f"{result.model_flops_per_s_per_device / TERA:.1f}",
                format_percent(result.mfu),
                "" if hardware is None else f"{hardware / TERA:.1f}",
                "" if result.hfu is None else format_percent(result.hfu),
                result.formula,
                result.used_by,
            ]
        )
    headings = (
        Column("FLOP convention", is_text=True),
        Column("TFLOP/s"),
        Column("MFU"),
        Column("with recompute", rank=2),
        Column("HFU", rank=1),
        Column("FLOPs per token", rank=3, is_text=True),
        Column("used by", rank=4, is_text=True),
    )
    return columns_of(rows, headings)


def waterfall_columns(found: Utilization) -> list[Column]:
    """Parts from peak to measured, as the columns of a table."""
    rows = []
    for part in found.waterfall:
        fraction = part.time_s / found.seconds
        if part.name not in (MODEL_PART, "unexplained") and abs(fraction) < _SHOWN_FROM_FRACTION:
            continue
        bar = ("#" if fraction > 0 else "-") * min(round(abs(fraction) * _BAR_CHARACTERS), _BAR_CHARACTERS)
        rows.append([part.name.replace("_", " "), format_seconds(part.time_s), format_percent(fraction), bar, part.why])
    rows.append(["measured", format_seconds(found.seconds), "100 %", "", ""])
    headings = (
        Column("from peak to measured", is_text=True),
        Column("time"),
        Column("share"),
        Column("", rank=1, is_text=True),
        Column("cause", rank=2, is_text=True),
    )
    return columns_of(rows, headings)


def reachable_words(found: Utilization) -> str:
    """The predicted step with its interval, in one line."""
    prediction = found.prediction
    if prediction is None:
        return ""
    ends = (prediction.step_time_s, prediction.step_time_low_s, prediction.step_time_high_s)
    middle, low, high = (format_seconds(end) for end in ends)
    best, most, least = (format_percent(found.mfu_at(end)) for end in ends)
    stack = "" if prediction.software == TUNED else f" with software of {prediction.software}"
    return f"reachable{stack}: {middle} per step ({low} to {high}), MFU {best} ({least} to {most})"


def reachable_columns(found: Utilization) -> list[Column]:
    """The predicted step without each loss alone, as the columns of a table."""
    rows = [
        [
            step.without.replace("_", " "),
            format_seconds(step.step_time_s),
            format_percent(step.mfu),
            step.way_out,
        ]
        for step in found.reachable
        if step.without == "unexplained" or step.step_time_s < (1.0 - _SHOWN_FROM_FRACTION) * _predicted_s(found)
    ]
    headings = (Column("without", is_text=True), Column("step"), Column("MFU"), Column("how", rank=1, is_text=True))
    return columns_of(rows, headings)


def _predicted_s(found: Utilization) -> float:
    return found.prediction.step_time_s if found.prediction is not None else found.seconds
