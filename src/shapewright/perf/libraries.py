"""Which library of a record stands for one that it does not know: another version of the same, or none.

A record names libraries with their version, such as ``vllm 0.24.0``. Another version of a known library resembles it
more than another library does: its kernels and its heuristics grow out of each other (docs/decisions/0013-strangers.md
has both distances). A library that no version of was measured is priced by the record's section for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

LibraryMatch = Literal["own", "version", "other"]
"""How near the library of a section is to the one that runs: itself (or none was named), another version, another."""

_NUMBER = re.compile(r"\d+")


def nearest_library(library: str, known: Iterable[str]) -> str:
    """The known library that stands for one: itself, else its nearest version, else none.

    Args:
        library: Name and version, as measured files spell it.
        known: Names and versions of a record.

    Returns:
        One of ``known``, or an empty word. Of several versions the newest that is not newer than the one asked for,
        else the oldest; without a version the newest.

    >>> nearest_library("vllm 0.19.1", ["sglang 0.5.14", "vllm 0.24.0"])
    'vllm 0.24.0'
    >>> nearest_library("vllm 0.20.0", ["vllm 0.14.0", "vllm 0.24.0"])
    'vllm 0.14.0'
    >>> nearest_library("trtllm 1.2.0", ["vllm 0.24.0"])
    ''
    """
    if not library:
        return ""
    candidates = list(known)
    if library in candidates:
        return library
    name, version = split_version(library)
    kin = sorted((split_version(each)[1], each) for each in candidates if split_version(each)[0] == name)
    if not kin:
        return ""
    not_newer = [each for own, each in kin if own <= version] if version else [each for _, each in kin]
    return not_newer[-1] if not_newer else kin[0][1]


def match_library(library: str, *found: str) -> LibraryMatch:
    """How near the library that runs is to the nearest of those that a section was fitted to.

    >>> tuple(match_library(library, "vllm 0.24.0") for library in ("", "vllm 0.19.1", "trtllm 1.2.0"))
    ('own', 'version', 'other')
    """
    if not library or library in found:
        return "own"
    name = split_version(library)[0]
    return "version" if any(each and split_version(each)[0] == name for each in found) else "other"


def split_version(library: str) -> tuple[str, tuple[int, ...]]:
    """Name of a library, folded, and its version as numbers; without a version those are empty.

    >>> split_version("SGLang 0.5.14rc1"), split_version("trtllm")
    (('sglang', (0, 5, 14, 1)), ('trtllm', ()))
    """
    name, _, version = library.strip().partition(" ")
    return name.casefold(), tuple(int(number) for number in _NUMBER.findall(version))
