"""Passes over one layer, lowered and priced once for all splits that share them.

Lowering is linear in the layers (plan.layers). A pass over one layer depends only on some degrees and the micro-batch
size of a split: its key. Keys that differ in the micro-batch size alone form a group, which is lowered once with arrays
for sizes. All new groups are priced together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.records import dataclass
from shapewright.lowering.model import lower_parts
from shapewright.optimize.plan.layers import (
    COLUMNS,
    columns_of,
    find_layer_kinds,
    price_matrix_gemms,
    sum_by_row,
)
from shapewright.optimize.plan.space import list_activation_policies
from shapewright.pricing.operations import price_key, price_operations
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from shapewright.lowering.model import StepParts
    from shapewright.lowering.operations.operation import Operation
    from shapewright.optimize.plan.layers import MatrixOptimizerGemms
    from shapewright.optimize.plan.request import PlanJob
    from shapewright.optimize.plan.space import Split

    PerKind = Float[np.ndarray, "kinds"]
    TimesOfSizes = Float[np.ndarray, "operations sizes"]
    RowSums = Float[np.ndarray, "sizes rows columns"]


_PASS_ROWS = 2
"""Rows of a kind of layer that precede those of its activation policies: forward and backward pass."""


class LayerPassKey(NamedTuple):
    """What a pass over one layer depends on; splits with the same key share the pass."""

    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    sequence_parallel: bool
    micro_batch_size: int
    expert_tensor_parallel: int | None


@dataclass(frozen=True)
class LayerPass:
    """Times and sizes of one pass over one layer of each kind. [s]

    Attributes:
        ends: Time of embedding and head.
        forward: Time of the forward pass of a layer of each kind.
        backward: Time of its backward pass.
        recompute: Time of recomputing a layer of each kind, and of copying it to the host.
        dense: Weights of a layer of each kind without routed experts.
        routed: Weights of routed experts.
        dense_trained: Those of ``dense`` that are trained.
        routed_trained: Those of ``routed`` that are trained.
        image_ends: Weights before and after the layers, which in image models are linear layers.
        residual_tokens: Tokens that a stage sends to the next.
        residual_copies: Devices of the tensor axis that hold the same tokens.
        dtype: Element format of the residual stream.
        width_bytes: Size of its elements. [byte]
        matrix_gemms: GEMMs of an optimizer that works on whole matrices; None for others.
    """

    ends: Float[np.ndarray, " columns"]
    forward: Float[np.ndarray, "kinds columns"]
    backward: Float[np.ndarray, "kinds columns"]
    recompute: Float[np.ndarray, "kinds policies columns"]
    dense: PerKind
    routed: PerKind
    dense_trained: PerKind
    routed_trained: PerKind
    image_ends: tuple[int, int]
    residual_tokens: int
    residual_copies: int
    dtype: str
    width_bytes: float
    matrix_gemms: MatrixOptimizerGemms | None


@dataclass
class _PriceTable:
    """Operations that are priced together, and the rows of the table of times that each is added to.

    Attributes:
        operations: Operations to price.
        entries: Pairs of the position of an operation and a row that its time is added to.
        recomputed: The same for operations that recomputation repeats in the backward pass.
    """

    operations: list[Operation] = field(default_factory=list)
    entries: list[tuple[int, int]] = field(default_factory=list)
    recomputed: list[tuple[int, int]] = field(default_factory=list)

    def add(self, operations: Sequence[Operation], row: int) -> None:
        """Add operations to one row."""
        self.entries += [(len(self.operations) + index, row) for index in range(len(operations))]
        self.operations += operations

    def add_layer(self, parts: StepParts, row: int, ends_row: int | None) -> int:
        """Add the forward pass of a stage to a row, and its backward pass to the next row.

        Operations of the first and last stage are added to ``ends_row``, if given.

        Returns:
            Position of the first operation of the forward pass; the others follow it.
        """
        first = len(self.operations)
        for pass_row, operations in ((row, parts.body), (row + 1, parts.backward_of_layers())):
            for index, operation in enumerate(operations, start=len(self.operations)):
                own_row = pass_row if operation.stage == "every" else ends_row
                if own_row is not None:
                    self.entries.append((index, own_row))
            self.operations += operations
        return first

    def sums(self, times_s: TimesOfSizes, num_rows: int) -> RowSums:
        """Return the times by row and column. [s]

        Args:
            times_s: Time of all executions of each operation. [s]
        """
        columns = [columns_of(self.operations[index]) for index, _ in self.entries]
        columns += [columns_of(self.operations[index], "recompute") for index, _ in self.recomputed]
        places, rows = np.array([*self.entries, *self.recomputed]).T
        return sum_by_row(columns, times_s[places], rows, num_rows)


class LayerPassPricer:
    """Lowers and prices the passes of a job's plans, and caches them."""

    def __init__(self, job: PlanJob) -> None:
        self._job = job
        self._policies = list_activation_policies(job.request)
        self._has_matrix_optimizer = OPTIMIZERS[job.scenario.workload.optimizer].works_on_matrices
        self._passes: dict[LayerPassKey, LayerPass] = {}
        self.kinds = find_layer_kinds(job.scenario.config)

    def price(self, keys: Sequence[LayerPassKey]) -> list[LayerPass]:
        """Return the pass of each key; new ones are lowered and priced together.

        Raises:
            UnknownRateError: the device's data sheet lacks a number that is needed.
            WorkloadError: the device has no kernel for an operation.
        """
        new = [key for key in dict.fromkeys(keys) if key not in self._passes]
        if new:
            self._price_new(new)
        return [self._passes[key] for key in keys]

    @property
    def _rows_per_group(self) -> int:
        """Rows of a group in the table of times: the ends, then passes and policies of each kind of layer."""
        return 1 + len(self.kinds.counts) * (_PASS_ROWS + len(self._policies))

    def _price_new(self, keys: Sequence[LayerPassKey]) -> None:
        """Lower a layer of each kind for new keys, group by group, and price them together."""
        groups: dict[LayerPassKey, list[LayerPassKey]] = {}
        for key in keys:
            groups.setdefault(key._replace(micro_batch_size=1), []).append(key)
        most_sizes = max(map(len, groups.values()))
        table = _PriceTable()
        lowered: list[list[StepParts]] = []
        for index, (key, members) in enumerate(groups.items()):
            sizes = [member.micro_batch_size for member in members]
            # Groups with fewer micro-batch sizes repeat their last one, so that all arrays have one length.
            sizes += sizes[-1:] * (most_sizes - len(sizes))
            lowered.append([self._lower(key, kind, np.array(sizes)) for kind in range(len(self.kinds.counts))])
            self._add_group(table, lowered[-1], index * self._rows_per_group)
        times_s = self._times_of(table.operations, most_sizes)
        sums = table.sums(times_s, len(groups) * self._rows_per_group)
        for index, members in enumerate(groups.values()):
            first_row = index * self._rows_per_group
            self._store(members, lowered[index], sums[:, first_row : first_row + self._rows_per_group])

    def _add_group(self, table: _PriceTable, lowered: Sequence[StepParts], ends_row: int) -> None:
        """Add a group's operations; embedding and head, which are equal for all kinds, are taken from the first."""
        for kind, parts in enumerate(lowered):
            row = ends_row + 1 + kind * (_PASS_ROWS + len(self._policies))
            first = table.add_layer(parts, row, ends_row if kind == 0 else None)
            first_mtp = len(table.operations)
            table.add(parts.mtp + parts.backward_of_mtp(), ends_row)
            for policy_row, policy in enumerate(self._policies, start=row + _PASS_ROWS):
                if policy.offload_activations:
                    table.add(parts.host_copies(policy.recompute), policy_row)
                for start, repeated in (
                    (first, parts.repeated_indices(policy.recompute)),
                    (first_mtp, parts.repeated_mtp_indices(policy.recompute)),
                ):
                    table.recomputed += [(start + index, policy_row) for index in repeated]
            if kind == 0:
                table.add(parts.inputs + parts.head + parts.backward_of_head(), ends_row)

    def _store(self, members: Sequence[LayerPassKey], lowered: Sequence[StepParts], sums: RowSums) -> None:
        """Store the passes of a group, one per micro-batch size.

        Args:
            sums: Its rows of the table of times. [s]
        """
        groups = [{group.name: group for group in parts.groups} for parts in lowered]
        counts = {
            f"{name}{ending}": np.array(
                [_scalar(getattr(found[group], field)) if group in found else 0.0 for found in groups]
            )
            for name, group in (("dense", "layers"), ("routed", "experts"))
            for ending, field in (("", "num_weights"), ("_trained", "num_trained"))
        }
        shard = lowered[0].shard
        before, after = (
            int(_scalar(groups[0][name].num_weights)) if name in groups[0] else 0 for name in ("embedding", "logits")
        )
        common: dict[str, Any] = {
            **counts,
            "image_ends": (before, after),
            "residual_copies": shard.num_residual_copies,
            "dtype": shard.dtype,
            "width_bytes": shard.width_bytes,
            "matrix_gemms": price_matrix_gemms(lowered, self._times_of_matrix_gemms)
            if self._has_matrix_optimizer
            else None,
        }
        tokens = np.broadcast_to(shard.num_residual_tokens, sums.shape[0]).tolist()
        for index, key in enumerate(members):
            kinds = sums[index, 1:].reshape(len(lowered), _PASS_ROWS + len(self._policies), len(COLUMNS))
            self._passes[key] = LayerPass(
                ends=sums[index, 0],
                forward=kinds[:, 0],
                backward=kinds[:, 1],
                recompute=kinds[:, _PASS_ROWS:],
                residual_tokens=tokens[index],
                **common,
            )

    def _lower(self, key: LayerPassKey, kind: int, batch_sizes: Int[np.ndarray, " sizes"]) -> StepParts:
        """Lower one pass over one layer of a kind, with as many replicas as the experts need."""
        layout = ParallelLayout(
            tensor_parallel=key.tensor_parallel,
            data_parallel=key.expert_parallel * (key.expert_tensor_parallel or 1),
            context_parallel=key.context_parallel,
            expert_parallel=key.expert_parallel,
            expert_tensor_parallel=key.expert_tensor_parallel,
            sequence_parallel=key.sequence_parallel,
        )
        workload = replace(self._job.scenario.workload, micro_batch_size=1, global_batch_size=None, recompute="none")
        counts = self.kinds.counts[kind]
        parts = lower_parts(
            self._job.scenario.config,
            workload.resized(micro_batch_size=batch_sizes),
            layout,
            node_size=self._job.scenario.device.node_size,
            counts=counts,
        )
        # Multi-token prediction layers are a kind of their own, so they are removed from the other kinds.
        return replace(parts, mtp=[]) if any(each.num_layers for each in counts) else parts

    def _times_of(self, operations: Sequence[Operation], num_sizes: int) -> TimesOfSizes:
        """Return the time of all executions of operations whose sizes are numbers or arrays. [s]"""
        device, software = self._job.scenario.device, self._job.scenario.software
        keys = [(software.needs_own_price(operation), price_key(operation)) for operation in operations]
        distinct = dict(zip(keys, operations, strict=True))
        singles = [single for operation in distinct.values() for single in operation.single_sizes(num_sizes)]
        prices = price_operations(singles, device)
        prices_s = np.array([price.time_s for price in prices]).reshape(len(distinct), num_sizes)
        adjusted_s = {
            key: software.adjusted_s(operation, own_s, device)
            for (key, operation), own_s in zip(distinct.items(), prices_s, strict=True)
        }
        times_s: TimesOfSizes = np.array([adjusted_s[key] for key in keys])
        for row, operation in enumerate(operations):
            times_s[row] *= operation.repeats  # a number, or an array over the sizes
        return times_s

    def _times_of_matrix_gemms(self, operations: Sequence[Operation]) -> Float[np.ndarray, " operations"]:
        """Return the time of all executions of operations that do not depend on the micro-batch. [s]"""
        return self._times_of(operations, 1)[:, 0]


def layer_pass_key(split: Split) -> LayerPassKey:
    """Return the key of the passes of a split."""
    return LayerPassKey(
        split.tensor_parallel,
        split.context_parallel,
        split.expert_parallel,
        split.sequence_parallel,
        split.micro_batch_size,
        split.expert_tensor_parallel,
    )


def _scalar(number: Any) -> float:
    """Return a number that may be an array of equal values over micro-batch sizes."""
    return float(np.ravel(number)[0])
