"""shapewright plot: measured and predicted on the same axes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shapewright.app.cli.console import echo, write_chart, write_text_file
from shapewright.app.cli.defaults import add_note, default_device
from shapewright.app.cli.device_options import calibration_option, named_device, uncalibrated_option
from shapewright.app.cli.help_pages import GroupedCommand

if TYPE_CHECKING:
    from shapewright.app.figures.chart import Chart
    from shapewright.app.figures.registry import FigureRequest
    from shapewright.hardware.device import Device
    from shapewright.measure.store.record import Row

_EPILOG = """\b
Figures: waves (throughput against n, ends of full waves), alignment (around a multiple of 128, in three layouts),
vocabulary (saw-tooth of the logits), heads (attention scores against hidden size), roofline, scatter (measured against
predicted; needs --store), heat-map (a layer over heads and hidden size). Or a suite of 'shapewright bench'.

\b
Examples:
  shapewright plot waves --device h100-sxm-80gb -o waves.html
  shapewright plot heat-map --device a100-sxm-40gb --config gpt3-2.7b -o heat.html
  shapewright plot tiles --device h200-sxm-141gb -o tiles.html
  shapewright plot scatter --store gemms.sqlite --device h100-sxm-80gb -o scatter.html
"""
_ENDINGS = (".png", ".svg", ".html")
DEFAULT_CONFIG = "gpt3-2.7b"


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("what", metavar="SUITE|FIGURE")
@click.option("-o", "--output", required=True, metavar="FILE", help="file to write: .png or .svg (plot extra), .html")
@click.option(
    "--store", "store_path", default="", metavar="PATH", help="measurements to draw; without it, predictions only"
)
@click.option(
    "--device", "device_name", default="", metavar="NAME", help="required unless the store has exactly one device"
)
@click.option("--dtype", default="", metavar="NAME", help="element format where nothing is measured; default: bf16")
@click.option("--config", default=DEFAULT_CONFIG, show_default=True, help="model of roofline and heat-map")
@uncalibrated_option
@calibration_option
def command(what: str, output: str, store_path: str, device_name: str, dtype: str, config: str) -> int:
    """Plot measurements and predictions on the same axes.

    Points are measured, lines predicted, bands their 90 % intervals. An .html page is complete in itself; of several
    charts, .png and .svg get a number each in their names.
    """
    from shapewright.app.figures.registry import FIGURE_NAMES, draw_figure
    from shapewright.core.errors import close_names
    from shapewright.measure.bench.suites.registry import SUITES

    ending = Path(output).suffix.lower()
    if ending not in _ENDINGS:
        raise click.UsageError(f"-o {output!r} must end in one of {', '.join(_ENDINGS)}")
    known = (*FIGURE_NAMES, *(name for name in SUITES if name not in FIGURE_NAMES))
    if what not in known:
        hint = close_names(what, known)
        raise click.UsageError(
            f"{what!r} is no figure and no suite; {hint + ' ' if hint else ''}there are {', '.join(known)}"
        )
    if what == "scatter" and not store_path:
        raise click.UsageError("scatter compares with measurements: give them with --store")
    rows = _rows(store_path)
    name = device_name or _only_device(rows, store_path)
    device = named_device(name)
    request = _request(device, rows, dtype, config)
    charts = (
        draw_figure(what, request) if what in FIGURE_NAMES else _suite_charts(what, request, has_store=bool(store_path))
    )
    written = _write(charts, Path(output), f"{what} on {device.title}", has_store=bool(store_path))
    for path in written:
        echo(f"wrote {path}")
    return 0


def _rows(store_path: str) -> list[Row]:
    """Rows of the store, if one is given."""
    if not store_path:
        return []
    from shapewright.measure.store.database import Store

    with Store(store_path, read_only=True) as store:
        return store.rows()


def _only_device(rows: list[Row], store_path: str) -> str:
    """The one device of a store; without a store, the default one."""
    names = sorted({row.device for row in rows})
    if len(names) == 1:
        return names[0]
    if not store_path:
        found, origin = default_device()
        if found is None:
            raise click.UsageError("give a device with --device NAME; 'shapewright devices' lists all")
        add_note(f"device {found}: {origin}", "device")
        return found
    raise click.UsageError(f"the store holds {', '.join(names) or 'no rows'}; name one of its devices with --device")


def _request(device: Device, rows: list[Row], dtype: str, config: str) -> FigureRequest:
    from shapewright.app.figures.measured import samples_from_rows
    from shapewright.app.figures.registry import FigureRequest
    from shapewright.core.dtypes import get_dtype
    from shapewright.lowering.model import lower
    from shapewright.prediction.build import build_scenario
    from shapewright.workload.layout import ParallelLayout

    given = {"dtype": get_dtype(dtype).name} if dtype else {}
    scenario = build_scenario(config, device, workload=given)
    device.peak_flops_per_s(scenario.workload.dtype)
    return FigureRequest(
        device=device,
        dtype=scenario.workload.dtype,
        config=scenario.config,
        workload=scenario.workload,
        operations=lower(scenario.config, scenario.workload, ParallelLayout()),
        samples=samples_from_rows(rows, device=device.name),
        rows=rows,
    )


def _suite_charts(suite: str, request: FigureRequest, *, has_store: bool) -> list[Chart]:
    """Sweeps of a suite: as they were measured, or as they would be."""
    from shapewright.app.figures.measured import SINGLE_OPERATIONS, Sample, samples_from_rows
    from shapewright.app.figures.registry import sweep_charts
    from shapewright.core.errors import MeasuredFileError
    from shapewright.measure.bench.suites.registry import make_suite

    if has_store:
        samples = samples_from_rows(request.rows, device=request.device.name, suite=suite)
    else:
        cases = make_suite(suite, (request.dtype,), small=False, seed=0)
        samples = [
            Sample(case.operation, name=case.operation.name, variant=case.variant)
            for case in cases
            if isinstance(case.operation, SINGLE_OPERATIONS) and not case.repetition
        ]
    charts = sweep_charts(samples, request)
    if not charts:
        where = "the store has" if has_store else "it has"
        raise MeasuredFileError(
            f"nothing to draw for suite {suite}: {where} no sweep of single operations on {request.device.name}; "
            "scatter and roofline draw other rows"
        )
    return charts


def _write(charts: list[Chart], path: Path, title: str, *, has_store: bool) -> list[str]:
    """Write the charts; give the names of the files."""
    if path.suffix.lower() == ".html":
        from shapewright.app.report.page import Figure, render_page

        words = "measured points, predicted lines, 90 % intervals" if has_store else "predictions, 90 % intervals"
        figures = [Figure(chart, caption=chart.alt) for chart in charts]
        write_text_file(str(path), render_page(title, figures, subtitle=words))
        return [str(path)]
    names: list[Path] = [path]
    if len(charts) > 1:
        names = [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, len(charts) + 1)]
    for chart, name in zip(charts, names, strict=True):
        write_chart(chart, name)
    return [str(name) for name in names]
