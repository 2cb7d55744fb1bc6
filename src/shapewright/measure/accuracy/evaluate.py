"""Evaluate predictions on every table of a folder: price its rows and summarize the errors by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.texts import Text, with_fields
from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy import stores as stores_module
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import count_repeated, read_columns
from shapewright.measure.accuracy.statistics import (
    LossErrors,
    absolute_percentage_errors,
    bias,
    coverage,
    kendall_tau,
    loss_errors,
    mean_width,
    ranking_regrets,
)
from shapewright.measure.accuracy.tables.registry import SUFFIXES, TABLES, find_tables, require_known
from shapewright.pricing.calibration.file import calibrated_device, read_calibration

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Chunk
    from shapewright.measure.accuracy.tables.registry import Table

GROUPINGS = ("device", "dtype", "library", "part", "size")
DEFAULT_GROUPING = ("device", "dtype", "library")
_FITTED_ROWS_NOTE = (
    "all rows are included, also those that calibration records were fitted to; held-out errors are in the provenance "
    "of the records, and an uncalibrated evaluation leaves out a device's own record"
)
# Label of rows that are not grouped.
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Errors of the rows of one group of a table.

    Attributes:
        table: Table, or quantity of a table.
        file: Name of the file that holds it.
        device: Canonical name of the device, or ``all``.
        dtype: Element format, or ``all``.
        library: Library and version, or ``all``.
        part: Another label of the table, or ``all``.
        decade: Decade of the measured time, such as ``10-100 us``, or ``all``.
        rows: Number of rows.
        mape: Mean of |predicted / measured - 1|.
        median_ape: Its median.
        p90_ape: Its 90 % quantile.
        bias: Mean of ln(predicted / measured).
        kendall_tau: Rank correlation tau-b of predicted and measured; None if all rows are equal.
        coverage_90: Share of measurements inside the 90 % interval.
        interval_width: Mean of ln(high / low) of the interval: coverage is meaningful only with it.
        roofline_mape: Mean error of max(flops / peak, bytes / bandwidth); None for losses and servers.
        regret_groups: Groups of alternatives among the rows: shapes of the same size within 3 %.
        regret_median: How much slower the predicted best of a group is than its measured best; median over groups, None
            without any.
        regret_p90: Its 90 % quantile.
        mean_error_nats: Mean of |predicted - measured|, for losses alone. [nats]
        difference_error_nats: Median error of differences between models of one size after the same tokens. [nats]
        order_fraction: Share of pairs of such models more than 0.01 nats apart whose order is predicted.
    """

    table: str
    device: str
    dtype: str
    library: str
    part: str
    decade: str
    rows: int
    mape: float
    median_ape: float
    p90_ape: float
    bias: float
    kendall_tau: float | None
    coverage_90: float
    interval_width: float
    roofline_mape: float | None
    file: str = ""
    regret_groups: int = 0
    regret_median: float | None = None
    regret_p90: float | None = None
    mean_error_nats: float | None = None
    difference_error_nats: float | None = None
    order_fraction: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Result for a folder.

    Attributes:
        rows: Errors, table by table.
        skipped: Number of skipped rows, by table and reason.
        unreadable: Why a file could not be evaluated, by table.
        notes: Notes for the user.
    """

    rows: tuple[Accuracy, ...]
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def evaluate_folder(
    folder: str | Path,
    *,
    tables: Sequence[str] = (),
    devices: Sequence[str] = (),
    by: Sequence[str] = DEFAULT_GROUPING,
    uncalibrated: bool = False,
    calibration: str | Path | None = None,
    physics_only: bool = False,
    on_table: Callable[[str, int], object] = lambda _name, _rows: None,
    on_rows: Callable[[int], None] = lambda _rows: None,
) -> Evaluation:
    """Price every row of the measured files of a folder and compare predictions with measurements.

    Args:
        folder: Holds files named as in ``TABLES``, and stores of 'shapewright bench' of any name.
        tables: Tables to evaluate, ``store`` for the stores; all existing ones if empty.
        devices: Devices to evaluate, by any name; all if empty.
        by: Labels to group by, of ``GROUPINGS``; tables are always separate.
        uncalibrated: Price as if the devices had no records of their own.
        calibration: File of records to price its device with; see ``pricing.calibration.file``.
        on_table: Called with name and number of rows before each table.
        on_rows: Called with the number of rows that were priced.

    Returns:
        Errors, and skipped rows with reasons.

    Raises:
        MeasuredFileError: the folder does not exist, or has nothing to evaluate.
        UnknownDeviceError: no device file has a name of ``devices``.
    """
    found, stores = find_tables(Path(folder), tables)
    require_known("grouping", by, GROUPINGS)
    own = _own_devices(calibration)
    chosen = frozenset(name if name in own else load_device(name).name for name in devices)
    rows: list[Accuracy] = []
    skipped: dict[str, dict[str, int]] = {}
    unreadable: dict[str, str] = {}
    notes: list[str] = []

    def evaluate(name: str, file_name: str, read: Callable[[Context], tuple[int, Iterable[Chunk]]]) -> None:
        context = Context(
            uncalibrated=uncalibrated,
            physics_only=physics_only,
            devices=chosen,
            advance=on_rows,
            own=own,
            folder=Path(folder),
        )
        try:
            num_rows, chunks = read(context)
        except MeasuredFileError as error:
            unreadable[name] = str(error)
            return
        on_table(name, num_rows)
        rows.extend(replace(row, file=file_name) for row in summarize(chunks, by))
        notes.extend(words for words in context.notes if words not in notes)
        if context.skipped:
            skipped[name] = dict(context.skipped.most_common())

    for name, path in found.items():
        others = [path.with_suffix(suffix) for suffix in SUFFIXES if suffix != path.suffix]
        notes.extend(f"{other.name} is ignored: {path.name} holds the table" for other in others if other.is_file())
        evaluate(name, path.name, partial(_read_table, TABLES[name], path))
    for path in stores:
        evaluate(path.name, path.name, partial(_read_store, path))
    if not rows:
        reasons = _why_nothing(skipped, unreadable, chosen)
        raise MeasuredFileError(Text(f"nothing to evaluate in {folder}: ", reasons))
    if not uncalibrated:
        notes.append(_FITTED_ROWS_NOTE)
    return Evaluation(tuple(rows), skipped, unreadable, tuple(notes))


def _read_table(table: Table, path: Path, context: Context) -> tuple[int, Iterable[Chunk]]:
    """Return the number of rows of a table, and their prices."""
    columns = read_columns(path, table.columns, context.skipped)
    repeated = count_repeated(columns)
    if repeated:
        context.note(
            f"{path.name}: {repeated:,} rows equal another row in every column that is read, and are counted twice"
        )
    return columns.num_rows, table.price(columns, context)


def _read_store(path: Path, context: Context) -> tuple[int, Iterable[Chunk]]:
    """Return the number of rows of a store, and their prices."""
    rows = stores_module.read_rows(path)
    return len(rows), stores_module.price(rows, context)


def _own_devices(path: str | Path | None) -> dict[str, Device]:
    """Return the device of a calibration file with the file's records, by name."""
    if path is None:
        return {}
    device = calibrated_device(read_calibration(path).device.name, path)
    return {device.name: device}


def summarize(chunks: Iterable[Chunk], by: Sequence[str] = DEFAULT_GROUPING) -> list[Accuracy]:
    """Group chunks by table and the labels of ``by``, and compute the errors of each group."""
    groups: defaultdict[tuple[str, ...], list[tuple[Chunk, np.ndarray]]] = defaultdict(list)
    for chunk in chunks:
        words = [chunk.table, *(getattr(chunk, name) if name in by else ALL for name in GROUPINGS[:-1])]
        by_decade = "size" in by and chunk.loss_groups is None
        decades = np.floor(np.log10(chunk.seconds) + 1e-9) if by_decade else np.zeros(len(chunk.measured))
        for decade in np.unique(decades):
            size = _decade_words(int(decade)) if by_decade else ALL
            groups[(*words, f"{decade + 99:03.0f}", size)].append((chunk, np.flatnonzero(decades == decade)))
    order = list(dict.fromkeys(key[0] for key in groups))
    keys = sorted(groups, key=lambda key: (order.index(key[0]), *key[1:]))
    return [_figures((*key[:-2], key[-1]), groups[key]) for key in keys]


def _figures(words: tuple[str, ...], members: list[tuple[Chunk, np.ndarray]]) -> Accuracy:
    measured = np.concatenate([chunk.measured[index] for chunk, index in members])
    predicted, low, high, roofline = (
        np.concatenate([column[index] for column, index in parts])
        for parts in zip(*([(column, index) for column in chunk.prices] for chunk, index in members), strict=True)
    )
    errors = absolute_percentage_errors(predicted, measured)
    regrets = _regrets(members)
    losses = _loss_errors(members, predicted, measured)
    return Accuracy(
        **dict(zip(("table", *GROUPINGS[:-1], "decade"), words, strict=True)),
        rows=len(measured),
        mape=float(np.mean(errors)),
        median_ape=float(np.median(errors)),
        p90_ape=float(np.quantile(errors, 0.9)),
        bias=bias(predicted, measured),
        kendall_tau=kendall_tau(predicted, measured),
        coverage_90=coverage(low, high, measured),
        interval_width=mean_width(low, high),
        roofline_mape=(
            None
            if losses or np.isnan(roofline).all()
            else float(np.mean(absolute_percentage_errors(roofline, measured)))
        ),
        regret_groups=len(regrets),
        regret_median=float(np.median(regrets)) if len(regrets) else None,
        regret_p90=float(np.quantile(regrets, 0.9)) if len(regrets) else None,
        mean_error_nats=losses and losses.mean_nats,
        difference_error_nats=losses and losses.difference_nats,
        order_fraction=losses and losses.order_fraction,
    )


def _loss_errors(
    members: list[tuple[Chunk, np.ndarray]], predicted: np.ndarray, measured: np.ndarray
) -> LossErrors | None:
    """Return the errors of losses in nats; None for other measurements."""
    known = [(chunk.loss_groups, index) for chunk, index in members if chunk.loss_groups is not None]
    if not known:
        return None
    columns = zip(*([column[index] for column in loss_groups] for loss_groups, index in known), strict=True)
    return loss_errors(predicted, measured, *map(np.concatenate, columns))


def _regrets(members: list[tuple[Chunk, np.ndarray]]) -> np.ndarray:
    """Return the ranking regrets of the groups of alternatives; shapes compete on one device, format and library."""
    alternatives: defaultdict[tuple[str, ...], list[tuple[Chunk, np.ndarray]]] = defaultdict(list)
    for chunk, index in members:
        if chunk.alternatives is not None:
            alternatives[chunk.device, chunk.dtype, chunk.library].append((chunk, index))
    found = [np.empty(0)]
    for parts in alternatives.values():
        columns = [
            (
                chunk.prices.predicted[index],
                chunk.measured[index],
                chunk.alternatives.group[index],
                chunk.alternatives.work[index],
            )
            for chunk, index in parts
            if chunk.alternatives is not None
        ]
        found.append(ranking_regrets(*map(np.concatenate, zip(*columns, strict=True))))
    return np.concatenate(found)


def _decade_words(decade: int) -> str:
    """Return the range of times of a power of ten, such as ``10-100 us``.

    >>> _decade_words(-5), _decade_words(-6), _decade_words(-1)
    ('10-100 us', '1-10 us', '100-1000 ms')
    """
    thousands = decade // 3
    unit = {0: "s", -1: "ms", -2: "us", -3: "ns"}.get(thousands, f"e{3 * thousands} s")
    least = 10 ** (decade - 3 * thousands)
    return f"{least}-{10 * least} {unit}"


def _why_nothing(skipped: dict[str, dict[str, int]], unreadable: dict[str, str], devices: frozenset[str]) -> str:
    """Return the reasons in one line."""
    reasons = [*unreadable.values(), *(reason for counts in skipped.values() for reason in counts)]
    if reasons:
        is_unknown = isinstance(reasons[0], Note) and reasons[0].code == "unknown-device"
        way_out = with_fields("; {calibration} describes a device that has none") if is_unknown else ""
        return "; ".join(dict.fromkeys(reasons[:3])) + way_out
    return f"no row of {', '.join(sorted(devices))}" if devices else "no rows"
