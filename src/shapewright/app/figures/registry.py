"""Figures of ``shapewright plot`` by name, drawn from measurements of a store or from predictions alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from shapewright.app.figures.chart import Chart, Points
from shapewright.app.figures.heat_maps import measured_layer_map, predicted_layer_map
from shapewright.app.figures.measured import (
    Sample,
    attention_heads_chart,
    default_samples,
    find_scores,
    measured_vs_predicted_chart,
)
from shapewright.app.figures.operation_sweep import find_operation_sweeps, operation_sweep_chart
from shapewright.app.figures.step import samples_roofline_chart
from shapewright.core.errors import MeasuredFileError
from shapewright.core.records import dataclass
from shapewright.lowering.operations.gemm import Gemm

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.measure.store.record import Row
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.workload import Workload

# Pages with more charts load slowly.
MAX_CHARTS = 24


@dataclass(frozen=True, kw_only=True)
class FigureRequest:
    """Inputs of a figure.

    Attributes:
        device: Device to predict for.
        dtype: Element format of figures without measurements.
        config: Model of the roofline and the heat map.
        workload: Workload of the model.
        operations: Operations of the model.
        samples: Measured operations; empty to draw predictions only.
        rows: Measured rows, including whole layers and steps.
    """

    device: Device
    dtype: str
    config: TransformerConfig
    workload: Workload
    operations: Sequence[Operation]
    samples: Sequence[Sample] = ()
    rows: Sequence[Row] = field(default=())


def draw_figure(name: str, request: FigureRequest) -> list[Chart]:
    """Make the charts of a figure.

    Args:
        name: One of FIGURE_NAMES.

    Raises:
        MeasuredFileError: the store has no measurements for the figure.
    """
    charts = _FIGURES[name](request)
    if not charts:
        raise MeasuredFileError(
            f"nothing to draw for {name}: the store has no rows for it of {request.device.name}; "
            "'shapewright store ls' lists its rows"
        )
    return charts


def sweep_charts(samples: Sequence[Sample], request: FigureRequest, *, most: int = MAX_CHARTS) -> list[Chart]:
    """Charts of the longest sweeps among samples."""
    return [operation_sweep_chart(sweep, request.device) for sweep in find_operation_sweeps(samples)[:most]]


def _waves(request: FigureRequest) -> list[Chart]:
    """Throughput against n with ends of waves, as in figure 5 of arXiv 2401.14489."""
    measured = [s for s in request.samples if isinstance(s.operation, Gemm) and "vocab" not in s.name]
    if measured:
        along_n = [sweep for sweep in find_operation_sweeps(measured) if sweep.dimension == "n"]
        along_n.sort(key=lambda sweep: sweep.fixed["batch"] != 1)
        return [operation_sweep_chart(sweep, request.device) for sweep in along_n[:1]]
    samples = [
        Sample(Gemm(name="waves", dtype=request.dtype, m=2304, n=n, k=4096), name="waves") for n in range(512, 6145, 64)
    ]
    return sweep_charts(samples, request)


# Offsets from a multiple of 128 that cover every alignment class.
_OFFSETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 120, 124, 126, 127, 128)


def _alignment(request: FigureRequest) -> list[Chart]:
    """Throughput around a multiple of 128 in the layouts of forward, dgrad and wgrad."""
    measured = [sample for sample in request.samples if sample.suite == "alignment"]
    if request.samples:
        return sweep_charts(measured, request)
    samples = []
    for layout, dimension in (("NT", "k"), ("NN", "n"), ("TN", "m")):
        for offset in _OFFSETS:
            aligned = Gemm(name="alignment", dtype=request.dtype, layout=layout, m=8192, n=4096, k=4096)
            operation = aligned.changed(**{dimension: 4096 + offset})
            samples.append(Sample(operation, name=f"alignment {layout}"))
    return sweep_charts(samples, request)


# Sweeps over the vocabulary in the suites alignment and paper, and in the published measurements of the paper.
_VOCABULARY_SWEEPS = ("alignment.vocabulary", "paper.vocabulary", "vocab_v_sweep")


def _vocabulary(request: FigureRequest) -> list[Chart]:
    """Throughput of the logits GEMM over vocabulary sizes."""
    if request.samples:
        return sweep_charts(
            [sample for sample in request.samples if sample.name in _VOCABULARY_SWEEPS], request, most=4
        )
    samples = [
        Sample(Gemm(name="logits", dtype=request.dtype, m=8192, n=v, k=2560, layout="NN"), name="vocabulary")
        for v in range(50240, 50305)
    ]
    return sweep_charts(samples, request)


def _heads(request: FigureRequest) -> list[Chart]:
    """Throughput of attention scores against hidden size, by number of heads."""
    samples = find_scores(request.samples)
    if request.samples and not samples:
        return []
    chosen = samples or default_samples(request.dtype)
    return [attention_heads_chart(chosen, request.device)]


def _roofline(request: FigureRequest) -> list[Chart]:
    """Roofline of measured operations, or of the operations of a model."""
    samples = list(request.samples) or [Sample(operation, name=operation.name) for operation in request.operations]
    formats = sorted({sample.operation.dtype for sample in samples if float(sample.operation.flops) > 0.0})
    known = [dtype for dtype in formats if dtype in request.device.dense_flops_per_s]
    return [samples_roofline_chart(samples, request.device, dtype) for dtype in known]


def _scatter(request: FigureRequest) -> list[Chart]:
    """Measured against predicted times."""
    chart = measured_vs_predicted_chart(request.samples, request.device, rows=request.rows)
    return [chart] if any(isinstance(part, Points) for part in chart.series) else []


def _heat_map(request: FigureRequest) -> list[Chart]:
    """Predicted rate of a layer over heads and hidden size, and the measured rate if available."""
    predicted = predicted_layer_map(request.config, request.workload, request.device)
    measured = measured_layer_map(request.rows, request.device)
    return [predicted, *([measured] if measured is not None else [])]


_FIGURES: Mapping[str, Callable[[FigureRequest], list[Chart]]] = {
    "waves": _waves,
    "alignment": _alignment,
    "vocabulary": _vocabulary,
    "heads": _heads,
    "roofline": _roofline,
    "scatter": _scatter,
    "heat-map": _heat_map,
}
FIGURE_NAMES = tuple(_FIGURES)
