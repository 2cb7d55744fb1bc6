"""How a benchmark's tokens spread over experts: what the busiest device of an expert group gets.

Balanced: tokens go round the experts, so every device gets the same rows, and min(experts, rows) experts get one.

Power law: each expert draws a weight x from p(x) ~ x^-alpha between two ends, rows follow the weights, no expert gets
more rows than there are tokens, and the device with most rows is timed. Here weights stand at the middles of equal
shares of probability, and devices are filled in shuffled orders; their busiest is averaged. What rounding leaves over
goes to the experts with fewest rows: measured times show more experts in use than round to a row.

Source: the procedure that ai-dynamo/aiconfigurator's collector describes for ``power_law_<alpha>``; its ends are 1 and
0.8 tokens, or 0.01 and 2 where rows are no more than experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.errors import MeasuredFileError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

POWER_LAW = "power_law"
# Words for rows that are spread evenly.
BALANCED = ("balanced", "uniform")
# Beyond it one expert has everything, and powers of its weights overflow.
_LARGEST_EXPONENT = 20.0
_NUM_SHUFFLES = 16
# More distinct groups than that take longer than a table of them is worth; tokens are then rounded to steps of 1/16 in
# their logarithm, but for few of them.
_MOST_EXACT, _STEPS_PER_E, _EXACT_TOKENS = 6_000, 16.0, 64.0


class Load(NamedTuple):
    """What a device's experts get.

    Attributes:
        rows: Rows of the busiest device.
        experts: Its experts that get at least one.
        tokens: Tokens that have a row there.
    """

    rows: float
    experts: float
    tokens: float


def busiest_loads(groups: Sequence[Array], distribution: str, *, packs_rest: bool = False) -> Array:
    """Loads of many expert groups, as rows of ``Load``; shape [3, groups].

    Each distinct group is worked out once. Where there are more than _MOST_EXACT of them, token counts are rounded by
    up to 3 %, and rows and tokens of the result scaled back.

    Args:
        groups: Tokens, experts of a token, experts, and devices that share them, of each group. [groups]
        distribution: As of busiest_load.
        packs_rest: Likewise.

    Raises:
        MeasuredFileError: the distribution is unknown.
    """
    distinct, places = np.unique(np.stack(groups, axis=1), axis=0, return_inverse=True)
    scale = np.ones(len(distinct))
    if len(distinct) > _MOST_EXACT:
        tokens = distinct[:, 0].copy()
        rounded = np.round(np.exp(np.round(np.log(tokens) * _STEPS_PER_E) / _STEPS_PER_E))
        distinct[:, 0] = np.where(tokens > _EXACT_TOKENS, rounded, tokens)
        scale = tokens / distinct[:, 0]
    loads = np.array(
        [
            busiest_load(int(tokens), int(topk), int(experts), int(devices), distribution, packs_rest=packs_rest)
            for tokens, topk, experts, devices in distinct.tolist()
        ]
    )
    loads = loads.reshape(-1, 3)
    loads[:, [0, 2]] *= scale[:, None]
    found: Array = loads[places.reshape(-1)].T
    return found


@cache
def busiest_load(
    num_tokens: int, topk: int, num_experts: int, num_devices: int, distribution: str, *, packs_rest: bool = False
) -> Load:
    """Rows and experts in use of the busiest device of an expert group.

    Args:
        num_tokens: Tokens of the whole group.
        topk: Experts of a token.
        num_experts: Experts of the whole group.
        num_devices: Devices that share them.
        distribution: ``balanced`` or ``uniform``, or ``power_law_`` and the exponent.
        packs_rest: What rounding leaves over goes to the timed device's experts, and not to all that have fewest.

    Raises:
        MeasuredFileError: the distribution is another.
    """
    rows = num_tokens * topk
    local = max(num_experts // num_devices, 1)
    if distribution in BALANCED:
        share = max(rows / num_devices, 1.0)
        # Neighbouring experts go to different tokens, so a token meets a device once before it meets it twice.
        return Load(share, min(float(local), share), min(float(num_tokens), share))
    alpha = _read_exponent(distribution)
    ends = (1.0, max(0.8 * num_tokens, 1.0)) if rows > num_experts else (0.01, 2.0)
    per_expert, rest = _spread(rows, num_tokens, num_experts, alpha, ends)
    packed = min(rest, local) if packs_rest else 0
    if not per_expert.any():
        # So few rows that every expert's round to none: they are packed, or dealt out as balanced ones are.
        if packs_rest:
            return Load(float(packed), float(packed), float(min(packed, num_tokens)))
        return busiest_load(num_tokens, topk, num_experts, num_devices, "balanced")
    if not packs_rest:
        per_expert[:rest] += 1.0
    shuffled = np.random.default_rng(0).permuted(np.tile(per_expert, (_NUM_SHUFFLES, 1)), axis=1)
    devices = shuffled[:, : local * num_devices].reshape(_NUM_SHUFFLES, num_devices, local)
    busiest = devices[np.arange(_NUM_SHUFFLES), devices.sum(axis=2).argmax(axis=1)]
    busiest[:, :packed] += 1.0
    # Experts choose tokens independently of each other.
    reached = num_tokens * (1.0 - np.prod(1.0 - np.minimum(busiest / num_tokens, 1.0), axis=1))
    means = (busiest.sum(axis=1).mean(), (busiest > 0.0).sum(axis=1).mean(), reached.mean())
    return Load(*(max(float(mean), 1.0) for mean in means))


def _read_exponent(distribution: str) -> float:
    """Exponent of ``power_law_<alpha>``.

    Raises:
        MeasuredFileError: the word is another.
    """
    prefix, _, word = distribution.rpartition("_")
    try:
        alpha = float(word)
    except ValueError:
        alpha = np.inf
    if prefix != POWER_LAW or not abs(alpha) <= _LARGEST_EXPONENT:
        raise MeasuredFileError(
            f"unknown distribution {distribution!r}; known are {', '.join(BALANCED)} and power_law_<alpha>, "
            f"alpha up to {_LARGEST_EXPONENT:g}"
        )
    return alpha


def _spread(rows: int, most: int, num_experts: int, alpha: float, ends: tuple[float, float]) -> tuple[Array, int]:
    """Whole rows of each expert, largest last, and how many of ``rows`` rounding leaves over; shape [experts]."""
    middles = (np.arange(num_experts) + 0.5) / num_experts
    if alpha == 1.0:  # the limit of what follows
        weights = ends[0] * (ends[1] / ends[0]) ** middles
    else:
        low, high = (end ** (1.0 - alpha) for end in ends)
        weights = (low + (high - low) * middles) ** (1.0 / (1.0 - alpha))
    # Experts at the limit leave the rest to the others; each pass finds more of them, from the largest down.
    num_full = 0
    while num_full < num_experts:
        scale = (rows - most * num_full) / weights[: num_experts - num_full].sum()
        reached = int(np.count_nonzero(weights * scale > most))
        if reached <= num_full:
            break
        num_full = reached
    spread: Array = np.round(np.minimum(weights * scale, most))
    rest = int(rows - spread.sum())
    # Where rounding took too many, the largest give them back.
    spread[num_experts + min(rest, 0) :] -= 1.0
    return spread, max(rest, 0)
