"""shapewright predict: predict a step, operation by operation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.console import print_csv, print_output
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.options import question_options, scenario_from_options, software_option
from shapewright.app.cli.trace_options import pop_traced_job, trace_config_option, trace_options
from shapewright.app.report.flags import field_named

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

_EPILOG = """\b
Examples:
  shapewright predict llama-3-8b --device h100-sxm-80gb --tp 2 --dtype fp8
  shapewright predict gpt3-2.7b --device a100-sxm-40gb --attention unfused
  shapewright predict llama-3-8b --device h100-sxm-80gb --phase decode --context-len 8192 --micro-batch-size 32
  shapewright predict ./config.json --device h100-sxm-80gb --tp 8 --pp 4 --dp 16 --global-batch-size 1024
  shapewright predict llama-3-8b --hidden-size 4097 --device h200-sxm-141gb --json
  shapewright predict llama-2-70b --device a100-sxm-80gb --dp 64 --zero-stage 3 --software fsdp-2024
  shapewright predict gpt2 --device a100-sxm-80gb --explain logits
  shapewright predict llama-3-8b --device h100-sxm-80gb --phase decode --sweep micro_batch_size=1..64
  shapewright predict llama-3-8b --device h100-sxm-80gb --micro-batch-size 1 --sweep vocab_size=128256,128257,128320
  shapewright predict my_model.py:build --inputs "tokens=int64[4,512]" --device h100-sxm-80gb --dtype bf16 --fused
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@software_option
@trace_options
@trace_config_option
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--explain", metavar="OP", help="explain the time of an operation, such as attention.qkv")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="FIELD=VALUES",
    help="predict every value of a workload or layout field or of a size of the model, such as micro_batch_size=1,2,4 "
    "or =1..64 (doubles) or hidden_size=4096..4608:64 (adds); may be given for several fields",
)
@click.option("--csv", "as_csv", is_flag=True, help="print CSV, one row per operation, or per step of --sweep")
@click.option("--all", "show_all", is_flag=True, help="list every operation")
def command(
    config: str | None,
    device: str,
    software: str | None,
    as_json: bool,
    as_csv: bool,
    explain: str | None,
    sweeps: tuple[str, ...],
    show_all: bool,
    **given: Any,
) -> int:
    """Predict step time, throughput, MFU and memory of CONFIG on a device.

    CONFIG is a preset (see 'shapewright models'), a Hugging Face config.json or model folder, a hub id
    (organization/name), or omitted if flags give the whole model. FILE.py:CALLABLE runs a file of your own: the
    callable returns a PyTorch module, which is traced on the meta device for --inputs.
    """
    if show_all and (as_json or explain):
        raise click.UsageError("--all has no effect with --json or --explain, which list every operation anyway")
    if as_csv and (as_json or explain or show_all):
        raise click.UsageError("--csv cannot be combined with --json, --explain or --all; give one of them")
    top = None if show_all else 20
    job = pop_traced_job(config, device, given, software=software, sweep=sweeps, explain=explain, csv=as_csv)
    if job is not None:
        from shapewright.app.report.traced.outputs import traced_predict_output
        from shapewright.app.report.traced.report import print_traced_prediction

        print_output(traced_predict_output(job.predict()), partial(print_traced_prediction, top=top), as_json=as_json)
        return 0
    scenario = scenario_from_options(config, device, given, software=software)
    if sweeps:
        if explain or show_all:
            raise click.UsageError("--explain and --all have no effect with --sweep, which prints one row per step")
        _print_sweep(scenario, sweeps, as_json=as_json, as_csv=as_csv)
        return 0
    prediction = scenario.predict()
    if explain:
        from shapewright.app.report.explain import explain_operation, print_explanations

        print_output(explain_operation(prediction, explain), print_explanations, as_json=as_json)
        return 0
    from shapewright.app.report.outputs.predict import predict_output

    output = predict_output(prediction, scenario)
    if as_csv:
        print_csv(output.to_json()["operations"])
        return 0
    from shapewright.app.report.predict import print_prediction

    print_output(output, partial(print_prediction, top=top), as_json=as_json)
    return 0


def _print_sweep(scenario: Scenario, sweeps: tuple[str, ...], *, as_json: bool, as_csv: bool) -> None:
    """Predict every combination and print a row for each."""
    from shapewright.app.report.outputs.compare import sweep_output
    from shapewright.app.report.predict import print_sweep
    from shapewright.prediction.sweep import parse_values, predict_sweep

    axes = {}
    for text in sweeps:
        name, found, values = text.partition("=")
        if not found:
            raise click.UsageError(f"--sweep {text!r} is not of the form FIELD=VALUES, such as micro_batch_size=1..64")
        axes[field_named(name)] = parse_values(values)
    swept = predict_sweep(
        scenario,
        axes,
        notes=tuple(note for note in scenario.notes if note.field not in axes),
    )
    output = sweep_output(swept, scenario.model.source)
    if as_csv:
        print_csv([{**row.pop("values"), **row} for row in output.to_json()["rows"]])
        return
    print_output(output, print_sweep, as_json=as_json)
