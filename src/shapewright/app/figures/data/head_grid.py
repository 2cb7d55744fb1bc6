"""Grid of predictions over the number of heads and the hidden size, at a fixed number of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.core.errors import ShapewrightError
from shapewright.models import with_changes
from shapewright.prediction.predict import predict

if TYPE_CHECKING:
    from shapewright.models import TransformerConfig
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

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
