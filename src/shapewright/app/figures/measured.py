"""Charts of measured operations with their predictions: throughput by head count, measured against predicted time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.app.figures.chart import PALETTE, Line, Points, XYChart
from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.core.units import TERA
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.store.record import OK
from shapewright.prediction.model_runs import predict_times_s
from shapewright.pricing.operations import price_operations

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.measure.store.record import Row
    from shapewright.pricing.price import Price

SINGLE_OPERATIONS = (Gemm, GroupedGemm, Attention, Pointwise, Collective)


@dataclass(frozen=True)
class Sample:
    """One operation with its measurement, if any.

    Attributes:
        operation: The operation.
        measured_s: Median measured time; None if unmeasured. [s]
        name: Sweep or layer that the sample belongs to.
        variant: Requested kernel.
        library: Library and versions; empty if unmeasured.
        suite: Benchmark suite of the measurement; empty if unmeasured.
    """

    operation: Operation
    measured_s: float | None = None
    name: str = ""
    variant: str = ""
    library: str = ""
    suite: str = ""


@dataclass(frozen=True)
class PricedSample:
    """A sample with its price."""

    sample: Sample
    price: Price

    @property
    def operation(self) -> Operation:
        """The operation of the sample."""
        return self.sample.operation


def samples_from_rows(rows: Iterable[Row], *, device: str = "", suite: str = "") -> list[Sample]:
    """Samples of successful rows of single operations, without repetitions.

    Args:
        device: Canonical name of the device to keep; empty for all.
        suite: Suite to keep; empty for all.
    """
    found = []
    for row in rows:
        if row.status != OK or row.repetition or not row.median_s:
            continue
        if (device and row.device != device) or (suite and row.suite != suite):
            continue
        operation = row.operation()
        if isinstance(operation, SINGLE_OPERATIONS):
            found.append(Sample(operation, row.median_s, row.name, row.variant, row.library, row.suite))
    return found


def price_samples(samples: Sequence[Sample], device: Device) -> list[PricedSample]:
    """Price samples in one call; samples that cannot be priced on the device are dropped."""
    try:
        prices = price_operations([sample.operation for sample in samples], device)
        return [PricedSample(sample, price) for sample, price in zip(samples, prices, strict=True)]
    except ShapewrightError:
        found = []
        for sample in samples:
            try:
                (price,) = price_operations([sample.operation], device)
            except ShapewrightError:
                continue
            found.append(PricedSample(sample, price))
        return found


# Layers of figures 8 to 11 of arXiv 2401.14489.
MICRO_BATCH_SIZE, SEQ_LEN = 4, 2048
_MAX_HIDDEN_SIZE = 8192
# Largest head dimension of published models. [element]
_MAX_HEAD_DIM = 256
_DEFAULT_HEADS = (8, 20, 32, 64)
# Curves drawn: the numbers of heads with the most hidden sizes.
_MAX_CURVES = 5


def default_samples(dtype: str) -> list[Sample]:
    """Score GEMMs of several numbers of heads for hidden sizes up to 8192, with head_dim in steps of 8."""
    found = []
    for a in _DEFAULT_HEADS:
        for d in range(16, min(_MAX_HEAD_DIM, _MAX_HIDDEN_SIZE // a) + 1, 8):
            operation = Gemm(name="score", dtype=dtype, m=SEQ_LEN, n=SEQ_LEN, k=d, batch=MICRO_BATCH_SIZE * a)
            found.append(Sample(operation, name="score"))
    return found


def find_scores(samples: Iterable[Sample]) -> list[Sample]:
    """Select score GEMMs among samples: batched, square, with k of at most 256."""
    found = []
    for sample in samples:
        operation = sample.operation
        if isinstance(operation, Gemm):
            batch, m, n, k = (int(size) for size in (operation.batch, operation.m, operation.n, operation.k))
            if batch > 1 and m == n and k < m and k <= _MAX_HEAD_DIM and batch % MICRO_BATCH_SIZE == 0:
                found.append(sample)
    return found


def attention_heads_chart(
    samples: Sequence[Sample],
    device: Device,
) -> XYChart:
    """Draw the throughput of score GEMMs against h, one curve per number of heads.

    Args:
        samples: Score GEMMs from find_scores or default_samples.
    """
    priced = price_samples(samples, device)
    by_heads: dict[int, list[tuple[float, float, float | None]]] = {}
    for entry in priced:
        operation = entry.operation
        assert isinstance(operation, Gemm)
        a = int(operation.batch) // MICRO_BATCH_SIZE
        flops, measured_s = float(operation.flops) / TERA, entry.sample.measured_s
        rate = flops / measured_s if measured_s else None
        by_heads.setdefault(a, []).append((float(a * int(operation.k)), flops / float(entry.price.time_s), rate))
    chosen = sorted(sorted(by_heads, key=lambda a: (-len(by_heads[a]), a))[:_MAX_CURVES])
    series: list[Line | Points] = []
    for place, a in enumerate(chosen):
        rows, color = sorted(by_heads[a]), PALETTE[place % len(PALETTE)]
        series.append(Line(f"a={a} predicted", [row[0] for row in rows], [row[1] for row in rows], color=color))
        seen = [(h, rate) for h, _, rate in rows if rate is not None]
        if seen:
            series.append(Points(f"a={a} measured", [h for h, _ in seen], [rate for _, rate in seen], color=color))
    dtype = samples[0].operation.dtype if samples else ""
    return XYChart(
        title=f"Attention scores by heads, {dtype}, {device.title}",
        x_label="hidden size h",
        y_label="TFLOP/s",
        series=series,
        alt=f"Throughput of score GEMMs against hidden size on {device.title}, for {len(chosen)} head counts",
        y_from_zero=True,
    )


# Ratio of the guide lines next to the diagonal.
_GUIDE_RATIO = 1.25
# Points beyond this number hide each other; every n-th one is drawn instead.
_MAX_POINTS = 500


class _Pair(NamedTuple):
    """A measured and a predicted time. [s]"""

    name: str
    measured_s: float
    predicted_s: float


def measured_vs_predicted_chart(samples: Sequence[Sample], device: Device, *, rows: Iterable[Row] = ()) -> XYChart:
    """Draw measured samples, layers and steps against their predictions.

    Args:
        samples: Samples; unmeasured ones are ignored.
        rows: Rows of a store; successful layers and steps of the device are used.
    """
    pairs: dict[str, list[_Pair]] = {}
    for entry in price_samples([one for one in samples if one.measured_s], device):
        measured_s = float(entry.sample.measured_s or 1.0)
        kind = f"{entry.operation.kind}, {entry.operation.dtype}"
        pairs.setdefault(kind, []).append(_Pair(entry.sample.name, measured_s, float(entry.price.time_s)))
    wholes = [row for row in rows if row.kind in ("layer", "step") and row.status == OK and row.device == device.name]
    for row, time_s in zip(wholes, predict_times_s([row.operation() for row in wholes], device), strict=True):
        if time_s is not None and row.median_s and not row.repetition:
            pairs.setdefault(f"{row.kind}, {row.dtype}", []).append(_Pair(row.name, row.median_s, time_s))
    series: list[Line | Points] = []
    for name, entries in sorted(pairs.items()):
        step = max(1, -(-len(entries) // _MAX_POINTS))
        shown = entries[::step]
        ratio = np.array([entry.predicted_s / entry.measured_s for entry in entries])
        error = f"{100.0 * float(np.mean(np.abs(ratio - 1.0))):.3g} % mean error over {len(entries):,}"
        series.append(
            Points(
                f"{name}: {error}",
                [1e6 * entry.measured_s for entry in shown],
                [1e6 * entry.predicted_s for entry in shown],
                [entry.name for entry in shown],
            )
        )
    times = [1e6 * entry.measured_s for entries in pairs.values() for entry in entries] or [1.0]
    ends = [min(times), max(times)]
    series.append(Line("equal", ends, ends, color="#7f7f7f"))
    for factor in (_GUIDE_RATIO, 1.0 / _GUIDE_RATIO):
        name = f"x {factor:.3g}"
        series.append(Line(name, ends, [end * factor for end in ends], dashed=True, color="#bbbbbb"))
    return XYChart(
        title=f"Measured and predicted, {device.title}",
        x_label="measured (us)",
        y_label="predicted (us)",
        series=series,
        alt=f"Predicted against measured times of {len(times):,} measurements on {device.title}",
        x_log=True,
        x_log_base=10,
        y_log=True,
    )
