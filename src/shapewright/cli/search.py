"""shapewright search: shapes of the same size that run faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shapewright.cli.console import counting_line
from shapewright.cli.given_device import calibration_option, compared_devices, named_device
from shapewright.cli.nodes import node_options
from shapewright.cli.options import GroupedCommand, group_options, job_options, software_option
from shapewright.cli.param_types import Share
from shapewright.cli.search_output import Shown, check_files, measure_shapes, show_result, write_page, write_shape
from shapewright.cluster import ENGINES
from shapewright.errors import ConfigError

if TYPE_CHECKING:
    from shapewright.hardware import Device

EXIT_INTERRUPTED = 130
_VERIFY_BUDGET_S = 60.0

_EPILOG = """\b
Examples:
  shapewright search gpt3-2.7b --device a100-sxm-40gb --attention unfused
  shapewright search gpt3-2.7b --device h100-sxm-80gb --vary ffn,vocab --keep heads=32 -o best.json
  shapewright search llama-2-7b --device h100-sxm-80gb --tp 2 -o best.args --format megatron-args
  shapewright search --params 3b --family llama --device h200-sxm-141gb --top 5
  shapewright search ./config.json --device h100-sxm-80gb --objective decode-latency --context-len 8192 --json
  shapewright search gpt3-2.7b --device a100-sxm-80gb --explain 1
  shapewright search gpt2 --device l40s --dtype bf16 --vary vocab --seq-len 256 --verify 1 --verify-budget 2
  shapewright search gpt3-2.7b --devices h100-sxm-80gb,a100-sxm-80gb,mi300x --train-tokens 300b --html search.html
  shapewright search llama-3-8b --device h100-sxm-80gb --tp 2 --dp 32 --global-batch 512 --vary layout,micro_batch
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@job_options
@click.option("--device", metavar="NAME", help="device name, alias or TOML file; see 'shapewright devices'")
@click.option("--devices", metavar="NAME,...", help="several devices instead: shapes that are good on all of them")
@calibration_option
@node_options
@software_option
@click.option("--params", metavar="N", help="parameters that shapes should have, such as 2.7b (default: CONFIG's)")
@click.option("--family", metavar="NAME", help="without CONFIG: public models to start from, such as llama or gpt")
@click.option("--tolerance", type=Share(), default=0.02, help="how far from that size shapes may be (default: 2%)")
@click.option(
    "--vary",
    metavar="FIELD,...",
    help="fields to vary: heads, head_dim, kv_heads, ffn, vocab, depth, width, micro_batch, experts, layout, recompute "
    "(default: heads,kv_heads,ffn,vocab,depth,width)",
)
@click.option("--keep", multiple=True, metavar="FIELD=VALUE", help="a value that shapes must have; may be given again")
@click.option(
    "--objective",
    type=click.Choice(("train-tokens-per-s", "prefill", "decode-latency", "cost")),
    help="what is to be fast, or cheap (default: what --phase says, else training)",
)
@click.option("--train-tokens", metavar="N", help="tokens of the training run, such as 2t: what a shape saves of it")
@click.option("--usd-per-hour", type=float, metavar="USD", help="price of one device for an hour")
@click.option("--top", type=int, default=20, show_default=True, help="how many shapes to list")
@click.option("--strict", is_flag=True, help="quality guard: stay close to the baseline's proportions")
@click.option("--free", is_flag=True, help="no quality guard")
@click.option("--explain", type=int, metavar="RANK", help="show baseline and one shape, operation by operation")
@click.option(
    "--verify",
    type=click.IntRange(1, 20),
    metavar="N",
    help="measure baseline and the first N shapes on this machine's GPU, else its CPU, in turns (extra bench)",
)
@click.option(
    "--verify-budget", type=click.FloatRange(0.1, 1e6), metavar="SECONDS", help="time to measure for (default: 60)"
)
@click.option("--pick", type=int, default=1, show_default=True, metavar="RANK", help="shape that -o writes")
@click.option("-o", "--output", metavar="FILE", help="write the picked shape as a config, in the form that was read")
@click.option(
    "--format",
    "format_name",
    default="hf",
    show_default=True,
    metavar="NAME",
    help="form of -o: hf (a config as it was read), megatron-args, neox-yaml, torchtitan-toml or nanogpt",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--csv", "as_csv", is_flag=True, help="print CSV, one row per shape")
@click.option("--html", "html", metavar="FILE", help="write the result as one self-contained page too")
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True, help="where the search runs")
@click.option("--address", metavar="ADDRESS", help="Ray cluster: auto, HOST:PORT, or local to start one (default)")
def command(
    config: str | None,
    device: str | None,
    devices: str | None,
    uncalibrated: bool,
    software: str,
    params: str | None,
    family: str | None,
    tolerance: float,
    vary: str | None,
    keep: tuple[str, ...],
    objective: str | None,
    train_tokens: str | None,
    usd_per_hour: float | None,
    top: int,
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
    engine: str,
    address: str | None,
    **given: Any,
) -> int:
    """Find shapes of CONFIG's size that run faster on a device.

    The same parameters, family and workload, faster: changes of one field first, then of more. Without CONFIG the
    baseline is a public model scaled to --params. What is ranked is throughput per parameter: a model that is faster
    because it is smaller gains nothing. Shapes stay inside a quality guard (docs/decisions/0006-search.md). Over
    several --devices the rank is that of the worst regret: the time on a device over that of the best shape there.

    Exit code 0: done, whether or not anything is faster; 2: bad input; 130: interrupted, with the best so far.
    """
    from shapewright.api import search

    if device is not None and devices is not None:
        raise click.UsageError("--device and --devices contradict each other: give one of them")
    if device is None and devices is None:
        raise click.UsageError("give --device NAME, or --devices NAME,NAME,...; 'shapewright devices' lists all")
    if verify_budget is not None and verify is None:
        raise click.UsageError("--verify-budget has no effect without --verify N: leave it out")
    if strict and free:
        raise click.UsageError("--strict and --free contradict each other: give one of them")
    shown = Shown(explain=explain, as_json=as_json, as_csv=as_csv)
    check_files(output, html, format_name)
    varied = [part.strip() for part in (vary or "").split(",") if part.strip()]
    if vary is not None and not varied:
        raise click.UsageError("--vary is empty: name fields such as heads,ffn, or leave it out for the usual ones")
    groups = group_options(given)
    result = search(
        config,
        devices=_find_devices(device, devices),
        num_parameters=_read_count("--params", params),
        family=family,
        tolerance_fraction=tolerance,
        vary=varied,
        keep=_read_keep(keep),
        objective=objective,
        guard="strict" if strict else "free" if free else "usual",
        top=top,
        train_tokens=_read_count("--train-tokens", train_tokens),
        usd_per_hour=usd_per_hour,
        engine=engine,
        address=address,
        workload=groups["workload"],
        layout=groups["layout"],
        overrides=groups["model"],
        uncalibrated=uncalibrated,
        software=software,
        progress=counting_line("shapes"),
    )
    if output:
        write_shape(result, pick, output, format_name)
    if html:
        write_page(result, html)
    verified = measure_shapes(result, verify, verify_budget or _VERIFY_BUDGET_S) if verify is not None else None
    show_result(result, verified, shown)
    return 0 if result.is_complete else EXIT_INTERRUPTED


def _find_devices(device: str | None, devices: str | None) -> list[str | Device]:
    """The devices of --device or --devices, with the records of --calibration for the one that it is of."""
    if device is not None:
        return [named_device(device)]
    return compared_devices([name.strip() for name in (devices or "").split(",") if name.strip()])


def _read_count(option: str, text: str | None) -> int | None:
    from shapewright.units import parse_count

    if text is None:
        return None
    try:
        return parse_count(text)
    except (ValueError, OverflowError):
        things = "parameters up to 100 trillion" if option == "--params" else "tokens"
        raise ConfigError(f"{option} {text!r} is no number of {things}, such as 2.7b") from None


def _read_keep(entries: tuple[str, ...]) -> dict[str, int]:
    """Fields and values of --keep; one field twice under two values is a contradiction."""
    from shapewright.search.request import field_of

    kept: dict[str, int] = {}
    for entry in (part for text in entries for part in text.split(",") if part):
        name, _, value = entry.partition("=")
        try:
            number = int(value)
        except ValueError:
            raise ConfigError(f"--keep {entry!r} is not FIELD=VALUE with a whole number, such as heads=32") from None
        field_name = field_of(name.strip())
        if kept.setdefault(field_name, number) != number:
            raise ConfigError(f"--keep asks for {field_name}={kept[field_name]} and {field_name}={number}; give one")
    return kept
