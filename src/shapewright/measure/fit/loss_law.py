"""Fit the law of loss to measured losses: coefficients per recipe, covariance by model, scatter of models left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.records import dataclass
from shapewright.measure.fit.loss_rows import LossRows, folds_of_models
from shapewright.prediction.loss.law import Z_90
from shapewright.prediction.loss.terms import COEFFICIENTS, derivatives, evaluate_terms

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


def fit_law(
    rows: LossRows,
    priors: Mapping[str, Prior],
    group_of: Callable[[str, str], str],
) -> LawFit:
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
    fold = folds_of_models(rows, NUM_FOLDS)
    predicted, deviation = np.empty(len(rows)), np.empty(len(rows))
    for number in np.unique(fold):
        others, left_out = fit(rows.take(fold != number)), rows.take(fold == number)
        predicted[fold == number] = others.predict(left_out)
        deviation[fold == number] = others.standard_deviation(left_out)
    return predicted, deviation


def scatter_about_law(
    errors: Float[np.ndarray, " rows"], deviation: Float[np.ndarray, " rows"], coverage: float = 0.9
) -> float:
    """Return the scatter with which intervals of left-out rows have a coverage. [nats]

    Args:
        errors: Predicted minus measured losses. [nats]
        deviation: Standard deviations of the predictions by the coefficients alone. [nats]
    """
    return float(np.sqrt(np.quantile(np.maximum((errors / Z_90) ** 2 - deviation**2, 0.0), coverage)))
