"""Fit the law of loss by shape to public losses.

The data folder holds loss_by_shape.csv. First all sources are fitted together: one set of shape terms, and recipe terms
for each source. Then each source may depart from the common shape terms as far as the sources differ. The reference
has the common shape terms, the level of decayed runs, and the spread between sources and toward larger models as its
uncertainty. Errors are those of whole models left out, twelve parts in turn. Some seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import shapewright.prediction.loss
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.fit.loss_law import LawFit, Prior, fit_law, predict_left_out, scatter_about_law
from shapewright.measure.fit.loss_rows import FORMAT, LossRows, read_loss_rows
from shapewright.measure.fit.shared import Array, round_numbers
from shapewright.measure.refit.record_files import command
from shapewright.prediction.loss.law import REFERENCE, Z_90
from shapewright.prediction.loss.terms import COEFFICIENTS, derivatives, evaluate_terms

TABLE = "loss_by_shape.csv"
LAW = Path(shapewright.prediction.loss.__file__).parent / "data" / "loss_law.json"
SOURCE = (
    "mcleish7/gemstone-scaling-laws @5f42047, Waterpine/open-lm-morph @1872be3, mlfoundations/scaling @a003c49, MIT"
)

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
SILENT = {"mlp_curvature": 0.03, "log_best_mlp_ratio": 0.6, "shared_kv": 0.02, "expert_share": 0.25}
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
    scatter_nats = scatter_about_law(errors[inside], deviation[inside])
    variance = deviation[inside] ** 2 + np.einsum("ri,ij,rj->r", slopes, silent, slopes) + scatter_nats**2
    return {
        "coefficients": fit.coefficients[recipe],
        "covariance": (fit.covariance[recipe] + silent).tolist(),
        "scatter_nats": scatter_nats,
        "scatter_length": SCATTER_LENGTH,
        "parameters_range": [float(np.min(sizes)), float(np.max(sizes))],
        "tokens_range": [float(np.min(own.tokens)), float(np.max(own.tokens))],
        "provenance": {
            "rows": len(own),
            "models": len(set(own.model)),
            "held_out_mean_error_nats": float(np.abs(errors[inside]).mean()),
            "held_out_coverage_90": float((np.abs(errors[inside]) <= Z_90 * np.sqrt(variance)).mean()),
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
