"""Times of frames: passes of layers alike are lowered and priced once, what depends on the replicas in arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.layout import ParallelLayout
from shapewright.lowering import layers_per_stage, lower_parts, spare_layers
from shapewright.lowering.backward import lower_backward
from shapewright.lowering.communication import send_to_next_stage
from shapewright.lowering.step import lower_gradient_communication, lower_optimizer, lower_tied_gradients, make_groups
from shapewright.operations import Collective, Pointwise
from shapewright.optimizers import OPTIMIZERS
from shapewright.perf.calibration import load_record
from shapewright.perf.collectives import price_collective
from shapewright.perf.pointwise import price_pointwise
from shapewright.perf.pricing import price_key, price_operations
from shapewright.plan.layers import kinds_of
from shapewright.plan.matrices import learn_matrices
from shapewright.plan.space import modes, shardings
from shapewright.plan.sums import (
    COLUMNS,
    FrameSums,
    add_rows,
    add_to_step,
    columns_of,
    no_times,
    settle_products,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.lowering import StepParts
    from shapewright.operations import Operation
    from shapewright.operations.base import Numeric
    from shapewright.perf.software import Software
    from shapewright.plan.matrices import MatrixSteps
    from shapewright.plan.request import PlanRequest
    from shapewright.plan.space import Frame
    from shapewright.workload import Workload

    Array = NDArray[np.float64]


class Family(NamedTuple):
    """What decides a pass over one layer: frames that agree in it differ in their number of layers alone."""

    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    sequence_parallel: bool
    micro_batch_size: int
    expert_tensor_parallel: int | None


@dataclass(frozen=True)
class _Pass:
    """One pass of a family. [s]

    Attributes:
        ends: Embedding and head. [columns]
        layers: A layer of each kind. [kinds, columns]
        recompute: A layer of each kind computed again, and copied to the host. [kinds, modes, columns]
        dense: Weights of a layer of each kind, routed experts left out. [kinds]
        routed: Weights of routed experts. [kinds]
        residual_tokens: Tokens that a stage hands on.
        residual_copies: Devices of the tensor axis that hold the same ones.
        matrices: Products of an optimiser that works on whole matrices; None for others.
    """

    ends: Array
    layers: Array
    recompute: Array
    dense: Array
    routed: Array
    residual_tokens: int
    residual_copies: int
    matrices: MatrixSteps | None


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
    """Adds up frames, and remembers what they share.

    Args:
        config: The model.
        device: What it runs on.
        workload: What is run; its micro-batch and recomputation are chosen by plans.
        request: What is kept.
        uncalibrated: Price as if nobody had measured the device.
        software: What the training software makes of the kernels.
    """

    def __init__(
        self,
        config: TransformerConfig,
        device: Device,
        workload: Workload,
        request: PlanRequest,
        *,
        uncalibrated: bool,
        software: Software,
    ) -> None:
        self._config, self._device, self._workload, self._uncalibrated = config, device, workload, uncalibrated
        self._software = software
        self._modes, self._shardings = modes(request), shardings(request)
        self._kinds = kinds_of(config)
        self._zero_stages = np.array([sharding.zero_stage for sharding in self._shardings])
        self._turns_matrices = OPTIMIZERS[workload.optimizer].newton_schulz_steps > 0
        self._passes: dict[Family, _Pass] = {}
        self._shard: Any = None

    def add_up(self, frames: Sequence[Frame]) -> FrameSums:
        """Add up frames of one pipeline degree.

        Raises:
            UnknownRateError: the device's sheet lacks a number that is needed.
            WorkloadError: the device has no kernel for an operation.
        """
        families = [_family_of(frame) for frame in frames]
        self._learn([family for family in dict.fromkeys(families) if family not in self._passes])
        known = [self._passes[family] for family in families]
        factors = self._kinds.factors(self._config, frames[0].pipeline_parallel)
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
        base = settle_products(repeats[:, None] * (ends + layers), self._software)
        return FrameSums(
            base=base,
            recompute=repeats[:, None, None] * recompute,
            sharding=sharding,
            send=self._sends(shards, 1),
            send_chunk=0.5 * self._sends(shards, 2),
            software=self._software,
            layers_per_stage=layers_per_stage(self._config, split),
            num_spare=0 if self._config.num_encoder_layers else spare_layers(self._config, split),
        )

    def _learn(self, families: Sequence[Family]) -> None:
        """Lower a layer of each kind for families not seen before, and price them together.

        Families that differ in their micro-batch alone are lowered once: a group.
        """
        groups: dict[Family, list[Family]] = {}
        for family in families:
            groups.setdefault(family._replace(micro_batch_size=1), []).append(family)
        operations: list[Operation] = []
        rows: list[int] = []
        # Operations that run again are those of the forward pass: position, row.
        again: list[tuple[int, int]] = []
        lowered: list[list[StepParts]] = []
        num_kinds = len(self._kinds.counts)
        per_group = 1 + num_kinds * (1 + len(self._modes))
        most_sizes = max(map(len, groups.values()), default=0)
        for index, (family, members) in enumerate(groups.items()):
            sizes = [member.micro_batch_size for member in members]
            # Groups of fewer micro-batches end in copies of their last, so that arrays are of one length.
            sizes += sizes[-1:] * (most_sizes - len(sizes))
            lowered.append([self._lower(family, kind, np.array(sizes)) for kind in range(num_kinds)])
            for kind, parts in enumerate(lowered[-1]):
                row = index * per_group + 1 + kind * (1 + len(self._modes))
                body = parts.body + parts.backward_of_layers()
                positions = {id(operation): len(operations) + place for place, operation in enumerate(parts.body)}
                operations += body
                # The ends of the model are the same whatever lies between.
                ends = index * per_group if kind == 0 else -1
                rows += [row if operation.stage == "every" else ends for operation in body]
                for column, mode in enumerate(self._modes, start=row + 1):
                    copies = parts.host_copies(mode.recompute) if mode.offload_activations else []
                    operations += copies
                    rows += [column] * len(copies)
                    again += [(positions[id(operation)], column) for operation in parts.repeated(mode.recompute)]
                if kind == 0:
                    outer = parts.inputs + parts.head + parts.backward_of_head()
                    operations += outer
                    rows += [ends] * len(outer)
        if not families:
            return
        kept = [position for position, row in enumerate(rows) if row >= 0]
        operations_s = self._times_of(operations, most_sizes)
        entries = np.array([*((position, rows[position]) for position in kept), *again])
        columns = [columns_of(operations[position]) for position in kept]
        columns += [columns_of(operations[position], "recompute") for position, _ in again]
        table = add_rows(columns, operations_s[entries[:, 0]], entries[:, 1], len(groups) * per_group)
        for index, members in enumerate(groups.values()):
            weights = [{group.name: group.num_weights for group in parts.groups} for parts in lowered[index]]
            shard = lowered[index][0].shard
            common: dict[str, Any] = {
                "dense": np.array([_first(found["layers"]) for found in weights]),
                "routed": np.array([_first(found.get("experts", 0)) for found in weights]),
                "residual_copies": shard.num_residual_copies,
                "matrices": learn_matrices(lowered[index], self._times_of_matrices) if self._turns_matrices else None,
            }
            tokens = np.broadcast_to(shard.num_residual_tokens, most_sizes).tolist()
            for place, family in enumerate(members):
                own = table[place, index * per_group : (index + 1) * per_group]
                kinds = own[1:].reshape(num_kinds, 1 + len(self._modes), len(COLUMNS))
                self._passes[family] = _Pass(
                    ends=own[0], layers=kinds[:, 0], recompute=kinds[:, 1:], residual_tokens=tokens[place], **common
                )

    def _times_of(self, operations: Sequence[Operation], num_sizes: int) -> Array:
        """Time of all executions of operations, whose sizes are numbers or arrays. [s], [operations, sizes]"""
        keys = [(self._software.tells_apart(operation), price_key(operation)) for operation in operations]
        alike = dict(zip(keys, operations, strict=True))
        singles = [single for operation in alike.values() for single in _single_sizes(operation, num_sizes)]
        prices = price_operations(singles, self._device, uncalibrated=self._uncalibrated)
        prices_s = np.array([price.time_s for price in prices]).reshape(len(alike), num_sizes)
        shown_s = {
            key: self._time_s(operation, own_s) for (key, operation), own_s in zip(alike.items(), prices_s, strict=True)
        }
        repeats = np.array([operation.repeats for operation in operations], dtype=float)
        times_s: Array = np.array([shown_s[key] for key in keys]) * repeats[:, None]
        return times_s

    def _times_of_matrices(self, operations: Sequence[Operation]) -> Array:
        """Time of all executions of operations that no micro-batch changes. [s], [operations]"""
        return self._times_of(operations, 1)[:, 0]

    def _lower(self, family: Family, kind: int, batch_sizes: NDArray[np.int64]) -> StepParts:
        """Lower one pass over one layer of a kind; replicas are as many as the experts need."""
        layout = ParallelLayout(
            tensor_parallel=family.tensor_parallel,
            data_parallel=family.expert_parallel * (family.expert_tensor_parallel or 1),
            context_parallel=family.context_parallel,
            expert_parallel=family.expert_parallel,
            expert_tensor_parallel=family.expert_tensor_parallel,
            sequence_parallel=family.sequence_parallel,
        )
        workload = replace(self._workload, micro_batch_size=1, global_batch_size=None, recompute="none")
        # Unchecked, since a workload takes numbers alone; the lowering takes arrays for what is not a branch.
        object.__setattr__(workload, "micro_batch_size", batch_sizes)
        parts = lower_parts(
            self._config, workload, layout, node_size=self._device.node_size, counts=self._kinds.counts[kind]
        )
        self._shard = parts.shard
        return parts

    def _shards(self, frames: Sequence[Frame], known: Sequence[_Pass], num_passes: NDArray[np.int64]) -> Any:
        degrees = [np.array([getattr(frame, name) for frame in frames]) for name in _DEGREES]
        degrees.append(np.array([frame.expert_tensor_parallel or frame.tensor_parallel for frame in frames]))
        return _Shards(
            config=self._config,
            workload=self._workload,
            layout=_Layouts(degrees[0], frames[0].pipeline_parallel, *degrees[1:]),
            node_size=self._device.node_size,
            num_passes=num_passes,
            num_residual_tokens=np.array([one.residual_tokens for one in known]),
            num_residual_copies=np.array([one.residual_copies for one in known]),
            dtype=self._shard.dtype,
            width_bytes=self._shard.width_bytes,
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
            own = replace(shards, workload=replace(self._workload, offload_optimizer=offloads))
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
                record = load_record("collectives", self._device, uncalibrated=self._uncalibrated)
                price = price_collective(operation, self._device, record)
            else:
                assert isinstance(operation, Pointwise), operation
                record = load_record("pointwise", self._device, uncalibrated=self._uncalibrated)
                price = price_pointwise(operation, self._device, record)
            time_s = np.asarray(self._time_s(operation, price.time_s))
            if isinstance(operation, Collective) and not operation.is_host:
                # A group of one device sends nothing, and nothing is launched for it.
                time_s = np.where(operation.num_ranks == 1, 0.0, time_s)
            known[key] = time_s
        for column in columns_of(operation):
            total[:, column] += known[key] * operation.repeats

    def _time_s(self, operation: Operation, time_s: Numeric) -> Any:
        """Time of one execution as the software runs it. [s]"""
        return self._software.adjusted_s(operation, time_s, self._device)


def _single_sizes(operation: Operation, num_sizes: int) -> list[Operation]:
    """An operation of each size of one whose sizes are arrays."""
    arrays = {name: value.tolist() for name, value in vars(operation).items() if isinstance(value, np.ndarray)}
    if not arrays:
        return [operation] * num_sizes
    rows = zip(*arrays.values(), strict=True)
    return [operation.changed(**dict(zip(arrays, values, strict=True))) for values in rows]


def _first(number: Any) -> float:
    """A number that does not depend on the micro-batch, though it may come as an array over it."""
    return float(np.ravel(number)[0])


_DEGREES = ("tensor_parallel", "data_parallel", "context_parallel", "expert_parallel")


def _family_of(frame: Frame) -> Family:
    return Family(
        frame.tensor_parallel,
        frame.context_parallel,
        frame.expert_parallel,
        frame.sequence_parallel,
        frame.micro_batch_size,
        frame.expert_tensor_parallel,
    )
