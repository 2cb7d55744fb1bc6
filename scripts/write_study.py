"""Write docs/study.md: results of ``check`` and ``search`` for twenty public models on four devices.

    python scripts/write_study.py --refresh   # predict everything again (minutes), then write page and figure
    python scripts/write_study.py             # write the page from the stored docs/study.json
    python scripts/write_study.py --check     # exit with 1 if the page is stale

The figure is drawn with --refresh only and needs matplotlib (the plot extra).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapewright import __version__
from shapewright.app.api.searches import search
from shapewright.app.api.steps import check
from shapewright.app.figures.chart import HeatMap
from shapewright.app.report.outputs.search import candidate_output, describe_changes
from shapewright.core.units import format_count
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.tables.paper_layers import PaperLayer
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.search.result import Candidate
from shapewright.prediction.predict import predict
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.price import price_gemms
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

DOCS = Path(__file__).parent.parent / "docs"
STORED, PAGE, FIGURE = DOCS / "study.json", DOCS / "study.md", DOCS / "figures" / "study.svg"

MODELS = (
    *("gpt2", "gpt2-xl", "gpt3-1.3b", "gpt3-2.7b", "gpt3-13b", "gpt3-175b", "pythia-1b", "pythia-12b", "opt-2.7b"),
    *("bloom-176b", "llama-2-7b", "llama-3-8b", "mistral-7b", "qwen2.5-7b", "gemma-2-9b", "phi-3-mini", "mpt-7b"),
    *("falcon-7b", "olmo-2-7b", "smollm2-1.7b"),
)
DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
# Largest parameter counts trained on one device, and on eight with ZeRO 3; larger models train on 512.
ONE_DEVICE, EIGHT_DEVICES = 3.5e9, 2e10

# Pairs of shapes with published measurements. Rates of a layer's forward pass by (h, a) on an A100, b=4, s=2048,
# unfused [TFLOP/s]. Source: jahatef/TransformerSizing, the logs of arXiv 2401.14489.
LAYERS = {
    (2560, 80): 74.96,
    (2560, 64): 83.39,
    (2560, 40): 108.51,
    (2560, 32): 119.47,
    (2560, 20): 140.70,
    (2048, 16): 129.66,
    (2048, 8): 155.29,
}
# (from, to, description)
LAYER_PAIRS = (
    ((2560, 32), (2560, 20), "GPT-3 2.7B, OPT 2.7B, Pythia 2.8B: 20 heads of 128 instead of 32 of 80"),
    ((2560, 32), (2560, 40), "the same with 40 heads of 64"),
    ((2560, 32), (2560, 64), "the same with 64 heads of 40"),
    ((2560, 32), (2560, 80), "the same with 80 heads of 32"),
    ((2048, 16), (2048, 8), "Pythia 1B against GPT-3 XL: 8 heads of 256 instead of 16 of 128"),
)
# Four batched GEMMs, contracted over the width of a SwiGLU MLP, h=4096 on H100, by that width [TFLOP/s]. Source:
# stas00/ml-engineering, training/performance, benchmarks/matrix-shape/swiglu-maf-bench.py.
SWIGLU = {10922: 272.73, 11008: 395.01}
# Seconds of one step by heads: h=13824, L=78, TP 4, PP 12, DP 8, b=2, 2048 sequences of 2048 on A100 80 GB, full
# recomputation. Source: bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md @9e64edec.
BLOOM_STEPS_S = {64: 103.5, 96: 107.1, 128: 147.4}
BLOOM_SOFTWARE = "megatron-deepspeed-2021"


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refresh", action="store_true", help="predict everything again")
    parser.add_argument("--compare", action="store_true", help="update only the comparison with measurements")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    arguments = parser.parse_args()
    if arguments.refresh:
        facts = {"version": __version__, "date": time.strftime("%F"), "rows": study(), "measured": compare_measured()}
        STORED.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        draw(facts)
    facts = json.loads(STORED.read_text(encoding="utf-8"))
    if arguments.compare:
        facts["measured"] = compare_measured()
        STORED.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    text = render(facts)
    if not arguments.check:
        PAGE.write_text(text, encoding="utf-8")
    elif text != PAGE.read_text(encoding="utf-8"):
        sys.exit("docs/study.md does not match docs/study.json: run python scripts/write_study.py")


def study() -> list[dict[str, Any]]:
    """Check and search every model on every device."""
    rows = []
    for name in MODELS:
        for device in DEVICES:
            rows.append(study_one(name, device))
            print(name, device, rows[-1]["verdict"], file=sys.stderr)
    return rows


def question_of(config: TransformerConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Workload and layout assumed for training a model of this size."""
    size, seq_len = count_parameters(config).total, min(2048, config.max_position_embeddings)
    if size <= ONE_DEVICE:
        return {"micro_batch_size": 4, "seq_len": seq_len}, {}
    if size <= EIGHT_DEVICES:
        return {"micro_batch_size": 2, "seq_len": seq_len}, {"data_parallel": 8, "zero_stage": 3}
    layout = {"tensor_parallel": 8, "pipeline_parallel": 8, "data_parallel": 8, "zero_stage": 1}
    return {"micro_batch_size": 1, "seq_len": seq_len, "global_batch_size": 1024}, layout


def study_one(name: str, device: str) -> dict[str, Any]:
    """Results of check and of two searches, by time to the loss and by speed, for one model on one device."""
    config = read_model(name).config
    workload, layout = question_of(config)
    report = check(name, device=device, workload=workload, layout=layout)
    # Vary the shape only: with pipeline stages, search would also vary the micro-batch.
    given: dict[str, Any] = {"device": device, "workload": workload, "layout": layout}
    given["keep"] = {"micro_batch_size": workload["micro_batch_size"]}
    found = search(name, objective="time-to-loss", **given)
    fastest = search(name, top=1, **given).candidates
    trades = [shape for shape in found.candidates if not shape.is_free]
    assert found.verdict is not None
    return {
        "model": name,
        "device": device,
        "parameters": found.baseline.prediction.parameters.total,
        "train_tokens": found.train_tokens,
        "layout": layout,
        "workload": workload,
        "mfu": found.baseline.prediction.mfu,
        "findings": [
            {"code": finding.code, "name": finding.name, "cost_fraction": finding.cost_fraction}
            for finding in report.findings
        ],
        "verdict": {"code": found.verdict.code, "text": found.verdict.text, "net": found.verdict.net_speedup},
        "free": _shape(max(filter(_is_free, found.candidates), key=_net_of, default=None)),
        "trade": _shape(trades[0] if trades else None),
        "fastest": _shape(fastest[0] if fastest else None),
        "num_shapes": found.tally.num_shapes,
    }


def _is_free(shape: Candidate) -> bool:
    return shape.is_free


def _net_of(shape: Candidate) -> float:
    assert shape.effect is not None
    assert shape.effect.net_speedup is not None
    return shape.effect.net_speedup.factor


def _shape(shape: Candidate | None) -> dict[str, Any] | None:
    if shape is None:
        return None
    assert shape.effect is not None
    net = shape.effect.net_speedup
    assert net is not None
    return {
        "changes": describe_changes(candidate_output(shape)),
        "speedup": shape.speedup.factor,
        "net": net.factor,
        "low": net.low,
        "high": net.high,
        "chance": net.probability_faster,
        "loss_difference_nats": shape.effect.difference_nats,
        "parameters_change": shape.parameters_change_fraction,
    }


def compare_measured() -> list[dict[str, Any]]:
    """Published speed-ups between pairs of shapes, and the predicted ones."""
    rows = []
    for before, after, words in LAYER_PAIRS:
        predicted = layer_rate(*after) / layer_rate(*before)
        rows.append(_pair(words, "A100, forward pass of one layer, unfused", LAYERS[after] / LAYERS[before], predicted))
    device = load_device("h100-sxm-80gb")
    gemms = [Gemm(name="mlp", batch=4, m=4096, n=4096, k=width, dtype="fp16", layout="NN") for width in SWIGLU]
    rates = [
        gemm.flops / float(price.time_s)
        for gemm, price in zip(gemms, price_gemms(gemms, device, load_record("gemm", device)), strict=True)
    ]
    words = "SwiGLU with h=4096 (first Llama models): MLP width 11008 instead of 10922, GEMM throughput"
    rows.append(_pair(words, "H100", SWIGLU[11008] / SWIGLU[10922], float(rates[1] / rates[0])))
    for num_before, num_after in ((96, 64), (128, 96)):
        words = (
            f"BLOOM candidates with h=13824: {num_after} heads instead of {num_before} "
            f"(head dimension {13824 // num_after} instead of {13824 // num_before})"
        )
        predicted = bloom_step_s(num_before) / bloom_step_s(num_after)
        rows.append(
            _pair(
                words,
                f"384 A100, training step, `{BLOOM_SOFTWARE}`",
                BLOOM_STEPS_S[num_before] / BLOOM_STEPS_S[num_after],
                predicted,
            )
        )
    return rows


def _pair(words: str, where: str, measured: float, predicted: float) -> dict[str, Any]:
    return {"what": words, "where": where, "measured": measured, "predicted": predicted}


def layer_rate(hidden_size: int, num_heads: int) -> float:
    """Predicted throughput of the forward pass of a layer, run as in the paper's script. [flop/s]"""
    layer = PaperLayer(num_heads, hidden_size, micro_batch_size=4, seq_len=2048, tensor_parallel=1)
    workload = layer.workload(is_flash=False)
    step = predict(layer.config, device=load_device("a100-sxm-40gb"), workload=workload, layout=ParallelLayout())
    b, s, h = 4, 2048, hidden_size
    return (24.0 * b * s * h**2 + 4.0 * b * s**2 * h) / step.layer_forward_time_s


def bloom_step_s(num_heads: int) -> float:
    """Predicted training step of a BLOOM candidate with the software of 2021. [s]"""
    config = replace(
        read_model("bloom-176b").config,
        hidden_size=13824,
        num_layers=78,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=13824 // num_heads,
        v_head_dim=13824 // num_heads,
        intermediate_size=4 * 13824,
        embedding_size=13824,
    )
    workload = Workload(attention="unfused", micro_batch_size=2, seq_len=2048, global_batch_size=2048, recompute="full")
    layout = ParallelLayout(tensor_parallel=4, pipeline_parallel=12, data_parallel=8, zero_stage=1)
    device = load_device("a100-sxm-80gb")
    return predict(config, device=device, workload=workload, layout=layout, software=BLOOM_SOFTWARE).step_time_s


def draw(facts: dict[str, Any]) -> None:
    """Draw the net speed-up of the recommended change of each model on each device."""
    from shapewright.app.figures.matplotlib_files import save_chart

    nets = {(row["model"], row["device"]): _recommended_net(row) for row in facts["rows"]}
    models = MODELS[::-1]  # the first one on top
    chart = HeatMap(
        title="Predicted net speed-up of the recommended change, to the same loss (%)",
        x_label="",
        y_label="",
        value_label="gain (%)",
        x_values=DEVICES,
        y_values=models,
        values=[[100.0 * (nets[model, device] - 1.0) for device in DEVICES] for model in models],
        alt="Gains differ more between models than between devices; many models are best kept.",
    )
    save_chart(chart, FIGURE)


def _recommended_net(row: dict[str, Any]) -> float:
    """Net speed-up of what the verdict recommends; 1 where it is to keep the shape."""
    return float(row["verdict"]["net"]) if row["verdict"]["code"] in ("free", "change") else 1.0


def render(facts: dict[str, Any]) -> str:
    """The page."""
    rows = facts["rows"]
    codes = Counter(row["verdict"]["code"] for row in rows)
    gains = [_recommended_net(row) for row in rows if row["verdict"]["code"] in ("free", "change")]
    fastest = [row["fastest"] for row in rows if row["fastest"]]
    slower = sum(shape["net"] < max(1.0, row["free"]["net"] if row["free"] else 1.0) for row, shape in _pairs(rows))
    unsure = sum(shape["low"] < 1.0 < shape["high"] for shape in fastest)
    lines = [
        "# Twenty public models on four devices",
        "",
        "Findings of `check` for published shapes, and shapes from `search` within 2 % of the parameters and the "
        "[quality guard](decisions/0006-search.md), compared by the time to the loss that the published shape has "
        f"after 20 tokens per parameter. Version {facts['version']}, {facts['date']}; numbers in "
        "[study.json](study.json).",
        "",
        f"Of {len(rows)} pairs of model and device, the verdict is to make a free change in {codes['free']}, to trade "
        f"loss for speed or speed for loss in {codes['change']}, to decide by a trial in {codes['trial']}, and to keep "
        f"the shape in {codes['keep']}. "
        f"Recommended changes gain {_gain(statistics.median(gains))} in the median and {_gain(max(gains))} at most.",
        "Free changes keep the loss: heads of 64 to 256 at the same attention width, and a padded vocabulary.",
        f"The fastest shape of the same size is another matter: in {slower} of {len(fastest)} pairs it is predicted to "
        f"need longer to the same loss than the unchanged shape or its best free change, and in {unsure} the interval "
        "of its net effect includes no effect.",
        "",
        "![Net speed-up of the recommended change by model and device](figures/study.svg)",
        "",
        "Training in bf16 with fused attention and at most 2048 tokens per sequence: one device up to "
        f"{format_count(ONE_DEVICE)} parameters (b=4), eight with ZeRO 3 up to {format_count(EIGHT_DEVICES)} (b=2), "
        "512 above (TP 8, PP 8, DP 8, ZeRO 1, 1024 sequences per step), without a memory limit where the published "
        "shape does not fit.",
        "*Net* is the speed-up to the same loss with its 90 % interval; *speed* that of the step. "
        "Letters: a heads, a_kv key-value heads, d head dimension, f MLP width, h hidden size, L layers, v vocabulary. "
        "Finding codes: [rules](rules.md).",
        "",
    ]
    for device in DEVICES:
        lines += [f"## {device}", "", *_table([row for row in rows if row["device"] == device]), ""]
    lines += [
        "## Comparison with measurements",
        "",
        "Times to a loss of seventeen shapes, measured and predicted, are on [a page of their own](time-to-loss.md). "
        "Below are published measurements of the speed of pairs of shapes. *Agrees*: same direction, and speed-ups "
        "within 10 %.",
        "",
        "| pair | where | measured | predicted | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in facts["measured"]:
        lines.append(
            f"| {row['what']} | {row['where']} | {row['measured']:.3f}x | {row['predicted']:.3f}x | {verdict_of(row)} |"
        )
    lines += [
        "",
        "In the last row, kernels of 2021 do not use tensor cores for a head dimension of 108; a current stack is "
        "predicted to lose little.",
        "",
        "Sources: arXiv 2401.14489 (jahatef/TransformerSizing), stas00/ml-engineering, BLOOM "
        "(bigscience-workshop/bigscience, tr11-176B-ml).",
        "",
    ]
    return "\n".join(lines)


def _pairs(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows with a fastest shape, and that shape."""
    return [(row, row["fastest"]) for row in rows if row["fastest"]]


def verdict_of(row: dict[str, Any]) -> str:
    """How well a prediction agrees with a measurement."""
    if (row["measured"] - 1.0) * (row["predicted"] - 1.0) < 0.0:
        return "disagrees"
    return "agrees" if 1 / 1.1 < row["predicted"] / row["measured"] < 1.1 else "direction only"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | MFU | findings (share of the step) | verdict | best free change: net | best trade: net (chance) "
        "| fastest shape: speed, net |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        fastest = row["fastest"]
        cells = [
            f"{row['model']} ({format_count(row['parameters'])})",
            f"{100.0 * row['mfu']:.0f} %",
            _findings(row["findings"]),
            row["verdict"]["code"],
            _change(row["free"]),
            _change(row["trade"]) + (f" {100.0 * row['trade']['chance']:.0f} %" if row["trade"] else ""),
            f"{fastest['changes']}: {fastest['speedup']:.3f}, {fastest['net']:.3f}" if fastest else "none",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _findings(findings: list[dict[str, Any]], most: int = 3) -> str:
    """Codes of the costliest findings."""
    words = [
        finding["code"] + (f" ({100.0 * finding['cost_fraction']:.1f} %)" if finding["cost_fraction"] else "")
        for finding in findings
    ]
    more = f", {len(words) - most} more" if len(words) > most else ""
    return (", ".join(words[:most]) + more) or "nothing"


def _change(shape: dict[str, Any] | None) -> str:
    """Changed fields, and the net speed-up with its interval."""
    return f"{shape['changes']}: {shape['net']:.3f} ({shape['low']:.3f} to {shape['high']:.3f})" if shape else "none"


def _gain(factor: float) -> str:
    return f"{100.0 * (factor - 1.0):.0f} %"


if __name__ == "__main__":
    main()
