"""Request bodies of the API, each with bounds, and their conversion to scenarios.

A model is given by the name of a preset, a config.json object in the request, or its fields; a device by its name. No
part of a request is used as a path or an address.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from shapewright.app.figures.sweep_values import MAX_POINTS, SWEPT_FIELDS
from shapewright.app.formats.servers.launch import ENGINES
from shapewright.core.errors import ConfigError, LayoutError
from shapewright.core.fields import documented_fields
from shapewright.models.read import Model, Preset, load_preset, read_model, read_object
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.plan.request import LARGEST_JOB
from shapewright.optimize.search.objective import OBJECTIVES
from shapewright.optimize.search.request import DEFAULT_VARIED, FEWEST_PARAMETERS, MOST_PARAMETERS, VARIED
from shapewright.optimize.serving.request import LONGEST_LEN, MOST_DEVICES
from shapewright.prediction.build import build_scenario
from shapewright.prediction.scenario import Scenario
from shapewright.prediction.training_run import FEWEST_TOKENS, MOST_TOKENS
from shapewright.pricing.software import TUNED, software_names
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.app.explorer.device_lookup import DeviceLookup

MAX_NAME_LENGTH = 200
MAX_COMPARED_DEVICES = 64
MAX_STAGES = 512
"""Most pipeline stages of a job: answers list every stage, and a page cannot show more."""
MAX_LIST_ENTRIES = 4096
PASTED = "pasted config"

# A coarse bound on any integer; TransformerConfig and Workload check tighter ones.
_LARGEST_INTEGER = 2**53
_TYPES: dict[str, Any] = {
    "int": Annotated[int, Field(strict=True, ge=0, le=_LARGEST_INTEGER)],
    "float": Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)],
    "str": Annotated[str, Field(strict=True, max_length=MAX_NAME_LENGTH)],
    "bool": Annotated[bool, Field(strict=True)],
    "tuple[int, ...]": Annotated[
        list[Annotated[int, Field(strict=True, ge=0, le=_LARGEST_INTEGER)]], Field(max_length=MAX_LIST_ENTRIES)
    ],
    "tuple[str, ...]": Annotated[
        list[Annotated[str, Field(strict=True, max_length=MAX_NAME_LENGTH)]], Field(max_length=MAX_LIST_ENTRIES)
    ],
    "tuple[bool, ...]": Annotated[list[Annotated[bool, Field(strict=True)]], Field(max_length=MAX_LIST_ENTRIES)],
}

_Positive = Annotated[int, Field(strict=True, ge=1, le=2**40)]
Name = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_NAME_LENGTH)]


class RequestPart(BaseModel):
    """Base class of request bodies and their parts; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def given(self) -> dict[str, Any]:
        """Fields present in the request, with lists as tuples, as configs hold them."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _optional_fields(name: str, cls: type) -> type[RequestPart]:
    """Make a request part from the documented fields of a dataclass; every field is optional."""
    fields: dict[str, Any] = {}
    for spec, note in documented_fields(cls):
        kind = _TYPES[str(spec.type).removesuffix(" | None")]
        text = note.help + (f" [{note.symbol}]" if note.symbol else "")
        extra: dict[str, Any] = {"enum": [*note.choices, None]} if note.choices else {}
        fields[spec.name] = (kind | None, Field(default=None, description=text, json_schema_extra=extra))
    return create_model(name, __base__=RequestPart, __doc__=f"Optional fields of {cls.__name__}.", **fields)


ModelFields = _optional_fields("ModelFields", TransformerConfig)
WorkloadFields = _optional_fields("WorkloadFields", Workload)
LayoutFields = _optional_fields("LayoutFields", ParallelLayout)


class Job(RequestPart):
    """A model, device, workload, layout and training software; omitted fields have the defaults of the command line."""

    preset: Name | None = Field(default=None, description="name of a preset, see /models")
    config: dict[str, Any] | None = Field(
        default=None, description="a Hugging Face config.json object, instead of a preset"
    )
    overrides: ModelFields = Field(default_factory=ModelFields, description="fields of the model to change")  # type: ignore[valid-type]
    device: Name = Field(description="name or alias of a device, see /devices")
    workload: WorkloadFields = Field(default_factory=WorkloadFields)  # type: ignore[valid-type]
    layout: LayoutFields = Field(default_factory=LayoutFields)  # type: ignore[valid-type]
    node_size: int | None = Field(
        default=None, strict=True, description="devices per node; null for the value of the device file"
    )
    network_gbit_per_s: float | None = Field(
        default=None,
        description="network per device and direction; null for the value of the device file",
    )
    uncalibrated: bool = Field(default=False, strict=True, description="price from data sheet and sibling devices")
    software: Name = Field(
        default=TUNED,
        description="training software that runs the job",
        json_schema_extra={"enum": list(software_names())},
    )

    @property
    def node_options(self) -> dict[str, Any]:
        """Node options of the job, as keywords of DeviceLookup.find."""
        return {"node_size": self.node_size, "network_gbit_per_s": self.network_gbit_per_s}


class PredictRequest(RequestPart):
    """A job, and optionally a baseline to compare it with."""

    job: Job
    baseline: Job | None = Field(default=None, description="job whose numbers the answer is compared with")


class JobRequest(RequestPart):
    """A job."""

    job: Job


class CompareRequest(JobRequest):
    """A job and the devices to compare; the device of the job is ignored."""

    devices: list[Name] = Field(min_length=1, max_length=MAX_COMPARED_DEVICES)
    usd_per_hour: dict[Name, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict, max_length=MAX_COMPARED_DEVICES, description="price of one device, by device name"
    )


class PlanRequestBody(JobRequest):
    """Training plans of the job's model; its layout, micro-batch, recomputation and offloading are chosen."""

    num_devices: Annotated[int, Field(strict=True, ge=1, le=LARGEST_JOB)] = 8
    global_batch_size: _Positive | None = None
    objective: Literal["time", "cost", "memory"] = "time"
    usd_per_hour: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] | None = None


class ExplainRequest(JobRequest):
    """A job and the name of an operation of its step."""

    operation: Name


class TilesRequest(JobRequest):
    """A job and a GEMM of its step."""

    operation: Name
    pass_name: Annotated[str, Field(strict=True, max_length=20)] = Field(default="", alias="pass")


class SweepRequest(JobRequest):
    """A job and the field to sweep."""

    field: Literal[tuple(SWEPT_FIELDS)]  # type: ignore[valid-type]
    measure: Literal["rate", "tokens", "step"] = "rate"
    values: list[_Positive] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_POINTS,
        description="values of the field; by default values around the current one",
    )


class SearchRequestBody(JobRequest):
    """A search for shapes with as many parameters as the job's model; fields are options of ``shapewright search``."""

    num_parameters: _Positive | None = Field(default=None, le=MOST_PARAMETERS)
    tolerance_fraction: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)] = 0.02
    vary: list[Literal[tuple(VARIED)]] = Field(default=list(DEFAULT_VARIED), max_length=len(VARIED))  # type: ignore[valid-type]
    keep: dict[Name, Annotated[int, Field(strict=True, ge=0, le=2**40)]] = Field(default_factory=dict, max_length=16)
    guard: Literal["usual", "strict", "free"] = "usual"
    top: Annotated[int, Field(strict=True, ge=1, le=100)] = 20
    objective: Literal[tuple(name for name in OBJECTIVES if name != "cost")] | None = None  # type: ignore[valid-type]
    train_tokens: Annotated[float, Field(gt=0.0, le=MOST_TOKENS, allow_inf_nan=False)] | None = Field(
        default=None, description="tokens that the job's model is trained on"
    )


class DesignRequestBody(JobRequest):
    """A design of the family of the job's model; of the job, model, device, sequence length and formats count."""

    num_parameters: Annotated[int, Field(strict=True, ge=FEWEST_PARAMETERS, le=MOST_PARAMETERS)]
    train_tokens: Annotated[int, Field(strict=True, ge=FEWEST_TOKENS, le=MOST_TOKENS)]
    num_devices: Annotated[int, Field(strict=True, ge=1, le=LARGEST_JOB)] = 64
    guard: Literal["usual", "strict", "free"] = "usual"
    top: Annotated[int, Field(strict=True, ge=1, le=20)] = 6


class ServingRequestBody(JobRequest):
    """A serving plan of the job's model; of the job, model, device and formats count."""

    prompt_len: Annotated[int, Field(strict=True, ge=1, le=LONGEST_LEN)] | None = None
    output_len: Annotated[int, Field(strict=True, ge=2, le=LONGEST_LEN)] | None = None
    num_devices: Annotated[int, Field(strict=True, ge=1, le=MOST_DEVICES)] | None = None
    ttft_limit_s: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] | None = None
    tpot_limit_s: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] | None = None
    requests_per_s: Annotated[float, Field(gt=0.0, le=1e9, allow_inf_nan=False)] | None = None
    usd_per_hour: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] | None = None
    engine: Literal[ENGINES] = Field(default="vllm", description="engine whose version prices and launches the plan")  # type: ignore[valid-type]

    def question(self) -> dict[str, Any]:
        """Arguments of the serving plan, without the job, the lengths and the engine."""
        names = ("num_devices", "ttft_limit_s", "tpot_limit_s", "requests_per_s")
        return {**{name: getattr(self, name) for name in names}, "usd_per_hour": self.usd_per_hour, "formats": []}


SLOW_REQUESTS: dict[str, type[JobRequest]] = {
    "check": JobRequest,
    "memory": JobRequest,
    "compare": CompareRequest,
    "breakdown": JobRequest,
    "sweep": SweepRequest,
    "plan": PlanRequestBody,
    "serving": ServingRequestBody,
    "heat-map": JobRequest,
    "report.html": JobRequest,
}
"""Requests that take many predictions, by name: the body of each."""


def read_job_model(job: Job) -> Model:
    """Read the model of a job.

    Raises:
        ConfigError: both preset and config are given, or the model is not valid.
        UnknownModelError: no preset of that name.
    """
    overrides = _given_fields(job.overrides)
    if job.preset is not None and job.config is not None:
        raise ConfigError("preset and config are both given; give one of them")
    if job.config is not None:
        return read_object(job.config, overrides, where=PASTED)
    if job.preset is not None:
        preset = _find_preset(job.preset.casefold())
        return read_object(preset.config, overrides, where=f"preset {preset.name}", name=preset.name)
    return read_model(None, overrides)


def followed_fields(job: Job, config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Fields of a model that a job does not set and that follow those it sets: value without them, and value now."""
    given = _given_fields(job.overrides)
    if not given or (job.preset is None and job.config is None):
        return {}
    base = read_job_model(job.model_copy(update={"overrides": ModelFields()})).config
    pairs = {spec.name: (getattr(base, spec.name), getattr(config, spec.name)) for spec in fields(config)}
    return {
        name: pair
        for name, pair in pairs.items()
        if name not in given and type(pair[0]) is int and type(pair[1]) is int and pair[0] != pair[1]
    }


@cache
def _find_preset(name: str) -> Preset:
    """Load a preset once; unknown names raise and are not cached."""
    return load_preset(name)


def build_job_scenario(job: Job, devices: DeviceLookup) -> Scenario:
    """Build the scenario of a job.

    Raises:
        ShapewrightError: the job is not valid.
    """
    scenario = build_scenario(
        read_job_model(job),
        devices.find(job.device, **job.node_options),
        workload=_given_fields(job.workload),
        layout=_given_fields(job.layout),
        uncalibrated=job.uncalibrated,
        software=job.software,
    )
    if not scenario.device.uncalibrated:
        scenario = replace(scenario, remarks=(*scenario.remarks, *devices.calibration_notes(scenario.device)))
    stages = scenario.layout.pipeline_parallel
    if stages > MAX_STAGES:
        raise LayoutError(
            f"pipeline_parallel={stages} is more than the limit of {MAX_STAGES} stages of the explorer; "
            f"use the command line instead"
        )
    return scenario


def _given_fields(part: Any) -> dict[str, Any]:
    return {name: value for name, value in part.given().items() if value is not None}


def job_fields(job: Job) -> dict[str, dict[str, Any]]:
    """Workload and layout fields that a job sets, by name."""
    return {"workload": _given_fields(job.workload), "layout": _given_fields(job.layout)}
