"""shapewright flops: FLOPs of a token, and what a training run takes."""

from __future__ import annotations

from typing import Any

import click

from shapewright.cli.console import make_console, print_json
from shapewright.cli.options import GroupedCommand, group_options, model_options
from shapewright.workload import RECOMPUTE_MODES

_EPILOG = """\b
Examples:
  shapewright flops llama-3-8b --seq-len 8192 --explain
  shapewright flops llama-3-8b --train-tokens 15t --gpus 1024 --device h100-sxm-80gb --mfu 0.4 --usd-per-hour 2
  shapewright flops gpt3-175b --train-tokens 300b --gpus 1024 --tflops 140 --recompute full
  shapewright flops mixtral-8x7b --train-tokens chinchilla --json
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@model_options
@click.option("--seq-len", type=int, metavar="N", help="tokens of a sequence (default: 2048, or the model's most)")
@click.option(
    "--recompute",
    type=click.Choice(RECOMPUTE_MODES),
    default="none",
    show_default=True,
    help="layers whose forward pass runs again: HFU counts it, MFU does not",
)
@click.option("--train-tokens", metavar="N", help="tokens of a training run, such as 15t, or 'chinchilla'")
@click.option("--gpus", type=int, metavar="N", help="devices of the run, for its days")
@click.option("--tflops", type=float, metavar="X", help="TFLOP/s that a device achieves, recomputation counted")
@click.option("--device", metavar="NAME", help="device whose peak --mfu is a share of")
@click.option("--dtype", metavar="NAME", default="bf16", show_default=True, help="element format of that peak")
@click.option("--mfu", type=float, metavar="F", help="share of the device's peak that is achieved, such as 0.4")
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
    from shapewright.calculators import count_chinchilla_tokens, count_flops, estimate_budget
    from shapewright.config import count_parameters, read_model
    from shapewright.report.calculators import flops_to_json, print_flops
    from shapewright.report.columns import print_notes
    from shapewright.workload import Workload

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
    if as_json:
        print_json({**flops_to_json(found, budget), "source": model.source, "notes": list(model.notes)})
    else:
        console = make_console()
        print_flops(found, budget, console, explains=explains)
        print_notes(model.notes, console)
    return 0


_USUAL_SEQ_LEN = 2048


def _read_tokens(text: str) -> float:
    """A count of tokens such as ``15t``."""
    from shapewright.units import parse_count

    try:
        return float(parse_count(text))
    except ValueError:
        raise click.UsageError(f"--train-tokens {text!r} is no count such as 15t or 300b, nor 'chinchilla'") from None


def _read_rate(tflops: float | None, device: str | None, dtype: str, mfu: float | None) -> float | None:
    """FLOP/s that a device achieves, as given or as a share of its peak."""
    from shapewright.units import TERA

    if tflops is not None:
        if device is not None or mfu is not None:
            raise click.UsageError("--tflops and --device with --mfu say the same: give one of them")
        if not 0 < tflops < 1e9:
            raise click.UsageError(f"--tflops {tflops:g} must be above 0; give what a device achieves, such as 400")
        return tflops * TERA
    if (device is None) != (mfu is None):
        raise click.UsageError("--device and --mfu belong together: give both, or --tflops")
    if device is None or mfu is None:
        return None
    if not 0.0 < mfu <= 1.0:
        raise click.UsageError(f"--mfu {mfu:g} must be above 0 and at most 1; give a share such as 0.4")
    from shapewright.hardware import load_device

    return mfu * load_device(device).peak_flops_per_s(dtype)
