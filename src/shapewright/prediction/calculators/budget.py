"""Training budgets: tokens, FLOPs, days and cost.

Legend: P active parameters, T tokens, n devices, X achieved FLOP/s per device, c price of a device hour.

    Chinchilla tokens   T = 20 P
    FLOPs               6 P T, or 8 P T with full recomputation
    days                FLOPs / (n X) / 86400
    cost                hours * n * c
"""

from __future__ import annotations

from dataclasses import dataclass

from shapewright.core.errors import WorkloadError
from shapewright.core.ranges import check_integer, check_number
from shapewright.lowering.flops import count_rule_of_thumb_flops, estimate_training_s

CHINCHILLA_TOKENS_PER_PARAMETER = 20.0
"""Tokens per parameter of a compute-optimal run. Source: arXiv 2203.15556, table 3 (20.2 to 22.0 for 0.4 to 175 B, and
1.4 T tokens for the 70 B model that it trains); P counts active parameters only."""

_SECONDS_PER_DAY, _SECONDS_PER_HOUR = 86_400.0, 3600.0
_MOST_TOKENS = 1e18
_MOST_DEVICES = 2**24  # more than a layout can have


@dataclass(frozen=True, kw_only=True)
class TrainingBudget:
    """Budget of a training run.

    Attributes:
        num_parameters: Active parameters per token.
        num_tokens: Tokens of the run.
        flops: FLOPs of the run, recomputation included. [flop]
        num_devices: Number of devices; None if not given.
        flops_per_s_per_device: Achieved rate of each device; None if not given. [flop/s]
        training_s: Duration; None without devices or rate. [s]
        usd: Cost of the run; None without a price.
    """

    num_parameters: float
    num_tokens: float
    flops: float
    num_devices: int | None = None
    flops_per_s_per_device: float | None = None
    training_s: float | None = None
    usd: float | None = None

    @property
    def training_days(self) -> float | None:
        """Duration in days."""
        return None if self.training_s is None else self.training_s / _SECONDS_PER_DAY

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens per parameter; Chinchilla has 20."""
        return self.num_tokens / self.num_parameters


def count_chinchilla_tokens(num_parameters: float) -> float:
    """Return the tokens of a compute-optimal run: 20 per parameter.

    >>> count_chinchilla_tokens(70e9)
    1400000000000.0

    Source: arXiv 2203.15556, table 3.
    """
    return CHINCHILLA_TOKENS_PER_PARAMETER * num_parameters


def estimate_budget(
    num_parameters: float,
    num_tokens: float,
    *,
    num_devices: int | None = None,
    flops_per_s_per_device: float | None = None,
    usd_per_hour: float | None = None,
    recompute: str = "none",
) -> TrainingBudget:
    """Estimate the budget of a training run from its parameter count.

    Args:
        num_parameters: Active parameters per token.
        num_tokens: Tokens of the run.
        num_devices: Devices of the job.
        flops_per_s_per_device: Achieved rate of each device, recomputation included. [flop/s]
        usd_per_hour: Price of one device hour. [USD]
        recompute: ``full`` counts 8 P T instead of 6 P T.

    Raises:
        WorkloadError: a number is out of range.

    Source: arXiv 2001.08361, section 2.1; arXiv 2104.04473, eq. 4.

    >>> budget = estimate_budget(
    ...     175e9, 300e9, num_devices=1024, flops_per_s_per_device=140e12, usd_per_hour=2.0, recompute="full"
    ... )
    >>> round(budget.training_days, 1), round(budget.usd)
    (33.9, 1666667)
    """
    for word, value in (
        ("train_tokens", num_tokens),
        ("achieved rate", flops_per_s_per_device),
        ("usd_per_hour", usd_per_hour),
    ):
        if value is not None:
            check_number(word, value, 0, _MOST_TOKENS, exclude_low=True, error=WorkloadError)
    if num_devices is not None:
        hint = "give the devices of the whole job"
        check_integer("num_devices", num_devices, 1, _MOST_DEVICES, error=WorkloadError, hint=hint)
    training_s = None
    if num_devices is not None and flops_per_s_per_device is not None:
        training_s = estimate_training_s(
            num_parameters,
            num_tokens,
            num_devices=num_devices,
            flops_per_s_per_device=flops_per_s_per_device,
            recompute=recompute,
        )
    usd = None
    if training_s is not None and usd_per_hour is not None and num_devices is not None:
        usd = training_s / _SECONDS_PER_HOUR * num_devices * usd_per_hour
    return TrainingBudget(
        num_parameters=num_parameters,
        num_tokens=num_tokens,
        flops=count_rule_of_thumb_flops(num_parameters, num_tokens, recompute=recompute),
        num_devices=num_devices,
        flops_per_s_per_device=flops_per_s_per_device,
        training_s=training_s,
        usd=usd,
    )
