"""What a whole training run takes: device hours, energy and money, from the time of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.errors import WorkloadError
from shapewright.integers import is_number

if TYPE_CHECKING:
    from shapewright.predict import Prediction

_SECONDS_PER_HOUR = 3600.0
_WATTS_PER_KILOWATT = 1000.0
LOWEST_USD_PER_HOUR, HIGHEST_USD_PER_HOUR = 1e-3, 1e6
FEWEST_TOKENS, MOST_TOKENS = 1, 10**17


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """A training run.

    Attributes:
        train_tokens: Tokens of the whole run.
        usd_per_hour: Price of one device for an hour, None where it is not known. [USD/h]

    Raises:
        WorkloadError: a number out of range.
    """

    train_tokens: int
    usd_per_hour: float | None = None

    def __post_init__(self) -> None:
        if not FEWEST_TOKENS <= self.train_tokens <= MOST_TOKENS:
            raise WorkloadError(
                f"--train-tokens {self.train_tokens} is out of range; give from 1 to {MOST_TOKENS:.0e}, such as 2t"
            )
        check_price(self.usd_per_hour)


def check_price(usd_per_hour: float | None) -> None:
    """Refuse a price that is none.

    Raises:
        WorkloadError: it is out of range.
    """
    if usd_per_hour is None:
        return
    if not is_number(usd_per_hour, LOWEST_USD_PER_HOUR, HIGHEST_USD_PER_HOUR):
        raise WorkloadError(
            f"--usd-per-hour {usd_per_hour!r} is out of range; give from {LOWEST_USD_PER_HOUR:g} to "
            f"{HIGHEST_USD_PER_HOUR:g} dollars for one device and hour, such as 2.5"
        )


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What a training run takes, or what another one saves of it.

    Attributes:
        device_hours: Hours of one device, over all devices.
        energy_kwh: Energy at the board power of the data sheet, so at most that of the devices; None where the sheet
            gives no power. [kWh]
        usd: Price of the hours; None where no price was given.
    """

    device_hours: float
    energy_kwh: float | None
    usd: float | None

    def scaled(self, factor: float) -> Bill:
        """So many times as much."""
        return Bill(
            device_hours=factor * self.device_hours,
            energy_kwh=None if self.energy_kwh is None else factor * self.energy_kwh,
            usd=None if self.usd is None else factor * self.usd,
        )


def bill_run(prediction: Prediction, horizon: Horizon) -> Bill:
    """What a run takes at the predicted speed, without evaluation, checkpoints and failures."""
    hours = horizon.train_tokens / prediction.tokens_per_s_per_device / _SECONDS_PER_HOUR
    watts = prediction.device.tdp_watts
    return Bill(
        device_hours=hours,
        energy_kwh=None if watts is None else hours * watts / _WATTS_PER_KILOWATT,
        usd=None if horizon.usd_per_hour is None else hours * horizon.usd_per_hour,
    )


def saved_by(bill: Bill, speedup_factor: float) -> Bill:
    """What a run that is so many times as fast saves of a bill.

    >>> saved_by(Bill(device_hours=120.0, energy_kwh=None, usd=None), 1.25).device_hours
    24.0
    """
    return bill.scaled((speedup_factor - 1.0) / speedup_factor)
