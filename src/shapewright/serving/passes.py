"""Passes of a server: decoding, prefilling, and both in one pass, as operations of the one lowering.

A mixed pass (chunked prefill, arXiv 2308.16369) multiplies its decode and its prefill tokens with the weights together;
only the attention core runs for each on its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shapewright.lowering import lower
from shapewright.operations import Attention
from shapewright.serving.windows import spread_windows

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.operations import Operation
    from shapewright.workload import Workload

# Roles of an attention block whose sizes are not those of the tokens alone: scores of a sequence, and the latents of
# MLA, which prefill expands and decode absorbs.
_CORE_ROLES = frozenset(
    ("fused", "score", "mask", "softmax", "over_value", "repeat_kv", "kv_b", "absorb_q", "absorb_out")
)


class Pass(NamedTuple):
    """What one device runs in one pass of a server.

    Attributes:
        operations: In order.
        workload: What they were lowered from; says how they add up.
        layout: How the model is spread.
    """

    operations: tuple[Operation, ...]
    workload: Workload
    layout: ParallelLayout


class Passes:
    """Makes passes of one model on one layout.

    Args:
        config: The model.
        device: Where it runs.
        workload: Formats and kind of attention.
        layout: How it is spread.
    """

    def __init__(self, config: TransformerConfig, device: Device, workload: Workload, layout: ParallelLayout) -> None:
        self._config, self._node_size = config, device.node_size
        self._workload, self._layout = workload, layout
        self._made: dict[tuple[object, ...], Pass] = {}
        self._spread_configs: dict[tuple[int, int], TransformerConfig] = {}

    def decode(self, batch_size: int, context_len: int, query_len: int = 1, *, answer_len: int = 1) -> Pass:
        """One pass over ``query_len`` new tokens of each sequence; more than one verifies proposals.

        Unfused attention has no kernel for few queries against a long cache: there each new token counts as a sequence.

        Args:
            batch_size: Sequences.
            context_len: Tokens that each has in the cache, in the middle of its answer.
            query_len: New tokens of each.
            answer_len: Tokens of an answer, over which the sequences are spread; matters to layers with windows.
        """
        key = ("decode", batch_size, context_len, query_len, answer_len)
        if key not in self._made:
            workload = replace(
                self._workload, phase="decode", micro_batch_size=batch_size * query_len, context_len=context_len
            )
            spread = self._spread(context_len - answer_len // 2, answer_len)
            operations = lower(spread, workload, self._layout, node_size=self._node_size)
            if query_len > 1:
                operations = tuple(_share_cache(operation, query_len) for operation in operations)
            self._made[key] = Pass(operations, workload, self._layout)
        return self._made[key]

    def prefill(self, batch_size: int, num_tokens: int, context_len: int = 0) -> Pass:
        """One pass over ``num_tokens`` of each of some prompts, behind ``context_len`` tokens that are cached."""
        key = ("prefill", batch_size, num_tokens, context_len)
        if key not in self._made:
            workload = replace(
                self._workload,
                phase="prefill",
                micro_batch_size=batch_size,
                seq_len=num_tokens,
                context_len=context_len,
            )
            self._made[key] = Pass(self._lower(workload), workload, self._layout)
        return self._made[key]

    def mixed(self, decode: Pass, prefill: Pass) -> Pass:
        """A decode pass and a prefill pass in one: weights are read once, attention cores run one after the other.

        Logits are those of the decoding sequences; the few rows of prompts that end are left out.
        """
        prompts = prefill.workload.micro_batch_size
        new_tokens = decode.workload.micro_batch_size
        together = self.prefill(1, new_tokens + prompts * prefill.workload.seq_len)
        operations = [
            *(operation for operation in together.operations if not _is_core(operation) and operation.stage != "last"),
            *(operation for operation in decode.operations if _is_core(operation)),
            *(operation for operation in prefill.operations if _is_core(operation)),
            *(operation for operation in decode.operations if operation.stage == "last"),
        ]
        return Pass(tuple(operations), together.workload, self._layout)

    def _spread(self, context_len: int, num_contexts: int) -> TransformerConfig:
        key = (context_len, num_contexts)
        if key not in self._spread_configs:
            self._spread_configs[key] = spread_windows(self._config, context_len, num_contexts)
        return self._spread_configs[key]

    def _lower(self, workload: Workload) -> tuple[Operation, ...]:
        return lower(self._config, workload, self._layout, node_size=self._node_size)


def _is_core(operation: Operation) -> bool:
    _, found, role = operation.name.partition("attention.")
    return bool(found) and role.partition(".")[0] in _CORE_ROLES


def _share_cache(operation: Operation, query_len: int) -> Operation:
    """Let the new tokens of one sequence read its cache together."""
    if not isinstance(operation, Attention):
        return operation
    batch_size = int(operation.batch_size) // query_len
    return replace(operation, batch_size=batch_size, query_len=query_len, kv_len=operation.kv_len + query_len - 1)
