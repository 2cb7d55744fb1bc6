"""A prediction as text (verdict, operations, warnings), and a sweep as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.app.report.columns import Column, columns_of, print_facts, print_notes, print_table
from shapewright.app.report.outputs.predict import degree_words, operation_output
from shapewright.core.units import TERA, format_bytes, format_count, format_percent, format_rate, format_seconds
from shapewright.lowering.operations import Attention
from shapewright.memory import count_trained_parameters
from shapewright.prediction.predict import Prediction
from shapewright.prediction.sweep import SWEPT_SIZES
from shapewright.pricing.software import TUNED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

    from shapewright.app.report.outputs.predict import OperationOutput, SweepOutput, SweptRow
    from shapewright.models import TransformerConfig
    from shapewright.prediction.composition import PricedOperation
    from shapewright.prediction.traced import TracedPrediction
    from shapewright.workload import ParallelLayout, Workload

_PASSES = {"forward": "fwd", "backward": "bwd", "recompute": "recomp", "step": "step"}


def print_prediction(
    prediction: Prediction, console: Console, *, notes: tuple[str, ...] = (), top: int | None = 20
) -> None:
    """Print a whole prediction.

    Args:
        prediction: The prediction.
        console: Console to print on.
        notes: Notes of the scenario.
        top: Operations to list, slowest first; None for all.
    """
    print_verdict(prediction, console)
    console.print()
    print_table(operation_columns(prediction, top=top), console)
    hidden = 0 if top is None else max(0, len(prediction.operations) - top)
    if hidden:
        console.print(f"{hidden} more operations; --all lists them", style="dim")
    if any(entry.exposed_fraction < 1.0 for entry in prediction.operations):
        console.print("share: of communication, only the exposed part", style="dim")
    print_notes((*notes, *prediction.warnings), console)


def print_verdict(prediction: Prediction, console: Console) -> None:
    """Print the scenario in one line, and the main results in one row."""
    console.print(describe(prediction), style="bold", soft_wrap=True)
    print_facts(verdict(prediction), console)


def describe(prediction: Prediction) -> str:
    """One line: model, device, workload, layout."""
    return describe_job(
        prediction.config,
        prediction.workload,
        prediction.layout,
        num_parameters=prediction.parameters.total,
        tokens_per_step=prediction.tokens_per_step,
        software=prediction.software,
        device_title=prediction.device.title,
    )


def describe_job(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    num_parameters: int,
    tokens_per_step: int,
    software: str,
    device_title: str = "",
) -> str:
    """One line: model, device if given, workload, layout."""
    lengths = f"s={workload.seq_len}" if workload.phase != "decode" else f"context={workload.context_len}"
    recompute = f", {workload.recompute_text}" if workload.recompute != "none" else ""
    stack = f", software of {software}" if software != TUNED else ""
    tuned = finetuning_words(config, workload)
    return (
        f"{config.title} ({format_count(num_parameters)} parameters){f' on {device_title}' if device_title else ''}: "
        f"{workload.phase}, {_batch_words(workload, layout, tokens_per_step)} {lengths}, {workload.dtype}, "
        f"{workload.attention} attention{recompute}{tuned}; {_layout_words(layout)}{stack}"
    )


def finetuning_words(config: TransformerConfig, workload: Workload) -> str:
    """Method of fine-tuning and number of trained parameters, empty if all are trained; packed documents."""
    words = f", documents of {workload.packed}" if workload.packed else ""
    if workload.trains_all:
        return words
    trained = format_count(count_trained_parameters(config, workload))
    detail = f" rank {workload.adapter_rank} on {workload.lora_targets or 'all-linear'}"
    if workload.last_layers is not None:
        detail = f" of {workload.last_layers}"
    return f", {workload.finetune}{detail} ({trained} trained){words}"


def _batch_words(workload: Workload, layout: ParallelLayout, tokens_per_step: int) -> str:
    """Micro-batch, and the batch of the step where it can differ."""
    has_steps = workload.global_batch_size is not None or layout.data_parallel * layout.pipeline_parallel > 1
    if not (workload.is_training and has_steps):
        return f"b={workload.micro_batch_size}"
    return f"b={workload.micro_batch_size} B={tokens_per_step // workload.query_len}"


def _layout_words(layout: ParallelLayout) -> str:
    """Every degree above one, and other fields that differ from their defaults."""
    words = degree_words(layout)
    if layout.zero_stage and layout.data_parallel * layout.context_parallel > 1:
        words.append(f"ZeRO {layout.zero_stage}")
    if layout.pipeline_schedule != "1f1b":
        words.append(layout.pipeline_schedule)
    ends = [name for name, is_counted in zip(("embedding", "loss"), layout.ends_as_layers, strict=True) if is_counted]
    words += [f"{' and '.join(ends)} as layers"] if ends else []
    if layout.tensor_parallel > 1 and not layout.sequence_parallel:
        words.append("no SP")
    return ", ".join(words) or "one device"


def with_utilization(columns: Iterable[Column], phase: str) -> list[Column]:
    """Columns of a table with the utilization of a phase: MBU in decode, otherwise MFU."""
    mbu = Column("MBU", "{mbu}", rank=1)
    return [mbu if each.name == "MFU" and phase == "decode" else each for each in columns]


def verdict(prediction: Prediction) -> dict[str, str]:
    """Main results of a prediction as texts by name."""
    workload = prediction.workload
    step = {"train": "step", "prefill": "time to first token", "decode": "time per token"}[workload.phase]
    capacity, used = prediction.device.memory_bytes, prediction.memory.total_bytes
    middle, low, high = map(
        format_seconds, (prediction.step_time_s, prediction.step_time_low_s, prediction.step_time_high_s)
    )
    facts = {
        step: f"{middle} ({low} to {high})",
        "tokens/s/device": f"{prediction.tokens_per_s_per_device:,.0f}",
        "model rate": format_rate(prediction.model_flops_per_s),
        "MFU": format_percent(prediction.mfu),
    }
    if workload.phase == "decode":
        facts["MBU"] = format_percent(prediction.mbu)
    if workload.recompute != "none":
        facts["HFU"] = format_percent(prediction.hfu)
    if prediction.bubble_time_s > 0.0 and workload.is_training:
        facts["bubble"] = format_percent(prediction.bubble_time_s / prediction.step_time_s)
    return {
        **facts,
        "layer forward": format_seconds(prediction.layer_forward_time_s),
        "memory": f"{format_bytes(used)} of {format_bytes(capacity)}" + ("" if used <= capacity else " (does not fit)"),
    }


class _OperationRow(NamedTuple):
    """An operation as a row of a table: its output, its share of the step, and its rate over the peak."""

    facts: OperationOutput
    share: float | None
    rate: float | None
    peak_fraction: float | None


_OPERATION_COLUMNS = (
    Column("operation", "{facts.name}", is_text=True),
    Column("pass", lambda row: _PASSES[row.facts.pass_name], rank=4, is_text=True),
    Column("size (m x n x k)", "{facts.shape}", rank=3, is_text=True),
    Column("runs", "{facts.repeats}", rank=5),
    Column("time", "{facts.time_s}"),
    Column("share", "{share:.1p}"),
    Column("TFLOP/s", lambda row: _rate_words(row.rate or 0.0), rank=6),
    Column("of peak", "{peak_fraction:.1p}", rank=1),
    Column("tile", lambda row: _tile_words(row.facts), rank=8),
    Column("tile eff.", "{facts.tile_efficiency:.1p}", rank=7),
    Column("waves", "{facts.num_waves}", rank=9),
    Column("wave eff.", "{facts.wave_efficiency:.1p}", rank=7),
    Column("align", "{facts.alignment} B", rank=2),
    Column("bound by", "{facts.bound_by}", is_text=True),
)


def operation_columns(prediction: Prediction | TracedPrediction, *, top: int | None = None) -> list[Column]:
    """Operations, slowest first, as the columns of a table."""
    ranked = sorted(prediction.operations, key=lambda entry: -entry.total_time_s)[:top]
    dtype = prediction.workload.dtype if isinstance(prediction, Prediction) else prediction.trace.dtype
    peak, step_s = prediction.device.peak_flops_per_s(dtype), prediction.step_time_s
    return columns_of((_row(entry, step_s, peak) for entry in ranked), _OPERATION_COLUMNS)


def _row(entry: PricedOperation, step_s: float, peak: float) -> _OperationRow:
    facts = operation_output(entry)
    # Executed FLOPs, not the whole square of attention: otherwise rates could exceed the peak.
    done = entry.operation.executed_flops if isinstance(entry.operation, Attention) else facts.flops
    rate = float(done) / facts.time_s if done and facts.time_s else None
    share = entry.total_time_s / step_s if step_s else None
    return _OperationRow(facts, share, rate, None if rate is None else rate / peak)


def _rate_words(rate: float) -> str:
    return f"{rate / TERA:.{0 if rate >= TERA else 2}f}" if rate else ""


def _tile_words(facts: OperationOutput) -> str:
    """Tile of the assumed kernel, and the parts of k where there are several."""
    parts = f"/{facts.split_k}" if (facts.split_k or 1) > 1 else ""
    return "" if facts.tile is None else f"{facts.tile[0]}x{facts.tile[1]}{parts}"


_SWEEP_COLUMNS = (
    Column("time", "{step_time_s}"),
    Column("90 % interval", "{step_time_low_s} to {step_time_high_s}", rank=1),
    Column("tokens/s/device", "{tokens_per_s_per_device:,.0f}"),
    Column("tokens/s/sequence", "{tokens_per_s_per_sequence:,.1f}", rank=2),
    Column("MFU", "{mfu}", rank=1),
    Column("memory", "{total_bytes}", rank=1),
    Column("", lambda row: row.problem or ("" if row.fits else "does not fit"), is_text=True),
)


def print_sweep(output: SweepOutput, console: Console) -> None:
    """Print one row per combination; rows that cannot run have the reason."""
    phase = output.workload.phase
    console.print(
        f"{output.config.title} on {output.device.title}: {phase}, {output.workload.dtype}",
        style="bold",
        soft_wrap=True,
    )
    # Swept sizes change the number of parameters, which is shown too.
    sizes = [Column("parameters", "{parameters:count}")] if set(SWEPT_SIZES) & set(output.axes) else []
    axes = [Column(field, _axis_value(field)) for field in output.axes]
    shown = _SWEEP_COLUMNS if "phase" in output.axes else with_utilization(_SWEEP_COLUMNS, phase)
    print_table(columns_of(output.rows, [*axes, *sizes, *shown]), console)
    print_notes(output.notes, console)


def _axis_value(field: str) -> Callable[[SweptRow], str]:
    return lambda row: str(row.values[field])
