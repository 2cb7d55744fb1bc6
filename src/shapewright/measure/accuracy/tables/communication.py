"""Evaluate tables of communication.

- collectives.parquet: NCCL inside one node, and between nodes if a group is larger than the device's node.
- collectives_more.parquet, expert_exchange.parquet: communication kernels of serving libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.lowering.operations.collective import COLLECTIVE_OPS, Collective
from shapewright.measure.accuracy.chunk import Chunk, Labels, prices_of, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.kernels import KernelTable, need
from shapewright.pricing.collectives import price_collective
from shapewright.pricing.kernels.exchange import COMBINE_BYTES, DISPATCH_BYTES, all_reduce_work, exchange_work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context

    Array = NDArray[np.float64]
    from shapewright.measure.accuracy.tables.kernels import KernelGroup
    from shapewright.pricing.kernels.work import KernelWork

FORMAT = Format(
    numbers={"num_gpus": 2, "message_bytes": 1}, labels=("device", "library", "op_name"), positive=("latency_s",)
)


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; the dtype of a message does not matter, parts are operation and group."""

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        ranks = rows.numbers["num_gpus"]
        operation = Collective(
            name="collective",
            op_name=_read_op_name(words[1]),
            axis="tensor",
            message_bytes=rows.numbers["message_bytes"],
            num_ranks=ranks,
            ranks_per_node=_count_local(ranks, device),
        )
        found = price_collective(operation, device, context.record("collectives", device))
        return prices_of(found, found.roofline_s)

    # Price group sizes separately: the larger ones may need a network that the device does not state.
    groups, codes = np.unique(columns.numbers["num_gpus"], return_inverse=True)
    sizes = Labels(codes.reshape(-1).astype(np.int64), tuple(f"{ranks:.0f}" for ranks in groups))
    columns = replace(columns, labels=columns.labels | {"group": sizes})
    by = ("device", "op_name", "library", "group")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        names, part = (device.name, "bytes", words[2]), f"{words[1]} x{words[3]}"
        yield from split_chunks("collectives", names, part, rows.numbers["latency_s"], prices)


def _read_op_name(word: str) -> str:
    """Return the operation of a name in any spelling.

    >>> _read_op_name("AllReduce"), _read_op_name("all2all"), _read_op_name("reduce-scatter")
    ('all_reduce', 'alltoall', 'reduce_scatter')

    Raises:
        MeasuredFileError: the name is unknown.
    """
    letters = "".join(letter for letter in word.casefold().replace("2", "to") if letter.isalpha())
    for op_name in COLLECTIVE_OPS:
        if letters == op_name.replace("_", ""):
            return op_name
    if letters in ("ptop", "send", "recv"):
        return "send_recv"
    raise MeasuredFileError(f"unknown op_name {word!r}; known are {', '.join(COLLECTIVE_OPS)}")


def _count_local(ranks: Array, device: Device) -> Array:
    """Return the ranks of a group that share a node: up to the node size, or all if the device states none."""
    return np.minimum(ranks, device.node_size) if device.node_size > 1 else ranks


_MODES = {"high_throughput": False, "low_latency": True}
_OPERATION_BYTES = {"dispatch": DISPATCH_BYTES, "combine": COMBINE_BYTES}


def _all_reduce(rows: Columns, group: KernelGroup) -> KernelWork:
    message_bytes, ranks = need(rows, "message_bytes", "num_gpus")
    for name in set(rows.labels["op_name"].values.tolist()):
        if name != "all_reduce":
            raise MeasuredFileError(f"unknown op_name {name!r}; serving libraries' own kernels are all_reduce")
    return all_reduce_work(group.device, message_bytes=message_bytes, ranks=ranks)


def _exchange(rows: Columns, group: KernelGroup) -> KernelWork:
    words, device, rates = group
    for column, known in (("mode", _MODES), ("operation", _OPERATION_BYTES)):
        if words[column] not in known:
            raise MeasuredFileError(f"unknown {column} {words[column]!r}; known are {', '.join(known)}")
    nodes, ranks, hidden, topk, experts, tokens = need(
        rows, "num_nodes", "num_gpus", "hidden_size", "topk", "num_experts", "num_tokens"
    )
    sends_to_each_expert = _MODES[words["mode"]]
    return exchange_work(
        device,
        rates,
        tokens=tokens,
        hidden_size=hidden,
        topk=topk,
        num_experts=experts,
        ranks=ranks,
        nodes=nodes,
        num_sms=np.zeros_like(tokens) if sends_to_each_expert else need(rows, "num_sms")[0],
        element_bytes=_OPERATION_BYTES[words["operation"]],
        sends_to_each_expert=sends_to_each_expert,
    )


ALL_REDUCE = KernelTable(
    name="collectives_more",
    columns=Format(
        numbers={"num_gpus": 2, "message_bytes": 1},
        labels=("device", "library", "op_name", "kernel", "cuda_graph"),
        positive=("latency_s",),
    ),
    labels=("library", "cuda_graph", "num_gpus"),
    build=_all_reduce,
    axes=(("message",),),
    layout=("message_bytes",),
    dtype="",
    sizes_as_labels=("num_gpus",),
)
EXCHANGE = KernelTable(
    name="expert_exchange",
    columns=Format(
        numbers={"num_nodes": 1, "num_gpus": 2, "hidden_size": 1, "topk": 1, "num_experts": 1, "num_tokens": 1},
        labels=("device", "library", "mode", "operation"),
        positive=("latency_s",),
        optional=("num_sms",),
    ),
    labels=("library", "mode", "operation"),
    build=_exchange,
    axes=(("tokens",), ("tokens", "sms"), ("sent",), ("sent", "sms"), ("tokens", "nodes"), ("tokens", "sms", "nodes")),
    layout=("hidden_size", "topk", "num_experts", "num_nodes"),
    dtype="",
    part="operation",
)
KERNEL_TABLES = (ALL_REDUCE, EXCHANGE)
