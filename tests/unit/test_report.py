"""Text tables and JSON of results: contents and width."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

import shapewright
from shapewright.app.cli import main
from shapewright.app.report.catalogue import model_columns, print_device, print_devices
from shapewright.app.report.check import print_check
from shapewright.app.report.columns import Column, fit
from shapewright.app.report.explain import explain_operation, print_explanations
from shapewright.app.report.outputs.catalogue import device_output, devices_output
from shapewright.app.report.outputs.check import report_output
from shapewright.app.report.outputs.predict import predict_output
from shapewright.app.report.predict import operation_columns, print_prediction
from shapewright.lint.check import check_scenario
from shapewright.models.read import list_presets
from shapewright.prediction.build import build_scenario
from shapewright.prediction.scenario import Scenario

TOP_KEYS = {
    "schema_version",
    "config",
    "device",
    "workload",
    "layout",
    "parameters",
    "step_time_s",
    "tokens_per_s_per_device",
    "model_flops_per_s",
    "mfu",
    "hfu",
    "layer_forward_time_s",
    "memory",
    "operations",
    "calibration",
    "warnings",
}
OPERATION_KEYS = {
    "name",
    "kind",
    "m",
    "n",
    "k",
    "batch",
    "layout",
    "repeats",
    "time_s",
    "flops",
    "bytes",
    "tile",
    "num_waves",
    "tile_efficiency",
    "wave_efficiency",
    "alignment",
    "bound_by",
}


@pytest.fixture(scope="module", name="question")
def make_question() -> Scenario:
    """A mixture of experts over sixteen devices: every kind of operation is in it."""
    layout = {"tensor_parallel": 2, "data_parallel": 4, "pipeline_parallel": 2, "expert_parallel": 4}
    return build_scenario("mixtral-8x7b", "h100-sxm-80gb", layout=layout)


def paper(num_characters: int) -> tuple[io.StringIO, Console]:
    """A console without colour that remembers."""
    text = io.StringIO()
    return text, Console(file=text, width=num_characters, color_system=None, markup=False, highlight=False)


def test_prediction_json_has_the_documented_keys(question: Scenario) -> None:
    """Keys that scripts rely on are there for every kind of operation, and the whole is strict JSON."""
    facts = predict_output(question.predict(), question).to_json()

    assert set(facts) >= TOP_KEYS
    assert all(set(entry) >= OPERATION_KEYS for entry in facts["operations"])
    assert {entry["kind"] for entry in facts["operations"]} == {
        "gemm",
        "grouped_gemm",
        "attention",
        "pointwise",
        "collective",
    }
    assert json.loads(json.dumps(facts, allow_nan=False))["parameters"]["total"] == 46_702_792_704
    assert facts["memory"]["total_bytes"] > 0
    assert facts["calibration"].startswith("gemm/h100-sxm-80gb/")


def test_operation_times_add_up_to_the_step(question: Scenario) -> None:
    """On one device without a pipeline the exposed times of all operations are the step."""
    one_device = build_scenario("gpt2", question.device)
    facts = predict_output(one_device.predict(), one_device).to_json()

    assert sum(entry["total_time_s"] for entry in facts["operations"]) == pytest.approx(facts["step_time_s"])


@pytest.mark.parametrize("num_characters", [100, 120, 160])
def test_prediction_fits_the_terminal(question: Scenario, num_characters: int) -> None:
    """Rows of the operations table are as wide as the terminal at most, and no value is cut."""
    text, console = paper(num_characters)
    print_prediction(predict_output(question.predict(), question), console)
    table = text.getvalue().partition("operation ")[2].partition("more operations")[0].splitlines()
    table = [line for line in table if not line.startswith("not shown at ")]

    assert len(table) == 22
    assert max(map(len, table[:-1])) <= num_characters
    assert all(line.endswith(("compute", "memory", "latency", "communication")) for line in table[1:-1])


def test_rates_stay_below_the_peak() -> None:
    """A fused attention's rate is of the arithmetic that it does: no percentage of the peak is above 100."""
    text, console = paper(200)
    scenario = build_scenario("llama-3-8b", "groq-lpu-v1", workload={"dtype": "fp16"})
    print_prediction(predict_output(scenario.predict(), scenario), console, top=None)
    lines = text.getvalue().splitlines()
    header = next(line for line in lines if line.startswith("operation "))
    end = header.index("of peak") + len("of peak")
    shares = [line[end - 7 : end].removesuffix("%").strip() for line in lines[lines.index(header) + 1 :]]
    shown = [float(share) for share in shares if share.replace(".", "", 1).isdigit()]

    assert len(shown) > 10
    assert max(shown) <= 100.0


def test_rates_are_fractions_of_the_peak_of_their_format() -> None:
    """In a step of fp8, the logits are a bf16 GEMM: 715 TFLOP/s are 72 % of 989, not 36 % of the 1,979 of fp8."""
    scenario = build_scenario("llama-3-8b", "h100-sxm-80gb", workload={"dtype": "fp8"})
    columns = {column.name: column.cells for column in operation_columns(predict_output(scenario.predict(), scenario))}
    rows = zip(columns["operation"], columns["TFLOP/s"], columns["of peak"], strict=True)
    shares = {name: (float(rate), float(share.removesuffix(" %"))) for name, rate, share in rows if rate}

    for name, peak in (("logits", 989.4), ("attention.fused", 989.4), ("mlp.up", 1979.0)):
        rate, percent = shares[name]
        assert percent == pytest.approx(100.0 * rate / peak, abs=0.1)


def test_columns_leave_in_order() -> None:
    """The least important column leaves first; a smaller one may stay in its place."""
    columns = [
        Column("name", cells=("gpt2",)),
        Column("why", cells=("because of its alignment",), rank=1),
        Column("waves", cells=("12",), rank=2),
    ]

    assert [column.name for column in fit(columns, 80)] == ["name", "why", "waves"]
    assert [column.name for column in fit(columns, 30)] == ["name", "why"]
    assert [column.name for column in fit(columns, 12)] == ["name", "waves"]
    assert [column.name for column in fit(columns, 1)] == ["name"]


def test_check_repeats_no_warning(question: Scenario) -> None:
    """A finding is not repeated by a note, nor its suggestion by its first line."""
    requested = build_scenario("gpt3-2.7b", "a100-sxm-40gb", workload={"attention": "unfused"})
    report = check_scenario(
        Scenario.of(requested.config, requested.device, requested.workload, question.layout.__class__())
    )
    text, console = paper(160)
    print_check(report_output(report), console)
    printed = text.getvalue()

    assert printed.count("does not fit") == 1
    assert printed.count("use num_heads=20 (head_dim 128)") == 1
    assert printed.count("pad it to 50304") == 1


def test_ignored_reason_is_no_all_clear() -> None:
    """A step that cannot run is not reported as fine if the rule that explains it is ignored."""
    requested = build_scenario("gpt2", "h100-sxm-80gb", layout={"tensor_parallel": 64})
    report = check_scenario(
        Scenario.of(requested.config, requested.device, requested.workload, requested.layout),
        ignore=["PL", "WQ", "TC", "ME"],
    )
    text, console = paper(160)
    print_check(report_output(report), console)

    assert report.findings == ()
    assert "cannot run: tensor_parallel=64 must divide num_heads=12" in text.getvalue()
    assert "no findings" not in text.getvalue()


def test_explanation_gives_every_reason(question: Scenario) -> None:
    """A GEMM's explanation has formula, terms, tile, waves, alignment, record and the code that priced it."""
    prediction = build_scenario("gpt2", question.device).predict()
    output = explain_operation(prediction, "logits")
    text, console = paper(160)
    print_explanations(output, console)

    (logits,) = output.operations
    for word in (
        "formula",
        "compute",
        "memory",
        "roofline",
        "tile",
        "waves",
        "alignment",
        "record",
        "shapewright.pricing",
    ):
        assert word in text.getvalue()
    assert logits.record.provenance["command"]


@pytest.mark.parametrize(
    ("preset", "job"),
    [
        ("llama-3-8b", {}),  # attention in training
        ("llama-3-8b", {"workload": {"dtype": "fp32"}}),  # GEMMs and elementwise operations in fp32
        ("deepseek-v3", {"workload": {"phase": "prefill"}, "layout": {"tensor_parallel": 8}}),  # latent attention
    ],
)
def test_an_explanation_has_the_record_of_the_price(preset: str, job: dict[str, Any]) -> None:
    """Formats, passes and layers with records of their own are not said to rest on the usual one."""
    prediction = shapewright.predict(preset, device="h100-sxm-80gb", **job)
    priced_by = {entry.operation.name: entry.price.calibration for entry in prediction.operations}

    for name, source in priced_by.items():
        found = {one.record.id for one in explain_operation(prediction, name).operations if one.name == name}
        assert found == {source.record_id}


def test_device_page_names_sources(question: Scenario) -> None:
    """Every number of a device is shown with its kind of source."""
    text, console = paper(160)
    print_device(device_output(question.device), console)
    lines = text.getvalue().splitlines()

    for name in question.device.numbers:
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert question.device.provenance[name]["kind"] in line


def test_lists_name_everything() -> None:
    """Each device and preset has its row."""
    text, console = paper(160)
    print_devices(devices_output(), console)
    models = model_columns(None)

    assert "h100-sxm-80gb " in text.getvalue()
    assert len(models[0].cells) == len(list_presets()) >= 60


def test_costs_that_differ_from_savings_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """A suggestion that sets the MLP width too saves far more than its finding costs; alone, both are equal."""
    several = ["--hidden-size", "3000", "--intermediate-size", "11007", "--num-heads", "30", "--num-layers", "2"]
    words = "savings: of all that the line sets"
    with pytest.raises(SystemExit):
        main(["check", *several, "--vocab-size", "32000", "--device", "h100-sxm-80gb"])
    assert words in capsys.readouterr().out

    with pytest.raises(SystemExit):
        main(["check", "gpt3-2.7b", "--attention", "unfused", "--device", "a100-sxm-40gb"])
    out = capsys.readouterr().out
    assert "costs" in out
    assert words not in out
