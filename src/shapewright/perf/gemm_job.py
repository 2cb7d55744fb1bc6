"""What prices the products of one dtype: a section of a record, its own or its nearest kin's, and the rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.dtypes import get_dtype, stored_weight_bytes
from shapewright.errors import CalibrationError
from shapewright.hardware import load_device
from shapewright.perf.best_rates import borrowed_rate_scale
from shapewright.perf.calibration import ROOFLINE_BOUND
from shapewright.perf.expert_kernels import choose_expert_kernel, leave_poor_matches
from shapewright.perf.expert_tiles import TileRule, read_rule
from shapewright.perf.gemm_menu import ALIGNMENT_FROM, GemmParameters, read_batched_parameters, read_parameters
from shapewright.perf.gemm_transfer import adapt_parameters, borrowed_feed_scale
from shapewright.perf.intervals import (
    FORMAT_ERROR,
    NARROW_FORMAT_ERROR,
    Interval,
    as_lenders,
    at_least,
    borrowed_interval,
    choose_interval,
    find_group,
    widened_for_format,
)
from shapewright.perf.kernels import DeviceRates, rates_of
from shapewright.perf.lending import carries_alignment, is_other_card
from shapewright.perf.libraries import LibraryMatch, match_library, nearest_library
from shapewright.perf.residual import ResidualTable, load_residuals, section_name

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord

# Whose fractions a dtype borrows in a record that lacks it, nearest first.
DTYPE_KIN = {
    "bf16": ("fp16",),
    "fp16": ("bf16",),
    "tf32": ("bf16", "fp16"),
    "fp32": ("bf16", "fp16"),
    "fp8": ("bf16", "fp16"),
    "int8": ("fp8", "bf16", "fp16"),
    "int4": ("fp8", "bf16", "fp16"),
    "fp4": ("fp8", "bf16", "fp16"),
}
# fp16 and bf16 run at one rate through the same kernels on every device that has both.
_SAME_KERNELS = {frozenset({"fp16", "bf16"})}
# Whose residual a device takes: its own, and that of a sibling of its architecture.
_RESIDUAL_TRANSFERS = ("exact", "architecture")
# What a benchmark's hot cache is worth where a borrowed record does not say. The speed-up is where the fit starts
# (fit.gemm), set before any such device was seen; products of few rows on H100, H200 and B200 read faster than others
# up to 0.12 to 0.16 of the cache, as if six weights took turns (docs/decisions/0003-gemm-calibration.md).
_ASSUMED_HOT_CACHE_SPEEDUP, _ASSUMED_HOT_CACHE_SHARE = 4.0, 1.0 / 6.0
# Formats of fewer bits are wrong by more with another's fractions. [bit]
_BITS_OF_8 = 8
# Widening of the logarithmic interval for weights that are stored narrower than they are multiplied: no table has such
# kernels. Judgement.
_STORED_WIDENING = 1.6


class Section(NamedTuple):
    """What prices one dtype: its own section of a record, or its nearest kin's.

    Attributes:
        parameters: Fitted numbers.
        batched: Those of batches of products, if they have their own.
        dtype: Format that they were fitted on.
        interval: Of prices by physics alone.
        batched_interval: Of batches, where they were measured.
        residual: What was learned beyond physics.
        residual_interval: Of prices with it.
        rule: How a serving library chooses tiles of expert layers, where it was measured.
        alignment_from: Device whose odd sizes taught its alignment factors, where the record's own were not measured.
    """

    parameters: GemmParameters
    batched: GemmParameters | None
    dtype: str
    interval: Interval
    batched_interval: Interval | None
    residual: ResidualTable | None
    residual_interval: Interval
    rule: TileRule | None = None
    alignment_from: str = ""

    def carried(self, carry: Callable[[GemmParameters], GemmParameters]) -> Section:
        """The section with all its kernels changed alike."""
        rule = self.rule and replace(self.rule, steps=tuple(carry(step) for step in self.rule.steps))
        batched = self.batched and carry(self.batched)
        return self._replace(parameters=carry(self.parameters), batched=batched, rule=rule)


# Unfolded sections by what chooses them. Records ship with the package: a few dozen at most.
_SECTIONS: dict[tuple[str | bool, ...], Section] = {}


def _section(record: CalibrationRecord, dtype: str, library: str) -> Section:
    """Find the section of a dtype or of its nearest kin; unfolded once per record and use.

    A library of another version is priced as its nearest one, where the record is of the device's own family. In a
    record of another family, and where the record does not know the library, it is priced as the middle of all.
    """
    use = (record.residual is None, record.borrower, record.distance, record.older_software, record.left_out)
    libraries, formats = record.parameters["libraries"], (dtype, *DTYPE_KIN[dtype])
    is_expert = record.kind == "moe"
    nearest = choose_expert_kernel(record, formats, library) if is_expert else nearest_library(library, libraries)
    match = match_library(library, nearest)
    if record.transfer == "generic" and not is_expert and nearest != library:
        nearest = ""  # of another family and in another version a library is no nearer than the middle of all
    key = (record.id, nearest, match, dtype, *use)
    if key not in _SECTIONS:
        # A library's own kernels in another format first: they are nearer than other kernels in the same format.
        for chosen, own in ((nearest, libraries.get(nearest, {})), ("", record.parameters["dtypes"])):
            name = next((name for name in formats if name in own), "")
            if name:
                _SECTIONS[key] = _read_section(record, dtype, name, chosen, match)
                break
        else:
            raise CalibrationError(
                f"record {record.id} has no section for {dtype} nor for {', '.join(DTYPE_KIN[dtype])}; "
                f"it has {', '.join(record.parameters['dtypes'])}"
            )
    return _SECTIONS[key]


def _read_section(record: CalibrationRecord, wanted: str, dtype: str, library: str, match: LibraryMatch) -> Section:
    """Unfold a section that the record has.

    Args:
        record: The record.
        wanted: Format to price.
        dtype: Format of the section.
        library: Library of the section; empty for that of all libraries together.
        match: How near that is to the library that runs.
    """
    # Another family's residual does harm, a sibling's helps (docs/decisions/0003). Some libraries have none.
    residual = record.residual if record.transfer in _RESIDUAL_TRANSFERS else None
    if residual and library and library not in residual["interval"]["libraries"]:
        residual = None
    name = section_name(dtype, library)

    def part(whole: Mapping[str, Any]) -> Any:
        return (whole["libraries"][library] if library else whole["dtypes"])[dtype]

    error = FORMAT_ERROR if get_dtype(wanted).bits >= _BITS_OF_8 else NARROW_FORMAT_ERROR

    def interval_of(own: Mapping[str, Any], section: str) -> Interval:
        found = choose_interval(record, own, section, (wanted, dtype), library=match)
        is_measured = _same_kernels(wanted, dtype) or found.format == wanted
        return found if is_measured else widened_for_format(found, error)

    table = residual.get("tables", {}).get(name, name) if residual else ""
    own = part(record.interval)
    products = interval_of(own, name)
    return Section(
        parameters=read_parameters(part(record.parameters)),
        batched=read_batched_parameters(part(record.parameters)),
        dtype=dtype,
        interval=products,
        batched_interval=_batched_interval(record, dtype, products),
        residual=load_residuals(residual["file"], record.kind).get(table) if residual else None,
        residual_interval=interval_of(part(residual["interval"]) if residual else own, f"{name}, learned"),
        rule=read_rule(part(record.parameters)),
        alignment_from=part(record.parameters).get(ALIGNMENT_FROM, ""),
    )


def _batched_interval(record: CalibrationRecord, dtype: str, products: Interval) -> Interval | None:
    """Interval of batches of products: the device's own, or that of devices left out, at least a sibling's.

    Where no batches of siblings were left out, the interval of single products counts in place of theirs.

    A record without batches of its own prices them as another family's would: its products' kernels, A100's alignment.
    """
    if record.kind != "gemm":
        return None
    if record.transfer != "exact":
        found = borrowed_interval(record, ("batches",))
        nearest = found if found and found.format else None
        lenders = _batched_interval(as_lenders(record), dtype, products) if record.transfer == "architecture" else None
        return at_least(nearest or products, lenders) if lenders else nearest
    own = find_group(record.kind, (f"own/{record.id}/{dtype}, batches",))
    found = own._replace(format="batches") if own else find_group(record.kind, ("generic",), ("batches",))
    return found if found and found.format else None


def _same_kernels(one: str, other: str) -> bool:
    return one == other or frozenset({one, other}) in _SAME_KERNELS


class GemmJob(NamedTuple):
    """What prices all products of one dtype, besides their sizes.

    Attributes:
        device: The device.
        dtype: Element format of the products.
        bits: Its width. [bit]
        stored_share: Bytes of B in memory over what they are once widened.
        is_hot: Whether a benchmark's cache holds the operands.
        section: What the record says; None where the roofline is all there is.
        rates: The device's rates.
        residual: Learned correction, if there is one for these products.
        widening: Factor on the logarithm of the interval's ends, besides the section's own.
        carries_alignment: Whether what poor alignment costs was measured on another SM.
        label: What to show beside a number.
    """

    device: Device
    dtype: str
    bits: int
    stored_share: float
    is_hot: bool
    section: Section | None
    rates: DeviceRates | None = None
    residual: ResidualTable | None = None
    widening: float = 1.0
    carries_alignment: bool = False
    label: str = ROOFLINE_BOUND


def make_gemm_job(
    dtype: str,
    weight_dtype: str | None,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    library: str = "",
) -> GemmJob:
    """Gather what prices products of one dtype.

    Args:
        dtype: Element format of the products.
        weight_dtype: That of B in memory, if it is narrower.
        device: The device.
        record: A record of kind ``gemm`` or ``moe``.
        hot_cache: Operands may lie in the last-level cache from a previous run.
        library: Library and version whose kernels are meant.

    Raises:
        UnknownRateError: the device has no rate for the dtype.
        CalibrationError: the record has no section for the dtype nor for its kin.
    """
    width = get_dtype(dtype)
    stored_share = stored_weight_bytes(weight_dtype) / width.num_bytes if weight_dtype else 1.0
    if device.roofline_only or device.num_sms is None:
        return GemmJob(device, dtype, width.bits, stored_share, is_hot=False, section=None)
    if record.kind == "moe":
        record = leave_poor_matches(record)
    section = _section(record, dtype, library)
    if section.rule:
        holds = section.rule.holds_for(library, record.transfer)
        section = section._replace(rule=section.rule.of(library) if holds else None)
    same = _same_kernels(section.dtype, dtype)
    is_carried = record.transfer != "exact" or is_other_card(device, record)
    if is_carried or not same:
        raw = record.parameters["dtypes"]
        section = section.carried(lambda kernels: adapt_parameters(kernels, raw, device, record, dtype))
    rates = replace(rates_of(device, dtype), stored_b_share=stored_share)
    if is_carried:
        rates = replace(rates, feed_scale=borrowed_feed_scale(device, load_device(record.device)))
    if hot_cache:
        rates = replace(rates, l2_bytes=device.l2_bytes or 0.0)
        feed_scale = rates.feed_scale
        section = section.carried(lambda kernels: _with_hot_cache(kernels, feed_scale))
    widening = 1.0
    label = record.label if same else f"{record.label}, fractions of {section.dtype}"
    if (scale := borrowed_rate_scale(device, record)) != 1.0:
        label += f", {scale:.2f} times as fast by the best rate known"
    if weight_dtype:
        widening *= _STORED_WIDENING
        label += f", {weight_dtype} weights assumed to be widened for free"
    return GemmJob(
        device=device,
        dtype=dtype,
        bits=width.bits,
        stored_share=stored_share,
        is_hot=hot_cache,
        section=section,
        rates=rates,
        residual=section.residual if same and not weight_dtype else None,
        widening=widening,
        carries_alignment=carries_alignment(device, record, section.alignment_from),
        label=label,
    )


def _with_hot_cache(parameters: GemmParameters, feed_scale: float) -> GemmParameters:
    """Parameters that say what a hot cache is worth, if only by assumption.

    A lender's cache gives each SM what it gives per clock, however slow the memory behind it: feed_scale says so.
    """
    if parameters.hot_cache_share and feed_scale == 1.0:
        return parameters
    if parameters.hot_cache_share:
        return replace(parameters, hot_cache_speedup=max(parameters.hot_cache_speedup * feed_scale, 1.0))
    return replace(parameters, hot_cache_speedup=_ASSUMED_HOT_CACHE_SPEEDUP, hot_cache_share=_ASSUMED_HOT_CACHE_SHARE)
