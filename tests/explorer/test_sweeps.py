"""Sweeps: the crest view's points are predictions, its cliffs are where waves end, and clicks lead to better shapes."""

from __future__ import annotations

from typing import Any

import pytest
from explorer_jobs import GPT3
from fastapi.testclient import TestClient

import shapewright
from shapewright.app.figures.heat_maps import predict_head_grid
from shapewright.app.figures.sweep_values import SWEPT_FIELDS, sweep_field, values_around
from shapewright.prediction.build import build_scenario


def swept(field: str, **more: Any) -> Any:
    """A sweep of GPT-3 2.7B on A100."""
    scenario = build_scenario("gpt3-2.7b", "a100-sxm-40gb", workload={"dtype": "fp16", "attention": "unfused"})
    return sweep_field(scenario, field, **more)


def test_points_are_predictions() -> None:
    """Pricing many values together changes no digit of any of them."""
    found = swept("intermediate_size", values=[10239, 10240, 10304])

    for point in found.points:
        alone = shapewright.predict(
            "gpt3-2.7b",
            device="a100-sxm-40gb",
            workload={"dtype": "fp16", "attention": "unfused"},
            overrides={"intermediate_size": point.value},
        )
        assert point.prediction.step_time_s == alone.step_time_s


def test_odd_values_fall_into_lower_classes() -> None:
    """10239 is aligned to 2 bytes and slower than its neighbour, which is aligned to 128."""
    odd, even = swept("intermediate_size", values=[10239, 10240]).points

    assert (odd.alignment_bytes, even.alignment_bytes) == (2, 128)
    assert odd.prediction.model_flops_per_s < even.prediction.model_flops_per_s


def test_waves_end_at_the_edges_of_the_watched_gemm() -> None:
    """Between the values of a wave end the waves of mlp.up grow, and nowhere else among aligned values."""
    found = swept("intermediate_size", values=[*range(9600, 11201, 64)])
    waves = {point.value: point.num_waves for point in found.points}

    assert found.wave_gemm == "mlp.up"
    assert found.wave_ends == tuple(value for value in list(waves)[:-1] if waves[value + 64] > waves[value])
    assert found.wave_ends


@pytest.mark.parametrize("field", SWEPT_FIELDS)
def test_every_field_can_be_swept(field: str, client: TestClient) -> None:
    """Every field has a curve with the current value marked, or a reason why there is none."""
    preset = "mixtral-8x7b" if "expert" in field or "moe" in field else "gpt3-2.7b"
    job = {"preset": preset, "device": "h100-sxm-80gb"}
    if field == "context_len":
        job |= {"workload": {"phase": "decode"}}
    answer = client.post("/api/v1/sweep", json={"job": job, "field": field})

    assert answer.status_code in (200, 422)
    if answer.status_code == 200:
        facts = answer.json()
        assert facts["current"] in [point["value"] for point in facts["points"]]
        assert {one["value"] for one in facts["local_maxima"]} <= {point["value"] for point in facts["points"]}
    else:
        assert field == "shared_expert_intermediate_size"  # Mixtral has none


def test_a_window_stays_while_the_value_moves_a_little() -> None:
    """Neighbouring values look at the same grid, so that the picture does not run away under the slider."""
    config = build_scenario("gpt3-2.7b", "a100-sxm-40gb").config

    assert values_around(config, "intermediate_size", 10240) == values_around(config, "intermediate_size", 10304)


def test_local_maxima_exceed_their_neighbors() -> None:
    """No neighbor of a crest has a higher model rate."""
    found = swept("intermediate_size")
    rates = {point.value: point.prediction.model_flops_per_s for point in found.points}
    values = list(rates)
    for crest in found.local_maxima:
        place = values.index(crest)
        assert rates[crest] == max(rates[value] for value in values[max(0, place - 2) : place + 3])


def test_heat_map_contains_the_current_shape(client: TestClient) -> None:
    """The outlined cell is the step that predict gives; cells where heads do not divide the width are empty."""
    scenario = build_scenario("gpt3-2.7b", "a100-sxm-40gb", workload={"dtype": "fp16", "attention": "unfused"})
    grid = predict_head_grid(scenario)
    row, column = grid.current
    here = grid.predictions[row][column]

    assert here is not None
    assert here.step_time_s == scenario.predict().step_time_s
    for count, cells in zip(grid.heads, grid.predictions, strict=True):
        for width, cell in zip(grid.widths, cells, strict=True):
            assert cell is None or (width % count == 0 and cell.config.num_heads == count)
    assert any(cell["changes"] for cell in client.post("/api/v1/heat-map", json={"job": GPT3}).json()["cells"])


def test_the_interval_is_that_of_the_difference(client: TestClient) -> None:
    """It is closed at the current value, and the verdict names the neighbor that is larger and faster."""
    found = client.post("/api/v1/sweep", json={"job": GPT3, "field": "vocab_size", "measure": "step"}).json()
    points = {point["value"]: point for point in found["points"]}
    here, padded = points[50257], points[50304]

    assert here["speedup_low"] == here["speedup"] == here["speedup_high"] == 1.0
    assert padded["speedup_low"] < padded["speedup"] == pytest.approx(here["step_time_s"] / padded["step_time_s"])
    assert padded["probability_faster"] > 0.99
    assert found["verdict"]["value"] == 50304
    assert "50,304 is larger and still takes " in found["verdict"]["text"]
    saved_percent = 100.0 * (1.0 - padded["step_time_s"] / here["step_time_s"])
    assert f" {saved_percent:.3g} % less time (" in found["verdict"]["text"]


def test_larger_steps_are_compared_per_token(client: TestClient) -> None:
    """A larger micro-batch takes a longer step, so that it is the time of a token that it saves."""
    job = {"preset": "llama-3.2-1b", "device": "h100-sxm-80gb"}
    found = client.post("/api/v1/sweep", json={"job": job, "field": "micro_batch_size"}).json()
    best = found["verdict"]["value"]
    times = {point["value"]: point["step_time_s"] / point["value"] for point in found["points"]}
    saved = f"{100.0 * (1.0 - times[best] / times[4]):.3g} % less time per token ("
    (crest,) = (one for one in found["local_maxima"] if one["value"] == best)
    split = client.post("/api/v1/sweep", json={"job": job, "field": "tensor_parallel"}).json()

    assert saved in found["verdict"]["text"]
    assert " % time per token, " in crest["gain_text"]
    assert split["verdict"]["text"] == "tensor parallel 1 is a good value: no value is faster per token near it."


def test_a_hidden_size_is_swept_with_the_same_heads() -> None:
    """Sizes that the heads do not divide are points too, and the one next to the current value is a cliff."""
    found = swept("hidden_size")
    shapes = {point.value: point.prediction.config for point in found.points}

    assert {(config.num_heads, config.head_dim) for config in shapes.values()} == {(32, 80)}
    assert found.current + 1 in shapes
