"""Field metadata: the symbol, the meaning and the flag of each public field, kept beside the field itself.

The command line makes its options from it and docs/notation.md is printed from it, so a name, its letter and its
help text are written once.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class FieldNote:
    """What a person needs to know of one field.

    Attributes:
        help: One sentence, without a full stop.
        symbol: The letter in formulas (arXiv 2401.14489's where it has one); empty if none.
        choices: The allowed words, for fields that hold a word.
    """

    help: str
    symbol: str = ""
    choices: tuple[str, ...] = ()


def note(
    help_text: str,
    *,
    default: Any = None,
    required: bool = False,
    symbol: str = "",
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a dataclass field together with its note."""
    metadata = {"note": FieldNote(help_text, symbol, choices)}
    return field(metadata=metadata) if required else field(default=default, metadata=metadata)


def note_of(spec: Field[Any]) -> FieldNote:
    """Return the note of one dataclass field."""
    found = spec.metadata["note"]
    assert isinstance(found, FieldNote)
    return found


_NOTED: dict[type, tuple[tuple[Field[Any], FieldNote], ...]] = {}


def noted_fields(cls: type) -> tuple[tuple[Field[Any], FieldNote], ...]:
    """List the fields of a dataclass that carry a note, in order."""
    if cls not in _NOTED:
        _NOTED[cls] = tuple((spec, note_of(spec)) for spec in fields(cls) if "note" in spec.metadata)
    return _NOTED[cls]
