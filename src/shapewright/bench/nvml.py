"""Clocks, power and temperature of an NVIDIA GPU, read from the driver's own library; nothing is ever set."""

from __future__ import annotations

import ctypes
from functools import lru_cache

_SUCCESS = 0
# NVML's enumerations: nvmlClockType_t and nvmlTemperatureSensors_t.
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
_MEGAHERTZ = 1e6
_MILLIWATT = 1e-3
_LONGEST_TEXT = 96


class Nvml:
    """One GPU as NVML sees it.

    Args:
        uuid: The GPU's UUID as torch reports it, with or without ``GPU-`` before it.

    Raises:
        OSError: there is no NVML, or it does not know the GPU.
    """

    def __init__(self, uuid: str) -> None:
        self._library = _load()
        self._handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._handle)) != _SUCCESS:
            raise OSError(f"NVML knows no {name}")

    def driver(self) -> str:
        """Version of the driver, or an empty string."""
        text = ctypes.create_string_buffer(_LONGEST_TEXT)
        code = self._library.nvmlSystemGetDriverVersion(text, _LONGEST_TEXT)
        return text.value.decode() if code == _SUCCESS else ""

    def state(self) -> dict[str, float]:
        """Clocks, power and temperature; what the driver does not tell is left out."""
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
            if read(*arguments, ctypes.byref(value)) == _SUCCESS:
                found[name] = value.value * scale
        return found


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    code = library.nvmlInit_v2()
    if code != _SUCCESS:
        raise OSError(f"NVML does not start (code {code})")
    return library
