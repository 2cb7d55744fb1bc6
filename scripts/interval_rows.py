"""Measured rows beside what the records predict of them: what intervals are made of. Not a script itself.

A row's ``fold`` is 0 where the fit of its record did not see it. Splits are those of the calibration scripts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from gemm_rows import PAPER, PRODUCTS, SOURCES, layer_rows, paper_rows

from shapewright.accuracy.columns import Columns, Labels
from shapewright.accuracy.context import Context
from shapewright.accuracy.paper_layers import BATCHES, PaperLayer, find_floors, find_misfits, price_block, product_of
from shapewright.accuracy.read import read_columns
from shapewright.accuracy.tables import TABLES
from shapewright.fit.logs import HELD_OUT_FOLD, NUM_FOLDS, Array, fold_of, folds_of
from shapewright.fit.split import split_by_shape
from shapewright.hardware import find_measured_device
from shapewright.operations import Gemm
from shapewright.perf.calibration import load_record

# Rows of a table that are priced to see how far devices and libraries are apart.
ROWS_OF_A_TABLE = 150_000


@cache
def read_table(folder: Path, name: str) -> Columns:
    """A measured table, as judging reads it."""
    return read_columns(folder / TABLES[name].file_name, TABLES[name].columns, Counter())


def words_of(columns: Columns, name: str) -> np.ndarray:
    """A column of words as an array."""
    labels = columns.labels[name]
    return np.array(labels.words)[labels.codes]


def renamed(columns: Columns, **words: str) -> Columns:
    """The same table with one word throughout each of some columns of words."""
    changed = {
        name: Labels(columns.labels[name].codes, (word,) * len(columns.labels[name].words))
        for name, word in words.items()
    }
    return replace(columns, labels={**columns.labels, **changed})


def sampled(columns: Columns, rows: int) -> Columns:
    """At most so many rows, drawn with a fixed seed."""
    if columns.num_rows <= rows:
        return columns
    return columns.take(np.sort(np.random.default_rng(0).permutation(columns.num_rows)[:rows]))


def price_rows(name: str, columns: Columns, **context: Any) -> pd.DataFrame:
    """Rows of a table, priced as ``shapewright accuracy`` prices them.

    Returns:
        table, device, dtype, library, part, measured, predicted, low, high of each row; their order is not the table's.
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


def gemm_folds(columns: Columns) -> np.ndarray:
    """0 for rows of (n, k) that their device's fit did not see, 1 for the others."""
    rows = pd.DataFrame({letter: columns.numbers[letter].astype(int) for letter in ("m", "n", "k")})
    rows = rows.assign(device=words_of(columns, "device"), dtype=words_of(columns, "dtype"))
    folds = np.ones(len(rows), dtype=int)
    for _, index in rows.groupby(["device", "dtype"]).indices.items():
        part = rows.iloc[index]
        unseen = split_by_shape(part)[1]
        folds[index] = ~part.set_index(["n", "k"]).index.isin(unseen.set_index(["n", "k"]).index)
    return folds


def attention_layouts(columns: Columns) -> list[tuple[int, ...]]:
    """Head layout of each row."""
    names = ("num_heads", "num_kv_heads", "head_dim")
    return list(zip(*(columns.numbers[name].astype(int).tolist() for name in names), strict=True))


def attention_folds(columns: Columns) -> np.ndarray:
    """Fold of each row's head layout."""
    return folds_of(*zip(*attention_layouts(columns), strict=True))


def expert_layouts(columns: Columns) -> list[tuple[int, ...]]:
    """Expert layout of each row."""
    names = ("num_experts", "topk", "hidden_size", "inter_size")
    return list(zip(*(columns.numbers[name].astype(int).tolist() for name in names), strict=True))


def expert_folds(columns: Columns) -> np.ndarray:
    """Fold of each row's expert layout: all layouts of the table, sorted, in turn."""
    layouts = expert_layouts(columns)
    order = {layout: index % NUM_FOLDS for index, layout in enumerate(sorted(set(layouts)))}
    return np.array([order[layout] for layout in layouts])


def collective_cells(columns: Columns) -> list[tuple[object, ...]]:
    """Operation, group and message of each row."""
    numbers = (columns.numbers[name].astype(int).tolist() for name in ("num_gpus", "message_bytes"))
    return list(zip(words_of(columns, "op_name").tolist(), *numbers, strict=True))


def collective_folds(columns: Columns) -> np.ndarray:
    """Fold of each cell."""
    return folds_of(*zip(*collective_cells(columns), strict=True))


def halves(keys: Sequence[tuple[object, ...]]) -> np.ndarray:
    """0 or 1 for each row by its whole shape, another cut than the folds'."""
    known: dict[tuple[object, ...], int] = {}
    return np.array([known.setdefault(key, fold_of("half", *key) % 2) for key in keys])


FOLDS: dict[str, Callable[[Columns], np.ndarray]] = {
    "gemm": gemm_folds,
    "attention_prefill": attention_folds,
    "attention_decode": attention_folds,
    "moe": expert_folds,
    "collectives": collective_folds,
}


def unseen_rows(folder: Path, name: str) -> Columns:
    """Rows of a table that no fit saw."""
    columns = read_table(folder, name)
    return columns.take(FOLDS[name](columns) == HELD_OUT_FOLD)


def seen_and_halves(
    name: str, columns: Columns, layouts: Sequence[tuple[object, ...]]
) -> list[tuple[np.ndarray, dict[str, Any]]]:
    """Rows that a fit saw, and the others in two halves that share no layout; each with columns that say which it is.

    Args:
        name: The table.
        columns: All of its rows.
        layouts: What is kept whole, of each row.
    """
    is_new, half = FOLDS[name](columns) == HELD_OUT_FOLD, halves(layouts)
    unseen = [(is_new & (half == side), {"is_unseen": True, "half": side}) for side in (0, 1)]
    return [(~is_new, {"is_unseen": False, "half": 0}), *unseen]


def paper_product_rows(folder: Path) -> Iterator[pd.DataFrame]:
    """Products of the paper's tables whose (n, k) the fit of their device did not see, priced as judging prices them.

    Yields frames with ``is_batch``, by table and product.
    """
    for gpu in ("a100", "v100", "mi250x"):
        fitted = fitted_shapes(folder, gpu)
        sweeps = read_table(folder, "paper_gemm")
        sweeps = sweeps.take(words_of(sweeps, "gpu") == gpu)
        unseen = is_unseen(sweeps.numbers["n"], sweeps.numbers["k"], fitted)
        if gpu != "a100":  # of devices of the paper alone all: 50 unseen rows say little, and seen ones err no less
            unseen = np.ones_like(unseen)
        for is_batch in (False, True):
            chosen = sweeps.take(unseen & ((sweeps.numbers["batch"] > 1.0) == is_batch))
            if chosen.num_rows:
                yield price_rows("paper_gemm", chosen).assign(is_batch=is_batch)
        layers = read_table(folder, "paper_layers")
        layers = layers.take(words_of(layers, "gpu") == gpu)
        for name in PRODUCTS:
            product = product_of(name, layers)
            unseen = is_unseen(np.asarray(product.n, float), np.asarray(product.k, float), fitted)
            chosen = only_measured(layers.take(unseen & (layers.numbers[f"{name}_tflops"] > 0.0)), f"{name}_tflops")
            if chosen.num_rows:
                yield price_rows("paper_layers", chosen).assign(is_batch=name in BATCHES)
        # Two products and little else, in the middle of a layer instead of alone.
        up = product_of("mlp_up", layers)
        unseen = is_unseen(np.asarray(up.n, float), np.asarray(up.k, float), fitted)
        blocks = only_measured(layers.take(unseen & (layers.numbers["mlp_s"] > 0.0)), "mlp_s", "mlp_tflops")
        if blocks.num_rows:
            yield price_rows("paper_layers", blocks).assign(is_batch=False)


def foreign_pointwise_rows(folder: Path) -> pd.DataFrame:
    """Mask, softmax and what else of an unfused attention block is no product, where another maker's chip ran it.

    Measured is what products, by the chip's own record, leave of the block.
    """
    layers = read_table(folder, "paper_layers")
    seconds = layers.numbers["attention_s"]
    is_stuck = find_floors(layers.labels["log"].codes, seconds) | find_misfits(layers)
    context, rows = Context(), []
    for gpu in sorted(set(words_of(layers, "gpu"))):
        device = find_measured_device(gpu)
        if load_record("pointwise", device).distance != "foreign":
            continue
        for row in np.flatnonzero((words_of(layers, "gpu") == gpu) & (seconds > 0.0) & ~is_stuck):
            layer = PaperLayer(*(int(layers.numbers[name][row]) for name in PaperLayer._fields))
            block = price_block("attention", layer, device, is_flash=False, context=context)
            parts = {
                is_product: sum(
                    entry.total_time_s for entry in block if isinstance(entry.operation, Gemm) == is_product
                )
                for is_product in (True, False)
            }
            rows.append((device.name, parts[False], float(seconds[row]) - parts[True]))
    found = pd.DataFrame(rows, columns=["device", "predicted", "measured"])
    return found[found.measured > 0.0]


def only_measured(columns: Columns, *names: str) -> Columns:
    """Layers with some measured quantities alone."""
    optional = TABLES["paper_layers"].columns.optional
    empty = {column: np.full(columns.num_rows, np.nan) for column in optional if column not in names}
    return replace(columns, numbers={**columns.numbers, **empty})


def is_unseen(n: Array, k: Array, fitted: set[tuple[int, int]]) -> np.ndarray:
    """Whether a fit of these (n, k) did not see each product."""
    return np.array([pair not in fitted for pair in zip(n.astype(int).tolist(), k.astype(int).tolist(), strict=True)])


def fitted_shapes(folder: Path, gpu: str) -> set[tuple[int, int]]:
    """(n, k) that calibrate_gemm.py fitted of the paper's tables on one GPU."""
    device = find_measured_device(gpu).name
    sources = [source.rows(folder) for source in SOURCES if source.table == PAPER and source.device == device]
    if not sources:  # alignment alone
        sources = [pd.concat([paper_rows(gpu)(folder), layer_rows(gpu, BATCHES)(folder)])]
    train = split_by_shape(sources[0])[0]
    return set(zip(train.n.astype(int).tolist(), train.k.astype(int).tolist(), strict=True))
