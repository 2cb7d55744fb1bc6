"""Heads against hidden size: the model rate of each pair, at one number of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.config import with_changes
from shapewright.errors import ShapewrightError
from shapewright.perf.software import TUNED
from shapewright.predict import predict

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.predict import Prediction
    from shapewright.workload import Workload

# Widths lie this share of the shape's own down and up from it, in steps of whole cache lines and more.
_REACH_FRACTION = 0.4
_NUM_WIDTHS = 13
_WIDTH_MULTIPLE = 128
# Numbers of heads that public models have; of these the ones nearest to the shape's own are drawn.
_HEADS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 256)
_NUM_HEADS = 10
# Head widths that attention kernels take.
_SMALLEST_HEAD_DIM, _LARGEST_HEAD_DIM = 16, 512


@dataclass(frozen=True, kw_only=True)
class HeatGrid:
    """Predicted steps over two dimensions.

    Attributes:
        heads: Numbers of heads, one for each row.
        widths: Hidden sizes, one for each column.
        predictions: Row by row; None where heads do not divide the width or the step cannot run.
        current: Row and column of the shape in question.
    """

    heads: tuple[int, ...]
    widths: tuple[int, ...]
    predictions: tuple[tuple[Prediction | None, ...], ...]
    current: tuple[int, int]


def heat_heads_by_width(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    layout: ParallelLayout,
    uncalibrated: bool = False,
    software: str = TUNED,
) -> HeatGrid:
    """Predict the step over numbers of heads and hidden sizes around one shape.

    Heads share the width (head_dim = hidden_size / num_heads) and key-value heads keep their share of the heads, as
    far as both divide; the MLP's width keeps its ratio where it follows the hidden size.

    Args:
        config: The model.
        device: The device.
        workload: What is run.
        layout: How it is spread.
        uncalibrated: Price as if nobody had measured the device.
        software: Training software that runs it, as predict takes it.
    """
    multiples = round(2 * _REACH_FRACTION * config.hidden_size / _NUM_WIDTHS / _WIDTH_MULTIPLE)
    step = max(multiples, 1) * _WIDTH_MULTIPLE
    first = max(1, round((1.0 - _REACH_FRACTION) * config.hidden_size / step)) * step
    widths = sorted({*(first + index * step for index in range(_NUM_WIDTHS)), config.hidden_size})
    by_distance = sorted(_HEADS, key=lambda count: abs(_ratio(count, config.num_heads)))
    heads = sorted({*by_distance[:_NUM_HEADS], config.num_heads})

    def at(num_heads: int, width: int) -> Prediction | None:
        if num_heads == config.num_heads and width == config.hidden_size:
            shape = config
        else:
            shape_or_none = _reshape(config, num_heads, width)
            if shape_or_none is None:
                return None
            shape = shape_or_none
        try:
            return predict(
                shape, device=device, workload=workload, layout=layout, uncalibrated=uncalibrated, software=software
            )
        except ShapewrightError:
            return None

    return HeatGrid(
        heads=tuple(heads),
        widths=tuple(widths),
        predictions=tuple(tuple(at(count, width) for width in widths) for count in heads),
        current=(heads.index(config.num_heads), widths.index(config.hidden_size)),
    )


def _ratio(one: int, other: int) -> float:
    """How many times one count is the other, with halves as far as doubles."""
    return max(one, other) / min(one, other) - 1.0


def _reshape(config: TransformerConfig, num_heads: int, width: int) -> TransformerConfig | None:
    """The model with other heads and width; None where they do not go together."""
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
