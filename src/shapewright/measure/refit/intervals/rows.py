"""Measured rows with the predictions of the records: the input of intervals.

The splits into fitted and held-out rows are those of the refits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shapewright.hardware.loader import find_measured_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.chunk import Columns, Labels
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.paper_layers import (
    BATCHED_GEMMS,
    GEMMS,
    PaperLayer,
    find_floors,
    find_misfits,
    find_repeats,
    layer_gemm,
    price_block,
)
from shapewright.measure.accuracy.tables.registry import TABLES
from shapewright.measure.fit.shared import HELD_OUT_FOLD, NUM_FOLDS, Array, fold_of_rows, half_of_rows, split_by_shape
from shapewright.measure.refit.gemm.rows import PAPER, SOURCES, layer_rows, paper_rows
from shapewright.pricing.calibration.records import load_record

# Rows per table from which differences between devices and libraries are estimated.
ROWS_OF_A_TABLE = 150_000


@cache
def read_table(folder: Path, name: str) -> Columns:
    """Read a measured table as the evaluation does."""
    return read_columns(folder / TABLES[name].file_name, TABLES[name].columns, Counter())


def with_labels(columns: Columns, **words: str) -> Columns:
    """Return the table with one label throughout each of some columns."""
    changed = {
        name: Labels(columns.labels[name].codes, (word,) * len(columns.labels[name].words))
        for name, word in words.items()
    }
    return replace(columns, labels={**columns.labels, **changed})


def sampled(columns: Columns, rows: int) -> Columns:
    """Return at most ``rows`` rows, drawn with a fixed seed."""
    if columns.num_rows <= rows:
        return columns
    return columns.take(np.sort(np.random.default_rng(0).permutation(columns.num_rows)[:rows]))


def price_rows(name: str, columns: Columns, **context: Any) -> pd.DataFrame:
    """Price the rows of a table as ``shapewright accuracy`` does.

    Returns:
        table, device, dtype, library, part, measured, predicted, low, high of each row, in another order than the
        table's.
    """
    chunks = TABLES[name].price(columns, Context(**context))
    frames = [
        pd.DataFrame(
            {"measured": chunk.measured, "predicted": chunk.prices.predicted, "low": chunk.prices.low,
             "high": chunk.prices.high}
        ).assign(table=chunk.table, device=chunk.device, dtype=chunk.dtype, library=chunk.library, part=chunk.part)
        for chunk in chunks
    ]  # fmt: skip
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def is_new_gemm(columns: Columns) -> NDArray[np.bool_]:
    """Return whether the (n, k) of each row was held out on its device."""
    rows = pd.DataFrame({letter: columns.numbers[letter].astype(int) for letter in ("m", "n", "k")})
    rows = rows.assign(device=columns.labels["device"].values, dtype=columns.labels["dtype"].values)
    found = np.zeros(len(rows), dtype=bool)
    for _, index in rows.groupby(["device", "dtype"]).indices.items():
        part = rows.iloc[index]
        held_out = split_by_shape(part)[1]
        found[index] = part.set_index(["n", "k"]).index.isin(held_out.set_index(["n", "k"]).index)
    return found


# Columns that identify the shape of a row, which is held out whole.
SHAPE_COLUMNS = {
    "attention_prefill": ("num_heads", "num_kv_heads", "head_dim"),
    "attention_decode": ("num_heads", "num_kv_heads", "head_dim"),
    "moe": ("num_experts", "topk", "hidden_size", "inter_size"),
    "collectives": ("op_name", "num_gpus", "message_bytes"),
}


def shapes_of(name: str, columns: Columns) -> list[tuple[Any, ...]]:
    """Return the shape of each row of a table."""
    values = (
        columns.labels[column].values if column in columns.labels else columns.numbers[column].astype(int)
        for column in SHAPE_COLUMNS[name]
    )
    return list(zip(*(column.tolist() for column in values), strict=True))


def is_new(name: str, columns: Columns) -> NDArray[np.bool_]:
    """Return whether each row was held out of the fit of its record."""
    if name == "gemm":
        return is_new_gemm(columns)
    shapes = shapes_of(name, columns)
    folds = fold_of_rows(*zip(*shapes, strict=True))
    if name == "moe":  # all layouts of the table, sorted, in turn
        order = {shape: index % NUM_FOLDS for index, shape in enumerate(sorted(set(shapes)))}
        folds = np.array([order[shape] for shape in shapes])
    return np.asarray(folds == HELD_OUT_FOLD)


def held_out_rows(folder: Path, name: str) -> Columns:
    """Return the held-out rows of a table."""
    columns = read_table(folder, name)
    return columns.take(is_new(name, columns))


def seen_and_halves(name: str, columns: Columns) -> list[tuple[np.ndarray, dict[str, Any]]]:
    """Return masks and labels of the fitted rows, and of the held-out ones in two halves without a common shape."""
    held_out, half = is_new(name, columns), half_of_rows(*zip(*shapes_of(name, columns), strict=True))
    parts = [(held_out & (half == side), {"is_held_out": True, "half": side}) for side in (0, 1)]
    return [(~held_out, {"is_held_out": False, "half": 0}), *parts]


def paper_gemm_rows(folder: Path) -> Iterator[pd.DataFrame]:
    """Price the GEMMs of the paper's tables whose (n, k) were held out on their device.

    Yields frames with ``is_batch``, by table and GEMM.
    """
    for gpu in ("a100", "v100", "mi250x"):
        fitted = fitted_shapes(folder, gpu)
        sweeps = read_table(folder, "paper_gemm")
        sweeps = sweeps.take(sweeps.labels["gpu"].values == gpu)
        held_out = is_held_out(sweeps.numbers["n"], sweeps.numbers["k"], fitted)
        if (
            gpu != "a100"
        ):  # use all rows of the paper's own devices: 50 held-out rows are too few, and fitted ones err no less
            held_out = np.ones_like(held_out)
        for is_batch in (False, True):
            chosen = sweeps.take(held_out & ((sweeps.numbers["batch"] > 1.0) == is_batch))
            if chosen.num_rows:
                yield price_rows("paper_gemm", chosen).assign(is_batch=is_batch)
        layers = read_table(folder, "paper_layers")
        layers = layers.take(layers.labels["gpu"].values == gpu)
        for name in GEMMS:
            layer_of_gemm = layer_gemm(name, layers.numbers)
            held_out = is_held_out(np.asarray(layer_of_gemm.n, float), np.asarray(layer_of_gemm.k, float), fitted)
            chosen = only_measured(layers.take(held_out & (layers.numbers[f"{name}_tflops"] > 0.0)), f"{name}_tflops")
            if chosen.num_rows:
                yield price_rows("paper_layers", chosen).assign(is_batch=name in BATCHED_GEMMS)
        # Two GEMMs and little else, inside a layer instead of alone.
        up = layer_gemm("mlp_up", layers.numbers)
        held_out = is_held_out(np.asarray(up.n, float), np.asarray(up.k, float), fitted)
        blocks = only_measured(layers.take(held_out & (layers.numbers["mlp_s"] > 0.0)), "mlp_s", "mlp_tflops")
        if blocks.num_rows:
            yield price_rows("paper_layers", blocks).assign(is_batch=False)


def foreign_pointwise_rows(folder: Path) -> pd.DataFrame:
    """Return mask, softmax and other pointwise parts of unfused attention blocks on another vendor's chip.

    The measured time is that of the block minus its predicted GEMMs.
    """
    layers = read_table(folder, "paper_layers")
    seconds = layers.numbers["attention_s"]
    is_left_out = find_floors(layers.labels["log"].codes, seconds) | find_misfits(layers) | find_repeats(layers)
    context, rows = Context(), []
    for gpu in sorted(set(layers.labels["gpu"].values)):
        device = find_measured_device(gpu)
        if load_record("pointwise", device).distance != "foreign":
            continue
        for row in np.flatnonzero((layers.labels["gpu"].values == gpu) & (seconds > 0.0) & ~is_left_out).tolist():
            layer = PaperLayer.of(layers, row)
            block = price_block("attention", layer, device, is_flash=False, context=context)
            parts = {
                is_gemm: sum(entry.total_time_s for entry in block if isinstance(entry.operation, Gemm) == is_gemm)
                for is_gemm in (True, False)
            }
            rows.append((device.name, parts[False], float(seconds[row]) - parts[True]))
    found = pd.DataFrame(rows, columns=["device", "predicted", "measured"])
    return found[found.measured > 0.0]


def only_measured(columns: Columns, *names: str) -> Columns:
    """Return layers with some measured quantities only."""
    optional = TABLES["paper_layers"].columns.optional
    empty = {column: np.full(columns.num_rows, np.nan) for column in optional if column not in names}
    return replace(columns, numbers={**columns.numbers, **empty})


def is_held_out(n: Array, k: Array, fitted: set[tuple[int, int]]) -> np.ndarray:
    """Whether each GEMM was held out of a fit of these (n, k)."""
    return np.array([pair not in fitted for pair in zip(n.astype(int).tolist(), k.astype(int).tolist(), strict=True)])


def fitted_shapes(folder: Path, gpu: str) -> set[tuple[int, int]]:
    """Return the (n, k) of the paper's tables that the GEMM refit fits on one GPU."""
    device = find_measured_device(gpu).name
    sources = [source.rows(folder) for source in SOURCES if source.table == PAPER and source.device == device]
    if not sources:  # alignment factors only
        sources = [pd.concat([paper_rows(folder, gpu), layer_rows(folder, gpu, BATCHED_GEMMS)])]
    train = split_by_shape(sources[0])[0]
    return set(zip(train.n.astype(int).tolist(), train.k.astype(int).tolist(), strict=True))
