"""Experiments: small models to train, whose losses would decide between shapes."""

from shapewright.optimize.experiments.propose import ExperimentPlan, Question, experiments_of, propose_experiments
from shapewright.optimize.experiments.small_models import Experiment, scale_down

__all__ = ["Experiment", "ExperimentPlan", "Question", "experiments_of", "propose_experiments", "scale_down"]
