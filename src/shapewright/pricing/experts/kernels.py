"""Kernel choice for expert layers: the nearest measured kernel by family, then by format, then by library.

A record of kind ``moe`` has sections by library, version and kernel, such as ``vllm 0.24.0/..._triton_tritonexperts``,
and in each the formats it was measured in. Kernels of one family resemble each other across formats and libraries more
than another family does in the same format: TensorRT-LLM's 8-bit blocks on B200 are 10 % off with its own 16-bit
fractions and 8-bit rates, and 120 % with triton's (docs/decisions/0013).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.pricing.calibration.libraries import nearest_library, split_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.pricing.calibration.records import CalibrationRecord

# Substring of a kernel's name and its family, first match first. sglang and vllm run triton unless the name contains
# another one.
_FAMILIES = (
    ("trtllm", "trtllm"),
    ("deepgemm", "deepgemm"),
    ("deep_gemm", "deepgemm"),
    ("marlin", "marlin"),
    ("cutedsl", "cutedsl"),
    ("cutlass", "cutlass"),
    ("triton", "triton"),
    ("fused_moe", "triton"),
)
_TRITON = "triton"
# Release from which a library's triton kernels have five default tiles by tokens instead of two; None where no release
# has. Source: vllm-project/vllm, pull request 34846, opened after the branch of 0.16 was cut and merged before 0.17.
_DEFAULTS: Mapping[str, tuple[int, ...] | None] = {"vllm": (0, 17), "sglang": None}
# Fraction of its record's usual bandwidth fraction below which a kernel is a poor match of one library and one device
# (CUTLASS on Hopper: a fifth), which does not predict other architectures or training software.
_LEAST_BANDWIDTH_RATIO = 0.5
# Formats whose default section defines the usual bandwidth fraction.
_USUAL_FORMATS = ("bf16", "fp16")


def describe_expert_kernel(
    record: CalibrationRecord, dtype: str, *, is_training: bool = False, is_own: bool = False
) -> str:
    """Text for the measured kernel that prices experts in a narrow format; empty in 16 bits or where none was measured.

    Args:
        record: A record of kind ``moe``.
        is_own: Whether a server runs kernels of its own (``expert_kernel="as-16-bit"``).
    """
    kernel = record.provenance.get("defaults", {}).get(dtype, "").partition(", ")[2]
    if not kernel or dtype in _USUAL_FORMATS:
        return ""
    if not has_poor_kernel(record, dtype):
        words = f"{dtype} experts are priced as {kernel} ran on {record.device}"
        return f"{words}; with another kernel they may be faster" if not (is_training or is_own) else words
    stand_in = f"{dtype} experts are priced with the fractions of {record.device}'s 16-bit kernels at the {dtype} rate"
    if is_training:
        return (
            f"{stand_in}, since {kernel} there does not predict training software; as slow as bf16 if yours multiplies "
            f"in 16 bits"
        )
    if is_own:
        return (
            f"{stand_in}, as for DeepGEMM or triton, which run checkpoints with block scales; expert_kernel=measured "
            f"prices them as {kernel}, which is slower and has one scale per tensor"
        )
    return (
        f"{dtype} experts are priced as {kernel} ran on {record.device}, at less than half of the bandwidth "
        f"fraction of 16-bit experts there; for a kernel as good as those (DeepGEMM, triton) set "
        f"expert_kernel=as-16-bit"
    )


def expert_kernel_family(kernel: str) -> str:
    """Family of a kernel's name as libraries spell it; empty if unknown.

    >>> expert_kernel_family("vllm_modeloptfp8moe_flashinfer_cutlass_flashinferexperts"), expert_kernel_family("x")
    ('cutlass', '')
    """
    folded = kernel.casefold()
    return next((family for word, family in _FAMILIES if word in folded), "")


def choose_expert_kernel(record: CalibrationRecord, formats: Sequence[str], library: str) -> str:
    """Choose the section of a record that prices a kernel in a format; empty for the record's default of that format.

    Args:
        record: A record of kind ``moe``.
        formats: Element format of the GEMMs and its fallbacks, nearest first.
        library: Library, version and kernel, such as ``vllm 0.24.0/triton``; empty if unknown.
    """
    sections: Mapping[str, Mapping[str, Any]] = record.parameters["libraries"]
    if not library or formats[0] in sections.get(library, {}):
        return library
    name, _, kernel = library.partition("/")
    family = expert_kernel_family(kernel)
    alike = [
        (formats.index(each), key)
        for key, own in sections.items()
        for each in own
        if each in formats and family and expert_kernel_family(key.partition("/")[2]) == family
    ]
    nearest_format = min((rank for rank, _ in alike), default=0)
    keys = {key.partition("/")[0]: key for rank, key in reversed(alike) if rank == nearest_format}
    if family == _TRITON:
        # The default tiles matter more than the library they ship with.
        keys = {own: key for own, key in keys.items() if has_same_defaults(name, own)} or keys
    if not keys:
        return ""
    return keys.get(nearest_library(name, keys), next(reversed(keys.values())))


def has_same_defaults(one: str, other: str) -> bool:
    """Whether two libraries choose the same default tiles for triton's kernels; False where one is unknown.

    sglang and vllm up to 0.16 have the same two tiles, vllm from 0.17 on has five.

    >>> has_same_defaults("vllm 0.14.0", "sglang 0.5.14"), has_same_defaults("vllm 0.14.0", "vllm 0.24.0")
    (True, False)
    """
    rules = [_default_rule(library) for library in (one, other)]
    return bool(rules[0]) and rules[0] == rules[1]


def has_defaults(library: str) -> bool:
    """Whether a library's default tiles are known."""
    return bool(_default_rule(library))


def _default_rule(library: str) -> str:
    """Name of a library's default tile rule; empty if unknown. Without a version the newest is meant."""
    name, version = split_version(library)
    if name not in _DEFAULTS:
        return ""
    changed_in = _DEFAULTS[name]
    return "five tiles" if changed_in and (not version or version >= changed_in) else "two tiles"


def drop_poor_kernels_if_transferred(record: CalibrationRecord) -> CalibrationRecord:
    """Remove poor kernels from a record that is borrowed by another architecture.

    CUTLASS's experts reach a fifth of the memory bandwidth on Hopper. With them TensorRT-LLM's kernels on B200 in the
    same format were priced at 3.7 times their time, with Hopper's 16-bit fractions at 1.4 times.
    """
    return drop_poor_kernels(record) if record.transfer == "generic" else record


_WITHOUT_POOR_KERNELS: dict[tuple[str, ...], tuple[CalibrationRecord, CalibrationRecord]] = {}
"""By use of a record: the record, and what is left of it."""


def has_poor_kernel(record: CalibrationRecord, dtype: str) -> bool:
    """Whether the measured kernel of a format is a poor match of its library, which other software does not use."""
    return custom_kernel_record(record, dtype) is not record


def custom_kernel_record(record: CalibrationRecord, dtype: str) -> CalibrationRecord:
    """Return the record for software with its own expert kernels: without poor kernels, if the format's is one.

    Training software has such kernels, and so do servers that are configured so. That the device can do better than a
    serving library's poor match is shown by its 16-bit experts, whose fractions at the narrow format's rate are used
    instead (docs/decisions/0007).
    """
    kept = drop_poor_kernels(record)
    return record if dtype in kept.parameters["dtypes"] else kept


def drop_poor_kernels(record: CalibrationRecord) -> CalibrationRecord:
    """Remove kernels that reach less than half of the record's usual bandwidth fraction; cached per record."""
    use = (record.id, record.transfer, record.recipient, record.distance_override, str(record.older_software))
    cached = _WITHOUT_POOR_KERNELS.get(use)
    if cached is None or cached[0].parameters is not record.parameters:
        default, libraries = record.parameters["dtypes"], record.parameters["libraries"]
        usual = next((default[each] for each in _USUAL_FORMATS if each in default), next(iter(default.values())))
        least = _LEAST_BANDWIDTH_RATIO * usual["bandwidth_fraction"]

        def keep_good(sections: Mapping[str, Any]) -> dict[str, Any]:
            return {name: own for name, own in sections.items() if own["bandwidth_fraction"] >= least}

        kept = {"dtypes": keep_good(default), "libraries": {key: keep_good(own) for key, own in libraries.items()}}
        dropped = {expert_kernel_family(key) for key, own in libraries.items() if own and not kept["libraries"][key]}
        left = replace(record, left_out=", ".join(sorted(dropped)), parameters={**record.parameters, **kept})
        cached = _WITHOUT_POOR_KERNELS[use] = (record, left)
    return cached[1]
