"""Parse and format quantities with units.

Inside the package every quantity is in SI base units; prefixes such as milli, giga and gibi appear only here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
KILO, MEGA, GIGA, TERA = 1e3, 1e6, 1e9, 1e12

SECONDS_PER_SUFFIX = {"_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}
"""Seconds per unit, by the suffix of a column name in seconds' place. [s]"""

NATS_FROM_BITS = "bits per byte x ln 2 x bytes per token"
"""How a loss in nats per token follows from one in bits per byte."""

_SUFFIXES = {"k": KILO, "m": MEGA, "b": GIGA, "t": TERA}
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def format_seconds(time_s: float) -> str:
    """Format a duration in the largest unit that keeps it above 1.

    >>> format_seconds(0.0123), format_seconds(4.2e-6), format_seconds(90.0)
    ('12.3 ms', '4.2 us', '90 s')
    """
    if time_s == 0:
        return "0 s"
    for scale, unit in _SECONDS:
        if abs(time_s) >= scale or unit == "ns":
            return f"{_three_digits(time_s / scale)} {unit}"
    raise AssertionError("unreachable")


def format_bytes(amount_bytes: float) -> str:
    """Format an amount of memory in binary units.

    >>> format_bytes(80 * 2**30), format_bytes(1536)
    ('80 GiB', '1.5 KiB')
    """
    for scale, unit in ((2.0**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(amount_bytes) >= scale:
            return f"{_three_digits(amount_bytes / scale)} {unit}"
    return f"{amount_bytes:.0f} B"


def format_rate(flops_per_s: float) -> str:
    """Format an arithmetic rate in TFLOP/s.

    >>> format_rate(312e12)
    '312 TFLOP/s'
    """
    return f"{_three_digits(flops_per_s / TERA)} TFLOP/s"


def format_count(count: float) -> str:
    """Format a large count (parameters, tokens) with a decimal suffix.

    >>> format_count(2_651_553_280), format_count(950)
    ('2.65 B', '950')
    """
    for scale, unit in ((TERA, "T"), (GIGA, "B"), (MEGA, "M"), (KILO, "k")):
        if abs(count) >= scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f}"


def format_number_of(number: int, noun: str) -> str:
    """Format a number of things, in the plural where it is not one.

    >>> format_number_of(1, "finding"), format_number_of(0, "finding"), format_number_of(1500, "step")
    ('1 finding', '0 findings', '1,500 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_amount(value: float) -> str:
    """Format a number: an integer from a hundred on, three digits below.

    >>> format_amount(123456.7), format_amount(9.876), format_amount(0.01234)
    ('123,457', '9.88', '0.0123')
    """
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.3g}"


def energy_unit(energy_kwh: float) -> tuple[str, float]:
    """Unit in which an energy is written, and the kWh of one: MWh from a thousand kWh on.

    >>> energy_unit(250.0), energy_unit(1200.0)
    (('kWh', 1.0), ('MWh', 1000.0))
    """
    return ("MWh", KILO) if energy_kwh >= KILO else ("kWh", 1.0)


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage.

    >>> format_percent(0.4213), format_percent(0.0042)
    ('42.1 %', '0.42 %')
    """
    return f"{_three_digits(100.0 * fraction)} %"


def parse_seconds(text: str) -> float:
    """Parse a duration such as ``300ms``, ``2 s`` or ``0.3``; the default unit is seconds.

    >>> parse_seconds("300ms"), parse_seconds("2 s"), parse_seconds("0.3")
    (0.3, 2.0, 0.3)

    Raises:
        ValueError: the text is not a duration above zero.
    """
    body = text.strip().lower()
    for scale, unit in sorted(_SECONDS, key=lambda entry: -len(entry[1])):
        if body.endswith(unit):
            value = float(body.removesuffix(unit)) * scale
            break
    else:
        value = float(body)
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{text!r} is not above zero")
    return value


def parse_count(text: str) -> int:
    """Parse a count such as ``2.7b``, ``350M``, ``8k`` or ``12``.

    >>> parse_count("2.7b"), parse_count("8k")
    (2700000000, 8000)

    Raises:
        ValueError: the text is not a number, or out of range.
    """
    value = parse_scaled(text)
    if not 0 <= value < 1e18:
        raise ValueError(f"{text!r} is out of range")
    return round(value)


def parse_scaled(text: str, scales: Mapping[str, float] = _SUFFIXES) -> float:
    """Parse a number that a letter may scale.

    Args:
        scales: Factor by letter, in lower case; by default the decimal suffixes of counts.

    >>> parse_scaled("20k"), parse_scaled("1,500"), parse_scaled("2d", {"d": 24.0, "h": 1.0})
    (20000.0, 1500.0, 48.0)

    Raises:
        ValueError: the text is not a number.
    """
    body = text.strip().lower().replace("_", "").replace(",", "")
    scale = scales.get(body[-1:])
    return float(body) if scale is None else float(body[:-1]) * scale


def _three_digits(value: float) -> str:
    """Format with three significant digits, never in exponent form."""
    magnitude = abs(value)
    digits = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def find_time_columns(names: Iterable[str], header: Container[str]) -> dict[str, tuple[str, float]]:
    """Find columns that hold a wanted time in another unit.

    Args:
        names: Wanted columns; those that end in ``_s`` and are missing from the header are looked for.
        header: Columns of the table.

    Returns:
        By wanted column: the column that replaces it, and seconds per unit of that column.

    >>> find_time_columns(["m", "latency_s"], ["m", "latency_us"])
    {'latency_s': ('latency_us', 1e-06)}
    """
    found = {}
    for name in names:
        if name.endswith("_s") and name not in header:
            for ending, seconds in SECONDS_PER_SUFFIX.items():
                if name.removesuffix("_s") + ending in header:
                    found[name] = name.removesuffix("_s") + ending, seconds
    return found
