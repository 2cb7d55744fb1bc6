"""Odd values, and damages of objects and of bytes."""

from __future__ import annotations

import copy
import json
import math
import re
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 31, 64, 257, 4096, 4097, 65_537, 2**31, 2**40, 2**40 + 1, 2**63, 10**18,
    -(10**18), 10**300, 10**400, 0.5, -0.0, 1e-308, 1e308, math.inf, -math.inf, math.nan, "", "8", "4096", "x", "gelu",
    "llama", "full_attention", "\ud800", "\x1b[31m", "\u202e", "\0", "../../etc/passwd", "{{7*7}}", [], [[]], {}, [0],
    [1, 2, 3], [0] * 300, ["full_attention"] * 8, {"": 0}, {"rope_type": "x"}, "9" * 5000,
)  # fmt: skip
SAME_TYPE: tuple[Any, ...] = (1, 2, 3, 5, 8, 16, 24, 31, 96, 128, 1000, 4096, 12_288, 50_257)
TEXTS = (
    b"", b"\0", b"\xff\xfe", b"[" * 3000, b"{\"a\":" * 3000, b"9" * 400, b"nan", b"1e999", b"-1", b"\n\n", b"'''",
    b"&a *a", b"!!python/object/apply:os.system [id]", b"__import__('os')", b"$(id)", b"%s%n", b"\\", b"=",
    b"0x10", b"1_0", b"0", b"0.5", b"null", b"true", b"[1, 2]", b"{a: 1}",
)  # fmt: skip


def spoil_object(content: Any, chance: Random, others: list[Any]) -> Any:
    """Replace, drop, borrow or nest some values of nested objects and lists."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 5))):
        inner = content
        while True:
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            if not keys:
                break
            key = chance.choice(list(keys))
            if isinstance(inner[key], dict | list) and inner[key] and chance.random() < 0.8:
                inner = inner[key]
                continue
            way = chance.random()
            if way < 0.2:
                del inner[key]
            elif way < 0.5 and isinstance(inner[key], int):
                inner[key] = chance.choice(SAME_TYPE)
            elif way < 0.6 and isinstance(inner, dict):
                other = chance.choice(others)
                borrowed = chance.choice(sorted(other))
                inner[borrowed] = copy.deepcopy(other[borrowed])
            elif way < 0.65:
                inner[key] = {"text_config": inner[key]}
            else:
                inner[key] = copy.deepcopy(chance.choice(VALUES))
            break
    return content


def spoil_bytes(content: bytes, chance: Random) -> bytes:
    """Cut, flip, insert, repeat or drop some of a file."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(content) + 1)
        other = chance.randrange(len(content) + 1)
        start, stop = min(place, other), max(place, other)
        way = chance.randrange(9)
        numbers = list(re.finditer(rb"\b\d+\b", content)) if way > 6 else []
        if numbers:
            start, stop = chance.choice(numbers).span()
            content = content[:start] + chance.choice((*TEXTS, b"1", b"7", b"4096")) + content[stop:]
        elif way == 0:
            content = content[:place]
        elif way == 1:
            content = content[:place] + chance.choice(TEXTS) + content[place:]
        elif way == 2:
            content = content[:start] + content[min(stop, start + 40) :]
        elif way == 3:
            content = content[:stop] + content[start : start + 200] + content[stop:]
        elif way == 4 and content:
            flipped = bytearray(content)
            flipped[place % len(content)] ^= 1 << chance.randrange(8)
            content = bytes(flipped)
        else:
            lines = content.split(b"\n")
            line = chance.randrange(len(lines))
            words = lines[line].split(b" ")
            words[chance.randrange(len(words))] = chance.choice((*TEXTS, str(chance.choice(SAME_TYPE)).encode()))
            lines[line] = b" ".join(words)
            content = b"\n".join(lines)
    return content


def as_json(content: Any) -> bytes:
    """Text of an object; halves of surrogate pairs stay escaped."""
    return json.dumps(content).encode()
