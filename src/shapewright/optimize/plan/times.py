"""Times of splits, as arrays: passes over layers (plan.passes), sends, gradient communication and optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.records import dataclass
from shapewright.lowering.collectives import send_to_next_stage
from shapewright.lowering.counts import layers_per_stage, spare_layers
from shapewright.lowering.gradients import lower_backward
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.optimizer_step import (
    lower_gradient_communication,
    lower_optimizer,
    lower_tied_gradients,
    make_groups,
)
from shapewright.optimize.plan.layers import (
    COLUMNS,
    SplitSums,
    add_to_step,
    columns_of,
    expose_tensor_communication,
    zero_sharding_times,
)
from shapewright.optimize.plan.passes import LayerPassPricer, layer_pass_key
from shapewright.optimize.plan.space import list_shardings
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.collectives import price_collective
from shapewright.pricing.operations import price_key
from shapewright.pricing.pointwise import price_pointwise
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from shapewright.lowering.operations.operation import Operation
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.plan.passes import LayerPass
    from shapewright.optimize.plan.request import PlanJob
    from shapewright.optimize.plan.space import Split
    from shapewright.workload.workload import Workload

    PerSplit = Int[np.ndarray, "splits"]
    SplitTimes = Float[np.ndarray, "splits columns"]
    ShardingTimes = Float[np.ndarray, "splits shardings columns"]

_DEGREES = ("tensor_parallel", "data_parallel", "context_parallel", "expert_parallel")


@dataclass(frozen=True)
class _Shards:
    """Stands in for a shard in the lowering of communication: sizes are numbers, or arrays over splits."""

    config: TransformerConfig
    workload: Workload
    layout: _Layouts
    node_size: int
    num_passes: PerSplit
    num_residual_tokens: PerSplit
    num_residual_copies: PerSplit
    dtype: str
    width_bytes: float
    prefix: str = ""


@dataclass(frozen=True)
class _Layouts:
    """Stands in for a layout in the lowering of communication: degrees are arrays over splits."""

    tensor_parallel: PerSplit
    pipeline_parallel: int
    data_parallel: PerSplit
    context_parallel: PerSplit
    expert_parallel: PerSplit
    expert_tensor_degree: PerSplit

    @property
    def devices_per_stage(self) -> PerSplit:
        """Devices per stage."""
        degree: PerSplit = self.tensor_parallel * self.data_parallel * self.context_parallel
        return degree

    @property
    def num_expert_replicas(self) -> PerSplit:
        """Devices that hold the same routed experts."""
        replicas: PerSplit = self.devices_per_stage // (self.expert_tensor_degree * self.expert_parallel)
        return replicas

    @property
    def num_devices(self) -> PerSplit:
        """Devices of the job."""
        return self.devices_per_stage * self.pipeline_parallel


class SplitPricer:
    """Prices splits of a job's plans, and caches the passes that they share."""

    def __init__(self, job: PlanJob) -> None:
        self._scenario = job.scenario
        self._shardings = list_shardings(job.request)
        self._zero_stages = np.array([sharding.zero_stage for sharding in self._shardings])
        self._passes = LayerPassPricer(job)

    def price(self, splits: Sequence[Split]) -> SplitSums:
        """Return the times of splits of one pipeline degree.

        Raises:
            UnknownRateError: the device's data sheet lacks a number that is needed.
            WorkloadError: the device has no kernel for an operation.
        """
        passes = self._passes.price([layer_pass_key(split) for split in splits])
        scenario = self._scenario
        layers_by_kind = self._passes.kinds.layers_by_kind(scenario.config, splits[0].pipeline_parallel)
        repeats = np.array([split.num_microbatches for split in splits])
        num_layers = round(float(layers_by_kind.sum())) - self._passes.kinds.predicts_further
        trained = self._passes.kinds.trained_by_kind(scenario, splits[0].pipeline_parallel)
        layers = np.einsum("k,fkc->fc", layers_by_kind, np.array([one.forward for one in passes]))
        layers += np.einsum("k,fkc->fc", trained, np.array([one.backward for one in passes]))
        recompute = np.einsum("k,fkmc->fmc", trained, np.array([one.recompute for one in passes]))
        ends = np.array([one.ends for one in passes])
        shards = self._shards(splits, passes, repeats)
        dense, routed, dense_trained, routed_trained = (
            np.rint(np.array([getattr(one, name) for one in passes]) @ num_layers_of_kind).astype(np.int64)
            for num_layers_of_kind, name in (
                (layers_by_kind, "dense"),
                (layers_by_kind, "routed"),
                (trained, "dense_trained"),
                (trained, "routed_trained"),
            )
        )
        layout = ParallelLayout(pipeline_parallel=splits[0].pipeline_parallel)
        image_ends = np.array([one.image_ends for one in passes]).T
        sharding = self._sharding(shards, (dense, routed), (dense_trained, routed_trained), image_ends, num_layers)
        for row, (split, one) in enumerate(zip(splits, passes, strict=True)):
            if one.matrix_gemms is not None:
                replicas = split.data_parallel * split.context_parallel
                copies = int(shards.layout.num_expert_replicas[row])
                unsharded_s, sharded_s = one.matrix_gemms.total_s(trained, replicas, copies)
                add_to_step(sharding[row], np.where(self._zero_stages > 0, sharded_s, unsharded_s))
        base = expose_tensor_communication(repeats[:, None] * (ends + layers), scenario.software)
        return SplitSums(
            base=base,
            recompute=repeats[:, None, None] * recompute,
            sharding=sharding,
            send=self._sends(shards, 1),
            send_chunk=0.5 * self._sends(shards, 2),
            software=scenario.software,
            layers_per_stage=layers_per_stage(scenario.config, layout),
            num_spare=0 if scenario.config.num_encoder_layers else spare_layers(scenario.config, layout),
        )

    def _shards(self, splits: Sequence[Split], passes: Sequence[LayerPass], num_passes: PerSplit) -> Any:
        degrees = [np.array([getattr(split, name) for split in splits]) for name in _DEGREES]
        degrees.append(np.array([split.expert_tensor_parallel or split.tensor_parallel for split in splits]))
        return _Shards(
            config=self._scenario.config,
            workload=self._scenario.workload,
            layout=_Layouts(degrees[0], splits[0].pipeline_parallel, *degrees[1:]),
            node_size=self._scenario.device.node_size,
            num_passes=num_passes,
            num_residual_tokens=np.array([one.residual_tokens for one in passes]),
            num_residual_copies=np.array([one.residual_copies for one in passes]),
            dtype=passes[0].dtype,
            width_bytes=passes[0].width_bytes,
        )

    def _sends(self, shards: Any, virtual_pipeline: int) -> SplitTimes:
        """Return the times of sends between stages. [s]"""
        total = np.zeros((len(shards.num_passes), len(COLUMNS)))
        forward = send_to_next_stage(shards, virtual_pipeline)
        for operation in forward + lower_backward(forward):
            self._add(total, operation, {})
        return total

    def _sharding(
        self,
        shards: Any,
        weights: tuple[PerSplit, PerSplit],
        trained: tuple[PerSplit, PerSplit],
        image_ends: Iterable[PerSplit],
        num_layers: int,
    ) -> ShardingTimes:
        """Return the times of gradient communication and optimizer step. [s]"""
        # Groups without weights, or without trained ones, run no kernels.
        dense, routed, before, after = (counts if counts.any() else 0 for counts in (*trained, *image_ends))
        has_experts = bool(weights[1].any())
        groups = make_groups(
            shards, weights, (dense, routed), num_layers, has_experts=has_experts, image_ends=(before, after)
        )
        total = zero_sharding_times(len(shards.num_passes), len(self._shardings))
        tied = lower_tied_gradients(shards)
        known: dict[tuple[Any, ...], Any] = {}
        for column, (stage, offload) in enumerate(self._shardings):
            own = replace(shards, workload=replace(self._scenario.workload, offload_optimizer=offload))
            step = tied + lower_optimizer(own, groups, stage)
            for operation in lower_gradient_communication(own, groups, stage) + step:
                self._add(total[:, column], operation, known)
        return total

    def _add(self, total: SplitTimes, operation: Operation, known: dict[tuple[Any, ...], Any]) -> None:
        """Add the time of an operation to the totals of the splits; equal operations are priced once."""
        key = (operation.pass_name, *price_key(operation))
        if key not in known:
            device = self._scenario.device
            if isinstance(operation, Collective):
                price = price_collective(operation, device, load_record("collectives", device))
            else:
                assert isinstance(operation, Pointwise), operation
                price = price_pointwise(operation, device, load_record("pointwise", device))
            time_s = np.asarray(self._scenario.software.adjusted_s(operation, price.time_s, device))
            if isinstance(operation, Collective) and not operation.is_host:
                # A group of one device launches no collective.
                time_s = np.where(operation.num_ranks == 1, 0.0, time_s)
            known[key] = time_s
        for column in columns_of(operation):
            total[:, column] += known[key] * operation.repeats
