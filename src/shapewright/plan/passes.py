"""Passes over one layer, lowered and priced once for all frames that share them.

Lowering is linear in its layers (plan.layers), and of a frame only a few degrees and the micro-batch change a pass: a
family. Families that differ in their micro-batch alone are lowered together, with arrays for sizes: a group. All groups
that are not known yet are priced in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.layout import ParallelLayout
from shapewright.lowering import lower_parts
from shapewright.optimizers import OPTIMIZERS
from shapewright.perf.pricing import price_key, price_operations
from shapewright.plan.layers import kinds_of
from shapewright.plan.matrices import learn_matrices
from shapewright.plan.space import modes
from shapewright.plan.sums import COLUMNS, add_rows, columns_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.lowering import StepParts
    from shapewright.operations import Operation
    from shapewright.plan.job import PlanJob
    from shapewright.plan.matrices import MatrixSteps
    from shapewright.plan.space import Frame

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
class Pass:
    """One pass of a family. [s]

    Attributes:
        ends: Embedding and head. [columns]
        layers: A layer of each kind. [kinds, columns]
        recompute: A layer of each kind computed again, and copied to the host. [kinds, modes, columns]
        dense: Weights of a layer of each kind, routed experts left out. [kinds]
        routed: Weights of routed experts. [kinds]
        residual_tokens: Tokens that a stage hands on.
        residual_copies: Devices of the tensor axis that hold the same ones.
        dtype: Format of that stream.
        width_bytes: Width of its elements. [byte]
        matrices: Products of an optimiser that works on whole matrices; None for others.
    """

    ends: Array
    layers: Array
    recompute: Array
    dense: Array
    routed: Array
    residual_tokens: int
    residual_copies: int
    dtype: str
    width_bytes: float
    matrices: MatrixSteps | None


@dataclass
class _Ledger:
    """Operations that are priced together, and the rows of a table in which their times are added up.

    Attributes:
        operations: Each is priced once.
        entries: Place of an operation, and a row that its time belongs to.
        again: The same of operations that recomputation runs a second time, in the backward pass.
    """

    operations: list[Operation] = field(default_factory=list)
    entries: list[tuple[int, int]] = field(default_factory=list)
    again: list[tuple[int, int]] = field(default_factory=list)

    def add(self, operations: Sequence[Operation], row: int) -> None:
        """Enter operations into one row."""
        self.entries += [(len(self.operations) + place, row) for place in range(len(operations))]
        self.operations += operations

    def add_layer(self, parts: StepParts, row: int, ends_row: int | None) -> dict[int, int]:
        """Enter both passes of a stage, what its ends alone run into a row of its own, or none.

        Returns:
            Places of the forward pass's operations, by identity.
        """
        body = parts.body + parts.backward_of_layers()
        places = {id(operation): len(self.operations) + place for place, operation in enumerate(parts.body)}
        for place, operation in enumerate(body, start=len(self.operations)):
            own_row = row if operation.stage == "every" else ends_row
            if own_row is not None:
                self.entries.append((place, own_row))
        self.operations += body
        return places

    def sums(self, times_s: Array, num_rows: int) -> Array:
        """Times by row and column, once all operations are priced. [sizes, rows, columns]

        Args:
            times_s: Time of all executions of each operation. [s], [operations, sizes]
            num_rows: Rows of the table.
        """
        columns = [columns_of(self.operations[place]) for place, _ in self.entries]
        columns += [columns_of(self.operations[place], "recompute") for place, _ in self.again]
        places, rows = np.array([*self.entries, *self.again]).T
        return add_rows(columns, times_s[places], rows, num_rows)


class PassesOfFamilies:
    """Lowers and prices passes of a job's plans, and remembers them."""

    def __init__(self, job: PlanJob) -> None:
        self._job = job
        self._modes = modes(job.request)
        self._turns_matrices = OPTIMIZERS[job.workload.optimizer].newton_schulz_steps > 0
        self._passes: dict[Family, Pass] = {}
        self.kinds = kinds_of(job.config)

    def of(self, families: Sequence[Family]) -> list[Pass]:
        """The pass of each family; those not seen before are lowered and priced together.

        Raises:
            UnknownRateError: the device's sheet lacks a number that is needed.
            WorkloadError: the device has no kernel for an operation.
        """
        new = [family for family in dict.fromkeys(families) if family not in self._passes]
        if new:
            self._learn(new)
        return [self._passes[family] for family in families]

    @property
    def _rows_per_group(self) -> int:
        """Rows of a group in the table of times: its ends, then a layer of each kind, each followed by its modes."""
        return 1 + len(self.kinds.counts) * (1 + len(self._modes))

    def _learn(self, families: Sequence[Family]) -> None:
        """Lower a layer of each kind for new families, group by group, and price them together."""
        groups: dict[Family, list[Family]] = {}
        for family in families:
            groups.setdefault(family._replace(micro_batch_size=1), []).append(family)
        most_sizes = max(map(len, groups.values()))
        ledger = _Ledger()
        lowered: list[list[StepParts]] = []
        for index, (family, members) in enumerate(groups.items()):
            sizes = [member.micro_batch_size for member in members]
            # Groups of fewer micro-batches end in copies of their last, so that arrays are of one length.
            sizes += sizes[-1:] * (most_sizes - len(sizes))
            lowered.append([self._lower(family, kind, np.array(sizes)) for kind in range(len(self.kinds.counts))])
            self._enter(ledger, lowered[-1], index * self._rows_per_group)
        times_s = self._times_of(ledger.operations, most_sizes)
        table = ledger.sums(times_s, len(groups) * self._rows_per_group)
        for index, members in enumerate(groups.values()):
            first_row = index * self._rows_per_group
            self._keep(members, lowered[index], table[:, first_row : first_row + self._rows_per_group])

    def _enter(self, ledger: _Ledger, lowered: Sequence[StepParts], ends_row: int) -> None:
        """Enter a group's operations; the ends of the model are the same whatever lies between, so the first kind's."""
        for kind, parts in enumerate(lowered):
            row = ends_row + 1 + kind * (1 + len(self._modes))
            places = ledger.add_layer(parts, row, ends_row if kind == 0 else None)
            for mode_row, mode in enumerate(self._modes, start=row + 1):
                if mode.offload_activations:
                    ledger.add(parts.host_copies(mode.recompute), mode_row)
                ledger.again += [(places[id(operation)], mode_row) for operation in parts.repeated(mode.recompute)]
            if kind == 0:
                ledger.add(parts.inputs + parts.head + parts.backward_of_head(), ends_row)

    def _keep(self, members: Sequence[Family], lowered: Sequence[StepParts], table: Array) -> None:
        """Remember the passes of a group, a micro-batch each.

        Args:
            members: Its families.
            lowered: A layer of each kind.
            table: Its rows of the table of times. [sizes, rows, columns]
        """
        weights = [{group.name: group.num_weights for group in parts.groups} for parts in lowered]
        shard = lowered[0].shard
        common: dict[str, Any] = {
            "dense": np.array([_first(found["layers"]) for found in weights]),
            "routed": np.array([_first(found.get("experts", 0)) for found in weights]),
            "residual_copies": shard.num_residual_copies,
            "dtype": shard.dtype,
            "width_bytes": shard.width_bytes,
            "matrices": learn_matrices(lowered, self._times_of_matrices) if self._turns_matrices else None,
        }
        tokens = np.broadcast_to(shard.num_residual_tokens, table.shape[0]).tolist()
        for place, family in enumerate(members):
            kinds = table[place, 1:].reshape(len(lowered), 1 + len(self._modes), len(COLUMNS))
            self._passes[family] = Pass(
                ends=table[place, 0],
                layers=kinds[:, 0],
                recompute=kinds[:, 1:],
                residual_tokens=tokens[place],
                **common,
            )

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
        workload = replace(self._job.workload, micro_batch_size=1, global_batch_size=None, recompute="none")
        # Unchecked, since a workload takes numbers alone; the lowering takes arrays for what is not a branch.
        object.__setattr__(workload, "micro_batch_size", batch_sizes)
        node_size = self._job.device.node_size
        return lower_parts(self._job.config, workload, layout, node_size=node_size, counts=self.kinds.counts[kind])

    def _times_of(self, operations: Sequence[Operation], num_sizes: int) -> Array:
        """Time of all executions of operations, whose sizes are numbers or arrays. [s], [operations, sizes]"""
        device, software = self._job.device, self._job.software
        keys = [(software.tells_apart(operation), price_key(operation)) for operation in operations]
        alike = dict(zip(keys, operations, strict=True))
        singles = [single for operation in alike.values() for single in _single_sizes(operation, num_sizes)]
        prices = price_operations(singles, device, uncalibrated=self._job.uncalibrated)
        prices_s = np.array([price.time_s for price in prices]).reshape(len(alike), num_sizes)
        shown_s = {
            key: software.adjusted_s(operation, own_s, device)
            for (key, operation), own_s in zip(alike.items(), prices_s, strict=True)
        }
        repeats = np.array([operation.repeats for operation in operations], dtype=float)
        times_s: Array = np.array([shown_s[key] for key in keys]) * repeats[:, None]
        return times_s

    def _times_of_matrices(self, operations: Sequence[Operation]) -> Array:
        """Time of all executions of operations that no micro-batch changes. [s], [operations]"""
        return self._times_of(operations, 1)[:, 0]


def family_of(frame: Frame) -> Family:
    """What decides a pass over a layer of a frame."""
    return Family(
        frame.tensor_parallel,
        frame.context_parallel,
        frame.expert_parallel,
        frame.sequence_parallel,
        frame.micro_batch_size,
        frame.expert_tensor_parallel,
    )


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
