"""Simulated traffic as text and as a page: percentiles over load, servers, what a run keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.plan import latency_chart
from shapewright.app.report.columns import Column, columns_of, print_notes, print_table
from shapewright.app.report.page import Figure, Section, Words, table_of
from shapewright.core.units import format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.traffic import TrafficOutput, TrafficRunOutput

_RUN_COLUMNS = (
    Column("server"),
    Column("arrivals/s"),
    Column("limits", is_text=True, rank=1),
    Column("TTFT p50"),
    Column("p90"),
    Column("p99"),
    Column("TPOT p50"),
    Column("p90 "),
    Column("p99 "),
    Column("E2E p50", rank=1),
    Column("p90  ", rank=1),
    Column("p99  ", rank=1),
    Column("90 % interval of TTFT p90", rank=7),
    Column("of TPOT p90", rank=7),
    Column("queue", rank=3),
    Column("running", rank=4),
    Column("cache use", rank=2),
    Column("preempted", rank=5),
    Column("prefix hits", rank=6),
    Column("goodput/s", rank=1),
    Column("tokens/s/GPU", rank=2),
    Column("USD/1M tokens", rank=2),
)
_SERVER_COLUMNS = (
    Column("server"),
    Column("device", is_text=True),
    Column("instances", is_text=True),
    Column("GPUs"),
    Column("largest load"),
    Column("within limits"),
    Column("closed form", rank=1),
    Column("cache tokens", rank=2),
    Column("sequences", rank=3),
    Column("tokens/pass", rank=3),
    Column("pass error", rank=4),
)


def print_traffic(output: TrafficOutput, console: Console) -> None:
    """Print what was simulated, the runs, the servers and notes."""
    console.print(describe_traffic(output), style="bold", soft_wrap=True)
    print_table(run_columns(output), console)
    console.print()
    console.print(verdict_words(output), style="bold" if output.keeps_limits else "bold red", soft_wrap=True)
    print_table(server_columns(output), console)
    print_notes(output.notes, console)


def describe_traffic(output: TrafficOutput) -> str:
    """What was simulated, in one line."""
    request = output.request
    devices = " and ".join(device.title for device in output.devices)
    count = f"{request.num_devices} x " if request.num_devices else ""
    limits = [
        f"{word} p90 at most {format_seconds(limit)}"
        for word, limit in (("TTFT", request.ttft_p90_limit_s), ("TPOT", request.tpot_p90_limit_s))
        if limit is not None
    ]
    what = "of a trace" if request.source == "trace" else f"with seed {request.seed}"
    return (
        f"{output.config.title} on {count}{devices}: {request.num_requests:,} requests {what}, "
        f"{request.mean_prompt_len:.0f} tokens in and {request.mean_output_len:.0f} out on average, "
        f"{output.format.name}" + "".join(f", {limit}" for limit in limits)
    )


def verdict_words(output: TrafficOutput) -> str:
    """Which server to take."""
    if output.best is None:
        return "no server keeps the limits; give a lower rate, more --gpus, or raise --ttft-p90 or --tpot-p90"
    run = output.runs[output.best]
    server = output.servers[run.server]
    return (
        f"best: server {run.server + 1}, {server.num_units} x ({server.instances}) on {server.num_devices} x "
        f"{server.device}, at {run.arrivals_per_s:.4g} requests/s"
    )


def run_columns(output: TrafficOutput) -> list[Column]:
    """Simulations, as columns of a table."""
    has_limits = (output.request.ttft_p90_limit_s, output.request.tpot_p90_limit_s) != (None, None)
    return columns_of([_run_row(run, has_limits=has_limits) for run in output.runs], _RUN_COLUMNS)


def _run_row(run: TrafficRunOutput, *, has_limits: bool) -> list[str]:
    head = [str(run.server + 1), f"{run.arrivals_per_s:.4g}"]
    if not run.holds_load:
        return [*head, "overload", *[""] * (len(_RUN_COLUMNS) - 3)]
    times = [getattr(run, f"{name}_{part}_s") for name in ("ttft", "tpot", "e2e") for part in ("p50", "p90", "p99")]
    return [
        *head,
        "" if not has_limits else "kept" if run.keeps_limits else "missed",
        *("" if time_s is None else format_seconds(time_s) for time_s in times),
        f"{format_seconds(run.ttft_p90_low_s or 0.0)} to {format_seconds(run.ttft_p90_high_s or 0.0)}",
        f"{format_seconds(run.tpot_p90_low_s)} to {format_seconds(run.tpot_p90_high_s)}"
        if run.tpot_p90_low_s is not None and run.tpot_p90_high_s is not None
        else "",
        f"{run.mean_queue:.3g}",
        f"{run.mean_running:.3g}",
        format_percent(run.cache_use_fraction or 0.0),
        f"{run.preemptions_per_request:.2g}" if run.preemptions_per_request else "",
        format_percent(run.prefix_hit_fraction) if run.prefix_hit_fraction else "",
        f"{run.goodput_requests_per_s:.3g}",
        f"{run.tokens_per_s_per_device:,.0f}",
        "" if run.usd_per_million_tokens is None else f"{run.usd_per_million_tokens:.4g}",
    ]


def server_columns(output: TrafficOutput) -> list[Column]:
    """Servers, as columns of a table."""
    rows = [
        [
            str(place),
            server.device,
            f"{server.num_units} x ({server.instances})" if server.num_units > 1 else server.instances,
            str(server.num_devices),
            f"{server.capacity_requests_per_s:.3g}/s",
            "" if server.largest_requests_per_s is None else f"{server.largest_requests_per_s:.3g}/s",
            f"{server.closed_form_requests_per_s:.3g}/s",
            format_count(server.cache_tokens),
            str(server.max_num_seqs),
            str(server.max_num_batched_tokens),
            f"{format_percent(server.pass_error_median_fraction)} to {format_percent(server.pass_error_max_fraction)}",
        ]
        for place, server in enumerate(output.servers, start=1)
    ]
    return columns_of(rows, _SERVER_COLUMNS)


ASSUMPTIONS = (
    "Every request is simulated: a pass decodes one token of each running sequence and spends the rest of its token "
    "budget on prompts, in order of arrival (chunked prefill); a request enters when the cache has blocks for it.",
    "If no block is left, the sequence that entered last is computed again later (recomputation). A shared prefix "
    "and the blocks of such a sequence stay in the cache until they are needed.",
    "Times of passes are those of 'shapewright predict', interpolated over batch, context and prompt tokens; the table "
    "of servers has the median and the largest error of that.",
    "Requests are dealt to instances and pipeline stages in turn. Replicas that share experts run passes in step.",
    "Disaggregated: prompts are computed on prefill instances, and the time to first token includes sending the cache.",
    "The first tenth of random requests fills the server and is left out of the percentiles; none of a trace.",
    "Intervals are simulations with all passes at the ends of the 90 % interval of their times.",
    "The closed form is at the mean lengths, with a full batch of equal requests.",
    "Not modelled: tokenization, network to the client, priorities, uneven expert load.",
)
"""Assumptions of the simulation, one line each."""


def traffic_sections(output: TrafficOutput) -> list[Section]:
    """Sections of the page."""
    return [
        Words("Verdict", (verdict_words(output),)),
        table_of("Simulations", run_columns(output)),
        Figure(latency_chart(output), "90 % quantiles of requests."),
        table_of("Servers", server_columns(output)),
        Words("Assumptions", (*ASSUMPTIONS, *(f"Note: {line}" for line in output.notes))),
    ]
