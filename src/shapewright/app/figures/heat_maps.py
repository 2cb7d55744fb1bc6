"""Heat maps of predicted steps over the number of heads and the hidden size, at a fixed number of layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.app.figures.chart import HeatMap
from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.core.units import TERA
from shapewright.measure.store.record import OK
from shapewright.models.transformer import with_changes
from shapewright.prediction.model_runs import FORWARD_BACKWARD, LayerRun, layer_run
from shapewright.prediction.predict import predict
from shapewright.pricing.operations import price_operations

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.measure.store.record import Row
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.workload import Workload

# Widths range from -40 % to +40 % of the current one, in multiples of 128.
_REACH_FRACTION = 0.4
_NUM_WIDTHS = 13
_WIDTH_MULTIPLE = 128
# Numbers of heads of public models; those nearest to the current one are used.
_HEADS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 256)
_NUM_HEADS = 10
# Head dimensions that attention kernels support.
_SMALLEST_HEAD_DIM, _LARGEST_HEAD_DIM = 16, 512


@dataclass(frozen=True, kw_only=True)
class HeadGrid:
    """Predicted steps over two dimensions.

    Attributes:
        heads: Numbers of heads, one for each row.
        widths: Hidden sizes, one for each column.
        predictions: One row per number of heads; None where heads do not divide the width or the step cannot run.
        current: Row and column of the scenario's own shape.
    """

    heads: tuple[int, ...]
    widths: tuple[int, ...]
    predictions: tuple[tuple[Prediction | None, ...], ...]
    current: tuple[int, int]


def predict_head_grid(scenario: Scenario) -> HeadGrid:
    """Predict the step over numbers of heads and hidden sizes around one shape.

    head_dim is hidden_size / num_heads. The ratio of query heads to key-value heads is kept where it divides
    num_heads, and so is the ratio of the MLP width to the hidden size where the model derives it.

    Args:
        scenario: Scenario at the centre of the grid.
    """
    config = scenario.config
    multiples = round(2 * _REACH_FRACTION * config.hidden_size / _NUM_WIDTHS / _WIDTH_MULTIPLE)
    step = max(multiples, 1) * _WIDTH_MULTIPLE
    first = max(1, round((1.0 - _REACH_FRACTION) * config.hidden_size / step)) * step
    widths = sorted({*(first + index * step for index in range(_NUM_WIDTHS)), config.hidden_size})
    by_distance = sorted(_HEADS, key=lambda count: abs(_relative_distance(count, config.num_heads)))
    heads = sorted({*by_distance[:_NUM_HEADS], config.num_heads})

    def predict_shape(num_heads: int, width: int) -> Prediction | None:
        if num_heads == config.num_heads and width == config.hidden_size:
            shape = config
        else:
            shape_or_none = _reshape(config, num_heads, width)
            if shape_or_none is None:
                return None
            shape = shape_or_none
        try:
            return predict(
                shape,
                device=scenario.device,
                workload=scenario.workload,
                layout=scenario.layout,
                software=scenario.software,
            )
        except ShapewrightError:
            return None

    return HeadGrid(
        heads=tuple(heads),
        widths=tuple(widths),
        predictions=tuple(tuple(predict_shape(count, width) for width in widths) for count in heads),
        current=(heads.index(config.num_heads), widths.index(config.hidden_size)),
    )


def _relative_distance(one: int, other: int) -> float:
    """Distance of two counts on a ratio scale: half and double are equally far."""
    return max(one, other) / min(one, other) - 1.0


def _reshape(config: TransformerConfig, num_heads: int, width: int) -> TransformerConfig | None:
    """The model with another number of heads and width; None if the combination is not valid."""
    head_dim, rest = divmod(width, num_heads)
    if rest or not _SMALLEST_HEAD_DIM <= head_dim <= _LARGEST_HEAD_DIM:
        return None
    group = config.num_heads // config.num_kv_heads
    kv_heads = num_heads // group if num_heads % group == 0 else num_heads
    changes = {"num_heads": num_heads, "hidden_size": width, "num_kv_heads": kv_heads}
    if not config.is_mla:
        changes["head_dim"] = head_dim
        if config.v_head_dim == config.head_dim:
            changes["v_head_dim"] = head_dim
    try:
        return with_changes(config, changes)
    except ShapewrightError:
        return None


HIDDEN_SIZES = (1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
HEADS = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256


def predicted_layer_map(
    config: TransformerConfig,
    workload: Workload,
    device: Device,
) -> HeatMap:
    """Predicted rate of one layer, forward and backward, for each (a, h); empty where h is not a multiple of a.

    Args:
        config: Model whose layer is varied; key-value heads and MLP keep their proportions.
    """
    values = [[_rate(config, workload, device, h, a) for h in HIDDEN_SIZES] for a in HEADS]
    outlined = None
    if config.hidden_size in HIDDEN_SIZES and config.num_heads in HEADS:
        outlined = (HEADS.index(config.num_heads), HIDDEN_SIZES.index(config.hidden_size))
    return HeatMap(
        title=f"Predicted rate of a layer, forward and backward, {workload.dtype}, {device.title}",
        x_label="hidden size h",
        y_label="heads a",
        value_label="TFLOP/s",
        x_values=[str(h) for h in HIDDEN_SIZES],
        y_values=[str(a) for a in HEADS],
        values=values,
        alt=f"Predicted TFLOP/s of a training layer over heads and hidden size on {device.title}",
        outlined=outlined,
    )


def measured_layer_map(rows: Iterable[Row], device: Device) -> HeatMap | None:
    """Measured rate of layers, forward and backward, over (a, h); None without such measurements.

    Of several measured layers with the same (a, h) the fastest is shown: they differ in MLP, kernels or compilation.
    """
    found: dict[tuple[int, int], float] = {}
    for row in rows:
        if row.kind != "layer" or row.status != OK or not row.median_s or row.device != device.name:
            continue
        layer = row.operation()
        assert isinstance(layer, LayerRun)
        if layer.passes != FORWARD_BACKWARD:
            continue
        config, _ = layer.config_and_workload()
        place = (config.num_heads, config.hidden_size)
        found[place] = max(found.get(place, 0.0), row.flops / row.median_s / TERA)
    if not found:
        return None
    heads, hidden = sorted({a for a, _ in found}), sorted({h for _, h in found})
    return HeatMap(
        title=f"Measured rate of a layer, forward and backward, {device.title}",
        x_label="hidden size h",
        y_label="heads a",
        value_label="TFLOP/s",
        x_values=[str(h) for h in hidden],
        y_values=[str(a) for a in heads],
        values=[[found.get((a, h)) for h in hidden] for a in heads],
        alt=f"Measured TFLOP/s of {len(found)} training layers over heads and hidden size on {device.title}",
    )


def head_grid_map(grid: HeadGrid) -> HeatMap:
    """Model rate of a whole step over numbers of heads and hidden sizes."""
    return HeatMap(
        title="Heads and hidden size",
        x_label="hidden size",
        y_label="heads",
        value_label="model TFLOP/s",
        x_values=[str(width) for width in grid.widths],
        y_values=[str(count) for count in grid.heads],
        values=[[None if cell is None else cell.model_flops_per_s / TERA for cell in row] for row in grid.predictions],
        alt="Model TFLOP/s per device by number of heads and hidden size; empty cells are not valid shapes.",
        outlined=grid.current,
    )


def _rate(config: TransformerConfig, workload: Workload, device: Device, h: int, a: int) -> float | None:
    """Predicted rate of one layer; None where the shape is not valid. [TFLOP/s]"""
    if h % a or not _MIN_HEAD_DIM <= h // a <= _MAX_HEAD_DIM:
        return None
    group = max(1, config.num_heads // config.num_kv_heads)
    if a % group:
        return None
    try:
        varied = replace(
            config,
            hidden_size=h,
            num_heads=a,
            num_kv_heads=a // group,
            head_dim=h // a,
            intermediate_size=round(config.intermediate_size * h / config.hidden_size / 64) * 64,
            embedding_size=h,
        )
        layer = layer_run(varied, workload)
        operations = layer.operations()
        prices = price_operations(operations, device)
    except ShapewrightError:
        return None
    total_s = sum(float(price.time_s) * int(entry.repeats) for price, entry in zip(prices, operations, strict=True))
    return layer.flops / total_s / TERA
