"""Plans in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapewright.layout import ParallelLayout
    from shapewright.plan.findings import Choice


def describe_choice(choice: Choice) -> str:
    """A plan in one phrase: ``tp 8, pp 4, dp 16, zero 1, micro-batch 2, full recompute``."""
    return describe_layout(choice.layout, choice.chosen_workload)


def describe_layout(layout: ParallelLayout, workload: Mapping[str, Any]) -> str:
    """Degrees above 1, sharding, schedule, micro-batch, recomputation and what the host keeps in one phrase.

    Args:
        layout: How the model is spread.
        workload: Fields of the workload that a plan chooses.
    """
    degrees = {
        "tp": layout.tensor_parallel,
        "pp": layout.pipeline_parallel,
        "vpp": layout.virtual_pipeline,
        "dp": layout.data_parallel,
        "cp": layout.context_parallel,
        "ep": layout.expert_parallel,
    }
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    parts += [f"etp {layout.tensor_degree_of_experts}"] * layout.cuts_experts_apart
    parts += [f"zero {layout.zero_stage}"] * (layout.zero_stage > 0)
    parts += ["no sp"] * (layout.tensor_parallel > 1 and not layout.sequence_parallel)
    parts += [layout.pipeline_schedule] * (layout.pipeline_schedule != "1f1b")
    parts.append(f"micro-batch {workload['micro_batch_size']}")
    parts += [f"{workload['recompute']} recompute"] * (workload["recompute"] != "none")
    parts += ["activations on host"] * workload["offload_activations"]
    parts += ["optimizer on host"] * workload["offload_optimizer"]
    return ", ".join(parts)
