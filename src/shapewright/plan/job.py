"""A training job that plans are looked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shapewright.errors import WorkloadError
from shapewright.hardware.nodes import check_units
from shapewright.perf.software import TUNED_SOFTWARE, Software
from shapewright.plan.request import OFFLOADS

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.plan.request import PlanRequest
    from shapewright.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """What all plans of a job have in common.

    Attributes:
        config: The model.
        device: What it runs on.
        workload: What is run: length, dtype, attention, optimiser and global batch; plans choose micro-batch and
            recomputation.
        request: Devices, objective, and what is kept as it is.
        uncalibrated: Price as if nobody had measured the device.
        software: What the training software makes of the kernels.

    Raises:
        WorkloadError: this is no training, or has no global batch.
        LayoutError: the devices do not fill nodes.
    """

    config: TransformerConfig
    device: Device
    workload: Workload
    request: PlanRequest
    uncalibrated: bool = False
    software: Software = TUNED_SOFTWARE

    def __post_init__(self) -> None:
        workload = self.workload
        if not workload.is_training:
            raise WorkloadError(f"phase={workload.phase!r} has no plan: plans are of training; use --phase train")
        if workload.recompute_layers is not None:
            raise WorkloadError(
                f"recompute_layers={workload.recompute_layers} is no choice of a plan, whose layers are all alike; "
                f"leave it out"
            )
        if workload.global_batch_size is None:
            raise WorkloadError("a plan needs the sequences of one optimiser step; give --global-batch, such as 2048")
        check_units(self.request.num_devices, self.device)

    @property
    def limit_bytes(self) -> float:
        """Most that a plan may need of a device. [byte]"""
        return self.device.memory_bytes * (1.0 - self.request.headroom_fraction)

    def settled(self) -> PlanJob:
        """The job as its software runs it, with what the workload offloads kept."""
        offloaded = {name: (True,) for name in OFFLOADS if getattr(self.workload, name)}
        request = replace(self.request, kept={**offloaded, **self.request.kept})
        return replace(self, workload=self.software.settle(self.workload), request=request)
