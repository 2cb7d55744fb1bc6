"""Element formats as measured files name them: compute format, stored format, and assumptions.

Serving libraries name a quantization scheme instead of a format: ``fp8_block`` multiplies 8-bit floats with a scale per
block, ``int8_wo`` stores 8-bit weights and multiplies in 16 bits. A name is matched in this order: a format of the
package, a scheme of weights and activations (``w4a16``), stored weights only (``_wo``), a prefix that is a format.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import MeasuredFileError, WorkloadError

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.measure.accuracy.chunk import Prices

# Widening of the logarithmic interval if a format is priced as a similar one: judgment, as for formats that borrow
# another's fractions (pricing.gemm).
_ASSUMED_WIDENING = 1.6
# Schemes of collectors that state no widths, and schemes known by a name.
_SCHEMES = {
    "awq": "w4a16",
    "gptq": "w4a16",
    "marlin": "w4a16",
    "sq": "w8a8",
    "smoothquant": "w8a8",
    "w4afp8": "w4a8",
    "w4a8_mxfp4_mxfp8": "w4a8",
}
_WIDTHS = re.compile(r"w(4|8|16)a(4|8|16)")
_STORED = {"4": "int4", "8": "int8"}
# Formats whose names are prefixes of other names: fp8_block, nvfp4_awq. Longer ones first.
_PREFIXES = ("nvfp4", "mxfp4", "mxfp8", "bfloat16", "float16", "float8", "bf16", "fp16", "fp8", "fp4", "int8", "int4")


class ElementFormat(NamedTuple):
    """Formats with which a measured row is priced.

    Attributes:
        dtype: Element format of the GEMMs.
        weight_dtype: Element format of the stored weights, if it is another.
        assumption: Assumption for the user; empty if there is none.
    """

    dtype: str
    weight_dtype: str | None = None
    assumption: str = ""

    def widen(self, prices: Prices) -> Prices:
        """Widen the intervals if there is an assumption."""
        return prices.widen(_ASSUMED_WIDENING) if self.assumption else prices


def read_format(word: str, device: Device) -> ElementFormat:
    """Read a format name for a device.

    A device without matrix units for a narrow float stores it and multiplies in 16 bits, as libraries do.

    Raises:
        MeasuredFileError: the name is unknown.
    """
    found = _read_word(word)
    narrow = get_dtype(found.dtype)
    if narrow.name not in device.dense_flops_per_s and narrow.name in ("fp8", "fp4", "int4") and not found.weight_dtype:
        stored = "int4" if narrow.bits == 4 else "int8"
        usual = "bf16" if "bf16" in device.dense_flops_per_s else "fp16"
        assumption = f"{word} on {device.name}, which cannot multiply it: stored weights, GEMMs in {usual}"
        return ElementFormat(usual, stored, assumption)
    return found


def read_stored_format(word: str) -> ElementFormat:
    """Read the format name of stored data, such as a cache; any device can store it.

    Raises:
        MeasuredFileError: the name is unknown.
    """
    found = _read_word(word)
    return ElementFormat(found.weight_dtype or found.dtype, None, found.assumption)


def _read_word(word: str) -> ElementFormat:
    folded = word.strip().casefold().removeprefix("torch.")
    try:
        return ElementFormat(get_dtype(folded).name)
    except WorkloadError:
        pass
    scheme = _SCHEMES.get(folded, folded)
    widths = _WIDTHS.match(scheme)
    if widths:
        is_integer = "int8" in folded or folded in ("sq", "smoothquant")
        return _read_scheme(word, widths.group(1), widths.group(2), is_integer=is_integer)
    if folded.endswith(("_wo", "-wo", "_weight_only")):
        stored = "int4" if "4" in folded else "int8"
        return ElementFormat("bf16", stored, f"{word}: weights as {stored}, GEMMs in bf16")
    for prefix in _PREFIXES:
        if folded.startswith(prefix):
            dtype = get_dtype(prefix).name
            return ElementFormat(dtype, None, f"{word} as {dtype}")
    raise MeasuredFileError(f"unknown format {word!r}; known are those of the package, and schemes such as w4a16")


def _read_scheme(word: str, weights: str, activations: str, *, is_integer: bool) -> ElementFormat:
    """Return the formats of a scheme with these widths of weights and activations."""
    if activations == "16":
        if weights == "16":
            return ElementFormat("bf16", None, f"{word} as bf16")
        return ElementFormat("bf16", _STORED[weights], f"{word}: weights as {_STORED[weights]}, GEMMs in bf16")
    if activations == "4":
        return ElementFormat("fp4", None, f"{word} as fp4")
    dtype = "int8" if is_integer else "fp8"
    if weights == "4":
        return ElementFormat(dtype, "int4", f"{word}: weights as int4, GEMMs in {dtype}")
    return ElementFormat(dtype, None, f"{word} as {dtype}")
