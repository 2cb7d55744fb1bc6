"""Draw docs/figures/wave_cliffs.svg: measured against predicted throughput where full waves end.

Needs matplotlib (the plot extra). The predicted curve is this package's; the measured points are the paper's. The
record says what the paper's collector adds to every call, and the curve includes it, as the points do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from shapewright.hardware import load_device
from shapewright.operations import Gemm
from shapewright.perf.calibration import load_record
from shapewright.perf.gemm import price_gemms
from shapewright.units import TERA

DEFAULT_TARGET = Path(__file__).parent.parent / "docs" / "figures" / "wave_cliffs.svg"

M, K, DEVICE, DTYPE = 2304, 4096, "a100-sxm-40gb", "fp16"
WIDTHS = range(512, 6145, 64)
# n -> TFLOP/s. Source: EleutherAI/cookbook @27dff48 (Apache-2.0), sweep mm_ksweep_high; arXiv 2401.14489, figure 5.
MEASURED = {1536: 217.6, 1600: 180.1, 3072: 235.0, 3136: 201.3, 4608: 239.2, 4672: 220.0}

# Before the curve's points in the figure's metadata, where a test finds them.
DESCRIBED_BY = "predicted TFLOP/s by n: "


def predict_curve() -> tuple[list[int], list[float], list[float]]:
    """Widths, predicted rates as the collector would see them, and the roofline's. [element], [flop/s], [flop/s]"""
    device = load_device(DEVICE)
    record = load_record("gemm", device)
    alignment = record.provenance["sections"]["bf16"]["alignment"]
    overhead_s, scale = alignment["collector_overhead_s"], alignment.get("collector_scale", 1.0)
    gemms = [Gemm(name="x", m=M, n=n, k=K, dtype=DTYPE, layout="NN") for n in WIDTHS]
    prices = price_gemms(gemms, device, record)
    rates, roofs = [], []
    for gemm, price in zip(gemms, prices, strict=True):
        rates.append(float(gemm.flops) / (float(price.time_s) * scale + overhead_s))
        roofs.append(float(gemm.flops) / float(price.roofline_s))
    return list(WIDTHS), rates, roofs


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_TARGET, help="where to write the SVG")
    target = parser.parse_args().output

    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "shapewright", "svg.fonttype": "none", "font.size": 10})
    import matplotlib.pyplot as plt

    widths, rates, roofs = predict_curve()
    figure, axes = plt.subplots(figsize=(8.0, 3.4), layout="constrained")
    axes.plot(widths, np.array(roofs) / TERA, color="#999999", linestyle="--", label="roofline")
    axes.plot(widths, np.array(rates) / TERA, color="#1f5fa8", label="predicted")
    axes.plot(
        list(MEASURED), list(MEASURED.values()), "o", color="#c0392b", markersize=5, label="measured (arXiv 2401.14489)"
    )
    for index, width in enumerate((1536, 3072, 4608), start=1):
        axes.axvline(width, color="#cccccc", linewidth=0.8, zorder=0)
        axes.annotate(
            f"{index} full wave{'s' if index > 1 else ''}", (width - 25, 252), rotation=90, ha="right", color="#777777"
        )
    axes.set(xlim=(512, 6144), ylim=(50, 330), xlabel="n", ylabel="TFLOP/s")
    axes.set_title(f"GEMM {M} x n x {K}, fp16, NVIDIA A100 SXM", loc="left", fontsize=10)
    axes.legend(loc="lower right", frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    points = " ".join(f"{n}:{rate / TERA:.1f}" for n, rate in zip(widths, rates, strict=True))
    figure.savefig(target, metadata={"Date": None, "Creator": None, "Description": f"{DESCRIBED_BY}{points}"})
    for n, measured in MEASURED.items():
        predicted = rates[widths.index(n)] / TERA
        print(f"n = {n}: measured {measured:.1f}, predicted {predicted:.1f} TFLOP/s")


if __name__ == "__main__":
    main()
