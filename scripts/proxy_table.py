"""The tables of docs/proxy-losses.md, from the losses in benchmarks. Not a script itself."""

from __future__ import annotations

import csv
import statistics
from math import log, sqrt
from pathlib import Path

from markdown_parts import markdown_table

FOLDER = Path(__file__).parent.parent / "benchmarks"
# What each model changes; the baseline of key-value heads is the one with 6 heads. A model may be of one size only.
_GROUPS = {
    "depth": ("layers-1", "layers-2", "base", "layers-6", "layers-9", "layers-16"),
    "head width": ("heads-12", "heads-6", "base", "heads-2", "heads-1"),
    "MLP over attention": ("attention-288", "attention-144", "base", "attention-48", "attention-24"),
    "MLP over width": ("narrow-mlp", "base", "wide-mlp"),
    "key-value heads": ("heads-6", "kv-3", "kv-2", "kv-1"),
}
_BASELINES = {"key-value heads": "heads-6"}


def proxy_table(losses_file: str, runs_file: str) -> str:
    """Losses of all models by what they change, with the noise between seeds.

    Args:
        losses_file: Exported losses, in benchmarks.
        runs_file: Runs that were planned, in benchmarks.
    """
    with (FOLDER / losses_file).open(encoding="utf-8", newline="") as file:
        losses = {row["run"]: row for row in csv.DictReader(file)}
    with (FOLDER / runs_file).open(encoding="utf-8", newline="") as file:
        planned = [row["name"] for row in csv.DictReader(file)]
    by_seed = {name: [float(loss) for loss in row["losses"].split()] for name, row in losses.items()}
    rows = []
    for group, names in _GROUPS.items():
        base = by_seed.get(_BASELINES.get(group, "base"), [])
        trained = [name for name in names if name in losses]
        for name in trained if len(trained) > 1 else []:  # a baseline alone compares nothing
            rows.append([group if name == trained[0] else "", *_cells(name, losses[name], by_seed[name], base)])
    headings = [
        "varied",
        "model",
        "h x L",
        "heads x width",
        "KV heads",
        "MLP",
        "loss by seed [nats/byte]",
        "difference",
    ]
    missing = {seed: [name for name in planned if len(by_seed.get(name, [])) <= seed] for seed in (0, 1)}
    lines = [markdown_table(headings, rows), "", _noise(by_seed)]
    for seed, untrained in missing.items():
        if untrained:
            listed = "all models" if untrained == planned else ", ".join(f"`{name}`" for name in untrained)
            lines.append(f"Seed {seed} is missing for {listed}.")
    return "\n".join(lines)


def _cells(name: str, row: dict[str, str], losses: list[float], base: list[float]) -> list[str]:
    """Shape, losses, and the mean difference from the baseline over the seeds that both have."""
    pairs = list(zip(losses, base, strict=False))
    difference = f"{statistics.mean(one - other for one, other in pairs):+.4f}" if pairs and losses != base else ""
    return [
        f"`{name}`",
        f"{row['hidden_size']} x {row['num_layers']}",
        f"{row['num_heads']} x {row['head_dim']}",
        row["num_kv_heads"],
        row["intermediate_size"],
        ", ".join(f"{loss:.4f}" for loss in losses),
        difference,
    ]


def _noise(by_seed: dict[str, list[float]]) -> str:
    """Noise between seeds, of a loss and of a difference at the same seed."""
    pairs = [(one, other) for one, other, *_ in (losses for losses in by_seed.values() if len(losses) > 1)]
    if len(pairs) < 2:
        return f"Seeds: {len(pairs)} models have two, too few to tell the noise."
    shifts = [one - other for one, other in pairs]
    single = sqrt(statistics.mean(shift**2 for shift in shifts) / 2.0)
    paired = statistics.stdev(shifts) / sqrt(2.0)
    return (
        f"Seeds: {len(pairs)} models have two. One loss has a standard deviation of {single:.4f} nats over seeds; "
        f"{paired:.4f} without the shift that a seed causes in all models, so a difference at one seed has "
        f"{paired * sqrt(2.0):.4f}. In bits per byte, divide by {log(2.0):.4f}."
    )
