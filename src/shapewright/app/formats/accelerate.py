"""Hugging Face Accelerate: YAML file of ``accelerate launch --config_file FILE``, with PyTorch FSDP 2.

The file does not describe the model and the batch, which the script defines; comments at its top state the batch.

Source: Accelerate, guides of FSDP, of FSDP 1 against FSDP 2, and of several degrees (huggingface.co/docs/accelerate),
version 1.6 or later.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from shapewright.app.formats.output_format import (
    DATA_PARALLEL_ONLY,
    OutputFormat,
    Untimed,
    check_training_workload,
    layout_error,
    num_replicas,
    workload_error,
)
from shapewright.app.formats.reading import Reading, Values, parse_yaml

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp32": "no"}
_DEGREE = "parallelism_config_"
_DEGREES = {f"{_DEGREE}tp_size": "tensor_parallel", f"{_DEGREE}cp_size": "context_parallel"}


def write_yaml(
    config: TransformerConfig,  # noqa: ARG001
    workload: Workload | None,
    layout: ParallelLayout | None,
    untimed: Untimed,
) -> str:
    """Write the config, without machines and their addresses."""
    lines = [] if workload is None else _workload_settings(workload, layout)
    names = {"num_steps": "max_steps", "warmup_steps": "warmup_steps", "learning_rate": "learning_rate"}
    lines += [f"#   {key}: {untimed[name]}" for name, key in names.items() if name in untimed]
    lines += ["compute_environment: LOCAL_MACHINE"]
    if workload is not None:
        lines.append(f"mixed_precision: '{_PRECISIONS[workload.dtype]}'")
    if layout is not None:
        if layout.num_devices > 1:
            lines.append(
                "# Processes of all machines; with several, set num_machines, machine_rank and main_process_ip too."
            )
        lines += [f"num_processes: {layout.num_devices}", *_layout_settings(layout, workload)]
    return "\n".join(lines) + "\n"


def _workload_settings(workload: Workload, layout: ParallelLayout | None) -> list[str]:
    check_training_workload(FORM.name, workload, _PRECISIONS)
    per_pass = workload.micro_batch_size * num_replicas(layout)
    return [
        "# Arguments of the training script:",
        f"#   per_device_train_batch_size: {workload.micro_batch_size}",
        f"#   gradient_accumulation_steps: {(workload.global_batch_size or per_pass) // per_pass}",
        f"#   tokens per sequence: {workload.seq_len}",
    ]


def _layout_settings(layout: ParallelLayout, workload: Workload | None) -> list[str]:
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        if getattr(layout, name) > 1:
            raise layout_error(FORM.name, f"{name}={getattr(layout, name)}", "only FSDP is supported")
    if layout.zero_stage == 1:
        raise layout_error(FORM.name, "zero_stage=1", "FSDP shards gradients too; use 0, 2 or 3")
    recomputes = workload is not None and workload.recompute == "full"
    if layout.zero_stage == 0:
        if recomputes:
            raise workload_error(
                FORM.name, "recompute='full' without FSDP", "the script controls checkpointing without FSDP"
            )
        return [f"distributed_type: {'MULTI_GPU' if layout.num_devices > 1 else 'NO'}"]
    values: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": layout.zero_stage == 3,
        "fsdp_activation_checkpointing": recomputes,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    words = {True: "true", False: "false"}
    return [
        "distributed_type: FSDP",
        "fsdp_config:",
        *(f"  {name}: {words[value] if isinstance(value, bool) else value}" for name, value in values.items()),
    ]


def read_accelerate(text: str) -> Reading:
    """Read a launch config of Accelerate, with FSDP of either version, DeepSpeed or plain data parallelism."""
    values = Values(parse_yaml(text))
    kind = str(values.get("distributed_type", default="NO")).upper()
    sharding, deepspeed = Values(values.get("fsdp_config") or {}), Values(values.get("deepspeed_config") or {})
    degrees = Values(values.get("parallelism_config") or {})
    layout = degrees.pick(_DEGREES)
    of_replica = prod(layout.values()) or 1
    replicas = degrees.number(f"{_DEGREE}dp_replicate_size", default=1)
    shards = degrees.number(f"{_DEGREE}dp_shard_size", default=1)
    processes = values.number("num_processes", default=of_replica * replicas * shards)
    layout["data_parallel"] = max(1, processes // of_replica)
    if layout.get("tensor_parallel", 1) > 1:
        layout["sequence_parallel"] = False  # plans of transformers split the matrices alone
    workload: dict[str, Any] = {"phase": "train"}
    old = str(sharding.get("fsdp_sharding_strategy", default="")).upper()
    if kind == "FSDP":
        reshards = sharding.get("fsdp_reshard_after_forward", default=True)
        keeps = old in ("2", "SHARD_GRAD_OP") or str(reshards).lower() in ("false", "shard_grad_op")
        is_whole = old in ("3", "NO_SHARD") or (replicas > 1 and shards * layout.get("context_parallel", 1) == 1)
        layout["zero_stage"] = 0 if is_whole else 2 if keeps else 3
        workload["recompute"] = "full" if sharding.flag("fsdp_activation_checkpointing") else "none"
    elif kind == "DEEPSPEED":
        layout["zero_stage"] = deepspeed.number("zero_stage", default=2)
        if deepspeed.get("offload_optimizer_device") == "cpu":
            workload["offload_optimizer"] = True
    stated = _commented(text)
    passes = stated.pop("passes", 0) or deepspeed.get("gradient_accumulation_steps")
    precision = str(values.get("mixed_precision", default="no"))
    workload["dtype"] = precision if precision in ("bf16", "fp16", "fp8") else "fp32"
    workload |= stated
    values.skip("compute_environment", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
    sharding.skip("fsdp_version", "fsdp_auto_wrap_policy", "fsdp_state_dict_type")
    not_priced = {
        "fsdp_config.fsdp_offload_params": sharding.flag("fsdp_offload_params"),
        "fsdp_config.fsdp_sharding_strategy": "HYBRID" in old or old in ("4", "5"),  # within a node alone
        f"parallelism_config.{_DEGREE}dp_replicate_size": replicas > 1 and layout.get("zero_stage", 0) > 0,
        "deepspeed_config.offload_param_device": deepspeed.get("offload_param_device", default="none") != "none",
        "deepspeed_config.offload_optimizer_device": deepspeed.get("offload_optimizer_device") == "nvme",
    }
    inner = [name for name, is_set in not_priced.items() if is_set]
    inner += [f"fsdp_config.{key}" for key in sharding.unread()]
    inner += [f"deepspeed_config.{key}" for key in deepspeed.unread()]
    inner += [f"parallelism_config.{key}" for key in degrees.unread()]
    return Reading(
        format="accelerate-yaml",
        workload=workload,
        layout=layout,
        passes=passes if isinstance(passes, int) else 1,  # "auto" is that of the trainer
        unread=(*values.unread(), *inner),
    )


def _commented(text: str) -> dict[str, int]:
    """Batch that our own files state in comments, since the training script sets it."""
    names = {
        "per_device_train_batch_size": "micro_batch_size",
        "gradient_accumulation_steps": "passes",
        "tokens per sequence": "seq_len",
    }
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.lstrip("# ").partition(": ")
        if line.startswith("#   ") and name in names and value.isdigit():
            found[names[name]] = int(value)
    return found


FORM = OutputFormat(
    name="accelerate-yaml",
    project="Accelerate",
    written_fields=frozenset(),
    fixed_values={},
    write=write_yaml,
    suffix=".yaml",
    run_values={
        **DATA_PARALLEL_ONLY,
        "zero_stage": (2, 3),
        "recompute": ("none", "full"),
    },
    unwritten=("recompute_layers",),  # the script has the optimizer, the loss and the data
)
