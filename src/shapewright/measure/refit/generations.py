"""Generations of training software whose overhead is fitted, and their free parameters."""

from __future__ import annotations

from collections.abc import Callable

from shapewright.core.records import dataclass
from shapewright.measure.accuracy.tables.training import PublishedRun
from shapewright.measure.refit import loss_steps
from shapewright.pricing.software import EXCHANGE_HIDDEN_FRACTION, Software

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
            name=loss_steps.SOFTWARE,
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
        table=loss_steps.TABLE,
    ),
)
