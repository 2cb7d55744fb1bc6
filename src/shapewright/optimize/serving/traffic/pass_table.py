"""Times of the passes of one stream on a grid, priced as every pass of a server is (serving.passes).

Operations outside the attention cores are priced by the tokens of a pass, finely enough for the tiles of their GEMMs;
the cores of decoding sequences by batch and mean context; those of prompt tokens, with the images of prompts, by their
number and the mean tokens that they attend to. Between grid points, times are interpolated linearly; the error is
measured on priced passes off the grid. The time of the host is added to each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.optimize.serving.pass_times import time_on_device, time_passes
from shapewright.optimize.serving.passes import Pass, is_core
from shapewright.optimize.serving.point import batch_sizes
from shapewright.optimize.serving.traffic.state import PassTable
from shapewright.optimize.serving.traffic.stream import pass_s

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from shapewright.lowering.operations.operation import Operation
    from shapewright.optimize.serving.point import Instance

    PerPass = Float[np.ndarray, "passes"]
    Counts = Int[np.ndarray, "points"]

_NUM_CHECKED = 24
"""Passes off the grid on which the error of interpolation is measured."""
_FIRST_CONTEXT = 16
_FINE_STEPS = ((256, 16), (1024, 64), (4096, 256), (2**20, 1024))
"""Pairs of a number of tokens and the step of priced numbers up to it. One token more than each is priced too, because
a tile ends between them."""


class PricedTable(NamedTuple):
    """Times of passes with their error.

    Attributes:
        table: The times, as arrays.
        error_median_fraction: Median error of interpolation over passes off the grid.
        error_most_fraction: Largest of them.
        low_fraction: Lower end of the 90 % interval of a pass over its middle, the median over passes.
        high_fraction: Upper end.
    """

    table: PassTable
    error_median_fraction: float
    error_most_fraction: float
    low_fraction: float
    high_fraction: float


def price_table(instance: Instance, *, max_sequences: int, max_tokens: int, longest_len: int) -> PricedTable:
    """Price the passes of a stream on a grid, and measure the error of interpolation between its points."""
    batches = np.array(batch_sizes(max_sequences))
    contexts = _context_points(longest_len)
    tokens, sequences = _token_points(max_tokens), _token_points(max_sequences)
    chunks = np.array([*(2**power for power in range(max_tokens.bit_length()) if 2**power < max_tokens), max_tokens])
    answer_len = max(1, instance.request.output_len)
    passes = [
        instance.passes.decode(int(batch), int(context), answer_len=min(answer_len, 2 * int(context)))
        for batch in batches
        for context in contexts
    ]
    passes += [_without_cores(instance.passes.decode(int(count), int(contexts[0]))) for count in (*batches, *sequences)]
    passes += [_without_cores(instance.passes.prefill(1, int(count))) for count in (*chunks, *tokens)]
    passes += [_prompt_pass(instance, int(chunk), int(seen)) for chunk in chunks for seen in contexts]
    low_s, middle_s, high_s = _compose(instance, passes)
    sizes = [len(batches) * len(contexts), len(batches), len(sequences), len(chunks), len(tokens)]
    decoding_s, of_batches_s, decode_s, of_chunks_s, tokens_s, prompt_s = np.split(middle_s, np.cumsum(sizes))
    decode_core_s = np.maximum(decoding_s.reshape(len(batches), -1) - of_batches_s[:, None], 0.0)
    prompt_core_s = np.maximum(prompt_s.reshape(len(chunks), -1) - of_chunks_s[:, None], 0.0)

    batch_cell, batch_fraction = _cells(batches, max_sequences)
    context_cell, context_fraction = _cells(contexts, longest_len)
    token_cell, token_fraction = _cells(chunks, max_tokens)
    table = PassTable(
        decode_s=_interpolate(sequences, decode_s, max_sequences),
        decode_core_s=_padded(decode_core_s),
        tokens_s=_interpolate(tokens, tokens_s, max_tokens),
        prompt_core_s=_padded(prompt_core_s),
        num_contexts=len(contexts) + 1,
        batch_cell=batch_cell,
        batch_fraction=batch_fraction,
        context_cell=context_cell,
        context_fraction=context_fraction,
        token_cell=token_cell,
        token_fraction=token_fraction,
        **_host_times(instance, batches, chunks),
    )
    errors = _interpolation_errors(instance, table, max_sequences, max_tokens, longest_len)
    return PricedTable(
        table=table,
        error_median_fraction=float(np.median(errors)),
        error_most_fraction=float(np.max(errors)),
        low_fraction=float(np.median(low_s / middle_s)),
        high_fraction=float(np.median(high_s / middle_s)),
    )


def scaled_table(table: PassTable, factor: float) -> PassTable:
    """Return the table with all times multiplied by a factor."""
    return table._replace(
        decode_s=np.asarray(table.decode_s) * factor,
        decode_core_s=np.asarray(table.decode_core_s) * factor,
        tokens_s=np.asarray(table.tokens_s) * factor,
        prompt_core_s=np.asarray(table.prompt_core_s) * factor,
    )


def _context_points(longest_len: int) -> Counts:
    """Return contexts from 16 tokens to the longest, in steps of a third to a half."""
    return np.array([size for size in batch_sizes(longest_len) if size >= min(_FIRST_CONTEXT, longest_len)])


def _token_points(most: int) -> Counts:
    """Return the numbers of tokens that are priced: finely where one tile of rows more changes the time."""
    points, first = {*batch_sizes(most), most}, _FINE_STEPS[0][1]
    for last, step in _FINE_STEPS:
        points |= {one + extra for one in range(first, min(last, most), step) for extra in (0, 1)}
        first = last
    return np.array(sorted(points))


def _interpolate(points: Counts, times_s: PerPass, most: int) -> Float[np.ndarray, " counts"]:
    """Return the time for every number of tokens up to the most. [s]"""
    return np.asarray(np.interp(np.arange(most + 1), [0, *points], [0.0, *times_s]))


def _cells(points: Counts, most: int) -> tuple[Counts, Float[np.ndarray, " counts"]]:
    """Return, for every integer up to a limit, the grid point below it and the fraction of the way to the next."""
    counts = np.arange(most + 2)
    cell = np.clip(np.searchsorted(points, counts, side="right") - 1, 0, len(points) - 1)
    following = points[np.minimum(cell + 1, len(points) - 1)]
    width = np.maximum(following - points[cell], 1)
    return cell, np.clip((counts - points[cell]) / width, 0.0, 1.0)


def _padded(values: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, " cells"]:
    """Return a flattened grid, with the last row and column repeated so that every point has a neighbor."""
    return np.pad(values, ((0, 1), (0, 1)), mode="edge").ravel()


def _without_cores(one: Pass) -> Pass:
    """Return the part of a pass that depends on its tokens alone: neither cores nor the images of prompts."""
    return one._replace(parts=one.parts_where(_is_outside_cores), tower=None, tower_share=0.0)


def _is_outside_cores(operation: Operation) -> bool:
    return not is_core(operation)


def _prompt_pass(instance: Instance, num_tokens: int, mean_seen: int) -> Pass:
    """Return a pass over tokens of one prompt, or of several short ones, that attend to a mean number of tokens."""
    num_prompts = max(1, round(num_tokens / (2 * mean_seen)))
    length = max(1, num_tokens // num_prompts)
    cores = instance.passes.prefill(num_prompts, length, max(0, mean_seen - length // 2))
    whole = instance.passes.prefill(1, num_tokens)  # with the images of so many tokens
    return whole._replace(parts=(*whole.parts_where(_is_outside_cores), *cores.parts_where(is_core)))


def _host_times(instance: Instance, batches: Counts, chunks: Counts) -> dict[str, Any]:
    """Return the host times of passes, as fields of the table."""
    server, passes = instance.request.server, instance.passes
    decode, prefill = passes.decode(int(batches[-1]), _FIRST_CONTEXT), passes.prefill(1, int(chunks[-1]))
    launches = {"decode": decode, "prefill": prefill, "mixed": passes.mixed(decode, prefill)}
    return {
        "most_graph_sequences": server.most_graph_sequences if server.cuda_graphs else 0,
        "host_s": server.host_s + server.host_per_rank_s * instance.layout.tensor_parallel,
        "host_per_sequence_s": server.host_per_sequence_s,
        "prefill_host_s": server.prefill_host_s,
    } | {f"{name}_launch_s": server.launch_s * one.num_kernels for name, one in launches.items()}


def _compose(instance: Instance, passes: Sequence[Pass], *, with_host: bool = False) -> tuple[PerPass, ...]:
    """Return lower ends, middles and upper ends of the times of passes, by default without the host. [s]"""
    scenario, server = instance.scenario, instance.request.server
    times = (time_passes if with_host else time_on_device)(passes, scenario, server)
    low, middle, high = zip(*((each.step_low_s, each.step_s, each.step_high_s) for each in times), strict=True)
    return np.array(low), np.array(middle), np.array(high)


def _interpolation_errors(
    instance: Instance, table: PassTable, max_sequences: int, max_tokens: int, longest_len: int
) -> PerPass:
    """Return the relative errors of interpolated decode and mixed passes off the grid."""
    draw = np.random.default_rng(0)
    passes, interpolated_s = [], []
    for index in range(_NUM_CHECKED):
        batch = round(max_sequences ** draw.random())
        context = round(_FIRST_CONTEXT * max(1.0, longest_len / _FIRST_CONTEXT) ** draw.random())
        context = min(context, longest_len)
        decode = instance.passes.decode(batch, context, answer_len=min(instance.request.output_len, 2 * context))
        if index % 2 or max_tokens <= batch:
            passes.append(decode)
            interpolated_s.append(pass_s(table, batch, batch * context, 0, 0.0))
            continue
        chunk = round((max_tokens - batch) ** draw.random())
        chunk = min(chunk, longest_len)
        before = round((longest_len - chunk) * draw.random())
        passes.append(instance.passes.mixed(decode, instance.passes.prefill(1, chunk, before)))
        interpolated_s.append(pass_s(table, batch, batch * context, chunk, chunk * (before + 0.5 * (chunk + 1))))
    _, exact, _ = _compose(instance, passes, with_host=True)
    return np.asarray(np.abs(np.array(interpolated_s) / exact - 1.0))
