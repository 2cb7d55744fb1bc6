"""Passes of a server as lowered operations: decode, prefill, and both in one pass.

A mixed pass (chunked prefill, arXiv 2308.16369) multiplies the tokens of decode and prefill with the weights together;
only the attention core runs for each separately.

Images of prompts run through the vision tower before their tokens. A pass with a part of a prompt takes that part of
the time of its images, though an engine runs an image as a whole: the mean over the passes of a prompt is the same.

Attention windows: the sequences of a batch are at different positions of their answers, so each layer is priced with
the mean number of tokens that they attend to. With chunked attention, a batch whose sequences are all in the middle of
their answers would attend to a whole chunk or to almost nothing, depending on a few tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.images import of_tower
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.rows import OperationRows
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.workload.images import tower_job

if TYPE_CHECKING:
    from shapewright.core.numeric import Count
    from shapewright.lowering.operations.operation import Operation
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.serving.adapters import Adapters
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_MOST_PASSES = 11
"""Most passes of a prompt that are priced. It is odd so that they do not all fall on the same position of a chunk: the
tokens of chunks and of passes are powers of two."""
_NARROW_BITS = 8


def spread_windows(config: TransformerConfig, context_len: int, num_contexts: int) -> TransformerConfig:
    """Return the model with each window as long as the mean number of tokens that decode passes attend to in it.

    Layers without a window need no change if the model is lowered with the middle context.

    Args:
        context_len: Tokens in the cache before the first of the passes.
        num_contexts: Passes, each with one more token in the cache.
    """
    if num_contexts == 1 or not any(config.attention_windows):
        return config
    is_chunked = config.attention_window_kind == "chunked"
    seen = {
        window: mean_seen(window, context_len, num_contexts, is_chunked=is_chunked)
        for window in set(config.attention_windows)
        if window
    }
    windows = tuple(seen.get(window, 0) for window in config.attention_windows)
    return replace(config, attention_windows=windows, attention_window_kind="sliding")


def contexts_of_passes(config: TransformerConfig, mean_context: int, tokens: int, num_passes: int) -> tuple[int, ...]:
    """Return the cached tokens before a few passes whose mean time is that of all passes of a prompt.

    The time of layers without a window grows linearly from pass to pass, so the pass in the middle is the mean; with
    sliding windows it is within 0.2 % (Gemma 2). With chunked attention, several passes are taken, evenly spaced over
    the prompt.

    Args:
        mean_context: Mean number of tokens in the cache before a pass.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> chunks = {"attention_windows": (32, 0), "attention_window_kind": "chunked"}
    >>> model = TransformerConfig(hidden_size=64, num_layers=2, num_heads=4, vocab_size=100, **chunks)
    >>> contexts_of_passes(model, 16, 16, 3)
    (0, 16, 32)
    """
    if not any(config.attention_windows) or config.attention_window_kind != "chunked":
        return (mean_context,)
    first = mean_context - (num_passes - 1) * tokens // 2
    count = min(num_passes, _MOST_PASSES)
    return tuple(first + (2 * index + 1) * num_passes // (2 * count) * tokens for index in range(count))


def mean_seen(window: int, context_len: int, num_contexts: int, *, is_chunked: bool) -> int:
    """Return the mean number of tokens that one new token attends to over contexts, itself included, rounded up.

    Args:
        window: Its window, above 0.
        context_len: Tokens in the cache before the first pass.
        num_contexts: Passes, each with one more token in the cache.
        is_chunked: Whether tokens see their own chunk only; otherwise the window slides.

    >>> mean_seen(4, 2, 4, is_chunked=True), mean_seen(4, 2, 4, is_chunked=False)  # 3 4 1 2 and 3 4 4 4
    (3, 4)
    """
    last = context_len + num_contexts
    total = _sum_seen(window, last, is_chunked=is_chunked) - _sum_seen(window, context_len, is_chunked=is_chunked)
    return -(-total // num_contexts)


def _sum_seen(window: int, num_tokens: int, *, is_chunked: bool) -> int:
    """Return the attended tokens summed over a sequence: 1 + 2 + ... + window, then window for each further token."""
    num_chunks, rest = divmod(num_tokens, window)
    triangle = window * (window + 1) // 2
    if is_chunked:
        return num_chunks * triangle + rest * (rest + 1) // 2
    return triangle + (num_tokens - window) * window if num_chunks else rest * (rest + 1) // 2


# Roles of an attention block whose sizes depend on more than the number of tokens: the scores of a sequence, and the
# latents of MLA, which are expanded in prefill and absorbed in decode.
_CORE_ROLES = frozenset(
    ("fused", "score", "mask", "softmax", "over_value", "repeat_kv", "kv_b", "absorb_q", "absorb_out")
)


Part = tuple[OperationRows, int]
"""Operations with a row for each of several passes, and the row of one pass."""


class PrefillSizes(NamedTuple):
    """Sizes of a prefill pass; see Passes.prefill."""

    batch_size: int
    num_tokens: int
    context_len: int


class Pass(NamedTuple):
    """Operations of one device in one pass of a server.

    Attributes:
        parts: The operations, in order: each part is a row of operations that several passes share.
        workload: Workload that they were lowered from.
        layout: Layout of the model.
        key: Kind and sizes; passes of one instance with equal keys are equal.
        num_decoding: Sequences that decode in it.
        tower: Pass of the vision tower over some images; None without images.
        tower_share: Part of that pass that belongs to this one.
    """

    parts: tuple[Part, ...]
    workload: Workload
    layout: ParallelLayout
    key: tuple[object, ...]
    num_decoding: int = 0
    tower: Pass | None = None
    tower_share: float = 0.0

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations, one by one."""
        return tuple(operation for rows, row in self.parts for operation in rows.row(row))

    @property
    def num_kernels(self) -> int:
        """Executions of all operations."""
        return sum(rows.num_kernels for rows, _ in self.parts)

    def parts_where(self, is_wanted: Callable[[Operation], bool]) -> tuple[Part, ...]:
        """Return the parts with some of the operations alone."""
        return tuple((rows.where(is_wanted), row) for rows, row in self.parts)


class Passes:
    """The passes of one model on one layout, lowered when first used.

    Args:
        scenario: Model, device and layout, and a workload with formats and kind of attention.
        adapters: LoRA adapters; None without.
        gathers_experts: Whether devices that share experts gather each other's tokens, see gather_experts.
        gemm_library: Library that runs the GEMMs in 8 and 4 bits, see name_library; empty for none by name.
        images_per_token: Images of a prompt over its new tokens.
    """

    def __init__(
        self,
        scenario: Scenario,
        adapters: Adapters | None = None,
        *,
        gathers_experts: bool = False,
        gemm_library: str = "",
        images_per_token: float = 0.0,
    ) -> None:
        self._adapters, self._gathers_experts = adapters, gathers_experts
        self._gemm_library = gemm_library
        self._config, self._node_size = scenario.config, scenario.device.node_size
        self._layout, self._images_per_token = scenario.layout, images_per_token
        # To the language model, tokens of images are tokens of the prompt like others.
        self._text_config = replace(self._config, vision=None) if self._config.vision else self._config
        self._workload = replace(scenario.workload, images=0)
        self._prefill = replace(self._workload, phase="prefill", micro_batch_size=1, seq_len=1, context_len=0)
        self._lowered: dict[tuple[object, ...], Pass] = {}
        self._token_operations: dict[int, Part] = {}
        self._spread_configs: dict[tuple[int, int], TransformerConfig] = {}

    def lower_decode_passes(
        self, batch_sizes: Collection[int], context_len: int, query_lens: Collection[int], answer_len: int
    ) -> None:
        """Lower decode passes with several numbers of sequences at once, with arrays for sizes; see decode.

        Args:
            batch_sizes: Sequences of each pass.
            context_len: Tokens that each sequence has in the cache.
            query_lens: New tokens of each sequence; a pass of each.
            answer_len: Tokens of an answer.
        """
        for query_len in query_lens:
            keys = {each: ("decode", each, context_len, query_len, answer_len) for each in batch_sizes}
            new = [each for each, key in keys.items() if key not in self._lowered]
            if not new:
                continue
            spread_config = self._spread(context_len - answer_len // 2, answer_len)
            base = replace(self._workload, phase="decode", context_len=context_len)
            workload = base.resized(micro_batch_size=np.array(new) * query_len)
            rows = self._decode_rows(workload, spread_config, query_len, len(new))
            for row, batch_size in enumerate(new):
                own = base.resized(micro_batch_size=batch_size * query_len)
                self._add_decode(keys[batch_size], own, (rows, row), batch_size)

    def lower_token_operations(self, num_tokens: Collection[int]) -> None:
        """Lower at once, with arrays for sizes, the operations of mixed passes that depend on their tokens alone.

        Args:
            num_tokens: New tokens of each pass, decoding ones included.
        """
        if self._adapters or not _depends_on_tokens_alone(self._config):
            return
        new = [each for each in dict.fromkeys(num_tokens) if each not in self._token_operations]
        if not new:
            return
        workload = self._prefill_workload(np.array(new), 1, 0)
        rows = OperationRows(self._lower(workload), len(new)).where(_is_token_operation)
        self._token_operations.update((tokens, (rows, row)) for row, tokens in enumerate(new))

    def decode(self, batch_size: int, context_len: int, query_len: int = 1, *, answer_len: int = 1) -> Pass:
        """Return a pass over ``query_len`` new tokens of each sequence; more than one verifies draft tokens.

        Unfused attention has no kernel for few queries against a long cache: then each new token counts as a sequence.

        Args:
            context_len: Tokens that each has in the cache, in the middle of its answer.
            answer_len: Tokens of an answer, over which the sequences are distributed; affects layers with windows.
        """
        key = ("decode", batch_size, context_len, query_len, answer_len)
        if key not in self._lowered:
            workload = replace(
                self._workload, phase="decode", micro_batch_size=batch_size * query_len, context_len=context_len
            )
            spread_config = self._spread(context_len - answer_len // 2, answer_len)
            self._add_decode(key, workload, (self._decode_rows(workload, spread_config, query_len), 0), batch_size)
        return self._lowered[key]

    def _decode_rows(
        self, workload: Workload, spread_config: TransformerConfig, query_len: int, num_rows: int = 1
    ) -> OperationRows:
        operations = self._lower(workload, spread_config)
        if query_len > 1:
            operations = tuple(_share_cache(operation, query_len) for operation in operations)
        return OperationRows(operations, num_rows)

    def _add_decode(self, key: tuple[object, ...], workload: Workload, part: Part, batch_size: int) -> None:
        self._lowered[key] = Pass((self._add_adapters(part, batch_size),), workload, self._layout, key, batch_size)

    def prefill(
        self, batch_size: int, num_tokens: int, context_len: int = 0, *, num_sequences: int | None = None
    ) -> Pass:
        """Return a pass over ``num_tokens`` of each of some prompts, after ``context_len`` cached tokens.

        Args:
            context_len: Tokens that each has in the cache.
            num_sequences: Sequences whose adapters are used; by default the prompts.
        """
        sequences = batch_size if num_sequences is None or self._adapters is None else num_sequences
        key = ("prefill", batch_size, num_tokens, context_len, sequences)
        if key not in self._lowered:
            workload = self._prefill_workload(batch_size, num_tokens, context_len)
            self._add_prefill(key, workload, (OperationRows(self._lower(workload)), 0), sequences)
        return self._lowered[key]

    def lower_prefill_passes(self, sizes: Collection[PrefillSizes]) -> None:
        """Lower prefill passes with several sizes at once, with arrays for sizes; see prefill.

        Passes whose kinds of operations depend on the length (windows, unfused attention) are lowered one by one.
        """
        depends_on_length = any(self._config.attention_windows) or self._workload.attention == "unfused"
        if depends_on_length or not _depends_on_tokens_alone(self._config):
            return
        keys = {each: ("prefill", *each, each.batch_size) for each in sizes}
        new = [each for each, key in keys.items() if key not in self._lowered]
        if not new:
            return
        rows = OperationRows(self._lower(self._prefill_workload(*np.array(new).T)), len(new))
        for row, each in enumerate(new):
            self._add_prefill(keys[each], self._prefill_workload(*each), (rows, row), each.batch_size)

    def _prefill_workload(self, batch_size: Count, num_tokens: Count, context_len: Count) -> Workload:
        return self._prefill.resized(micro_batch_size=batch_size, seq_len=num_tokens, context_len=context_len)

    def _add_prefill(self, key: tuple[object, ...], workload: Workload, part: Part, num_sequences: int) -> None:
        tower, share = self._tower(self._images_per_token * workload.micro_batch_size * workload.seq_len)
        parts = (self._add_adapters(part, num_sequences),)
        self._lowered[key] = Pass(parts, workload, self._layout, key, tower=tower, tower_share=share)

    def _tower(self, num_images: float) -> tuple[Pass | None, float]:
        """Return a pass of the vision tower over as many images or the next whole number, and the share of it."""
        if not num_images:
            return None, 0.0
        whole = ceil(num_images)
        key = ("tower", whole)
        if key not in self._lowered:
            workload = replace(self._workload, phase="prefill", micro_batch_size=1, images=whole)
            operations = lower(*tower_job(self._config, workload, self._layout), node_size=self._node_size)
            rows = OperationRows(tuple(of_tower(operations)))
            self._lowered[key] = Pass(((rows, 0),), workload, self._layout, key)
        return self._lowered[key], num_images / whole

    def mixed(self, decode: Pass, prefill: Pass) -> Pass:
        """Return a decode and a prefill pass in one: weights are read once, attention cores run one after the other.

        Only decoding sequences compute logits; those of prompts that end in the pass, a few rows, are left out.
        """
        prompts = prefill.workload.micro_batch_size
        new_tokens = decode.workload.micro_batch_size
        num_tokens = new_tokens + prompts * prefill.workload.seq_len
        if num_tokens in self._token_operations:
            token_parts: tuple[Part, ...] = (self._token_operations[num_tokens],)
        else:
            together = self.prefill(1, num_tokens, num_sequences=decode.num_decoding + prompts)
            token_parts = together.parts_where(_is_token_operation)
        parts = (*token_parts, *(part for each in (decode, prefill) for part in each.parts_where(is_core)))
        key = ("mixed", decode.key, prefill.key)
        logits = decode.parts_where(_is_logits)
        both = Pass((*parts, *logits), prefill.workload, self._layout, key, decode.num_decoding)
        return both._replace(tower=prefill.tower, tower_share=prefill.tower_share)

    def _spread(self, context_len: int, num_contexts: int) -> TransformerConfig:
        key = (context_len, num_contexts)
        if key not in self._spread_configs:
            self._spread_configs[key] = spread_windows(self._text_config, context_len, num_contexts)
        return self._spread_configs[key]

    def _add_adapters(self, part: Part, num_sequences: int) -> Part:
        if self._adapters is None:
            return part
        rows, row = part
        return OperationRows(self._adapters.add_to(rows.row(row), num_sequences, self._config, self._layout)), 0

    def _lower(self, workload: Workload, config: TransformerConfig | None = None) -> tuple[Operation, ...]:
        operations = lower(config or self._text_config, workload, self._layout, node_size=self._node_size)
        if self._gathers_experts:
            operations = gather_experts(operations, self._config)
        return name_library(operations, self._gemm_library) if self._gemm_library else operations


def name_library(operations: Sequence[Operation], library: str) -> tuple[Operation, ...]:
    """Return the operations with the library that runs GEMMs in 8 and 4 bits, for which each has kernels of its own.

    In 16 bits all call the vendor's.
    """
    return tuple(
        one.changed(library=library) if isinstance(one, Gemm) and get_dtype(one.dtype).bits <= _NARROW_BITS else one
        for one in operations
    )


def gather_experts(operations: Sequence[Operation], config: TransformerConfig) -> tuple[Operation, ...]:
    """Return the operations with all-gathers and reduce-scatters of tokens instead of all-to-all exchanges of rows.

    Each of r devices that share experts gets the tokens of all others, whatever their experts, and the results of all
    devices are summed: r messages for each token, where an exchange sends one for each of its experts.
    """
    return tuple(
        _as_gather(one, config.num_experts_per_token)
        if isinstance(one, Collective) and one.op_name == "alltoall" and one.axis == "expert"
        else one
        for one in operations
    )


def _as_gather(exchange: Collective, experts_per_token: int) -> Collective:
    op_name = "all_gather" if exchange.role == "dispatch" else "reduce_scatter"
    message_bytes = exchange.message_bytes * exchange.num_ranks / experts_per_token
    return exchange.changed(op_name=op_name, message_bytes=message_bytes, crossing_fraction=1.0)


def _depends_on_tokens_alone(config: TransformerConfig) -> bool:
    """Return whether operations outside the cores depend on the number of tokens, not on how sequences divide them.

    Learned position tables are read by position, and indexers and captions belong to a sequence.
    """
    return config.position_embedding != "learned" and not (
        config.index_topk or config.compressed_layers or config.num_caption_tokens or config.attends_to_images
    )


def _is_token_operation(operation: Operation) -> bool:
    """Return whether an operation works on all tokens alike: it is neither a core of sequences nor the logits."""
    return not is_core(operation) and not _is_logits(operation)


def _is_logits(operation: Operation) -> bool:
    return operation.stage == "last"


def is_core(operation: Operation) -> bool:
    """Return whether an operation is part of a core that runs for each sequence: attention, a scan, a convolution."""
    if isinstance(operation, Scan | CausalConv | SparseAttention):
        return True
    return operation.block in ("attention", "cross_attention") and operation.role in _CORE_ROLES


def _share_cache(operation: Operation, query_len: int) -> Operation:
    """Return an operation in which the new tokens of a sequence are queries of one sequence, not sequences each."""
    if not isinstance(operation, Attention | SparseAttention | Scan | CausalConv):
        return operation
    batch_size = operation.batch_size // query_len
    if isinstance(operation, Scan | CausalConv):
        return operation.changed(batch_size=batch_size, seq_len=query_len)
    return operation.changed(batch_size=batch_size, query_len=query_len, kv_len=operation.kv_len + query_len - 1)
