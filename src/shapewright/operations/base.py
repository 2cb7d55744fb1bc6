"""What every operation carries: its module, the pass it belongs to, where it runs and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Count = int | NDArray[np.int64]
    Numeric = float | NDArray[np.floating[Any]]

PASSES = ("forward", "recompute", "backward", "step")
STAGES = ("every", "first", "last")


@dataclass(frozen=True, kw_only=True)
class OperationBase:
    """Facts common to all operations.

    Attributes:
        name: Module path and role, such as ``attention.qkv`` or ``mlp.up.wgrad``.
        pass_name: One of PASSES; ``step`` is what runs once per optimiser step.
        stage: Which pipeline stages run it: ``every``, the ``first`` or the ``last``.
        repeats: Executions per step on one device of that stage, micro-batches and layers counted.
        dtype: Element format of the operands.
    """

    name: str
    pass_name: str = "forward"
    stage: str = "every"
    repeats: Count = 1
    dtype: str = "bf16"
