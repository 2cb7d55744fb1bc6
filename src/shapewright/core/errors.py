"""Errors caused by user input.

Each message states what is wrong, the value given, what is allowed, and what to do. The command line prints it as one
line and exits with status 2.

    ShapewrightError
    +-- ConfigError           a model configuration is malformed or contradicts itself
    |   +-- UnknownModelError no such preset, file or hub repository
    +-- DeviceError           a device file is malformed
    |   +-- UnknownDeviceError no such device
    |   +-- UnknownRateError  the data sheet lacks a number that is needed
    +-- WorkloadError         batch size, sequence length, dtype or phase is invalid
    +-- LayoutError           a parallel layout does not fit the model or the devices
    +-- CalibrationError      a calibration record is missing or malformed
    +-- MissingExtraError     an optional dependency is not installed
    +-- TraceError            a PyTorch module cannot be run on the meta device
    +-- UnknownRuleError      no lint rule has this code or name
    +-- MeasuredFileError     a file of measurements is missing, malformed or lacks columns
    +-- StoreError            a measurement store is missing, corrupt, full, or written by a newer version
    +-- ClusterError          no Ray cluster answers, or it lost a task
    +-- BenchError            no device to measure on, or it does not support the benchmark
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from shapewright.core.texts import FieldName, Text

_MAX_CLOSE_NAMES = 3
_MAX_SHOWN_BITS = 256


class ShapewrightError(ValueError):
    """Base class of all errors caused by user input; its message is one printable line.

    Attributes:
        code: Kind of error in JSON output, one per class.
        text: The message, whose names of fields the command line writes as flags.
        fact: What is wrong: the message without subject and advice.
        subject: Name that the message starts with, such as a device; empty where it starts with none.
        field: Field that has the wrong value; empty where no single one has.
        reason: What is wrong, in words that are the same for all shapes of a model; the fact if none are given.
    """

    code: ClassVar[str] = "input"

    def __init__(
        self, fact: str = "", *, subject: str = "", advice: str = "", field: str = "", reason: str = ""
    ) -> None:
        fact, subject = plain_text(fact), plain_text(subject)
        parts = (*((subject, " ") if subject else ()), fact, *(("; ", plain_text(advice)) if advice else ()))
        self.text = Text(*parts)
        super().__init__(str(self.text))
        self.fact, self.subject, self.field, self.reason = fact, subject, field, reason or fact


class ConfigError(ShapewrightError):
    """A model configuration is malformed or contradicts itself."""

    code = "config"


class UnknownModelError(ConfigError):
    """No preset, file or hub repository has this name."""

    code = "unknown-model"


class DeviceError(ShapewrightError):
    """A device file is malformed."""

    code = "device"


class UnknownDeviceError(DeviceError):
    """No device file or alias has this name."""

    code = "unknown-device"


class UnknownRateError(DeviceError):
    """The data sheet lacks a number that is needed."""

    code = "unknown-rate"


class WorkloadError(ShapewrightError):
    """Batch size, sequence length, dtype or phase is invalid for this model or device."""

    code = "workload"


class LayoutError(ShapewrightError):
    """A parallel layout does not fit the model or the devices."""

    code = "layout"


class CalibrationError(ShapewrightError):
    """A calibration record is missing or malformed."""

    code = "calibration"


class MissingExtraError(ShapewrightError):
    """An optional dependency is not installed."""

    code = "missing-extra"


class TraceError(ShapewrightError):
    """A PyTorch module cannot be imported, built, or run on the meta device.

    Attributes:
        user_traceback: Traceback of the user's code, of several lines; empty where none was raised.
    """

    code = "trace"

    def __init__(self, fact: str = "", *, user_traceback: str = "", **parts: str) -> None:
        super().__init__(fact, **parts)
        self.user_traceback = user_traceback


class UnknownRuleError(ShapewrightError):
    """No lint rule has this code or name."""

    code = "unknown-rule"


class MeasuredFileError(ShapewrightError):
    """A file of measurements is missing, malformed or lacks columns."""

    code = "measured-file"


class StoreError(ShapewrightError):
    """A measurement store is missing, corrupt, full, or written by a newer version."""

    code = "store"


class ClusterError(ShapewrightError):
    """No Ray cluster answers, or it lost a task."""

    code = "cluster"


class BenchError(ShapewrightError):
    """There is no device to measure on, or it does not support the benchmark."""

    code = "bench"


def plain_text(text: str) -> str:
    r"""Return a text in one line, without characters that a terminal acts on or that cannot be written.

    Names from files may hold escape sequences, which retitle or recolour a terminal, and halves of surrogate pairs.

    >>> plain_text("a\nb \x1b[31m")
    'a b \\x1b[31m'
    """
    if isinstance(text, Text):
        return Text(*(part if isinstance(part, FieldName) else _plain_part(part) for part in text.parts))
    return _printable(" ".join(text.split()))


def _plain_part(text: str) -> str:
    """Return a part of a text in one line, with the spaces at its ends."""
    line = " ".join(text.split())
    return _printable(f"{' ' * text[:1].isspace()}{line}{' ' * (line != '' and text[-1].isspace())}")


def _printable(line: str) -> str:
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message without its full stop, to quote in another message."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    return words[0][:200].rstrip(".")


def short_repr(value: object, max_length: int = 40) -> str:
    """Return the ASCII representation of a user's value on one line, cut to a length.

    >>> short_repr("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print integers of many digits
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # a list with such an integer, or nested too deeply
        return "a value too large to print"
    return text if len(text) <= max_length else text[: max_length - 4] + "..."


def short_path(path: object) -> str:
    """Return the representation of a path on one line, cut to 250 characters.

    >>> short_path("models/gpt2")
    "'models/gpt2'"
    """
    return short_repr(str(path), max_length=250)


def close_names(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ``did you mean 'a', 'b'?``, or an empty string.

    >>> close_names("h100", ["h100-sxm-80gb", "mi300x"])
    "did you mean 'h100-sxm-80gb'?"
    """
    import difflib  # a millisecond, for errors alone

    candidates = list(known)
    folded = name.casefold()
    close = [candidate for candidate in candidates if "_" in candidate and folded == _initials(candidate)]
    close += difflib.get_close_matches(folded, candidates, n=_MAX_CLOSE_NAMES, cutoff=0.6)
    close += [candidate for candidate in candidates if folded in candidate.casefold() and candidate not in close]
    if not close:
        return ""
    return "did you mean " + ", ".join(repr(candidate) for candidate in close[:_MAX_CLOSE_NAMES]) + "?"


def _initials(name: str) -> str:
    """Return the first letters of the words of a field, by which many know it: ``tp`` of ``tensor_parallel``."""
    return "".join(word[:1] for word in name.split("_"))
