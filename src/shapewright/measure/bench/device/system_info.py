"""Facts about the machine: processor, memory and caches from the operating system, GPU state from NVML.

Everything is read; no clock or power limit is ever set.
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from shapewright.core.units import KIB

_NVML_SUCCESS = 0
# NVML's enumerations: nvmlClockType_t and nvmlTemperatureSensors_t.
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
_MEGAHERTZ = 1e6
_MILLIWATT = 1e-3
_NVML_TEXT_LENGTH = 96


def processor_name() -> str:
    """Processor name as Linux reports it, or the architecture elsewhere."""
    return _first_value(Path("/proc/cpuinfo"), "model name") or platform.machine()


def host_available_bytes() -> float:
    """Host memory that can be allocated, file caches included; all memory where Linux does not report it. [byte]"""
    kibibytes = _first_value(Path("/proc/meminfo"), "MemAvailable").removesuffix("kB").strip()
    if kibibytes.isdigit():
        return float(kibibytes) * KIB
    return host_memory_bytes()


def host_memory_bytes() -> float:
    """Total memory of the host. [byte]"""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def host_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> float | None:
    """Size of the last-level cache of the first core; None where Linux does not report it. [byte]

    Source: Linux kernel documentation, ABI/testing/sysfs-devices-system-cpu, cpu*/cache/index*.

    Args:
        folder: Cache folder of a core, with one folder per cache that holds its ``level`` and ``size``.
    """
    sizes: dict[int, float] = {}
    for index in folder.glob("index*"):
        with suppress(OSError, ValueError):
            level = int((index / "level").read_text(encoding="ascii"))
            sizes[level] = int((index / "size").read_text(encoding="ascii").strip().removesuffix("K")) * float(KIB)
    return sizes[max(sizes)] if sizes else None


class Nvml:
    """State of one NVIDIA GPU, read through NVML.

    Args:
        uuid: UUID of the GPU as torch reports it, with or without the prefix ``GPU-``.

    Raises:
        OSError: NVML is not installed, or does not list the GPU.
    """

    def __init__(self, uuid: str) -> None:
        self._library = _load_nvml()
        self._handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._handle)) != _NVML_SUCCESS:
            raise OSError(f"NVML does not list {name}")

    def driver(self) -> str:
        """Driver version, or an empty string."""
        text = ctypes.create_string_buffer(_NVML_TEXT_LENGTH)
        code = self._library.nvmlSystemGetDriverVersion(text, _NVML_TEXT_LENGTH)
        return text.value.decode() if code == _NVML_SUCCESS else ""

    def state(self) -> dict[str, float]:
        """Clocks, power and temperature; readings that the driver refuses are left out."""
        library, handle = self._library, self._handle
        readings = {
            "sm_clock_hz": (library.nvmlDeviceGetClockInfo, (handle, _CLOCK_SM), _MEGAHERTZ),
            "memory_clock_hz": (library.nvmlDeviceGetClockInfo, (handle, _CLOCK_MEMORY), _MEGAHERTZ),
            "power_watts": (library.nvmlDeviceGetPowerUsage, (handle,), _MILLIWATT),
            "temperature_celsius": (library.nvmlDeviceGetTemperature, (handle, _TEMPERATURE_GPU), 1.0),
        }
        found: dict[str, float] = {}
        for name, (read, arguments, scale) in readings.items():
            value = ctypes.c_uint()
            if read(*arguments, ctypes.byref(value)) == _NVML_SUCCESS:
                found[name] = value.value * scale
        return found


@lru_cache(maxsize=1)
def _load_nvml() -> ctypes.CDLL:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    code = library.nvmlInit_v2()
    if code != _NVML_SUCCESS:
        raise OSError(f"nvmlInit failed with code {code}")
    return library


def _first_value(path: Path, name: str) -> str:
    """Value of the first ``name: value`` line of a /proc file, or an empty string."""
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""
