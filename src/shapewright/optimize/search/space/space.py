"""The space of a search: all combinations of the values of its fields, around a baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from math import gcd, inf, lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import ConfigError
from shapewright.core.numeric import round_up
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.optimize.search.request import VARIED, ffn_field, followers_of, needs_square_heads
from shapewright.optimize.search.space.grid import Grid
from shapewright.optimize.search.space.guard import MEASURES, active_ffn_width, allowed_range, ffn_ratio, measure_shape

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.search.request import SearchRequest
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload


HEADS_AXIS = ("hidden_size", "num_heads", "head_dim", "num_kv_heads")
"""Fields of the tuples that ``FieldValues.heads`` lists."""

ALIGNED_UNIT = 64  # elements: in 16 bits a cache line of 128 bytes
_HEAD_UNIT = 8  # elements: in 16 bits the 16 bytes that fused attention kernels need
# Widths for which flash-attn has kernels, and which vLLM's backend of it accepts (get_supported_head_sizes). [element]
COMPILED_HEAD_UNIT = 32
_WIDTH_RANGE = (0.75, 1.35)
_DEPTH_RANGE = (0.66, 1.5)
_FEWEST_WIDTHS, _MOST_WIDTHS = 8, 33
_MOST_DEPTHS = 64
_MOST_FFN = 256
_MOST_PADDING_FRACTION = 0.02
_VOCAB_UNITS = (8, 64, 128, 256)
_LARGEST_MICRO_BATCH_SIZE = 64
# Heads, and key-value heads, stay multiples of up to this power of two if the baseline's are.
_HEADS_SPLIT, _KV_HEADS_SPLIT = 4, 2
_FREE_HEAD_DIMS = (16, 512)
_ATTENTION_WIDTH_RANGE = (0.5, 1.5)


@dataclass(frozen=True)
class FieldValues:
    """Lists the values of each field of a space.

    Attributes:
        baseline: The model that shapes are variants of.
        layout: Its layout; widths are multiples of the tensor degree.
        request: Kept values and the quality guard.
        free: Fields that vary, as keys of VARIED.
        ranges: Ranges that the quality guard allows, by measure.
        has_square_heads: Whether heads divide the hidden size, as the form of the config has no head width.
    """

    baseline: TransformerConfig
    layout: ParallelLayout
    request: SearchRequest
    free: set[str]
    ranges: dict[str, tuple[float, float]]
    has_square_heads: bool

    def describe_kept(self) -> str:
        """Return the kept fields, for a message."""
        kept = ", ".join(f"{name}={value}" for name, value in self.request.keep.items())
        return f"the kept values ({kept})" if kept else "the fields that are not varied"

    def heads(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield width, heads, head dimension and key-value heads that fit together."""
        for width in self.widths():
            for num_heads, head_dim in sorted(set(self._heads_at(width))):
                for num_kv_heads in sorted(set(self._kv_heads(num_heads))):
                    if self._keeps_divisibility(num_heads, num_kv_heads):
                        yield width, num_heads, head_dim, num_kv_heads

    def widths(self) -> list[int]:
        """Return the hidden sizes."""
        current = self.baseline.hidden_size
        if "hidden_size" in self.request.keep:
            return [self.request.keep["hidden_size"]]
        if "width" not in self.free:
            return [current]
        low, high = (current * factor for factor in _WIDTH_RANGE)
        unit = _spacing(high - low, ALIGNED_UNIT * self.layout.tensor_parallel, _MOST_WIDTHS)
        return _multiples(low, high, unit, current)

    def _heads_at(self, width: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of heads with head dimensions at a width."""
        config, keep = self.baseline, self.request.keep
        if config.shares_keys:
            yield config.num_heads, config.head_dim
            return
        attention_width = Fraction(width * config.num_heads * config.head_dim, config.hidden_size)
        if self.has_square_heads:
            attention_width = Fraction(width)
        low, high = self.ranges["head_dim"]
        low, high = max(low, _FREE_HEAD_DIMS[0]), min(high, _FREE_HEAD_DIMS[1])
        is_any_width = "num_heads" in keep or self.request.guard == "free"
        unit = _HEAD_UNIT if is_any_width else COMPILED_HEAD_UNIT
        head_dims = set(_multiples(low, high, unit, config.head_dim))
        if "head_dim" in keep:
            head_dims = {keep["head_dim"]}
        varies_head_dim = "heads" in self.free or "head_dim" in keep or "num_heads" in keep
        found: set[tuple[int, int]] = set()
        is_square = config.num_heads * config.head_dim == config.hidden_size
        is_off_grid = config.head_dim % _HEAD_UNIT != 0 or (config.hidden_size % ALIGNED_UNIT != 0 and not is_square)
        for head_dim in head_dims if varies_head_dim else {config.head_dim}:
            if attention_width % head_dim == 0:
                found.add((int(attention_width // head_dim), head_dim))
            elif is_off_grid and not self.has_square_heads:
                # No width on the grid has the baseline's ratio of heads to width: take the nearest number of heads.
                found.add((max(1, round(attention_width / head_dim)), head_dim))
        if "head_dim" in self.free:
            counts = {num_heads for num_heads, _ in found} | {config.num_heads}
            for num_heads in counts:
                for head_dim in head_dims:
                    if _ATTENTION_WIDTH_RANGE[0] <= num_heads * head_dim / attention_width <= _ATTENTION_WIDTH_RANGE[1]:
                        found.add((num_heads, head_dim))
        if "num_heads" in keep and "head_dim" in keep:
            found.add((keep["num_heads"], keep["head_dim"]))
        for num_heads, head_dim in found:
            if num_heads == keep.get("num_heads", num_heads) and head_dim == keep.get("head_dim", head_dim):
                yield num_heads, head_dim

    def _kv_heads(self, num_heads: int) -> Iterator[int]:
        """Yield numbers of key-value heads: the baseline's group or number, and if they vary, those in the guard."""
        config, keep = self.baseline, self.request.keep
        if "num_kv_heads" in keep:
            if num_heads % keep["num_kv_heads"] == 0:
                yield keep["num_kv_heads"]
            return
        group = config.num_heads // config.num_kv_heads
        if num_heads % group == 0:
            yield num_heads // group
        elif num_heads % config.num_kv_heads == 0:
            yield config.num_kv_heads
        if "kv_heads" in self.free and not config.shares_keys:
            low, high = self.ranges["kv_group"]
            for size in range(1, num_heads + 1):
                if num_heads % size == 0 and low <= size <= high:
                    yield num_heads // size

    def _keeps_divisibility(self, num_heads: int, num_kv_heads: int) -> bool:
        """Return whether heads are multiples of the powers of two, up to a limit, that divide the baseline's.

        Shapes can then be split over as many devices as the baseline.
        """
        if self.request.guard == "free":
            return True
        config = self.baseline
        pairs = ((num_heads, config.num_heads, _HEADS_SPLIT), (num_kv_heads, config.num_kv_heads, _KV_HEADS_SPLIT))
        return all(old == new or new % gcd(old, most) == 0 for new, old, most in pairs)

    def ffn_at(self, width: int) -> int:
        """Return the MLP width with the baseline's ratio to the hidden size."""
        config = self.baseline
        exact = Fraction(getattr(config, ffn_field(config)) * width, config.hidden_size)
        if exact.denominator == 1:
            return int(exact)
        unit = ALIGNED_UNIT * self.layout.tensor_parallel
        return max(round(exact / unit), 1) * unit

    def ffn(self, widths: list[int]) -> list[int]:
        """Return the MLP widths."""
        config = self.baseline
        if "intermediate_size" in self.request.keep:
            return [self.request.keep["intermediate_size"]]
        current = getattr(config, ffn_field(config))
        if "ffn" not in self.free:
            return [current]
        low, high = self.ranges["ffn_ratio"]
        own_ratio = measure_shape(config)["ffn_ratio"]
        smallest = current * max(low / own_ratio, 0.5) * widths[0] / config.hidden_size
        largest = current * min(high / own_ratio, 2.0) * widths[-1] / config.hidden_size
        unit = _spacing(largest - smallest, ALIGNED_UNIT * self.layout.tensor_parallel, _MOST_FFN)
        return _multiples(smallest, largest, unit, current)

    def ranges_beside_grid(self) -> dict[str, tuple[float, float]]:
        """Return the ranges, widened to hold the nearest aligned shape.

        An unaligned baseline may lie at the end of a range, with its aligned neighbor just outside of it.
        """
        config = self.baseline
        name, unit = ffn_field(config), ALIGNED_UNIT * self.layout.tensor_parallel
        width, inner = config.hidden_size, getattr(config, name)
        if width % ALIGNED_UNIT:
            width = min((each for each in self.widths() if each != width), key=lambda each: abs(each - width))
        if inner % ALIGNED_UNIT:
            inner = max(round(inner / unit), 1) * unit
        beside = {
            "aspect": width / config.num_layers,
            "ffn_ratio": ffn_ratio(config, active_ffn_width(config, inner), width),
        }
        widened = {
            measure: (min(low, beside[measure]), max(high, beside[measure]))
            for measure, (low, high) in self.ranges.items()
            if measure in beside
        }
        return self.ranges | widened

    def depth(self) -> list[int]:
        """Return the numbers of layers."""
        config = self.baseline
        if "num_layers" in self.request.keep:
            return [self.request.keep["num_layers"]]
        if "depth" not in self.free:
            return [config.num_layers]
        low, high = (config.num_layers * factor for factor in _DEPTH_RANGE)
        unit = self.layout.pipeline_parallel * self.layout.virtual_pipeline
        if self.request.guard != "free":
            # A whole number of periods keeps the ratio of the kinds of layers.
            unit = lcm(unit, config.hybrid_period)
        while (high - low) / unit > _MOST_DEPTHS:
            unit *= 2
        ends = sum(self.layout.ends_as_layers)
        return [count - ends for count in _multiples(max(low, 1) + ends, high + ends, unit, config.num_layers + ends)]

    def vocab(self) -> list[int]:
        """Return the vocabulary sizes, which are at least the baseline's.

        Raises:
            ConfigError: a kept one is smaller.
        """
        current = self.baseline.vocab_size
        kept = self.request.keep.get("vocab_size", current)
        if kept < current:
            raise ConfigError(
                f"the kept vocabulary of {kept:,} is below the {current:,} entries of the baseline's tokenizer, and "
                f"losses of another tokenizer cannot be compared",
                advice=with_fields("give the baseline that {vocab_size}, or a design that {tokenizer_vocab}"),
                field="keep",
            )
        if "vocab_size" in self.request.keep:
            return [kept]
        if "vocab" not in self.free:
            return [current]
        padded = {round_up(current, unit * t) for unit in _VOCAB_UNITS for t in {1, self.layout.tensor_parallel}}
        return sorted({current, *(value for value in padded if value <= current * (1.0 + _MOST_PADDING_FRACTION))})

    def micro_batch(self, workload: Workload) -> list[int]:
        """Return the micro-batch sizes."""
        current = workload.micro_batch_size
        if "micro_batch_size" in self.request.keep:
            return [self.request.keep["micro_batch_size"]]
        if "micro_batch" not in self.free:
            return [current]
        return sorted({current, *(2**power for power in range(_LARGEST_MICRO_BATCH_SIZE.bit_length()))})


def _spacing(reach: float, unit: int, most: int) -> int:
    """Return the spacing of values: the unit, doubled while there are too many values, halved while too few."""
    while reach / unit > most:
        unit *= 2
    while reach / unit < _FEWEST_WIDTHS and unit > _HEAD_UNIT:
        unit //= 2
    return unit


def _multiples(low: float, high: float, unit: int, current: int) -> list[int]:
    """Return the multiples of a unit in a range, and the current value of the baseline."""
    first, last = -(-int(low) // unit), int(high // unit)
    return sorted({current, *(unit * factor for factor in range(max(first, 1), last + 1))})


# The product of four such sizes, such as layers times width squared, fits in 63 bits.
_LARGEST_DIM = 2**20


@dataclass(frozen=True, kw_only=True)
class Space:
    """The shapes of a search.

    Attributes:
        baseline: The model they are variants of.
        grid: All combinations of values.
        followers: Fields that take another field's value: name of the follower to name of the leader.
        ranges: Ranges that the quality guard allows, by measure.
    """

    baseline: TransformerConfig
    grid: Grid
    followers: dict[str, str]
    ranges: dict[str, tuple[float, float]]

    @property
    def ffn_field(self) -> str:
        """Field of the MLP width that is varied."""
        return ffn_field(self.baseline)

    @property
    def ffn_spacing(self) -> float:
        """Median spacing of MLP widths; infinite if the MLP width follows the hidden size. [element]"""
        widths = self.grid.columns["ffn"].get(self.ffn_field)
        if widths is None:
            return inf
        return float(np.median(np.diff(widths))) if len(widths) > 1 else 0.0

    def allowed(self, grid: Grid, rows: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, "rows ffn depth 1 1"]:
        """Return whether shapes are inside the ranges of depth and MLP width; the result broadcasts over the grid.

        Args:
            grid: The grid, or a part of it.
            rows: Entries of ``heads``.
        """
        heads = {name: column[rows].reshape(-1, 1, 1, 1, 1) for name, column in grid.columns["heads"].items()}
        layers = grid.columns["depth"]["num_layers"].reshape(1, 1, -1, 1, 1)
        inner = heads.get(self.ffn_field)
        if inner is None:
            inner = grid.columns["ffn"][self.ffn_field].reshape(1, -1, 1, 1, 1)
        low, high = self.ranges["aspect"]
        aspect = heads["hidden_size"] / layers
        # The ends of the ranges are results of divisions, so they are compared with a tolerance.
        inside = (aspect >= low * (1 - 1e-9)) & (aspect <= high * (1 + 1e-9))
        low, high = self.ranges["ffn_ratio"]
        ratio = ffn_ratio(self.baseline, active_ffn_width(self.baseline, inner), heads["hidden_size"])
        within: Bool[np.ndarray, "rows ffn depth 1 1"] = (
            inside & (ratio >= low * (1 - 1e-9)) & (ratio <= high * (1 + 1e-9))
        )
        return within


def make_space(scenario: Scenario, request: SearchRequest) -> Space:
    """Make the space of a search from the values of every field.

    Args:
        scenario: The baseline; widths are multiples of its parallel degrees.

    Raises:
        ConfigError: nothing is left to vary, or a kept value leaves no shape.
    """
    baseline = scenario.config
    free = set(request.free_fields())
    if not free:
        raise ConfigError("every field is kept, so nothing is left to search; vary more fields or keep fewer")
    baseline_measures = measure_shape(baseline)
    ranges = {
        measure.name: allowed_range(measure, baseline_measures[measure.name], request.guard) for measure in MEASURES
    }
    if request.goal.resolve(scenario.workload.phase).measures_loss and request.guard != "free":
        # More key-value heads lower the loss, but enlarge the cache in serving, which the objective does not count; so
        # groups are at least as large as the baseline's.
        (low, high), group = ranges["kv_group"], baseline_measures["kv_group"]
        ranges["kv_group"] = (max(group, low), max(group, high))
    listed = FieldValues(baseline, scenario.layout, request, free, ranges, needs_square_heads(scenario.model))
    listed = replace(listed, ranges=listed.ranges_beside_grid())
    rows = list(listed.heads())
    if not rows:
        raise ConfigError(
            f"no heads divide the width: {listed.describe_kept()} leave no head dimension inside the guard; "
            f"{_describe_nearest(listed)}" + with_fields("keep fewer fields, vary heads, or set {guard:free}")
        )
    heads = {
        name: np.array(column, dtype=np.int64) for name, column in zip(HEADS_AXIS, zip(*rows, strict=True), strict=True)
    }
    ffn: dict[str, list[int]] = {}
    width_fields = {"hidden_size"}
    name, widths = ffn_field(baseline), sorted({row[0] for row in rows})
    if "ffn" in free or "intermediate_size" in request.keep or widths == [baseline.hidden_size]:
        ffn[name] = listed.ffn(widths)
    else:
        follow = {width: listed.ffn_at(width) for width in widths}
        heads[name] = np.array([follow[row[0]] for row in rows], dtype=np.int64)
        width_fields.add(name)
    columns: dict[str, dict[str, Any]] = {
        "heads": heads,
        "ffn": ffn,
        "depth": {"num_layers": listed.depth()},
        "vocab": {"vocab_size": listed.vocab()},
        "batch": {"micro_batch_size": listed.micro_batch(scenario.workload)},
    }
    arrays = {
        axis: {key: np.asarray(values, dtype=np.int64) for key, values in column.items()}
        for axis, column in columns.items()
    }
    largest = max(int(values.max()) for column in arrays.values() for values in column.values())
    if largest > _LARGEST_DIM:
        raise ConfigError(f"a size of {largest:,} is too large to search around; give sizes up to 2**20")
    return Space(
        baseline=baseline,
        grid=Grid(arrays, frozenset(width_fields)),
        followers=followers_of(baseline),
        ranges=listed.ranges,
    )


def _describe_nearest(listed: FieldValues) -> str:
    """Return, for each kept field of the heads, the nearest value with which shapes exist."""
    keep, found = listed.request.keep, []
    fields = {name: key for key, name in VARIED.items()} | {"head_dim": "heads"}
    for index, name in enumerate(HEADS_AXIS):
        if name not in keep:
            continue
        request = replace(listed.request, keep={key: value for key, value in keep.items() if key != name})
        relaxed = replace(listed, request=request, free=listed.free | {fields[name]})
        values = {row[index] for row in relaxed.heads()} - {keep[name]}
        if values:
            found.append(f"{name}={min(values, key=lambda value: (abs(value - keep[name]), value))}")
    return f"the nearest value that does: {' or '.join(found)}; " if found else ""
