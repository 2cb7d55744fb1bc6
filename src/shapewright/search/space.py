"""The space of a search: which values each field may take, around a baseline.

Values are those that hardware likes, and the baseline's own:

- width: multiples of 64 per device of the tensor axis (coarser or finer for 8 to 33 values), a third down and up;
- heads: every head width that divides the attention's width, in multiples of 8; the attention's width keeps its ratio
  to the residual stream (``head_dim`` varies that too);
- key-value heads: every divisor of the heads;
- ffn: multiples of 64 per device of the tensor axis; depth: every number of layers that fills the pipeline's stages;
- vocabulary: the published one and paddings of it; micro-batch: powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import ConfigError
from shapewright.search.bands import MEASURES, allowed_range, ffn_ratio, measure_shape
from shapewright.search.grid import Grid
from shapewright.search.request import VARIED, ffn_field

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.config import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.search.request import SearchRequest
    from shapewright.workload import Workload

_UNIT = 64  # elements: 128 bytes of 16 bits, a whole cache line
_HEAD_UNIT = 8  # elements: 16 bytes of 16 bits, what fused attention kernels need
_WIDTH_RANGE = (0.75, 1.35)
_DEPTH_RANGE = (0.66, 1.5)
_FEWEST_WIDTHS, _MOST_WIDTHS = 8, 33
_MOST_DEPTHS = 64
_MOST_FFN = 256
_MOST_PADDING_FRACTION = 0.02
_VOCAB_UNITS = (8, 64, 128, 256)
_LARGEST_MICRO_BATCH_SIZE = 64
# Devices that heads, and key-value heads, can still be spread over evenly if the baseline's can.
_HEADS_SPLIT, _KV_HEADS_SPLIT = 4, 2
_HEADS_AXIS = ("hidden_size", "num_heads", "head_dim", "num_kv_heads")
_FREE_HEAD_DIMS = (16, 512)
_ATTENTION_WIDTH_RANGE = (0.5, 1.5)
# Products of four such sizes, layers times widths squared among them, stay inside 63 bits.
_LARGEST_DIM = 2**20


@dataclass(frozen=True, kw_only=True)
class Space:
    """Shapes to look at.

    Attributes:
        baseline: The model they are variants of.
        grid: All combinations of values.
        followers: Fields that take another field's value: name of the follower to name of the leader.
        ranges: What the quality guard allows, by measure.
    """

    baseline: TransformerConfig
    grid: Grid
    followers: dict[str, str]
    ranges: dict[str, tuple[float, float]]

    @property
    def ffn_field(self) -> str:
        """The MLP width that lies on a grid."""
        return ffn_field(self.baseline)

    def allowed(self, grid: Grid, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where shapes at some entries of ``heads`` are inside the ranges of depth and ffn; broadcasts over a grid."""
        heads = {name: column[rows].reshape(-1, 1, 1, 1, 1) for name, column in grid.columns["heads"].items()}
        layers = grid.columns["depth"]["num_layers"].reshape(1, 1, -1, 1, 1)
        inner = heads.get(self.ffn_field)
        if inner is None:
            inner = grid.columns["ffn"][self.ffn_field].reshape(1, -1, 1, 1, 1)
        low, high = self.ranges["aspect"]
        aspect = heads["hidden_size"] / layers
        # A hair's width, for the ends of a range come from divisions.
        inside = (aspect >= low * (1 - 1e-9)) & (aspect <= high * (1 + 1e-9))
        low, high = self.ranges["ffn_ratio"]
        ratio = ffn_ratio(self.baseline, active_inner(self.baseline, inner), heads["hidden_size"])
        within: NDArray[np.bool_] = inside & (ratio >= low * (1 - 1e-9)) & (ratio <= high * (1 + 1e-9))
        return within


def active_inner(config: TransformerConfig, inner: Any) -> Any:
    """Inner width that one token passes through, given the width that is varied."""
    if not config.is_moe:
        return inner
    return config.num_experts_per_token * inner + config.shared_expert_intermediate_size


def make_space(
    baseline: TransformerConfig, workload: Workload, layout: ParallelLayout, request: SearchRequest
) -> Space:
    """List the values of every field.

    Raises:
        ConfigError: nothing is left to vary, or a kept value leaves no shape.
    """
    free = set(request.free_fields())
    if not free:
        raise ConfigError("every field is kept: nothing is left to search; give --vary or fewer --keep")
    own = measure_shape(baseline)
    ranges = {measure.name: allowed_range(measure, own[measure.name], request.guard) for measure in MEASURES}
    lister = _Lister(baseline, layout, request, free, ranges)
    rows = list(lister.heads())
    if not rows:
        raise ConfigError(
            f"no heads fit the width: {lister.kept_words()} leave no whole heads inside the guard; "
            f"{_nearest_words(lister)}keep fewer fields, vary heads, or give --free"
        )
    heads = {
        name: np.array(column, dtype=np.int64)
        for name, column in zip(_HEADS_AXIS, zip(*rows, strict=True), strict=True)
    }
    ffn: dict[str, list[int]] = {}
    width_fields = {"hidden_size"}
    name, widths = ffn_field(baseline), sorted({row[0] for row in rows})
    if "ffn" in free or "intermediate_size" in request.keep or widths == [baseline.hidden_size]:
        ffn[name] = lister.ffn(widths)
    else:
        follow = {width: lister.ffn_at(width) for width in widths}
        heads[name] = np.array([follow[row[0]] for row in rows], dtype=np.int64)
        width_fields.add(name)
    columns: dict[str, dict[str, Any]] = {
        "heads": heads,
        "ffn": ffn,
        "depth": {"num_layers": lister.depth()},
        "vocab": {"vocab_size": lister.vocab()},
        "batch": {"micro_batch_size": lister.micro_batch(workload)},
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
        followers=_followers(baseline),
        ranges=ranges,
    )


def _nearest_words(lister: _Lister) -> str:
    """For each kept field of the heads, the nearest value that would leave shapes, all else kept."""
    keep, found = lister.request.keep, []
    fields = {name: key for key, name in VARIED.items()} | {"head_dim": "heads"}
    for place, name in enumerate(_HEADS_AXIS):
        if name not in keep:
            continue
        request = replace(lister.request, keep={key: value for key, value in keep.items() if key != name})
        relaxed = replace(lister, request=request, free=lister.free | {fields[name]})
        values = {row[place] for row in relaxed.heads()} - {keep[name]}
        if values:
            found.append(f"{name}={min(values, key=lambda value: (abs(value - keep[name]), value))}")
    return f"the nearest that would: {' or '.join(found)}; " if found else ""


def _followers(config: TransformerConfig) -> dict[str, str]:
    """Fields that have another one's value in the baseline, and keep having it."""
    pairs = {
        "v_head_dim": "head_dim",
        "embedding_size": "hidden_size",
        "num_encoder_layers": "num_layers",
    }
    followers = {
        follower: leader for follower, leader in pairs.items() if getattr(config, follower) == getattr(config, leader)
    }
    if config.is_moe and config.moe_intermediate_size == config.intermediate_size:
        followers["intermediate_size"] = "moe_intermediate_size"
    if config.is_mla:
        followers.pop("v_head_dim", None)
    return followers


@dataclass(frozen=True)
class _Lister:
    """Lists the values of each field."""

    baseline: TransformerConfig
    layout: ParallelLayout
    request: SearchRequest
    free: set[str]
    ranges: dict[str, tuple[float, float]]

    def kept_words(self) -> str:
        """The kept fields, for a message."""
        kept = ", ".join(f"{name}={value}" for name, value in self.request.keep.items())
        return f"the kept values ({kept})" if kept else "the fields that are not varied"

    def heads(self) -> Iterator[tuple[int, int, int, int]]:
        """Width, heads, head width and key-value heads that go together."""
        for width in self.widths():
            for num_heads, head_dim in sorted(set(self._heads_at(width))):
                for num_kv_heads in sorted(set(self._kv_heads(num_heads))):
                    if self._splits(num_heads, num_kv_heads):
                        yield width, num_heads, head_dim, num_kv_heads

    def widths(self) -> list[int]:
        """Hidden sizes."""
        own = self.baseline.hidden_size
        if "hidden_size" in self.request.keep:
            return [self.request.keep["hidden_size"]]
        if "width" not in self.free:
            return [own]
        low, high = (own * factor for factor in _WIDTH_RANGE)
        unit = _UNIT * self.layout.tensor_parallel
        while (high - low) / unit > _MOST_WIDTHS:
            unit *= 2
        while (high - low) / unit < _FEWEST_WIDTHS and unit > _HEAD_UNIT:
            unit //= 2
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
        if inner.denominator == 1:
            for head_dim in head_dims if recut else {config.head_dim}:
                if int(inner) % head_dim == 0:
                    found.add((int(inner) // head_dim, head_dim))
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

    def _splits(self, num_heads: int, num_kv_heads: int) -> bool:
        """Whether heads divide by the powers of two that the baseline's divide by, as far as people use them."""
        if self.request.guard == "free":
            return True
        config = self.baseline
        pairs = ((num_heads, config.num_heads, _HEADS_SPLIT), (num_kv_heads, config.num_kv_heads, _KV_HEADS_SPLIT))
        return all(own == new or new % gcd(own, most) == 0 for new, own, most in pairs)

    def ffn_at(self, width: int) -> int:
        """MLP width in the baseline's proportion to the residual stream."""
        config = self.baseline
        exact = Fraction(getattr(config, ffn_field(config)) * width, config.hidden_size)
        if exact.denominator == 1:
            return int(exact)
        unit = _UNIT * self.layout.tensor_parallel
        return max(round(exact / unit), 1) * unit

    def ffn(self, widths: list[int]) -> list[int]:
        """MLP widths."""
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
        unit = _UNIT * self.layout.tensor_parallel
        while (largest - smallest) / unit > _MOST_FFN:
            unit *= 2
        while (largest - smallest) / unit < _FEWEST_WIDTHS and unit > _HEAD_UNIT:
            unit //= 2
        return _multiples(smallest, largest, unit, own)

    def depth(self) -> list[int]:
        """Numbers of layers."""
        config = self.baseline
        if "num_layers" in self.request.keep:
            return [self.request.keep["num_layers"]]
        if "depth" not in self.free:
            return [config.num_layers]
        low, high = (config.num_layers * factor for factor in _DEPTH_RANGE)
        unit = self.layout.pipeline_parallel * self.layout.virtual_pipeline
        while (high - low) / unit > _MOST_DEPTHS:
            unit *= 2
        return _multiples(max(low, 1), high, unit, config.num_layers)

    def vocab(self) -> list[int]:
        """Vocabularies: never smaller than the baseline's, which has that many tokens."""
        own = self.baseline.vocab_size
        if "vocab_size" in self.request.keep:
            return [self.request.keep["vocab_size"]]
        if "vocab" not in self.free:
            return [own]
        padded = {-(-own // (unit * t)) * unit * t for unit in _VOCAB_UNITS for t in {1, self.layout.tensor_parallel}}
        return sorted({own, *(value for value in padded if value <= own * (1.0 + _MOST_PADDING_FRACTION))})

    def micro_batch(self, workload: Workload) -> list[int]:
        """Micro-batch sizes."""
        own = workload.micro_batch_size
        if "micro_batch_size" in self.request.keep:
            return [self.request.keep["micro_batch_size"]]
        if "micro_batch" not in self.free:
            return [own]
        return sorted({own, *(2**power for power in range(_LARGEST_MICRO_BATCH_SIZE.bit_length()))})


def _multiples(low: float, high: float, unit: int, own: int) -> list[int]:
    """Multiples of a unit in a range, and the baseline's own value."""
    first, last = -(-int(low) // unit), int(high // unit)
    return sorted({own, *(unit * factor for factor in range(max(first, 1), last + 1))})
