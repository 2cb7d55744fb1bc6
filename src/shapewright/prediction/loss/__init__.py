"""Loss by shape: a law of the training loss by parameters, tokens and shape, and the training time to reach a loss."""

from shapewright.prediction.loss.effect import (
    LossEffect,
    NetSpeedup,
    count_active_parameters,
    describe_extrapolation,
    estimate_loss_effect,
    has_loss_law,
    is_far_outside,
    keeps_loss,
    net_speedup,
    scale_to_baseline,
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
    "count_active_parameters",
    "describe_extrapolation",
    "estimate_loss_effect",
    "has_loss_law",
    "is_far_outside",
    "keeps_loss",
    "load_loss_law",
    "net_speedup",
    "scale_to_baseline",
]
