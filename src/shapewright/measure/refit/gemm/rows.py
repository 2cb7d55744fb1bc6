"""Read the measured GEMMs that records are fitted to, by device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from shapewright.core.records import dataclass
from shapewright.measure.accuracy.tables.paper_layers import FORMAT, GEMMS, layer_gemm


@dataclass(frozen=True)
class Source:
    """The rows of one section of a record.

    Attributes:
        device: Canonical name.
        dtype: Element format.
        table: File that they are in.
        rows: Reads them from the data folder.
        layout: Layout of the operands.
        hot_cache: The benchmark leaves operands in the last-level cache.
    """

    device: str
    dtype: str
    table: str
    rows: Callable[[Path], pd.DataFrame]
    layout: str
    hot_cache: bool = False


def library_rows(alias: str, dtype: str) -> Callable[[Path], pd.DataFrame]:
    """Return a reader of gemm.parquet for one device and dtype, all libraries."""

    def read(folder: Path) -> pd.DataFrame:
        table = pd.read_parquet(folder / "gemm.parquet", filters=[("device", "==", alias), ("dtype", "==", dtype)])
        return table.assign(batch=1)[["library", "batch", "m", "n", "k", "latency_s"]]

    return read


def paper_rows(gpu: str) -> Callable[[Path], pd.DataFrame]:
    """Return a reader of paper_gemm.csv for one GPU, with times instead of rates."""

    def read(folder: Path) -> pd.DataFrame:
        table = pd.read_csv(folder / "paper_gemm.csv")
        table = table[table.gpu == gpu]
        seconds = 2.0 * table.batch * table.m * table.n * table.k / (table.tflops * 1e12)
        return table.assign(library="", latency_s=seconds)[["library", "batch", "m", "n", "k", "latency_s"]]

    return read


def layer_rows(gpu: str, gemms: Sequence[str]) -> Callable[[Path], pd.DataFrame]:
    """Return a reader of single and batched GEMMs of the paper's layers, as times.

    Most logs hold the slowest iteration.
    """

    def read(folder: Path) -> pd.DataFrame:
        table = pd.read_csv(folder / "paper_layers.csv")
        table = table[table.gpu == gpu]
        parts = []
        for name in gemms:
            gemm = layer_gemm(name, {size: table[size] for size in FORMAT.numbers})
            dims = {letter: getattr(gemm, letter).astype(int) for letter in ("batch", "m", "n", "k")}
            parts.append(pd.DataFrame(dims).assign(tflops=table[f"{name}_tflops"], gemm=name, log=table.log))
        rows = pd.concat(part.dropna() for part in parts)
        seconds = 2.0 * rows.batch * rows.m * rows.n * rows.k / (rows.tflops * 1e12)
        kept = ["library", "slowest", "gemm", "log", "batch", "m", "n", "k", "latency_s"]
        return rows.assign(library="", slowest=True, latency_s=seconds)[kept]

    return read


def joined(*readers: Callable[[Path], pd.DataFrame]) -> Callable[[Path], pd.DataFrame]:
    """Return a reader of the rows of several readers."""
    own = {"slowest": False, "gemm": "", "log": ""}  # defaults for tables without these columns
    return lambda folder: pd.concat([read(folder) for read in readers], ignore_index=True).fillna(own)


PAPER = "paper_gemm.csv, paper_layers.csv"
# Fitted rows of each GEMM of the layers, by architecture: few enough that the clean sweeps still count.
LAYER_ROWS = {"volta": 120, "cdna2": 90}
SOURCES = (
    Source("a100-sxm-80gb", "bf16", "gemm.parquet", library_rows("a100_sxm", "bf16"), "NT"),
    Source("h100-sxm-80gb", "bf16", "gemm.parquet", library_rows("h100_sxm", "bf16"), "NT"),
    Source("h100-sxm-80gb", "fp8", "gemm.parquet", library_rows("h100_sxm", "fp8"), "NT"),
    Source("h200-sxm-141gb", "bf16", "gemm.parquet", library_rows("h200_sxm", "bf16"), "NT"),
    Source("h200-sxm-141gb", "fp8", "gemm.parquet", library_rows("h200_sxm", "fp8"), "NT"),
    Source("b200-sxm-180gb", "bf16", "gemm.parquet", library_rows("b200_sxm", "bf16"), "NT"),
    Source("b200-sxm-180gb", "fp8", "gemm.parquet", library_rows("b200_sxm", "fp8"), "NT"),
    Source("b200-sxm-180gb", "fp4", "gemm.parquet", library_rows("b200_sxm", "nvfp4"), "NT"),
    Source("l40s", "bf16", "gemm.parquet", library_rows("l40s", "bf16"), "NT", hot_cache=True),
    Source("l40s", "fp8", "gemm.parquet", library_rows("l40s", "fp8"), "NT", hot_cache=True),
    Source("v100-sxm2-16gb", "fp16", PAPER, joined(paper_rows("v100"), layer_rows("v100", GEMMS)), "NN"),
    Source("mi250x-gcd", "fp16", PAPER, joined(paper_rows("mi250x"), layer_rows("mi250x", GEMMS)), "NN"),
)
