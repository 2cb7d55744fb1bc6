"""collectives.parquet: NCCL inside one node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.accuracy.columns import Labels
from shapewright.accuracy.context import Chunk, prices_of, split_chunks
from shapewright.accuracy.read import Format
from shapewright.errors import MeasuredFileError
from shapewright.operations import Collective
from shapewright.operations.collective import COLLECTIVE_OPS
from shapewright.perf.collectives import price_collective

if TYPE_CHECKING:
    from shapewright.accuracy.columns import Columns
    from shapewright.accuracy.context import Context, Prices
    from shapewright.hardware import Device

FORMAT = Format(
    numbers={"num_gpus": 2, "message_bytes": 1}, labels=("device", "library", "op_name"), positive=("latency_s",)
)


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; the dtype of a message makes no difference, parts are operation and group."""

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        op_name = words[1]
        if op_name not in COLLECTIVE_OPS:
            raise MeasuredFileError(f"unknown op_name {op_name!r}; known are {', '.join(COLLECTIVE_OPS)}")
        ranks = rows.numbers["num_gpus"]
        operation = Collective(
            name="collective",
            op_name=op_name,
            axis="tensor",
            message_bytes=rows.numbers["message_bytes"],
            num_ranks=ranks,  # type: ignore[arg-type]
            ranks_per_node=ranks,  # type: ignore[arg-type]
        )
        found = price_collective(operation, device, context.record("collectives", device))
        return prices_of(found, found.roofline_s)

    for rows, device, words, prices in context.price_groups(columns, ("device", "op_name", "library"), price_group):
        parts = Labels.of([f"{words[1]} x{ranks:.0f}" for ranks in rows.numbers["num_gpus"]])
        names = (device.name, "bytes", words[2])
        yield from split_chunks("collectives", names, parts, rows.numbers["latency_s"], prices)
