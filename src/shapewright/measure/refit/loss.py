"""Fit the law of loss by shape to public losses.

The data folder holds loss_by_shape.csv. Each source is fitted alone: recipes of one source share the shape terms and
have their own floor and token terms. The reference joins what the sources agree on, with the spread between them as its
uncertainty. Errors are those of whole models left out, twelve parts in turn. Some seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import shapewright.prediction.loss
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.fit.loss_law import LawFit, Prior, fit_law, predict_left_out
from shapewright.measure.fit.loss_rows import FORMAT, LossRows, read_loss_rows
from shapewright.measure.fit.shared import round_to_4_digits
from shapewright.measure.refit.record_files import command
from shapewright.prediction.loss.law import COEFFICIENTS, REFERENCE

TABLE = "loss_by_shape.csv"
LAW = Path(shapewright.prediction.loss.__file__).parent / "data" / "loss_law.json"
SOURCE = (
    "mcleish7/gemstone-scaling-laws @5f42047, Waterpine/open-lm-morph @1872be3, mlfoundations/scaling @a003c49, MIT"
)

# Coefficients that each recipe of a source has for itself.
PER_RECIPE = {
    "gemstones": ("floor_nats", "log_token_nats", "token_exponent"),
    "grid": ("log_token_nats",),
    "morph": (),
}
# Wide: the losses decide. The floor is held near the values of compute-optimal fits, which the losses cannot tell from
# a small exponent of size.
PRIORS = {
    "floor_nats": Prior(
        mean=1.7, standard_deviation=0.1, low=0.5, high=3.0, source="arXiv 2203.15556 (1.69) and 2404.10102 (1.82)"
    ),
    "log_capacity_nats": Prior(mean=0.0, standard_deviation=2.0),
    "capacity_exponent": Prior(mean=0.25, standard_deviation=0.15, low=0.02, high=1.0, source="arXiv 2404.10102: 0.35"),
    "log_token_nats": Prior(mean=-1.2, standard_deviation=2.0),
    "token_exponent": Prior(mean=0.4, standard_deviation=0.15, low=0.05, high=1.5, source="arXiv 2404.10102: 0.37"),
    "token_size_exponent": Prior(mean=0.1, standard_deviation=0.15),
    "curvature": Prior(mean=0.1, standard_deviation=0.2, low=0.0),
    "log_best_width_per_layer": Prior(mean=3.9, standard_deviation=1.0),
    "best_width_growth": Prior(mean=0.0, standard_deviation=0.3),
    "head_curvature": Prior(mean=0.2, standard_deviation=0.3, low=0.0),
    "log_best_head_dim": Prior(mean=float(np.log(115.0)), standard_deviation=0.2),
    "mlp_curvature": Prior(mean=0.03, standard_deviation=0.0),
    "log_best_mlp_ratio": Prior(mean=1.0, standard_deviation=0.0),
    "shared_kv": Prior(mean=0.01, standard_deviation=0.0),
    "expert_share": Prior(mean=0.5, standard_deviation=0.0),
}
# Fields that the losses do not vary alone. Uncertainties are in ln N_eff.
SILENT = {
    "mlp_curvature": 0.03,
    "log_best_mlp_ratio": 0.6,
    "shared_kv": 0.02,
    "expert_share": 0.25,
}
SCATTER_LENGTH = 0.4


def fit_source(rows: LossRows, start: LawFit | None = None) -> LawFit:
    """Fit the recipes of one source."""
    source = str(rows.source[0])
    priors = dict(PRIORS)
    for name, attribute in (("log_best_head_dim", "head_dim"),):
        if len(np.unique(getattr(rows.shape, attribute))) == 1:
            priors[name] = replace(priors[name], standard_deviation=0.0)
            priors["head_curvature"] = replace(priors["head_curvature"], standard_deviation=0.0)
    return fit_law(rows, priors, PER_RECIPE[source], start=start)


def refit(data: Path) -> None:
    """Fit all sources and write the law."""
    skipped: Counter[str] = Counter()
    rows = read_loss_rows(read_columns(data / TABLE, FORMAT, skipped), skipped)
    recipes: dict[str, Any] = {}
    fits: dict[str, LawFit] = {}
    for source in sorted(set(rows.source)):
        own = rows.take(rows.source == source)
        predicted = predict_left_out(own, fit_source)
        fits[source] = fit_source(own)
        errors = predicted - own.loss_nats
        print(f"{source}: {len(own)} rows, {len(set(own.model))} models, {np.abs(errors).mean():.4f} nats", flush=True)
        for recipe in sorted(set(own.recipe)):
            inside = own.recipe == recipe
            recipes[recipe] = _recipe(own.take(inside), fits[source], recipe, errors[inside])
    reference = _reference(recipes)
    content = {
        "id": f"loss/{datetime.now(UTC).date().isoformat()}",
        "provenance": {
            "date": datetime.now(UTC).date().isoformat(),
            "file": TABLE,
            "source": SOURCE,
            "command": command("loss"),
            "rows": len(rows),
            "left_out": dict(skipped),
            "split": "whole (source, width, depth) left out, 12 parts",
            "priors": {name: prior.source for name, prior in PRIORS.items() if prior.source},
        },
        "recipes": {REFERENCE: reference, **recipes},
    }
    LAW.write_text(json.dumps(round_to_4_digits(content), indent=1) + "\n", encoding="utf-8")


def _recipe(rows: LossRows, fit: LawFit, recipe: str, errors: Any) -> dict[str, Any]:
    sizes = rows.shape.num_parameters
    return {
        "coefficients": fit.coefficients[recipe],
        "covariance": _with_silent_fields(fit.covariance[recipe]).tolist(),
        "scatter_nats": float(np.sqrt(np.mean(errors**2))),
        "scatter_length": SCATTER_LENGTH,
        "parameters_range": [float(np.min(sizes)), float(np.max(sizes))],
        "tokens_range": [float(np.min(rows.tokens)), float(np.max(rows.tokens))],
        "provenance": {"rows": len(rows), "held_out_mean_error_nats": float(np.abs(errors).mean())},
    }


def _with_silent_fields(covariance: Any) -> Any:
    """Add the variance of the fields that no loss varies alone."""
    found = np.array(covariance)
    for name, deviation in SILENT.items():
        found[COEFFICIENTS.index(name), COEFFICIENTS.index(name)] += deviation**2
    return found


# Shape terms of the reference: mean and standard deviation over the sources, growth toward larger models unknown.
_JOINED = {
    "curvature": 0.08,
    "log_best_width_per_layer": 0.5,
    "best_width_growth": 0.2,
    "head_curvature": 0.1,
    "log_best_head_dim": 0.15,
}


def _reference(recipes: dict[str, Any]) -> dict[str, Any]:
    """Join the recipes: level and tokens of the longest runs, shape terms of all."""
    longest = max(recipes, key=lambda name: float(recipes[name]["tokens_range"][1]))
    base = recipes[longest]
    coefficients = dict(base["coefficients"])
    covariance = np.array(base["covariance"])
    for name, deviation in _JOINED.items():
        index = COEFFICIENTS.index(name)
        # A curvature is worth as many nats here as in its source, at the reference size.
        values = {
            recipe["coefficients"][name] * (_slope(recipe) / _slope(base) if name.endswith("curvature") else 1.0)
            for recipe in recipes.values()
            if recipe["covariance"][index][index] > 0.0
        }
        coefficients[name] = float(np.median(list(values)))
        covariance[index, :] = covariance[:, index] = 0.0
        covariance[index, index] = deviation**2
    coefficients["best_width_growth"] = 0.0
    ranges = {
        name: [end(recipe[name][place] for recipe in recipes.values()) for place, end in ((0, min), (1, max))]
        for name in ("parameters_range", "tokens_range")
    }
    return {
        **base,
        "coefficients": coefficients,
        "covariance": covariance.tolist(),
        "provenance": {"level": longest},
        **ranges,
    }


def _slope(recipe: dict[str, Any]) -> float:
    """Decrease of the loss per ln N_eff at the reference size. [nats]"""
    value = recipe["coefficients"]
    return float(value["capacity_exponent"] * np.exp(value["log_capacity_nats"]))
