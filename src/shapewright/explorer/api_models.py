"""Requests of the API beyond a job alone, each bounded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shapewright.explorer.answers import MOST_COMPARED_DEVICES
from shapewright.explorer.job import Job, Name, Part
from shapewright.figures.sweep import MOST_POINTS, SWEPT_FIELDS
from shapewright.search.request import DEFAULT_VARIED, MOST_PARAMETERS, VARIED

_Positive = Annotated[int, Field(strict=True, ge=1, le=2**40)]


class PredictRequest(Part):
    """A job, and what to hold it against."""

    job: Job
    baseline: Job | None = Field(default=None, description="say how far the job's numbers are from this one's")


class JobRequest(Part):
    """A job."""

    job: Job


class MemoryRequest(JobRequest):
    """A job and its optimiser."""

    optimizer: Name = "adamw"


class CompareRequest(JobRequest):
    """A job on several devices; the job's own device is not looked at."""

    devices: list[Name] = Field(min_length=1, max_length=MOST_COMPARED_DEVICES)
    usd_per_hour: dict[Name, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict, max_length=MOST_COMPARED_DEVICES, description="price of one device by name"
    )


class ExplainRequest(JobRequest):
    """An operation of a job's step."""

    operation: Name


class TilesRequest(JobRequest):
    """A product of a job's step."""

    operation: Name
    pass_name: Annotated[str, Field(strict=True, max_length=20)] = Field(default="", alias="pass")


class SweepRequest(JobRequest):
    """A field of a job to sweep."""

    field: Literal[tuple(SWEPT_FIELDS)]  # type: ignore[valid-type]
    measure: Literal["rate", "tokens", "step"] = "rate"
    values: list[_Positive] | None = Field(
        default=None,
        min_length=1,
        max_length=MOST_POINTS,
        description="values to take; by default some around the job's",
    )


class SearchRequestBody(JobRequest):
    """A search for shapes of the job's size; the fields are the options of ``shapewright search``."""

    num_parameters: _Positive | None = Field(default=None, le=MOST_PARAMETERS)
    tolerance_fraction: Annotated[float, Field(ge=0.0, le=10.0, allow_inf_nan=False)] = 0.02
    vary: list[Literal[tuple(VARIED)]] = Field(default=list(DEFAULT_VARIED), max_length=len(VARIED))  # type: ignore[valid-type]
    keep: dict[Name, Annotated[int, Field(strict=True, ge=0, le=2**40)]] = Field(default_factory=dict, max_length=16)
    guard: Literal["usual", "strict", "free"] = "usual"
    top: Annotated[int, Field(strict=True, ge=1, le=100)] = 20
    objective: Literal["train-tokens-per-s", "prefill", "decode-latency"] | None = None
