"""DeepSpeed: JSON config of ``deepspeed.initialize`` and ``--deepspeed FILE`` with batch, precision and ZeRO.

The file does not describe the model, which the script defines. With ``activation_checkpointing`` in the file, the
script must still checkpoint its layers itself.

Source: DeepSpeed configuration JSON (www.deepspeed.ai/docs/config-json), sections on batch size, ZeRO with
offload_optimizer, and activation checkpointing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from shapewright.app.formats.reading import Reading, Values, given, parse_yaml, read_replicas, read_zero
from shapewright.core.texts import with_fields

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

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
            raise workload_error(
                FORM.name, with_fields("{offload_optimizer} without ZeRO"), "offload requires stage 1, 2 or 3"
            )
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


_AUTO = "auto"  # left to the trainer that reads the file


def read_deepspeed(text: str) -> Reading:
    """Read a config of DeepSpeed; values that are ``auto`` are those of the trainer."""
    file = {name: value for name, value in parse_yaml(text).items() if value != _AUTO}
    values = Values(file)
    micro_batch = values.number("train_micro_batch_size_per_gpu")
    stated_passes = values.number("gradient_accumulation_steps")
    passes = stated_passes or 1
    batch = values.number("train_batch_size")
    zero = values.get("zero_optimization") or {}
    places = {name: _offload_place(zero, name) for name in ("offload_optimizer", "offload_param")}
    priced = {"offload_optimizer": ("none", "cpu"), "offload_param": ("none",)}
    not_priced = [f"zero_optimization.{name}" for name, place in places.items() if place not in priced[name]]
    is_enabled = {name: bool((values.get(name) or {}).get("enabled")) for name in ("bf16", "fp16")}
    values.skip("bf16", "fp16")
    workload = {
        "phase": "train",
        "micro_batch_size": micro_batch,
        "global_batch_size": batch,
        "dtype": "bf16" if is_enabled["bf16"] else "fp16" if is_enabled["fp16"] else "fp32",
        "recompute": "full" if values.get("activation_checkpointing") else None,
        "offload_optimizer": True if places["offload_optimizer"] == "cpu" else None,
    }
    layout = read_zero(zero) | read_replicas(given(workload), passes)
    return Reading(
        format="deepspeed-json",
        workload=given(workload),
        layout=layout,
        passes=passes,
        guesses_replicas=not stated_passes and "data_parallel" in layout,
        unread=(*values.unread(), *not_priced),
    )


def _offload_place(zero: object, name: str) -> str:
    """Where a section of ``zero_optimization`` offloads to: ``cpu``, ``nvme`` or ``none``."""
    section = zero.get(name) if isinstance(zero, Mapping) else None
    return str(section.get("device", "none")) if isinstance(section, Mapping) else "none"


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
    unwritten=("recompute_layers",),  # the script has the optimizer, the loss and the data
)
