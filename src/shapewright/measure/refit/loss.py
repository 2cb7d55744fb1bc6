"""Fit the law of loss by shape to public losses.

The data folder holds loss_by_shape.csv. First all sources are fitted together: one set of shape terms, and recipe terms
for each source. Then each source may depart from the common shape terms as far as the sources differ. The reference
has the common shape terms, the level of decayed runs, and the spread between sources and toward larger models as its
uncertainty. Errors are those of whole models left out, twelve parts in turn. Some seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import shapewright.prediction.loss
from shapewright.core.records import dataclass
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.fit.loss_rows import FORMAT, LossRows, read_loss_rows
from shapewright.measure.fit.shared import Array, predict_in_turn, round_numbers
from shapewright.measure.refit.record_files import command
from shapewright.prediction.loss.law import REFERENCE, Z_90
from shapewright.prediction.loss.terms import COEFFICIENTS, derivatives, evaluate_terms

if TYPE_CHECKING:
    from jaxtyping import Float

TABLE = "loss_by_shape.csv"
LAW = Path(shapewright.prediction.loss.__file__).parent / "data" / "loss_law.json"
SOURCE = (
    "mcleish7/gemstone-scaling-laws @5f42047, Waterpine/open-lm-morph @1872be3, mlfoundations/scaling @a003c49, MIT"
)

NUM_FOLDS = 12
# Residuals beyond this count less than in proportion to their square. [nats]
_ROBUST_NATS = 0.01


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is known of a coefficient before a fit.

    Attributes:
        mean: Expected value.
        standard_deviation: Its uncertainty; 0 fixes the coefficient.
        low: Lower bound.
        high: Upper bound.
    """

    mean: float
    standard_deviation: float
    low: float = -np.inf
    high: float = np.inf


# Coefficients that schedules of one source have for themselves: the models are the same, and so are the other terms.
# Recipes of other sources share nothing: the batch sizes of the grid go with the size of its models.
OF_A_SCHEDULE = ("floor_nats", "log_token_nats", "token_exponent")
SAME_MODELS = ("gemstones",)
SHAPE_TERMS = ("curvature", "log_best_width_per_layer", "best_width_growth", "head_curvature", "log_best_head_dim")
# Wide: the losses decide.
PRIORS = {
    "floor_nats": Prior(mean=1.5, standard_deviation=0.5, low=0.5, high=3.0),
    "log_capacity_nats": Prior(mean=0.0, standard_deviation=2.0),
    "capacity_exponent": Prior(mean=0.25, standard_deviation=0.15, low=0.02, high=1.0),
    "log_token_nats": Prior(mean=-1.2, standard_deviation=2.0),
    "token_exponent": Prior(mean=0.4, standard_deviation=0.15, low=0.05, high=1.5),
    "token_size_exponent": Prior(mean=0.1, standard_deviation=0.15),
    "curvature": Prior(mean=0.1, standard_deviation=0.2, low=0.0),
    "log_best_width_per_layer": Prior(mean=3.9, standard_deviation=1.0),
    "best_width_growth": Prior(mean=0.0, standard_deviation=0.3),
    "head_curvature": Prior(mean=0.3, standard_deviation=0.3, low=0.0),
    "log_best_head_dim": Prior(mean=float(np.log(110.0)), standard_deviation=0.2),
    "mlp_curvature": Prior(mean=0.03, standard_deviation=0.0),
    "log_best_mlp_ratio": Prior(mean=1.0, standard_deviation=0.0),
    "shared_kv": Prior(mean=0.01, standard_deviation=0.0),
    "expert_share": Prior(mean=0.5, standard_deviation=0.0),
    # More, narrower experts learn more (arXiv 2402.07871); by how much at a number of tokens is chosen.
    "expert_granularity": Prior(mean=0.2, standard_deviation=0.0),
}
# How far the shape terms of one source may depart from the common ones.
BETWEEN_SOURCES = {
    "curvature": 0.1,
    "log_best_width_per_layer": 0.3,
    "best_width_growth": 0.1,
    "head_curvature": 0.2,
    "log_best_head_dim": 0.1,
}
# Fields that no loss varies alone: uncertainty in ln N_eff.
SILENT = {
    "mlp_curvature": 0.03,
    "log_best_mlp_ratio": 0.6,
    "shared_kv": 0.02,
    "expert_share": 0.25,
    "expert_granularity": 0.2,
}
# Distance in (ln width, ln depth) at which errors of two models are hardly alike: differences of fitted residuals of
# Gemstones have a standard deviation of 0.0035 nats up to 0.2, 0.007 at 0.3 and 0.010 from 0.5 on.
SCATTER_LENGTH = 0.3

# Recipe whose level the reference has: its learning rate decays, as in most runs.
LEVEL = "cooled to 0"
# ln of the sizes and tokens (over N0 and D0) about which extrapolation turns: 5e8 parameters, 1e11 tokens.
PIVOT_PARAMETERS, PIVOT_TOKENS = 1.6, 2.3


def group_of(name: str, recipe: str) -> str:
    """Return which recipes share a coefficient of the fits by source."""
    source = recipe.partition(",")[0]
    return source if source in SAME_MODELS and name not in OF_A_SCHEDULE else recipe


def group_with_common_shape(name: str, recipe: str) -> str:
    """Return which recipes share a coefficient of the common fit."""
    return "" if name in SHAPE_TERMS else group_of(name, recipe)


def fit_common(rows: LossRows) -> LawFit:
    """Fit all sources with one set of shape terms."""
    return fit_law(rows, PRIORS, group_with_common_shape)


def fit_sources(rows: LossRows) -> LawFit:
    """Fit all sources; those with small models alone have shape terms of their own, near the common ones."""
    common = fit_common(rows)
    is_common = np.array([source in SAME_MODELS for source in rows.source])
    if is_common.all():
        return common
    priors = dict(PRIORS)
    for name, deviation in BETWEEN_SOURCES.items():
        priors[name] = replace(PRIORS[name], mean=common.value_of(name, ""), standard_deviation=deviation)
    own = fit_law(rows.take(~is_common), priors, group_of)
    return replace(
        own,
        coefficients={**common.coefficients, **own.coefficients},
        covariance={**common.covariance, **own.covariance},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class LawFit:
    """Fitted coefficients.

    Attributes:
        coefficients: Of each recipe, by name.
        covariance: Of each recipe. [coefficients, coefficients]
        names: Free parameters: coefficient and group of recipes that share it.
        values: Their values. [parameters]
    """

    coefficients: dict[str, dict[str, float]]
    covariance: dict[str, Float[np.ndarray, "coefficients coefficients"]]
    names: tuple[tuple[str, str], ...]
    values: Float[np.ndarray, " parameters"]

    def value_of(self, name: str, group: str) -> float:
        """Fitted value of a coefficient."""
        return float(self.values[self.names.index((name, group))])

    def predict(self, rows: LossRows) -> Float[np.ndarray, " rows"]:
        """Losses of rows of the fitted recipes. [nats]"""
        columns = self._columns(rows)
        terms = evaluate_terms(columns, rows.shape, rows.tokens)
        loss: Float[np.ndarray, " rows"] = columns["floor_nats"] + terms.capacity_nats + terms.token_nats
        return loss

    def standard_deviation(self, rows: LossRows) -> Float[np.ndarray, " rows"]:
        """Standard deviation of these by the coefficients alone. [nats]"""
        columns = self._columns(rows)
        slopes = derivatives(columns, evaluate_terms(columns, rows.shape, rows.tokens))
        matrix = np.stack(np.broadcast_arrays(*slopes), axis=-1)
        covariance = np.stack([self.covariance[recipe] for recipe in rows.recipe])
        deviation: Float[np.ndarray, " rows"] = np.sqrt(np.einsum("ri,rij,rj->r", matrix, covariance, matrix))
        return deviation

    def _columns(self, rows: LossRows) -> dict[str, Float[np.ndarray, " rows"]]:
        """Coefficients of each row."""
        return {name: np.array([self.coefficients[recipe][name] for recipe in rows.recipe]) for name in COEFFICIENTS}


def fit_law(rows: LossRows, priors: Mapping[str, Prior], group_of: Callable[[str, str], str]) -> LawFit:
    """Fit coefficients to losses.

    Args:
        group_of: Takes a coefficient and a recipe; recipes of which it returns the same word share the coefficient.

    Returns:
        The fit. Its covariance takes all rows of a model as one observation, since their errors are alike.
    """
    from scipy.optimize import least_squares

    recipes = sorted(set(rows.recipe))
    free = [name for name in COEFFICIENTS if priors[name].standard_deviation > 0.0]
    names = tuple(dict.fromkeys((name, group_of(name, recipe)) for name in free for recipe in recipes))
    position = {key: index for index, key in enumerate(names)}
    places = {recipe: {name: position[name, group_of(name, recipe)] for name in free} for recipe in recipes}
    place = {name: np.array([places[recipe][name] for recipe in rows.recipe]) for name in free}
    known = [priors[name] for name, _ in names]
    mean, deviation = (np.array([getattr(prior, side) for prior in known]) for side in ("mean", "standard_deviation"))
    low, high = (np.array([getattr(prior, side) for prior in known]) for side in ("low", "high"))

    def columns_of(values: Any) -> dict[str, Any]:
        return {name: values[place[name]] if name in place else priors[name].mean for name in COEFFICIENTS}

    def residuals(values: Any) -> Any:
        columns = columns_of(values)
        terms = evaluate_terms(columns, rows.shape, rows.tokens)
        errors = columns["floor_nats"] + terms.capacity_nats + terms.token_nats - rows.loss_nats
        return np.concatenate([errors / _ROBUST_NATS, (values - mean) / deviation])

    def jacobian(values: Any) -> Any:
        columns = columns_of(values)
        slopes = derivatives(columns, evaluate_terms(columns, rows.shape, rows.tokens))
        matrix = np.zeros((len(rows), len(names)))
        for name, slope in zip(COEFFICIENTS, slopes, strict=True):
            if name in place:
                matrix[np.arange(len(rows)), place[name]] = slope
        return np.concatenate([matrix / _ROBUST_NATS, np.diag(1.0 / deviation)])

    found = least_squares(
        residuals,
        np.clip(mean, low + 1e-9, high - 1e-9),
        jac=jacobian,
        bounds=(low, high),
        loss="soft_l1",
        x_scale="jac",
    )
    spread = _clustered_covariance(
        jacobian(found.x)[: len(rows)], residuals(found.x)[: len(rows)], 1.0 / deviation**2, rows.model
    )
    inner = [COEFFICIENTS.index(name) for name in free]
    coefficients: dict[str, dict[str, float]] = {}
    covariance: dict[str, Any] = {}
    for recipe in recipes:
        outer = [places[recipe][name] for name in free]
        fitted = dict(zip(free, found.x[outer].tolist(), strict=True))
        coefficients[recipe] = {name: fitted.get(name, priors[name].mean) for name in COEFFICIENTS}
        covariance[recipe] = np.zeros((len(COEFFICIENTS), len(COEFFICIENTS)))
        covariance[recipe][np.ix_(inner, inner)] = spread[np.ix_(outer, outer)]
    return LawFit(coefficients=coefficients, covariance=covariance, names=names, values=found.x)


def _clustered_covariance(slopes: Any, errors: Any, precision: Any, model: Any) -> Any:
    """Covariance of fitted values with correlated errors of one model's rows.

    Source: the sandwich of Liang and Zeger, Biometrika 73(1), 1986, with priors as observations of their own.
    """
    weights = 1.0 / np.sqrt(1.0 + errors**2)  # of soft_l1
    curvature = slopes.T @ (slopes * weights[:, None]) + np.diag(precision)
    inverse = np.linalg.pinv(curvature)
    middle = np.diag(precision)
    models = np.unique(model)
    for name in models:
        inside = model == name
        pull = slopes[inside].T @ (errors * weights)[inside]
        middle = middle + np.outer(pull, pull) * len(models) / max(len(models) - 1, 1)
    return inverse @ middle @ inverse


def predict_left_out(
    rows: LossRows, fit: Callable[[LossRows], LawFit]
) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
    """Predict each row by a fit that saw no row of its model.

    Returns:
        Predicted losses [nats], and their standard deviations by the coefficients alone [nats].
    """
    models = np.random.default_rng(0).permutation(np.unique(rows.model))
    fold_of = dict(zip(models, np.arange(len(models)) % NUM_FOLDS, strict=True))
    fold = np.array([fold_of[model] for model in rows.model])
    predicted, deviation = np.empty(len(rows)), np.empty(len(rows))
    for number in np.unique(fold):
        others, left_out = fit(rows.take(fold != number)), rows.take(fold == number)
        predicted[fold == number] = others.predict(left_out)
        deviation[fold == number] = others.standard_deviation(left_out)
    return predicted, deviation


def scatter_about_law(errors: Float[np.ndarray, " rows"], deviation: Float[np.ndarray, " rows"]) -> float:
    """Return the scatter with which intervals of left-out rows cover 90 %. [nats]

    Args:
        errors: Predicted minus measured losses. [nats]
        deviation: Standard deviations of the predictions by the coefficients alone. [nats]
    """
    return float(np.sqrt(np.quantile(np.maximum((errors / Z_90) ** 2 - deviation**2, 0.0), 0.9)))


def scatter_of_others(
    errors: Float[np.ndarray, " rows"], deviation: Float[np.ndarray, " rows"], model: np.ndarray[Any, Any]
) -> Float[np.ndarray, " rows"]:
    """Return for each row the scatter about the law that the rows of the other models give. [nats]

    Args:
        errors: Predicted minus measured losses. [nats]
        deviation: Standard deviations of the predictions by the coefficients alone. [nats]
        model: Model of each row. [rows]
    """
    return predict_in_turn(
        model, lambda others, left: np.full(left.sum(), scatter_about_law(errors[others], deviation[others]))
    )


def refit(data: Path) -> None:
    """Fit all sources and write the law."""
    skipped: Counter[str] = Counter()
    rows = read_loss_rows(read_columns(data / TABLE, FORMAT, skipped), skipped)
    predicted, deviation = predict_left_out(rows, fit_sources)
    errors = predicted - rows.loss_nats
    fit = fit_sources(rows)
    recipes = {recipe: _recipe(rows, fit, recipe, errors, deviation) for recipe in sorted(set(rows.recipe))}
    alike = np.isin(rows.source, SAME_MODELS)
    scatter_nats = scatter_about_law(errors[alike], deviation[alike])
    for recipe, content in recipes.items():
        print(recipe, content["provenance"], flush=True)
    today = datetime.now(UTC).date().isoformat()
    content = {
        "id": f"loss/{today}",
        "provenance": {
            "date": today,
            "file": TABLE,
            "source": SOURCE,
            "command": command("loss"),
            "rows": len(rows),
            "left_out": dict(skipped),
            "split": "whole (source, width, depth) left out, 12 parts",
        },
        "recipes": {REFERENCE: _reference(rows, recipes, scatter_nats), **recipes},
    }
    LAW.write_text(json.dumps(round_numbers(content), indent=1) + "\n", encoding="utf-8")


def _recipe(rows: LossRows, fit: LawFit, recipe: str, errors: Array, deviation: Array) -> dict[str, Any]:
    """Record of one recipe."""
    inside = rows.recipe == recipe
    own = rows.take(inside)
    terms = evaluate_terms(fit.coefficients[recipe], own.shape, own.tokens)
    slopes = np.stack(np.broadcast_arrays(*derivatives(fit.coefficients[recipe], terms)), axis=-1)
    sizes = own.shape.num_parameters
    silent = _of_silent_fields(slopes)
    errors, deviation = errors[inside], deviation[inside]
    # With the scatter of all models the intervals would cover 90 % of their losses by construction.
    scatter_nats = scatter_of_others(errors, deviation, own.model)
    variance = deviation**2 + np.einsum("ri,ij,rj->r", slopes, silent, slopes) + scatter_nats**2
    return {
        "coefficients": fit.coefficients[recipe],
        "covariance": (fit.covariance[recipe] + silent).tolist(),
        "scatter_nats": scatter_about_law(errors, deviation),
        "scatter_length": SCATTER_LENGTH,
        "parameters_range": [float(np.min(sizes)), float(np.max(sizes))],
        "tokens_range": [float(np.min(own.tokens)), float(np.max(own.tokens))],
        "provenance": {
            "rows": len(own),
            "models": len(set(own.model)),
            "held_out_mean_error_nats": float(np.abs(errors).mean()),
            "held_out_coverage_90": float((np.abs(errors) <= Z_90 * np.sqrt(variance)).mean()),
        },
    }


def _of_silent_fields(slopes: Array | None = None) -> Array:
    """Covariance of the coefficients of fields that no loss varies alone.

    Args:
        slopes: Derivatives of the losses of a recipe by the coefficients: another effect of these fields would have
            been fitted with other level and size terms, so that it changes the losses of other models alone.
    """
    directions = np.diag([SILENT.get(name, 0.0) for name in COEFFICIENTS])
    if slopes is not None:
        level = [COEFFICIENTS.index(name) for name in ("floor_nats", "log_capacity_nats", "capacity_exponent")]
        directions[:, level] = -np.linalg.lstsq(slopes[:, level], slopes @ directions.T, rcond=None)[0].T
    return directions.T @ directions


def _reference(rows: LossRows, recipes: Mapping[str, Any], scatter_nats: float) -> dict[str, Any]:
    """Record for a recipe of which nothing is known: common shape terms, and what is unsure beyond the data."""
    fit = fit_common(rows)
    recipe = next(name for name in fit.coefficients if LEVEL in name)
    value = dict(fit.coefficients[recipe])
    # The best width per layer falls with size in the losses, up to 2 B, and rises in arXiv 2006.12467: beyond the
    # pivot the reference takes neither side.
    value["log_best_width_per_layer"] += value["best_width_growth"] * PIVOT_PARAMETERS
    value["best_width_growth"] = 0.0
    capacity = float(np.exp(value["log_capacity_nats"]))
    directions = [
        # A higher floor with the same loss and slope at N0: the losses cannot tell a low floor from a small exponent of
        # size, which differ at 70 B. Others fitted floors of 1.69 (arXiv 2203.15556) and 1.82 (arXiv 2404.10102).
        {
            "floor_nats": 0.4,
            "log_capacity_nats": -0.4 / capacity,
            "capacity_exponent": value["capacity_exponent"] * 0.4 / capacity,
        },
        {"token_exponent": 0.08, "log_token_nats": 0.08 * PIVOT_TOKENS},
        {"token_size_exponent": 0.06, "log_token_nats": -0.06 * PIVOT_PARAMETERS},
        {"curvature": 0.05},
        {"log_best_width_per_layer": 0.3},
        {"best_width_growth": 0.15, "log_best_width_per_layer": -0.15 * PIVOT_PARAMETERS},
        {"head_curvature": 0.15},
        {"log_best_head_dim": 0.1},
    ]
    spread = np.array([[direction.get(name, 0.0) for name in COEFFICIENTS] for direction in directions])
    ends = {
        name: [end(recipe[name][place] for recipe in recipes.values()) for place, end in ((0, min), (1, max))]
        for name in ("parameters_range", "tokens_range")
    }
    return {
        "coefficients": value,
        "covariance": (fit.covariance[recipe] + spread.T @ spread + _of_silent_fields()).tolist(),
        "scatter_nats": scatter_nats,
        "scatter_length": SCATTER_LENGTH,
        **ends,
        "provenance": {"level": recipe, "rows": len(rows), "models": len(set(rows.model))},
    }
