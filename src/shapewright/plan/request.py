"""What a plan is asked for: devices, objective, and what is kept as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from shapewright.errors import LayoutError, close_names
from shapewright.fields import noted_fields
from shapewright.layout import PIPELINE_SCHEDULES, ParallelLayout
from shapewright.optimizers import OPTIMIZERS
from shapewright.workload import RECOMPUTE_MODES, Workload

OBJECTIVES = {
    "time": "the shortest step on all devices",
    "cost": "the least device time for a token, on as many of the devices as cost no more",
    "memory": "the least memory of a device, on all devices",
}
SHORT_NAMES = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
    "sp": "sequence_parallel",
    "vpp": "virtual_pipeline",
    "zero": "zero_stage",
    "schedule": "pipeline_schedule",
    "micro_batch": "micro_batch_size",
}
OFFLOADS = ("offload_activations", "offload_optimizer")
"""Fields of the workload that a plan chooses where both values are kept; false otherwise."""
_OF_WORKLOAD = ("micro_batch_size", "recompute", *OFFLOADS)
_CUTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
SEARCHED = (*(spec.name for spec, _ in noted_fields(ParallelLayout) if spec.name not in _CUTS), *_OF_WORKLOAD)
"""Fields that a plan chooses."""

LARGEST_JOB = 2**20
_WORDS: Mapping[str, tuple[str, ...]] = {"pipeline_schedule": PIPELINE_SCHEDULES, "recompute": RECOMPUTE_MODES}
_TRUE_OR_FALSE = ("sequence_parallel", *OFFLOADS)
_TRUTHS = {"true": True, "false": False, "on": True, "off": False, "1": True, "0": False}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is asked for.

    Attributes:
        num_devices: Devices of the job.
        objective: A key of OBJECTIVES.
        kept: Values that searched fields may take; a field that is missing is free.
        top: Plans to list.
        usd_per_hour: Price of one device. [USD/h]
        straggler_factor: Expected step over the predicted one, for devices that fall behind; it changes no order.
        headroom_fraction: Share of a device's memory that a plan must leave free.

    Raises:
        LayoutError: devices, objective or kept values make no sense.
    """

    num_devices: int
    objective: str = "time"
    kept: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    top: int = 10
    usd_per_hour: float | None = None
    straggler_factor: float = 1.0
    headroom_fraction: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= LARGEST_JOB:
            raise LayoutError(f"gpus={self.num_devices} must be a whole number from 1 to {LARGEST_JOB}")
        if self.objective not in OBJECTIVES:
            raise LayoutError(f"objective={self.objective!r} is not known; choose one of {', '.join(OBJECTIVES)}")
        if self.top < 1:
            raise LayoutError(f"top={self.top} must be 1 or more")
        if self.usd_per_hour is not None and not (isfinite(self.usd_per_hour) and self.usd_per_hour > 0.0):
            raise LayoutError(f"usd_per_hour={self.usd_per_hour:g} must be above 0")
        if not 1.0 <= self.straggler_factor < 100.0:
            raise LayoutError(f"straggler_factor={self.straggler_factor:g} must be from 1 to 100; 1 is none")
        if not 0.0 <= self.headroom_fraction < 1.0:
            raise LayoutError(f"headroom={self.headroom_fraction:g} must be a share from 0 to 1, such as 0.1 or 10%")
        for name in self.kept:
            if name not in SEARCHED:
                hint = close_names(name, SEARCHED)
                raise LayoutError(
                    f"a plan does not choose {name!r}; {hint + ' ' if hint else ''}it chooses {', '.join(SEARCHED)}"
                )

    def allows(self, name: str, value: Any) -> bool:
        """Whether a field may take a value."""
        return name not in self.kept or value in self.kept[name]


def read_kept(name: str, values: str) -> tuple[str, tuple[Any, ...]]:
    """Read a restriction such as ``tp=4,8``.

    Returns:
        The field's name and the values it may take.

    Raises:
        LayoutError: the field is not searched, or a value is none of its kind.

    >>> read_kept("tp", "4,8"), read_kept("schedule", "1f1b")
    (('tensor_parallel', (4, 8)), ('pipeline_schedule', ('1f1b',)))
    """
    field_name = SHORT_NAMES.get(name, name.replace("-", "_"))
    if field_name not in SEARCHED:
        known = (*SHORT_NAMES, "recompute", *OFFLOADS)
        hint = close_names(name, known)
        raise LayoutError(
            f"--keep {name}: a plan does not choose it; {hint + ' ' if hint else ''}it chooses {', '.join(known)}"
        )
    return field_name, tuple(_read_value(field_name, part.strip()) for part in values.split(",") if part.strip())


def _read_value(field_name: str, text: str) -> Any:
    if field_name in _WORDS:
        if text not in _WORDS[field_name]:
            allowed = ", ".join(_WORDS[field_name])
            raise LayoutError(f"--keep {field_name}={text!r} is not known; choose among {allowed}")
        return text
    if field_name in _TRUE_OR_FALSE:
        if text.lower() not in _TRUTHS:
            raise LayoutError(f"--keep {field_name}={text!r} is neither true nor false; give one of them or both")
        return _TRUTHS[text.lower()]
    if not text.isascii() or not text.isdigit():
        raise LayoutError(f"--keep {field_name}={text!r} is no whole number; give one or more, such as 4,8")
    return int(text)


def keep_given(
    keep: Mapping[str, Sequence[Any]], workload: Mapping[str, Any], layout: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Restrictions together: lists of values, and fields that were given one value.

    Raises:
        LayoutError: one field twice under values that exclude each other, or a value out of its range.
    """
    counted = [name for name in _CUTS if layout.get(name) or any(keep.get(name, ()))]
    if counted:
        raise LayoutError(
            f"a plan counts no ends of the model as layers; leave {' and '.join(counted)} out, and ask predict and "
            f"memory about such a layout"
        )
    single = {**layout, **{name: workload[name] for name in _OF_WORKLOAD if name in workload}}
    kept = {name: tuple(values) for name, values in keep.items()}
    for name in _CUTS:  # kept false, as they always are
        single.pop(name, None)
        kept.pop(name, None)
    for name, value in single.items():
        if value is None:
            continue
        if value not in kept.get(name, (value,)):
            allowed = ", ".join(map(str, kept[name]))
            raise LayoutError(f"{name}={value} is asked for, and only {allowed} may be kept; give one of the two")
        kept[name] = (value,)
    smallest, largest = {"zero_stage": 0}, {"zero_stage": 3}
    for name, values in kept.items():
        if name in _WORDS or name in _TRUE_OR_FALSE:
            continue
        for value in values:
            if value is None and name == "expert_tensor_parallel":  # the tensor axis' own, as in a layout
                continue
            if not isinstance(value, int) or not smallest.get(name, 1) <= value <= largest.get(name, LARGEST_JOB):
                raise LayoutError(
                    f"{name}={value!r} must be a whole number from {smallest.get(name, 1)} to "
                    f"{largest.get(name, LARGEST_JOB)}"
                )
    return kept


def offload_choices(kept: Mapping[str, tuple[Any, ...]], workload: Workload) -> dict[str, tuple[Any, ...]]:
    """What is kept, with and without the host's memory where neither was asked for.

    No stack keeps states on a host for optimisers that multiply whole matrices (docs/decisions/0005).
    """
    names = OFFLOADS if not OPTIMIZERS[workload.optimizer].newton_schulz_steps else OFFLOADS[:1]
    return {**dict.fromkeys(names, (False, True)), **kept}
