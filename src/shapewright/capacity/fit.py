"""Does it fit: memory of every stage against the device, the largest sizes that fit, and what to change if it does not.

Remedies are priced with the predicted time per token, so that the cheapest comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING

from shapewright.capacity.offload import Offload, estimate_offload
from shapewright.capacity.remedies import MOST_DEVICES, Remedy, Situation, find_remedies
from shapewright.lowering import describe_overlong, longest_sequence, num_microbatches, validate_layout
from shapewright.memory import ALLOCATOR_BAND_FRACTION, OPTIMIZERS, estimate_memory, estimate_stages, find_recipe
from shapewright.perf.software import TUNED
from shapewright.saved_tensors import NARROW_PRODUCTS
from shapewright.shown import ShownInNotebook

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.memory import MemoryEstimate
    from shapewright.workload import Workload

_LARGEST_BATCH = 2**20
# Sequence lengths are given in multiples of this, unless they are below it.
_TOKENS_STEP = 128


@dataclass(frozen=True, kw_only=True)
class Capacity(ShownInNotebook):
    """Memory of a job against its device.

    Attributes:
        config: The model.
        device: The device.
        workload: What is run.
        layout: How it is spread.
        optimizer: Name of the optimiser; empty where nothing is trained.
        stages: Memory of one device of each pipeline stage.
        largest_micro_batch_size: Largest micro-batch that fits with everything else as it is; 0 if none does.
        largest_seq_len: Longest sequence that fits, of decode the longest context; 0 if none does.
        remedies: What makes it fit, on these devices first and then on more, each cheapest in time first; empty where
            it fits.
        nearest: What comes closest to fitting where there is no remedy.
        notes: What needs to be said, one line each.
        uncalibrated: Price as if nobody had measured the device.
        software: Training software that remedies are priced with.
    """

    config: TransformerConfig
    device: Device
    workload: Workload
    layout: ParallelLayout
    optimizer: str
    stages: tuple[MemoryEstimate, ...]
    largest_micro_batch_size: int
    largest_seq_len: int
    remedies: tuple[Remedy, ...]
    nearest: Remedy | None
    notes: tuple[str, ...]
    uncalibrated: bool = False
    software: str = TUNED

    @cached_property
    def offload(self) -> Offload | None:
        """What keeping saved activations in the host's memory does or would do; None outside training."""
        return self._estimate_offload("offload_activations")

    @cached_property
    def optimizer_offload(self) -> Offload | None:
        """The same of optimiser states; None outside training, or where no host can take the optimiser's step."""
        return self._estimate_offload("offload_optimizer")

    def _estimate_offload(self, what: str) -> Offload | None:
        return estimate_offload(
            self.config,
            self.device,
            self.workload,
            self.layout,
            what=what,
            uncalibrated=self.uncalibrated,
            software=self.software,
        )

    @property
    def busiest(self) -> MemoryEstimate:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def headroom_bytes(self) -> float:
        """What the busiest stage leaves of the device; below 0 it does not fit. [byte]"""
        return self.device.memory_bytes - self.busiest.total_bytes

    @property
    def fits(self) -> bool:
        """Whether every stage fits, if the allocator wastes nothing."""
        return self.headroom_bytes >= 0.0

    @property
    def verdict(self) -> str:
        """``fits``, ``tight`` (within the band that allocator and buffers may take), or ``does not fit``."""
        if not self.fits:
            return "does not fit"
        return "tight" if is_tight(self.busiest.total_bytes, self.device) else "fits"


def is_tight(needed_bytes: float, device: Device) -> bool:
    """Whether what allocator and buffers may take on top is more than the device has left."""
    return needed_bytes * (1.0 + ALLOCATOR_BAND_FRACTION) > device.memory_bytes


def estimate_capacity(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    layout: ParallelLayout,
    optimizer: str | None = None,
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
    software: str = TUNED,
) -> Capacity:
    """Compare what a job needs with what its device has.

    Args:
        config: The model.
        device: What it runs on.
        workload: What is run.
        layout: How it is spread.
        optimizer: One of shapewright.memory.OPTIMIZERS instead of the workload's; counts in training.
        notes: What the caller has to say, kept beside the result.
        uncalibrated: Price remedies as if nobody had measured the device.
        software: Training software that remedies are priced with, as predict takes it.

    Raises:
        LayoutError: the layout does not divide the model.
        WorkloadError: the optimiser is not known, the model cannot run this phase, or the global batch does not split
            into whole micro-batches.
    """
    validate_layout(config, workload, layout)
    num_microbatches(workload, layout)
    workload = workload if optimizer is None else replace(workload, optimizer=optimizer)
    stages = estimate_stages(config, workload, layout)
    situation = Situation(config, device, workload, layout, uncalibrated, software)
    fits = max(stage.total_bytes for stage in stages) <= device.memory_bytes
    remedies, nearest = ((), None) if fits else find_remedies(situation)
    said = [
        *notes,
        *_describe_optimizer(workload),
        *_describe_kept(config, workload),
        *describe_overlong(config, workload),
    ]
    if software != TUNED:
        said.append(f"steps are priced as software of {software} runs them")
    if not fits and not remedies:
        said.append(
            f"nothing looked at makes it fit on up to {MOST_DEVICES} devices; take a shorter sequence, a smaller "
            f"model, or a device with more memory"
        )
    crosses_nodes = any(found.num_devices > device.node_size and found.step_time_s is None for found in remedies)
    if crosses_nodes and device.inter_node_bandwidth_bytes_per_s is None:
        said.append(
            f"remedies without a step reach over nodes of {device.node_size}, and {device.name} has no network in its "
            f"file: --network-gbit-per-s gives one, --node-size larger nodes"
        )
    return Capacity(
        config=config,
        device=device,
        workload=workload,
        layout=layout,
        optimizer=workload.optimizer if workload.is_training else "",
        stages=stages,
        largest_micro_batch_size=_largest_micro_batch(situation),
        largest_seq_len=_largest_seq_len(situation),
        remedies=remedies,
        nearest=nearest,
        notes=tuple(said),
        uncalibrated=uncalibrated,
        software=software,
    )


def _describe_optimizer(workload: Workload) -> list[str]:
    """What the choice of optimiser does, or that it does nothing."""
    optimizer = workload.optimizer
    if not workload.is_training:
        return [f"optimizer={optimizer} has no effect in {workload.phase}"] if optimizer != "adamw" else []
    chosen = OPTIMIZERS[optimizer]
    recipe = find_recipe(optimizer, workload.dtype)
    total = recipe.weight_bytes + recipe.gradient_bytes + recipe.optimizer_bytes
    return [f"{optimizer}: {chosen.title}; {total:g} bytes a parameter with weights and gradients ({chosen.source})"]


def _describe_kept(config: TransformerConfig, workload: Workload) -> list[str]:
    """What software is taken to keep of the MLP and of narrow products, and how to ask for the other."""
    is_narrow = workload.dtype in NARROW_PRODUCTS
    if workload.narrow_inputs and not is_narrow:
        return [f"narrow_inputs has no effect with dtype={workload.dtype}, whose products read 16 bits or more"]
    if not workload.is_training or workload.recompute == "full":
        return []
    said = []
    if config.gated_mlp and workload.fused_activation:
        said.append(
            "activation and gate are one kernel that keeps its inputs (Megatron-LM's bias_swiglu_fusion, Liger, "
            "torch.compile); --no-fused-activation counts the factors that separate kernels keep as well"
        )
    if is_narrow and not workload.narrow_inputs:
        said.append(
            f"inputs of {workload.dtype} products are kept in 16 bits (torchao); --narrow-inputs counts them in "
            f"{workload.dtype} (Transformer Engine)"
        )
    return said


def _largest_micro_batch(situation: Situation) -> int:
    """Largest micro-batch; with a global batch, the largest that divides a replica's share of it."""
    workload, layout = situation.workload, situation.layout
    if workload.is_training and workload.global_batch_size is not None:
        share = workload.global_batch_size // layout.data_parallel
        sizes = [size for size in range(1, min(share, _LARGEST_BATCH) + 1) if share % size == 0]
        return max((size for size in sizes if _fits(situation, replace(workload, micro_batch_size=size))), default=0)
    return find_largest(lambda size: _fits(situation, replace(workload, micro_batch_size=size)), _LARGEST_BATCH)


def _largest_seq_len(situation: Situation) -> int:
    """Longest sequence, or in decode the longest context, that splits over the layout."""
    workload, layout = situation.workload, situation.layout
    most = longest_sequence(situation.config)
    if workload.phase == "decode":
        longest = find_largest(lambda length: _fits(situation, replace(workload, context_len=length - 1)), most)
        return max(longest - 1, 0)
    splits_tokens = layout.splits_sequence_over_tensor and workload.is_training
    step = layout.context_parallel * (layout.tensor_parallel if splits_tokens else 1)
    count = find_largest(lambda count: _fits(situation, replace(workload, seq_len=count * step)), most // step)
    round_step = lcm(step, _TOKENS_STEP)
    return count * step // round_step * round_step or count * step


def _fits(situation: Situation, workload: Workload) -> bool:
    needed = estimate_memory(situation.config, workload, situation.layout)
    return needed.total_bytes <= situation.device.memory_bytes


def find_largest(fits: Callable[[int], bool], limit: int) -> int:
    """Largest whole number from 1 to a limit that fits, if whatever is larger than a misfit does not fit either.

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
