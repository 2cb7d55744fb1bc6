"""Evaluate stores of 'shapewright bench': every valid row once, compared with the price of its own operation.

GEMMs, attention, pointwise operations and collectives are separate tables, such as ``store/gemm``; so are whole layers
and steps, which are predicted from their operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import MeasuredFileError, ShapewrightError, StoreError
from shapewright.core.files import read_start
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.accuracy.chunk import Chunk, Labels, Prices, price_step, prices_of, split_chunks
from shapewright.measure.accuracy.context import ROWS_AT_ONCE
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import OK
from shapewright.prediction.composition.stages import PricedOperation
from shapewright.prediction.model_runs import LayerRun, ProxyRun, StepRun
from shapewright.prediction.predict import predict
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.collectives import price_collectives
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.operations import price_operations
from shapewright.pricing.pointwise import price_pointwises
from shapewright.pricing.price import roofline_s

if TYPE_CHECKING:
    from pathlib import Path

    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.context import Context
    from shapewright.measure.store.record import Row

TABLE = "store"
# First bytes of every SQLite file. Source: sqlite.org/fileformat.html, section 1.3.
_MAGIC = b"SQLite format 3\x00"


def find_stores(folder: Path) -> list[Path]:
    """Return the files of a folder that are SQLite databases."""
    return sorted(path for path in folder.iterdir() if path.is_file() and is_store(path))


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
    """Price every valid row once; parts are the suite's names of operations, with the requested kernel.

    Failed rows and repetitions are counted as skipped, unless their device is not selected.
    """
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[(row.device, row.kind, row.dtype, row.library, *_flags(row))].append(row)
    for (name, kind, dtype, library, *_), group in groups.items():
        device = context.find_device(name, len(group))
        if device is None:
            context.advance(len(group))
            continue
        good = _valid_rows(group, context)
        context.advance(len(group) - len(good))
        for start in range(0, len(good), ROWS_AT_ONCE):
            part = good[start : start + ROWS_AT_ONCE]
            kept, prices = _price_kind(kind, part, device, context)
            context.advance(len(part))
            if kept:
                labels = Labels.of([f"{row.name} {row.variant}".strip() for row in kept])
                measured = np.array([float(row.median_s or 0.0) for row in kept])
                yield from split_chunks(f"{TABLE}/{kind}", (device.name, dtype, library), labels, measured, prices)


def _valid_rows(rows: Sequence[Row], context: Context) -> list[Row]:
    """Return the valid rows; the others are counted."""
    reasons = [_skip_reason(row) for row in rows]
    context.skipped.update(reason for reason in reasons if reason)
    return [row for row, reason in zip(rows, reasons, strict=True) if not reason]


def _skip_reason(row: Row) -> str:
    """Return why a row is skipped; empty if it is not."""
    if row.status != OK:
        return f"status {row.status!r}, not {OK!r}"
    if not row.median_s:
        return "no measured time"
    if row.kind == ProxyRun.kind:
        return "a loss of 'shapewright proxy', which 'calibrate --losses' fits"
    # Repetitions have the same prediction: they would count its error twice.
    return "a repetition: each measurement is counted once" if row.repetition else ""


def is_store(path: Path) -> bool:
    """Return whether a file is an SQLite database, as stores are."""
    try:
        return read_start(path, len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _flags(row: Row) -> tuple[Any, ...]:
    """Return the fields that rows must share to be priced in one call."""
    if row.kind == "gemm":
        return row.layout, row.is_cold
    if row.kind == "attention":
        sizes = row.sizes
        names = ("causal", "is_backward", "kv_cache_dtype", "values_in_keys", "writes_cache")
        return row.variant, row.is_cold, *(sizes.get(name) for name in names)
    return ()


def _price_kind(kind: str, rows: Sequence[Row], device: Device, context: Context) -> tuple[list[Row], Prices]:
    """Return the rows that could be priced, with their prices; the others are counted."""
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
    # A user's record was fitted to rows that may have read from the cache, and to those of its libraries together.
    is_own = "gemm" in device.own_records and not context.uncalibrated
    hot = not first.is_cold and (is_own or device.architecture_facts.benchmarks_run_from_cache)
    library = "" if is_own else first.library
    found = price_gemm(operation, device, context.record("gemm", device), hot_cache=hot, library=library)
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
    operations = [
        replace(operation, operation="layernorm") if row.is_layernorm else operation
        for row in rows
        if isinstance(operation := row.operation(), Pointwise)
    ]
    return _join_intervals(price_pointwises(operations, device, context.record("pointwise", device)))


def _price_collective(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    operations = [operation for row in rows if isinstance(operation := row.operation(), Collective)]
    return _join_intervals(price_collectives(operations, device, context.record("collectives", device)))


def _price_single(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    """Price any other operation as in a model's step."""
    operations: list[Any] = [row.operation() for row in rows]
    return _join_intervals(price_operations(operations, context.with_pricing(device)))


def _price_layer(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    found = []
    for row in rows:
        layer = row.operation()
        assert isinstance(layer, LayerRun)
        operations = layer.operations()
        prices = price_operations(operations, context.with_pricing(device))
        priced = [PricedOperation(operation, one) for operation, one in zip(operations, prices, strict=True)]
        found.append(price_step(priced, *layer.config_and_workload()))
    return Prices(*np.array(found, dtype=float).T)


def _price_step(rows: Sequence[Row], device: Device, context: Context) -> Prices:
    found = []
    for row in rows:
        step = row.operation()
        assert isinstance(step, StepRun)
        config, workload = step.config_and_workload()
        whole = predict(config, device=context.with_pricing(device), workload=workload)
        floor_s = sum(float(e.price.roofline_s) * int(e.operation.repeats) for e in whole.busiest_operations)
        found.append((whole.step_time_s, whole.step_time_low_s, whole.step_time_high_s, floor_s))
    return Prices(*np.array(found, dtype=float).T)


def _join_intervals(prices: Sequence[Any]) -> Prices:
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
