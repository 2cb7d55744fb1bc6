"""Evaluate collectives_more.parquet and expert_exchange.parquet: communication kernels of serving libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.kernels.table import KernelTable, need
from shapewright.pricing.kernels.exchange import COMBINE_BYTES, DISPATCH_BYTES, all_reduce_work, exchange_work

if TYPE_CHECKING:
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.tables.kernels.table import KernelGroup
    from shapewright.pricing.kernels.work import KernelWork

_MODES = {"high_throughput": False, "low_latency": True}
_OPERATION_BYTES = {"dispatch": DISPATCH_BYTES, "combine": COMBINE_BYTES}


def _all_reduce(rows: Columns, group: KernelGroup) -> KernelWork:
    message_bytes, ranks = need(rows, "message_bytes", "num_gpus")
    for name in {rows.labels["op_name"][row] for row in range(rows.num_rows)}:
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
