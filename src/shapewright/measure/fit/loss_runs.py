"""Fit the recipe terms of the law of loss to a few runs of one's own.

The reference is the prior, widened by what differs between recipes: data, tokenizer and schedule move the floor and the
sizes of both terms. Runs update all coefficients at once, shape terms included, as far as they say anything of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from math import hypot, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import CalibrationError, MeasuredFileError
from shapewright.core.records import dataclass
from shapewright.core.units import NATS_FROM_BITS, format_count
from shapewright.measure.fit.loss_rows import FEWEST_RUNS, LossRows, read_own_losses, shapes_of
from shapewright.prediction.loss.law import REFERENCE, Z_90, LossLaw, load_loss_law
from shapewright.prediction.loss.terms import COEFFICIENTS, derivatives, evaluate_terms

if TYPE_CHECKING:
    from jaxtyping import Float

# Standard deviations between recipes. The floor of a byte vocabulary is one nat per token below that of 50,000 tokens.
BETWEEN_RECIPES = {
    "floor_nats": 1.0,
    "log_capacity_nats": 0.7,
    "capacity_exponent": 0.03,
    "log_token_nats": 1.0,
    "token_exponent": 0.1,
    "token_size_exponent": 0.05,
}
# Noise of a loss apart from what the rows of a model have in common: seeds, smoothing of the training loss. Source:
# docs/proxy-losses.md, between seeds. [nats]
NOISE_NATS = 0.011
# Largest sum of squares of errors and departures from the prior, each over its standard deviation, per row; near 1
# where the law holds. Losses of other units, of mixed recipes or of diverged runs exceed it.
_MOST_MISFIT = 20.0
# Median of losses over those of the reference, below which they are in bits per byte: 1 / (ln 2 x 4.2 bytes per token)
# is 0.34 for English text. Text as easy as code is above it.
_LEAST_OF_REFERENCE = 0.42
# Guessing among 262,144 tokens has this loss; larger numbers are perplexities. [nats]
_MOST_NATS = 12.5
# From this ratio of parameters on, a larger model is expected to have the lower loss whatever its shape.
_CLEARLY_LARGER = 1.5
_FLOOR = COEFFICIENTS.index("floor_nats")
# A step that predicts a loss this far off is taken back without a closer look. [nats]
_SENSELESS_NATS = 1e3
_MOST_STEPS, _SMALL_STEP = 100, 1e-6


def fit_recipe(law: LossLaw, rows: LossRows, name: str) -> LossLaw:
    """Fit the law to losses of a recipe of the user's own.

    Args:
        law: The law whose coefficients and covariance are the prior, the reference.

    Returns:
        The law with updated coefficients and covariance; its floor is at least 0.

    Raises:
        CalibrationError: the losses are so far from every law that the fit does not converge.

    Source: iterated linear Gaussian update, Tarantola, Inverse Problem Theory, 2005, section 3.2.
    """
    mean = np.array([law.coefficients[key] for key in COEFFICIENTS])
    prior = law.covariance + np.diag([BETWEEN_RECIPES.get(key, 0.0) ** 2 for key in COEFFICIENTS])
    noise = _noise_covariance(law, rows)
    values, misfit = _most_likely(mean, prior, noise, rows)
    if values[_FLOOR] < 0.0:
        # No text has less than no entropy. Small models alone cannot tell the floor from a slower fall of the loss, so
        # without this limit, large models would have negative losses.
        per_nat = prior[_FLOOR] / prior[_FLOOR, _FLOOR]
        at_zero = prior - np.outer(prior[_FLOOR], per_nat)
        values, misfit = _most_likely(mean - mean[_FLOOR] * per_nat, at_zero, noise, rows)
    predicted, slopes = _linearize(values, rows)
    if not misfit <= _MOST_MISFIT * len(rows):
        worst_nats = float(np.abs(predicted - rows.loss_nats).max())
        raise CalibrationError(
            f"the losses of {name} follow no law of size and tokens that is anywhere near those known (misfit "
            f"{misfit / len(rows):.0f} per row, at most {_MOST_MISFIT:.0f}; one is {worst_nats:.2g} nats off): check "
            f"columns and units (nats per token), and that all runs have one recipe"
        )
    gain = prior @ slopes.T @ np.linalg.inv(slopes @ prior @ slopes.T + noise)
    posterior = prior - gain @ slopes @ prior
    sizes = np.asarray(rows.shape.num_parameters)
    return LossLaw(
        name=name,
        coefficients=dict(zip(COEFFICIENTS, values.tolist(), strict=True)),
        covariance=(posterior + posterior.T) / 2.0,
        scatter_nats=law.scatter_nats,
        scatter_length=law.scatter_length,
        parameters_range=(float(sizes.min()), float(sizes.max())),
        tokens_range=(float(rows.tokens.min()), float(rows.tokens.max())),
        provenance={"prior": law.name, "rows": len(rows), "models": len(set(rows.model))},
    )


def _most_likely(mean: Any, prior: Any, noise: Any, rows: LossRows) -> tuple[Any, float]:
    """Return the coefficients that are most likely by a prior and some rows, and their misfit.

    Args:
        mean: Mean of the prior.
        prior: Its covariance.
        noise: Covariance of the measured losses about the law.
    """
    values, misfit = mean, _misfit(mean, mean, prior, noise, rows)
    for _ in range(_MOST_STEPS):
        predicted, slopes = _linearize(values, rows)
        gain = prior @ slopes.T @ np.linalg.inv(slopes @ prior @ slopes.T + noise)
        change = mean + gain @ (rows.loss_nats - predicted + slopes @ (values - mean)) - values
        scale, found = 1.0, _misfit(values + change, mean, prior, noise, rows)
        while found > misfit and scale > _SMALL_STEP:  # halve steps that overshoot
            scale /= 2.0
            found = _misfit(values + scale * change, mean, prior, noise, rows)
        if found >= misfit:
            break
        values, misfit = values + scale * change, found
        if scale * float(np.abs(change).max()) < _SMALL_STEP:
            break
    return values, misfit


def _linearize(values: Any, rows: LossRows) -> tuple[Any, Any]:
    """Losses [nats] and their derivatives by the coefficients. [rows], [rows, coefficients]"""
    coefficients = dict(zip(COEFFICIENTS, values.tolist(), strict=True))
    with np.errstate(over="ignore", invalid="ignore"):
        terms = evaluate_terms(coefficients, rows.shape, rows.tokens)
        predicted = coefficients["floor_nats"] + terms.capacity_nats + terms.token_nats
        slopes = np.stack(np.broadcast_arrays(*derivatives(coefficients, terms)), axis=-1)
    return predicted, slopes


def _misfit(values: Any, mean: Any, prior: Any, noise: Any, rows: LossRows) -> float:
    """Sum of squares of errors and of departures from the prior, each over its covariance."""
    errors, departure = _linearize(values, rows)[0] - rows.loss_nats, values - mean
    if not np.abs(errors).max() < _SENSELESS_NATS:
        return float(np.inf)
    return float(errors @ np.linalg.solve(noise, errors) + departure @ np.linalg.pinv(prior) @ departure)


def _noise_covariance(law: LossLaw, rows: LossRows) -> Float[np.ndarray, "rows rows"]:
    """Covariance of measured losses about the law: errors of similar shapes are correlated. [nats^2]"""
    each = rows.take(np.arange(len(rows))[:, None]).shape
    covariance: Float[np.ndarray, "rows rows"] = law.scatter_covariance(each, rows.shape)
    return covariance + NOISE_NATS**2 * np.eye(len(rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class LossCalibration:
    """The law fitted to a user's own losses.

    Attributes:
        law: The fitted law.
        prior: The law before.
        rows: The losses.
        left_out_errors_nats: Predicted minus measured loss of each model by a fit to the other models; empty if those
            are too few.
        skipped: Rows left out by reason.
        notes: Remarks, one line each.
    """

    law: LossLaw
    prior: LossLaw
    rows: LossRows
    left_out_errors_nats: tuple[float, ...]
    skipped: Mapping[str, int]
    notes: tuple[str, ...]


def calibrate_losses(path: str | Path, *, command: str = "") -> LossCalibration:
    """Fit the law to the losses of a file; see read_own_losses.

    Args:
        path: Store or table of losses of one recipe.

    Raises:
        MeasuredFileError: the file cannot be read, or has too few losses, mixed ones or losses in other units.
        CalibrationError: the losses do not follow the law.
    """
    skipped, prior = Counter[str](), load_loss_law(REFERENCE)
    rows = read_own_losses(path, skipped)
    _check_units(rows, prior)
    name = str(rows.recipe[0])
    law = fit_recipe(prior, rows, name)
    facts = {"source": Path(path).name, "date": datetime.now(UTC).date().isoformat(), "command": command}
    models = shapes_of(rows)
    errors: list[float] = []
    for model in np.unique(models):
        inside = models == model
        if (~inside).sum() >= FEWEST_RUNS:
            others, own = fit_recipe(prior, rows.take(~inside), name), rows.take(inside)
            errors.append(float(np.mean(others.loss_nats(own.shape, own.tokens) - own.loss_nats)))
    return LossCalibration(
        law=replace(
            law,
            provenance={**law.provenance, **facts},
        ),
        prior=prior,
        rows=rows,
        left_out_errors_nats=tuple(errors),
        skipped=dict(skipped),
        notes=_note_contradiction(prior, rows),
    )


def _check_units(rows: LossRows, prior: LossLaw) -> None:
    """Refuse losses that are no nats per token; those per byte, as 'shapewright proxy' measures them, may be low.

    Raises:
        MeasuredFileError: they are bits per byte or perplexities by their size.
    """
    most = float(rows.loss_nats.max())
    if most > _MOST_NATS:
        raise MeasuredFileError(
            f"loss {most:.3g} is more than guessing costs ({_MOST_NATS} nats): for a perplexity, give its logarithm"
        )
    usual = np.asarray(prior.loss_nats(rows.shape, rows.tokens))
    if float(np.median(rows.loss_nats / usual)) < _LEAST_OF_REFERENCE and "bytes" not in str(rows.recipe[0]):
        raise MeasuredFileError(
            f"loss {np.median(rows.loss_nats):.3g} is far below the {np.median(usual):.3g} nats per token of models of "
            f"this size: if it is in bits per byte, loss = {NATS_FROM_BITS}; if it is in nats per byte, say so in "
            "column data, such as 'bytes of books'"
        )


def _note_contradiction(prior: LossLaw, rows: LossRows) -> tuple[str, ...]:
    """Return a note on the larger model that is worst beside a smaller one after no more tokens; none without one.

    A model that is hardly larger may be worse by its shape, and others by noise and scatter.
    """
    sizes, widths, depths = map(np.asarray, (rows.shape.num_parameters, rows.shape.hidden_size, rows.shape.num_layers))
    should_be_lower = (sizes[:, None] >= _CLEARLY_LARGER * sizes) & (rows.tokens[:, None] >= rows.tokens)
    excess_nats = np.where(should_be_lower, rows.loss_nats[:, None] - rows.loss_nats, 0.0)
    larger, smaller = np.unravel_index(int(np.argmax(excess_nats)), excess_nats.shape)
    if excess_nats[larger, smaller] <= Z_90 * sqrt(2.0) * hypot(NOISE_NATS, prior.scatter_nats):
        return ()
    words = [
        f"{widths[row]:.0f} x {depths[row]:.0f} ({format_count(sizes[row])} parameters, "
        f"{format_count(rows.tokens[row])} tokens) has {rows.loss_nats[row]:.4g} nats"
        for row in (larger, smaller)
    ]
    return (f"losses contradict each other: {words[0]}, and the smaller {words[1]}; check these two runs",)
