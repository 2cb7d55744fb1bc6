"""Readers of tables (parquet and csv): measured tables as ``shapewright accuracy`` reads them, and exports of a store.

Each reader converts one record of its table into measurements. GEMMs are C[m,n] = A[m,k] B[k,n] in all tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.tables.gemm import PAPER_DTYPE, PAPER_LIBRARY
from shapewright.measure.accuracy.tables.paper_layers import FORMAT as LAYERS_FORMAT
from shapewright.measure.accuracy.tables.paper_layers import GEMMS as LAYER_GEMMS
from shapewright.measure.accuracy.tables.paper_layers import layer_gemm
from shapewright.measure.accuracy.tables.pointwise import SIZES as POINTWISE_SIZES
from shapewright.measure.accuracy.tables.pointwise import operation_of
from shapewright.measure.store.imports.measured import Measurement, measurement_of_rate, positive
from shapewright.measure.store.record import Case, Row, Run

Record = Mapping[str, Any]

# A separate library name, since some of these GEMMs are in the sweeps too.
LAYER_LIBRARY = f"{PAPER_LIBRARY}, layer logs"


def _measurement(record: Record, case: Case, suite: str) -> Measurement:
    """A measurement from a record with device, library, kernel and latency_s."""
    return Measurement(
        case=case,
        device=str(record["device"]),
        library=str(record["library"]),
        suite=suite,
        median_s=positive(record["latency_s"]),
        facts={"kernel": str(record.get("kernel") or "")},
    )


def _sizes(record: Record, *names: str) -> dict[str, Any]:
    """Integer columns of a record."""
    return {name: int(record[name]) for name in names}


def read_gemm(record: Record) -> Iterator[Measurement]:
    """Read a record of gemm.parquet, or of linear_layers.parquet, whose layers are of a named model."""
    kernel = str(record["kernel"])
    name, suite = (f"{record['model']} {kernel}", "linear_layers") if "model" in record else ("gemm", "gemm")
    operation = Gemm(name=name, dtype=get_dtype(record["dtype"]).name, layout="NT", **_sizes(record, "m", "n", "k"))
    yield _measurement(record, Case(operation=operation, variant=kernel), suite)


def read_attention(record: Record) -> Iterator[Measurement]:
    """Read a record of attention_prefill or attention_decode.parquet, whose times include the write to the cache."""
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
    yield _measurement(record, Case(operation=operation, variant=str(record["kernel"])), suite)


def read_pointwise(record: Record) -> Iterator[Measurement]:
    """Read a record of pointwise.parquet: a kernel of a real model, with bytes as the lowering counts them."""
    name, dtype = str(record["operation"]), get_dtype(record["dtype"])
    sizes = {size: np.float64(record[size]) for size in POINTWISE_SIZES}
    bulk = operation_of(sizes, name, str(record["model"]), dtype.num_bytes)
    read_bytes, written_bytes = float(bulk.read_bytes), float(bulk.written_bytes)
    operation = bulk.changed(dtype=dtype.name, read_bytes=read_bytes, written_bytes=written_bytes)
    width = round(written_bytes / (float(record["num_tokens"]) * dtype.num_bytes * int(bulk.num_kernels)))
    case = Case(operation=operation, row_width=width, variant=str(record["model"]))
    yield _measurement({**record, "kernel": name}, case, "pointwise")


def read_collectives(record: Record) -> Iterator[Measurement]:
    """Read a record of collectives.parquet: NCCL within one node."""
    ranks = int(record["num_gpus"])
    operation = Collective(
        name="collective",
        op_name=str(record["op_name"]),
        axis="tensor",
        message_bytes=float(record["message_bytes"]),
        num_ranks=ranks,
        ranks_per_node=ranks,
    )
    yield _measurement({**record, "kernel": record["op_name"]}, Case(operation=operation), "collectives")


def read_paper_gemm(record: Record) -> Iterator[Measurement]:
    """Read a record of paper_gemm.csv: the rate of a plain or batched GEMM."""
    sizes = _sizes(record, "batch", "m", "n", "k")
    yield _from_rate(record["gpu"], f"paper {record['sweep']}", str(record["sweep"]), sizes, positive(record["tflops"]))


def read_paper_layers(record: Record) -> Iterator[Measurement]:
    """Read a record of paper_layers.csv: the six GEMMs of a layer, most at their slowest of 100 to 200 iterations."""
    sizes = {name: np.float64(record[name]) for name in LAYERS_FORMAT.numbers}
    for name in LAYER_GEMMS:
        rate = positive(record.get(f"{name}_tflops"))
        if rate is not None:
            gemm = layer_gemm(name, sizes)
            dims = {letter: int(getattr(gemm, letter)) for letter in ("batch", "m", "n", "k")}
            suite = f"paper layers {record['log']}"
            yield _from_rate(record["gpu"], suite, name, dims, rate, library=LAYER_LIBRARY)


def read_mamf_table(record: Record) -> Iterator[Measurement]:
    """Read a record of mamf.csv: the fastest GEMM found on a device."""
    sizes = {"batch": 1, **{letter: int(record[letter.upper()]) for letter in ("m", "n", "k")}}
    rate = positive(record["mamf_tflops"])
    library = f"torch {record['torch_version']}"
    yield _from_rate(
        record["accelerator"], "mamf", "mamf", sizes, rate, dtype=record["dtype"], library=library, layout="NT"
    )


def _from_rate(
    device: Any,
    suite: str,
    name: str,
    sizes: Mapping[str, Any],
    rate_tflops: float | None,
    *,
    dtype: str = PAPER_DTYPE,
    library: str = PAPER_LIBRARY,
    layout: str = "NN",
) -> Measurement:
    operation = Gemm(name=name, dtype=get_dtype(dtype).name, layout=layout, **sizes)
    return measurement_of_rate(operation, rate_tflops, device=str(device), library=library, suite=suite)


# Required columns of each table and its reader; the first entry whose columns are all present applies.
READERS: tuple[tuple[frozenset[str], Callable[[Record], Iterator[Measurement]]], ...] = (
    (frozenset(("query_len", "num_kv_heads", "kv_cache_dtype", "latency_s")), read_attention),
    (frozenset(("op_name", "num_gpus", "message_bytes", "latency_s")), read_collectives),
    (frozenset(("operation", "num_tokens", "gated", "latency_s")), read_pointwise),
    (frozenset(("model", "kernel", "m", "n", "k", "latency_s")), read_gemm),
    (frozenset(("kernel", "dtype", "m", "n", "k", "latency_s")), read_gemm),
    (frozenset(("sweep", "gpu", "batch", "m", "n", "k", "tflops")), read_paper_gemm),
    (frozenset(("log", "gpu", "num_heads", "hidden_size", "qkv_tflops")), read_paper_layers),
    (frozenset(("accelerator", "mamf_tflops", "M", "N", "K")), read_mamf_table),
)
# Why some tables cannot be imported, by a column that identifies the table.
UNSUPPORTED_TABLES = {
    "moe_ep_size": "whole expert blocks, which are not single operations; 'shapewright accuracy' reads them",
    "tokens_per_s_per_gpu": "training runs, which are not single operations; 'shapewright accuracy' reads them",
    "sm_or_cu_count": "data sheets, which are not measurements; see 'shapewright devices'",
}


EXPORT_COLUMNS = frozenset(("key", "run_id", "sizes", "status", "median_s", "started_utc"))
"""Columns that identify measurements.parquet and measurements.csv of 'shapewright store export'."""

_CELL_READERS: Mapping[type, Callable[[Any], Any]] = {
    int: lambda cell: int(float(cell)),
    float: float,
    bool: lambda cell: str(cell).lower() in ("true", "1", "1.0"),
    str: str,
    Mapping: lambda cell: json.loads(cell) if isinstance(cell, str) else cell,
}


def read_exported(record: Record) -> tuple[Run, Row]:
    """Read a record of an exported store: the row and its run, unchanged.

    Raises:
        KeyError: a required column is missing.
        ValueError: a cell has a value of the wrong type.
    """
    return Run(**_fields_of(Run, record)), Row(**_fields_of(Row, record))


def _fields_of(cls: type[Run] | type[Row], record: Record) -> dict[str, Any]:
    """Fields of a run or row from cells; an empty cell is None or an empty string."""
    found: dict[str, Any] = {}
    types = get_type_hints(cls)
    for spec in fields(cls):
        is_optional = type(None) in get_args(types[spec.name])
        kind = get_args(types[spec.name])[0] if is_optional else types[spec.name]
        cell = record.get(spec.name)
        if cell is not None and cell != "":
            found[spec.name] = _CELL_READERS[get_origin(kind) or kind](cell)
        elif kind is str:
            found[spec.name] = ""
        elif is_optional:
            found[spec.name] = None
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise KeyError(spec.name)
    return found
