"""Element formats as measured files spell them: what multiplies, what is stored, and what had to be assumed.

Serving libraries name a quantisation, not a format: ``fp8_block`` multiplies 8-bit floats with a scale for each block,
``int8_wo`` stores 8-bit weights and multiplies in 16 bits. A word is read in that order: a format of the package, a
scheme of weights and activations (``w4a16``), stored weights alone (``_wo``), a beginning that is a format.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from shapewright.dtypes import get_dtype
from shapewright.errors import MeasuredFileError, WorkloadError

if TYPE_CHECKING:
    from shapewright.accuracy.chunk import Prices
    from shapewright.hardware import Device

# Widening of the logarithmic interval where a word is priced as a format that it is not quite: judgement, as for
# formats that borrow another's fractions (perf.gemm).
_ASSUMED_WIDENING = 1.6
# Words that collectors use for 16-bit and 8-bit weights with narrow activations, and schemes known by their makers.
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
# Formats whose name other words begin with: fp8_block, nvfp4_awq. Longer beginnings first.
_BEGINNINGS = ("nvfp4", "mxfp4", "mxfp8", "bfloat16", "float16", "float8", "bf16", "fp16", "fp8", "fp4", "int8", "int4")


class ElementFormat(NamedTuple):
    """How a word is priced.

    Attributes:
        dtype: Element format of the products.
        weight_dtype: Element format of the weights in memory, where it is another.
        assumption: What was taken for granted, for the reader; empty where nothing was.
    """

    dtype: str
    weight_dtype: str | None = None
    assumption: str = ""

    def widen(self, prices: Prices) -> Prices:
        """Intervals as wide as the assumption asks for."""
        return prices.widen(_ASSUMED_WIDENING) if self.assumption else prices


def read_format(word: str, device: Device) -> ElementFormat:
    """Read a format's word for a device.

    A device without matrix units for a narrow float stores it, and multiplies in 16 bits, as libraries do.

    Raises:
        MeasuredFileError: the word tells no format.
    """
    found = _read_word(word)
    narrow = get_dtype(found.dtype)
    if narrow.name not in device.dense_flops_per_s and narrow.name in ("fp8", "fp4", "int4") and not found.weight_dtype:
        stored = "int4" if narrow.bits == 4 else "int8"
        usual = "bf16" if "bf16" in device.dense_flops_per_s else "fp16"
        assumption = f"{word} on {device.name}, which cannot multiply it: stored weights, products in {usual}"
        return ElementFormat(usual, stored, assumption)
    return found


def read_stored_format(word: str) -> ElementFormat:
    """Read the word of a format in which something lies in memory, such as a cache; any device can store it.

    Raises:
        MeasuredFileError: the word tells no format.
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
        return ElementFormat("bf16", stored, f"{word}: weights as {stored}, products in bf16")
    for beginning in _BEGINNINGS:
        if folded.startswith(beginning):
            dtype = get_dtype(beginning).name
            return ElementFormat(dtype, None, f"{word} as {dtype}")
    raise MeasuredFileError(f"unknown format {word!r}; known are those of the package, and schemes such as w4a16")


def _read_scheme(word: str, weights: str, activations: str, *, is_integer: bool) -> ElementFormat:
    """A scheme of so many bits of weights and of activations."""
    if activations == "16":
        if weights == "16":
            return ElementFormat("bf16", None, f"{word} as bf16")
        return ElementFormat("bf16", _STORED[weights], f"{word}: weights as {_STORED[weights]}, products in bf16")
    if activations == "4":
        return ElementFormat("fp4", None, f"{word} as fp4")
    dtype = "int8" if is_integer else "fp8"
    if weights == "4":
        return ElementFormat(dtype, "int4", f"{word}: weights as int4, products in {dtype}")
    return ElementFormat(dtype, None, f"{word} as {dtype}")
