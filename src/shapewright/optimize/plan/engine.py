"""Evaluate a space of plans: the memory of all, then the step times of those that fit; keep the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import LayoutError
from shapewright.core.notes import Refusal
from shapewright.lowering.checks import validate_layout
from shapewright.memory.estimate import ALLOCATOR_BAND_FRACTION
from shapewright.optimize.plan.findings import Choice, Findings
from shapewright.optimize.plan.memory import SplitMemoryEstimator, layout_of
from shapewright.optimize.plan.space import (
    Schedule,
    Split,
    list_activation_policies,
    list_device_counts,
    list_schedules,
    list_shardings,
    list_splits,
)
from shapewright.optimize.plan.times import SplitPricer
from shapewright.workload.layout import MAX_ZERO_STAGE_IN_PIPELINES, ParallelLayout

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from shapewright.optimize.plan.request import PlanJob

    Fits = Bool[np.ndarray, "splits policies shardings"]
    Totals = Float[np.ndarray, "splits policies shardings"]
    Progress = Callable[[int, int], None]

# Splits evaluated together: enough to price in arrays, few enough to stop soon after an interrupt.
_SPLITS_AT_ONCE = 256


def explore(job: PlanJob, *, memory_only: bool = False, progress: Progress | None = None) -> Findings:
    """Evaluate every plan of a job.

    Args:
        memory_only: Predict no step times; find only the plan of least memory.
        progress: Called after each chunk with the number of splits done and of all splits.

    Returns:
        The best plans; after an interrupt, the best so far.

    Raises:
        UnknownRateError: the device's data sheet lacks a number that is needed.
        WorkloadError: the device has no kernel for this attention.
    """
    job = job.resolved()
    tight_above_bytes = job.scenario.device.memory_bytes / (1.0 + ALLOCATOR_BAND_FRACTION)
    findings = Findings(job.request, tight_above_bytes=tight_above_bytes)
    evaluation = _Evaluation(job, findings)
    try:
        chunks = list(evaluation.chunks())
        total = sum(len(chunk) for chunk, _ in chunks)
        done = 0
        for chunk, num_devices in chunks:
            evaluation.evaluate(chunk, num_devices, memory_only=memory_only)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    except KeyboardInterrupt:
        findings.is_complete = False
    return findings


class _Evaluation:
    """Evaluation of the splits of a job, chunk by chunk."""

    def __init__(self, job: PlanJob, findings: Findings) -> None:
        self._scenario, self._request = job.scenario, job.request
        self._findings = findings
        self._memory, self._times = SplitMemoryEstimator(job), SplitPricer(job)
        self._limit_bytes = job.limit_bytes
        self._policies, self._shardings = list_activation_policies(self._request), list_shardings(self._request)

    def chunks(self) -> Iterator[tuple[list[Split], int]]:
        """Yield chunks of splits of one pipeline degree that lowering accepts, with their number of devices."""
        global_batch_size = self._scenario.workload.global_batch_size
        assert global_batch_size is not None
        for num_devices in list_device_counts(self._scenario.device, self._request):
            by_pipeline: dict[int, list[Split]] = {}
            for split in list_splits(
                self._scenario, self._request, num_devices=num_devices, global_batch_size=global_batch_size
            ):
                by_pipeline.setdefault(split.pipeline_parallel, []).append(split)
            refusals: dict[Split, Refusal | None] = {}
            for _, listed in sorted(by_pipeline.items()):
                kept = [split for split in listed if not self._refuses(split, refusals)]
                for first in range(0, len(kept), _SPLITS_AT_ONCE):
                    yield kept[first : first + _SPLITS_AT_ONCE], num_devices

    def _refuses(self, split: Split, known: dict[Split, Refusal | None]) -> bool:
        """Return whether lowering refuses a split, which does not depend on the micro-batch size; count it if so."""
        key = split._replace(micro_batch_size=1, num_microbatches=1)
        if key not in known:
            try:
                validate_layout(self._scenario.config, self._scenario.workload, layout_of(split))
                known[key] = None
            except LayoutError as error:
                known[key] = Refusal.of(error)
        refusal = known[key]
        if refusal is not None:
            self._findings.tally.refused[refusal] += 1
        return refusal is not None

    def evaluate(self, chunk: list[Split], num_devices: int, *, memory_only: bool = False) -> None:
        """Evaluate the plans of some splits of one pipeline degree."""
        allowed_schedules = list_schedules(self._scenario.config, chunk[0].pipeline_parallel, self._request)
        memory = self._memory.estimate(chunk).first_shardings(self._num_shardings(chunk))
        valid = {schedule: self._valid(chunk, schedule) for schedule in allowed_schedules}
        fits: dict[Schedule, Fits] = {}
        totals: dict[Schedule, Totals] = {}
        for schedule in allowed_schedules:
            totals[schedule] = memory.total_bytes(schedule)
            fits[schedule] = valid[schedule] & (totals[schedule] <= self._limit_bytes)
            self._findings.tally.num_plans += int(valid[schedule].sum())
            self._record_smallest(chunk, schedule, np.where(valid[schedule], totals[schedule], np.inf), num_devices)
        has_fitting = [part.any(axis=(1, 2)) for part in fits.values()]
        rows = np.flatnonzero(np.any(has_fitting, axis=0)) if has_fitting else np.zeros(0, dtype=np.int64)
        if memory_only or not len(rows):
            return
        self._price(
            [chunk[row] for row in rows],
            {schedule: part[rows] for schedule, part in fits.items()},
            {schedule: part[rows] for schedule, part in totals.items()},
            num_devices,
        )

    def _num_shardings(self, chunk: list[Split]) -> int:
        """Return how many shardings are tried: under a pipeline none that shards weights, unless zero_stage is kept."""
        if chunk[0].pipeline_parallel == 1 or "zero_stage" in self._request.kept:
            return len(self._shardings)
        return sum(sharding.zero_stage <= MAX_ZERO_STAGE_IN_PIPELINES for sharding in self._shardings)

    def _valid(self, chunk: list[Split], schedule: Schedule) -> Fits:
        """Return which combinations are valid plans.

        Interleaving needs a multiple of the stages as micro-batches (Megatron-LM refuses others), DualPipe an even
        number of at least two per stage, and sharding more than one replica. The rules for interleaving and sharding do
        not apply if the field is kept.
        """
        passes = np.array([split.num_microbatches for split in chunk])
        replicas = np.array([split.data_parallel * split.context_parallel for split in chunk])
        is_schedulable = np.ones(len(chunk), dtype=bool)
        if schedule.virtual_pipeline > 1 and "virtual_pipeline" not in self._request.kept:
            is_schedulable = passes % chunk[0].pipeline_parallel == 0
        if schedule.pipeline_schedule == "dualpipe":
            is_schedulable = (passes >= 2 * chunk[0].pipeline_parallel) & (passes % 2 == 0)
        can_shard = (replicas > 1) | ("zero_stage" in self._request.kept)
        unsharded = np.array([sharding.zero_stage == 0 for sharding in self._shardings[: self._num_shardings(chunk)]])
        by_sharding = is_schedulable[:, None] & (unsharded | can_shard[:, None])
        valid: Fits = np.repeat(by_sharding[:, None, :], len(self._policies), axis=1)
        return valid

    def _record_smallest(self, chunk: list[Split], schedule: Schedule, totals: Totals, num_devices: int) -> None:
        """Record the plan of least memory if it needs less than the least so far."""
        position = int(np.argmin(totals))
        least = float(totals.reshape(-1)[position])
        if np.isfinite(least) and (self._findings.smallest is None or least < self._findings.smallest[0]):
            row, policy, sharding = (int(index) for index in np.unravel_index(position, totals.shape))
            choice = Choice(chunk[row], schedule, self._policies[policy], self._shardings[sharding], num_devices)
            self._findings.smallest = (least, choice)

    def _price(
        self,
        chunk: list[Split],
        fits: dict[Schedule, Fits],
        totals: dict[Schedule, Totals],
        num_devices: int,
    ) -> None:
        """Predict the steps of the plans that fit."""
        findings = self._findings
        sums = self._times.price(chunk).first_shardings(self._num_shardings(chunk))
        passes = np.array([split.num_microbatches for split in chunk])
        first_split = len(findings.splits)
        findings.splits += chunk
        tables = []
        for schedule, fitting in fits.items():
            rows, policies, sharded = np.nonzero(fitting)
            if not len(rows):
                continue
            layout = ParallelLayout(pipeline_parallel=chunk[0].pipeline_parallel, **schedule._asdict())
            findings.schedules.append(schedule)
            tables.append(
                {
                    "step_s": sums.step_s(passes, layout)[fitting],
                    "bytes": totals[schedule][fitting],
                    "split": rows + first_split,
                    "policy": policies,
                    "sharding": sharded,
                    "schedule": np.full(len(rows), len(findings.schedules) - 1),
                    "devices": np.full(len(rows), num_devices),
                }
            )
        if tables:
            findings.add({name: np.concatenate([table[name] for table in tables]) for name in tables[0]})
