"""An instance of a server: the memory of its devices, the sequences that it holds, and its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor
from typing import TYPE_CHECKING

from shapewright.memory import estimate_stages
from shapewright.optimize.serving.passes import Passes

if TYPE_CHECKING:
    from shapewright.memory import MemoryEstimate
    from shapewright.optimize.serving.passes import Pass
    from shapewright.optimize.serving.request import ServingFormat, ServingRequest
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload import ParallelLayout, Workload


@dataclass(frozen=True)
class Instance:
    """One copy of a model on its devices, in one format.

    Attributes:
        scenario: Model, device, layout, and any inference workload; its formats are replaced.
        format: Element formats.
        request: Lengths and limits.
    """

    scenario: Scenario
    format: ServingFormat
    request: ServingRequest

    @cached_property
    def layout(self) -> ParallelLayout:
        """Layout of the model."""
        return self.scenario.layout

    @cached_property
    def base(self) -> Workload:
        """The workload in the formats of the instance."""
        return replace(
            self.scenario.workload,
            phase="decode",
            dtype=self.format.dtype,
            weight_dtype=self.format.weight_dtype,
            kv_cache_dtype=self.format.kv_cache_dtype,
            kv_block_tokens=self.request.block_tokens,
        )

    @cached_property
    def passes(self) -> Passes:
        """The passes of the instance, lowered when first used."""
        return Passes(self.scenario.replace(workload=self.base))

    def decode_passes(self, batch_size: int) -> tuple[Pass, Pass]:
        """Return a plain decode pass in the middle of the answers, and the one that runs (it may verify drafts)."""
        request = self.request
        context_len, answer_len = request.prompt_len + request.output_len // 2, request.output_len
        plain = self.passes.decode(batch_size, context_len, answer_len=answer_len)
        if not request.speculation:
            return plain, plain
        return plain, self.passes.decode(batch_size, context_len, request.query_len, answer_len=answer_len)

    @property
    def num_streams(self) -> int:
        """Batches that are processed at once: one per replica and pipeline stage."""
        return self.layout.data_parallel * self.layout.pipeline_parallel

    def stage_estimates(self, num_tokens: int) -> tuple[MemoryEstimate, ...]:
        """Return the memory of each stage in a pass over some tokens; its cache is not that of the server. [byte]"""
        workload = replace(self.base, phase="prefill", micro_batch_size=1, seq_len=num_tokens, context_len=0)
        return estimate_stages(self.scenario.config, workload, self.layout)

    def cache_bytes(self, num_tokens: int) -> tuple[float, ...]:
        """Return the cache of one sequence on one device of each stage. [byte]"""
        workload = replace(self.base, micro_batch_size=1, context_len=num_tokens - 1)
        return tuple(stage.kv_cache_bytes for stage in estimate_stages(self.scenario.config, workload, self.layout))

    def free_bytes(self, num_tokens: int) -> tuple[float, ...]:
        """Return the memory left for the cache on one device of each stage in a pass over some tokens. [byte]"""
        budget_bytes = self.request.memory_fraction * self.scenario.device.memory_bytes
        return tuple(
            budget_bytes - (stage.total_bytes - stage.kv_cache_bytes) for stage in self.stage_estimates(num_tokens)
        )

    def most_sequences(self, num_tokens: int, length: int | None = None) -> int:
        """Return the sequences of a length that one replica holds beside a pass over some tokens.

        Args:
            num_tokens: Tokens of the largest pass.
            length: Tokens of each sequence; by default prompt and answer.
        """
        cache = self.cache_bytes(length or self.request.total_len)
        return max(
            0, min(floor(free / each) for free, each in zip(self.free_bytes(num_tokens), cache, strict=True) if each)
        )

    def cache_tokens(self, num_tokens: int) -> int:
        """Return the tokens that the caches of the instance hold, in sequences of prompt and answer."""
        length = self.request.total_len
        shares = (
            free / each
            for free, each in zip(self.free_bytes(num_tokens), self.cache_bytes(length), strict=True)
            if each
        )
        return max(0, floor(min(shares) * length)) * self.layout.data_parallel


def batch_sizes(most: int) -> Sequence[int]:
    """Return the batch sizes to try: 1, 2, 3, 4, 6, 8, 12, ... and the largest.

    >>> batch_sizes(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    sizes = {most}
    power = 1
    while power <= most:
        sizes |= {power, power + power // 2}
        power *= 2
    return sorted(size for size in sizes if 0 < size <= most)
