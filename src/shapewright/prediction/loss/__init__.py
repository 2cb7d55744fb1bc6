"""Loss by shape: a law of training loss over parameters, tokens and shape, and the time to a loss that follows."""

from shapewright.prediction.loss.effect import (
    LossEffect,
    NetSpeedup,
    as_compared,
    count_compared,
    describe_extrapolation,
    has_loss_law,
    is_far_outside,
    is_free_change,
    judge_change,
    net_speedup,
)
from shapewright.prediction.loss.law import LossDifference, LossLaw, TokensRatio, load_loss_law
from shapewright.prediction.loss.terms import ShapeForLoss

__all__ = [
    "LossDifference",
    "LossEffect",
    "LossLaw",
    "NetSpeedup",
    "ShapeForLoss",
    "TokensRatio",
    "as_compared",
    "count_compared",
    "describe_extrapolation",
    "has_loss_law",
    "is_far_outside",
    "is_free_change",
    "judge_change",
    "load_loss_law",
    "net_speedup",
]
