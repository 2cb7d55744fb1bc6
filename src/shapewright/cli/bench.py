"""shapewright bench: measure operations on this machine's device."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from shapewright.cli.console import make_console, print_json
from shapewright.cli.given_device import as_asked, calibration_option, given_calibration, named_device
from shapewright.cli.param_types import FloatParam
from shapewright.cluster import ENGINES
from shapewright.workload import PHASES

if TYPE_CHECKING:
    from shapewright.bench.backend import DeviceFacts
    from shapewright.bench.request import SuiteResult
    from shapewright.bench.run import Outcome
    from shapewright.hardware import Device

SCHEMA_VERSION = 1
DEFAULT_STORE = "shapewright.sqlite"
_DEFAULT_NUM_RANKS = 2
_EPILOG = """\b
Suites: smoke (a minute of everything), paper (the sweeps of arXiv 2401.14489), alignment (sizes around multiples of 1
to 128 in three layouts), tiles (fine sweeps across wave ends), batched (products of unfused attention), random,
attention, pointwise, experts; layer, compiled, model, decode and memory (whole decoder layers and steps); mamf (search
for the best matmul rate); collectives (between --num-ranks). Several, with commas between, share the budget.

\b
Examples:
  shapewright bench smoke --cpu --budget 1s
  shapewright bench alignment,model --dtype bf16 --budget 8m --store h200.sqlite
  shapewright bench collectives --num-ranks 8 --store h200.sqlite
  shapewright bench paper --engine ray --address auto --budget 30m --store cluster.sqlite
  shapewright bench pointwise --cpu --budget 1s --calibration cpu.json
  shapewright bench --shapes-from gpt2 --cpu --phase prefill --seq-len 32 --budget 1s --device h100-sxm-80gb
"""
_SECONDS_PER = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(FloatParam):
    """A length of time such as ``90``, ``90s``, ``8m`` or ``2h``, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Turn the text into seconds."""
        text = str(value).strip().lower()
        try:
            seconds = float(text[:-1]) * _SECONDS_PER[text[-1]] if text[-1:] in _SECONDS_PER else float(text)
        except ValueError:
            seconds = -1.0
        if not 0.0 < seconds < 1e7:
            self.fail(f"{value!r} is not a time such as 90s, 8m or 2h", param, ctx)
        return seconds


@click.command(epilog=_EPILOG)
@click.argument("suite", required=False, metavar="[SUITE,...]")
@click.option("--shapes-from", metavar="CONFIG", help="measure the operations of this model instead of a suite")
@click.option("--cpu", is_flag=True, help="measure the CPU, on smaller shapes")
@click.option("--device-index", type=int, default=0, show_default=True, help="which of the visible GPUs")
@click.option("--num-ranks", type=click.IntRange(2), help="collectives: processes, on GPUs one each (default: 2)")
@click.option("--dtype", metavar="NAME,...", help="element formats; default: what the suite is about, fp32 on a CPU")
@click.option("--budget", type=Duration(), default="60s", show_default=True, help="stop beginning rows after this time")
@click.option(
    "--store", "store_path", default=DEFAULT_STORE, show_default=True, metavar="PATH", help="file of the rows"
)
@click.option("--seed", type=int, default=0, show_default=True, help="of the order in which rows are measured")
@click.option(
    "--ci-fraction", type=click.FloatRange(0.0, 1.0, min_open=True), default=0.01, show_default=True,
    help="repeat until half the 95 % interval of the median is this share of it",
)  # fmt: skip
@click.option("--kernel-names", is_flag=True, help="name the kernels that ran, with their grids, in each row of a GPU")
@click.option("--retry-failed", is_flag=True, help="measure rows again that failed or were wrong")
@click.option("--device", metavar="NAME", help="device to predict for; default: the one that the driver names")
@calibration_option
@click.option("--phase", type=click.Choice(PHASES), help="with --shapes-from: what is run (default: train)")
@click.option("--micro-batch-size", type=int, help="with --shapes-from: sequences per pass (default: 4)")
@click.option("--seq-len", type=int, help="with --shapes-from: tokens per sequence (default: at most 2048)")
@click.option(
    "--engine", type=click.Choice(ENGINES), default="local", show_default=True,
    help="where to measure: here, or on each GPU of a Ray cluster (extra ray)",
)  # fmt: skip
@click.option("--address", metavar="ADDRESS", help="Ray cluster: auto, HOST:PORT, or local to start one (default)")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(
    suite: str | None,
    shapes_from: str | None,
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

    Each finished row goes into the store at once; a run that was stopped goes on where it was. Measuring happens in a
    process of its own: what kills it costs one row. Times are medians of calls on random inputs, replayed from a graph
    where the device has graphs, so that launch cost stands apart. Every shape is compared with float64 first. Exit
    code 1: a row failed or was wrong. Needs the bench extra (PyTorch).
    """
    from shapewright.bench.request import Request, run_request
    from shapewright.bench.suites import COLLECTIVES
    from shapewright.bench.worker import WorkerOptions
    from shapewright.dtypes import get_dtype

    given = {name: value for name, value in workload_fields.items() if value is not None}
    suites = _read_suites(suite, shapes_from, given)
    if num_ranks and COLLECTIVES not in suites:
        raise click.UsageError("--num-ranks has no effect here; use it with the suite collectives")
    if kernel_names and cpu:
        raise click.UsageError("--kernel-names has no effect with --cpu, whose libraries do not tell: leave it out")
    if address is not None and engine == "local":
        raise click.UsageError("--address has no effect without --engine ray: leave it out")
    with _progress(suite or f"shapes of {shapes_from}") as (on_start, on_row):
        request = Request(
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
            engine=engine,
            address=address,
            command=shlex.join(["shapewright", *sys.argv[1:]]),
            on_start=on_start,
            on_row=on_row,
        )
        predicted_for = _predicted_device(device)
        try:
            results = run_request(request, store_path)
        except KeyboardInterrupt:
            click.echo(f"every finished row is in {store_path}; the same command goes on from there", err=True)
            raise
    predicted_for = _device_of(results[0].facts, predicted_for, is_named=device is not None)
    _show(results, [_facts(result, predicted_for) for result in results], suite, store_path, as_json=as_json)
    return 1 if any(row.status != "ok" for result in results for row in result.outcome.measured) else 0


def _read_suites(suite: str | None, shapes_from: str | None, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of suites; none where the shapes of a model are measured.

    Raises:
        UsageError: neither or both are given, or what has no effect on a suite.
        BenchError: there is no such suite.
    """
    from shapewright.bench.suites import require_suite, suite_names

    if (suite is None) == (shapes_from is None):
        raise click.UsageError(f"give one suite ({', '.join(suite_names())}), or --shapes-from CONFIG instead of it")
    suites = tuple(word.strip() for word in suite.split(",")) if suite else ()
    for name in suites:
        require_suite(name)
    if suites and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{flags} has no effect on a suite; use it with --shapes-from")
    return suites


def _show(
    results: Sequence[SuiteResult],
    rows: Sequence[Sequence[dict[str, Any]]],
    suite: str | None,
    store_path: str,
    *,
    as_json: bool,
) -> None:
    """Print all suites together, their rows as JSON has them."""
    facts = [row for own in rows for row in own]
    outcome = results[0].outcome
    for result in results[1:]:
        outcome = outcome.joined(result.outcome)
    outcome = replace(outcome, num_left=sum(result.outcome.num_left for result in results))
    summary = summarize_bench(outcome, facts)
    if not as_json:
        _print(facts, summary, results, store_path)
        return
    first = results[0]
    heads = {
        "schema_version": SCHEMA_VERSION,
        "suite": suite or first.name,
        "device": first.facts.name,
        "library": first.facts.library,
        "store": store_path,
    }
    print_json({**heads, **summary, "rows": facts})


def summarize_bench(outcome: Outcome, facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The call in numbers, for people and programs alike."""
    from shapewright.report.measured import best_rates, repeatability

    return {
        "num_measured": len(outcome.measured),
        "num_bad": sum(row.status != "ok" for row in outcome.measured),
        "num_known": outcome.num_known,
        "num_left": outcome.num_left,
        "num_left_out": outcome.num_left_out,
        "wall_s": outcome.wall_s,
        "kernels_s": outcome.kernels_s,
        "waited_s": outcome.waited_s,
        "overhead_fraction": outcome.overhead_fraction,
        "rows_per_min": outcome.rows_per_min,
        "repeatability": repeatability(facts),
        "best_flops_per_s": best_rates(facts),
    }


def _facts(result: SuiteResult, device: Device | None) -> list[dict[str, Any]]:
    """Rows as JSON, with what is predicted for them and, of a model, how often they run."""
    from shapewright.report.measured import estimate_row_figures, predict_rows_s

    rows, shapes = result.rows, result.shapes
    operations = [row.operation() for row in rows]
    predicted = predict_rows_s(operations, device)
    facts = [
        {**row.to_json(), "predicted_s": predicted_s, "predicted_figures": estimate_row_figures(operation)}
        for row, predicted_s, operation in zip(rows, predicted, operations, strict=True)
    ]
    if shapes is None:
        return facts
    by_key = {case.key(row.device, row.library): case for row in rows[:1] for case in shapes.cases}
    return [{**fact, "repeats": shapes.repeats_of(by_key[fact["key"]])} for fact in facts]


def _print(
    facts: list[dict[str, Any]], summary: Mapping[str, Any], results: Sequence[SuiteResult], store_path: str
) -> None:
    from shapewright.report.measured import print_rows, reading_order, step_line, summary_lines

    console = make_console()
    shapes = results[0].shapes
    print_rows(facts if shapes is not None else sorted(facts, key=reading_order), console)
    if shapes is not None:
        console.print(step_line(facts), soft_wrap=True)
        for name, reason in shapes.left_out.items():
            console.print(f"not measured: {name}: {reason}", soft_wrap=True)
    for line in summary_lines(summary, facts, store_path):
        console.print(line, soft_wrap=True)


def _predicted_device(name: str | None) -> Device | None:
    """The device to predict for, as far as --device and --calibration say; what is wrong with them is said at once."""
    if name is not None:
        return named_device(name)
    path = given_calibration()
    if path is None:
        return None
    from shapewright.perf.calibration_file import calibrated_device, read_calibration

    return as_asked(calibrated_device(read_calibration(path).device.name, path))


def _device_of(facts: DeviceFacts, predicted_for: Device | None, *, is_named: bool) -> Device | None:
    """The device whose predictions stand beside rows: the one named, or that of what was measured, if it is known."""
    from shapewright.hardware import list_devices

    if predicted_for is not None and (is_named or predicted_for.name == facts.name):
        return predicted_for
    if predicted_for is not None:
        click.echo(
            f"--calibration is of {predicted_for.name}, and {facts.name} was measured: its records are left aside; "
            f"--device {predicted_for.name} predicts for it all the same",
            err=True,
        )
    return named_device(facts.name) if facts.name in list_devices() else None


@contextmanager
def _progress(name: str) -> Iterator[tuple[Callable[[int], None], Callable[[Any], None]]]:
    """A bar on a terminal's standard error; nothing elsewhere."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield (lambda _count: None), (lambda _row: None)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=None)

        def on_row(row: Any) -> None:
            bars.update(task, advance=1, description=f"{name}: {row.kind} {row.name}")

        yield (lambda count: bars.update(task, total=count)), on_row
