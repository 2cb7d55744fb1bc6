"""Intervals of products: batches, the paper's devices, other libraries, older software, devices left out.

Not a script itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from gemm_rows import PRODUCTS
from interval_devices import best_rate_biases
from interval_groups import Groups, library_groups, parts_of
from interval_rows import (
    ROWS_OF_A_TABLE,
    only_measured,
    paper_product_rows,
    price_rows,
    read_table,
    renamed,
    sampled,
    unseen_rows,
    words_of,
)
from interval_transfer import OtherDevices, transfer_groups

from shapewright.accuracy.columns import Columns
from shapewright.accuracy.paper_gemm import PRODUCTS_ALONE, paper_library
from shapewright.accuracy.paper_layers import BATCHES
from shapewright.adding_up import ERROR_CORRELATION
from shapewright.dtypes import get_dtype
from shapewright.fit.intervals import pool, spread_over, widened
from shapewright.fit.left_out import bias_of
from shapewright.hardware import load_device
from shapewright.perf.calibration import load_record
from shapewright.perf.residual import section_name

# The paper's A100, whose products other tables have too.
A100_OF_PAPER = "a100-sxm-40gb"
# Regimes of the paper's rows: sweeps of a millisecond, layers of up to a second; a hundred unseen rows a table.
PAPER_EDGES_S = (1e-3, 1e-2, 1e-1)
PAPER_FEWEST_ROWS = 60
# Products inside layers, a part of their own beside products timed alone.
BLOCKS = ("paper_layers/mlp", "paper_layers/mlp-flash")
# A block is two products of nearly equal time. Errors with this correlation (adding_up) add up to less than twice one
# of them, so that a product errs by so much more than its block, on logarithms.
PRODUCT_OF_BLOCK = np.sqrt(2.0 / (1.0 + ERROR_CORRELATION))


def product_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Products: batches, the paper's devices, other libraries, older software, devices left out."""
    groups: Groups = {}
    paper = pd.concat(list(paper_product_rows(folder)), ignore_index=True)
    paper["is_block"] = paper.table.isin(BLOCKS)
    ratio = paper.measured / paper.predicted
    paper["measured"] = paper.predicted * ratio.where(~paper.is_block, ratio**PRODUCT_OF_BLOCK)
    for (device, is_batch), rows in paper.groupby(["device", "is_batch"]):
        record = load_record("gemm", load_device(str(device)))
        section = next(iter(record.parameters["dtypes"]))
        sections = {section: rows}
        if is_batch:
            sections = {f"{section}, batches": rows}
        elif (alone := paper_library(record, PRODUCTS_ALONE)) != (inside := paper_library(record)):
            names = section_name(section, alone), section_name(section, inside)
            sections = {names[0]: rows[~rows.is_block], names[1]: rows}
        elif alone:  # a section of the paper's software, beside those of others
            sections = {section_name(section, alone): rows}
        for name, part in sections.items():
            origin = part.table.str.split("/").str[0].where(~part.is_block, BLOCKS[0])
            parts = parts_of(part.assign(origin=origin), ["origin"])
            groups[f"own/{record.id}/{name}"] = pool(
                list(parts.values()), edges_s=PAPER_EDGES_S, fewest=PAPER_FEWEST_ROWS
            )
    a100 = paper[paper.device == A100_OF_PAPER]

    unseen = unseen_rows(folder, "gemm")
    swapped = pd.concat(swapped_libraries("gemm", unseen), ignore_index=True)
    swapped["format"] = swapped.dtype.map(lambda word: get_dtype(word).name)
    groups |= library_groups(swapped)

    # Under no name of a library: as software that no record has a section of.
    layers = renamed(read_table(folder, "linear_layers"), library="")
    older = price_rows("linear_layers", layers)
    older = older[older.table == "linear_layers"].assign(origin=older.part.str.split().str[0])
    older = pd.concat([older, a100[~a100.is_batch].assign(origin=a100.table.str.split("/").str[0])])
    parts = parts_of(older, ["origin"])
    groups["older software"] = widened(pool(list(parts.values())), spread_over(parts))

    far = far_rows(folder)
    far = far.assign(format=far.dtype.map(lambda word: get_dtype(word).name))
    products = far_paper_rows(folder)
    # Devices that no other table has; fp16 and bf16 share their kernels and their numbers.
    alone = products[~products.is_batch & (products.device != A100_OF_PAPER)].assign(format="bf16")
    others = OtherDevices(same=best_rate_biases(folder))
    groups |= transfer_groups("gemm", pd.concat([far, alone], ignore_index=True), others)
    batches = transfer_groups("gemm", products[products.is_batch].assign(format="batches"), others)
    groups |= {name: group for name, group in batches.items() if "/batches" in name}
    return groups, {}


@cache
def far_paper_rows(folder: Path) -> pd.DataFrame:
    """The paper's products, priced uncalibrated, with ``is_batch``."""
    sweeps = read_table(folder, "paper_gemm")
    is_batch = sweeps.numbers["batch"] > 1.0
    frames = [
        price_rows("paper_gemm", sweeps.take(is_batch == chosen), uncalibrated=True).assign(is_batch=chosen)
        for chosen in (False, True)
    ]
    layers = read_table(folder, "paper_layers")
    for name in PRODUCTS:
        rows = only_measured(layers.take(layers.numbers[f"{name}_tflops"] > 0.0), f"{name}_tflops")
        frames.append(price_rows("paper_layers", rows, uncalibrated=True).assign(is_batch=name in BATCHES))
    return pd.concat(frames, ignore_index=True)


def usual_biases(folder: Path) -> OtherDevices:
    """What 16-bit products say of the biases that devices of a class have in operations of other kinds."""
    found: dict[str, dict[str, float]] = {"generic": {}} | best_rate_biases(folder)
    far, paper = far_rows(folder).query("dtype == 'bf16'"), far_paper_rows(folder).query("not is_batch")
    for place, table in (("generic", far), ("foreign", paper)):
        for device, rows in table.groupby("device"):
            if load_record("gemm", load_device(str(device)), uncalibrated=True).distance == place:
                found[place][str(device)] = bias_of((rows.predicted.to_numpy(), rows.measured.to_numpy()))
    return OtherDevices(usual=found)


@cache
def far_rows(folder: Path) -> pd.DataFrame:
    """Products of other tables that no fit saw, priced uncalibrated."""
    return price_rows("gemm", sampled(unseen_rows(folder, "gemm"), ROWS_OF_A_TABLE), uncalibrated=True)


def swapped_libraries(name: str, columns: Columns) -> Iterator[pd.DataFrame]:
    """Rows of each library, priced with the section of every other one of its device."""
    libraries = words_of(columns, "library")
    devices = words_of(columns, "device")
    for device in sorted(set(devices)):
        here = sorted(set(libraries[devices == device]))
        for measured, priced in product(here, here):
            if measured != priced:
                chosen = columns.take((devices == device) & (libraries == measured))
                yield price_rows(name, renamed(chosen, library=priced))
