"""Stores of 'shapewright bench': every good row, each measurement once, against the price of its own operation.

Products, attention, pointwise operations and collectives are tables of their own, such as ``store/gemm``; so are whole
layers and steps, which are predicted from the operations that they are made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.accuracy.chunk import Chunk, Prices, prices_of, split_chunks
from shapewright.accuracy.columns import Labels
from shapewright.accuracy.context import ROWS_AT_ONCE
from shapewright.accuracy.gemm import HOT_CACHE_ARCHITECTURES
from shapewright.adding_up import PricedOperation, add_up
from shapewright.errors import MeasuredFileError, ShapewrightError, StoreError
from shapewright.layout import ParallelLayout
from shapewright.operations import Attention, Collective, Gemm, Pointwise
from shapewright.perf.attention import price_attention
from shapewright.perf.collectives import price_collectives
from shapewright.perf.gemm import price_gemm
from shapewright.perf.pointwise import price_pointwises
from shapewright.perf.pricing import price_operations
from shapewright.perf.roofline import roofline_s
from shapewright.predict import predict
from shapewright.store.file import Store
from shapewright.store.record import OK
from shapewright.whole import LayerRun, StepRun

if TYPE_CHECKING:
    from pathlib import Path

    from shapewright.accuracy.context import Context
    from shapewright.hardware import Device
    from shapewright.store.record import Row

TABLE = "store"
# How every SQLite file begins. Source: sqlite.org/fileformat.html, section 1.3.
_MAGIC = b"SQLite format 3\x00"


def find_stores(folder: Path) -> list[Path]:
    """Files of a folder that are SQLite databases."""
    return sorted(path for path in folder.iterdir() if path.is_file() and _is_database(path))


def read_rows(path: Path) -> list[Row]:
    """All rows of a store; ``price`` judges the good ones.

    Raises:
        MeasuredFileError: the file is no store, damaged, or newer than this program.
    """
    try:
        with Store(path, read_only=True) as store:
            return list(store.rows())
    except StoreError as error:
        raise MeasuredFileError(str(error)) from error


def price(rows: Sequence[Row], context: Context) -> Iterator[Chunk]:
    """Price every good row once; parts are what the suite calls the operation, with the kernel that was asked for.

    Rows that failed and repeated measurements are counted as skipped, unless their device is not asked for.
    """
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[(row.device, row.kind, row.dtype, row.library, *_flags(row))].append(row)
    for (name, kind, dtype, library, *_), group in groups.items():
        device = context.device_of(name, len(group))
        if device is None:
            context.advance(len(group))
            continue
        good = _good(group, context)
        context.advance(len(group) - len(good))
        for start in range(0, len(good), ROWS_AT_ONCE):
            part = good[start : start + ROWS_AT_ONCE]
            kept, prices = _price_kind(kind, part, device, context)
            context.advance(len(part))
            if kept:
                labels = Labels.of([f"{row.name} {row.variant}".strip() for row in kept])
                measured = np.array([float(row.median_s or 0.0) for row in kept])
                yield from split_chunks(f"{TABLE}/{kind}", (device.name, dtype, library), labels, measured, prices)


def _good(rows: Sequence[Row], context: Context) -> list[Row]:
    """Rows that can be judged; the others are counted."""
    reasons = [_why_not_judged(row) for row in rows]
    context.skipped.update(reason for reason in reasons if reason)
    return [row for row, reason in zip(rows, reasons, strict=True) if not reason]


def _why_not_judged(row: Row) -> str:
    """Why a row has no error of its own; empty if it has."""
    if row.status != OK:
        return f"status {row.status!r}, not {OK!r}"
    if not row.median_s:
        return "no measured time"
    # Both measurements of one thing have the same prediction: they would count its error twice.
    return "repeats a measurement, and each counts once" if row.repetition else ""


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _flags(row: Row) -> tuple[Any, ...]:
    """What rows must share to be priced in one evaluation."""
    if row.kind == "gemm":
        return row.layout, row.is_cold
    if row.kind == "attention":
        sizes = row.sizes
        names = ("causal", "is_backward", "kv_cache_dtype", "values_in_keys", "writes_cache")
        return row.variant, row.is_cold, *(sizes.get(name) for name in names)
    return ()


def _price_kind(kind: str, rows: Sequence[Row], device: Device, context: Context) -> tuple[list[Row], Prices]:
    """Rows that could be priced, with their prices; the others are counted."""
    try:
        return list(rows), _PRICERS.get(kind, _price_single)(rows, device, context)
    except ShapewrightError as error:
        if len(rows) == 1:
            context.skipped[str(error)] += 1
            return [], _EMPTY
    kept: list[Row] = []
    found: list[Prices] = []
    for row in rows:
        one, prices = _price_kind(kind, [row], device, context)
        if one:
            kept += one
            found.append(prices)
    return kept, Prices(*(np.concatenate(parts) for parts in zip(*found, strict=True))) if found else _EMPTY


_EMPTY = Prices(*(np.empty(0) for _ in range(4)))


def _columns(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    return {name: np.array([float(row.sizes[name]) for row in rows]) for name in names}


def _price_gemm(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    first = rows[0]
    operation = Gemm(name="gemm", dtype=first.dtype, layout=first.layout, **_columns(rows, ("m", "n", "k", "batch")))
    hot = not first.is_cold and device.architecture in HOT_CACHE_ARCHITECTURES
    found = price_gemm(operation, device, context.record("gemm", device), hot_cache=hot, library=first.library)
    return prices_of(found, roofline_s(operation.flops, operation.num_bytes, device, operation.dtype))


def _price_attention(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    first = rows[0]
    call = first.operation()
    assert isinstance(call, Attention)
    sized = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window_size")
    operation = replace(call, **_columns(rows, sized))
    record = context.record("attention", device)
    library, kernel = (first.library, first.variant) if first.library in record.parameters["libraries"] else ("", "")
    found = price_attention(operation, device, record, hot_cache=not first.is_cold, library=library, kernel=kernel)
    return prices_of(found, roofline_s(operation.executed_flops, operation.num_bytes, device, operation.dtype))


def _price_pointwise(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    operations = [operation for row in rows if isinstance(operation := row.operation(), Pointwise)]
    return _joined(price_pointwises(operations, device, context.record("pointwise", device)))


def _price_collective(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    operations = [operation for row in rows if isinstance(operation := row.operation(), Collective)]
    return _joined(price_collectives(operations, device, context.record("collectives", device)))


def _price_single(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    """Any other operation, as a model's step prices it."""
    operations: list[Any] = [row.operation() for row in rows]
    return _joined(price_operations(operations, context.priced(device), uncalibrated=context.uncalibrated))


def _price_layer(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    found = []
    for row in rows:
        layer = row.operation()
        assert isinstance(layer, LayerRun)
        operations = layer.operations()
        prices = price_operations(operations, context.priced(device), uncalibrated=context.uncalibrated)
        priced = [PricedOperation(operation, one) for operation, one in zip(operations, prices, strict=True)]
        bounds = [replace(entry, price=replace(entry.price, time_s=entry.price.roofline_s)) for entry in priced]
        config, workload = layer.question()
        times = add_up(priced, config, workload, ParallelLayout())
        floor_s = add_up(bounds, config, workload, ParallelLayout()).step_s
        found.append((times.step_s, times.step_low_s, times.step_high_s, floor_s))
    return Prices(*np.array(found, dtype=float).T)


def _price_step(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    found = []
    for row in rows:
        step = row.operation()
        assert isinstance(step, StepRun)
        config, workload = step.question()
        whole = predict(config, device=context.priced(device), workload=workload, uncalibrated=context.uncalibrated)
        floor_s = sum(float(e.price.roofline_s) * int(e.operation.repeats) for e in whole.busiest_operations)
        found.append((whole.step_time_s, whole.step_time_low_s, whole.step_time_high_s, floor_s))
    return Prices(*np.array(found, dtype=float).T)


def _joined(prices: Sequence[Any]) -> Prices:
    names = ("time_s", "low_s", "high_s", "roofline_s")
    return Prices(*(np.array([float(getattr(one, name)) for one in prices]) for name in names))


_PRICERS: Mapping[str, Callable[[Sequence[Row], Device, Context], Prices]] = {
    "gemm": _price_gemm,
    "attention": _price_attention,
    "pointwise": _price_pointwise,
    "collective": _price_collective,
    "layer": _price_layer,
    "step": _price_step,
}
