"""Simulate a unit of instances: requests are dealt to its streams in turn, and prefilled there or on other instances.

A stream is a batch: each pipeline stage of an instance has one, with an equal part of the cache, and streams run
independently. Replicas of the attention that share experts run their passes in step: they are one stream, in which
sequences are dealt evenly, and a pass takes as long as that of the replica with most prompt tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.errors import WorkloadError
from shapewright.core.records import dataclass
from shapewright.optimize.serving.traffic.pass_table import scaled_table
from shapewright.optimize.serving.traffic.requests import Traffic
from shapewright.optimize.serving.traffic.state import Limits, Log, PassTable, Requests, Totals, Work
from shapewright.optimize.serving.traffic.stream import run_stream

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    PerRequest = Float[np.ndarray, " requests"]
    Counts = Int[np.ndarray, " requests"]


class Streams(NamedTuple):
    """Equal streams of some instances.

    Attributes:
        table: Times of passes.
        limits: Limits of the scheduler, and blocks of the cache.
        num_streams: Number of streams.
    """

    table: PassTable
    limits: Limits
    num_streams: int


@dataclass(frozen=True)
class SimulatedUnit:
    """The streams of a server.

    Attributes:
        decode: Streams that decode; they also prefill if ``prefill`` is None.
        prefill: Streams that only prefill; None if aggregated.
        transfer_len: Prompt lengths whose transfer was priced. [token], [points]
        transfer_s: Time to send the cache of a prompt of each length. [s], [points]
        interval: Ends of the 90 % interval of the times of passes, over their middle.
    """

    decode: Streams
    prefill: Streams | None = None
    transfer_len: tuple[float, ...] = (0.0,)
    transfer_s: tuple[float, ...] = (0.0,)
    interval: tuple[float, float] = (1.0, 1.0)

    def scaled(self, factor: float) -> SimulatedUnit:
        """Return the unit with all times of passes multiplied by a factor."""
        parts = [part and part._replace(table=scaled_table(part.table, factor)) for part in (self.decode, self.prefill)]
        assert parts[0] is not None
        return replace(self, decode=parts[0], prefill=parts[1])

    @property
    def longest_len(self) -> int:
        """Tokens of the longest sequence that a cache holds."""
        parts = [self.decode, *([self.prefill] if self.prefill else [])]
        return min(part.limits.num_blocks // part.limits.num_replicas * part.limits.block_tokens for part in parts)


@dataclass(frozen=True)
class Outcome:
    """Times and counts of every request, in order of arrival.

    Attributes:
        arrival_s: Times of arrival. [s], [requests]
        admitted_s: Times of entering a batch. [s], [requests]
        first_s: Times of the first token, with the transfer of the cache. [s], [requests]
        end_s: Times of the last token. [s], [requests]
        emitted: Tokens of the answers. [requests]
        preempted: How often each was preempted. [requests]
        hit_len: Prompt tokens that were in the cache. [requests]
        running_s: Time of each from entering a batch to its last token there, on all instances that it runs on. [s],
            [requests]
        totals: Sums of each decoding stream.
        prefill_totals: Sums of each prefilling stream; empty if aggregated.
    """

    arrival_s: PerRequest
    admitted_s: PerRequest
    first_s: PerRequest
    end_s: PerRequest
    emitted: Counts
    preempted: Counts
    hit_len: Counts
    running_s: PerRequest
    totals: tuple[Totals, ...]
    prefill_totals: tuple[Totals, ...] = ()

    @property
    def makespan_s(self) -> float:
        """Time from the first arrival to the last token. [s]"""
        return float(np.max(self.end_s) - self.arrival_s[0])


def simulate_unit(unit: SimulatedUnit, traffic: Traffic, *, compiled: bool = False) -> Outcome:
    """Simulate requests until all of them have ended.

    Args:
        compiled: Use Numba, which must be installed; the result is the same.

    Raises:
        WorkloadError: a request does not fit into the cache of a stream.
    """
    if traffic.longest_len > unit.longest_len:
        raise WorkloadError(
            f"a request of {traffic.longest_len} tokens does not fit into the cache of {unit.longest_len} tokens of "
            f"one batch; give shorter ones, or instances with more devices"
        )
    if unit.prefill is None:
        log, totals = _run_streams(unit.decode, traffic, np.zeros_like(traffic.prompt_len), compiled=compiled)
        return Outcome(traffic.arrival_s, *log, running_s=log.running_s, totals=totals)
    only_prefill = Traffic(
        traffic.arrival_s, traffic.prompt_len, np.ones_like(traffic.output_len), traffic.prefix, traffic.prefix_len
    )
    before, prefill_totals = _run_streams(
        unit.prefill, only_prefill, np.zeros_like(traffic.prompt_len), compiled=compiled
    )
    sent_s = before.end_s + np.interp(traffic.prompt_len, unit.transfer_len, unit.transfer_s)
    order = np.argsort(sent_s, kind="stable")
    arriving = traffic.select(order)
    # Only prefill instances share prefixes.
    none = np.full_like(arriving.prefix, -1)
    sent = Traffic(sent_s[order], arriving.prompt_len, arriving.output_len, none, arriving.prefix_len)
    after, totals = _run_streams(unit.decode, sent, arriving.prompt_len, compiled=compiled)
    inverse = np.argsort(order, kind="stable")
    return Outcome(
        arrival_s=traffic.arrival_s,
        admitted_s=before.admitted_s,
        first_s=sent_s,
        end_s=after.end_s[inverse],
        emitted=after.emitted[inverse],
        preempted=before.preempted + after.preempted[inverse],
        hit_len=before.hit_len,
        running_s=before.running_s + after.running_s[inverse],
        totals=totals,
        prefill_totals=prefill_totals,
    )


class _Logs(NamedTuple):
    """The fields of a Log, as arrays over all streams."""

    admitted_s: PerRequest
    first_s: PerRequest
    end_s: PerRequest
    emitted: Counts
    preempted: Counts
    hit_len: Counts

    @property
    def running_s(self) -> PerRequest:
        """Time of each request from entering a batch to its last token. [s], [requests]"""
        running_s: PerRequest = self.end_s - self.admitted_s
        return running_s


def _run_streams(
    streams: Streams, traffic: Traffic, sent_len: Counts, *, compiled: bool
) -> tuple[_Logs, tuple[Totals, ...]]:
    """Deal requests to streams in turn, and run each of them."""
    num = traffic.num_requests
    logs = _Logs(*(np.zeros(num) for _ in range(3)), *(np.zeros(num, np.int64) for _ in range(3)))
    totals = []
    for index in range(streams.num_streams):
        part = slice(index, num, streams.num_streams)
        own = traffic.select(part)
        if not own.num_requests:
            totals.append(Totals(0, 0.0, 0.0, 0, 0, 0, streams.limits.num_blocks))
            continue
        log, total = _run_one(streams, own, sent_len[part], compiled=compiled)
        totals.append(total)
        for column, values in zip(logs, log, strict=True):
            column[part] = values
    return logs, tuple(totals)


def _run_one(streams: Streams, traffic: Traffic, sent_len: Counts, *, compiled: bool) -> tuple[Log, Totals]:
    """Run one stream, on arrays if compiled; otherwise on lists, whose items Python reads faster."""
    num, num_prefixes = traffic.num_requests, max(0, int(traffic.prefix.max()) + 1)
    requests = Requests(
        traffic.arrival_s,
        traffic.prompt_len,
        traffic.output_len,
        sent_len.copy(),
        traffic.prefix,
        np.minimum(traffic.prefix_len, traffic.prompt_len),
    )
    never = [np.full(num, -1.0) for _ in range(3)]
    counts = [(sent_len > 0).astype(np.int64), np.zeros(num, np.int64), np.zeros(num, np.int64)]
    log = Log(never[0], never[1], never[2], counts[0], counts[1], counts[2])
    sizes = [num + 1] * 9 + [num_prefixes + 1] * 4 + [streams.limits.block_tokens, streams.limits.num_replicas]
    work = Work(*(np.zeros(size, np.int64) for size in sizes))
    if compiled:
        from shapewright.optimize.serving.traffic.compiled import run_stream as run_compiled

        arrays = [_contiguous(group) for group in (requests, streams.table)]
        return log, Totals(*run_compiled(arrays[0], arrays[1], streams.limits, log, work))
    listed = [_as_lists(group) for group in (requests, streams.table, log, work)]
    totals = Totals(*run_stream(listed[0], listed[1], streams.limits, listed[2], listed[3]))
    return listed[2], totals


def _as_lists(group: Any) -> Any:
    return type(group)(*(each.tolist() if isinstance(each, np.ndarray) else each for each in group))


def _contiguous(group: Any) -> Any:
    return type(group)(*(np.ascontiguousarray(each) if isinstance(each, np.ndarray) else each for each in group))
