"""Read GPT-NeoX, nanoGPT and litgpt configs.

Sources: neox_args.py and transformer.py of EleutherAI/gpt-neox; train.py and model.py of karpathy/nanoGPT; config.py
and args.py of Lightning-AI/litgpt, for names and defaults.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from shapewright.app.formats.readers.reading import (
    Reading,
    Values,
    given,
    literal,
    parse_python,
    parse_yaml,
    round_up,
)
from shapewright.core.errors import ConfigError, short_repr

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp16": "fp16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}

_NEOX_SIZES = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_position_embeddings", "opt_pos_emb_offset": "position_offset",
}  # fmt: skip
_NEOX_ACTIVATIONS = {
    "swiglu": ("silu", True), "geglu": ("gelu", True), "gelu": ("gelu", False), "relu": ("relu", False),
    "silu": ("silu", False),
}  # fmt: skip
_NEOX_VOCABULARY = re.compile(r"^\s*# vocab_size (\d+):", re.MULTILINE)


def read_neox(text: str) -> Reading:
    """Read a YAML config of GPT-NeoX; the vocabulary is that of the tokenizer, unless the file states it."""
    values = Values(parse_yaml(text))
    fields = values.pick(_NEOX_SIZES)
    activation = str(values.get("activation", default="gelu"))
    if activation not in _NEOX_ACTIVATIONS:
        raise ConfigError(f"activation={short_repr(activation)} is not known; give activation and gated_mlp")
    name, is_gated = _NEOX_ACTIVATIONS[activation]
    width = values.number("intermediate_size", default=4 * fields.get("hidden_size", 0))
    if is_gated:  # its two first matrices together are 2/3 of the width
        width = round_up(-(-width // 3), values.number("mlp_multiple_of", default=1))
    is_rmsnorm = values.get("norm", default="layernorm") == "rmsnorm"
    norm_bias = values.flag("use_bias_in_norms", default=True) and not is_rmsnorm
    biases = values.flag("use_bias_in_attn_linear", default=True), values.flag("use_bias_in_mlp", default=True)
    window = values.number("sliding_window_width")
    fields |= {
        "activation": name,
        "gated_mlp": is_gated,
        "intermediate_size": width,
        "num_kv_heads": values.number("num_kv_heads"),
        "norm": "rmsnorm" if is_rmsnorm else values.get("norm", default="layernorm"),
        "norm_bias": norm_bias,
        "qkv_bias": biases[0],
        "attention_out_bias": biases[0],
        "mlp_bias": biases[1],
        "parallel_attention_mlp": values.flag("gpt_j_residual"),
        "num_norms_per_layer": 1 if values.flag("gpt_j_tied") and values.flag("gpt_j_residual") else 2,
        "tied_embeddings": not values.flag("no_weight_tying"),
        "position_embedding": values.get("pos_emb", default="learned"),
        "hidden_dropout": values.number("hidden_dropout", default=0.0),
        "attention_dropout": values.number("attention_dropout", default=0.0),
        "attention_windows": (window,) if window else None,
        "fused_qkv": True,
        "fused_gate_up": is_gated,
    }
    stated = _NEOX_VOCABULARY.search(text)
    if stated:
        fields["vocab_size"] = int(stated[1])
        values.skip("make_vocab_size_divisible_by")
    epsilon = values.number("rms_norm_epsilon" if is_rmsnorm else "layernorm_epsilon")
    layout = values.pick({"model_parallel_size": "tensor_parallel"})
    stages = values.number("pipe_parallel_size", default=1)
    layout["pipeline_parallel"] = max(1, stages)
    sequence_parallel = values.flag("sequence_parallel")
    if layout.get("tensor_parallel", 1) > 1:
        layout["sequence_parallel"] = sequence_parallel
    values.skip("mlp_multiple_of")
    return Reading(
        format="neox-yaml",
        fields=given(fields),
        workload=_neox_workload(values),
        layout=layout | read_zero(values.get("zero_optimization")),
        untimed=given({"rotary_base": values.number("rotary_emb_base"), "norm_epsilon": epsilon}),
        unread=values.unread(),
    )


def _neox_workload(values: Values) -> dict[str, Any]:
    kinds = str(values.get("attention_config", default=""))
    precision = values.get("precision")
    if precision is None:
        precision = next((name for name in ("bf16", "fp16") if values.get(name)), "fp32")
    recomputes = values.flag("checkpoint_activations")
    values.skip("checkpoint_num_layers", "bf16", "fp16")
    workload = values.pick({"seq_length": "seq_len", "train_micro_batch_size_per_gpu": "micro_batch_size"})
    return workload | given(
        {
            "phase": "train",
            "dtype": _DTYPES.get(str(precision)),
            "recompute": "full" if recomputes else "none",
            "attention": ("flash" if "flash" in kinds else "unfused") if kinds else None,
            "global_batch_size": values.number("train_batch_size"),
        }
    )


def read_zero(zero: object) -> dict[str, int]:
    """ZeRO stage of a ``zero_optimization`` section."""
    return {"zero_stage": int(zero.get("stage", 0))} if isinstance(zero, Mapping) else {}


def read_nanogpt(text: str) -> Reading:
    """Read a config file of nanoGPT, on top of the defaults of train.py."""
    assignments: dict[str, Any] = {}
    unread = []
    for statement in parse_python(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            try:
                assignments[name] = literal(statement.value)
            except (ValueError, TypeError, RecursionError):
                unread.append(name)
    values = Values(assignments)
    has_bias = values.flag("bias")
    dropout = values.number("dropout", default=0.0)
    block = values.number("block_size", default=1024)
    micro_batch = values.number("batch_size", default=12)
    passes = values.number("gradient_accumulation_steps", default=40)
    biases = dict.fromkeys(("norm_bias", "qkv_bias", "attention_out_bias", "mlp_bias"), has_bias)
    return Reading(
        format="nanogpt",
        fields={
            "num_layers": values.number("n_layer", default=12),
            "num_heads": values.number("n_head", default=12),
            "hidden_size": values.number("n_embd", default=768),
            "vocab_size": values.number("vocab_size", default=50304),
            "max_position_embeddings": block,
            "norm": "layernorm",
            "activation": "gelu",
            "tied_embeddings": True,
            "position_embedding": "learned",
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
            "fused_qkv": True,
            **biases,
        },
        # Passes are summed over all devices.
        workload={
            "phase": "train",
            "seq_len": block,
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch * passes,
            "dtype": _DTYPES.get(values.get("dtype", default="bfloat16"), "bf16"),
            "attention": "flash",
            "recompute": "none",
        },
        unread=tuple(sorted((*unread, *values.unread()))),
    )


_LITGPT_SIZES = {
    "n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_heads", "n_query_groups": "num_kv_heads",
    "intermediate_size": "intermediate_size", "block_size": "max_position_embeddings", "n_expert": "num_experts",
    "n_expert_per_token": "num_experts_per_token", "moe_intermediate_size": "moe_intermediate_size",
}  # fmt: skip
_LITGPT_DEFAULTS = {"n_layer": 16, "n_embd": 4096, "n_head": 32, "block_size": 4096, "vocab_size": 50254}
_LITGPT_MLPS = {
    "GptNeoxMLP": ("gelu", False), "LLaMAMLP": ("silu", True), "GemmaMLP": ("gelu", True), "LLaMAMoE": ("silu", True),
}  # fmt: skip
_LITGPT_PRECISIONS = {"bf16": "bf16", "16": "fp16", "32": "fp32"}


def read_litgpt(text: str) -> Reading:
    """Read a model_config.yaml of litgpt, or the config of a training with ``model_config`` and ``train``."""
    file = parse_yaml(text)
    inner = file.get("model_config")
    model = inner if isinstance(inner, Mapping) else file
    values = Values({**_LITGPT_DEFAULTS, **model})
    fields = values.pick(_LITGPT_SIZES)
    kind = values.get("mlp_class_name", default="GptNeoxMLP")
    activation, is_gated = _LITGPT_MLPS.get(kind, ("gelu", False))
    if values.get("gelu_approximate") == "tanh" and activation == "gelu":
        activation = "gelu_pytorch_tanh"
    is_rmsnorm = values.get("norm_class_name", default="LayerNorm") == "RMSNorm"
    has_bias = values.flag("bias", default=True)
    multiple = values.number("padding_multiple", default=512)
    padded = values.number("padded_vocab_size") or round_up(values.number("vocab_size"), multiple)
    window = values.number("sliding_window_size")
    flags = values.get("sliding_window_indices") or [1]
    fields |= {
        "activation": activation,
        "gated_mlp": is_gated,
        "head_dim": values.number("head_size"),
        "vocab_size": padded,
        "norm": "rmsnorm" if is_rmsnorm else "layernorm",
        "norm_bias": not is_rmsnorm,
        "qkv_bias": values.flag("attn_bias") or has_bias,
        "attention_out_bias": has_bias,
        "mlp_bias": has_bias,
        "lm_head_bias": values.flag("lm_head_bias"),
        "qk_norm": "per-head" if values.flag("norm_qk") else "none",
        "parallel_attention_mlp": values.flag("parallel_residual", default=True),
        "num_norms_per_layer": (1 if values.flag("shared_attention_norm") else 2)
        + values.flag("post_attention_norm")
        + values.flag("post_mlp_norm"),
        "position_embedding": "rotary",
        "attention_windows": tuple(window * int(flag) for flag in flags) if window else None,
        "fused_qkv": True,
    }
    values.skip("name", "hf_config", "rotary_percentage", "vocab_size")
    workload, layout, unread = _litgpt_run(file) if model is not file else ({}, {}, ())
    return Reading(
        format="litgpt-yaml",
        fields={name: value for name, value in given(fields).items() if value != 0 or name.endswith("bias")},
        workload=workload,
        layout=layout,
        untimed=values.pick({"rope_base": "rotary_base", "norm_eps": "norm_epsilon"}),
        unread=(*values.unread(), *unread),
    )


def _litgpt_run(file: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Workload and layout of a training, and the keys that are not read."""
    values = Values({name: value for name, value in file.items() if name not in ("model_config", "train")})
    train = Values(file.get("train") or {})
    names = {"global_batch_size": "global_batch_size", "micro_batch_size": "micro_batch_size"}
    workload = train.pick({**names, "max_seq_length": "seq_len"}) | {"phase": "train"}
    precision = str(values.get("precision", default=""))
    workload |= given({"dtype": next((ours for word, ours in _LITGPT_PRECISIONS.items() if word in precision), None)})
    devices, nodes = values.get("devices"), values.number("num_nodes", default=1)
    layout = {"data_parallel": int(devices) * nodes} if str(devices).isdigit() else {}
    return workload, layout, (*values.unread(), *(f"train.{key}" for key in train.unread()))
