"""Table of architectures: all facts about a chip family that the package looks up by its name.

To add an architecture, add one ``Architecture`` entry to ``ARCHITECTURES``; device files may then name it. Facts of one
chip (rates, memory, number of multiprocessors) belong in its device file. Facts that differ between chips of one
architecture (GA100 and GA102 are both Ampere) are listed by compute capability in ``COMPUTE_CAPABILITIES``.

Sources, by field:

    vendor, generation        vendors' product pages; generations count a vendor's matrix-unit chips in order
    donors                    judgement: same vendor and nearest generation of matrix unit, then ampere, the best
                              measured architecture
    same_kernels              NVIDIA, CUDA C Programming Guide, "Family-specific features": capability 10.3 is of family
                              10.0. Blackwell Ultra is Blackwell with a higher 4-bit rate, more memory and less int8
    has_fused_attention       FlashAttention-2 needs Ampere's asynchronous copies and bf16 (arXiv 2307.08691 and the
                              flash-attn package's list of GPUs)
    flash_attention_version   Dao-AILab/flash-attention: csrc/flash_attn (version 2) and hopper/ (version 3)
    full_width_bytes          NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores";
                              arXiv 2401.14489, section on tensor cores
    switching_energy          TSMC's announcements (recalled, not re-read), power at the same speed: N7 against 16FF+
                              -60 %, N5 against N7 -30 %, N3E against N5 -32 %; N6 is taken as N7, 12FFN as 16FF+, 4N
                              and 4NP as N5. GA102 is Samsung's 8LPP: 10LPE against 14LPE -40 %, 10LPP against that
                              -15 %, 8LPP against that -10 %; 14LPP, against 14LPE -15 %, is taken as 16FF+
    exponential_growth        NVIDIA, "Inside NVIDIA Blackwell Ultra": 10.7 against 5 tera-exponentials/s (recalled)
    gemm_tiles                kernel names in profiler traces of cuBLAS (ampere_..._128x256_..., nvjet_..._256x128),
                              CUTLASS's profiler lists, rocBLAS's Tensile file names (MT128x128)
    matrix_instructions       NVIDIA, PTX ISA: warp-level (mma.sync), warpgroup-level (wgmma) and tcgen05 instructions
    num_cache_partitions      NVIDIA A100 and H100 architecture white papers, "L2 cache"; B200 has two dies
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from shapewright.core.records import dataclass

GPU_VENDORS = ("NVIDIA", "AMD")
"""Vendors whose chips run kernels as tiles on multiprocessors that share one clock."""

COMMON_GEMM_TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
    (64, 32),
    (32, 64),
    (128, 32),
    (32, 128),
    (16, 64),
    (16, 128),
)
"""GEMM output tiles (rows, columns) that every vendor's library ships, in both orientations. [element]"""

_FULL_CACHE_LINE_BYTES = 128
_WIDEST_THREAD_LOAD_BYTES = 16
# NVIDIA's kernels with narrow loads lose a third to two thirds of the rate.
USUAL_ALIGNMENT_FACTORS = (0.3, 0.6, 0.6, 0.93, 0.95, 0.97)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Facts shared by all chips of one architecture.

    Attributes:
        name: Name, as device files spell it.
        vendor: Vendor, as device files spell it.
        family: Name shared by architectures of one generation with different chips, such as ``blackwell``.
        generation: Position among the vendor's architectures, counted from 0; None where none was calibrated.
        donors: Architectures whose calibration records price this one while it has none, nearest first.
        same_kernels: Architectures whose multiprocessors run the same kernels.
        has_fused_attention: Whether libraries have a fused attention kernel for it.
        flash_attention_version: Major version of the FlashAttention kernels that it runs.
        full_width_bytes: Row alignment at which matrix operands load at full width. [byte]
        fp8_donor_rank: Rank among the architectures whose records price the cast to fp8 elsewhere, 0 for the best
            measured; None where its records are not used for that.
        switching_energy: Energy of one transistor switch in its data-center process, relative to TSMC N7; None where
            unknown.
        exponential_growth: Exponentials per multiprocessor and clock, relative to an older architecture by name, where
            the vendor states that they grew.
        gemm_tiles: GEMM output tiles that its libraries ship; empty where they were never listed. [element]
        alignment_factors_guess: Rate factors at 2, 4, 8, 16, 32 and 64 bytes of alignment from which a fit starts.
        benchmarks_run_from_cache: Whether repeated GEMM benchmarks read operands from the last-level cache: on L40S
            they reach 3 TB/s with 0.86 TB/s of memory bandwidth.
    """

    name: str
    vendor: str
    family: str = ""
    generation: int | None = None
    donors: tuple[str, ...] = ()
    same_kernels: tuple[str, ...] = ()
    has_fused_attention: bool = True
    flash_attention_version: int = 3
    full_width_bytes: int = _FULL_CACHE_LINE_BYTES
    fp8_donor_rank: int | None = None
    switching_energy: float | None = None
    exponential_growth: Mapping[str, float] = field(default_factory=dict)
    gemm_tiles: tuple[tuple[int, int], ...] = ()
    alignment_factors_guess: tuple[float, ...] = USUAL_ALIGNMENT_FACTORS
    benchmarks_run_from_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class ComputeCapability:
    """Facts of chips with one compute capability, where chips of one architecture differ.

    Attributes:
        matrix_instructions: Instructions that feed the tensor cores; kernels are compiled for them.
        num_cache_partitions: Partitions of the last-level cache, each of which keeps a copy of shared data.
        switching_energy: Energy of one transistor switch where the process differs from that of the architecture's
            data-center chip, relative to TSMC N7.
    """

    matrix_instructions: str
    num_cache_partitions: int = 1
    switching_energy: float | None = None


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        name="pascal",
        vendor="NVIDIA",
        donors=("volta", "turing", "ampere"),
        has_fused_attention=False,
        full_width_bytes=_WIDEST_THREAD_LOAD_BYTES,
        switching_energy=2.5,
    ),
    Architecture(
        name="volta",
        vendor="NVIDIA",
        generation=0,
        donors=("turing", "ampere"),
        has_fused_attention=False,
        full_width_bytes=_WIDEST_THREAD_LOAD_BYTES,
        switching_energy=2.5,
        gemm_tiles=COMMON_GEMM_TILES,
        # Volta's libraries do not use tensor cores for odd sizes: 4 TFLOP/s at head widths 65 to 127, 25 above.
        alignment_factors_guess=(0.4, 0.8, 0.8, 0.95, 0.95, 0.97),
    ),
    Architecture(
        name="turing",
        vendor="NVIDIA",
        generation=1,
        donors=("volta", "ampere"),
        has_fused_attention=False,
        full_width_bytes=_WIDEST_THREAD_LOAD_BYTES,
        switching_energy=2.5,
    ),
    Architecture(
        name="ampere",
        vendor="NVIDIA",
        generation=2,
        donors=("hopper", "ada"),
        flash_attention_version=2,
        switching_energy=1.0,
        gemm_tiles=COMMON_GEMM_TILES,
    ),
    Architecture(
        name="ada",
        vendor="NVIDIA",
        generation=3,
        donors=("ampere",),
        flash_attention_version=2,
        fp8_donor_rank=2,
        switching_energy=0.7,
        gemm_tiles=COMMON_GEMM_TILES,
        benchmarks_run_from_cache=True,
    ),
    Architecture(
        name="hopper",
        vendor="NVIDIA",
        generation=3,
        donors=("ampere",),
        fp8_donor_rank=0,
        switching_energy=0.7,
        gemm_tiles=((192, 128), (128, 192), *COMMON_GEMM_TILES),
    ),
    Architecture(
        name="blackwell",
        vendor="NVIDIA",
        family="blackwell",
        generation=4,
        donors=("hopper", "ampere"),
        same_kernels=("blackwell-ultra",),
        fp8_donor_rank=1,
        switching_energy=0.7,
        gemm_tiles=((256, 256), (256, 192), (192, 128), (128, 192), *COMMON_GEMM_TILES),
    ),
    Architecture(
        name="blackwell-ultra",
        vendor="NVIDIA",
        family="blackwell",
        generation=4,
        donors=("blackwell", "hopper", "ampere"),
        same_kernels=("blackwell",),
        switching_energy=0.7,
        exponential_growth={"blackwell": 2.0},
    ),
    Architecture(
        name="blackwell-consumer",
        vendor="NVIDIA",
        family="blackwell",
        generation=4,
        donors=("ada", "ampere"),
        switching_energy=0.7,
        benchmarks_run_from_cache=True,
    ),
    Architecture(name="cdna1", vendor="AMD", generation=0, donors=("cdna2", "ampere"), switching_energy=1.0),
    Architecture(
        name="cdna2",
        vendor="AMD",
        generation=1,
        donors=("cdna1", "ampere"),
        switching_energy=1.0,
        gemm_tiles=COMMON_GEMM_TILES,
        # MI250X shows next to no loss at 4 bytes; 2 bytes were not measured.
        alignment_factors_guess=(0.8, 0.95, 0.95, 0.97, 0.98, 0.99),
    ),
    Architecture(name="cdna3", vendor="AMD", generation=2, donors=("cdna2", "cdna1", "ampere"), switching_energy=0.7),
    Architecture(
        name="cdna4", vendor="AMD", generation=3, donors=("cdna3", "cdna2", "cdna1", "ampere"), switching_energy=0.48
    ),
    Architecture(name="xe2", vendor="Intel"),
    Architecture(name="gaudi2", vendor="Intel"),
    Architecture(name="gaudi3", vendor="Intel"),
    Architecture(name="tpu-v3", vendor="Google"),
    Architecture(name="tpu-v4", vendor="Google"),
    Architecture(name="tpu-v5e", vendor="Google"),
    Architecture(name="tpu-v5p", vendor="Google"),
    Architecture(name="tpu-v6e", vendor="Google"),
    Architecture(name="tpu-v7", vendor="Google"),
    Architecture(name="neuroncore-v2", vendor="AWS"),
    Architecture(name="neuroncore-v3", vendor="AWS"),
    Architecture(name="wse-2", vendor="Cerebras"),
    Architecture(name="wse-3", vendor="Cerebras"),
    Architecture(name="tsp-v1", vendor="Groq"),
    Architecture(name="sn40l", vendor="SambaNova"),
    Architecture(name="grayskull", vendor="Tenstorrent"),
    Architecture(name="wormhole", vendor="Tenstorrent"),
    Architecture(name="ipu-mk2", vendor="Graphcore"),
    Architecture(name="tcp", vendor="FuriosaAI"),
    Architecture(name="dimc", vendor="d-Matrix"),
    # For a device file of one's own whose chip belongs to none of the above.
    Architecture(name="other", vendor=""),
)

ARCHITECTURE_NAMES = tuple(architecture.name for architecture in ARCHITECTURES)

LAST_RESORT_DONOR = "ampere"
"""Architecture whose records price a device when none of its own donors has a record."""

# By exact capability, else by its major version.
COMPUTE_CAPABILITIES: Mapping[str, ComputeCapability] = {
    "7": ComputeCapability(matrix_instructions="mma.sync"),
    "8": ComputeCapability(matrix_instructions="mma.sync"),
    "8.0": ComputeCapability(matrix_instructions="mma.sync", num_cache_partitions=2),
    "8.6": ComputeCapability(matrix_instructions="mma.sync", switching_energy=1.35),
    "9": ComputeCapability(matrix_instructions="wgmma", num_cache_partitions=2),
    "10": ComputeCapability(matrix_instructions="tcgen05", num_cache_partitions=2),
    "12": ComputeCapability(matrix_instructions="mma.sync"),
}

_BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def find_architecture(name: str) -> Architecture:
    """Return the entry of an architecture; that of ``other`` for an unknown name.

    >>> find_architecture("blackwell-ultra").donors
    ('blackwell', 'hopper', 'ampere')
    """
    return _BY_NAME.get(name, _BY_NAME["other"])


def find_compute_capability(version: str) -> ComputeCapability:
    """Return the facts of a compute capability.

    Chips without an entry (AMD's ``gfx942``) have matrix instructions of their own, named by the major version.

    >>> find_compute_capability("8.9").matrix_instructions, find_compute_capability("8.0").num_cache_partitions
    ('mma.sync', 2)
    """
    major = version.partition(".")[0]
    known = COMPUTE_CAPABILITIES.get(version) or COMPUTE_CAPABILITIES.get(major)
    return known or ComputeCapability(matrix_instructions=major)
