"""DeepSpeed: JSON config of ``deepspeed.initialize`` and ``--deepspeed FILE`` with batch, precision and ZeRO.

The file does not describe the model, which the script defines. With ``activation_checkpointing`` in the file, the
script must still checkpoint its layers itself.

Source: DeepSpeed configuration JSON (www.deepspeed.ai/docs/config-json), sections on batch size, ZeRO with
offload_optimizer, and activation checkpointing.
"""

from __future__ import annotations

import json
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

if TYPE_CHECKING:
    from shapewright.models import TransformerConfig
    from shapewright.workload import ParallelLayout, Workload

_PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "fp32": {},
}


def write_json(
    config: TransformerConfig,
    workload: Workload | None,
    layout: ParallelLayout | None,
    untimed: Untimed,
) -> str:
    """Write the config; optimizer and learning-rate schedule only where the length of the run is known."""
    values: dict[str, Any] = {} if workload is None else _workload_settings(config, workload, layout)
    values |= (
        {} if layout is None else _layout_settings(layout, offloads=workload is not None and workload.offload_optimizer)
    )
    if "num_steps" in untimed:
        rate = untimed["learning_rate"]
        betas = [untimed["beta1"], untimed["beta2"]]
        adam = {"lr": rate, "betas": betas, "weight_decay": untimed["weight_decay"]}
        cosine = {
            "total_num_steps": untimed["num_steps"],
            "warmup_num_steps": untimed["warmup_steps"],
            "cos_min_ratio": untimed["final_learning_rate"] / rate,
        }
        values |= {
            "optimizer": {"type": "AdamW", "params": adam},
            "scheduler": {"type": "WarmupCosineLR", "params": cosine},
            "gradient_clipping": untimed["gradient_clip"],
        }
    return json.dumps(values, indent=2) + "\n"


def _workload_settings(config: TransformerConfig, workload: Workload, layout: ParallelLayout | None) -> dict[str, Any]:
    check_training_workload(FORM.name, workload, _PRECISIONS)
    per_pass = workload.micro_batch_size * num_replicas(layout)
    global_batch_size = workload.global_batch_size or per_pass
    values: dict[str, Any] = {
        "train_batch_size": global_batch_size,
        "train_micro_batch_size_per_gpu": workload.micro_batch_size,
        "gradient_accumulation_steps": global_batch_size // per_pass,
        **_PRECISIONS[workload.dtype],
    }
    if workload.recompute == "full":
        values["activation_checkpointing"] = {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "number_checkpoints": config.num_layers,
        }
    return values


def _layout_settings(layout: ParallelLayout, *, offloads: bool) -> dict[str, Any]:
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        if getattr(layout, name) > 1:
            raise layout_error(
                FORM.name, f"{name}={getattr(layout, name)}", "only data parallelism is configured in the file"
            )
    if layout.zero_stage == 0:
        if offloads:
            raise workload_error(FORM.name, "offload_optimizer without ZeRO", "offload requires stage 1, 2 or 3")
        return {"zero_optimization": {"stage": 0}}
    return {
        "zero_optimization": {
            "stage": layout.zero_stage,
            # Predictions assume communication overlapped with computation.
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offloads else {}),
        }
    }


FORM = OutputFormat(
    name="deepspeed-json",
    project="DeepSpeed",
    written_fields=frozenset(),
    fixed_values={},
    write=write_json,
    suffix=".json",
    run_values={
        **DATA_PARALLEL_ONLY,
        "recompute": ("none", "full"),
    },
    offloads=frozenset(("offload_optimizer",)),
)
