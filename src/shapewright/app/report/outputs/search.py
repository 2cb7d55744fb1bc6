"""Output of ``search``, as JSON and as CSV rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shapewright.app.report.outputs.model import Output, described, optional, plain, take
from shapewright.app.report.outputs.predict import DeviceSummary, JobLayout, job_layout, summarize_device
from shapewright.models import TransformerConfig
from shapewright.optimize.search.compare import Gain
from shapewright.prediction.training_run import RunCost, estimate_run_cost, estimate_saving
from shapewright.workload import ParallelLayout, Workload

if TYPE_CHECKING:
    from shapewright.optimize.search import Candidate, SearchResult
    from shapewright.optimize.search.result import Verification

_DEGREES = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel")
_CSV_COLUMNS = (
    "rank",
    "changed_fields",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
    "num_experts",
    "num_experts_per_token",
    "shared_expert_intermediate_size",
    "micro_batch_size",
    "recompute",
    *_DEGREES,
    "speedup",
    "speedup_low",
    "speedup_high",
    "probability_faster",
    "equal_size_speedup",
    "layer_speedup",
    "parameters",
    "parameters_change",
    "step_time_s",
    "memory_bytes",
    "kv_bytes_per_token",
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Values of one field."""

    old: Any = described("value of the baseline", key="from")
    new: Any = described("value of this shape", key="to")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure of the quality guard."""

    value: float = described("value of the measure")
    factor: float = described("the value over that of the baseline")
    percentile_of_presets: float = described("percentile of the value among public models")


@dataclass(frozen=True, kw_only=True)
class SpeedupThere:
    """One shape on one of several devices."""

    speedup: float = described("throughput over that of the baseline")
    speedup_low: float = described("lower end of its 90 % interval")
    speedup_high: float = described("upper end of its 90 % interval")
    equal_size_speedup: float = described("the same per parameter that a token uses")
    regret: float = described("time over that of the best shape on this device, from 1")


@dataclass(frozen=True, kw_only=True)
class CandidateOutput:
    """One shape, compared with the baseline."""

    rank: int = described("place in `candidates` from 1; 0 for the baseline and shapes that are not listed there")
    config: TransformerConfig
    micro_batch_size: int = described("sequences of a micro-batch")
    recompute: str = described("activation recomputation")
    layout: ParallelLayout = described("every field of ParallelLayout ([notation](notation.md))")
    changed_fields: list[str] = described("changed fields; those that follow from another one are not counted")
    changes: dict[str, Change] = described("every field that differs from the baseline")
    speedup: float = described("throughput over that of the baseline")
    speedup_low: float = described("lower end of its 90 % interval")
    speedup_high: float = described("upper end of its 90 % interval")
    probability_faster: float = described("probability that the speed-up is above 1")
    equal_size_speedup: float = described("speed-up per parameter that a token uses; shapes are ranked by it")
    layer_speedup: float = described("speed-up of the forward pass of one average layer")
    parameters: int
    parameters_change: float = described("parameters gained or lost, as a fraction")
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    tokens_per_s_per_device: float
    mfu: float
    memory_bytes: float = described("memory of one device of the fullest pipeline stage")
    kv_bytes_per_token: float = described("KV cache of one token over the whole model")
    measures: dict[str, Measure] = described("measures of the quality guard")
    gains: list[Gain] = described("time saved by module")
    on_devices: dict[str, SpeedupThere] = described("results by device where several were given")
    saves: RunCost | None = optional("what the training run takes less; with `horizon` only")
    saves_low: RunCost | None = optional("the same at the lower end of the speed-up")
    saves_high: RunCost | None = optional("the same at the upper end of the speed-up")


@dataclass(frozen=True, kw_only=True)
class BestAlone:
    """The best shape of one device."""

    name: str = described("canonical name of the device")
    best_alone: CandidateOutput = described("the shape that is best on this device alone")


@dataclass(frozen=True, kw_only=True)
class HorizonOutput:
    """The training run that savings refer to."""

    train_tokens: int = described("tokens trained on")
    usd_per_hour: float | None
    board_watts: float | None = described("board power; energies are upper bounds")
    baseline: RunCost = described("what the run takes with the baseline")


@dataclass(frozen=True, kw_only=True)
class Range:
    """Limits of a measure."""

    low: float = described("lower limit")
    high: float | None = described("upper limit; null without one")


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Number of shapes."""

    num_shapes: int = described("shapes of the space", key="size")
    priced: int = described("shapes whose step was predicted")
    pruned: int = described("shapes that were not predicted: `refused`, `outside_guard` and `outside_budget`")
    refused: Mapping[str, int] = described("shapes that cannot run, by reason")
    outside_guard: int = described("shapes outside the quality guard")
    outside_budget: int = described("shapes of another size")
    faster: int = described("faster shapes that fit in memory")
    faster_but_too_large: int = described("faster shapes that do not fit")


@dataclass(frozen=True, kw_only=True)
class ModuleTimes:
    """Measured times of one part of the model, for equal work."""

    baseline_s: float = described("time of the baseline")
    shape_s: float = described("time of the shape")


@dataclass(frozen=True, kw_only=True)
class VerifiedShapeOutput:
    """One shape, measured and predicted."""

    rank: int = described("its rank in the search")
    predicted: float = described("predicted speed-up of the whole step")
    predicted_of_measured: float = described("predicted speed-up of the operations that were measured")
    measured: float = described("measured speed-up of them, median of the rounds")
    measured_low: float = described("lowest of the rounds")
    measured_high: float = described("highest of the rounds")
    covered_fraction: float = described("share of the predicted step in operations that were measured")
    modules: dict[str, ModuleTimes] = described("measured times by part of the model")


@dataclass(frozen=True, kw_only=True)
class VerificationOutput:
    """Measurement of the best shapes."""

    device: str = described("device that was measured")
    library: str = described("library and versions")
    asked_device: str = described("device of the search")
    shapes: list[VerifiedShapeOutput] = described("the shapes, by rank")
    num_rounds: int = described("rounds of the measurement")
    notes: list[str] = described("remarks, one line each")
    wall_s: float = described("duration of the measurement")


@dataclass(frozen=True, kw_only=True)
class SearchOutput(Output):
    """Faster shapes of the same size."""

    source: str
    device: DeviceSummary = described("the device; the first where several were given")
    devices: list[BestAlone] = described("where several were given: the devices, each with its best shape")
    horizon: HorizonOutput | None = described("the training run; null without `--train-tokens` or a price")
    software: str
    workload: Workload
    layout: JobLayout
    baseline: CandidateOutput = described("the shape that the search started from")
    candidates: list[CandidateOutput] = described("faster shapes, the best first")
    best_by_num_changes: dict[str, int] = described("rank of the best shape by number of changed fields")
    pareto: list[CandidateOutput] = described("Pareto front over time, parameters, KV bytes per token and memory")
    guard: dict[str, Range] = described("limits by measure of the quality guard")
    space: SearchSpace = described("shapes considered")
    elapsed_s: float
    is_complete: bool
    notes: list[str]
    verification: VerificationOutput | None = optional("measurement of the best shapes; with `--verify` only")


def search_output(result: SearchResult, verification: Verification | None = None) -> SearchOutput:
    """Output of a search, with the measurement of its shapes."""
    tally, prediction = result.tally, result.baseline.prediction
    return take(
        SearchOutput,
        result,
        source=result.model.source,
        device=summarize_device(prediction.device),
        devices=[BestAlone(name=name, best_alone=candidate_output(best)) for name, best in result.best_on.items()],
        horizon=_horizon(result),
        software=prediction.software,
        workload=prediction.workload,
        layout=job_layout(prediction.layout),
        baseline=candidate_output(result.baseline),
        candidates=[replace(candidate_output(shape), **_savings(result, shape)) for shape in result.candidates],
        best_by_num_changes={str(number): shape.rank for number, shape in result.best_by_num_changes().items()},
        pareto=[candidate_output(shape) for shape in result.front],
        guard={
            measure: Range(low=low, high=high if high != float("inf") else None)
            for measure, (low, high) in result.ranges.items()
        },
        space=take(SearchSpace, tally, faster_but_too_large=tally.too_large),
        verification=None if verification is None else _verification(verification),
    )


def candidate_output(candidate: Candidate) -> CandidateOutput:
    """One shape; the baseline has rank 0 and a speed-up of 1."""
    prediction, speedup = candidate.prediction, candidate.speedup
    return take(
        CandidateOutput,
        candidate,
        micro_batch_size=prediction.workload.micro_batch_size,
        recompute=prediction.workload.recompute,
        layout=prediction.layout,
        changes={name: Change(old=old, new=new) for name, (old, new) in candidate.changes.items()},
        speedup=speedup.factor,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        probability_faster=speedup.probability_faster,
        parameters=prediction.parameters.total,
        parameters_change=candidate.parameters_change_fraction,
        step_time_s=prediction.step_time_s,
        step_time_low_s=prediction.step_time_low_s,
        step_time_high_s=prediction.step_time_high_s,
        tokens_per_s_per_device=prediction.tokens_per_s_per_device,
        mfu=prediction.mfu,
        memory_bytes=prediction.memory.total_bytes,
        measures={
            name: Measure(value=value, factor=factor, percentile_of_presets=percentile)
            for name, (value, factor, percentile) in candidate.measures.items()
        },
        on_devices={
            name: take(
                SpeedupThere,
                there,
                speedup=there.speedup.factor,
                speedup_low=there.speedup.low,
                speedup_high=there.speedup.high,
            )
            for name, there in candidate.on_devices.items()
        },
    )


def _horizon(result: SearchResult) -> HorizonOutput | None:
    if result.horizon is None:
        return None
    prediction = result.baseline.prediction
    return take(
        HorizonOutput,
        result.horizon,
        board_watts=prediction.device.tdp_watts,
        baseline=estimate_run_cost(prediction, result.horizon),
    )


def _savings(result: SearchResult, candidate: Candidate) -> dict[str, Any]:
    """Savings of a shape over the training run, at its speed-up and at the ends of the interval."""
    if result.horizon is None:
        return {}
    cost, speedup = estimate_run_cost(result.baseline.prediction, result.horizon), candidate.speedup
    ends = {"saves": speedup.factor, "saves_low": speedup.low, "saves_high": speedup.high}
    return {name: estimate_saving(cost, factor) for name, factor in ends.items()}


def _verification(found: Verification) -> VerificationOutput:
    shapes = [
        take(
            VerifiedShapeOutput,
            shape,
            modules={
                module: ModuleTimes(baseline_s=before_s, shape_s=after_s)
                for module, (before_s, after_s) in shape.modules.items()
            },
        )
        for shape in found.shapes
    ]
    return take(VerificationOutput, found, shapes=shapes)


def search_rows(result: SearchResult) -> list[list[str]]:
    """Baseline and candidates as rows of a CSV file, heading first."""
    rows = [list(_CSV_COLUMNS)]
    for candidate in (result.baseline, *result.candidates):
        facts = plain(candidate_output(candidate))
        facts |= {name: value for name, value in facts["config"].items() if name in _CSV_COLUMNS}
        facts |= {name: facts["layout"][name] for name in _DEGREES}
        facts["changed_fields"] = " ".join(facts["changed_fields"])
        rows.append([str(facts[name]) for name in _CSV_COLUMNS])
    return rows
