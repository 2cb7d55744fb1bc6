"""Objectives of a search: what is minimized, in which phase, and over which training run."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import ConfigError, WorkloadError
from shapewright.core.ranges import check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, joined, with_fields
from shapewright.core.units import NATS_FROM_BITS
from shapewright.prediction.loss.effect import scale_to_baseline
from shapewright.prediction.loss.law import load_loss_law
from shapewright.prediction.loss.terms import ShapeForLoss
from shapewright.prediction.training_run import (
    FEWEST_TOKENS,
    MOST_TOKENS,
    SECONDS_PER_HOUR,
    check_price,
    count_chinchilla_tokens,
    require_a_step,
)

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.optimize.search.findings import Table
    from shapewright.prediction.predict import Prediction

    PerShape = Float[np.ndarray, " shapes"]

MOST_GPU_HOURS = 1e10
"""A million devices for a year."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a search minimizes.

    Attributes:
        name: Its name.
        phase: The phase that it is measured in.
        measures_step: Whether the time of a step counts (latency), instead of the time per token.
        measures_loss: Whether shapes are compared at equal loss, or by loss, instead of by speed at equal size.
        description: What it is, in one phrase.
    """

    name: str
    phase: str
    measures_step: bool = False
    measures_loss: bool = False
    description: str


OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective(
            name="time-to-loss", phase="train", measures_loss=True, description="device time to the baseline's loss"
        ),
        Objective(
            name="loss-at-budget",
            phase="train",
            measures_loss=True,
            description="loss after as much device time as the baseline's run takes",
        ),
        Objective(
            name="train-tokens-per-s", phase="train", description="training tokens per second, at equal parameters"
        ),
        Objective(name="prefill", phase="prefill", description="prefill tokens per second, at equal parameters"),
        Objective(
            name="decode-latency",
            phase="decode",
            measures_step=True,
            description="time of one decode step, at equal parameters",
        ),
        Objective(
            name="cost",
            phase="train",
            measures_loss=True,
            description="dollars to train to the baseline's loss, and to serve the tokens that are stated",
        ),
    )
}
"""What a search can minimize, by name."""

SPEED = "time"
"""Objective that stands for the throughput or latency of the phase, at equal parameters."""
# The objective that SPEED stands for in each phase; also the default where no training run is given.
_SPEED_OBJECTIVES = {"train": "train-tokens-per-s", "prefill": "prefill", "decode": "decode-latency"}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Objective of a search, and the training run after which losses are compared.

    The run is given by the tokens, the device hours or the final loss of the baseline; by default it has 20 tokens per
    parameter.

    Attributes:
        objective: A key of OBJECTIVES, or ``time`` for the throughput or latency of the phase. None selects
            ``loss-at-budget`` if the run is given by device hours, ``time-to-loss`` if it is given otherwise, and
            ``time`` without a run.
        train_tokens: Tokens that the baseline is trained on.
        gpu_hours: Device hours that the baseline is trained for.
        target_loss_nats: Loss that the baseline is trained to, in the recipe of the loss law. [nat]
        serve_tokens: Tokens that the model generates over its lifetime; ``cost`` includes serving them.
        usd_per_hour: Price of one device; required by ``cost``. [USD/h]

    Raises:
        ConfigError: the objective is not known, or the run is given twice.
        WorkloadError: a number is out of range, or has no effect.
    """

    objective: str | None = None
    train_tokens: float | None = None
    gpu_hours: float | None = None
    target_loss_nats: float | None = None
    serve_tokens: float | None = None
    usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.objective is not None and self.objective not in (SPEED, *OBJECTIVES):
            raise ConfigError(
                f"objective={self.objective!r} is not known; choose one of {', '.join((SPEED, *OBJECTIVES))}"
            )
        check_price(self.usd_per_hour)
        sizes: dict[str, tuple[Any, float, float, str]] = {
            "train_tokens": (self.train_tokens, FEWEST_TOKENS, MOST_TOKENS, "give tokens such as 300b"),
            "gpu_hours": (self.gpu_hours, 0.0, MOST_GPU_HOURS, "give device hours such as 10000"),
            "target_loss_nats": (self.target_loss_nats, 0.0, 20.0, "give nats per token such as 2.5"),
            "serve_tokens": (self.serve_tokens, FEWEST_TOKENS, MOST_TOKENS, "give tokens such as 1t"),
        }
        for name, (value, low, high, hint) in sizes.items():
            if value is not None:
                check_number(name, value, low, high, error=WorkloadError, hint=hint, exclude_low=low == 0.0)
        given = [name for name in ("train_tokens", "gpu_hours", "target_loss_nats") if getattr(self, name) is not None]
        if len(given) > 1:
            raise WorkloadError(
                joined(map(FieldName, given)) + " each fix the length of the training run", advice="give one of them"
            )
        if self.objective == "cost" and self.usd_per_hour is None:
            raise WorkloadError(
                "objective='cost' needs the price of a device", advice=with_fields("give {usd_per_hour}, such as 2.5")
            )
        if self.serve_tokens is not None and self.objective != "cost":
            raise WorkloadError(
                with_fields("{serve_tokens} has no effect without objective='cost'"),
                advice="omit it or give that objective",
            )

    @property
    def has_run(self) -> bool:
        """Whether the training run is given."""
        return any(value is not None for value in (self.train_tokens, self.gpu_hours, self.target_loss_nats))

    def resolve(self, phase: str | None) -> Objective:
        """Return the objective.

        Args:
            phase: The phase of the workload; None where it follows from the objective.

        Raises:
            WorkloadError: objective, phase and training run contradict each other.
        """
        if self.objective == SPEED:
            objective = OBJECTIVES[_SPEED_OBJECTIVES[phase or "train"]]
        elif self.objective is not None:
            objective = OBJECTIVES[self.objective]
            if phase not in (None, objective.phase):
                raise WorkloadError(
                    f"objective={objective.name} is measured in phase={objective.phase}, not in {phase}; give one of "
                    f"them"
                )
        elif phase in (None, "train") and self.gpu_hours is not None:
            objective = OBJECTIVES["loss-at-budget"]
        elif phase in (None, "train") and self.has_run:
            objective = OBJECTIVES["time-to-loss"]
        else:
            objective = OBJECTIVES[_SPEED_OBJECTIVES[phase or "train"]]
        for name in ("train_tokens", "gpu_hours", "target_loss_nats"):
            if getattr(self, name) is not None and objective.phase != "train":
                raise WorkloadError(
                    with_fields("{name} has no effect in {phase}", name=FieldName(name), phase=objective.phase),
                    advice="omit it or use phase='train'",
                )
        return objective

    def count_train_tokens(self, baseline: Prediction) -> float:
        """Return the tokens that the baseline is trained on.

        Raises:
            WorkloadError: the baseline does not reach the target, or the run is implausibly long or short.
        """
        if not self.has_run:
            return count_chinchilla_tokens(baseline.parameters.active)
        tokens = self._count_given_tokens(baseline)
        require_a_step(tokens, baseline)
        return tokens

    def _count_given_tokens(self, baseline: Prediction) -> float:
        if self.train_tokens is not None:
            return float(self.train_tokens)
        if self.gpu_hours is not None:
            tokens = self.gpu_hours * SECONDS_PER_HOUR * baseline.tokens_per_s_per_device
            if not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
                raise WorkloadError(
                    f"gpu_hours={self.gpu_hours:g} are {tokens:.3g} tokens for this model; give hours for "
                    f"{FEWEST_TOKENS} to {MOST_TOKENS:g} tokens"
                )
            return tokens
        assert self.target_loss_nats is not None
        law, shape = load_loss_law(), ShapeForLoss.of(baseline.config)
        tokens = float(law.tokens_to_reach(shape, self.target_loss_nats))
        if not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
            least, most = (float(law.loss_nats(shape, float(end))) for end in (MOST_TOKENS, FEWEST_TOKENS))
            hint = f"; a loss in nats per token is {NATS_FROM_BITS}" if self.target_loss_nats < least else ""
            raise WorkloadError(
                f"target_loss_nats={self.target_loss_nats:g} is out of reach: by the loss law (recipe {law.name!r}) "
                f"this model never falls below {least:.3g} nats, and has {min(most, 20.0):.3g} after the first token; "
                f"give a loss between them{hint}"
            )
        return tokens


@dataclass(frozen=True, kw_only=True)
class LossRanking:
    """Ranks shapes by loss and device time together.

    Attributes:
        objective: ``time-to-loss``, ``loss-at-budget`` or ``cost``.
        baseline: The baseline in the terms of the loss law.
        num_compared: Its parameters, as prediction.loss counts them to compare sizes.
        train_tokens: Tokens that it is trained on.
        token_s: Its time per token in training. [s]
        served_tokens_ratio: Tokens served for each token of training, times serving devices per training device.
    """

    objective: str
    baseline: ShapeForLoss
    num_compared: float
    train_tokens: float
    token_s: float
    served_tokens_ratio: float = 0.0

    def columns(self, shapes: ShapeForLoss, num_compared: Any) -> Table:
        """Return the columns that the costs of shapes are computed from, one row per shape.

        Args:
            num_compared: Their parameters, as prediction.loss counts them to compare sizes.
        """
        size_ratio = num_compared / self.num_compared
        shapes = scale_to_baseline(shapes, self.baseline, size_ratio)
        law = load_loss_law()
        target_nats = law.loss_nats(self.baseline, self.train_tokens)
        needed = np.asarray(law.ratio_to_reach(shapes, target_nats, self.train_tokens), dtype=float)
        table = {"tokens_ratio": needed, "size_ratio": np.broadcast_to(size_ratio, needed.shape)}
        if self.objective == "loss-at-budget":
            for spec in fields(shapes):
                table[spec.name] = np.broadcast_to(getattr(shapes, spec.name), table["tokens_ratio"].shape)
        return table

    def costs(self, token_s: PerShape, columns: Table) -> PerShape:
        """Return the costs of shapes, from their times per token in training; lower is better.

        Args:
            token_s: Time per token. [s]
            columns: From ``columns``, and ``served_s``, the time to serve a token, where tokens are served.

        Returns:
            Time per token of the baseline's run at equal size, served tokens included; for ``loss-at-budget`` the
            exponential of the loss above the baseline's.
        """
        if self.objective == "loss-at-budget":
            law = load_loss_law()
            shapes = ShapeForLoss(**{spec.name: columns[spec.name] for spec in fields(ShapeForLoss)})
            reached = law.loss_nats(shapes, self.train_tokens * self.token_s * columns["size_ratio"] / token_s)
            cost = np.exp(reached - law.loss_nats(self.baseline, self.train_tokens))
        else:
            cost = token_s / columns["size_ratio"] * columns["tokens_ratio"]
            if "served_s" in columns:
                cost = cost + self.served_tokens_ratio * columns["served_s"] / columns["size_ratio"]
        return np.asarray(cost, dtype=float)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that a shape must keep.

    Attributes:
        num_parameters: Target number of parameters.
        num_active: Target number of parameters that a token uses; None if only the total counts.
        tolerance_fraction: Accepted deviation of both.
        memory_bytes: Most memory of one device. [byte]
        token_s: Most time per token (or per step); slower shapes are dropped. [s]
        cost: Highest cost: time per token (or step) divided by active parameters, or the cost of ``ranking``. Division
            by parameters keeps smaller shapes from leading only because they are smaller.
        per_step: Whether times and costs are per step, instead of per token.
        ranking: Ranks by loss and time together; None for speed at equal size.
        least_costs: With several devices, the lowest cost on each; cost is then the largest ratio to them.
    """

    num_parameters: int
    num_active: int | None = None
    tolerance_fraction: float
    memory_bytes: float
    token_s: float
    cost: float
    per_step: bool = False
    ranking: LossRanking | None = None
    least_costs: tuple[float, ...] = ()
