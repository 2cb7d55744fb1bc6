"""shapewright search: find faster shapes of the same size, print them, write their configs, and measure them."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.cluster_options import cluster_options
from shapewright.app.cli.console import (
    counting_line,
    echo,
    make_console,
    print_output,
    refuse_unwritable,
    write_json_file,
    write_text_file,
)
from shapewright.app.cli.defaults import add_note, default_device
from shapewright.app.cli.device_options import (
    calibration_option,
    compared_devices,
    loss_law_option,
    named_device,
    node_options,
)
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.kept_fields import keep_of_shape
from shapewright.app.cli.names import complete_device
from shapewright.app.cli.options import (
    api_keywords,
    experiments_option,
    job_options,
    software_option,
    write_experiments,
)
from shapewright.app.cli.param_types import NATS, SHARE, amount_of, count_of
from shapewright.app.report.flags import flag_of
from shapewright.core.errors import ConfigError

if TYPE_CHECKING:
    from shapewright.app.report.outputs.search import SearchOutput
    from shapewright.hardware.device import Device
    from shapewright.optimize.search.result import Candidate, SearchResult, Verification


def check_files(output: str | None, html: str | None, experiments: str | None, format_name: str) -> None:
    """Refuse output files and formats that cannot be written, before the search.

    Raises:
        UsageError: a form without a file, or standard output as a file.
        ShapewrightError: there is no such form, or a file cannot be written.
    """
    if format_name != "hf":
        from shapewright.app.formats.registry import check_format

        check_format(format_name)
        if not output:
            raise click.UsageError("--format has no effect without -o: give -o FILE, or leave it out")
    if "-" in (output, html, experiments):
        raise click.UsageError("-o, --html and --experiments need a file name: standard output is used for the report")
    refuse_unwritable(output, html, experiments)


def show_result(result: SearchResult, found: SearchOutput, *, explain: int | None, as_json: bool, as_csv: bool) -> None:
    """Print the shapes found, their measurements and the experiments that would decide between them."""
    if as_csv:
        from shapewright.app.report.outputs.search import search_rows

        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(search_rows(result))
        click.echo(text.getvalue(), nl=False)
        return
    from shapewright.app.report.optimize.search import print_next_steps, print_search

    if explain is None:
        print_output(found, print_search, as_json=as_json)
        return
    from shapewright.app.report.optimize.candidates import explained_shape_output, print_explained_shape

    explained = explained_shape_output(result, _ranked(result, explain, "--explain"))
    print_output(explained, print_explained_shape, as_json=as_json)
    if not as_json:
        print_next_steps(found, make_console())


def write_shape(result: SearchResult, rank: int, output: str, format_name: str) -> None:
    """Write the shape at a rank to a file of a format, and print changes that the format cannot express."""
    candidate = _ranked(result, rank, "--pick")
    if format_name == "hf":
        from shapewright.models.write import to_config_json

        write_json_file(output, to_config_json(result.model, candidate.config))
    else:
        write_text_file(output, _write_as(format_name, candidate, result))
    words = f"wrote {output} (rank {candidate.rank})"
    if format_name == "hf":
        words += _flags_beside(candidate)
    echo(words, err=True)


def _write_as(format_name: str, candidate: Candidate, result: SearchResult) -> str:
    """Write a shape in a format.

    Raises:
        ConfigError: the format cannot express the shape; the message names the first rank that it can express.
    """
    from shapewright.app.formats.registry import write_format
    from shapewright.models.write import untimed_values

    def write(one: Candidate) -> str | ConfigError:
        job = one.prediction
        try:
            return write_format(
                format_name, one.config, workload=job.workload, layout=job.layout, untimed=untimed_values(result.model)
            )
        except ConfigError as error:
            return error

    written = write(candidate)
    if isinstance(written, str):
        return written
    other = next((one.rank for one in result.candidates if isinstance(write(one), str)), None)
    advice = "vary other fields" if other is None else f"rank {other} can be written: --pick {other}"
    raise ConfigError(f"rank {candidate.rank}: " + written.text, advice=advice)


def _flags_beside(candidate: Candidate) -> str:
    """Changes that no config.json can express (batch, layout, recomputation), as flags."""
    layout, workload = candidate.prediction.layout, candidate.prediction.workload
    flags = {
        "micro_batch": [f"--micro-batch-size {workload.micro_batch_size}"],
        "recompute": [f"--recompute {workload.recompute}"],
        "layout": [
            f"{flag_of(name)} {getattr(layout, name)}"
            for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel")
        ],
    }
    said = [flag for change, words in flags.items() if change in candidate.changed_fields for flag in words]
    return f"; it is fastest with {' '.join(said)}" if said else ""


def _ranked(result: SearchResult, rank: int, option: str) -> Candidate:
    if not result.candidates:
        raise ConfigError("the search found no faster shape to write or to explain; vary more fields")
    if not 1 <= rank <= len(result.candidates):
        found = f"ranks 1 to {len(result.candidates)}"
        raise ConfigError(f"{option} {rank}: the search found {found}; give one of them, or a higher --top")
    return result.candidates[rank - 1]


def measure_shapes(result: SearchResult, num_shapes: int, budget_s: float) -> Verification:
    """Measure on this machine's GPU, or on its CPU where there is none."""
    from shapewright.measure.bench.verify import verify_search
    from shapewright.measure.bench.worker import Worker, WorkerOptions

    show = counting_line("measurements")
    with Worker(WorkerOptions(cpu=not _has_gpu())) as worker:
        return verify_search(result, num_shapes, worker, budget_s=budget_s, **({"on_case": show} if show else {}))


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False  # opening the CPU says what is missing
    return bool(torch.cuda.is_available())


_OBJECTIVES = ("time-to-loss", "loss-at-budget", "time", "train-tokens-per-s", "prefill", "decode-latency", "cost")
EXIT_INTERRUPTED = 130
_VERIFY_BUDGET_S = 60.0

_EPILOG = """\b
Examples:
  shapewright search gpt3-2.7b --device a100-sxm-40gb --attention unfused
  shapewright search gpt3-2.7b --device h100-sxm-80gb --vary ffn,vocab --keep heads=32 -o best.json
  shapewright search llama-2-7b --device h100-sxm-80gb --tp 2 -o best.args --format megatron-args
  shapewright search --params 3b --family llama --device h200-sxm-141gb --train-tokens 300b --top 5
  shapewright search ./config.json --device h100-sxm-80gb --objective decode-latency --context-len 8192 --json
  shapewright search gpt3-2.7b --device a100-sxm-80gb --explain 1
  shapewright search llama-3-8b --device h100-sxm-80gb --dp 8 --zero-stage 3 --train-tokens 1t
  shapewright search gpt3-2.7b --device a100-sxm-80gb --gpu-hours 20000
  shapewright search gpt3-2.7b --device a100-sxm-80gb --train-tokens 300b --experiments runs.csv
  shapewright search gpt3-2.7b --device a100-sxm-80gb --objective cost --serve-tokens 1t --usd-per-hour 2
  shapewright search gpt2 --device l40s --dtype bf16 --vary vocab --seq-len 256 --verify 1 --verify-budget 2
  shapewright search gpt3-2.7b --devices h100-sxm-80gb,a100-sxm-80gb,mi300x --train-tokens 300b --html search.html
  shapewright search llama-3-8b --device h100-sxm-80gb --tp 2 --dp 32 --global-batch 512 --vary layout,micro_batch
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@job_options
@click.option(
    "--device",
    metavar="NAME",
    shell_complete=complete_device,
    help="device name, alias or TOML file; see 'shapewright devices'",
)
@click.option("--devices", metavar="NAME,...", help="several devices: shapes are ranked by worst regret")
@calibration_option
@loss_law_option
@node_options
@software_option
@click.option(
    "--params",
    "num_parameters",
    type=count_of("parameters"),
    metavar="N",
    help="number of parameters, such as 2.7b (default: that of CONFIG)",
)
@click.option("--family", metavar="NAME", help="without CONFIG: family to start from, such as llama or gpt")
@click.option(
    "--tolerance",
    "tolerance_fraction",
    type=SHARE,
    default=0.02,
    help="allowed deviation from that size (default: 2%)",
)
@click.option(
    "--vary",
    multiple=True,
    metavar="FIELD,...",
    help="fields to vary: heads, head_dim, kv_heads, ffn, vocab, depth, width, micro_batch, experts, layout, recompute "
    "(default: heads,kv_heads,ffn,vocab,depth,width); may be repeated",
)
@click.option("--keep", multiple=True, metavar="FIELD=VALUE", help="fix a field; may be repeated")
@click.option(
    "--objective",
    type=click.Choice(_OBJECTIVES),
    help="what to minimize (default: time-to-loss with the length of a run, loss-at-budget with --gpu-hours, else the "
    "speed of the --phase)",
)
@click.option(
    "--train-tokens",
    type=count_of("tokens"),
    metavar="N",
    help="tokens that CONFIG is trained on (default: 20 per parameter)",
)
@click.option(
    "--gpu-hours",
    type=amount_of("GPU hours"),
    metavar="H",
    help="device hours that CONFIG is trained for, such as 20k, instead of tokens",
)
@click.option(
    "--target-loss",
    "target_loss_nats",
    type=NATS,
    metavar="NATS",
    help="loss that CONFIG is trained to, instead of tokens",
)
@click.option(
    "--serve-tokens",
    type=count_of("tokens"),
    metavar="N",
    help="tokens generated in the model's life, for --objective cost",
)
@click.option("--usd-per-hour", type=float, metavar="USD", help="price of one device for an hour")
@click.option("--top", type=int, default=20, show_default=True, help="number of shapes to list")
@click.option("--strict", is_flag=True, help="strict quality guard: stay close to the proportions of the baseline")
@click.option("--free", is_flag=True, help="no quality guard")
@click.option("--explain", type=int, metavar="RANK", help="compare the baseline with one shape, operation by operation")
@click.option(
    "--verify",
    type=click.IntRange(1, 20),
    metavar="N",
    help="measure the baseline and the first N shapes on this machine's GPU, else its CPU (extra bench)",
)
@click.option(
    "--verify-budget", type=click.FloatRange(0.1, 1e6), metavar="SECONDS", help="time to measure (default: 60)"
)
@click.option("--pick", type=int, default=1, show_default=True, metavar="RANK", help="rank of the shape that -o writes")
@click.option("-o", "--output", metavar="FILE", help="write the picked shape as a config, in the format of the input")
@click.option(
    "--format",
    "format_name",
    default="hf",
    show_default=True,
    metavar="NAME",
    help="format of -o: hf (a config as it was read), megatron-args, neox-yaml, torchtitan-toml, nanogpt, litgpt-yaml",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--csv", "as_csv", is_flag=True, help="print CSV, one row per shape")
@click.option("--html", "html", metavar="FILE", help="also write the result as one self-contained HTML page")
@experiments_option
@cluster_options
def command(
    config: str | None,
    device: str | None,
    devices: str | None,
    vary: tuple[str, ...],
    keep: tuple[str, ...],
    strict: bool,
    free: bool,
    explain: int | None,
    verify: int | None,
    verify_budget: float | None,
    pick: int,
    output: str | None,
    format_name: str,
    as_json: bool,
    as_csv: bool,
    html: str | None,
    experiments: str | None,
    **given: Any,
) -> int:
    """Find shapes of CONFIG's size that reach a loss sooner, or run faster, on a device.

    The verdict comes first: keep the shape, or a change, with its net speed-up to the same loss and how sure it is.
    Changes that keep the loss (other heads of 64 to 256, a padded vocabulary) are free; others trade loss for speed.
    With --train-tokens, --gpu-hours or --target-loss, shapes are ranked by loss and time together, the surest gain
    first; else by throughput per parameter. Without CONFIG the baseline is a public model scaled to --params. Shapes
    stay inside a quality guard (docs/decisions/0006-search.md). Over several --devices the rank is that of the worst
    regret: what is minimized, over that of the best shape of the device.

    Exit code 0: done, whether or not anything is faster; 2: bad input; 130: interrupted, with the best so far.
    """
    from shapewright.app.api.searches import search
    from shapewright.app.report.outputs.search import search_output

    if device is not None and devices is not None:
        raise click.UsageError("--device and --devices cannot be combined; give one of them")
    if device is None and devices is None:
        device, origin = default_device()
        if device is None:
            raise click.UsageError("give --device NAME, or --devices NAME,NAME,...; 'shapewright devices' lists all")
        add_note(f"device {device}: {origin}", "device")
        click.get_current_context().params["device"] = device
    if verify_budget is not None and verify is None:
        raise click.UsageError("--verify-budget has no effect without --verify N: leave it out")
    if strict and free:
        raise click.UsageError("--strict and --free cannot be combined; give one of them")
    if as_csv and (as_json or explain is not None):
        raise click.UsageError("--csv cannot be combined with --json or --explain; give one of them")
    if verify is not None and (as_csv or (as_json and explain is not None)):
        raise click.UsageError("--verify has no effect with --csv, or with --explain and --json: leave it out")
    check_files(output, html, experiments, format_name)
    varied = [part.strip() for part in ",".join(vary).split(",") if part.strip()]
    if vary and not varied:
        raise click.UsageError("--vary is empty: name fields such as heads,ffn, or leave it out for the usual ones")
    result = search(
        config,
        devices=_find_devices(device, devices),
        vary=varied,
        keep=keep_of_shape(keep),
        guard="strict" if strict else "free" if free else "usual",
        progress=counting_line("shapes"),
        **api_keywords(given, with_defaults=True),
    )
    if output:
        write_shape(result, pick, output, format_name)
    found = search_output(result)
    if html:
        from shapewright.app.report.optimize.search import search_page

        write_text_file(html, search_page(found))
        echo(f"wrote {html}", err=True)
    if verify is not None:
        measured = measure_shapes(result, verify, verify_budget or _VERIFY_BUDGET_S)
        found = replace(found, verification=measured)
    if experiments:
        found = replace(found, experiments=write_experiments(result, experiments))
    show_result(result, found, explain=explain, as_json=as_json, as_csv=as_csv)
    return 0 if result.is_complete else EXIT_INTERRUPTED


def _find_devices(device: str | None, devices: str | None) -> list[str | Device]:
    """The devices of --device or --devices, with the records of --calibration for the one that it is of."""
    if device is not None:
        return [named_device(device)]
    return compared_devices([name.strip() for name in (devices or "").split(",") if name.strip()])
