"""search_shapes: from a question and a request to shapes of the same size that run faster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import ConfigError
from shapewright.fields import noted_fields
from shapewright.layout import ParallelLayout
from shapewright.perf.software import TUNED, software_of
from shapewright.predict import predict
from shapewright.search.bands import measure_shape, percentile_of
from shapewright.search.branches import list_branches
from shapewright.search.changes import decode_changes
from shapewright.search.compare import compare_times, explain_gains
from shapewright.search.engine import Findings, Job, Limits, explore, run_here
from shapewright.search.expressible import keep_expressible
from shapewright.search.front import take
from shapewright.search.memory import kv_bytes_per_token
from shapewright.search.refusal import refuse_empty
from shapewright.search.request import VARIED
from shapewright.search.result import Candidate, OnDevice, SearchResult
from shapewright.search.space import make_space
from shapewright.search.steps import Setting
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.config import Model
    from shapewright.hardware import Device
    from shapewright.perf.software import Software
    from shapewright.predict import Prediction
    from shapewright.search.branches import Branch
    from shapewright.search.engine import Progress, Runner
    from shapewright.search.front import Table
    from shapewright.search.request import SearchRequest
    from shapewright.search.space import Space
    from shapewright.workload import Workload

# Shapes that gain less are the baseline for all that a prediction can tell.
SMALLEST_GAIN_FRACTION = 0.002
_WORTH_IT = 1.0 - SMALLEST_GAIN_FRACTION
# Shapes of each number of changes that are listed whatever the others gain; of one change, one for each field.
_LISTED_OF_EACH = 3
_LARGEST_FRONT = 24
# Fields that make a shape another one, and not only a wider or narrower one.
_SKELETON = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "micro_batch_size", "branch")
# Head widths that flash-attn's kernels are compiled for are multiples of it. [element]
_COMPILED_HEAD_UNIT = 32
_HEAD_NOTE = (
    "a head width that is no multiple of 32 is computed as the next one; it reads less cache, as predicted here, only "
    "where the serving library stores heads unpadded"
)
# Source: arXiv 2402.07871 (Scaling laws for fine-grained mixture of experts).
_EXPERTS_NOTE = (
    "experts are held to equal total and active parameters, and no guard judges their number or how many a token uses: "
    "fewer, larger ones lose more in published fits (arXiv 2402.07871)"
)
_EXPERT_FIELDS = (
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "shared_expert_intermediate_size",
)


def search_shapes(
    model: Model,
    device: Device,
    workload: Workload,
    layout: ParallelLayout,
    request: SearchRequest,
    *,
    others: Sequence[tuple[Device, Workload]] = (),
    per_step: bool = False,
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
    software: str = TUNED,
    run: Runner = run_here,
    progress: Progress | None = None,
) -> SearchResult:
    """Look for shapes of the same size that run faster.

    Args:
        model: The baseline; shapes are written in its form, so only fields that the form can hold are varied.
        device: What it runs on.
        workload: What is run.
        layout: How it is spread.
        request: What to vary, and how far.
        others: Further devices, each with the workload there: shapes are then ranked by the worst regret, which is
            their time over that of the shape that is best on a device.
        per_step: Make the step short (latency), and not the time of a token (throughput).
        notes: What there is to say about the question.
        uncalibrated: Price as if nobody had measured the device.
        software: Training software that runs it, as predict takes it.
        run: Runs the jobs of the search.
        progress: Told how many shapes of how many are done.

    Raises:
        ShapewrightError: the baseline cannot run, or the space is empty; says which constraint emptied it.
    """
    start_s = time.perf_counter()
    if per_step and "micro_batch" in request.free_fields():
        raise ConfigError("--vary micro_batch has no meaning for decode-latency, where 1 is fastest; leave it out")
    request, remarks = keep_expressible(model, request)
    workload, more = hold_global_batch(workload, layout, request)
    notes += (*remarks, *more)
    if "experts" in request.free_fields() and model.config.is_moe:
        notes += (_EXPERTS_NOTE,)
    branches = list_branches(model.config, device, workload, layout, request)
    places = [(device, workload), *others]
    stack = software_of(software, workload.phase)
    finders = [
        _Finder(branches, place, request, per_step=per_step, uncalibrated=uncalibrated, software=stack)
        for place in places
    ]
    first = finders[0]
    limits, more = first.limits(request)
    notes += more
    for finder in finders[1:]:
        theirs, more = finder.limits(request)
        limits = replace(limits, memory_bytes=min(limits.memory_bytes, theirs.memory_bytes))
        notes += more
    least: dict[str, Findings] = {}
    if others:
        for finder in finders:
            own, _ = finder.limits(request)
            # Without bounds on time, so that the best is found even where no shape beats the baseline.
            own = replace(own, memory_bytes=limits.memory_bytes, cost=float("inf"), token_s=float("inf"))
            least[finder.device.name] = explore(finder.jobs(own, [finder]), run, progress)
            refuse_empty(least[finder.device.name], own, first.spaces[0])
        least_costs = tuple(float(found.best["cost"].min()) for found in least.values() if found.best is not None)
        own_costs = [finder.own_cost for finder in finders]
        worst = max(cost / least for cost, least in zip(own_costs, least_costs, strict=True))
        limits = replace(limits, least_costs=least_costs, token_s=float("inf"), cost=worst * _WORTH_IT)
    findings = explore(first.jobs(limits, finders), run, progress)
    refuse_empty(findings, limits, first.spaces[0])
    tell = partial(_on_devices, finders, limits.least_costs)
    candidates = tuple(tell(candidate) for candidate in first.list_candidates(findings, request.top))
    if not candidates:
        experts = " experts" if model.config.is_moe and "experts" not in request.vary else ""
        notes += (
            f"no shape inside the limits is predicted to be faster; widen them with --vary{experts}, --tolerance or "
            f"--free",
        )
    if workload.phase == "decode" and any(shape.config.head_dim % _COMPILED_HEAD_UNIT for shape in candidates):
        notes += (_HEAD_NOTE,)
    if findings.tally.too_large:
        words = f"{findings.tally.too_large:,} faster shapes do not fit the memory of {device.name}"
        least_bytes = findings.tally.least_memory_bytes
        if not candidates and least_bytes is not None:
            words += f": the least of them needs {format_bytes(least_bytes)} of {format_bytes(device.memory_bytes)}"
        notes += (words,)
    return SearchResult(
        model=model,
        baseline=tell(first.baseline),
        candidates=candidates,
        front=tuple(tell(candidate) for candidate in first.list_front(findings, candidates)),
        best_on={
            finder.device.name: tell(found)
            for finder in finders
            for found in first.list_best(least.get(finder.device.name))
        },
        tally=findings.tally,
        ranges=first.spaces[0].ranges,
        elapsed_s=time.perf_counter() - start_s,
        is_complete=findings.is_complete,
        notes=tuple(dict.fromkeys(notes)),
    )


def hold_global_batch(
    workload: Workload, layout: ParallelLayout, request: SearchRequest
) -> tuple[Workload, tuple[str, ...]]:
    """Give a training step the global batch of the baseline where layouts differ, so that all of them do the same work.

    Without one, each layout would take a micro-batch per replica and stage.
    """
    if "layout" not in request.free_fields() or not workload.is_training or workload.global_batch_size is not None:
        return workload, ()
    passes = workload.micro_batch_size * layout.data_parallel * layout.pipeline_parallel
    words = f"global batch held at the baseline's {passes} sequences, one micro-batch per replica and stage"
    return replace(workload, global_batch_size=passes), (f"{words}; give --global-batch for yours",)


def _on_devices(finders: Sequence[_Finder], least_costs: Sequence[float], candidate: Candidate) -> Candidate:
    """A candidate with what it does on each of several devices."""
    if not least_costs:
        return candidate
    places = {
        finder.device.name: finder.on_device(candidate, least)
        for finder, least in zip(finders, least_costs, strict=True)
    }
    return replace(candidate, on_devices=places)


class _Finder:
    """Branches on one device: makes jobs of them, and candidates of the rows of tables, each predicted once more."""

    def __init__(
        self,
        branches: Sequence[Branch],
        place: tuple[Device, Workload],
        request: SearchRequest,
        *,
        per_step: bool,
        uncalibrated: bool,
        software: Software,
    ) -> None:
        self.device, workload = place
        self._branches, self._per_step = branches, per_step
        own = branches[0]
        self.spaces: list[Space] = []
        self._settings: list[Setting] = []
        for branch in branches:
            asked = replace(workload, recompute=branch.workload.recompute)
            space = make_space(branch.config, asked, branch.layout, request)
            self.spaces.append(space)
            self._settings.append(
                Setting(
                    config=branch.config,
                    device=self.device,
                    workload=asked,
                    layout=branch.layout,
                    uncalibrated=uncalibrated,
                    software=software,
                    followers=space.followers,
                )
            )
        self._varies_experts = any(branch.config != own.config for branch in branches)
        self._known: dict[tuple[Any, ...], Prediction] = {}
        self.own = self._predict({}, 0)
        self.baseline = self._candidate(0, self.own, ())

    @property
    def own_cost(self) -> float:
        """The baseline's time per token (or step) and parameter that a token uses. [s]"""
        return self._token_s(self.own) / self.own.parameters.active

    def limits(self, request: SearchRequest) -> tuple[Limits, tuple[str, ...]]:
        """What shapes must keep to here, and what there is to say about it."""
        needed, there = self.own.memory.total_bytes, self.device.memory_bytes
        words = f"the baseline needs {format_bytes(needed)} of {format_bytes(there)} on {self.device.name}"
        can_shrink = {"layout", "recompute", "micro_batch"} & set(request.free_fields())
        limits = Limits(
            num_parameters=request.num_parameters or self.own.parameters.total,
            num_active=self.own.parameters.active if self._varies_experts else None,
            tolerance_fraction=request.tolerance_fraction,
            memory_bytes=there if needed <= there or can_shrink else float("inf"),
            token_s=self._token_s(self.own),
            cost=self.own_cost * _WORTH_IT,
            per_step=self._per_step,
        )
        if needed <= there:
            return limits, ()
        if can_shrink:
            return limits, (f"{words}: what is listed fits",)
        return limits, (f"{words}: shapes are not asked to fit either",)

    def jobs(self, limits: Limits, finders: Sequence[_Finder]) -> list[Job]:
        """All branches in jobs, on the devices of some finders."""
        jobs: list[Job] = []
        for number, (branch, space) in enumerate(zip(self._branches, self.spaces, strict=True)):
            settings = tuple(finder._settings[number] for finder in finders)
            jobs += Job(space, settings, limits, number, branch.code).split()
        return jobs

    def on_device(self, candidate: Candidate, least_cost: float) -> OnDevice:
        """What a candidate of any finder does on this one's device."""
        other = candidate.prediction
        here = predict(
            other.config,
            device=self.device,
            workload=replace(
                self._settings[0].workload,
                micro_batch_size=other.workload.micro_batch_size,
                recompute=other.workload.recompute,
            ),
            layout=other.layout,
            uncalibrated=self._settings[0].uncalibrated,
            software=self._settings[0].software,
        )
        speedup = compare_times(self.own, here, per_step=self._per_step)
        return OnDevice(
            speedup=speedup,
            equal_size_speedup=speedup.factor * here.parameters.active / self.own.parameters.active,
            regret=self._token_s(here) / here.parameters.active / least_cost,
        )

    def _token_s(self, prediction: Prediction) -> float:
        """What is to be short: time per token of all devices, or the step. [s]"""
        return prediction.step_time_s / (1.0 if self._per_step else prediction.tokens_per_step)

    def list_candidates(self, findings: Findings, top: int) -> tuple[Candidate, ...]:
        """The best of each number of changes, filled up with the best of all."""
        if findings.best is None:
            return ()
        table = take(findings.best, np.argsort(findings.best["cost"], kind="stable"))
        chosen = list(_choose(table, top))
        return self.candidates_of(take(table, np.array(sorted(chosen), dtype=np.int64)))

    def list_best(self, findings: Findings | None) -> tuple[Candidate, ...]:
        """The very best shape, if there is one."""
        if findings is None or findings.best is None:
            return ()
        return self.candidates_of(take(findings.best, np.argmin(findings.best["cost"], keepdims=True)))

    def list_front(self, findings: Findings, listed: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """The fastest shapes of the Pareto front, with their ranks among the listed ones; 0 for those that are not."""
        if findings.front is None:
            return ()
        front = self.candidates_of(take(findings.front, np.arange(min(len(findings.front["cost"]), _LARGEST_FRONT))))
        # One prediction stands for one shape, see _predict.
        ranks = {id(candidate.prediction): candidate.rank for candidate in listed}
        return tuple(replace(candidate, rank=ranks.get(id(candidate.prediction), 0)) for candidate in front)

    def candidates_of(self, table: Table) -> tuple[Candidate, ...]:
        """Candidates of all rows, in their order."""
        varied = {*VARIED.values(), "moe_intermediate_size"} & set(table)
        found = []
        for row in range(len(table["cost"])):
            shape = {name: int(table[name][row]) for name in varied}
            prediction = self._predict(shape, int(table["branch"][row]))
            found.append(self._candidate(row + 1, prediction, decode_changes(int(table["changes"][row]))))
        return tuple(found)

    def _predict(self, shape: dict[str, int], branch: int) -> Prediction:
        key = (branch, *sorted(shape.items()))
        if key not in self._known:
            setting = self._settings[branch]
            config, workload = setting.concrete(shape)
            self._known[key] = predict(
                config,
                device=self.device,
                workload=workload,
                layout=setting.layout,
                uncalibrated=setting.uncalibrated,
                software=setting.software,
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


def _differences(baseline: Prediction, candidate: Prediction) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Fields that differ, followers included, but for those that only repeat another one."""
    owners = {
        **dict.fromkeys((*VARIED.values(), *_EXPERT_FIELDS), "config"),
        **dict.fromkeys(("micro_batch_size", "recompute"), "workload"),
        **dict.fromkeys((spec.name for spec, _ in noted_fields(ParallelLayout)), "layout"),
    }
    for name, owner in owners.items():
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
    wanted = [0, *(rows[0] for _, rows in sorted(by_count.items()))]
    wanted += by_count.get(1, [])
    wanted += [row for _, rows in sorted(by_count.items()) for row in rows[:_LISTED_OF_EACH]]
    # The rest by speed, but for those that differ from a faster one only by a little more or less ffn or vocabulary.
    skeletons = np.stack([table[name] for name in (*_SKELETON, "changes")], axis=1)
    _, different = np.unique(skeletons, axis=0, return_index=True)
    return list(dict.fromkeys([*wanted, *sorted(different.tolist())]))[:top]
