"""A search as text: baseline, faster shapes, their changes and gains, Pareto front, measured speed-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_notes, print_table
from shapewright.app.report.predict import print_verdict
from shapewright.core.units import format_bytes, format_count, format_seconds
from shapewright.prediction.training_run import estimate_run_cost, estimate_saving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from shapewright.optimize.search import Candidate, SearchResult
    from shapewright.optimize.search.result import Verification
    from shapewright.prediction.training_run import RunCost

_CANDIDATE_COLUMNS = (
    Column("rank"),
    Column("changes", is_text=True),
    Column("speed-up"),
    Column("90 % interval", rank=1),
    Column("faster", rank=3),
    Column("at equal size", rank=2),
    Column("parameters", rank=2),
    Column("step", rank=4),
    Column("memory", rank=5),
    Column("KV/token", rank=6),
)
_GAINS_SHOWN = 4
_FRONT_SHOWN = 8
# Symbols of fields, as in docs/notation.md.
_LETTERS = {
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
QUALITY_NOTE = (
    "Speed is predicted, quality is not: for shapes inside the guard, published results show little change of loss at "
    "equal parameters (Kaplan et al. 2020: a few percent over wide ranges); verify it by training."
)
_MEASURE_WORDS = {
    "aspect": "width per layer",
    "head_dim": "head width",
    "ffn_ratio": "MLP ratio",
    "kv_group": "heads per KV head",
}
_PERCENT_AT_EDGE = 5.0
_KWH_PER_MWH = 1000.0


def print_search(result: SearchResult, console: Console) -> None:
    """Print a whole result."""
    print_verdict(result.baseline.prediction, console)
    console.print()
    if result.candidates:
        console.print(candidates_heading(result), style="bold", soft_wrap=True)
        print_table(candidate_columns(result.candidates), console)
        console.print()
        _print_devices(result, console)
        console.print("Best by number of changed fields", style="bold")
        for number, candidate in result.best_by_num_changes().items():
            _print_best(number, candidate, console)
        console.print()
        for line in describe_horizon(result):
            console.print(line, soft_wrap=True)
        console.print(
            f"Pareto front over time, parameters, KV bytes per token and memory, {_front_words(result)}",
            style="bold",
            soft_wrap=True,
        )
        print_table(candidate_columns(result.front[:_FRONT_SHOWN]), console)
        console.print()
        console.print(describe_letters([*result.candidates, *result.front[:_FRONT_SHOWN]]), style="dim", soft_wrap=True)
    console.print(describe_space(result), style="dim", soft_wrap=True)
    console.print(QUALITY_NOTE, style="dim", soft_wrap=True)
    print_notes(result.notes, console)


def _front_words(result: SearchResult) -> str:
    """How much of the front is shown, and to which list its ranks refer."""
    listed = " (ranks of the list)" if any(not shape.rank for shape in result.front) else ""
    num_front = len(result.front)
    return (f"the first of {num_front}" if num_front > _FRONT_SHOWN else f"all {num_front}") + listed


def candidates_heading(result: SearchResult) -> str:
    """Heading of the list of shapes."""
    if not result.best_on:
        return "Faster shapes of the same size, by speed-up at equal size (they need retraining)"
    return "Shapes of the same size by worst regret (they need retraining); times are those of the first device"


def _print_devices(result: SearchResult, console: Console) -> None:
    if not result.best_on:
        return
    console.print(
        "On each device: speed-up of a shape, and its regret relative to the best shape of the device", style="bold"
    )
    print_table(device_columns(result), console)
    for line in describe_portability(result):
        console.print(line, soft_wrap=True)
    console.print()


def device_columns(result: SearchResult) -> list[Column]:
    """Baseline and shapes by device, one row each, as the columns of a table."""
    names = list(result.best_on)
    rows = [
        [
            str(candidate.rank) if candidate.rank else "baseline",
            *(
                f"{there.speedup.factor:.3f}x, regret {100.0 * (there.regret - 1.0):.1f} %"
                for there in candidate.on_devices.values()
            ),
        ]
        for candidate in (result.baseline, *result.candidates)
    ]
    return columns_of(rows, (Column("rank"), *(Column(name) for name in names)))


def describe_portability(result: SearchResult) -> list[str]:
    """Loss from using one shape on all devices, one line per device."""
    if not result.best_on or not result.candidates:
        return []
    first = result.candidates[0]
    lines = []
    for name, best in result.best_on.items():
        alone, shared = best.on_devices[name], first.on_devices[name]
        lines.append(
            f"{name}: rank 1 gives {shared.speedup.factor:.3f}x; the best shape of this device alone gives "
            f"{alone.speedup.factor:.3f}x ({describe_changes(best)}): at equal size the shared shape is "
            f"{100.0 * (shared.regret - 1.0):.1f} % slower"
        )
    return lines


def describe_horizon(result: SearchResult) -> list[str]:
    """Savings of the first shape, and of the best with one changed field, over the training run."""
    horizon = result.horizon
    if horizon is None:
        return []
    device = result.baseline.prediction.device
    bill = estimate_run_cost(result.baseline.prediction, horizon)
    power = (
        f" (energy at the board power of {device.tdp_watts:g} W, an upper bound)" if bill.energy_kwh is not None else ""
    )
    lines = [f"Over {format_count(horizon.train_tokens)} tokens the baseline takes {_bill_words(bill)}{power}"]
    best = {candidate.rank: candidate for candidate in result.best_by_num_changes().values()}
    shown = {1: result.candidates[0]} if result.candidates else {}
    shown |= {rank: candidate for rank, candidate in best.items() if len(candidate.changed_fields) == 1}
    for rank, candidate in shown.items():
        low, high = (estimate_saving(bill, end).device_hours for end in (candidate.speedup.low, candidate.speedup.high))
        lines.append(
            f"    rank {rank} ({describe_changes(candidate)}) saves "
            f"{_bill_words(estimate_saving(bill, candidate.speedup.factor))}; hours {_amount(low)} to {_amount(high)}"
        )
    return [*lines, ""]


def _bill_words(bill: RunCost) -> str:
    parts = [f"{_amount(bill.device_hours)} device hours"]
    if bill.energy_kwh is not None:
        is_large = bill.energy_kwh >= _KWH_PER_MWH
        parts.append(
            f"{_amount(bill.energy_kwh / _KWH_PER_MWH)} MWh" if is_large else f"{_amount(bill.energy_kwh)} kWh"
        )
    if bill.usd is not None:
        parts.append(f"{_amount(bill.usd)} USD")
    return ", ".join(parts)


def _amount(value: float) -> str:
    """Format a number: integer from a hundred on, three digits below.

    >>> _amount(123456.7), _amount(9.876), _amount(0.01234)
    ('123,457', '9.88', '0.0123')
    """
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.3g}"


def candidate_columns(candidates: Sequence[Candidate]) -> list[Column]:
    """Shapes, one row each, as the columns of a table."""
    return columns_of((_row(candidate) for candidate in candidates), _CANDIDATE_COLUMNS)


def describe_changes(candidate: Candidate) -> str:
    """The fields that differ, by symbol: ``a 32 -> 20, d 80 -> 128``."""
    changes = dict(candidate.changes)
    config = candidate.config
    if config.num_kv_heads == config.num_heads and "num_heads" in changes:
        changes.pop("num_kv_heads", None)
    if changes.get("moe_intermediate_size") == changes.get("intermediate_size"):
        changes.pop("intermediate_size", None)  # follows from moe_intermediate_size
    return ", ".join(f"{_LETTERS.get(name, name)} {old} -> {new}" for name, (old, new) in changes.items())


def describe_letters(candidates: Sequence[Candidate]) -> str:
    """Legend: fields of the symbols in the changes, and the meaning of two columns."""
    shown = {change.split(" ")[0] for candidate in candidates for change in describe_changes(candidate).split(", ")}
    letters = ", ".join(f"{letter} {name}" for name, letter in _LETTERS.items() if letter in shown and letter != name)
    return f"letters: {letters}; faster: probability of being faster; at equal size: speed-up per active parameter"


def describe_space(result: SearchResult) -> str:
    """Number of shapes, in one line."""
    tally = result.tally
    refused = sum(tally.refused.values())
    parts = [
        f"{tally.num_shapes:,} shapes in {format_seconds(result.elapsed_s)}",
        f"{tally.outside_guard:,} outside the quality guard",
        f"{tally.outside_budget:,} of another size",
        *([f"{refused:,} cannot run"] if refused else []),
        f"{tally.priced:,} priced",
        f"{tally.faster:,} faster",
    ]
    return ("" if result.is_complete else "interrupted, best so far: ") + "; ".join(parts)


def _row(candidate: Candidate) -> list[str]:
    speedup, prediction = candidate.speedup, candidate.prediction
    change = candidate.parameters_change_fraction
    return [
        str(candidate.rank or "-"),
        describe_changes(candidate),
        f"{speedup.factor:.3f}x",
        f"{speedup.low:.3f} to {speedup.high:.3f}",
        f"{100.0 * speedup.probability_faster:.0f} %",
        f"{candidate.equal_size_speedup:.3f}x",
        f"{format_count(prediction.parameters.total)} ({100.0 * change:+.2f} %)",
        format_seconds(prediction.step_time_s),
        format_bytes(prediction.memory.total_bytes),
        format_bytes(candidate.kv_bytes_per_token),
    ]


def _print_best(number: int, candidate: Candidate, console: Console) -> None:
    fields = f"{number} ({', '.join(candidate.changed_fields)})"
    console.print(
        f"{fields}: rank {candidate.rank}, {candidate.speedup.factor:.3f}x, {describe_changes(candidate)}",
        soft_wrap=True,
    )
    gains = [gain for gain in candidate.gains if gain.saved_fraction > 0.0][:_GAINS_SHOWN]
    for gain in gains:
        console.print(
            f"    {gain.module} saves {100.0 * gain.saved_fraction:.1f} %: {gain.reason}", style="dim", soft_wrap=True
        )
    moved = describe_measures(candidate)
    if moved:
        console.print(f"    moves {moved}", style="dim", soft_wrap=True)


def describe_measures(candidate: Candidate) -> str:
    """Changed measures of a shape, with their percentiles among public models."""
    parts = []
    for name, (value, factor, percentile) in candidate.measures.items():
        if abs(factor - 1.0) < 1e-3:
            continue
        rare = " (rare)" if not _PERCENT_AT_EDGE <= percentile <= 100.0 - _PERCENT_AT_EDGE else ""
        parts.append(
            f"{_MEASURE_WORDS[name]} {value / factor:.3g} -> {value:.3g}, percentile {percentile:.0f} of public "
            f"models{rare}"
        )
    return "; ".join(parts)


_VERIFIED_COLUMNS = (
    Column("rank"),
    Column("predicted"),
    Column("predicted of measured"),
    Column("measured"),
    Column("rounds", rank=1),
    Column("covered", rank=2),
)
_MODULE_COLUMNS = (Column("part", is_text=True), Column("baseline"), Column("shape"), Column("saves"))


def print_verification(found: Verification, console: Console) -> None:
    """Print measured and predicted speed-ups, and the parts of the first shape."""
    console.print(f"Measured on {found.device} ({found.library}), {found.num_rounds} alternating rounds", style="bold")
    rows = [
        [
            str(shape.rank),
            f"{shape.predicted:.3f}x",
            f"{shape.predicted_of_measured:.3f}x",
            f"{shape.measured:.3f}x",
            f"{shape.measured_low:.3f} to {shape.measured_high:.3f}",
            f"{100.0 * shape.covered_fraction:.0f} %",
        ]
        for shape in found.shapes
    ]
    print_table(columns_of(rows, _VERIFIED_COLUMNS), console)
    first = found.shapes[0]
    total_s = sum(before_s for before_s, _ in first.modules.values())
    modules = sorted(first.modules.items(), key=lambda item: item[1][1] - item[1][0])
    console.print()
    console.print(f"Rank {first.rank} by part of the model, measured, for equal work", style="bold")
    print_table(
        columns_of(
            [
                [name, format_seconds(before), format_seconds(after), f"{100.0 * (before - after) / total_s:+.1f} %"]
                for name, (before, after) in modules
            ],
            _MODULE_COLUMNS,
        ),
        console,
    )
    print_notes(found.notes, console)
    console.print()
