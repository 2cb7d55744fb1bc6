"""GPT-NeoX: YAML config with quoted keys, as in its own examples.

Source: megatron/neox_arguments/neox_args.py and megatron/model/transformer.py of EleutherAI/gpt-neox, 2025 (the MLP
after the removal of ``mlp_type``: a gated MLP is ``intermediate_size / 3`` wide, rounded up to ``mlp_multiple_of``).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from shapewright.app.formats.output_format import (
    OutputFormat,
    Untimed,
    check_embedding_width,
    check_head_dims,
    check_pipeline_schedule,
    check_training_workload,
    layout_error,
    model_error,
    num_replicas,
    unwritten_scaling,
    vocab_padding,
)
from shapewright.app.formats.reading import (
    DTYPES,
    Reading,
    Values,
    given,
    parse_yaml,
    read_replicas,
    read_zero,
)
from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.numeric import round_up
from shapewright.core.texts import with_fields

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

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


def write_yaml(
    config: TransformerConfig, workload: Workload | None, layout: ParallelLayout | None, untimed: Untimed
) -> str:
    """Write a config, without data, and without optimizer and schedule where the length of the run is not known."""
    shards = layout.tensor_parallel if layout else 1
    unit = vocab_padding(FORM, config, shards)
    smallest = config.vocab_size - unit * shards + 1
    values = {**_model_settings(config), "make_vocab_size_divisible_by": unit}
    epsilon = "rms_norm_epsilon" if config.norm == "rmsnorm" else "layernorm_epsilon"
    names = {"norm_epsilon": epsilon}
    names |= {"rotary_base": "rotary_emb_base"} if config.position_embedding == "rotary" else {}
    values |= {key: untimed[name] for name, key in names.items() if name in untimed}
    values |= {} if workload is None else _attention_kind(config, workload)
    values |= {} if layout is None else _layout_settings(layout)
    values |= {} if workload is None else _workload_settings(workload, layout)
    values |= _run_settings(untimed) if "num_steps" in untimed else {}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in values.items()]
    head = (
        f"# vocab_size {config.vocab_size}: tokenizers of {smallest} to {config.vocab_size} tokens are padded to it.\n"
    )
    head += "".join(f"{line}\n" for line in unwritten_scaling(untimed))
    return head + "{\n" + "\n".join(lines) + "\n}\n"


def _run_settings(untimed: Untimed) -> dict[str, Any]:
    betas = [untimed["beta1"], untimed["beta2"]]
    return {
        "train_iters": untimed["num_steps"],
        "lr_decay_iters": untimed["num_steps"],
        "lr_decay_style": "cosine",
        "warmup": untimed["warmup_steps"] / untimed["num_steps"],
        "min_lr": untimed["final_learning_rate"],
        "optimizer": {"type": "Adam", "params": {"lr": untimed["learning_rate"], "betas": betas, "eps": 1e-8}},
        "weight_decay": untimed["weight_decay"],
        "gradient_clipping": untimed["gradient_clip"],
    }


def _model_settings(config: TransformerConfig) -> dict[str, Any]:
    check_head_dims(FORM, config)
    check_embedding_width(FORM, config)
    if config.position_embedding not in _POSITIONS:
        raise model_error(
            FORM.name, f"position_embedding={config.position_embedding!r}", f"supported are {', '.join(_POSITIONS)}"
        )
    activation = _ACTIVATIONS.get((config.activation, config.gated_mlp))
    if activation is None:
        gate = "with" if config.gated_mlp else "without"
        raise model_error(
            FORM.name, f"activation={config.activation!r} {gate} a gate", "the activation is not supported"
        )
    if config.qkv_bias != config.attention_out_bias:
        raise model_error(FORM.name, f"qkv_bias={config.qkv_bias} alone", "one setting applies to all attention biases")
    norms = {(False, 2): (False, False), (True, 2): (True, False), (True, 1): (True, True)}
    kind = (config.parallel_attention_mlp, config.num_norms_per_layer)
    if kind not in norms:
        raise model_error(FORM.name, f"num_norms_per_layer={config.num_norms_per_layer}", "1 or 2 are supported")
    parallel, tied = norms[kind]
    windows = {config.window_of_layer(index) for index in range(config.num_layers)}
    if len(windows) > 1:
        raise model_error(
            FORM.name, f"windows of {' and '.join(map(str, sorted(windows)))}", "one window applies to all layers"
        )
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


def _layout_settings(layout: ParallelLayout) -> dict[str, Any]:
    check_pipeline_schedule(FORM, layout)
    for name in ("context_parallel", "expert_parallel", "virtual_pipeline"):
        if getattr(layout, name) > 1:
            raise layout_error(FORM.name, f"{name}={getattr(layout, name)}", "it is not supported")
    if layout.zero_stage > 1 and layout.pipeline_parallel > 1:
        raise layout_error(
            FORM.name, f"zero_stage={layout.zero_stage} with stages", "DeepSpeed pipelines support ZeRO stage 1 at most"
        )
    return {
        "model_parallel_size": layout.tensor_parallel,
        # 1 already enables DeepSpeed's pipeline engine; 0 disables it, as ZeRO stages 2 and 3 require.
        "pipe_parallel_size": 0 if layout.zero_stage > 1 else layout.pipeline_parallel,
        "sequence_parallel": layout.splits_sequence_over_tensor,
        "zero_optimization": {"stage": layout.zero_stage},
    }


def _workload_settings(workload: Workload, layout: ParallelLayout | None) -> dict[str, Any]:
    check_training_workload(FORM.name, workload, _PRECISIONS)
    per_pass = workload.micro_batch_size * num_replicas(layout)
    stages = layout.pipeline_parallel if layout else 1
    global_batch_size = workload.global_batch_size or per_pass * stages
    return {
        "seq_length": workload.seq_len,
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": workload.micro_batch_size,
        "gradient_accumulation_steps": global_batch_size // per_pass,
        "precision": _PRECISIONS[workload.dtype],
        "checkpoint_activations": workload.recompute == "full",
        **({"checkpoint_num_layers": 1} if workload.recompute == "full" else {}),
    }


_SIZES = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_position_embeddings", "opt_pos_emb_offset": "position_offset",
}  # fmt: skip
_ACTIVATION_FIELDS = {
    "swiglu": ("silu", True), "geglu": ("gelu", True), "gelu": ("gelu", False), "relu": ("relu", False),
    "silu": ("silu", False),
}  # fmt: skip
_VOCABULARY = re.compile(r"^[ \t]*# vocab_size (\d+):", re.MULTILINE)


def read_neox(text: str) -> Reading:
    """Read a YAML config of GPT-NeoX; the vocabulary is that of the tokenizer, unless the file states it."""
    values = Values(parse_yaml(text))
    fields = values.pick(_SIZES)
    activation = str(values.get("activation", default="gelu"))
    if activation not in _ACTIVATION_FIELDS:
        raise ConfigError(
            f"activation={short_repr(activation)} is not known", advice=with_fields("give activation and {gated_mlp}")
        )
    name, is_gated = _ACTIVATION_FIELDS[activation]
    width = values.number("intermediate_size", default=4 * fields.get("hidden_size", 0))
    if is_gated:  # its two first matrices together are 2/3 of the width, rounded down
        width = round_up(int(width * 2 / 3) // 2, values.number("mlp_multiple_of", default=1))
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
    stated = _VOCABULARY.search(text)
    fields["vocab_size"] = int(stated[1]) if stated else values.number("padded_vocab_size")
    epsilon = values.number("rms_norm_epsilon" if is_rmsnorm else "layernorm_epsilon")
    layout = values.pick({"model_parallel_size": "tensor_parallel"})
    stages = values.number("pipe_parallel_size", default=1)
    layout["pipeline_parallel"] = max(1, stages)
    sequence_parallel = values.flag("sequence_parallel")
    if layout.get("tensor_parallel", 1) > 1:
        layout["sequence_parallel"] = sequence_parallel
    values.skip("mlp_multiple_of")
    workload = _read_workload(values)
    stated_passes = values.number("gradient_accumulation_steps")
    passes = stated_passes or 1
    layout |= read_zero(values.get("zero_optimization")) | read_replicas(workload, passes)
    return Reading(
        format="neox-yaml",
        fields=given(fields),
        workload=workload,
        layout=layout,
        passes=passes,
        guesses_replicas=not stated_passes and "data_parallel" in layout,
        vocab_multiple=values.number("make_vocab_size_divisible_by", default=128),
        untimed=given({"rotary_base": values.number("rotary_emb_base"), "norm_epsilon": epsilon}),
        unread=values.unread(),
    )


def _read_workload(values: Values) -> dict[str, Any]:
    kinds = str(values.get("attention_config", default="global"))
    recomputes = values.flag("checkpoint_activations")
    values.skip("checkpoint_num_layers")
    workload = values.pick({"seq_length": "seq_len", "train_micro_batch_size_per_gpu": "micro_batch_size"})
    return workload | given(
        {
            "phase": "train",
            "dtype": DTYPES.get(_precision(values)),
            "recompute": "full" if recomputes else "none",
            "attention": "flash" if "flash" in kinds else "unfused",
            "global_batch_size": values.number("train_batch_size"),
        }
    )


def _precision(values: Values) -> str:
    """Format of the GEMMs; older files have bf16 as a type of the section of fp16."""
    stated = values.get("precision")
    sections = {name: Values(values.get(name) or {}) for name in ("bf16", "fp16")}
    if stated is not None:
        return str(stated)
    if sections["fp16"].get("type") == "bfloat16":
        return "bf16"
    return next((name for name, section in sections.items() if section.flag("enabled")), "fp32")


FORM = OutputFormat(
    name="neox-yaml",
    project="GPT-NeoX",
    written_fields=frozenset(
        (
            *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "intermediate_size"),
            *("vocab_size", "max_position_embeddings", "parallel_attention_mlp", "norm", "norm_bias"),
            *("num_norms_per_layer", "hidden_dropout", "attention_dropout", "attention_windows", "qkv_bias"),
            *("attention_out_bias", "activation", "gated_mlp", "mlp_bias", "tied_embeddings", "embedding_size"),
            *("position_embedding", "position_offset"),
        )
    ),
    fixed_values={},
    write=write_yaml,
    suffix=".yml",
    fused={"fused_qkv": True, "fused_gate_up": True},
    run_values={
        "context_parallel": (1,),
        "expert_parallel": (1,),
        "virtual_pipeline": (1,),
        "zero_stage": (0, 1),
        "pipeline_schedule": ("1f1b",),
        "recompute": ("none", "full"),
    },
)
