"""Tile and wave tails of the GEMMs that matter, and the widths that would not have them.

Legend: m, n rows and columns of a GEMM's output, f an MLP width, h hidden_size, t tensor_parallel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.lint.mlp import mlp_width_fields, pieces_of_width
from shapewright.operations import Gemm, GroupedGemm
from shapewright.perf.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.adding_up import PricedOperation
    from shapewright.lint.what_if import WhatIf
    from shapewright.predict import Prediction

BIG_GEMM_FRACTION = 0.04
"""Share of the step from which the tail of a GEMM, its gradients included, is worth a look; a step has some ten."""

_GRADIENTS = re.compile(r"\.(dgrad|wgrad)$")


@dataclass(frozen=True)
class BigGemm:
    """A weight GEMM that takes a visible share of the step.

    Attributes:
        operation: What runs.
        price: Its price.
        step_fraction: Its share of the step.
    """

    operation: Gemm | GroupedGemm
    price: GemmPrice
    step_fraction: float

    @property
    def slots(self) -> int:
        """Tiles that run at once."""
        return round(float(self.price.num_tiles) / (float(self.price.num_waves) * float(self.price.wave_efficiency)))


def big_gemms(prediction: Prediction) -> Iterator[BigGemm]:
    """Weight GEMMs (not batched ones, whose sizes follow from heads and lengths) that matter to the step."""
    family_s: dict[str, float] = {}
    for priced in prediction.operations:
        family = _family(priced)
        family_s[family] = family_s.get(family, 0.0) + priced.total_time_s
    for priced in prediction.operations:
        operation, price = priced.operation, priced.price
        if not isinstance(operation, Gemm | GroupedGemm) or not isinstance(price, GemmPrice) or not price.num_waves:
            continue  # a price without waves is a bound, from a device without a model of tiles
        is_batched = isinstance(operation, Gemm) and operation.batch != 1
        if family_s[_family(priced)] >= BIG_GEMM_FRACTION * prediction.step_time_s and not is_batched:
            yield BigGemm(operation, price, priced.total_time_s / prediction.step_time_s)


def _family(priced: PricedOperation) -> str:
    """Name of a GEMM without the suffix of its gradients."""
    return _GRADIENTS.sub("", priced.operation.name)


@dataclass(frozen=True)
class WidthAxis:
    """The output dimension of a GEMM that a width of the model decides.

    Attributes:
        field_name: Field of TransformerConfig.
        width: Its value.
        extent: The GEMM's dimension: the width on one device, or twice that for fused gate and up. [element]
        other_extent: The GEMM's other output dimension. [element]
        tile: Tile along the dimension. [element]
        other_tile: Tile along the other dimension. [element]
        unit: Elements of the dimension per element of the width, times tensor_parallel.
    """

    field_name: str
    width: int
    extent: int
    other_extent: int
    tile: int
    other_tile: int
    unit: float

    def width_for(self, extent: int) -> int:
        """Width of the model that makes the dimension so long."""
        return round(extent / self.unit)


def width_axis(case: WhatIf, gemm: BigGemm) -> WidthAxis | None:
    """Find the MLP or hidden width behind a GEMM's output; None for others, such as queries or the vocabulary."""
    operation, price = gemm.operation, gemm.price
    m, n, tile_m, tile_n = int(operation.m), int(operation.n), round(float(price.tile_m)), round(float(price.tile_n))
    # In wgrad (layout TN) both dimensions are widths; forward and dgrad have tokens in m.
    axes = [(n, m, tile_n, tile_m)]
    if operation.layout == "TN":
        axes.append((m, n, tile_m, tile_n))
    for extent, other_extent, tile, other_tile in axes:
        for name in mlp_width_fields(case.config):
            width, t = getattr(case.config, name), pieces_of_width(case.layout, name)
            for times in (1, 2):
                if extent * t == times * width and "attention" not in operation.name:
                    return WidthAxis(name, width, extent, other_extent, tile, other_tile, times / t)
    return None
