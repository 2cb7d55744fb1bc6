"""Megatron-LM: command-line arguments of pretrain_gpt.py, one per line.

Source: megatron/training/arguments.py of NVIDIA/Megatron-LM, 2025 (core 0.14).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shapewright.app.formats.output_format import (
    OutputFormat,
    Untimed,
    check_embedding_width,
    check_pipeline_schedule,
    layout_error,
    model_error,
    num_replicas,
    vocab_padding,
    workload_error,
)
from shapewright.core.texts import with_fields
from shapewright.workload.recompute import CORE

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
_ACTIVATIONS: dict[tuple[str, bool], list[str]] = {
    # (activation, gated): flags. The fused bias-GELU kernel uses the tanh form, so all forms of GELU map to it.
    ("silu", True): ["--swiglu"],
    ("relu2", False): ["--squared-relu"],
    ("gelu", False): [],
    ("gelu_new", False): [],
    ("gelu_fast", False): [],
    ("gelu_tanh", False): [],
    ("gelu_pytorch_tanh", False): [],
}
_PRECISIONS = {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp32": list[str](), "fp8": ["--bf16", "--fp8-format hybrid"]}
_RUN = {
    "num_steps": "--train-iters",
    "warmup_steps": "--lr-warmup-iters",
    "learning_rate": "--lr",
    "final_learning_rate": "--min-lr",
    "weight_decay": "--weight-decay",
    "beta1": "--adam-beta1",
    "beta2": "--adam-beta2",
    "gradient_clip": "--clip-grad",
}
_RECOMPUTE = {
    "none": list[str](),
    "selective": ["--recompute-granularity selective"],
    "full": ["--recompute-granularity full"],
}


def write_arguments(
    config: TransformerConfig, workload: Workload | None, layout: ParallelLayout | None, untimed: Untimed
) -> str:
    """Write arguments for ``pretrain_gpt.py $(cat FILE)``."""
    lines = [*_model_settings(config), *_attention(config), *_mlp(config), *_head(config, layout)]
    names = {"norm_epsilon": "--norm-epsilon", **_RUN}
    names |= {"rotary_base": "--rotary-base"} if config.position_embedding == "rotary" else {}
    if "rope_scaling_factor" in untimed and config.position_embedding == "rotary":
        lines.append("--use-rope-scaling")
        names["rope_scaling_factor"] = "--rope-scaling-factor"
    values = {**untimed, "rotary_base": round(untimed.get("rotary_base", 0))}  # it takes an integer
    lines += [f"{flag} {values[name]:.10g}" for name, flag in names.items() if name in untimed]
    lines += ["--lr-decay-style cosine"] if "num_steps" in untimed else []
    lines += [] if layout is None else _layout_settings(config, layout)
    lines += [] if workload is None else _workload_settings(workload, layout)
    if workload is not None and workload.offload_optimizer:
        lines += _offload(layout)
    return "\n".join(lines) + "\n"


def _model_settings(config: TransformerConfig) -> Iterator[str]:
    check_embedding_width(FORM, config)
    yield f"--num-layers {config.num_layers}"
    yield f"--hidden-size {config.hidden_size}"
    yield f"--ffn-hidden-size {config.intermediate_size}"
    yield f"--num-attention-heads {config.num_heads}"
    yield f"--max-position-embeddings {config.max_position_embeddings}"
    if config.norm == "layernorm" and not config.norm_bias:
        raise model_error(FORM.name, "a LayerNorm without bias", "its LayerNorm has a bias")
    if config.norm == "rmsnorm" and config.norm_bias:
        raise model_error(FORM.name, "an RMSNorm with bias", "its RMSNorm has no bias")
    yield f"--normalization {'RMSNorm' if config.norm == 'rmsnorm' else 'LayerNorm'}"
    if config.position_embedding not in _POSITIONS:
        raise model_error(
            FORM.name,
            f"position_embedding={config.position_embedding!r}",
            f"supported are {', '.join(sorted(_POSITIONS))}",
        )
    yield f"--position-embedding-type {_POSITIONS[config.position_embedding]}"
    if config.rotary_layers:
        without = [int(not config.is_rotary_layer(index)) for index in range(config.num_layers)]
        yield f"--no-rope-freq {_list_argument(without)}"
    yield f"--hidden-dropout {config.hidden_dropout}"
    yield f"--attention-dropout {config.attention_dropout}"


def _attention(config: TransformerConfig) -> Iterator[str]:
    if config.is_mla:
        yield "--multi-latent-attention"
        if config.q_lora_rank:
            yield f"--q-lora-rank {config.q_lora_rank}"
        yield f"--kv-lora-rank {config.kv_lora_rank}"
        yield f"--qk-head-dim {config.head_dim - config.qk_rope_head_dim}"
        yield f"--qk-pos-emb-head-dim {config.qk_rope_head_dim}"
        yield f"--v-head-dim {config.v_head_dim}"
        yield "--qk-layernorm"  # norm of the compressed queries and keys, always present in MLA
    else:
        if config.v_head_dim != config.head_dim:
            raise model_error(
                FORM.name,
                f"v_head_dim={config.v_head_dim}",
                with_fields("{v_head_dim} must equal {head_dim} without MLA"),
            )
        yield f"--kv-channels {config.head_dim}"
        if config.num_kv_heads != config.num_heads:
            yield "--group-query-attention"
            yield f"--num-query-groups {config.num_kv_heads}"
    if config.qk_norm != "none":
        if config.qk_norm_bias != (config.norm == "layernorm"):
            raise model_error(
                FORM.name,
                f"qk_norm_bias={config.qk_norm_bias}",
                "norms of queries and keys have the type of the layer norms",
            )
        yield "--qk-layernorm"
    if config.attention_sinks:
        yield "--softmax-type learnable"
    yield from _windows(config)
    biases = (config.qkv_bias, config.attention_out_bias, config.mlp_bias)
    flags = {
        (True, True, True): list[str](),
        (False, False, False): ["--disable-bias-linear"],
        (True, False, False): ["--disable-bias-linear", "--add-qkv-bias"],
    }
    if biases not in flags:
        raise model_error(
            FORM.name,
            "qkv_bias={}, attention_out_bias={}, mlp_bias={}".format(*biases),
            with_fields("supported are all three, none, or {qkv_bias} only"),
        )
    yield from flags[biases]


def _windows(config: TransformerConfig) -> Iterator[str]:
    sizes = {window for window in config.attention_windows if window}
    if not sizes:
        return
    if len(sizes) > 1:
        raise model_error(
            FORM.name, f"windows of {' and '.join(map(str, sorted(sizes)))}", "one window size is supported"
        )
    # Positions to the left of the query; our window size includes the query itself.
    yield f"--window-size {sizes.pop() - 1},0"
    flags = [int(config.window_of_layer(index) > 0) for index in range(config.num_layers)]
    if not all(flags):
        yield f"--window-attn-skip-freq {_list_argument(flags)}"


def _mlp(config: TransformerConfig) -> Iterator[str]:
    key = (config.activation, config.gated_mlp)
    if key not in _ACTIVATIONS:
        gate = "with" if config.gated_mlp else "without"
        raise model_error(
            FORM.name,
            f"activation={config.activation!r} {gate} a gate",
            "supported are SwiGLU with a gate, GELU and relu2 without",
        )
    yield from _ACTIVATIONS[key]
    if not config.is_moe:
        return
    yield f"--num-experts {config.num_experts}"
    yield f"--moe-router-topk {config.num_experts_per_token}"
    yield f"--moe-ffn-hidden-size {config.moe_intermediate_size}"
    yield "--moe-grouped-gemm"
    if config.shared_expert_intermediate_size:
        yield f"--moe-shared-expert-intermediate-size {config.shared_expert_intermediate_size}"
        if config.shared_expert_gate:
            yield "--moe-shared-expert-gate"
    flags = [int(config.is_moe_layer(index)) for index in range(config.num_layers)]
    if not all(flags):
        yield f"--moe-layer-freq {_list_argument(flags)}"


def _head(config: TransformerConfig, layout: ParallelLayout | None) -> Iterator[str]:
    shards = layout.tensor_parallel if layout else 1
    yield f"--vocab-size {config.vocab_size}"
    yield f"--make-vocab-size-divisible-by {vocab_padding(FORM, config, shards)}"
    if not config.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"


def _layout_settings(config: TransformerConfig, layout: ParallelLayout) -> Iterator[str]:
    check_pipeline_schedule(FORM, layout)
    yield f"--tensor-model-parallel-size {layout.tensor_parallel}"
    yield f"--pipeline-model-parallel-size {layout.pipeline_parallel}"
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    yield from ("--" + name.replace("_", "-") for name in names if getattr(layout, name))
    if config.num_layers % (layout.pipeline_parallel * layout.virtual_pipeline) and not any(layout.ends_as_layers):
        # Uneven splits need an explicit layout; Megatron-LM derives the chunks per stage from it.
        yield f"--pipeline-model-parallel-layout {_pipeline_layout(config.num_layers, layout)}"
    elif layout.virtual_pipeline > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {layout.virtual_pipeline}"
    yield f"--context-parallel-size {layout.context_parallel}"
    if layout.expert_parallel > 1:
        yield f"--expert-model-parallel-size {layout.expert_parallel}"
    if layout.has_own_expert_degree:
        yield f"--expert-tensor-parallel-size {layout.expert_tensor_degree}"
    if layout.splits_sequence_over_tensor:
        yield "--sequence-parallel"
    # Predictions assume that gradient reduction and weight gathering overlap with computation.
    replicas = layout.data_parallel * layout.context_parallel
    if replicas > 1:
        yield "--overlap-grad-reduce"
    if layout.zero_stage == 1:
        yield "--use-distributed-optimizer"
        if replicas > 1:
            yield "--overlap-param-gather"
    elif layout.zero_stage > 1:
        raise layout_error(FORM.name, f"zero_stage={layout.zero_stage}", "the distributed optimizer is ZeRO stage 1")


def _workload_settings(workload: Workload, layout: ParallelLayout | None) -> Iterator[str]:
    if not workload.is_training:
        raise workload_error(FORM.name, f"phase={workload.phase!r}", "the format is for training runs")
    yield f"--seq-length {workload.seq_len}"
    yield f"--micro-batch-size {workload.micro_batch_size}"
    stages = layout.pipeline_parallel if layout else 1
    default = workload.global_batch_size or workload.micro_batch_size * num_replicas(layout) * stages
    yield f"--global-batch-size {default}"
    if workload.dtype not in _PRECISIONS:
        raise workload_error(FORM.name, f"dtype={workload.dtype!r}", f"supported are {', '.join(_PRECISIONS)}")
    yield from _PRECISIONS[workload.dtype]
    yield f"--attention-backend {'flash' if workload.attention == 'flash' else 'unfused'}"
    yield from _RECOMPUTE[workload.recompute]
    if workload.recompute == "full":
        yield from _recomputed_layers(workload, layout)
    if workload.recompute == "selective" and workload.recompute_modules != CORE:
        yield f"--recompute-modules {workload.recompute_modules.replace(',', ' ')}"
    if not workload.fused_activation:
        yield "--no-bias-swiglu-fusion"


def _recomputed_layers(workload: Workload, layout: ParallelLayout | None) -> Iterator[str]:
    """Layers that full recomputation repeats: all one by one, or the first of each chunk of a stage."""
    chunks = layout.virtual_pipeline if layout else 1
    layers = workload.recompute_layers
    if layers is not None and layers % chunks:
        raise workload_error(
            FORM.name, f"recompute_layers={layers} in {chunks} chunks of a stage", "each chunk has the same number"
        )
    yield f"--recompute-method {'uniform' if layers is None else 'block'}"
    yield f"--recompute-num-layers {1 if layers is None else layers // chunks}"


def _offload(layout: ParallelLayout | None) -> list[str]:
    """Arguments that keep optimizer states in host memory, with the precision-aware distributed optimizer."""
    if layout is None or layout.zero_stage != 1:
        raise workload_error(
            FORM.name,
            with_fields("{offload_optimizer} without ZeRO stage 1"),
            "only the distributed optimizer can be offloaded",
        )
    return ["--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0", "--use-precision-aware-optimizer"]


def _pipeline_layout(num_layers: int, layout: ParallelLayout) -> str:
    """Pipeline layout string: E embedding, t layer, L loss; the first and last chunks have fewer layers.

    >>> from shapewright.workload.layout import ParallelLayout
    >>> _pipeline_layout(7, ParallelLayout(pipeline_parallel=4))
    'Ett|tt|tt|tL'
    >>> _pipeline_layout(6, ParallelLayout(pipeline_parallel=4))
    'Et|tt|tt|tL'
    """
    chunks = layout.pipeline_parallel * layout.virtual_pipeline
    per_stage = -(-num_layers // layout.pipeline_parallel)
    per_chunk = -(-per_stage // layout.virtual_pipeline)
    counts = [per_chunk] * chunks
    # Remove layers alternately from the last and the first chunk, then from the next inner ones.
    ends = [index for pair in zip(range(chunks - 1, -1, -1), range(chunks), strict=True) for index in pair]
    for spare in range(chunks * per_chunk - num_layers):
        pair = spare // (2 * per_chunk)
        counts[ends[2 * pair + spare % 2]] -= 1
    return "E" + "|".join("t" * count for count in counts) + "L"


def _list_argument(flags: Sequence[int]) -> str:
    """Format a list argument, without spaces.

    >>> _list_argument([0, 1, 1])
    '[0,1,1]'
    """
    return "[" + ",".join(map(str, flags)) + "]"


FORM = OutputFormat(
    name="megatron-args",
    project="Megatron-LM",
    written_fields=frozenset(
        (
            *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "intermediate_size"),
            *("vocab_size", "max_position_embeddings", "norm", "norm_bias", "hidden_dropout", "attention_dropout"),
            *("attention_windows", "qkv_bias", "attention_out_bias", "mlp_bias", "qk_norm_bias", "attention_sinks"),
            *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "activation", "gated_mlp", "num_experts"),
            *("num_experts_per_token", "moe_intermediate_size", "shared_expert_intermediate_size"),
            *("shared_expert_gate", "moe_layers", "tied_embeddings", "embedding_size", "position_embedding"),
            "rotary_layers",
        )
    ),
    fixed_values={
        "qk_norm": ("none", "per-head"),
    },
    write=write_arguments,
    suffix=".args",
    fused={"fused_qkv": True, "fused_gate_up": True},
    run_values={"zero_stage": (0, 1), "pipeline_schedule": ("1f1b",)},
    offloads=frozenset(("offload_optimizer",)),
    supports_end_layers=True,
    unwritten=("optimizer", "loss_chunks", "packed", "kernels"),
)
