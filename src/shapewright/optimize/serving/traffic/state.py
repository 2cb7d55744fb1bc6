"""Requests, times, limits and memory of a simulated stream: lists, or arrays where the loop is compiled."""

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
        sent_len: Tokens of each that arrive with their cache, from a prefill instance; 0 for none. [requests]
        prefix: Number of the shared prefix, below 0 for none. [requests]
        prefix_len: Tokens that it shares. [requests]
    """

    ready_s: Reals
    prompt_len: Counts
    output_len: Counts
    sent_len: Counts
    prefix: Counts
    prefix_len: Counts


class PassTable(NamedTuple):
    """Times of passes on a grid, see traffic.pass_table.

    Attributes:
        decode_s: Pass that decodes, without attention cores. [s], [sequences]
        decode_core_s: Its cores, by batch and mean context. [s], [batch cells * context cells]
        tokens_s: Pass over prompt tokens and decoding sequences, without cores. [s], [tokens of a pass]
        prompt_core_s: Cores of prompt tokens by number and mean seen tokens. [s], [token cells * context cells]
        num_contexts: Grid points of contexts.
        batch_cell: Grid point below each number of sequences. [sequences]
        batch_fraction: Way to the next grid point. [sequences]
        context_cell: Grid point below each context. [contexts]
        context_fraction: Way to the next grid point. [contexts]
        token_cell: Grid point below each number of prompt tokens. [tokens of a pass]
        token_fraction: Way to the next grid point. [tokens of a pass]
        most_graph_sequences: Largest decode pass that is a CUDA graph.
        decode_launch_s: Time that the host needs to launch a decode pass that is none. [s]
        prefill_launch_s: The same of a pass over prompts. [s]
        mixed_launch_s: The same of a pass over both. [s]
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
        is_chunked: Whether prompts are cut to the tokens of a pass.
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
    """What happened, by request; -1 or 0 before the simulation.

    Attributes:
        admitted_s: When each first entered the batch. [s], [requests]
        first_s: When its first token was done. [s], [requests]
        end_s: When its last token was done. [s], [requests]
        emitted: Tokens that it answered. [requests]
        preempted: How often it lost its blocks. [requests]
        hit_len: Prompt tokens that were in the cache. [requests]
    """

    admitted_s: Reals
    first_s: Reals
    end_s: Reals
    emitted: Counts
    preempted: Counts
    hit_len: Counts


class Work(NamedTuple):
    """Memory of the simulation, zeros before it: lists of (n + 1) entries for n requests or prefixes.

    The last entry of ``before`` and ``after`` is the end of the list of running sequences; that of ``older`` and
    ``newer`` the end of the list of unused prefixes.
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
        prefill_tokens: Prompt tokens that were computed, again after a preemption too.
        decode_tokens: Tokens that decode passes added.
        free_blocks: Blocks that are free at the end, unused prefixes included.
    """

    num_passes: int
    busy_s: float
    cache_block_s: float
    most_blocks: int
    prefill_tokens: int
    decode_tokens: int
    free_blocks: int
