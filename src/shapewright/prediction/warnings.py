"""Warnings of a prediction: what limits the use of its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.core.notes import Note
from shapewright.core.texts import with_fields
from shapewright.core.units import format_bytes
from shapewright.lowering.flops import count_masked_fraction
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.scan import Scan
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.experts.kernels import describe_expert_kernel

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.memory.estimate import MemoryEstimate
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.pricing.calibration.source import CalibrationSource
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

# MFU from which the share of masked scores is reported. Presentation only: no price depends on it.
_HIGH_MFU = 0.75
# Share of a step from which communication over PCIe is reported. Presentation only.
_MUCH_COMMUNICATION = 0.3
# Multiple of 16-bit keys at which GEMMs load 16 bytes at a time. Presentation only.
_ALIGNED_KEYS = 8
_WIDE_BITS = 16


def warn_if_too_large(device: Device, workload: Workload, memory: MemoryEstimate) -> Iterator[Note]:
    """Warn of a step that does not fit in memory, and name the options that need less."""
    if memory.total_bytes > device.memory_bytes:
        options = with_fields(
            "lower {micro_batch_size}, set {recompute:full}, or shard it with {tensor_parallel}, {pipeline_parallel} "
            "or {zero_stage}"
            if workload.is_training
            else "lower {micro_batch_size}, set a narrower {weight_dtype} or {kv_cache_dtype}, or shard it with "
            "{tensor_parallel} or {pipeline_parallel}"
        )
        yield Note(
            f"does not fit: needs {format_bytes(memory.total_bytes)} of {format_bytes(device.memory_bytes)} on "
            f"{device.name}; " + options,
            "does-not-fit",
        )


def warn_of_calibration(device: Device, sources: Mapping[str, CalibrationSource]) -> Iterator[Note]:
    """Warn of operations priced without a record of this device, or by data-sheet rates alone.

    Args:
        sources: Calibration records by kind of operation.
    """
    parts = [(kind, part) for kind, source in sources.items() for part in source.parts]
    if unmeasured := [f"{kind} {part.stand_in_with_reason}" for kind, part in parts if part.is_uncalibrated]:
        yield Note(f"uncalibrated on {device.name}: {', '.join(unmeasured)}; intervals are wider", "uncalibrated")
    if bounds := dict.fromkeys(kind for kind, part in parts if part.is_roofline_bound):
        yield Note(
            f"{', '.join(bounds)} on {device.name}: roofline bounds from the data sheet, not predictions; "
            f"real steps take longer",
            "roofline-bound",
        )


def warn_of_slow_format(device: Device, workload: Workload) -> Iterator[Note]:
    """Warn of a narrow format whose matrix rate is not above that of 16 bits, and whose casts cost time."""
    rates = device.dense_flops_per_s
    wide = {name: rates[name] for name in ("bf16", "fp16") if name in rates}
    if workload.dtype not in rates or not wide or get_dtype(workload.dtype).bits >= _WIDE_BITS:
        return
    best = max(wide, key=lambda name: wide[name])
    share = rates[workload.dtype] / wide[best]
    if share <= 1.0:
        yield Note(
            f"{workload.dtype} has {100.0 * share:.0f} % of the matrix rate of {best} on {device.name}, by its data "
            f"sheet: GEMMs bound by arithmetic are not faster than in {best}",
            "slow-format",
            "dtype",
        )


def warn_of_scans(priced: Iterable[PricedOperation]) -> Iterator[Note]:
    """Note which scans have no measured kernel, and how they are priced."""
    scans = [entry.operation for entry in priced if isinstance(entry.operation, Scan)]
    if not scans:
        return
    from shapewright.pricing.kernels.scans import BACKWARD_RATIO, BORROWED_SCAN_ERROR, CHUNKLESS_SCANS, MEASURED_SCANS

    unmeasured = [rule for rule in dict.fromkeys(scan.rule for scan in scans) if rule not in MEASURED_SCANS]
    for rule in unmeasured:
        how = "its memory traffic and exponentials" if rule in CHUNKLESS_SCANS else "the kernel of a gated delta net"
        yield Note(
            f"no measured kernel of {rule} scans: priced by {how}, with an interval of at least a factor of "
            f"{BORROWED_SCAN_ERROR:g} each way",
            "assumed",
            "layer_types",
        )
    if any(scan.is_backward for scan in scans):
        yield Note(
            f"no measured gradient of scans: {BACKWARD_RATIO:g} times the forward pass is assumed",
            "assumed",
            "layer_types",
        )


def warn_of_batch(workload: Workload, layout: ParallelLayout, bubble_fraction: float) -> Iterator[Note]:
    """Warn of a pipeline bubble due to the default global batch, and of ZeRO without replicas."""
    if not workload.is_training:
        return
    if workload.global_batch_size is None and layout.pipeline_parallel > 1:
        each = "two micro-batches" if layout.default_microbatches > layout.pipeline_parallel else "one micro-batch"
        yield Note(
            with_fields("{global_batch_size} is not given: with {each} per replica and stage ", each=each)
            + f"the pipeline bubble is {100.0 * bubble_fraction:.0f} % of the step",
            "assumed",
            "global_batch_size",
        )
    # With fewer devices for a matrix of an expert than for others, experts have replicas where nothing else has.
    num_replicas = max(layout.data_parallel * layout.context_parallel, layout.num_expert_replicas)
    if layout.zero_stage and num_replicas == 1:
        yield Note(
            f"zero_stage={layout.zero_stage} has no effect with a single replica",
            "no-effect",
            "zero_stage",
        )


def warn_of_host_link(device: Device, priced: Iterable[PricedOperation], step_s: float) -> Iterator[Note]:
    """Warn of a step dominated by communication over PCIe, which was measured in a single kind of host.

    Hosts differ in sockets and PCIe switches more than devices differ.
    """
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
        yield Note(
            f"{100.0 * sent_s / step_s:.0f} % of the step is communication over PCIe, measured in one host of L40S "
            f"where 2, 4 and 8 devices share 20, 5 and 2 GB/s; other hosts may be several times faster, and pipeline "
            f"parallelism communicates less than tensor parallelism",
            "host-link",
        )


def warn_of_unaligned_cache(workload: Workload, priced: Iterable[PricedOperation]) -> Iterator[Note]:
    """Warn of a decode step whose unfused attention reads an odd number of keys: one more can be faster.

    The number of keys is a contiguous dimension of its GEMMs, which run on slower kernels where it is not aligned.
    """
    num_keys = workload.context_len + 1
    if workload.phase != "decode" or num_keys % _ALIGNED_KEYS == 0:
        return
    if any(
        isinstance(entry.operation, Gemm) and num_keys in (entry.operation.n, entry.operation.k) for entry in priced
    ):
        yield Note(
            f"unfused attention over {num_keys} keys (context_len={workload.context_len} and the new token) runs on "
            f"kernels for unaligned sizes; a cache padded to a multiple of {_ALIGNED_KEYS} is faster",
            "unaligned-cache",
            "context_len",
        )


def warn_of_masked_scores(config: TransformerConfig, workload: Workload, mfu: float) -> Iterator[Note]:
    """Warn of a high MFU that counts attention scores which kernels skip because of masks and windows."""
    if mfu <= _HIGH_MFU:
        return
    masked_fraction = count_masked_fraction(config, workload)
    if masked_fraction > 0.0:
        rest = mfu * (1.0 - masked_fraction)
        yield Note(
            f"MFU includes masked attention scores, as in Megatron-LM; without them it is {100.0 * rest:.1f} %",
            "masked-scores",
        )


def warn_of_utilization(hfu: float, mbu: float) -> Iterator[Note]:
    """Explain utilizations above 1, which count work or traffic that the device does not do."""
    if hfu > 1.0:
        yield Note(
            f"HFU is {hfu:.0%}, above 1: it counts the whole square of attention, of which kernels skip the masked "
            f"part",
            "utilization-above-1",
        )
    if mbu > 1.0:
        yield Note(
            f"MBU is {mbu:.0%}, above 1: it counts operands that stay in the cache as read from memory",
            "utilization-above-1",
        )


def warn_of_expert_kernel(config: TransformerConfig, device: Device, workload: Workload) -> Iterator[Note]:
    """Name the measured kernel that prices experts in a narrow format: kernels of one format differ by a factor."""
    if config.is_moe and not device.roofline_only:
        record = load_record("moe", device)
        text = describe_expert_kernel(
            record,
            workload.dtype,
            is_training=workload.is_training,
            is_own=workload.expert_kernel == "as-16-bit",
        )
        if text:
            yield Note(text, "expert-kernel", "expert_kernel")
