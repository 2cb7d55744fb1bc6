"""The form in which kernels without a formula of their own are priced: terms of work with fitted weights.

    time_s = sum(serial_i w_i) + ((sum(compute_i w_i))^p + (sum(memory_i w_i))^p)^(1/p)

Every term is the time of a part at the rate of the data sheet, so that its weight is 1 / (achieved fraction of that
rate) and holds on other devices. ``compute`` and ``memory`` overlap, ``serial`` (starts, rounds of tiles, one block
after the other) does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.hardware.device import Device

    PerCall = Float[np.ndarray, "*calls"]

POWER = "power"
"""Name of the exponent p among the weights."""

NOMINAL_START_S = 3e-6
"""Unit of the term of starts: about the shortest kernel of the measured tables. [s]"""

EXPONENTIALS_PER_SM_PER_CLOCK = 16.0
"""4 special function units of 4 lanes. Source: CUDA C programming guide, arithmetic throughput, capability 8.0."""


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """Work of some calls of one kernel.

    Attributes:
        compute: Arithmetic by name, at peak. [s]
        memory: Traffic by name, at full bandwidth. [s]
        serial: Costs by name that overlap with nothing. [s]
        roofline_s: Lower bound from the data sheet. [s]
        places: Sizes by which residual tables are indexed, by name.
        rare: Terms whose weights a fit takes as near zero unless rows show otherwise.
    """

    compute: Mapping[str, PerCall]
    memory: Mapping[str, PerCall]
    serial: Mapping[str, PerCall]
    roofline_s: PerCall
    places: Mapping[str, PerCall]
    rare: frozenset[str] = frozenset()

    def take(self, index: Any) -> KernelWork:
        """Return the calls of an index or of a mask."""

        def of(terms: Mapping[str, PerCall]) -> dict[str, PerCall]:
            return {name: values[index] for name, values in terms.items()}

        return KernelWork(
            compute=of(self.compute),
            memory=of(self.memory),
            serial=of(self.serial),
            roofline_s=self.roofline_s[index],
            places=of(self.places),
            rare=self.rare,
        )


@dataclass(frozen=True)
class KernelParts:
    """Parts of the time of some calls. [s]"""

    total_s: PerCall
    compute_s: PerCall
    memory_s: PerCall
    start_s: PerCall


def estimate_kernel(work: KernelWork, weights: Mapping[str, float]) -> KernelParts:
    """Time of calls by their work and the weights of its terms.

    >>> one = np.ones(1)
    >>> work = KernelWork(compute={"gemm": 3 * one}, memory={"bytes": 4 * one}, serial={"start": one},
    ...                   roofline_s=4 * one, places={})
    >>> float(estimate_kernel(work, {"gemm": 1.0, "bytes": 1.0, "start": 2.0, "power": 2.0}).total_s[0])
    7.0
    """

    def weigh(terms: Mapping[str, PerCall]) -> PerCall:
        found = np.zeros_like(work.roofline_s)
        for name, values in terms.items():
            found = found + weights[name] * values
        return found

    compute_s, memory_s, start_s = weigh(work.compute), weigh(work.memory), weigh(work.serial)
    longer = np.maximum(np.maximum(compute_s, memory_s), np.finfo(float).tiny)
    power = weights[POWER]
    joined = longer * ((compute_s / longer) ** power + (memory_s / longer) ** power) ** (1.0 / power)
    return KernelParts(start_s + joined, compute_s, memory_s, start_s)


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """Numbers of a data sheet by which work is counted.

    Attributes:
        bytes_per_s: Memory bandwidth. [byte/s]
        num_sms: Multiprocessors.
        clock_hz: Boost clock. [Hz]
        l2_bytes: Last-level cache. [byte]
        exponential_growth: Exponentials per multiprocessor and clock, relative to the measured device.
    """

    bytes_per_s: float
    num_sms: float
    clock_hz: float
    l2_bytes: float
    exponential_growth: float = 1.0

    @property
    def exponentials_per_s(self) -> float:
        """Exponentials of the whole device. [1/s]"""
        return EXPONENTIALS_PER_SM_PER_CLOCK * self.exponential_growth * self.num_sms * self.clock_hz


def narrow_rate(device: Device, dtype: str) -> float:
    """Dense rate in a format, or in 16 bits where the device has none for it. [flop/s]"""
    if dtype in device.dense_flops_per_s:
        return device.peak_flops_per_s(dtype)
    return device.peak_flops_per_s("bf16" if "bf16" in device.dense_flops_per_s else "fp16")


def tail_of(num_tiles: PerCall, num_sms: float) -> PerCall:
    """Empty slots of the last wave, in waves: ceil(waves) - waves.

    >>> tail_of(np.array([150.0]), 100.0).tolist()
    [0.5]
    """
    waves = num_tiles / num_sms
    empty: PerCall = np.ceil(waves - 1e-9) - waves
    return empty
