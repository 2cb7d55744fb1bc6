"""What a reader of a predicted step must know beside its numbers, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from shapewright.lowering import count_masked_fraction
from shapewright.operations import Collective
from shapewright.perf.calibration import RECORD_KINDS, ROOFLINE_BOUND, UNCALIBRATED, load_record
from shapewright.perf.expert_kernels import say_expert_kernel
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.adding_up import PricedOperation
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.memory import MemoryEstimate
    from shapewright.workload import Workload

# MFU from which a reader is told what of it masked scores are. A matter of presentation: no price depends on it.
_HIGH_MFU = 0.75
# Share of a step from which the host's links are worth a word. A matter of presentation likewise.
_MUCH_COMMUNICATION = 0.3


def say_too_large(device: Device, workload: Workload, memory: MemoryEstimate) -> Iterator[str]:
    """That a step does not fit, and which options make it smaller."""
    if memory.total_bytes > device.memory_bytes:
        remedies = (
            "lower --micro-batch-size, turn on --recompute full, or spread it with --tensor-parallel, "
            "--pipeline-parallel or --zero-stage"
            if workload.is_training
            else "lower --micro-batch-size, take a narrower --weight-dtype or --kv-cache-dtype, or spread it with "
            "--tensor-parallel or --pipeline-parallel"
        )
        yield (
            f"does not fit: needs {format_bytes(memory.total_bytes)} of {format_bytes(device.memory_bytes)} on "
            f"{device.name}; {remedies}"
        )


def say_uncalibrated(device: Device, labels: Mapping[str, str]) -> Iterator[str]:
    """Which kinds of operations no record of the device's own prices, and which a roof of the sheet alone.

    Args:
        device: What the step runs on.
        labels: Which record priced each kind of operation.
    """
    if unmeasured := [
        f"{kind} {reason}" for kind, label in labels.items() if (reason := _why_uncalibrated(label, device))
    ]:
        yield f"uncalibrated on {device.name}: {', '.join(unmeasured)}; intervals are wider for it"
    if bounds := [kind for kind, label in labels.items() if label == ROOFLINE_BOUND]:
        yield (
            f"{', '.join(bounds)} on {device.name}: bounds from the data sheet and no predictions, so that real steps "
            "take longer"
        )


def say_idle(workload: Workload, layout: ParallelLayout, bubble_fraction: float) -> Iterator[str]:
    """That a batch which nobody gave leaves a pipeline idle, and which option does nothing on one replica."""
    if not workload.is_training:
        return
    if workload.global_batch_size is None and layout.pipeline_parallel > 1:
        yield (
            f"no global batch was given: with one micro-batch for each replica and stage the pipeline stands idle for "
            f"{100.0 * bubble_fraction:.0f} % of the step; --global-batch gives yours"
        )
    if layout.zero_stage and layout.data_parallel * layout.context_parallel == 1:
        yield f"zero_stage={layout.zero_stage} has no effect: there is one replica, and nothing to shard over"


def say_host(device: Device, priced: Iterable[PricedOperation], step_s: float) -> Iterator[str]:
    """That a step waits for PCIe, which was timed in one host: sockets and switches differ more than devices do."""
    if device.intra_node_link or device.roofline_only or step_s <= 0.0:
        return
    sent_s = sum(
        entry.total_time_s
        for entry in priced
        if isinstance(entry.operation, Collective)
        and not entry.operation.is_host
        and int(entry.operation.ranks_per_node) > 1
    )
    if sent_s >= _MUCH_COMMUNICATION * step_s:
        yield (
            f"{100.0 * sent_s / step_s:.0f} % of the step is communication over PCIe, timed in one host of L40S, where "
            f"2, 4 and 8 devices share 20, 5 and 2 GB/s; yours may be several times faster, and a pipeline sends less "
            f"than --tensor-parallel"
        )


def _why_uncalibrated(label: str, device: Device) -> str:
    """What stands in for a record of the device's own and why that one, in parentheses; nothing where it has one."""
    if not label.startswith(UNCALIBRATED):
        return ""
    words = label.removeprefix(f"{UNCALIBRATED} ")
    for record in (load_record(kind, device, uncalibrated=True) for kind in RECORD_KINDS):
        words = words.replace(record.id, f"{record.id}: {record.lent_as}")
    return words


def say_masked(config: TransformerConfig, workload: Workload, mfu: float) -> Iterator[str]:
    """That a high MFU counts scores that no device works on, where masks and windows skip some."""
    if mfu <= _HIGH_MFU:
        return
    masked_fraction = count_masked_fraction(config, workload)
    if masked_fraction > 0.0:
        rest = mfu * (1.0 - masked_fraction)
        yield f"MFU counts scores that the mask skips, as Megatron-LM's does; without them it is {100.0 * rest:.1f} %"


def say_kernel_of_experts(
    config: TransformerConfig, device: Device, workload: Workload, *, uncalibrated: bool
) -> Iterator[str]:
    """Which measured kernel prices experts in a narrow format, since kernels of one format differ by a factor."""
    if config.is_moe and not device.roofline_only:
        record = load_record("moe", device, uncalibrated=uncalibrated)
        words = say_expert_kernel(
            record,
            workload.dtype,
            is_training=workload.is_training,
            is_own=workload.expert_kernel == "as-16-bit",
        )
        if words:
            yield words
