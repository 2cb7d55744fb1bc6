"""What the host says of itself, processor, memory and caches: by files of Linux, by POSIX where they are not there."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

from shapewright.units import KIB


def processor_name() -> str:
    """What Linux calls the processor, or the architecture."""
    return _first_value(Path("/proc/cpuinfo"), "model name") or platform.machine()


def host_available_bytes() -> float:
    """Memory that Linux could give away, caches of files included; all of it where it does not tell. [byte]"""
    kibibytes = _first_value(Path("/proc/meminfo"), "MemAvailable").removesuffix("kB").strip()
    if kibibytes.isdigit():
        return float(kibibytes) * KIB
    return host_memory_bytes()


def host_memory_bytes() -> float:
    """All memory of the host. [byte]"""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def host_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> float | None:
    """Size of the last-level cache that Linux says the first core has; None where it does not. [byte]

    Source: Linux kernel documentation, ABI/testing/sysfs-devices-system-cpu, cpu*/cache/index*.

    Args:
        folder: Of the caches of a core, one folder each with its ``level`` and ``size``.
    """
    sizes: dict[int, float] = {}
    for index in folder.glob("index*"):
        with suppress(OSError, ValueError):
            level = int((index / "level").read_text(encoding="ascii"))
            sizes[level] = int((index / "size").read_text(encoding="ascii").strip().removesuffix("K")) * float(KIB)
    return sizes[max(sizes)] if sizes else None


def _first_value(path: Path, name: str) -> str:
    """What follows a name and its colon in a file of the kernel, or an empty string."""
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
