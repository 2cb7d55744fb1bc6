"""Numbers in README.md and docs/index.md, computed from current predictions, calibration records and results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accuracy_page import accuracy_facts, results
from markdown_parts import markdown_table

import shapewright
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.prediction.speedup import compare_times
from shapewright.pricing.software import TUNED, UNNAMED, load_software, software_names

DOCS = Path(__file__).parent.parent / "docs"

# Devices of the first row of the accuracy table, with their short names.
_MAIN_DEVICES = {
    "a100-sxm-80gb": "A100",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "b200-sxm-180gb": "B200",
}
_SHORT_NAMES = {**_MAIN_DEVICES, "l40s": "L40S", "v100-sxm2-16gb": "V100", "mi250x-gcd": "MI250X"}
# Odd sizes were measured on the A100; the H100 borrows its alignment factors.
_MODEL, _DEVICES = "llama-3-8b", ("a100-sxm-80gb", "h100-sxm-80gb")


def odd_width() -> str:
    """Predicted cost of adding one element to the hidden size."""
    even = read_model(_MODEL).config
    changes = {"hidden_size": even.hidden_size + 1, "head_dim": even.head_dim, "v_head_dim": even.v_head_dim}
    slower = []
    for device in _DEVICES:
        steps = [shapewright.predict(_MODEL, device=device, overrides=changed) for changed in ({}, changes)]
        factor = compare_times(steps[1], steps[0])
        slower.append(
            f"{factor.factor:.1f} times as long on an {_SHORT_NAMES[device]} (90 % interval {factor.low:.1f} to "
            f"{factor.high:.1f})"
        )
    more = count_parameters(steps[1].config).total / count_parameters(steps[0].config).total - 1.0
    return (
        f"Llama-3-8B with `hidden_size` {even.hidden_size + 1} instead of {even.hidden_size} has {100 * more:.2f} % "
        f"more parameters, but its training step is predicted to take {slower[0]} and {slower[1]}."
    )


def paper() -> str:
    """Speed-up of the suggested head count, as the paper measured it and as predicted."""
    heads, *_ = json.loads((DOCS / "study.json").read_text(encoding="utf-8"))["measured"]
    return (
        f"The paper measured a speed-up of {heads['measured']:.2f}x for the forward pass of a layer with 20 heads; "
        f"the prediction is {heads['predicted']:.2f}x ([more such pairs](docs/study.md))."
    )


def accuracy_table() -> str:
    """Held-out errors by kind of prediction: the accuracy table of the README."""
    reached = {bar["what"]: bar["reached"] for bar in results()["bars"]}
    facts = accuracy_facts()
    rows = [*_gemm_rows(facts, reached), *_kernel_rows(reached), *_step_rows(reached)]
    roofline = next(table for table in results()["tables"] if table["table"] == "gemm")["roofline"]
    median, p90 = reached["ranking regret"].partition(" (")[0].split("; ")
    num_rows = sum(fact["rows"] for fact in facts if not fact["is_part"])
    return (
        f"Mean absolute error of predicted times on held-out measurements ({num_rows:,} kernel rows, "
        f"{results()['date']}). *Tau* is Kendall's rank correlation.\n\n"
        + markdown_table(["prediction", "mean error", "held out"], rows)
        + f"\n\nPlain roofline has an error of {100 * roofline:.0f} % on all measured GEMMs. The 90 % intervals "
        f"contain {_first(reached['90 % interval coverage'])} of held-out rows. Among GEMMs of equal work, the one "
        f"predicted to be fastest is {median} slower than the measured best in the median, and {p90} at the 90th "
        "percentile, by device and library."
    )


def _gemm_rows(facts: list[dict[str, Any]], reached: dict[str, str]) -> list[list[str]]:
    """Rows of the accuracy table on GEMMs."""
    gemms = [fact for fact in facts if fact["operation"] == "gemm"]
    bf16 = [fact for fact in gemms if fact["section"] == "bf16" and fact["device"] in _MAIN_DEVICES]
    fp8 = [fact for fact in gemms if fact["section"] == "fp8"]
    odd = [fact for fact in gemms if fact["section"].endswith("odd sizes") or fact["section"] == "fp16"]
    l40s = [fact for fact in gemms if fact["section"] == "bf16" and fact["device"] == "l40s"]
    devices = re.findall(r"(\S+) ([\d.]+ %)", reached["GEMM, uncalibrated device"])
    near, far = (pick(devices, key=lambda pair: float(pair[1].split()[0])) for pick in (min, max))
    means, medians = _span(bf16, "mean"), _span(bf16, "median")
    return [
        [f"GEMM, bf16: {_names(bf16)}", f"{means} (median {medians})", "(n, k) shapes"],
        ["GEMM, bf16: L40S", _span(l40s, "mean"), "(n, k) shapes"],
        [f"GEMM, fp8: {_names(fp8)}", _span(fp8, "mean"), "(n, k) shapes"],
        [f"GEMM, odd sizes: {_names(odd)}", _span(odd, "mean"), "(n, k) shapes"],
        [
            "GEMM, bf16, uncalibrated device",
            f"{near[1]} ({_SHORT_NAMES[near[0]]}) to {far[1]} ({_SHORT_NAMES[far[0]]})",
            "devices",
        ],
    ]


def _kernel_rows(reached: dict[str, str]) -> list[list[str]]:
    """Rows of the accuracy table on all other kernels."""
    prefill, decode = reached["attention prefill; decode"].partition(" (")[0].split("; ")
    return [
        ["attention, 16-bit: prefill; decode", f"{prefill}; {decode}", "head layouts"],
        ["expert (MoE) block", _first(reached["MoE block"]), "expert layouts"],
        ["pointwise operations, A100", reached["pointwise"], "models"],
        ["collectives inside a node", reached["collectives"], "message sizes"],
    ]


def _step_rows(reached: dict[str, str]) -> list[list[str]]:
    """Rows of the accuracy table on layers and training steps."""
    unfused, flash = reached["paper's layers, unfused; flash"].split("; ")
    dense, experts = (_default_software_error(has_experts=has_experts) for has_experts in (False, True))
    unnamed = load_software(UNNAMED).provenance["reports"]["held out"]["mean_absolute_error"]
    return [
        ["layer of the paper, A100: unfused; flash attention", f"{unfused}; {flash}", "not fitted; hidden sizes"],
        ["dense training step, matching `--software`", _without_parts(reached["training step, dense"]), "models"],
        ["MoE training step, matching `--software`", _without_parts(reached["training step, MoE"]), "models"],
        ["dense; MoE training step, default software", f"{dense}; {experts}", "models"],
        [f"any training step, `--software {UNNAMED}`", f"{100 * unnamed:.0f} %", "software generations"],
    ]


def _first(reached: str) -> str:
    """The first figure of a result."""
    return re.split(r"; | \(", reached)[0]


def _without_parts(reached: str) -> str:
    """Mean error and tau of a result, without the values in parentheses."""
    return re.sub(r" \(.*\)", "", reached)


def _names(facts: Iterable[dict[str, Any]]) -> str:
    """Short names of the devices of some facts, in the order of the list above."""
    devices = {fact["device"] for fact in facts}
    return ", ".join(short for name, short in _SHORT_NAMES.items() if name in devices)


def _span(facts: list[dict[str, Any]], key: str) -> str:
    """Smallest and largest value of an error."""
    found = sorted(100.0 * fact[key] for fact in facts)
    return f"{found[0]:.1f} %" if len(found) == 1 else f"{found[0]:.1f} to {found[-1]:.1f} %"


def _default_software_error(*, has_experts: bool) -> str:
    """Smallest and largest error over software generations when each is predicted as a tuned stack."""
    reports = [
        load_software(name).provenance["reports"]["as a tuned stack"]
        for name in software_names()
        if name not in (TUNED, UNNAMED) and ("moe" in name) == has_experts
    ]
    return _span(reports, "mean_absolute_error")
