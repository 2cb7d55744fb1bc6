"""Memory of splits: the terms of the memory estimate, combined over activation policies, shardings and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.records import dataclass
from shapewright.memory.activations import (
    LayerBytes,
    count_microbatches_in_flight,
    estimate_activation_terms,
    estimate_layer,
)
from shapewright.memory.estimate import CUDA_CONTEXT_BYTES
from shapewright.memory.saved_tensors import fuses_activation
from shapewright.memory.stages import Stage, peak_stage_candidates
from shapewright.memory.states import count_stage_parameters, estimate_states
from shapewright.models.parameters import count_parameters
from shapewright.optimize.plan.space import list_activation_policies, list_shardings
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.projection import training_recipe
from shapewright.workload.recompute import ALTERNATE, read_modules

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.models.layers import LayerKind
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.plan.request import PlanJob
    from shapewright.optimize.plan.space import ActivationPolicy, Schedule, Split
    from shapewright.workload.workload import Workload

    ByPolicy = Float[np.ndarray, "splits stages policies"]
    BySharding = Float[np.ndarray, "splits stages shardings"]
    ByStage = Float[np.ndarray, "splits stages"]
    Totals = Float[np.ndarray, "splits policies shardings"]


@dataclass(frozen=True)
class SplitMemory:
    """Memory of splits of one pipeline degree.

    Attributes:
        stages: Stages that may need most memory.
        states_bytes: Weights, gradients, optimizer states and gathered layers. [byte]
        duplicated_bytes: States that devices hold in addition under DualPipe. [byte]
        microbatch_bytes: Activations of each micro-batch in flight, on the device. [byte]
        host_bytes: Activations of each micro-batch in flight, offloaded to the host. [byte]
        in_transit_bytes: Most offloaded activations that the device holds while copying. [byte]
        transient_bytes: Short-lived buffers. [byte]
        fixed_bytes: Memory that does not grow with micro-batches: end of the model, logits, runtime. [byte]
        end_bytes: Of it, what GPipe keeps for each micro-batch in flight. [byte]
        splits: The splits.
        workloads: Workload of one replica with micro-batches of one sequence, by the number of them in a step.
    """

    stages: tuple[int, ...]
    states_bytes: BySharding
    duplicated_bytes: BySharding
    microbatch_bytes: ByPolicy
    host_bytes: ByPolicy
    in_transit_bytes: ByPolicy
    transient_bytes: ByPolicy
    fixed_bytes: ByStage
    end_bytes: ByStage
    splits: Sequence[Split]
    workloads: Mapping[int, Workload]

    def first_shardings(self, num_shardings: int) -> SplitMemory:
        """Return the memory of the first shardings only."""
        return replace(
            self,
            states_bytes=self.states_bytes[:, :, :num_shardings],
            duplicated_bytes=self.duplicated_bytes[:, :, :num_shardings],
        )

    def total_bytes(self, schedule: Schedule) -> Totals:
        """Return the bytes of the fullest stage under one schedule."""
        in_flight = self._in_flight(schedule)[:, :, None]
        on_device = self.microbatch_bytes * in_flight + np.minimum(self.in_transit_bytes, self.host_bytes * in_flight)
        fixed = self.fixed_bytes[:, :, None]
        if schedule.pipeline_schedule == "gpipe":
            fixed = fixed + (in_flight - 1.0) * self.end_bytes[:, :, None]
        by_policy = on_device + self.transient_bytes + fixed
        states = (
            self.states_bytes + self.duplicated_bytes if schedule.pipeline_schedule == "dualpipe" else self.states_bytes
        )
        total: Totals = (by_policy[:, :, :, None] + states[:, :, None, :]).max(axis=1)
        return total

    def _in_flight(self, schedule: Schedule) -> ByStage:
        """Return the micro-batches in flight."""
        layout = ParallelLayout(pipeline_parallel=self.splits[0].pipeline_parallel, **schedule._asdict())
        counts, which = np.unique([split.num_microbatches for split in self.splits], return_inverse=True)
        by_count = [
            [count_microbatches_in_flight(self.workloads[count], layout, stage) for stage in self.stages]
            for count in counts.tolist()
        ]
        in_flight: ByStage = np.array(by_count, dtype=float)[which]
        return in_flight


class SplitMemoryEstimator:
    """Estimates the memory of splits of a job, and caches the terms that they share."""

    def __init__(self, job: PlanJob) -> None:
        self._config, self._workload = job.scenario.config, job.scenario.workload
        self._policies, self._shardings = list_activation_policies(job.request), list_shardings(job.request)
        self._counts = count_parameters(job.scenario.config)
        # Which GEMMs alternate depends on the exchanges of rows between them, and so do the outputs of experts.
        self._depends_on_exchange = self._config.is_moe and (
            ALTERNATE in read_modules(self._workload.recompute_modules)
            or not fuses_activation(self._config, self._workload)
        )
        self._stages: dict[tuple[int, int], Stage] = {}
        self._states: dict[tuple[Any, ...], Float[np.ndarray, "stages shardings 2"]] = {}
        self._terms: dict[tuple[Any, ...], Float[np.ndarray, "6 stages policies"]] = {}
        self._layers: dict[tuple[Any, ...], LayerBytes] = {}
        self._workloads: dict[tuple[int, ActivationPolicy], Workload] = {}
        self._workloads_by_count: dict[int, Workload] = {}

    def estimate(self, splits: Sequence[Split]) -> SplitMemory:
        """Estimate the memory of splits of one pipeline degree."""
        stages = tuple(peak_stage_candidates(self._config, layout_of(splits[0])))
        states_bytes, duplicated_bytes = np.moveaxis(
            np.array([self._states_of(split, stages) for split in splits]), 3, 0
        )
        terms = np.array([self._terms_of(split, stages) for split in splits])
        microbatch_bytes, host_bytes, in_transit_bytes, transient_bytes, fixed_bytes, end_bytes = (
            terms[:, part] for part in range(6)
        )
        for split in splits:
            count = split.num_microbatches
            if count not in self._workloads_by_count:
                self._workloads_by_count[count] = replace(self._workload, micro_batch_size=1, global_batch_size=count)
        return SplitMemory(
            stages=stages,
            states_bytes=states_bytes,
            duplicated_bytes=duplicated_bytes,
            microbatch_bytes=microbatch_bytes,
            host_bytes=host_bytes,
            in_transit_bytes=in_transit_bytes,
            transient_bytes=transient_bytes,
            fixed_bytes=fixed_bytes[:, :, 0],
            end_bytes=end_bytes[:, :, 0],
            splits=splits,
            workloads=self._workloads_by_count,
        )

    def _workload_of(self, split: Split, policy: ActivationPolicy) -> Workload:
        """Return the workload of a plan."""
        key = (split.micro_batch_size, policy)
        if key not in self._workloads:
            size = split.micro_batch_size
            self._workloads[key] = replace(self._workload, micro_batch_size=size, **policy._asdict())
        return self._workloads[key]

    def _stage(self, split: Split, index: int) -> Stage:
        """Return a stage of a split; its layers depend on the pipeline degree alone."""
        key = (split.pipeline_parallel, index)
        if key not in self._stages:
            self._stages[key] = Stage(self._config, layout_of(split), index)
        stage = copy(self._stages[key])
        stage.layout = layout_of(split)
        return stage

    def _states_of(self, split: Split, stages: Sequence[int]) -> Float[np.ndarray, "stages shardings 2"]:
        """Return the states, and those that DualPipe adds to them, by stage and sharding. [byte]

        They depend on neither micro-batch size nor sequence parallelism.
        """
        replicas = split.data_parallel * split.context_parallel
        experts = (split.expert_parallel, split.expert_tensor_parallel)
        key = (split.pipeline_parallel, split.tensor_parallel, *experts, replicas)
        if key not in self._states:
            self._states[key] = np.array([self._states_of_stage(self._stage(split, index)) for index in stages])
        return self._states[key]

    def _states_of_stage(self, stage: Stage) -> list[tuple[float, float]]:
        """Return the states of a stage, and those that DualPipe adds to them, by sharding. [byte]"""
        own = self._states_under(stage, "1f1b")
        both = own if stage.layout.pipeline_parallel % 2 else self._states_under(stage, "dualpipe")
        return [(one, two - one) for one, two in zip(own, both, strict=True)]

    def _states_under(self, stage: Stage, schedule: str) -> list[float]:
        """Return the states of a stage under a schedule, by sharding. [byte]"""
        layout = replace(stage.layout, pipeline_schedule=schedule)
        stage = copy(stage)
        stage.layout = layout
        parameters = count_stage_parameters(stage, self._counts, self._workload)
        return [
            estimate_states(
                parameters,
                replace(self._workload, offload_optimizer=sharding.offload_optimizer),
                replace(layout, zero_stage=sharding.zero_stage),
                training_recipe(self._config, self._workload),
            ).total_bytes
            for sharding in self._shardings
        ]

    def _terms_of(self, split: Split, stages: Sequence[int]) -> Float[np.ndarray, "6 stages policies"]:
        """Return microbatch, host, in_transit, transient, fixed and end bytes, as in SplitMemory. [byte]

        They do not depend on the number of replicas, and of the expert degree at most on whether rows are exchanged.
        """
        expert_parallel = min(split.expert_parallel, 2) if self._depends_on_exchange else 1
        key = split._replace(data_parallel=1, expert_parallel=expert_parallel, num_microbatches=1)
        if key not in self._terms:
            rows = []
            for index in stages:
                stage = self._stage(split, index)
                for policy in self._policies:
                    term = estimate_activation_terms(stage, self._workload_of(split, policy), self._layer_bytes)
                    fixed_bytes = term.end_bytes + term.logits_bytes + CUDA_CONTEXT_BYTES
                    rows.append(
                        (
                            term.microbatch_bytes,
                            term.host_bytes,
                            term.in_transit_bytes,
                            term.transient_bytes,
                            fixed_bytes,
                            term.gpipe_end_bytes,
                        )
                    )
            self._terms[key] = np.array(rows).T.reshape(6, len(stages), len(self._policies))
        return self._terms[key]

    def _layer_bytes(
        self,
        config: TransformerConfig,
        workload: Workload,
        layout: ParallelLayout,
        *,
        kind: LayerKind,
        has_cross_attention: bool,
    ) -> LayerBytes:
        """Return estimate_layer, cached by the fields that it depends on."""
        key = (
            layout.tensor_parallel,
            layout.expert_tensor_degree,
            self._depends_on_exchange and (layout.has_own_expert_degree, layout.expert_parallel > 1),
            layout.context_parallel,
            layout.sequence_parallel,
            workload.micro_batch_size,
            workload.recompute,
            workload.offload_activations,
            kind,
            has_cross_attention,
        )
        if key not in self._layers:
            self._layers[key] = estimate_layer(
                config, workload, layout, kind=kind, has_cross_attention=has_cross_attention
            )
        return self._layers[key]


def layout_of(split: Split) -> ParallelLayout:
    """Return the layout of a split, before ZeRO stage and schedule are chosen."""
    return _layout_of_degrees(tuple(split.degrees.items()))


@lru_cache(maxsize=4096)  # a design plans many shapes on the same splits
def _layout_of_degrees(degrees: tuple[tuple[str, Any], ...]) -> ParallelLayout:
    return ParallelLayout(**dict(degrees))
