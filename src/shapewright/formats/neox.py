"""GPT-NeoX: a YAML config in the quoted form of its own examples.

Source: megatron/neox_arguments/neox_args.py and megatron/model/transformer.py of EleutherAI/gpt-neox, 2025 (the MLP
since ``mlp_type`` went away: a gated one is ``intermediate_size / 3`` wide, rounded up to ``mlp_multiple_of``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shapewright.formats.form import (
    Form,
    cannot,
    cannot_spread,
    refuse_other_embedding_width,
    refuse_other_head_dims,
    refuse_other_runs,
    refuse_other_schedules,
    replicas_of,
    vocab_padding,
)

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload

_POSITIONS = {"learned": "learned", "rotary": "rotary", "alibi": "alibi", "none": "none"}
_PRECISIONS = {"bf16": "bfloat16", "fp16": "fp16", "fp32": "fp32"}
_ACTIVATIONS = {
    ("silu", True): "swiglu",
    ("gelu", True): "geglu",
    ("gelu_new", True): "geglu",
    ("gelu_pytorch_tanh", True): "geglu",
    ("relu", False): "relu",
    ("silu", False): "silu",
    **dict.fromkeys(
        [(name, False) for name in ("gelu", "gelu_new", "gelu_fast", "gelu_tanh", "gelu_pytorch_tanh")], "gelu"
    ),
}


def write_yaml(config: TransformerConfig, workload: Workload | None, layout: ParallelLayout | None) -> str:
    """Write a config; data, optimiser and schedule are the reader's to add in another file."""
    shards = layout.tensor_parallel if layout else 1
    unit = vocab_padding(FORM, config, shards)
    smallest = config.vocab_size - unit * shards + 1
    values = {**_shape(config), "make_vocab_size_divisible_by": unit}
    values |= {} if workload is None else _attention_kind(config, workload)
    values |= {} if layout is None else _spread(layout)
    values |= {} if workload is None else _batch(workload, layout)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in values.items()]
    head = (
        f"# vocab_size {config.vocab_size}: tokenizers of {smallest} to {config.vocab_size} tokens are padded to it.\n"
    )
    return head + "{\n" + "\n".join(lines) + "\n}\n"


def _shape(config: TransformerConfig) -> dict[str, Any]:
    refuse_other_head_dims(FORM, config)
    refuse_other_embedding_width(FORM, config)
    if config.position_embedding not in _POSITIONS:
        raise cannot(FORM.name, f"position_embedding={config.position_embedding!r}", f"it has {', '.join(_POSITIONS)}")
    activation = _ACTIVATIONS.get((config.activation, config.gated_mlp))
    if activation is None:
        gate = "with" if config.gated_mlp else "without"
        raise cannot(FORM.name, f"activation={config.activation!r} {gate} a gate", "it has no such activation")
    if config.qkv_bias != config.attention_out_bias:
        raise cannot(FORM.name, f"qkv_bias={config.qkv_bias} alone", "its attention has all biases or none")
    norms = {(False, 2): (False, False), (True, 2): (True, False), (True, 1): (True, True)}
    kind = (config.parallel_attention_mlp, config.num_norms_per_layer)
    if kind not in norms:
        raise cannot(FORM.name, f"num_norms_per_layer={config.num_norms_per_layer}", "it has one or two")
    parallel, tied = norms[kind]
    windows = {config.window_of_layer(index) for index in range(config.num_layers)}
    if len(windows) > 1:
        raise cannot(FORM.name, f"windows of {' and '.join(map(str, sorted(windows)))}", "it has one for all layers")
    window = windows.pop()
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        **({"num_kv_heads": config.num_kv_heads} if config.num_kv_heads != config.num_heads else {}),
        "intermediate_size": config.intermediate_size * (3 if config.gated_mlp else 1),
        "mlp_multiple_of": 1,
        "activation": activation,
        "max_position_embeddings": config.max_position_embeddings,
        "pos_emb": _POSITIONS[config.position_embedding],
        **({"opt_pos_emb_offset": config.position_offset} if config.position_offset else {}),
        "norm": config.norm,
        "use_bias_in_norms": config.norm_bias,
        "use_bias_in_attn_linear": config.qkv_bias,
        "use_bias_in_mlp": config.mlp_bias,
        "gpt_j_residual": parallel,
        "gpt_j_tied": tied,
        "no_weight_tying": not config.tied_embeddings,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        **({"sliding_window_width": window} if window else {}),
    }


def _attention_kind(config: TransformerConfig, workload: Workload) -> dict[str, Any]:
    return {"attention_config": [[["flash" if workload.attention == "flash" else "global"], config.num_layers]]}


def _spread(layout: ParallelLayout) -> dict[str, Any]:
    refuse_other_schedules(FORM, layout)
    for name in ("context_parallel", "expert_parallel", "virtual_pipeline"):
        if getattr(layout, name) > 1:
            raise cannot_spread(FORM.name, f"{name}={getattr(layout, name)}", "it spreads no model that way")
    if layout.zero_stage > 1 and layout.pipeline_parallel > 1:
        raise cannot_spread(
            FORM.name, f"zero_stage={layout.zero_stage} with stages", "DeepSpeed's pipelines go with stage 1 at most"
        )
    return {
        "model_parallel_size": layout.tensor_parallel,
        # DeepSpeed's pipeline engine runs from one stage on; 0 is without it, as stages 2 and 3 of ZeRO need.
        "pipe_parallel_size": 0 if layout.zero_stage > 1 else layout.pipeline_parallel,
        "sequence_parallel": layout.splits_sequence_over_tensor,
        "zero_optimization": {"stage": layout.zero_stage},
    }


def _batch(workload: Workload, layout: ParallelLayout | None) -> dict[str, Any]:
    refuse_other_runs(FORM.name, workload, _PRECISIONS)
    per_pass = workload.micro_batch_size * replicas_of(layout)
    stages = layout.pipeline_parallel if layout else 1
    return {
        "seq_length": workload.seq_len,
        "train_micro_batch_size_per_gpu": workload.micro_batch_size,
        "gradient_accumulation_steps": (workload.global_batch_size or per_pass * stages) // per_pass,
        "precision": _PRECISIONS[workload.dtype],
        "checkpoint_activations": workload.recompute == "full",
        **({"checkpoint_num_layers": 1} if workload.recompute == "full" else {}),
    }


FORM = Form(
    name="neox-yaml",
    project="GPT-NeoX",
    written=frozenset(
        (
            *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "intermediate_size"),
            *("vocab_size", "max_position_embeddings", "parallel_attention_mlp", "norm", "norm_bias"),
            *("num_norms_per_layer", "hidden_dropout", "attention_dropout", "attention_windows", "qkv_bias"),
            *("attention_out_bias", "activation", "gated_mlp", "mlp_bias", "tied_embeddings", "embedding_size"),
            *("position_embedding", "position_offset"),
        )
    ),
    fixed={},
    write=write_yaml,
    suffix=".yml",
    runs={
        "context_parallel": (1,),
        "expert_parallel": (1,),
        "virtual_pipeline": (1,),
        "zero_stage": (0, 1),
        "pipeline_schedule": ("1f1b",),
        "recompute": ("none", "full"),
    },
)
