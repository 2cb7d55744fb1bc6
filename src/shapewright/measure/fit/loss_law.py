"""Fit the law of loss to measured losses: coefficients per recipe, covariance by model, scatter of models left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.measure.fit.loss_rows import LossRows, folds_of_models
from shapewright.prediction.loss.law import COEFFICIENTS, derivatives, evaluate_terms

if TYPE_CHECKING:
    from jaxtyping import Float

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
        source: Where it comes from.
    """

    mean: float
    standard_deviation: float
    low: float = -np.inf
    high: float = np.inf
    source: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class LawFit:
    """Fitted coefficients.

    Attributes:
        coefficients: Of each recipe, by name.
        covariance: Of each recipe. [coefficients, coefficients]
        names: Free parameters: coefficient and recipe, the latter empty where recipes share it.
        values: Their values. [parameters]
    """

    coefficients: dict[str, dict[str, float]]
    covariance: dict[str, Float[np.ndarray, "coefficients coefficients"]]
    names: tuple[tuple[str, str], ...]
    values: Float[np.ndarray, " parameters"]

    def predict(self, rows: LossRows) -> Float[np.ndarray, " rows"]:
        """Losses of rows of the fitted recipes. [nats]"""
        columns = {name: np.array([self.coefficients[recipe][name] for recipe in rows.recipe]) for name in COEFFICIENTS}
        terms = evaluate_terms(columns, rows.shape, rows.tokens)
        loss: Float[np.ndarray, " rows"] = columns["floor_nats"] + terms.capacity_nats + terms.token_nats
        return loss


def fit_law(
    rows: LossRows,
    priors: Mapping[str, Prior],
    per_recipe: Sequence[str],
    *,
    start: LawFit | None = None,
) -> LawFit:
    """Fit coefficients to the losses of one source.

    Args:
        rows: The losses.
        priors: Prior of every coefficient.
        per_recipe: Coefficients that each recipe has for itself; recipes share the others.
        start: An earlier fit of the same recipes to start from.

    Returns:
        The fit. Its covariance takes all rows of a model as one observation, since their errors are alike.
    """
    from scipy.optimize import least_squares

    recipes = sorted(set(rows.recipe))
    names = tuple(
        (name, recipe)
        for name in COEFFICIENTS
        if priors[name].standard_deviation > 0.0
        for recipe in (recipes if name in per_recipe else [""])
    )
    position = {key: index for index, key in enumerate(names)}
    place = {
        name: np.array([position[name, recipe if name in per_recipe else ""] for recipe in rows.recipe])
        for name in COEFFICIENTS
        if priors[name].standard_deviation > 0.0
    }
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

    values = mean if start is None else start.values
    found = least_squares(
        residuals,
        np.clip(values, low + 1e-9, high - 1e-9),
        jac=jacobian,
        bounds=(low, high),
        loss="soft_l1",
        x_scale="jac",
    )
    spread = _clustered_covariance(
        jacobian(found.x)[: len(rows)], residuals(found.x)[: len(rows)], 1.0 / deviation**2, rows.model
    )
    coefficients: dict[str, dict[str, float]] = {}
    covariance: dict[str, Any] = {}
    for recipe in recipes:
        chosen = [position.get((name, recipe if name in per_recipe else ""), -1) for name in COEFFICIENTS]
        coefficients[recipe] = {
            name: float(found.x[index]) if index >= 0 else priors[name].mean
            for name, index in zip(COEFFICIENTS, chosen, strict=True)
        }
        free = np.array(chosen) >= 0
        matrix = np.zeros((len(COEFFICIENTS), len(COEFFICIENTS)))
        matrix[np.ix_(free, free)] = spread[np.ix_(np.array(chosen)[free], np.array(chosen)[free])]
        covariance[recipe] = matrix
    return LawFit(coefficients=coefficients, covariance=covariance, names=names, values=found.x)


def _clustered_covariance(slopes: Any, errors: Any, precision: Any, model: Any) -> Any:
    """Covariance of fitted values where the errors of one model's rows are alike.

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


def predict_left_out(rows: LossRows, fit: Callable[[LossRows, LawFit | None], LawFit]) -> Float[np.ndarray, " rows"]:
    """Predict each row by a fit that saw no row of its model.

    Args:
        rows: The losses of one source.
        fit: Fits rows, starting from a fit of all if one is given.
    """
    whole = fit(rows, None)
    fold = folds_of_models(rows, NUM_FOLDS)
    predicted = np.empty(len(rows))
    for number in np.unique(fold):
        predicted[fold == number] = fit(rows.take(fold != number), whole).predict(rows.take(fold == number))
    return predicted
