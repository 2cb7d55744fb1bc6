"""Interval groups of fused attention and of expert blocks: their sections, other libraries, left-out devices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from shapewright.core.dtypes import get_dtype
from shapewright.hardware.loader import find_measured_device, load_device
from shapewright.measure.accuracy.chunk import Columns
from shapewright.measure.refit.intervals.gemm import prior_biases
from shapewright.measure.refit.intervals.left_out import transfer_groups
from shapewright.measure.refit.intervals.residual_intervals import Groups, Interval, library_groups, own_groups
from shapewright.measure.refit.intervals.rows import (
    ROWS_OF_A_TABLE,
    held_out_rows,
    price_rows,
    read_table,
    sampled,
    seen_and_halves,
    with_labels,
)
from shapewright.pricing.attention.kernels import AttentionShape
from shapewright.pricing.attention.sections import choose_kernels, choose_section
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.residual import section_name

TABLES = ("attention_prefill", "attention_decode")


def attention_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Return the interval groups of fused attention."""
    own, far, swapped = [], [], []
    for table in TABLES:
        columns = read_table(folder, table)
        for chosen, labels in seen_and_halves(table, columns):
            own += [rows.assign(**labels) for rows in rows_by_kernel(columns.take(chosen), table)]
        some = sampled(held_out_rows(folder, table), ROWS_OF_A_TABLE)
        far += list(rows_by_kernel(some, table, uncalibrated=True))
        for other in other_attention_libraries(some):
            swapped += list(rows_by_kernel(other, table))
    rows = pd.concat(own, ignore_index=True)
    keys = ["device", "dtype", "library", "part", "width", "group", "phase"]
    kernels = {key: find_kernel(*key) for key in rows[keys].drop_duplicates().itertuples(index=False, name=None)}
    found = [kernels[key] for key in rows[keys].itertuples(index=False, name=None)]
    rows["path"] = [kernel.group for kernel in found]
    rows["regime_s"] = rows.predicted
    # The rows that a table was learned from are too close to it: its interval is that of layouts left out in turn.
    is_learned = pd.Series([kernel.table_interval is not None for kernel in found], index=rows.index)
    rows["regime"] = rows.device + rows.library + rows.dtype + rows.phase + is_learned.astype(str)
    known = {kernel.group: kernel.table_interval for kernel in kernels.values() if kernel.table_interval is not None}
    groups, report = own_groups(rows, "regime", known)
    groups |= library_groups(with_formats(swapped))
    groups |= transfer_groups("attention", with_formats(far), prior_biases(folder))
    return groups, report


def with_formats(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return rows with the element formats and the phase by which groups are named."""
    rows = pd.concat(frames, ignore_index=True)
    pairs = zip(rows.dtype, rows.phase, strict=True)
    return rows.assign(format=[attention_format(dtype, phase) for dtype, phase in pairs], format_family=rows.phase)


def rows_by_kernel(columns: Columns, table: str, **context: Any) -> Iterator[pd.DataFrame]:
    """Yield priced rows by head width, group and phase, which determine the kernel."""
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
    """Return the element formats in the naming of attention sections, after the phase."""
    arithmetic, _, cache = dtype.partition("+")
    return f"{phase}/{'fp8' if arithmetic == 'fp8' else '16bit_kv8' if cache else '16bit'}"


class PricedKernel(NamedTuple):
    """The section and kernel that price some calls.

    Attributes:
        group: Name of their interval group.
        table_interval: Interval of the learned table, from layouts that its trees did not see; None without a table.
    """

    group: str
    table_interval: Interval | None


def find_kernel(
    device: str, dtype: str, library: str, kernel: str, width: float, group: float, phase: str
) -> PricedKernel:
    """Find the section and kernel that price a call."""
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
    group_name = f"own/{record.id}/{path}/{name}/{phase}"
    if section.residual(name, phase) is None:
        return PricedKernel(group_name, None)
    assert record.residual is not None
    table = record.residual["tables"][f"{path}/{name}/{phase}"]
    return PricedKernel(f"{group_name}, learned", record.residual["interval"][table])


def other_attention_libraries(columns: Columns) -> Iterator[Columns]:
    """Yield rows with the name of another library, by device.

    The default sections, those of the newest vllm, price every unknown name. Its own rows are priced with the other
    library's sections, by that library's kernels of the same width.
    """
    devices, libraries = columns.labels["device"].values, columns.labels["library"].values
    for device in sorted(set(devices)):
        record = load_record("attention", find_measured_device(device))
        others = [name for name in record.parameters["libraries"] if name in set(libraries[devices == device])]
        here = (devices == device) & np.isin(libraries, others)
        yield with_labels(columns.take(here), library="another", kernel="another")
        for other in others:
            rest = columns.take((devices == device) & (libraries != other))
            yield with_labels(rest, library=other, kernel="")


def expert_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Return the interval groups of expert blocks."""
    columns = read_table(folder, "moe")
    rows, known = own_rows(columns)
    rows["regime"] = rows.device + rows.dtype + rows.path.isin(list(known)).astype(str)
    groups, report = own_groups(rows[rows.path != ""], "regime", known)
    for device in rows.device.unique():
        groups |= default_groups(load_record("moe", load_device(device)), groups)

    some = sampled(held_out_rows(folder, "moe"), ROWS_OF_A_TABLE)
    is_rare = rows.is_held_out & (rows.path == "")
    others = [*other_kernels(columns, some), rows[is_rare].assign(library="rare kernels")]
    groups |= library_groups(rows_of_gemms(pd.concat(others, ignore_index=True)))
    far = rows_of_gemms(price_rows("moe", some, uncalibrated=True, as_new_shapes=True))
    return groups | transfer_groups("moe", far, prior_biases(folder)), report


def own_rows(columns: Columns) -> tuple[pd.DataFrame, dict[str, Interval]]:
    """Return rows priced with their own kernel's section, with the group in ``path`` (empty without one).

    Returned too are the intervals of learned tables, by group.
    """
    parts = seen_and_halves("moe", columns)
    kernels = columns.labels["kernel"].values
    own = []
    for kernel in sorted(set(kernels)):
        for chosen, labels in parts:
            found = columns.take((kernels == kernel) & chosen)
            if found.num_rows:
                own.append(price_rows("moe", found, as_new_shapes=True).assign(kernel=kernel, **labels))
    rows = pd.concat(own, ignore_index=True)
    names = ["device", "dtype", "library", "kernel"]
    sections = {key: find_section(*key) for key in rows[names].drop_duplicates().itertuples(index=False, name=None)}
    rows["path"] = [sections[key].group for key in rows[names].itertuples(index=False, name=None)]
    # Intervals are indexed by the time of one GEMM, of which a block has two.
    rows["regime_s"] = rows.predicted / 2.0
    tables = {one.group: one.table_interval for one in sections.values() if one.table_interval is not None}
    return rows, tables


def other_kernels(columns: Columns, some: Columns) -> Iterator[pd.DataFrame]:
    """Yield rows priced with kernels that did not run them.

    With an unknown name, rows of other libraries take vllm's sections, which price models; vllm's rows take each of
    sglang's kernels that was measured on their device.

    Args:
        columns: The whole table, which contains the measured combinations.
    """
    is_default = np.array([word.startswith("vllm") for word in some.labels["library"].values])
    unnamed = with_labels(some, library="another", kernel="another")
    yield price_rows("moe", unnamed.take(~is_default), as_new_shapes=True)
    measured = set(zip(*(columns.labels[name].values for name in ("kernel", "library", "device")), strict=True))
    sglang = sorted({(kernel, library) for kernel, library, _ in measured if kernel.startswith("sglang")})
    for kernel, library in sglang:
        devices = sorted(
            device for device in set(some.labels["device"].values) if (kernel, library, device) in measured
        )
        chosen = some.take(is_default & np.isin(some.labels["device"].values, devices))
        yield price_rows("moe", with_labels(chosen, library=library, kernel=kernel), as_new_shapes=True)


def rows_of_gemms(blocks: pd.DataFrame) -> pd.DataFrame:
    """Return rows of blocks as those of their two GEMMs, with their element format."""
    formats = blocks.dtype.map(lambda word: get_dtype(word).name)
    return blocks.assign(
        format=formats,
        format_family=formats,
        predicted=blocks.predicted / 2.0,
        measured=blocks.measured / 2.0,
    )


class PricedSection(NamedTuple):
    """The section that prices some blocks.

    Attributes:
        group: Name of its interval group; empty if the record has no section of its own.
        table_interval: Interval of the learned table, from layouts that its trees did not see; None without a table.
    """

    group: str
    table_interval: Interval | None = None


def find_section(device: str, dtype: str, library: str, kernel: str) -> PricedSection:
    """Find the section that prices a block."""
    record = load_record("moe", load_device(device))
    name, known = get_dtype(dtype).name, record.parameters["libraries"]
    key = f"{library}/{kernel}"
    if name not in known.get(key, {}):
        return PricedSection("")
    section = section_name(name, key)
    group = f"own/{record.id}/{section}"
    if not record.residual or section not in record.residual["tables"]:
        return PricedSection(group)
    return PricedSection(f"{group}, learned", record.residual["interval"]["libraries"][key][name])


def default_groups(record: Any, groups: Groups) -> Groups:
    """Return the groups of the sections that price models, which are those of one library's kernel."""
    found: Groups = {}
    for dtype, words in record.provenance.get("defaults", {}).items():
        for learned in ("", ", learned"):
            own = groups.get(f"own/{record.id}/{dtype} of {words.removeprefix(f'{dtype}, ')}{learned}")
            if own is not None:
                found[f"own/{record.id}/{dtype}{learned}"] = own
    return found
