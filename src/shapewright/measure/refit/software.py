"""Fit the overhead of generations of training software from published training throughput.

The data folder holds published_training_throughput.csv; loss_by_shape.csv adds the steps of the Gemstones models. At
most one parameter is fitted per generation: a factor on all times, or a host cost per operation. Older kernels of fused
attention have a factor of their own per architecture. Errors and intervals are those of held-out rows: every group (a
model size, or a source) is left out in turn. About a minute on one core.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.published_rows import FORMAT
from shapewright.measure.accuracy.tables.training import PublishedRun, read_runs
from shapewright.measure.fit.shared import Array, error_summary, fit_log_times, predict_in_turn
from shapewright.measure.refit.record_files import command, write_record
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.predict import Prediction, borrowed_fraction, predict
from shapewright.pricing.software import (
    EXCHANGE_HIDDEN_FRACTION,
    OVERLAP_SHARE,
    TUNED,
    UNNAMED,
    Software,
    load_software,
)
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

# Most rows per fit; steps of similar rows have similar errors.
MOST_ROWS = 60
# Quantiles of the interval.
QUANTILES = (0.05, 0.95)
# Fields of Software that a record holds.
PARAMETERS = (
    "overlap_share", "tensor_hidden_fraction", "time_factor", "host_s", "host_scope", "expert_hidden_fraction",
    "workload", "attention_factor", "unaligned_heads_fraction",
)  # fmt: skip
TABLE = "published_training_throughput.csv"
SOURCE = "published training throughput, named per row"
# FlashAttention-3 is 1.5 to 2 times as fast as 2 on H100, whose record holds 3. Source: arXiv 2407.08608, abstract.
FLASH_2_ON_HOPPER = 1.75
# Heads of 108 elements ran 27 % slower in BLOOM's experiments than heads of 144 and 216: as if their batched GEMMs used
# no tensor cores. The share of the fp32 rate comes from other rows, whose heads the table lacks and the source states
# (chronicles-prequel.md, 20 February 2022, 80 layers, t=8, p=10): h=14400 with 96 heads of 150 elements against h=13824
# with 64 heads of 216, seconds of a step at b=1, 2, 4, 8: 221.21/160.29, 207.92/151.07, 208.18/147.43, 229.69/152.51.
# Measured over predicted ratio of each pair at a share of 0.5: 1.07, 1.00, 0.97, 1.01.
UNALIGNED_HEADS_FRACTION = 0.5
# Rows are exchanged in 16 bits whatever the format of the GEMMs (megatron/core/transformer/moe/fused_a2a.py), and
# biases and clamps of experts are separate kernels (experts.py, ``_apply_bias``; fusions/fused_bias_geglu.py) until
# Transformer Engine's fused grouped MLP includes them, which recipes enable in 2026 (``cutedsl_fused_grouped_mlp``).
MEGATRON_EXPERTS = {"fused_experts": False, "narrow_dispatch": False}
# The Gemstones models, trained on MI250X: a source of the table of losses, the name of its software, and its batches.
GEMSTONES, GEMSTONES_TABLE, GEMSTONES_SOFTWARE = "gemstones", "loss_by_shape.csv", "fsdp-rocm-2024"
BATCH_TOKENS, SEQ_LEN = 4_194_304, 2048
# The table names one long run per shape; its other runs continue it with the same step time.
_RUN = "hot_100b+"
# Not published; errors of left-out widths are within 0.005 of each other for 4 and 8 and for ZeRO 0 and 3.
_MICRO_BATCH_SIZE, _ZERO_STAGE = 4, 3
_FIELDS = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")


# Factors that a fit starts from. From above alone some stop where a factor of 1 is a kink of the cost.
_START_FACTORS = (1.2, 0.8)
# A field of Software, or an architecture's entry of such a field.
Parameter = str | tuple[str, str]


@dataclass(frozen=True)
class Generation:
    """One generation of software and its free parameters.

    Attributes:
        software: Its name and title, and the parameters known without a fit.
        free: Free parameters and their ranges.
        group_of: Returns the group that a run is left out with.
        why: Reason for these parameters, and rejected alternatives.
        source: Where the rows are from.
        table: File of the rows.
    """

    software: Software
    free: dict[Parameter, tuple[float, float]]
    group_of: Callable[[PublishedRun], str]
    why: str
    source: str = SOURCE
    table: str = TABLE


def model_family(run: PublishedRun) -> str:
    """Return model and size in one spelling."""
    return str(run.config.name).lower().replace("llama3.1", "llama3").replace("_", "-").replace("llama-", "llama")


def source_or_width(run: PublishedRun) -> str:
    """Group key of a published run: the hidden size for BLOOM's experiments, otherwise the source."""
    return str(run.config.hidden_size) if run.source.startswith("BLOOM") else run.source.split(" ")[0]


GENERATIONS = (
    Generation(
        Software(name="nemo-2024", title="NVIDIA NeMo and Megatron-Bridge, 24.07 to 26.06"),
        {},
        model_family,
        "no factor: overlaps as in a tuned stack, including tensor-parallel communication with gradient GEMMs",
    ),
    Generation(
        Software(
            name="nemo-moe-2025",
            title="NVIDIA NeMo and Megatron-Bridge of 2025 with experts, launched one by one",
            workload=MEGATRON_EXPERTS,
        ),
        {"host_s": (1e-6, 2e-3)},
        model_family,
        "each operation costs the host a fixed time: in each layer it waits for how many rows each expert gets, and "
        "cannot run ahead. Recipes without CUDA graphs",
    ),
    Generation(
        Software(
            name="nemo-moe-2025-graphs",
            title="NVIDIA NeMo and Megatron-Bridge of 2025 with experts, attention and router in CUDA graphs",
            host_scope="experts",
            workload=MEGATRON_EXPERTS,
        ),
        {"host_s": (1e-6, 2e-3)},
        model_family,
        "each operation of experts costs the host a fixed time: recipes with cuda_graph_scope attn, moe_router, "
        "moe_preprocess",
    ),
    Generation(
        Software(
            name="nemo-moe-2026",
            title="NVIDIA Megatron-Bridge since 26.06 with experts, the iteration in one CUDA graph",
            expert_hidden_fraction=EXCHANGE_HIDDEN_FRACTION,
            workload={"narrow_dispatch": False},
        ),
        {},
        model_family,
        "no factor: expert exchanges overlap with another micro-batch (moe_a2a_overlap), which hides the "
        "same share as a GEMM hides of concurrent communication; no launches are left (cuda_graph_impl full_iteration)",
    ),
    Generation(
        Software(name="megatron-2020", title="Megatron-LM of 2020 and 2021", tensor_hidden_fraction=0.0),
        {},
        model_family,
        "no factor: A100 and V100 err in opposite directions. Overlap of all-reduces with weight gradients came in "
        "2022",
    ),
    Generation(
        Software(
            name="megatron-deepspeed-2021",
            title="Megatron-DeepSpeed of 2021 and 2022 (BLOOM, MT-NLG)",
            overlap_share=0.0,
            tensor_hidden_fraction=0.0,
            unaligned_heads_fraction=UNALIGNED_HEADS_FRACTION,
        ),
        {"host_s": (1e-6, 2e-3)},
        source_or_width,
        "each operation costs the host a fixed time, so that small micro-batches and tensor slices lose most; BLOOM "
        "ran with CUDA_LAUNCH_BLOCKING=1 (run script tr11-176B-ml.slurm), which alone cost 0 to 7 % by its own log; a "
        "factor instead leaves layouts in the wrong order. "
        "Gradients are reduced after the last micro-batch. Batched GEMMs of head dimensions not aligned to 16 "
        "bytes (108 and 150 elements) run at half the fp32 rate, taken from rows that are not among these",
    ),
    Generation(
        Software(
            name="fsdp-2023",
            title="PyTorch FSDP of 2023 with FlashAttention 1 (MosaicML llm-foundry)",
            overlap_share=0.0,
            tensor_hidden_fraction=0.0,
        ),
        {
            "time_factor": (0.5, 2.0),
            ("attention_factor", "ampere"): (0.8, 5.0),
            ("attention_factor", "hopper"): (0.8, 8.0),
        },
        model_family,
        "steps grow by the whole communication of shards; attention of long sequences runs at the rate of the "
        "FlashAttention 1 kernel on A100, and far below FlashAttention 3, which the Hopper record holds",
    ),
    Generation(
        Software(
            name="fsdp-2024",
            title="PyTorch FSDP2 of 2024 (torchtitan)",
            overlap_share=0.0,
            tensor_hidden_fraction=0.0,
            attention_factor={"hopper": FLASH_2_ON_HOPPER},
        ),
        {"time_factor": (0.5, 2.0)},
        model_family,
        "steps grow by the whole communication of shards; Hopper's attention factor is not fitted (arXiv 2407.08608: "
        "FlashAttention 3 is 1.5 to 2 times as fast as 2)",
    ),
    Generation(
        Software(
            name=GEMSTONES_SOFTWARE,
            title="PyTorch on ROCm of 2024, sharded over MI250X dies (Gemstones)",
            overlap_share=0.0,
            tensor_hidden_fraction=0.0,
            workload={"attention": "unfused"},
        ),
        {"time_factor": (0.5, 2.0)},
        lambda run: f"width {run.config.hidden_size}",
        "attention took as long as unfused attention does; a factor on fused attention instead is 5 to 10, depends on "
        "the widths that it is fitted to, and leaves 12 to 14 % on the others; a host cost fits to zero",
        source="seconds per step of Gemstones (arXiv 2502.06857), mcleish7/gemstone-scaling-laws @5f42047, MIT",
        table=GEMSTONES_TABLE,
    ),
)


def read_measured_steps(data: Path) -> dict[str, PublishedRun]:
    """Return the Gemstones runs that have a step time, by width and depth in words."""
    found = {}
    with (data / GEMSTONES_TABLE).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["source"] != GEMSTONES or not row["run"].startswith(_RUN):
                continue
            num_devices = int(row["num_devices"])
            sizes: dict[str, Any] = {name: int(row[name]) for name in _FIELDS}
            found[f"{row['hidden_size']}x{row['num_layers']}"] = PublishedRun(
                source=GEMSTONES,
                software=GEMSTONES_SOFTWARE,
                device=load_device("mi250x-gcd"),
                config=TransformerConfig(
                    **sizes, v_head_dim=sizes["head_dim"], gated_mlp=True, norm="rmsnorm", position_embedding="rotary",
                    tied_embeddings=False, max_position_embeddings=SEQ_LEN,
                ),
                workload=Workload(
                    micro_batch_size=_MICRO_BATCH_SIZE, global_batch_size=BATCH_TOKENS // SEQ_LEN, seq_len=SEQ_LEN,
                    dtype="bf16",
                ),
                layout=ParallelLayout(data_parallel=num_devices, zero_stage=_ZERO_STAGE),
                tokens_per_s_per_device=BATCH_TOKENS / (float(row["seconds_per_step"]) * num_devices),
            )  # fmt: skip
    return found


def apply(software: Software, values: dict[Parameter, float]) -> Software:
    """Return the software with fitted parameters."""
    plain: dict[str, Any] = {name: value for name, value in values.items() if isinstance(name, str)}
    attention = {name[1]: value for name, value in values.items() if not isinstance(name, str)}
    return replace(software, **plain, attention_factor={**software.attention_factor, **attention})


def predict_step(software: Software, run: PublishedRun) -> Prediction:
    """Predict a step of a run with some software."""
    return predict(run.config, device=run.device, workload=run.workload, layout=run.layout, software=software)


def predict_steps(software: Software, runs: Sequence[PublishedRun]) -> Array:
    """Predict the time of each step. [s]"""
    return np.array([predict_step(software, run).step_time_s for run in runs])


def select_evenly(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Return all runs, or MOST_ROWS of them, evenly selected."""
    return [runs[index] for index in np.unique(np.linspace(0, len(runs) - 1, MOST_ROWS).astype(int))]


def fit(generation: Generation, runs: Sequence[PublishedRun]) -> dict[Parameter, float]:
    """Fit the free parameters to some rows, evenly selected if there are many."""
    if not generation.free:
        return {}
    chosen = select_evenly(runs)
    measured = np.array([run.step_s for run in chosen])
    fits = [
        fit_log_times(
            lambda values: predict_steps(apply(generation.software, values), chosen),
            measured,
            {name: 1e-4 if name == "host_s" else factor for name in generation.free},
            generation.free,
            most_evaluations=12,
        )
        for factor in _START_FACTORS
    ]
    return min(fits, key=lambda each: each[1])[0]


def predict_left_out(generation: Generation, runs: Sequence[PublishedRun]) -> Array:
    """Predict the step of each run by a fit to the runs of other groups. [s]"""
    groups = np.array([generation.group_of(run) for run in runs])

    def predict_group(seen: Any, left_out: Any) -> Array:
        fitted, judged = (list(compress(runs, mask)) for mask in (seen, left_out))
        return predict_steps(apply(generation.software, fit(generation, fitted)), judged)

    return predict_in_turn(groups, predict_group)


def calibrate(generation: Generation, runs: list[PublishedRun]) -> dict[str, Any]:
    """Fit one generation and return its record, with errors on left-out groups."""
    measured = np.array([run.step_s for run in runs])
    groups = np.array([generation.group_of(run) for run in runs])
    held_out = predict_left_out(generation, runs)
    reports: dict[str, Any] = {
        f"held out {group}": error_summary(held_out[groups == group], measured[groups == group])
        for group in sorted(set(groups))
    }
    values = fit(generation, runs)
    final = apply(generation.software, values)
    reports["held out"] = error_summary(held_out, measured)
    reports["fit"] = error_summary(predict_steps(final, runs), measured)
    reports["as a tuned stack"] = error_summary(predict_steps(load_software(TUNED), runs), measured)
    ratio = measured / held_out
    share = min(1.0, QUANTILES[1] * (len(ratio) + 1) / len(ratio))
    return make_record(
        final,
        runs,
        [float(np.quantile(ratio, end)) for end in (1.0 - share, share)],
        reports,
        rows_of=(generation.source, generation.table),
        fitted=sorted(name if isinstance(name, str) else f"attention:{name[1]}" for name in values),
        why=generation.why,
        rows_fitted=len(select_evenly(runs)) if values else 0,
        split="every group held out in turn; the numbers themselves are fitted on rows_fitted of all, evenly selected",
    )


def average_generation(runs: list[PublishedRun]) -> dict[str, Any]:
    """Return the record of unnamed software: the average of all generations, each held out from the average in turn.

    A generation counts once, however many rows it has: in the factor, the mean of the medians of ln(measured / tuned),
    and in the interval, where its rows share its weight.
    """
    measured, tuned = np.array([run.step_s for run in runs]), predict_steps(load_software(TUNED), runs)
    logs, names = np.log(measured / tuned), np.array([run.software for run in runs])
    medians = {str(name): float(np.median(logs[names == name])) for name in sorted(set(names))}
    held_out, reports = np.empty(len(runs)), {}
    for name in medians:
        own = names == name
        held_out[own] = np.exp(np.mean([middle for other, middle in medians.items() if other != name])) * tuned[own]
        reports[f"held out {name}"] = error_summary(held_out[own], measured[own])
    reports["held out"] = error_summary(held_out, measured)
    reports["as a tuned stack"] = error_summary(tuned, measured)
    ratio = measured / held_out
    order = np.argsort(ratio)
    weights = np.cumsum([1.0 / (names == names[row]).sum() / len(medians) for row in order])
    middle = Software(
        name=UNNAMED,
        title="unspecified software: geometric mean of all generations",
        time_factor=float(np.exp(np.mean(list(medians.values())))),
    )
    return make_record(
        middle,
        runs,
        [float(ratio[order[min(int(np.searchsorted(weights, share)), len(order) - 1)]]) for share in QUANTILES],
        reports,
        rows_of=(SOURCE, TABLE),
        fitted=["time_factor"],
        rows_fitted=len(runs),
        why="one factor, the geometric mean of the generations above",
        split="every generation held out in turn",
    )


def make_record(
    final: Software,
    runs: Sequence[PublishedRun],
    ends: Sequence[float],
    reports: dict[str, Any],
    *,
    rows_of: tuple[str, str],
    **how: Any,
) -> dict[str, Any]:
    """Return the record of a generation.

    Args:
        ends: Ends of its interval, measured over predicted.
        rows_of: Source and file of the rows.
        **how: Further provenance: what is fitted, why, and how rows were held out.
    """
    borrowed = [borrowed_fraction(predict_step(final, run).operations) for run in runs]
    return {
        "name": final.name,
        "title": final.title,
        "parameters": {name: getattr(final, name) for name in PARAMETERS},
        "interval": {
            "low": min(ends[0], 1.0),
            "high": max(ends[1], 1.0),
            # Share of step time that borrowed records price, which is part of the residuals.
            "borrowed_fraction": float(np.mean(borrowed)),
        },
        "provenance": {
            "source": rows_of[0],
            "files": [rows_of[1]],
            "rows": len(runs),
            "sources": sorted({run.source for run in runs}),
            **how,
            "command": command("software"),
            "reports": reports,
        },
    }


def refit(data: Path) -> None:
    """Fit and write the records of software generations."""
    neutral = Software(overlap_share=OVERLAP_SHARE)
    runs = []
    for run in read_runs(read_columns(data / TABLE, FORMAT, Counter()), Context(), has_experts=None):
        with suppress(ShapewrightError):  # a row that cannot be predicted
            predict_steps(neutral, [run])
            runs.append(run)
    rows_of = {
        generation.software.name: [run for run in runs if run.software == generation.software.name]
        for generation in GENERATIONS
        if generation.table == TABLE
    }
    rows_of[GEMSTONES_SOFTWARE] = list(read_measured_steps(data).values())
    records = {
        generation.software.name: calibrate(generation, rows_of[generation.software.name]) for generation in GENERATIONS
    }
    records[UNNAMED] = average_generation([run for run in runs if run.software in records])
    for name, record in records.items():
        print(name, record["parameters"], record["interval"], record["provenance"]["reports"]["held out"], flush=True)
        print("  ", {key: report["mean_absolute_error"] for key, report in record["provenance"]["reports"].items()})
        print(write_record("software", name, record))
