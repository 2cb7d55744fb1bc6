"""shapewright flops: FLOPs per token, and the duration and cost of a training run."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from shapewright.app.cli.console import print_output
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.options import group_options, model_options
from shapewright.core.errors import WorkloadError
from shapewright.core.ranges import check_number
from shapewright.workload.workload import RECOMPUTE_MODES

_EPILOG = """\b
Examples:
  shapewright flops llama-3-8b --seq-len 8192 --explain
  shapewright flops llama-3-8b --train-tokens 15t --gpus 1024 --device h100-sxm-80gb --mfu 0.4 --usd-per-hour 2
  shapewright flops gpt3-175b --train-tokens 300b --gpus 1024 --tflops 140 --recompute full
  shapewright flops mixtral-8x7b --train-tokens chinchilla --json
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@model_options
@click.option("--seq-len", type=int, metavar="N", help="tokens per sequence (default: at most 2048)")
@click.option(
    "--recompute",
    type=click.Choice(RECOMPUTE_MODES),
    default="none",
    show_default=True,
    help="recomputed layers: counted in HFU, not in MFU",
)
@click.option("--train-tokens", metavar="N", help="tokens of a training run, such as 15t, or 'chinchilla'")
@click.option("--gpus", type=int, metavar="N", help="number of devices, for the duration")
@click.option("--tflops", type=float, metavar="X", help="achieved TFLOP/s per device, recomputation included")
@click.option("--device", metavar="NAME", help="device whose peak --mfu refers to")
@click.option("--dtype", metavar="NAME", default="bf16", show_default=True, help="element format of that peak")
@click.option("--mfu", type=float, metavar="F", help="model FLOPs utilization, such as 0.4")
@click.option("--usd-per-hour", type=float, metavar="USD", help="price of one device for an hour, for the cost")
@click.option("--explain", "explains", is_flag=True, help="show the formula of each number")
@click.option("--json", "as_json", is_flag=True, help="print JSON, formulas included")
def command(
    config: str | None,
    seq_len: int | None,
    recompute: str,
    train_tokens: str | None,
    gpus: int | None,
    tflops: float | None,
    device: str | None,
    dtype: str,
    mfu: float | None,
    usd_per_hour: float | None,
    explains: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Count the FLOPs of a token of CONFIG, by every convention, and what a training run takes.

    Days and cost need --train-tokens and --gpus, with --tflops or with --device and --mfu.
    """
    from shapewright.app.report.calculators import print_flops
    from shapewright.app.report.outputs.calculators import flops_output
    from shapewright.models.parameters import count_parameters
    from shapewright.models.read import read_model
    from shapewright.prediction.calculators.flops import count_flops
    from shapewright.prediction.calculators.training import estimate_budget
    from shapewright.prediction.training_run import count_chinchilla_tokens
    from shapewright.workload.workload import Workload

    model = read_model(config, group_options(given)["model"])
    longest = min(_USUAL_SEQ_LEN, model.config.max_position_embeddings)
    found = count_flops(
        model.config, Workload(seq_len=seq_len if seq_len is not None else longest, recompute=recompute)
    )
    budget = None
    rate = _read_rate(tflops, device, dtype, mfu)
    if train_tokens is not None:
        active = count_parameters(model.config).active
        tokens = count_chinchilla_tokens(active) if train_tokens == "chinchilla" else _read_tokens(train_tokens)
        budget = estimate_budget(
            active,
            tokens,
            num_devices=gpus,
            flops_per_s_per_device=rate,
            usd_per_hour=usd_per_hour,
            recompute=recompute,
        )
    elif any(value is not None for value in (gpus, rate, usd_per_hour)):
        raise click.UsageError("--gpus, --tflops, --mfu and --usd-per-hour need --train-tokens as well")
    print_output(flops_output(found, budget, model), partial(print_flops, explains=explains), as_json=as_json)
    return 0


_USUAL_SEQ_LEN = 2048


def _read_tokens(text: str) -> float:
    """A count of tokens such as ``15t``."""
    from shapewright.core.units import parse_count

    try:
        return float(parse_count(text))
    except ValueError:
        raise click.UsageError(f"--train-tokens {text!r} is not a count such as 15t or 300b, or 'chinchilla'") from None


def _read_rate(tflops: float | None, device: str | None, dtype: str, mfu: float | None) -> float | None:
    """FLOP/s that a device achieves, as given or as a share of its peak."""
    from shapewright.core.units import TERA

    if tflops is not None:
        if device is not None or mfu is not None:
            raise click.UsageError("--tflops excludes --device and --mfu: give one or the other")
        check_number("--tflops", tflops, 0, 1e9, error=WorkloadError, exclude_low=True, hint="400 is usual")
        return tflops * TERA
    if (device is None) != (mfu is None):
        raise click.UsageError("--device and --mfu belong together: give both, or --tflops")
    if device is None or mfu is None:
        return None
    check_number("--mfu", mfu, 0, 1, error=WorkloadError, exclude_low=True, hint="give a share such as 0.4")
    from shapewright.hardware.loader import load_device

    return mfu * load_device(device).peak_flops_per_s(dtype)
