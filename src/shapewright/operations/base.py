"""What every operation carries: its module, the pass it belongs to, where it runs and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Count = int | NDArray[np.integer[Any]] | NDArray[np.floating[Any]]
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

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values.

        What dataclasses.replace does, several times faster: an operation checks and derives nothing when it is made,
        and lowering a step copies a hundred of them.

        >>> OperationBase(name="mlp.up").changed(repeats=3).repeats
        3
        """
        copy = object.__new__(type(self))
        values = copy.__dict__
        values.update(self.__dict__)
        values.update(changes)
        assert len(values) == len(self.__dict__), f"{type(self).__name__} has no field {sorted(changes)}"
        return copy
