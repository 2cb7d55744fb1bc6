"""DeepSpeed: the JSON config that ``deepspeed.initialize`` and ``--deepspeed FILE`` take: batch, precision and ZeRO.

It says nothing of the model, which is the script's. Recomputation is the model's as well: with
``activation_checkpointing`` in the file, the script must checkpoint its layers.

Source: DeepSpeed configuration JSON (www.deepspeed.ai/docs/config-json), sections on batch size, ZeRO with
offload_optimizer, and activation checkpointing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shapewright.formats.form import Form, cannot_run, cannot_spread, refuse_other_runs, replicas_of

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload

_PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "fp32": {},
}


def write_json(config: TransformerConfig, workload: Workload | None, layout: ParallelLayout | None) -> str:
    """Write the config; optimiser and schedule are the reader's to add."""
    values: dict[str, Any] = {} if workload is None else _batch(config, workload, layout)
    values |= {} if layout is None else _spread(layout, offloads=workload is not None and workload.offload_optimizer)
    return json.dumps(values, indent=2) + "\n"


def _batch(config: TransformerConfig, workload: Workload, layout: ParallelLayout | None) -> dict[str, Any]:
    refuse_other_runs(FORM.name, workload, _PRECISIONS)
    per_pass = workload.micro_batch_size * replicas_of(layout)
    whole = workload.global_batch_size or per_pass
    values: dict[str, Any] = {
        "train_batch_size": whole,
        "train_micro_batch_size_per_gpu": workload.micro_batch_size,
        "gradient_accumulation_steps": whole // per_pass,
        **_PRECISIONS[workload.dtype],
    }
    if workload.recompute == "full":
        values["activation_checkpointing"] = {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "number_checkpoints": config.num_layers,
        }
    return values


def _spread(layout: ParallelLayout, *, offloads: bool) -> dict[str, Any]:
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        if getattr(layout, name) > 1:
            raise cannot_spread(
                FORM.name, f"{name}={getattr(layout, name)}", "the file knows replicas; other axes are the model's code"
            )
    if layout.zero_stage == 0:
        if offloads:
            raise cannot_run(FORM.name, "offload_optimizer without ZeRO", "its offload is that of stages 1 to 3")
        return {"zero_optimization": {"stage": 0}}
    return {
        "zero_optimization": {
            "stage": layout.zero_stage,
            # The step is predicted with communication behind computation.
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            **({"offload_optimizer": {"device": "cpu", "pin_memory": True}} if offloads else {}),
        }
    }


FORM = Form(
    name="deepspeed-json",
    project="DeepSpeed",
    written=frozenset(),
    fixed={},
    write=write_json,
    suffix=".json",
    runs={
        "tensor_parallel": (1,),
        "pipeline_parallel": (1,),
        "context_parallel": (1,),
        "expert_parallel": (1,),
        "recompute": ("none", "full"),
    },
    offloads=frozenset(("offload_optimizer",)),
)
