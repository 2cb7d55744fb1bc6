"""search_shapes: from a question and a request to shapes of the same size that run faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import ConfigError
from shapewright.predict import predict
from shapewright.search.bands import measure_shape, percentile_of
from shapewright.search.changes import decode_changes
from shapewright.search.compare import Gain, Speedup, compare_times, explain_gains
from shapewright.search.engine import Findings, Limits, Tally, explore
from shapewright.search.expressible import keep_expressible
from shapewright.search.front import take
from shapewright.search.memory import kv_bytes_per_token
from shapewright.search.request import VARIED
from shapewright.search.space import make_space
from shapewright.search.steps import Setting
from shapewright.shown import ShownInNotebook
from shapewright.units import format_bytes, format_count

if TYPE_CHECKING:
    from shapewright.config import Model, TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.predict import Prediction
    from shapewright.search.front import Table
    from shapewright.search.request import SearchRequest
    from shapewright.search.space import Space
    from shapewright.workload import Workload

# Shapes that gain less are the baseline for all that a prediction can tell.
SMALLEST_GAIN_FRACTION = 0.002
# Shapes of each number of changes that are listed whatever the others gain; of one change, one for each field.
_LISTED_OF_EACH = 3
_LARGEST_FRONT = 24
# Fields that make a shape another one, and not only a wider or narrower one.
_SKELETON = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One shape beside the baseline.

    Attributes:
        rank: Place in the list, from 1; 0 for the baseline.
        prediction: Its step.
        changed_fields: Changed fields as a person counts them, see search.changes.
        changes: Old and new value by name, of all fields that differ.
        speedup: Throughput over the baseline's, with interval.
        equal_size_speedup: The same per parameter that a token uses, by which shapes are ranked: a model that is faster
            because it is smaller has gained nothing.
        layer_speedup: Forward time of one average layer, the baseline's over this one's.
        parameters_change_fraction: Parameters gained or lost.
        kv_bytes_per_token: What a token adds to the KV cache of the whole model. [byte]
        gains: What got faster, and why.
        measures: By measure of search.bands: value, factor from the baseline, percentile among public models.
    """

    rank: int
    prediction: Prediction
    changed_fields: tuple[str, ...]
    changes: Mapping[str, tuple[int, int]]
    speedup: Speedup
    equal_size_speedup: float
    layer_speedup: float
    parameters_change_fraction: float
    kv_bytes_per_token: float
    gains: tuple[Gain, ...]
    measures: Mapping[str, tuple[float, float, float]]

    @property
    def config(self) -> TransformerConfig:
        """The shape."""
        return self.prediction.config


@dataclass(frozen=True, kw_only=True)
class SearchResult(ShownInNotebook):
    """What a search found.

    Attributes:
        model: The baseline with the form it was read in, which config.write_back takes.
        baseline: Where it started.
        candidates: Faster shapes, the fastest first: the best of each number of changes, then the best of all.
        front: Shapes that no other beats in time per token, parameters, KV bytes per token and memory, fastest first;
            the fastest ones where there are many.
        tally: What became of the shapes of the space.
        ranges: What the quality guard allowed, by measure.
        elapsed_s: How long it took. [s]
        is_complete: False where it was interrupted.
        notes: What to know.
    """

    model: Model
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    tally: Tally
    ranges: Mapping[str, tuple[float, float]]
    elapsed_s: float
    is_complete: bool
    notes: tuple[str, ...]

    def best_by_num_changes(self) -> dict[int, Candidate]:
        """The fastest listed shape of each number of changed fields."""
        best: dict[int, Candidate] = {}
        for candidate in self.candidates:
            best.setdefault(len(candidate.changed_fields), candidate)
        return dict(sorted(best.items()))


def search_shapes(
    model: Model,
    device: Device,
    workload: Workload,
    layout: ParallelLayout,
    request: SearchRequest,
    *,
    per_step: bool = False,
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Look for shapes of the same size that run faster.

    Args:
        model: The baseline; shapes are written in its form, so only fields that the form can hold are varied.
        device: What it runs on.
        workload: What is run.
        layout: How it is spread.
        request: What to vary, and how far.
        per_step: Make the step short (latency), and not the time of a token (throughput).
        notes: What there is to say about the question.
        uncalibrated: Price as if nobody had measured the device.
        progress: Told how many shapes of how many are done.

    Raises:
        ShapewrightError: the baseline cannot run, or the space is empty; says which constraint emptied it.
    """
    start_s = time.perf_counter()
    if per_step and "micro_batch" in request.free_fields():
        raise ConfigError("--vary micro_batch has no meaning for decode-latency, where 1 is fastest; leave it out")
    request, remarks = keep_expressible(model, request)
    notes += remarks
    config = model.config
    space = make_space(config, workload, layout, request)
    setting = Setting(
        config=config,
        device=device,
        workload=workload,
        layout=layout,
        uncalibrated=uncalibrated,
        followers=space.followers,
    )
    finder = _Finder(setting, per_step)
    memory_bytes = finder.own.memory.total_bytes
    if memory_bytes > device.memory_bytes:
        notes += (
            f"the baseline needs {format_bytes(memory_bytes)} of {format_bytes(device.memory_bytes)}: shapes are not "
            f"asked to fit either",
        )
    own_s = finder.own.step_time_s / (1.0 if per_step else finder.own.tokens_per_step)
    limits = Limits(
        num_parameters=request.num_parameters or finder.own.parameters.total,
        tolerance_fraction=request.tolerance_fraction,
        memory_bytes=device.memory_bytes if memory_bytes <= device.memory_bytes else float("inf"),
        token_s=own_s,
        cost=own_s / finder.own.parameters.active * (1.0 - SMALLEST_GAIN_FRACTION),
        per_step=per_step,
    )
    findings = explore(space, setting, limits, progress)
    _refuse_empty(findings, limits, space)
    candidates = finder.list_candidates(findings, request.top)
    front = finder.list_front(findings)
    if not candidates:
        notes += (
            "no shape inside the limits is predicted to be faster; widen them with --vary, --tolerance or --free",
        )
    if findings.tally.too_large:
        notes += (f"{findings.tally.too_large:,} faster shapes do not fit the memory of {device.name}",)
    return SearchResult(
        model=model,
        baseline=finder.baseline,
        candidates=candidates,
        front=front,
        tally=findings.tally,
        ranges=space.ranges,
        elapsed_s=time.perf_counter() - start_s,
        is_complete=findings.is_complete,
        notes=notes,
    )


class _Finder:
    """Turns rows of tables into candidates, each predicted once more on its own."""

    def __init__(self, setting: Setting, per_step: bool) -> None:
        self._setting, self._per_step = setting, per_step
        self._known: dict[tuple[Any, ...], Prediction] = {}
        self.own = self._predict({})
        self.baseline = self._candidate(0, self.own, ())

    def list_candidates(self, findings: Findings, top: int) -> tuple[Candidate, ...]:
        """The best of each number of changes, filled up with the best of all."""
        if findings.best is None:
            return ()
        table = take(findings.best, np.argsort(findings.best["cost"], kind="stable"))
        chosen = list(_choose(table, top))
        return self.candidates_of(take(table, np.array(sorted(chosen), dtype=np.int64)))

    def list_front(self, findings: Findings) -> tuple[Candidate, ...]:
        """The fastest shapes of the Pareto front."""
        if findings.front is None:
            return ()
        return self.candidates_of(take(findings.front, np.arange(min(len(findings.front["cost"]), _LARGEST_FRONT))))

    def candidates_of(self, table: Table) -> tuple[Candidate, ...]:
        """Candidates of all rows, in their order."""
        varied = {*VARIED.values(), "moe_intermediate_size"} & set(table)
        found = []
        for row in range(len(table["cost"])):
            prediction = self._predict({name: int(table[name][row]) for name in varied})
            found.append(self._candidate(row + 1, prediction, decode_changes(int(table["changes"][row]))))
        return tuple(found)

    def _predict(self, shape: dict[str, int]) -> Prediction:
        key = tuple(sorted(shape.items()))
        if key not in self._known:
            config, workload = self._setting.concrete(shape)
            self._known[key] = predict(
                config,
                device=self._setting.device,
                workload=workload,
                layout=self._setting.layout,
                uncalibrated=self._setting.uncalibrated,
            )
        return self._known[key]

    def _candidate(self, rank: int, prediction: Prediction, changed: tuple[str, ...]) -> Candidate:
        own, config = self.own, prediction.config
        speedup = compare_times(own, prediction, per_step=self._per_step)
        size = prediction.parameters.active / own.parameters.active
        return Candidate(
            rank=rank,
            prediction=prediction,
            changed_fields=changed,
            changes=dict(_differences(own, prediction)),
            speedup=speedup,
            equal_size_speedup=speedup.factor * size,
            layer_speedup=own.layer_forward_time_s / prediction.layer_forward_time_s,
            parameters_change_fraction=prediction.parameters.total / own.parameters.total - 1.0,
            kv_bytes_per_token=kv_bytes_per_token(config, prediction.workload),
            gains=explain_gains(own, prediction, per_step=self._per_step) if rank else (),
            measures={
                name: (value, value / measure_shape(own.config)[name], percentile_of(name, value))
                for name, value in measure_shape(config).items()
            },
        )


def _differences(baseline: Prediction, candidate: Prediction) -> Iterator[tuple[str, tuple[int, int]]]:
    """Fields that differ, followers included, but for those that only repeat another one."""
    for name in (*VARIED.values(), "moe_intermediate_size"):
        owner = "workload" if name == "micro_batch_size" else "config"
        old, new = (getattr(getattr(prediction, owner), name) for prediction in (baseline, candidate))
        if old != new:
            yield name, (old, new)


def _choose(table: Table, top: int) -> list[int]:
    """Rows to list, of a table in order of cost."""
    codes = [int(code) for code in table["changes"]]
    first_of_kind = {code: row for row, code in reversed(list(enumerate(codes)))}
    by_count: dict[int, list[int]] = {}
    for row in sorted(first_of_kind.values()):
        by_count.setdefault(codes[row].bit_count(), []).append(row)
    wanted = [rows[0] for _, rows in sorted(by_count.items())]
    wanted += by_count.get(1, [])
    wanted += [row for _, rows in sorted(by_count.items()) for row in rows[:_LISTED_OF_EACH]]
    # The rest by speed, but for those that differ from a faster one only by a little more or less ffn or vocabulary.
    skeletons = np.stack([table[name] for name in (*_SKELETON, "changes")], axis=1)
    _, different = np.unique(skeletons, axis=0, return_index=True)
    return list(dict.fromkeys([*wanted, *sorted(different.tolist())]))[:top]


def _refuse_empty(findings: Findings, limits: Limits, space: Space) -> None:
    """Say which constraint left nothing to price.

    Raises:
        ConfigError: nothing was priced.
    """
    tally = findings.tally
    if tally.priced or not findings.is_complete:
        return
    if sum(tally.refused.values()) == tally.num_shapes:
        reason, _ = tally.refused.most_common(1)[0]
        raise ConfigError(
            f"none of {tally.num_shapes:,} shapes can run: {reason}; keep fewer fields, or change the layout"
        )
    if not tally.outside_budget:
        low, high = space.ranges["aspect"]
        raise ConfigError(
            f"the quality guard leaves none of {tally.num_shapes:,} shapes: it allows width / layers from {low:.3g} to "
            f"{high:.3g} and an MLP as in search.bands; keep other values, or give --free"
        )
    nearest = tally.nearest_parameters
    assert nearest is not None
    away = nearest / limits.num_parameters - 1.0
    raise ConfigError(
        f"none of {tally.num_shapes:,} shapes has {format_count(limits.num_parameters)} parameters within "
        f"{100.0 * limits.tolerance_fraction:.3g} %; the nearest inside the guard has {format_count(nearest)} "
        f"({100.0 * away:+.2g} %): give --tolerance {abs(100.0 * away) * 1.05 + 0.01:.3g}%, vary more fields, or --free"
    )
