"""Output of ``--experiments``: small models to train, and what they would settle."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.app.report.outputs.model import described, take

if TYPE_CHECKING:
    from shapewright.optimize.experiments import ExperimentPlan


@dataclass(frozen=True, kw_only=True)
class ExperimentOutput:
    """A small model to train."""

    name: str = described("name in the file of runs")
    num_parameters: int = described("parameters without embeddings")
    hidden_size: int = described("width of the residual stream")
    num_layers: int = described("layers")
    num_heads: int = described("query heads")
    num_kv_heads: int = described("key-value heads")
    intermediate_size: int = described("inner width of the MLP")
    train_tokens: float = described("tokens of one seed")
    num_seeds: int = described("seeds to train")
    gpu_hours: float = described("predicted time of all seeds on one device, in hours")


@dataclass(frozen=True, kw_only=True)
class QuestionOutput:
    """An undecided shape, and what the experiments would say about it."""

    rank: int = described("rank of the shape")
    net_low: float = described("lower end of the 90 % interval of its net speed-up now")
    net_high: float = described("upper end")
    after_low: float = described("lower end after the experiments, if they find what is expected")
    after_high: float = described("upper end")
    chance_settled: float = described("probability that the interval excludes 1 after the experiments")
    experiments: list[str] = described("names of the models that it needs; none where none helps")


@dataclass(frozen=True, kw_only=True)
class ExperimentsOutput:
    """The cheapest small models that would settle undecided shapes."""

    file: str = described("file of runs for `shapewright proxy`")
    num_seeds: int = described("seeds to train, for `--seeds`")
    gpu_hours: float = described("predicted time of all of them on one device, in hours")
    full_gpu_hours: float = described("predicted device hours of training the baseline at full size")
    experiments: list[ExperimentOutput] = described("models to train, the smallest first")
    questions: list[QuestionOutput] = described("the undecided shapes, best first")
    notes: list[str] = described("remarks, one line each")


def experiments_output(plan: ExperimentPlan, path: str) -> ExperimentsOutput:
    """Output of proposed experiments, whose runs are written to a file."""
    return take(
        ExperimentsOutput,
        plan,
        file=path,
        num_seeds=max((run.num_seeds for run in plan.experiments), default=1),
        experiments=[
            take(
                ExperimentOutput,
                run,
                hidden_size=run.config.hidden_size,
                num_layers=run.config.num_layers,
                num_heads=run.config.num_heads,
                num_kv_heads=run.config.num_kv_heads,
                intermediate_size=run.config.intermediate_size,
            )
            for run in plan.experiments
        ],
        questions=[take(QuestionOutput, one, experiments=list(one.experiments)) for one in plan.questions],
        notes=list(plan.notes),
    )


def runs_file(plan: ExperimentPlan) -> str:
    """Content of the file of runs, csv."""
    rows = [run.run_columns() for run in plan.experiments]
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["hidden_size", "num_layers", "num_heads"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
