"""An instance of a server: how many sequences its memory holds, and what its passes take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor
from typing import TYPE_CHECKING

from shapewright.memory import estimate_stages
from shapewright.serving.passes import Passes

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.memory import MemoryEstimate
    from shapewright.serving.passes import Pass
    from shapewright.serving.request import ServingFormat, ServingRequest
    from shapewright.workload import Workload


@dataclass(frozen=True)
class Instance:
    """One copy of a model on its devices, in one format.

    Attributes:
        config: The model.
        device: What it runs on.
        workload: Any inference workload; its formats are replaced.
        layout: How the model is spread.
        format: Element formats.
        request: Lengths and limits.
    """

    config: TransformerConfig
    device: Device
    workload: Workload
    layout: ParallelLayout
    format: ServingFormat
    request: ServingRequest

    @cached_property
    def base(self) -> Workload:
        """The workload in this instance's formats."""
        return replace(
            self.workload,
            phase="decode",
            dtype=self.format.dtype,
            weight_dtype=self.format.weight_dtype,
            kv_cache_dtype=self.format.kv_cache_dtype,
            kv_block_tokens=self.request.block_tokens,
        )

    @cached_property
    def passes(self) -> Passes:
        """Maker of its passes."""
        return Passes(self.config, self.device, self.base, self.layout)

    def decode_passes(self, batch_size: int) -> tuple[Pass, Pass]:
        """A plain decode pass in the middle of the answers, and the one that runs, which may verify proposals."""
        request = self.request
        context_len, answer_len = request.prompt_len + request.output_len // 2, request.output_len
        plain = self.passes.decode(batch_size, context_len, answer_len=answer_len)
        if not request.speculation:
            return plain, plain
        return plain, self.passes.decode(batch_size, context_len, request.query_len, answer_len=answer_len)

    @property
    def num_streams(self) -> int:
        """Batches that are under way at once: one per replica and pipeline stage."""
        return self.layout.data_parallel * self.layout.pipeline_parallel

    def stage_estimates(self, num_tokens: int) -> tuple[MemoryEstimate, ...]:
        """Memory of each stage in a pass over some tokens; the cache in it is not that of the server. [byte]"""
        workload = replace(self.base, phase="prefill", micro_batch_size=1, seq_len=num_tokens, context_len=0)
        return estimate_stages(self.config, workload, self.layout)

    def cache_bytes(self, num_tokens: int) -> tuple[float, ...]:
        """Cache of one sequence on one device of each stage. [byte]"""
        workload = replace(self.base, micro_batch_size=1, context_len=num_tokens - 1)
        return tuple(stage.kv_cache_bytes for stage in estimate_stages(self.config, workload, self.layout))

    def free_bytes(self, num_tokens: int) -> tuple[float, ...]:
        """What weights and a pass over some tokens leave for the cache on one device of each stage. [byte]"""
        budget_bytes = self.request.memory_fraction * self.device.memory_bytes
        return tuple(
            budget_bytes - (stage.total_bytes - stage.kv_cache_bytes) for stage in self.stage_estimates(num_tokens)
        )

    def most_sequences(self, num_tokens: int, length: int | None = None) -> int:
        """Sequences of a length that one replica holds beside a pass over some tokens; 0 if none.

        Args:
            num_tokens: Tokens of the largest pass.
            length: Tokens of each sequence; by default prompt and answer.
        """
        cache = self.cache_bytes(length or self.request.total_len)
        return max(
            0, min(floor(free / each) for free, each in zip(self.free_bytes(num_tokens), cache, strict=True) if each)
        )

    def cache_tokens(self, num_tokens: int) -> int:
        """Tokens, of sequences as long as prompt and answer, that the caches of an instance hold."""
        length = self.request.total_len
        shares = (
            free / each
            for free, each in zip(self.free_bytes(num_tokens), self.cache_bytes(length), strict=True)
            if each
        )
        return max(0, floor(min(shares) * length)) * self.layout.data_parallel


def batch_sizes(most: int) -> Sequence[int]:
    """Batches to look at: 1, 2, 3, 4, 6, 8, 12, ... and the largest.

    >>> batch_sizes(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    sizes = {most}
    power = 1
    while power <= most:
        sizes |= {power, power + power // 2}
        power *= 2
    return sorted(size for size in sizes if 0 < size <= most)
