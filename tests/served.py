"""Instances and plans of servers, for the tests of serving."""

from __future__ import annotations

from typing import Any

import shapewright
from shapewright.optimize.serving.plan import ServingPlan
from shapewright.optimize.serving.point import Instance
from shapewright.optimize.serving.request import ServingFormat, ServingRequest
from shapewright.prediction.build import build_scenario
from shapewright.workload.layout import ParallelLayout

BF16 = ServingFormat("bf16", "bf16", "bf16")


def make_instance(model: str = "llama-3-8b", request: ServingRequest | None = None, **degrees: int) -> Instance:
    """One copy of a model on H100s."""
    question = build_scenario(model, "h100-sxm-80gb", workload={"phase": "prefill"})
    return Instance(
        question.replace(layout=ParallelLayout(**degrees)),
        BF16,
        request or ServingRequest(prompt_len=1000, output_len=101),
    )


def plan(model: str = "llama-3-8b", device: str = "h100-sxm-80gb", **given: Any) -> ServingPlan:
    """A plan with short lengths, in one format."""
    return shapewright.serve_plan(
        model, device=device, **{"prompt_len": 1000, "output_len": 200, "formats": []} | given
    )
