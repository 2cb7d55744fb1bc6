"""Output of ``memory``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shapewright.app.report.flags import flag_of
from shapewright.app.report.outputs.model import (
    DeviceSummary,
    JobLayout,
    Output,
    described,
    job_layout,
    summarize_device,
    take,
)
from shapewright.app.report.outputs.predict import MemoryComponents
from shapewright.core.records import dataclass
from shapewright.memory.estimate import ALLOCATOR_BAND_FRACTION
from shapewright.memory.states import count_trained_parameters
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.capacity.fit import is_tight
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.prediction.capacity.fit import Capacity
    from shapewright.prediction.capacity.fit_options import FitOption, Offload


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one device of a pipeline stage."""

    stage: int = described("number of the stage, from 0")
    total_bytes: float = described("memory of one device")
    components: MemoryComponents = described("the total by component", is_flat=True)


@dataclass(frozen=True, kw_only=True)
class RemedyOutput:
    """A change that makes the job fit."""

    changes: Mapping[str, Any] = described("new value by field")
    flags: str = described("the changes as options of the command line")
    total_bytes: float
    tight: bool = described("whether the memory left is less than the allocator may take")
    num_devices: int = described("devices of the whole job")
    step_time_s: float | None = described("predicted time of the step; null where it cannot be predicted")
    slowdown_fraction: float | None = described("device time per token over that of the job as given, minus 1")


@dataclass(frozen=True, kw_only=True)
class OffloadOutput:
    """Effect of keeping tensors in host memory, compared with the same job without it."""

    total_bytes: float
    freed_bytes: float = described("device memory that it frees")
    host_bytes: float = described("host memory that it takes per device")
    moved_bytes: float = described("bytes copied per step, both directions")
    transfer_s: float | None = described("time of the copies in one direction; null where the link is unknown")
    exposed_s: float | None = described("time by which the step becomes longer; null where unknown")
    exposed_fraction: float | None = described("share of the copies that no computation hides; null for optimizers")
    step_time_s: float | None = described("predicted time of the step with it; null where unknown")
    fits: bool = described("whether the job fits with it")


@dataclass(frozen=True, kw_only=True)
class MemoryOutput(Output):
    """Memory of the job against the device."""

    fits: bool = described("whether every pipeline stage fits")
    verdict: str = described("`fits`, `tight` (fits only if the allocator wastes little) or `does not fit`")
    total_bytes: float
    capacity_bytes: float
    headroom_bytes: float = described("memory left; negative where the job does not fit")
    allocator_band_fraction: float = described("assumed overhead of allocator and communication buffers")
    total_high_bytes: float = described("the total with that overhead")
    components: MemoryComponents = described("the total by component")
    stage: int = described("number of the fullest pipeline stage, from 0")
    stages: list[StageMemory] = described("memory of every pipeline stage")
    largest_micro_batch_size: int = described("largest micro-batch that fits, all else unchanged; 0 if none does")
    largest_seq_len: int | None = described("longest sequence that fits; 0 if none does, null in decode")
    largest_context_len: int | None = described("longest context that fits; 0 if none does, null except in decode")
    remedies: list[RemedyOutput] = described(
        "changes that make the job fit: on the same devices first, then on more, cheapest in time first"
    )
    nearest: RemedyOutput | None = described("the change closest to fitting where there is no remedy; else null")
    host_bytes: float = described("host memory per device for offloaded tensors")
    host_link_bytes_per_s: float | None = described("rate of the host link; null where unknown")
    offload: OffloadOutput | None = described("activation offload, whether used or not; null in inference")
    optimizer_offload: OffloadOutput | None = described("optimizer offload; null in inference and for muon")
    trained_parameters: int = described("parameters that training updates, such as those of adapters; 0 in inference")
    optimizer: str | None = described("name of the optimizer; null in inference")
    software: str
    config: TransformerConfig
    device: DeviceSummary
    workload: Workload
    layout: JobLayout
    notes: list[str]
    source: str


def memory_output(found: Capacity) -> MemoryOutput:
    """Output of a capacity estimate."""
    busiest, is_decode = found.busiest, found.workload.phase == "decode"
    return take(
        MemoryOutput,
        found,
        total_bytes=busiest.total_bytes,
        capacity_bytes=found.device.memory_bytes,
        allocator_band_fraction=ALLOCATOR_BAND_FRACTION,
        total_high_bytes=busiest.total_bytes * (1.0 + ALLOCATOR_BAND_FRACTION),
        components=take(MemoryComponents, busiest),
        stage=busiest.stage,
        stages=[take(StageMemory, stage, components=take(MemoryComponents, stage)) for stage in found.stages],
        largest_seq_len=None if is_decode else found.largest_seq_len,
        largest_context_len=found.largest_seq_len if is_decode else None,
        remedies=[_remedy(option, found) for option in found.fit_options],
        nearest=None if found.closest_option is None else _remedy(found.closest_option, found),
        host_bytes=busiest.host_bytes,
        host_link_bytes_per_s=found.device.host_bandwidth_bytes_per_s or found.device.pcie_bandwidth_bytes_per_s,
        offload=_offload(found.offload, found),
        optimizer_offload=_offload(found.optimizer_offload, found),
        trained_parameters=count_trained_parameters(found.config, found.workload),
        optimizer=found.optimizer or None,
        device=summarize_device(found.device),
        layout=job_layout(found.layout),
        source=found.scenario.model.source,
    )


def _remedy(option: FitOption, found: Capacity) -> RemedyOutput:
    return take(
        RemedyOutput,
        option,
        flags=changes_as_flags(option.changes),
        total_bytes=option.needed_bytes,
        tight=is_tight(option.needed_bytes, found.device),
    )


def _offload(offload: Offload | None, found: Capacity) -> OffloadOutput | None:
    if offload is None:
        return None
    return take(OffloadOutput, offload, fits=offload.total_bytes <= found.device.memory_bytes)


def changes_as_flags(changes: Mapping[str, Any]) -> str:
    """Changed fields as options of the command line."""
    return " ".join(flag_of(name) + ("" if value is True else f" {value}") for name, value in changes.items())
