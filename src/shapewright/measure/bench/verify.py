"""Verify a search by measuring the operations of the baseline and of the best shapes on the local device.

Each round measures every distinct operation once and alternates between the baseline and the shapes, so that drift of
clocks and temperature affects all of them equally. A round gives one speedup per shape; the result is the median of the
rounds, with their range. Operations that cannot be measured here (collectives, and operations above the device's limit)
are excluded on both sides, and the covered share of the predicted step is reported.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from shapewright.core.errors import BenchError
from shapewright.measure.bench.run import make_run
from shapewright.measure.bench.suites.layers import list_model_cases
from shapewright.measure.bench.worker import WorkerDiedError
from shapewright.measure.store.record import OK
from shapewright.optimize.search.result import ModuleTimes, Verification, VerifiedShape

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import DeviceFacts
    from shapewright.measure.bench.run import Measurer
    from shapewright.measure.bench.suites.layers import ModelCases
    from shapewright.measure.store.record import Case, Run
    from shapewright.optimize.search.result import Candidate, SearchResult

_ROUNDS = 3
# Limits of a measurement's share of the budget. [s]
_MIN_CASE_S, _MAX_CASE_S = 0.02, 1.0
_CI_FRACTION = 0.02
# After this many crashes the cause is the machine, not the operations.
_MAX_CRASHES = 5


def verify_search(
    result: SearchResult,
    num_shapes: int,
    measurer: Measurer,
    *,
    budget_s: float,
    on_case: Callable[[int, int], None] = lambda _done, _of: None,
) -> Verification:
    """Measure the baseline and the best shapes of a search.

    Args:
        measurer: Measures each operation; operations that fail or crash the process are excluded.
        budget_s: Time after which no further round is begun. [s]
        on_case: Called with the number of finished measurements and their total.

    Raises:
        BenchError: the search found no shape, or none of the operations can be measured.
    """
    facts = measurer.facts
    begin = time.monotonic()
    if not result.candidates:
        raise BenchError("cannot verify the search: it found no faster shape; vary more fields or widen their ranges")
    facts.require_dtypes((result.baseline.prediction.workload.dtype,))
    shown = (result.baseline, *result.candidates[:num_shapes])
    jobs = [candidate.prediction for candidate in shown]
    model_cases = [list_model_cases(job.config, job.workload, job.layout) for job in jobs]
    cases, num_too_large = _interleave_cases(model_cases, facts)
    if not cases:
        raise BenchError(f"cannot verify the search: every operation is too large for {facts.name}")
    run = make_run(facts, suite="verify", command="search --verify")
    rounds = _measure(cases, measurer, run, budget_s - (time.monotonic() - begin), on_case)
    known = set.intersection(*(set(times) for times in rounds))
    if not known:
        raise BenchError(f"cannot verify the search: every operation failed on {facts.name}")
    notes = [f"{num_too_large} operations are too large for {facts.name}"] if num_too_large else []
    failed = sorted({case.operation.name for key, case in cases.items() if key not in known})
    notes += [f"excluded because they failed here: {', '.join(failed)}"] if failed else []
    names = sorted({name for listed in model_cases for name in listed.skipped})
    notes += [f"not measurable as one kernel on one device: {', '.join(names)}"] if names else []
    if facts.name != result.baseline.prediction.device.name:
        notes.append(
            f"measured on {facts.name}, searched for {result.baseline.prediction.device.name}: a shape that is fast on "
            "one may be slow on the other"
        )
    return Verification(
        device=facts.name,
        library=facts.library,
        asked_device=result.baseline.prediction.device.name,
        shapes=tuple(
            _compare(shown[0], candidate, (model_cases[0], listed), rounds, known)
            for candidate, listed in zip(shown[1:], model_cases[1:], strict=True)
        ),
        num_rounds=len(rounds),
        notes=tuple(notes),
        wall_s=time.monotonic() - begin,
    )


def _interleave_cases(model_cases: Sequence[ModelCases], facts: DeviceFacts) -> tuple[dict[str, Case], int]:
    """Distinct cases by key, alternating between the models, and the number of cases that are too large."""
    cases: dict[str, Case] = {}
    too_large: set[str] = set()
    for turn in zip_longest(*(listed.cases for listed in model_cases)):
        for case in turn:
            if case is None:
                continue
            key = case.key("", "")
            if float(case.operation.flops) <= facts.max_operation_flops:
                cases.setdefault(key, case)
            else:
                too_large.add(key)
    return cases, len(too_large)


def _measure(
    cases: Mapping[str, Case], measurer: Measurer, run: Run, budget_s: float, on_case: Callable[[int, int], None]
) -> list[dict[str, float]]:
    """Medians by case of every round, without cases that failed; the first round is always finished. [s]"""
    begin = time.monotonic()
    share_s = min(max(budget_s / (_ROUNDS * len(cases)), _MIN_CASE_S), _MAX_CASE_S)
    rounds: list[dict[str, float]] = []
    crashed: set[str] = set()
    while len(rounds) < _ROUNDS and (not rounds or time.monotonic() - begin < budget_s):
        medians_s: dict[str, float] = {}
        for number, (key, case) in enumerate(cases.items()):
            if key not in crashed:
                try:
                    row = measurer.measure(case, run, budget_s=share_s, ci_fraction=_CI_FRACTION)
                except WorkerDiedError as death:
                    crashed.add(key)
                    if len(crashed) >= _MAX_CRASHES:
                        raise BenchError(
                            f"cannot verify the search: {_MAX_CRASHES} measuring processes died ({death})"
                        ) from death
                else:
                    if row.status == OK and row.median_s is not None:
                        medians_s[key] = row.median_s
            on_case(len(rounds) * len(cases) + number + 1, _ROUNDS * len(cases))
        rounds.append(medians_s)
    return rounds


def _compare(
    baseline: Candidate,
    candidate: Candidate,
    both_cases: tuple[ModelCases, ModelCases],
    rounds: Sequence[Mapping[str, float]],
    known: set[str],
) -> VerifiedShape:
    """Measured speedup of one shape over the baseline, for the operations measured on both sides."""
    # Tokens per step may differ: the shape's times are scaled to the baseline's tokens.
    work_ratio = baseline.prediction.tokens_per_step / candidate.prediction.tokens_per_step
    counted = _counted_names(both_cases, known)
    factors = []
    for medians_s in rounds:
        before_s, after_s = (sum(_times_by_name(listed, medians_s, counted).values()) for listed in both_cases)
        factors.append(before_s / (work_ratio * after_s))
    covered_s, shares = [], []
    for side in (baseline, candidate):
        total_s = sum(entry.total_time_s for entry in side.prediction.busiest_operations)
        part_s = sum(
            entry.total_time_s for entry in side.prediction.busiest_operations if entry.operation.name in counted
        )
        covered_s.append(part_s)
        shares.append(part_s / total_s)
    return VerifiedShape(
        rank=candidate.rank,
        predicted=candidate.speedup.factor,
        predicted_of_measured=covered_s[0] / (work_ratio * covered_s[1]),
        measured=statistics.median(factors),
        measured_low=min(factors),
        measured_high=max(factors),
        covered_fraction=min(shares),
        modules=_times_by_module(both_cases, rounds, counted, work_ratio),
    )


def _counted_names(both_cases: tuple[ModelCases, ModelCases], known: set[str]) -> set[str]:
    """Names of operations that were measured wherever a side has them: one that is too large is left out of both."""
    names = {name for listed in both_cases for key in known & listed.names.keys() for name in listed.names[key]}
    unknown = {name for listed in both_cases for key in listed.names.keys() - known for name in listed.names[key]}
    return names - unknown - {name for listed in both_cases for name in listed.skipped}


def _times_by_name(listed: ModelCases, medians_s: Mapping[str, float], counted: set[str]) -> dict[str, float]:
    """Measured time per step of each counted operation. [s]"""
    times_s: dict[str, float] = defaultdict(float)
    for key, names in listed.names.items():
        for name, repeats in names.items():
            if name in counted:
                times_s[name] += medians_s[key] * repeats
    return times_s


def _times_by_module(
    both_cases: tuple[ModelCases, ModelCases],
    rounds: Sequence[Mapping[str, float]],
    counted: set[str],
    work_ratio: float,
) -> dict[str, ModuleTimes]:
    """Measured times of the baseline and the shape by part of the model, for equal work."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    known = set.intersection(*(set(medians_s) for medians_s in rounds))
    medians_s = {key: statistics.median(one_round[key] for one_round in rounds) for key in known}
    for side, listed in enumerate(both_cases):
        for name, time_s in _times_by_name(listed, medians_s, counted).items():
            sums[name.partition(".")[0]][side] += time_s * (work_ratio if side else 1.0)
    return {module: ModuleTimes(baseline_s=before_s, shape_s=after_s) for module, (before_s, after_s) in sums.items()}
