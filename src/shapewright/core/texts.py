"""Texts that name fields: the library spells them as fields, the command line as the flags that set them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Self


class FieldName(str):
    """A field that a text advises to change: its name, or name and value where the text advises a value.

    Attributes:
        field: Name of the field.
        value: Value to set; empty where the text advises none.
    """

    __slots__ = ("field", "value")

    field: str
    value: str

    def __new__(cls, field: str, value: str = "") -> FieldName:
        """Spell a field as the library does."""
        shown = value if value == "False" else repr(value)
        name = super().__new__(cls, f"{field}={shown}" if value else field)
        name.field = field
        name.value = value
        return name

    def __getnewargs__(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.field, self.value


class Text(str):
    """A text of parts, some of which are names of fields; made by ``with_fields``.

    Attributes:
        parts: What the text consists of: plain text and names of fields, in order.
    """

    __slots__ = ("parts",)

    parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> Self:
        """Join parts; those of texts among them become parts of this one."""
        text = super().__new__(cls, "".join(parts))
        text.parts = tuple(inner for part in parts for inner in (part.parts if isinstance(part, Text) else (part,)))
        return text

    def __getnewargs__(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.parts

    def __add__(self, after: str) -> Text:
        return Text(self, after)

    def __radd__(self, before: str) -> Text:
        return Text(before, self)

    def spelled(self, spell: Callable[[FieldName], str]) -> str:
        """Return the text with each name of a field spelled by a function."""
        return "".join(spell(part) if isinstance(part, FieldName) else part for part in self.parts)


def with_fields(template: str, /, **values: object) -> Text:
    """Return a text that names fields: ``{name}`` in its template, or ``{name:value}`` to advise a value.

    Names in braces that are given as values stand for these, which may be names of fields or texts.

    >>> text = with_fields("give {num_devices} of at least {fewest}, or set {recompute:full}", fewest=8)
    >>> print(text)
    give num_devices of at least 8, or set recompute='full'
    >>> text.spelled(lambda name: f"--{name.field} {name.value}".rstrip())
    'give --num_devices of at least 8, or set --recompute full'
    """
    parts: list[str] = []
    for literal, name, spec in _parsed(template):
        if literal:
            parts.append(literal)
        if name in values:
            value = values[name]
            parts.append(value if isinstance(value, str) and not spec else format(value, spec or ""))
        elif name is not None:
            parts.append(FieldName(name, spec or ""))
    return Text(*parts)


@cache
def _parsed(template: str) -> tuple[tuple[str, str | None, str | None], ...]:
    """Return the plain texts, names and format of a template."""
    from string import Formatter  # not needed to start a command

    return tuple((literal, name, spec) for literal, name, spec, _ in Formatter().parse(template))


def joined(texts: Iterable[str], separator: str = " and ") -> Text:
    """Return texts and names of fields with a separator between them.

    >>> print(joined(map(FieldName, ["train_tokens", "gpu_hours"])))
    train_tokens and gpu_hours
    """
    return Text(*[part for text in texts for part in (separator, text)][1:])
