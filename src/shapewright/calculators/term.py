"""A number with the formula that it comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LETTERS = re.compile(r"[A-Za-z][A-Za-z_]*")


@dataclass(frozen=True)
class Term:
    """One number of a calculation.

    Attributes:
        name: What it is.
        formula: How it is computed, in letters; ``*`` multiplies and ``^`` raises.
        numbers: The same with the letters' values.
        value: What it comes to.
    """

    name: str
    formula: str
    numbers: str
    value: float


def put_in(formula: str, values: Mapping[str, float]) -> str:
    """Write values in place of letters.

    >>> put_in("L*(h*h + a_kv*d)", {"L": 2, "h": 64, "a_kv": 1, "d": 16})
    '2*(64*64 + 1*16)'
    """
    return _LETTERS.sub(lambda match: f"{values[match[0]]:.15g}", formula)
