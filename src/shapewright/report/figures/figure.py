"""The figures by name: what each is drawn from, with a store and without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shapewright.errors import MeasuredFileError
from shapewright.operations import Gemm
from shapewright.report.charts import Chart, Points
from shapewright.report.figures import heads as heads_figure
from shapewright.report.figures import heat_map
from shapewright.report.figures.roofline import roofline_chart
from shapewright.report.figures.samples import Sample
from shapewright.report.figures.scatter import scatter_chart
from shapewright.report.figures.sweep import find_sweeps, sweep_chart

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.operations import Operation
    from shapewright.store.record import Row
    from shapewright.workload import Workload

# A page with more charts than these loads slowly and is read by nobody.
MOST_CHARTS = 24


@dataclass(frozen=True, kw_only=True)
class FigureRequest:
    """What a figure is drawn from.

    Attributes:
        device: What to predict for.
        dtype: Element format where nothing was measured.
        config: Model of the roofline and the heat map.
        workload: What is run of it.
        operations: Its operations.
        samples: What was measured; empty to draw predictions alone.
        rows: The same as rows, which hold whole layers too.
        uncalibrated: Predict as if nobody had measured the device.
    """

    device: Device
    dtype: str
    config: TransformerConfig
    workload: Workload
    operations: Sequence[Operation]
    samples: Sequence[Sample] = ()
    rows: Sequence[Row] = field(default=())
    uncalibrated: bool = False


def draw_figure(name: str, request: FigureRequest) -> list[Chart]:
    """Charts of a figure.

    Args:
        name: One of FIGURE_NAMES.
        request: What to draw from.

    Raises:
        MeasuredFileError: the figure needs measurements, and there are none that it could show.
    """
    charts = _FIGURES[name](request)
    if not charts:
        raise MeasuredFileError(
            f"nothing to draw for {name}: the store has no rows for it of {request.device.name}; "
            "'shapewright store ls' says what it holds"
        )
    return charts


def sweep_charts(samples: Sequence[Sample], request: FigureRequest, *, most: int = MOST_CHARTS) -> list[Chart]:
    """Charts of the longest sweeps among samples."""
    return [
        sweep_chart(sweep, request.device, uncalibrated=request.uncalibrated) for sweep in find_sweeps(samples)[:most]
    ]


def _waves(request: FigureRequest) -> list[Chart]:
    """Throughput against n, where full waves end: a product of the paper's figure 5."""
    measured = [s for s in request.samples if isinstance(s.operation, Gemm) and "vocab" not in s.name]
    if measured:
        along_n = [sweep for sweep in find_sweeps(measured) if sweep.dimension == "n"]
        along_n.sort(key=lambda sweep: sweep.fixed["batch"] != 1)
        return [sweep_chart(sweep, request.device, uncalibrated=request.uncalibrated) for sweep in along_n[:1]]
    samples = [
        Sample(Gemm(name="waves", dtype=request.dtype, m=2304, n=n, k=4096), name="waves") for n in range(512, 6145, 64)
    ]
    return sweep_charts(samples, request)


# Steps beside a multiple of 128 that show every alignment class.
_OFFSETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 120, 124, 126, 127, 128)


def _alignment(request: FigureRequest) -> list[Chart]:
    """Throughput around a multiple of 128 in the layouts of forward, dgrad and wgrad."""
    measured = [sample for sample in request.samples if sample.name.startswith("alignment.")]
    if request.samples:
        return sweep_charts(measured, request)
    samples = []
    for layout, dimension in (("NT", "k"), ("NN", "n"), ("TN", "m")):
        for offset in _OFFSETS:
            aligned = Gemm(name="alignment", dtype=request.dtype, layout=layout, m=8192, n=4096, k=4096)
            operation = aligned.changed(**{dimension: 4096 + offset})
            samples.append(Sample(operation, name=f"alignment {layout}"))
    return sweep_charts(samples, request)


def _vocabulary(request: FigureRequest) -> list[Chart]:
    """Saw-tooth of the logits over the vocabulary."""
    if request.samples:
        return sweep_charts([sample for sample in request.samples if "vocab" in sample.name], request, most=4)
    samples = [
        Sample(Gemm(name="logits", dtype=request.dtype, m=8192, n=v, k=2560, layout="NN"), name="vocabulary")
        for v in range(50240, 50305)
    ]
    return sweep_charts(samples, request)


def _heads(request: FigureRequest) -> list[Chart]:
    """Scores against hidden size, by number of heads."""
    samples = heads_figure.find_scores(request.samples)
    if request.samples and not samples:
        return []
    chosen = samples or heads_figure.default_samples(request.dtype)
    return [heads_figure.heads_chart(chosen, request.device, uncalibrated=request.uncalibrated)]


def _roofline(request: FigureRequest) -> list[Chart]:
    """Operations under the roof: what was measured, or those of a model."""
    samples = list(request.samples) or [Sample(operation, name=operation.name) for operation in request.operations]
    formats = sorted({sample.operation.dtype for sample in samples if float(sample.operation.flops) > 0.0})
    known = [dtype for dtype in formats if dtype in request.device.dense_flops_per_s]
    return [roofline_chart(samples, request.device, dtype, uncalibrated=request.uncalibrated) for dtype in known]


def _scatter(request: FigureRequest) -> list[Chart]:
    """Measured against predicted."""
    chart = scatter_chart(request.samples, request.device, rows=request.rows, uncalibrated=request.uncalibrated)
    return [chart] if any(isinstance(part, Points) for part in chart.series) else []


def _heat_map(request: FigureRequest) -> list[Chart]:
    """A layer's rate over heads and hidden size; what was measured of it beside."""
    predicted = heat_map.predicted_map(
        request.config, request.workload, request.device, uncalibrated=request.uncalibrated
    )
    measured = heat_map.measured_map(request.rows, request.device)
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
