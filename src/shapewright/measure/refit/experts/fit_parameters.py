"""Free parameters of the fit of one expert kernel, and the record section that they give."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shapewright.measure.fit.gemm_section import transform, untransform
from shapewright.pricing.experts.kernels import expert_kernel_family

Array = NDArray[np.float64]

# At 1, compute and memory times add up; above 32 the combined time is their maximum to within 2 %.
LARGEST_OVERLAP_POWER = 32.0
# Upper limit of the speedup by the cache; above it the time of a cached block is its start.
LARGEST_CACHE_SPEEDUP = 16.0

# Tiles of grouped kernels. Source: the search spaces of vllm's and sglang's tuning scripts for fused_moe (16 to 256
# rows, 32 to 256 columns) and the tile names of FlashInfer's CUTLASS and TensorRT-LLM kernels.
TILE_ROWS = {"blackwell": (8, 16, 32, 64, 128, 256)}
COMMON_TILE_ROWS = (16, 32, 64, 128)
TILE_COLUMNS = (64, 128, 256)
NARROW = ("fp8", "fp4")


class Rule(NamedTuple):
    """Tiles that a library uses for untuned shapes, by number of tokens.

    Attributes:
        per_expert: Tokens are counted per expert.
        up_to: Most tokens of every step but the last.
        tiles: Rows and columns of each step's tile.
    """

    per_expert: bool
    up_to: tuple[int, ...]
    tiles: tuple[tuple[int, int], ...]


# Source: get_default_config of each library's fused_moe (vllm 0.14.0, 0.24.0; sglang 0.5.10, 0.5.14), for GEMMs in 16
# bits and in FP8 with one scale per tensor.
_OLDER_RULE = Rule(per_expert=True, up_to=(1,), tiles=((16, 32), (64, 64)))
RULES = {
    "vllm 0.24": Rule(
        per_expert=False,
        up_to=(32, 64, 96, 512),
        tiles=((16, 64), (32, 64), (32, 128), (64, 128), (128, 128)),
    ),
    "vllm 0.14": _OLDER_RULE,
    "sglang 0.5": _OLDER_RULE,
}


class Key(NamedTuple):
    """Name of a free parameter.

    Attributes:
        name: Name.
        number: Rows or columns of a tile, or number of a step; None for parameters that exist once.
    """

    name: str
    number: int | None = None


class FitParameters:
    """Free parameters of one fit: name, start, transform."""

    SCALARS = (
        ("start_s", 1e-5, "log"),
        ("bandwidth_fraction", 0.85, "logit"),
        ("feed_ratio", 3.0, "log"),
        ("overlap_power", 4.0, "log"),
        ("wave_give_back", 0.3, "logit"),
        ("power_drop_fraction", 0.12, "logit"),
        ("power_half_flops", 1e12, "log"),
        ("fill_k", 200.0, "log"),
        ("write_ratio", 1.0, "log"),
        ("idle_row_share", 0.7, "log"),
    )
    # Share of the start for the first expert, and number of further experts that take half of the rest.
    GROWTH = (("first_share", 0.5, "logit"), ("half_count", 8.0, "log"))
    HOT = (("hot_cache_speedup", 3.0, "log"), ("hot_cache_share", 0.3, "log"))
    CAST = (("cast_bytes_per_element", 4.0, "log"), ("cast_row_s", 1e-9, "log"))
    # Time of vllm's sum for a single row; it has kernels for two to four (csrc/moe/moe_align_sum_kernels.cu).
    LONE_ROW = (("lone_row_s_per_byte", 3e-12, "log"),)
    # Parameters that siblings do not share: those of the memory, and the start, which depends on the host.
    MEMORY_PARAMETERS = ("bandwidth_fraction", "hot_cache_speedup", "hot_cache_share", "idle_row_share", "start_s")
    # Factors of a tile's rate by its rows and by its columns.
    ROW_STARTS: Mapping[int, float] = MappingProxyType({8: 0.2, 16: 0.3, 32: 0.45, 64: 0.6, 128: 0.7, 256: 0.75})
    COLUMN_STARTS: Mapping[int, float] = MappingProxyType({32: 0.5, 64: 0.7, 128: 0.9})
    FREE_COLUMNS = (64, 128)

    def __init__(self, architecture: str, dtype: str, library: str, kernel: str) -> None:
        family = expert_kernel_family(kernel)
        # CUTLASS sets up each expert as a separate problem; sglang's kernels start later with more rows to sort.
        self.counts_groups = family == "cutlass"
        self.start_grows = self.counts_groups or library.startswith("sglang")
        self.library = library
        self.rule = next((rule for prefix, rule in RULES.items() if library.startswith(prefix)), None)
        if family != "triton":
            self.rule = None
        # The older vllm was timed on one layout, with top 8, which does not determine it.
        self.sums_lone_rows = family == "triton" and library.startswith("vllm 0.24")
        self.rows = TILE_ROWS.get(architecture, COMMON_TILE_ROWS)
        plain = [*self.SCALARS, *(self.GROWTH if self.start_grows else ()), *self.HOT]
        plain += self.CAST if dtype in NARROW else ()
        plain += self.LONE_ROW if self.sums_lone_rows else ()
        self.entries = [
            *((Key("row_rate", rows), start, "logit") for rows, start in self.ROW_STARTS.items() if rows in self.rows),
            *((Key("column_rate", columns), self.COLUMN_STARTS[columns], "logit") for columns in self.FREE_COLUMNS),
            *((Key(name), start, kind) for name, start, kind in plain),
        ]
        for number, (m, n) in enumerate(self.rule.tiles if self.rule else ()):
            self.entries += [
                (Key("rate", number), self.ROW_STARTS[m] * self.COLUMN_STARTS.get(n, 1.0), "logit"),
                (Key("bandwidth_fraction", number), 0.8, "logit"),
                (Key("feed_ratio", number), 3.0, "log"),
            ]

    @property
    def is_memory_parameter(self) -> NDArray[np.bool_]:
        """Which parameters belong to memory or benchmark instead of a multiprocessor; shape [parameters]."""
        return np.array([key.name in self.MEMORY_PARAMETERS for key, _, _ in self.entries])

    @property
    def is_feed(self) -> NDArray[np.bool_]:
        """Which parameters are ratios to a multiprocessor's share of the memory bandwidth; shape [parameters]."""
        return np.array([key.name == "feed_ratio" for key, _, _ in self.entries])

    def start(self) -> Array:
        """Return the starting point, which is also the prior."""
        return transform(self.entries)

    def section(self, x: Array, factors: dict[str, Any]) -> dict[str, Any]:
        """Return the section of the record for a fitted vector."""
        values = untransform(x, self.entries)
        v = {key.name: value for key, value in values.items() if key.number is None}
        return {
            "tiles": [
                {
                    "m": m,
                    "n": n,
                    "rate": values[Key("row_rate", m)] * values.get(Key("column_rate", n), 1.0),
                    "fill_k": v["fill_k"],
                }
                for m in self.rows
                for n in TILE_COLUMNS
            ],
            "splits": [1],
            **{name: v[name] for name, _, _ in self.SCALARS if name not in ("fill_k", "overlap_power")},
            "split_start_s": 0.0,
            "overlap_power": min(max(v["overlap_power"], 1.0), LARGEST_OVERLAP_POWER),
            "k_step": 32,
            "hot_cache_speedup": min(v["hot_cache_speedup"], LARGEST_CACHE_SPEEDUP),
            "hot_cache_share": v["hot_cache_share"],
            "cast_bytes_per_element": v.get("cast_bytes_per_element", 0.0),
            "cast_row_s": v.get("cast_row_s", 0.0),
            "alignment_factor": factors,
            **({name: v[name] for name, _, _ in self.LONE_ROW} if self.sums_lone_rows else {}),
            **({"start_growth": self._growth(v)} if self.start_grows else {}),
            **({"untuned": self._untuned(self.rule, values)} if self.rule else {}),
        }

    def _growth(self, v: dict[str, float]) -> dict[str, Any]:
        return {**{name: v[name] for name, _, _ in self.GROWTH}, "counts_groups": self.counts_groups}

    def _untuned(self, rule: Rule, values: dict[Key, float]) -> dict[str, Any]:
        steps = [
            {
                "tiles": [{"m": m, "n": n, "rate": values[Key("rate", number)], "fill_k": values[Key("fill_k")]}],
                "bandwidth_fraction": values[Key("bandwidth_fraction", number)],
                "feed_ratio": values[Key("feed_ratio", number)],
            }
            for number, (m, n) in enumerate(rule.tiles)
        ]
        return {"library": self.library, "per_expert": rule.per_expert, "up_to": list(rule.up_to), "steps": steps}
