"""Search on one device: jobs for all branches, and candidates from the rows that the jobs found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import hypot
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.fields import documented_fields
from shapewright.core.units import format_bytes
from shapewright.optimize.search.branches import decode_changes, encode_names
from shapewright.optimize.search.engine import Job
from shapewright.optimize.search.findings import Findings, take
from shapewright.optimize.search.memory import kv_bytes_per_token
from shapewright.optimize.search.objective import Limits, LossRanking
from shapewright.optimize.search.request import VARIED, ffn_field
from shapewright.optimize.search.result import Candidate, OnDevice, explain_gains
from shapewright.optimize.search.space.guard import measure_shape, percentile_of
from shapewright.optimize.search.space.space import ALIGNED_UNIT, make_space
from shapewright.optimize.search.steps import VariedScenario
from shapewright.optimize.search.verdict import judge_search, recommend
from shapewright.prediction.loss.effect import (
    NARROWEST_FREE_HEAD,
    WIDEST_FREE_HEAD,
    count_active_parameters,
    estimate_loss_effect,
    has_loss_law,
    is_far_outside,
)
from shapewright.prediction.loss.terms import ShapeForLoss
from shapewright.prediction.speedup import Speedup, compare_times
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.search.branches import Branch
    from shapewright.optimize.search.findings import Table
    from shapewright.optimize.search.objective import Objective
    from shapewright.optimize.search.request import SearchRequest
    from shapewright.optimize.search.result import Verdict
    from shapewright.optimize.search.space.space import Space
    from shapewright.prediction.loss.effect import LossEffect
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

# Fraction by which shapes must cost less than the baseline; smaller differences are within the error of a prediction.
SMALLEST_GAIN_FRACTION = 0.002
MOST_COST_FRACTION = 1.0 - SMALLEST_GAIN_FRACTION
# Shapes that are always listed for each number of changes; of one change, one for each field.
_LISTED_OF_EACH = 3
_LARGEST_FRONT = 24
# Of shapes with equal values of these fields, only the best is listed.
_DISTINGUISHING_FIELDS = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "micro_batch_size", "branch")
# The training micro-batch does not apply to serving, which has its own.
_FIXED_IN_SERVING = frozenset({"micro_batch_size"})
_EXPERT_FIELDS = (
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "shared_expert_intermediate_size",
)


class DeviceSearch:
    """The branches of a search on one device.

    Args:
        branches: The branches; the first is the baseline's.
        scenario: The baseline on the device.
        request: What is varied.
        objective: What is minimized.
        serving: The baseline as it is served; None if serving does not count.

    Attributes:
        scenario: The baseline on the device.
        objective: What is minimized.
        spaces: Shapes of each branch.
        baseline_prediction: Prediction of the baseline.
        train_tokens: Tokens that it is trained on; None if the loss law does not describe it.
        ranking: Ranks shapes by loss and time together; None for speed at equal size.
        baseline: The baseline as a candidate.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        scenario: Scenario,
        request: SearchRequest,
        objective: Objective,
        *,
        serving: Scenario | None = None,
    ) -> None:
        self.scenario, self.objective = scenario, objective
        self._branches, self._serving = branches, serving
        self.spaces: list[Space] = []
        self._varied: list[VariedScenario] = []
        self._served_predictions: dict[TransformerConfig, Prediction] = {}
        self._served: list[VariedScenario] = []
        for branch in branches:
            changed = scenario.replace(**branch.changes)
            space = make_space(changed, request)
            self.spaces.append(space)
            self._varied.append(VariedScenario(scenario=changed, followers=space.followers))
            if serving is not None:
                served = serving.replace(model=changed.model)
                self._served.append(VariedScenario(scenario=served, followers=space.followers, fixed=_FIXED_IN_SERVING))
        self._varies_experts = any("experts" in branch.changed for branch in branches)
        self.baseline_prediction = scenario.predict()
        self.train_tokens: float | None = None
        self.ranking: LossRanking | None = None
        if has_loss_law(self.baseline_prediction.config):
            self.train_tokens = request.goal.count_train_tokens(self.baseline_prediction)
            if objective.measures_loss:
                self.ranking = self._rank_by_loss(request.goal.serve_tokens or 0.0)
        self.baseline = self._candidate(0, self.baseline_prediction, ())

    @property
    def is_far_outside(self) -> bool:
        """Whether the baseline or its run is too far outside the data of the loss law to decide between shapes."""
        return self.train_tokens is not None and is_far_outside(self.baseline_prediction.config, self.train_tokens)

    def _rank_by_loss(self, serve_tokens: float) -> LossRanking:
        assert self.train_tokens is not None
        share = 0.0
        if self._serving is not None:
            num_devices = self._serving.layout.num_devices / self.scenario.layout.num_devices
            share = serve_tokens / self.train_tokens * num_devices
        return LossRanking(
            objective=self.objective.name,
            baseline=ShapeForLoss.of(self.baseline_prediction.config),
            num_compared=count_active_parameters(
                self.baseline_prediction.config, self.baseline_prediction.config.vocab_size
            ),
            train_tokens=self.train_tokens,
            token_s=self._token_s(self.baseline_prediction),
            served_tokens_ratio=share,
        )

    @property
    def device_name(self) -> str:
        """Name of the device."""
        return self.scenario.device.name

    @property
    def baseline_cost(self) -> float:
        """The baseline's cost: that of the ranking, or else time per token (or step) over active parameters."""
        return self.cost_of(self.baseline_prediction)

    def cost_of(self, prediction: Prediction) -> float:
        """Return the cost of one shape, computed as the engine does for many."""
        token_s = self._token_s(prediction)
        if self.ranking is None:
            return token_s / prediction.parameters.active
        size = count_active_parameters(prediction.config, self.baseline_prediction.config.vocab_size)
        ranked = self.ranking.columns(ShapeForLoss.of(prediction.config), size)
        columns = {name: np.atleast_1d(column) for name, column in ranked.items()}
        if self._serving is not None:
            served = self._predict_served(self._serving, prediction.config)
            columns["served_s"] = np.array([served.step_time_s / served.tokens_per_step])
        return float(self.ranking.costs(np.array([token_s]), columns)[0])

    def _predict_served(self, serving: Scenario, config: TransformerConfig) -> Prediction:
        """Predict a decode step of a shape as the model is served; each shape is predicted once."""
        if config not in self._served_predictions:
            self._served_predictions[config] = serving.replace(model=replace(serving.model, config=config)).predict()
        return self._served_predictions[config]

    def _lifetime_gain(self, prediction: Prediction, effect: LossEffect | None, cost_ratio: float) -> Speedup | None:
        """Return the dollars of the baseline over those of a shape, to train and to serve; None without serving.

        Errors of the time to the loss and of the time to serve a token count by their shares of the dollars.
        """
        if self._serving is None or self.ranking is None or effect is None or effect.net_speedup is None:
            return None
        if effect.net_speedup.factor == 0.0:  # the loss is out of reach
            return effect.net_speedup
        own, served = (
            self._predict_served(self._serving, each.config) for each in (self.baseline_prediction, prediction)
        )
        served_s = self.ranking.served_tokens_ratio * served.step_time_s / served.tokens_per_step
        serving_share = served_s / effect.size_ratio / (cost_ratio * self.baseline_cost)
        deviation = hypot(
            (1.0 - serving_share) * effect.net_speedup.log_standard_deviation,
            serving_share * compare_times(own, served).log_standard_deviation,
        )
        return Speedup.of(1.0 / cost_ratio, deviation)

    def limits(self, request: SearchRequest) -> tuple[Limits, tuple[str, ...]]:
        """Return the limits of shapes on this device, and notes about them."""
        needed, available = self.baseline_prediction.memory.total_bytes, self.scenario.device.memory_bytes
        can_shrink = {"layout", "recompute", "micro_batch"} & set(request.free_fields())
        limits = Limits(
            num_parameters=request.num_parameters or self.baseline_prediction.parameters.total,
            num_active=self.baseline_prediction.parameters.active if self._varies_experts else None,
            tolerance_fraction=request.tolerance_fraction,
            memory_bytes=available if needed <= available or can_shrink else float("inf"),
            token_s=float("inf") if self.ranking else self._token_s(self.baseline_prediction),
            cost=self.baseline_cost * MOST_COST_FRACTION,
            per_step=self.objective.measures_step,
            ranking=self.ranking,
        )
        if needed <= available:
            return limits, ()
        note = f"the baseline needs {format_bytes(needed)} of {format_bytes(available)} on {self.device_name}"
        note += f": {'the listed shapes fit' if can_shrink else 'the listed shapes need not fit either'}"
        if self.baseline_prediction.workload.is_training and "layout" not in request.free_fields():
            note += "; a plan finds layouts that fit, to search with"
        return limits, (note,)

    def jobs(self, limits: Limits, searches: Sequence[DeviceSearch]) -> list[Job]:
        """Return the jobs of all branches, evaluated on the devices of the given searches."""
        jobs: list[Job] = []
        for number, (branch, space) in enumerate(zip(self._branches, self.spaces, strict=True)):
            scenarios = tuple(search._varied[number] for search in searches)
            serving = self._served[number] if self._served else None
            jobs += Job(space, scenarios, limits, number, branch.code, serving).split()
        return jobs

    def on_device(self, candidate: Candidate, least_cost: float) -> OnDevice:
        """Predict a candidate of another device's search on this device.

        Args:
            least_cost: Cost of the best shape on this device.
        """
        other, base = candidate.prediction, self.scenario
        here = base.replace(
            model=replace(base.model, config=other.config),
            layout=other.layout,
            recompute=other.workload.recompute,
            micro_batch_size=other.workload.micro_batch_size,
        ).predict()
        speedup = compare_times(self.baseline_prediction, here, per_step=self.objective.measures_step)
        return OnDevice(
            speedup=speedup,
            equal_size_speedup=speedup.factor * here.parameters.active / self.baseline_prediction.parameters.active,
            effect=self._loss_effect(here, speedup),
            regret=self.cost_of(here) / least_cost,
        )

    def _loss_effect(self, prediction: Prediction, speedup: Speedup) -> LossEffect | None:
        """Return the effect of a shape on the loss; None if the loss law does not describe the shape."""
        is_other_hybrid = prediction.config.layer_types != self.baseline_prediction.config.layer_types
        if self.train_tokens is None or is_other_hybrid:  # the law does not cover other ratios of layer types
            return None
        return estimate_loss_effect(
            self.baseline_prediction.config,
            prediction.config,
            train_tokens=self.train_tokens,
            speedup=speedup if self.objective.phase == "train" else None,
        )

    def _token_s(self, prediction: Prediction) -> float:
        """Return the time that the objective compares: per token of all devices, or per step. [s]"""
        return prediction.step_time_s / (1.0 if self.objective.measures_step else prediction.tokens_per_step)

    def list_candidates(self, findings: Findings, top: int) -> tuple[Candidate, ...]:
        """Return the best shapes of each number of changes, then the best of all up to ``top``, in order of cost."""
        if findings.best is None:
            return ()
        table = take(findings.best, np.argsort(findings.best["cost"], kind="stable"))
        chosen = _choose_rows(table, top, self.baseline_prediction.config)
        return self.candidates_of(take(table, np.array(sorted(chosen), dtype=np.int64)))

    def sort_by_certainty(self, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return the candidates ranked anew: the recommended one first, then by the lower end of their gain."""
        recommended = recommend(candidates, only_free=self.is_far_outside)
        first = recommended[1].rank if recommended else 0
        certain_gains = {candidate.rank: candidate.gain.low if candidate.gain else 0.0 for candidate in candidates}
        ordered = sorted(candidates, key=lambda candidate: (candidate.rank != first, -certain_gains[candidate.rank]))
        return tuple(replace(candidate, rank=rank) for rank, candidate in enumerate(ordered, start=1))

    def shorten(self, candidates: Sequence[Candidate], top: int, findings: Findings) -> tuple[Candidate, ...]:
        """Return the first candidates, up to ``top``, and the recommended one if it is not among them."""
        if len(candidates) <= top:
            return tuple(candidates)
        shown = [*(candidates[:top] if self.ranking else self.list_candidates(findings, top))]
        verdict = self.judge(candidates)
        if verdict is not None and verdict.rank:
            recommended = candidates[verdict.rank - 1]
            if _shape_key(recommended) not in [_shape_key(candidate) for candidate in shown]:
                shown.append(recommended)
        return tuple(replace(candidate, rank=rank) for rank, candidate in enumerate(shown, start=1))

    def judge(self, candidates: Sequence[Candidate]) -> Verdict | None:
        """Return the verdict on the baseline."""
        return judge_search(
            candidates,
            is_training=self.objective.phase == "train",
            only_free=self.is_far_outside,
            unit=", in dollars to train and to serve" if self._serving is not None else "",
        )

    @property
    def lifetime_s(self) -> float | None:
        """Device time to train the baseline and to serve the goal's tokens; None without such tokens. [s]"""
        if self._serving is None or self.train_tokens is None:
            return None
        return self.baseline_cost * self.train_tokens * self.scenario.layout.num_devices

    def list_best(self, findings: Findings | None) -> tuple[Candidate, ...]:
        """Return the best shape, if there is one."""
        if findings is None or findings.best is None:
            return ()
        return self.candidates_of(take(findings.best, np.argmin(findings.best["cost"], keepdims=True)))

    def list_front(self, findings: Findings, listed: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return the fastest shapes of the Pareto front, with their ranks among the listed ones, or 0."""
        if findings.front is None:
            return ()
        front = self.candidates_of(take(findings.front, np.arange(min(len(findings.front["cost"]), _LARGEST_FRONT))))
        ranks = {_shape_key(candidate): candidate.rank for candidate in listed}
        return tuple(replace(candidate, rank=ranks.get(_shape_key(candidate), 0)) for candidate in front)

    def candidates_of(self, table: Table) -> tuple[Candidate, ...]:
        """Return a candidate for each row of a table."""
        varied = {*VARIED.values(), "moe_intermediate_size"} & set(table)
        found = []
        for row in range(len(table["cost"])):
            shape = {name: int(table[name][row]) for name in varied}
            prediction = self._varied[int(table["branch"][row])].at(shape).predict()
            found.append(self._candidate(row + 1, prediction, decode_changes(int(table["changes"][row]))))
        return tuple(found)

    def _candidate(self, rank: int, prediction: Prediction, changed: tuple[str, ...]) -> Candidate:
        baseline, config = self.baseline_prediction, prediction.config
        speedup = compare_times(baseline, prediction, per_step=self.objective.measures_step)
        size = prediction.parameters.active / baseline.parameters.active
        effect, cost_ratio = self._loss_effect(prediction, speedup), self.cost_of(prediction) / self.baseline_cost
        return Candidate(
            rank=rank,
            prediction=prediction,
            changed_fields=changed,
            changes=dict(_differences(baseline, prediction)),
            speedup=speedup,
            equal_size_speedup=speedup.factor * size,
            effect=effect,
            cost_ratio=cost_ratio,
            lifetime=self._lifetime_gain(prediction, effect, cost_ratio),
            layer_speedup=baseline.layer_forward_time_s / prediction.layer_forward_time_s,
            parameters_change_fraction=prediction.parameters.total / baseline.parameters.total - 1.0,
            kv_bytes_per_token=kv_bytes_per_token(config, prediction.workload),
            gains=explain_gains(baseline, prediction, per_step=self.objective.measures_step) if rank else (),
            measures={
                name: (value, value / measure_shape(baseline.config)[name], percentile_of(name, value))
                for name, value in measure_shape(config).items()
            },
        )


def _shape_key(candidate: Candidate) -> tuple[Any, ...]:
    prediction = candidate.prediction
    return prediction.config, prediction.workload, prediction.layout


def _differences(baseline: Prediction, candidate: Prediction) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the fields that differ, with the old and the new value."""
    owners = {
        **dict.fromkeys((*VARIED.values(), *_EXPERT_FIELDS, "layer_types"), "config"),
        **dict.fromkeys(("micro_batch_size", "recompute"), "workload"),
        **dict.fromkeys((spec.name for spec, _ in documented_fields(ParallelLayout)), "layout"),
    }
    for name, owner in owners.items():
        old, new = (getattr(getattr(prediction, owner), name) for prediction in (baseline, candidate))
        if old != new:
            yield name, (old, new)


def _choose_rows(table: Table, top: int, baseline: TransformerConfig) -> list[int]:
    """Return the rows to list from a table in order of cost, in order of priority."""
    codes = [int(code) for code in table["changes"]]
    first_of_kind = {code: row for row, code in reversed(list(enumerate(codes)))}
    by_count: dict[int, list[int]] = {}
    for row in sorted(first_of_kind.values()):
        by_count.setdefault(codes[row].bit_count(), []).append(row)
    rows_to_list = [0, *(rows[0] for _, rows in sorted(by_count.items()))]
    rows_to_list += _loss_free_rows(table, baseline)
    rows_to_list += _nearest_rows(table, baseline)
    rows_to_list += by_count.get(1, [])
    rows_to_list += [row for _, rows in sorted(by_count.items()) for row in rows[:_LISTED_OF_EACH]]
    # Then the best of each combination of distinguishing fields: the others differ only slightly in ffn or vocabulary.
    combinations = np.stack([table[name] for name in (*_DISTINGUISHING_FIELDS, "changes")], axis=1)
    _, different = np.unique(combinations, axis=0, return_index=True)
    return list(dict.fromkeys([*rows_to_list, *sorted(different.tolist())]))[:top]


def _nearest_rows(table: Table, baseline: TransformerConfig) -> list[int]:
    """Return the row nearest to an unaligned width or MLP width, of those that change nothing else."""
    rows = []
    for kind, name in (("width", "hidden_size"), ("ffn", ffn_field(baseline))):
        value, alone = getattr(baseline, name), np.flatnonzero(table["changes"] == encode_names((kind,)))
        if value % ALIGNED_UNIT and len(alone):
            rows.append(int(alone[np.argmin(np.abs(table[name][alone] - value))]))
    return rows


def _loss_free_rows(table: Table, baseline: TransformerConfig) -> list[int]:
    """Return the best row of each kind of change that keeps the loss: heads, vocabulary, or both."""
    is_free = (table["head_dim"] >= NARROWEST_FREE_HEAD) & (table["head_dim"] <= WIDEST_FREE_HEAD)
    for name in ("num_heads", "num_kv_heads"):
        is_free &= table[name] * table["head_dim"] == getattr(baseline, name) * baseline.head_dim
    is_free |= table["head_dim"] == baseline.head_dim
    kinds = (("heads",), ("vocab",), ("heads", "vocab"))
    best = (np.flatnonzero(is_free & (table["changes"] == encode_names(kind)))[:1] for kind in kinds)
    return [int(row) for rows in best for row in rows]
