"""Free parameters of the fit of one expert kernel, and the section of a record that they make. Not a script itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shapewright.fit.gemm import transform, untransform
from shapewright.perf.expert_kernels import expert_kernel_family

Array = NDArray[np.float64]

# 1 adds arithmetic and traffic up; above 32 the joined time is their maximum to within 2 %.
LARGEST_OVERLAP_POWER = 32.0
# No last-level cache is further ahead of its memory; above, the fit only knows that a cached block costs its start.
LARGEST_CACHE_SPEEDUP = 16.0

# Tiles that grouped kernels come in. Source: the search spaces of vllm's and sglang's tuning scripts for fused_moe
# (16 to 256 rows, 32 to 256 columns) and the tile names of FlashInfer's CUTLASS and TensorRT-LLM kernels.
TILE_ROWS = {"blackwell": (8, 16, 32, 64, 128, 256)}
COMMON_TILE_ROWS = (16, 32, 64, 128)
TILE_COLUMNS = (64, 128, 256)
NARROW = ("fp8", "fp4")


class Rule(NamedTuple):
    """Tiles that a library takes for shapes that nobody tuned, by tokens.

    Attributes:
        per_expert: Whether tokens are counted for each expert.
        up_to: Most tokens of every step but the last.
        tiles: Rows and columns of each step's tile.
    """

    per_expert: bool
    up_to: tuple[int, ...]
    tiles: tuple[tuple[int, int], ...]


# Source: get_default_config of each library's fused_moe (vllm 0.14.0, 0.24.0; sglang 0.5.10, 0.5.14), for products in
# 16 bits and in FP8 with one scale for a tensor.
_OF_OLD = Rule(per_expert=True, up_to=(1,), tiles=((16, 32), (64, 64)))
RULES = {
    "vllm 0.24": Rule(
        per_expert=False,
        up_to=(32, 64, 96, 512),
        tiles=((16, 64), (32, 64), (32, 128), (64, 128), (128, 128)),
    ),
    "vllm 0.14": _OF_OLD,
    "sglang 0.5": _OF_OLD,
}


class Form:
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
    # What the first expert takes of the start, and how many more take half of the rest.
    GROWTH = (("first_share", 0.5, "logit"), ("half_count", 8.0, "log"))
    HOT = (("hot_cache_speedup", 3.0, "log"), ("hot_cache_share", 0.3, "log"))
    CAST = (("cast_bytes_per_element", 4.0, "log"), ("cast_row_s", 1e-9, "log"))
    # What vllm's sum of a single row takes; it has kernels for two to four (csrc/moe/moe_align_sum_kernels.cu).
    LONE = (("lone_row_s_per_byte", 3e-12, "log"),)
    # What siblings do not share: they have the same multiprocessors, behind another memory. Hosts start kernels.
    MEMORYS = ("bandwidth_fraction", "hot_cache_speedup", "hot_cache_share", "idle_row_share", "start_s")
    # Rates of a tile: one of its rows times one of its columns.
    ROW_STARTS = (("8", 0.2), ("16", 0.3), ("32", 0.45), ("64", 0.6), ("128", 0.7), ("256", 0.75))
    COLUMN_STARTS = (("32", 0.5), ("64", 0.7), ("128", 0.9))

    def __init__(self, architecture: str, dtype: str, library: str, kernel: str) -> None:
        family = expert_kernel_family(kernel)
        # CUTLASS sets each expert up as a problem of its own; sglang's kernels start later the more rows they sort.
        self.counts_groups = family == "cutlass"
        self.start_grows = self.counts_groups or library.startswith("sglang")
        self.library = library
        self.rule = next((rule for prefix, rule in RULES.items() if library.startswith(prefix)), None)
        if family != "triton":
            self.rule = None
        # The older vllm was timed on one layout, of 8 experts a token, and tells nothing of it.
        self.sums_lone_rows = family == "triton" and library.startswith("vllm 0.24")
        self.rows = TILE_ROWS.get(architecture, COMMON_TILE_ROWS)
        self.entries = [(f"rows:{rows}", start, "logit") for rows, start in self.ROW_STARTS if int(rows) in self.rows]
        self.entries += [(f"columns:{columns}", start, "logit") for columns, start in self.COLUMN_STARTS[1:]]
        self.entries += self.SCALARS
        self.entries += self.GROWTH if self.start_grows else ()
        self.entries += self.HOT
        self.entries += self.CAST if dtype in NARROW else ()
        self.entries += self.LONE if self.sums_lone_rows else ()
        for number, (m, n) in enumerate(self.rule.tiles if self.rule else ()):
            rate = dict(self.ROW_STARTS)[str(m)] * dict(self.COLUMN_STARTS).get(str(n), 1.0)
            own = (("rate", rate, "logit"), ("bandwidth_fraction", 0.8, "logit"), ("feed_ratio", 3.0, "log"))
            self.entries += [(f"{number}:{name}", value, kind) for name, value, kind in own]

    @property
    def is_memorys(self) -> NDArray[np.bool_]:
        """Which parameters are the memory's or the benchmark's, not a multiprocessor's; shape [parameters]."""
        return np.array([name.rpartition(":")[2] in self.MEMORYS for name, _, _ in self.entries])

    @property
    def is_feed(self) -> NDArray[np.bool_]:
        """Which parameters are ratios to a multiprocessor's share of the memory's bandwidth; shape [parameters]."""
        return np.array([name.endswith("feed_ratio") for name, _, _ in self.entries])

    def start(self) -> Array:
        """Starting point, which is also the prior."""
        return transform(self.entries)

    def section(self, x: Array, factors: dict[str, Any]) -> dict[str, Any]:
        """The record's section of a vector of the fit."""
        v = untransform(x, self.entries)
        return {
            "tiles": [
                {"m": m, "n": n, "rate": v[f"rows:{m}"] * v.get(f"columns:{n}", 1.0), "fill_k": v["fill_k"]}
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
            **({name: v[name] for name, _, _ in self.LONE} if self.sums_lone_rows else {}),
            **({"start_growth": self._growth(v)} if self.start_grows else {}),
            **({"untuned": self._untuned(self.rule, v)} if self.rule else {}),
        }

    def _growth(self, v: dict[str, float]) -> dict[str, Any]:
        return {**{name: v[name] for name, _, _ in self.GROWTH}, "counts_groups": self.counts_groups}

    def _untuned(self, rule: Rule, v: dict[str, float]) -> dict[str, Any]:
        steps = [
            {
                "tiles": [{"m": m, "n": n, "rate": v[f"{number}:rate"], "fill_k": v["fill_k"]}],
                "bandwidth_fraction": v[f"{number}:bandwidth_fraction"],
                "feed_ratio": v[f"{number}:feed_ratio"],
            }
            for number, (m, n) in enumerate(rule.tiles)
        ]
        return {"library": self.library, "per_expert": rule.per_expert, "up_to": list(rule.up_to), "steps": steps}
