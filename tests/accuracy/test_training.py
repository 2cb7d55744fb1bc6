"""Predicted steps against published training throughput: each generation of software, models its fit did not see."""

from __future__ import annotations

import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from calibration_script import load_script
from measured import measured_file

from shapewright.accuracy.context import Context
from shapewright.accuracy.read import read_columns
from shapewright.accuracy.statistics import kendall_tau
from shapewright.accuracy.training import FORMAT, PublishedRun, read_runs
from shapewright.perf.software import load_software
from shapewright.predict import predict

LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))["training"]


@cache
def runs() -> tuple[PublishedRun, ...]:
    """Rows with a full configuration."""
    path = measured_file("published_training_throughput.csv")
    return tuple(read_runs(read_columns(path, FORMAT, Counter()), Context()))


def rates(chosen: list[PublishedRun], software: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Measured and predicted tokens per second and device."""
    found = [
        predict(
            run.config, device=run.device, workload=run.workload, layout=run.layout, software=software or run.software
        ).tokens_per_s_per_device
        for run in chosen
    ]
    return np.array([run.tokens_per_s_per_device for run in chosen]), np.array(found)


@pytest.mark.parametrize("name", LIMITS["held_out"])
def test_models_left_out(name: str) -> None:
    """Fitted without a group of rows, the mean error on that group stays within the limit, over all groups."""
    script = load_script("calibrate_software")
    (generation,) = [each for each in script.GENERATIONS if each.software.name == name]
    chosen = [run for run in runs() if run.software == name]
    groups = np.array([generation.group_of(run) for run in chosen])
    errors = []
    for group in sorted(set(groups)):
        seen = [run for run, other in zip(chosen, groups, strict=True) if other != group]
        unseen = [run for run, other in zip(chosen, groups, strict=True) if other == group]
        # Some 25 rows, evenly picked, tell the numbers as well, and are quicker.
        software = script.apply(generation.software, script.fit(generation, seen[:: 1 + len(seen) // 25]))
        step_s = script.predict_steps(software, unseen)
        errors += list(np.abs(np.array([run.step_s for run in unseen]) / step_s - 1.0))

    assert float(np.mean(errors)) <= LIMITS["held_out"][name]


@pytest.mark.parametrize("name", LIMITS["kendall_tau"])
def test_order_of_rows(name: str) -> None:
    """Predicted tokens per second put the rows of a generation, and all rows, in about the measured order."""
    chosen = [run for run in runs() if name in ("all", run.software)]
    measured, predicted = rates(chosen)

    assert kendall_tau(measured, predicted) >= LIMITS["kendall_tau"][name]


def test_records_are_better_than_the_default() -> None:
    """Told which software ran, predictions of old stacks err at most half as much as those of a tuned one."""
    chosen = [run for run in runs() if load_software(run.software).overlap_share == 0.0]

    def mean_error(software: str) -> float:
        measured, predicted = rates(chosen, software)
        return float(np.mean(np.abs(predicted / measured - 1.0)))

    assert mean_error("") <= mean_error("tuned") / 2.0
