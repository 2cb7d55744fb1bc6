"""Aggregated serving: each instance prefills and decodes, in continuous batches with chunked prefill.

Legend: B sequences that a pass decodes, q prompt tokens of a mixed pass, P tokens of a prompt that are not cached yet,
O answer length, E tokens that a decode pass adds to a sequence (1 without speculation), T_d time of a decode pass, T_m
of a mixed pass, which also prefills.

    prefill passes of a request               n = ceil(P / q), or 1 / r if r whole prompts share a pass
    share of mixed passes                     f = B n E / (O - 1): sequences end as fast as others are prefilled
    mean pass                                 T = (1 - f) T_d + f T_m
    time per further token                    T / E
    time to first token                       S + f S / (2 (1 - f)) with S = max(n, 1) T_m: a queue with random arrivals
    requests per second                       B E / ((O - 1) T) for each replica and pipeline stage

Assumes: the batch is always full (a closed loop) and all lengths are equal; decode passes are priced in the middle of
the answer, with windows at their mean over it (serving.passes), and mixed passes at the mean of all passes of a prompt,
after a cached prefix; each sequence holds a copy of its prefix; one prompt at a time unless r of them fit; scheduling
and sampling on the host overlap with the device. Pipelines keep every stage busy with a batch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from shapewright.optimize.serving.passes import PrefillSizes, contexts_of_passes
from shapewright.optimize.serving.point import OperatingPoint, Span, batch_sizes, mean_span, span_of, waiting_s

if TYPE_CHECKING:
    from shapewright.optimize.serving.passes import Pass
    from shapewright.optimize.serving.point import Instance
    from shapewright.prediction.composition.step import StepTimes

MOST_LOAD_FRACTION = 0.8
"""Largest used share of the prefill capacity, by judgment: at 0.8 the mean wait is twice the service time, and it grows
without bound towards 1."""

_MOST_PASS_TOKENS = 16384
_CHUNK_TOKENS = (512, 2048, 8192, _MOST_PASS_TOKENS)
"""Prompt tokens of one pass; vLLM's default is 2048 to 8192 by device (its max_num_batched_tokens). The largest is the
limit of whole prompts that share a pass, so a prompt of 8,200 tokens is not cut while two of 8,100 share a pass."""
_PROMPTS = (2, 4, 16, 64)
"""Whole prompts that share a pass."""


class PrefillChunking(NamedTuple):
    """How prompts are divided over passes: one in several chunks, or several whole ones in a pass.

    Attributes:
        prompts: Whole prompts that share a pass; 1 if a prompt is cut.
        tokens: Tokens of each prompt in a pass.
        num_passes: Passes of one prompt.
        context_len: Mean number of its tokens in the cache before a pass.
    """

    prompts: int
    tokens: int
    num_passes: int
    context_len: int


def list_chunkings(prompt_len: int, cached_len: int = 0) -> list[PrefillChunking]:
    """Return the ways to cut a prompt into chunks, or to prefill several whole prompts in one pass.

    Args:
        prompt_len: Tokens of a prompt that are not in the cache.
        cached_len: Tokens before them that are in the cache.

    >>> [(chunking.prompts, chunking.tokens, chunking.num_passes) for chunking in list_chunkings(4000)]
    [(1, 500, 8), (1, 2000, 2), (1, 4000, 1), (2, 4000, 1), (4, 4000, 1)]
    """
    found = {}
    for chunk in _CHUNK_TOKENS:
        count = ceil(prompt_len / min(chunk, prompt_len))
        tokens = ceil(prompt_len / count)
        found[count] = PrefillChunking(1, tokens, count, cached_len + (count - 1) * tokens // 2)
    chunkings = sorted(found.values(), key=lambda chunking: chunking.tokens)
    fitting = (prompts for prompts in _PROMPTS if prompts * prompt_len <= _MOST_PASS_TOKENS)
    return [*chunkings, *(PrefillChunking(prompts, prompt_len, 1, cached_len) for prompts in fitting)]


class AggregatedCandidate(NamedTuple):
    """An instance with a batch and a chunking of prompts, before its passes are priced."""

    instance: Instance
    batch_size: int
    chunking: PrefillChunking
    load_fraction: float

    def passes(self) -> tuple[Pass, ...]:
        """Return a plain decode pass, the decode pass that runs (it may verify drafts), and mixed passes to average."""
        passes = self.instance.passes
        plain, decode = self.instance.decode_passes(self.batch_size)
        return plain, decode, *(passes.mixed(decode, passes.prefill(*sizes)) for sizes in self.prefills())

    def prefills(self) -> list[PrefillSizes]:
        """Return the sizes of the prefill passes that the mixed passes contain."""
        config, (prompts, tokens, num_passes, context_len) = self.instance.scenario.config, self.chunking
        contexts = contexts_of_passes(config, context_len, tokens, num_passes)
        return [PrefillSizes(prompts, tokens, each) for each in contexts]

    def point(self, times: Sequence[StepTimes]) -> OperatingPoint:
        """Return the operating point, given the times of the passes."""
        instance, request, chunking, load = self.instance, self.instance.request, self.chunking, self.load_fraction
        plain, decode, *mixed_spans = (span_of(time) for time in times)
        mixed = mean_span(mixed_spans)
        if request.speculation:
            draft = plain.scaled(request.speculation.draft_s(1.0))
            # The draft reads the prompts as well: its share of what a mixed pass takes beyond a decode pass.
            prefill = mixed.plus(decode.scaled(-1.0))
            mixed = mixed.plus(draft).plus(prefill.scaled(request.draft_memory_fraction))
            decode = decode.plus(draft)
        mean = decode.scaled(1.0 - load).plus(mixed.scaled(load))
        service = mixed.scaled(chunking.num_passes)
        ttft = Span(*(end + waiting_s(end, load) for end in (service.middle_s, service.low_s, service.high_s)))
        per_stream = self.batch_size * request.tokens_per_pass / ((request.output_len - 1) * mean.middle_s)
        return OperatingPoint(
            mode="aggregated",
            format=instance.format,
            layout=instance.layout,
            batch_size=self.batch_size,
            num_sequences=self.batch_size * instance.num_streams,
            prefill_tokens=chunking.prompts * chunking.tokens,
            prefill_load_fraction=load,
            prompt_cost_fraction=max(1.0 - decode.middle_s / mean.middle_s, 0.0),
            ttft=ttft,
            tpot=mean.scaled(1.0 / request.tokens_per_pass),
            requests_per_s=per_stream * instance.num_streams,
            output_len=request.output_len,
        )


def aggregated_candidates(instance: Instance) -> Iterator[AggregatedCandidate]:
    """Yield batches with chunkings that fit in memory and do not exceed MOST_LOAD_FRACTION."""
    request = instance.request
    chunkings = list_chunkings(request.new_len, request.cached_len)
    # Share of mixed passes per sequence of the batch: f = B * passes_per_sequence.
    passes_per_sequence = [
        each.num_passes / each.prompts * request.tokens_per_pass / (request.output_len - 1) for each in chunkings
    ]
    most = [int(MOST_LOAD_FRACTION / passes) for passes in passes_per_sequence]
    most = _limit_to_memory(most, instance, chunkings, [0] * len(chunkings))
    # The decoding tokens of the largest batch need activations in the mixed pass too.
    most = _limit_to_memory(most, instance, chunkings, [max(batch, 0) * request.query_len for batch in most])
    for chunking, passes, largest in zip(chunkings, passes_per_sequence, most, strict=True):
        for batch_size in batch_sizes(largest):
            if batch_size < chunking.prompts:
                continue  # no more prompts arrive together than sequences decode
            yield AggregatedCandidate(instance, batch_size, chunking, batch_size * passes)


def _limit_to_memory(
    most: Sequence[int], instance: Instance, chunkings: Sequence[PrefillChunking], decoding_tokens: Sequence[int]
) -> list[int]:
    """Return the largest batch of each chunking that fits beside the prompts, below 1 if none does."""
    tokens = [each.prompts * each.tokens + more for each, more in zip(chunkings, decoding_tokens, strict=True)]
    held, stages = instance.list_most_sequences(tokens), instance.layout.pipeline_parallel
    fitting = [each // stages - chunking.prompts for each, chunking in zip(held, chunkings, strict=True)]
    return list(map(min, most, fitting))
