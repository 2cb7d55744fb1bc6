"""shapewright calibrate: fit calibration records to measurements of one device, or the loss law to own losses."""

from __future__ import annotations

import click

from shapewright.app.cli.console import given_command, print_output, refuse_unwritable, status_line, write_json_file
from shapewright.app.cli.help_pages import GroupedCommand

_EPILOG = """\b
Examples:
  shapewright calibrate --store gemms.sqlite -o h100.json
  shapewright calibrate --losses proxy.sqlite -o my-recipe.json
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.option("--store", "store_path", metavar="PATH", help="store of measurements")
@click.option("--losses", "losses_path", metavar="PATH", help="store of 'shapewright proxy', or csv table, with losses")
@click.option("-o", "--output", required=True, metavar="FILE", help="where to write the calibration (JSON)")
@click.option(
    "--device", default="", metavar="NAME", help="device to fit, by name or file; required if the store holds several"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(store_path: str | None, losses_path: str | None, output: str, device: str, as_json: bool) -> int:
    """Fit calibration records, or with --losses the law of loss by shape, and write them to FILE.

    With --store, GEMMs are fitted, and pointwise operations and attention if the store has rows of them. The printed
    errors are those of held-out rows, split by whole (n, k) shapes, sizes and head layouts. 'predict', 'check'
    and others take the file with --calibration. A CPU has no data sheet and is described by its best rows. Needs the
    fit extra.

    With --losses, the law is updated by the losses of three or more models of one recipe (data, schedule, batch), in
    nats per token. The printed errors are those of held-out models.
    """
    if (store_path is None) == (losses_path is None):
        raise click.UsageError("give either --store PATH or --losses PATH")
    refuse_unwritable(output)
    words = given_command()
    if losses_path is not None:
        if device:
            raise click.UsageError("--device has no effect with --losses: leave it out")
        return _calibrate_losses(losses_path, output, words, as_json=as_json)
    assert store_path is not None
    return _calibrate_device(store_path, output, device, words, as_json=as_json)


def _calibrate_device(store_path: str, output: str, device: str, words: str, *, as_json: bool) -> int:
    from shapewright.app.report.measured import print_calibration
    from shapewright.app.report.outputs.measure import calibrate_output
    from shapewright.measure.fit.calibrate import calibrate_rows
    from shapewright.measure.store.database import Store

    with Store(store_path, read_only=True) as store:
        rows, runs = store.rows(), store.runs()
    with status_line("fitting") as on_step:
        result = calibrate_rows(
            rows,
            runs,
            device=device,
            source=store_path,
            command=words,
            on_kind=lambda kind: on_step(f"fitting {kind}"),
        )
    write_json_file(output, result.content)
    print_output(calibrate_output(result, output), print_calibration, as_json=as_json)
    return 0


def _calibrate_losses(path: str, output: str, words: str, *, as_json: bool) -> int:
    from shapewright.app.report.outputs.loss import loss_calibration_output
    from shapewright.app.report.proxies import print_loss_calibration
    from shapewright.measure.fit.loss_runs import calibrate_losses
    from shapewright.prediction.loss.law import law_file_content

    result = calibrate_losses(path, command=words)
    write_json_file(output, law_file_content(result.law))
    print_output(loss_calibration_output(result, output), print_loss_calibration, as_json=as_json)
    return 0
