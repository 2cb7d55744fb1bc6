"""What the README claims in numbers: each made from predictions, records and results as they are today."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from accuracy_page import accuracy_facts, results
from markdown_parts import markdown_table

import shapewright
from shapewright.config import count_parameters, read_model
from shapewright.perf.software import TUNED, UNNAMED, load_software, software_names

DOCS = Path(__file__).parent.parent / "docs"

# The devices whose products the summary speaks of, and what they are called there.
_SUMMARY_DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
# Odd sizes were measured on the first of these devices; the other takes what they cost from it.
_MODEL, _DEVICES = "llama-3-8b", {"a100-sxm-80gb": "A100", "h100-sxm-80gb": "H100"}


def odd_width() -> str:
    """What one element more in every width costs."""
    even = read_model(_MODEL).config
    changes = {"hidden_size": even.hidden_size + 1, "head_dim": even.head_dim, "v_head_dim": even.v_head_dim}
    slower = []
    for device, name in _DEVICES.items():
        steps = [shapewright.predict(_MODEL, device=device, overrides=changed) for changed in ({}, changes)]
        slower.append(f"{steps[1].step_time_s / steps[0].step_time_s:.1f} times as long on an {name}")
    more = count_parameters(steps[1].config).total / count_parameters(steps[0].config).total - 1.0
    return (
        f"Llama-3-8B with `hidden_size` {even.hidden_size + 1} instead of {even.hidden_size} has {100 * more:.2f} % "
        f"more parameters, and is predicted to take {slower[0]}, and {slower[1]}."
    )


def paper() -> str:
    """The change of heads as the paper measured it, beside the prediction."""
    heads, *_ = json.loads((DOCS / "study.json").read_text(encoding="utf-8"))["measured"]
    return (
        f"The paper measured that change of heads at {heads['measured']:.2f}x for a layer's forward pass; predicted "
        f"are {heads['predicted']:.2f}x. [More such pairs](docs/study.md)"
    )


def summary() -> str:
    """The errors that matter most, in one paragraph."""
    reached = {bar["what"]: bar["reached"] for bar in results()["bars"]}
    products = [
        fact
        for fact in accuracy_facts()
        if (fact["operation"], fact["section"]) == ("gemm", "bf16") and fact["device"] in _SUMMARY_DEVICES
    ]
    table = next(table for table in results()["tables"] if table["table"] == "gemm")
    return (
        f"In short: 16-bit products that no fit saw are {_span(products, 'median')} off in the median and "
        f"{_span(products, 'mean')} in the mean on A100, H100, H200 and B200; published dense training steps "
        f"{_first(reached['published training throughput'])} in the mean, where the software is known; and 90 % "
        f"intervals hold {_first(reached['90 % interval'])} of unseen rows. Plain roofline, max(FLOPs / peak, "
        f"bytes / bandwidth), is {100 * table['roofline']:.0f} % off on all measured products."
    )


def beyond() -> str:
    """How far predictions hold where nothing was fitted."""
    reached = {bar["what"]: bar["reached"] for bar in results()["bars"]}
    devices = re.findall(r"(\S+) ([\d.]+ %)", reached["GEMM, unseen device"])
    near, far = (pick(devices, key=lambda pair: float(pair[1].split()[0])) for pick in (min, max))
    own, _, today = reached["layer GEMMs of another collector"].split("; ")
    unfused, flash = reached["paper's layers, unfused; flash"].split("; ")
    median, p90 = reached["ranking regret"].partition(" (")[0].split("; ")
    noise = reached["ranking regret"].partition(": ")[2].rstrip(")")
    rows = [
        ["products on a device that nobody measured", f"{near[1]} ({near[0]}) to {far[1]} ({far[0]})", "each device"],
        ["products of 2024's software (vidur, A100)", f"{own}; today's libraries after one factor {today}", "models"],
        ["the paper's layers on A100, unfused", unfused, "whole table"],
        ["the same with flash attention", flash, "hidden sizes"],
        ["published training steps, dense models", _with_tau(reached["published training throughput"]), "models"],
        ["the same, mixtures of experts", _with_tau(reached["published training of mixtures of experts"]), "models"],
        [
            "choosing among products alike in work: slower than the measured best",
            f"median {median}; p90 {p90} by device and library (choosing by another library's times: {noise})",
            "(n, k)",
        ],
    ]
    return (
        "Beyond kernels that were measured: mean error, and Kendall's tau (1: predictions and measurements have one "
        "order).\n\n" + markdown_table(["judged on", f"reached, {results()['date']}", "left out of the fit"], rows)
    )


def _first(reached: str) -> str:
    """The first figure of a bar."""
    return re.split(r"; | \(", reached)[0]


def _with_tau(reached: str) -> str:
    """Mean error and tau of a bar, without what stands in brackets."""
    return re.sub(r" \(.*\)", "", reached)


def _span(facts: list[dict[str, Any]], key: str) -> str:
    """Least and largest of an error."""
    found = [100.0 * fact[key] for fact in facts]
    return f"{min(found):.1f} to {max(found):.1f} %"


def software() -> str:
    """What knowing the software of a training step brings, and what not knowing it costs."""
    reports = {name: load_software(name).provenance["reports"] for name in software_names() if name != TUNED}
    unnamed = reports.pop(UNNAMED)

    def spans(*, experts: bool) -> list[str]:
        chosen = [report for name, report in reports.items() if ("moe" in name) == experts]
        return [
            _span([report[judged] for report in chosen], "mean_absolute_error")
            for judged in ("held out", "as a tuned stack")
        ]

    (dense, dense_tuned), (sparse, sparse_tuned) = spans(experts=False), spans(experts=True)
    return (
        "A training step depends on the software that runs it. Published dense steps are "
        f"{dense} off with the `--software` that ran them and {dense_tuned} without, those of mixtures of experts "
        f"{sparse} and {sparse_tuned}; where nobody names it, "
        f"{100 * unnamed['held out']['mean_absolute_error']:.0f} %. Without `--software` a tuned "
        "stack of today is predicted, and the interval spans all generations. "
        "[Each of them, and what differs](docs/accuracy.md#training-steps-by-software)"
    )
