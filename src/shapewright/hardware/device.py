"""Device: the data sheet of one accelerator SKU in SI base units. Measured rates are in calibration records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from functools import cached_property

from shapewright.core.errors import UnknownRateError
from shapewright.core.records import ReadOnlyDict, dataclass, read_only
from shapewright.hardware.architectures import Architecture, find_architecture, find_compute_capability

SCOPES = ("card", "die", "package")
RATE_TABLES = ("dense_flops_per_s", "sparse_flops_per_s")

# Pricing options that a Device carries. They are not part of the hardware: no device file and no output contains them.
PRICING_FIELDS = ("own_records", "uncalibrated", "physics_only")


@dataclass(frozen=True, kw_only=True)
class Device:
    """Data sheet of one accelerator; numbers that it lacks are None or missing from the tables.

    Attributes:
        name: Canonical name, such as ``h100-sxm-80gb``.
        title: Name in reports.
        vendor: Manufacturer.
        architecture: One of ARCHITECTURE_NAMES, such as ``ampere``, ``hopper`` or ``cdna3``.
        dense_flops_per_s: Dense matrix rate by dtype. [flop/s]
        sparse_flops_per_s: Matrix rate by dtype with 2:4 structured sparsity; never used in predictions. [flop/s]
        memory_bytes: Capacity. [byte]
        memory_bandwidth_bytes_per_s: Main memory bandwidth. [byte/s]
        memory_kind: Technology, such as ``HBM3``.
        num_sms: Streaming multiprocessors (NVIDIA), compute units (AMD) or matrix cores; None where tiles and waves
            cannot be modelled.
        boost_clock_hz: Clock at which dense_flops_per_s is quoted. [Hz]
        tensor_fma_per_sm_per_clock: Dense fp16 fused multiply-adds per SM and clock.
        l2_bytes: Last-level on-chip cache. [byte]
        shared_memory_per_sm_bytes: Maximum shared memory of one thread block. [byte]
        tdp_watts: Board power. [W]
        node_size: Devices per node of the reference system, connected by the intra-node link or else by the host.
        intra_node_link: Name of the link inside a node.
        link_group_size: Devices connected by the link if fewer than node_size, such as a bridged pair.
        intra_node_bandwidth_bytes_per_s: Bandwidth of that link per device, one direction. [byte/s]
        inter_node_bandwidth_bytes_per_s: Network bandwidth per device, one direction, in the reference system. [byte/s]
        pcie_bandwidth_bytes_per_s: PCIe bandwidth, one direction. [byte/s]
        host_bandwidth_bytes_per_s: Bandwidth to host memory per device, one direction, where the link is not PCIe, such
            as NVLink-C2C. [byte/s]
        compute_capability: Vendor's version of the instruction set.
        scope: Part that the numbers describe: ``card``, ``die``, ``package``.
        num_dies: Dies with matrix units that the numbers cover together, if more than one.
        peak_mismatch: Why num_sms x tensor_fma_per_sm_per_clock x 2 x boost_clock_hz differs from the fp16 rate by more
            than 1 %; empty where it does not.
        roofline_only: Whether tiles and waves cannot be modelled, so that predictions are bounds.
        aliases: Other names, including those that nvidia-smi prints.
        provenance: Source id, place, date read and kind of each number.
        sources: Title, publisher and URL of each source id.
        notes: Remarks for users.
        own_records: User's calibration records by kind (pricing.calibration.records.CalibrationRecord); they take
            precedence over those of the package. Never set by a device file.
        uncalibrated: Whether to price it as an unmeasured device, without calibration records of its own. Never set by
            a device file.
        physics_only: Whether to price it by the formulas alone, without learned residuals. Never set by a device file.
    """

    name: str
    title: str
    vendor: str
    architecture: str
    dense_flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    sparse_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_kind: str = ""
    num_sms: int | None = None
    boost_clock_hz: float | None = None
    tensor_fma_per_sm_per_clock: float | None = None
    l2_bytes: float | None = None
    shared_memory_per_sm_bytes: float | None = None
    tdp_watts: float | None = None
    node_size: int = 1
    intra_node_link: str = ""
    link_group_size: int | None = None
    intra_node_bandwidth_bytes_per_s: float | None = None
    inter_node_bandwidth_bytes_per_s: float | None = None
    pcie_bandwidth_bytes_per_s: float | None = None
    host_bandwidth_bytes_per_s: float | None = None
    compute_capability: str = ""
    scope: str = "card"
    num_dies: int | None = None
    peak_mismatch: str = ""
    roofline_only: bool = False
    aliases: tuple[str, ...] = ()
    provenance: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    notes: str = ""
    own_records: Mapping[str, object] = field(default_factory=dict, repr=False)
    uncalibrated: bool = field(default=False, repr=False)
    physics_only: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        """Keep its tables from changes: a device is loaded once and shared by all predictions of a process."""
        for name in (*RATE_TABLES, "provenance", "sources"):
            object.__setattr__(self, name, read_only(getattr(self, name)))
        object.__setattr__(self, "own_records", ReadOnlyDict(self.own_records))

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the dense matrix rate of an element format [flop/s].

        Raises:
            UnknownRateError: the data sheet has no rate for it.
        """
        rate = self.dense_flops_per_s.get(dtype)
        if rate is None:
            known = ", ".join(sorted(self.dense_flops_per_s))
            if not known:
                raise UnknownRateError(
                    f"the data sheet of {self.name} has no dense matrix rate for any dtype, {dtype} included; choose "
                    f"another device, or give the rate in a device file of your own"
                )
            raise UnknownRateError(
                f"has no {dtype} rate (it has {known}); set dtype to one of those, or give the rate in a device file "
                f"of your own",
                subject=self.name,
                field="dtype",
            )
        return rate

    @cached_property
    def without_calibration(self) -> Device:
        """This device priced without its own calibration records; always the same object, for caches."""
        return self if self.uncalibrated else replace(self, uncalibrated=True)

    @cached_property
    def without_residuals(self) -> Device:
        """This device priced without learned residuals; always the same object, for caches."""
        return self if self.physics_only else replace(self, physics_only=True)

    def with_pricing(self, *, uncalibrated: bool = False, physics_only: bool = False) -> Device:
        """Return this device with the given pricing options added to its own."""
        device = self.without_calibration if uncalibrated else self
        return device.without_residuals if physics_only else device

    @property
    def architecture_facts(self) -> Architecture:
        """Entry of the architecture table for this device."""
        return find_architecture(self.architecture)

    @property
    def sm_kind(self) -> tuple[str, str, float] | None:
        """Properties of an SM that kernels are compiled for; None where the data sheet lacks them.

        Returns:
            Vendor, generation of the matrix instructions, and maximum shared memory of a thread block [byte]. GA102
            (8.6), AD102 (8.9) and GB202 (12.0) agree: warp-level instructions and 99 KiB. A100 has 163 KiB, Hopper
            other instructions.
        """
        if not self.compute_capability.partition(".")[0] or self.shared_memory_per_sm_bytes is None:
            return None
        instructions = find_compute_capability(self.compute_capability).matrix_instructions
        return self.vendor, instructions, self.shared_memory_per_sm_bytes

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers of the device file by field name; rates as ``dense_flops_per_s.fp16``."""
        found: dict[str, float] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name in RATE_TABLES:
                found.update({f"{spec.name}.{dtype}": rate for dtype, rate in value.items()})
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found[spec.name] = value
        return found

    @property
    def unsourced(self) -> tuple[str, ...]:
        """Numbers without provenance; allowed in users' device files only."""
        return tuple(name for name in self.numbers if name not in self.provenance)
