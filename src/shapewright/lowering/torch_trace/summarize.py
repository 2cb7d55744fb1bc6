"""From recorded calls to a trace: merged chains, names, equal operations of equal layers, and memory by module."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import NORM_KINDS, Pointwise
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.lowering.torch_trace.dispatched import View, sum_views
from shapewright.lowering.torch_trace.operators import UNKNOWN
from shapewright.lowering.torch_trace.recorder import Call
from shapewright.lowering.torch_trace.trace import (
    TracedLinear,
    TracedModule,
    UnknownOperator,
    merge_paths,
    path_pattern,
)

# Rows of the smallest embedding table that is taken for a vocabulary where nothing else shows what a layer computes.
_LEAST_VOCABULARY = 8192
# Equal kernels of fewer bytes than these, which are launched longer than they run, and their least number in a loop.
_SMALL_BYTES, _LEAST_LOOP = 2**20, 500
_OF_BACKWARD = re.compile(r"_backward(_data)?(?=\+|$)")

# Activations that a gate has: a chain that also multiplies is one with a gate.
_OF_GATE = re.compile(r"(silu|gelu|sigmoid|relu|tanh|hardswish|mish|softplus|elu)(_backward)?_?")
# Kind of a merged chain: the first of these that it contains. A norm's row is read twice, so it decides first.
_CHAIN_KINDS = ("layernorm", "norm", "softmax", "cross_entropy", "embedding", "dropout", "activation", "rotary", "bias")


def fuse_calls(calls: Sequence[Call]) -> list[Call]:
    """Merge chains of fusible calls of one pass as torch.compile would.

    A call joins the chain of the latest call that wrote one of its inputs if that chain is still the last one written
    to and works on as many elements. A chain reads what it did not write, once, and writes what others read.
    """
    chains: list[list[int]] = []
    chain_of: dict[int, int] = {}  # by call
    writer_of: dict[int, int] = {}  # last call that wrote a storage
    readers: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        joined = None
        if call.is_fusible:
            for serial in call.reads:
                writer = writer_of.get(serial)
                if writer is None or writer not in chain_of:
                    continue
                first = calls[chains[chain_of[writer]][0]]
                if first.pass_name == call.pass_name and _same_extent(first.num_elements, call.num_elements):
                    candidate = chain_of[writer]
                    joined = candidate if joined is None else max(joined, candidate)
            # A chain is one kernel: it runs where its last input exists.
            if joined is not None and any(
                writer_of.get(serial, -1) > chains[joined][-1] and chain_of.get(writer_of[serial]) != joined
                for serial in call.reads
            ):
                joined = None
            if joined is None:
                chains.append([])
                joined = len(chains) - 1
            chains[joined].append(index)
            chain_of[index] = joined
        for serial in call.reads:
            if serial in writer_of:
                readers[writer_of[serial]].append(index)
        for serial in call.writes:
            writer_of[serial] = index
    merged: list[Call] = []
    for index, call in enumerate(calls):
        if index not in chain_of:
            merged.append(call)
            continue
        members = chains[chain_of[index]]
        if index == members[0]:
            merged.append(_merge(calls, members, readers))
    return merged


def _same_extent(one: int, other: int) -> bool:
    """Whether two calls can be one loop: equal numbers of elements, or one a reduction of the other."""
    larger, smaller = max(one, other), max(min(one, other), 1)
    return larger % smaller == 0


def _merge(calls: Sequence[Call], members: Sequence[int], readers: Mapping[int, Sequence[int]]) -> Call:
    """One call for a chain."""
    if len(members) == 1:
        return calls[members[0]]
    inside = set(members)
    reads: dict[int, float] = {}
    writes: dict[int, float] = {}
    own: set[int] = set()
    views: list[View] = []
    for index in members:
        call = calls[index]
        views += [view for view in call.views if view.serial not in own]
        for serial, num_bytes in call.reads.items():
            if serial not in own:
                reads[serial] = max(reads.get(serial, 0.0), num_bytes)
        own |= call.writes.keys()
        used = readers.get(index, ())
        if not used or any(reader not in inside for reader in used):
            for serial, num_bytes in call.writes.items():
                writes[serial] = max(writes.get(serial, 0.0), num_bytes)
    for serial, num_bytes in sum_views(views).items():
        reads[serial] = max(reads[serial], num_bytes)  # members may read different views of one tensor
    works = [calls[index].work for index in members]
    kinds = [work.operation for work in works if isinstance(work, Pointwise)]
    kind = next((one for one in _CHAIN_KINDS if one in kinds), kinds[0])
    first = calls[members[-1]] if calls[members[0]].pass_name == "forward" else calls[members[0]]
    names = list(dict.fromkeys(calls[index].operator for index in members))
    operator = "+".join(names[:3]) + ("+..." if len(names) > 3 else "")
    work = calls[members[0]].work.changed(
        operation=kind,
        read_bytes=sum(reads.values()),
        written_bytes=sum(writes.values()),
        dtype=first.work.dtype,
        is_gated=kind == "activation" and "mul" in names and any(map(_OF_GATE.fullmatch, names)),
    )
    return Call(
        operator, first.path, first.pass_name, first.gradient, work, reads, tuple(views), writes, first.num_elements
    )


def name_of(call: Call) -> str:
    """Name of an operation: path of its module, and its operator unless it is the module's GEMM with a weight."""
    is_own_gemm = call.has_weight and isinstance(call.work, Gemm)
    operator = _OF_BACKWARD.sub("", call.operator) if call.gradient else call.operator  # named by its gradient below
    name = call.path if is_own_gemm and call.path else ".".join(filter(None, (call.path, operator)))
    return f"{name}.{call.gradient}" if call.gradient else name


def list_operations(calls: Sequence[Call]) -> tuple[Operation, ...]:
    """Name the operations, and list equal ones whose paths differ only in indices once."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    works: dict[tuple[Any, ...], Operation] = {}
    rules = {call.path: call.work.rule for call in calls if isinstance(call.work, Scan)}
    for call in calls:
        if isinstance(call.work, CausalConv):
            call.work = call.work.changed(rule=rules.get(call.path, call.work.rule))
        name = name_of(call)
        key = (type(call.work), call.pass_name, path_pattern(name), astuple(call.work))
        groups.setdefault(key, []).append(name)
        if key not in works:
            works[key] = call.work.changed(pass_name=call.pass_name, gradient=call.gradient)
            if call.gradient and isinstance(call.work, Pointwise) and call.work.operation in NORM_KINDS:
                works[key] = works[key].changed(is_backward=True)
    return tuple(works[key].changed(name=merge_paths(names), repeats=len(names)) for key, names in groups.items())


def list_linears(calls: Sequence[Call], embedding_rows: Mapping[int, int]) -> tuple[TracedLinear, ...]:
    """List the linear layers of the forward pass, equal ones once.

    Args:
        embedding_rows: Rows of embedding tables by their storage.
    """
    found = {index: call.work for index, call in enumerate(calls) if _is_linear(call) and isinstance(call.work, Gemm)}
    scored = _feed_cross_entropy(calls)
    inputs = {int(work.k) for work in found.values()}
    # A layer with as many outputs as a table has rows computes logits, unless another one takes its outputs.
    vocabularies = {rows for rows in embedding_rows.values() if rows >= _LEAST_VOCABULARY} - inputs
    groups: dict[tuple[Any, ...], list[str]] = {}
    for index, work in found.items():
        call = calls[index]
        is_tied = not embedding_rows.keys().isdisjoint(call.reads)
        is_vocabulary = is_tied or index in scored or int(work.n) in vocabularies
        sizes = (work.m, work.k, work.n, work.layout)
        key = (path_pattern(call.path), *sizes, call.is_convolution, is_vocabulary)
        groups.setdefault(key, []).append(call.path)
    return tuple(
        TracedLinear(
            path=merge_paths(paths) or "(model)",
            count=len(paths),
            num_rows=int(m),
            in_features=int(k),
            out_features=int(n),
            operation_name=merge_paths(paths),
            is_convolution=is_convolution,
            is_vocabulary=is_vocabulary,
        )
        for (_, m, k, n, layout, is_convolution, is_vocabulary), paths in groups.items()
        # The output of a transposed convolution is channels times kernel.
        if not (is_convolution and layout != "NT")
    )


def _is_linear(call: Call) -> bool:
    """Whether a call of the forward pass multiplies by a weight."""
    return call.pass_name == "forward" and call.has_weight and isinstance(call.work, Gemm) and call.work.batch == 1


def _feed_cross_entropy(calls: Sequence[Call]) -> set[int]:
    """Linear layers whose outputs cross entropy reads, by the index of their call: followed backward from the loss."""
    writer_of: dict[int, int] = {}  # last call that wrote a storage
    sources: list[list[int]] = []
    for index, call in enumerate(calls):
        sources.append([writer_of[serial] for serial in call.reads if serial in writer_of])
        writer_of |= dict.fromkeys(call.writes, index)
    waiting = [index for index, call in enumerate(calls) if call.operator.startswith("nll_loss") and not call.gradient]
    seen: set[int] = set()
    linears = set()
    while waiting:
        for source in sources[waiting.pop()]:
            if source in seen:
                continue
            seen.add(source)
            if _is_linear(calls[source]):
                linears.add(source)
            elif isinstance(calls[source].work, Pointwise):
                waiting.append(source)
    return linears


def note_on_loops(calls: Sequence[Call]) -> str:
    """Note on modules that run the same small kernels hundreds of times, as a loop over tokens does; empty without any.

    Libraries have one fused kernel for such a loop.
    """
    counts = Counter(
        (call.path, call.operator, call.work.num_bytes)
        for call in calls
        if call.pass_name == "forward" and isinstance(call.work, Pointwise) and call.work.num_bytes < _SMALL_BYTES
    )
    paths: dict[str, list[str]] = {}
    for (path, _, _), count in counts.items():
        if count >= _LEAST_LOOP:
            paths.setdefault(path_pattern(path), []).append(path)
    if not paths:
        return ""
    names = ", ".join(merge_paths(found) or "(model)" for found in paths.values())
    return (
        f"{names}: the same small kernels run hundreds of times, as in a loop over tokens, and are priced so; a fused "
        "kernel, which libraries have for known layers, takes a fraction of that time"
    )


def list_unknown(calls: Sequence[Call]) -> tuple[UnknownOperator, ...]:
    """List the operators without a model, with their share of all bytes."""
    num_bytes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    total = 0.0
    for call in calls:
        moved = float(call.work.num_bytes)
        total += moved
        if isinstance(call.work, Pointwise) and call.work.operation == UNKNOWN:
            num_bytes[call.operator] += int(moved)
            counts[call.operator] += 1
    return tuple(
        UnknownOperator(name=name, count=counts[name], num_bytes=float(moved), bytes_fraction=moved / total)
        for name, moved in num_bytes.most_common()
    )


def list_modules(modules: Sequence[TracedModule]) -> tuple[TracedModule, ...]:
    """List modules, equal ones whose paths differ only in indices once."""
    groups: dict[tuple[Any, ...], list[TracedModule]] = {}
    for one in modules:
        key = (path_pattern(one.path), *astuple(one)[1:])
        groups.setdefault(key, []).append(one)
    return tuple(
        TracedModule(**{**vars(members[0]), "path": merge_paths(one.path for one in members), "count": len(members)})
        for members in groups.values()
    )
