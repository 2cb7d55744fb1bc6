"""Steps of optimisers that multiply whole matrices (Muon), over frames.

Legend: n layers of the stage that hold a matrix, r replicas that share them from ZeRO stage 1 on.

    time of a step = sum over matrices of ceil(iterations n / r) x time of one product
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shapewright.operations import GroupedGemm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shapewright.lowering import StepParts
    from shapewright.operations import Operation

    Array = NDArray[np.float64]


@dataclass(frozen=True)
class MatrixSteps:
    """Products of one family's matrices.

    Attributes:
        product_s: Time of one product. [products, s]
        repeats: How often it runs for a layer of each kind, unshared. [kinds, products]
        is_routed: Whether its matrices are routed experts, which fewer devices hold copies of. [products]
    """

    product_s: Array
    repeats: Array
    is_routed: NDArray[np.bool_]

    def total_s(self, factors: Array, replicas: int, replicas_of_experts: int) -> tuple[float, float]:
        """Time of a step, unshared and shared over replicas. [s]

        Args:
            factors: Layers of each kind. [kinds]
            replicas: Devices that hold the same weights.
            replicas_of_experts: Devices that hold the same routed experts.
        """
        unshared = np.rint(factors @ self.repeats)
        sharers = np.where(self.is_routed, replicas_of_experts, replicas)
        return float(unshared @ self.product_s), float(np.ceil(unshared / sharers) @ self.product_s)


def learn_matrices(lowered: Sequence[StepParts], times_of: Callable[[Sequence[Operation]], Array]) -> MatrixSteps:
    """Products of a family from one lowered layer of each kind; products alike in name are alike.

    Args:
        lowered: A pass over one layer of each kind.
        times_of: Prices operations. [s]
    """
    products: dict[str, Operation] = {}
    routed: dict[str, bool] = {}
    counts: list[dict[str, int]] = []
    for parts in lowered:
        experts = {layer.name for layer in parts.weighted_layers() if isinstance(layer, GroupedGemm)}
        found = parts.orthogonalization(0)
        counts.append({product.name: int(product.repeats) for product in found})
        for product in found:
            products.setdefault(product.name, product.changed(repeats=1))
            routed[product.name] = product.name.split(".", 1)[1].rsplit(".", 1)[0] in experts
    return MatrixSteps(
        product_s=times_of(list(products.values())),
        repeats=np.array([[count.get(name, 0) for name in products] for count in counts], dtype=float),
        is_routed=np.array([routed[name] for name in products], dtype=bool),
    )
