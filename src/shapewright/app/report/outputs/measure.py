"""Outputs of ``bench``, ``store``, ``accuracy`` and ``calibrate``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.app.report.outputs.model import Output, described, optional, take
from shapewright.core.records import dataclass
from shapewright.measure.store.record import Row
from shapewright.measure.store.summary import RowGroup

if TYPE_CHECKING:
    from shapewright.measure.accuracy.evaluate import Evaluation
    from shapewright.measure.bench.calibration_search import CalibrationRound
    from shapewright.measure.bench.device.backend import DeviceFacts
    from shapewright.measure.bench.run import Outcome
    from shapewright.measure.fit.calibrate import CalibrationResult
    from shapewright.measure.store.summary import StoreSummary


@dataclass(frozen=True, kw_only=True)
class Repeatability:
    """Differences between measurements of the same operation."""

    num_pairs: int = described("pairs of measurements")
    median_fraction: float = described("median difference of their medians")
    largest_fraction: float = described("largest difference")


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One measured row with its prediction."""

    row: Row = described("columns of `store show`", is_flat=True)
    predicted_s: float | None = described("predicted time; null where the device is unknown or has no price for it")
    predicted_figures: Mapping[str, float] = described("predicted values of `figures`")
    repeats: int | None = optional("executions in a step; with `--shapes-from` only")


@dataclass(frozen=True, kw_only=True)
class CalibrationRoundOutput(Output):
    """Random shapes of one round, predicted from the rows before them."""

    dtype: str = described("element format")
    num_rows: int = described("GEMMs that the fit had")
    num_shapes: int = described("random shapes of the round")
    mean_error: float = described("mean of |predicted / measured - 1| of them")


@dataclass(frozen=True, kw_only=True)
class BenchOutput(Output):
    """Measured rows, and the call in numbers.

    `sizes` of a row of kind `layer` or `step` holds the fields of its `config` and `workload`. `figures` holds
    `tokens_per_s`, `peak_memory_bytes`, `activation_bytes` or `bus_bytes_per_s`, and `kernels_s` and `row_s` of every
    row.
    """

    suite: str = described("suites, or the model whose shapes were measured")
    device: str = described("device that was measured")
    library: str = described("library and versions")
    store: str = described("store of the rows")
    num_measured: int = described("rows measured")
    num_bad: int = described("rows of them that failed or are wrong")
    num_unstored: int = described("rows measured that another process had stored by then, and are not stored")
    num_known: int = described("rows that the store had")
    num_left: int = described("rows left when the budget ended")
    num_left_out: int = described("rows that are too large for the device")
    wall_s: float = described("duration of the call")
    kernels_s: float = described("time in which the device worked")
    waited_s: float = described("time in which a CPU's single thread had no core")
    overhead_fraction: float | None = described("rest of the duration over `kernels_s`")
    rows_per_min: float | None = described("rows measured per minute")
    repeatability: Repeatability | None = described("differences between repeated measurements; null without any")
    best_flops_per_s: dict[str, float] = described("highest rate of a GEMM by dtype")
    calibration_rounds: list[CalibrationRoundOutput] = described("with `--for-calibration`: errors on new shapes")
    rows: list[BenchRow] = described("the rows")


@dataclass(frozen=True, kw_only=True)
class StoreRowsOutput(Output):
    """Every row of a store."""

    rows: list[Row] = described("the rows with every column")


@dataclass(frozen=True, kw_only=True)
class StoreContentsOutput(Output):
    """A store in numbers."""

    store_schema_version: int = described("version of the store's own form")
    path: str = described("the file")
    file_bytes: int = described("size of the file")
    num_runs: int = described("runs that wrote to it")
    statuses: Mapping[str, int] = described("rows by status: `ok`, `failed`, `wrong`")
    groups: list[RowGroup] = described("rows by suite, device, library, kind and dtype")


def store_contents_output(contents: StoreSummary) -> StoreContentsOutput:
    """Output of the contents of a store."""
    return take(StoreContentsOutput, contents)


@dataclass(frozen=True, kw_only=True)
class StoreChangesOutput(Output):
    """Rows that `store merge` or `store import` brought in."""

    store: str = described("the store")
    added: int = described("new rows")
    replaced: int = described("failed rows replaced by good ones")
    kept: int = described("rows for which the store kept its own")
    skipped: Mapping[str, Mapping[str, int]] = described("rows left out, by file and reason")


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """Prediction errors of one table, or of one part of it. Errors are fractions: 0.05 is 5 %."""

    table: str = described("table that was evaluated")
    device: str = described("device; `all` where devices are not separated")
    dtype: str = described("element format; `all` where formats are not separated")
    library: str = described("library; `all` where libraries are not separated")
    rows: int = described("rows evaluated")
    mape: float = described("mean of abs(predicted / measured - 1)")
    median_ape: float = described("its median")
    p90_ape: float = described("its 90 % quantile")
    bias: float = described("mean of ln(predicted / measured)")
    kendall_tau: float | None = described("rank correlation; null where all rows are equal")
    coverage_90: float = described("interval coverage: share of measurements inside the 90 % interval")
    roofline_mape: float | None = described(
        "mean error of max(FLOPs / peak, bytes / bandwidth) on the same rows; null for losses"
    )
    interval_width: float = described("mean of ln(high / low) of the interval, rows with a lower end of 0 left out")
    file: str = described("name of the file that holds the table")
    part: str | None = optional("kernel, operation or log; with `--by part` only")
    decade: str | None = optional("decade of the measured time; with `--by size` only", key="size")
    mean_error_nats: float | None = optional("mean of abs(predicted - measured) in nats; of losses only")
    difference_error_nats: float | None = optional(
        "median error of differences between models of one size (within 15 %) after the same tokens, in nats; of "
        "losses with such pairs only"
    )
    order_fraction: float | None = optional(
        "share of those pairs more than 0.01 nats apart whose order is predicted; of losses with such pairs only"
    )


@dataclass(frozen=True, kw_only=True)
class AccuracyRowWithRegret(AccuracyRow):
    """The same with the ranking regret, which `--regret` adds."""

    regret_groups: int = described("sizes with several shapes")
    regret_median: float | None = described(
        "slowdown of the shape predicted to be best over the best of its size, median over sizes; null without any"
    )
    regret_p90: float | None = described("its 90 % quantile")


def accuracy_output(evaluation: Evaluation, separated: Sequence[str], *, regret: bool = False) -> list[AccuracyRow]:
    """Output of an accuracy report: a list without a schema version.

    Args:
        separated: Those of ``part`` and ``decade`` that its rows are separated by.
        regret: Whether to add the ranking regret.
    """
    absent: dict[str, Any] = {name: None for name in ("part", "decade") if name not in separated}
    cls = AccuracyRowWithRegret if regret else AccuracyRow
    return [take(cls, row, **absent) for row in evaluation.rows]


@dataclass(frozen=True, kw_only=True)
class FitError:
    """Errors of one fit on held-out rows."""

    kind: str = described("kind of operation")
    part: str = described("element format or phase")
    rows: int = described("held-out rows")
    mape: float = described("mean of abs(predicted / measured - 1)")
    median_ape: float = described("its median")
    p90_ape: float = described("its 90 % quantile")
    bias: float = described("mean of ln(predicted / measured)")


@dataclass(frozen=True, kw_only=True)
class CalibrateOutput(Output):
    """Calibration records fitted to measurements.

    The calibration file itself has `schema_version` 2, `kind`, `device` (the content of a device file), `remarks`, and
    `records` by kind, each with `id`, `devices`, `architecture`, `parameters`, `interval` and `provenance`.
    """

    device: str = described("device that was fitted")
    output: str = described("the calibration file")
    records: dict[str, str] = described("id of each fitted record by kind of operation")
    errors: list[FitError] = described("errors on held-out rows")
    remarks: list[str] = described("assumptions of the fit, one line each")


def calibrate_output(result: CalibrationResult, path: str) -> CalibrateOutput:
    """Output of a fit whose calibration was written to a file."""
    return CalibrateOutput(
        device=result.content["device"]["name"],
        output=path,
        records={kind: record["id"] for kind, record in result.content["records"].items()},
        errors=[FitError(**error) for error in result.errors],
        remarks=list(result.remarks),
    )


def bench_output(
    outcome: Outcome,
    rows: list[BenchRow],
    *,
    suite: str,
    measured: DeviceFacts,
    store_path: str,
    rounds: Sequence[CalibrationRound] = (),
) -> BenchOutput:
    """Output of a call of the benchmark.

    Args:
        suite: Names of the suites, or of the model.
        rounds: Errors on new shapes of the suite ``calibration``.
    """
    stored = [entry.row for entry in rows]
    return take(
        BenchOutput,
        outcome,
        suite=suite,
        device=measured.name,
        library=measured.library,
        store=store_path,
        num_measured=len(outcome.measured),
        num_left_out=outcome.num_too_large,
        num_bad=sum(row.status != "ok" for row in outcome.measured),
        repeatability=repeatability(stored),
        best_flops_per_s=best_rates(stored),
        calibration_rounds=[
            take(CalibrationRoundOutput, each, num_shapes=len(each.errors), mean_error=each.mean_error)
            for each in rounds
        ],
        rows=rows,
    )


def repeatability(rows: Sequence[Row]) -> Repeatability | None:
    """Differences between medians of the same operation, over the smaller of two; None without repetitions."""
    first_s: dict[str, float] = {}
    differences = []
    for row in sorted(rows, key=lambda row: row.repetition):
        median_s = row.median_s
        if not median_s:
            continue
        same = json.dumps([row.kind, row.dtype, row.layout, row.variant, row.sizes], sort_keys=True)
        if same in first_s and row.repetition:
            low_s, high_s = sorted((first_s[same], median_s))
            differences.append(high_s / low_s - 1.0)
        first_s.setdefault(same, median_s)
    if not differences:
        return None
    return Repeatability(
        num_pairs=len(differences),
        median_fraction=statistics.median(differences),
        largest_fraction=max(differences),
    )


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Highest rate of a GEMM by element format. [flop/s]"""
    rates: dict[str, float] = {}
    for row in rows:
        if row.kind == "gemm" and row.median_s:
            rates[row.dtype] = max(rates.get(row.dtype, 0.0), row.flops / row.median_s)
    return rates
