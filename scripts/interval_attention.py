"""Intervals of fused attention: its sections, other libraries, devices left out. Not a script itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from interval_groups import Groups, library_groups, own_groups
from interval_products import usual_biases
from interval_rows import (
    ROWS_OF_A_TABLE,
    attention_layouts,
    price_rows,
    read_table,
    renamed,
    sampled,
    seen_and_halves,
    unseen_rows,
    words_of,
)
from interval_transfer import transfer_groups

from shapewright.accuracy.columns import Columns
from shapewright.dtypes import get_dtype
from shapewright.fit.intervals import Interval
from shapewright.hardware import find_measured_device, load_device
from shapewright.perf.attention_kernels import AttentionShape
from shapewright.perf.attention_sections import choose_kernels, choose_section
from shapewright.perf.calibration import load_record

TABLES = ("attention_prefill", "attention_decode")


def attention_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Fused attention: its sections, other libraries, devices left out."""
    own, far, swapped = [], [], []
    for table in TABLES:
        columns = read_table(folder, table)
        for chosen, said in seen_and_halves(table, columns, attention_layouts(columns)):
            own += [rows.assign(**said) for rows in rows_by_kernel(columns.take(chosen), table)]
        some = sampled(unseen_rows(folder, table), ROWS_OF_A_TABLE)
        far += list(rows_by_kernel(some, table, uncalibrated=True))
        for other in other_attention_libraries(some):
            swapped += list(rows_by_kernel(other, table))
    rows = pd.concat(own, ignore_index=True)
    keys = ["device", "dtype", "library", "part", "width", "group", "phase"]
    names = {key: attention_path(*key) for key in rows[keys].drop_duplicates().itertuples(index=False, name=None)}
    rows["path"] = [names[key] for key in rows[keys].itertuples(index=False, name=None)]
    rows["regime_s"] = rows.predicted
    # What a table was learned from lies too near it: its form is that of layouts left out in turn.
    learned = [path for path in set(rows.path) if path.endswith(", learned")]
    rows["regime"] = rows.device + rows.library + rows.dtype + rows.phase + rows.path.isin(learned).astype(str)
    groups, report = own_groups(rows, "regime", {path: learned_form(path) for path in learned})
    groups |= library_groups(with_formats(swapped))
    groups |= transfer_groups("attention", with_formats(far), usual_biases(folder))
    return groups, report


def with_formats(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Rows with their element format, by which groups are told apart."""
    rows = pd.concat(frames, ignore_index=True)
    pairs = zip(rows.dtype, rows.phase, strict=True)
    return rows.assign(format=[attention_format(dtype, phase) for dtype, phase in pairs])


def rows_by_kernel(columns: Columns, table: str, **context: Any) -> Iterator[pd.DataFrame]:
    """Rows with the kernel that each call takes: head width, group and phase decide it."""
    numbers = columns.numbers
    group = np.minimum(numbers["num_heads"] / numbers["num_kv_heads"], 4.0)
    group = np.where(group == 3.0, 2.0, group)
    is_token = numbers["query_len"] == 1.0
    for width, size, token in product(np.unique(numbers["head_dim"]), np.unique(group), (False, True)):
        chosen = columns.take((numbers["head_dim"] == width) & (group == size) & (is_token == token))
        if chosen.num_rows:
            rows = price_rows(table, chosen, **context)
            yield rows.assign(width=width, group=size, phase="decode" if token else "prefill")


def attention_format(dtype: str, phase: str) -> str:
    """Element formats as attention sections are named, after the phase."""
    arithmetic, _, cache = dtype.partition("+")
    return f"{phase}/{'fp8' if arithmetic == 'fp8' else '16bit_kv8' if cache else '16bit'}"


def attention_path(device: str, dtype: str, library: str, kernel: str, width: float, group: float, phase: str) -> str:
    """Group of the section and kernel that price a call."""
    record = load_record("attention", load_device(device))
    arithmetic, _, cache = dtype.partition("+")
    bits = 8 if cache or arithmetic == "fp8" else 16
    section = choose_section(get_dtype(arithmetic).name, bits, record, library)
    one = np.ones(1)
    shape = AttentionShape(
        batch_size=one, query_len=one, kv_len=one, num_heads=group * one, num_kv_heads=one, head_dim=width * one,
        v_head_dim=width * one, window_size=0.0 * one, causal=True, element_bytes=2.0, kv_element_bytes=2.0,
    )  # fmt: skip
    (name,) = choose_kernels(shape, section, kernel)
    path = f"{section.library}/{section.name}" if section.library else section.name
    learned = ", learned" if section.residual(name, phase) is not None else ""
    return f"own/{record.id}/{path}/{name}/{phase}{learned}"


def learned_form(path: str) -> Interval:
    """Interval of a table of attention, from layouts that its trees did not see, by the path of its group."""
    _, _, device, _, kernel = path.removesuffix(", learned").split("/", 4)
    residual = load_record("attention", load_device(device)).residual
    assert residual is not None
    found: Interval = residual["interval"][residual["tables"][kernel]]
    return found


def other_attention_libraries(columns: Columns) -> Iterator[Columns]:
    """Rows under the name of a library that is not theirs, by device.

    The default sections are the newest vllm's: they price every name that a record does not know. Its own rows are
    priced with the other library's sections, under that one's kernels of the same width.
    """
    devices, libraries = words_of(columns, "device"), words_of(columns, "library")
    for device in sorted(set(devices)):
        record = load_record("attention", find_measured_device(device))
        others = [name for name in record.parameters["libraries"] if name in set(libraries[devices == device])]
        here = (devices == device) & np.isin(libraries, others)
        yield renamed(columns.take(here), library="another", kernel="another")
        for other in others:
            rest = columns.take((devices == device) & (libraries != other))
            yield renamed(rest, library=other, kernel="")
