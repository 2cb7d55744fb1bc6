"""shapewright plan: how to spread a training job over devices."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.console import counting_line, echo, print_output, refuse_unwritable, write_text_file
from shapewright.app.cli.device_options import named_device
from shapewright.app.cli.help_pages import GroupedCommand, set_next
from shapewright.app.cli.kept_fields import keep_of_plan
from shapewright.app.cli.options import api_keywords, has_files, question_options, software_option
from shapewright.app.cli.param_types import SHARE
from shapewright.core.errors import ConfigError

if TYPE_CHECKING:
    from shapewright.app.formats.output_format import OutputFormat
    from shapewright.core.notes import Note
    from shapewright.optimize.plan.result import Plan, PlanResult

EXIT_INTERRUPTED = 130

_EPILOG = """\b
Examples:
  shapewright plan llama-3-70b --device h100-sxm-80gb --gpus 512 --global-batch 2048 --seq-len 8192
  shapewright plan gpt3-175b --device a100-sxm-80gb --gpus 1024 --global-batch 1536 --tp 8 --keep schedule=1f1b
  shapewright plan mixtral-8x7b --device h100-sxm-80gb --gpus 64 --global-batch 256 --headroom 10% --json
  shapewright plan llama-3-8b --device h100-sxm-80gb --gpus 64 --global-batch 256 --objective cost --usd-per-hour 2.5
  shapewright plan llama-3-8b --device rtx-4090 --gpus 16 --global-batch 64 --node-size 8 --network-gbit-per-s 100
  shapewright plan llama-3-8b --device h100-sxm-80gb --gpus 8 --global-batch 64 --format accelerate-yaml
  shapewright plan llama-3-70b --device h100-sxm-80gb --gpus 64 --global-batch 256 --html plan.html --trace plan.json
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@click.option("--gpus", "num_devices", type=int, required=True, metavar="N", help="devices of the job")
@click.option(
    "--objective",
    type=click.Choice(("time", "cost", "memory")),
    default="time",
    show_default=True,
    help="time: shortest step; cost: least device time per token, on fewer devices where cheaper; memory: least memory",
)
@click.option("--top", type=int, default=10, show_default=True, help="number of plans to list")
@click.option(
    "--keep",
    multiple=True,
    metavar="FIELD=V,V",
    help="values that a field may take: tp, pp, dp, cp, ep, etp, sp, vpp, zero, schedule, micro_batch, "
    "recompute, offload_activations, offload_optimizer; may be repeated. A flag such as --tp 8 keeps one value",
)
@click.option("--try-offload", is_flag=True, help="also try host memory for activations and optimizer states")
@click.option(
    "--headroom", "headroom_fraction", type=SHARE, default=0.0, help="share of memory to leave free (default: 0%)"
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    metavar="NAME",
    help="optimizer, which sets the states stored and sent per parameter",
)
@software_option
@click.option("--usd-per-hour", type=float, metavar="USD", help="price of one device for an hour")
@click.option(
    "--straggler-factor",
    type=float,
    default=1.0,
    show_default=True,
    metavar="F",
    help="expected over predicted step time, to allow for slow devices",
)
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help="print the chosen plan for a framework, and search only what its format can express: megatron-args, "
    "torchtitan-toml, neox-yaml, nanogpt, litgpt-yaml, deepspeed-json or accelerate-yaml",
)
@click.option(
    "--pick", type=int, default=1, show_default=True, metavar="RANK", help="rank of the plan for --format and --trace"
)
@click.option("-o", "--output", metavar="FILE", help="write the output of --format to a file, and print the report")
@click.option("--html", metavar="FILE", help="write a page with the pipeline's timeline and the Pareto front")
@click.option("--trace", metavar="FILE", help="write the pipeline's timeline as a Chrome trace")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(
    config: str | None,
    device: str,
    top: int,
    keep: tuple[str, ...],
    format_name: str | None,
    pick: int,
    output: str | None,
    html: str | None,
    trace: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Plan how to spread the training of CONFIG over devices.

    Tensor, pipeline (GPipe, 1F1B, interleaved, zero-bubble), data, context and expert parallelism, ZeRO stage, sequence
    parallelism, micro-batch, recomputation and, with --try-offload, the host's memory are searched together under
    memory and divisibility. Every plan has the time and the memory that 'shapewright predict' and 'shapewright memory'
    give it.

    Exit code 0: done; 2: bad input, or nothing fits; 130: interrupted, with the best so far.
    """
    from shapewright.app.api.searches import plan
    from shapewright.app.report.optimize.plan import print_plan
    from shapewright.app.report.outputs.plan import plans_output
    from shapewright.models.read import read_model
    from shapewright.models.transformer import with_changes
    from shapewright.models.write import untimed_values

    form = _check_format(format_name, as_json=as_json, output=output)
    refuse_unwritable(output, html, trace)
    keywords = api_keywords(given)
    kept = keep_of_plan(keep)
    limits: tuple[Note, ...] = ()
    fused: dict[str, bool] = {}
    if form is not None:
        from shapewright.app.formats.output_format import fused_as_trained, keep_expressible, note_on_limits
        from shapewright.app.formats.registry import FORMATS, write_format
        from shapewright.workload.recompute import CORE

        model = read_model(config, keywords["overrides"]).config
        modules = keywords["workload"].get("recompute_modules", CORE)
        expressible = keep_expressible(form, kept, recompute_modules=modules)
        limits, kept = note_on_limits([form.name], kept, expressible), expressible
        fused, as_trained = fused_as_trained(form, model)
        if form.name in FORMATS:  # a model that the format cannot express is refused before the search
            write_format(form.name, with_changes(model, fused))
        keywords["overrides"] |= fused
        limits += as_trained
    result = plan(
        config,
        device=named_device(device),
        top=max(top, pick) if top > 0 else top,
        keep=kept,
        progress=counting_line("splits"),
        **keywords,
    )
    if not result.plans:
        click.echo("stopped before any plan was found", err=True)
        return EXIT_INTERRUPTED
    result = replace(result, notes=(*result.notes, *limits))
    untimed = untimed_values(read_model(config, keywords["overrides"])) if format_name else {}
    untimed["node_size"] = result.scenario.device.node_size
    text = _write_files(result, format_name, untimed, pick=pick, output=output, html=html, trace=trace)
    if text:
        click.echo(text, nl=False)
    else:
        following = "check" if any(getattr(note, "code", "") == "shape" for note in result.notes) else "predict"
        set_next(f"{following} {{job}}", _chosen_fields(_ranked(result, pick)) | fused)
        print_output(plans_output(result), print_plan, as_json=as_json)
    return 0 if result.is_complete else EXIT_INTERRUPTED


def _check_format(name: str | None, *, as_json: bool, output: str | None) -> OutputFormat | None:
    """Look a format up before the search, and refuse what contradicts it."""
    if name is None:
        if output is not None:
            raise click.UsageError("-o has no effect without --format: give a format, or leave -o out")
        return None
    if as_json and output is None:
        raise click.UsageError("--format and --json both print: write the format with -o FILE, or leave one out")
    from shapewright.app.formats.registry import find_format

    return find_format(name)


def _write_files(
    result: PlanResult,
    format_name: str | None,
    untimed: dict[str, float],
    *,
    pick: int,
    output: str | None,
    html: str | None,
    trace: str | None,
) -> str:
    """Write the requested files; return text to print instead of the report, if any."""
    chosen = _ranked(result, pick)
    if trace is not None and chosen.layout.pipeline_parallel == 1:  # checked before anything is written
        raise ConfigError(
            f"--trace draws a pipeline, and rank {pick} has none; --keep pp=2,4,8 or another --pick has one"
        )
    if html is not None:
        from shapewright.app.report.optimize.plan import render_plan
        from shapewright.app.report.outputs.plan import plans_output

        write_text_file(html, render_plan(plans_output(result), result.plans[0].prediction))
    if trace is not None:
        from shapewright.app.report.optimize.plan import chrome_trace

        write_text_file(trace, json.dumps(chrome_trace(chosen)) + "\n")
    if format_name is None:
        return ""
    from shapewright.app.formats.registry import write_format

    text = write_format(format_name, result.config, workload=chosen.workload, layout=chosen.layout, untimed=untimed)
    if output is None:
        return text
    write_text_file(output, text)
    echo(f"wrote {output} (rank {pick})", err=True)
    return ""


def _chosen_fields(plan: Plan) -> dict[str, Any]:
    """Return what a plan chose and a prediction of it has to be told: fields that differ from what it would take."""
    from shapewright.optimize.plan.request import PLANNED_WORKLOAD_FIELDS

    found = {name: getattr(plan.workload, name) for name in PLANNED_WORKLOAD_FIELDS}
    found |= {one.name: getattr(plan.layout, one.name) for one in fields(plan.layout)}
    if has_files(click.get_current_context()):  # which set other values than the defaults
        return found
    usual = {one.name: one.default for part in (plan.workload, plan.layout) for one in fields(part)}
    return {name: value for name, value in found.items() if name == "micro_batch_size" or value != usual[name]}


def _ranked(result: PlanResult, rank: int) -> Plan:
    if not 1 <= rank <= len(result.plans):
        raise ConfigError(f"--pick {rank}: there are ranks 1 to {len(result.plans)}; give one of them")
    return result.plans[rank - 1]
