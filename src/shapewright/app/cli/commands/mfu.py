"""shapewright mfu: explain a measured training step."""

from __future__ import annotations

from typing import Any

import click

from shapewright.app.cli.console import print_output
from shapewright.app.cli.device_options import named_device
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.options import api_keywords, question_options, software_option
from shapewright.app.cli.trace_options import pop_traced_job, trace_options
from shapewright.models.flop_conventions import CONVENTIONS

_EPILOG = """\b
Examples:
  shapewright mfu llama-3-8b --device h100-sxm-80gb --seconds 3.6 --gpus 8 --global-batch 128
  shapewright mfu llama-3-8b --device h100-sxm-80gb --tokens-per-s-per-gpu 9100 --gpus 8 --global-batch 128
  shapewright mfu gpt3-175b --device a100-sxm-80gb --seconds 13.75 --gpus 64 --global-batch 64 --tp 8 --pp 8
  shapewright mfu gpt3-175b --device a100-sxm-80gb --seconds 18.1 --gpus 64 --global-batch 64 --recompute full --json
  shapewright mfu llama-3-8b --device h100-sxm-80gb --seconds 3.6 --gpus 8 --global-batch 128 --oneline
  shapewright mfu llama-3-8b --device h100-sxm-80gb --seconds 3.6 --gpus 8 --global-batch 128 --html mfu.html
  shapewright mfu dit-xl-2 --device h100-sxm-80gb --steps-per-s 7.5 --gpus 8 --global-batch 256
  shapewright mfu llama-3-8b --device h100-sxm-80gb --trace profile.json.gz
  shapewright mfu my_model.py:build --inputs "tokens=int64[4,512]" --device h100-sxm-80gb --seconds 0.1 --gpus 1
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@software_option
@trace_options
@click.option("--seconds", type=float, metavar="S", help="measured time of one optimizer step")
@click.option("--tokens-per-s", type=float, metavar="X", help="instead: measured tokens/s of the whole job")
@click.option(
    "--tokens-per-s-per-gpu", "--tokens-per-s-per-device", "tokens_per_s_per_device", type=float, metavar="X",
    help="instead: measured tokens/s of the job, divided by its devices",
)  # fmt: skip
@click.option("--steps-per-s", type=float, metavar="X", help="instead: measured optimizer steps per second")
@click.option("--images-per-s", type=float, metavar="X", help="instead: measured images/s of the whole job")
@click.option("--gpus", "num_devices", type=int, metavar="N", help="devices of the whole job")
@click.option(
    "--trace", metavar="FILE",
    help="trace of one rank by torch.profiler (export_chrome_trace; .json or .gz): says where the step loses time, and "
    "states the time, devices and batch that are not given",
)  # fmt: skip
@click.option(
    "--convention",
    type=click.Choice(tuple(CONVENTIONS)),
    default="megatron",
    show_default=True,
    help="FLOP convention of the headline; the report has all",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--html", metavar="FILE", help="also write an HTML page with the figure")
@click.option("--oneline", is_flag=True, help="print one line of name=value pairs, for logs")
def command(
    config: str | None,
    device: str,
    software: str | None,
    seconds: float | None,
    tokens_per_s: float | None,
    tokens_per_s_per_device: float | None,
    steps_per_s: float | None,
    images_per_s: float | None,
    num_devices: int | None,
    trace: str | None,
    as_json: bool,
    html: str | None,
    oneline: bool,
    **given: Any,
) -> int:
    """Explain a measured training step of CONFIG: MFU, HFU, and where the rest of the peak went.

    The measurement is --seconds a step, --tokens-per-s, --tokens-per-s-per-gpu, --steps-per-s or --images-per-s, one
    of them; --global-batch is needed. Without --tp, --pp and --dp the waterfall assumes the fastest plain layout that
    fits. With --trace all of these follow from the trace where they are not given (record_shapes=True), and kernels are
    matched to predicted operations: which are slow, gaps of the host, exposed communication, recomputation, and the fix
    that gains most.
    """
    from shapewright.app.api.steps import mfu

    if as_json and oneline:
        raise click.UsageError("--json and --oneline cannot be combined; give one of them")
    rates = {"tokens-per-s": tokens_per_s, "tokens-per-s-per-gpu": tokens_per_s_per_device}
    rates |= {"steps-per-s": steps_per_s, "images-per-s": images_per_s}
    num_given = sum(value is not None for value in (seconds, *rates.values()))
    if num_given > 1 or (num_given == 0 and trace is None):
        others = ", ".join(f"--{name}" for name in rates)
        raise click.UsageError(f"give what was measured as one of --seconds, {others}")
    source = click.get_current_context().get_parameter_source("convention")
    named = given["convention"] if source is not click.core.ParameterSource.DEFAULT else ""
    job = pop_traced_job(config, device, given, software=software, oneline=oneline, html=html, convention=named)
    if job is not None:
        ranks = job.trace.num_ranks
        if num_devices not in (None, ranks):
            where = "one device" if ranks == 1 else f"{ranks} devices"
            raise click.UsageError(f"--gpus {num_devices}: the traced module runs on {where}; leave --gpus out")
        if tokens_per_s_per_device is not None:
            tokens_per_s = tokens_per_s_per_device * ranks
        if images_per_s is not None and not job.trace.counts_samples:
            raise click.UsageError("--images-per-s has no effect on a module whose inputs are tokens")
        if tokens_per_s is not None and job.trace.counts_samples:
            raise click.UsageError("--tokens-per-s has no effect on a module whose inputs are samples: --images-per-s")
        count = job.trace.num_job_tokens
        for work, rate in ((1, steps_per_s), (count, tokens_per_s), (count, images_per_s)):
            if rate is not None:
                seconds = work / rate if rate else 0.0
        from shapewright.app.report.traced.outputs import traced_mfu_output
        from shapewright.app.report.traced.report import print_traced_mfu
        from shapewright.prediction.traced import explain_traced_step
        from shapewright.prediction.utilization.kineto import read_trace

        profile = None if trace is None else read_trace(trace)
        explained = explain_traced_step(job.predict(), seconds, profile)
        print_output(traced_mfu_output(explained), print_traced_mfu, as_json=as_json)
        return 0
    keywords = api_keywords(given, with_defaults=True)
    batch = keywords["workload"].pop("global_batch_size", None)
    if num_devices is None and trace is None:
        raise click.UsageError("Missing option '--gpus': the devices of the whole job")
    if batch is None and trace is None:
        raise click.UsageError("Missing option '--global-batch': the sequences of one step over all replicas")
    found = mfu(
        config,
        device=named_device(device),
        seconds=seconds,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s_per_device,
        steps_per_s=steps_per_s,
        images_per_s=images_per_s,
        num_devices=num_devices,
        global_batch_size=batch,
        trace=trace,
        software=software,
        **keywords,
    )
    from shapewright.app.report.mfu import print_utilization, utilization_line, utilization_page
    from shapewright.app.report.outputs.mfu import mfu_output

    text = (lambda output, _: click.echo(utilization_line(output))) if oneline else print_utilization
    print_output(mfu_output(found), text, as_json=as_json, html=html, page=utilization_page)
    return 0
