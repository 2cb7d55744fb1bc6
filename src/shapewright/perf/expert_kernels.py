"""Which measured kernels price an expert layer: those of its own family first, then of its format, then of its library.

A record of kind ``moe`` has sections by library, version and kernel, such as ``vllm 0.24.0/..._triton_tritonexperts``,
and in each the formats it was measured in. Kernels of one family resemble each other over formats and libraries more
than another family does in the same format: TensorRT-LLM's 8-bit blocks on B200 are 10 % off with its own 16-bit
fractions and 8-bit rates, and 120 % with triton's (docs/decisions/0013-strangers.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.perf.libraries import nearest_library, split_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.perf.calibration import CalibrationRecord

# What a kernel's name contains, and its family; the first that fits. sglang and vllm run triton unless they say more.
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
# Release from which a library's triton kernels have five default tiles by tokens instead of two; None where none has.
# Source: vllm-project/vllm, pull request 34846, opened after the branch of 0.16 was cut and merged before 0.17.
_DEFAULTS: Mapping[str, tuple[int, ...] | None] = {"vllm": (0, 17), "sglang": None}
# A kernel that reaches a smaller part of its record's usual share of bandwidth is a poor match of one library and one
# device (CUTLASS on Hopper: a fifth), and tells nothing of another family of devices, nor of a training stack.
_LEAST_SHARE_TO_LEND = 0.5
# Formats whose default section says what share of bandwidth is usual.
_USUAL_FORMATS = ("bf16", "fp16")


def say_expert_kernel(record: CalibrationRecord, dtype: str, *, is_training: bool = False, is_own: bool = False) -> str:
    """Which measured kernel prices experts in a narrow format, in words; empty in 16 bits or where none was.

    Args:
        record: A record of kind ``moe``.
        dtype: Format of the products.
        is_training: Whether a training stack runs them.
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
            f"{stand_in}, since {kernel} there tells nothing of a training stack; as slow as bf16 if yours multiplies "
            f"in 16 bits"
        )
    if is_own:
        return (
            f"{stand_in}, as for DeepGEMM or triton, which checkpoints with block scales run; --expert-kernel measured "
            f"prices them as {kernel} ran, slower and with one scale a tensor"
        )
    return (
        f"{dtype} experts are priced as {kernel} ran on {record.device}, at less than half of the share of bandwidth "
        f"that 16-bit experts reach there; for a kernel as good as those (DeepGEMM, triton) give --expert-kernel "
        f"as-16-bit"
    )


def expert_kernel_family(kernel: str) -> str:
    """Family of a kernel's name as libraries spell it; empty if it tells none.

    >>> expert_kernel_family("vllm_modeloptfp8moe_flashinfer_cutlass_flashinferexperts"), expert_kernel_family("x")
    ('cutlass', '')
    """
    folded = kernel.casefold()
    return next((family for word, family in _FAMILIES if word in folded), "")


def choose_expert_kernel(record: CalibrationRecord, formats: Sequence[str], library: str) -> str:
    """Section of a record that prices a kernel in a format; empty for the record's default of that format.

    Args:
        record: A record of kind ``moe``.
        formats: Element format of the products, and those whose fractions it could borrow, nearest first.
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
        # What it runs where nobody tuned tells kernels apart more than whose release it is.
        keys = {own: key for own, key in keys.items() if has_same_defaults(name, own)} or keys
    if not keys:
        return ""
    return keys.get(nearest_library(name, keys), next(reversed(keys.values())))


def has_same_defaults(one: str, other: str) -> bool:
    """Whether two libraries choose tiles of triton's kernels alike where nobody tuned; no where one is not known.

    sglang and vllm up to 0.16 have the same two tiles, and vllm from 0.17 on five.

    >>> has_same_defaults("vllm 0.14.0", "sglang 0.5.14"), has_same_defaults("vllm 0.14.0", "vllm 0.24.0")
    (True, False)
    """
    rules = [_default_rule(library) for library in (one, other)]
    return bool(rules[0]) and rules[0] == rules[1]


def has_defaults(library: str) -> bool:
    """Whether a library's default tiles are known."""
    return bool(_default_rule(library))


def _default_rule(library: str) -> str:
    """What a library's default tiles are called here; empty if unknown. Without a version the newest is meant."""
    name, version = split_version(library)
    if name not in _DEFAULTS:
        return ""
    changed_in = _DEFAULTS[name]
    return "five tiles" if changed_in and (not version or version >= changed_in) else "two tiles"


def leave_poor_matches(record: CalibrationRecord) -> CalibrationRecord:
    """A record without the kernels that tell nothing of the device, where it is borrowed from another family.

    CUTLASS's experts reach a fifth of the memory's bandwidth on Hopper. TensorRT-LLM's on B200 in the same format were
    priced at 3.7 times their time by them, and at 1.4 times by Hopper's 16-bit fractions.
    """
    return leave_poor_kernels(record) if record.transfer == "generic" else record


_LENT: dict[tuple[str, ...], CalibrationRecord] = {}


def has_poor_kernel(record: CalibrationRecord, dtype: str) -> bool:
    """Whether what a record measured in a format is a poor match of its library, which stacks of their own leave."""
    return own_kernel_record(record, dtype) is not record


def own_kernel_record(record: CalibrationRecord, dtype: str) -> CalibrationRecord:
    """The record that prices experts of a stack with its own kernels: without poor kernels, if they are the format's.

    A training stack has such kernels, and so has a server that says so. That the device can do better than a serving
    library's poor match is proven by its 16-bit experts, whose fractions at the narrow format's rate stand in
    (docs/decisions/0007-moe.md).
    """
    kept = leave_poor_kernels(record)
    return record if dtype in kept.parameters["dtypes"] else kept


def leave_poor_kernels(record: CalibrationRecord) -> CalibrationRecord:
    """A record without the kernels that reach less than half of its usual share of bandwidth; made once per record."""
    use = (record.id, record.transfer, record.borrower, record.farther, str(record.older_software))
    if use not in _LENT:
        default, libraries = record.parameters["dtypes"], record.parameters["libraries"]
        usual = next((default[each] for each in _USUAL_FORMATS if each in default), next(iter(default.values())))
        least = _LEAST_SHARE_TO_LEND * usual["bandwidth_fraction"]

        def lend(sections: Mapping[str, Any]) -> dict[str, Any]:
            return {name: own for name, own in sections.items() if own["bandwidth_fraction"] >= least}

        kept = {"dtypes": lend(default), "libraries": {key: lend(own) for key, own in libraries.items()}}
        dropped = {expert_kernel_family(key) for key, own in libraries.items() if own and not kept["libraries"][key]}
        _LENT[use] = replace(record, left_out=", ".join(sorted(dropped)), parameters={**record.parameters, **kept})
    return _LENT[use]
