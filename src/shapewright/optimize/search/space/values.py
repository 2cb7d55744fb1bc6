"""Values of each field of a search: aligned values around the baseline, and the baseline's own.

- width: multiples of 64 per device of the tensor axis (coarser or finer, for 8 to 33 values), a third down and up;
- heads: every head_dim that divides the attention's width, in multiples of 8; the attention's width keeps its ratio to
  hidden_size (nearly, where the baseline's own sizes are on no grid) unless ``head_dim`` is varied;
- key-value heads: every divisor of the heads;
- ffn: multiples of 64 per device of the tensor axis; depth: every number of layers that fills the pipeline stages;
- vocabulary: the published size and paddings of it; micro-batch: powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import gcd, lcm
from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.optimize.search.request import ffn_field
from shapewright.optimize.search.space.guard import measure_shape

if TYPE_CHECKING:
    from shapewright.models import TransformerConfig
    from shapewright.optimize.search.request import SearchRequest
    from shapewright.workload import ParallelLayout, Workload

HEADS_AXIS = ("hidden_size", "num_heads", "head_dim", "num_kv_heads")
"""Fields of the tuples that ``FieldValues.heads`` lists."""

_UNIT = 64  # elements: in 16 bits a cache line of 128 bytes
_HEAD_UNIT = 8  # elements: in 16 bits the 16 bytes that fused attention kernels need
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
    """Lists the values of each field.

    Attributes:
        baseline: The model that shapes are variants of.
        layout: Its layout; widths are multiples of the tensor degree.
        request: Kept values and the quality guard.
        free: Fields that vary, keys of VARIED.
        ranges: Ranges that the quality guard allows, by measure.
    """

    baseline: TransformerConfig
    layout: ParallelLayout
    request: SearchRequest
    free: set[str]
    ranges: dict[str, tuple[float, float]]

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
        own = self.baseline.hidden_size
        if "hidden_size" in self.request.keep:
            return [self.request.keep["hidden_size"]]
        if "width" not in self.free:
            return [own]
        low, high = (own * factor for factor in _WIDTH_RANGE)
        unit = _spacing(high - low, _UNIT * self.layout.tensor_parallel, _MOST_WIDTHS)
        return _multiples(low, high, unit, own)

    def _heads_at(self, width: int) -> Iterator[tuple[int, int]]:
        config, keep = self.baseline, self.request.keep
        if config.is_mla:
            yield config.num_heads, config.head_dim
            return
        inner = Fraction(width * config.num_heads * config.head_dim, config.hidden_size)
        low, high = self.ranges["head_dim"]
        low, high = max(low, _FREE_HEAD_DIMS[0]), min(high, _FREE_HEAD_DIMS[1])
        head_dims = set(_multiples(low, high, _HEAD_UNIT, config.head_dim))
        if "head_dim" in keep:
            head_dims = {keep["head_dim"]}
        recut = "heads" in self.free or "head_dim" in keep or "num_heads" in keep
        found: set[tuple[int, int]] = set()
        is_square = config.num_heads * config.head_dim == config.hidden_size
        is_off_grid = config.head_dim % _HEAD_UNIT != 0 or (config.hidden_size % _UNIT != 0 and not is_square)
        for head_dim in head_dims if recut else {config.head_dim}:
            if inner % head_dim == 0:
                found.add((int(inner // head_dim), head_dim))
            elif is_off_grid:
                # No width on the grid has the baseline's ratio: the nearest number of heads comes close to it.
                found.add((max(1, round(inner / head_dim)), head_dim))
        if "head_dim" in self.free:
            counts = {num_heads for num_heads, _ in found} | {config.num_heads}
            for num_heads in counts:
                for head_dim in head_dims:
                    if _ATTENTION_WIDTH_RANGE[0] <= num_heads * head_dim / inner <= _ATTENTION_WIDTH_RANGE[1]:
                        found.add((num_heads, head_dim))
        if "num_heads" in keep and "head_dim" in keep:
            found.add((keep["num_heads"], keep["head_dim"]))
        for num_heads, head_dim in found:
            if num_heads == keep.get("num_heads", num_heads) and head_dim == keep.get("head_dim", head_dim):
                yield num_heads, head_dim

    def _kv_heads(self, num_heads: int) -> Iterator[int]:
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
        if "kv_heads" in self.free and not config.is_mla:
            low, high = self.ranges["kv_group"]
            for size in range(1, num_heads + 1):
                if num_heads % size == 0 and low <= size <= high:
                    yield num_heads // size

    def _keeps_divisibility(self, num_heads: int, num_kv_heads: int) -> bool:
        """Return whether heads are multiples of the powers of two that the baseline's are multiples of, up to a limit.

        So that shapes can be split over as many devices as the baseline.
        """
        if self.request.guard == "free":
            return True
        config = self.baseline
        pairs = ((num_heads, config.num_heads, _HEADS_SPLIT), (num_kv_heads, config.num_kv_heads, _KV_HEADS_SPLIT))
        return all(own == new or new % gcd(own, most) == 0 for new, own, most in pairs)

    def ffn_at(self, width: int) -> int:
        """Return the MLP width of the baseline's ratio to the hidden size."""
        config = self.baseline
        exact = Fraction(getattr(config, ffn_field(config)) * width, config.hidden_size)
        if exact.denominator == 1:
            return int(exact)
        unit = _UNIT * self.layout.tensor_parallel
        return max(round(exact / unit), 1) * unit

    def ffn(self, widths: list[int]) -> list[int]:
        """Return the MLP widths."""
        config = self.baseline
        if "intermediate_size" in self.request.keep:
            return [self.request.keep["intermediate_size"]]
        own = getattr(config, ffn_field(config))
        if "ffn" not in self.free:
            return [own]
        low, high = self.ranges["ffn_ratio"]
        own_ratio = measure_shape(config)["ffn_ratio"]
        smallest = own * max(low / own_ratio, 0.5) * widths[0] / config.hidden_size
        largest = own * min(high / own_ratio, 2.0) * widths[-1] / config.hidden_size
        unit = _spacing(largest - smallest, _UNIT * self.layout.tensor_parallel, _MOST_FFN)
        return _multiples(smallest, largest, unit, own)

    def depth(self) -> list[int]:
        """Return the numbers of layers."""
        config = self.baseline
        if "num_layers" in self.request.keep:
            return [self.request.keep["num_layers"]]
        if "depth" not in self.free:
            return [config.num_layers]
        low, high = (config.num_layers * factor for factor in _DEPTH_RANGE)
        unit = self.layout.pipeline_parallel * self.layout.virtual_pipeline
        if config.is_hybrid and self.request.guard != "free":
            # Whole periods keep the ratio of the kinds of layers.
            unit = lcm(unit, len(config.layer_types), len(config.mlp_layers) or 1)
        while (high - low) / unit > _MOST_DEPTHS:
            unit *= 2
        ends = sum(self.layout.ends_as_layers)
        return [count - ends for count in _multiples(max(low, 1) + ends, high + ends, unit, config.num_layers + ends)]

    def vocab(self) -> list[int]:
        """Return the vocabulary sizes, which are at least the baseline's."""
        own = self.baseline.vocab_size
        if "vocab_size" in self.request.keep:
            return [self.request.keep["vocab_size"]]
        if "vocab" not in self.free:
            return [own]
        padded = {-(-own // (unit * t)) * unit * t for unit in _VOCAB_UNITS for t in {1, self.layout.tensor_parallel}}
        return sorted({own, *(value for value in padded if value <= own * (1.0 + _MOST_PADDING_FRACTION))})

    def micro_batch(self, workload: Workload) -> list[int]:
        """Return the micro-batch sizes."""
        own = workload.micro_batch_size
        if "micro_batch_size" in self.request.keep:
            return [self.request.keep["micro_batch_size"]]
        if "micro_batch" not in self.free:
            return [own]
        return sorted({own, *(2**power for power in range(_LARGEST_MICRO_BATCH_SIZE.bit_length()))})


def _spacing(reach: float, unit: int, most: int) -> int:
    """Return the distance between values: the unit, doubled while there are too many values, halved while too few."""
    while reach / unit > most:
        unit *= 2
    while reach / unit < _FEWEST_WIDTHS and unit > _HEAD_UNIT:
        unit //= 2
    return unit


def _multiples(low: float, high: float, unit: int, own: int) -> list[int]:
    """Return the multiples of a unit in a range, and the baseline's own value."""
    first, last = -(-int(low) // unit), int(high // unit)
    return sorted({own, *(unit * factor for factor in range(max(first, 1), last + 1))})
