"""A tensor saved for the backward pass, with its size on one device, and which tensors recomputation keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.dtypes import get_dtype
from shapewright.workload.recompute import ALTERNATE, CORE, MODULES, read_modules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.workload.alternate_gemms import AlternateGemms

_NARROWEST_ACTIVATION_BYTES = 2.0  # fp8 and fp4 are formats of GEMM operands; activations between GEMMs have 16 bits
LAYER = "layer"
"""Block of the one tensor that a layer as a whole keeps: its input."""


class SavedTensor(NamedTuple):
    """A tensor saved for the backward pass, with its size on one device.

    Attributes:
        block: Part of the layer that saves it, such as ``attention``.
        role: Role within the block, such as ``queries``.
        rows: Product of the leading dimensions, usually tokens. [element]
        columns: Last dimension. [element]
        element_bytes: Width of one element. [byte]
    """

    block: str
    role: str
    rows: int
    columns: int
    element_bytes: float

    @property
    def name(self) -> str:
        """Displayed name."""
        return f"{self.block}.{self.role}"

    @property
    def num_bytes(self) -> float:
        """Size in memory. [byte]"""
        return self.element_bytes * self.rows * self.columns


def activation_element_bytes(dtype: str) -> float:
    """Width of one activation element between GEMMs of a dtype. [byte]

    >>> activation_element_bytes("fp8"), activation_element_bytes("tf32")
    (2.0, 4.0)
    """
    return max(_NARROWEST_ACTIVATION_BYTES, get_dtype(dtype).num_bytes)


def select_kept_tensors(
    tensors: tuple[SavedTensor, ...], recompute: str, modules: str = CORE, alternate: AlternateGemms | None = None
) -> tuple[SavedTensor, ...]:
    """Select the tensors that remain saved under a recomputation mode.

    Args:
        tensors: Tensors that the layer saves without recomputation.
        recompute: ``none`` keeps all, ``full`` only the layer's input, ``selective`` all but those of ``modules``.
        modules: Names of recomputed modules, separated by commas.
        alternate: What the layer keeps if ``alternate_gemms`` is one of them.
    """
    if recompute == "full":
        return tuple(tensor for tensor in tensors if tensor.block == LAYER)
    if recompute == "selective":
        roles = {tensor.role for tensor in tensors}
        names = read_modules(modules)
        named = (MODULES[name] for name in names if name != ALTERNATE)
        recomputed = [module for module in named if not module.source or module.source in roles]
        if ALTERNATE in names:
            assert alternate is not None, "the GEMMs of the layer are not given"
            kept = set(alternate.list_kept(frozenset((tensor.block, tensor.role) for tensor in tensors)))
            tensors = tuple(tensor for tensor in tensors if (tensor.block, tensor.role) in kept)
        return tuple(
            tensor
            for tensor in tensors
            if not any(module.drops_tensor(tensor.block, tensor.role) for module in recomputed)
        )
    return tensors


def sum_bytes(tensors: Iterable[SavedTensor]) -> float:
    """Size of several tensors together. [byte]"""
    return sum(tensor.num_bytes for tensor in tensors)
