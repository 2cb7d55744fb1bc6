"""The API returns exactly the numbers and error messages of the command line."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from explorer_jobs import GPT3
from fastapi.testclient import TestClient

from shapewright.app.cli import main
from shapewright.app.explorer.problems import PROBLEM_TYPE

GPT3_FLAGS = ["gpt3-2.7b", "--device", "a100-sxm-40gb", "--dtype", "fp16", "--attention", "unfused"]
DECODE: dict[str, Any] = {"preset": "llama-3-8b", "device": "h100-sxm-80gb", "workload": {"phase": "decode"}}
SPREAD: dict[str, Any] = {
    "preset": "llama-3-70b",
    "device": "h100-sxm-80gb",
    "layout": {"tensor_parallel": 8, "pipeline_parallel": 4},
    "workload": {"global_batch_size": 64},
}
QUESTIONS = ("predict", "check", "memory", "breakdown", "heat-map", "config", "operations.csv")


def ask(client: TestClient, path: str, **body: Any) -> Any:
    """Post a request and expect success."""
    answer = client.post(f"/api/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json() if "json" in answer.headers["content-type"] else answer.text


def say(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command line prints."""
    with pytest.raises(SystemExit):
        main(arguments)
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["predict", "check", "memory"])
@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, []),
        ({"software": "fsdp-2023"}, ["--software", "fsdp-2023"]),
        ({"uncalibrated": True}, ["--uncalibrated"]),
        (
            {"node_size": 4, "network_gbit_per_s": 100, "layout": {"data_parallel": 8}},
            ["--node-size", "4", "--network-gbit-per-s", "100", "--dp", "8"],
        ),
        ({"workload": {**GPT3["workload"], "optimizer": "muon"}}, ["--optimizer", "muon"]),
    ],
    ids=["usual", "software", "uncalibrated", "nodes", "optimizer"],
)
def test_answers_are_those_of_the_commands(
    command: str, fields: dict[str, Any], flags: list[str], client: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every key of --json has the same value in the API's answer."""
    expected = json.loads(say([command, *GPT3_FLAGS, *flags, "--json"], capsys))
    found = ask(client, command, job={**GPT3, **fields})

    assert {key: found[key] for key in expected} == expected


def test_text_is_that_of_the_command(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    """Title, verdict and every cell of the operations table are part of the output of predict --all."""
    out = say(["predict", *GPT3_FLAGS, "--all"], capsys)
    text = ask(client, "predict", job=GPT3)["text"]
    lines = [line.split() for line in out.splitlines()]

    assert text["title"] in out
    assert all(value in out for value in text["verdict"].values())
    assert all([word for cell in row for word in cell.split()] in lines for row in text["operations"]["rows"])


def test_findings_read_as_the_command_prints_them(
    client: TestClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Message, cost and suggestions of every finding, and every better shape."""
    monkeypatch.setenv("COLUMNS", "240")  # wide enough for every column
    out = say(["check", *GPT3_FLAGS], capsys)
    text = ask(client, "check", job=GPT3)["text"]

    assert text["findings"]
    for words in text["findings"]:
        assert all(part in out for part in (words["message"], words["cost"], *words["suggestions"]))
    assert all(cell in out for row in text["better_shapes"]["rows"] for cell in row)


@pytest.mark.parametrize("uncalibrated", [False, True])
def test_comparison_is_that_of_the_command(
    uncalibrated: bool, client: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Comparing devices gives the numbers of the command, with and without their own calibration."""
    names = ["a100-sxm-40gb", "h100-sxm-80gb"]
    flags = [flag for flag in GPT3_FLAGS if flag not in ("--device", "a100-sxm-40gb")]
    flags += ["--uncalibrated"] if uncalibrated else []
    expected = json.loads(say(["compare", *flags, "--devices", ",".join(names), "--json"], capsys))
    found = ask(client, "compare", job={**GPT3, "uncalibrated": uncalibrated}, devices=names)

    assert {key: found[key] for key in expected} == expected


def test_explanation_is_that_of_the_command(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    """Explaining an operation gives the facts of the command."""
    explained = json.loads(say(["predict", *GPT3_FLAGS, "--explain", "logits", "--json"], capsys))

    assert {key: ask(client, "explain", job=GPT3, operation="logits")[key] for key in explained} == explained


@pytest.mark.parametrize("job", [GPT3, DECODE, SPREAD], ids=["train", "decode", "spread"])
@pytest.mark.parametrize("path", QUESTIONS)
def test_every_scenario_has_a_result(path: str, job: dict[str, Any], client: TestClient) -> None:
    """Training, decode and multi-device layouts work in every view; a figure that cannot be drawn gives a reason."""
    answer = ask(client, path, job=job)
    assert answer
    if path == "breakdown":
        has_problem = {name for name, one in answer.items() if isinstance(one, dict) and "problem" in one}
        assert has_problem == {GPT3["preset"]: {"pipeline"}, "llama-3-8b": {"waterfall", "pipeline"}}.get(
            job["preset"], set()
        )


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        ({"pipeline_schedule": "gpipe"}, {"forward", "backward"}),
        ({"pipeline_schedule": "zero-bubble"}, {"forward", "backward", "weight gradients"}),
        (
            {"virtual_pipeline": 2},
            {"forward, chunk 0", "forward, chunk 1", "backward, chunk 0", "backward, chunk 1"},
        ),
    ],
    ids=["gpipe", "zero-bubble", "interleaved"],
)
def test_every_schedule_is_drawn(layout: dict[str, Any], kinds: set[str], client: TestClient) -> None:
    """The pipeline's figure shows each kind of pass that the schedule has, of every micro-batch on every stage."""
    stages, passes = 4, 8
    job = {
        **GPT3,
        "workload": {"micro_batch_size": 1, "global_batch_size": passes},
        "layout": {"pipeline_parallel": stages, **layout},
    }
    texts = ask(client, "breakdown", job=job)["pipeline"]["texts"]

    assert {kind: len(words) for kind, words in texts.items()} == dict.fromkeys(kinds, stages * passes)


def test_too_long_a_pipeline_is_not_simulated(client: TestClient) -> None:
    """More passes than a figure can show are not simulated; the other figures are present."""
    job = {**GPT3, "overrides": {"num_layers": 1024}, "workload": {"micro_batch_size": 1, "global_batch_size": 1024}}
    answer = ask(client, "breakdown", job={**job, "layout": {"pipeline_parallel": 256}})

    assert "256 stages of 1 chunks are too many to draw" in answer["pipeline"]["problem"]
    assert "option" in answer["layer"]


def test_a_pasted_config_is_read_like_a_preset(client: TestClient) -> None:
    """The config of a preset, sent as an object, gives the preset's step; only its name is its own."""
    config = client.get("/api/v1/models/gpt3-2.7b").json()["config"]
    pasted = ask(client, "predict", job={**GPT3, "preset": None, "config": config})
    named = ask(client, "predict", job=GPT3)

    assert pasted["source"] == "pasted config"
    assert (pasted["step_time_s"], pasted["operations"]) == (named["step_time_s"], named["operations"])


def test_fields_alone_describe_a_model(client: TestClient) -> None:
    """A model can be described by fields, without preset or config."""
    fields = {"hidden_size": 1024, "num_layers": 4, "num_heads": 16, "vocab_size": 32000}
    answer = ask(client, "predict", job={"overrides": fields, "device": "h100-sxm-80gb"})

    assert answer["config"]["head_dim"] == 64


def test_config_is_written_in_the_format_it_was_read(client: TestClient) -> None:
    """Changed fields are written under the keys that the config uses."""
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "unknown": "kept"}
    job = {"config": config, "overrides": {"vocab_size": 50304, "num_heads": 6}, "device": "h100-sxm-80gb"}

    assert ask(client, "config", job=job)["config"] == {**config, "vocab_size": 50304, "n_head": 6}


def test_operations_come_as_csv(client: TestClient) -> None:
    """One row for each operation, with the numbers of the prediction."""
    rows = list(csv.DictReader(io.StringIO(ask(client, "operations.csv", job=GPT3))))
    expected = ask(client, "predict", job=GPT3)["operations"]

    assert [float(row["time_s"]) for row in rows] == [one["time_s"] for one in expected]


def test_changes_against_a_baseline_are_reported(client: TestClient) -> None:
    """Against a baseline, a better vocabulary size is reported as a shorter step."""
    after = {**GPT3, "overrides": {"vocab_size": 50304}}
    answer = ask(client, "predict", job=after, baseline=GPT3)
    before_s, after_s = ask(client, "predict", job=GPT3)["step_time_s"], answer["step_time_s"]
    moved = {one["name"]: one for one in answer["moved"]}

    assert moved["step"]["change_fraction"] == pytest.approx(after_s / before_s - 1.0)
    assert moved["step"]["is_better"]
    assert moved["step"]["text"].startswith("-")


def test_tiles_are_those_of_the_prediction(client: TestClient) -> None:
    """The grid has the tiles and waves that predict reports, and its last wave is what is left."""
    grid = ask(client, "tiles", job=GPT3, operation="logits", **{"pass": "forward"})
    one = next(op for op in ask(client, "predict", job=GPT3)["operations"] if op["name"] == "logits")

    assert (grid["num_tiles"], grid["num_waves"]) == (one["num_tiles"], one["num_waves"])
    assert grid["num_rows"] * grid["num_columns"] * grid["num_copies"] == grid["num_tiles"]
    assert (grid["num_waves"] - 1) * grid["num_slots"] + grid["num_last"] == grid["num_tiles"]


def test_the_report_is_a_file(client: TestClient) -> None:
    """The report is one page for the disk: no browser shows it under this address."""
    answer = client.post("/api/v1/report.html", json={"job": GPT3})

    assert answer.status_code == 200
    assert answer.headers["content-disposition"].startswith("attachment")
    assert "gpt3-2.7b on NVIDIA A100 SXM4 40 GB" in answer.text


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"preset": "gpt3-2.7b", "device": "h1000"}, "unknown device 'h1000'"),
        ({"preset": "gpt-9", "device": "h100-sxm-80gb"}, "no preset 'gpt-9'"),
        ({"preset": "../../etc/passwd", "device": "h100-sxm-80gb"}, "no preset '../../etc/passwd'"),
        ({"preset": "/etc/passwd", "device": "h100-sxm-80gb"}, "no preset '/etc/passwd'"),
        ({"preset": "openai-community/gpt2", "device": "h100-sxm-80gb"}, "no preset 'openai-community/gpt2'"),
        ({"preset": "gpt2", "device": "/etc/passwd"}, "unknown device '/etc/passwd'"),
        ({"preset": "gpt2", "device": "../my.toml"}, "unknown device '../my.toml'"),
        ({"preset": "gpt2", "config": {}, "device": "h100-sxm-80gb"}, "preset and config are both given"),
        ({"config": {"model_type": "gpt2", "n_embd": -1}, "device": "h100-sxm-80gb"}, "in 'pasted config': "),
        ({**GPT3, "workload": {"seq_len": 0}}, "seq_len=0 must be an integer from 1 to 2**40"),
        ({**GPT3, "layout": {"tensor_parallel": 7}}, "tensor_parallel=7 must divide num_heads=32"),
        (
            {**GPT3, "overrides": {"num_layers": 1024}, "layout": {"pipeline_parallel": 1024}},
            "more than the limit of 512 stages",
        ),
        (
            {**GPT3, "overrides": {"num_layers": 512, "attention_windows": list(range(1, 513))}},
            "gives 512 kinds of layers; at most 32",
        ),
        ({"device": "h100-sxm-80gb"}, "a model without a config needs hidden_size"),
    ],
)
def test_refusals_are_the_command_lines(job: dict[str, Any], words: str, client: TestClient) -> None:
    """Invalid input gives a problem with the library's message; no input is used as a path or a hub id."""
    answer = client.post("/api/v1/predict", json={"job": job})

    assert answer.status_code == 422
    assert answer.headers["content-type"] == PROBLEM_TYPE
    assert words in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"job": {}},
        {"job": {**GPT3, "workload": {"seq_len": "many"}}},
        {"job": {**GPT3, "overrides": {"hidden_size": 2**60}}},
        {"job": {**GPT3, "overrides": {"no_such_field": 1}}},
        {"job": {**GPT3, "device": "x" * 500}},
    ],
)
def test_malformed_requests_are_refused(body: dict[str, Any], client: TestClient) -> None:
    """A request of another form is a problem in one line that names the place."""
    answer = client.post("/api/v1/predict", json=body)

    assert answer.status_code == 422
    assert answer.json()["title"] == "MalformedRequest"
    assert "\n" not in answer.json()["detail"]


def test_catalogue_lists_everything(client: TestClient) -> None:
    """Presets, devices and rules are those of the commands, and every field of the form has its words."""
    about = client.get("/api/v1").json()

    assert len(about["models"]) == len(client.get("/api/v1/models").json()["models"]) > 100
    assert len(about["devices"]) == len(client.get("/api/v1/devices").json()["devices"]) > 50
    assert {rule["code"] for rule in client.get("/api/v1/rules").json()["rules"]} >= {"TC101", "ME101"}
    assert all(field["help"] for fields in about["fields"].values() for field in fields)
    assert client.get("/api/v1/models/no-such").status_code == 404


def test_each_row_has_the_place_of_its_operation_in_an_explanation(client: TestClient) -> None:
    """Attention with a window and without has one name, and each row is explained by its own time."""
    job = {"preset": "gpt-neo-1.3b", "device": "h100-sxm-80gb"}
    operations = ask(client, "predict", job=job)["text"]["operations"]
    column = [each["name"] for each in operations["columns"]].index("time")
    explained = ask(client, "explain", job=job, operation="attention.fused")["text"]
    rows = [
        (explained[key["explained"]]["predicted"].partition(",")[0], row[column])
        for key, row in zip(operations["keys"], operations["rows"], strict=True)
        if key["name"] == "attention.fused"
    ]

    assert len({shown for _, shown in rows}) == 2
    assert all(own == shown for own, shown in rows)
