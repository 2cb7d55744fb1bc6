"""A request: suites, or the shapes of a model, run one after the other against one store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapewright.bench.mamf import BestRateSearch, candidate_shapes, shape_case
from shapewright.bench.model import ModelShapes, largest_first, model_shapes
from shapewright.bench.run import DEFAULT_CI_FRACTION, Measurer, Outcome, make_run, rows_of, run_cases
from shapewright.bench.suites import COLLECTIVES, MAMF, collective_cases, default_dtypes, make_suite
from shapewright.bench.worker import Worker, WorkerOptions
from shapewright.config import read_model
from shapewright.errors import BenchError
from shapewright.layout import ParallelLayout
from shapewright.store.file import Store, require_usable
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.bench.backend import DeviceFacts
    from shapewright.store.record import Case, Row, Run

# Shapes that the search for the best rate asks for at once.
_SUGGESTED_AT_ONCE = 8
_LONGEST_SEQ_LEN = 2048

open_measurer: Callable[[WorkerOptions], Any] = Worker
"""Opens what measures, a context manager: a process of its own."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured.

    Attributes:
        suites: Names of suites; empty for the shapes of a model.
        shapes_from: Preset, path or hub id of that model.
        workload_fields: Fields of its Workload.
        dtypes: Element formats; empty for those that each suite is about.
        options: Which device, and how many ranks collectives have.
        budget_s: Time after which no further row is begun, shared by the suites. [s]
        seed: Of the order of the rows.
        ci_fraction: Half width of a median's interval, over the median, that is narrow enough.
        retry_failed: Measure rows again that failed or were wrong.
        engine: One of ``shapewright.cluster.ENGINES``.
        address: Address of the Ray cluster; None to start one here.
        command: The command line, for the record.
        on_start: Called with the number of rows to measure, by suite.
        on_row: Called with each row.
    """

    suites: tuple[str, ...] = ()
    shapes_from: str = ""
    workload_fields: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    options: WorkerOptions = field(default_factory=WorkerOptions)
    budget_s: float = 60.0
    seed: int = 0
    ci_fraction: float = DEFAULT_CI_FRACTION
    retry_failed: bool = False
    engine: str = "local"
    address: str | None = None
    command: str = ""
    on_start: Callable[[int], None] = lambda _count: None
    on_row: Callable[[Row], None] = lambda _row: None


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """What came of one suite.

    Attributes:
        name: The suite, or the model whose shapes were taken.
        facts: The device.
        outcome: What was measured now.
        rows: Every row of the suite that the store holds.
        shapes: What of the model's step could be measured, if it is a model.
    """

    name: str
    facts: DeviceFacts
    outcome: Outcome
    rows: list[Row]
    shapes: ModelShapes | None = None


def run_request(request: Request, store_path: str | Path) -> list[SuiteResult]:
    """Run everything that is asked for.

    Raises:
        ShapewrightError: the device, a dtype or the store cannot be used; what was measured before is stored.
    """
    require_usable(store_path)
    names = request.suites or (f"shapes of {request.shapes_from}",)
    # Collectives need several processes; all other suites share one.
    groups = [tuple(name for name in names if (name == COLLECTIVES) == together) for together in (False, True)]
    results: list[SuiteResult] = []
    left_s = request.budget_s
    for group in groups:
        if not group:
            continue
        num_ranks = request.options.num_ranks if group == (COLLECTIVES,) else 1
        options = replace(request.options, num_ranks=num_ranks)
        with _open(options, request) as measurer:
            for name in group:
                _dtypes(name, request, measurer.facts)  # a format that is not there is said before a store is made
            for name in group:
                begin = time.monotonic()
                share_s = max(left_s, 0.0) / (len(names) - len(results))
                results.append(_run_suite(name, request, measurer, store_path, share_s))
                left_s -= time.monotonic() - begin
    return results


def _open(options: WorkerOptions, request: Request) -> Any:
    """Open what measures, a context manager."""
    if request.engine == "local":
        return open_measurer(options)
    from shapewright.bench.on_ray import open_cluster_measurer

    return open_cluster_measurer(options, request.address)


def _run_suite(name: str, request: Request, measurer: Measurer, store_path: str | Path, budget_s: float) -> SuiteResult:
    facts = measurer.facts
    dtypes, small = _dtypes(name, request, facts), not facts.is_cuda
    run = make_run(facts, suite=name, command=request.command)
    shapes = None
    if request.shapes_from:
        shapes = _shapes_of_model(request, dtypes)
        cases = largest_first(shapes.cases)
    elif name == COLLECTIVES:
        cases = collective_cases(request.options.num_ranks, dtypes, small=small, seed=request.seed)
    elif name != MAMF:
        cases = make_suite(name, dtypes, small=small, seed=request.seed)
    with Store(store_path) as store:
        # A cluster hands out its cases itself, to several devices at a time.
        run_all = getattr(measurer, "run_cases", None) or partial(run_cases, measurer=measurer)

        def measure(cases: list[Case], seconds: float) -> Outcome:
            outcome: Outcome = run_all(
                cases,
                store=store,
                run=run,
                budget_s=seconds,
                ci_fraction=request.ci_fraction,
                retry_failed=request.retry_failed,
                on_start=request.on_start,
                on_row=request.on_row,
            )
            return outcome

        if name == MAMF and not request.shapes_from:
            outcome, cases = _search_best_rate(dtypes, facts, store, run, measure, request.seed, budget_s)
        else:
            outcome = measure(cases, budget_s)
        return SuiteResult(name=name, facts=facts, outcome=outcome, rows=rows_of(cases, store, run), shapes=shapes)


def _dtypes(name: str, request: Request, facts: DeviceFacts) -> tuple[str, ...]:
    """Element formats to measure, all of which the device has."""
    suite = "smoke" if request.shapes_from else name
    dtypes = request.dtypes or default_dtypes(suite, facts.dtypes, cpu=not facts.is_cuda)
    facts.require_dtypes(dtypes)
    return dtypes


def _shapes_of_model(request: Request, dtypes: tuple[str, ...]) -> ModelShapes:
    if len(dtypes) > 1:
        raise BenchError(f"the shapes of a model are measured in one --dtype, got {', '.join(dtypes)}")
    config = read_model(request.shapes_from, None).config
    given = dict(request.workload_fields)
    seq_len = given.pop("seq_len", min(_LONGEST_SEQ_LEN, config.max_position_embeddings))
    context = {"context_len": seq_len - 1} if given.get("phase") == "decode" else {}
    workload = Workload(**given, seq_len=seq_len, **context, dtype=dtypes[0])
    return model_shapes(config, workload, ParallelLayout())


def _search_best_rate(
    dtypes: tuple[str, ...],
    facts: DeviceFacts,
    store: Store,
    run: Run,
    measure: Callable[[list[Case], float], Outcome],
    seed: int,
    budget_s: float,
) -> tuple[Outcome, list[Case]]:
    """Measure what the search suggests, format by format, until it is done or the time is over."""
    begin = time.monotonic()
    outcome = Outcome()
    asked: list[Case] = []
    shapes = candidate_shapes(small=not facts.is_cuda)
    num_sms = int(facts.facts.get("num_sms", 1))
    for place, dtype in enumerate(dtypes):
        search = BestRateSearch(shapes, num_sms=num_sms, seed=seed)
        left_s = budget_s - (time.monotonic() - begin)
        end = time.monotonic() + max(left_s, 0.0) / (len(dtypes) - place)
        rates: dict[int, float] = {}
        while suggested := search.suggest(rates, _SUGGESTED_AT_ONCE):
            cases = [shape_case(shapes[index], dtype) for index in suggested]
            per_case_s = max(0.0, end - time.monotonic()) / max(1, search.num_runs - len(rates))
            latest = measure(cases, per_case_s * len(cases))
            outcome = outcome.joined(latest)
            asked += cases
            found = {row.key: row.flops / row.median_s if row.median_s else 0.0 for row in rows_of(cases, store, run)}
            keys = [case.key(run.device, run.library) for case in cases]
            rates |= {index: found[key] for index, key in zip(suggested, keys, strict=True) if key in found}
            if latest.num_left or latest.num_left_out or time.monotonic() >= end:
                break
    return outcome, asked
