"""Write docs/time-to-loss.md: predicted and measured time to a loss of the Gemstones models.

    python scripts/write_time_to_loss.py --refresh DIR   # predict from loss_by_shape.csv in DIR, then write the page
    python scripts/write_time_to_loss.py                 # write the page from the stored docs/time-to-loss.json
    python scripts/write_time_to_loss.py --check         # exit with 1 if the page is stale

Losses are predicted by fits that leave the model out. A time to a loss is tokens needed, times seconds per token, times
devices.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from shapewright import __version__
from shapewright.core.units import format_count
from shapewright.models import TransformerConfig, count_parameters
from shapewright.prediction.build import build_scenario

DOCS = Path(__file__).parent.parent / "docs"
STORED, PAGE = DOCS / "time-to-loss.json", DOCS / "time-to-loss.md"
TABLE, SOURCE, RUN = "loss_by_shape.csv", "gemstones", "hot_100b+"
# Shapes of one size differ by at most this in parameters, embeddings included.
SAME_SIZE = 1.25
# Tokens of the slower learner of a pair at which its loss is the target.
TARGET_TOKENS = (100e9, 200e9, 300e9)
MICRO_BATCH_SIZE = 4
BATCH_TOKENS = 4_194_304
SEQ_LEN = 2048
DEVICE = "mi250x-gcd"


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--refresh", metavar="DIR", type=Path, help="folder with loss_by_shape.csv")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    arguments = parser.parse_args()
    if arguments.refresh:
        facts = {"version": __version__, "date": time.strftime("%F"), **compare(arguments.refresh)}
        STORED.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    text = render(json.loads(STORED.read_text(encoding="utf-8")))
    if not arguments.check:
        PAGE.write_text(text, encoding="utf-8")
    elif text != PAGE.read_text(encoding="utf-8"):
        sys.exit("docs/time-to-loss.md does not match its JSON: run python scripts/write_time_to_loss.py")


def compare(data: Path) -> dict[str, Any]:
    """Measured and predicted times to a loss of every pair of shapes of one size."""
    curves, shapes = read_curves(data), read_shapes(data)
    steps = {
        name: {"measured_s": shape["step_s"], "predicted_s": predict_step_s(shape)} for name, shape in shapes.items()
    }
    pairs = []
    for one, other in itertools.combinations(sorted(shapes, key=lambda name: shapes[name]["parameters"]), 2):
        sizes = sorted(shapes[name]["parameters"] for name in (one, other))
        if sizes[1] / sizes[0] > SAME_SIZE:
            continue
        for tokens in TARGET_TOKENS:
            pairs.append(compare_pair(one, other, tokens, curves, shapes, steps))
    return {"shapes": {name: {**shapes[name], **steps[name]} for name in shapes}, "pairs": pairs}


def compare_pair(
    one: str, other: str, tokens: float, curves: dict[str, Any], shapes: dict[str, Any], steps: dict[str, Any]
) -> dict[str, Any]:
    """Ratio of the device time of two shapes to the loss of the slower learner after some tokens."""
    target_nats = max(loss_at(curves[name]["measured"], tokens) for name in (one, other))

    def device_hours(name: str, losses: str, step: str) -> float:
        needed = tokens_to(curves[name][losses], target_nats)
        return float(needed / BATCH_TOKENS * steps[name][step] * shapes[name]["num_devices"] / 3600.0)

    hours = {
        label: [device_hours(name, losses, step) for name in (one, other)]
        for label, losses, step in (
            ("measured", "measured", "measured_s"),
            ("predicted_tokens", "predicted", "measured_s"),
            ("predicted", "predicted", "predicted_s"),
        )
    }
    return {
        "shapes": [one, other],
        "target_nats": target_nats,
        "measured_hours": hours["measured"],
        **{f"{label}_ratio": values[0] / values[1] for label, values in hours.items()},
    }


def read_curves(data: Path) -> dict[str, Any]:
    """Measured losses of the models, and those predicted by fits that leave the model out, by tokens."""
    from shapewright.measure.accuracy.measured_files import read_columns
    from shapewright.measure.fit.loss_law import predict_left_out
    from shapewright.measure.fit.loss_rows import FORMAT, read_loss_rows
    from shapewright.measure.refit.loss import fit_sources

    skipped: Counter[str] = Counter()
    rows = read_loss_rows(read_columns(data / TABLE, FORMAT, skipped), skipped)
    predicted, _ = predict_left_out(rows, fit_sources)
    recipe = f"{SOURCE}, constant, dolma, batch of {BATCH_TOKENS} tokens"
    curves = {}
    for model in sorted(set(rows.model[rows.recipe == recipe])):
        own = np.flatnonzero((rows.recipe == recipe) & (rows.model == model))
        own = own[np.argsort(rows.tokens[own])]
        tokens = rows.tokens[own].tolist()
        curves[str(model).partition(": ")[2]] = {
            "measured": list(zip(tokens, rows.loss_nats[own].tolist(), strict=True)),
            "predicted": list(zip(tokens, predicted[own].tolist(), strict=True)),
        }
    return curves


def read_shapes(data: Path) -> dict[str, Any]:
    """Shape, devices and measured step time of each model."""
    fields = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    found: dict[str, Any] = {}
    with (data / TABLE).open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["source"] != SOURCE or not row["run"].startswith(RUN):
                continue
            config = {name: int(row[name]) for name in fields}
            found[f"{row['hidden_size']}x{row['num_layers']}"] = {
                "config": config,
                "parameters": count_parameters(config_of(config)).total,
                "num_devices": int(row["num_devices"]),
                "step_s": float(row["seconds_per_step"]),
            }
    return found


def config_of(fields: dict[str, Any]) -> TransformerConfig:
    """Config of a model of the table."""
    return TransformerConfig(
        **fields, v_head_dim=fields["head_dim"], gated_mlp=True, norm="rmsnorm", position_embedding="rotary",
        tied_embeddings=False, max_position_embeddings=SEQ_LEN,
    )  # fmt: skip


def predict_step_s(shape: dict[str, Any]) -> float:
    """Predicted time of one optimizer step on as many dies. [s]"""
    workload = {
        "micro_batch_size": MICRO_BATCH_SIZE,
        "global_batch_size": BATCH_TOKENS // SEQ_LEN,
        "seq_len": SEQ_LEN,
        "dtype": "bf16",
    }
    layout = {"data_parallel": shape["num_devices"], "zero_stage": 3}
    scenario = build_scenario(config_of(shape["config"]), DEVICE, workload=workload, layout=layout)
    return scenario.predict().step_time_s


def loss_at(curve: list[tuple[float, float]], tokens: float) -> float:
    """Loss after some tokens, linear in the logarithm of tokens. [nat]"""
    return float(np.interp(np.log(tokens), np.log([point[0] for point in curve]), [point[1] for point in curve]))


def tokens_to(curve: list[tuple[float, float]], target_nats: float) -> float:
    """Tokens after which a falling curve first reaches a loss; beyond its ends along its last or first points."""
    logs = np.log([point[0] for point in curve])
    losses = np.minimum.accumulate([point[1] for point in curve])
    below = np.flatnonzero(losses <= target_nats)
    # Extrapolated over the outer eight points, which average the noise of smoothed losses.
    if not len(below) or below[0] == 0:
        part = slice(-8, None) if not len(below) else slice(0, 8)
        slope, level = np.polyfit(logs[part], losses[part], 1)
        return float(np.exp((target_nats - level) / slope))
    after = int(below[0])
    share = (losses[after - 1] - target_nats) / (losses[after - 1] - losses[after])
    return float(np.exp(logs[after - 1] + share * (logs[after] - logs[after - 1])))


def render(facts: dict[str, Any]) -> str:
    """The page."""
    pairs = facts["pairs"]
    rows = [
        "# Predicted and measured time to a loss",
        "",
        "The Gemstones models (arXiv 2502.06857) have one recipe and many shapes, with losses up to 350 B tokens and "
        "seconds per step on MI250X. So device hours to a loss are measured: tokens needed, times seconds per token, "
        "times devices. "
        f"Version {facts['version']}, {facts['date']}; numbers in [time-to-loss.json](time-to-loss.json).",
        "",
        f"Below are all {len(pairs) // len(TARGET_TOKENS)} pairs of shapes within {100 * (SAME_SIZE - 1):.0f} % of "
        "one size, for three targets each: the loss of the slower learner after 100, 200 and 300 B tokens. The losses "
        "of a model are predicted by a fit that leaves out all of its runs; steps by a tuned stack (ZeRO 3, "
        f"micro-batch {MICRO_BATCH_SIZE}), which these runs were not.",
        "",
        "| predicted | order right | ratio of times, median error |",
        "| --- | --- | --- |",
    ]
    for label, words in (
        ("predicted_tokens_ratio", "tokens needed, with measured steps"),
        ("predicted_ratio", "tokens and steps"),
    ):
        rows.append(f"| {words} | {100 * _order(pairs, label):.0f} % | {100 * _error(pairs, label):.0f} % |")
    far = [pair for pair in pairs if abs(np.log(pair["measured_ratio"])) > np.log(1.1)]
    rows += [
        "",
        f"Of the {len(far)} pairs and targets whose measured times differ by more than 10 %, the order is right in "
        f"{100 * _order(far, 'predicted_tokens_ratio'):.0f} % with measured steps and in "
        f"{100 * _order(far, 'predicted_ratio'):.0f} % with predicted ones.",
        "",
        "## Pairs",
        "",
        "Times are device hours of one die; ratios are the first shape's over the second's.",
        "",
        "| shapes | target (nats) | measured hours | ratio | tokens predicted | both predicted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for pair in pairs:
        hours = " and ".join(f"{value:,.0f}" for value in pair["measured_hours"])
        rows.append(
            f"| {' and '.join(pair['shapes'])} | {pair['target_nats']:.3f} | {hours} | {pair['measured_ratio']:.2f} "
            f"| {pair['predicted_tokens_ratio']:.2f} | {pair['predicted_ratio']:.2f} |"
        )
    rows += ["", "## Steps", "", "| shape | parameters | dies | measured | predicted | ratio |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for name, shape in sorted(facts["shapes"].items(), key=lambda item: item[1]["parameters"]):
        rows.append(
            f"| {name} | {format_count(shape['parameters'])} | {shape['num_devices']} | {shape['measured_s']:.2f} s "
            f"| {shape['predicted_s']:.2f} s | {shape['measured_s'] / shape['predicted_s']:.2f} |"
        )
    spread = [shape["measured_s"] / shape["predicted_s"] for shape in facts["shapes"].values()]
    rows += [
        "",
        f"Measured steps take {statistics.median(spread):.1f} times the predicted time in the median "
        f"({min(spread):.1f} to {max(spread):.1f}). A common factor cancels in a comparison of shapes; what "
        "remains is that the deep ones ran at a lower rate than a tuned stack would.",
        "",
    ]
    return "\n".join(rows)


def _order(pairs: list[dict[str, Any]], label: str) -> float:
    """Share of pairs whose ratio is on the right side of 1."""
    return statistics.fmean((pair[label] > 1.0) == (pair["measured_ratio"] > 1.0) for pair in pairs)


def _error(pairs: list[dict[str, Any]], label: str) -> float:
    """Median relative error of a ratio."""
    errors = (abs(np.log(pair[label] / pair["measured_ratio"])) for pair in pairs)
    return float(np.expm1(statistics.median(errors)))


if __name__ == "__main__":
    main()
