"""The request of a design: size and tokens or a budget, and the constraints on shapes and plans."""

from __future__ import annotations

from dataclasses import field
from math import log2
from typing import TYPE_CHECKING

from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.core.ranges import check_integer, check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, joined, with_fields
from shapewright.optimize.plan.request import PlanRequest
from shapewright.optimize.search.objective import Goal
from shapewright.optimize.search.request import DEFAULT_VARIED, SearchRequest, check_num_parameters
from shapewright.prediction.training_run import FEWEST_TOKENS, MOST_TOKENS, check_price

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_MOST_HOURS = 1e9
_BATCH_FACTOR, _BATCH_EXPONENT = 0.2920, 0.3271


@dataclass(frozen=True, kw_only=True)
class DesignRequest:
    """What to design.

    Attributes:
        num_devices: Devices of the job.
        num_parameters: Parameters of the model; None to choose them for the tokens and the budget.
        train_tokens: Tokens of the run; None for as many as the budget pays for.
        budget_device_hours: Hours summed over all devices that the run may take; None without a budget.
        usd_per_hour: Price of one device. [USD/h]
        headroom_fraction: Share of a device's memory that plans must leave free.
        straggler_factor: Ratio of the expected step to the predicted one, for slow devices.
        keep_plan: Values that fields of plans may take, see PlanRequest.kept.
        keep_shape: Values that fields of the shape must have, see SearchRequest.keep.
        tolerance_fraction: Largest deviation of a shape from the number of parameters.
        guard: Quality guard of the shapes.
        top: Designs to list.

    Raises:
        WorkloadError: neither size nor budget is given, or a number is out of range.
    """

    num_devices: int
    num_parameters: int | None = None
    train_tokens: int | None = None
    budget_device_hours: float | None = None
    usd_per_hour: float | None = None
    headroom_fraction: float = 0.0
    straggler_factor: float = 1.0
    keep_plan: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    keep_shape: Mapping[str, int] = field(default_factory=dict)
    tolerance_fraction: float = 0.02
    guard: str = "usual"
    top: int = 6

    def __post_init__(self) -> None:
        check_price(self.usd_per_hour)
        if self.num_parameters is not None:
            check_num_parameters(self.num_parameters)
        if self.train_tokens is not None:
            hint = "give a count such as 300b"
            check_integer("train_tokens", self.train_tokens, FEWEST_TOKENS, MOST_TOKENS, error=WorkloadError, hint=hint)
        if self.budget_device_hours is not None:
            check_number(
                "the budget in device hours",
                self.budget_device_hours,
                0,
                _MOST_HOURS,
                exclude_low=True,
                error=WorkloadError,
                hint="give hours, GPU hours or dollars that pay for at least one step",
            )
        elif self.num_parameters is None:
            raise WorkloadError(
                with_fields("nothing to design for: {num_parameters} is missing, and so is a budget to choose it for"),
                advice=with_fields(
                    "give {num_parameters} and {train_tokens}, such as 3b and 300b, or a budget of hours, GPU hours or "
                    "dollars"
                ),
            )
        elif self.train_tokens is None:
            raise WorkloadError(
                "the length of the run is missing",
                advice=with_fields(
                    "give {train_tokens}, such as 300b, or a budget of hours, GPU hours or dollars that it is "
                    "chosen for"
                ),
            )
        object.__setattr__(self, "keep_shape", self.search_request().keep)
        self.plan_request()

    def search_request(self, vary: tuple[str, ...] = DEFAULT_VARIED, top: int = 20) -> SearchRequest:
        """Return the request of a search for shapes of this size that reach the baseline's loss soonest."""
        return SearchRequest(
            vary=vary,
            keep=self.keep_shape,
            num_parameters=self.num_parameters,
            tolerance_fraction=self.tolerance_fraction,
            guard=self.guard,
            top=top,
            goal=Goal(train_tokens=self.train_tokens),
        )

    def plan_request(self, top: int = 3) -> PlanRequest:
        """Return the request of the plans of a shape.

        Raises:
            LayoutError: devices or kept values are invalid.
        """
        return PlanRequest(
            num_devices=self.num_devices,
            kept=self.keep_plan,
            top=top,
            usd_per_hour=self.usd_per_hour,
            straggler_factor=self.straggler_factor,
            headroom_fraction=self.headroom_fraction,
        )


def budget_device_hours(
    num_devices: int,
    *,
    hours: float | None = None,
    gpu_hours: float | None = None,
    usd: float | None = None,
    usd_per_hour: float | None = None,
) -> float | None:
    """Return a budget in hours summed over all devices; None without one.

    Args:
        hours: Hours that the job may take. [h]
        gpu_hours: Hours summed over all devices. [h]
        usd_per_hour: Price of one device. [USD/h]

    Raises:
        WorkloadError: more than one budget is given, dollars without a price, or a number that is not positive.
    """
    named = {"hours": hours, "gpu_hours": gpu_hours, "usd": usd}
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise WorkloadError(joined(map(FieldName, given)) + " are both budgets of the run", advice="give one of them")
    for name, value in given.items():
        hint = "give the budget of the whole run"
        check_number(name, value, 0, _MOST_HOURS, exclude_low=True, error=WorkloadError, hint=hint)
    if usd is not None:
        if usd_per_hour is None:
            raise WorkloadError(
                f"usd={usd:g} needs the price of a device", advice=with_fields("give {usd_per_hour}, such as 2.5")
            )
        check_price(usd_per_hour)
        return usd / usd_per_hour
    if hours is not None:
        check_integer("num_devices", num_devices, 1, error=LayoutError)
        return hours * num_devices
    return gpu_hours


def usual_batch_size(num_parameters: int, train_tokens: float, num_devices: int, seq_len: int) -> int:
    """Return the global batch size of a run by DeepSeek's fit, rounded so that the devices can share it.

    The tokens of a batch are 0.2920 C^0.3271 with C = 6 * parameters * tokens. The number of sequences is rounded to
    the number of devices times a power of two; in small runs to that number divided by a power of two.

    Source: arXiv 2401.02954 (DeepSeek LLM), eq. 1.

    >>> usual_batch_size(3_000_000_000, 300e9, 64, 4096)
    1024
    """
    tokens = _BATCH_FACTOR * (6.0 * num_parameters * train_tokens) ** _BATCH_EXPONENT
    power = round(log2(max(tokens / seq_len, 1.0) / num_devices))
    while power > 0 and num_devices * 2**power * seq_len > train_tokens:
        power -= 1
    while power < 0 and num_devices % 2**-power:
        power += 1
    return num_devices << power if power >= 0 else max(1, num_devices >> -power)
