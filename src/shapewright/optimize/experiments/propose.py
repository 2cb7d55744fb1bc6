"""Propose experiments: the cheapest small models whose losses would decide whether a changed shape is better.

A change of shape is undecided if the 90 % interval of its net speed-up includes 1. The coefficients of the loss law
have a normal distribution with a known covariance, and shapes deviate from the law by a Gaussian process over width and
depth. Losses that are not measured yet and the loss difference at full size therefore have a joint normal distribution:
the variance that remains after small runs is known beforehand. Their mean is not, so a set of runs decides a question
only with some probability. Errors of the step time remain; 'search --verify' measures those.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import erf, exp, inf, log, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.errors import ConfigError
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.optimize.experiments.small_models import Experiment, make_experiment, scale_down
from shapewright.optimize.search.result import SearchResult
from shapewright.prediction.loss.effect import count_active_parameters, keeps_loss, net_speedup, scale_to_baseline
from shapewright.prediction.loss.law import Z_90, LossLaw, load_loss_law
from shapewright.prediction.loss.terms import ShapeForLoss, derivatives, evaluate_terms

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.design.result import Design, DesignResult
    from shapewright.optimize.search.result import Candidate
    from shapewright.prediction.speedup import Speedup

# Sizes of small models that are considered, without embeddings. [parameter]
_SIZES = tuple(4e6 * 4.0**step for step in range(6))
_LARGEST_SIZE_FRACTION = 0.5
_MOST_SIZES, _MOST_SEEDS = 3, 3
# Standard deviation of the loss between seeds of one model, without the shift that a seed causes in all models. Source:
# docs/proxy-losses.md, seventeen models with two seeds: 0.0111 nats.
SEED_NATS = 0.011
# Losses of a user's data are offset from the law's by an unknown amount at each size. [nat]
_OFFSET_NATS = 1.0
# A set of runs is proposed if it settles a question with this probability.
ENOUGH_CHANCE = 0.8
# Below this probability none is proposed.
_LEAST_CHANCE = 0.05
# Smaller differences of that probability are not worth a larger set.
_SAME_CHANCE = 0.03
# Most that a set of runs may cost, as a share of the full run.
_MOST_COST_FRACTION = 0.05
# If no set is proposed, the cheapest one is named that narrows the interval nearly as much as any set within this share
# of the cost.
_NAMED_COST_FRACTION, _NEARLY_AS_MUCH = 0.01, 0.9
_MOST_CONTENDERS = 5
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """An undecided change of shape, and how much experiments would reduce its uncertainty.

    Attributes:
        rank: Place of the shape among the contenders, from 1.
        net_low: Lower end of the 90 % interval of its net speed-up, now.
        net_high: Upper end.
        after_low: Lower end after the experiments, or after ``narrowing``, if the losses are as expected.
        after_high: Upper end.
        chance_settled: Probability that the interval then excludes 1; 0 without experiments.
        experiments: Names of the runs that it needs.
        narrowing: If no runs are likely to decide it, names of those that narrow it most within a hundredth of the cost
            of the full training; they are not proposed.
        narrowing_gpu_hours: Predicted time of these runs on one device. [h]
    """

    rank: int
    net_low: float
    net_high: float
    after_low: float
    after_high: float
    chance_settled: float
    experiments: tuple[str, ...]
    narrowing: tuple[str, ...] = ()
    narrowing_gpu_hours: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ExperimentPlan:
    """Proposed experiments.

    Attributes:
        experiments: Models to train, the smallest first; runs that several questions need are listed once.
        questions: The undecided changes that were considered.
        gpu_hours: Predicted time of all experiments on one device. [h]
        full_gpu_hours: Predicted time of training the baseline at full size. [h]
        why_none: Why no experiment is proposed; empty if some are.
        notes: Remarks, one line each.
    """

    experiments: tuple[Experiment, ...]
    questions: tuple[Question, ...]
    gpu_hours: float
    full_gpu_hours: float
    why_none: str
    notes: tuple[str, ...]


def propose_experiments(
    baseline: TransformerConfig,
    contenders: Sequence[tuple[TransformerConfig, Speedup]],
    *,
    train_tokens: float,
    full_gpu_hours: float,
    device: Device,
    law: LossLaw | None = None,
) -> ExperimentPlan:
    """Propose the cheapest small models that would settle undecided changes of shape.

    Args:
        baseline: The shape to keep or change.
        contenders: Changed shapes with the ratio of their training throughputs, best first.
        train_tokens: Tokens that the baseline is trained on.
        full_gpu_hours: Predicted time of that training, over all devices. [h]
        device: Device that the small models would be trained on.
        law: Law of loss; default: the reference recipe.
    """
    law = law or load_loss_law()
    planner = _Planner(baseline, train_tokens, full_gpu_hours, device, law)
    notes: list[str] = []
    runs: dict[str, Experiment] = {}
    questions: list[Question] = []
    why_none = "no shape is undecided by its loss"
    for rank, (config, speedup) in enumerate(contenders, start=1):
        if len(questions) == _MOST_CONTENDERS:
            notes.append(f"the {_MOST_CONTENDERS} best undecided shapes are considered")
            break
        if keeps_loss(baseline, config):
            continue
        if config.is_moe or config.is_mla or config.stack != "decoder":
            why_none = "experts, latent attention and encoders are not trained by 'shapewright proxy'"
            break
        question, chosen = planner.assess(rank, config, speedup)
        if question is None:
            continue
        questions.append(question)
        why_none = f"none of at most {_MOST_COST_FRACTION:.0%} of the training cost is likely to settle a shape"
        for run in chosen:
            known = runs.get(run.name)
            runs[run.name] = run if known is None or known.num_seeds < run.num_seeds else known
    unsettled = [question for question in questions if question.chance_settled < ENOUGH_CHANCE]
    if unsettled:
        notes.append(
            f"{len(unsettled)} of {len(questions)} questions stay open with more than {1.0 - ENOUGH_CHANCE:.0%} "
            f"probability, whatever runs within {_MOST_COST_FRACTION:.0%} of the cost of the full training find: most "
            "of what is unsure is scatter of single shapes about the law, which shows near the full size alone, or "
            "step time, which 'search --verify' measures"
        )
    num_seeds = max((run.num_seeds for run in runs.values()), default=1)
    ordered = tuple(run.with_seeds(num_seeds) for run in sorted(runs.values(), key=lambda run: run.num_parameters))
    return ExperimentPlan(
        experiments=ordered,
        questions=tuple(questions),
        gpu_hours=sum(run.gpu_hours for run in ordered),
        full_gpu_hours=full_gpu_hours,
        why_none="" if ordered else why_none,
        notes=tuple(dict.fromkeys(notes)),
    )


def experiments_of(result: SearchResult | DesignResult) -> ExperimentPlan:
    """Propose experiments that would settle which of the shapes of a search or a design is better.

    Raises:
        ConfigError: the search does not compare training, or the loss law does not describe the model.
    """
    prediction = result.baseline.prediction
    shapes: Sequence[Candidate | Design]
    if isinstance(result, SearchResult):
        shapes, train_tokens = result.candidates, result.train_tokens
        if result.objective.phase != "train" or train_tokens is None:
            raise ConfigError(
                with_fields(
                    "experiments need a search that compares the training of decoders: give {train_tokens}, or leave "
                    "out a phase other than train"
                )
            )
    else:
        shapes, train_tokens = result.designs, result.baseline.effect.train_tokens
    return propose_experiments(
        prediction.config,
        [(shape.config, shape.speedup) for shape in shapes],
        train_tokens=train_tokens,
        full_gpu_hours=train_tokens / prediction.tokens_per_s_per_device / _SECONDS_PER_HOUR,
        device=prediction.device,
    )


class _RunSet(NamedTuple):
    """A set of runs, with the uncertainty that remains after them.

    Attributes:
        chance: Probability that they decide the question.
        hours: Their cost. [h]
        deviation: Standard deviation of the logarithm of the net speed-up after them.
        runs: The runs.
    """

    chance: float
    hours: float
    deviation: float
    runs: tuple[Experiment, ...]


class _Planner:
    """Chooses experiments for one baseline."""

    def __init__(
        self, baseline: TransformerConfig, train_tokens: float, full_gpu_hours: float, device: Device, law: LossLaw
    ) -> None:
        self.baseline, self.train_tokens, self.device, self.law = baseline, train_tokens, device, law
        self.baseline_shape = ShapeForLoss.of(baseline)
        self.most_hours = _MOST_COST_FRACTION * full_gpu_hours
        largest = _LARGEST_SIZE_FRACTION * float(self.baseline_shape.num_parameters)
        self.sizes = [size for size in _SIZES if size <= largest]
        self._made: dict[str, Experiment] = {}

    def assess(
        self, rank: int, config: TransformerConfig, speedup: Speedup
    ) -> tuple[Question | None, tuple[Experiment, ...]]:
        """Return the question about a shape and the experiments proposed for it; None if it is already decided."""
        law, baseline_shape = self.law, self.baseline_shape
        ratio = count_active_parameters(config, self.baseline.vocab_size) / count_active_parameters(
            self.baseline, self.baseline.vocab_size
        )
        shape = scale_to_baseline(ShapeForLoss.of(config), baseline_shape, ratio)
        needed = law.tokens_ratio(shape, baseline_shape, self.train_tokens)
        step_deviation = speedup.log_standard_deviation
        net = net_speedup(speedup.factor * ratio, needed, step_log_standard_deviation=step_deviation)
        if not 0.0 < net.low < 1.0 < net.high < inf:
            return None, ()
        before_nats = float(law.difference(shape, baseline_shape, self.train_tokens).standard_deviation_nats)
        # Deviation of the logarithm of the tokens needed per deviation of the loss.
        scale = float(needed.log_standard_deviation) / before_nats
        gain, before = log(float(net.mean)), float(np.hypot(needed.log_standard_deviation, step_deviation))
        sets: list[_RunSet] = []
        for chosen, num_seeds in self._list_choices():
            pairs = [self._make_pair(config, rank, num_parameters, num_seeds) for num_parameters in chosen]
            runs = tuple(run for pair in pairs for run in pair)
            hours = sum(run.gpu_hours for run in runs)
            if hours <= self.most_hours:
                after = float(np.hypot(scale * self._remaining_nats(shape, pairs), step_deviation))
                sets.append(_RunSet(_chance_settled(gain, before, after), hours, after, runs))
        no_runs = _RunSet(0.0, 0.0, before, ())
        # The cheapest set that is likely enough to decide the question, or nearly as likely as any.
        wanted = min(ENOUGH_CHANCE, max((one.chance for one in sets), default=0.0) - _SAME_CHANCE)
        enough = [one for one in sets if one.chance >= max(wanted, _LEAST_CHANCE)]
        best = min(enough, key=lambda one: one.hours, default=no_runs)
        cheap = [one for one in sets if one.hours <= _NAMED_COST_FRACTION / _MOST_COST_FRACTION * self.most_hours]
        least = before - _NEARLY_AS_MUCH * (before - min((one.deviation for one in cheap), default=before))
        narrows = [one for one in cheap if one.deviation <= least and not best.runs]
        narrowing = min(narrows, key=lambda one: one.hours, default=no_runs)
        after = (best if best.runs else narrowing).deviation
        question = Question(
            rank=rank,
            net_low=float(net.low),
            net_high=float(net.high),
            after_low=exp(gain - Z_90 * after),
            after_high=exp(gain + Z_90 * after),
            chance_settled=best.chance,
            experiments=tuple(run.name for run in best.runs),
            narrowing=tuple(run.name for run in narrowing.runs),
            narrowing_gpu_hours=narrowing.hours,
        )
        return question, best.runs

    def _list_choices(self) -> list[tuple[tuple[float, ...], int]]:
        """Return the combinations of sizes and numbers of seeds to consider."""
        return [
            (chosen, seeds)
            for count in range(1, _MOST_SIZES + 1)
            for chosen in combinations(self.sizes, count)
            for seeds in range(1, _MOST_SEEDS + 1)
        ]

    def _make_pair(
        self, config: TransformerConfig, rank: int, num_parameters: float, num_seeds: int
    ) -> tuple[Experiment, Experiment]:
        """Return the small models of the baseline and of a contender, of one size."""
        growth = self.law.coefficients["best_width_growth"]
        scale = num_parameters / float(self.baseline_shape.num_parameters)
        return (
            self._experiment(
                f"baseline-{_in_millions(num_parameters)}",
                scale_down(self.baseline, scale, growth),
                num_parameters,
                num_seeds,
            ),
            self._experiment(
                f"shape-{rank}-{_in_millions(num_parameters)}",
                scale_down(config, scale, growth, num_parameters),
                num_parameters,
                num_seeds,
            ),
        )

    def _experiment(self, name: str, config: TransformerConfig, num_parameters: float, num_seeds: int) -> Experiment:
        if name not in self._made:
            self._made[name] = make_experiment(name, config, num_parameters, self.device)
        return self._made[name].with_seeds(num_seeds)

    def _remaining_nats(self, shape: ShapeForLoss, pairs: list[tuple[Experiment, Experiment]]) -> float:
        """Return the standard deviation of the loss difference at full size that remains after some runs. [nat]"""
        law, shapes, slopes = self.law, list[ShapeForLoss](), []
        for base, other in pairs:
            own = ShapeForLoss.of(base.config)
            ratio = other.num_parameters / base.num_parameters
            shapes += [own, scale_to_baseline(ShapeForLoss.of(other.config), own, ratio)]
            slopes += [_slopes(law, each, base.train_tokens) for each in shapes[-2:]]
        matrix = np.array(slopes)
        size_of_run = np.repeat(np.arange(len(pairs)), 2)
        seeds = np.array([run.num_seeds for pair in pairs for run in pair])
        covariance = (
            matrix @ law.covariance @ matrix.T
            + np.array([[law.scatter_covariance(one, other) for other in shapes] for one in shapes])
            + np.diag(SEED_NATS**2 / seeds)
            + _OFFSET_NATS**2 * (size_of_run[:, None] == size_of_run)
        )
        slope = _slopes(law, shape, self.train_tokens) - _slopes(law, self.baseline_shape, self.train_tokens)
        shared = matrix @ law.covariance @ slope + np.array(
            [law.scatter_covariance(each, shape) - law.scatter_covariance(each, self.baseline_shape) for each in shapes]
        )
        before = float(law.difference(shape, self.baseline_shape, self.train_tokens).standard_deviation_nats) ** 2
        return sqrt(max(before - float(shared @ np.linalg.solve(covariance, shared)), 0.0))


def _slopes(law: LossLaw, shape: ShapeForLoss, train_tokens: float) -> Any:
    found = derivatives(law.coefficients, evaluate_terms(law.coefficients, shape, train_tokens))
    return np.array(found, dtype=float)


def _chance_settled(gain: float, before: float, after: float) -> float:
    """Return the probability that the 90 % interval after some experiments excludes 0.

    Args:
        gain: Expected value now.
        before: Standard deviation now.
        after: Standard deviation after the experiments.
    """
    mean_deviation = sqrt(max(before**2 - after**2, 1e-18))  # of the mean that the experiments will find
    return sum(0.5 * (1.0 + erf((sign * gain - Z_90 * after) / mean_deviation / sqrt(2.0))) for sign in (1.0, -1.0))


def _in_millions(num_parameters: float) -> str:
    return f"{num_parameters / 1e6:.0f}m"
