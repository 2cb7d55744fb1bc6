"""Parameters, FLOPs, batches and budgets as tables, on request with the formula of each number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_facts, print_notes, print_table
from shapewright.core.dtypes import stored_weight_bytes
from shapewright.core.units import GIGA, format_bytes, format_count, format_percent, format_rate
from shapewright.prediction.training_run import CHINCHILLA_TOKENS_PER_PARAMETER

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.calculators import BatchOutput, FlopsOutput, ParamsOutput
    from shapewright.prediction.calculators.parameters import Term

_WEIGHT_FORMATS = ("fp32", "bf16", "fp8", "int4")
_BATCH_ROWS = 40
LETTERS = (
    "h hidden_size, e embedding_size, L layers (L_d dense, L_m with experts, L_e encoder), a num_heads, a_kv "
    "num_kv_heads, d head_dim, d_v v_head_dim, f intermediate_size, f_m moe_intermediate_size, f_s of shared experts, "
    "E num_experts, v vocab_size, s positions, r_q r_kv d_r ranks and rotary width of MLA, k token types, n_b relative "
    "position buckets"
)
_EXPLANATION_COLUMNS = (
    Column("formula", "{formula}", rank=2, is_text=True),
    Column("in numbers", "{numbers}", rank=3, is_text=True),
)
_CONVENTION_COLUMNS = (
    Column("training, GFLOP/token", lambda flops: _giga(flops.model_flops_per_token)),
    Column("with recompute", lambda flops: _giga(flops.hardware_flops_per_token), rank=1),
    Column("formula", "{formula}", rank=2, is_text=True),
    Column("used by", "{used_by}", rank=3, is_text=True),
)
_BATCH_COLUMNS = (
    Column("global batch", "{global_batch_size:,}"),
    Column("micro-batch", "{micro_batch_size:,}"),
    Column("replicas", "{data_parallel:,}"),
    Column("accumulation", "{num_microbatches:,}"),
    Column("bubble", "{bubble_fraction}"),
)


def _giga(flops: float | None) -> str:
    return "" if flops is None else f"{flops / GIGA:,.2f}"


def print_parameters(output: ParamsOutput, console: Console, *, explains: bool) -> None:
    """Print parameter counts by component."""
    total = output.total
    console.print(f"{output.config.title}: {total:,} parameters", style="bold")
    facts = {"non-embedding": f"{output.non_embedding:,}"}
    if output.active != total:
        facts["active per token"] = f"{output.active:,}"
    facts |= {f"weights in {name}": format_bytes(stored_weight_bytes(name) * float(total)) for name in _WEIGHT_FORMATS}
    print_facts(facts, console)
    console.print()
    _print_terms(output.components, console, explains=explains, total=total)
    if explains:
        console.print(f"letters: {LETTERS}", style="dim", soft_wrap=True)
    print_notes(output.notes, console)


def print_flops(output: FlopsOutput, console: Console, *, explains: bool) -> None:
    """Print FLOPs per token by convention, and the budget of a training run."""
    recompute = "no" if output.recompute == "none" else output.recompute
    console.print(f"{output.config.title}: FLOPs per token, s={output.seq_len}, {recompute} recompute", style="bold")
    _print_terms(output.per_token, console, explains=explains)
    if explains:
        words = "W active weights of the layers, A attention (whole square), V weights of the logits"
        console.print(f"letters: {words}", style="dim", soft_wrap=True)
    console.print()
    names = Column("FLOP convention", is_text=True, cells=tuple(output.conventions))
    print_table([names, *columns_of(output.conventions.values(), _CONVENTION_COLUMNS)], console)
    console.print()
    _print_budget(output, console, explains=explains)
    print_notes(output.notes, console)


def _print_budget(output: FlopsOutput, console: Console, *, explains: bool) -> None:
    """Print tokens, FLOPs, days and cost of a training run."""
    budget = output.budget
    active = output.chinchilla_tokens / CHINCHILLA_TOKENS_PER_PARAMETER
    facts = {"Chinchilla tokens": f"{format_count(output.chinchilla_tokens)} (20 x {format_count(active)})"}
    if budget is not None:
        facts["tokens"] = f"{format_count(budget.num_tokens)} ({budget.tokens_per_parameter:.1f} per parameter)"
        facts["FLOPs"] = f"{budget.flops:.3g}"
        if budget.training_days is not None and budget.flops_per_s_per_device is not None:
            facts["devices"] = f"{budget.num_devices:,} at {format_rate(budget.flops_per_s_per_device)}"
            facts["days"] = f"{budget.training_days:,.1f}"
        if budget.usd is not None:
            facts["cost"] = f"{budget.usd:,.0f} USD"
    print_facts(facts, console)
    if explains and budget is not None:
        per_token = round(budget.flops / (budget.num_parameters * budget.num_tokens))
        console.print(
            f"FLOPs = {per_token} P T = {per_token} * {budget.num_parameters:.6g} * {budget.num_tokens:.6g} (arXiv "
            f"2001.08361, section 2.1); days = FLOPs / (n X) / 86400 (arXiv 2104.04473, eq. 4); Chinchilla: T = 20 P "
            f"(arXiv 2203.15556, table 3)",
            style="dim",
            soft_wrap=True,
        )


def print_batch(output: BatchOutput, console: Console, *, explains: bool) -> None:
    """Print all combinations that make the batch."""
    solutions = output.solutions
    has_pipeline = any(one.bubble_fraction for one in solutions)
    columns = _BATCH_COLUMNS if has_pipeline else _BATCH_COLUMNS[:-1]
    print_table(columns_of(solutions[:_BATCH_ROWS], columns), console)
    if len(solutions) > _BATCH_ROWS:
        console.print(f"{_BATCH_ROWS} of {len(solutions)} solutions; --json has all", style="dim")
    if explains:
        console.print(
            "global batch = micro-batch * replicas * accumulation; replicas = devices / (tensor * pipeline * context); "
            "bubble = (p - 1) / (v m + p - 1) of the step, with m micro-batches per replica (arXiv 2104.04473, section "
            "2.2)",
            style="dim",
            soft_wrap=True,
        )


def _print_terms(terms: Sequence[Term], console: Console, *, explains: bool, total: int | None = None) -> None:
    headings = [
        Column("part", lambda term: term.name.replace("_", " "), is_text=True),
        Column("count", "{value:,.0f}"),
        *([Column("share", lambda term: format_percent(term.value / total), rank=1)] if total else []),
        *(_EXPLANATION_COLUMNS if explains else ()),
    ]
    print_table(columns_of(terms, headings), console)
