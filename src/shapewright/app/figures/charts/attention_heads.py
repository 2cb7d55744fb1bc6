"""Chart of attention scores: throughput of the score GEMM against hidden size, by number of heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shapewright.app.figures.chart import PALETTE, Line, Points, XYChart
from shapewright.app.figures.data.samples import Sample, price_samples
from shapewright.core.units import TERA
from shapewright.lowering.operations import Gemm

if TYPE_CHECKING:
    from shapewright.hardware import Device

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
        device: Device to predict for.
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
