"""Conservation in simulated traffic: every request ends once, no token is lost, the cache is never over capacity."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shapewright.optimize.serving.traffic.requests import Traffic
from shapewright.optimize.serving.traffic.unit import SimulatedUnit, simulate_unit
from simulated import constant_streams, make_traffic

BLOCK = 4


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    """A few requests with short lengths, some of which share prefixes."""
    num = draw(st.integers(1, 25))
    gaps = draw(st.lists(st.floats(0.0, 8.0), min_size=num, max_size=num))
    prompts = draw(st.lists(st.integers(1, 40), min_size=num, max_size=num))
    answers = draw(st.lists(st.integers(1, 24), min_size=num, max_size=num))
    prefixes = draw(st.lists(st.integers(-1, 2), min_size=num, max_size=num))
    shares = draw(st.lists(st.integers(0, 40), min_size=num, max_size=num))
    return make_traffic(np.cumsum(gaps), prompts, answers, prefixes, np.minimum(prompts, shares))


@given(
    traffic=traffics(),
    num_blocks=st.integers(32, 40),
    max_sequences=st.integers(1, 8),
    spare_tokens=st.integers(0, 40),
    num_streams=st.integers(1, 3),
    is_apart=st.booleans(),
    is_chunked=st.booleans(),
    is_mixed=st.booleans(),
    reserves_answers=st.booleans(),
    keeps_preempted=st.booleans(),
    num_replicas=st.integers(1, 2),
)
def test_nothing_is_lost(
    traffic: Traffic,
    num_blocks: int,
    max_sequences: int,
    spare_tokens: int,
    num_streams: int,
    *,
    is_apart: bool,
    is_chunked: bool,
    is_mixed: bool,
    reserves_answers: bool,
    keeps_preempted: bool,
    num_replicas: int,
) -> None:
    """Requests, tokens and blocks are conserved for any arrivals, lengths, prefixes, caches and budgets."""
    given_sizes = {"num_blocks": num_blocks, "block_tokens": BLOCK, "num_streams": num_streams, "longest_len": 64}
    max_tokens = max_sequences + spare_tokens if is_chunked else 64
    limits = {
        "max_sequences": max_sequences,
        "max_tokens": max_tokens,
        "is_chunked": is_chunked,
        "is_mixed": is_chunked and is_mixed,
    }
    further_limits = {"reserves_answers": reserves_answers, "keeps_preempted": keeps_preempted}
    streams = constant_streams(**given_sizes, **limits, **further_limits, num_replicas=num_replicas)
    unit = SimulatedUnit(streams, streams if is_apart else None, (0.0,), (0.5,))
    outcome = simulate_unit(unit, traffic)
    every = (*outcome.totals, *outcome.prefill_totals)

    assert np.all(outcome.arrival_s <= outcome.admitted_s)
    assert np.all(outcome.admitted_s < outcome.first_s)
    assert np.all(outcome.first_s <= outcome.end_s)
    assert outcome.emitted.tolist() == traffic.output_len.tolist()
    assert all(total.most_blocks <= num_blocks for total in every)
    assert all(total.free_blocks == num_blocks for total in every)
    # First tokens come from passes over the prompt; after a preemption, so does the next one.
    decoded = sum(total.decode_tokens for total in outcome.totals)
    lost = int(outcome.preempted.sum())
    assert not (lost and reserves_answers)
    further = int((traffic.output_len - 1).sum())
    assert further - lost <= decoded <= further
    computed = sum(total.prefill_tokens for total in every)
    assert computed + outcome.hit_len.sum() >= traffic.prompt_len.sum()
    if not lost:
        assert computed + outcome.hit_len.sum() == traffic.prompt_len.sum()
        assert decoded == further
    assert max(total.busy_s for total in every) <= outcome.makespan_s + 1e-9
