"""Evaluate the law of loss on loss_by_shape.csv: losses of language models by shape, tokens and recipe.

Losses of a recipe that the law was fitted to are predicted by it as they are. Of a recipe that it does not know, level
and token terms are fitted to the rows themselves, starting from the reference: only the differences between shapes are
then predictions, and a note says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.measure.accuracy.chunk import Chunk, LossGroups, Prices
from shapewright.measure.fit.loss_rows import FEWEST_RUNS, read_loss_rows
from shapewright.measure.fit.loss_runs import fit_recipe
from shapewright.prediction.loss.law import REFERENCE, Z_90, load_loss_law, loss_recipes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.context import Context
    from shapewright.measure.fit.loss_rows import LossRows
    from shapewright.prediction.loss.law import LossLaw

TABLE = "loss_by_shape"


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Predict the losses of a table, recipe by recipe; none where devices are chosen, since losses are of no device."""
    if context.devices:
        context.advance(columns.num_rows)
        return
    rows = read_loss_rows(columns, context.skipped)
    context.advance(columns.num_rows - len(rows))
    for number, recipe in enumerate(dict.fromkeys(rows.recipe)):
        own = rows.take(rows.recipe == recipe)
        law = _law_of(str(recipe), own, context)
        if law is not None:
            predicted = np.asarray(law.loss_nats(own.shape, own.tokens))
            margin = Z_90 * np.asarray(law.standard_deviation_nats(own.shape, own.tokens))
            yield Chunk(
                table=TABLE,
                device="all",
                dtype="all",
                library=str(own.source[0]),
                part=str(recipe),
                measured=own.loss_nats,
                prices=Prices(predicted, predicted - margin, predicted + margin, np.full(len(own), np.nan)),
                seconds=np.ones(len(own)),
                loss_groups=LossGroups(
                    group=np.full(len(own), number),
                    log_parameters=np.log(np.asarray(own.shape.num_parameters)),
                    log_tokens=np.log(own.tokens),
                ),
            )
        context.advance(len(own))


def _law_of(recipe: str, rows: LossRows, context: Context) -> LossLaw | None:
    """Return the law of a recipe; None where the rows are too few to tell its level."""
    if recipe in loss_recipes():
        return load_loss_law(recipe)
    if len(rows) < FEWEST_RUNS:
        context.skipped[f"{recipe}: an unknown recipe with fewer than {FEWEST_RUNS} losses"] += len(rows)
        return None
    try:
        law = fit_recipe(load_loss_law(REFERENCE), rows, recipe)
    except CalibrationError as error:
        context.skipped[str(error)] += len(rows)
        return None
    context.note(
        f"{TABLE}: level and token terms of {recipe!r} are estimated from its own {len(rows)} rows, since the law was "
        f"not fitted to this recipe; differences between shapes are predictions"
    )
    return law
