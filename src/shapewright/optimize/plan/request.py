"""The request of a plan: devices, objective, and the values that the fields of a plan may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import LayoutError, WorkloadError, close_names, short_repr
from shapewright.core.fields import documented_fields
from shapewright.core.ranges import check_integer, check_number, read_integer
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, joined, with_fields
from shapewright.hardware.nodes import check_allocation
from shapewright.prediction.training_run import HIGHEST_USD_PER_HOUR
from shapewright.workload.layout import ENDS_AS_LAYERS, PIPELINE_SCHEDULES, ParallelLayout
from shapewright.workload.optimizers import OPTIMIZERS
from shapewright.workload.workload import OFFLOADS, RECOMPUTE_MODES, Workload

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

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
PLANNED_WORKLOAD_FIELDS = ("micro_batch_size", "recompute", *OFFLOADS)
"""Fields of the workload that a plan chooses; offload if both values are kept, and false otherwise."""
PLAN_FIELDS = (
    *(spec.name for spec, _ in documented_fields(ParallelLayout) if spec.name not in ENDS_AS_LAYERS),
    *PLANNED_WORKLOAD_FIELDS,
)
"""Fields that a plan chooses."""

LARGEST_JOB = 2**20
_NAMED_VALUES: Mapping[str, tuple[str, ...]] = {"pipeline_schedule": PIPELINE_SCHEDULES, "recompute": RECOMPUTE_MODES}
_BOOLEAN_FIELDS = ("sequence_parallel", *OFFLOADS)
_BOOLEANS = {"true": True, "false": False, "on": True, "off": False, "1": True, "0": False}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        num_devices: Devices of the job.
        objective: A key of OBJECTIVES.
        kept: Values that fields of PLAN_FIELDS may take; a field that is missing here may take any.
        top: Number of plans to list.
        usd_per_hour: Price of one device. [USD/h]
        straggler_factor: Ratio of the expected step to the predicted one, for slow devices.
        headroom_fraction: Share of a device's memory that a plan must leave free.

    Raises:
        LayoutError: devices, objective or kept values are invalid.
    """

    num_devices: int
    objective: str = "time"
    kept: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    top: int = 10
    usd_per_hour: float | None = None
    straggler_factor: float = 1.0
    headroom_fraction: float = 0.0

    def __post_init__(self) -> None:
        check_integer("num_devices", self.num_devices, 1, LARGEST_JOB, error=LayoutError)
        if self.objective not in OBJECTIVES:
            raise LayoutError(
                f"objective={self.objective!r} is not known; choose one of {', '.join(OBJECTIVES)}", field="objective"
            )
        check_integer("top", self.top, 1, error=LayoutError)
        if self.usd_per_hour is not None:
            check_number(
                "usd_per_hour", self.usd_per_hour, 0, HIGHEST_USD_PER_HOUR, exclude_low=True, error=LayoutError
            )
        check_number("straggler_factor", self.straggler_factor, 1, 100, exclude_high=True, error=LayoutError)
        hint = "give a fraction such as 0.1 or 10%"
        check_number("headroom_fraction", self.headroom_fraction, 0, 1, exclude_high=True, error=LayoutError, hint=hint)
        for name in self.kept:
            if name not in PLAN_FIELDS:
                hint = close_names(name, PLAN_FIELDS)
                raise LayoutError(
                    f"kept={name!r} is not chosen by a plan; {hint + ' ' if hint else ''}it chooses "
                    f"{', '.join(PLAN_FIELDS)}",
                    field="kept",
                )

    def allows(self, name: str, value: Any) -> bool:
        """Return whether a field may take a value."""
        return name not in self.kept or value in self.kept[name]


def read_kept(name: str, values: str) -> tuple[str, tuple[Any, ...]]:
    """Read a restriction such as ``tp=4,8``.

    Returns:
        The field's name and the values it may take.

    Raises:
        LayoutError: a plan does not choose the field, or a value is of another type.

    >>> read_kept("tp", "4,8"), read_kept("schedule", "1f1b")
    (('tensor_parallel', (4, 8)), ('pipeline_schedule', ('1f1b',)))
    """
    field_name = SHORT_NAMES.get(name, name.replace("-", "_"))
    if field_name not in PLAN_FIELDS:
        known = (*SHORT_NAMES, "recompute", *OFFLOADS)
        hint = close_names(name, known)
        raise LayoutError(
            f"keep={name!r} is not chosen by a plan; {hint + ' ' if hint else ''}it chooses {', '.join(known)}",
            field="keep",
        )
    return field_name, tuple(_read_value(field_name, part.strip()) for part in values.split(",") if part.strip())


def _read_value(field_name: str, text: str) -> Any:
    if field_name in _NAMED_VALUES:
        if text not in _NAMED_VALUES[field_name]:
            allowed = ", ".join(_NAMED_VALUES[field_name])
            raise LayoutError(f"keep {field_name}={text!r} is not known; choose among {allowed}")
        return text
    if field_name in _BOOLEAN_FIELDS:
        if text.lower() not in _BOOLEANS:
            raise LayoutError(f"keep {field_name}={text!r} must be true or false, or both")
        return _BOOLEANS[text.lower()]
    number = read_integer(text)
    if number is None or number < 0:
        raise LayoutError(f"keep {field_name}={short_repr(text)} must be one or more integers, such as 4,8")
    return number


def combine_kept(
    keep: Mapping[str, Sequence[Any]], workload: Mapping[str, Any], layout: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Combine all restrictions of a plan: lists of values, and fields of workload and layout that have one value.

    Raises:
        LayoutError: two restrictions of a field exclude each other, or a value is out of range.
    """
    given_ends = [name for name in ENDS_AS_LAYERS if layout.get(name) or any(keep.get(name, ()))]
    if given_ends:
        raise LayoutError(
            "a plan does not count the ends of the model as layers; leave "
            + joined(map(FieldName, given_ends))
            + " out, or predict such a layout by itself"
        )
    single = {**layout, **{name: workload[name] for name in PLANNED_WORKLOAD_FIELDS if name in workload}}
    kept = {name: tuple(values) for name, values in keep.items()}
    for name in ENDS_AS_LAYERS:  # always false in a plan
        single.pop(name, None)
        kept.pop(name, None)
    for name, value in single.items():
        if value is None:
            continue
        if value not in kept.get(name, (value,)):
            allowed = ", ".join(map(str, kept[name]))
            raise LayoutError(f"{name}={value} is given, but keep allows {allowed} only; give one of the two")
        kept[name] = (value,)
    smallest, largest = {"zero_stage": 0}, {"zero_stage": 3}
    for name, values in kept.items():
        if name in _NAMED_VALUES or name in _BOOLEAN_FIELDS:
            continue
        for value in values:
            if value is None and name == "expert_tensor_parallel":  # the degree of the tensor axis, as in a layout
                continue
            check_integer(name, value, smallest.get(name, 1), largest.get(name, LARGEST_JOB), error=LayoutError)
    return kept


def offload_choices(kept: Mapping[str, tuple[Any, ...]], workload: Workload) -> dict[str, tuple[Any, ...]]:
    """Return the kept values, with offload tried on and off unless the request keeps it.

    No software offloads the states of optimizers that work on whole matrices (docs/decisions/0005).
    """
    names = OFFLOADS if not OPTIMIZERS[workload.optimizer].works_on_matrices else OFFLOADS[:1]
    return {**dict.fromkeys(names, (False, True)), **kept}


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """A training job to plan: a scenario and a request.

    Attributes:
        scenario: The job: model, device, sequence length, dtype, attention, optimizer and global batch size; plans
            choose layout, micro-batch size and recomputation.
        request: Devices, objective and kept values.

    Raises:
        WorkloadError: the phase is not training, or there is no global batch size.
        LayoutError: the devices do not fill whole nodes.
    """

    scenario: Scenario
    request: PlanRequest

    def __post_init__(self) -> None:
        workload = self.scenario.workload
        if not workload.is_training:
            raise WorkloadError(
                f"phase={workload.phase!r} cannot be planned: plans are for training; use phase='train'", field="phase"
            )
        if workload.recompute_layers is not None:
            raise WorkloadError(
                f"recompute_layers={workload.recompute_layers} cannot be planned: plans recompute all layers alike; "
                f"leave it out",
                field="recompute_layers",
            )
        if workload.global_batch_size is None:
            raise WorkloadError(
                with_fields("a plan needs {global_batch_size}, the sequences of one optimizer step, such as 2048")
            )
        check_allocation(self.request.num_devices, self.scenario.device)

    @property
    def limit_bytes(self) -> float:
        """Most memory that a plan may need on a device. [byte]"""
        return self.scenario.device.memory_bytes * (1.0 - self.request.headroom_fraction)

    def of_language_model(self) -> PlanJob:
        """Return the job of the language model alone, without images, over the same number of tokens."""
        scenario = self.scenario.replace(images=0, image_size=None, vision=None)
        return PlanJob(scenario=scenario, request=self.request)

    def resolved(self) -> PlanJob:
        """Return the job with workload fields set as its software does, and with the workload's offload kept."""
        scenario = self.scenario
        offloaded = {name: (True,) for name in OFFLOADS if getattr(scenario.workload, name)}
        return PlanJob(
            scenario=scenario.replace(workload=scenario.software.settle(scenario.workload)),
            request=replace(self.request, kept={**offloaded, **self.request.kept}),
        )
