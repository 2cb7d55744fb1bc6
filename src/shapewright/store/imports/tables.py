"""Measured tables (parquet and csv) in the columns that ``shapewright accuracy`` reads.

Each reader turns a row of its table, as a mapping, into measurements. GEMMs are BLAS in all of them:
C[m,n] = A[m,k] B[k,n].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shapewright.dtypes import get_dtype
from shapewright.operations import Attention, Collective, Gemm, Pointwise
from shapewright.store.imports.measured import Measured, positive
from shapewright.store.record import Case
from shapewright.units import TERA

Record = Mapping[str, Any]

# The paper's sweeps and layers were timed in fp16 with PyTorch 1.13 to 2.0. Source: reference logs of EleutherAI/
# cookbook @27dff48, which name both.
PAPER_DTYPE, PAPER_LIBRARY = "fp16", "pytorch 1.13-2.0"
# A set of its own: some of its products are among the sweeps too.
LAYER_LIBRARY = f"{PAPER_LIBRARY}, layer logs"
# Name in pointwise.parquet -> kind of the package.
_POINTWISE_KINDS = {
    "input_layernorm": "norm",
    "attn_rope": "rotary",
    "mlp_act": "activation",
    "add": "residual",
    "emb": "embedding",
}


def _plain(record: Record, case: Case, suite: str) -> Measured:
    """A row of a table that names device, library, kernel and latency_s."""
    return Measured(
        case=case,
        device=str(record["device"]),
        library=str(record["library"]),
        suite=suite,
        median_s=positive(record["latency_s"]),
        facts={"kernel": str(record.get("kernel") or "")},
    )


def _sizes(record: Record, *names: str) -> dict[str, Any]:
    """Whole numbers of a row."""
    return {name: int(record[name]) for name in names}


def read_gemm(record: Record) -> Iterator[Measured]:
    """gemm.parquet: a linear layer's product."""
    operation = Gemm(
        name="gemm",
        dtype=get_dtype(record["dtype"]).name,
        layout="NT",
        **_sizes(record, "m", "n", "k"),
    )
    yield _plain(record, Case(operation=operation, variant=str(record["kernel"])), "gemm")


def read_linear_layers(record: Record) -> Iterator[Measured]:
    """linear_layers.parquet: the same, of named layers of models."""
    operation = Gemm(
        name=f"{record['model']} {record['kernel']}",
        dtype=get_dtype(record["dtype"]).name,
        layout="NT",
        **_sizes(record, "m", "n", "k"),
    )
    yield _plain(record, Case(operation=operation, variant=str(record["kernel"])), "linear_layers")


def read_attention(record: Record) -> Iterator[Measured]:
    """attention_prefill.parquet and attention_decode.parquet; the copy into the cache is timed with the call."""
    is_decode = "context_len" in record
    sizes = _sizes(record, "batch_size", "query_len", "num_heads", "num_kv_heads", "head_dim")
    dtype, cache = get_dtype(record["dtype"]).name, get_dtype(record["kv_cache_dtype"]).name
    operation = Attention(
        name="attention.decode" if is_decode else "attention.prefill",
        dtype=dtype,
        kv_cache_dtype=None if cache == dtype else cache,
        kv_len=int(record["context_len" if is_decode else "query_len"]),
        v_head_dim=sizes["head_dim"],
        window_size=int(record["window_size"]),
        writes_cache=True,
        **sizes,
    )
    suite = "attention_decode" if is_decode else "attention_prefill"
    yield _plain(record, Case(operation=operation, variant=str(record["kernel"])), suite)


def read_pointwise(record: Record) -> Iterator[Measured]:
    """pointwise.parquet: kernels of real models, bytes as the lowering counts them."""
    name = str(record["operation"])
    tokens, hidden = float(record["num_tokens"]), float(record["hidden_size"])
    shards, gated = float(record["tensor_parallel"]), float(record["gated"])
    width, inputs = hidden, 1.0
    if name == "attn_rope":
        heads = float(record["num_heads"]) + float(record["num_kv_heads"])
        width = heads * hidden / float(record["num_heads"]) / shards
    elif name == "mlp_act":
        width, inputs = float(record["intermediate_size"]) / shards, 1.0 + gated
    elif name == "add":
        inputs = 2.0
    dtype = get_dtype(record["dtype"])
    written_bytes = tokens * width * dtype.num_bytes
    operation = Pointwise(
        name=name,
        dtype=dtype.name,
        operation=_POINTWISE_KINDS[name],
        read_bytes=inputs * written_bytes,
        written_bytes=written_bytes,
    )
    case = Case(operation=operation, row_width=round(width), variant=str(record["model"]))
    yield _plain({**record, "kernel": name}, case, "pointwise")


def read_collectives(record: Record) -> Iterator[Measured]:
    """collectives.parquet: NCCL inside one node."""
    ranks = int(record["num_gpus"])
    operation = Collective(
        name="collective",
        op_name=str(record["op_name"]),
        axis="tensor",
        message_bytes=float(record["message_bytes"]),
        num_ranks=ranks,
        ranks_per_node=ranks,
    )
    yield _plain({**record, "kernel": record["op_name"]}, Case(operation=operation), "collectives")


def read_paper_gemm(record: Record) -> Iterator[Measured]:
    """paper_gemm.csv: rates of plain and batched products."""
    sizes = _sizes(record, "batch", "m", "n", "k")
    yield _of_rate(record["gpu"], f"paper {record['sweep']}", str(record["sweep"]), sizes, positive(record["tflops"]))


def read_paper_layers(record: Record) -> Iterator[Measured]:
    """paper_layers.csv: the six products of a layer, most of them the slowest of 100 to 200 iterations."""
    numbers = ("num_heads", "hidden_size", "micro_batch_size", "seq_len", "tensor_parallel")
    a, h, b, s, t = (int(float(record[name])) for name in numbers)
    tokens, batch = b * s, b * a // t
    shapes = {
        "qkv": (1, tokens, 3 * h // t, h),
        "score": (batch, s, s, h // a),
        "aov": (batch, s, h // a, s),
        "proj": (1, tokens, h, h // t),
        "mlp_up": (1, tokens, 4 * h // t, h),
        "mlp_down": (1, tokens, h, 4 * h // t),
    }
    for name, shape in shapes.items():
        rate = positive(record.get(f"{name}_tflops"))
        if rate is not None:
            sizes = dict(zip(("batch", "m", "n", "k"), shape, strict=True))
            yield _of_rate(record["gpu"], f"paper layers {record['log']}", name, sizes, rate, library=LAYER_LIBRARY)


def read_mamf_table(record: Record) -> Iterator[Measured]:
    """mamf.csv: the best product that anyone found on a device."""
    sizes = {"batch": 1, **{letter: int(record[letter.upper()]) for letter in ("m", "n", "k")}}
    rate = positive(record["mamf_tflops"])
    library = f"torch {record['torch_version']}"
    yield _of_rate(
        record["accelerator"], "mamf", "mamf", sizes, rate, dtype=record["dtype"], library=library, layout="NT"
    )


def _of_rate(
    device: Any,
    suite: str,
    name: str,
    sizes: Mapping[str, Any],
    rate_tflops: float | None,
    *,
    dtype: str = PAPER_DTYPE,
    library: str = PAPER_LIBRARY,
    layout: str = "NN",
) -> Measured:
    """A product whose rate a table keeps in TFLOP/s."""
    operation = Gemm(name=name, dtype=get_dtype(dtype).name, layout=layout, **sizes)
    median_s = None if rate_tflops is None else float(operation.flops) / (rate_tflops * TERA)
    return Measured(
        case=Case(operation=operation),
        device=str(device),
        library=library,
        suite=suite,
        median_s=median_s,
        facts={"kernel": name},
    )


# Columns that tell a table, and its reader; the first whose columns are all there is taken.
READERS: tuple[tuple[frozenset[str], Callable[[Record], Iterator[Measured]]], ...] = (
    (frozenset(("query_len", "num_kv_heads", "kv_cache_dtype", "latency_s")), read_attention),
    (frozenset(("op_name", "num_gpus", "message_bytes", "latency_s")), read_collectives),
    (frozenset(("operation", "num_tokens", "gated", "latency_s")), read_pointwise),
    (frozenset(("model", "kernel", "m", "n", "k", "latency_s")), read_linear_layers),
    (frozenset(("kernel", "dtype", "m", "n", "k", "latency_s")), read_gemm),
    (frozenset(("sweep", "gpu", "batch", "m", "n", "k", "tflops")), read_paper_gemm),
    (frozenset(("log", "gpu", "num_heads", "hidden_size", "qkv_tflops")), read_paper_layers),
    (frozenset(("accelerator", "mamf_tflops", "M", "N", "K")), read_mamf_table),
)
# Tables that hold no single operation, by a column that tells them.
NO_OPERATION = {
    "moe_ep_size": "whole expert blocks, which no single operation of a store stands for; 'shapewright accuracy' "
    "judges the table itself",
    "tokens_per_s_per_gpu": "whole training runs of others; 'shapewright accuracy' judges the table itself",
    "sm_or_cu_count": "data sheets, which are no measurements; 'shapewright devices' has them",
}
