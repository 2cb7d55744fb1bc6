"""Intervals of expert blocks: their sections, other libraries, devices left out. Not a script itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from interval_groups import Groups, library_groups, own_groups
from interval_products import usual_biases
from interval_rows import (
    ROWS_OF_A_TABLE,
    expert_layouts,
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
from shapewright.hardware import load_device
from shapewright.perf.calibration import load_record


def expert_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Expert blocks: their sections, other libraries, devices left out."""
    columns = read_table(folder, "moe")
    rows = own_rows(columns)
    learned = [path for path in set(rows.path) if path.endswith(", learned")]
    rows["regime"] = rows.device + rows.dtype + rows.path.isin(learned).astype(str)
    groups, report = own_groups(rows[rows.path != ""], "regime", {path: learned_expert_form(path) for path in learned})
    for device in rows.device.unique():
        groups |= default_groups(load_record("moe", load_device(device)), groups)

    some = sampled(unseen_rows(folder, "moe"), ROWS_OF_A_TABLE)
    is_rare = rows.is_unseen & (rows.path == "")
    others = [*other_kernels(columns, some), rows[is_rare].assign(library="rare kernels")]
    groups |= library_groups(of_products(pd.concat(others, ignore_index=True)))
    far = of_products(price_rows("moe", some, uncalibrated=True))
    return groups | transfer_groups("moe", far, usual_biases(folder)), report


def own_rows(columns: Columns) -> pd.DataFrame:
    """Rows priced with their own kernel's section, whose group is ``path``; empty where there is none."""
    parts = seen_and_halves("moe", columns, expert_layouts(columns))
    kernels = words_of(columns, "kernel")
    own = []
    for kernel in sorted(set(kernels)):
        for chosen, said in parts:
            found = columns.take((kernels == kernel) & chosen)
            if found.num_rows:
                own.append(price_rows("moe", found).assign(kernel=kernel, **said))
    rows = pd.concat(own, ignore_index=True)
    names = ["device", "dtype", "library", "kernel"]
    paths = {key: expert_path(*key) for key in rows[names].drop_duplicates().itertuples(index=False, name=None)}
    rows["path"] = [paths[key] for key in rows[names].itertuples(index=False, name=None)]
    # Intervals are chosen by the time of a product, of which a block has two.
    rows["regime_s"] = rows.predicted / 2.0
    return rows


def other_kernels(columns: Columns, some: Columns) -> Iterator[pd.DataFrame]:
    """Rows priced with kernels that did not run them.

    Under no known name what is not vllm's takes vllm's sections, which price models; vllm's rows take each of sglang's
    kernels that was measured on their device.

    Args:
        columns: The whole table, which says what was measured.
        some: The rows to price.
    """
    is_default = np.array([word.startswith("vllm") for word in words_of(some, "library")])
    unnamed = renamed(some, library="another", kernel="another")
    yield price_rows("moe", unnamed.take(~is_default))
    measured = set(zip(*(words_of(columns, name) for name in ("kernel", "library", "device")), strict=True))
    sglang = sorted({(kernel, library) for kernel, library, _ in measured if kernel.startswith("sglang")})
    for kernel, library in sglang:
        devices = sorted(device for device in set(words_of(some, "device")) if (kernel, library, device) in measured)
        chosen = some.take(is_default & np.isin(words_of(some, "device"), devices))
        yield price_rows("moe", renamed(chosen, library=library, kernel=kernel))


def of_products(blocks: pd.DataFrame) -> pd.DataFrame:
    """Rows of blocks as those of their two products, with their element format."""
    return blocks.assign(
        format=blocks.dtype.map(lambda word: get_dtype(word).name),
        predicted=blocks.predicted / 2.0,
        measured=blocks.measured / 2.0,
    )


def expert_path(device: str, dtype: str, library: str, kernel: str) -> str:
    """Group of the section that prices a block; empty where the record has none of its own."""
    record = load_record("moe", load_device(device))
    name, known = get_dtype(dtype).name, record.parameters["libraries"]
    key = f"{library}/{kernel}"
    if name not in known.get(key, {}):
        return ""
    section = f"{name} of {key}"
    learned = ", learned" if record.residual and section in record.residual["tables"] else ""
    return f"own/{record.id}/{section}{learned}"


def learned_expert_form(path: str) -> Interval:
    """Interval of a table of experts, from layouts that its trees did not see, by the path of its group."""
    _, _, device, _, section = path.removesuffix(", learned").split("/", 4)
    residual = load_record("moe", load_device(device)).residual
    assert residual is not None
    dtype, _, library = section.partition(" of ")
    found: Interval = residual["interval"]["libraries"][library][dtype]
    return found


def default_groups(record: Any, groups: Groups) -> Groups:
    """The groups of the sections that price models, which are those of one library's kernel."""
    found: Groups = {}
    for dtype, words in record.provenance.get("defaults", {}).items():
        for learned in ("", ", learned"):
            own = groups.get(f"own/{record.id}/{dtype} of {words.removeprefix(f'{dtype}, ')}{learned}")
            if own is not None:
                found[f"own/{record.id}/{dtype}{learned}"] = own
    return found
