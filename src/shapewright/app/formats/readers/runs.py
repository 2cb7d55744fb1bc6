"""Read files that describe a run but no model: DeepSpeed, Accelerate, and launch lines of vLLM and SGLang.

Sources: www.deepspeed.ai/docs/config-json; Accelerate's launch configs with FSDP and DeepSpeed; the engine arguments of
vLLM (vllm/engine/arg_utils.py) and SGLang (srt/server_args.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from shapewright.app.formats.readers.megatron import parse_arguments
from shapewright.app.formats.readers.reading import Reading, Values, given, parse_yaml
from shapewright.app.formats.readers.trainers import read_zero
from shapewright.core.errors import ConfigError

_AUTO = "auto"  # left to the trainer that reads the file


def read_deepspeed(text: str) -> Reading:
    """Read a config of DeepSpeed; values that are ``auto`` are those of the trainer."""
    file = {name: value for name, value in parse_yaml(text).items() if value != _AUTO}
    values = Values(file)
    micro_batch = values.number("train_micro_batch_size_per_gpu")
    passes = values.number("gradient_accumulation_steps", default=1)
    batch = values.number("train_batch_size")
    zero = values.get("zero_optimization") or {}
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    is_enabled = {name: bool((values.get(name) or {}).get("enabled")) for name in ("bf16", "fp16")}
    layout: dict[str, Any] = read_zero(zero)
    if batch and micro_batch:
        layout["data_parallel"] = max(1, batch // (micro_batch * passes))
    workload = {
        "phase": "train",
        "micro_batch_size": micro_batch,
        "global_batch_size": batch,
        "dtype": "bf16" if is_enabled["bf16"] else "fp16" if is_enabled["fp16"] else "fp32",
        "recompute": "full" if values.get("activation_checkpointing") else None,
        "offload_optimizer": True if offload and offload.get("device") == "cpu" else None,
    }
    return Reading(
        format="deepspeed-json", workload=given(workload), layout=layout, unread=_without(values, "bf16", "fp16")
    )


def _without(values: Values, *keys: str) -> tuple[str, ...]:
    values.skip(*keys)
    return values.unread()


def read_accelerate(text: str) -> Reading:
    """Read a launch config of Accelerate, with FSDP of either version, DeepSpeed or plain data parallelism."""
    values = Values(parse_yaml(text))
    kind = str(values.get("distributed_type", default="NO")).upper()
    sharding, deepspeed = Values(values.get("fsdp_config") or {}), Values(values.get("deepspeed_config") or {})
    layout: dict[str, Any] = {"data_parallel": values.number("num_processes", default=1)}
    workload: dict[str, Any] = {"phase": "train"}
    if kind == "FSDP":
        old = str(sharding.get("fsdp_sharding_strategy", default="")).upper()
        reshards = sharding.get("fsdp_reshard_after_forward", default=True)
        keeps = old in ("2", "SHARD_GRAD_OP") or str(reshards).lower() in ("false", "shard_grad_op")
        layout["zero_stage"] = 0 if old in ("3", "NO_SHARD") else 2 if keeps else 3
        workload["recompute"] = "full" if sharding.flag("fsdp_activation_checkpointing") else "none"
    elif kind == "DEEPSPEED":
        layout["zero_stage"] = deepspeed.number("zero_stage", default=2)
        if deepspeed.get("offload_optimizer_device") == "cpu":
            workload["offload_optimizer"] = True
    precision = str(values.get("mixed_precision", default="no"))
    workload["dtype"] = precision if precision in ("bf16", "fp16", "fp8") else "fp32"
    workload |= _commented(text)
    values.skip("compute_environment", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
    sharding.skip("fsdp_version", "fsdp_auto_wrap_policy", "fsdp_state_dict_type", "fsdp_offload_params")
    inner = [f"fsdp_config.{key}" for key in sharding.unread()] + [
        f"deepspeed_config.{key}" for key in deepspeed.unread()
    ]
    return Reading(format="accelerate-yaml", workload=workload, layout=layout, unread=(*values.unread(), *inner))


def _commented(text: str) -> dict[str, int]:
    """Batch that our own files state in comments, since the training script sets it."""
    names = {"per_device_train_batch_size": "micro_batch_size", "tokens per sequence": "seq_len"}
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.lstrip("# ").partition(": ")
        if line.startswith("#   ") and name in names and value.isdigit():
            found[names[name]] = int(value)
    return found


_VLLM = {
    "tensor_parallel_size": "tensor_parallel", "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel", "dp": "data_parallel",
}  # fmt: skip
_SGLANG = {
    "tp_size": "tensor_parallel", "tensor_parallel_size": "tensor_parallel", "tp": "tensor_parallel",
    "pp_size": "pipeline_parallel", "pp": "pipeline_parallel", "dp_size": "data_parallel", "dp": "data_parallel",
    "ep_size": "expert_parallel", "ep": "expert_parallel",
}  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32", "float32": "fp32"}
# Method of --quantization -> formats of GEMMs and weights; others need the checkpoint to be known.
_QUANTIZED: dict[str, dict[str, str]] = {
    "fp8": {"dtype": "fp8"}, "w8a8_fp8": {"dtype": "fp8"}, "w8a8_int8": {"dtype": "int8"},
    "awq": {"weight_dtype": "int4"}, "awq_marlin": {"weight_dtype": "int4"}, "gptq": {"weight_dtype": "int4"},
    "gptq_marlin": {"weight_dtype": "int4"}, "modelopt_fp4": {"dtype": "fp4"}, "mxfp4": {"weight_dtype": "fp4"},
}  # fmt: skip


def read_vllm(text: str) -> Reading:
    """Read a launch line of vLLM."""
    values, model = _launch(text, "serve")
    layout: dict[str, Any] = values.pick(_VLLM)
    model = str(values.get("model", default=model))
    if values.flag("enable_expert_parallel"):
        layout["expert_parallel"] = layout.get("tensor_parallel", 1) * layout.get("data_parallel", 1)
    workload = _served(values, values.number("max_model_len"), values.number("max_num_seqs"))
    return Reading(format="vllm", model=model, workload=workload, layout=layout, unread=values.unread())


def read_sglang(text: str) -> Reading:
    """Read a launch line of SGLang; its tensor degree is that of the whole instance."""
    values, _ = _launch(text, "sglang.launch_server")
    layout: dict[str, Any] = values.pick(_SGLANG)
    if values.flag("enable_dp_attention") and layout.get("data_parallel"):
        layout["tensor_parallel"] = max(1, layout.get("tensor_parallel", 1) // layout["data_parallel"])
    workload = _served(values, values.number("context_length"), values.number("max_running_requests"))
    model = str(values.get("model_path", "model", default=""))
    return Reading(format="sglang", model=model, workload=workload, layout=layout, unread=values.unread())


def _launch(text: str, program: str) -> tuple[Values, str]:
    """Arguments of the first command with a program, and the word after it."""
    lines = text.replace("\\\n", " ").splitlines()
    line = next((line for line in lines if program in line and not line.lstrip().startswith("#")), "")
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"the launch line cannot be read: {error}; check its quotes") from None
    after = words[words.index(program) + 1] if program in words and words[-1] != program else ""
    return Values(parse_arguments(line.partition(program)[2])), "" if after.startswith("-") else after


def _served(values: Values, length: int | None, sequences: int | None) -> dict[str, Any]:
    """Workload of decoding at the limits of the server."""
    workload: dict[str, Any] = {"phase": "decode", "context_len": length, "micro_batch_size": sequences}
    dtype = _DTYPES.get(str(values.get("dtype")))
    workload |= {"dtype": dtype, **_QUANTIZED.get(str(values.get("quantization")), {})}
    cache = str(values.get("kv_cache_dtype", default=_AUTO))
    workload["kv_cache_dtype"] = "fp8" if cache.startswith("fp8") else None
    return given(workload)
