"""Job: what a request asks about, and the question that it becomes.

Models come from a preset's name, from a config.json object inside the request, or from fields alone; devices are named.
Nothing that a request says is ever a path or an address.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from shapewright.config import Model, Preset, TransformerConfig, load_preset, read_model, read_object
from shapewright.errors import ConfigError, LayoutError
from shapewright.fields import noted_fields
from shapewright.layout import ParallelLayout
from shapewright.perf.software import TUNED, software_names
from shapewright.question import Question, ask
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.explorer.known_devices import KnownDevices

LONGEST_NAME = 200
MOST_STAGES = 512
"""Pipeline stages that are taken: answers tell each of them, and a page could show no more."""
MOST_LIST_ENTRIES = 4096
MOST_LAYER_KINDS = 128
"""Kinds of layers that are taken; each is lowered and priced on its own, and published models have two or three."""
PASTED = "pasted config"

# Counts are bounded once more, and more tightly, where they are used; here so that no number is absurd.
_LARGEST_INTEGER = 2**53
_TYPES: dict[str, Any] = {
    "int": Annotated[int, Field(strict=True, ge=0, le=_LARGEST_INTEGER)],
    "float": Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)],
    "str": Annotated[str, Field(strict=True, max_length=LONGEST_NAME)],
    "bool": Annotated[bool, Field(strict=True)],
    "tuple[int, ...]": Annotated[
        list[Annotated[int, Field(strict=True, ge=0, le=_LARGEST_INTEGER)]], Field(max_length=MOST_LIST_ENTRIES)
    ],
    "tuple[bool, ...]": Annotated[list[Annotated[bool, Field(strict=True)]], Field(max_length=MOST_LIST_ENTRIES)],
}

Name = Annotated[str, Field(strict=True, min_length=1, max_length=LONGEST_NAME)]


class Part(BaseModel):
    """A part of a request: what is not a field is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def given(self) -> dict[str, Any]:
        """The fields that were given, with the tuples that configs hold."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _part(name: str, cls: type) -> type[Part]:
    """Make the model of some fields of a dataclass: each may be left out, and has the dataclass's own description."""
    fields: dict[str, Any] = {}
    for spec, note in noted_fields(cls):
        kind = _TYPES[str(spec.type).removesuffix(" | None")]
        text = note.help + (f" [{note.symbol}]" if note.symbol else "")
        extra: dict[str, Any] = {"enum": [*note.choices, None]} if note.choices else {}
        fields[spec.name] = (kind | None, Field(default=None, description=text, json_schema_extra=extra))
    return create_model(name, __base__=Part, __doc__=f"Some fields of {cls.__name__}.", **fields)


ModelFields = _part("ModelFields", TransformerConfig)
WorkloadFields = _part("WorkloadFields", Workload)
LayoutFields = _part("LayoutFields", ParallelLayout)


class Job(Part):
    """A model, a device, a workload, a layout and a software; what is left out has the command line's defaults."""

    preset: Name | None = Field(default=None, description="name of a preset, see /models")
    config: dict[str, Any] | None = Field(
        default=None, description="a Hugging Face config.json object, instead of a preset"
    )
    overrides: ModelFields = Field(default_factory=ModelFields, description="fields of the model to change")  # type: ignore[valid-type]
    device: Name = Field(description="name or alias of a device, see /devices")
    workload: WorkloadFields = Field(default_factory=WorkloadFields)  # type: ignore[valid-type]
    layout: LayoutFields = Field(default_factory=LayoutFields)  # type: ignore[valid-type]
    node_size: int | None = Field(
        default=None, strict=True, description="devices of one of your nodes; null for its own"
    )
    network_gbit_per_s: float | None = Field(
        default=None, description="network between your nodes, for each device and in one direction; null for its own"
    )
    uncalibrated: bool = Field(default=False, strict=True, description="price from the data sheet and siblings alone")
    software: Name = Field(
        default=TUNED,
        description="training software that runs it",
        json_schema_extra={"enum": list(software_names())},
    )

    @property
    def nodes(self) -> dict[str, Any]:
        """Nodes that the devices stand in, as KnownDevices.named takes them."""
        return {"node_size": self.node_size, "network_gbit_per_s": self.network_gbit_per_s}


def read_job_model(job: Job) -> Model:
    """The model of a job.

    Raises:
        ConfigError: preset and config contradict each other, or the model makes no sense.
        UnknownModelError: there is no such preset.
    """
    overrides = _without_none(job.overrides)
    if job.preset is not None and job.config is not None:
        raise ConfigError("preset and config contradict each other; give one of them")
    if job.config is not None:
        return read_object(job.config, overrides, where=PASTED)
    if job.preset is not None:
        preset = _find_preset(job.preset.casefold())
        return read_object(preset.config, overrides, where=f"preset {preset.name}", name=preset.name)
    return read_model(None, overrides)


@cache
def _find_preset(name: str) -> Preset:
    """A preset, read once; a name that is none raises, and is not kept."""
    return load_preset(name)


def ask_job(job: Job, devices: KnownDevices) -> Question:
    """Complete a job to a question.

    Raises:
        ShapewrightError: what is wrong with it, in one line.
    """
    question = ask(
        read_job_model(job),
        devices.named(job.device, **job.nodes),
        workload=_without_none(job.workload),
        layout=_without_none(job.layout),
        uncalibrated=job.uncalibrated,
        software=job.software,
    )
    if not question.uncalibrated:
        question = replace(question, remarks=(*question.remarks, *devices.remark(question.device)))
    kinds = len(question.config.layer_groups())
    if kinds > MOST_LAYER_KINDS:
        raise ConfigError(
            f"{kinds} kinds of layers are more than the {MOST_LAYER_KINDS} that the explorer takes; "
            f"use the command line for more"
        )
    stages = question.layout.pipeline_parallel
    if stages > MOST_STAGES:
        raise LayoutError(
            f"pipeline_parallel={stages} is more than the {MOST_STAGES} stages that the explorer takes; "
            f"use the command line for more"
        )
    return question


def _without_none(part: Any) -> dict[str, Any]:
    return {name: value for name, value in part.given().items() if value is not None}


def job_fields(job: Job) -> dict[str, dict[str, Any]]:
    """Workload and layout fields that a job gives, by name."""
    return {"workload": _without_none(job.workload), "layout": _without_none(job.layout)}
