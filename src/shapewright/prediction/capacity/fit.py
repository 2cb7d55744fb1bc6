"""Capacity: memory of every pipeline stage against the device, the largest sizes that fit, and changes that fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING

from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.lowering.checks import describe_long_sequence, max_sequence_length, validate_layout
from shapewright.lowering.counts import num_microbatches
from shapewright.memory.estimate import ALLOCATOR_BAND_FRACTION, estimate_stages
from shapewright.memory.saved_tensors import SCALE_BYTES_PER_ELEMENT
from shapewright.prediction.capacity.fit_options import (
    MOST_DEVICES,
    FitOption,
    Offload,
    estimate_offload,
    find_fit_options,
)
from shapewright.prediction.scenario import ScenarioResult
from shapewright.pricing.software import TUNED
from shapewright.workload.optimizers import OPTIMIZERS
from shapewright.workload.projection import training_recipe

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.memory.estimate import MemoryEstimate
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_LARGEST_BATCH = 2**20
# The longest sequence is rounded down to a multiple of this, unless it is shorter.
_TOKENS_STEP = 128


@dataclass(frozen=True, kw_only=True, repr=False)
class Capacity(ScenarioResult, NotebookDisplay):
    """Memory of a job, compared with the memory of its device.

    Attributes:
        scenario: The job.
        optimizer: Name of the optimizer; empty outside training.
        stages: Memory of one device of each pipeline stage.
        largest_micro_batch_size: Largest micro-batch that fits, all else equal; 0 if none fits.
        largest_seq_len: Longest sequence that fits, in decode the longest context, all else equal; 0 if none does.
        fit_options: Changes that make the job fit, first on the same devices, then on more, in each group the fastest
            first; empty where it fits.
        closest_option: The change that comes closest to fitting where none fits.
        notes: Notes on assumptions.
    """

    scenario: Scenario
    optimizer: str
    stages: tuple[MemoryEstimate, ...]
    largest_micro_batch_size: int
    largest_seq_len: int
    fit_options: tuple[FitOption, ...]
    closest_option: FitOption | None
    notes: tuple[str, ...]

    @property
    def layout(self) -> ParallelLayout:
        """The parallel layout."""
        return self.scenario.layout

    @property
    def software(self) -> str:
        """Training software of the predicted times."""
        return self.scenario.software.name

    @cached_property
    def offload(self) -> Offload | None:
        """Effect of offloading saved activations to host memory; None outside training."""
        return estimate_offload(self.scenario, "offload_activations")

    @cached_property
    def optimizer_offload(self) -> Offload | None:
        """Effect of offloading optimizer states; None outside training, or if the optimizer cannot run on the host."""
        return estimate_offload(self.scenario, "offload_optimizer")

    @property
    def busiest(self) -> MemoryEstimate:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def headroom_bytes(self) -> float:
        """Device memory minus that of the fullest stage; negative if the job does not fit. [byte]"""
        return self.device.memory_bytes - self.busiest.total_bytes

    @property
    def fits(self) -> bool:
        """Whether every stage fits, without allocator overhead."""
        return self.headroom_bytes >= 0.0

    @property
    def verdict(self) -> str:
        """``fits``, ``tight`` (fits, but may not with allocator overhead and buffers), or ``does not fit``."""
        if not self.fits:
            return "does not fit"
        return "tight" if is_tight(self.busiest.total_bytes, self.device) else "fits"


def is_tight(needed_bytes: float, device: Device) -> bool:
    """Whether the job may not fit once allocator overhead and buffers are added."""
    return needed_bytes * (1.0 + ALLOCATOR_BAND_FRACTION) > device.memory_bytes


def estimate_capacity(scenario: Scenario, *, optimizer: str | None = None) -> Capacity:
    """Compare the memory that a job needs with that of its device.

    Args:
        optimizer: A key of shapewright.workload.optimizers.OPTIMIZERS, to replace that of the workload.

    Raises:
        LayoutError: the layout does not divide the model.
        WorkloadError: the optimizer is unknown, the model cannot run this phase, or the global batch is not a multiple
            of the micro-batch over all replicas.
    """
    validate_layout(scenario.config, scenario.workload, scenario.layout)
    num_microbatches(scenario.workload, scenario.layout)
    if optimizer is not None:
        scenario = scenario.replace(optimizer=optimizer)
    config, device, workload = scenario.config, scenario.device, scenario.workload
    stages = estimate_stages(config, workload, scenario.layout)
    fits = max(stage.total_bytes for stage in stages) <= device.memory_bytes
    options, closest = ((), None) if fits else find_fit_options(scenario)
    found_notes = [
        *scenario.notes,
        *_describe_optimizer(config, workload),
        *_describe_saved_tensors(config, workload),
        *describe_long_sequence(config, workload),
    ]
    if scenario.software.name != TUNED:
        text = f"steps are predicted for software of {scenario.software.name}"
        found_notes.append(Note(text, "software", "software"))
    if not fits and not options:
        text = (
            f"no change makes it fit on up to {MOST_DEVICES} devices; use a shorter sequence, a smaller "
            f"model, or a device with more memory"
        )
        found_notes.append(Note(text, "does-not-fit"))
    crosses_nodes = any(found.num_devices > device.node_size and found.step_time_s is None for found in options)
    if crosses_nodes and device.inter_node_bandwidth_bytes_per_s is None:
        text = (
            f"options without a predicted step span several nodes of {device.node_size}, and the device file of "
            f"{device.name} has no network: "
            + with_fields("set {inter_node_bandwidth_bytes_per_s}, or a larger {node_size}")
        )
        found_notes.append(Note(text, "no-network"))
    return Capacity(
        scenario=scenario,
        optimizer=workload.optimizer if workload.is_training else "",
        stages=stages,
        largest_micro_batch_size=_largest_micro_batch(scenario),
        largest_seq_len=_largest_seq_len(scenario),
        fit_options=options,
        closest_option=closest,
        notes=tuple(found_notes),
    )


def _describe_optimizer(config: TransformerConfig, workload: Workload) -> list[Note]:
    """Describe the states of the optimizer, or note that it has no effect."""
    optimizer = workload.optimizer
    if not workload.is_training:
        text = f"optimizer={optimizer} has no effect in {workload.phase}"
        return [Note(text, "no-effect", "optimizer")] if optimizer != "adamw" else []
    chosen = OPTIMIZERS[optimizer]
    recipe = training_recipe(config, workload)
    total = recipe.weight_bytes + recipe.gradient_bytes + recipe.optimizer_bytes
    text = f"{optimizer}: {chosen.title}; {total:.3g} bytes per parameter with weights and gradients ({chosen.source})"
    return [Note(text, "optimizer", "optimizer")]


def _describe_saved_tensors(config: TransformerConfig, workload: Workload) -> list[Note]:
    """Describe which tensors of the MLP and of narrow GEMMs are assumed to be saved, and the options to change it."""
    is_narrow = workload.dtype in SCALE_BYTES_PER_ELEMENT
    if workload.narrow_inputs and not is_narrow:
        no_effect = with_fields("{narrow_inputs} has no effect with ")
        reason = f"dtype={workload.dtype}, whose GEMMs read 16 bits or more"
        return [Note(no_effect + reason, "no-effect", "narrow_inputs")]
    if not workload.is_training or workload.recompute == "full":
        return []
    notes = []
    if config.gated_mlp and workload.fused_activation and workload.kernels != "torch":
        text = (
            "activation and gate are assumed to be one kernel that saves its inputs (Megatron-LM's bias_swiglu_fusion, "
            "Liger, torch.compile); fused_activation=False also counts what separate kernels save"
        )
        notes.append(Note(text, "assumed", "fused_activation"))
    if is_narrow and not workload.narrow_inputs:
        text = (
            f"inputs of {workload.dtype} GEMMs are assumed to be saved in 16 bits (torchao); narrow_inputs=True counts "
            f"them in {workload.dtype} (Transformer Engine)"
        )
        notes.append(Note(text, "assumed", "narrow_inputs"))
    return notes


def _largest_micro_batch(scenario: Scenario) -> int:
    """Find the largest micro-batch that fits; with a global batch, one that divides the batch of a replica."""
    workload, layout = scenario.workload, scenario.layout
    if workload.is_training and workload.global_batch_size is not None:
        replica_batch = workload.global_batch_size // layout.data_parallel
        sizes = [size for size in range(1, min(replica_batch, _LARGEST_BATCH) + 1) if replica_batch % size == 0]
        return max((size for size in sizes if _fits(scenario, micro_batch_size=size)), default=0)
    return find_largest(lambda size: _fits(scenario, micro_batch_size=size), _LARGEST_BATCH)


def _largest_seq_len(scenario: Scenario) -> int:
    """Find the longest sequence that fits and divides over the layout; in decode the longest context."""
    workload, layout = scenario.workload, scenario.layout
    most = max_sequence_length(scenario.config)
    if workload.phase == "decode":
        longest = find_largest(lambda length: _fits(scenario, context_len=length - 1), most)
        return max(longest - 1, 0)
    splits_tokens = layout.splits_sequence_over_tensor and workload.is_training
    step = layout.context_parallel * (layout.tensor_parallel if splits_tokens else 1)
    count = find_largest(lambda count: _fits(scenario, seq_len=count * step), most // step)
    round_step = lcm(step, _TOKENS_STEP)
    return count * step // round_step * round_step or count * step


def _fits(scenario: Scenario, **changes: int) -> bool:
    if scenario.workload.packed is not None:  # packing does not change memory, and its lengths fix the sequence length
        scenario = scenario.replace(packed=None)
    return scenario.replace(**changes).estimate_memory().total_bytes <= scenario.device.memory_bytes


def find_largest(fits: Callable[[int], bool], limit: int) -> int:
    """Find the largest integer from 1 to a limit that fits, for a monotonic predicate; 0 if none does.

    >>> find_largest(lambda size: size * size <= 50, 1000), find_largest(lambda size: False, 1000)
    (7, 0)
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
