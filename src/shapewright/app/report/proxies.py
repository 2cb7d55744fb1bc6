"""Proxy models, the law fitted to them, and proposed experiments as text tables."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_notes, print_table
from shapewright.core.units import format_number_of, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.loss import ExperimentsOutput, LossCalibrationOutput, ProxyLoss, ProxyOutput

_COLUMNS = (
    Column("model", is_text=True),
    Column("parameters", rank=2),
    Column("h", rank=1), Column("L", rank=1), Column("heads", rank=1), Column("kv", rank=1), Column("d", rank=1),
    Column("f", rank=1),
    Column("tokens", rank=2),
    Column("loss [nat]"),
    Column("seeds"),
    Column("step", rank=1),
    Column("remark", rank=1, is_text=True),
)  # fmt: skip


def print_proxies(output: ProxyOutput, console: Console) -> None:
    """Print one line per model: its mean loss over finished seeds, and half the range of them."""
    models: dict[tuple[str, int], list[ProxyLoss]] = {}
    for run in output.runs:
        models.setdefault((run.name, run.num_parameters), []).append(run)
    print_table(columns_of(map(_cells, models.values()), _COLUMNS), console)
    console.print(
        f"{output.device}, {output.dtype}; text {output.text} of {output.text_bytes / 1e6:.1f} MB; stored in "
        f"{output.store}",
        soft_wrap=True,
    )
    if output.num_left:
        left = format_number_of(output.num_left, "run")
        console.print(f"{left} not finished: the same command goes on from there", soft_wrap=True)


def _cells(runs: list[ProxyLoss]) -> list[str]:
    first = runs[0]
    losses = [run.loss_nats for run in runs if run.state == "finished" and run.loss_nats is not None]
    times_s = [run.step_s for run in runs if run.step_s is not None]
    spread = f" +- {(max(losses) - min(losses)) / 2:.4f}" if len(losses) > 1 else ""
    remarks = [
        f"seed {run.seed}: {run.error or run.state}, {run.trained_tokens / run.train_tokens:.0%}"
        for run in runs
        if run.state != "finished"
    ]
    shape = (first.hidden_size, first.num_layers, first.num_heads, first.num_kv_heads, first.head_dim)
    return [
        first.name,
        f"{first.num_parameters:,}",
        *map(str, (*shape, first.intermediate_size)),
        f"{first.train_tokens / 1e6:,.2f} M",
        f"{statistics.mean(losses):.4f}{spread}" if losses else "-",
        f"{len(losses)}/{len(runs)}",
        format_seconds(statistics.median(times_s)) if times_s else "-",
        "; ".join(remarks),
    ]


_COEFFICIENT_COLUMNS = (
    Column("coefficient", "{name}", is_text=True),
    Column("reference", "{before:.4f} +- {before_standard_deviation:.4f}"),
    Column("fitted", "{after:.4f} +- {after_standard_deviation:.4f}"),
)


def print_loss_calibration(output: LossCalibrationOutput, console: Console) -> None:
    """Print the coefficients before and after the fit, and the errors."""
    print_table(columns_of(output.coefficients, _COEFFICIENT_COLUMNS), console)
    words = (
        f"{output.num_losses} losses of {output.recipe}: fitted within {output.mean_error_nats:.4f} nats in the mean"
    )
    if output.left_out_mean_error_nats is not None:
        words += f", models that the fit did not see within {output.left_out_mean_error_nats:.4f}"
    console.print(words, soft_wrap=True)
    for reason, count in output.skipped.items():
        console.print(f"{format_number_of(count, 'row')} left out: {reason}", soft_wrap=True)
    print_notes(output.notes, console)
    console.print(f"written to {output.output}", soft_wrap=True)


_EXPERIMENT_COLUMNS = (
    Column("experiment", "{name}", is_text=True),
    Column("parameters", lambda run: f"{run.num_parameters / 1e6:,.1f} M"),
    Column("h x L", "{hidden_size} x {num_layers}", rank=1),
    Column("heads", "{num_heads}", rank=1),
    Column("kv", "{num_kv_heads}", rank=2),
    Column("f", "{intermediate_size}", rank=2),
    Column("tokens", lambda run: f"{run.train_tokens / 1e6:,.0f} M"),
    Column("seeds", "{num_seeds}", rank=1),
    Column("GPU hours", "{gpu_hours:.3g}"),
)


def print_experiments(output: ExperimentsOutput, console: Console) -> None:
    """Print the models to train, and what they would settle."""
    console.print()
    if not output.questions:
        console.print(f"experiments: none, {output.why_none}")
    for one in output.questions:
        now = f"rank {one.rank}: net speed-up {one.net_low:.3g} to {one.net_high:.3g} now"
        after = (
            f"{one.after_low:.3g} to {one.after_high:.3g} expected after "
            f"{format_number_of(len(one.experiments), 'small model')}; "
            f"{one.chance_settled:.0%} probability that they settle it"
            if one.experiments
            else "no small model is likely to settle it"
        )
        if one.narrowing:
            after += (
                f"; for {one.narrowing_gpu_hours:.2g} GPU hours {', '.join(one.narrowing)} would leave "
                f"{one.after_low:.3g} to {one.after_high:.3g}"
            )
        console.print(f"{now}, {after}", soft_wrap=True)
    if output.experiments:
        print_table(columns_of(output.experiments, _EXPERIMENT_COLUMNS), console)
        console.print(
            f"{output.gpu_hours:.3g} GPU hours of {output.full_gpu_hours:,.0f} for the full training; run "
            f"'shapewright proxy {output.file} --text FILES --seeds {output.num_seeds}', then 'shapewright calibrate "
            "--losses'",
            soft_wrap=True,
        )
    print_notes(output.notes, console)
