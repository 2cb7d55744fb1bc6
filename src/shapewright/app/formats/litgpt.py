"""litgpt: config of ``litgpt pretrain --config FILE``, with the model under ``model_config``.

Source: litgpt/config.py, litgpt/args.py and litgpt/pretrain.py of Lightning-AI/litgpt, 2025.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shapewright.app.formats.output_format import (
    DATA_PARALLEL_ONLY,
    OutputFormat,
    Untimed,
    check_embedding_width,
    check_training_workload,
    layout_error,
    model_error,
    num_replicas,
    unwritten_scaling,
    workload_error,
)

if TYPE_CHECKING:
    from shapewright.models import TransformerConfig
    from shapewright.workload import ParallelLayout, Workload

_MLPS = {
    ("gelu", False): ("GptNeoxMLP", "none"),
    ("gelu_new", False): ("GptNeoxMLP", "tanh"),
    ("gelu_pytorch_tanh", False): ("GptNeoxMLP", "tanh"),
    ("gelu", True): ("GemmaMLP", "none"),
    ("gelu_pytorch_tanh", True): ("GemmaMLP", "tanh"),
    ("silu", True): ("LLaMAMLP", "none"),
}
_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}


def write_yaml(
    config: TransformerConfig, workload: Workload | None, layout: ParallelLayout | None, untimed: Untimed
) -> str:
    """Write a config, without data, and without optimizer and schedule where the length of the run is not known."""
    check_embedding_width(FORM, config)
    lines = [
        *unwritten_scaling(untimed),
        "model_config:",
        *(f"  {key}: {json.dumps(value)}" for key, value in _model(config, untimed).items()),
    ]
    if workload is not None:
        check_training_workload(FORM.name, workload, _PRECISIONS)
        if workload.recompute != "none":
            raise workload_error(FORM.name, f"recompute={workload.recompute!r}", "pretraining saves all activations")
        batch = workload.global_batch_size or workload.micro_batch_size * num_replicas(layout)
        lines += [
            f"precision: {_PRECISIONS[workload.dtype]}",
            "train:",
            f"  global_batch_size: {batch}",
            f"  micro_batch_size: {workload.micro_batch_size}",
            f"  max_seq_length: {workload.seq_len}",
        ]
        if "num_steps" in untimed:
            lines += [
                f"  max_tokens: {int(untimed['num_steps']) * batch * workload.seq_len}",
                f"  lr_warmup_steps: {untimed['warmup_steps']}",
                f"  min_lr: {untimed['final_learning_rate']}",
                f"  max_norm: {untimed['gradient_clip']}",
                "optimizer:",
                "  class_path: torch.optim.AdamW",
                "  init_args:",
                f"    lr: {untimed['learning_rate']}",
                f"    weight_decay: {untimed['weight_decay']}",
                f"    betas: [{untimed['beta1']}, {untimed['beta2']}]",
            ]
    if layout is not None:
        if layout.num_devices != layout.data_parallel:
            raise layout_error(FORM.name, "model parallelism", "it has data parallelism and FSDP")
        lines.append(f"devices: {layout.data_parallel}")
    return "\n".join(lines) + "\n"


def _model(config: TransformerConfig, untimed: Untimed) -> dict[str, Any]:
    mlp = _MLPS.get((config.activation, config.gated_mlp))
    biases = (config.qkv_bias, config.attention_out_bias, config.mlp_bias)
    if mlp is None or (config.is_moe and (config.activation, config.gated_mlp) != ("silu", True)):
        raise model_error(FORM.name, f"activation={config.activation!r}", "supported are GELU and SwiGLU")
    if biases[1:] not in ((True, True), (False, False)) or (biases[1] and not biases[0]):
        raise model_error(FORM.name, "biases in some layers only", "supported are all, none, or qkv_bias only")
    if config.norm_bias != (config.norm == "layernorm"):
        raise model_error(FORM.name, f"norm_bias={config.norm_bias}", "LayerNorm has a bias and RMSNorm has none")
    if config.num_norms_per_layer not in (2, 4) and not (
        config.num_norms_per_layer == 1 and config.parallel_attention_mlp
    ):
        raise model_error(
            FORM.name,
            f"num_norms_per_layer={config.num_norms_per_layer}",
            "it has 2, 4, or 1 in parallel blocks",
        )
    windows = {window for window in config.attention_windows if window}
    if len(windows) > 1:
        raise model_error(FORM.name, "windows of several sizes", "one window size is supported")
    values: dict[str, Any] = {
        "name": config.name or "shapewright",
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_heads,
        "n_query_groups": config.num_kv_heads,
        "head_size": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "norm_class_name": "RMSNorm" if config.norm == "rmsnorm" else "LayerNorm",
        "norm_qk": config.qk_norm != "none",
        "parallel_residual": config.parallel_attention_mlp,
        "shared_attention_norm": config.num_norms_per_layer == 1,
        "post_attention_norm": config.num_norms_per_layer == 4,
        "post_mlp_norm": config.num_norms_per_layer == 4,
        "bias": config.mlp_bias,
        "attn_bias": config.qkv_bias,
        "lm_head_bias": config.lm_head_bias,
        "mlp_class_name": "LLaMAMoE" if config.is_moe else mlp[0],
        "gelu_approximate": mlp[1],
        "rotary_percentage": 1.0,
    }
    if config.is_moe:
        values |= {
            "n_expert": config.num_experts,
            "n_expert_per_token": config.num_experts_per_token,
            "moe_intermediate_size": config.moe_intermediate_size,
        }
    if windows:
        values["sliding_window_size"] = windows.pop()
        flags = [int(config.window_of_layer(index) > 0) for index in range(config.num_layers)]
        values["sliding_window_indices"] = flags
    names = {"rotary_base": "rope_base", "norm_epsilon": "norm_eps"}
    return values | {key: untimed[name] for name, key in names.items() if name in untimed}


FORM = OutputFormat(
    name="litgpt-yaml",
    project="litgpt",
    written_fields=frozenset(
        (
            *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"),
            *("max_position_embeddings", "parallel_attention_mlp", "norm", "norm_bias", "num_norms_per_layer"),
            *("qkv_bias", "attention_out_bias", "mlp_bias", "lm_head_bias", "activation", "gated_mlp", "num_experts"),
            *("num_experts_per_token", "moe_intermediate_size", "attention_windows", "embedding_size", "v_head_dim"),
        )
    ),
    fixed_values={
        "hidden_dropout": (0.0,),
        "attention_dropout": (0.0,),
        "qk_norm": ("none", "per-head"),
        "tied_embeddings": (False,),
        "position_embedding": ("rotary",),
    },
    write=write_yaml,
    suffix=".yaml",
    run_values={**DATA_PARALLEL_ONLY, "zero_stage": (0, 3), "recompute": ("none",)},
)
