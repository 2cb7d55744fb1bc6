"""A search as JSON and CSV: stable forms with a schema version."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.horizon import bill_run, saved_by
from shapewright.report.prediction_json import SCHEMA_VERSION
from shapewright.report.question_json import device_to_json

if TYPE_CHECKING:
    from shapewright.search import Candidate, SearchResult

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


def search_to_json(result: SearchResult) -> dict[str, Any]:
    """Turn a result into plain dicts, lists, numbers and strings; units stand in the keys."""
    tally = result.tally
    prediction = result.baseline.prediction
    return {
        "schema_version": SCHEMA_VERSION,
        "source": result.model.source,
        "device": device_to_json(prediction.device),
        "devices": [{"name": name, "best_alone": candidate_to_json(best)} for name, best in result.best_on.items()],
        "horizon": _horizon_to_json(result),
        "software": prediction.software,
        "workload": asdict(prediction.workload),
        "layout": {**asdict(prediction.layout), "num_devices": prediction.layout.num_devices},
        "baseline": candidate_to_json(result.baseline),
        "candidates": [candidate_to_json(candidate) | _savings(result, candidate) for candidate in result.candidates],
        "best_by_num_changes": {
            str(number): candidate.rank for number, candidate in result.best_by_num_changes().items()
        },
        "pareto": [candidate_to_json(candidate) for candidate in result.front],
        "guard": {
            measure: {"low": low, "high": high if high != float("inf") else None}
            for measure, (low, high) in result.ranges.items()
        },
        "space": {
            "size": tally.num_shapes,
            "priced": tally.priced,
            "pruned": tally.pruned,
            "refused": dict(tally.refused),
            "outside_guard": tally.outside_guard,
            "outside_budget": tally.outside_budget,
            "faster": tally.faster,
            "faster_but_too_large": tally.too_large,
        },
        "elapsed_s": result.elapsed_s,
        "is_complete": result.is_complete,
        "notes": list(result.notes),
    }


def candidate_to_json(candidate: Candidate) -> dict[str, Any]:
    """One shape beside the baseline; the baseline itself has rank 0 and a speed-up of 1."""
    prediction, speedup = candidate.prediction, candidate.speedup
    return {
        "rank": candidate.rank,
        "config": asdict(candidate.config),
        "micro_batch_size": prediction.workload.micro_batch_size,
        "recompute": prediction.workload.recompute,
        "layout": asdict(prediction.layout),
        "changed_fields": list(candidate.changed_fields),
        "changes": {name: {"from": old, "to": new} for name, (old, new) in candidate.changes.items()},
        "speedup": speedup.factor,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "probability_faster": speedup.probability_faster,
        "equal_size_speedup": candidate.equal_size_speedup,
        "layer_speedup": candidate.layer_speedup,
        "parameters": prediction.parameters.total,
        "parameters_change": candidate.parameters_change_fraction,
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.step_time_low_s,
        "step_time_high_s": prediction.step_time_high_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "mfu": prediction.mfu,
        "memory_bytes": prediction.memory.total_bytes,
        "kv_bytes_per_token": candidate.kv_bytes_per_token,
        "measures": {
            name: {"value": value, "factor": factor, "percentile_of_presets": percentile}
            for name, (value, factor, percentile) in candidate.measures.items()
        },
        "gains": [asdict(gain) for gain in candidate.gains],
        "on_devices": {
            name: {
                "speedup": there.speedup.factor,
                "speedup_low": there.speedup.low,
                "speedup_high": there.speedup.high,
                "equal_size_speedup": there.equal_size_speedup,
                "regret": there.regret,
            }
            for name, there in candidate.on_devices.items()
        },
    }


def _horizon_to_json(result: SearchResult) -> dict[str, Any] | None:
    """The training run and what the baseline takes for it."""
    if result.horizon is None:
        return None
    prediction = result.baseline.prediction
    return {
        "train_tokens": result.horizon.train_tokens,
        "usd_per_hour": result.horizon.usd_per_hour,
        "board_watts": prediction.device.tdp_watts,
        "baseline": asdict(bill_run(prediction, result.horizon)),
    }


def _savings(result: SearchResult, candidate: Candidate) -> dict[str, Any]:
    """What a shape saves of the run, with the ends of the interval of its speed-up."""
    if result.horizon is None:
        return {}
    bill, speedup = bill_run(result.baseline.prediction, result.horizon), candidate.speedup
    ends = {"saves": speedup.factor, "saves_low": speedup.low, "saves_high": speedup.high}
    return {name: asdict(saved_by(bill, factor)) for name, factor in ends.items()}


def search_to_rows(result: SearchResult) -> list[list[str]]:
    """Baseline and candidates as the rows of a CSV file, heading first."""
    rows = [list(_CSV_COLUMNS)]
    for candidate in (result.baseline, *result.candidates):
        facts = candidate_to_json(candidate)
        facts |= {name: value for name, value in facts["config"].items() if name in _CSV_COLUMNS}
        facts |= {name: facts["layout"][name] for name in _DEGREES}
        facts["changed_fields"] = " ".join(facts["changed_fields"])
        rows.append([str(facts[name]) for name in _CSV_COLUMNS])
    return rows
