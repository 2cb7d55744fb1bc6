"""Proxy models as a text table: loss of each shape with its spread over seeds."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_table
from shapewright.core.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.proxies import ProxyLoss, ProxyOutput

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
        console.print(f"{output.num_left} runs are not finished: the same command goes on with them", soft_wrap=True)


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
