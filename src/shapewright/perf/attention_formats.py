"""What 8-bit arithmetic costs attention where only kernels in 16 bits were measured: the mean of the families.

Scores come out of their sum in 32 bits and must be cast to be multiplied again. To 8 bits that takes more work for each
score than to 16, and tiles of twice the rate wait more: wherever one kernel was measured in both formats, it does 0.64
to 0.76 times as many exponentials a clock (triton on Hopper as many), and reaches 0.4 to 1.1 times the share of a peak
twice as high. So where a record has no kernel in 8 bits, its kernels take the means of both ratios, one vote for each
family, and not the sheet's rate alone. What each came to: docs/decisions/0013-strangers.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.perf.calibration import list_records

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.perf.attention_prefill import PrefillParameters
    from shapewright.perf.attention_sections import Section
    from shapewright.perf.calibration import CalibrationRecord

_NARROW, _WIDE = "fp8", "16bit"


class FormatRatios(NamedTuple):
    """What kernels in 8 bits reach beside the same kernels in 16.

    Attributes:
        tensor_share: Ratio of their shares of the peak of their format.
        exponentials: Ratio of their scores per multiprocessor and clock.
    """

    tensor_share: float
    exponentials: float


def narrow_kernel(prefill: PrefillParameters, section: Section) -> PrefillParameters:
    """A 16-bit kernel as it would multiply in 8 bits, where that is what a section stands in for; else as it is."""
    if section.wanted != _NARROW or section.name == _NARROW:
        return prefill
    ratios = mean_ratios(section.record.borrower or section.record.device)
    return replace(
        prefill,
        exponentials_per_sm_per_clock=prefill.exponentials_per_sm_per_clock * ratios.exponentials,
        tensor_fraction={width: share * ratios.tensor_share for width, share in prefill.tensor_fraction.items()},
    )


@cache
def mean_ratios(left_out: str) -> FormatRatios:
    """Geometric means over the families of the package's records, but one device's; 1 where there is none.

    Args:
        left_out: The device to price, whose own measurements do not count.
    """
    families: dict[str, list[tuple[float, float]]] = {}
    for record in list_records("attention"):
        if left_out not in record.devices:
            families.setdefault(record.architecture, []).extend(_ratios(record))
    means = [np.mean(np.log(pairs), axis=0) for pairs in families.values() if pairs]
    if not means:
        return FormatRatios(1.0, 1.0)
    tensor_share, exponentials = np.exp(np.mean(means, axis=0))
    return FormatRatios(float(tensor_share), float(exponentials))


def _ratios(record: CalibrationRecord) -> Iterator[tuple[float, float]]:
    """Of the share of the peak and of exponentials, for each kernel that one library runs in both formats."""
    narrow: Mapping[str, Any] = record.parameters["sections"].get(_NARROW, {}).get("kernels", {})
    for library, sections in record.parameters.get("libraries", {}).items():
        reported = record.provenance["reports"]
        wide: Mapping[str, Any] = sections.get(_WIDE, {}).get("kernels", {})
        for name in sorted(set(narrow) & set(wide)):
            libraries = reported.get(f"{_NARROW}/{name}/prefill", {}).get("libraries", ())
            if library in libraries:
                pair = narrow[name]["prefill"], wide[name]["prefill"]
                (width,) = pair[0]["tensor_fraction"]
                yield (
                    pair[0]["tensor_fraction"][width] / pair[1]["tensor_fraction"][width],
                    pair[0]["exponentials_per_sm_per_clock"] / pair[1]["exponentials_per_sm_per_clock"],
                )
