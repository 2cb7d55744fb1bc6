"""Measured: one measurement of a file that is imported, before it is a row; and the rows that come of many."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shapewright import __version__
from shapewright.errors import ShapewrightError, UnknownDeviceError
from shapewright.hardware import detect_device, find_measured_device
from shapewright.store.record import OK, Case, Row, Run, row_facts


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What the reader of a file says of it, where the file does not, or says it wrongly.

    Attributes:
        device: Device that was measured.
        library: Library and versions.
        dtype: Element format.
    """

    device: str = ""
    library: str = ""
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measurement.

    Attributes:
        case: What was measured.
        device: Its device, by any name.
        library: Library and versions.
        suite: What the file calls the set that it belongs to.
        median_s: The middle of its samples, or whatever the file kept of them; None where it failed. [s]
        status: One of record.STATUSES.
        facts: Further fields of a row.
        runtime: CUDA or ROCm with its version, where the file says.
        driver: Version of the driver, where the file says.
        device_facts: Properties of the device, where the file says.
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
    """Canonical name of a device as measured files spell it; a name without a device file stays as it is."""
    try:
        return find_measured_device(name).name
    except UnknownDeviceError:
        return name


def detected_device(gpu_name: str, num_sms: int, memory_bytes: float) -> str:
    """Canonical name of what a driver reported, or what the driver called it."""
    try:
        return detect_device(gpu_name, num_sms, memory_bytes).name
    except ShapewrightError:
        return gpu_name


def rows_of(measured: Iterable[Measured], *, command: str) -> tuple[list[Run], list[Row]]:
    """Rows of a store, and the runs that they belong to: one for each device, library and suite.

    Measurements of one thing in the same import are told apart by their repetition, in the order of the file, so that
    none is lost and a second import of the same file adds nothing.
    """
    runs: dict[tuple[Any, ...], Run] = {}
    seen: Counter[str] = Counter()
    rows: list[Row] = []
    for one in measured:
        words = (canonical_device(one.device), one.library, one.suite, one.runtime, one.driver)
        if words not in runs:
            runs[words] = _make_run(words, one.device_facts, command)
        run = runs[words]
        facts = row_facts(one.case, run)
        repetition = seen[facts["key"]]
        seen[facts["key"]] += 1
        if repetition:
            again = Case(
                operation=one.case.operation,
                variant=one.case.variant,
                row_width=one.case.row_width,
                repetition=repetition,
            )
            facts = row_facts(again, run)
        facts["repetition"] = repetition
        rows.append(Row(**{**facts, "measured_utc": "", "status": one.status, "median_s": one.median_s, **one.facts}))
    return list(runs.values()), rows


def positive(value: Any) -> float | None:
    """A number above zero, or None: what a file has for a time that it lacks."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0.0 < number < float("inf") else None


def timed(measurements: Iterable[Measured], skipped: Counter[str]) -> Iterator[Measured]:
    """Those with a time, or with the reason that they have none; the others are counted."""
    for one in measurements:
        if one.status == OK and positive(one.median_s) is None:
            skipped["no time above zero"] += 1
            continue
        yield one


def _make_run(words: tuple[Any, ...], device_facts: Mapping[str, Any], command: str) -> Run:
    device, library, suite, runtime, driver = words
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
