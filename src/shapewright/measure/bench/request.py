"""The request of a bench (suites, or the operations of one model), and run_bench, which measures and stores them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import BenchError
from shapewright.core.records import dataclass
from shapewright.measure.bench.calibration_search import CalibrationRound, measure_for_calibration
from shapewright.measure.bench.run import DEFAULT_CI_FRACTION, Measurer, Outcome, make_run, run_cases, stored_rows
from shapewright.measure.bench.suites.gemm import BestRateSearch, candidate_shapes, shape_case
from shapewright.measure.bench.suites.layers import ModelCases, largest_first, list_model_cases
from shapewright.measure.bench.suites.registry import choose_dtypes, collective_cases, get_suite, make_suite
from shapewright.measure.bench.worker import Worker, WorkerOptions
from shapewright.measure.store.database import Store, require_writable
from shapewright.measure.store.record import Case
from shapewright.models.read import read_model
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import DeviceFacts
    from shapewright.measure.bench.suites.registry import Suite
    from shapewright.measure.store.record import Row, Run

# Shapes that the search for the best matmul rate suggests at once.
_SUGGESTIONS_PER_ROUND = 8
DEFAULT_TARGET_ERROR = 0.1
_MODEL_DTYPES = ("bf16",)
_MAX_DEFAULT_SEQ_LEN = 2048

open_measurer: Callable[[WorkerOptions], Any] = Worker
"""Opens a measurer on this host, as a context manager."""


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What to measure, where and for how long.

    Attributes:
        suites: Names of suites; empty to measure the operations of a model.
        shapes_from: Preset, path or hub id of that model.
        workload_fields: Fields of the model's Workload.
        dtypes: Element formats; empty for the defaults of each suite.
        options: The device, and the number of ranks of collectives.
        budget_s: Time after which no further row is begun, shared by the suites. [s]
        seed: Seed of the order of the rows.
        ci_fraction: Half width of the median's confidence interval over the median at which sampling may stop.
        retry_failed: Whether to measure failed and wrong rows again.
        target_error: Mean error on shapes not measured yet at which the suite ``calibration`` ends.
        engine: One of ``shapewright.core.ray_cluster.ENGINES``.
        address: Address of the Ray cluster; None to start one on this host.
        command: The command line, which the store records.
        on_start: Called with the number of rows to measure, once per suite.
        on_row: Called with each new row.
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
    target_error: float = DEFAULT_TARGET_ERROR
    engine: str = "local"
    address: str | None = None
    command: str = ""
    on_start: Callable[[int], None] = lambda _count: None
    on_row: Callable[[Row], None] = lambda _row: None


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """Result of one suite, or of the operations of a model.

    Attributes:
        name: Name of the suite, or a label with the model's name.
        facts: The device.
        outcome: Counts and new rows of this run.
        rows: All rows of the suite in the store.
        model_cases: The measurable operations of the model; None for a suite.
        rounds: Errors on shapes before they were measured, of the suite ``calibration``.
    """

    name: str
    facts: DeviceFacts
    outcome: Outcome
    rows: list[Row]
    model_cases: ModelCases | None = None
    rounds: tuple[CalibrationRound, ...] = ()


def run_bench(request: BenchRequest, store_path: str | Path) -> list[SuiteResult]:
    """Measure all suites of a request, or the operations of its model.

    Raises:
        ShapewrightError: the device, a dtype or the store cannot be used; rows measured before the error are stored.
    """
    require_writable(store_path)
    jobs = [_Job(name=name, suite=get_suite(name)) for name in request.suites]
    jobs = jobs or [_Job(name=f"shapes of {request.shapes_from}", suite=None)]
    # Suites whose cases need several ranks run last: they need their own processes, all other suites share one.
    groups = [[job for job in jobs if job.needs_ranks == needs_ranks] for needs_ranks in (False, True)]
    results: list[SuiteResult] = []
    left_s = request.budget_s
    for group in groups:
        if not group:
            continue
        options = replace(request.options, num_ranks=request.options.num_ranks if group[0].needs_ranks else 1)
        with _open(options, request) as measurer:
            for job in group:
                _choose_dtypes(job, request, measurer.facts)  # raises before a store is created
            for job in group:
                begin = time.monotonic()
                share_s = max(left_s, 0.0) / (len(jobs) - len(results))
                results.append(_run_job(job, request, measurer, store_path, share_s))
                left_s -= time.monotonic() - begin
    return results


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A suite, or the operations of a model where ``suite`` is None."""

    name: str
    suite: Suite | None

    @property
    def needs_ranks(self) -> bool:
        """Whether each case runs on several communicating processes."""
        return self.suite is not None and self.suite.needs_ranks


def _open(options: WorkerOptions, request: BenchRequest) -> Any:
    """Open a measurer, as a context manager."""
    if request.engine == "local":
        return open_measurer(options)
    from shapewright.measure.bench.ray_measurer import open_cluster_measurer

    return open_cluster_measurer(options, request.address)


def _run_job(
    job: _Job, request: BenchRequest, measurer: Measurer, store_path: str | Path, budget_s: float
) -> SuiteResult:
    facts = measurer.facts
    dtypes, small = _choose_dtypes(job, request, facts), not facts.is_cuda
    run = make_run(facts, suite=job.name, command=request.command)
    model_cases, cases, rounds = None, list[Case](), list[CalibrationRound]()
    if job.suite is None:
        model_cases = _model_cases(request, dtypes)
        cases = largest_first(model_cases.cases)
    elif job.suite.needs_ranks:
        cases = collective_cases(request.options.num_ranks, dtypes, small=small, seed=request.seed)
    elif not (job.suite.searches_best_rate or job.suite.is_adaptive):
        cases = make_suite(job.name, dtypes, small=small, seed=request.seed)
    with Store(store_path) as store:
        # A cluster distributes the cases over its devices itself.
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

        if job.suite is not None and job.suite.searches_best_rate:
            outcome, cases = _search_best_rate(dtypes, facts, store, run, measure, request.seed, budget_s)
        elif job.suite is not None and job.suite.is_adaptive:
            outcome, cases, rounds = measure_for_calibration(
                dtypes,
                facts,
                store,
                run,
                measure,
                seed=request.seed,
                budget_s=budget_s,
                target_error=request.target_error,
            )
        else:
            outcome = measure(cases, budget_s)
        rows = stored_rows(cases, store, run)
        return SuiteResult(
            name=job.name, facts=facts, outcome=outcome, rows=rows, model_cases=model_cases, rounds=tuple(rounds)
        )


def _choose_dtypes(job: _Job, request: BenchRequest, facts: DeviceFacts) -> tuple[str, ...]:
    """Element formats to measure: those requested or the defaults; all are supported by the device."""
    preferred = _MODEL_DTYPES if job.suite is None else job.suite.default_dtypes
    dtypes = request.dtypes or choose_dtypes(preferred, facts.dtypes, cpu=not facts.is_cuda)
    facts.require_dtypes(dtypes)
    return dtypes


def _model_cases(request: BenchRequest, dtypes: tuple[str, ...]) -> ModelCases:
    if len(dtypes) > 1:
        raise BenchError(f"the operations of a model are measured in one dtype, got {', '.join(dtypes)}")
    config = read_model(request.shapes_from, None).config
    given = dict(request.workload_fields)
    seq_len = given.pop("seq_len", min(_MAX_DEFAULT_SEQ_LEN, config.max_position_embeddings))
    context = {"context_len": seq_len - 1} if given.get("phase") == "decode" else {}
    workload = Workload(**given, seq_len=seq_len, **context, dtype=dtypes[0])
    return list_model_cases(config, workload, ParallelLayout())


def _search_best_rate(
    dtypes: tuple[str, ...],
    facts: DeviceFacts,
    store: Store,
    run: Run,
    measure: Callable[[list[Case], float], Outcome],
    seed: int,
    budget_s: float,
) -> tuple[Outcome, list[Case]]:
    """Measure the shapes that the search suggests, one format after another, until all runs or the budget are used."""
    begin = time.monotonic()
    outcome = Outcome()
    measured: list[Case] = []
    shapes = candidate_shapes(small=not facts.is_cuda)
    num_sms = int(facts.facts.get("num_sms", 1))
    for index, dtype in enumerate(dtypes):
        search = BestRateSearch(shapes, num_sms=num_sms, seed=seed)
        left_s = budget_s - (time.monotonic() - begin)
        end = time.monotonic() + max(left_s, 0.0) / (len(dtypes) - index)
        rates: dict[int, float] = {}
        while suggested := search.suggest(rates, _SUGGESTIONS_PER_ROUND):
            cases = [shape_case(shapes[shape], dtype) for shape in suggested]
            per_case_s = max(0.0, end - time.monotonic()) / max(1, search.num_runs - len(rates))
            latest = measure(cases, per_case_s * len(cases))
            outcome = outcome.followed_by(latest)
            measured += cases
            rows = stored_rows(cases, store, run)
            rate_by_key = {row.key: row.flops / row.median_s if row.median_s else 0.0 for row in rows}
            keys = [case.key(run.device, run.library) for case in cases]
            rates |= {shape: rate_by_key[key] for shape, key in zip(suggested, keys, strict=True) if key in rate_by_key}
            if latest.num_left or latest.num_too_large or time.monotonic() >= end:
                break
    return outcome, measured
