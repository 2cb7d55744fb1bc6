"""CalibrationSource: which calibration record a price rests on, and how far that record was transferred.

Prices of one record share one object; text is made only when a source is printed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable

Transfer = Literal["exact", "architecture", "generic", "roofline", "assumed"]
"""How a price uses its record: the device's own, a sibling's (same architecture), another architecture's, none because
the price is the roofline bound, none because the price is a stated assumption."""


@dataclass(frozen=True, kw_only=True)
class CalibrationSource:
    """Origin of a price.

    Attributes:
        transfer: How the record is used.
        record_id: Id of the calibration record; empty without one.
        donor: Device that the record was measured on; empty without a record.
        reason: Why this donor was chosen, in words; empty for the device's own record.
        left_out: Kernels of the record that were left out, in words.
        fractions_of: Element format whose measured fractions stand in for the priced one.
        rate_scale: Factor on the record's rates from the best published rate of the device.
        stored_weights: Element format of weights that are assumed to be widened at no cost.
        decode_record_id: Record whose decode kernels stand in for attention.
        assumption: What is assumed where no record exists, in words.
        others: Sources of the other prices, where several prices rest on different ones.
    """

    transfer: Transfer
    record_id: str = ""
    donor: str = ""
    reason: str = ""
    left_out: str = ""
    fractions_of: str = ""
    rate_scale: float = 1.0
    stored_weights: str = ""
    decode_record_id: str = ""
    assumption: str = ""
    others: tuple[CalibrationSource, ...] = ()

    @classmethod
    def of_prices(cls, sources: Iterable[CalibrationSource]) -> CalibrationSource:
        """Join the sources of several prices, at least one, each once and in their order."""
        first, *others = dict.fromkeys(sources)
        return replace(first, others=tuple(others)) if others else first

    @property
    def parts(self) -> tuple[CalibrationSource, ...]:
        """This source and the others, each of which describes itself alone in all but its label."""
        return (self, *self.others)

    @property
    def is_borrowed(self) -> bool:
        """Whether another device's record prices this."""
        return self.transfer in ("architecture", "generic")

    @property
    def is_roofline_bound(self) -> bool:
        """Whether the price is the data-sheet bound, without any measurement."""
        return self.transfer == "roofline"

    @property
    def is_uncalibrated(self) -> bool:
        """Whether the device has no record of its own for this."""
        return self.is_borrowed or self.is_roofline_bound

    @property
    def label(self) -> str:
        """Text shown next to a price: the record's id, or ``uncalibrated`` and the record that was borrowed."""
        origin = f"uncalibrated {self._stand_in(self.record_id)}" if self.is_uncalibrated else self._origin()
        return "; ".join([origin, *(other.label for other in self.others)])

    @property
    def stand_in_with_reason(self) -> str:
        """Text for what prices an uncalibrated operation, with the reason for the choice of donor."""
        return self._stand_in(f"{self.record_id}: {self.reason}" if self.reason else self.record_id)

    @property
    def adjustments(self) -> str:
        """Text for how the price departs from the record; empty where it does not."""
        without = f"without {self.left_out}" if self.left_out else ""
        return ", ".join(part for part in (without, *self._adjustments()) if part)

    def __str__(self) -> str:
        return self.label

    def _stand_in(self, record: str) -> str:
        if self.is_roofline_bound:
            return "(roofline bound)"
        name = f"{record} without {self.left_out}" if self.left_out else record
        return ", ".join([f"(borrows {name})", *self._adjustments()])

    def _origin(self) -> str:
        if self.transfer == "assumed":
            return f"assumed ({self.assumption})"
        name = f"{self.record_id} without {self.left_out}" if self.left_out else self.record_id
        return ", ".join([name, *self._adjustments()])

    def _adjustments(self) -> list[str]:
        texts = []
        if self.fractions_of:
            texts.append(f"fractions of {self.fractions_of}")
        if self.rate_scale != 1.0:
            texts.append(f"{self.rate_scale:.2f} times as fast by the best rate known")
        if self.stored_weights:
            texts.append(f"{self.stored_weights} weights assumed to be widened for free")
        if self.decode_record_id:
            texts.append(f"decode of {self.decode_record_id}")
        return texts


ROOFLINE_BOUND = CalibrationSource(transfer="roofline")
"""Source of a price that is the data-sheet bound."""
