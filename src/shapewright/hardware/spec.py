"""Device: what a vendor says about one SKU, in SI base units. Measured behaviour lives in calibration records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from shapewright.errors import UnknownRateError

# Families that share matrix units, kernels and behaviour; calibration records transfer along them. ``other`` is for
# a device file of one's own.
ARCHITECTURES = (
    "volta",
    "turing",
    "ampere",
    "ada",
    "hopper",
    "blackwell",
    "blackwell-ultra",
    "blackwell-consumer",
    "cdna2",
    "cdna3",
    "cdna4",
    "xe2",
    "gaudi2",
    "gaudi3",
    "tpu-v3",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "tpu-v7",
    "neuroncore-v2",
    "neuroncore-v3",
    "wse-2",
    "wse-3",
    "tsp-v1",
    "sn40l",
    "grayskull",
    "wormhole",
    "ipu-mk2",
    "other",
)

SCOPES = ("card", "die", "package")
RATE_TABLES = ("dense_flops_per_s", "sparse_flops_per_s")


# Fields that say how a device is priced, not what it is: no device file has them, and no output that tells of one.
PRICING_FIELDS = ("own_records", "physics_only")

# Compute capabilities, up to the point, whose tensor cores a warp feeds (mma.sync); 9 has instructions of four warps
# (wgmma), 10 of a thread (tcgen05). Source: NVIDIA, PTX ISA, sections on warp-level, asynchronous warpgroup-level and
# tcgen05 matrix instructions.
_WARP_GENERATIONS, _WARP_INSTRUCTIONS = ("7", "8", "12"), "mma.sync"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator as its data sheet describes it. Absent numbers are None and asking for them is an error.

    Attributes:
        name: Canonical name, such as ``h100-sxm-80gb``.
        title: Name to print.
        vendor: Maker.
        architecture: Family that shares kernels and behaviour: ``volta``, ``ampere``, ``ada``, ``hopper``, ``cdna3``...
        dense_flops_per_s: Dense matrix rate by dtype. [flop/s]
        sparse_flops_per_s: Matrix rate by dtype with 2:4 structured sparsity, as sheets advertise it; nothing is priced
            with it. [flop/s]
        memory_bytes: Capacity. [byte]
        memory_bandwidth_bytes_per_s: Main memory bandwidth. [byte/s]
        memory_kind: What it is made of, such as ``HBM3``.
        num_sms: Streaming multiprocessors (NVIDIA), compute units (AMD) or matrix cores; None where a tile model has
            no meaning.
        boost_clock_hz: Clock at which dense_flops_per_s is quoted. [Hz]
        tensor_fma_per_sm_per_clock: Dense fp16 fused multiply-adds of one SM in one clock.
        l2_bytes: Last-level cache on the chip. [byte]
        shared_memory_per_sm_bytes: Largest shared memory that one thread block of an SM may use. [byte]
        tdp_watts: Board power. [W]
        node_size: Devices that the intra-node link (or, without one, the host) joins in the reference system.
        intra_node_link: Name of the link inside a node.
        link_group_size: Devices that the link joins where it does not reach the whole node, such as a bridged pair.
        intra_node_bandwidth_bytes_per_s: Its bandwidth per device, one direction. [byte/s]
        inter_node_bandwidth_bytes_per_s: Network bandwidth per device, one direction, in the reference system. [byte/s]
        pcie_bandwidth_bytes_per_s: PCIe link, one direction. [byte/s]
        host_bandwidth_bytes_per_s: Link to the host's memory where it is not PCIe, such as NVLink-C2C, per device and
            one direction. [byte/s]
        compute_capability: Vendor's version of the instruction set.
        scope: What the numbers are of: ``card``, ``die``, ``package``.
        num_dies: Dies with matrix units that the numbers are of together, where they are more than one.
        peak_mismatch: Why num_sms x tensor_fma_per_sm_per_clock x 2 x boost_clock_hz misses the fp16 rate by more than
            1 %; empty where it does not.
        roofline_only: No tiles and waves can be modelled; predictions are bounds and say so.
        aliases: Other names, those that nvidia-smi prints among them.
        provenance: Per number: source id, place, date read, kind.
        sources: Per source id: title, publisher, url.
        notes: What to know before use.
        own_records: Calibration records that price this device before those of the package, by kind
            (perf.calibration.CalibrationRecord); a device file never has any.
        physics_only: Whether to price it without what was learned beyond the formulas; a device file never says so.
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
    physics_only: bool = field(default=False, repr=False)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the dense matrix rate of an element format [flop/s].

        Raises:
            UnknownRateError: the sheet gives no rate for it.
        """
        rate = self.dense_flops_per_s.get(dtype)
        if rate is None:
            known = ", ".join(sorted(self.dense_flops_per_s))
            if not known:
                raise UnknownRateError(
                    f"{self.name} has no {dtype} rate, nor one of another dtype: its sheet gives no dense rate; take "
                    f"another device, or give the rate in a device file of your own"
                )
            raise UnknownRateError(
                f"{self.name} has no {dtype} rate (it has {known}); choose one of those with --dtype, or give the rate "
                f"in a device file of your own"
            )
        return rate

    @cached_property
    def by_physics(self) -> Device:
        """The same device, priced without what was learned beyond the formulas; one object, whose prices are kept."""
        return self if self.physics_only else replace(self, physics_only=True)

    @property
    def sm_kind(self) -> tuple[str, str, float] | None:
        """What kernels of a multiprocessor are compiled for; None where a sheet is silent.

        The maker, the generation of its matrix instructions, and the shared memory of a block [byte]: GA102 (8.6),
        AD102 (8.9) and GB202 (12.0) multiply by instructions of a warp and have 99 KiB. A100 has 163, Hopper other
        instructions.
        """
        generation = self.compute_capability.partition(".")[0]
        if not generation or self.shared_memory_per_sm_bytes is None:
            return None
        instructions = _WARP_INSTRUCTIONS if generation in _WARP_GENERATIONS else generation
        return self.vendor, instructions, self.shared_memory_per_sm_bytes

    @property
    def numbers(self) -> dict[str, float]:
        """Every number the file gives, by field name; rates as ``dense_flops_per_s.fp16``."""
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
        """Numbers without provenance; none in a file of this package, perhaps all in a file of one's own."""
        return tuple(name for name in self.numbers if name not in self.provenance)
