"""Outputs of ``search``, as JSON and as CSV rows, and of ``search --explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from shapewright.app.report.outputs.check import EffectOutput, effect_output
from shapewright.app.report.outputs.loss import ExperimentsOutput
from shapewright.app.report.outputs.model import (
    DeviceSummary,
    JobLayout,
    Output,
    described,
    job_layout,
    optional,
    plain,
    summarize_device,
    take,
    text_only,
)
from shapewright.app.report.outputs.predict import OperationOutput, PredictOutput, prediction_output
from shapewright.core.records import dataclass
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.search.result import Gain, Verification
from shapewright.optimize.search.verdict import VERDICTS, name_changes
from shapewright.prediction.training_run import RunCost, estimate_run_cost, estimate_saving
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.optimize.search.result import Candidate, SearchResult, Verdict
    from shapewright.prediction.speedup import Speedup

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
    *(spec.name for spec in fields(EffectOutput)),
    "layer_speedup",
    "parameters",
    "parameters_change",
    "step_time_s",
    "memory_bytes",
    "kv_bytes_per_token",
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Old and new value of a changed field."""

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
    net_speedup: float | None = described("time to the baseline's loss over the shape's; null as `net_speedup` below")
    regret: float = described("what the objective minimizes over that of the best shape on this device, from 1")


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
    equal_size_speedup: float = described("speed-up per parameter that a token uses")
    effect: EffectOutput = described("what the change does to the loss", is_flat=True)
    cost_ratio: float = described(
        "what the objective minimizes over that of the baseline; for `loss-at-budget` the exponential of the "
        "difference of loss"
    )
    lifetime_gain: float | None = optional(
        "dollars to train the baseline and to serve `--serve-tokens` over those of this shape, at the same loss"
    )
    lifetime_gain_low: float | None = optional("lower end of its 90 % interval")
    lifetime_gain_high: float | None = optional("upper end")
    chance_cheaper: float | None = optional("probability that it is above 1")
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
    saves: RunCost | None = optional(
        "what the training run takes less: to the same loss where the objective compares losses, else for the same "
        "tokens; with `horizon` only"
    )
    saves_low: RunCost | None = optional("the same at the lower end of the net speed-up, or the speed-up")
    saves_high: RunCost | None = optional("the same at the upper end")


@dataclass(frozen=True, kw_only=True)
class VerdictOutput:
    """What to do with the baseline."""

    code: str = described("; ".join(f"`{code}`: {text}" for code, text in VERDICTS.items()))
    text: str = described("the verdict in one sentence")
    rank: int = described("rank of the recommended shape in `candidates`; 0 where the verdict is to keep the shape")
    changes: dict[str, Change] = described("the fields that it changes")
    net_speedup: float = described(
        "its net speed-up, with `--serve-tokens` its `lifetime_gain`, in inference its speed-up; 1 to keep the shape"
    )
    net_speedup_low: float = described("lower end of its 90 % interval")
    net_speedup_high: float = described("upper end of its 90 % interval")
    chance_better: float = described("probability that it is above 1")


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
    lifetime_usd: float | None = optional("dollars to train the baseline and to serve `--serve-tokens`")


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
    faster: int = described("shapes better than the baseline that fit in memory")
    faster_but_too_large: int = described("better shapes that do not fit")


@dataclass(frozen=True, kw_only=True)
class SearchOutput(Output):
    """Better shapes of the same size."""

    verdict: VerdictOutput | None = described("what to do; null for a model that the loss law does not describe")
    source: str
    objective: str = described("what is minimized")
    train_tokens: float | None = described("tokens of the baseline's run, at which losses are compared")
    device: DeviceSummary = described("the device; the first where several were given")
    devices: list[BestAlone] = described("where several were given: the devices, each with its best shape")
    horizon: HorizonOutput | None = described("the training run; null where neither its length nor a price is given")
    software: str
    workload: Workload
    layout: JobLayout
    baseline: CandidateOutput = described("the shape that the search started from")
    candidates: list[CandidateOutput] = described("better shapes, the best first")
    best_by_num_changes: dict[str, int] = described("rank of the best shape by number of changed fields")
    pareto: list[CandidateOutput] = described(
        "Pareto front over time, parameters or tokens to the loss, KV bytes per token and memory"
    )
    guard: dict[str, Range] = described("limits by measure of the quality guard")
    space: SearchSpace = described("shapes considered")
    elapsed_s: float
    is_complete: bool
    notes: list[str]
    verification: Verification | None = optional("measurement of the best shapes; with `--verify` only")
    experiments: ExperimentsOutput | None = optional("small models that would decide; with `--experiments` only")
    step: PredictOutput = text_only()


def search_output(result: SearchResult) -> SearchOutput:
    """Output of a search."""
    tally, prediction = result.tally, result.baseline.prediction
    return take(
        SearchOutput,
        result,
        prediction,
        verdict=None if result.verdict is None else verdict_output(result.verdict),
        source=result.model.source,
        objective=result.objective.name,
        device=summarize_device(prediction.device),
        devices=[BestAlone(name=name, best_alone=candidate_output(best)) for name, best in result.best_on.items()],
        horizon=_horizon(result),
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
        step=prediction_output(prediction),
    )


def candidate_output(candidate: Candidate) -> CandidateOutput:
    """One shape; the baseline has rank 0 and a speed-up of 1."""
    prediction, speedup = candidate.prediction, candidate.speedup
    return take(
        CandidateOutput,
        candidate,
        prediction,
        prediction.workload,
        changes=changes_output(candidate.changes),
        speedup=speedup.factor,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        probability_faster=speedup.probability_faster,
        effect=effect_output(candidate.effect),
        **_lifetime_keys(candidate.lifetime),
        parameters=prediction.parameters.total,
        parameters_change=candidate.parameters_change_fraction,
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
                net_speedup=effect_output(there.effect).net_speedup,
            )
            for name, there in candidate.on_devices.items()
        },
    )


def changes_output(changes: Mapping[str, tuple[Any, Any]]) -> dict[str, Change]:
    """Old and new values by field."""
    return {name: Change(old=old, new=new) for name, (old, new) in changes.items()}


def verdict_output(verdict: Verdict) -> VerdictOutput:
    """What to do with a baseline."""
    return take(VerdictOutput, verdict, changes=changes_output(verdict.changes))


def _horizon(result: SearchResult) -> HorizonOutput | None:
    if result.horizon is None:
        return None
    prediction = result.baseline.prediction
    return take(
        HorizonOutput,
        result.horizon,
        board_watts=prediction.device.tdp_watts,
        baseline=estimate_run_cost(prediction, result.horizon),
        lifetime_usd=result.lifetime_usd,
    )


def _lifetime_keys(gain: Speedup | None) -> dict[str, Any]:
    if gain is None:
        return {}
    return {
        "lifetime_gain": gain.factor,
        "lifetime_gain_low": gain.low,
        "lifetime_gain_high": gain.high,
        "chance_cheaper": gain.probability_faster,
    }


def _savings(result: SearchResult, candidate: Candidate) -> dict[str, Any]:
    """Savings of a shape over the training run, at its net speed-up or speed-up, and at the ends of the interval."""
    if result.horizon is None:
        return {}
    cost, speedup = estimate_run_cost(result.baseline.prediction, result.horizon), candidate.speedup
    ends = {"saves": speedup.factor, "saves_low": speedup.low, "saves_high": speedup.high}
    net = candidate.effect.net_speedup if candidate.effect is not None else None
    if result.objective.measures_loss and net is not None:
        ends = {"saves": net.factor, "saves_low": net.low, "saves_high": net.high}
    return {name: estimate_saving(cost, factor) if factor > 0.0 else None for name, factor in ends.items()}


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


FIELD_LETTERS = {
    "hidden_size": "h",
    "num_layers": "L",
    "num_heads": "a",
    "num_kv_heads": "a_kv",
    "head_dim": "d",
    "intermediate_size": "f",
    "moe_intermediate_size": "f_e",
    "vocab_size": "v",
    "micro_batch_size": "b",
    "num_experts": "E",
    "num_experts_per_token": "k_e",
    "shared_expert_intermediate_size": "f_shared",
    "tensor_parallel": "t",
    "pipeline_parallel": "p",
    "data_parallel": "dp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
    "recompute": "recompute",
}
"""Symbols of fields in changes, as in docs/notation.md."""


class ChangedShape(Protocol):
    """An output of a shape that differs from a baseline."""

    @property
    def changes(self) -> dict[str, Change]:
        """Every field that differs."""


def changes_by_letter(candidate: ChangedShape) -> dict[str, tuple[Any, Any]]:
    """Old and new values of the fields that differ, by symbol; those that follow from others are left out."""
    changes = name_changes({name: (change.old, change.new) for name, change in candidate.changes.items()})
    return {FIELD_LETTERS.get(name, name): values for name, values in changes.items()}


def describe_changes(candidate: ChangedShape) -> str:
    """The fields that differ, by symbol: ``a 32 -> 20, d 80 -> 128``."""
    return ", ".join(f"{letter} {old} -> {new}" for letter, (old, new) in changes_by_letter(candidate).items())


def describe_gain(candidate: CandidateOutput) -> str:
    """Speed-up per step and to the same loss: ``1.121x, 1.064x to the same loss``."""
    words, net = f"{candidate.speedup:.3f}x", candidate.effect.net_speedup
    if candidate.effect.is_free:
        return f"{words}, free"
    return words if net is None else f"{words}, {net:.3f}x to the same loss"


@dataclass(frozen=True, kw_only=True)
class OperationPair:
    """An operation of the baseline and of a shape, for equal numbers of tokens."""

    name: str = described("name of the operation")
    pass_name: str = described("pass of the step")
    before: OperationOutput | None = described("the operation of the baseline; null where it has none of this name")
    after: OperationOutput | None = described("the operation of the shape; null where it has none of this name")
    before_s: float = described("its time in the baseline's step")
    after_s: float = described("its time in the shape, for the tokens of the baseline's step")
    saved_fraction: float = described("the difference over the baseline's step")


@dataclass(frozen=True, kw_only=True)
class ExplainedShapeOutput(Output):
    """One shape against the baseline, operation by operation."""

    shape: CandidateOutput = described("the shape")
    operations: list[OperationPair] = described("the operations, largest saving first")
