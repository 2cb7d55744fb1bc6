"""Read Megatron-LM: argument lists, launch scripts, and arguments of a checkpoint as JSON or as the log prints them.

Source: megatron/training/arguments.py of NVIDIA/Megatron-LM, 2025 (core 0.14), for names and defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from shapewright.app.formats.reading import Reading, Values, given, literal, parse_python, parse_yaml
from shapewright.app.formats.shell import Script, arguments_of, read_script
from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.numeric import round_up
from shapewright.core.texts import with_fields
from shapewright.models.validate import MAX_NUM_LAYERS
from shapewright.workload.recompute import CORE

_SIZES = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_heads", "max_position_embeddings": "max_position_embeddings",
    "num_experts": "num_experts", "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}  # fmt: skip
_LATENT = {
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}  # fmt: skip
_LAYOUT = {
    "tensor_model_parallel_size": "tensor_parallel", "pipeline_model_parallel_size": "pipeline_parallel",
    "context_parallel_size": "context_parallel", "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel", "data_parallel_size": "data_parallel",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline",
}  # fmt: skip
_BATCH = {"seq_length": "seq_len", "micro_batch_size": "micro_batch_size", "global_batch_size": "global_batch_size"}
# Strategies of Megatron-FSDP, which come instead of the distributed optimizer, as stages of ZeRO.
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
_FROM_LOG = re.compile(r"^[ \t]*(?:\[[^\]\n]*\]:[ \t]*)?([a-z]\w+) \.{3,} (.*\S)[ \t]*$", re.MULTILINE)
# Any of them is in the command that starts a training.
_SIGNS = ("num_layers", "hidden_size", "tensor_model_parallel_size", "micro_batch_size")
# Written for the tools of the trainer; no field depends on them.
_WITHOUT_EFFECT = (
    "overlap_grad_reduce", "overlap_param_gather", "moe_grouped_gemm",
    "optimizer_offload_fraction", "use_precision_aware_optimizer", "multi_latent_attention",
    "master_addr", "master_port", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "standalone",
)  # fmt: skip


def parse_arguments(text: str) -> dict[str, Any]:
    """Arguments of a list, of a shell script that holds one, of a checkpoint's JSON, or of a log.

    Raises:
        ConfigError: quotes or brackets of the text do not match.
    """
    if text.lstrip().startswith("{"):
        found = parse_yaml(text)
        return dict(found["args"]) if isinstance(found.get("args"), dict) else found
    logged = {name: _value(words) for name, words in _FROM_LOG.findall(text)}
    if logged:
        return {name: value for name, value in logged.items() if value is not None}
    return _of_script(read_script(text))


def _of_script(script: Script) -> dict[str, Any]:
    """Arguments of the command of a script that starts a training; of all commands and variables if none does."""
    found = [arguments_of(words) for words in script.commands]
    trainings = [arguments for arguments in found if any(sign in arguments for sign in _SIGNS)]
    if not trainings:
        texts = script.unused.values()
        parts = [*found, *(arguments_of(text.split()) for text in texts)]
        return {name: value for part in parts for name, value in part.items()}
    chosen = max(trainings, key=len)
    questions = list(script.open_questions())
    if any(not other.items() <= chosen.items() for other in trainings):
        questions.append("(another training command)")
    # A command without this switch has it off, unlike a log or a checkpoint that lacks it.
    return {"group_query_attention": False, **chosen, **dict.fromkeys(questions, True)}


def _value(words: str) -> Any:
    try:
        return literal(parse_python(words).body[0].value)  # type: ignore[attr-defined]
    except (ConfigError, ValueError, AttributeError, IndexError):
        return words


def read_arguments(text: str) -> Reading:
    """Read the arguments of a training."""
    values = Values(parse_arguments(text))
    layout = values.pick(_LAYOUT)
    multiple = values.number("make_vocab_size_divisible_by", default=128)
    fields = _model(values, multiple * layout.get("tensor_parallel", 1))
    layout |= _more_layout(values, fields)
    values.skip(*_WITHOUT_EFFECT)
    return Reading(
        format="megatron-args",
        fields=fields,
        layout=layout,
        workload=_workload(values, layout.get("virtual_pipeline", 1)),
        vocab_multiple=0 if values.number("padded_vocab_size") else multiple,
        untimed=values.pick({name: name for name in _untimed_names(values)}),
        unread=values.unread(),
    )


def _untimed_names(values: Values) -> tuple[str, ...]:
    names = ("rotary_base", "norm_epsilon")
    return (*names, "rope_scaling_factor") if values.flag("use_rope_scaling") else names


def _model(values: Values, vocab_multiple: int) -> dict[str, Any]:
    fields = values.pick(_SIZES)
    is_gated, heads = values.flag("swiglu"), fields.get("num_heads")
    if "intermediate_size" not in fields and "hidden_size" in fields:
        width = 4 * fields["hidden_size"]
        fields["intermediate_size"] = width * 2 // 3 // 64 * 64 if is_gated else width
    fields["activation"] = "silu" if is_gated else "relu2" if values.flag("squared_relu") else "gelu"
    fields |= {"gated_mlp": is_gated, "fused_qkv": True, "fused_gate_up": is_gated}
    fields["norm"] = "rmsnorm" if values.get("normalization") == "RMSNorm" else "layernorm"
    fields["norm_bias"] = fields["norm"] == "layernorm"
    position = values.get("position_embedding_type", default="learned_absolute")
    if values.flag("use_rotary_position_embeddings"):
        position = "rope"
    if position not in _POSITIONS:
        raise ConfigError(
            f"position_embedding_type={short_repr(position)} is not known",
            advice=with_fields("give {position_embedding}"),
        )
    fields["position_embedding"] = _POSITIONS[position]
    for name in ("hidden_dropout", "attention_dropout"):
        fields[name] = values.number(name, default=0.1)
    has_bias = not values.flag("disable_bias_linear") and values.get("add_bias_linear", default=True) is not False
    fields |= {"attention_out_bias": has_bias, "mlp_bias": has_bias}
    fields["qkv_bias"] = values.flag("add_qkv_bias") or has_bias
    fields["tied_embeddings"] = not values.flag("untie_embeddings_and_output_weights")
    # Groups count only with their switch: a log and a checkpoint say num_query_groups=1 of a model without groups.
    groups = values.number("num_query_groups", default=1)
    has_groups = values.flag("group_query_attention", default=groups > 1)
    fields["num_kv_heads"] = groups if has_groups else heads
    fields |= _attention(values) | _layers(values, fields.get("num_layers", 0))
    padded = values.number("padded_vocab_size")
    tokens = values.number("vocab_size")
    if padded or tokens:
        fields["vocab_size"] = padded or round_up(tokens, vocab_multiple)
    top = values.number("moe_router_topk", default=2)
    if fields.get("num_experts"):
        fields["num_experts_per_token"] = top
        fields.setdefault("moe_intermediate_size", fields.get("intermediate_size"))
        fields["shared_expert_gate"] = values.flag("moe_shared_expert_gate")
    return given(fields)


def _attention(values: Values) -> dict[str, Any]:
    has_norm = values.flag("qk_layernorm")
    fields: dict[str, Any] = {"attention_sinks": values.get("softmax_type") == "learnable"}
    if values.number("kv_lora_rank") and values.flag("multi_latent_attention", default=True):
        fields |= values.pick(_LATENT)
        fields["head_dim"] = values.number("qk_head_dim", default=128) + fields.get("qk_rope_head_dim", 64)
        fields["q_lora_rank"] = fields.get("q_lora_rank", 0)
        fields.setdefault("v_head_dim", 128)
        return fields
    fields["head_dim"] = fields["v_head_dim"] = values.number("kv_channels")
    fields["qk_norm"] = "per-head" if has_norm else "none"
    if has_norm:
        fields["qk_norm_bias"] = values.get("normalization") != "RMSNorm"
    return fields


def _layers(values: Values, num_layers: int) -> dict[str, Any]:
    """Fields with an entry for each layer."""
    fields: dict[str, Any] = {}
    if num_layers > MAX_NUM_LAYERS:
        return fields  # which the model refuses
    window = values.get("window_size")
    if window is not None:
        left = int(re.findall(r"-?\d+", str(window))[0])
        # A number is the distance of layers without a window: the last of every n layers.
        flags = _pattern(values.get("window_attn_skip_freq"), num_layers, default=1, of_number=_all_but_last)
        fields["attention_windows"] = tuple((left + 1) * flag for flag in flags)
    experts = values.get("moe_layer_freq")
    if values.number("num_experts"):
        flags = _pattern(experts, num_layers, default=1, of_number=_first)
        fields["moe_layers"] = () if all(flags) else tuple(bool(flag) for flag in flags)
    without = values.get("no_rope_freq")
    if without is not None:
        flags = _pattern(without, num_layers, default=0, of_number=_last)
        fields["rotary_layers"] = tuple(not flag for flag in flags)
    return fields


def _first(index: int, every: int) -> bool:
    return index % every == 0


def _last(index: int, every: int) -> bool:
    return (index + 1) % every == 0


def _all_but_last(index: int, every: int) -> bool:
    return not _last(index, every)


def _pattern(value: Any, num_layers: int, *, default: int, of_number: Callable[[int, int], bool]) -> list[int]:
    """A flag for each layer, of a list, an expression such as ``([0]*1+[1]*2)*3``, or a number.

    Args:
        of_number: Whether a layer has the flag, by its index and the number; each argument has a rule of its own.
    """
    if value is None:
        return [default] * num_layers
    if isinstance(value, int) or str(value).isdigit():
        return [int(of_number(index, int(value))) for index in range(num_layers)]
    if isinstance(value, list):
        return [int(entry) for entry in value]
    repeated = re.sub(r"\[(\d+)\]\s*\*\s*(\d+)", lambda found: _repeat(found, num_layers), str(value))
    entries = [int(digit) for digit in re.findall(r"\d+", repeated.rpartition(")")[0] or repeated)]
    times = re.search(r"\)\s*\*\s*(\d+)$", str(value).strip())
    flags = entries * (int(times[1]) if times and int(times[1]) <= num_layers else 1)
    if len(flags) != num_layers:
        raise ConfigError(f"the pattern {short_repr(value)} has not one entry for each of {num_layers} layers")
    return flags


def _repeat(found: re.Match[str], most: int) -> str:
    return json.dumps([int(found[1])] * min(int(found[2]), most))


def _more_layout(values: Values, fields: dict[str, Any]) -> dict[str, Any]:
    layout: dict[str, Any] = {}
    per_chunk = values.number("num_layers_per_virtual_pipeline_stage")
    stages = values.number("pipeline_model_parallel_size", default=1)
    if per_chunk and fields.get("num_layers"):
        layout["virtual_pipeline"] = fields["num_layers"] // stages // per_chunk
    chunks = values.get("pipeline_model_parallel_layout")
    if chunks is not None:
        layout["virtual_pipeline"] = _count_chunks(str(chunks)) // stages
    layout["sequence_parallel"] = values.flag("sequence_parallel")
    layout["zero_stage"] = 1 if values.flag("use_distributed_optimizer") else 0
    if values.flag("use_torch_fsdp2"):
        layout["zero_stage"] = 3
    elif values.flag("use_megatron_fsdp", "use_custom_fsdp"):
        strategy = values.get("data_parallel_sharding_strategy", default="no_shard")
        if strategy not in _SHARDED:
            raise ConfigError(
                f"data_parallel_sharding_strategy={short_repr(strategy)} is not known",
                advice=with_fields("give {zero_stage}"),
            )
        layout["zero_stage"] = _SHARDED[strategy]
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        layout[name] = values.flag(name)
    world = _num_devices(values)
    if world and values.number("data_parallel_size") is None:
        degrees = [values.number(name, default=1) for name in tuple(_LAYOUT)[:3]]
        layout["data_parallel"] = max(1, world // (degrees[0] * degrees[1] * degrees[2]))
    if layout["sequence_parallel"] is False and values.number("tensor_model_parallel_size", default=1) == 1:
        del layout["sequence_parallel"]
    return layout


def _count_chunks(layout: str) -> int:
    """Chunks of a pipeline layout, whose multiplications are not written out.

    >>> _count_chunks("Et*2|(tt|)*3,m|L")
    6
    """
    repeated = r"\(([^()]*)\)\*(\d+)"
    apart = re.sub(repeated, "", layout)
    bars = apart.count("|") + sum(int(times) - 1 for times in re.findall(r"\|\*(\d+)", apart))
    bars += sum(str(group).count("|") * int(times) for group, times in re.findall(repeated, layout))
    return 1 + bars


def _num_devices(values: Values) -> int:
    """Devices of the job: those of a checkpoint or a log, or those that torchrun starts; 0 where they are not known."""
    of_node, nodes = values.count("nproc_per_node"), values.count("nnodes", default=1)
    return values.number("world_size") or (of_node or 0) * (nodes or 0)


def _workload(values: Values, chunks: int) -> dict[str, Any]:
    has_fp8 = values.get("fp8_format", "fp8") is not None
    dtype = "fp8" if has_fp8 else "bf16" if values.flag("bf16") else "fp16" if values.flag("fp16") else "fp32"
    values.skip("bf16", "fp16")
    workload = {**values.pick(_BATCH), "phase": "train", "dtype": dtype}
    backend = values.get("attention_backend")
    if backend is not None:
        workload["attention"] = "unfused" if "unfused" in str(backend) else "flash"
    workload["recompute"] = values.get("recompute_granularity", default="none")
    if values.flag("recompute_activations"):  # the older switch, which comes before the granularity
        workload["recompute"] = "selective"
    values.skip("recompute_method")
    if workload["recompute"] == "full":
        workload |= _recomputed_layers(values, chunks)
    modules = values.get("recompute_modules")
    if workload["recompute"] == "selective":
        words = modules if isinstance(modules, list) else str(modules or "").split()
        workload["recompute_modules"] = ",".join(words) or CORE
    if values.flag("no_bias_swiglu_fusion"):
        workload["fused_activation"] = False
    if values.flag("optimizer_cpu_offload"):
        workload["offload_optimizer"] = True
    return workload


def _recomputed_layers(values: Values, chunks: int) -> dict[str, Any]:
    """Layers of a stage that the block method repeats; the uniform method, of one layer at a time, repeats all."""
    if values.get("recompute_method", default="uniform") == "block":
        return {"recompute_layers": values.number("recompute_num_layers", default=1) * chunks}
    values.skip_if("recompute_num_layers", 1, "1")
    return {}
