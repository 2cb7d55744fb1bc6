"""Cost of output tokens: device prices in a serving plan, on the command line, in JSON and on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shapewright
from command_line import run as run_command
from shapewright.core.errors import WorkloadError

JOB = ["serve-plan", "llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "1000", "--osl", "200", "--formats", "none"]


def test_a_token_costs_the_time_of_all_devices_that_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """3.60 dollars an hour are a tenth of a cent a second: a unit of n devices pays n of them for its tokens."""
    code, out, _ = run_command([*JOB, "--usd-per-hour", "3.6", "--json"], capsys)
    facts = json.loads(out)
    points = [facts["best"], *facts["best_by_mode"].values(), *facts["front"]["disaggregated"]]

    assert code == 0
    assert facts["request"]["usd_per_hour"] == 3.6
    assert max(point["num_devices"] for point in points) > 1
    for point in points:
        assert point["usd_per_million_tokens"] * point["tokens_per_s"] == pytest.approx(1000 * point["num_devices"])


def test_costs_stand_where_a_price_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a price every table has a column of costs, however narrow, and so has the page; without one nothing has."""
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "plan.html"
    _, priced, _ = run_command([*JOB, "--usd-per-hour", "2.5", "--html", str(page)], capsys)
    _, free, _ = run_command(JOB, capsys)
    _, out, _ = run_command([*JOB, "--json"], capsys)
    cost = shapewright.serve_plan(
        "llama-3-8b", device="h100-sxm-80gb", prompt_len=1000, output_len=200, formats=[], usd_per_hour=2.5
    )
    best = cost.best()

    assert best is not None
    assert priced.count("USD/1M tokens") == 2
    assert f"{best.usd_per_million_tokens(2.5):.4g}" in priced
    assert "USD/1M tokens" in page.read_text(encoding="utf-8")
    assert "USD" not in free
    assert json.loads(out)["best"]["usd_per_million_tokens"] is None


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf"), "2.5", True])
def test_invalid_prices_are_errors(price: object) -> None:
    """A price is a number above 0, in Python too."""
    with pytest.raises(WorkloadError, match=r"usd_per_hour=.* must be a number from"):
        shapewright.serve_plan(
            "llama-3-8b",
            device="h100-sxm-80gb",
            prompt_len=10,
            output_len=10,
            usd_per_hour=price,
        )


def test_cards_without_a_network_serve_alone() -> None:
    """Replicas need no network; layouts that do are left out with a note, and a model that needs one is refused."""
    plan = shapewright.serve_plan("llama-3.1-8b", device="rtx-4090", prompt_len=1000, output_len=200, num_devices=2)

    assert {point.layout.num_devices for point in plan.points} == {1}
    assert sum("layouts over several nodes are left out" in note for note in plan.notes) == 1
    with pytest.raises(WorkloadError, match="needs at least 2 x rtx-4090, which cannot be priced"):
        shapewright.serve_plan(
            "llama-2-13b", device="rtx-4090", prompt_len=1000, output_len=200, num_devices=2, formats=()
        )
