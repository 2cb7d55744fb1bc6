"""One stream of a server as a discrete-event simulation: continuous batching with a paged cache.

A pass decodes one token of every sequence whose prompt is done, and spends the rest of its token budget on prompts:
first on the one that was cut, then on the queue in order of arrival (chunked prefill, arXiv 2308.16369). A sequence
enters when the cache has blocks for its tokens so far; it takes further blocks as it grows (arXiv 2309.06180). If no
block is left, the sequence that entered last gives up its blocks, returns to the head of the queue, and computes its
tokens again when it enters, except those whose blocks nobody has taken since.

A shared prefix stays in the cache in whole blocks, counted once, when no sequence uses it any more, until its blocks
are needed: the one that was used longest ago goes first.

Passes without prompts that lie between two events (a sequence ends, a request arrives, blocks run out) differ in the
length of the context alone, and are taken in one jump at their mean context.

The same function runs on lists without Numba, and on arrays compiled by it (traffic.compiled): it uses only what both
allow.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapewright.optimize.serving.traffic.state import Counts, Limits, Log, PassTable, Requests, Work

_MOST_STEPS = 256
"""Passes of one jump: over so many tokens the time of a pass is linear in the context."""


def pass_s(table: PassTable, num_decoding: int, context: int, num_tokens: int, num_seen: float) -> float:
    """Return the time of a pass: all but the cores for its tokens, and cores bilinear between points of the table. [s]

    X(n + q) + D(n, c) + P(q, s / q), at least the launches of a pass that is no CUDA graph, and what the host adds.

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
    """Return the time of a pass of replicas in step, with evenly dealt sequences and whole prompts. [s]

    Args:
        table: The table, of one replica.
        replicas: Number of replicas.
        num_decoding: Sequences that decode on all of them.
        context: Tokens in the cache of all sequences.
        num_tokens: Prompt tokens of all.
        num_seen: Sum of the tokens that each prompt token attends to.
        longest: Tokens of the longest part of a prompt, which one replica computes.
    """
    if replicas == 1:
        return pass_s(table, num_decoding, context, num_tokens, num_seen)
    own = -(-num_decoding // replicas)
    own_context = own * (context // num_decoding) if num_decoding > 0 else 0
    own_tokens = max(longest, -(-num_tokens // replicas))
    own_seen = num_seen * own_tokens / num_tokens if num_tokens > 0 else 0.0
    return pass_s(table, own, own_context, own_tokens, own_seen)


def append_item(before: Counts, after: Counts, end: int, item: int) -> None:
    """Append an item to a linked list whose end is a place of its own."""
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
    """Decrement the reference count of a prefix; return the blocks that are now unused."""
    work.users[prefix] -= 1
    if work.users[prefix] == 0 and work.resident[prefix] > 0:
        append_item(work.older, work.newer, len(work.users) - 1, prefix)
        return work.resident[prefix]
    return 0


def evict_blocks(work: Work, again: list[int], num_lost: int, num_blocks: int) -> tuple[int, int]:
    """Evict unused blocks, oldest first, until enough are free: preempted sequences, then prefixes.

    Args:
        again: Preempted sequences, in order.
        num_lost: How many of them, from the first, have no blocks left.
        num_blocks: Blocks that are needed.

    Returns:
        The new ``num_lost``, and the blocks that are free.
    """
    freed, end = 0, len(work.users) - 1
    while freed < num_blocks and num_lost < len(again):
        taken = min(work.kept[again[num_lost]], num_blocks - freed)
        work.kept[again[num_lost]] -= taken
        freed += taken
        if work.kept[again[num_lost]] == 0:
            num_lost += 1
    while freed < num_blocks:
        oldest = work.newer[end]
        remove_item(work.older, work.newer, oldest)
        freed += work.resident[oldest]
        work.resident[oldest] = 0
    return num_lost, freed


def run_stream(requests: Requests, table: PassTable, limits: Limits, log: Log, work: Work) -> Any:
    """Simulate one stream until every request ended.

    Args:
        requests: The requests, each of which fits into the cache by itself.
        log: Receives times and counts.

    Returns:
        The Totals, as a tuple. An error would be a mistake of this function: more than the cache was taken.
    """
    ready_s, prompt_len, output_len, sent_len, prefix, prefix_len = requests
    max_sequences, max_tokens, block, num_blocks = limits[:4]
    is_chunked, is_mixed, reserves_answers, keeps_preempted, replicas = limits[4:]
    max_running = max_sequences * replicas
    num, end = len(ready_s), len(work.before) - 1
    no_prefix = len(work.users) - 1
    work.before[end], work.after[end] = end, end
    work.older[no_prefix], work.newer[no_prefix] = no_prefix, no_prefix
    ends, again = [(0, 0)], [0]  # typed by their first entries
    ends.pop()
    again.pop()
    free, unused, promised = num_blocks, 0, 0
    now, step, arrived, head, num_done = 0.0, 0, 0, 0, 0
    num_running, num_decoding, context = 0, 0, 0
    num_cut, num_lost = 0, 0
    num_passes, busy_s, cache_block_s, most_blocks, prefill_tokens, decode_tokens = 0, 0.0, 0.0, 0, 0, 0

    while num_done < num:
        while arrived < num and ready_s[arrived] <= now:
            arrived += 1
        if num_running == 0 and len(again) == 0 and head == arrived:
            now = ready_s[arrived]
            continue

        has_lost = False
        while num_decoding > 0 and work.growing[step % block] > free + unused:
            has_lost = True
            victim = work.before[end]
            if work.end_step[victim] <= 0:  # its prompt is cut
                length, whole = work.base_len[victim], work.computed[victim] // block
                num_kept = 0
                for place in range(num_cut):
                    if work.cut[place] != victim:
                        work.cut[num_kept] = work.cut[place]
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
            again.append(victim)

        num_filled, num_sent, tokens, seen, longest = 0, 0, 0, 0.0, 0
        room = max_tokens + (-num_decoding // replicas) if is_mixed else max_tokens
        budget = room * replicas
        num_kept = 0
        for place in range(num_cut):
            one = work.cut[place]
            chunk = min(room, work.base_len[one] - work.computed[one])
            longest = max(longest, chunk)
            seen += chunk * (work.computed[one] + 0.5 * (chunk + 1))
            tokens += chunk
            budget -= chunk
            work.computed[one] += chunk
            if work.computed[one] == work.base_len[one]:
                work.filled[num_filled] = one
                num_filled += 1
            else:
                work.cut[num_kept] = one
                num_kept += 1
        num_cut = num_kept
        reserve = work.growing[step % block]
        while not has_lost and num_cut < replicas and num_running < max_running and (len(again) > 0 or head < arrived):
            one = again[-1] if len(again) > 0 else head
            is_sent = sent_len[one] > 0
            if not is_sent and budget <= 0:
                break
            length = sent_len[one] if is_sent else prompt_len[one] + log.emitted[one]
            shared, own = 0, prefix[one]
            if own >= 0:
                if work.users[own] == 0 and work.resident[own] > 0:
                    remove_item(work.older, work.newer, own)
                    unused -= work.resident[own]
                work.users[own] += 1
                shared = min(work.resident[own], min(prefix_len[one], length - 1) // block)
            kept, spare = 0, 0
            if len(again) > 0:
                spare = work.kept[one]
                unused -= spare
                if shared >= work.shared[one]:
                    kept = max(0, min(spare - (shared - work.shared[one]), (length - 1) // block - shared))
                free += spare - kept
            wanted = -(-length // block) - shared - kept
            if own >= 0 and work.users[own] == 1 and wanted + reserve > free + unused:
                free += work.resident[own] - shared  # nobody else uses the rest of the prefix
                work.resident[own] = shared
            further = promised + -(-(prompt_len[one] + output_len[one] - 1) // block) - shared - kept - wanted
            start = (shared + kept) * block
            is_long = not is_chunked and not is_sent and tokens > 0 and length - start > budget
            if is_long or wanted + (further if reserves_answers else reserve) > free + unused:
                if own >= 0:
                    unused += release_prefix(work, own)
                unused += spare
                free -= spare - kept
                break
            if len(again) > 0:
                again.pop()
                num_lost = min(num_lost, len(again))
            else:
                head += 1
            if wanted > free:
                num_lost, freed = evict_blocks(work, again, num_lost, wanted - free)
                free += freed
                unused -= freed
            free -= wanted
            work.kept[one] = 0
            promised = further
            work.shared[one] = shared
            append_item(work.before, work.after, end, one)
            num_running += 1
            if log.admitted_s[one] < 0.0:
                log.admitted_s[one] = now
            work.base_len[one] = length
            if is_sent:
                num_sent += 1
            else:
                log.hit_len[one] += shared * block
                chunk = min(budget, room, length - start)
                longest = max(longest, chunk)
                seen += chunk * (start + 0.5 * (chunk + 1))
                tokens += chunk
                budget -= chunk
                if chunk < length - start:
                    work.computed[one] = start + chunk
                    work.cut[num_cut] = one
                    num_cut += 1
                    continue
            work.filled[num_filled] = one
            num_filled += 1

        steps = 1 if num_decoding > 0 and (is_mixed or tokens == 0) else 0
        if num_decoding > 0 and tokens == 0:
            while work.end_step[ends[0][1]] != ends[0][0]:
                heappop(ends)
            if num_filled == 0 and not has_lost:
                steps = min(ends[0][0] - step, _MOST_STEPS)
            can_enter = num_running < max_running and len(again) == 0 and head == arrived
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
            num_lost, freed = evict_blocks(work, again, num_lost, grown - free)
            free += freed
            unused -= freed
        free -= grown
        promised -= grown

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
            last_step, one = heappop(ends)
            if work.end_step[one] != last_step:
                continue
            length = work.base_len[one] + step - work.start_step[one]
            log.emitted[one] += step - work.start_step[one]
            work.growing[(work.start_step[one] - work.base_len[one]) % block] -= 1
            work.end_step[one] = -1
            num_decoding -= 1
            context -= length
            free += -(-length // block) - work.shared[one]
            if prefix[one] >= 0:
                unused += release_prefix(work, prefix[one])
            remove_item(work.before, work.after, one)
            num_running -= 1
            log.end_s[one] = now
            num_done += 1
        for place in range(num_filled):
            one = work.filled[place]
            length, own = work.base_len[one], prefix[one]
            if sent_len[one] == 0:
                log.emitted[one] += 1
                if log.first_s[one] < 0.0:
                    log.first_s[one] = now
            if own >= 0:
                whole = min(prefix_len[one], length) // block
                if whole > work.resident[own]:
                    work.shared[one] += whole - work.resident[own]
                    work.resident[own] = whole
            left = output_len[one] - log.emitted[one]
            if left > 0:
                work.start_step[one] = step
                work.end_step[one] = step + left
                heappush(ends, (step + left, one))
                work.growing[(step - length) % block] += 1
                num_decoding += 1
                context += length
            else:
                free += -(-length // block) - work.shared[one]
                if own >= 0:
                    unused += release_prefix(work, own)
                remove_item(work.before, work.after, one)
                num_running -= 1
                log.end_s[one] = now
                num_done += 1
        if tokens == 0 and steps == 0 and num_sent == 0 and not has_lost:
            raise ValueError("the simulation does not advance")
    return num_passes, busy_s, cache_block_s, most_blocks, prefill_tokens, decode_tokens, free + unused
