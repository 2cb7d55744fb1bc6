"""litgpt: config of ``litgpt pretrain --config FILE``, with the model under ``model_config``.

Source: litgpt/config.py, litgpt/args.py and litgpt/pretrain.py of Lightning-AI/litgpt, 2025.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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
from shapewright.app.formats.reading import Reading, Values, given, parse_yaml
from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.numeric import divisors, round_up
from shapewright.core.texts import with_fields
from shapewright.models.read import list_presets, load_preset, read_model

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_SIZES = {
    "n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_heads", "n_query_groups": "num_kv_heads",
    "head_size": "head_dim", "intermediate_size": "intermediate_size", "block_size": "max_position_embeddings",
}  # fmt: skip
_EXPERT_SIZES = {
    "n_expert": "num_experts",
    "n_expert_per_token": "num_experts_per_token",
    "moe_intermediate_size": "moe_intermediate_size",
}
_MLPS = {
    ("gelu", False): ("GptNeoxMLP", "none"),
    ("gelu_new", False): ("GptNeoxMLP", "tanh"),
    ("gelu_pytorch_tanh", False): ("GptNeoxMLP", "tanh"),
    ("gelu", True): ("GemmaMLP", "none"),
    ("gelu_pytorch_tanh", True): ("GemmaMLP", "tanh"),
    ("silu", True): ("LLaMAMLP", "none"),
}
_UNTIMED = {"rope_base": "rotary_base", "norm_eps": "norm_epsilon"}
# Devices of a usual node, such as an HGX board, and the most: a rack such as NVL72 has several hosts.
_NODE_DEVICES = 8
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
        lines += _devices(layout.data_parallel, int(min(untimed.get("node_size", _NODE_DEVICES), _NODE_DEVICES)))
    return "\n".join(lines) + "\n"


def _devices(num_devices: int, node_size: int) -> list[str]:
    """Lines of the devices of a node and of the nodes: the largest ones of equal size."""
    of_node = max(size for size in divisors(num_devices) if size <= node_size)
    if of_node == num_devices:
        return [f"devices: {num_devices}"]
    return [
        "# litgpt shards within each node alone (HYBRID_SHARD), which takes more memory than planned.",
        f"devices: {of_node}  # of a node",
        f"num_nodes: {num_devices // of_node}",
    ]


def _model(config: TransformerConfig, untimed: Untimed) -> dict[str, Any]:
    mlp = _MLPS.get((config.activation, config.gated_mlp))
    biases = (config.qkv_bias, config.attention_out_bias, config.mlp_bias)
    if mlp is None or (config.is_moe and (config.activation, config.gated_mlp) != ("silu", True)):
        raise model_error(FORM.name, f"activation={config.activation!r}", "supported are GELU and SwiGLU")
    if biases[1:] not in ((True, True), (False, False)) or (biases[1] and not biases[0]):
        raise model_error(
            FORM.name, "biases in some layers only", with_fields("supported are all, none, or {qkv_bias} only")
        )
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
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
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
        values |= {theirs: getattr(config, ours) for theirs, ours in _EXPERT_SIZES.items()}
    if windows:
        values["sliding_window_size"] = windows.pop()
        flags = [int(config.window_of_layer(index) > 0) for index in range(config.num_layers)]
        values["sliding_window_indices"] = flags
    return values | {key: untimed[name] for key, name in _UNTIMED.items() if name in untimed}


_DEFAULTS = {"n_layer": 16, "n_embd": 4096, "n_head": 32, "block_size": 4096, "vocab_size": 50254}
_MLP_CLASSES = {
    "GptNeoxMLP": ("gelu", False), "LLaMAMLP": ("silu", True), "GemmaMLP": ("gelu", True), "LLaMAMoE": ("silu", True),
}  # fmt: skip
_DEFAULT_BATCHES = {"global_batch_size": 512, "micro_batch_size": 4}  # of pretrain.py
_OF_TRAINING = frozenset(("model_config", "model_name", "model", "train"))
_TUNING = re.compile(r"-(instruct|chat|it|hf|base|pt|deduped|v0\.1)(?![^-])")
_WORDS_OF_PRECISION = {"bf16": "bf16", "16": "fp16", "32": "fp32"}


def read_litgpt(text: str) -> Reading:
    """Read a model_config.yaml of litgpt, or the config of a training with its model's name or sizes."""
    file = parse_yaml(text)
    if not _OF_TRAINING.intersection(file):
        fields, untimed, unread = _read_model(file)
        return Reading(format="litgpt-yaml", fields=fields, untimed=untimed, unread=unread)
    workload, layout, not_run = _read_run(file)
    sizes = file.get("model_config") or file.get("model")
    name = file.get("model_name")
    preset = "" if sizes else _preset_of(name)
    fields, untimed, unread = ({"fused_qkv": True}, {}, ()) if preset else _read_model(sizes)
    fields["tied_embeddings"] = Values(file.get("train") or {}).flag("tie_embeddings")
    positions = read_model(preset).config.max_position_embeddings if preset else fields["max_position_embeddings"]
    workload.setdefault("seq_len", positions)  # as pretrain.py does
    return Reading(
        format="litgpt-yaml",
        fields=fields,
        model=preset,
        workload=workload,
        layout=layout,
        untimed=untimed,
        unread=(*unread, *not_run),
    )


def _preset_of(name: object) -> str:
    """Preset of a model by the name that litgpt or Hugging Face gives it; tuned models have the shape of their base.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str):
        raise ConfigError("the file has neither a model_config with sizes nor a model_name; write one of them into it")
    wanted = _base_name(name)
    presets = {preset: load_preset(preset).hub_id or preset for preset in list_presets()}
    found = [preset for preset, hub_id in presets.items() if wanted in (_base_name(preset), _base_name(hub_id))]
    if not found:
        raise ConfigError(
            f"model_name={short_repr(name)} is no preset, and the file has no sizes of it; write them below "
            f"model_config, as in the model_config.yaml of its checkpoint"
        )
    return next((preset for preset in found if preset.endswith("-text")), found[0])


def _base_name(name: str) -> str:
    """Name without its organization and the words for tuning.

    >>> _base_name("mistralai/Mixtral-8x7B-Instruct-v0.1"), _base_name("tiny-llama-1.1b-chat")
    ('mixtral-8x7b', 'tinyllama-1.1b')
    """
    plain = _TUNING.sub("", name.rpartition("/")[2].lower().replace("_", "."))
    return plain.replace("tiny-llama", "tinyllama").replace("meta-llama", "llama")


def _read_model(model: object) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Fields of a model, values that no prediction depends on, and the keys that are not read."""
    if not isinstance(model, Mapping):
        raise ConfigError(f"model_config is {short_repr(model)}; write the sizes of the model below it")
    values = Values({**_DEFAULTS, **given(model)})
    fields = values.pick(_SIZES | _EXPERT_SIZES)
    kind = values.get("mlp_class_name", default="GptNeoxMLP")
    activation, is_gated = _MLP_CLASSES.get(kind, ("gelu", False))
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
    if not fields["max_position_embeddings"]:
        raise ConfigError("block_size=0 must be a whole number above 0")
    kept = {name: value for name, value in given(fields).items() if value != 0 or name.endswith("bias")}
    return kept, values.pick(_UNTIMED), values.unread()


def _read_run(file: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Workload and layout of a training, and the keys that are not read."""
    values = Values({name: value for name, value in file.items() if name not in _OF_TRAINING})
    train = Values(file.get("train") or {})
    names = {"global_batch_size": "global_batch_size", "micro_batch_size": "micro_batch_size"}
    workload = train.pick({**names, "max_seq_length": "seq_len"}) | {"phase": "train"}
    if "train" in file:
        workload = {**_DEFAULT_BATCHES, **workload}
    train.skip("tie_embeddings")
    precision = str(values.get("precision", default=""))
    workload |= given({"dtype": next((ours for word, ours in _WORDS_OF_PRECISION.items() if word in precision), None)})
    if precision == "bf16-true":  # weights, gradients and states are in 16 bits
        workload["optimizer"] = "adamw-bf16"
    devices, nodes = values.get("devices"), values.number("num_nodes", default=1)
    layout = {"data_parallel": int(devices) * nodes} if str(devices).isdigit() else {}
    if layout.get("data_parallel", 1) > 1:
        layout["zero_stage"] = 3  # litgpt's FSDP strategy, in the devices of a node
    not_priced = ("num_nodes",) if nodes > 1 else ()  # HYBRID_SHARD: each node holds all weights
    return workload, layout, (*values.unread(), *not_priced, *(f"train.{key}" for key in train.unread()))


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
    fused={"fused_qkv": True, "fused_gate_up": False},
    run_values={**DATA_PARALLEL_ONLY, "zero_stage": (3,), "recompute": ("none",)},
)
