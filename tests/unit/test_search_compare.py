"""Comparison of two predictions: interval of the speed-up, gains by module, and the explanation."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from shapewright.optimize.search.result import explain_gains
from shapewright.prediction.build import build_scenario
from shapewright.prediction.predict import Prediction
from shapewright.prediction.speedup import compare_times


def gpt3(micro_batch_size: int, **overrides: object) -> Prediction:
    """GPT-3 2.7B with some fields changed, training in fp16 on an A100."""
    workload = {"dtype": "fp16", "micro_batch_size": micro_batch_size}
    return build_scenario("gpt3-2.7b", "a100-sxm-40gb", workload=workload, overrides=overrides).predict()


@pytest.fixture(scope="module")
def published() -> Prediction:
    """As published: MLP of 10240, learned positions, 50257 words; 4 sequences."""
    return gpt3(4)


@pytest.fixture(scope="module")
def changed() -> Prediction:
    """A quarter more MLP, rotary positions, 50304 words; 8 sequences."""
    return gpt3(8, intermediate_size=12800, position_embedding="rotary", vocab_size=50304)


@pytest.mark.parametrize("per_step", [False, True])
def test_gains_add_up_to_the_speedup(published: Prediction, changed: Prediction, *, per_step: bool) -> None:
    """Savings of modules add up to the total, per token or per step, in both directions, largest first."""
    for before, after in ((published, changed), (changed, published)):
        saved = [gain.saved_fraction for gain in explain_gains(before, after, per_step=per_step)]
        factor = compare_times(before, after, per_step=per_step).factor

        assert saved == sorted(saved, reverse=True)
        assert sum(saved) == pytest.approx(1.0 - 1.0 / factor, abs=1e-3)


def test_reasons_by_hand(published: Prediction, changed: Prediction) -> None:
    """12800 of 10240 are 25 % more, the other way 20 % less; 50304 halves are rows of 128 bytes, 50257 of 2."""
    there, back = explain_gains(published, changed), explain_gains(changed, published)
    backward = {gain.module: gain.reason for gain in back}
    words = {gain.module: (gain.reason, backward[gain.module]) for gain in there if gain.module in backward}

    assert words["mlp.up"] == words["mlp.down"] == ("25 % more arithmetic", "20 % less arithmetic")
    assert words["mlp.activation"] == ("25 % more bytes", "20 % fewer bytes")
    assert words["attention.rotary"] == ("not in the baseline", "not in this shape")
    assert words["embedding.positions"] == ("not in this shape", "not in the baseline")
    assert words["norm"] == ("small differences", "small differences")
    assert words["logits"][0].startswith("rows aligned to 128 bytes, were 2, +")
    assert words["logits"][1].startswith("rows aligned to 2 bytes, were 128, -")


def test_reasons_per_step_count_the_whole_batch(published: Prediction, changed: Prediction) -> None:
    """Twice the sequences are twice the work of a step, and 2 x 1.25 in the MLP."""
    words = {gain.module: gain.reason for gain in explain_gains(published, changed, per_step=True)}

    assert words["mlp.up"] == "150 % more arithmetic"
    assert words["residual"] == words["cross_entropy"] == "100 % more bytes"
    assert words["attention.out"].startswith("100 % more arithmetic")


def test_an_emptier_last_wave_is_explained() -> None:
    """2048 x 10240 are 8 x 80 tiles of 256 x 128, 5.93 waves of 108; 8 x 82 are 6.07, and run in seven: 12 % slower."""
    before, after = (
        build_scenario(
            "gpt3-2.7b", "a100-sxm-40gb", workload={"phase": "prefill"}, overrides={"intermediate_size": ffn}
        ).predict()
        for ffn in (10240, 10496)
    )
    (gain,) = (gain for gain in explain_gains(before, after) if gain.module == "mlp.up")

    assert gain.reason == "2 % more arithmetic, waves 87 % full, were 99, -12 % FLOP/s"


@pytest.mark.parametrize(("device", "rel"), [("a100-sxm-40gb", 0.05), ("v100-sxm2-32gb", 0.1)])
def test_against_an_exact_time_the_interval_is_the_steps(device: str, rel: float) -> None:
    """Against an exact time, the interval is that of the other step, whichever is compared with which.

    The one adds logarithms, the other seconds, which for intervals of a tenth differ by some percent. On V100, errors
    of borrowed records correlate more than those of its own GEMMs.
    """
    workload = {"phase": "decode", "micro_batch_size": 8}
    own = build_scenario("gpt3-2.7b", device, workload=workload, layout={"tensor_parallel": 2}).predict()
    sure = [
        replace(entry, price=replace(entry.price, low_s=entry.price.time_s, high_s=entry.price.time_s))
        for entry in own.operations
    ]
    for speedup in (
        compare_times(own, replace(own, operations=tuple(sure))),
        compare_times(replace(own, operations=tuple(sure)), own),
    ):
        assert speedup.factor == 1.0
        assert speedup.probability_faster == 0.5
        assert log(speedup.high / speedup.low) == pytest.approx(
            log(own.step_time_high_s / own.step_time_low_s), rel=rel
        )


def test_intervals_are_the_same_both_ways() -> None:
    """One device against two, which borrow their collectives: the interval of the inverse is the inverse interval."""
    workload = {"phase": "decode", "micro_batch_size": 4}
    one, two = (
        build_scenario("gpt3-2.7b", "v100-sxm2-32gb", workload=workload, layout={"tensor_parallel": degree}).predict()
        for degree in (1, 2)
    )
    there, back = compare_times(one, two, per_step=True), compare_times(two, one, per_step=True)

    assert (there.low, there.high) == (pytest.approx(1.0 / back.high), pytest.approx(1.0 / back.low))


def test_factor_at_the_interval_end_has_95_percent_probability(published: Prediction) -> None:
    """A 90 % interval leaves a twentieth on either side: a factor whose lower end is 1 is above 1 with 95 %."""
    other = gpt3(4, num_heads=20)
    speedup = compare_times(published, other)
    # As long a step as puts one end of the interval on 1.
    for end, probability in ((speedup.low, 0.95), (speedup.high, 0.05)):
        moved = replace(other, tokens_per_s_per_device=other.tokens_per_s_per_device / end)
        assert compare_times(published, moved).probability_faster == pytest.approx(probability, abs=1e-4)
