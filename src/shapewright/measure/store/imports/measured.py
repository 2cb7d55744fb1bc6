"""Imported measurements, and the rows and runs made from them."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from datetime import UTC, datetime
from typing import Any

from shapewright import __version__
from shapewright.core.errors import ShapewrightError, UnknownDeviceError
from shapewright.core.records import dataclass
from shapewright.core.units import TERA
from shapewright.hardware.loader import detect_device, find_measured_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.store.record import OK, Case, Row, Run, row_facts


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """User-provided values that replace or complete those of an imported file; empty for none.

    Attributes:
        device: Device that was measured.
        library: Library and versions.
        dtype: Element format.
    """

    device: str = ""
    library: str = ""
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement of an imported file.

    Attributes:
        case: The measured case.
        device: Name or alias of its device.
        library: Library and versions.
        suite: Name of the set of measurements that it belongs to.
        median_s: Median of its samples, or the statistic that the file contains; None if it failed. [s]
        status: One of record.STATUSES.
        facts: Further fields of the row.
        runtime: CUDA or ROCm with its version; empty if unknown.
        driver: Driver version; empty if unknown.
        device_facts: Properties of the device; empty if unknown.
    """

    case: Case
    device: str
    library: str
    suite: str
    median_s: float | None
    status: str = OK
    facts: Mapping[str, Any] = field(default_factory=dict)
    runtime: str = ""
    driver: str = ""
    device_facts: Mapping[str, Any] = field(default_factory=dict)


def canonical_device(name: str) -> str:
    """Canonical name of a device in a measured file; names without a device file are returned unchanged."""
    try:
        return find_measured_device(name).name
    except UnknownDeviceError:
        return name


def detected_device(gpu_name: str, num_sms: int, memory_bytes: float) -> str:
    """Canonical name of a device that a driver reported, or the driver's name if there is no device file."""
    try:
        return detect_device(gpu_name, num_sms, memory_bytes).name
    except ShapewrightError:
        return gpu_name


def measurement_of_rate(
    operation: Gemm, rate_tflops: float | None, *, device: str, library: str, suite: str, **facts: str
) -> Measurement:
    """A measurement from the rate of a GEMM; without a time if the rate is None or 0."""
    return Measurement(
        case=Case(operation=operation),
        device=device,
        library=library,
        suite=suite,
        median_s=float(operation.flops) / (rate_tflops * TERA) if rate_tflops else None,
        facts={"kernel": operation.name, **facts},
    )


def make_rows(measurements: Iterable[Measurement], *, command: str) -> tuple[list[Run], list[Row]]:
    """Make the rows of measurements, and their runs: one for each device, library and suite.

    Several measurements of the same case become repetitions, numbered in the order of the file, so that none is lost
    and importing the same file again adds nothing.
    """
    runs: dict[tuple[Any, ...], Run] = {}
    seen: Counter[str] = Counter()
    rows: list[Row] = []
    for one in measurements:
        labels = (canonical_device(one.device), one.library, one.suite, one.runtime, one.driver)
        if labels not in runs:
            runs[labels] = _make_run(labels, one.device_facts, command)
        run = runs[labels]
        facts = row_facts(one.case, run)
        repetition = seen[facts["key"]]
        seen[facts["key"]] += 1
        if repetition:
            facts = row_facts(replace(one.case, repetition=repetition), run)
        facts["repetition"] = repetition
        rows.append(Row(**{**facts, "measured_utc": "", "status": one.status, "median_s": one.median_s, **one.facts}))
    return list(runs.values()), rows


def positive(value: Any) -> float | None:
    """A finite number above zero; None for any other value, such as the placeholder of a missing time."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0.0 < number < float("inf") else None


def drop_untimed(measurements: Iterable[Measurement], skipped: Counter[str]) -> Iterator[Measurement]:
    """Drop measurements that have neither a time nor an error, and count them in ``skipped``."""
    for one in measurements:
        if one.status == OK and positive(one.median_s) is None:
            skipped["no time above zero"] += 1
            continue
        yield one


def _make_run(labels: tuple[Any, ...], device_facts: Mapping[str, Any], command: str) -> Run:
    device, library, suite, runtime, driver = labels
    return Run(
        run_id=uuid.uuid4().hex,
        started_utc=datetime.now(UTC).isoformat(timespec="milliseconds"),
        command=command,
        suite=suite,
        device=device,
        device_facts=device_facts,
        driver=driver,
        runtime=runtime,
        torch_version="",
        library=library,
        shapewright_version=__version__,
    )
