"""Memory of frames: the terms of the one estimate, combined over recomputation, ZeRO stage and schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.config import count_parameters
from shapewright.layout import ParallelLayout
from shapewright.memory import (
    CUDA_CONTEXT_BYTES,
    LayerBytes,
    Stage,
    count_microbatches_in_flight,
    count_stage_parameters,
    estimate_layer,
    estimate_states,
    estimate_training_terms,
    stages_to_compare,
)
from shapewright.plan.space import modes, shardings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.config import TransformerConfig
    from shapewright.plan.job import PlanJob
    from shapewright.plan.space import Frame, Mode, Order
    from shapewright.workload import Workload

    Array = NDArray[np.float64]


@dataclass(frozen=True)
class FrameMemory:
    """Memory of frames of one pipeline degree. [byte]

    Attributes:
        stages: Stages that may need most.
        states: Weights, gradients, optimiser states and gathered layers. [frames, stages, shardings]
        copied: What of them DualPipe's devices have twice. [frames, stages, shardings]
        kept: Activations of a micro-batch in flight. [frames, stages, modes]
        host: Those of them that the host keeps. [frames, stages, modes]
        moving: The most of them that the device holds besides. [frames, stages, modes]
        once: What is there once: the end of the model, logits, the runtime. [frames, stages]
        momentary: What exists for a moment. [frames, stages, modes]
        frames: The frames.
        alone: One replica with micro-batches of one sequence, by how many of them a step has.
    """

    stages: tuple[int, ...]
    states: Array
    copied: Array
    kept: Array
    host: Array
    moving: Array
    once: Array
    momentary: Array
    frames: Sequence[Frame]
    alone: Mapping[int, Workload]

    def under(self, num_shardings: int) -> FrameMemory:
        """The same of the first shardings alone."""
        return replace(self, states=self.states[:, :, :num_shardings], copied=self.copied[:, :, :num_shardings])

    def total_bytes(self, order: Order) -> Array:
        """Bytes of the fullest stage under one order of passes. [frames, modes, shardings]"""
        in_flight = self._in_flight(order)[:, :, None]
        on_device = self.kept * in_flight + np.minimum(self.moving, self.host * in_flight)
        by_mode = on_device + self.momentary + self.once[:, :, None]
        states = self.states + self.copied if order.pipeline_schedule == "dualpipe" else self.states
        total: Array = (by_mode[:, :, :, None] + states[:, :, None, :]).max(axis=1)
        return total

    def _in_flight(self, order: Order) -> Array:
        """Micro-batches in flight. [frames, stages]"""
        layout = ParallelLayout(pipeline_parallel=self.frames[0].pipeline_parallel, **order._asdict())
        counts, which = np.unique([frame.num_microbatches for frame in self.frames], return_inverse=True)
        by_count = [
            [count_microbatches_in_flight(self.alone[count], layout, stage) for stage in self.stages]
            for count in counts.tolist()
        ]
        in_flight: Array = np.array(by_count, dtype=float)[which]
        return in_flight


class MemoryOfFrames:
    """Estimates frames of a job's plans, and remembers what they share."""

    def __init__(self, job: PlanJob) -> None:
        self._config, self._workload = job.config, job.workload
        self._modes, self._shardings = modes(job.request), shardings(job.request)
        self._counts = count_parameters(job.config)
        self._stages: dict[tuple[int, int], Stage] = {}
        self._states: dict[tuple[Any, ...], Array] = {}
        self._terms: dict[tuple[Any, ...], Array] = {}
        self._layers: dict[tuple[Any, ...], LayerBytes] = {}
        self._workloads: dict[tuple[int, Mode], Workload] = {}
        self._alone: dict[int, Workload] = {}

    def estimate(self, frames: Sequence[Frame]) -> FrameMemory:
        """Estimate frames of one pipeline degree."""
        stages = tuple(stages_to_compare(self._config, layout_of(frames[0])))
        states, copied = np.moveaxis(np.array([self._states_of(frame, stages) for frame in frames]), 3, 0)
        terms = np.array([self._terms_of(frame, stages) for frame in frames])
        kept, host, moving, momentary, once = (terms[:, part] for part in range(5))
        for frame in frames:
            count = frame.num_microbatches
            if count not in self._alone:
                self._alone[count] = replace(self._workload, micro_batch_size=1, global_batch_size=count)
        return FrameMemory(stages, states, copied, kept, host, moving, once[:, :, 0], momentary, frames, self._alone)

    def _workload_of(self, frame: Frame, mode: Mode) -> Workload:
        """The workload of a plan."""
        key = (frame.micro_batch_size, mode)
        if key not in self._workloads:
            size = frame.micro_batch_size
            self._workloads[key] = replace(self._workload, micro_batch_size=size, **mode._asdict())
        return self._workloads[key]

    def _stage(self, frame: Frame, index: int) -> Stage:
        """A stage of a frame; which layers it has depends on the pipeline degree alone."""
        key = (frame.pipeline_parallel, index)
        if key not in self._stages:
            self._stages[key] = Stage(self._config, layout_of(frame), index)
        stage = copy(self._stages[key])
        stage.layout = layout_of(frame)
        return stage

    def _states_of(self, frame: Frame, stages: Sequence[int]) -> Array:
        """States, and those that DualPipe has twice, by stage and sharding. [stages, shardings, 2, byte]

        Micro-batch and sequence parallelism have no part in them.
        """
        replicas = frame.data_parallel * frame.context_parallel
        experts = (frame.expert_parallel, frame.expert_tensor_parallel)
        key = (frame.pipeline_parallel, frame.tensor_parallel, *experts, replicas)
        if key not in self._states:
            self._states[key] = np.array([self._states_of_stage(self._stage(frame, index)) for index in stages])
        return self._states[key]

    def _states_of_stage(self, stage: Stage) -> list[tuple[float, float]]:
        """States by sharding, and those that DualPipe has twice. [byte]"""
        parameters = count_stage_parameters(stage, self._counts)
        found = [
            estimate_states(
                parameters,
                replace(self._workload, offload_optimizer=sharding.offload_optimizer),
                replace(stage.layout, zero_stage=sharding.zero_stage),
            )
            for sharding in self._shardings
        ]
        return [(states.total_bytes, states.weights_bytes + states.gradients_bytes) for states in found]

    def _terms_of(self, frame: Frame, stages: Sequence[int]) -> Array:
        """Activations, in the order of FrameMemory: kept, host, moving, momentary, once. [5, stages, modes, byte]

        How many replicas there are and which device has which experts has no part in them.
        """
        key = frame._replace(data_parallel=1, expert_parallel=1, num_microbatches=1)
        if key not in self._terms:
            rows = []
            for index in stages:
                stage = self._stage(frame, index)
                for mode in self._modes:
                    term = estimate_training_terms(stage, self._workload_of(frame, mode), self._layer_bytes)
                    once = term.end_bytes + term.logits_bytes + CUDA_CONTEXT_BYTES
                    rows.append((term.microbatch_bytes, term.host_bytes, term.moving_bytes, term.momentary_bytes, once))
            self._terms[key] = np.array(rows).T.reshape(5, len(stages), len(self._modes))
        return self._terms[key]

    def _layer_bytes(
        self,
        config: TransformerConfig,
        workload: Workload,
        layout: ParallelLayout,
        *,
        has_experts: bool,
        has_cross_attention: bool,
    ) -> LayerBytes:
        """estimate_layer, once for what a layer can tell apart."""
        key = (
            layout.tensor_parallel,
            layout.tensor_degree_of_experts,
            layout.context_parallel,
            layout.sequence_parallel,
            workload.micro_batch_size,
            workload.recompute,
            workload.offload_activations,
            has_experts,
            has_cross_attention,
        )
        if key not in self._layers:
            self._layers[key] = estimate_layer(
                config, workload, layout, has_experts=has_experts, has_cross_attention=has_cross_attention
            )
        return self._layers[key]


def layout_of(frame: Frame) -> ParallelLayout:
    """The layout of a frame, before ZeRO stage and schedule are chosen."""
    return ParallelLayout(**frame.degrees)
