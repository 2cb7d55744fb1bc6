"""Draw the figures of docs/ from predictions and from the measurements in committed records.

    python scripts/draw_figures.py [NAME ...]

Needs matplotlib (the plot extra). The first figure sets the paper's measured points beside the curve; its record says
what the paper's collector adds to every call, and the curve includes it, as the points do. The others are what
``shapewright plot`` draws without a store, and held-out errors as the records keep them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from shapewright.app.figures.chart import BarChart, BarPart, Chart, HeatMap, Line, Points, XYChart
from shapewright.app.figures.matplotlib_files import save_chart
from shapewright.app.figures.measured import Sample
from shapewright.app.figures.operation_sweep import OperationSweep, operation_sweep_chart
from shapewright.app.figures.registry import FigureRequest, draw_figure
from shapewright.core.units import TERA
from shapewright.hardware.loader import load_device
from shapewright.lowering.model import lower
from shapewright.lowering.operations.gemm import Gemm
from shapewright.prediction.build import build_scenario
from shapewright.pricing.calibration.records import load_record
from shapewright.workload.layout import ParallelLayout

FOLDER = Path(__file__).parent.parent / "docs" / "figures"

M, K, DEVICE, DTYPE = 2304, 4096, "a100-sxm-40gb", "fp16"
WIDTHS = range(512, 6145, 64)
# n -> TFLOP/s. Source: EleutherAI/cookbook @27dff48 (Apache-2.0), sweep mm_ksweep_high; arXiv 2401.14489, figure 5.
MEASURED = {1536: 217.6, 1600: 180.1, 3072: 235.0, 3136: 201.3, 4608: 239.2, 4672: 220.0}

# Before the numbers that a figure shows in its metadata, where a test finds them; and of the first, curve by width.
NUMBERS_ARE, DESCRIBED_BY = "drawn: ", "predicted TFLOP/s by n: "
MEASURED_DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s", "mi250x-gcd",
                    "v100-sxm2-16gb")  # fmt: skip


def wave_cliffs() -> XYChart:
    """Measured against predicted throughput where full waves end."""
    device = load_device(DEVICE)
    alignment = load_record("gemm", device).provenance["sections"]["bf16"]["alignment"]
    samples = []
    for n in WIDTHS:
        operation = Gemm(name="x", m=M, n=n, k=K, dtype=DTYPE, layout="NN")
        measured_s = float(operation.flops) / (MEASURED[n] * TERA) if n in MEASURED else None
        samples.append(Sample(operation, measured_s, name="paper"))
    fixed = {"m": M, "k": K, "batch": 1, "layout": "NN", "dtype": DTYPE}
    chart = operation_sweep_chart(
        OperationSweep("gemm", "paper", "n", fixed, tuple(samples)),
        device,
        measured_name="measured",
        measured_scale=alignment.get("collector_scale", 1.0),
        measured_extra_s=alignment["collector_overhead_s"],
    )
    return replace(
        chart,
        title=f"{device.title}, {DTYPE}, {M} x n x {K}: one more column of tiles costs a whole wave",
        x_label="width n",
        marks=tuple(mark for mark in chart.marks if mark.value in MEASURED),
    )


def predict_curve() -> tuple[list[int], list[float]]:
    """Widths, and predicted rates as the collector would see them. [element], [TFLOP/s]"""
    curve = next(part for part in wave_cliffs().series if isinstance(part, Line) and part.name == "predicted")
    return [int(x) for x in curve.x], [float(y or 0.0) for y in curve.y]


def of_plot(name: str, device: str, dtype: str) -> Chart:
    """The first chart that 'shapewright plot' draws of a figure of GPT-3 2.7B without a store."""
    question = build_scenario("gpt3-2.7b", device, workload={"dtype": dtype})
    request = FigureRequest(
        device=question.device,
        dtype=dtype,
        config=question.config,
        workload=question.workload,
        operations=lower(question.config, question.workload, ParallelLayout()),
    )
    return draw_figure(name, request)[0]


def held_out_errors() -> BarChart:
    """Mean error of held-out GEMMs by device and format, from the records."""
    by_dtype: dict[str, dict[str, float]] = {}
    for name in MEASURED_DEVICES:
        for dtype, section in load_record("gemm", load_device(name)).provenance["sections"].items():
            by_dtype.setdefault(dtype, {})[name] = 100.0 * float(section["held_out"]["mean_ape"])
    categories = [f"{name}, {dtype}" for name in MEASURED_DEVICES for dtype in by_dtype if name in by_dtype[dtype]]
    values = [by_dtype[dtype][name] for name in MEASURED_DEVICES for dtype in by_dtype if name in by_dtype[dtype]]
    return BarChart(
        title="GEMM times on held-out (n, k) shapes, by record",
        value_label="mean error (%)",
        categories=categories,
        parts=[BarPart("mean error", values)],
        alt=f"Mean held-out error of GEMM times by device and format, from {min(values):.3g} to {max(values):.3g} %",
    )


FIGURES: Mapping[str, Callable[[], Chart]] = {
    "wave_cliffs": wave_cliffs,
    "alignment": lambda: of_plot("alignment", "a100-sxm-40gb", "fp16"),
    "vocabulary": lambda: of_plot("vocabulary", "a100-sxm-40gb", "fp16"),
    "heads": lambda: of_plot("heads", "a100-sxm-40gb", "fp16"),
    "roofline": lambda: of_plot("roofline", "h100-sxm-80gb", "bf16"),
    "heat_map": lambda: of_plot("heat-map", "h100-sxm-80gb", "bf16"),
    "held_out_errors": held_out_errors,
}


def drawn_numbers(chart: Chart) -> list[float]:
    """Return the values that a figure shows: of curves and points, bars, or cells."""
    if isinstance(chart, XYChart):
        shown = [y for part in chart.series if isinstance(part, Line | Points) for y in part.y]
    elif isinstance(chart, HeatMap):
        shown = [value for row in chart.values for value in row]
    elif isinstance(chart, BarChart):
        shown = [value for part in chart.parts for value in part.values]
    else:
        raise TypeError(f"no numbers are known of a {type(chart).__name__}; add it here")
    return [value for value in shown if value is not None]


def description(name: str, chart: Chart) -> str:
    """Return the metadata text of a figure: its content with numbers; for the first figure the points of its curve."""
    if name != "wave_cliffs":
        return f"{chart.alt}; {NUMBERS_ARE}" + " ".join(f"{value:.4g}" for value in drawn_numbers(chart))
    return DESCRIBED_BY + " ".join(f"{n}:{rate:.1f}" for n, rate in zip(*predict_curve(), strict=True))


def main() -> None:
    """Draw all figures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *FIGURES], metavar="NAME", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the figures")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or FIGURES:
        chart = FIGURES[name]()
        path = arguments.output / f"{name}.svg"
        save_chart(chart, path, description=description(name, chart))
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
