"""Rules on the tiles and waves of large GEMMs.

Legend: m, n rows and columns of a GEMM's output, f an MLP width, h hidden_size, t tensor_parallel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.numeric import round_up
from shapewright.core.records import dataclass
from shapewright.lint.rule import Fix, Violation, rule
from shapewright.lint.shape_fixes import (
    count_width_shards,
    full_width_multiple,
    list_mlp_width_fields,
    nearest_multiples,
)
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.pricing.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

BIG_GEMM_FRACTION = 0.04
"""Smallest share of the step, gradients included, of a GEMM whose tail is checked; about ten GEMMs are as large."""


@dataclass(frozen=True)
class BigGemm:
    """A weight GEMM with at least BIG_GEMM_FRACTION of the step.

    Attributes:
        operation: The operation.
        price: Its price.
        time_s: Its time in a step.
    """

    operation: Gemm | GroupedGemm
    price: GemmPrice
    time_s: float

    @property
    def slots(self) -> int:
        """Number of tiles that run concurrently."""
        return round(float(self.price.num_tiles) / (float(self.price.num_waves) * float(self.price.wave_efficiency)))


def list_big_gemms(prediction: Prediction) -> Iterator[BigGemm]:
    """Yield the large weight GEMMs of a step, without batched ones, whose sizes follow from heads and lengths."""
    shares: dict[str, float] = {}  # by module, with the gradients of a GEMM
    for priced in prediction.operations:
        module = priced.operation.module
        shares[module] = shares.get(module, 0.0) + prediction.share_of_step(priced)
    for priced in prediction.operations:
        operation, price = priced.operation, priced.price
        if not isinstance(operation, Gemm | GroupedGemm) or not isinstance(price, GemmPrice) or not price.num_waves:
            continue  # roofline prices have no waves
        is_batched = isinstance(operation, Gemm) and operation.batch != 1
        if shares[operation.module] >= BIG_GEMM_FRACTION and not is_batched:
            yield BigGemm(operation, price, priced.total_time_s)


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


# Higher efficiencies lose less than the error of a prediction. Shapes with w waves have a mean efficiency of about
# 1 - 1 / (2 w), so the rule rarely fires with three or more waves.
SMALLEST_WAVE_EFFICIENCY = 0.85
_MOST_WIDTH_CHANGE_FRACTION = 0.1


@rule(
    "WQ102",
    "wave-tail",
    reads=("config.intermediate_size", "config.hidden_size", "workload.micro_batch_size", "workload.seq_len"),
)
def wave_tail(scenario: Scenario) -> Iterator[Violation]:
    """The last wave of a large GEMM fills only part of the device.

    ## What it does

    Fires when a weight GEMM with at least 4 % of the step, gradients included, has a wave efficiency below 85 %, and a
    similar MLP width or micro-batch has no such GEMM and is predicted to be faster.

    ## Why it is slow

    Output tiles run on all SMs concurrently, in waves; one tile more than a full wave costs another wave. On an A100
    (108 SMs, tiles of 128 x 256) a GEMM of 2304 x n x 4096 ran at 217.6 TFLOP/s with n = 1536, which is exactly 108
    tiles, and at 180.1 with n = 1600; at 235.0 with n = 3072 and at 201.3 with n = 3136 (sweep of arXiv 2401.14489).

    ## Example

    An MLP of width 3584 makes 224 tiles for 1024 tokens: two waves of 108 and a third with 8.

    >>> from shapewright.lint.example import fires
    >>> small = {"num_layers": 4, "hidden_size": 1536, "num_heads": 12, "vocab_size": 32000}
    >>> fires("WQ102", intermediate_size=3584, micro_batch_size=1, seq_len=1024, **small)
    True

    ## Use instead

    The width or micro-batch of the suggestion, whose tiles fill the last wave.

    >>> fires("WQ102", intermediate_size=3456, micro_batch_size=1, seq_len=1024, **small)
    False

    ## Fix safety

    `runtime` for a micro-batch, `retrain` for an MLP width.

    ## When it does not matter

    With many waves the last one matters little, and persistent kernels distribute its work. The kernel that a library
    selects depends on its version, so gains of a few percent may not carry over.

    ## References

    - arXiv 2401.14489, section on wave quantization; NVIDIA, Matrix Multiplication Background User's Guide, "Wave
      quantization".
    """
    worst = _find_worst_wave_tail(scenario)
    if worst is None:
        return
    fixes = tuple(fix for fix in _fuller_wave_fixes(scenario, worst) if _fills_waves(scenario, fix))
    if not fixes:
        return
    axis = find_width_axis(scenario, worst)
    name = axis.field_name if axis else "micro_batch_size"
    path = f"config.{name}" if axis else f"workload.{name}"
    yield Violation(
        field=path,
        actual=axis.width if axis else scenario.workload.micro_batch_size,
        wanted="a number of tiles that fills whole waves",
        problem=(
            f"gives {worst.operation.name} {round(float(worst.price.num_tiles))} tiles on {worst.slots} slots, "
            f"{float(worst.price.wave_efficiency):.0%} full"
        ),
        fixes=fixes,
    )


def _find_worst_wave_tail(scenario: Scenario) -> BigGemm | None:
    """Return the large GEMM whose last wave loses the most time; None where none is below the efficiency limit."""
    if not scenario.is_possible:
        return None
    tails = [
        gemm
        for gemm in list_big_gemms(scenario.predict())
        if gemm.price.wave_efficiency < SMALLEST_WAVE_EFFICIENCY and gemm.price.bound_by == "compute"
    ]
    return max(tails, key=lambda gemm: gemm.time_s * (1.0 - float(gemm.price.wave_efficiency)), default=None)


def _fills_waves(scenario: Scenario, fix: Fix) -> bool:
    after = scenario.try_replace(fix.changes)
    return after is not None and after.is_possible and _find_worst_wave_tail(after) is None


def _fuller_wave_fixes(scenario: Scenario, worst: BigGemm) -> Iterator[Fix]:
    yield from _fuller_width_fixes(scenario, worst)
    size, layout = scenario.workload.micro_batch_size, scenario.layout
    # A micro-batch of one sequence is reported by micro-batch-too-small.
    if not scenario.workload.is_training or size == 1:
        return
    # Without a global batch, a smaller micro-batch makes the step smaller and the share of the optimizer larger.
    candidates = (size - 1, size + 1) if scenario.workload.global_batch_size else (size + 1,)
    for candidate in candidates:
        divisible = math.lcm(size, candidate) * layout.data_parallel * layout.default_microbatches
        common_changes = {} if scenario.workload.global_batch_size else {"global_batch_size": divisible}
        yield Fix(
            kind="runtime",
            title=f"use micro_batch_size={candidate}",
            changes={"micro_batch_size": candidate},
            common_changes=common_changes,
        )


def _fuller_width_fixes(scenario: Scenario, worst: BigGemm) -> Iterator[Fix]:
    """Suggest the widths with one wave less, and with a full last wave."""
    axis = find_width_axis(scenario, worst)
    if axis is None:
        return
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype) * scenario.layout.tensor_parallel
    other_tiles = -(-axis.other_extent // axis.other_tile) * round(float(worst.price.split_k))
    num_waves = round(float(worst.price.num_waves))
    for waves in (num_waves - 1, num_waves):
        tiles = waves * worst.slots // other_tiles
        width = axis.width_for(tiles * axis.tile) // multiple * multiple
        if width != axis.width and abs(width / axis.width - 1.0) <= _MOST_WIDTH_CHANGE_FRACTION:
            title = f"use {axis.field_name}={width}"
            yield Fix(kind="retrain", title=title, changes={axis.field_name: width})


# Higher efficiencies lose less than the error of a prediction.
SMALLEST_TILE_EFFICIENCY = 0.9


@rule("WQ103", "tile-tail", reads=("config.intermediate_size", "config.moe_intermediate_size", "workload.dtype"))
def tile_tail(scenario: Scenario) -> Iterator[Violation]:
    """The last tile along an MLP width is mostly padding.

    ## What it does

    Fires when an aligned MLP width is an output dimension of a weight GEMM with at least 4 % of the step, gradients
    included, and more than a tenth of the tiles along it is padding.

    ## Why it is slow

    The output is divided into tiles of, for example, 128 x 256, and each tile is computed in full. On an A100 a GEMM of
    27648 x n x 4096 ran at 242.6 TFLOP/s with n = 384, and at 220.8 with n = 448, which is 1.75 tiles of 256 (sweep of
    arXiv 2401.14489, logs in EleutherAI/cookbook).

    ## Example

    On an H100, an expert of width 320 fills 2.5 tiles of 128.

    >>> from shapewright.lint.example import fires
    >>> experts = {"num_layers": 4, "hidden_size": 2048, "num_heads": 16, "num_experts": 16, "num_experts_per_token": 4}
    >>> fires("WQ103", device="h100-sxm-80gb", moe_intermediate_size=320, **experts)
    True

    ## Use instead

    The width of the suggestion, which fills the tiles of the assumed kernel.

    >>> fires("WQ103", device="h100-sxm-80gb", moe_intermediate_size=384, **experts)
    False

    ## Fix safety

    `retrain`.

    ## When it does not matter

    Where the width has many tiles, the last one matters little. The tile that a library selects depends on its version.

    ## References

    - arXiv 2401.14489, section on tile quantization; NVIDIA, Matrix Multiplication Background User's Guide, "Tile
      quantization".
    """
    worst = _find_worst_tile_tail(scenario)
    if worst is None:
        return
    fixes = []
    for extent in nearest_multiples(worst.extent, worst.tile):
        changes = {worst.field_name: worst.width_for(extent)}
        after = scenario.try_replace(changes)
        if after is not None and after.is_possible and _find_worst_tile_tail(after) is None:
            title = f"use {changes[worst.field_name]}"
            fixes.append(Fix(kind="retrain", title=title, changes=changes))
    if fixes:
        yield Violation(
            field=f"config.{worst.field_name}",
            actual=worst.width,
            wanted=f"a multiple of {worst.tile} on each device",
            problem=f"fills {_tile_efficiency(worst):.0%} of its tiles of {worst.tile}",
            fixes=tuple(fixes),
        )


def _find_worst_tile_tail(scenario: Scenario) -> WidthAxis | None:
    """Return the aligned MLP width with the lowest tile efficiency; None where none is below the limit."""
    if not scenario.is_possible:
        return None
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    axes = [
        axis for gemm in list_big_gemms(scenario.predict()) if (axis := find_width_axis(scenario, gemm)) is not None
    ]
    tails = [axis for axis in axes if axis.width % multiple == 0 and _tile_efficiency(axis) < SMALLEST_TILE_EFFICIENCY]
    return min(tails, key=_tile_efficiency, default=None)


def _tile_efficiency(axis: WidthAxis) -> float:
    """Return the share of the tiles along a dimension that is not padding."""
    return axis.extent / round_up(axis.extent, axis.tile)
