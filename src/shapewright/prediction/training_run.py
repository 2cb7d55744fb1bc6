"""A training run: its length, its learning rate, and its cost in device hours, energy and money from a step's time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.errors import WorkloadError
from shapewright.core.ranges import check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields

if TYPE_CHECKING:
    from shapewright.prediction.predict import Prediction

SECONDS_PER_HOUR = 3600.0
_WATTS_PER_KILOWATT = 1000.0
LOWEST_USD_PER_HOUR, HIGHEST_USD_PER_HOUR = 1e-3, 1e6
FEWEST_TOKENS, MOST_TOKENS = 1, 10**17
CHINCHILLA_TOKENS_PER_PARAMETER = 20.0
"""Tokens per parameter of a compute-optimal run. Source: arXiv 2203.15556, table 3 (20.2 to 22.0 for 0.4 to 175 B, and
1.4 T tokens for the 70 B model that it trains); only active parameters count."""
_RATE_FACTOR, _RATE_EXPONENT = 0.3118, -0.1250
_USUAL_WARMUP_STEPS, _MOST_WARMUP_FRACTION, _FINAL_FRACTION = 2000, 0.05, 0.1


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Length of a training run, and the price of its devices.

    Attributes:
        train_tokens: Tokens of the whole run.
        usd_per_hour: Price of one device hour; None where unknown. [USD/h]

    Raises:
        WorkloadError: a number is out of range.
    """

    train_tokens: int
    usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        check_number("train_tokens", self.train_tokens, FEWEST_TOKENS, MOST_TOKENS, error=WorkloadError)
        check_price(self.usd_per_hour)


def count_chinchilla_tokens(num_parameters: float) -> float:
    """Return the tokens of a compute-optimal run: 20 per parameter.

    >>> count_chinchilla_tokens(70e9)
    1400000000000.0

    Source: arXiv 2203.15556, table 3.
    """
    return CHINCHILLA_TOKENS_PER_PARAMETER * num_parameters


def check_price(usd_per_hour: float | None) -> None:
    """Check the price of a device hour.

    Raises:
        WorkloadError: the price is out of range.
    """
    if usd_per_hour is None:
        return
    hint = "give the dollars per device and hour, such as 2.5"
    check_number(
        "usd_per_hour", usd_per_hour, LOWEST_USD_PER_HOUR, HIGHEST_USD_PER_HOUR, error=WorkloadError, hint=hint
    )


def require_a_step(train_tokens: float, prediction: Prediction) -> None:
    """Refuse a run that is shorter than one optimizer step.

    Raises:
        WorkloadError: it is.
    """
    if train_tokens < prediction.tokens_per_step:
        usual = round(count_chinchilla_tokens(prediction.parameters.active))
        raise WorkloadError(
            f"a run of {train_tokens:,.0f} tokens is shorter than one step of {prediction.tokens_per_step:,}",
            advice=with_fields("give {train_tokens} for many steps, such as {usual}, 20 per parameter", usual=usual),
        )


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Cost of a training run, or the difference between two runs.

    Attributes:
        device_hours: Hours summed over all devices.
        energy_kwh: Energy at the board power of the data sheet, an upper bound; None where the data sheet gives no
            power. [kWh]
        usd: Price of the device hours; None where no price was given.
    """

    device_hours: float
    energy_kwh: float | None
    usd: float | None

    def scaled(self, factor: float) -> RunCost:
        """Multiply every cost by a factor."""
        return RunCost(
            device_hours=factor * self.device_hours,
            energy_kwh=None if self.energy_kwh is None else factor * self.energy_kwh,
            usd=None if self.usd is None else factor * self.usd,
        )


def estimate_run_cost(prediction: Prediction, run: TrainingRun) -> RunCost:
    """Estimate the cost of a run at the predicted speed, without evaluation, checkpoints and failures."""
    hours = run.train_tokens / prediction.tokens_per_s_per_device / SECONDS_PER_HOUR
    watts = prediction.device.tdp_watts
    return RunCost(
        device_hours=hours,
        energy_kwh=None if watts is None else hours * watts / _WATTS_PER_KILOWATT,
        usd=None if run.usd_per_hour is None else hours * run.usd_per_hour,
    )


@dataclass(frozen=True, kw_only=True)
class RunSchedule:
    """Steps of a run and the settings of AdamW: a linear warm-up, then a cosine decay to the final learning rate.

    Attributes:
        num_steps: Optimizer steps.
        warmup_steps: Steps with a rising learning rate.
        learning_rate: Largest learning rate.
        final_learning_rate: Learning rate of the last step.
        weight_decay: Decoupled weight decay.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        gradient_clip: Largest norm of the gradient.
    """

    num_steps: int
    warmup_steps: int
    learning_rate: float
    final_learning_rate: float
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    gradient_clip: float = 1.0


def usual_schedule(num_parameters: int, train_tokens: float, num_steps: int) -> RunSchedule:
    """Return a schedule for a run, as published models had it; no prediction depends on it.

    The learning rate is 0.3118 C^-0.1250 with C = 6 * parameters * tokens. It rises for 2,000 steps, at most 5 % of
    the run, and falls to a tenth.

    Source: learning rate: arXiv 2401.02954 (DeepSeek LLM), eq. 1; the rest: arXiv 2307.09288 (Llama 2), section 2.2.

    >>> schedule = usual_schedule(3_000_000_000, 300e9, 71_526)
    >>> round(schedule.learning_rate, 6), schedule.warmup_steps
    (0.000599, 2000)
    """
    rate = float(f"{_RATE_FACTOR * (6.0 * num_parameters * train_tokens) ** _RATE_EXPONENT:.3g}")
    return RunSchedule(
        num_steps=num_steps,
        warmup_steps=min(_USUAL_WARMUP_STEPS, int(_MOST_WARMUP_FRACTION * num_steps)),
        learning_rate=rate,
        final_learning_rate=float(f"{_FINAL_FRACTION * rate:.3g}"),
    )


def estimate_saving(cost: RunCost, speedup_factor: float) -> RunCost:
    """Estimate how much of a run's cost a speed-up saves.

    >>> estimate_saving(RunCost(device_hours=120.0, energy_kwh=None, usd=None), 1.25).device_hours
    24.0
    """
    return cost.scaled((speedup_factor - 1.0) / speedup_factor)
