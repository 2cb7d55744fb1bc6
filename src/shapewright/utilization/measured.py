"""The measurement that an MFU begins with: the time of a step, or the tokens of a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.errors import WorkloadError
from shapewright.integers import is_number

if TYPE_CHECKING:
    from shapewright.workload import Workload

SHORTEST_STEP_S, LONGEST_STEP_S, MOST_DEVICES = 1e-9, 1e9, 2**24
"""Measurements outside these are mistakes: a nanosecond, thirty years, more devices than a layout can have."""

SECONDS = "seconds"
"""Name of the measurement that needs no conversion."""

OF_WHAT = {
    SECONDS: "of a whole optimiser step",
    "tokens_per_s": "of the whole job",
    "tokens_per_s_per_device": "of one device",
}
"""What each measurement must be of; the first suspicion where it gives too much."""

_WHAT_TO_GIVE = {
    SECONDS: "the time of one optimiser step",
    "tokens_per_s": "the tokens of a second over the whole job",
    "tokens_per_s_per_device": "those of the whole job divided by its devices",
}


def read_measurement(workload: Workload, num_devices: int, **measured: float | None) -> tuple[str, float]:
    """The step's time, from what was measured of it.

    Args:
        workload: What was run; its global batch and its seq_len say how many tokens a step has.
        num_devices: Devices that took part.
        measured: One of seconds [s], tokens_per_s [token/s] and tokens_per_s_per_device [token/s]; others are None.

    Returns:
        The name of what was given, and the time of one optimiser step. [s]

    Raises:
        WorkloadError: none or several were given, it is no training step, or a number is out of range.
    """
    given = {name: value for name, value in measured.items() if value is not None}
    if len(given) != 1:
        raise WorkloadError(
            f"a measurement is one of {', '.join(_WHAT_TO_GIVE)}, but "
            + (f"{' and '.join(given)} were given; leave all but one out" if given else "none was given")
        )
    ((name, value),) = given.items()
    num_tokens = _count_tokens(workload, num_devices)
    if name == SECONDS:
        lowest, highest = SHORTEST_STEP_S, LONGEST_STEP_S
    else:
        shared_by = num_devices if name == "tokens_per_s_per_device" else 1
        lowest, highest = (num_tokens / shared_by / end_s for end_s in (LONGEST_STEP_S, SHORTEST_STEP_S))
    if not is_number(value, lowest, highest):
        raise WorkloadError(f"{name}={value!r} must be from {lowest:g} to {highest:g}; give {_WHAT_TO_GIVE[name]}")
    return name, value if name == SECONDS else num_tokens / shared_by / value


def _count_tokens(workload: Workload, num_devices: int) -> int:
    """Tokens of one optimiser step.

    Raises:
        WorkloadError: this is no training step of so many devices.
    """
    if not workload.is_training:
        raise WorkloadError(f"utilization is explained for training, not phase={workload.phase!r}; leave --phase out")
    if not 1 <= num_devices <= MOST_DEVICES:
        raise WorkloadError(f"gpus={num_devices} must be from 1 to {MOST_DEVICES}; give the devices of the whole job")
    if workload.global_batch_size is None:
        raise WorkloadError("global_batch_size is missing; give the sequences of one optimiser step over all replicas")
    return workload.global_batch_size * workload.seq_len
