"""Export a store as the tables that ``shapewright accuracy`` reads, and as one table with all rows."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shapewright.core.errors import MissingExtraError, StoreError
from shapewright.core.files import replacing
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import OK, Row
from shapewright.prediction.model_runs import ProxyRun

# Operation in pointwise.parquet by kernel of a row, and whether it is gated.
_POINTWISE_NAMES = {
    "layer_norm": ("input_layernorm", 0),
    "gelu": ("mlp_act", 0),
    "glu": ("mlp_act", 1),
    "residual": ("add", 0),
}

Record = dict[str, Any]
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def export_store(store: Store, folder: str | Path, *, format_name: str = "parquet") -> dict[str, int]:
    """Write the store's rows as tables; existing files with the same names are replaced.

    ``measurements`` contains every row and its run, failed rows included. The other tables contain successful rows in
    the columns of measured tables, with medians as ``latency_s``. Some rows are in ``measurements`` only, because the
    other tables have no column for them: repetitions, GEMMs in other layouts than NT, gradients of attention, and
    attention that does not write keys and values to a cache (the libraries of those tables do). Final losses of proxy
    models are one row per model, the mean over its seeds.

    Args:
        folder: Folder to write to; it is created if it does not exist.
        format_name: ``parquet`` or ``csv``; ``shapewright accuracy`` reads both.

    Returns:
        Number of rows written, by file name.

    Raises:
        MissingExtraError: pyarrow is not installed, which parquet needs.
        StoreError: the folder cannot be written.
    """
    rows, runs = store.rows(), {run.run_id: run for run in store.runs()}
    good = [row for row in rows if row.status == OK and row.repetition == 0]
    tables: dict[str, list[Record]] = {
        name: [record for row in good if (record := make(row)) is not None] for name, make in _TABLES.items()
    }
    tables["loss_by_shape"] = loss_records([row for row in rows if row.status == OK])
    tables["measurements"] = [{**_flat(row.to_json()), **_run_facts(runs[row.run_id])} for row in rows]
    write = _write_parquet if format_name == "parquet" else _write_csv
    target, written = Path(folder), {}
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, records in tables.items():
            if records:
                path = target / f"{name}.{format_name}"
                write(path, records)
                written[path.name] = len(records)
    except OSError as error:
        raise StoreError(
            f"cannot write {error.filename or target}: {error.strerror or error}; give a writable folder"
        ) from error
    return written


def _shared_columns(row: Row) -> Record:
    """Columns that all tables have: device, library, kernel, element format and time."""
    return {
        "device": row.device,
        "library": row.library,
        "kernel": row.kernel,
        "dtype": row.dtype,
        "latency_s": row.median_s,
    }


def _gemm(row: Row) -> Record | None:
    if row.kind != "gemm" or row.layout != "NT" or row.batch != 1:
        return None
    return {**_shared_columns(row), "m": row.m, "n": row.n, "k": row.k}


def _attention(row: Row) -> Record | None:
    sizes = row.sizes
    if row.kind != "attention" or sizes["is_backward"] or sizes["v_head_dim"] != sizes["head_dim"]:
        return None
    if not sizes.get(
        "writes_cache"
    ):  # the tables' times include the write: without it prefills would look a sixth too fast
        return None
    names = ("batch_size", "query_len", "num_heads", "num_kv_heads", "head_dim", "window_size")
    cache = {"kv_cache_dtype": sizes["kv_cache_dtype"] or row.dtype}
    return {**_shared_columns(row), **{name: sizes[name] for name in names}, **cache}


def _prefill(row: Row) -> Record | None:
    record = _attention(row)
    is_prefill = record is not None and row.sizes["causal"] and 1 < row.sizes["query_len"] == row.sizes["kv_len"]
    return record if is_prefill else None


def _decode(row: Row) -> Record | None:
    record = _attention(row)
    if record is None or row.sizes["query_len"] != 1:
        return None
    return {**record, "context_len": row.sizes["kv_len"]}


def _pointwise(row: Row) -> Record | None:
    if row.kind != "pointwise" or row.kernel not in _POINTWISE_NAMES:
        return None
    operation, gated = _POINTWISE_NAMES[row.kernel]
    width = row.sizes["row_width"]
    element_bytes = {"fp32": 4, "tf32": 4}.get(row.dtype, 2)
    num_tokens = round(row.sizes["written_bytes"] / (element_bytes * width))
    sizes = {"num_tokens": num_tokens, "hidden_size": width, "intermediate_size": width, "gated": gated}
    ones = dict.fromkeys(("num_heads", "num_kv_heads", "tensor_parallel"), 1)
    return {**_shared_columns(row), **sizes, **ones, "model": "rows of one width", "operation": operation}


def loss_records(rows: Sequence[Row]) -> list[Record]:
    """Final losses of proxy models, in the columns of measured tables of losses.

    Args:
        rows: Successful rows; other kinds and losses before the end of a run are left out.

    Returns:
        One record per model and recipe: ``loss`` and ``seconds_per_step`` are means over seeds, ``losses`` lists the
        loss of each seed, in their order. Losses of other data, formats or recipes have another ``data`` or
        ``schedule``.
    """
    models: dict[str, list[Row]] = {}
    for row in rows:
        if (
            row.kind == ProxyRun.kind
            and row.sizes["training"]["trained_tokens"] == row.sizes["training"]["train_tokens"]
        ):
            same = json.dumps([row.sizes, row.variant, row.dtype, row.device, row.library], sort_keys=True)
            models.setdefault(same, []).append(row)
    # Processes that share a store may finish a later seed first.
    return [_loss(sorted(seeds, key=lambda row: row.repetition)) for seeds in models.values()]


def _loss(seeds: Sequence[Row]) -> Record:
    first, losses = seeds[0], [row.figures["loss_nats"] for row in seeds]
    run = first.operation()
    assert isinstance(run, ProxyRun)
    config, workload = run.config_and_workload()
    recipe = run.training
    names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    words = ", ".join(
        f"{name.replace('_', ' ')} {recipe[name]:g}"
        for name in ("learning_rate", "warmup_fraction", "final_fraction", "weight_decay")
    )
    return {
        "source": "proxy",
        "run": first.name,
        **{name: getattr(config, name) for name in names},
        "gated_mlp": int(config.gated_mlp),
        "vocab_size": config.vocab_size,
        "tied_embeddings": int(config.tied_embeddings),
        "seq_len": workload.seq_len,
        "tokens": recipe["trained_tokens"],
        "batch_tokens": recipe["batch_tokens"],
        "learning_rate": recipe["learning_rate"],
        "schedule": f"cosine, {words}, sequences of {workload.seq_len}",
        "data": f"bytes {recipe['text']}, {first.dtype}",
        "loss": statistics.mean(losses),
        "losses": " ".join(f"{loss:.6f}" for loss in losses),
        "loss_kind": "validation",
        "device": first.device,
        "library": first.library,
        "seconds_per_step": statistics.mean(row.median_s or 0.0 for row in seeds),
    }


_TABLES: Mapping[str, Callable[[Row], Record | None]] = {
    "gemm": _gemm,
    "attention_prefill": _prefill,
    "attention_decode": _decode,
    "pointwise": _pointwise,
}


def _flat(facts: Record) -> Record:
    """Encode mappings as JSON text, so that each field is one cell."""
    return {
        name: json.dumps(value, sort_keys=True) if isinstance(value, dict) else value for name, value in facts.items()
    }


def _run_facts(run: Any) -> Record:
    names = ("started_utc", "command", "driver", "runtime", "torch_version", "shapewright_version")
    return {
        **{name: getattr(run, name) for name in names},
        "device_facts": json.dumps(run.device_facts, sort_keys=True),
    }


def _write_parquet(path: Path, records: Sequence[Record]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError(
            "writing parquet needs pyarrow, which is not installed; run: pip install 'shapewright[fit]', or write csv"
        ) from error
    with replacing(path) as draft:
        pq.write_table(pa.Table.from_pylist(list(records)), draft, compression="zstd")


def _write_csv(path: Path, records: Sequence[Record]) -> None:
    with replacing(path) as draft, draft.open("x", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows({name: _plain_cell(value) for name, value in record.items()} for record in records)


def _plain_cell(value: Any) -> Any:
    """A text that a spreadsheet would run as a formula, with an apostrophe before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value
