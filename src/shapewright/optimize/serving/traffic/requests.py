"""Requests to simulate: drawn from distributions at a rate, or read from a trace.

For one seed, lengths are equal at every rate, and intervals are in proportion, so rates and layouts are compared on the
same requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.errors import WorkloadError, short_repr
from shapewright.core.ranges import check_integer, check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.optimize.serving.request import LONGEST_LEN

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    PerRequest = Float[np.ndarray, " requests"]
    Lengths = Int[np.ndarray, " requests"]

MOST_REQUESTS = 5_000_000
DEFAULT_REQUESTS = 10_000
MOST_RATES = 32
_FASTEST_PER_S = 1e6
_PERIODS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RATE = re.compile(r"(?P<number>[0-9.eE+-]+)\s*(?:/\s*(?P<period>[a-z]+))?")
_LOWEST_BURSTINESS, _HIGHEST_BURSTINESS = 1e-2, 1e6


class _Kind(NamedTuple):
    """A distribution of lengths.

    Attributes:
        parameters: Names of its parameters.
        mean: Returns the mean, given the parameters.
        draw: Returns random lengths, given a generator, a count and the parameters; the lengths may be fractional.
    """

    parameters: tuple[str, ...]
    mean: Callable[..., float]
    draw: Callable[..., PerRequest]


def _lognormal_parameters(mean: float, deviation: float) -> tuple[float, float]:
    """Return mu and sigma of the lognormal distribution with a mean and a standard deviation."""
    variance = math.log1p((deviation / mean) ** 2)
    return math.log(mean) - variance / 2.0, math.sqrt(variance)


_KINDS: Mapping[str, _Kind] = {
    "fixed": _Kind(("n",), lambda n: n, lambda _, size, n: np.full(size, n)),
    "uniform": _Kind(
        ("low", "high"),
        lambda low, high: (low + high) / 2.0,
        lambda draw, size, low, high: draw.integers(round(low), round(high), size, endpoint=True),
    ),
    "normal": _Kind(
        ("mean", "deviation"), lambda mean, _: mean, lambda draw, size, *numbers: draw.normal(*numbers, size)
    ),
    "lognormal": _Kind(
        ("mean", "deviation"),
        lambda mean, _: mean,
        lambda draw, size, *numbers: draw.lognormal(*_lognormal_parameters(*numbers), size),
    ),
    "geometric": _Kind(("mean",), lambda mean: mean, lambda draw, size, mean: draw.geometric(1.0 / mean, size)),
    "poisson": _Kind(("mean",), lambda mean: mean, lambda draw, size, mean: draw.poisson(mean, size)),
}
_ALIASES = {"constant": "fixed", "exponential": "geometric", "gaussian": "normal"}
_FORMS = "N, " + ", ".join(
    f"{name}:{','.join(kind.parameters).upper()}" for name, kind in _KINDS.items() if name != "fixed"
)
_MIXED = "or N=SHARE,N=SHARE,..."


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of prompt or answer lengths.

    Attributes:
        kind: ``fixed``, ``uniform``, ``normal``, ``lognormal``, ``geometric``, ``poisson`` or ``mixed``.
        numbers: Its numbers; lengths alone if mixed.
        shares: Share of each length if mixed.
    """

    kind: str
    numbers: tuple[float, ...]
    shares: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Mean length. [token]"""
        if self.kind == "mixed":
            return float(np.dot(self.numbers, self.shares))
        return float(_KINDS[self.kind].mean(*self.numbers))

    def draw(self, generator: np.random.Generator, count: int) -> Lengths:
        """Return random lengths of at least one token. [token], [requests]"""
        if self.kind == "mixed":
            drawn = generator.choice(np.array(self.numbers), count, p=self.shares)
        else:
            drawn = _KINDS[self.kind].draw(generator, count, *self.numbers)
        lengths: Lengths = np.clip(np.rint(drawn), 1, LONGEST_LEN).astype(np.int64)
        return lengths


def read_lengths(text: str | int, name: str) -> LengthDistribution:
    """Read a distribution such as ``500``, ``uniform:100,900``, ``lognormal(800,600)`` or ``128=0.7,2048=0.3``.

    Args:
        name: Field that holds it, for messages.

    Raises:
        WorkloadError: it cannot be read.

    >>> read_lengths("uniform:100,900", "prompt_len").mean
    500.0
    """
    words = str(text).strip().lower().replace("(", ":").removesuffix(")")
    try:
        if "=" in words:
            return _read_mixed(words)
        kind, _, rest = words.rpartition(":")
        kind = _ALIASES.get(kind, kind)
        if kind == "uniform":
            rest = rest.replace("-", ",")
        numbers = tuple(float(part) for part in rest.split(","))
    except ValueError:
        raise _lengths_error(name, text) from None
    kind = kind or "fixed"
    if kind not in _KINDS or len(numbers) != len(_KINDS[kind].parameters):
        raise _lengths_error(name, text)
    is_in_range = all(math.isfinite(one) and 0 <= one <= LONGEST_LEN for one in numbers) and numbers[0] >= 1
    is_ordered = kind != "uniform" or numbers[0] <= numbers[1]
    is_whole = kind not in ("fixed", "uniform") or all(one % 1 == 0 for one in numbers)
    if not (is_in_range and is_ordered and is_whole):
        raise _lengths_error(name, text)
    return LengthDistribution(kind, numbers)


def _read_mixed(words: str) -> LengthDistribution:
    pairs = [part.split("=") for part in words.split(",")]
    lengths = tuple(int(length) for length, _ in pairs)
    shares = np.array([float(share) for _, share in pairs])
    if min(lengths) < 1 or max(lengths) > LONGEST_LEN or not np.all(shares >= 0) or not 0 < shares.sum() < math.inf:
        raise ValueError(words)
    return LengthDistribution("mixed", lengths, tuple(float(share) for share in shares / shares.sum()))


def _lengths_error(name: str, text: object) -> WorkloadError:
    return WorkloadError(
        f"{name}={short_repr(text)} is not a distribution of lengths from 1 to 2**{LONGEST_LEN.bit_length() - 1} "
        f"tokens; give {_FORMS}, {_MIXED}, such as lognormal:800,600",
        field=name,
    )


def read_rates(text: str) -> tuple[float, ...]:
    """Read rates of arrival such as ``12/s``, ``300/min`` or ``2/s,4/s,8/s``. [1/s]

    Raises:
        WorkloadError: they cannot be read.

    >>> read_rates("12/s,300/min")
    (12.0, 5.0)
    """
    rates = []
    for part in text.split(","):
        matched = _RATE.fullmatch(part.strip().lower())
        period_s = _PERIODS_S.get(matched["period"] or "s") if matched else None
        try:
            rate = float(matched["number"]) / period_s if matched and period_s else math.nan
        except ValueError:
            rate = math.nan
        if not 0.0 < rate <= _FASTEST_PER_S:
            raise WorkloadError(
                f"arrivals={short_repr(text)} is not a rate above 0 and at most {_FASTEST_PER_S:g}/s; give requests "
                f"per {', '.join(_PERIODS_S)}, such as 12/s, 300/min or 2/s,4/s,8/s",
                field="arrivals",
            )
        rates.append(rate)
    if len(rates) > MOST_RATES:
        raise WorkloadError(f"arrivals has {len(rates)} rates; give at most {MOST_RATES}", field="arrivals")
    return tuple(dict.fromkeys(rates))


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival.

    Attributes:
        arrival_s: Times of arrival. [s], [requests]
        prompt_len: Tokens of each prompt. [requests]
        output_len: Tokens of each answer. [requests]
        prefix: Index of the prefix that a prompt shares with others, -1 for none. [requests]
        prefix_len: Tokens of the shared prefix. [requests]
    """

    arrival_s: PerRequest
    prompt_len: Lengths
    output_len: Lengths
    prefix: Lengths
    prefix_len: Lengths

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    @property
    def rate_per_s(self) -> float:
        """Mean rate of arrival; 0 if all arrive at once. [1/s]"""
        spread_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (self.num_requests - 1) / spread_s if spread_s > 0 else 0.0

    @property
    def longest_len(self) -> int:
        """Tokens of the longest sequence at its end."""
        return int(np.max(self.prompt_len + self.output_len))

    def select(self, index: slice | Lengths) -> Traffic:
        """Return some of the requests."""
        return Traffic(
            self.arrival_s[index],
            self.prompt_len[index],
            self.output_len[index],
            self.prefix[index],
            self.prefix_len[index],
        )

    def at_once(self, count: int) -> Traffic:
        """Return ``count`` requests, repeated or cut off, that all arrive at time 0, to simulate the capacity."""
        chosen = self.select(np.arange(count) % self.num_requests)
        return Traffic(np.zeros(count), chosen.prompt_len, chosen.output_len, chosen.prefix, chosen.prefix_len)

    def at_rate(self, rate_per_s: float) -> Traffic:
        """Return the requests with intervals scaled to another mean rate. [1/s]"""
        first = self.arrival_s[0]
        scaled = (self.arrival_s - first) * (self.rate_per_s / rate_per_s)
        return Traffic(scaled, self.prompt_len, self.output_len, self.prefix, self.prefix_len)


@dataclass(frozen=True, kw_only=True)
class RandomTraffic:
    """Requests drawn from distributions.

    Attributes:
        prompts: Lengths of prompts.
        answers: Lengths of answers.
        cached_len: Tokens at the start of every prompt that all share.
        num_requests: Number of requests.
        seed: Seed of the generator.
        burstiness: Shape of the gamma distribution of intervals: 1 gives Poisson arrivals, less gives bursts, much more
            gives even intervals.

    Raises:
        WorkloadError: a value is out of range.
    """

    prompts: LengthDistribution
    answers: LengthDistribution
    cached_len: int = 0
    num_requests: int = DEFAULT_REQUESTS
    seed: int = 0
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        hint = "give the number of requests to simulate, such as 10000"
        check_integer("num_requests", self.num_requests, 1, MOST_REQUESTS, error=WorkloadError, hint=hint)
        check_integer("seed", self.seed, 0, 2**63 - 1, error=WorkloadError, hint="give a whole number such as 0")
        hint = "give the tokens that all prompts share"
        check_integer("cached_len", self.cached_len, 0, LONGEST_LEN, error=WorkloadError, hint=hint)
        hint = "1 is Poisson, less comes in bursts"
        check_number(
            "burstiness", self.burstiness, _LOWEST_BURSTINESS, _HIGHEST_BURSTINESS, error=WorkloadError, hint=hint
        )

    def draw(self, longest_len: int) -> tuple[Traffic, int]:
        """Return the requests at a mean rate of one per second, and how many were cut to the longest sequence.

        Args:
            longest_len: Tokens of the longest sequence that model and cache hold.

        Raises:
            WorkloadError: prompts and answers of fixed or mean length are longer than that.
        """
        typical = self.prompts.mean + self.answers.mean
        if typical > longest_len:
            raise WorkloadError(
                with_fields("{prompt_len} + {output_len}")
                + f" = {typical:.0f} tokens on average exceed the {longest_len} tokens that a sequence may have here",
                advice="give shorter ones",
            )
        if self.cached_len >= self.prompts.mean:
            raise WorkloadError(
                f"cached_len={self.cached_len} must be below the mean "
                + with_fields("{prompt_len} of {mean:.0f} tokens", mean=self.prompts.mean),
                advice="give the tokens that all prompts share",
                field="cached_len",
            )
        streams = [np.random.default_rng([self.seed, index]) for index in range(3)]
        prompt_len = self.prompts.draw(streams[0], self.num_requests)
        output_len = self.answers.draw(streams[1], self.num_requests)
        intervals = streams[2].gamma(self.burstiness, 1.0 / self.burstiness, self.num_requests)
        num_cut = int(np.sum(prompt_len + output_len > longest_len))
        prompt_len = np.minimum(prompt_len, longest_len - 1)
        output_len = np.minimum(output_len, longest_len - prompt_len)
        shared = np.minimum(self.cached_len, prompt_len)
        prefix = np.full(self.num_requests, 0 if self.cached_len else -1)
        return Traffic(np.cumsum(intervals) - intervals[0], prompt_len, output_len, prefix, shared), num_cut
