"""Times of frames: passes over their layers (plan.passes), and what depends on the replicas, in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.layout import ParallelLayout
from shapewright.lowering import layers_per_stage, spare_layers
from shapewright.lowering.backward import lower_backward
from shapewright.lowering.communication import send_to_next_stage
from shapewright.lowering.step import lower_gradient_communication, lower_optimizer, lower_tied_gradients, make_groups
from shapewright.operations import Collective, Pointwise
from shapewright.perf.calibration import load_record
from shapewright.perf.collectives import price_collective
from shapewright.perf.pointwise import price_pointwise
from shapewright.plan.passes import PassesOfFamilies, family_of
from shapewright.plan.space import shardings
from shapewright.plan.sums import COLUMNS, FrameSums, add_to_step, columns_of, no_times, settle_products

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.config import TransformerConfig
    from shapewright.operations import Operation
    from shapewright.plan.job import PlanJob
    from shapewright.plan.passes import Pass
    from shapewright.plan.space import Frame
    from shapewright.workload import Workload

    Array = NDArray[np.float64]

_DEGREES = ("tensor_parallel", "data_parallel", "context_parallel", "expert_parallel")


@dataclass(frozen=True)
class _Shards:
    """What the lowering of communication reads of a shard, over frames: each size a number or an array."""

    config: TransformerConfig
    workload: Workload
    layout: _Layouts
    node_size: int
    num_passes: NDArray[np.int64]
    num_residual_tokens: NDArray[np.int64]
    num_residual_copies: NDArray[np.int64]
    dtype: str
    width_bytes: float
    prefix: str = ""


@dataclass(frozen=True)
class _Layouts:
    """Degrees of frames of one pipeline degree."""

    tensor_parallel: NDArray[np.int64]
    pipeline_parallel: int
    data_parallel: NDArray[np.int64]
    context_parallel: NDArray[np.int64]
    expert_parallel: NDArray[np.int64]
    tensor_degree_of_experts: NDArray[np.int64]

    @property
    def devices_per_stage(self) -> NDArray[np.int64]:
        """Devices of a stage."""
        return self.tensor_parallel * self.data_parallel * self.context_parallel

    @property
    def replicas_of_experts(self) -> NDArray[np.int64]:
        """Devices that hold the same routed experts."""
        return self.devices_per_stage // (self.tensor_degree_of_experts * self.expert_parallel)

    @property
    def num_devices(self) -> NDArray[np.int64]:
        """Devices of the job."""
        return self.devices_per_stage * self.pipeline_parallel


class TimesOfFrames:
    """Adds up frames of a job's plans, and remembers what they share."""

    def __init__(self, job: PlanJob) -> None:
        self._job = job
        self._shardings = shardings(job.request)
        self._zero_stages = np.array([sharding.zero_stage for sharding in self._shardings])
        self._passes = PassesOfFamilies(job)

    def add_up(self, frames: Sequence[Frame]) -> FrameSums:
        """Add up frames of one pipeline degree.

        Raises:
            UnknownRateError: the device's sheet lacks a number that is needed.
            WorkloadError: the device has no kernel for an operation.
        """
        known = self._passes.of([family_of(frame) for frame in frames])
        factors = self._passes.kinds.factors(self._job.config, frames[0].pipeline_parallel)
        repeats = np.array([frame.num_microbatches for frame in frames])
        layers = np.einsum("k,fkc->fc", factors, np.array([one.layers for one in known]))
        recompute = np.einsum("k,fkmc->fmc", factors, np.array([one.recompute for one in known]))
        ends = np.array([one.ends for one in known])
        shards = self._shards(frames, known, repeats)
        dense, routed = (
            np.rint(np.array([getattr(one, name) for one in known]) @ factors).astype(np.int64)
            for name in ("dense", "routed")
        )
        split = ParallelLayout(pipeline_parallel=frames[0].pipeline_parallel)
        sharding = self._sharding(shards, dense, routed, round(float(factors.sum())))
        for row, (frame, one) in enumerate(zip(frames, known, strict=True)):
            if one.matrices is not None:
                replicas = frame.data_parallel * frame.context_parallel
                copies = int(shards.layout.replicas_of_experts[row])
                alone_s, shared_s = one.matrices.total_s(factors, replicas, copies)
                add_to_step(sharding[row], np.where(self._zero_stages > 0, shared_s, alone_s))
        base = settle_products(repeats[:, None] * (ends + layers), self._job.software)
        return FrameSums(
            base=base,
            recompute=repeats[:, None, None] * recompute,
            sharding=sharding,
            send=self._sends(shards, 1),
            send_chunk=0.5 * self._sends(shards, 2),
            software=self._job.software,
            layers_per_stage=layers_per_stage(self._job.config, split),
            num_spare=0 if self._job.config.num_encoder_layers else spare_layers(self._job.config, split),
        )

    def _shards(self, frames: Sequence[Frame], known: Sequence[Pass], num_passes: NDArray[np.int64]) -> Any:
        degrees = [np.array([getattr(frame, name) for frame in frames]) for name in _DEGREES]
        degrees.append(np.array([frame.expert_tensor_parallel or frame.tensor_parallel for frame in frames]))
        return _Shards(
            config=self._job.config,
            workload=self._job.workload,
            layout=_Layouts(degrees[0], frames[0].pipeline_parallel, *degrees[1:]),
            node_size=self._job.device.node_size,
            num_passes=num_passes,
            num_residual_tokens=np.array([one.residual_tokens for one in known]),
            num_residual_copies=np.array([one.residual_copies for one in known]),
            dtype=known[0].dtype,
            width_bytes=known[0].width_bytes,
        )

    def _sends(self, shards: Any, virtual_pipeline: int) -> Array:
        """Sends between stages. [frames, columns]"""
        total = np.zeros((len(shards.num_passes), len(COLUMNS)))
        forward = send_to_next_stage(shards, virtual_pipeline)
        for operation in forward + lower_backward(forward):
            self._add(total, operation, {})
        return total

    def _sharding(self, shards: Any, dense: NDArray[np.int64], routed: NDArray[np.int64], num_layers: int) -> Array:
        """Gradient communication and optimiser step. [frames, shardings, columns]"""
        groups = make_groups(shards, dense, routed, num_layers, has_experts=bool(routed.any()))
        total = no_times(len(shards.num_passes), len(self._shardings))
        tied = lower_tied_gradients(shards)
        known: dict[tuple[str, bool], Array] = {}
        for column, (stage, offloads) in enumerate(self._shardings):
            own = replace(shards, workload=replace(self._job.workload, offload_optimizer=offloads))
            step = tied + lower_optimizer(own, groups, stage)
            for operation in lower_gradient_communication(own, groups, stage) + step:
                self._add(total[:, column], operation, known, is_sharded=stage > 0)
        return total

    def _add(
        self, total: Array, operation: Operation, known: dict[tuple[str, bool], Array], *, is_sharded: bool = False
    ) -> None:
        """Add an operation over frames; one that comes back under the same name is priced once."""
        key = (operation.name, is_sharded)
        if key not in known:
            if isinstance(operation, Collective):
                record = load_record("collectives", self._job.device, uncalibrated=self._job.uncalibrated)
                price = price_collective(operation, self._job.device, record)
            else:
                assert isinstance(operation, Pointwise), operation
                record = load_record("pointwise", self._job.device, uncalibrated=self._job.uncalibrated)
                price = price_pointwise(operation, self._job.device, record)
            time_s = np.asarray(self._job.software.adjusted_s(operation, price.time_s, self._job.device))
            if isinstance(operation, Collective) and not operation.is_host:
                # A group of one device sends nothing, and nothing is launched for it.
                time_s = np.where(operation.num_ranks == 1, 0.0, time_s)
            known[key] = time_s
        for column in columns_of(operation):
            total[:, column] += known[key] * operation.repeats
