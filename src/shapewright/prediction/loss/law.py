"""The loss law: its fitted coefficients, comparisons of shapes with intervals, and files with a user's own law.

The formula is that of prediction.loss.terms. The covariance of the coefficients gives a loss difference an interval,
which widens outside the fitted data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import CalibrationError, close_names, first_line, short_repr
from shapewright.core.files import read_start
from shapewright.core.records import dataclass
from shapewright.prediction.loss.terms import COEFFICIENTS, REFERENCE_TOKENS, derivatives, evaluate_terms

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.core.numeric import Numeric
    from shapewright.prediction.loss.terms import ShapeForLoss


REFERENCE = "reference"
"""Recipe of a model with unknown data and schedule."""
Z_90 = 1.6448536269514722
"""Standard deviations from the mean to the ends of a 90 % interval of a normal distribution."""
FREE_NATS = 0.01
"""Largest loss difference that counts as zero: heads of 64 to 256 differ by less in the data. [nats]"""


_FILE = "data/loss_law.json"
# Weight of ln head_dim in the distance between two shapes, relative to ln hidden_size and ln num_layers. Source: most
# likely value for residuals of left-out models of the grid, 63 pairs of heads at one width from 512 up and one depth
# (0.45 to 0.60; decision 0018). It includes noise between seeds.
_HEAD_DISTANCE_WEIGHT = 0.48


@dataclass(frozen=True, kw_only=True, eq=False)
class LossDifference:
    """Loss of candidates minus loss of a baseline after the same tokens of the same data.

    Attributes:
        mean_nats: Expected difference, positive where the candidate is worse.
        standard_deviation_nats: Its standard deviation.
    """

    mean_nats: Numeric
    standard_deviation_nats: Numeric

    @property
    def low_nats(self) -> Numeric:
        """5 % quantile."""
        return self.mean_nats - Z_90 * self.standard_deviation_nats

    @property
    def high_nats(self) -> Numeric:
        """95 % quantile."""
        return self.mean_nats + Z_90 * self.standard_deviation_nats

    @property
    def is_free(self) -> Any:
        """Whether a candidate is at most ``FREE_NATS`` worse with a probability of 95 %."""
        return self.high_nats <= FREE_NATS


@dataclass(frozen=True, kw_only=True, eq=False)
class TokensRatio:
    """Tokens that candidates need for the loss of a baseline, over the baseline's tokens.

    Attributes:
        ratio: Expected ratio; infinite where the loss cannot be reached.
        log_standard_deviation: Standard deviation of its logarithm; 0 where the ratio is infinite.
    """

    ratio: Numeric
    log_standard_deviation: Numeric


@dataclass(frozen=True, kw_only=True, eq=False)
class LossLaw:
    """The law with the coefficients of one recipe: data, schedule and tokenizer.

    Attributes:
        name: Name of the recipe.
        coefficients: Value of each of ``COEFFICIENTS``.
        covariance: Covariance of the coefficients, in the order of ``COEFFICIENTS``.
        scatter_nats: Standard deviation of a shape's loss from the law; the error is the same after all tokens. [nats]
        scatter_length: Distance in (ln hidden_size, ln num_layers) from which on the errors of two shapes are nearly
            independent.
        parameters_range: Smallest and largest size of the fitted models, parameters without embeddings.
        tokens_range: Fewest and most training tokens of the fitted losses.
        provenance: Source, rows, split and errors of the fit.
    """

    name: str
    coefficients: Mapping[str, float]
    covariance: Float[np.ndarray, "coefficients coefficients"]
    scatter_nats: float
    scatter_length: float
    parameters_range: tuple[float, float]
    tokens_range: tuple[float, float]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def loss_nats(self, shape: ShapeForLoss, train_tokens: Numeric) -> Numeric:
        """Expected loss per token of a shape. [nats]

        Args:
            shape: One or many shapes.
            train_tokens: Tokens that each is trained on.
        """
        terms = evaluate_terms(self.coefficients, shape, train_tokens)
        loss: Numeric = self.coefficients["floor_nats"] + terms.capacity_nats + terms.token_nats
        return loss

    def standard_deviation_nats(self, shape: ShapeForLoss, train_tokens: Numeric) -> Numeric:
        """Standard deviation of the expected loss of a shape, scatter included. [nats]"""
        variance = self._variance(
            derivatives(self.coefficients, evaluate_terms(self.coefficients, shape, train_tokens))
        )
        deviation: Numeric = np.sqrt(variance + self.scatter_nats**2)
        return deviation

    def difference(self, candidates: ShapeForLoss, baseline: ShapeForLoss, train_tokens: Numeric) -> LossDifference:
        """Loss of candidates minus that of a baseline after the same tokens; arguments as in ``compare``."""
        return self.compare(candidates, baseline, train_tokens)[0]

    def tokens_ratio(self, candidates: ShapeForLoss, baseline: ShapeForLoss, train_tokens: Numeric) -> TokensRatio:
        """Tokens that candidates need for the baseline's loss, over the baseline's; arguments as in ``compare``."""
        return self.compare(candidates, baseline, train_tokens)[1]

    def compare(
        self, candidates: ShapeForLoss, baseline: ShapeForLoss, train_tokens: Numeric
    ) -> tuple[LossDifference, TokensRatio]:
        """Compare candidates with a baseline: loss after the same tokens, and tokens for the same loss.

        Args:
            candidates: The models to compare; tables are fastest in blocks of some thousands.
            train_tokens: Tokens that the baseline is trained on.
        """
        one, other = (evaluate_terms(self.coefficients, shape, train_tokens) for shape in (candidates, baseline))
        mean_nats = (one.capacity_nats - other.capacity_nats) + (one.token_nats - other.token_nats)
        pairs = zip(derivatives(self.coefficients, one), derivatives(self.coefficients, other), strict=True)
        variance = self._variance([left - right for left, right in pairs])
        deviation_nats = np.sqrt(variance + self._scatter_variance(candidates, baseline))
        # The token term of the candidate at the baseline's loss; its slope in ln D there gives the deviation.
        exponent, left_nats = self.coefficients["token_exponent"], one.token_nats - mean_nats
        reaches = left_nats > 0.0
        left_nats = np.where(reaches, left_nats, 1.0)
        return (
            LossDifference(mean_nats=mean_nats, standard_deviation_nats=deviation_nats),
            TokensRatio(
                ratio=np.where(reaches, (one.token_nats / left_nats) ** (1.0 / exponent), np.inf)[()],
                log_standard_deviation=np.where(reaches, deviation_nats / (exponent * left_nats), 0.0)[()],
            ),
        )

    def tokens_to_reach(self, shape: ShapeForLoss, loss_nats: Numeric) -> Numeric:
        """Tokens after which a shape is expected to reach a loss; infinite where it never does.

        Args:
            loss_nats: Loss to reach. [nats]
        """
        tokens: Numeric = REFERENCE_TOKENS * self.ratio_to_reach(shape, loss_nats, REFERENCE_TOKENS)
        return tokens

    def ratio_to_reach(self, shape: ShapeForLoss, loss_nats: Numeric, train_tokens: float) -> Any:
        """Ratio of the tokens with which a shape reaches a loss to ``train_tokens``; infinite where it never does.

        Args:
            shape: One or many shapes.
            loss_nats: Loss to reach. [nats]
            train_tokens: Denominator of the ratio.
        """
        terms = evaluate_terms(self.coefficients, shape, train_tokens)
        left_nats = (loss_nats - self.coefficients["floor_nats"]) - terms.capacity_nats
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # shapes that never reach it
            ratio = np.exp(np.log(terms.token_nats / left_nats) / self.coefficients["token_exponent"])
        return np.where(left_nats > 0.0, ratio, np.inf)[()]

    def _variance(self, slopes: list[Any]) -> Any:
        """Variance of a sum of coefficients times slopes. [nats^2]"""
        matrix = np.stack(np.broadcast_arrays(*slopes), axis=-1)
        return np.sum((matrix @ self._root) ** 2, axis=-1)

    @cached_property
    def _root(self) -> Float[np.ndarray, "coefficients coefficients"]:
        """Square root of the covariance: its product with its transpose is the covariance."""
        values, vectors = np.linalg.eigh(self.covariance)
        root: Float[np.ndarray, "coefficients coefficients"] = vectors * np.sqrt(np.maximum(values, 0.0))
        return root

    def scatter_covariance(self, one: ShapeForLoss, other: ShapeForLoss) -> Any:
        """Covariance of two shapes' deviations from the law: a variance for equal ones, 0 for distant ones. [nats^2]"""
        return self.scatter_nats**2 * np.exp(-0.5 * self._squared_distance(one, other))

    def _scatter_variance(self, one: ShapeForLoss, other: ShapeForLoss) -> Any:
        """Variance of the difference between two shapes' deviations from the law.

        It is 0 for equal shapes and twice the variance of one deviation for distant ones.
        """
        return 2.0 * self.scatter_nats**2 * -np.expm1(-0.5 * self._squared_distance(one, other))

    def _squared_distance(self, one: ShapeForLoss, other: ShapeForLoss) -> Any:
        """Squared distance of two shapes, in units of ``scatter_length``."""
        squared = (
            np.log(one.hidden_size / other.hidden_size) ** 2
            + np.log(one.num_layers / other.num_layers) ** 2
            + (_HEAD_DISTANCE_WEIGHT * np.log(one.head_dim / other.head_dim)) ** 2
        )
        return squared / self.scatter_length**2


def loss_recipes() -> tuple[str, ...]:
    """Names of the fitted recipes, the reference first."""
    return tuple(_read_laws())


_LAW_IN_USE: ContextVar[LossLaw | None] = ContextVar("loss law in use", default=None)


def load_loss_law(recipe: str = "") -> LossLaw:
    """Load the law of a recipe.

    Args:
        recipe: Name of a fitted recipe; empty for the law in use, the reference by default.

    Raises:
        CalibrationError: there is no recipe of this name.
    """
    used = _LAW_IN_USE.get()
    if used is not None and not recipe:
        return used
    recipe, laws = recipe or REFERENCE, _read_laws()
    if recipe not in laws:
        hint = close_names(recipe, laws)
        raise CalibrationError(
            f"unknown loss recipe {recipe!r}; {hint + ' ' if hint else ''}choose one of {', '.join(laws)}"
        )
    return laws[recipe]


@cache
def _read_laws() -> dict[str, LossLaw]:
    """Read the fitted laws by recipe."""
    raw = json.loads(resources.files("shapewright.prediction.loss").joinpath(_FILE).read_text(encoding="utf-8"))
    return {name: parse_law(name, law, raw["provenance"]) for name, law in raw["recipes"].items()}


def parse_law(name: str, raw: Mapping[str, Any], provenance: Mapping[str, Any]) -> LossLaw:
    """Build the law of a recipe from its record.

    Raises:
        CalibrationError: the record lacks a coefficient or is malformed.
    """
    try:
        return LossLaw(
            name=name,
            coefficients={key: float(raw["coefficients"][key]) for key in COEFFICIENTS},
            covariance=np.array(raw["covariance"], dtype=float).reshape(len(COEFFICIENTS), len(COEFFICIENTS)),
            scatter_nats=float(raw["scatter_nats"]),
            scatter_length=float(raw["scatter_length"]),
            parameters_range=_read_range(raw["parameters_range"]),
            tokens_range=_read_range(raw["tokens_range"]),
            provenance={**provenance, **raw.get("provenance", {})},
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CalibrationError(f"loss recipe {short_repr(name)} is malformed: {first_line(error)}") from error


def _read_range(raw: Any) -> tuple[float, float]:
    first, last = raw
    return float(first), float(last)


FILE_KIND = "shapewright loss law"
FILE_SCHEMA_VERSION = 2
_LARGEST_FILE_BYTES = 2**20
# Limits far outside of all fits, whose exponents are 0.1 to 0.7, curvatures up to 0.5, logarithms and variances up to
# 5 and 3.
_EXPONENTS = ("capacity_exponent", "token_exponent")
_SMALLEST_EXPONENT, _LARGEST_SLOPE, _LARGEST_COEFFICIENT = 0.01, 1.5, 10.0
_LARGEST_COVARIANCE, _LARGEST_NUMBER = 1e4, 1e20


def law_file_content(law: LossLaw) -> dict[str, Any]:
    """Return the content of a file with one law, as ``read_loss_law`` reads it."""
    return {
        "schema_version": FILE_SCHEMA_VERSION,
        "kind": FILE_KIND,
        "recipe": law.name,
        "law": {
            "coefficients": dict(law.coefficients),
            "covariance": law.covariance.tolist(),
            "scatter_nats": law.scatter_nats,
            "scatter_length": law.scatter_length,
            "parameters_range": list(law.parameters_range),
            "tokens_range": list(law.tokens_range),
        },
        "provenance": dict(law.provenance),
    }


def read_loss_law(path: str | Path) -> LossLaw:
    """Read the law of a user's own recipe, as 'shapewright calibrate --losses' writes it.

    Raises:
        CalibrationError: the file cannot be read, is something else, or is malformed.
    """
    hint = "give a file that 'shapewright calibrate --losses' has written"
    try:
        content = read_start(path, _LARGEST_FILE_BYTES + 1)
        raw = json.loads(content.decode("utf-8")) if len(content) <= _LARGEST_FILE_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise CalibrationError(f"loss law {path} cannot be read ({reason}); {hint}") from error
    if not isinstance(raw, dict) or raw.get("kind") != FILE_KIND or not isinstance(raw.get("law"), dict):
        raise CalibrationError(f"{path} is not a loss law; {hint}")
    if raw.get("schema_version") != FILE_SCHEMA_VERSION:
        raise CalibrationError(
            f"loss law {path} has schema version {short_repr(raw.get('schema_version'))}, known here is "
            f"{FILE_SCHEMA_VERSION}; fit it again with 'shapewright calibrate --losses'"
        )
    provenance = raw.get("provenance")
    law = parse_law(str(raw.get("recipe", "")), raw["law"], provenance if isinstance(provenance, dict) else {})
    if not _is_in_range(law):
        raise CalibrationError(f"loss law {path} has numbers out of range; {hint}")
    return law


def _is_in_range(law: LossLaw) -> bool:
    """Whether the numbers of a law are small enough that no loss overflows, for models of any size."""
    high = {
        name: _LARGEST_COEFFICIENT if name.startswith(("log_", "floor_")) else _LARGEST_SLOPE for name in COEFFICIENTS
    }
    low = {name: -most for name, most in high.items()} | dict.fromkeys(_EXPONENTS, _SMALLEST_EXPONENT)
    numbers = [*law.covariance.flat, *law.parameters_range, *law.tokens_range]
    return (
        all(low[name] <= value <= high[name] for name, value in law.coefficients.items())
        and bool(np.all(np.abs(numbers) <= _LARGEST_NUMBER) and np.all(np.abs(law.covariance) <= _LARGEST_COVARIANCE))
        and 0.0 <= law.scatter_nats <= _LARGEST_COEFFICIENT
        and _SMALLEST_EXPONENT <= law.scatter_length <= _LARGEST_COEFFICIENT
    )


@contextmanager
def using_loss_law(path: str | Path) -> Iterator[None]:
    """Predict losses with the law of a user's own recipe, in this thread.

    Args:
        path: File that 'shapewright calibrate --losses' has written.

    Raises:
        CalibrationError: the file cannot be read, is something else, or is malformed.
    """
    token = _LAW_IN_USE.set(read_loss_law(path))
    try:
        yield
    finally:
        _LAW_IN_USE.reset(token)
