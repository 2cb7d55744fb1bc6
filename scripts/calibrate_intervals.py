"""Fit the intervals of src/shapewright/perf/data/intervals from rows that no fit of the records saw.

    python scripts/calibrate_intervals.py --data DIR [--kind gemm]

Run it last, whenever a record was fitted anew: it prices the measured tables of DIR with the records as they are, and
asks how far the rows lie off that no fit saw, that another library ran, or whose device is left out. Groups are
explained in ``shapewright.perf.intervals``, what was tried in docs/decisions/0012-intervals.md. Needs the ``fit``
extra; two minutes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibrate_collectives import ONE_MACHINE_GROUPS
from calibration import argument_parser, record_path
from interval_devices import best_rate_biases
from interval_groups import Groups, library_groups, own_groups, parts_of
from interval_rows import (
    FOLDS,
    PRODUCTS,
    attention_layouts,
    collective_cells,
    expert_layouts,
    foreign_pointwise_rows,
    halves,
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
from shapewright.fit.intervals import (
    Interval,
    pool,
    spread_over,
    widened,
)
from shapewright.fit.left_out import bias_of
from shapewright.fit.logs import HELD_OUT_FOLD, tidy
from shapewright.hardware import find_measured_device, load_device
from shapewright.perf.attention_kernels import AttentionShape
from shapewright.perf.attention_sections import choose_kernels, choose_section
from shapewright.perf.calibration import load_record
from shapewright.perf.residual import section_name

KINDS = ("gemm", "attention", "moe", "collectives", "pointwise")
ATTENTION_TABLES = ("attention_prefill", "attention_decode")
# Rows of a table that are priced to see how far devices and libraries are apart.
ROWS_OF_A_TABLE = 150_000
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


def gemm_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
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
    layers = renamed(read_table(folder, "linear_layers"), library=lambda _: "")
    older = price_rows("linear_layers", layers)
    older = older[older.table == "linear_layers"].assign(origin=older.part.str.split().str[0])
    older = pd.concat([older, a100[~a100.is_batch].assign(origin=a100.table.str.split("/").str[0])])
    parts = parts_of(older, ["origin"])
    groups["older software"] = widened(pool(list(parts.values())), spread_over(parts))

    far = price_rows("gemm", sampled(unseen, ROWS_OF_A_TABLE), uncalibrated=True)
    far["format"] = far.dtype.map(lambda word: get_dtype(word).name)
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
    """What products say of the biases that siblings and other makers' chips have in operations of other kinds."""
    found = best_rate_biases(folder)
    for device, rows in far_paper_rows(folder).query("not is_batch").groupby("device"):
        if load_record("gemm", load_device(str(device)), uncalibrated=True).distance == "foreign":
            found["foreign"][str(device)] = bias_of((rows.predicted.to_numpy(), rows.measured.to_numpy()))
    return OtherDevices(usual=found)


def swapped_libraries(name: str, columns: Columns) -> Iterator[pd.DataFrame]:
    """Rows of each library, priced with the section of every other one of its device."""
    libraries = words_of(columns, "library")
    devices = words_of(columns, "device")
    for device in sorted(set(devices)):
        here = sorted(set(libraries[devices == device]))
        for measured, priced in product(here, here):
            if measured != priced:
                chosen = columns.take((devices == device) & (libraries == measured))
                yield price_rows(name, renamed(chosen, library=lambda _, word=priced: word))  # type: ignore[misc]


def attention_rows(columns: Columns, table: str, **context: Any) -> Iterator[pd.DataFrame]:
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
    name = str(choose_kernels(shape, section, kernel)[0])
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


def attention_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Fused attention: its sections, other libraries, devices left out."""
    own, far, swapped = [], [], []
    for table in ATTENTION_TABLES:
        columns = read_table(folder, table)
        is_unseen, half = FOLDS[table](columns) == HELD_OUT_FOLD, halves(attention_layouts(columns))
        for chosen, unseen, side in ((~is_unseen, False, 0), *((is_unseen & (half == h), True, h) for h in (0, 1))):
            own += [rows.assign(is_unseen=unseen, half=side) for rows in attention_rows(columns.take(chosen), table)]
        some = sampled(columns.take(is_unseen), ROWS_OF_A_TABLE)
        far += list(attention_rows(some, table, uncalibrated=True))
        for other in other_attention_libraries(some):
            swapped += list(attention_rows(other, table))
    rows = pd.concat(own, ignore_index=True)
    keys = ["device", "dtype", "library", "part", "width", "group", "phase"]
    names = {key: attention_path(*key) for key in rows[keys].drop_duplicates().itertuples(index=False, name=None)}
    rows["path"] = [names[key] for key in rows[keys].itertuples(index=False, name=None)]
    rows["regime_s"] = rows.predicted
    # What a table was learned from lies too near it: its form is that of layouts left out in turn.
    learned = [path for path in set(rows.path) if path.endswith(", learned")]
    rows["regime"] = rows.device + rows.library + rows.dtype + rows.phase + rows.path.isin(learned).astype(str)
    groups, report = own_groups(rows, "regime", {path: learned_form(path) for path in learned})
    for collected, make in (
        (swapped, library_groups),
        (far, lambda found: transfer_groups("attention", found, usual_biases(folder))),
    ):
        found = pd.concat(collected, ignore_index=True)
        pairs = zip(found.dtype, found.phase, strict=True)
        found["format"] = [attention_format(dtype, phase) for dtype, phase in pairs]
        groups |= make(found)  # type: ignore[operator]
    return groups, report


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
        yield renamed(columns.take(here), library=lambda _: "another", kernel=lambda _: "another")
        for other in others:
            rest = columns.take((devices == device) & (libraries != other))
            yield renamed(rest, library=lambda _, word=other: word, kernel=lambda _: "")  # type: ignore[misc]


def expert_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Expert blocks: their sections, other libraries, devices left out."""
    columns = read_table(folder, "moe")
    is_unseen, half = FOLDS["moe"](columns) == HELD_OUT_FOLD, halves(expert_layouts(columns))
    own = []
    kernels = words_of(columns, "kernel")
    for kernel in sorted(set(kernels)):
        for chosen, unseen, side in ((~is_unseen, False, 0), *((is_unseen & (half == h), True, h) for h in (0, 1))):
            found = columns.take((kernels == kernel) & chosen)
            if found.num_rows:
                own.append(price_rows("moe", found).assign(is_unseen=unseen, half=side, kernel=kernel))
    rows = pd.concat(own, ignore_index=True)
    names = ["device", "dtype", "library", "kernel"]
    paths = {key: expert_path(*key) for key in rows[names].drop_duplicates().itertuples(index=False, name=None)}
    rows["path"] = [paths[key] for key in rows[names].itertuples(index=False, name=None)]
    # Intervals are chosen by the time of a product, of which a block has two.
    rows["regime_s"] = rows.predicted / 2.0
    learned = [path for path in set(rows.path) if path.endswith(", learned")]
    rows["regime"] = rows.device + rows.dtype + rows.path.isin(learned).astype(str)
    groups, report = own_groups(rows[rows.path != ""], "regime", {path: learned_expert_form(path) for path in learned})
    for device in rows.device.unique():
        groups |= default_groups(load_record("moe", load_device(device)), groups)

    some = sampled(columns.take(is_unseen), ROWS_OF_A_TABLE)
    unnamed = renamed(some, library=lambda _: "another", kernel=lambda _: "another")
    is_rare = rows.is_unseen & (rows.path == "")
    is_default = np.array([word.startswith("vllm") for word in words_of(some, "library")])
    frames = [price_rows("moe", unnamed.take(~is_default)), rows[is_rare].assign(library="rare kernels")]
    for kernel in sorted({word for word in kernels if word.startswith("sglang")}):
        for library in sorted(set(words_of(columns, "library")[kernels == kernel])):
            devices = {
                device
                for device, word, used in zip(
                    words_of(columns, "device"), words_of(columns, "library"), kernels, strict=True
                )
                if word == library and used == kernel
            }
            chosen = some.take(is_default & np.isin(words_of(some, "device"), sorted(devices)))
            frames.append(
                price_rows("moe", renamed(chosen, library=lambda _, w=library: w, kernel=lambda _, w=kernel: w))
            )  # type: ignore[misc]
    for found, make in (
        (pd.concat(frames, ignore_index=True), library_groups),
        (price_rows("moe", some, uncalibrated=True), lambda found: transfer_groups("moe", found, usual_biases(folder))),
    ):
        groups |= make(
            found.assign(  # type: ignore[operator]
                format=found.dtype.map(lambda word: get_dtype(word).name),
                predicted=found.predicted / 2.0,
                measured=found.measured / 2.0,
            )
        )
    return groups, report


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


def collective_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Collectives: their records, devices left out."""
    columns = read_table(folder, "collectives")
    is_unseen, half = FOLDS["collectives"](columns) == HELD_OUT_FOLD, halves(collective_cells(columns))
    own = [
        price_rows("collectives", columns.take(chosen)).assign(is_unseen=unseen, half=side)
        for chosen, unseen, side in ((~is_unseen, False, 0), *((is_unseen & (half == h), True, h) for h in (0, 1)))
    ]
    rows = pd.concat(own, ignore_index=True)
    paths = {name: f"own/{load_record('collectives', load_device(name)).id}/collectives" for name in set(rows.device)}
    groups, report = own_groups(rows.assign(path=rows.device.map(paths), regime_s=rows.predicted), "table")
    far = price_rows("collectives", columns, uncalibrated=True)
    # Groups that say more of one machine than of its links, as the records hold them apart.
    for name, sizes in ONE_MACHINE_GROUPS.items():
        far = far[~((far.device == name) & far.part.str.endswith(tuple(f" x{size}" for size in sizes)))]
    return groups | transfer_groups("collectives", far.assign(format=""), usual_biases(folder)), report


def pointwise_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Mask and softmax on another maker's chip: all else was measured on one device alone."""
    rows = foreign_pointwise_rows(folder)
    found = pool(list(parts_of(rows, ["device"]).values()), edges_s=())
    return {f"foreign/{kind}": found for kind in ("mask", "softmax")}, {}


MAKERS: Mapping[str, Callable[[Path], tuple[Groups, dict[str, Any]]]] = {
    "gemm": gemm_groups,
    "attention": attention_groups,
    "moe": expert_groups,
    "collectives": collective_groups,
    "pointwise": pointwise_groups,
}


def write_groups(kind: str, groups: Groups, report: dict[str, Any]) -> Path:
    """Write the groups of a kind, one a line."""
    head = {
        "kind": kind,
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python scripts/calibrate_intervals.py --data DIR --kind {kind}",
        "held_out": report,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(tidy(value))}" for name, value in sorted(groups.items())]
    path = record_path("intervals", kind)
    path.parent.mkdir(exist_ok=True)
    body = json.dumps(head, indent=1)[:-2]
    path.write_text(f'{body},\n "groups": {{\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
    return path


def main() -> None:
    """Fit and write the groups of every kind."""
    parser = argument_parser(__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be given again; default: all")
    given = parser.parse_args()
    for kind in given.kind or KINDS:
        # Own groups are made of what records say without them.
        groups, report = MAKERS[kind](given.data)
        print(write_groups(kind, groups, report), len(groups), "groups", json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
