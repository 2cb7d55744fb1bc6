"""Requests, times of passes, limits and working memory of a simulated stream: lists, or arrays if it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Reals = list[float] | np.ndarray
    Counts = list[int] | np.ndarray


class Requests(NamedTuple):
    """Requests of one stream, in order of arrival.

    Attributes:
        ready_s: Times of arrival. [s], [requests]
        prompt_len: Tokens of each prompt. [requests]
        output_len: Tokens of each answer. [requests]
        sent_len: Tokens of each whose cache a prefill instance has sent; 0 for none. [requests]
        prefix: Index of the shared prefix of each, -1 for none. [requests]
        prefix_len: Tokens of the shared prefix. [requests]
    """

    ready_s: Reals
    prompt_len: Counts
    output_len: Counts
    sent_len: Counts
    prefix: Counts
    prefix_len: Counts


class PassTable(NamedTuple):
    """Times of passes on a grid, see traffic.pass_table; cores are attention cores.

    Attributes:
        decode_s: Decode pass without attention cores. [s], [sequences]
        decode_core_s: Cores of decoding sequences by batch and mean context. [s], [batch cells * context cells]
        tokens_s: Pass over prompt tokens and decoding sequences, without cores. [s], [tokens of a pass]
        prompt_core_s: Cores of prompt tokens, with their images, by their number and the mean tokens that they attend
            to. [s], [token cells * context cells]
        num_contexts: Grid points of contexts.
        batch_cell: Grid point below each number of sequences. [sequences]
        batch_fraction: Fraction of the distance to the next grid point. [sequences]
        context_cell: Grid point below each context. [contexts]
        context_fraction: Fraction of the distance to the next grid point. [contexts]
        token_cell: Grid point below each number of prompt tokens. [tokens of a pass]
        token_fraction: Fraction of the distance to the next grid point. [tokens of a pass]
        most_graph_sequences: Sequences of the largest decode pass that runs as a CUDA graph.
        decode_launch_s: Time that the host needs to launch a decode pass without a CUDA graph. [s]
        prefill_launch_s: The same for a prefill pass. [s]
        mixed_launch_s: The same for a mixed pass. [s]
        host_s: Time that the host adds to every pass. [s]
        host_per_sequence_s: The same for each decoding sequence. [s]
        prefill_host_s: The same for a pass with prompt tokens, besides host_s. [s]
    """

    decode_s: Reals
    decode_core_s: Reals
    tokens_s: Reals
    prompt_core_s: Reals
    num_contexts: int
    batch_cell: Counts
    batch_fraction: Reals
    context_cell: Counts
    context_fraction: Reals
    token_cell: Counts
    token_fraction: Reals
    most_graph_sequences: int = 0
    decode_launch_s: float = 0.0
    prefill_launch_s: float = 0.0
    mixed_launch_s: float = 0.0
    host_s: float = 0.0
    host_per_sequence_s: float = 0.0
    prefill_host_s: float = 0.0


class Limits(NamedTuple):
    """Limits of the scheduler of one stream.

    Attributes:
        max_sequences: Sequences that run at once.
        max_tokens: Tokens of one pass.
        block_tokens: Tokens of a cache block.
        num_blocks: Blocks of the cache.
        is_chunked: Whether prompts may be cut into chunks (chunked prefill).
        is_mixed: Whether prompts share passes with decoding sequences.
        reserves_answers: Whether a request starts only if its whole answer fits, so that none is preempted.
        keeps_preempted: Whether the blocks of a preempted sequence stay in the cache until they are needed.
        num_replicas: Replicas that run their passes in step; sequences and tokens are limits of each, blocks of all.
    """

    max_sequences: int
    max_tokens: int
    block_tokens: int
    num_blocks: int
    is_chunked: bool = True
    is_mixed: bool = True
    reserves_answers: bool = False
    keeps_preempted: bool = False
    num_replicas: int = 1


class Log(NamedTuple):
    """Times and counts of each request; -1 or 0 before the simulation.

    Attributes:
        admitted_s: When each first entered the batch. [s], [requests]
        first_s: When its first token was done. [s], [requests]
        end_s: When its last token was done. [s], [requests]
        emitted: Tokens of its answer so far. [requests]
        preempted: How often it was preempted. [requests]
        hit_len: Prompt tokens that were in the cache. [requests]
    """

    admitted_s: Reals
    first_s: Reals
    end_s: Reals
    emitted: Counts
    preempted: Counts
    hit_len: Counts


class Work(NamedTuple):
    """Working memory of the simulation, zeros before it; lists have n + 1 entries for n requests or prefixes.

    ``before`` and ``after`` are a circular linked list of the running sequences, ``older`` and ``newer`` one of the
    unused prefixes; the last entry of each is the sentinel.

    Attributes:
        before: Running sequence that entered before each. [requests + 1]
        after: Running sequence that entered after each. [requests + 1]
        start_step: Decode step at which each began to decode. [requests + 1]
        end_step: Decode step at which each ends; 0 or -1 if it does not decode. [requests + 1]
        base_len: Tokens of each when it began to decode, or that it prefills. [requests + 1]
        shared: Blocks of each that belong to its shared prefix. [requests + 1]
        filled: Sequences whose prompt is completed in this pass, as a list. [requests + 1]
        kept: Blocks that each preempted sequence still has in the cache. [requests + 1]
        computed: Tokens computed so far of each prompt that is cut. [requests + 1]
        older: Unused prefix that was released before each. [prefixes + 1]
        newer: Unused prefix that was released after each. [prefixes + 1]
        users: Running sequences that use each prefix. [prefixes + 1]
        resident: Blocks of each prefix in the cache. [prefixes + 1]
        growing: Decoding sequences that take a new block, by decode step modulo block size. [block tokens]
        cut: Sequences whose prompt is only partly computed, as a list. [replicas]
    """

    before: Counts
    after: Counts
    start_step: Counts
    end_step: Counts
    base_len: Counts
    shared: Counts
    filled: Counts
    kept: Counts
    computed: Counts
    older: Counts
    newer: Counts
    users: Counts
    resident: Counts
    growing: Counts
    cut: Counts


class Totals(NamedTuple):
    """Sums over a simulation.

    Attributes:
        num_passes: Passes.
        busy_s: Time of all passes. [s]
        cache_block_s: Blocks in use, integrated over time. [block s]
        most_blocks: Most blocks in use.
        prefill_tokens: Prompt tokens that were computed, those recomputed after a preemption included.
        decode_tokens: Tokens that decode passes added.
        free_blocks: Free blocks at the end, those of unused prefixes included.
    """

    num_passes: int
    busy_s: float
    cache_block_s: float
    most_blocks: int
    prefill_tokens: int
    decode_tokens: int
    free_blocks: int
