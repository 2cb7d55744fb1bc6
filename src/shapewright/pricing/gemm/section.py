"""Record sections for GEMMs: which section prices a dtype and library, adapted to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.core.dtypes import get_dtype, stored_weight_bytes
from shapewright.core.errors import CalibrationError
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.forest import FOREST, ResidualForest, load_forests
from shapewright.pricing.calibration.intervals import (
    FORMAT_ERROR,
    NARROW_FORMAT_ERROR,
    Interval,
    as_donor_record,
    borrowed_interval,
    choose_interval,
    find_residual_group,
    widen_for_format,
    widest,
)
from shapewright.pricing.calibration.libraries import LibraryMatch, match_library, nearest_library
from shapewright.pricing.calibration.records import FP32_GEMM, list_records, load_record
from shapewright.pricing.calibration.residual import ResidualTable, load_residuals, section_name
from shapewright.pricing.calibration.source import ROOFLINE_BOUND, CalibrationSource
from shapewright.pricing.calibration.transfer import format_rate_error, has_transferred_alignment, is_sibling_card
from shapewright.pricing.experts.kernels import choose_expert_kernel, drop_poor_kernels_if_transferred
from shapewright.pricing.experts.tiles import TileRule, read_rule
from shapewright.pricing.gemm.kernels import DeviceRates, rates_of
from shapewright.pricing.gemm.parameters import ALIGNMENT_FROM, GemmParameters, read_batched_parameters, read_parameters
from shapewright.pricing.gemm.transfer import transfer_feed_scale, transfer_parameters, transfer_rate_scale

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.records import CalibrationRecord

# Formats whose fractions stand in for a dtype that a record lacks, nearest first.
FALLBACK_DTYPES = {
    "bf16": ("fp16",),
    "fp16": ("bf16",),
    "tf32": ("bf16", "fp16"),
    "fp32": ("bf16", "fp16"),
    "fp8": ("bf16", "fp16"),
    "int8": ("fp8", "bf16", "fp16"),
    "int4": ("fp8", "bf16", "fp16"),
    "fp4": ("fp8", "bf16", "fp16"),
}
# fp16 and bf16 run at the same rate through the same kernels on every device that has both.
_SAME_KERNELS = {frozenset({"fp16", "bf16"})}
# Transfers for which the residual table applies: the device's own record and that of a sibling.
_RESIDUAL_TRANSFERS = ("exact", "architecture")
# Hot-cache constants where a borrowed record has none. The speed-up is the starting value of the fit
# (measure.fit.gemm); GEMMs of few rows on H100, H200 and B200 read faster than others up to 0.12 to 0.16 of the cache,
# as if six weights took turns (docs/decisions/0016).
_ASSUMED_HOT_CACHE_SPEEDUP, _ASSUMED_HOT_CACHE_SHARE = 4.0, 1.0 / 6.0
# Narrower formats have a larger error with another format's fractions. [bit]
_BITS_OF_8 = 8
# Widening of the logarithmic interval for weights that are stored narrower than they are multiplied: no table has such
# kernels. Judgment.
_STORED_WIDENING = 1.6


class Section(NamedTuple):
    """Section of a record that prices one dtype, its own or that of a fallback dtype.

    Attributes:
        parameters: Constants of single GEMMs.
        batched: Constants of batched GEMMs, if the section has them.
        dtype: Format that they were fitted on.
        interval: Interval of formula prices.
        batched_interval: Interval of batches, where they were measured.
        residual: Residual table of the formulas.
        residual_interval: Interval of prices with the residual correction.
        rule: Tile rule of a serving library for expert layers, where it was measured.
        alignment_from: Device on which the alignment factors were measured, if not the record's own.
    """

    parameters: GemmParameters
    batched: GemmParameters | None
    dtype: str
    interval: Interval
    batched_interval: Interval | None
    residual: ResidualTable | ResidualForest | None
    residual_interval: Interval
    rule: TileRule | None = None
    alignment_from: str = ""

    def map_parameters(self, change: Callable[[GemmParameters], GemmParameters]) -> Section:
        """Return the section with all its parameters changed by a function."""
        rule = self.rule and replace(self.rule, steps=tuple(change(step) for step in self.rule.steps))
        batched = self.batched and change(self.batched)
        return self._replace(parameters=change(self.parameters), batched=batched, rule=rule)


# Sections by record, library, dtype and use. Records ship with the package: a few dozen entries at most.
_SECTIONS: dict[tuple[str | bool, ...], Section] = {}


def _find_section(record: CalibrationRecord, dtype: str, library: str) -> Section:
    """Find the section of a dtype or of its nearest fallback; cached per record and use.

    Another version of a library is priced as its nearest measured version, where the record belongs to the device's
    architecture. In a record of another architecture, or where the library was not measured, the section of all
    libraries applies.
    """
    use = (
        record.residual is None,
        record.is_for_new_shapes,
        record.recipient,
        record.distance,
        record.older_software,
        record.left_out,
    )
    libraries, formats = record.parameters["libraries"], (dtype, *FALLBACK_DTYPES[dtype])
    is_expert = record.kind == "moe"
    nearest = choose_expert_kernel(record, formats, library) if is_expert else nearest_library(library, libraries)
    match = match_library(library, nearest)
    if record.transfer == "generic" and not is_expert and nearest != library:
        nearest = ""  # on another architecture, another version is no nearer than all libraries together
    key = (record.id, nearest, match, dtype, *use)
    if key not in _SECTIONS:
        # The library's own kernels in another format first: they are nearer than other kernels in the same format.
        for chosen, own in ((nearest, libraries.get(nearest, {})), ("", record.parameters["dtypes"])):
            name = next((name for name in formats if name in own), "")
            if name:
                _SECTIONS[key] = _read_section(record, dtype, name, chosen, match)
                break
        else:
            raise CalibrationError(
                f"record {record.id} has no section for {dtype} nor for {', '.join(FALLBACK_DTYPES[dtype])}; "
                f"it has {', '.join(record.parameters['dtypes'])}"
            )
    return _SECTIONS[key]


def _read_section(record: CalibrationRecord, wanted: str, dtype: str, library: str, match: LibraryMatch) -> Section:
    """Read a section that the record has.

    Args:
        library: Library of the section; empty for the section of all libraries.
        match: How near that is to the running library.
    """
    # A sibling's residual helps, another architecture's does not (docs/decisions/0003). Some libraries have none.
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
        return found if is_measured else widen_for_format(found, error)

    table = residual.get("tables", {}).get(name, name) if residual else ""
    own = part(record.interval)
    own_interval = interval_of(own, name)
    return Section(
        parameters=read_parameters(part(record.parameters)),
        batched=read_batched_parameters(part(record.parameters)),
        dtype=dtype,
        interval=own_interval,
        batched_interval=_batched_interval(record, dtype, own_interval),
        residual=_load_residual(residual, record, table) if residual else None,
        residual_interval=interval_of(part(residual["interval"]) if residual else own, f"{name}, learned"),
        rule=read_rule(part(record.parameters)),
        alignment_from=part(record.parameters).get(ALIGNMENT_FROM, ""),
    )


def _load_residual(
    residual: Mapping[str, Any], record: CalibrationRecord, name: str
) -> ResidualTable | ResidualForest | None:
    """Load the learned correction of a section, in the form that the record has."""
    if residual.get("form") == FOREST:
        return load_forests(residual["file"], record.kind).get(name)
    return load_residuals(residual["file"], record.kind, without_own_shapes=record.is_for_new_shapes).get(name)


def _batched_interval(record: CalibrationRecord, dtype: str, single: Interval) -> Interval | None:
    """Interval of batched GEMMs: the device's own, or that of held-out devices, at least as wide as a sibling's own.

    Without held-out siblings with batches, the interval of single GEMMs applies. A record without batches of its own
    prices them like another architecture's record: the kernels of its GEMMs with A100's alignment.
    """
    if record.kind != "gemm":
        return None
    if record.transfer != "exact":
        found = borrowed_interval(record, ("batches",))
        nearest = found if found and found.format else None
        donor_interval = (
            _batched_interval(as_donor_record(record), dtype, single) if record.transfer == "architecture" else None
        )
        return widest(nearest or single, donor_interval) if donor_interval else nearest
    own = find_residual_group(record.kind, (f"own/{record.id}/{dtype}, batches",))
    found = own._replace(format="batches") if own else find_residual_group(record.kind, ("generic",), ("batches",))
    return found if found and found.format else None


def _same_kernels(one: str, other: str) -> bool:
    return one == other or frozenset({one, other}) in _SAME_KERNELS


class GemmPricing(NamedTuple):
    """Everything that prices GEMMs of one dtype, except their sizes.

    Attributes:
        device: The device.
        dtype: Element format of the GEMMs.
        bits: Width of it. [bit]
        stored_share: Bytes of B in memory over its bytes once widened.
        is_hot: Whether a benchmark's cache holds the operands.
        section: Section of the record; None where the price is the roofline bound.
        rates: The device's rates.
        residual: Residual table, if it applies to these GEMMs.
        widening: Factor on the logarithm of the interval's ends, besides the section's own.
        has_transferred_alignment: Whether the cost of poor alignment was measured on another SM.
        rate_error: What GEMMs that wait for arithmetic may be wrong by, as a factor (format_rate_error).
        source: Record used, and how far it was transferred.
        others: The same with the records of other donors; the price is the geometric mean over architectures.
        architecture: Architecture of the record's device.
    """

    device: Device
    dtype: str
    bits: int
    stored_share: float
    is_hot: bool
    section: Section | None
    rates: DeviceRates | None = None
    residual: ResidualTable | ResidualForest | None = None
    widening: float = 1.0
    has_transferred_alignment: bool = False
    rate_error: float = 1.0
    source: CalibrationSource = ROOFLINE_BOUND
    others: tuple[GemmPricing, ...] = ()
    architecture: str = ""


def prepare_gemm_pricing(
    dtype: str,
    weight_dtype: str | None,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    library: str = "",
    is_alone: bool = False,
) -> GemmPricing:
    """Gather everything that prices GEMMs of one dtype.

    Cores for fp32 differ more between architectures than matrix units do, so that a device of an architecture without
    a record takes the mean over its vendor's architectures (docs/decisions/0017).

    Args:
        weight_dtype: Element format of B in memory, if it is narrower.
        record: A record of kind ``gemm`` or ``moe``.
        hot_cache: Whether operands may lie in the last-level cache from a previous run.
        library: Library and version whose kernels run.
        is_alone: Whether to price with this record alone in any case.

    Raises:
        UnknownRateError: the device has no rate for the dtype.
        CalibrationError: the record has no section for the dtype or its fallbacks.
    """
    width = get_dtype(dtype)
    stored_share = stored_weight_bytes(weight_dtype) / width.num_bytes if weight_dtype else 1.0
    if device.roofline_only or device.num_sms is None:
        return GemmPricing(device, dtype, width.bits, stored_share, is_hot=False, section=None)
    if record.kind == "moe":
        record = drop_poor_kernels_if_transferred(record)
    elif (
        dtype == "fp32"
        and record.kind == "gemm"
        and dtype not in record.parameters["dtypes"]
        and (device.uncalibrated or "gemm" not in device.own_records)
    ):
        record = load_record(FP32_GEMM, device)
    section = _find_section(record, dtype, library)
    if section.rule:
        holds = section.rule.applies_to(library, record.transfer)
        section = section._replace(rule=section.rule.for_library(library) if holds else None)
    is_same_format = _same_kernels(section.dtype, dtype)
    is_transferred = record.transfer != "exact" or is_sibling_card(device, record)
    if is_transferred or not is_same_format:
        raw = record.parameters["dtypes"]
        section = section.map_parameters(lambda kernels: transfer_parameters(kernels, raw, device, record, dtype))
    rates = replace(rates_of(device, dtype), stored_b_share=stored_share)
    if is_transferred:
        rates = replace(rates, feed_scale=transfer_feed_scale(device, load_device(record.device)))
    if hot_cache:
        rates = replace(rates, l2_bytes=device.l2_bytes or 0.0)
        feed_scale = rates.feed_scale
        section = section.map_parameters(lambda kernels: _with_hot_cache(kernels, feed_scale))
    widening = 1.0
    source, scale = record.source, transfer_rate_scale(device, record)
    if weight_dtype:
        widening *= _STORED_WIDENING
    if not is_same_format or scale != 1.0 or weight_dtype:
        stand_in = "" if is_same_format else section.dtype
        source = replace(source, fractions_of=stand_in, rate_scale=scale, stored_weights=weight_dtype or "")
    others: tuple[GemmPricing, ...] = ()
    if record.kind == FP32_GEMM and record.transfer == "generic" and not is_alone:
        others = tuple(
            prepare_gemm_pricing(dtype, weight_dtype, device, donor, hot_cache=hot_cache, is_alone=True)
            for donor in _other_fp32_donors(device, record)
        )
    if others:
        source = replace(source, reason=f"{source.reason}, averaged over architectures for fp32")
    return GemmPricing(
        device=device,
        dtype=dtype,
        bits=width.bits,
        stored_share=stored_share,
        is_hot=hot_cache,
        section=section,
        rates=rates,
        residual=section.residual if is_same_format and not weight_dtype else None,
        widening=widening,
        has_transferred_alignment=has_transferred_alignment(device, record, section.alignment_from),
        rate_error=format_rate_error(device, record, dtype),
        source=source,
        others=others,
        architecture=record.architecture,
    )


def _other_fp32_donors(device: Device, record: CalibrationRecord) -> list[CalibrationRecord]:
    """Records besides the nearest one that a device takes the mean of: its vendor's if one was measured, else all."""
    known = list_records(FP32_GEMM)
    own = {each.device for each in known if device.name in each.devices}
    vendor = {each.device for each in known if load_device(each.device).vendor == device.vendor} - own
    donors = (vendor or {each.device for each in known} - own) - {record.device}
    names = [each.device for each in known]
    return [
        load_record(FP32_GEMM, device, without=tuple(name for name in names if name != donor))
        for donor in names
        if donor in donors
    ]


def _with_hot_cache(parameters: GemmParameters, feed_scale: float) -> GemmParameters:
    """Set hot-cache constants, by assumption where the record has none.

    A donor's cache feeds each SM at its rate per clock regardless of memory bandwidth, which feed_scale expresses.
    """
    if parameters.hot_cache_share and feed_scale == 1.0:
        return parameters
    if parameters.hot_cache_share:
        return replace(parameters, hot_cache_speedup=max(parameters.hot_cache_speedup * feed_scale, 1.0))
    return replace(parameters, hot_cache_speedup=_ASSUMED_HOT_CACHE_SPEEDUP, hot_cache_share=_ASSUMED_HOT_CACHE_SHARE)
