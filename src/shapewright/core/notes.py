"""Notes on results, and refusals of parts of a result: texts with a code and the field that they are about."""

from __future__ import annotations

from typing import Self

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.core.texts import Text


class Note(Text):
    """A line for the reader of a result. It is its text; code and field let programs select notes.

    >>> note = Note("seq_len=8 has no effect in decode", code="no-effect", field="seq_len")
    >>> note.field, note == "seq_len=8 has no effect in decode"
    ('seq_len', True)

    Attributes:
        code: Kind of note, such as ``no-effect``, ``does-not-fit`` or ``uncalibrated``.
        field: Field of the config, workload or layout that it is about; empty where it is about none.
    """

    __slots__ = ("code", "field")

    code: str
    field: str

    def __new__(cls, text: str, code: str = "note", field: str = "") -> Self:
        """Create a note of a text."""
        note = super().__new__(cls, text)
        note.code = code
        note.field = field
        return note

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        return Text(*self.parts), self.code, self.field


@dataclass(frozen=True)
class Refusal:
    """Why one of several steps, devices or plans cannot run: an error that is part of a result.

    Attributes:
        text: The message of the error.
        fact: The message without its subject and its advice.
        code: Kind of error, such as ``layout``.
        field: Field that has the wrong value; empty where no single one has.
        subject: Name that the text starts with, such as a device; empty where it starts with none.
    """

    text: str
    fact: str
    code: str
    field: str = ""
    subject: str = ""

    @classmethod
    def of(cls, error: ShapewrightError) -> Refusal:
        """Describe an error."""
        return cls(error.text, error.fact, error.code, error.field, error.subject)

    @property
    def statement(self) -> str:
        """The text without its subject."""
        return self.text[len(self.subject) :].lstrip()

    def __str__(self) -> str:
        return self.text
