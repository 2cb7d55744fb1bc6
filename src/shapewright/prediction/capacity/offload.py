"""Offload to host memory: memory freed, bytes moved and exposed time of offloaded activations or optimizer states.

Both are options of the workload (``offload_activations``, ``offload_optimizer``). Their effect is the difference
between the job with and without the option.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.lowering import lower
from shapewright.lowering.operations import Collective
from shapewright.pricing.host import LINK_FRACTION, host_link_bytes_per_s

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

OFFLOADS = ("offload_activations", "offload_optimizer")
"""Fields of the workload that offload to host memory."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Effect of one offload option, relative to the same job without it.

    Attributes:
        total_bytes: Device memory with the option. [byte]
        freed_bytes: Device memory that it frees. [byte]
        host_bytes: Host memory that it uses for one device. [byte]
        moved_bytes: Bytes over the host link in one step, both directions together. [byte]
        transfer_s: Time of the longer direction; None where the rate of the link is unknown. [s]
        exposed_s: Increase of the step time; None where either step cannot be priced. [s]
        exposed_fraction: Share of the copy time that is exposed; None where either step cannot be priced, or where the
            host does more than copy.
        step_time_s: Predicted step with the option; None where either step cannot be priced. [s]
    """

    total_bytes: float
    freed_bytes: float
    host_bytes: float
    moved_bytes: float
    transfer_s: float | None
    exposed_s: float | None
    exposed_fraction: float | None
    step_time_s: float | None


def estimate_offload(scenario: Scenario, what: str = "offload_activations") -> Offload | None:
    """Estimate the effect of an offload option on the fullest stage; None where the option is not possible.

    Args:
        scenario: The job, with or without the option.
        what: One of OFFLOADS.
    """
    try:
        without, with_it = (scenario.replace(**{what: is_on}) for is_on in (False, True))
    except ShapewrightError:  # not training, or an optimizer that cannot run on the host
        return None
    before, after = (job.estimate_memory() for job in (without, with_it))
    of_optimizer = what == "offload_optimizer"
    there, back = _moved_bytes(with_it, of_optimizer=of_optimizer)
    transfer_s: float | None = None
    try:
        transfer_s = max(there, back) / (LINK_FRACTION * host_link_bytes_per_s(scenario.device))
        steps = [job.predict().step_time_s for job in (without, with_it)]
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
        exposed_fraction=None if exposed_s is None or of_optimizer or not copies_s else exposed_s / copies_s,
        step_time_s=steps[1] if steps else None,
    )


def _moved_bytes(scenario: Scenario, *, of_optimizer: bool) -> tuple[float, float]:
    """Return the bytes to and from the host in one step: those of the optimizer, or all others."""
    there = back = 0.0
    for operation in lower(scenario.config, scenario.workload, scenario.layout, node_size=scenario.device.node_size):
        if not isinstance(operation, Collective) or operation.op_name != "host_copy":
            continue
        if (operation.block == "optimizer") == of_optimizer:
            moved = float(operation.message_bytes) * int(operation.repeats)
            if operation.role == "to_host":
                there += moved
            else:
                back += moved
    return there, back
