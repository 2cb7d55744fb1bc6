"""Tile and wave tails: the large GEMMs of a step, and the model widths behind their output dimensions.

Legend: m, n rows and columns of a GEMM's output, f an MLP width, h hidden_size, t tensor_parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.lint.shape_fixes import count_width_shards, list_mlp_width_fields
from shapewright.lowering.operations import Gemm, GroupedGemm
from shapewright.pricing.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

BIG_GEMM_FRACTION = 0.04
"""Smallest share of the step, gradients included, of a GEMM whose tail is checked; a step has about ten of them."""


@dataclass(frozen=True)
class BigGemm:
    """A weight GEMM with at least BIG_GEMM_FRACTION of the step.

    Attributes:
        operation: The operation.
        price: Its price.
        step_fraction: Its share of the step.
    """

    operation: Gemm | GroupedGemm
    price: GemmPrice
    step_fraction: float

    @property
    def slots(self) -> int:
        """Tiles that run concurrently."""
        return round(float(self.price.num_tiles) / (float(self.price.num_waves) * float(self.price.wave_efficiency)))


def list_big_gemms(prediction: Prediction) -> Iterator[BigGemm]:
    """Yield the large weight GEMMs of a step, without batched ones, whose sizes follow from heads and lengths."""
    module_s: dict[str, float] = {}  # includes the gradients of a GEMM
    for priced in prediction.operations:
        module = priced.operation.module
        module_s[module] = module_s.get(module, 0.0) + priced.total_time_s
    for priced in prediction.operations:
        operation, price = priced.operation, priced.price
        if not isinstance(operation, Gemm | GroupedGemm) or not isinstance(price, GemmPrice) or not price.num_waves:
            continue  # roofline prices have no waves
        is_batched = isinstance(operation, Gemm) and operation.batch != 1
        if module_s[operation.module] >= BIG_GEMM_FRACTION * prediction.step_time_s and not is_batched:
            yield BigGemm(operation, price, priced.total_time_s / prediction.step_time_s)


@dataclass(frozen=True)
class WidthAxis:
    """An output dimension of a GEMM that is proportional to a width of the model.

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
        """Return the model width for a length of the dimension."""
        return round(extent / self.unit)


def find_width_axis(scenario: Scenario, gemm: BigGemm) -> WidthAxis | None:
    """Find the MLP width behind an output dimension of a GEMM; None for other GEMMs, such as queries or logits."""
    operation, price = gemm.operation, gemm.price
    m, n, tile_m, tile_n = int(operation.m), int(operation.n), round(float(price.tile_m)), round(float(price.tile_n))
    # In wgrad (layout TN) both dimensions are widths; forward and dgrad have tokens in m.
    axes = [(n, m, tile_n, tile_m)]
    if operation.layout == "TN":
        axes.append((m, n, tile_m, tile_n))
    for extent, other_extent, tile, other_tile in axes:
        for name in list_mlp_width_fields(scenario.config):
            width, t = getattr(scenario.config, name), count_width_shards(scenario.layout, name)
            for times in (1, 2):
                if extent * t == times * width and operation.block not in ("attention", "cross_attention"):
                    return WidthAxis(name, width, extent, other_extent, tile, other_tile, times / t)
    return None
