"""Dataclass fields with a help text, a symbol and the allowed values.

The command-line options, the explorer's form and docs/notation.md are generated from these, so that each text is
written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from shapewright.core.records import dataclass

_METADATA_KEY = "doc"
_SHOWN = "is_shown"

Getter = TypeVar("Getter", bound=Callable[..., Any])


@dataclass(frozen=True)
class FieldDoc:
    """Documentation of one field.

    Attributes:
        help: One sentence, without a full stop.
        symbol: Letter in formulas, that of arXiv 2401.14489 where it has one; empty if none.
        choices: Allowed values of a field that holds one of several words; empty for other fields.
    """

    help: str
    symbol: str = ""
    choices: tuple[str, ...] = ()


def doc_field(
    help_text: str,
    *,
    default: Any = None,
    required: bool = False,
    symbol: str = "",
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a dataclass field together with its documentation."""
    metadata = {_METADATA_KEY: FieldDoc(help_text, symbol, choices)}
    return field(metadata=metadata) if required else field(default=default, metadata=metadata)


_CACHE: dict[type, tuple[tuple[Field[Any], FieldDoc], ...]] = {}


def documented_fields(cls: type) -> tuple[tuple[Field[Any], FieldDoc], ...]:
    """List the documented fields of a dataclass with their documentation, in order."""
    if cls not in _CACHE:
        _CACHE[cls] = tuple(
            (spec, spec.metadata[_METADATA_KEY]) for spec in fields(cls) if _METADATA_KEY in spec.metadata
        )
    return _CACHE[cls]


def shown(getter: Getter) -> Getter:
    """Mark the function of a property that outputs contain like a field; its docstring describes it."""
    setattr(getter, _SHOWN, True)
    return getter


def shown_properties(cls: type) -> dict[str, Callable[..., Any]]:
    """Functions of the properties of a dataclass that outputs contain, by name, in order."""
    found = {name: value.fget for name, value in vars(cls).items() if isinstance(value, property)}
    return {name: getter for name, getter in found.items() if getter is not None and hasattr(getter, _SHOWN)}
