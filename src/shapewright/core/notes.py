"""Notes: lines of text about a result, each with a code and the field that it is about."""

from __future__ import annotations


class Note(str):
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

    def __new__(cls, text: str, code: str = "note", field: str = "") -> Note:
        """Create a note of a text."""
        note = super().__new__(cls, text)
        note.code = code
        note.field = field
        return note

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]
        return str(self), self.code, self.field
