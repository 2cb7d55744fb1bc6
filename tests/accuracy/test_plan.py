"""Plans against published training throughput: no published layout is faster, and the order of layouts is kept."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from measured import measured_file

from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.published_rows import FORMAT
from shapewright.measure.accuracy.tables.training import PublishedRun, read_runs
from shapewright.optimize.plan import SEARCHED, PlanRequest, plan_job
from shapewright.optimize.plan.engine import explore
from shapewright.optimize.plan.request import PlanJob
from shapewright.prediction.predict import predict
from shapewright.prediction.scenario import Scenario
from shapewright.pricing.software import load_software

# Every so many different jobs are looked at: a few dozen, of all sources.
_STRIDE = 7
_REPEATED_WITHIN = 0.05


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    """Published rows with a full configuration."""
    rows = read_columns(measured_file("published_training_throughput.csv"), FORMAT, Counter())
    return list(read_runs(rows, Context()))


def test_no_published_layout_beats_the_best_plan(runs: list[PublishedRun]) -> None:
    """With the published layout a plan errs by less than 15 %; without it the best plan is never slower."""
    jobs = list({(run.device.name, run.config, run.workload, run.layout): run for run in runs}.values())
    errors = []
    for run in jobs[::_STRIDE]:
        published = predict(
            run.config, device=run.device, workload=run.workload, layout=run.layout, software=run.software
        )
        if published.memory.total_bytes > run.device.memory_bytes:
            continue
        layout = {name: (getattr(run.layout, name),) for name in SEARCHED if hasattr(run.layout, name)}
        kept = {
            **layout,
            "micro_batch_size": (run.workload.micro_batch_size,),
            "recompute": (run.workload.recompute,),
        }
        request = PlanRequest(num_devices=run.layout.num_devices, kept=kept, top=1)
        scenario = Scenario.of(run.config, run.device, run.workload, software=load_software(run.software))
        held = plan_job(scenario, request).plans
        job = PlanJob(scenario=scenario, request=replace(request, kept={}))
        free = explore(job)

        assert [plan.prediction.step_time_s for plan in held] == [published.step_time_s]
        assert free.best["step_s"][0] <= published.step_time_s * (1.0 + 1e-9)
        tokens_per_s = held[0].prediction.tokens_per_s_per_device
        errors.append(abs(tokens_per_s / run.tokens_per_s_per_device - 1.0))
    assert len(errors) > 20
    assert float(np.mean(errors)) < 0.15


def test_layouts_of_bloom_keep_their_order(runs: list[PublishedRun]) -> None:
    """Of two layouts of one BLOOM shape, the one that was measured faster is predicted faster: Kendall tau of 0.7.

    Pairs within 5 % are left out: repetitions of one run differ by as much.
    """
    measured: dict[tuple[object, ...], dict[tuple[object, ...], list[PublishedRun]]] = {}
    for run in runs:
        if run.software == "megatron-deepspeed-2021" and run.workload.global_batch_size == 2048:
            shape = (run.config, run.workload.dtype, run.layout.num_devices)
            job = (run.layout, run.workload.micro_batch_size)
            measured.setdefault(shape, {}).setdefault(job, []).append(run)
    signs = []
    for jobs in measured.values():
        steps = [(np.median([run.step_s for run in repeats]), predict_step_s(repeats[0])) for repeats in jobs.values()]
        for one, other in itertools.combinations(steps, 2):
            if abs(np.log(one[0] / other[0])) > _REPEATED_WITHIN:
                signs.append(np.sign((one[0] - other[0]) * (one[1] - other[1])))
    assert len(signs) > 20
    assert float(np.mean(signs)) >= 0.7


def predict_step_s(run: PublishedRun) -> float:
    """Predicted step of a published run, as its software runs it."""
    return predict(
        run.config, device=run.device, workload=run.workload, layout=run.layout, software=run.software
    ).step_time_s
