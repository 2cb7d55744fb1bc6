"""Plans in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapewright.layout import ParallelLayout
    from shapewright.plan.engine import Choice


def describe_choice(choice: Choice) -> str:
    """A plan in one phrase: ``tp 8, pp 4, dp 16, zero 1, micro-batch 2, full recompute``."""
    return describe_layout(choice.layout, choice.frame.micro_batch_size, choice.recompute)


def describe_layout(layout: ParallelLayout, micro_batch_size: int, recompute: str) -> str:
    """Degrees above 1, sharding, schedule, micro-batch and recomputation in one phrase."""
    degrees = {
        "tp": layout.tensor_parallel,
        "pp": layout.pipeline_parallel,
        "vpp": layout.virtual_pipeline,
        "dp": layout.data_parallel,
        "cp": layout.context_parallel,
        "ep": layout.expert_parallel,
    }
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    parts += [f"zero {layout.zero_stage}"] * (layout.zero_stage > 0)
    parts += ["no sp"] * (layout.tensor_parallel > 1 and not layout.sequence_parallel)
    parts += [layout.pipeline_schedule] * (layout.pipeline_schedule != "1f1b")
    parts.append(f"micro-batch {micro_batch_size}")
    parts += [f"{recompute} recompute"] * (recompute != "none")
    return ", ".join(parts)
