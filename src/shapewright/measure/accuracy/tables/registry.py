"""The measured tables that can be evaluated: file, columns, pricing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shapewright.measure.accuracy.tables import (
    attention,
    communication,
    gemm,
    kernels,
    linear_layers,
    loss_by_shape,
    moe,
    paper_layers,
    pointwise,
    published_rows,
    training,
)
from shapewright.measure.accuracy.tables.serving import rows as serving_rows
from shapewright.measure.accuracy.tables.serving import runs as serving_runs
from shapewright.measure.accuracy.tables.serving import table as serving_table
from shapewright.measure.fit import loss_rows

if TYPE_CHECKING:
    from shapewright.measure.accuracy.chunk import Chunk, Columns
    from shapewright.measure.accuracy.context import Context
    from shapewright.measure.accuracy.measured_files import Format


class Table(NamedTuple):
    """A measured table.

    Attributes:
        file_name: Its file.
        columns: Required columns of the file.
        price: Prices its rows.
    """

    file_name: str
    columns: Format
    price: Callable[[Columns, Context], Iterator[Chunk]]


TABLES: Mapping[str, Table] = {
    "gemm": Table("gemm.parquet", gemm.FORMAT, gemm.price),
    "gemm_amd": Table("gemm_amd.parquet", gemm.AMD_FORMAT, gemm.price_amd),
    "gemm_fp32": Table("gemm_fp32.parquet", gemm.FP32_FORMAT, gemm.price_fp32),
    "attention_prefill": Table("attention_prefill.parquet", attention.PREFILL_FORMAT, attention.price_prefill),
    "attention_decode": Table("attention_decode.parquet", attention.DECODE_FORMAT, attention.price_decode),
    "moe": Table("moe.parquet", moe.FORMAT, moe.price),
    "collectives": Table("collectives.parquet", communication.FORMAT, communication.price),
    "linear_layers": Table("linear_layers.parquet", linear_layers.FORMAT, linear_layers.price),
    "pointwise": Table("pointwise.parquet", pointwise.FORMAT, pointwise.price),
    "pointwise_fp32": Table("pointwise_fp32.parquet", pointwise.FP32_FORMAT, pointwise.price_fp32),
    "paper_gemm": Table("paper_gemm.csv", gemm.PAPER_FORMAT, gemm.price_paper),
    "paper_layers": Table("paper_layers.csv", paper_layers.FORMAT, paper_layers.price),
    "loss_by_shape": Table("loss_by_shape.csv", loss_rows.FORMAT, loss_by_shape.price),
    "published_training_throughput": Table("published_training_throughput.csv", published_rows.FORMAT, training.price),
    "published_training_more": Table("published_training_more.csv", published_rows.FORMAT, training.price_more),
    "serving_runs": Table("serving_runs.csv", serving_runs.FORMAT, serving_runs.price),
    "serving_throughput": Table("serving_throughput.csv", serving_rows.FORMAT, serving_table.price),
    "serving_static": Table("serving_static.csv", serving_rows.STATIC_FORMAT, serving_table.price_static),
    "training_mlperf": Table("training_mlperf.csv", published_rows.MLPERF_FORMAT, training.price_mlperf),
} | {
    table.name: Table(f"{table.name}.{suffix}", table.columns, table.price)
    for table, suffix in (
        (attention.TRAINING, "csv"),
        (attention.ENCODER, "parquet"),
        (attention.LATENT, "parquet"),
        (kernels.NORMS, "csv"),
        (kernels.FUSED, "csv"),
        (kernels.QUANTIZE, "parquet"),
        (attention.LINEAR, "parquet"),
        (attention.SPARSE, "parquet"),
        (communication.ALL_REDUCE, "parquet"),
        (communication.EXCHANGE, "parquet"),
    )
}
