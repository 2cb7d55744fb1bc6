"""Kernel choice of attention records: section (element formats), library and head width.

A record's ``sections`` price models, with the kernels of the newest measured library. ``libraries`` has sections of
other libraries by name and version, for calls whose library is known. A section has one kernel per family and head
width, since libraries compile each width separately with its own tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass
from shapewright.pricing.attention.decode import DecodeParameters
from shapewright.pricing.attention.kernels import read_parameters
from shapewright.pricing.attention.prefill import PrefillParameters
from shapewright.pricing.attention.residual import AttentionResidual, load_residual
from shapewright.pricing.calibration.intervals import choose_interval, widen_for_format
from shapewright.pricing.calibration.libraries import LibraryMatch, match_library, nearest_library

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool

    from shapewright.pricing.attention.kernels import AttentionShape
    from shapewright.pricing.calibration.intervals import Interval
    from shapewright.pricing.calibration.records import CalibrationRecord

    CallMask = Bool[np.ndarray, "*calls"]

# Transfers for which the residual table applies: the device's own record and that of a sibling.
RESIDUAL_TRANSFERS = ("exact", "architecture")
# Widest head of the FlashAttention kernels; wider heads run another kernel of the library. [element]
WIDEST_FLASH_HEAD = 256
# Widening of the logarithmic interval for unmeasured kernels (backward).
ASSUMED_WIDENING = 1.6
ASSUMED_BACKWARD_ERROR = 1.3
"""Error of an assumed backward pass, as a factor: of 46 measured in 16 bits on H200 and GB200 (attention_training.csv)
nine in ten are within 1.34 of what their forward pass and the assumption give, on H200 alone within 1.06."""
# Substring of a kernel's name and its family, first match first; flash_attention, fa2 and fa3 are the default.
_FAMILIES = (("triton", "triton"), ("trtllm", "trtllm"), ("flashinfer", "flashinfer"), ("fa4", "fa4"))
# Flashinfer decodes small groups of query heads without tensor cores, in separate kernels for one head and for several:
# widest group and its family, narrowest first. Source: flashinfer's choice in sglang (4 heads and more use tensor
# cores, with a 16-bit cache); the step between 1 and 2 heads is measured.
SMALL_GROUPS = ((1, "flashinfer_group1"), (3, "flashinfer_group3"))


@dataclass(frozen=True)
class Section:
    """Kernels of one library for one combination of element formats.

    Attributes:
        record: The record that holds it.
        library: Library and version; empty for the default one.
        name: Element formats, such as ``16bit_kv8``.
        wanted: Element formats that are priced with it.
        is_own: Whether these formats were measured, not others.
        match: How near its library is to the running one.
    """

    record: CalibrationRecord
    library: str
    name: str
    wanted: str
    is_own: bool
    match: LibraryMatch = "own"

    @property
    def content(self) -> Mapping[str, Any]:
        """Kernels of the section and the choice between them, as in the record."""
        parameters = self.record.parameters
        sections = parameters["libraries"][self.library] if self.library else parameters["sections"]
        found: Mapping[str, Any] = sections[self.name]
        return found

    def path(self, kernel: str, phase: str) -> str:
        """Name of a kernel in a phase in the record's intervals."""
        own = f"{self.name}/{kernel}/{phase}"
        return f"{self.library}/{own}" if self.library else own

    def interval(self, kernel: str, phase: str) -> Interval:
        """Interval of a kernel's formula in a phase, for its use here."""
        path = self.path(kernel, phase)
        return self._interval(self.record.interval[path], path, phase)

    def residual(self, kernel: str, phase: str) -> tuple[AttentionResidual, Interval] | None:
        """Residual table of a kernel in a phase, with its interval; None where no table applies."""
        learned = self.record.residual
        if learned is None or not self.is_own or self.record.transfer not in RESIDUAL_TRANSFERS:
            return None
        path = self.path(kernel, phase)
        table = learned["tables"].get(path)
        if table is None:
            return None
        interval = self._interval(learned["interval"][table], f"{path}, learned", phase)
        return load_residual(learned["file"], table), interval

    def _interval(self, own: Mapping[str, Any], path: str, phase: str) -> Interval:
        formats = (f"{phase}/{self.wanted}", phase)
        found = choose_interval(self.record, own, path, formats, library=self.match)
        is_measured = self.is_own or found.format == formats[0]
        return found if is_measured else widen_for_format(found)


def kernel_family(kernel: str) -> str:
    """Family of a kernel's name as libraries spell it.

    >>> kernel_family("vllm_flashinfer_trtllmdecode"), kernel_family("fa3"), kernel_family("vllm_triton_attn")
    ('trtllm', 'flash', 'triton')
    """
    return next((family for word, family in _FAMILIES if word in kernel), "flash")


def kernel_width(kernel: str) -> float:
    """Head width at which a record's kernel was measured. [element]

    >>> kernel_width("flashinfer_group3_128")
    128.0
    """
    return float(kernel.rpartition("_")[2])


def choose_section(dtype: str, kv_bits: int, record: CalibrationRecord, library: str, kernel: str = "") -> Section:
    """Choose the section for an element format of the arithmetic and of the cache.

    A library is priced by its own section or by that of its nearest version. Without either, or where that lacks a
    kernel of the running family, a section of the same formats with such a kernel is used: a kernel resembles itself in
    another library more than other kernels in its own. Otherwise the default section.

    Raises:
        CalibrationError: the record has no suitable section.
    """
    wanted = "fp8" if dtype == "fp8" else "16bit" if kv_bits >= 16 else "16bit_kv8"
    is_measured = dtype not in ("fp32", "tf32") and kv_bits >= 8
    libraries = record.parameters.get("libraries", {})
    nearest = nearest_library(library, libraries)
    choices = []
    if wanted in libraries.get(nearest, {}):
        choices.append(Section(record, nearest, wanted, wanted, is_measured, match_library(library, nearest)))
    if wanted in record.parameters["sections"]:
        choices.append(Section(record, "", wanted, wanted, is_measured, _match_default(record, wanted, library)))
    usual = choices[:1]
    if library and kernel:
        others = (name for name in libraries if name != nearest and wanted in libraries[name])
        choices += [Section(record, name, wanted, wanted, is_measured, "other") for name in others]
    for section in (*(each for each in choices if not kernel or has_family(each, kernel)), *usual):
        return section
    for name in (wanted, "16bit_kv8", "16bit"):
        if name in record.parameters["sections"]:
            match = _match_default(record, name, library)
            return Section(record, "", name, wanted, is_measured and name == wanted, match)
    raise CalibrationError(
        f"attention record {record.id} has no section {wanted!r} nor '16bit'; "
        "run python -m shapewright.measure.refit attention"
    )


def _match_default(record: CalibrationRecord, section: str, library: str) -> LibraryMatch:
    """Classify the running library against those that a default section was fitted to, if the record lists them."""
    if not library:
        return "own"
    reports: Mapping[str, Any] = record.provenance.get("reports", {})
    fitted = {
        name
        for path, report in reports.items()
        if path.startswith(f"{section}/")
        for name in report.get("libraries", ())
    }
    return match_library(library, *(fitted or (library,)))


def has_family(section: Section, kernel: str) -> bool:
    """Whether a section has a kernel of the same family."""
    family = kernel_family(kernel)
    return any(name.startswith(f"{family}_") for name in section.content["kernels"])


def choose_kernels(shape: AttentionShape, section: Section, kernel: str) -> dict[str, CallMask]:
    """Assign every call to a kernel; masks by the kernel's name in the record.

    Args:
        shape: The calls; latent heads (key and value widths differ) use the section's usual kernel.
        kernel: Running kernel, as libraries spell it, if known; otherwise each width uses its usual one.
    """
    content = section.content
    usual: dict[int, str] = {int(width): name for width, name in content["kernel_of_head_dim"].items()}
    if kernel:
        family = kernel_family(kernel)
        own = {int(width): f"{family}_{width}" for width in usual if f"{family}_{width}" in content["kernels"]}
        usual = own or usual
    flat = [width for width in usual if width <= WIDEST_FLASH_HEAD] or list(usual)
    wide = [width for width in usual if width > WIDEST_FLASH_HEAD] or list(usual)
    is_latent = shape.head_dim != shape.v_head_dim
    taken: dict[str, CallMask] = {content["usual_kernel"]: is_latent}
    compiled = read_kernel(section, content["usual_kernel"])[0].kernel_head_dims
    for head_dim in sorted(set(shape.head_dim.ravel().tolist())):
        # A width runs the kernel of the next compiled width, which resembles that of the nearest measured one.
        padded = next((width for width in compiled if width >= head_dim), head_dim)
        widths = wide if head_dim > WIDEST_FLASH_HEAD else flat
        nearest = min(widths, key=lambda width: (abs(log(width / padded)), -width))
        here = (shape.head_dim == head_dim) & ~is_latent
        for widest, family in SMALL_GROUPS if usual[nearest].startswith("flashinfer_") else ():
            small = f"{family}_{nearest}"
            if small in content["kernels"]:
                is_small = here & (shape.num_heads <= widest * shape.num_kv_heads)
                taken[small] = taken.get(small, False) | is_small
                here = here & ~is_small
        taken[usual[nearest]] = taken.get(usual[nearest], False) | here
    return {name: calls for name, calls in taken.items() if calls.any()}


def read_kernel(section: Section, kernel: str) -> tuple[PrefillParameters, DecodeParameters]:
    """Read a kernel's constants in both phases; cached."""
    key = (section.record.id, section.library, section.name, kernel)
    if key not in _KERNELS:
        raw = section.content["kernels"][kernel]
        _KERNELS[key] = (
            read_parameters(PrefillParameters, raw["prefill"], section.record.id),
            read_parameters(DecodeParameters, raw["decode"], section.record.id),
        )
    return _KERNELS[key]


_KERNELS: dict[tuple[str, str, str, str], tuple[PrefillParameters, DecodeParameters]] = {}
