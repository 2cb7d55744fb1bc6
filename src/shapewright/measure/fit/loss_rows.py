"""Read measured losses: one row per run and number of tokens, with the shape of the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.core.records import dataclass
from shapewright.core.units import NATS_FROM_BITS
from shapewright.measure.accuracy.chunk import Columns, Labels
from shapewright.measure.accuracy.measured_files import Format, read_columns
from shapewright.measure.accuracy.stores import is_store
from shapewright.measure.store.database import Store
from shapewright.measure.store.export import loss_records
from shapewright.measure.store.record import OK
from shapewright.prediction.loss.terms import ShapeForLoss

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FORMAT = Format(
    numbers={
        "hidden_size": 1,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "intermediate_size": 1,
        "gated_mlp": 0,
        "tokens": 1,
    },
    labels=("source", "schedule", "data"),
    positive=("loss",),
    optional=("batch_tokens",),
)
"""Columns of a table of losses."""

FEWEST_RUNS = 3
"""Fewest losses that the terms of a recipe are fitted to."""

# A model this wide that ends above this loss diverged: neighbors of its size are below 3.7 nats. The public grid marks
# a few such runs by nothing but their loss.
DIVERGED_NATS, DIVERGED_FROM_WIDTH = 4.5, 512


@dataclass(frozen=True, kw_only=True, eq=False)
class LossRows:
    """Measured losses.

    Attributes:
        shape: Shapes of the models, one per row.
        tokens: Training tokens. [rows]
        loss_nats: Measured losses. [rows]
        source: Who trained the models. [rows]
        recipe: Source, schedule, data and batch in words; losses of one recipe can be compared. [rows]
        model: Width and depth in words; rows of one model have a common error. [rows]
    """

    shape: ShapeForLoss
    tokens: Float[np.ndarray, " rows"]
    loss_nats: Float[np.ndarray, " rows"]
    source: np.ndarray[Any, Any]
    recipe: np.ndarray[Any, Any]
    model: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.loss_nats)

    def take(self, index: Any) -> LossRows:
        """Return the rows of an index or of a mask."""
        shape = {name: getattr(self.shape, name)[index] for name in self.shape.__dataclass_fields__}
        columns = {name: getattr(self, name)[index] for name in self.__dataclass_fields__ if name != "shape"}
        return LossRows(shape=replace(self.shape, **shape), **columns)


def read_loss_rows(columns: Columns, skipped: Counter[str]) -> LossRows:
    """Turn a table into rows; of runs that differ in nothing but warm-up the best one is kept.

    Args:
        columns: Columns of ``FORMAT``.
        skipped: Receives the number of rows left out by reason.
    """
    number = columns.numbers
    batch = number["batch_tokens"]
    words = [columns.labels[name].values.astype(object) for name in FORMAT.labels]
    recipe = np.array(
        [
            ", ".join([*(word for word in parts if word), *([f"batch of {size:.0f} tokens"] if size > 0.0 else [])])
            for *parts, size in zip(*words, batch, strict=True)
        ],
        dtype=object,
    )
    width, depth, head = number["hidden_size"], number["num_layers"], number["head_dim"]
    inner, heads, kv_heads, gated = (
        number[name] for name in ("intermediate_size", "num_heads", "num_kv_heads", "gated_mlp")
    )
    shape = ShapeForLoss(
        num_parameters=depth * width * (2.0 * head * (heads + kv_heads) + (2.0 + gated) * inner),
        hidden_size=width,
        num_layers=depth,
        head_dim=head,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        gated_mlp=gated,
        total_parameters=np.zeros(columns.num_rows),
        expert_width=np.zeros(columns.num_rows),
    )
    rows = LossRows(
        shape=shape,
        tokens=number["tokens"],
        loss_nats=number["loss"],
        source=words[0],
        recipe=recipe,
        model=np.array([f"{source}: {h:.0f}x{n:.0f}" for source, h, n in zip(words[0], width, depth, strict=True)]),
    )
    diverged = (rows.loss_nats > DIVERGED_NATS) & (width >= DIVERGED_FROM_WIDTH)
    # A model of this width can be above that loss early in training: only an outlier among equal runs diverged.
    best = _is_best_of_equal_runs(rows)
    diverged &= ~best
    if diverged.any():
        skipped["the run diverged"] += int(diverged.sum())
    worse = ~best & ~diverged
    if worse.any():
        skipped["another run of the same shape, tokens and recipe has a lower loss"] += int(worse.sum())
    return rows.take(best)


def read_own_losses(path: str | Path, skipped: Counter[str]) -> LossRows:
    """Read a user's own losses of one recipe, from a store of ``shapewright proxy`` or a table with ``FORMAT``.

    Args:
        skipped: Receives the number of rows left out by reason.

    Raises:
        MeasuredFileError: the file cannot be read, has fewer than three runs, or losses of several recipes.
        StoreError: the store is damaged or newer than this program.
    """
    file = Path(path)
    if is_store(file):
        with Store(file, read_only=True) as store:
            records = loss_records([row for row in store.rows() if row.status == OK])
        columns = Columns(
            len(records),
            {name: np.array([record[name] for record in records], dtype=float) for name in FORMAT.number_names},
            {name: Labels.of([record[name] for record in records]) for name in FORMAT.labels},
        )
    else:
        try:
            columns = read_columns(file, FORMAT, skipped)
        except MeasuredFileError as error:
            raise MeasuredFileError(f"{error}; loss is in nats per token: {NATS_FROM_BITS}") from None
        if skipped:
            reason, count = skipped.most_common(1)[0]
            raise MeasuredFileError(f"{file.name} has {count} unusable rows: {reason}; correct or remove them")
    rows = read_loss_rows(columns, skipped)
    recipes = sorted(set(rows.recipe))
    if len(recipes) > 1:
        raise MeasuredFileError(
            f"{file.name} has losses of {len(recipes)} recipes, which cannot be compared: {'; '.join(recipes[:3])}; "
            "keep those of one source, schedule, data and batch_tokens"
        )
    if len(rows) < FEWEST_RUNS:
        left_out = "".join(f"; {count} left out: {reason}" for reason, count in skipped.items())
        raise MeasuredFileError(
            f"{file.name} has {len(rows)} final losses, and the terms of a recipe need {FEWEST_RUNS}; train more "
            f"with 'shapewright proxy'{left_out}"
        )
    return rows


def shapes_of(rows: LossRows) -> Int[np.ndarray, " rows"]:
    """Return a number for each row; rows of equal shapes have the same."""
    fields = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "gated_mlp")
    columns = np.stack([np.asarray(getattr(rows.shape, name), dtype=float) for name in fields])
    found: Int[np.ndarray, " rows"] = np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1)
    return found


def _is_best_of_equal_runs(rows: LossRows) -> Any:
    """Return whether a row has the lowest loss of those with the same shape, tokens and recipe. [rows]"""
    columns = zip(shapes_of(rows), rows.tokens, rows.recipe, strict=True)
    best: dict[tuple[object, ...], int] = {}
    for index, key in enumerate(columns):
        if key not in best or rows.loss_nats[index] < rows.loss_nats[best[key]]:
            best[key] = index
    kept = np.zeros(len(rows), dtype=bool)
    kept[list(best.values())] = True
    return kept
