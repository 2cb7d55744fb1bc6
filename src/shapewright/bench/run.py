"""The bench: measures what a store does not hold yet, row by row, until the budget ends."""

from __future__ import annotations

import gc
import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shapewright import __version__
from shapewright.bench.attention import prepare_attention
from shapewright.bench.gemm import prepare_gemm, prepare_grouped_gemm
from shapewright.bench.pointwise import prepare_pointwise
from shapewright.bench.prepared import TOLERANCE_FRACTION, Prepared
from shapewright.bench.timer import measure
from shapewright.errors import BenchError
from shapewright.operations import Attention, Gemm, GroupedGemm, Pointwise
from shapewright.store.record import FAILED, OK, STATUSES, WRONG, Case, Row, Run, row_facts

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend
    from shapewright.store.file import Store

# A row gets its share of what is left of the budget, within these. [s]
_LEAST_ROW_S, _MOST_ROW_S = 0.03, 2.0
# Half width of the median's 95 % interval, over the median, at which a row is known well enough.
DEFAULT_CI_FRACTION = 0.01
_LONGEST_ERROR = 300


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a call of the bench.

    Attributes:
        measured: Rows made, in their order.
        num_known: Cases whose rows the store held already.
        num_left: Cases that the budget did not reach.
        num_left_out: Cases larger than what is worth this device's time.
        wall_s: Time spent. [s]
        timed_s: Part of it spent in the timed kernels, warm-up and checks left out. [s]
    """

    measured: tuple[Row, ...]
    num_known: int
    num_left: int
    num_left_out: int
    wall_s: float
    timed_s: float


def make_run(backend: Backend, *, suite: str, command: str) -> Run:
    """Describe this call of the bench."""
    return Run(
        run_id=uuid.uuid4().hex,
        started_utc=_now(),
        command=command,
        suite=suite,
        device=backend.name,
        device_facts=backend.facts,
        driver=backend.driver,
        runtime=backend.runtime,
        torch_version=backend.torch_version,
        library=backend.library,
        shapewright_version=__version__,
    )


def run_cases(
    cases: Sequence[Case],
    backend: Backend,
    store: Store,
    run: Run,
    *,
    budget_s: float,
    ci_fraction: float = DEFAULT_CI_FRACTION,
    retry_failed: bool = False,
    on_row: Callable[[Row], None] = lambda _row: None,
    on_start: Callable[[int], None] = lambda _count: None,
) -> Outcome:
    """Measure cases in their order; each finished row is committed before the next one begins.

    Args:
        cases: What to measure.
        backend: Where.
        store: Rows that it holds are not measured again.
        run: Describes this call.
        budget_s: Time after which no further row is begun. [s]
        ci_fraction: Half width of the median's interval, over the median, that is narrow enough.
        retry_failed: Measure rows again that failed or were wrong.
        on_row: Called with each row.
        on_start: Called with the number of cases to measure.

    Raises:
        BenchError: an operation left the device unusable; its row is stored as failed.
        StoreError: a row cannot be stored.
    """
    begin = time.monotonic()
    worth = [case for case in cases if float(case.operation.flops) <= backend.most_flops]
    known = store.finished_keys(statuses=(OK,) if retry_failed else STATUSES)
    pending = [case for case in worth if case.key(run.device, run.library) not in known]
    store.add_run(run)
    on_start(len(pending))
    measured: list[Row] = []
    for index, case in enumerate(pending):
        left_s = budget_s - (time.monotonic() - begin)
        if left_s <= 0.0:
            break
        row_s = min(max(left_s / (len(pending) - index), _LEAST_ROW_S), _MOST_ROW_S)
        row = measure_case(case, backend, run, budget_s=row_s, ci_fraction=ci_fraction)
        store.add(row)
        measured.append(row)
        on_row(row)
        if row.status == FAILED:
            _require_usable(backend, row)
    return Outcome(
        measured=tuple(measured),
        num_known=len(worth) - len(pending),
        num_left=len(pending) - len(measured),
        num_left_out=len(cases) - len(worth),
        wall_s=time.monotonic() - begin,
        timed_s=sum((row.median_s or 0.0) * row.num_samples * row.calls_per_sample for row in measured),
    )


def measure_case(case: Case, backend: Backend, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
    """Measure one case; whatever goes wrong with it becomes part of its row."""
    row = Row(**row_facts(case, run), measured_utc=_now(), status=FAILED, state_before=backend.read_state())
    try:
        prepared = prepare(case, backend)
        row = replace(
            row,
            kernel=prepared.kernel,
            num_inputs=len(prepared.inputs),
            is_cold=prepared.is_cold(backend.cache_bytes),
        )
        found_error = prepared.check(prepared.call(*prepared.inputs[0]), prepared.inputs[0])
        backend.synchronize()
        tolerance = TOLERANCE_FRACTION[case.operation.dtype]
        if not found_error <= tolerance:
            words = f"relative error {found_error:.3g} against float64, at most {tolerance:g} is right"
            # NaN has no place in JSON; the words say it.
            kept_error = found_error if math.isfinite(found_error) else None
            return replace(row, status=WRONG, error=words, relative_error=kept_error, state_after=backend.read_state())
        timing = measure(
            backend,
            prepared.call,
            prepared.inputs,
            budget_s=budget_s,
            ci_fraction=ci_fraction,
            capturable=prepared.capturable,
        )
    except (BenchError, RuntimeError, NotImplementedError, TypeError, ValueError, MemoryError) as error:
        # Torch raises RuntimeError for memory, for kernels it lacks and for errors of the device alike.
        failed = replace(row, error=_one_line(error), state_after=backend.read_state())
        del error
        gc.collect()
        _release_quietly(backend)
        return failed
    summary = timing.summary
    return replace(
        row,
        status=OK,
        measured_utc=_now(),
        relative_error=found_error,
        method=timing.method,
        median_s=summary.median_s,
        min_s=summary.min_s,
        max_s=summary.max_s,
        q1_s=summary.q1_s,
        q3_s=summary.q3_s,
        ci_half_width_s=summary.ci_half_width_s,
        num_samples=summary.num_samples,
        calls_per_sample=timing.calls_per_sample,
        launch_s=timing.launch_s,
        state_after=backend.read_state(),
    )


def prepare(case: Case, backend: Backend) -> Prepared:
    """Make a case ready to run.

    Raises:
        BenchError: there is no way to measure it.
    """
    import torch

    torch.manual_seed(0)
    operation = case.operation
    if isinstance(operation, Attention):
        return prepare_attention(operation, backend, case.variant)
    if isinstance(operation, Gemm):
        return prepare_gemm(operation, backend)
    if isinstance(operation, GroupedGemm):
        return prepare_grouped_gemm(operation, backend)
    if isinstance(operation, Pointwise):
        return prepare_pointwise(operation, backend, case.row_width)
    raise BenchError(f"{operation.kind} {operation.name} needs several devices and is not measured here")


def rows_of(cases: Iterable[Case], store: Store, run: Run) -> list[Row]:
    """The store's rows of cases, whenever they were measured."""
    return store.rows(keys=(case.key(run.device, run.library) for case in cases))


def _require_usable(backend: Backend, row: Row) -> None:
    """Find out whether a failed row took the device's context with it."""
    try:
        backend.synchronize()
    except RuntimeError as error:
        raise BenchError(
            f"the device gives no answer after {row.kind} {row.name} {dict(row.sizes)} ({_one_line(error)}); "
            "that row is stored as failed, run the same command again to go on after it"
        ) from error


def _release_quietly(backend: Backend) -> None:
    try:
        backend.release()
    except RuntimeError:
        return  # the next synchronisation says so


def _one_line(error: BaseException) -> str:
    words = str(error).strip().splitlines() or [type(error).__name__]
    return words[0][:_LONGEST_ERROR]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
