"""shapewright design: shape, layout and run for a size and tokens, or for a budget."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.console import (
    counting_line,
    echo,
    print_output,
    refuse_unwritable,
    write_json_file,
    write_text_file,
)
from shapewright.app.cli.device_options import (
    calibration_option,
    device_option,
    loss_law_option,
    named_device,
    node_options,
)
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.kept_fields import keep_of_design
from shapewright.app.cli.options import (
    experiments_option,
    field_options,
    group_options,
    other_options,
    software_option,
    write_experiments,
)
from shapewright.app.cli.param_types import HOURS, SHARE, amount_of, count_of
from shapewright.core.errors import ShapewrightError, short_path

if TYPE_CHECKING:
    from shapewright.app.report.outputs.design import DesignOutput
    from shapewright.optimize.design.result import DesignResult

EXIT_INTERRUPTED = 130
_USUAL_FORMATS = ("megatron-args", "torchtitan-toml")
_WORKLOAD_FIELDS = ("seq_len", "dtype", "attention", "optimizer", "global_batch_size")

_EPILOG = """\b
Examples:
  shapewright design --params 3b --train-tokens 300b --device h100-sxm-80gb --gpus 64 -o design
  shapewright design --gpu-hours 5000 --device h100-sxm-80gb --gpus 64 --family qwen3
  shapewright design --train-tokens 1t --usd 200000 --usd-per-hour 2.5 --device h200-sxm-141gb --gpus 128
  shapewright design --params 7b --hours 336 --device a100-sxm-80gb --gpus 256 --keep tp=1,2 --keep heads=32
  shapewright design --params 1b --train-tokens 100b --device h100-sxm-80gb --gpus 8 --format torchtitan-toml -o out
  shapewright design --params 1b --train-tokens 20b --device h100-sxm-80gb --gpus 8 --experiments runs.csv
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@field_options({"workload": _WORKLOAD_FIELDS, "layout": (), "model": ()})
@device_option
@calibration_option
@loss_law_option
@node_options
@software_option
@click.option("--gpus", "num_devices", type=int, required=True, metavar="N", help="devices of the job")
@click.option(
    "--params",
    "num_parameters",
    type=count_of("parameters"),
    metavar="N",
    help="parameters, such as 3b (default: for the budget, or those of CONFIG)",
)
@click.option(
    "--train-tokens", type=count_of("tokens"), metavar="N", help="tokens, such as 300b (default: for the budget)"
)
@click.option("--hours", type=HOURS, metavar="H", help="budget: hours that the job may take, such as 336 or 14d")
@click.option(
    "--gpu-hours",
    type=amount_of("GPU hours"),
    metavar="H",
    help="budget: hours summed over all devices, such as 5000 or 20k",
)
@click.option("--usd", type=amount_of("dollars"), metavar="USD", help="budget in dollars, with --usd-per-hour")
@click.option("--usd-per-hour", type=float, metavar="USD", help="price of one device for an hour")
@click.option("--family", metavar="NAME", help="without CONFIG: family of the shape, such as llama (default) or qwen3")
@click.option(
    "--global-batch-tokens",
    type=count_of("tokens"),
    metavar="N",
    help="tokens of a step (default: for size and tokens)",
)
@click.option("--tokenizer-vocab", type=int, metavar="N", help="entries of the tokenizer (default: the family's)")
@click.option(
    "--keep",
    multiple=True,
    metavar="FIELD=V,...",
    help="fix a field of the shape (heads=32), or the values a field of the plan may take (tp=1,2); may be repeated",
)
@click.option(
    "--tolerance",
    "tolerance_fraction",
    type=SHARE,
    default=0.02,
    help="allowed deviation from --params (default: 2%)",
)
@click.option("--strict", is_flag=True, help="strict quality guard: stay close to the proportions of the family")
@click.option("--free", is_flag=True, help="no quality guard")
@click.option(
    "--headroom", "headroom_fraction", type=SHARE, default=0.0, help="share of memory to leave free (default: 0%)"
)
@click.option(
    "--straggler-factor",
    type=float,
    default=1.0,
    show_default=True,
    metavar="F",
    help="expected step over the predicted one, for devices that fall behind",
)
@click.option("--top", type=int, default=6, show_default=True, help="number of designs to list")
@click.option(
    "--format",
    "format_names",
    metavar="NAME,...",
    help="trainers that must be able to express the design, and whose files -o writes: megatron-args, torchtitan-toml, "
    "neox-yaml, nanogpt, litgpt-yaml, deepspeed-json, accelerate-yaml (default: of the first two those that can)",
)
@click.option("-o", "--output", metavar="DIR", help="write config.json, trainer files, design.json and design.html")
@experiments_option
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(
    config: str | None,
    device: str,
    keep: tuple[str, ...],
    strict: bool,
    free: bool,
    format_names: str | None,
    output: str | None,
    experiments: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Design a model and its training run on --gpus devices.

    Shape, layout, micro-batch, recomputation and pipeline schedule are searched together under memory, for the shortest
    time to the loss of the family's shape. Without --params the size of the lowest loss for a budget is chosen, without
    --train-tokens as many tokens as it pays for. The plan is the one that 'shapewright plan' gives the shape, and the
    expected loss is relative to the shape of the family, each with a 90 % interval. CONFIG: a model to scale instead of
    a family.

    Exit code 0: done; 2: bad input, or nothing fits; 130: interrupted, with the best so far.
    """
    from shapewright.app.api.designs import design
    from shapewright.app.report.optimize.design import print_design
    from shapewright.app.report.outputs.design import design_output

    if strict and free:
        raise click.UsageError("--strict and --free cannot be combined; give one of them")
    names = [name.strip() for name in (format_names or "").split(",") if name.strip()]
    if format_names is not None and not output:
        raise click.UsageError("--format has no effect without -o: give -o DIR, or leave it out")
    if experiments == "-":
        raise click.UsageError("--experiments needs a file name: standard output is used for the report")
    folder = None if output is None else _folder(output)
    refuse_unwritable(experiments)
    result = design(
        config,
        device=named_device(device),
        keep=keep_of_design(keep),
        formats=names,
        guard="strict" if strict else "free" if free else "usual",
        workload=group_options(given)["workload"],
        progress=counting_line("shapes"),
        **other_options(given),
    )
    found = design_output(result, write_experiments(result, experiments) if experiments else None)
    if folder is not None:
        write_folder(result, found, folder, names)
    print_output(found, print_design, as_json=as_json)
    return 0 if result.is_complete else EXIT_INTERRUPTED


def _folder(output: str) -> Path:
    """Create the folder of -o.

    Raises:
        ShapewrightError: it cannot be written to.
    """
    if not output:
        raise click.UsageError("-o needs the name of a folder, such as design")
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a zero byte, or half of a surrogate pair
        reason = getattr(error, "strerror", None) or "no path"
        raise ShapewrightError(
            f"cannot write into {short_path(output)}: {reason}; give the path of a folder that you can write to"
        ) from error
    refuse_unwritable(str(folder / "config.json"))
    return folder


def write_folder(result: DesignResult, found: DesignOutput, folder: Path, names: list[str]) -> None:
    """Write config.json, the files of trainers, the JSON output and the page of a design."""
    from shapewright.app.formats.registry import find_format, write_format
    from shapewright.app.report.optimize.design import design_page
    from shapewright.models.write import untimed_values

    best = result.best
    node_size = best.plan.prediction.device.node_size
    written = ["config.json", "design.json", "design.html"]
    write_json_file(str(folder / "config.json"), found.config_json)
    write_json_file(str(folder / "design.json"), found.to_json())
    write_text_file(str(folder / "design.html"), design_page(found))
    for name in names or _USUAL_FORMATS:
        path = folder / f"{name.partition('-')[0]}{find_format(name).suffix}"
        try:
            text = write_format(
                name,
                best.config,
                workload=best.workload,
                layout=best.plan.layout,
                untimed={**untimed_values(result.model), **asdict(best.run.schedule), "node_size": node_size},
            )
        except ShapewrightError as error:
            echo(f"note: no {path.name}, as {error}; --format {name} finds a design that it can express", err=True)
            continue
        write_text_file(str(path), text)
        written.append(path.name)
    echo(f"wrote {', '.join(written)} into {folder}", err=True)
