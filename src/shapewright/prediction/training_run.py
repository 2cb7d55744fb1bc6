"""Cost of a training run in device hours, energy and money, from the time of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.core.errors import WorkloadError
from shapewright.core.ranges import check_number

if TYPE_CHECKING:
    from shapewright.prediction.predict import Prediction

_SECONDS_PER_HOUR = 3600.0
_WATTS_PER_KILOWATT = 1000.0
LOWEST_USD_PER_HOUR, HIGHEST_USD_PER_HOUR = 1e-3, 1e6
FEWEST_TOKENS, MOST_TOKENS = 1, 10**17


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training run.

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
    hours = run.train_tokens / prediction.tokens_per_s_per_device / _SECONDS_PER_HOUR
    watts = prediction.device.tdp_watts
    return RunCost(
        device_hours=hours,
        energy_kwh=None if watts is None else hours * watts / _WATTS_PER_KILOWATT,
        usd=None if run.usd_per_hour is None else hours * run.usd_per_hour,
    )


def estimate_saving(cost: RunCost, speedup_factor: float) -> RunCost:
    """Estimate how much of a run's cost a speed-up saves.

    >>> estimate_saving(RunCost(device_hours=120.0, energy_kwh=None, usd=None), 1.25).device_hours
    24.0
    """
    return cost.scaled((speedup_factor - 1.0) / speedup_factor)
