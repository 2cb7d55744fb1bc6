"""shapewright bench: measure operations on this machine's device."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from shapewright.cli.console import make_console, print_json
from shapewright.workload import PHASES

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend
    from shapewright.bench.model import ModelShapes
    from shapewright.bench.run import Outcome

SCHEMA_VERSION = 1
DEFAULT_STORE = "shapewright.sqlite"
_EPILOG = """\b
Suites: smoke (a minute of everything), paper (the sweeps of arXiv 2401.14489), alignment (sizes around multiples of 1
to 128 in three layouts), tiles (fine sweeps across wave ends), attention, pointwise.

\b
Examples:
  shapewright bench smoke --cpu --budget 1s
  shapewright bench alignment --dtype bf16 --budget 8m --store h200.sqlite
  shapewright bench --shapes-from gpt2 --cpu --phase prefill --seq-len 32 --budget 1s --device h100-sxm-80gb
"""
_SECONDS_PER = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
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
@click.argument("suite", required=False)
@click.option("--shapes-from", metavar="CONFIG", help="measure the operations of this model instead of a suite")
@click.option("--cpu", is_flag=True, help="measure the CPU, on smaller shapes")
@click.option("--device-index", type=int, default=0, show_default=True, help="which of the visible GPUs")
@click.option("--dtype", metavar="NAME,...", help="element formats; default: bf16 or bf16,fp16, fp32 on a CPU")
@click.option("--budget", type=Duration(), default="60s", show_default=True, help="stop beginning rows after this time")
@click.option(
    "--store", "store_path", default=DEFAULT_STORE, show_default=True, metavar="PATH", help="file of the rows"
)
@click.option("--seed", type=int, default=0, show_default=True, help="of the order in which rows are measured")
@click.option(
    "--ci-fraction", type=click.FloatRange(0.0, 1.0, min_open=True), default=0.01, show_default=True,
    help="repeat until half the 95 % interval of the median is this share of it",
)  # fmt: skip
@click.option("--retry-failed", is_flag=True, help="measure rows again that failed or were wrong")
@click.option("--device", metavar="NAME", help="device to predict for; default: the one that the driver names")
@click.option("--phase", type=click.Choice(PHASES), help="with --shapes-from: what is run (default: train)")
@click.option("--micro-batch-size", type=int, help="with --shapes-from: sequences per pass (default: 4)")
@click.option("--seq-len", type=int, help="with --shapes-from: tokens per sequence (default: at most 2048)")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(
    suite: str | None,
    shapes_from: str | None,
    cpu: bool,
    device_index: int,
    dtype: str | None,
    budget: float,
    store_path: str,
    seed: int,
    ci_fraction: float,
    retry_failed: bool,
    device: str | None,
    as_json: bool,
    **workload_fields: Any,
) -> int:
    """Measure the operations of SUITE, or of one model, on this machine's GPU or CPU.

    Each finished row goes into the store at once; a run that was stopped goes on where it was. Times are medians of
    calls on random inputs, replayed from a graph where the device has graphs, so that launch cost stands apart. Every
    shape is compared with float64 first. Exit code 1: a row failed or was wrong. Needs the bench extra (PyTorch).
    """
    from shapewright.bench.backend import open_backend
    from shapewright.bench.run import make_run, rows_of, run_cases
    from shapewright.bench.suites import suite_names
    from shapewright.store.file import Store

    if (suite is None) == (shapes_from is None):
        raise click.UsageError(f"give one suite ({', '.join(suite_names())}), or --shapes-from CONFIG instead of it")
    given = {name: value for name, value in workload_fields.items() if value is not None}
    if suite is not None and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{flags} has no effect on a suite; use it with --shapes-from")
    predicted_for = _named_device(device)
    formats = tuple(word.strip() for word in dtype.split(",")) if dtype else ()
    backend = open_backend(cpu=cpu, device_index=device_index)
    cases, shapes = _cases(suite, shapes_from, given, formats, backend, seed)
    name = suite or f"shapes of {shapes_from}"
    run = make_run(backend, suite=name, command=shlex.join(["shapewright", *sys.argv[1:]]))
    with Store(store_path) as store, _progress(name) as (on_start, on_row):
        try:
            outcome = run_cases(
                cases,
                backend,
                store,
                run,
                budget_s=budget,
                ci_fraction=ci_fraction,
                retry_failed=retry_failed,
                on_start=on_start,
                on_row=on_row,
            )
        except KeyboardInterrupt:
            click.echo(f"every finished row is in {store_path}; the same command goes on from there", err=True)
            raise
        rows = rows_of(cases, store, run)
    facts = _facts(rows, shapes, predicted_for or _own_device(backend))
    if as_json:
        print_json({**_summary(outcome, backend, name, store_path), "rows": facts})
    else:
        _print(facts, outcome, shapes, store_path)
    return 1 if any(row.status != "ok" for row in outcome.measured) else 0


def _cases(
    suite: str | None,
    shapes_from: str | None,
    given: dict[str, Any],
    formats: tuple[str, ...],
    backend: Backend,
    seed: int,
) -> tuple[list[Any], ModelShapes | None]:
    """What to measure, in order; with the model's own counts if it is a model."""
    from shapewright.bench.suites import default_dtypes, make_suite
    from shapewright.dtypes import get_dtype

    formats = tuple(get_dtype(name).name for name in formats)
    formats = formats or default_dtypes(suite or "smoke", backend.dtypes, cpu=not backend.is_cuda)
    backend.require_dtypes(formats)
    if suite is not None:
        return make_suite(suite, formats, small=not backend.is_cuda, seed=seed), None
    from shapewright.bench.model import largest_first, model_shapes
    from shapewright.config import read_model
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload

    if len(formats) > 1:
        raise click.UsageError(f"--shapes-from takes one --dtype, got {', '.join(formats)}")
    assert shapes_from is not None
    config = read_model(shapes_from, None).config
    seq_len = given.get("seq_len", min(2048, config.max_position_embeddings))
    context = {"context_len": seq_len - 1} if given.get("phase") == "decode" else {}
    workload = Workload(**{**given, "seq_len": seq_len, **context}, dtype=formats[0])
    shapes = model_shapes(config, workload, ParallelLayout())
    return largest_first(shapes.cases), shapes


def _facts(rows: list[Any], shapes: ModelShapes | None, device: Any) -> list[dict[str, Any]]:
    """Rows as JSON, with what is predicted for them and, of a model, how often they run."""
    from shapewright.report.measured import predict_rows_s

    predicted = predict_rows_s([row.operation() for row in rows], device)
    facts = [{**row.to_json(), "predicted_s": predicted_s} for row, predicted_s in zip(rows, predicted, strict=True)]
    if shapes is None:
        return facts
    by_key = {case.key(row.device, row.library): case for row in rows[:1] for case in shapes.cases}
    return [{**fact, "repeats": shapes.repeats_of(by_key[fact["key"]])} for fact in facts]


def _summary(outcome: Outcome, backend: Backend, name: str, store_path: str) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": name,
        "device": backend.name,
        "library": backend.library,
        "store": store_path,
        "num_measured": len(outcome.measured),
        "num_known": outcome.num_known,
        "num_left": outcome.num_left,
        "num_left_out": outcome.num_left_out,
        "wall_s": outcome.wall_s,
        "timed_s": outcome.timed_s,
    }


def _print(facts: list[dict[str, Any]], outcome: Outcome, shapes: ModelShapes | None, store_path: str) -> None:
    from shapewright.report.measured import print_rows, reading_order, step_line
    from shapewright.units import format_seconds

    console = make_console()
    print_rows(facts if shapes is not None else sorted(facts, key=reading_order), console)
    if shapes is not None:
        console.print(step_line(facts), soft_wrap=True)
        for name, reason in shapes.left_out.items():
            console.print(f"not measured: {name}: {reason}", soft_wrap=True)
    words = (
        f"{len(outcome.measured)} rows measured in {format_seconds(outcome.wall_s)}, {outcome.num_known} known before"
    )
    if outcome.num_left:
        words += f", {outcome.num_left} left for a larger --budget"
    if outcome.num_left_out:
        words += f", {outcome.num_left_out} too large for this device"
    console.print(f"{words}; all in {store_path}", soft_wrap=True)
    num_cold, num_timed = sum(fact["is_cold"] for fact in facts), sum(fact["median_s"] is not None for fact in facts)
    console.print(
        f"inputs rotate; in {num_cold} of {num_timed} rows they exceed the cache, the others may read from it"
    )


def _named_device(name: str | None) -> Any:
    from shapewright.hardware import load_device

    return load_device(name) if name else None


def _own_device(backend: Backend) -> Any:
    """The device file of what was measured, if there is one."""
    from shapewright.hardware import list_devices

    return _named_device(backend.name) if backend.name in list_devices() else None


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
