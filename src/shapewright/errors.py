"""Every error a user can cause.

Each says what is wrong, the value given, what is allowed, and what to do; the command line prints exactly that
one line and exits with 2.

    ShapewrightError
    +-- ConfigError           a model configuration is malformed or contradicts itself
    |   +-- UnknownModelError a preset or hub id that is not there
    +-- DeviceError           a device file is malformed
    |   +-- UnknownDeviceError
    |   +-- UnknownRateError  a number that the device's sheet does not give
    +-- WorkloadError         batch, lengths, dtype or phase that make no sense
    +-- LayoutError           a parallel layout that does not divide the model
    +-- CalibrationError      a calibration record is missing or malformed
    +-- MissingExtraError     an optional dependency is not installed
    +-- UnknownRuleError      no lint rule has this code or name
    +-- MeasuredFileError     a file of measurements is missing, broken or lacks columns
    +-- StoreError            a store of measurements is missing, broken, full or newer than this program
    +-- ClusterError          no Ray cluster answers, or it lost what it was given
    +-- BenchError            there is nothing to measure on, or it cannot do what is asked
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_CLOSE_NAMES = 3


class ShapewrightError(ValueError):
    """Base of all errors that are the input's fault and not the program's."""


class ConfigError(ShapewrightError):
    """A model configuration is malformed or contradicts itself."""


class UnknownModelError(ConfigError):
    """No preset, file or hub repository has this name."""


class DeviceError(ShapewrightError):
    """A device file is malformed."""


class UnknownDeviceError(DeviceError):
    """No device file or alias has this name."""


class UnknownRateError(DeviceError):
    """The device's sheet does not give a number that the question needs."""


class WorkloadError(ShapewrightError):
    """Batch, lengths, dtype or phase make no sense for this model or device."""


class LayoutError(ShapewrightError):
    """A parallel layout does not divide the model or the devices."""


class CalibrationError(ShapewrightError):
    """A calibration record is missing or malformed."""


class MissingExtraError(ShapewrightError):
    """An optional dependency is not installed."""


class UnknownRuleError(ShapewrightError):
    """No lint rule has this code or name."""


class MeasuredFileError(ShapewrightError):
    """A file of measurements is missing, broken or lacks columns."""


class StoreError(ShapewrightError):
    """A store of measurements is missing, broken, full or newer than this program."""


class ClusterError(ShapewrightError):
    """No Ray cluster answers, or it lost what it was given."""


class BenchError(ShapewrightError):
    """There is nothing to measure on, or it cannot do what is asked."""


def first_line(error: BaseException) -> str:
    """Return the first line of what a library complains of, without its full stop, to quote in one's own error."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    return words[0][:200].rstrip(".")


def close_names(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ``did you mean 'a', 'b'?``, or an empty string.

    >>> close_names("h100", ["h100-sxm-80gb", "mi300x"])
    "did you mean 'h100-sxm-80gb'?"
    """
    candidates = list(known)
    folded = name.casefold()
    close = difflib.get_close_matches(folded, candidates, n=_MOST_CLOSE_NAMES, cutoff=0.6)
    close += [candidate for candidate in candidates if folded in candidate.casefold() and candidate not in close]
    if not close:
        return ""
    return "did you mean " + ", ".join(repr(candidate) for candidate in close[:_MOST_CLOSE_NAMES]) + "?"
