"""shapewright bench: measure operations on this machine's device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.cluster_options import cluster_options
from shapewright.app.cli.console import echo, given_command, make_console, print_json, progress_bars
from shapewright.app.cli.device_options import calibration_option, given_calibration, named_device, with_pricing_options
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.param_types import BUDGET
from shapewright.app.report.flags import flag_of
from shapewright.workload.workload import PHASES

if TYPE_CHECKING:
    from shapewright.app.report.outputs.measure import BenchOutput, BenchRow
    from shapewright.hardware.device import Device
    from shapewright.measure.bench.device.backend import DeviceFacts
    from shapewright.measure.bench.request import SuiteResult

DEFAULT_STORE = "shapewright.sqlite"
_DEFAULT_NUM_RANKS = 2
_EPILOG = """\b
Suites: smoke (a minute of everything), paper (the sweeps of arXiv 2401.14489), alignment (sizes around multiples of 1
to 128 in three layouts), tiles (fine sweeps across wave ends), batched (GEMMs of unfused attention), random,
attention, pointwise, experts; layer, compiled, model, decode and memory (decoder layers and steps); mamf (search
for the best matmul rate); calibration (random and chosen GEMMs); collectives (between --num-ranks). Several suites,
comma-separated, share the budget.

\b
Examples:
  shapewright bench smoke --cpu --budget 1s
  shapewright bench alignment,model --dtype bf16 --budget 8m --store h200.sqlite
  shapewright bench collectives --num-ranks 8 --store h200.sqlite
  shapewright bench paper --engine ray --address auto --budget 30m --store cluster.sqlite
  shapewright bench --for-calibration --cpu --budget 1s --store mine.sqlite
  shapewright bench pointwise --cpu --budget 1s --calibration cpu.json
  shapewright bench --shapes-from gpt2 --cpu --phase prefill --seq-len 32 --budget 1s
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("suite", required=False, metavar="[SUITE,...]")
@click.option("--shapes-from", metavar="CONFIG", help="measure the operations of this model instead of a suite")
@click.option(
    "--for-calibration",
    is_flag=True,
    help="measure what 'shapewright calibrate' needs: GEMMs until --target-error, pointwise, attention",
)
@click.option(
    "--target-error",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="with --for-calibration: mean error on shapes not measured yet at which GEMMs end  [default: 0.1]",
)
@click.option("--cpu", is_flag=True, help="measure the CPU, on smaller shapes")
@click.option("--device-index", type=int, default=0, show_default=True, help="index of the GPU among the visible ones")
@click.option("--num-ranks", type=click.IntRange(2), help="collectives: processes, on GPUs one each (default: 2)")
@click.option("--dtype", metavar="NAME,...", help="element formats; default: those of the suite; fp32 on a CPU")
@click.option("--budget", type=BUDGET, default="60s", show_default=True, help="start no new row after this time")
@click.option("--store", "store_path", default=DEFAULT_STORE, show_default=True, metavar="PATH", help="store file")
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the order in which rows are measured")
@click.option(
    "--ci-fraction", type=click.FloatRange(0.0, 1.0, min_open=True), default=0.01, show_default=True,
    help="repeat until the half-width of the 95 % interval of the median is this fraction of it",
)  # fmt: skip
@click.option("--kernel-names", is_flag=True, help="name the kernels that ran, with their grids, in each row of a GPU")
@click.option("--retry-failed", is_flag=True, help="measure failed and wrong rows again")
@click.option("--device", metavar="NAME", help="device to predict for (default: the measured one)")
@calibration_option
@click.option("--phase", type=click.Choice(PHASES), help="with --shapes-from: phase (default: train)")
@click.option("--micro-batch-size", type=int, help="with --shapes-from: sequences per pass (default: 4)")
@click.option("--seq-len", type=int, help="with --shapes-from: tokens per sequence (default: at most 2048)")
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(
    suite: str | None,
    shapes_from: str | None,
    for_calibration: bool,
    target_error: float | None,
    cpu: bool,
    device_index: int,
    num_ranks: int | None,
    dtype: str | None,
    budget: float,
    store_path: str,
    seed: int,
    ci_fraction: float,
    kernel_names: bool,
    retry_failed: bool,
    device: str | None,
    engine: str,
    address: str | None,
    as_json: bool,
    **workload_fields: Any,
) -> int:
    """Measure the operations of SUITE, or of one model, on this machine's GPU or CPU.

    Each finished row is stored immediately; the same command resumes an interrupted run. Rows are measured in a
    separate process, so that a crash loses one row. Times are medians of calls on random inputs, replayed from a graph
    where the device has graphs, so that launch cost is reported separately. Results are first checked in float64.
    Exit code 1: a row failed or was wrong. Needs the bench extra (PyTorch).
    """
    from shapewright.core.dtypes import get_dtype
    from shapewright.measure.bench.request import DEFAULT_TARGET_ERROR, BenchRequest, run_bench
    from shapewright.measure.bench.suites.registry import CALIBRATION, CALIBRATION_SUITES, COLLECTIVES
    from shapewright.measure.bench.worker import WorkerOptions

    given = {name: value for name, value in workload_fields.items() if value is not None}
    if for_calibration and suite is None and shapes_from is None:
        suite = ",".join(CALIBRATION_SUITES)
    elif for_calibration:
        raise click.UsageError("--for-calibration chooses the suites; leave out SUITE and --shapes-from")
    suites = _read_suites(suite, shapes_from, given)
    if target_error is not None and CALIBRATION not in suites:
        raise click.UsageError("--target-error has no effect here; use it with --for-calibration")
    if num_ranks and COLLECTIVES not in suites:
        raise click.UsageError("--num-ranks has no effect here; use it with the suite collectives")
    if kernel_names and cpu:
        raise click.UsageError("--kernel-names has no effect with --cpu, whose libraries report no names; leave it out")
    if address is not None and engine == "local":
        raise click.UsageError("--address has no effect without --engine ray: leave it out")
    with progress_bars() as bars:
        words = suite or f"shapes of {shapes_from}"
        task = bars.add_task(words, total=None)
        request = BenchRequest(
            suites=suites,
            shapes_from=shapes_from or "",
            workload_fields=given,
            dtypes=tuple(get_dtype(word.strip()).name for word in dtype.split(",")) if dtype else (),
            options=WorkerOptions(
                cpu=cpu,
                device_index=device_index,
                num_ranks=num_ranks or _DEFAULT_NUM_RANKS,
                names_kernels=kernel_names,
            ),
            budget_s=budget,
            seed=seed,
            ci_fraction=ci_fraction,
            retry_failed=retry_failed,
            target_error=target_error or DEFAULT_TARGET_ERROR,
            engine=engine,
            address=address,
            command=given_command(),
            on_start=lambda count: bars.update(task, total=count),
            on_row=lambda row: bars.update(task, advance=1, description=f"{words}: {row.kind} {row.name}"),
        )
        predicted_for = _predicted_device(device)
        try:
            results = run_bench(request, store_path)
        except KeyboardInterrupt:
            echo(f"every finished row is in {store_path}; the same command resumes from there", err=True)
            raise
    predicted_for = _device_of(results[0].facts, predicted_for, is_named=device is not None)
    _show(results, [_rows(result, predicted_for) for result in results], suite, store_path, as_json=as_json)
    return 1 if any(row.status != "ok" for result in results for row in result.outcome.measured) else 0


def _read_suites(suite: str | None, shapes_from: str | None, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of suites; empty where the shapes of a model are measured.

    Raises:
        UsageError: neither or both are given, or an option without effect on a suite.
        BenchError: there is no such suite.
    """
    from shapewright.measure.bench.suites.registry import SUITES, get_suite

    if (suite is None) == (shapes_from is None):
        raise click.UsageError(f"give one suite ({', '.join(SUITES)}), or --shapes-from CONFIG instead of it")
    suites = tuple(word.strip() for word in suite.split(",")) if suite else ()
    for name in suites:
        get_suite(name)
    if suites and given:
        flags = ", ".join(map(flag_of, given))
        raise click.UsageError(f"{flags} has no effect on a suite; use it with --shapes-from")
    return suites


def _show(
    results: Sequence[SuiteResult],
    rows: Sequence[Sequence[BenchRow]],
    suite: str | None,
    store_path: str,
    *,
    as_json: bool,
) -> None:
    """Print the rows and the summary of all suites together."""
    from shapewright.app.report.outputs.measure import bench_output

    outcome = results[0].outcome
    for result in results[1:]:
        outcome = outcome.followed_by(result.outcome)
    outcome = replace(outcome, num_left=sum(result.outcome.num_left for result in results))
    first, together = results[0], [row for own in rows for row in own]
    output = bench_output(
        outcome,
        together,
        suite=suite or first.name,
        measured=first.facts,
        store_path=store_path,
        rounds=[each for result in results for each in result.rounds],
    )
    if as_json:
        print_json(output.to_json())
    else:
        _print(output, results)


def _rows(result: SuiteResult, device: Device | None) -> list[BenchRow]:
    """Rows with their predictions and, of a model, their executions in a step."""
    from shapewright.app.report.measured import estimate_row_figures
    from shapewright.app.report.outputs.measure import BenchRow
    from shapewright.prediction.model_runs import predict_times_s

    rows, cases = result.rows, result.model_cases
    operations = [row.operation() for row in rows]
    entries = [
        BenchRow(row=row, predicted_s=predicted_s, predicted_figures=estimate_row_figures(operation))
        for row, predicted_s, operation in zip(rows, predict_times_s(operations, device), operations, strict=True)
    ]
    if cases is None:
        return entries
    by_key = {case.key(row.device, row.library): case for row in rows[:1] for case in cases.cases}
    return [replace(entry, repeats=cases.repeats_of(by_key[entry.row.key])) for entry in entries]


def _print(output: BenchOutput, results: Sequence[SuiteResult]) -> None:
    from shapewright.app.report.measured import print_rows, reading_order, step_line, summary_lines

    console = make_console()
    model_cases = results[0].model_cases
    print_rows(output.rows if model_cases is not None else sorted(output.rows, key=reading_order), console)
    if model_cases is not None:
        console.print(step_line(output.rows), soft_wrap=True)
        for name, reason in model_cases.skipped.items():
            console.print(f"not measured: {name}: {reason}", soft_wrap=True)
    for line in summary_lines(output):
        console.print(line, soft_wrap=True)


def _predicted_device(name: str | None) -> Device | None:
    """The device to predict for, by --device and --calibration; errors in them are reported before measuring."""
    if name is not None:
        return named_device(name)
    path = given_calibration()
    if path is None:
        return None
    from shapewright.pricing.calibration.file import calibrated_device, read_calibration

    return with_pricing_options(calibrated_device(read_calibration(path).device.name, path))


def _device_of(facts: DeviceFacts, predicted_for: Device | None, *, is_named: bool) -> Device | None:
    """The device to predict for: the named one, or the measured one if it has a device file."""
    from shapewright.hardware.loader import list_devices

    if predicted_for is not None and (is_named or predicted_for.name == facts.name):
        return predicted_for
    if predicted_for is not None:
        echo(
            f"--calibration is of {predicted_for.name}, and {facts.name} was measured: its records are not used; "
            f"--device {predicted_for.name} predicts for it anyway",
            err=True,
        )
    return named_device(facts.name) if facts.name in list_devices() else None
