"""Heat maps over number of heads and hidden size: rate of one training layer, or of a whole step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.app.figures.chart import HeatMap
from shapewright.core.errors import ShapewrightError
from shapewright.core.units import TERA
from shapewright.measure.store.record import OK
from shapewright.prediction.model_runs import FORWARD_BACKWARD, LayerRun, layer_run
from shapewright.pricing.operations import price_operations

if TYPE_CHECKING:
    from shapewright.app.figures.data.head_grid import HeadGrid
    from shapewright.hardware import Device
    from shapewright.measure.store.record import Row
    from shapewright.models import TransformerConfig
    from shapewright.workload import Workload

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
        workload: Workload of the layer.
        device: Device to predict for.
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
