"""Layer times, summed into step times for all plans of a split at once.

The time of a stage is a sum over its kinds of layers, so a stage of another depth is not lowered again. A split is
combined with recomputation, ZeRO stage and pipeline schedule. Each adds its own terms to the parts of a step
(prediction.composition), so these terms are computed once and added for every combination.

Legend: n layers of the stage that hold a matrix, r replicas that share them from ZeRO stage 1 on.

    time of the matrix optimizer (Muon) = sum over matrices of ceil(iterations n / r) x time of one GEMM
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.records import dataclass
from shapewright.lowering.counts import LayerCounts, count_encoder_layers, count_layers, count_trained_layers
from shapewright.lowering.operations.base import STAGES
from shapewright.models.layers import LayerKind
from shapewright.prediction.composition.stages import EXPERT_EXCHANGES, GRADIENT_GEMMS
from shapewright.prediction.composition.step import (
    STEP_PARTS,
    add_exposed_communication,
    collective_part,
    compose_parts,
    parts_of,
)
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Bool, Float, Int

    from shapewright.lowering.model import StepParts
    from shapewright.lowering.operations.operation import Operation
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.scenario import Scenario
    from shapewright.pricing.software import Software

    PerKind = Float[np.ndarray, "kinds"]
    PerGemm = Float[np.ndarray, "gemms"]
    SplitTimes = Float[np.ndarray, "splits columns"]
    PolicyTimes = Float[np.ndarray, "splits policies columns"]
    ShardingTimes = Float[np.ndarray, "splits shardings columns"]
    StepTimes = Float[np.ndarray, "splits policies shardings"]


class LayerKinds(NamedTuple):
    """The kinds of layers of a model.

    Lowering is linear in the counts of layers, because equal layers are one operation that repeats. The time of any
    stage is therefore a sum over kinds of layers, each times its number of layers.

    Attributes:
        counts: Layers to lower for each kind: of the decoder, and of the encoder.
        kinds: Kinds of decoder layers, in the order of the first counts.
        has_encoder: Whether an encoder layer follows them, as one more kind.
        predicts_further: Whether the last kind is all multi-token prediction layers together.
    """

    counts: tuple[tuple[LayerCounts, LayerCounts], ...]
    kinds: tuple[LayerKind, ...]
    has_encoder: bool
    predicts_further: bool

    def layers_by_kind(self, config: TransformerConfig, pipeline_parallel: int) -> PerKind:
        """Return the number of layers of each kind on the busiest stage."""
        layout = ParallelLayout(pipeline_parallel=pipeline_parallel)
        return self._count(count_layers(config, layout), count_encoder_layers(config, layout).num_layers)

    def trained_by_kind(self, scenario: Scenario, pipeline_parallel: int) -> PerKind:
        """Return the number of those with a backward pass."""
        config, layout = scenario.config, ParallelLayout(pipeline_parallel=pipeline_parallel)
        trained = count_trained_layers(config, scenario.workload, count_layers(config, layout))
        return self._count(trained, count_encoder_layers(config, layout).num_layers)

    def _count(self, counts: LayerCounts, num_encoder_layers: int) -> PerKind:
        found = [float(counts.kinds.get(kind, 0)) for kind in self.kinds]
        if self.has_encoder:
            found.append(float(num_encoder_layers))
        return np.array([*found, 1.0] if self.predicts_further else found)


def find_layer_kinds(config: TransformerConfig) -> LayerKinds:
    """Return the kinds of layers of a model."""
    kinds = tuple(config.count_kinds(range(config.num_layers)))
    none = LayerCounts({})
    counts = [(LayerCounts({kind: 1}), none) for kind in kinds]
    has_encoder = config.num_encoder_layers > 0
    if has_encoder:
        counts.append((none, LayerCounts({LayerKind(is_rotary=config.position_embedding == "rotary"): 1})))
    predicts_further = config.num_mtp_layers > 0
    if predicts_further:
        counts.append((none, none))
    return LayerKinds(tuple(counts), kinds, has_encoder, predicts_further)


@dataclass(frozen=True)
class MatrixOptimizerGemms:
    """The distinct GEMMs of a matrix optimizer (Muon).

    Attributes:
        gemm_s: Time of one execution of each GEMM. [s]
        repeats: Executions for one layer of each kind, unsharded.
        is_routed: Whether its matrices belong to routed experts, which fewer replicas hold.
    """

    gemm_s: PerGemm
    repeats: Float[np.ndarray, "kinds gemms"]
    is_routed: Bool[np.ndarray, " gemms"]

    def total_s(self, layers_by_kind: PerKind, replicas: int, num_expert_replicas: int) -> tuple[float, float]:
        """Return the time of a step without sharding, and sharded over replicas. [s]

        Args:
            replicas: Devices that hold the same weights.
            num_expert_replicas: Devices that hold the same routed experts.
        """
        unsharded = np.rint(layers_by_kind @ self.repeats)
        num_sharing = np.where(self.is_routed, num_expert_replicas, replicas)
        return float(unsharded @ self.gemm_s), float(np.ceil(unsharded / num_sharing) @ self.gemm_s)


def price_matrix_gemms(
    lowered: Sequence[StepParts], times_of: Callable[[Sequence[Operation]], PerGemm]
) -> MatrixOptimizerGemms:
    """Price the GEMMs of a matrix optimizer; GEMMs of the same name are equal.

    Args:
        lowered: A pass over one layer of each kind.
        times_of: Returns the times of operations. [s]
    """
    gemms: dict[str, Operation] = {}
    counts: list[dict[str, int]] = []
    for parts in lowered:
        found = parts.orthogonalization(0)
        counts.append({gemm.name: int(gemm.repeats) for gemm in found})
        for gemm in found:
            gemms.setdefault(gemm.name, gemm.changed(repeats=1))
    return MatrixOptimizerGemms(
        gemm_s=times_of(list(gemms.values())),
        repeats=np.array([[count.get(name, 0) for name in gemms] for count in counts], dtype=float),
        is_routed=np.array([gemm.block == "moe" for gemm in gemms.values()], dtype=bool),
    )


# The first stage has no experts outside of its layers; the last may, in multi-token prediction layers.
COLUMNS = tuple(part for part in STEP_PARTS if part != collective_part(EXPERT_EXCHANGES, "first"))
"""Parts of a step, in the order of the columns of the arrays here."""
_INDEX = {name: index for index, name in enumerate(COLUMNS)}
# Parts whose exposed time is added before splits are combined, see expose_tensor_communication.
_EXPOSED_EARLY = frozenset(collective_part(GRADIENT_GEMMS, stage) for stage in STAGES)


@dataclass(frozen=True)
class SplitSums:
    """Times of splits of one pipeline degree, by part of a step. [s]

    Attributes:
        base: Forward and backward pass without sends.
        recompute: Recomputation, and copies to the host and back, by activation policy.
        sharding: Gradient communication and optimizer step, by sharding.
        send: Sends between stages without chunks.
        send_chunk: Sends per chunk of an interleaved schedule.
        software: Training software, which determines what overlaps.
        layers_per_stage: Layers of the busiest stage.
        num_spare: Layers that the other stages lack, in sum, compared with the busiest one.
    """

    base: SplitTimes
    recompute: PolicyTimes
    sharding: ShardingTimes
    send: SplitTimes
    send_chunk: SplitTimes
    software: Software
    layers_per_stage: int
    num_spare: int

    def first_shardings(self, num_shardings: int) -> SplitSums:
        """Return the times of the first shardings only."""
        return replace(self, sharding=self.sharding[:, :num_shardings])

    def step_s(self, num_microbatches: Int[np.ndarray, " splits"], layout: ParallelLayout) -> StepTimes:
        """Return the step times of the splits under one schedule. [s]

        Args:
            layout: Pipeline degree, chunks and schedule; its other degrees have no effect.
        """
        chunks = layout.virtual_pipeline
        send = self.send if chunks == 1 else chunks * self.send_chunk
        total = (self.base + send)[:, None, None, :] + self.recompute[:, :, None, :] + self.sharding[:, None, :, :]
        step_s, _ = compose_parts(
            {name: total[..., index] for name, index in _INDEX.items() if name not in _EXPOSED_EARLY},
            num_microbatches[:, None, None],
            layout,
            self.software,
            layers_per_stage=self.layers_per_stage,
            num_spare=self.num_spare,
        )
        return np.asarray(step_s, dtype=float)


def expose_tensor_communication(base: SplitTimes, software: Software) -> SplitTimes:
    """Add the exposed share of tensor communication to its stages, and return the array.

    Recomputation, ZeRO stage and schedule do not change it, so it is computed once per split.

    Args:
        base: Times of splits; changed in place. [s]
    """
    parts: dict[str, Any] = {name: base[:, index] for name, index in _INDEX.items()}
    exposed = add_exposed_communication(parts, software, pools=(GRADIENT_GEMMS,))
    for stage in STAGES:
        base[:, _INDEX[stage]] = exposed[stage]
    return base


def zero_sharding_times(num_splits: int, num_shardings: int) -> ShardingTimes:
    """Return an array for the times of gradient communication and optimizer step. [s]"""
    return np.zeros((num_splits, num_shardings, len(COLUMNS)))


def add_to_step(sharding: Float[np.ndarray, "shardings columns"], times_s: Float[np.ndarray, " shardings"]) -> None:
    """Add work that runs once per step to a split, in place.

    Args:
        sharding: Times of the split. [s]
        times_s: Times to add. [s]
    """
    sharding[:, _INDEX["step"]] += times_s


def sum_by_row(
    columns: Sequence[tuple[int, ...]],
    times_s: Float[np.ndarray, "operations sizes"],
    rows: Int[np.ndarray, " operations"],
    num_rows: int,
) -> Float[np.ndarray, "sizes rows columns"]:
    """Sum times by row and column. [s]

    Args:
        columns: Columns that each time belongs to, see columns_of.
        times_s: Times of all executions of operations, of several sizes. [s]
    """
    kinds: dict[tuple[int, ...], int] = {}
    codes = np.array([kinds.setdefault(each, len(kinds)) for each in columns])
    cells, num_cells = rows * len(kinds) + codes, num_rows * len(kinds)
    by_kind = np.array([np.bincount(cells, weights=own_s, minlength=num_cells) for own_s in times_s.T])
    column_mask = np.zeros((len(kinds), len(COLUMNS)))
    for each, code in kinds.items():
        column_mask[code, list(each)] = 1.0
    table: Float[np.ndarray, "sizes rows columns"] = by_kind.reshape(-1, num_rows, len(kinds)) @ column_mask
    return table


_COLUMNS_OF_PARTS: dict[tuple[str, ...], tuple[int, ...]] = {}


def columns_of(operation: Operation, pass_name: str = "") -> tuple[int, ...]:
    """Return the columns that an operation's time is added to, by default those of its own pass."""
    parts = parts_of(operation, pass_name)
    columns = _COLUMNS_OF_PARTS.get(parts)
    if columns is None:
        columns = _COLUMNS_OF_PARTS[parts] = tuple(_INDEX[part] for part in parts)
    return columns
