"""Simulated streams with given times of passes, for the tests of traffic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shapewright.optimize.serving.traffic.requests import Traffic
from shapewright.optimize.serving.traffic.state import Limits, PassTable
from shapewright.optimize.serving.traffic.unit import Outcome, SimulatedUnit, Streams, simulate_unit


def make_traffic(
    arrival_s: Sequence[float],
    prompt_len: Sequence[int],
    output_len: Sequence[int],
    prefix: Sequence[int] | None = None,
    prefix_len: Sequence[int] | None = None,
) -> Traffic:
    """Requests from lists."""
    num = len(arrival_s)
    return Traffic(
        np.asarray(arrival_s, float),
        np.asarray(prompt_len, np.int64),
        np.asarray(output_len, np.int64),
        np.full(num, -1) if prefix is None else np.asarray(prefix, np.int64),
        np.zeros(num, np.int64) if prefix_len is None else np.asarray(prefix_len, np.int64),
    )


def constant_streams(
    pass_time_s: float = 1.0,
    *,
    max_sequences: int = 4,
    max_tokens: int = 64,
    block_tokens: int = 4,
    num_blocks: int = 1000,
    num_streams: int = 1,
    longest_len: int = 4000,
    is_chunked: bool = True,
    is_mixed: bool | None = None,
    reserves_answers: bool = False,
    keeps_preempted: bool = False,
    num_replicas: int = 1,
) -> Streams:
    """Streams whose passes all take the same time."""
    each_s = np.full(max_tokens + max_sequences + 1, pass_time_s)
    no_fractions = np.zeros(longest_len + max_tokens + max_sequences)
    first_cells = no_fractions.astype(np.int64)
    table = PassTable(
        decode_s=each_s,
        decode_core_s=np.zeros(4),
        tokens_s=each_s,
        prompt_core_s=np.zeros(4),
        num_contexts=2,
        batch_cell=first_cells,
        batch_fraction=no_fractions,
        context_cell=first_cells,
        context_fraction=no_fractions,
        token_cell=first_cells,
        token_fraction=no_fractions,
    )
    return Streams(
        table,
        Limits(
            max_sequences,
            max_tokens,
            block_tokens,
            num_blocks,
            is_chunked,
            is_chunked if is_mixed is None else is_mixed,
            reserves_answers,
            keeps_preempted,
            num_replicas,
        ),
        num_streams,
    )


def simulate(traffic: Traffic, streams: Streams, *, compiled: bool = False) -> Outcome:
    """Run requests on aggregated streams."""
    return simulate_unit(SimulatedUnit(streams), traffic, compiled=compiled)
