"""A search as text and as a page: verdict, baseline, better shapes and their gains, front, measured speed-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, fit, print_notes, print_table
from shapewright.app.report.optimize.candidates import candidate_columns, describe_letters, describe_measures
from shapewright.app.report.outputs.search import describe_changes, describe_gain
from shapewright.app.report.predict import describe, print_verdict
from shapewright.app.report.proxies import print_experiments
from shapewright.core.units import energy_unit, format_amount, format_count, format_number_of, format_seconds
from shapewright.optimize.search.objective import OBJECTIVES

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.search import CandidateOutput, SearchOutput, SpeedupThere
    from shapewright.optimize.search.result import Verification
    from shapewright.prediction.training_run import RunCost


_GAINS_SHOWN = 4
_FRONT_SHOWN = 8


def print_search(found: SearchOutput, console: Console) -> None:
    """Print a whole result, with the measurement of its shapes and the experiments that would decide between them."""
    if found.verdict is not None:
        console.print(f"verdict: {found.verdict.text}", style="bold", soft_wrap=True)
        console.print()
    print_verdict(found.step, console)
    console.print()
    if found.candidates:
        console.print(candidates_heading(found), style="bold", soft_wrap=True)
        by_speed = not found.devices and not measures_loss(found)
        listed = candidate_columns(found.candidates, by_speed=by_speed)
        print_table(listed, console)
        console.print()
        _print_devices(found, console)
        console.print("Best by number of changed fields", style="bold")
        for number, candidate in best_by_num_changes(found).items():
            _print_best(number, candidate, console)
        console.print()
        for line in describe_run_cost(found):
            console.print(line, soft_wrap=True)
        front = found.pareto[:_FRONT_SHOWN]
        console.print(f"{front_heading(found)}, {_front_words(found)}", style="bold", soft_wrap=True)
        print_table(candidate_columns(front, by_speed=by_speed), console)
        console.print()
        shown = fit(listed, console.width)
        console.print(describe_letters([*found.candidates, *front], shown), style="dim", soft_wrap=True)
    console.print(describe_space(found), style="dim", soft_wrap=True)
    print_notes(found.notes, console)
    print_next_steps(found, console)


def print_next_steps(found: SearchOutput, console: Console) -> None:
    """Print the measurement of shapes and the proposed experiments, where there are any."""
    if found.verification is not None:
        print_verification(found.verification, console)
    if found.experiments is not None:
        print_experiments(found.experiments, console)


def best_by_num_changes(found: SearchOutput) -> dict[str, CandidateOutput]:
    """The best listed shape of each number of changed fields."""
    return {number: found.candidates[rank - 1] for number, rank in found.best_by_num_changes.items()}


def front_heading(found: SearchOutput) -> str:
    """Heading of the Pareto front."""
    quality = "tokens to the loss" if measures_loss(found) else "parameters"
    return f"Pareto front over time, {quality}, KV bytes per token and memory"


def measures_loss(found: SearchOutput) -> bool:
    """Whether shapes are ranked by loss and time together."""
    return OBJECTIVES[found.objective].measures_loss


def _front_words(found: SearchOutput) -> str:
    """How much of the front is shown, and to which list its ranks refer."""
    listed = " (ranks of the list)" if any(not shape.rank for shape in found.pareto) else ""
    num_front = len(found.pareto)
    return (f"the first of {num_front}" if num_front > _FRONT_SHOWN else f"all {num_front}") + listed


def candidates_heading(found: SearchOutput) -> str:
    """Heading of the list of shapes."""
    if found.devices:
        return "Shapes of the same size by worst regret (they need retraining); times are those of the first device"
    if not measures_loss(found):
        return "Faster shapes of the same size, by speed-up at equal size (they need retraining)"
    what = OBJECTIVES[found.objective].description
    tokens = f"; the baseline's run: {format_count(found.train_tokens)} tokens" if found.train_tokens else ""
    return f"Better shapes of the same size by {what}, the surest gain first (they need retraining{tokens})"


def _print_devices(found: SearchOutput, console: Console) -> None:
    if not found.devices:
        return
    gain = "speed-up to the same loss" if measures_loss(found) else "speed-up"
    console.print(
        f"On each device: {gain} of a shape, and its regret relative to the best shape of the device", style="bold"
    )
    print_table(device_columns(found), console)
    for line in describe_portability(found):
        console.print(line, soft_wrap=True)
    console.print()


def device_columns(found: SearchOutput) -> list[Column]:
    """Baseline and shapes by device, one row each, as the columns of a table."""
    rows = [
        [
            str(candidate.rank) if candidate.rank else "baseline",
            *(
                f"{_gain_there(found, there):.3f}x, regret {100.0 * (there.regret - 1.0):.1f} %"
                for there in candidate.on_devices.values()
            ),
        ]
        for candidate in (found.baseline, *found.candidates)
    ]
    return columns_of(rows, (Column("rank"), *(Column(device.name) for device in found.devices)))


def _gain_there(found: SearchOutput, there: SpeedupThere) -> float:
    """Speed-up of a shape on one of several devices: to the same loss where shapes are ranked by it."""
    return there.net_speedup if measures_loss(found) and there.net_speedup is not None else there.speedup


def describe_portability(found: SearchOutput) -> list[str]:
    """Loss from using one shape on all devices, one line per device."""
    if not found.candidates:
        return []
    first = found.candidates[0]
    what = OBJECTIVES[found.objective].description
    lines = []
    for device in found.devices:
        alone, shared = device.best_alone.on_devices[device.name], first.on_devices[device.name]
        behind = f"{100.0 * (shared.regret - 1.0):.1f} %"
        loss = f"with the shared shape the {what} is {behind} more"
        lines.append(
            f"{device.name}: rank 1 gives {_gain_there(found, shared):.3f}x; the best shape of this device alone gives "
            f"{_gain_there(found, alone):.3f}x ({describe_changes(device.best_alone)}): "
            + (loss if measures_loss(found) else f"at equal size the shared shape is {behind} slower")
        )
    return lines


def describe_run_cost(found: SearchOutput) -> list[str]:
    """Savings of the first shape, and of the best with one changed field, over the training run."""
    run = found.horizon
    if run is None:
        return []
    cost = run.baseline
    power = (
        f" (energy at the board power of {run.board_watts:g} W, an upper bound)" if cost.energy_kwh is not None else ""
    )
    lines = [f"Over {format_count(run.train_tokens)} tokens the baseline takes {_cost_words(cost)}{power}"]
    if run.lifetime_usd is not None:
        lines.append(f"    to train and to serve it costs {format_amount(run.lifetime_usd)} USD")
    shown = {candidate.rank: candidate for candidate in found.candidates[:1]}
    shown |= {best.rank: best for best in best_by_num_changes(found).values() if len(best.changed_fields) == 1}
    for rank, candidate in shown.items():
        if candidate.saves is None or candidate.saves_low is None or candidate.saves_high is None:
            continue
        low, high = candidate.saves_low.device_hours, candidate.saves_high.device_hours
        goal = " to the same loss" if measures_loss(found) else ""
        lines.append(
            f"    rank {rank} ({describe_changes(candidate)}) saves {_cost_words(candidate.saves)}{goal}; hours "
            f"{format_amount(low)} to {format_amount(high)}"
        )
    return [*lines, ""]


def _cost_words(cost: RunCost) -> str:
    parts = [f"{format_amount(cost.device_hours)} device hours"]
    if cost.energy_kwh is not None:
        unit, unit_kwh = energy_unit(cost.energy_kwh)
        parts.append(f"{format_amount(cost.energy_kwh / unit_kwh)} {unit}")
    if cost.usd is not None:
        parts.append(f"{format_amount(cost.usd)} USD")
    return ", ".join(parts)


def describe_space(found: SearchOutput) -> str:
    """How many shapes were searched, excluded by each limit, priced, and faster, in one line."""
    space = found.space
    refused = sum(space.refused.values())
    parts = [
        f"{format_number_of(space.num_shapes, 'shape')} in {format_seconds(found.elapsed_s)}",
        f"{space.outside_guard:,} outside the quality guard",
        f"{space.outside_budget:,} of another size",
        *([f"{refused:,} cannot run"] if refused else []),
        f"{space.priced:,} priced",
        f"{space.faster:,} {'better' if measures_loss(found) else 'faster'}",
    ]
    return ("" if found.is_complete else "interrupted, best so far: ") + "; ".join(parts)


def _print_best(number: str, candidate: CandidateOutput, console: Console) -> None:
    fields = f"{number} ({', '.join(candidate.changed_fields)})"
    console.print(
        f"{fields}: rank {candidate.rank}, {describe_gain(candidate)}, {describe_changes(candidate)}", soft_wrap=True
    )
    gains = [gain for gain in candidate.gains if gain.saved_fraction > 0.0][:_GAINS_SHOWN]
    for gain in gains:
        console.print(
            f"    {gain.module} saves {100.0 * gain.saved_fraction:.1f} %: {gain.reason}", style="dim", soft_wrap=True
        )
    moved = describe_measures(candidate)
    if moved:
        console.print(f"    moves {moved}", style="dim", soft_wrap=True)


_VERIFIED_COLUMNS = (
    Column("rank", "{rank}"),
    Column("predicted", "{predicted:.3f}x"),
    Column("predicted of measured", "{predicted_of_measured:.3f}x"),
    Column("measured", "{measured:.3f}x"),
    Column("rounds", "{measured_low:.3f} to {measured_high:.3f}", rank=1),
    Column("covered", "{covered_fraction:.0p}", rank=2),
)


def print_verification(found: Verification, console: Console) -> None:
    """Print measured and predicted speed-ups, and the parts of the first shape."""
    console.print(f"Measured on {found.device} ({found.library}), {found.num_rounds} alternating rounds", style="bold")
    print_table(columns_of(found.shapes, _VERIFIED_COLUMNS), console)
    first = found.shapes[0]
    total_s = sum(times.baseline_s for times in first.modules.values())
    modules = sorted(first.modules.items(), key=lambda pair: pair[1].shape_s - pair[1].baseline_s)
    headings = (
        Column("part", lambda pair: pair[0], is_text=True),
        Column("baseline", lambda pair: format_seconds(pair[1].baseline_s)),
        Column("shape", lambda pair: format_seconds(pair[1].shape_s)),
        Column("saves", lambda pair: f"{100.0 * (pair[1].baseline_s - pair[1].shape_s) / total_s:+.1f} %"),
    )
    console.print()
    console.print(f"Rank {first.rank} by part of the model, measured, for equal work", style="bold")
    print_table(columns_of(modules, headings), console)
    print_notes(found.notes, console)
    console.print()


def search_page(found: SearchOutput) -> str:
    """Render a result as one HTML document."""
    from shapewright.app.figures.shapes import time_per_token_chart
    from shapewright.app.report.page import Figure, Section, Words, render_page, table_of

    sections: list[Section] = [Words("Summary", _summary(found))]
    if found.candidates:
        caption = "Down and to the right is better: less time for more parameters."
        sections.append(Figure(time_per_token_chart(found), caption))
        sections.append(table_of(candidates_heading(found), candidate_columns(found.candidates)))
        if found.devices:
            sections.append(table_of("On each device", device_columns(found)))
        sections.append(table_of(front_heading(found), candidate_columns(found.pareto)))
        sections.append(Words("Best by number of changed fields", _best_words(found)))
    listed = [*found.candidates, *found.pareto]
    legend = [describe_letters(listed, candidate_columns(listed))] if found.candidates else []
    sections.append(Words("Notes", [*legend, describe_space(found), *found.notes]))
    title = f"Shapes of the size of {found.step.config.title}"
    return render_page(title, sections, subtitle=describe(found.step))


def _summary(found: SearchOutput) -> list[str]:
    verdict = [] if found.verdict is None else [f"Verdict: {found.verdict.text}."]
    if not found.candidates:
        return [*verdict, "No shape within the limits is predicted to be better."]
    first = found.candidates[0]
    words = (
        f"Rank 1 runs {first.speedup:.3f} times as fast as the baseline (90 % interval {first.speedup_low:.3f} to "
        f"{first.speedup_high:.3f}), {first.equal_size_speedup:.3f} times at equal size: {describe_changes(first)}."
    )
    return [*verdict, words, *describe_portability(found), *(line for line in describe_run_cost(found) if line)]


def _best_words(found: SearchOutput) -> list[str]:
    words = []
    for number, candidate in best_by_num_changes(found).items():
        gains = "; ".join(
            f"{gain.module} saves {100.0 * gain.saved_fraction:.1f} % ({gain.reason})"
            for gain in candidate.gains[:3]
            if gain.saved_fraction > 0.0
        )
        moved = describe_measures(candidate)
        head = f"{number} ({', '.join(candidate.changed_fields)}): rank {candidate.rank}"
        parts = [f"{head}, {describe_gain(candidate)}, {describe_changes(candidate)}", gains]
        words.append(". ".join([*filter(None, parts), *([f"Moves {moved}"] if moved else [])]))
    return words
