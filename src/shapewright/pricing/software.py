"""Training software: how a framework generation differs from today's kernels and host.

Operations are priced with today's kernels and a host that keeps up. A generation changes that:

    time of an operation = (price x attention factor, for fused attention) x time factor + host cost

and how much communication computation hides. At most one of these numbers is fitted per generation, on other rows than
those it is evaluated on; an attention factor means an older kernel and differs by architecture. So does the fraction
for unaligned heads: the batched GEMMs of unfused attention do not use tensor cores where the head width is not a
multiple of 16 bytes, and run at that fraction of the fp32 rate of the other cores. Each generation is a record,
``data/software/<name>.json``, written by ``python -m shapewright.measure.refit``; ``tuned`` has no record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import CalibrationError, WorkloadError, close_names
from shapewright.core.records import ReadOnlyDict, dataclass
from shapewright.core.texts import with_fields
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm

if TYPE_CHECKING:
    from shapewright.core.numeric import Numeric
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.pricing.price import Price
    from shapewright.workload.workload import Workload

TUNED = "tuned"
"""Default: a current stack whose host always keeps up, and an interval that covers all published ones."""

UNNAMED = "unnamed"
"""Unspecified software: the geometric mean of all generations, with an interval from held-out generations."""

_FOLDER = "data/software"
OVERLAP_SHARE = 0.9
"""Fraction of a pass's computation that can hide communication marked as overlapping: the first bucket waits for the
last layer's gradients. Assumed; buckets of 25 to 40 MB leave about this much.
"""
TENSOR_HIDDEN_FRACTION = 0.75
"""Fraction of communication that a concurrent GEMM hides: the rest is its loss to the SMs that move data. NCCL runs
up to 24 channels, one SM each, of an A100's 108, and 32 of an H100's 132. NVIDIA's recipes fit equally well with 0.75
to 0.9 (docs/decisions/0002).
"""
EXCHANGE_HIDDEN_FRACTION = TENSOR_HIDDEN_FRACTION
"""Fraction of an expert exchange that computation of another micro-batch hides: as for a concurrent GEMM, for the
same reason. DeepSeek-V3's kernels take 20 of an H800's 132 SMs (arXiv 2412.19437, section 3.2.2).
"""
_TENSOR_CORE_BITS = 128
"""Alignment below which older kernels of batched GEMMs use no tensor cores. [bit] Source: CUDA 10 cuBLAS
documentation, tensor core usage (multiples of 8 half-precision elements).
"""


@dataclass(frozen=True, kw_only=True)
class Software:
    """One generation of a framework.

    Attributes:
        name: Name that selects it.
        title: Frameworks and years that it stands for.
        overlap_share: Fraction of a pass's computation that can hide overlapping communication.
        tensor_hidden_fraction: Fraction of the tensor axis' communication in the backward pass that the gradients of
            concurrent GEMMs hide, where they take as long.
        time_factor: Factor on every operation.
        host_s: Added cost of each operation of a pass, because the host launches it and waits. [s]
        host_scope: Operations with that cost: ``all`` of a pass, or those of ``experts`` alone where the others are
            captured in CUDA graphs (attention and router have sizes that do not depend on the routing).
        expert_hidden_fraction: Fraction of the expert axis' communication that computation of another micro-batch
            hides, where it takes as long.
        workload: Fields of the workload that it overrides.
        attention_factor: Factor on fused attention by architecture; 1 where it is not listed.
        unaligned_heads_fraction: Fraction of the fp32 rate of the ordinary cores at which batched GEMMs run whose head
            width is not a multiple of 16 bytes; 0 where they use tensor cores.
        low: 5 % quantile of measured / predicted held-out steps; None for the interval of the operations.
        high: 95 % quantile of the same.
        borrowed_fraction: Fraction of the time of those steps that was priced with other devices' records.
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

    def __post_init__(self) -> None:
        """Keep the tables from changes: a generation is loaded once and shared by all predictions of a process."""
        for name in ("workload", "attention_factor"):
            object.__setattr__(self, name, ReadOnlyDict(getattr(self, name)))

    def settle(self, workload: Workload) -> Workload:
        """Return the workload as this software runs it."""
        return replace(workload, **self.workload) if self.workload else workload

    @property
    def changes_prices(self) -> bool:
        """Whether it changes the time of any operation."""
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
            time_s: Its price, or those of many of its kind. [s]
            device: Where it runs.
        """
        factor, host_s = self._factor_and_host_s(operation, time_s, device)
        adjusted: Numeric = time_s * factor + host_s
        return adjusted

    def _factor_and_host_s(self, operation: Operation, time_s: Numeric, device: Device) -> tuple[Any, float]:
        """Factor on an operation's price, and its launch cost. [s]"""
        factor: Any = self.time_factor
        if isinstance(operation, Attention):
            factor *= self.attention_factor.get(device.architecture, 1.0)
        elif self.unaligned_heads_fraction and isinstance(operation, Gemm):
            least_s = self._time_off_tensor_cores_s(operation, device)
            factor = factor * _larger(1.0, least_s / time_s)
        return factor, self.host_s if self._costs_host(operation) else 0.0

    def _costs_host(self, operation: Operation) -> bool:
        """Whether the host launches an operation separately and the device waits for it."""
        return operation.pass_name != "step" and (self.host_scope == "all" or operation.is_expert_block)

    def needs_own_price(self, operation: Operation) -> bool:
        """Whether an operation costs more than an equal one of another block, and needs a separate price."""
        return self.host_scope != "all" and operation.is_expert_block

    def _time_off_tensor_cores_s(self, operation: Gemm, device: Device) -> Any:
        """Time of batched GEMMs, one per head, with operands not aligned to 16 bytes; 0 for others. [s]"""
        bits = get_dtype(operation.dtype).bits
        tails: Any = sum(getattr(operation, letter) * bits % _TENSOR_CORE_BITS for letter in operation.contiguous_dims)
        leaves = (tails > 0) & (operation.batch > 1)
        return leaves * operation.flops / (self.unaligned_heads_fraction * device.peak_flops_per_s("fp32"))


TUNED_SOFTWARE = Software()


def _larger(one: float, other: Numeric) -> Any:
    """Larger of two numbers, or of a number and each of an array."""
    if isinstance(other, float | int):
        return max(one, other)
    import numpy as np

    return np.maximum(one, other)


def load_software(name: str) -> Software:
    """Load a generation by name.

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
    """Return the software of a step; only training steps can have other than the default.

    Raises:
        CalibrationError: there is no record of this name.
        WorkloadError: the step is not training, and the software is not the default.
    """
    software = name if isinstance(name, Software) else load_software(name)
    if phase != "train" and software.name != TUNED:
        raise WorkloadError(
            f"software={software.name!r} is training software and means nothing in {phase}",
            advice=with_fields("leave it out or use {phase:train}"),
            field="software",
        )
    return software


def software_names() -> tuple[str, ...]:
    """Names of all generations, the default first."""
    return (TUNED, *_read_generations())


@cache
def _read_generations() -> dict[str, Software]:
    """Read all records, by name."""
    folder = resources.files("shapewright.pricing") / _FOLDER
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    records = [json.loads(entry.read_text(encoding="utf-8")) for entry in files]
    return {
        raw["name"]: Software(
            name=raw["name"],
            title=raw["title"],
            record=raw["id"],
            low=raw["interval"]["low"],
            high=raw["interval"]["high"],
            borrowed_fraction=raw["interval"]["borrowed_fraction"],
            provenance=raw["provenance"],
            **raw["parameters"],
        )
        for raw in records
    }
