"""What the host's memory can take off a device: saved activations, or optimiser states; what moves, what of it shows.

Both are choices of the workload (``offload_activations``, ``offload_optimizer``) that memory and predict know. Here a
job is put beside the same job without one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shapewright.errors import ShapewrightError
from shapewright.lowering import lower
from shapewright.memory import estimate_memory
from shapewright.operations import Collective
from shapewright.perf.host import LINK_FRACTION, host_link_bytes_per_s
from shapewright.perf.software import TUNED
from shapewright.predict import predict

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload

OFFLOADS = ("offload_activations", "offload_optimizer")
"""What can wait in the host's memory, as fields of the workload."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What keeping one thing in the host's memory does, against the same job without it.

    Attributes:
        total_bytes: Memory of the device with it. [byte]
        freed_bytes: What it frees. [byte]
        host_bytes: What the host holds of it for one device. [byte]
        moved_bytes: What crosses the link in one step, both directions together. [byte]
        transfer_s: Time of the longer direction; None where the link's rate is not known. [s]
        exposed_s: What the step takes longer; None where either step cannot be priced. [s]
        exposed_fraction: Share of the copies' time that shows; None likewise, or where the host does more than copy.
        step_time_s: Predicted step with it; None likewise. [s]
    """

    total_bytes: float
    freed_bytes: float
    host_bytes: float
    moved_bytes: float
    transfer_s: float | None
    exposed_s: float | None
    exposed_fraction: float | None
    step_time_s: float | None


def estimate_offload(
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    layout: ParallelLayout,
    *,
    what: str = "offload_activations",
    uncalibrated: bool = False,
    software: str = TUNED,
) -> Offload | None:
    """Estimate what the host's memory takes off the fullest stage; None where there is no such choice.

    Args:
        config: The model.
        device: What it runs on.
        workload: What is run, with or without it.
        layout: How it is spread.
        what: One of OFFLOADS.
        uncalibrated: Price as if nobody had measured the device.
        software: Training software that runs it, as predict takes it.
    """
    terms: dict[str, Any] = {"device": device, "layout": layout, "uncalibrated": uncalibrated, "software": software}
    try:
        changes: list[dict[str, Any]] = [{what: False}, {what: True}]
        without, having = (replace(workload, **change) for change in changes)
    except ShapewrightError:  # no training, or an optimiser that no host can step
        return None
    before, after = (estimate_memory(config, job, layout) for job in (without, having))
    prefix = "optimizer." if what == "offload_optimizer" else ""
    there, back = _moved_bytes(config, having, layout, device.node_size, prefix=prefix)
    transfer_s: float | None = None
    try:
        transfer_s = max(there, back) / (LINK_FRACTION * host_link_bytes_per_s(device))
        steps = [predict(config, workload=job, **terms).step_time_s for job in (without, having)]
    except ShapewrightError:
        steps = []
    exposed_s = steps[1] - steps[0] if steps else None
    copies_s = (there + back) / max(there, back) * transfer_s if transfer_s and max(there, back) else 0.0
    return Offload(
        total_bytes=after.total_bytes,
        freed_bytes=before.total_bytes - after.total_bytes,
        host_bytes=after.host_bytes - before.host_bytes,
        moved_bytes=there + back,
        transfer_s=transfer_s,
        exposed_s=exposed_s,
        exposed_fraction=None if exposed_s is None or prefix or not copies_s else exposed_s / copies_s,
        step_time_s=steps[1] if steps else None,
    )


def _moved_bytes(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, node_size: int, *, prefix: str
) -> tuple[float, float]:
    """Bytes to the host and from it in one step: of the optimiser's copies, or of all others."""
    there = back = 0.0
    for operation in lower(config, workload, layout, node_size=node_size):
        if not isinstance(operation, Collective) or operation.op_name != "host_copy":
            continue
        if operation.name.startswith("optimizer.") == bool(prefix):
            moved = float(operation.message_bytes) * int(operation.repeats)
            if operation.name.endswith("to_host"):
                there += moved
            else:
                back += moved
    return there, back
