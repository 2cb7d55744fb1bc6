"""A prediction as text (verdict, operations, warnings), and a sweep as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.app.report.columns import Column, columns_of, fill, print_facts, print_notes, print_table
from shapewright.app.report.outputs.model import degree_words
from shapewright.core.units import TERA, format_bytes, format_count, format_percent, format_rate, format_seconds
from shapewright.memory.states import count_trained_parameters
from shapewright.pricing.software import TUNED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

    from shapewright.app.report.outputs.compare import SweepOutput, SweptRow
    from shapewright.app.report.outputs.predict import OperationOutput, PredictOutput, StepMemory
    from shapewright.app.report.traced.outputs import TracedMemoryParts, TracedPredictOutput
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_PASSES = {"forward": "fwd", "backward": "bwd", "recompute": "recomp", "step": "step"}


def print_prediction(output: PredictOutput, console: Console, *, top: int | None = 20) -> None:
    """Print a whole prediction.

    Args:
        top: Operations to list, slowest first; None for all.
    """
    print_verdict(output, console)
    console.print()
    print_operations(output, console, top=top)
    if any(entry.exposed_fraction < 1.0 for entry in output.operations):
        console.print("share: of communication, only the exposed part", style="dim")
    print_notes((*output.notes, *output.warnings), console)


def print_operations(output: PredictOutput | TracedPredictOutput, console: Console, *, top: int | None) -> None:
    """Print the table of operations, and how many are left out."""
    print_table(operation_columns(output, top=top), console)
    hidden = 0 if top is None else max(0, len(output.operations) - top)
    if hidden:
        console.print(f"{hidden} more operations; --all lists them", style="dim")


def print_verdict(output: PredictOutput, console: Console) -> None:
    """Print the scenario in one line, and the main results in one row."""
    console.print(describe(output), style="bold", soft_wrap=True)
    print_facts(verdict(output), console)


def describe(output: PredictOutput) -> str:
    """One line: model, device, workload, layout."""
    return describe_job(
        output.config,
        output.workload,
        output.layout.layout,
        num_parameters=output.parameters.total,
        tokens_per_step=output.tokens_per_step,
        software=output.software,
        device_title=output.device.title,
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


def verdict(output: PredictOutput) -> dict[str, str]:
    """Main results of a prediction as texts by name."""
    workload, memory = output.workload, output.memory
    step = {"train": "step", "prefill": "time to first token", "decode": "time per token"}[workload.phase]
    facts = {
        step: fill("{step_time_s} ({step_time_low_s} to {step_time_high_s})", output),
        **_throughput(output),
        "model rate": format_rate(output.model_flops_per_s),
        "MFU": format_percent(output.mfu),
    }
    if workload.phase == "decode":
        facts["MBU"] = format_percent(output.mbu)
    if workload.recompute != "none":
        facts["HFU"] = format_percent(output.hfu)
    if output.bubble_time_s > 0.0 and workload.is_training:
        facts["bubble"] = format_percent(output.bubble_time_s / output.step_time_s)
    return {
        **facts,
        "layer forward": format_seconds(output.layer_forward_time_s),
        "memory": memory_words(memory),
    }


def _throughput(output: PredictOutput) -> dict[str, str]:
    """Tokens per second and device, and images where the step has some."""
    facts = {"tokens/s/device": f"{output.tokens_per_s_per_device:,.0f}"}
    if output.images_per_s_per_device is None or output.workload.phase == "decode":
        return facts
    images = {"images/s/device": f"{output.images_per_s_per_device:,.1f}"}
    return images if output.config.patches is not None else {**facts, **images}


def memory_words(memory: StepMemory | TracedMemoryParts) -> str:
    """Memory against the capacity of the device."""
    words = f"{format_bytes(memory.total_bytes)} of {format_bytes(memory.capacity_bytes)}"
    return words if memory.fits else f"{words} (does not fit)"


class _OperationRow(NamedTuple):
    """An operation as a row of a table: its output, its share of the step, and its rate over the peak of its format."""

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


def operation_columns(output: PredictOutput | TracedPredictOutput, *, top: int | None = None) -> list[Column]:
    """Operations, slowest first, as the columns of a table."""
    ranked = sorted(output.operations, key=lambda entry: -entry.total_time_s)[:top]
    rows = (_row(entry, output.step_time_s, output.dense_flops_per_s.get(entry.dtype)) for entry in ranked)
    return columns_of(rows, _OPERATION_COLUMNS)


def _row(facts: OperationOutput, step_s: float, peak: float | None) -> _OperationRow:
    done = facts.executed_flops
    rate = done / facts.time_s if done and facts.time_s else None
    share = facts.total_time_s / step_s if step_s else None
    return _OperationRow(facts, share, rate, None if rate is None or peak is None else rate / peak)


def _rate_words(rate: float) -> str:
    return f"{rate / TERA:.{0 if rate >= TERA else 2}f}" if rate else ""


def _tile_words(facts: OperationOutput) -> str:
    """Tile of the assumed kernel, and the parts of k where there are several."""
    parts = f"/{facts.split_k}" if (facts.split_k or 1) > 1 else ""
    return "" if facts.tile is None else f"{facts.tile[0]}x{facts.tile[1]}{parts}"


_SWEEP_COLUMNS = (
    Column("time", "{step_time_s}"),
    Column("90 % interval", "{step_time_low_s} to {step_time_high_s}"),
    Column("tokens/s/device", "{tokens_per_s_per_device:,.0f}"),
    Column("tokens/s/sequence", "{tokens_per_s_per_sequence:,.1f}", rank=2),
    Column("MFU", "{mfu}", rank=1),
    Column("memory", "{total_bytes}", rank=1),
    Column("", lambda row: row.problem or ("" if row.fits else "does not fit"), is_text=True),
)


def print_sweep(output: SweepOutput, console: Console) -> None:
    """Print one row per combination; rows that cannot run have the reason."""
    from shapewright.prediction.sweep import SWEPT_SIZES

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
