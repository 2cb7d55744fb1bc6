"""Matching of library versions: which measured library version prices one that was not measured.

Records name libraries with their version, such as ``vllm 0.24.0``. Another version of a measured library resembles it
more than another library does, because kernels and heuristics are inherited (both distances: docs/decisions/0013). A
library without any measured version is priced by the section fitted to all libraries together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

LibraryMatch = Literal["own", "version", "other"]
"""Whether the running library is the measured one (or unspecified), another version of it, or another library."""

_NUMBER = re.compile(r"\d+")


def nearest_library(library: str, known: Iterable[str]) -> str:
    """Return the measured library version that prices a library: itself, else its nearest version, else none.

    Args:
        library: Name and version, as measured files spell it.
        known: Names and versions of a record.

    Returns:
        One of ``known``, or an empty string. Among several versions: the newest that is not newer than the requested
        one, else the oldest; without a requested version the newest.

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
    versions = sorted((split_version(each)[1], each) for each in candidates if split_version(each)[0] == name)
    if not versions:
        return ""
    not_newer = [each for own, each in versions if own <= version] if version else [each for _, each in versions]
    return not_newer[-1] if not_newer else versions[0][1]


def match_library(library: str, *found: str) -> LibraryMatch:
    """Classify the running library against those that a section was fitted to, by the nearest of them.

    >>> tuple(match_library(library, "vllm 0.24.0") for library in ("", "vllm 0.19.1", "trtllm 1.2.0"))
    ('own', 'version', 'other')
    """
    if not library or library in found:
        return "own"
    name = split_version(library)[0]
    return "version" if any(each and split_version(each)[0] == name for each in found) else "other"


def split_version(library: str) -> tuple[str, tuple[int, ...]]:
    """Split a library into its folded name and its version numbers; the latter are empty without a version.

    >>> split_version("SGLang 0.5.14rc1"), split_version("trtllm")
    (('sglang', (0, 5, 14, 1)), ('trtllm', ()))
    """
    name, _, version = library.strip().partition(" ")
    return name.casefold(), tuple(int(number) for number in _NUMBER.findall(version))
