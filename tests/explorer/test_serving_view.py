"""The Serving view: what the API answers is the command's plan, and the page shows it with launch lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

import shapewright
from shapewright.app.explorer.views.serving import LOAD_FRACTIONS

ADDRESS = "/api/v1/serving"
JOB = {"preset": "llama-3-8b", "device": "h100-sxm-80gb"}


def test_the_answer_is_the_command_s(client: TestClient) -> None:
    """Recommended point, instances for the load and launch lines are those of serve-plan; figures have their points."""
    body = {
        "job": JOB,
        "prompt_len": 500,
        "output_len": 100,
        "num_devices": 4,
        "requests_per_s": 8.0,
        "engine": "sglang",
    }
    found = client.post(ADDRESS, json=body).json()
    given: dict[str, Any] = {"prompt_len": 500, "output_len": 100, "num_devices": 4, "requests_per_s": 8.0}
    plan = shapewright.serve_plan("llama-3-8b", device="h100-sxm-80gb", server="sglang-0.5", formats=[], **given)
    expected = plan.recommended

    assert expected is not None
    assert found["recommended"]["tpot_s"] == pytest.approx(expected.point.tpot.middle_s)
    assert found["recommended"]["instances"] in found["text"]["verdict"]
    assert found["fleet"]["num_spare_instances"] == 1
    assert found["launch"]["engine"] == "sglang"
    assert "sglang.launch_server" in found["launch"]["text"]
    assert found["launch_problem"] == ""
    figures = found["figures"]
    assert len(figures["front"]["texts"]["bf16"]) == len(found["front_by_format"]["bf16"])
    assert all(len(texts) == len(LOAD_FRACTIONS) for texts in figures["ttft"]["texts"].values())
    assert set(figures["limits"]["texts"]) == {"compute", "memory", "communication", "latency"}


def test_latency_rises_with_load_and_over_quantiles(client: TestClient) -> None:
    """The curves do not fall with the load at their end, and 99 % is never below the median."""
    found = client.post(ADDRESS, json={"job": JOB, "num_devices": 1}).json()
    for name in ("ttft", "tpot"):
        median, tail = (
            next(one for one in found["figures"][name]["option"]["series"] if one["name"] == label)["data"]
            for label in ("median", "99 %")
        )
        assert median[-1][1] > median[0][1]
        assert all(high[1] >= middle[1] for middle, high in zip(median, tail, strict=True))


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"job": {**JOB, "preset": "bert-base"}, "prompt_len": 100}, 422, "needs a decoder"),
        ({"prompt_len": 0}, 422, ""),
        ({"engine": "tgi"}, 422, ""),
        ({"requests_per_s": 1e6, "num_devices": 2}, 422, "more than 2 devices carry"),
    ],
)
def test_bad_questions_are_problems(client: TestClient, changes: dict[str, Any], status: int, words: str) -> None:
    """Bounds and the command's errors are answered with 422."""
    answer = client.post(ADDRESS, json={"job": JOB, **changes})
    assert answer.status_code == status
    assert words in answer.json()["detail"]


def test_what_cannot_be_launched_is_still_planned(client: TestClient) -> None:
    """A model that the engine does not support has a plan and the reason; limits that cannot be met have no curves."""
    unknown = client.post(
        ADDRESS, json={"job": {**JOB, "preset": "gpt2"}, "prompt_len": 100, "engine": "trtllm"}
    ).json()
    late = client.post(ADDRESS, json={"job": JOB, "tpot_limit_s": 1e-6, "num_devices": 1}).json()

    assert "does not know model_type='gpt2'" in unknown["launch_problem"]
    assert unknown["recommended"] is not None
    assert late["recommended"] is None
    assert late["figures"]["ttft"] == {"problem": "no point keeps the limits"}


def test_the_page_shows_front_latency_and_launch_lines(open_page: Callable[..., Any]) -> None:
    """The card draws its figures; another engine and a load change lines and verdict, on a phone too."""
    from page_tools import NARROW, expect, see

    page = open_page("preset=llama-3-8b&device=h100-sxm-80gb", viewport=NARROW)
    card = see(page, "serving")
    expect(page.locator("#serving-launch")).to_contain_text("vllm serve meta-llama/Meta-Llama-3-8B", timeout=60_000)
    assert card.locator("canvas").count() == 4
    page.select_option("#serving-engine", "trtllm")
    expect(page.locator("#serving-launch")).to_contain_text("trtllm-serve", timeout=60_000)
    page.fill("#serving-requests_per_s", "20")
    page.locator("#serving-requests_per_s").blur()
    expect(card).to_contain_text("1 spare x", timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
