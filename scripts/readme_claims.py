"""What the README claims in numbers: each made from predictions, records and results as they are today."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from markdown_parts import markdown_table

import shapewright
from shapewright.config import count_parameters, read_model
from shapewright.perf.software import TUNED, load_software, software_names

DOCS = Path(__file__).parent.parent / "docs"

# Rows of the bars that speak of what no kernel table does, in the README's words.
_BEYOND = {
    "GEMM, unseen device": ("products on a device that nobody measured, bf16, mean error", "each device in turn"),
    "layer GEMMs of another collector": (
        "products of 2024's software (vidur), mean error: its own section; today's libraries after one factor",
        "models; (n, k); all but the factor",
    ),
    "paper's layers, unfused; flash": (
        "whole layers of the paper on A100, mean error: unfused; flash attention",
        "whole table; hidden sizes",
    ),
    "published training throughput": ("published training throughput, mean error", "models"),
    "ranking regret": ("shape chosen among products alike in work, slower than the best: median; p90", "(n, k)"),
    "90 % interval": (
        "inside the 90 % interval: unseen rows; cells of a device and library, tables within 85 to 95 %",
        "shapes and layouts; the same; no",
    ),
}
_MODEL, _DEVICE = "llama-3-8b", "h100-sxm-80gb"


def odd_width() -> str:
    """What one element more in every width costs."""
    even = read_model(_MODEL).config
    changes = {"hidden_size": even.hidden_size + 1, "head_dim": even.head_dim, "v_head_dim": even.v_head_dim}
    steps = [shapewright.predict(_MODEL, device=_DEVICE, overrides=changed) for changed in ({}, changes)]
    more = count_parameters(steps[1].config).total / count_parameters(steps[0].config).total - 1.0
    slower = steps[1].step_time_s / steps[0].step_time_s
    return (
        f"Llama-3-8B with `hidden_size` {even.hidden_size + 1} instead of {even.hidden_size} has {100 * more:.2f} % "
        f"more parameters, and is predicted to take {slower:.1f} times as long on an H100."
    )


def paper() -> str:
    """The change of heads as the paper measured it, beside the prediction."""
    heads, *_ = json.loads((DOCS / "study.json").read_text(encoding="utf-8"))["measured"]
    return (
        f"The paper measured that change of heads at {heads['measured']:.2f}x for a layer's forward pass; predicted "
        f"are {heads['predicted']:.2f}x. [More such pairs](docs/study.md)"
    )


def beyond() -> str:
    """How far predictions hold where nothing was fitted, and plain roofline beside them."""
    results = json.loads((DOCS / "accuracy_results.json").read_text(encoding="utf-8"))
    reached = {bar["what"]: bar["reached"] for bar in results["bars"]}
    rows = [[words, reached[what], held_out] for what, (words, held_out) in _BEYOND.items()]
    products = next(table for table in results["tables"] if table["table"] == "gemm")
    rows.append(
        [
            "all measured products: mean error, and that of max(FLOPs / peak, bytes / bandwidth)",
            f"{100 * products['mean']:.1f} %, {100 * products['roofline']:.0f} %",
            "no: fits saw four fifths",
        ]
    )
    return markdown_table(["judged on", f"reached, {results['date']}", "held out"], rows)


def software() -> str:
    """Generations of training software: errors of models left out of their fits, and of predictions that know none."""
    rows = []
    for name in software_names():
        if name == TUNED:
            continue
        found = load_software(name)
        reports: dict[str, Any] = found.provenance["reports"]
        held_out, tuned = reports["held out"], reports["as a tuned stack"]
        rows.append(
            [
                f"`{name}`: {found.title}",
                str(held_out["rows"]),
                f"{100 * held_out['mean_absolute_error']:.1f} %",
                f"{100 * tuned['mean_absolute_error']:.0f} %",
                re.split(r"[;.] ", found.provenance["why"])[0],
            ]
        )
    return markdown_table(["software", "rows", "mean error", "as a tuned stack", "what differs"], rows)
