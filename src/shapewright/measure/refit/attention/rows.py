"""Select rows of the attention tables for a fit: library, element formats and kernel family."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from shapewright.measure.refit.attention.kernel_fit import Source
from shapewright.pricing.attention.sections import SMALL_GROUPS, kernel_family

# Sections that price models: (library, arithmetic, cache) of the rows that each is fitted to.
SECTIONS = {
    "16bit": ("vllm", "bf16", "bfloat16"),
    "16bit_kv8": ("vllm", "bf16", "fp8"),
    "fp8": ("sglang", "fp8", "fp8"),
}
# Sections of another library, which price its measurements.
OTHER_LIBRARY = "sglang"
OTHER_SECTIONS = {"16bit": (OTHER_LIBRARY, "bf16", "bfloat16"), "16bit_kv8": (OTHER_LIBRARY, "bf16", "fp8")}
PHASES = ("prefill", "decode")


def read_rows(data: Path, phase: str, device_name: str, source: Source) -> pd.DataFrame:
    """Read the rows of one device, library and pair of element formats; one query token is decode in either table."""
    library, dtype, kv_dtype = source
    rows = pd.read_parquet(data / f"attention_{phase}.parquet")
    rows = rows[(rows.device == device_name) & rows.library.str.startswith(library)]
    rows = rows[(rows.dtype == (dtype if phase == "prefill" else "bf16")) & (rows.kv_cache_dtype == kv_dtype)]
    if phase == "prefill":
        rows = rows[rows.query_len > 1].assign(kv_len=lambda frame: frame.query_len)
    else:
        rows = rows.assign(kv_len=lambda frame: frame.context_len)
    rows = rows.assign(family=rows.kernel.map(kernel_family)).reset_index(drop=True)
    if phase == "decode" and library == OTHER_LIBRARY and kv_dtype == "bfloat16":
        for widest, family in reversed(SMALL_GROUPS):
            small = (rows.family.str.startswith("flashinfer")) & (rows.num_heads <= widest * rows.num_kv_heads)
            rows.loc[small, "family"] = family
    return rows
