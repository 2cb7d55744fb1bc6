"""Decode passes of a server whose model has windows: what sequences of a batch see on the mean over their answers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.optimize.serving.aggregated import AggregatedCandidate, list_chunkings
from shapewright.optimize.serving.passes import Pass, mean_seen, spread_windows
from shapewright.optimize.serving.point import Instance
from shapewright.optimize.serving.request import ServingFormat, ServingRequest
from shapewright.prediction.build import build_scenario
from shapewright.prediction.composition.step import compose_passes
from shapewright.workload.layout import ParallelLayout

CHUNK = 8192


def make_instance(model: str, prompt_len: int, output_len: int) -> Instance:
    """One copy of a model on eight H200."""
    question = build_scenario(model, "h200-sxm-141gb", workload={"phase": "prefill"})
    return Instance(
        question.replace(layout=ParallelLayout(tensor_parallel=8)),
        ServingFormat("bf16", "bf16", "bf16"),
        ServingRequest(prompt_len=prompt_len, output_len=output_len),
    )


def step_s(instance: Instance, one: Pass) -> float:
    """Time of a pass. [s]"""
    return compose_passes([one], instance.scenario.config, instance.scenario.device)[0].step_s


def decode_s(model: str, prompt_len: int, output_len: int) -> float:
    """Time per token of a batch of 32. [s]"""
    instance = make_instance(model, prompt_len, output_len)
    return step_s(instance, instance.decode_passes(32)[0])


@given(st.integers(1, 40), st.integers(0, 100), st.integers(1, 100), st.booleans())
def test_the_mean_is_that_of_all_contexts(window: int, context_len: int, num_contexts: int, is_chunked: bool) -> None:
    """Counted one by one: a chunk is left behind when it is full, a sliding window stays full."""
    contexts = range(context_len, context_len + num_contexts)
    seen = [cached % window + 1 if is_chunked else min(cached + 1, window) for cached in contexts]
    mean = mean_seen(window, context_len, num_contexts, is_chunked=is_chunked)

    assert 0 <= mean * num_contexts - sum(seen) < num_contexts


@pytest.mark.parametrize(("prompt_len", "output_len"), [(7692, 1000), (8100, 200), (4000, 8386)])
def test_a_batch_across_chunks_takes_the_mean_of_its_passes(prompt_len: int, output_len: int) -> None:
    """Llama 4, whose chunks end within the answer: as long as the mean over passes at places all along the answer."""
    instance = make_instance("llama-4-scout", prompt_len, output_len)
    places = range(prompt_len, prompt_len + output_len, max(output_len // 100, 1))
    mean_s = sum(step_s(instance, instance.passes.decode(32, place)) for place in places) / len(places)

    assert step_s(instance, instance.decode_passes(32)[0]) == pytest.approx(mean_s, rel=0.005)


def test_chunk_ends_cause_no_cliff() -> None:
    """From prompts whose answers end before a chunk does to prompts that fill it, no 50 tokens change 1 % of a pass."""
    times_s = [decode_s("llama-4-scout", prompt_len, 1000) for prompt_len in range(7000, CHUNK + 200, 50)]

    assert all(abs(after / before - 1.0) < 0.01 for before, after in pairwise(times_s))


def test_longer_contexts_of_sliding_windows_never_take_less() -> None:
    """Gemma 2, whose windows are full after 4096 tokens: longer prompts and longer answers take as long or longer."""
    by_prompt = [decode_s("gemma-2-27b", prompt_len, 1000) for prompt_len in range(2800, 4400, 100)]
    by_answer = [decode_s("gemma-2-27b", 3000, output_len) for output_len in range(500, 4500, 250)]

    assert by_prompt == sorted(by_prompt)
    assert by_answer == sorted(by_answer)


@pytest.mark.parametrize(("model", "prompt_len"), [("llama-3-8b", 4000), ("gemma-2-27b", 8000), ("llama-4-scout", 100)])
def test_outputs_that_leave_no_window_are_priced_at_their_middle(model: str, prompt_len: int) -> None:
    """No window, a window that is full all along, a chunk that is not yet full: as one pass in the middle."""
    instance = make_instance(model, prompt_len, 1000)
    middle = instance.passes.decode(32, prompt_len + 500)

    assert step_s(instance, instance.decode_passes(32)[0]) == step_s(instance, middle)


def mixed_s(model: str, prompt_len: int) -> tuple[float, list[float]]:
    """Time of a planned mixed pass of about 512 prompt tokens and 32 sequences, and of each pass priced one by one."""
    instance = make_instance(model, prompt_len, 1000)
    chunking = list_chunkings(prompt_len)[0]
    candidate = AggregatedCandidate(instance, 32, chunking, load_fraction=0.0)
    times = compose_passes(candidate.passes(), instance.scenario.config, instance.scenario.device)
    passes, decode = instance.passes, instance.decode_passes(32)[0]
    each = [
        passes.mixed(decode, passes.prefill(1, chunking.tokens, n * chunking.tokens))
        for n in range(chunking.num_passes)
    ]
    # A load of one is a pass with prefill all the time.
    point = candidate._replace(load_fraction=1.0 - 1e-12).point(times)
    return point.tpot.middle_s, [
        one.step_s for one in compose_passes(each, instance.scenario.config, instance.scenario.device)
    ]


@pytest.mark.parametrize("model", ["llama-4-scout", "gemma-2-27b", "llama-3-8b"])
@pytest.mark.parametrize("prompt_len", [5000, 16384, 16900, 65536])
def test_a_pass_that_prefills_takes_the_mean_of_all_of_its_prompt(model: str, prompt_len: int) -> None:
    """Chunks that end between two passes, windows that fill, and neither."""
    found_s, each_s = mixed_s(model, prompt_len)

    assert found_s == pytest.approx(sum(each_s) / len(each_s), rel=0.003)


def test_prompts_across_a_chunk_are_no_cliff() -> None:
    """Where the middle of the prompt enters a new chunk a pass would get faster at once; the mean does not."""
    times_s = [mixed_s("llama-4-scout", prompt_len)[0] for prompt_len in range(16640, 17200, 64)]

    assert all(abs(after / before - 1.0) < 0.01 for before, after in pairwise(times_s))


def test_a_model_without_windows_stays_as_it_is() -> None:
    """There is nothing to spread."""
    config = make_instance("llama-3-8b", 100, 100).scenario.config

    assert spread_windows(config, 100, 100) is config
