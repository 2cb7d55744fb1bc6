"""Go through a space of plans: memory first, then the time of whatever fits, and keep the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from shapewright.errors import LayoutError
from shapewright.layout import MOST_ZERO_STAGE_IN_PIPELINES, ParallelLayout
from shapewright.lowering import validate_layout
from shapewright.memory import ALLOCATOR_BAND_FRACTION
from shapewright.plan.findings import Choice, Findings
from shapewright.plan.memory import MemoryOfFrames, layout_of
from shapewright.plan.space import Frame, Order, device_counts, frames, modes, orders, shardings
from shapewright.plan.times import TimesOfFrames

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.plan.job import PlanJob

    Progress = Callable[[int, int], None]

# Frames worked on together: enough to price in arrays, few enough to stop soon after an interrupt.
_FRAMES_AT_ONCE = 256


def explore(job: PlanJob, *, memory_only: bool = False, progress: Progress | None = None) -> Findings:
    """Look at every plan.

    Args:
        job: What is planned.
        memory_only: Look for the smallest plan alone; no step is predicted.
        progress: Told after each chunk how many splits of how many are done.

    Returns:
        The best of them; what there is so far where the user interrupts.

    Raises:
        UnknownRateError: the device's sheet lacks a number that is needed.
        WorkloadError: the device has no kernel for this attention.
    """
    job = job.settled()
    findings = Findings(job.request, roomy_bytes=job.device.memory_bytes / (1.0 + ALLOCATOR_BAND_FRACTION))
    explorer = _Explorer(job, findings)
    try:
        chunks = list(explorer.chunks())
        total = sum(len(chunk) for chunk, _ in chunks)
        done = 0
        for chunk, num_devices in chunks:
            explorer.look_at(chunk, num_devices, memory_only=memory_only)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    except KeyboardInterrupt:
        findings.is_complete = False
    return findings


class _Explorer:
    """Goes through the splits, chunk by chunk."""

    def __init__(self, job: PlanJob, findings: Findings) -> None:
        self._config, self._device, self._workload, self._request = job.config, job.device, job.workload, job.request
        self._findings = findings
        self._memory, self._times = MemoryOfFrames(job), TimesOfFrames(job)
        self._limit_bytes = job.limit_bytes
        self._modes, self._shardings = modes(self._request), shardings(self._request)

    def chunks(self) -> Iterator[tuple[list[Frame], int]]:
        """Splits of one pipeline degree at a time, those that the lowering refuses left out."""
        assert self._workload.global_batch_size is not None
        for num_devices in device_counts(self._device, self._request):
            by_pipeline: dict[int, list[Frame]] = {}
            for frame in frames(
                self._config,
                self._device,
                num_devices=num_devices,
                global_batch_size=self._workload.global_batch_size,
                seq_len=self._workload.seq_len,
                request=self._request,
            ):
                by_pipeline.setdefault(frame.pipeline_parallel, []).append(frame)
            refusals: dict[Frame, str] = {}
            for _, listed in sorted(by_pipeline.items()):
                kept = [frame for frame in listed if not self._refuses(frame, refusals)]
                for first in range(0, len(kept), _FRAMES_AT_ONCE):
                    yield kept[first : first + _FRAMES_AT_ONCE], num_devices

    def _refuses(self, frame: Frame, known: dict[Frame, str]) -> bool:
        """Whether the model cannot be split so; micro-batches have no say."""
        key = frame._replace(micro_batch_size=1, num_microbatches=1)
        if key not in known:
            try:
                validate_layout(self._config, self._workload, layout_of(frame))
                known[key] = ""
            except LayoutError as error:
                known[key] = str(error)
        if known[key]:
            self._findings.tally.refused[known[key]] += 1
        return bool(known[key])

    def look_at(self, chunk: list[Frame], num_devices: int, *, memory_only: bool = False) -> None:
        """Judge the plans of some splits of one pipeline degree."""
        allowed_orders = orders(self._config, chunk[0].pipeline_parallel, self._request)
        memory = self._memory.estimate(chunk).under(self._num_shardings(chunk))
        valid = {order: self._valid(chunk, order) for order in allowed_orders}
        fits: dict[Order, NDArray[np.bool_]] = {}
        totals: dict[Order, NDArray[np.float64]] = {}
        for order in allowed_orders:
            totals[order] = memory.total_bytes(order)
            fits[order] = valid[order] & (totals[order] <= self._limit_bytes)
            self._findings.tally.num_plans += int(valid[order].sum())
            self._note_smallest(chunk, order, np.where(valid[order], totals[order], np.inf), num_devices)
        rooms = [part.any(axis=(1, 2)) for part in fits.values()]
        worth = np.flatnonzero(np.any(rooms, axis=0)) if rooms else np.zeros(0, dtype=np.int64)
        if memory_only or not len(worth):
            return
        self._price(
            [chunk[row] for row in worth],
            {o: f[worth] for o, f in fits.items()},
            {o: t[worth] for o, t in totals.items()},
            num_devices,
        )

    def _num_shardings(self, chunk: list[Frame]) -> int:
        """Shardings that are looked at, the first ones: under a pipeline none of weights, unless it is asked for."""
        if chunk[0].pipeline_parallel == 1 or "zero_stage" in self._request.kept:
            return len(self._shardings)
        return sum(sharding.zero_stage <= MOST_ZERO_STAGE_IN_PIPELINES for sharding in self._shardings)

    def _valid(self, chunk: list[Frame], order: Order) -> NDArray[np.bool_]:
        """Plans that there are. [frames, modes, shardings]

        Interleaving needs the micro-batches in groups of as many as there are stages (Megatron-LM refuses others),
        DualPipe two for each stage, and sharding over replicas more than one of them, unless it is asked for.
        """
        passes = np.array([frame.num_microbatches for frame in chunk])
        replicas = np.array([frame.data_parallel * frame.context_parallel for frame in chunk])
        whole = np.ones(len(chunk), dtype=bool)
        if order.virtual_pipeline > 1 and "virtual_pipeline" not in self._request.kept:
            whole = passes % chunk[0].pipeline_parallel == 0
        if order.pipeline_schedule == "dualpipe":
            whole = (passes >= 2 * chunk[0].pipeline_parallel) & (passes % 2 == 0)
        has_choice = np.full(len(chunk), "zero_stage" in self._request.kept)
        unsharded = np.array([sharding.zero_stage == 0 for sharding in self._shardings[: self._num_shardings(chunk)]])
        stages = whole[:, None] & (unsharded | (has_choice | (replicas > 1))[:, None])
        valid: NDArray[np.bool_] = np.repeat(stages[:, None, :], len(self._modes), axis=1)
        return valid

    def _note_smallest(self, chunk: list[Frame], order: Order, totals: NDArray[np.float64], num_devices: int) -> None:
        position = int(np.argmin(totals))
        least = float(totals.reshape(-1)[position])
        if np.isfinite(least) and (self._findings.smallest is None or least < self._findings.smallest[0]):
            row, mode, sharding = (int(index) for index in np.unravel_index(position, totals.shape))
            choice = Choice(chunk[row], order, self._modes[mode], self._shardings[sharding], num_devices)
            self._findings.smallest = (least, choice)

    def _price(
        self,
        chunk: list[Frame],
        fits: dict[Order, NDArray[np.bool_]],
        totals: dict[Order, NDArray[np.float64]],
        num_devices: int,
    ) -> None:
        """Predict the steps of what fits."""
        findings = self._findings
        sums = self._times.add_up(chunk).under(self._num_shardings(chunk))
        passes = np.array([frame.num_microbatches for frame in chunk])
        first_frame = len(findings.frames)
        findings.frames += chunk
        tables = []
        for order, room in fits.items():
            rows, columns, sharded = np.nonzero(room)
            if not len(rows):
                continue
            layout = ParallelLayout(pipeline_parallel=chunk[0].pipeline_parallel, **order._asdict())
            findings.orders.append(order)
            tables.append(
                {
                    "step_s": sums.step_s(passes, layout)[room],
                    "bytes": totals[order][room],
                    "frame": rows + first_frame,
                    "mode": columns,
                    "sharding": sharded,
                    "order": np.full(len(rows), len(findings.orders) - 1),
                    "devices": np.full(len(rows), num_devices),
                }
            )
        if tables:
            findings.add({name: np.concatenate([table[name] for table in tables]) for name in tables[0]})
