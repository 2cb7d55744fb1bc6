"""Training software: what a framework of one generation makes of the kernels.

Operations are priced with today's kernels, run by a host that keeps up. A generation says what was different then:

    time of an operation = (price x attention factor, if it is fused attention) x time factor + host cost

and how much communication its computation hides. At most one of these numbers is fitted per generation, on rows other
than those that it is judged on; an attention factor is the choice of an older kernel, a different thing on each
architecture. So is a fraction for unaligned heads: the batched products of unfused attention leave the tensor cores
where a head is no whole number of 16 bytes, and run at that fraction of the ordinary cores' fp32 rate. Each generation
is a record, ``data/software/<name>.json``, written by ``scripts/calibrate_software.py``; ``tuned`` is no record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from shapewright.dtypes import get_dtype
from shapewright.errors import CalibrationError, WorkloadError, close_names
from shapewright.operations import Attention, Gemm

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.operations import Operation
    from shapewright.operations.base import Numeric
    from shapewright.perf.price import Price
    from shapewright.workload import Workload

TUNED = "tuned"
"""The default: a stack of today whose host never falls behind, and an interval that spans all published ones."""

UNNAMED = "unnamed"
"""Software that nobody named: the middle of all generations, and an interval of generations left out."""

_FOLDER = "data/software"
OVERLAP_SHARE = 0.9
"""Share of a pass's computation that communication marked as overlapping can hide behind: the first bucket waits for
the last layer's gradients. Assumed; buckets of 25 to 40 MB leave about this much."""
TENSOR_HIDDEN_FRACTION = 0.75
"""What a product hides of the communication that runs beside it: the rest is what it loses to the SMs that move data.
NCCL runs up to 24 channels, one SM each, of an A100's 108, and 32 of an H100's 132. NVIDIA's recipes are met as well
with anything from 0.75 to 0.9 (docs/decisions/0002)."""
EXCHANGE_HIDDEN_FRACTION = TENSOR_HIDDEN_FRACTION
"""What computation of another micro-batch hides of an exchange of experts: as much as a product hides of what runs
beside it, for the same reason. DeepSeek-V3's kernels take 20 of an H800's 132 SMs (arXiv 2412.19437, section 3.2.2)."""
_TENSOR_CORE_BITS = 128
"""Alignment below which older kernels of batched products use no tensor cores. Source: CUDA 10 cuBLAS documentation,
tensor core usage (multiples of 8 half-precision elements)."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """One generation of a framework.

    Attributes:
        name: Word that chooses it.
        title: Frameworks and years that it stands for.
        overlap_share: Share of a pass's computation that overlapping communication can hide behind.
        tensor_hidden_fraction: Share of the tensor axis' communication in the backward pass that the gradients of the
            products beside it hide, where they take as long.
        time_factor: Factor on every operation.
        host_s: What each operation of a pass costs more, because the host launches it and waits. [s]
        host_scope: Operations that this counts for: ``all`` of a pass, or those of ``experts`` alone where the others
            are captured in CUDA graphs (attention and router have sizes that do not depend on the routing).
        expert_hidden_fraction: Share of the expert axis' communication that computation of another micro-batch hides,
            where it takes as long.
        workload: Fields of the workload that it decides, whatever was asked.
        attention_factor: Factor on fused attention by architecture; 1 where it is not named.
        unaligned_heads_fraction: Share of the fp32 rate of the ordinary cores at which batched products of heads that
            are no whole number of 16 bytes run; 0 where they run on tensor cores.
        low: 5 % of measured / predicted steps that no fit saw; None for the interval of the operations.
        high: 95 % of the same.
        borrowed_fraction: Share of the time of those steps that other devices' records priced.
        record: Id of its record; empty for ``tuned``.
        provenance: Source, rows, split and errors of the record.
    """

    name: str = TUNED
    title: str = "tuned stack of today"
    overlap_share: float = OVERLAP_SHARE
    tensor_hidden_fraction: float = TENSOR_HIDDEN_FRACTION
    time_factor: float = 1.0
    host_s: float = 0.0
    host_scope: str = "all"
    expert_hidden_fraction: float = 0.0
    workload: Mapping[str, Any] = field(default_factory=dict)
    attention_factor: Mapping[str, float] = field(default_factory=dict)
    unaligned_heads_fraction: float = 0.0
    low: float | None = None
    high: float | None = None
    borrowed_fraction: float = 0.0
    record: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def settle(self, workload: Workload) -> Workload:
        """The workload as this software runs it."""
        return replace(workload, **self.workload) if self.workload else workload

    @property
    def changes_prices(self) -> bool:
        """Whether any operation takes another time than its price says."""
        return self.time_factor != 1.0 or bool(self.host_s or self.attention_factor or self.unaligned_heads_fraction)

    def adjust(self, operation: Operation, price: Price, device: Device) -> Price:
        """Price of an operation as this software runs it."""
        factor, host_s = self._factor_and_host_s(operation, price.time_s, device)
        if factor == 1.0 and host_s == 0.0:
            return price
        return replace(
            price,
            time_s=price.time_s * factor + host_s,
            low_s=price.low_s * factor + host_s,
            high_s=price.high_s * factor + host_s,
            start_s=price.start_s + host_s,
        )

    def adjusted_s(self, operation: Operation, time_s: Numeric, device: Device) -> Numeric:
        """Time of one execution as this software runs it. [s]

        Args:
            operation: What runs.
            time_s: Its price, or those of many of its kind. [s]
            device: Where it runs.
        """
        factor, host_s = self._factor_and_host_s(operation, time_s, device)
        adjusted: Numeric = time_s * factor + host_s
        return adjusted

    def _factor_and_host_s(self, operation: Operation, time_s: Numeric, device: Device) -> tuple[Any, float]:
        """What becomes of an operation's price: a factor, and what its launch costs. [s]"""
        factor: Any = self.time_factor
        if isinstance(operation, Attention):
            factor *= self.attention_factor.get(device.architecture, 1.0)
        elif self.unaligned_heads_fraction and isinstance(operation, Gemm):
            least_s = self._time_off_tensor_cores_s(operation, device)
            factor = factor * _larger(1.0, least_s / time_s)
        return factor, self.host_s if self._costs_host(operation) else 0.0

    def _costs_host(self, operation: Operation) -> bool:
        """Whether the host launches an operation by itself and the device waits for it."""
        return operation.pass_name != "step" and (self.host_scope == "all" or _is_of_experts(operation))

    def tells_apart(self, operation: Operation) -> bool:
        """Whether an operation takes longer than an equal one of another block, and needs a price of its own."""
        return self.host_scope != "all" and _is_of_experts(operation)

    def _time_off_tensor_cores_s(self, operation: Gemm, device: Device) -> Any:
        """Time of batched products, one per head, whose operands do not start on whole 16 bytes; 0 for others. [s]"""
        bits = get_dtype(operation.dtype).bits
        tails: Any = sum(getattr(operation, letter) * bits % _TENSOR_CORE_BITS for letter in operation.contiguous_dims)
        leaves = (tails > 0) & (operation.batch > 1)
        return leaves * operation.flops / (self.unaligned_heads_fraction * device.peak_flops_per_s("fp32"))


TUNED_SOFTWARE = Software()

_EXPERT_BLOCKS = ("moe.", "shared_expert.")
_ROUTER_ROLES = ("moe.router", "moe.choose")


def _is_of_experts(operation: Operation) -> bool:
    """Whether an operation works on routed rows or shared experts; the router works on tokens as they come."""
    name = operation.name
    return any(block in name for block in _EXPERT_BLOCKS) and not any(role in name for role in _ROUTER_ROLES)


def _larger(one: float, other: Numeric) -> Any:
    """The larger of two numbers, or of a number and each of an array."""
    if isinstance(other, float | int):
        return max(one, other)
    import numpy as np

    return np.maximum(one, other)


def load_software(name: str) -> Software:
    """Find a generation by name.

    Raises:
        CalibrationError: there is no record of this name.
    """
    known = {TUNED: TUNED_SOFTWARE, **_read_generations()}
    if name not in known:
        hint = close_names(name, known)
        raise CalibrationError(
            f"unknown software {name!r}; {hint + ' ' if hint else ''}choose one of {', '.join(known)}"
        )
    return known[name]


def software_of(name: str | Software, phase: str) -> Software:
    """The software of a step; only training has any.

    Raises:
        CalibrationError: there is no record of this name.
        WorkloadError: the step is none of training, and the software is not the default.
    """
    software = name if isinstance(name, Software) else load_software(name)
    if phase != "train" and software.name != TUNED:
        raise WorkloadError(
            f"software={software.name!r} is training software and means nothing in {phase}; leave it out or use "
            f"--phase train"
        )
    return software


def software_names() -> tuple[str, ...]:
    """Names to choose from, the default first."""
    return (TUNED, *_read_generations())


@cache
def _read_generations() -> dict[str, Software]:
    """All records, by name."""
    folder = resources.files("shapewright.perf") / _FOLDER
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    found = (_parse(entry.name, entry.read_text(encoding="utf-8")) for entry in files)
    return {software.name: software for software in found}


def _parse(file_name: str, text: str) -> Software:
    try:
        raw = json.loads(text)
        return Software(
            name=raw["name"],
            title=raw["title"],
            record=raw["id"],
            low=raw["interval"]["low"],
            high=raw["interval"]["high"],
            borrowed_fraction=raw["interval"]["borrowed_fraction"],
            provenance=raw["provenance"],
            **raw["parameters"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"software record {file_name} is malformed: {error!r}") from error
