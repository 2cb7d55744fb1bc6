"""Hugging Face Accelerate: the YAML that ``accelerate launch --config_file FILE`` takes: PyTorch FSDP, version 2.

It says nothing of the model and of the batch, which are the script's; the batch stands in comments at its top.

Source: Accelerate, guides of FSDP and of FSDP 1 against FSDP 2 (huggingface.co/docs/accelerate), for its versions from
1.6 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.formats.form import Form, cannot_run, cannot_spread, refuse_other_runs, replicas_of

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload

_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp32": "no"}


def write_yaml(config: TransformerConfig, workload: Workload | None, layout: ParallelLayout | None) -> str:  # noqa: ARG001
    """Write the config; machines and their addresses are the reader's to fill in."""
    lines = [] if workload is None else _batch(workload, layout)
    lines += ["compute_environment: LOCAL_MACHINE"]
    if workload is not None:
        lines.append(f"mixed_precision: '{_PRECISIONS[workload.dtype]}'")
    if layout is not None:
        if layout.num_devices > 1:
            lines.append(
                "# All machines together; on several, give num_machines, machine_rank and main_process_ip too."
            )
        lines += [f"num_processes: {layout.num_devices}", *_spread(layout, workload)]
    return "\n".join(lines) + "\n"


def _batch(workload: Workload, layout: ParallelLayout | None) -> list[str]:
    refuse_other_runs(FORM.name, workload, _PRECISIONS)
    per_pass = workload.micro_batch_size * replicas_of(layout)
    return [
        "# Arguments of the training script:",
        f"#   per_device_train_batch_size: {workload.micro_batch_size}",
        f"#   gradient_accumulation_steps: {(workload.global_batch_size or per_pass) // per_pass}",
        f"#   tokens of a sequence: {workload.seq_len}",
    ]


def _spread(layout: ParallelLayout, workload: Workload | None) -> list[str]:
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        if getattr(layout, name) > 1:
            raise cannot_spread(FORM.name, f"{name}={getattr(layout, name)}", "it spreads by FSDP alone")
    if layout.zero_stage == 1:
        raise cannot_spread(FORM.name, "zero_stage=1", "FSDP shards gradients too: give 0, 2 or 3")
    recomputes = workload is not None and workload.recompute == "full"
    if layout.zero_stage == 0:
        if recomputes:
            raise cannot_run(FORM.name, "recompute='full' without FSDP", "checkpointing is the script's there")
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


FORM = Form(
    name="accelerate-yaml",
    project="Accelerate",
    written=frozenset(),
    fixed={},
    write=write_yaml,
    suffix=".yaml",
    runs={
        "tensor_parallel": (1,),
        "pipeline_parallel": (1,),
        "context_parallel": (1,),
        "expert_parallel": (1,),
        "zero_stage": (2, 3),
        "recompute": ("none", "full"),
    },
)
