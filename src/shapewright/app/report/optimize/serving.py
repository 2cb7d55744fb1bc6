"""Serving plans as text and as a page: best points, Pareto fronts, capacity of instances."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_facts, print_notes, print_table, spread
from shapewright.core.units import format_amount, format_number_of, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.serving import OperatingPointOutput, ServePlanOutput

_FRONT_ROWS = 10
_CAPACITY_ROWS = 8
_LEAST_SHARE = 0.05
_GIVES, _COSTS = "tokens/s/GPU", "USD/1M tokens"

_POINT_COLUMNS = (
    Column("instances", "{instances}", is_text=True),
    Column("GPUs", "{num_devices}", rank=2),
    Column("sequences", "{num_sequences}", rank=2),
    Column("first token", "{ttft_s}"),
    Column("90 % interval", "{ttft_low_s} to {ttft_high_s}"),
    Column("per token", "{tpot_s}"),
    Column("90 % interval ", "{tpot_low_s} to {tpot_high_s}"),
    Column(_GIVES, "{tokens_per_s_per_device:,.0f}"),
    Column(_COSTS, "{usd_per_million_tokens:.4g}", rank=2),
    Column("tokens/s/user", "{tokens_per_s_per_user:.1f}", rank=2),
    Column("requests/s", "{requests_per_s:.2f}", rank=3),
    Column("prefill load", "{prefill_load_fraction}", rank=2),
    Column("limited by", "{limited_by}", is_text=True, rank=4),
    Column("prompt tokens/pass", "{prefill_tokens:,}", rank=5),
)
_CAPACITY_COLUMNS = (
    Column("instance", "{instance}", is_text=True),
    Column("GPUs", "{layout.num_devices}"),
    Column("weights/GPU", "{weights_bytes}", rank=1),
    Column("free for cache", "{free_bytes}", rank=1),
    Column("cache/token", "{cache_bytes_per_token:bytes}", rank=2),
    Column("tokens in cache", "{cache_tokens:count}"),
    Column("sequences", "{most_sequences:,}"),
)


def print_serving(output: ServePlanOutput, console: Console) -> None:
    """Print the request, the best of each mode and format, fronts, capacities and notes."""
    console.print(describe_serving(output), style="bold", soft_wrap=True)
    if output.recommended is not None:
        print_table(mode_columns(output), console)
        print_facts(recommendation_facts(output), console)
    else:
        console.print(no_plan_words(output), style="bold red", soft_wrap=True)
    if any(output.best_by_format[one.name] for one in output.formats[1:]):
        console.print()
        console.print("best point of each format (other formats change the outputs of the model)", style="bold")
        print_table(format_columns(output), console)
    if front := output.front_by_format[output.formats[0].name]:
        console.print()
        console.print("Pareto front over tokens/s per user and per GPU", style="bold")
        print_table(point_columns(spread(front, _FRONT_ROWS)), console)
    console.print()
    console.print(f"capacity of one instance, {output.formats[0].name}", style="bold")
    print_table(capacity_columns(output, _CAPACITY_ROWS), console)
    if output.adapters:
        console.print()
        print_facts(
            {
                "LoRA adapters": f"{output.adapters.num_resident} resident",
                "rank": str(output.adapters.rank),
                "on": output.adapters.targets,
            },
            console,
        )
    speculation = output.speculation
    if speculation:
        console.print()
        print_facts(
            {
                "speculative decoding": f"{speculation.num_draft_tokens} proposed, "
                f"{format_percent(speculation.acceptance_fraction)} accepted",
                "tokens per pass": f"{speculation.tokens_per_pass:.2f}",
                "draft memory": f"{format_percent(speculation.draft_memory_fraction)} of weights and cache",
            },
            console,
        )
    print_notes(output.notes, console)


def describe_serving(output: ServePlanOutput) -> str:
    """The request in one line."""
    request = output.request
    limits = [
        f"{word} at most {format_seconds(limit)}"
        for word, limit in (("first token", request.ttft_limit_s), ("per token", request.tpot_limit_s))
        if limit is not None
    ]
    parts = [f"{request.cached_len} of them cached"] if request.cached_len else []
    parts += [f"{format_number_of(request.images, 'image')} included"] if request.images else []
    within = f" ({', '.join(parts)})" if parts else ""
    devices = f"{request.num_devices} x " if request.num_devices else ""
    return (
        f"{output.config.title} on {devices}{output.device.title}: "
        f"{format_number_of(request.prompt_len, 'token')} in{within}, "
        f"{request.output_len} out, {output.formats[0].name}, {output.server.title}"
        + "".join(f", {limit}" for limit in limits)
    )


def no_plan_words(output: ServePlanOutput, *, with_advice: bool = True) -> str:
    """Why no point keeps the limits, with the shortest times that are possible, and what to do."""
    first, token = output.shortest_ttft_s, output.shortest_tpot_s
    if first is None or token is None:
        return "no layout could be priced in this format"
    reason = (
        f"no point keeps the limits: the shortest time to first token is {format_seconds(first)}, the shortest time "
        f"per token {format_seconds(token)}, maybe at different points"
    )
    return f"{reason}; raise --ttft or --tpot, or give more --gpus" if with_advice else reason


def mode_columns(output: ServePlanOutput, heading: str = "") -> list[Column]:
    """The recommended point, and the one of each mode with most tokens/s of the devices, as columns of a table."""
    first, *others = _named_columns({"recommended": output.recommended, **output.best_by_mode})
    return [replace(first, name=heading), *others]


def recommendation_facts(output: ServePlanOutput) -> dict[str, str]:
    """Why a point is recommended, what limits it, what its tokens cost, and the instances for the load."""
    point, fleet = output.recommended, output.fleet
    if point is None:
        return {}
    facts = {"recommended": output.recommended_reason}
    if output.request.ttft_limit_s is None and output.recommended_ttft_limit_s is not None:
        facts["first token"] = f"within the default limit of {format_seconds(output.recommended_ttft_limit_s)}"
    facts["limited by"] = limit_words(point)
    if point.usd_per_million_input_tokens is not None:
        facts["cost"] = (
            f"{point.usd_per_million_input_tokens:.3g} USD per million tokens in, "
            f"{point.usd_per_million_output_tokens:.3g} out"
        )
    if fleet is not None:
        price = "" if fleet.usd_per_hour is None else f", {format_amount(fleet.usd_per_hour)} USD/h"
        facts["load"] = (
            f"{fleet.requests_per_s:g} requests/s: {fleet.num_instances} + {fleet.num_spare_instances} spare x "
            f"({point.instances}), {fleet.num_devices} GPUs, {format_percent(fleet.load_fraction)} used{price}"
        )
    return facts


def limit_words(point: OperatingPointOutput) -> str:
    """What limits a point, such as ``memory: memory 68 %, communication 16 %, latency 16 % of a pass; cache 7 % full``.

    Shares under 5 % are left out.
    """
    shares = sorted(point.pass_fractions.items(), key=lambda entry: -entry[1])
    shown = ", ".join(f"{name} {format_percent(share)}" for name, share in shares if share >= _LEAST_SHARE)
    return f"{point.limited_by}: {shown} of a pass; cache {format_percent(point.cache_fraction)} full"


def format_columns(output: ServePlanOutput) -> list[Column]:
    """Best point of each format, as columns of a table."""
    return _named_columns(output.best_by_format)


def _named_columns(points: Mapping[str, OperatingPointOutput | None]) -> list[Column]:
    named = {name: point for name, point in points.items() if point is not None}
    return point_columns(list(named.values()), tuple(named))


def point_columns(points: Sequence[OperatingPointOutput], names: Sequence[str] = ()) -> list[Column]:
    """Points, as columns of a table; with a price, a narrow terminal keeps the cost and drops the throughput."""
    has_price = any(point.usd_per_million_tokens is not None for point in points)
    ranks = {_COSTS: 0, _GIVES: 2} if has_price else {}
    columns = [replace(column, rank=ranks.get(column.name, column.rank)) for column in _POINT_COLUMNS]
    instances, *others = columns_of(points, columns)
    short = tuple(re.sub(r"\((.*?)\)(?: prefill| decode)?", r"\1", cell) for cell in instances.cells)
    named = Column("", is_text=True, cells=tuple(names) or ("",) * len(points))
    return [named, replace(instances, short_cells=short), *others]


def capacity_columns(output: ServePlanOutput, most: int | None = None) -> list[Column]:
    """Capacity of instances in the first format, as columns of a table."""
    in_first_format = [capacity for capacity in output.capacities if capacity.format == output.formats[0].name]
    return columns_of(in_first_format[:most], _CAPACITY_COLUMNS)


ASSUMPTIONS = (
    "Times are those of 'shapewright predict' with --phase prefill or decode.",
    "Closed loop: the batch is always full and all lengths are equal. Decode passes are priced at the middle of the "
    "answer, windows at their mean length over it, prefill passes at the mean over those of a prompt.",
    "Aggregated: a share f of the passes also prefills, f = B n / (O - 1) for B sequences, n prefill passes per prompt "
    "and O output tokens; a mean pass takes (1 - f) T_decode + f T_mixed. The prefill capacity is used up to 80 %.",
    "Queueing before the first token follows M/D/1, one server with random arrivals and a fixed service time: "
    "rho S / (2 (1 - rho)).",
    "Disaggregated: the KV cache of a prompt is sent between instances; the time to first token includes that.",
    "Every pipeline stage, and every replica of the attention (DP), works on a batch of its own.",
    "Sequences allocate the cache blocks of prompt and answer at their start; nothing is evicted, and prompts share no "
    "prefix.",
    "Speculation: E = (1 - a^(g+1)) / (1 - a) tokens per pass; the verifying pass is priced, the draft costs g times "
    "its share of a decode step. Its weights, its cache and its time for prompts are --draft-size of the model's; by "
    "default --draft-cost, which is at least as much for a draft that reads weights and cache once in a step.",
    "LoRA: sequences use the resident adapters with equal chance; their GEMMs are priced as batched GEMMs. Not "
    "compared with measurements.",
    "Not modelled: varying lengths, bursts of arrivals, uneven expert load, tokenization, sampling, a slow host.",
)
"""Assumptions of a serving plan, one line each."""


def serving_page(output: ServePlanOutput) -> str:
    """Render a serving plan as one HTML document."""
    from shapewright.app.figures.plan import serving_chart
    from shapewright.app.report.page import Figure, Section, Words, render_page, table_of

    sections: list[Section] = []
    if output.recommended is not None:
        sections.append(table_of("Recommended, and most tokens/s of each mode", mode_columns(output, "point")))
        facts = recommendation_facts(output)
        sections.append(Words("The recommended point", tuple(f"{name}: {words}" for name, words in facts.items())))
    else:
        sections.append(Words("No plan", (no_plan_words(output),)))
    if output.launch is not None:
        sections.append(
            Words(f"Launch: {output.launch.engine} {output.launch.version}", output.launch.warnings, output.launch.text)
        )
    sections.append(Figure(serving_chart(output), "Up and to the right is better."))
    if len(output.formats) > 1:
        note = "Other formats change the outputs of the model, which is not evaluated here."
        sections.append(table_of("Best point of each format", format_columns(output), note=note))
    if front := output.front_by_format[output.formats[0].name]:
        sections.append(table_of("The front", point_columns(front)))
    sections.append(table_of(f"Capacity of one instance, {output.formats[0].name}", capacity_columns(output)))
    sections.append(Words("Assumptions", (*ASSUMPTIONS, *(f"Note: {line}" for line in output.notes))))
    return render_page(f"Serving {output.config.title}", sections, subtitle=describe_serving(output))
