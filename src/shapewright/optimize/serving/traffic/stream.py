"""One stream of a server as a discrete-event simulation: continuous batching with a paged cache.

A pass decodes one token of every sequence whose prompt is done, and spends the rest of its token budget on prompts:
first on the one that was cut, then on the queue in order of arrival (chunked prefill, arXiv 2308.16369). A sequence
enters when the cache has blocks for its tokens so far; it takes further blocks as it grows (arXiv 2309.06180). If no
block is left, the sequence that entered last is preempted: it loses its blocks and returns to the head of the queue.
When it enters again, it recomputes its tokens, except those whose blocks are still in the cache.

A shared prefix is cached in whole blocks, counted once. When no sequence uses it any more, it stays until its blocks
are needed; the least recently used prefix is evicted first.

Passes without prompts that lie between two events (a sequence ends, a request arrives, blocks run out) differ in the
length of the context alone, and are taken in one jump at their mean context.

The same function runs on lists in Python, and on arrays compiled by Numba (traffic.compiled), so it uses only what both
support.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapewright.optimize.serving.traffic.state import Counts, Limits, Log, PassTable, Requests, Work

_MOST_STEPS = 256
"""Most passes of one jump: the time of a pass is linear in the context over so many tokens."""


def pass_s(table: PassTable, num_decoding: int, context: int, num_tokens: int, num_seen: float) -> float:
    """Return the time of a pass: its operations by number of tokens, and its attention cores, from the table. [s]

    X(n + q) + D(n, c) + P(q, s / q), with X the time without attention cores, D that of the cores of decoding sequences
    and P that of the cores of prompt tokens; D and P are interpolated bilinearly. A pass that is no CUDA graph takes at
    least the time of its launches. The time of the host is added.

    Args:
        num_decoding: Sequences that decode, n.
        context: Tokens in the cache of all of them, n c.
        num_tokens: Prompt tokens, q.
        num_seen: Sum of the tokens that each prompt token attends to, s.
    """
    width = table.num_contexts
    total_s = table.tokens_s[num_decoding + num_tokens] if num_tokens > 0 else table.decode_s[num_decoding]
    if num_decoding > 0:
        mean = context // num_decoding
        row = table.batch_cell[num_decoding] * width + table.context_cell[mean]
        across, along = table.context_fraction[mean], table.batch_fraction[num_decoding]
        low = table.decode_core_s[row] + across * (table.decode_core_s[row + 1] - table.decode_core_s[row])
        row += width
        high = table.decode_core_s[row] + across * (table.decode_core_s[row + 1] - table.decode_core_s[row])
        total_s += low + along * (high - low)
    if num_tokens > 0:
        mean = int(num_seen / num_tokens)
        row = table.token_cell[num_tokens] * width + table.context_cell[mean]
        across, along = table.context_fraction[mean], table.token_fraction[num_tokens]
        low = table.prompt_core_s[row] + across * (table.prompt_core_s[row + 1] - table.prompt_core_s[row])
        row += width
        high = table.prompt_core_s[row] + across * (table.prompt_core_s[row + 1] - table.prompt_core_s[row])
        total_s += low + along * (high - low)
        total_s = max(total_s, table.mixed_launch_s if num_decoding > 0 else table.prefill_launch_s)
        total_s += table.prefill_host_s
    elif num_decoding > table.most_graph_sequences:
        total_s = max(total_s, table.decode_launch_s)
    return total_s + table.host_s + table.host_per_sequence_s * max(num_decoding, 1)


def replica_pass_s(
    table: PassTable, replicas: int, num_decoding: int, context: int, num_tokens: int, num_seen: float, longest: int
) -> float:
    """Return the time of a pass of replicas that run in step; sequences and prompts are dealt evenly to them. [s]

    Args:
        table: The table, of one replica.
        replicas: Number of replicas.
        num_decoding: Sequences that decode on all of them.
        context: Tokens in the cache of all sequences.
        num_tokens: Prompt tokens of all.
        num_seen: Sum of the tokens that each prompt token attends to.
        longest: Tokens of the longest chunk of a prompt, which one replica computes.
    """
    if replicas == 1:
        return pass_s(table, num_decoding, context, num_tokens, num_seen)
    own = -(-num_decoding // replicas)
    own_context = own * (context // num_decoding) if num_decoding > 0 else 0
    own_tokens = max(longest, -(-num_tokens // replicas))
    own_seen = num_seen * own_tokens / num_tokens if num_tokens > 0 else 0.0
    return pass_s(table, own, own_context, own_tokens, own_seen)


def append_item(before: Counts, after: Counts, end: int, item: int) -> None:
    """Append an item to a circular linked list with a sentinel ``end``."""
    last = before[end]
    after[last] = item
    before[item] = last
    after[item] = end
    before[end] = item


def remove_item(before: Counts, after: Counts, item: int) -> None:
    """Remove an item from a linked list."""
    after[before[item]] = after[item]
    before[after[item]] = before[item]


def release_prefix(work: Work, prefix: int) -> int:
    """Decrement the reference count of a prefix, and return the number of blocks that became unused."""
    work.users[prefix] -= 1
    if work.users[prefix] == 0 and work.resident[prefix] > 0:
        append_item(work.older, work.newer, len(work.users) - 1, prefix)
        return work.resident[prefix]
    return 0


def evict_blocks(work: Work, requeued: list[int], num_without_blocks: int, num_blocks: int) -> tuple[int, int]:
    """Evict unused blocks until enough are free: those of preempted sequences, then prefixes, the oldest first.

    Args:
        requeued: Preempted sequences, in order of preemption.
        num_without_blocks: How many of them, from the first, have no blocks left.
        num_blocks: Blocks that are needed.

    Returns:
        The new ``num_without_blocks``, and the number of blocks that were freed.
    """
    freed, end = 0, len(work.users) - 1
    while freed < num_blocks and num_without_blocks < len(requeued):
        taken = min(work.kept[requeued[num_without_blocks]], num_blocks - freed)
        work.kept[requeued[num_without_blocks]] -= taken
        freed += taken
        if work.kept[requeued[num_without_blocks]] == 0:
            num_without_blocks += 1
    while freed < num_blocks:
        oldest = work.newer[end]
        remove_item(work.older, work.newer, oldest)
        freed += work.resident[oldest]
        work.resident[oldest] = 0
    return num_without_blocks, freed


def run_stream(requests: Requests, table: PassTable, limits: Limits, log: Log, work: Work) -> Any:
    """Simulate one stream until every request has ended.

    Args:
        requests: The requests; each fits into the cache by itself.
        table: Times of passes.
        limits: Limits of the scheduler.
        log: Receives times and counts.
        work: Zeros, changed in place.

    Returns:
        The Totals, as a tuple.

    Raises:
        ValueError: the simulation does not advance, which is a defect of this function.
    """
    ready_s, prompt_len, output_len, sent_len, prefix, prefix_len = requests
    max_sequences, max_tokens, block, num_blocks = limits[:4]
    is_chunked, is_mixed, reserves_answers, keeps_preempted, replicas = limits[4:]
    max_running = max_sequences * replicas
    num, end = len(ready_s), len(work.before) - 1
    no_prefix = len(work.users) - 1
    work.before[end], work.after[end] = end, end
    work.older[no_prefix], work.newer[no_prefix] = no_prefix, no_prefix
    ends, requeued = [(0, 0)], [0]  # Numba infers the types of lists from their first entries
    ends.pop()
    requeued.pop()
    free, unused, reserved = num_blocks, 0, 0
    now, step, arrived, head, num_done = 0.0, 0, 0, 0, 0
    num_running, num_decoding, context = 0, 0, 0
    num_cut, num_without_blocks = 0, 0
    num_passes, busy_s, cache_block_s, most_blocks, prefill_tokens, decode_tokens = 0, 0.0, 0.0, 0, 0, 0

    while num_done < num:
        while arrived < num and ready_s[arrived] <= now:
            arrived += 1
        if num_running == 0 and len(requeued) == 0 and head == arrived:
            now = ready_s[arrived]
            continue

        has_preempted = False
        while num_decoding > 0 and work.growing[step % block] > free + unused:
            has_preempted = True
            victim = work.before[end]
            if work.end_step[victim] <= 0:  # its prompt is only partly computed
                length, whole = work.base_len[victim], work.computed[victim] // block
                num_kept = 0
                for index in range(num_cut):
                    if work.cut[index] != victim:
                        work.cut[num_kept] = work.cut[index]
                        num_kept += 1
                num_cut = num_kept
            else:
                length = work.base_len[victim] + step - work.start_step[victim]
                log.emitted[victim] += step - work.start_step[victim]
                work.growing[(work.start_step[victim] - work.base_len[victim]) % block] -= 1
                work.end_step[victim] = -1
                num_decoding -= 1
                context -= length
                whole = length // block
            kept = max(0, whole - work.shared[victim]) if keeps_preempted else 0
            work.kept[victim] = kept
            free += -(-length // block) - work.shared[victim] - kept
            unused += kept
            if prefix[victim] >= 0:
                unused += release_prefix(work, prefix[victim])
            sent_len[victim] = 0
            remove_item(work.before, work.after, victim)
            num_running -= 1
            log.preempted[victim] += 1
            requeued.append(victim)

        num_filled, num_sent, tokens, seen, longest = 0, 0, 0, 0.0, 0
        room = max_tokens + (-num_decoding // replicas) if is_mixed else max_tokens
        budget = room * replicas
        num_kept = 0
        for index in range(num_cut):
            request = work.cut[index]
            chunk = min(room, work.base_len[request] - work.computed[request])
            longest = max(longest, chunk)
            seen += chunk * (work.computed[request] + 0.5 * (chunk + 1))
            tokens += chunk
            budget -= chunk
            work.computed[request] += chunk
            if work.computed[request] == work.base_len[request]:
                work.filled[num_filled] = request
                num_filled += 1
            else:
                work.cut[num_kept] = request
                num_kept += 1
        num_cut = num_kept
        next_growth = work.growing[step % block]
        while (
            not has_preempted
            and num_cut < replicas
            and num_running < max_running
            and (len(requeued) > 0 or head < arrived)
        ):
            request = requeued[-1] if len(requeued) > 0 else head
            is_sent = sent_len[request] > 0
            if not is_sent and budget <= 0:
                break
            length = sent_len[request] if is_sent else prompt_len[request] + log.emitted[request]
            shared, own_prefix = 0, prefix[request]
            if own_prefix >= 0:
                if work.users[own_prefix] == 0 and work.resident[own_prefix] > 0:
                    remove_item(work.older, work.newer, own_prefix)
                    unused -= work.resident[own_prefix]
                work.users[own_prefix] += 1
                shared = min(work.resident[own_prefix], min(prefix_len[request], length - 1) // block)
            kept, spare = 0, 0
            if len(requeued) > 0:
                spare = work.kept[request]
                unused -= spare
                if shared >= work.shared[request]:
                    kept = max(0, min(spare - (shared - work.shared[request]), (length - 1) // block - shared))
                free += spare - kept
            wanted = -(-length // block) - shared - kept
            if own_prefix >= 0 and work.users[own_prefix] == 1 and wanted + next_growth > free + unused:
                free += work.resident[own_prefix] - shared  # nobody else uses the rest of the prefix
                work.resident[own_prefix] = shared
            further = reserved + -(-(prompt_len[request] + output_len[request] - 1) // block) - shared - kept - wanted
            start = (shared + kept) * block
            is_long = not is_chunked and not is_sent and tokens > 0 and length - start > budget
            if is_long or wanted + (further if reserves_answers else next_growth) > free + unused:
                if own_prefix >= 0:
                    unused += release_prefix(work, own_prefix)
                unused += spare
                free -= spare - kept
                break
            if len(requeued) > 0:
                requeued.pop()
                num_without_blocks = min(num_without_blocks, len(requeued))
            else:
                head += 1
            if wanted > free:
                num_without_blocks, freed = evict_blocks(work, requeued, num_without_blocks, wanted - free)
                free += freed
                unused -= freed
            free -= wanted
            work.kept[request] = 0
            reserved = further
            work.shared[request] = shared
            append_item(work.before, work.after, end, request)
            num_running += 1
            if log.admitted_s[request] < 0.0:
                log.admitted_s[request] = now
            work.base_len[request] = length
            if is_sent:
                num_sent += 1
            else:
                log.hit_len[request] += shared * block
                chunk = min(budget, room, length - start)
                longest = max(longest, chunk)
                seen += chunk * (start + 0.5 * (chunk + 1))
                tokens += chunk
                budget -= chunk
                if chunk < length - start:
                    work.computed[request] = start + chunk
                    work.cut[num_cut] = request
                    num_cut += 1
                    continue
            work.filled[num_filled] = request
            num_filled += 1

        steps = 1 if num_decoding > 0 and (is_mixed or tokens == 0) else 0
        if num_decoding > 0 and tokens == 0:
            while work.end_step[ends[0][1]] != ends[0][0]:
                heappop(ends)
            if num_filled == 0 and not has_preempted:
                steps = min(ends[0][0] - step, _MOST_STEPS)
            can_enter = num_running < max_running and len(requeued) == 0 and head == arrived
            if can_enter and arrived < num:
                wait = (ready_s[arrived] - now) / replica_pass_s(table, replicas, num_decoding, context, 0, 0.0, 0)
                if wait < steps:
                    steps = max(1, min(steps, int(wait) + 1))
        grown = 0
        if num_decoding > 0:
            if free + unused < num_decoding * -(-steps // block):
                taken = 0
                while taken < steps and grown + work.growing[(step + taken) % block] <= free + unused:
                    grown += work.growing[(step + taken) % block]
                    taken += 1
                steps = taken
            else:
                grown = steps // block * num_decoding
                for extra in range(steps % block):
                    grown += work.growing[(step + extra) % block]
        if grown > free:
            num_without_blocks, freed = evict_blocks(work, requeued, num_without_blocks, grown - free)
            free += freed
            unused -= freed
        free -= grown
        reserved -= grown

        if tokens > 0:
            pass_time_s = replica_pass_s(table, replicas, num_decoding * steps, context, tokens, seen, longest)
        else:
            middle = context + num_decoding * (steps - 1) // 2
            pass_time_s = 0.0
            if steps > 0:
                pass_time_s = steps * replica_pass_s(table, replicas, num_decoding, middle, 0, 0.0, 0)
        used = num_blocks - free - unused
        most_blocks = max(most_blocks, used)
        cache_block_s += used * pass_time_s
        busy_s += pass_time_s
        now += pass_time_s
        num_passes += max(steps, min(tokens, 1))
        prefill_tokens += tokens
        decode_tokens += num_decoding * steps
        context += num_decoding * steps
        step += steps

        while len(ends) > 0 and ends[0][0] <= step:
            last_step, request = heappop(ends)
            if work.end_step[request] != last_step:
                continue
            length = work.base_len[request] + step - work.start_step[request]
            log.emitted[request] += step - work.start_step[request]
            work.growing[(work.start_step[request] - work.base_len[request]) % block] -= 1
            work.end_step[request] = -1
            num_decoding -= 1
            context -= length
            free += -(-length // block) - work.shared[request]
            if prefix[request] >= 0:
                unused += release_prefix(work, prefix[request])
            remove_item(work.before, work.after, request)
            num_running -= 1
            log.end_s[request] = now
            num_done += 1
        for index in range(num_filled):
            request = work.filled[index]
            length, own_prefix = work.base_len[request], prefix[request]
            if sent_len[request] == 0:
                log.emitted[request] += 1
                if log.first_s[request] < 0.0:
                    log.first_s[request] = now
            if own_prefix >= 0:
                whole = min(prefix_len[request], length) // block
                if whole > work.resident[own_prefix]:
                    work.shared[request] += whole - work.resident[own_prefix]
                    work.resident[own_prefix] = whole
            left = output_len[request] - log.emitted[request]
            if left > 0:
                work.start_step[request] = step
                work.end_step[request] = step + left
                heappush(ends, (step + left, request))
                work.growing[(step - length) % block] += 1
                num_decoding += 1
                context += length
            else:
                free += -(-length // block) - work.shared[request]
                if own_prefix >= 0:
                    unused += release_prefix(work, own_prefix)
                remove_item(work.before, work.after, request)
                num_running -= 1
                log.end_s[request] = now
                num_done += 1
        if tokens == 0 and steps == 0 and num_sent == 0 and not has_preempted:
            raise ValueError("the simulation does not advance")
    return num_passes, busy_s, cache_block_s, most_blocks, prefill_tokens, decode_tokens, free + unused
