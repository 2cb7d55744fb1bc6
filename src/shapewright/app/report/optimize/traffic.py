"""Simulated traffic as text and as a page: percentiles over load, servers, what a run keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, fill, print_notes, print_table
from shapewright.core.units import format_number_of, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.traffic import TrafficOutput, TrafficRunOutput, TrafficServerOutput


def _instances_words(server: TrafficServerOutput) -> str:
    return f"{server.num_units} x ({server.instances})" if server.num_units > 1 else server.instances


def _unless_zero(run: TrafficRunOutput, template: str) -> str:
    """The one field of a template, empty where it is zero."""
    name = template.strip("{}").partition(":")[0]
    return fill(template, run) if getattr(run, name) else ""


# A server that cannot hold the load has a rate and no times.
_RUN_COLUMNS = (
    Column("TTFT p50", "{ttft_p50_s}"),
    Column("p90", "{ttft_p90_s}"),
    Column("90 % interval", "{ttft_p90_low_s} to {ttft_p90_high_s}"),
    Column("p99", "{ttft_p99_s}"),
    Column("TPOT p50", "{tpot_p50_s}"),
    Column("p90 ", "{tpot_p90_s}"),
    Column("90 % interval ", "{tpot_p90_low_s} to {tpot_p90_high_s}"),
    Column("p99 ", "{tpot_p99_s}"),
    Column("E2E p50", "{e2e_p50_s}", rank=1),
    Column("p90  ", "{e2e_p90_s}", rank=1),
    Column("p99  ", "{e2e_p99_s}", rank=1),
    Column("queue", "{mean_queue:amount}", rank=3),
    Column("running", "{mean_running:amount}", rank=4),
    Column("cache use", "{cache_use_fraction}", rank=2),
    Column(
        "preempted",
        lambda run: _unless_zero(run, "{preemptions_per_request:.2g}"),
        rank=5,
    ),
    Column("prefix hits", lambda run: _unless_zero(run, "{prefix_hit_fraction}"), rank=6),
    Column("goodput/s", "{goodput_requests_per_s:amount}", rank=1),
    Column("tokens/s/GPU", "{tokens_per_s_per_device:,.0f}", rank=2),
    Column("USD/1M tokens", "{usd_per_million_tokens:.4g}"),  # shown only where a price was given
)
_SERVER_COLUMNS = (
    Column("device", "{device}", is_text=True),
    Column("instances", _instances_words, is_text=True),
    Column("GPUs", "{num_devices}"),
    Column("USD/h", "{usd_per_hour:.4g}"),  # shown only where a price was given
    Column("largest load", "{capacity_requests_per_s:amount}/s"),
    Column("within limits", "{largest_requests_per_s:amount}/s"),
    Column("closed form", "{closed_form_requests_per_s:amount}/s", rank=1),
    Column("cache tokens", "{cache_tokens:count}", rank=2),
    Column("sequences", "{max_num_seqs}", rank=3),
    Column("tokens/pass", "{max_num_batched_tokens}", rank=3),
    Column("pass error", "{pass_error_median_fraction} to {pass_error_max_fraction}", rank=4),
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
    images = f", {format_number_of(request.images, 'image')} each" if request.images else ""
    what = "of a trace" if request.source == "trace" else f"with seed {request.seed}"
    return (
        f"{output.config.title} on {count}{devices}: {format_number_of(request.num_requests, 'request')} {what}, "
        f"{format_number_of(round(request.mean_prompt_len), 'token')} in and "
        f"{request.mean_output_len:.0f} out on average{images}, {output.format.name}"
        + "".join(f", {limit}" for limit in limits)
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

    def limits(run: TrafficRunOutput) -> str:
        if not run.holds_load:
            return "overload"
        return "" if not has_limits else "kept" if run.keeps_limits else "missed"

    headings = (
        Column("server", lambda run: str(run.server + 1)),
        Column("arrivals/s", "{arrivals_per_s:.4g}"),
        Column("limits", limits, is_text=True, rank=1),
    )
    return columns_of(output.runs, (*headings, *_RUN_COLUMNS))


def server_columns(output: TrafficOutput) -> list[Column]:
    """Servers, as columns of a table."""
    numbers = tuple(str(place) for place, _ in enumerate(output.servers, start=1))
    return [Column("server", cells=numbers), *columns_of(output.servers, _SERVER_COLUMNS)]


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


def traffic_page(output: TrafficOutput) -> str:
    """Render simulated traffic as one HTML document."""
    from shapewright.app.figures.plan import latency_chart
    from shapewright.app.report.page import Figure, Section, Words, render_page, table_of

    sections: list[Section] = [
        Words("Verdict", (verdict_words(output),)),
        table_of("Simulations", run_columns(output)),
        Figure(latency_chart(output), "90 % quantiles of requests."),
        table_of("Servers", server_columns(output)),
        Words("Assumptions", (*ASSUMPTIONS, *(f"Note: {line}" for line in output.notes))),
    ]
    return render_page(f"Traffic on {output.config.title}", sections, subtitle=describe_traffic(output))
