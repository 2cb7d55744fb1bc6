"""The Python face gives what the command line prints."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shapewright
from shapewright.app.api.parts import ScenarioParts
from shapewright.app.cli import main
from shapewright.app.report.outputs.check import check_output
from shapewright.app.report.outputs.predict import predict_output
from shapewright.core.errors import ConfigError
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.models.read import read_model
from shapewright.prediction.build import build_scenario

WORKLOAD = {"attention": "unfused", "dtype": "fp16", "micro_batch_size": 2}
FLAGS = ["--attention", "unfused", "--dtype", "fp16", "--micro-batch-size", "2"]


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """Return the JSON that the command line prints."""
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert isinstance(facts, dict)
    return facts


def test_predict_answer_equals_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """shapewright.predict and `shapewright predict --json` agree to the last digit."""
    scenario = build_scenario("gpt2", "a100-sxm-40gb", workload=WORKLOAD, layout={"data_parallel": 2})
    prediction = shapewright.predict("gpt2", device="a100-sxm-40gb", workload=WORKLOAD, layout={"data_parallel": 2})
    facts = printed(["predict", "gpt2", "--device", "a100-sxm-40gb", *FLAGS, "--dp", "2"], capsys)

    assert facts["source"] == "preset gpt2"
    assert facts["notes"] == []
    assert facts == json.loads(json.dumps(predict_output(prediction, scenario).to_json()))


def test_check_answer_equals_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """shapewright.check and `shapewright check --json` find the same."""
    report = shapewright.check("gpt2", device="a100-sxm-40gb", workload=WORKLOAD, ignore=["TC103"])
    facts = printed(["check", "gpt2", "--device", "a100-sxm-40gb", *FLAGS, "--ignore", "TC103"], capsys)

    assert report.findings
    scenario = build_scenario("gpt2", "a100-sxm-40gb", workload=WORKLOAD)
    assert facts == json.loads(json.dumps(check_output(report, scenario).to_json()))


# What each verb that prices is asked beyond a model and a device, and a number in its answer that prices decide.
PRICED: dict[str, tuple[dict[str, Any], Callable[[Any], float]]] = {
    "predict": ({}, lambda answer: answer.step_time_s),
    "check": ({}, lambda answer: answer.prediction.step_time_s),
    "search": ({"vary": ["vocab"]}, lambda answer: answer.baseline.prediction.step_time_s),
    "sweep": ({"axes": {"micro_batch_size": [1]}}, lambda answer: answer.rows[0].prediction.step_time_s),
    "fits": ({"workload": {"micro_batch_size": 64}}, lambda answer: answer.fit_options[0].step_time_s),
    "mfu": ({"seconds": 9.0, "num_devices": 1, "global_batch_size": 8}, lambda answer: answer.prediction.step_time_s),
    "plan": ({"num_devices": 8, "global_batch_size": 64}, lambda answer: answer.plans[0].expected_step_s),
    "design": (
        {"num_devices": 8, "num_parameters": 1_300_000_000, "train_tokens": 10**10, "keep": {"tp": 1}},
        lambda answer: answer.baseline.prediction.step_time_s,
    ),
    "serve_traffic": (
        {"arrivals": "1/s", "prompt_len": 100, "output_len": 20, "num_requests": 20, "num_layouts": 1},
        lambda answer: answer.runs[0].figures.end_to_end.mean_s,
    ),
    "serve_plan": (
        {"prompt_len": 512, "output_len": 64, "num_devices": 1},
        lambda answer: answer.points[0].requests_per_s,
    ),
    "compare": ({}, lambda answer: answer.rows[0].prediction.step_time_s),
}


@pytest.mark.parametrize("verb", sorted(PRICED))
def test_every_verb_can_price_by_physics_alone(verb: str) -> None:
    """``physics_only`` gives what a device that is marked so gives, and another number than without it."""
    fields, number_of = PRICED[verb]
    device = load_device("h100-sxm-80gb")

    def requested(chip: Device, **words: Any) -> float:
        chips = {"devices": [chip]} if verb == "compare" else {"device": chip}
        return number_of(getattr(shapewright, verb)("gpt3-1.3b", **chips, **fields, **words))

    assert requested(device, physics_only=True) == requested(device.without_residuals) != requested(device)


def test_every_function_is_covered() -> None:
    """Every function of the package that prices something is covered by the test above; a trace has no prices."""
    functions = {
        each for each in shapewright.__all__ if "app.api" in getattr(getattr(shapewright, each), "__module__", "")
    }
    assert set(PRICED) == functions - {"trace"}


def test_paths_and_overrides(tmp_path: Path) -> None:
    """A path object is a config; overrides change it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_embd": 768, "n_layer": 2, "n_head": 12}), encoding="utf-8")
    prediction = shapewright.predict(path, device="l40s", overrides={"num_layers": 5})

    assert (prediction.config.hidden_size, prediction.config.num_layers) == (768, 5)


@pytest.mark.parametrize("verb", sorted(PRICED))
def test_overrides_of_a_config_object(verb: str) -> None:
    """Every verb applies overrides to a TransformerConfig as to a preset, and rejects unknown fields."""
    fields, number_of = PRICED[verb]
    device = {"devices": ["h100-sxm-80gb"]} if verb == "compare" else {"device": "h100-sxm-80gb"}

    def ask(config: object, overrides: dict[str, Any]) -> float:
        return number_of(getattr(shapewright, verb)(config, **device, **fields, overrides=overrides))

    config = read_model("gpt3-1.3b").config
    assert ask(config, {"num_layers": 48}) == ask("gpt3-1.3b", {"num_layers": 48}) != ask(config, {})
    with pytest.raises(ConfigError, match="did you mean 'num_layers'"):
        ask(config, {"num_layer": 48})


def test_generated_configs_are_valid() -> None:
    """A dict is read as the config.json that it would be written to, without a file."""
    held = {"model_type": "gpt2", "n_embd": 768, "n_layer": 2, "n_head": 12}
    prediction = shapewright.predict(held, device="l40s", overrides={"num_layers": 5})

    assert (prediction.config.model_type, prediction.config.hidden_size, prediction.config.num_layers) == (
        "gpt2",
        768,
        5,
    )
    with pytest.raises(shapewright.ShapewrightError, match=r"the dict given.*hidden_size"):
        shapewright.predict({"num_hidden_layers": 2}, device="l40s")
    with pytest.raises(shapewright.ShapewrightError, match=r"cannot be read from int.*to_dict\(\)"):
        shapewright.predict(42, device="l40s")  # type: ignore[arg-type]


def test_numpys_numbers_are_numbers() -> None:
    """Fields, degrees and axes may come from an array; what comes out is as from Python's own numbers."""
    two = np.int64(2)
    fields = {
        "workload": {"micro_batch_size": two},
        "layout": {"tensor_parallel": two},
        "overrides": {"num_layers": two},
    }
    prediction = shapewright.predict("gpt2", device="l40s", **fields)
    swept = shapewright.sweep("gpt2", device="l40s", axes={"micro_batch_size": np.arange(1, 3)})

    shape = prediction.workload.micro_batch_size, prediction.layout.tensor_parallel, prediction.config.num_layers
    assert [(value, type(value)) for value in shape] == [(2, int)] * 3
    assert [type(row.values["micro_batch_size"]) for row in swept.rows] == [int, int]


def test_one_device_may_be_given_without_a_list() -> None:
    """A single name in place of a list is one name, not its letters."""
    assert [row.device.name for row in shapewright.compare("gpt2", devices="l40s").rows] == ["l40s"]


def test_every_user_error_is_one_class() -> None:
    """Whatever is wrong with the input, ShapewrightError catches it, and so does ValueError."""
    with pytest.raises(shapewright.ShapewrightError) as raised:
        shapewright.predict("gpt2", device="nonesuch")

    assert isinstance(raised.value, ValueError)


def test_unknown_field_is_one_line() -> None:
    """A field that a workload or layout does not have is named, with those that it has."""
    with pytest.raises(shapewright.ShapewrightError, match="sequence_length") as raised:
        shapewright.predict("gpt2", device="l40s", workload={"sequence_length": 5})
    assert "seq_len" in str(raised.value)
    with pytest.raises(shapewright.ShapewrightError, match="tp"):
        shapewright.predict("gpt2", device="l40s", layout={"tp": 2})


def test_search_answer_equals_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The search function and the search command give the same shapes."""
    with pytest.raises(SystemExit):
        main(["search", "gpt3-125m", "--device", "a100-sxm-80gb", "--vary", "vocab,ffn", "--tolerance", "5%", "--json"])
    printed = json.loads(capsys.readouterr().out)
    result = shapewright.search("gpt3-125m", device="a100-sxm-80gb", vary=("vocab", "ffn"), tolerance_fraction=0.05)

    assert result.candidates
    assert [shape["speedup"] for shape in printed["candidates"]] == [s.speedup.factor for s in result.candidates]


# A scenario that every function can take, and what each is asked about it.
SCENARIO_WORKLOAD = {"dtype": "fp16", "micro_batch_size": 2, "seq_len": 1024}


@pytest.mark.parametrize("verb", sorted(PRICED))
def test_every_verb_takes_a_scenario(verb: str) -> None:
    """A Scenario as first argument gives what its parts give, and needs no device."""
    fields, number_of = PRICED[verb]
    own = {name: value for name, value in fields.items() if name != "workload"}
    workload = {**SCENARIO_WORKLOAD, **fields.get("workload", {})}
    scenario = shapewright.build_scenario("gpt3-1.3b", "h100-sxm-80gb", workload=workload)
    devices = {"devices": ["h100-sxm-80gb"]} if verb == "compare" else {}
    parts = devices or {"device": "h100-sxm-80gb"}
    if verb in ("plan", "design", "serve_plan"):  # these choose the micro-batch themselves
        workload = {name: value for name, value in workload.items() if name in ("dtype", "seq_len")}
    if verb == "serve_plan":
        del workload["seq_len"]
    function = getattr(shapewright, verb)

    from_scenario = number_of(function(scenario, **devices, **own))
    assert from_scenario == number_of(function("gpt3-1.3b", **parts, **own, workload=workload))


def test_arguments_replace_parts_of_a_scenario() -> None:
    """Device, options and single fields given with a Scenario replace those that it has."""
    scenario = shapewright.build_scenario("gpt2", "h100-sxm-80gb", workload=SCENARIO_WORKLOAD)
    prediction = shapewright.predict(
        scenario,
        device="l40s",
        workload={"micro_batch_size": 3},
        layout={"data_parallel": 2},
        overrides={"num_layers": 5},
        uncalibrated=True,
    )

    assert prediction.device.name == "l40s"
    assert prediction.device.uncalibrated
    assert (prediction.workload.micro_batch_size, prediction.workload.dtype) == (3, "fp16")
    assert (prediction.layout.data_parallel, prediction.config.num_layers) == (2, 5)
    assert shapewright.predict(scenario).step_time_s == scenario.predict().step_time_s


def test_wrong_arguments_of_a_scenario_are_refused() -> None:
    """A missing device, an unknown keyword and an unknown field are named."""
    scenario = shapewright.build_scenario("gpt2", "l40s")
    with pytest.raises(shapewright.ShapewrightError, match="no device given"):
        shapewright.predict("gpt2")
    with pytest.raises(TypeError, match="worklod"):
        shapewright.predict(scenario, worklod={})  # type: ignore[call-arg]
    with pytest.raises(shapewright.ShapewrightError, match="sequence_length"):
        shapewright.predict(scenario, workload={"sequence_length": 5})


@pytest.mark.parametrize("verb", sorted(PRICED))
def test_signatures_list_the_shared_parameters(verb: str) -> None:
    """help() shows every part of a scenario, in the signature and with its meaning."""
    function = getattr(shapewright, verb)
    shown = inspect.signature(function).parameters

    assert set(ScenarioParts.__annotations__) <= set(shown)
    assert "parts" not in shown
    assert all(f"        {name}: " in (function.__doc__ or "") for name in shown)
