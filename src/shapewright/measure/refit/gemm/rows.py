"""Read the measured GEMMs that records are fitted to, by device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from shapewright.core.records import dataclass
from shapewright.measure.accuracy.tables.paper_layers import FORMAT, GEMMS, layer_gemm

TABLE, PAPER = "gemm.parquet", "paper_gemm.csv, paper_layers.csv"
SIZES = ["batch", "m", "n", "k"]


@dataclass(frozen=True)
class Source:
    """The rows of one section of a record.

    Attributes:
        device: Canonical name.
        alias: Name of the device in the table.
        dtype: Element format.
        table: File that they are in: TABLE or PAPER.
        layout: Layout of the operands.
        hot_cache: The benchmark leaves operands in the last-level cache.
    """

    device: str
    alias: str
    dtype: str
    table: str = TABLE
    layout: str = "NT"
    hot_cache: bool = False

    def rows(self, folder: Path) -> pd.DataFrame:
        """Read the rows of all libraries, or of the paper's sweeps and layers."""
        if self.table == PAPER:
            sweeps = paper_rows(folder, self.alias).assign(slowest=False, gemm="", log="")
            return pd.concat([sweeps, layer_rows(folder, self.alias, GEMMS)], ignore_index=True)
        word = "nvfp4" if self.dtype == "fp4" else self.dtype
        table = pd.read_parquet(folder / TABLE, filters=[("device", "==", self.alias), ("dtype", "==", word)])
        return table.assign(batch=1)[["library", *SIZES, "latency_s"]]


def paper_rows(folder: Path, gpu: str) -> pd.DataFrame:
    """Read the sweeps of paper_gemm.csv on one GPU, with times instead of rates."""
    table = pd.read_csv(folder / "paper_gemm.csv")
    table = table[table.gpu == gpu]
    return table.assign(library="", latency_s=_seconds(table))[["library", *SIZES, "latency_s"]]


def layer_rows(folder: Path, gpu: str, gemms: Sequence[str]) -> pd.DataFrame:
    """Read single and batched GEMMs of the paper's layers, as times; most logs hold the slowest iteration."""
    table = pd.read_csv(folder / "paper_layers.csv")
    table = table[table.gpu == gpu]
    parts = []
    for name in gemms:
        gemm = layer_gemm(name, {size: table[size] for size in FORMAT.numbers})
        dims = pd.DataFrame({letter: getattr(gemm, letter).astype(int) for letter in SIZES})
        parts.append(dims.assign(tflops=table[f"{name}_tflops"], gemm=name, log=table.log))
    rows = pd.concat(part.dropna() for part in parts)
    kept = ["library", "slowest", "gemm", "log", *SIZES, "latency_s"]
    return rows.assign(library="", slowest=True, latency_s=_seconds(rows))[kept]


def _seconds(rows: pd.DataFrame) -> pd.Series:
    return 2.0 * rows.batch * rows.m * rows.n * rows.k / (rows.tflops * 1e12)


# Fitted rows of each GEMM of the layers, by architecture: few enough that the clean sweeps still count.
LAYER_ROWS = {"volta": 120, "cdna2": 90}
SOURCES = (
    Source("a100-sxm-80gb", "a100_sxm", "bf16"),
    Source("h100-sxm-80gb", "h100_sxm", "bf16"),
    Source("h100-sxm-80gb", "h100_sxm", "fp8"),
    Source("h200-sxm-141gb", "h200_sxm", "bf16"),
    Source("h200-sxm-141gb", "h200_sxm", "fp8"),
    Source("b200-sxm-180gb", "b200_sxm", "bf16"),
    Source("b200-sxm-180gb", "b200_sxm", "fp8"),
    Source("b200-sxm-180gb", "b200_sxm", "fp4"),
    Source("l40s", "l40s", "bf16", hot_cache=True),
    Source("l40s", "l40s", "fp8", hot_cache=True),
    Source("v100-sxm2-16gb", "v100", "fp16", PAPER, "NN"),
    Source("mi250x-gcd", "mi250x", "fp16", PAPER, "NN"),
)
