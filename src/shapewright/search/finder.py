"""Finder: the branches of a search on one device, from limits to jobs and from found rows to candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.fields import noted_fields
from shapewright.layout import ParallelLayout
from shapewright.predict import predict
from shapewright.search.bands import measure_shape, percentile_of
from shapewright.search.changes import decode_changes
from shapewright.search.compare import compare_times, explain_gains
from shapewright.search.findings import Findings
from shapewright.search.front import take
from shapewright.search.job import Job, Limits
from shapewright.search.memory import kv_bytes_per_token
from shapewright.search.request import VARIED
from shapewright.search.result import Candidate, OnDevice
from shapewright.search.space import make_space
from shapewright.search.steps import Setting
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.perf.software import Software
    from shapewright.predict import Prediction
    from shapewright.search.branches import Branch
    from shapewright.search.front import Table
    from shapewright.search.request import SearchRequest
    from shapewright.search.space import Space
    from shapewright.workload import Workload

# Shapes that gain less are the baseline for all that a prediction can tell.
SMALLEST_GAIN_FRACTION = 0.002
WORTH_IT = 1.0 - SMALLEST_GAIN_FRACTION
# Shapes of each number of changes that are listed whatever the others gain; of one change, one for each field.
_LISTED_OF_EACH = 3
_LARGEST_FRONT = 24
# Fields that make a shape another one, and not only a wider or narrower one.
_SKELETON = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "micro_batch_size", "branch")
_EXPERT_FIELDS = (
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "shared_expert_intermediate_size",
)


class Finder:
    """Branches on one device: makes jobs of them, and candidates of the rows of tables, each predicted once more.

    Attributes:
        device: What the branches run on.
        spaces: Shapes of each branch.
        own: The baseline's step here.
        baseline: The same as a candidate.
    """

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
            asked = workload.with_recompute(branch.workload.recompute)
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
            cost=self.own_cost * WORTH_IT,
            per_step=self._per_step,
        )
        if needed <= there:
            return limits, ()
        words += f": {'what is listed fits' if can_shrink else 'shapes are not asked to fit either'}"
        if self.own.workload.is_training and "layout" not in request.free_fields():
            words += "; 'shapewright plan' finds layouts that do, to search with (--tp, --pp, --dp, --zero-stage)"
        return limits, (words,)

    def jobs(self, limits: Limits, finders: Sequence[Finder]) -> list[Job]:
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
                self._settings[0].workload.with_recompute(other.workload.recompute),
                micro_batch_size=other.workload.micro_batch_size,
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
