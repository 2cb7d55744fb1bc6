"""Timelines of the regression grid: simulated pipelines of every schedule, with stages of unequal times."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product

from regression_answers import Answer, list_cells

from shapewright.core.errors import LayoutError
from shapewright.optimize.plan.timeline import SIMULATED_SCHEDULES, PassTimes, pass_times, simulate_pipeline
from shapewright.prediction.build import build_scenario
from shapewright.workload.layout import ParallelLayout

_TIMES = {"plain": PassTimes(1.0, 2.0), "uneven": PassTimes(1.1, 1.3, 0.7, (0.23, 0.31), (0.37, 0.41))}
_STAGES, _PASSES, _CHUNKS = (1, 2, 3, 4), (1, 3, 4, 8, 12), (1, 2, 3)


def list_schedules() -> list[str]:
    """Simulated schedules."""
    return list(SIMULATED_SCHEDULES)


def answer_timelines(schedule: str) -> dict[str, Answer]:
    """Passes of pipelines of a schedule, and the times of passes of a prediction."""
    answers: dict[str, Answer] = {}
    for stages, passes, chunks, times in product(_STAGES, _PASSES, _CHUNKS, _TIMES):
        question = f"{schedule}: {stages} stages, {passes} passes, {chunks} chunks, {times}"
        try:
            layout = ParallelLayout(pipeline_parallel=stages, virtual_pipeline=chunks, pipeline_schedule=schedule)
            done = simulate_pipeline(layout, passes, _TIMES[times])
        except LayoutError as error:
            answers[question] = {"refused": str(error)}
        else:
            answers[question] = dict(list_cells([each._asdict() for each in done], "passes"))
    layout = ParallelLayout(pipeline_parallel=4, data_parallel=2, pipeline_schedule=schedule)
    scenario = build_scenario(
        "llama-2-13b", "a100-sxm-80gb", workload={"seq_len": 1000, "global_batch_size": 16}, layout=asdict(layout)
    )
    answers[f"{schedule}: times of {scenario.config.name}"] = dict(
        list_cells(asdict(pass_times(scenario.predict())), "")
    )
    return answers
