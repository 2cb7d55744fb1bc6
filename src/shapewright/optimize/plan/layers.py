"""Kinds of layers of a model, and the GEMMs of optimizers that work on whole matrices (Muon), per layer.

Stages of any depth are sums over the kinds of their layers, so that they need not be lowered again.

Legend: n layers of the stage that hold a matrix, r replicas that share them from ZeRO stage 1 on.

    time of the matrix optimizer = sum over matrices of ceil(iterations n / r) x time of one GEMM
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.lowering import LayerCounts, count_encoder_layers, count_layers
from shapewright.workload import ParallelLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Bool, Float

    from shapewright.lowering import StepParts
    from shapewright.lowering.operations import Operation
    from shapewright.models import TransformerConfig

    PerKind = Float[np.ndarray, "kinds"]
    PerGemm = Float[np.ndarray, "gemms"]


class LayerKinds(NamedTuple):
    """The kinds of layers of a model.

    Lowering is linear in the counts of layers, because equal layers are one operation that repeats. The step of any
    stage is therefore a sum over kinds of layers with a factor for each. The kinds are: a layer of each attention
    window, with the MLP of the first layer; if MLPs differ, a layer with the other MLP, which replaces one with the
    first; if position embeddings differ, a layer with the other embedding, in the same way; and a layer of an encoder.

    Attributes:
        counts: Layers to lower for each kind: of the decoder, and of the encoder.
        windows: Attention windows, in the order of the first kinds.
        has_other_mlp: Whether the next kind has the other MLP.
        starts_with_experts: Whether the first layer has experts.
        has_other_positions: Whether the next kind differs in having rotary positions.
        starts_with_rotary: Whether the first layer has rotary positions.
        has_encoder: Whether the last kind is a layer of an encoder.
    """

    counts: tuple[tuple[LayerCounts, LayerCounts], ...]
    windows: tuple[int, ...]
    has_other_mlp: bool
    starts_with_experts: bool
    has_other_positions: bool
    starts_with_rotary: bool
    has_encoder: bool

    def factors(self, config: TransformerConfig, pipeline_parallel: int) -> PerKind:
        """Return the number of layers of each kind on the busiest stage."""
        layout = ParallelLayout(pipeline_parallel=pipeline_parallel)
        counts = count_layers(config, layout)
        found = [float(counts.windows.get(window, 0)) for window in self.windows]
        if self.has_other_mlp:
            others = float(counts.num_dense if self.starts_with_experts else counts.num_expert)
            found[0] -= others
            found.append(others)
        if self.has_other_positions:
            others = float(counts.num_rotary)
            if self.starts_with_rotary:
                others = counts.num_layers - others
            found[0] -= others
            found.append(others)
        if self.has_encoder:
            found.append(float(count_encoder_layers(config, layout).num_layers))
        return np.array(found)


def find_layer_kinds(config: TransformerConfig) -> LayerKinds:
    """Return the kinds of layers of a model."""
    groups = config.layer_groups()
    windows = tuple(dict.fromkeys(group.window for group in groups))
    has_experts, has_rotary = groups[0].is_moe, config.is_rotary_layer(0)
    none = LayerCounts({}, 0, 0, 0)
    counts = [(_one_layer(window, has_experts=has_experts, has_rotary=has_rotary), none) for window in windows]
    has_other_mlp = len({group.is_moe for group in groups}) > 1
    if has_other_mlp:
        counts.append((_one_layer(windows[0], has_experts=not has_experts, has_rotary=has_rotary), none))
    # A pattern is one period, so both kinds occur in it unless it has no rotary layer.
    has_other_positions = len(set(config.rotary_layers)) > 1
    if has_other_positions:
        counts.append((_one_layer(windows[0], has_experts=has_experts, has_rotary=not has_rotary), none))
    has_encoder = config.num_encoder_layers > 0
    if has_encoder:
        one = _one_layer(0, has_experts=False, has_rotary=config.position_embedding == "rotary")
        counts.append((none, one))
    return LayerKinds(tuple(counts), windows, has_other_mlp, has_experts, has_other_positions, has_rotary, has_encoder)


def _one_layer(window: int, *, has_experts: bool, has_rotary: bool) -> LayerCounts:
    return LayerCounts({window: 1}, int(not has_experts), int(has_experts), int(has_rotary))


@dataclass(frozen=True)
class MatrixSteps:
    """GEMMs of a matrix optimizer.

    Attributes:
        gemm_s: Time of one GEMM. [s]
        repeats: Executions for a layer of each kind, unsharded.
        is_routed: Whether its matrices are routed experts, of which there are fewer replicas.
    """

    gemm_s: PerGemm
    repeats: Float[np.ndarray, "kinds gemms"]
    is_routed: Bool[np.ndarray, " gemms"]

    def total_s(self, factors: PerKind, replicas: int, num_expert_replicas: int) -> tuple[float, float]:
        """Return the time per step, unsharded and sharded over replicas. [s]

        Args:
            factors: Layers of each kind.
            replicas: Devices that hold the same weights.
            num_expert_replicas: Devices that hold the same routed experts.
        """
        unsharded = np.rint(factors @ self.repeats)
        num_sharing = np.where(self.is_routed, num_expert_replicas, replicas)
        return float(unsharded @ self.gemm_s), float(np.ceil(unsharded / num_sharing) @ self.gemm_s)


def make_matrix_steps(lowered: Sequence[StepParts], times_of: Callable[[Sequence[Operation]], PerGemm]) -> MatrixSteps:
    """Return the GEMMs of a matrix optimizer; GEMMs of the same name are equal.

    Args:
        lowered: A pass over one layer of each kind.
        times_of: Prices operations. [s]
    """
    gemms: dict[str, Operation] = {}
    counts: list[dict[str, int]] = []
    for parts in lowered:
        found = parts.orthogonalization(0)
        counts.append({gemm.name: int(gemm.repeats) for gemm in found})
        for gemm in found:
            gemms.setdefault(gemm.name, gemm.changed(repeats=1))
    return MatrixSteps(
        gemm_s=times_of(list(gemms.values())),
        repeats=np.array([[count.get(name, 0) for name in gemms] for count in counts], dtype=float),
        is_routed=np.array([gemm.block == "moe" for gemm in gemms.values()], dtype=bool),
    )
