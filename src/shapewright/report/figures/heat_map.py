"""Heat map of a layer's training rate over hidden size and number of heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.errors import ShapewrightError
from shapewright.perf.pricing import price_operations
from shapewright.report.charts import HeatMap
from shapewright.store.record import OK
from shapewright.units import TERA
from shapewright.whole import FORWARD_BACKWARD, LayerRun, layer_run

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.store.record import Row
    from shapewright.workload import Workload

HIDDEN_SIZES = (1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
HEADS = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
_LEAST_HEAD, _MOST_HEAD = 16, 256


def predicted_map(
    config: TransformerConfig,
    workload: Workload,
    device: Device,
    *,
    uncalibrated: bool = False,
) -> HeatMap:
    """Predicted rate of one layer, forward and backward, for each (a, h); empty where h is no multiple of a.

    Args:
        config: Model whose layer is varied; key-value heads and MLP keep their proportions.
        workload: What is run.
        device: What to predict for.
        uncalibrated: Predict as if nobody had measured the device.
    """
    values = [[_rate(config, workload, device, h, a, uncalibrated=uncalibrated) for h in HIDDEN_SIZES] for a in HEADS]
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


def measured_map(rows: Iterable[Row], device: Device) -> HeatMap | None:
    """Measured rate of layers, forward and backward, over (a, h); None where no such layer was measured.

    Of several layers of one (a, h) the fastest counts: they differ in MLP, kernels or compilation.
    """
    found: dict[tuple[int, int], float] = {}
    for row in rows:
        if row.kind != "layer" or row.status != OK or not row.median_s or row.device != device.name:
            continue
        layer = row.operation()
        assert isinstance(layer, LayerRun)
        if layer.passes != FORWARD_BACKWARD:
            continue
        config, _ = layer.question()
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


def _rate(
    config: TransformerConfig, workload: Workload, device: Device, h: int, a: int, *, uncalibrated: bool
) -> float | None:
    """Predicted rate of one layer; None where there is no such layer. [TFLOP/s]"""
    if h % a or not _LEAST_HEAD <= h // a <= _MOST_HEAD:
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
        prices = price_operations(operations, device, uncalibrated=uncalibrated)
    except ShapewrightError:
        return None
    total_s = sum(float(price.time_s) * int(entry.repeats) for price, entry in zip(prices, operations, strict=True))
    return layer.flops / total_s / TERA
