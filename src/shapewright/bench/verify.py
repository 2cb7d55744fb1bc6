"""Measure what a search predicts: baseline and shapes, operation by operation, in turns, on the device of this machine.

Each round measures every distinct operation once, the baseline's and the shapes' in turns, so that drift of clocks and
temperature falls on all alike. A round gives one speed-up per shape; the median of the rounds is what was measured, and
their range says by how much it moves. Operations that cannot be measured here (collectives, what is too large) are
left out on both sides, and the share of the predicted step that is covered is told.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from shapewright.bench.model import model_shapes
from shapewright.bench.run import make_run
from shapewright.bench.worker import WorkerDiedError
from shapewright.errors import BenchError
from shapewright.search.verified import Verification, VerifiedShape
from shapewright.store.record import OK

if TYPE_CHECKING:
    from shapewright.bench.backend import DeviceFacts
    from shapewright.bench.model import ModelShapes
    from shapewright.bench.run import Measurer
    from shapewright.predict import Prediction
    from shapewright.search import Candidate, SearchResult
    from shapewright.store.record import Case, Run

_ROUNDS = 3
# Each measurement gets its share of the budget, within these. [s]
_LEAST_CASE_S, _MOST_CASE_S = 0.02, 1.0
_CI_FRACTION = 0.02
# So many lost processes are the machine's fault, not that of the operations.
_MOST_DEATHS = 5


def verify_search(
    result: SearchResult,
    num_shapes: int,
    measurer: Measurer,
    *,
    budget_s: float,
    on_case: Callable[[int, int], None] = lambda _done, _of: None,
) -> Verification:
    """Measure the baseline and the first shapes of a search.

    Args:
        result: The search.
        num_shapes: Shapes to measure.
        measurer: Who measures; an operation that takes its process with it is left out, like one that fails.
        budget_s: Time after which no further round is begun. [s]
        on_case: Told how many measurements of how many are done.

    Raises:
        BenchError: the search found nothing, or nothing of it can be measured here.
    """
    facts = measurer.facts
    begin = time.monotonic()
    if not result.candidates:
        raise BenchError("--verify has nothing to measure: the search found no faster shape; widen it with --vary")
    facts.require_dtypes((result.baseline.prediction.workload.dtype,))
    shown = (result.baseline, *result.candidates[:num_shapes])
    listed = [_shapes_of(candidate.prediction) for candidate in shown]
    cases, num_left_out = _in_turns(listed, facts)
    if not cases:
        raise BenchError(f"--verify cannot measure here: every operation is too large for {facts.name}")
    run = make_run(facts, suite="verify", command="search --verify")
    rounds = _measure(cases, measurer, run, budget_s - (time.monotonic() - begin), on_case)
    known = set.intersection(*(set(times) for times in rounds))
    if not known:
        raise BenchError(f"--verify measured nothing: every operation failed on {facts.name}")
    notes = [f"{num_left_out} operations are too large for {facts.name}"] if num_left_out else []
    failed = sorted({case.operation.name for key, case in cases.items() if key not in known})
    notes += [f"failed here, and left out of every shape: {', '.join(failed)}"] if failed else []
    names = sorted({name for shapes in listed for name in shapes.left_out})
    notes += [f"not measured, for no single kernel of one device stands for it: {', '.join(names)}"] if names else []
    if facts.name != result.baseline.prediction.device.name:
        notes.append(
            f"measured on {facts.name}, searched for {result.baseline.prediction.device.name}: shapes that suit one "
            f"need not suit the other"
        )
    return Verification(
        device=facts.name,
        library=facts.library,
        asked_device=result.baseline.prediction.device.name,
        shapes=tuple(
            _verified(shown[0], candidate, (listed[0], shapes), rounds, known)
            for candidate, shapes in zip(shown[1:], listed[1:], strict=True)
        ),
        num_rounds=len(rounds),
        notes=tuple(notes),
        wall_s=time.monotonic() - begin,
    )


def _shapes_of(prediction: Prediction) -> ModelShapes:
    return model_shapes(prediction.config, prediction.workload, prediction.layout)


def _in_turns(listed: Sequence[ModelShapes], facts: DeviceFacts) -> tuple[dict[str, Case], int]:
    """Distinct cases by key, one of each shape in turn, and how many are too large."""
    cases: dict[str, Case] = {}
    left_out: set[str] = set()
    for turn in range(max(len(shapes.cases) for shapes in listed)):
        for shapes in listed:
            if turn < len(shapes.cases):
                case = shapes.cases[turn]
                key = case.key("", "")
                if float(case.operation.flops) <= facts.most_flops:
                    cases.setdefault(key, case)
                else:
                    left_out.add(key)
    return cases, len(left_out)


def _measure(
    cases: Mapping[str, Case], measurer: Measurer, run: Run, budget_s: float, on_case: Callable[[int, int], None]
) -> list[dict[str, float]]:
    """Times of the cases that work, round by round; the first round is always finished. [s]"""
    begin = time.monotonic()
    share_s = min(max(budget_s / (_ROUNDS * len(cases)), _LEAST_CASE_S), _MOST_CASE_S)
    rounds: list[dict[str, float]] = []
    deadly: set[str] = set()
    while len(rounds) < _ROUNDS and (not rounds or time.monotonic() - begin < budget_s):
        times: dict[str, float] = {}
        for number, (key, case) in enumerate(cases.items()):
            if key not in deadly:
                try:
                    row = measurer.measure(case, run, budget_s=share_s, ci_fraction=_CI_FRACTION)
                except WorkerDiedError as death:
                    deadly.add(key)
                    if len(deadly) >= _MOST_DEATHS:
                        raise BenchError(
                            f"--verify lost {_MOST_DEATHS} measuring processes; the last {death}"
                        ) from death
                else:
                    if row.status == OK and row.median_s is not None:
                        times[key] = row.median_s
            on_case(len(rounds) * len(cases) + number + 1, _ROUNDS * len(cases))
        rounds.append(times)
    return rounds


def _verified(
    baseline: Candidate,
    candidate: Candidate,
    listed: tuple[ModelShapes, ModelShapes],
    rounds: Sequence[Mapping[str, float]],
    known: set[str],
) -> VerifiedShape:
    """One shape against the baseline, over the operations that were measured on both sides."""
    work = baseline.prediction.tokens_per_step / candidate.prediction.tokens_per_step
    factors = []
    for times in rounds:
        before_s, after_s = (_sum_s(shapes, times, known) for shapes in listed)
        factors.append(before_s / (work * after_s))
    measured, shares = [], []
    for side, shapes in zip((baseline, candidate), listed, strict=True):
        total_s = sum(entry.total_time_s for entry in side.prediction.busiest_operations)
        keys = {case.operation.name for case in shapes.cases if case.key("", "") in known}
        part_s = sum(entry.total_time_s for entry in side.prediction.busiest_operations if entry.operation.name in keys)
        measured.append(part_s)
        shares.append(part_s / total_s)
    return VerifiedShape(
        rank=candidate.rank,
        predicted=candidate.speedup.factor,
        predicted_of_measured=measured[0] / (work * measured[1]),
        measured=statistics.median(factors),
        measured_low=min(factors),
        measured_high=max(factors),
        covered_fraction=min(shares),
        modules=_by_module(listed, rounds, known, work),
    )


def _sum_s(shapes: ModelShapes, times: Mapping[str, float], known: set[str]) -> float:
    keys = [case.key("", "") for case in shapes.cases]
    return sum(times[key] * shapes.repeats[key] for key in keys if key in known)


def _by_module(
    listed: tuple[ModelShapes, ModelShapes], rounds: Sequence[Mapping[str, float]], known: set[str], work: float
) -> dict[str, tuple[float, float]]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, shapes in enumerate(listed):
        for case in shapes.cases:
            key = case.key("", "")
            if key in known:
                time_s = statistics.median(times[key] for times in rounds) * shapes.repeats[key]
                sums[case.operation.name.partition(".")[0]][side] += time_s * (work if side else 1.0)
    return {module: (before_s, after_s) for module, (before_s, after_s) in sums.items()}
