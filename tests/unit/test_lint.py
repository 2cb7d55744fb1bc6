"""check_scenario: findings and their costs, reports, fixes, and the example of the paper."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from shapewright.app.integrations.sarif import to_sarif
from shapewright.app.report.check import finding_words
from shapewright.app.report.outputs.check import check_output
from shapewright.core.errors import LayoutError, UnknownRuleError
from shapewright.hardware.loader import load_device
from shapewright.lint.better_shapes import find_better_shapes
from shapewright.lint.check import CheckReport, check_scenario, exact_changes, exit_code, fix_config
from shapewright.lint.evaluate import evaluate, run_rules
from shapewright.lint.example import example_scenario
from shapewright.lint.rule import Finding, get_rule, list_rules
from shapewright.lint.rules.waves import list_big_gemms
from shapewright.models.read import read_model
from shapewright.prediction.build import build_scenario
from shapewright.prediction.predict import predict
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

A100 = load_device("a100-sxm-40gb")
GPT3_2_7B = read_model("gpt3-2.7b").config


def check_gpt3(**changes: Any) -> CheckReport:
    """Check GPT-3 2.7B as published on an A100, training in fp16 with four sequences of 2048."""
    workload = Workload(**{"micro_batch_size": 4, "seq_len": 2048, "dtype": "fp16", **changes})
    return check_scenario(Scenario.of(GPT3_2_7B, A100, workload))


@pytest.fixture(scope="module")
def report() -> CheckReport:
    """GPT-3 2.7B on an A100 with fused attention."""
    return check_gpt3()


@pytest.mark.parametrize("attention", ["unfused", "flash"])
@pytest.mark.parametrize("phase", ["train", "prefill"])
def test_gpt3_2_7b_should_use_20_heads(attention: str, phase: str) -> None:
    """The example of the paper: 20 heads of 128 instead of 32 of 80 is the best change of heads."""
    found = check_gpt3(attention=attention, phase=phase)
    heads = [finding for finding in found.findings if finding.code == "TC103"]
    best = heads[0].suggestions[0]

    assert dict(best.changes)["num_heads"] == 20
    assert (best.kind, best.parameters_change_fraction) == ("retrain", 0.0)
    of_heads = next(shape for shape in found.better_shapes if shape.changes["num_heads"] != 32)
    assert of_heads.changes["num_heads"] == 20
    assert found.better_shapes[0].speedup > 1.0


def test_gpt3_2_7b_should_pad_its_vocabulary(report: CheckReport) -> None:
    """50257 is odd: padding to 50304 is an exact fix, and the message names the logit GEMM."""
    finding = next(finding for finding in report.findings if finding.code == "TC101")

    assert finding.message.startswith("vocab_size=50257 is not a multiple of 64 (fp16 on a100-sxm-40gb): logits")
    assert [(suggestion.kind, dict(suggestion.changes)) for suggestion in finding.suggestions] == [
        ("exact", {"vocab_size": 50304})
    ]


def test_findings_are_sorted_by_cost(report: CheckReport) -> None:
    """Findings that prevent the step from running come first, then the costliest."""
    stops = [finding.severity == "error" and finding.cost_s is None for finding in report.findings]
    costs = [finding.cost_s or 0.0 for finding in report.findings if finding.cost_s or finding.severity != "error"]

    assert stops == sorted(stops, reverse=True)
    assert costs == sorted(costs, reverse=True)


def test_costs_add_up_to_what_the_combined_fix_saves(report: CheckReport) -> None:
    """The shares of the findings are the total; the total is the step without the fix minus the step with it."""
    fix, prediction = report.combined_fix, report.prediction
    assert fix is not None
    assert prediction is not None
    scenario = Scenario.of(GPT3_2_7B, A100, Workload(micro_batch_size=4, seq_len=2048, dtype="fp16"))
    after = scenario.replace(**fix.changes).predict()

    assert set(fix.codes) == {finding.code for finding in report.findings if finding.cost_s is not None}
    assert sum(finding.cost_fraction or 0.0 for finding in report.findings) == pytest.approx(fix.gain_fraction)
    assert (fix.step_time_before_s, fix.step_time_s) == (prediction.step_time_s, after.step_time_s)
    assert fix.step_time_s < fix.step_time_before_s


def test_a_combined_fix_holds_the_layout_that_it_needs() -> None:
    """Where the layout cannot run, the fix sets one that can; savings per parameter are named as such."""
    scenario = build_scenario("gpt3-2.7b", "h100-sxm-80gb", layout={"tensor_parallel": 3})
    found = check_scenario(scenario, search_shapes=False)
    assert found.combined_fix is not None
    assert found.combined_fix.changes["tensor_parallel"] == 2
    assert found.combined_fix.title.startswith("tensor_parallel=2, ")
    fixed = scenario.replace(**found.combined_fix.changes)
    assert fixed.is_possible
    sizes = {"hidden_size": 3000, "intermediate_size": 11007, "head_dim": 100, "num_heads": 30, "num_kv_heads": 10}
    scenario = build_scenario("llama-3-8b", "h100-sxm-80gb", overrides=sizes)
    found = check_scenario(scenario, search_shapes=False)
    wide = next(finding for finding in found.findings if finding.code == "TC102")
    (line, *_) = finding_words(wide)["suggestions"]
    suggestion = wide.suggestions[0]
    changed = scenario.replace(**suggestion.changes)
    saved = 1.0 - changed.predict().step_time_s / scenario.predict().step_time_s
    assert " per parameter, +" in line
    assert suggestion.predicted_gain_fraction == pytest.approx(
        1.0 - (1.0 - saved) / (1.0 + suggestion.parameters_change_fraction), abs=1e-3
    )


def test_a_fix_that_pays_only_with_another_is_part_of_both() -> None:
    """At an odd hidden size padding saves nothing, so the vocabulary is reported with the width that it needs."""
    config = dataclasses.replace(
        read_model("llama-3-8b").config, hidden_size=4097, embedding_size=4097, vocab_size=32003
    )
    scenario = Scenario.of(config, load_device("h100-sxm-80gb"), Workload(micro_batch_size=4, seq_len=2048))
    found = check_scenario(scenario, search_shapes=False)
    padded, of_width = (
        next(finding for finding in found.findings if finding.code == code) for code in ("TC101", "TC102")
    )

    assert padded.only_with == {"hidden_size": 4096}
    assert "only with hidden_size=4096; pad it to 32064" in padded.message
    assert not of_width.only_with
    assert found.combined_fix is not None
    assert found.combined_fix.changes["vocab_size"] == 32064
    assert found.combined_fix.gain_fraction == pytest.approx(
        sum(finding.cost_fraction or 0.0 for finding in (padded, of_width))
    )
    assert "vocab_size" not in exact_changes(found)


def test_ignored_findings_are_counted(report: CheckReport) -> None:
    """Rules are ignored by code, name or family, and the report counts their findings."""
    workload = Workload(micro_batch_size=4, seq_len=2048, dtype="fp16")
    found = check_scenario(
        Scenario.of(GPT3_2_7B, A100, workload), ignore=("vocab-not-aligned", "ME"), search_shapes=False
    )
    left_out = [finding for finding in report.findings if finding.code == "TC101" or finding.code.startswith("ME")]

    assert found.num_suppressed == len(left_out) > 0
    assert [finding.code for finding in found.findings] == [
        finding.code for finding in report.findings if finding not in left_out
    ]


def test_ignoring_an_unknown_rule_is_an_error() -> None:
    """A misspelt rule raises an error."""
    with pytest.raises(UnknownRuleError, match="TC999"):
        check_scenario(Scenario.of(GPT3_2_7B, A100, Workload(dtype="fp16")), ignore=["TC999"])


def test_a_step_that_cannot_run_is_a_finding() -> None:
    """Heads that do not divide give a report with suggestions and without a prediction."""
    found = check_scenario(Scenario.of(GPT3_2_7B, A100, Workload(dtype="fp16"), ParallelLayout(tensor_parallel=6)))

    assert found.prediction is None
    assert "tensor_parallel=6" in found.refusal.text
    assert found.better_shapes == ()
    assert [finding.code for finding in found.findings if finding.severity == "error"] == ["PL101", "PL102", "PL109"]
    assert exit_code(found, "error") == 1


def test_an_error_that_no_rule_explains_is_raised() -> None:
    """Errors that no rule explains are raised unchanged."""
    with pytest.raises(LayoutError, match="expert_parallel"):
        check_scenario(
            Scenario.of(GPT3_2_7B, A100, Workload(dtype="fp16"), ParallelLayout(data_parallel=2, expert_parallel=2))
        )


def test_severity_is_limited_where_a_default_decides() -> None:
    """A bubble that follows from the default batch is at most an info."""
    given = example_scenario(pipeline_parallel=4, micro_batch_size=4, global_batch_size=16)
    assumed = example_scenario(pipeline_parallel=4, micro_batch_size=4)
    severities = []
    for scenario in (given, assumed):
        (violation,) = get_rule("PL107").check(scenario)
        finding = evaluate(get_rule("PL107"), violation, scenario)
        assert finding is not None
        severities.append(finding.severity)

    assert severities == ["error", "info"]


def test_cost_of_uneven_stages_is_limited() -> None:
    """33 layers on 4 stages waste a twelfth of the time; the gain of removing the bubble is not part of the cost."""
    scenario = example_scenario(num_layers=33, pipeline_parallel=4, global_batch_size=16, device="a100-sxm-80gb")
    (violation,) = get_rule("PL106").check(scenario)
    finding = evaluate(get_rule("PL106"), violation, scenario)

    assert finding is not None
    assert finding.cost_fraction == pytest.approx(1.0 - 33 / 36)
    assert (finding.suggestions[0].predicted_gain_fraction or 0.0) > 0.2
    assert "slower" not in finding.message


def test_fixes_of_a_scenario_that_does_not_fit_need_no_more_memory() -> None:
    """Where memory is exceeded, fixes of layout and batch fit or need no more memory; fixes of the shape stay."""
    scenario = example_scenario(num_layers=48, tensor_parallel=2, data_parallel=2, micro_batch_size=8, vocab_size=50257)
    found = run_rules(scenario)
    runtime = [made for finding in found for made in finding.suggestions if made.kind == "runtime"]

    assert not scenario.fits
    assert runtime
    for made in runtime:
        after = scenario.try_replace(made.changes)
        assert after is not None
        assert after.predict().memory.total_bytes <= scenario.predict().memory.total_bytes
    assert "TC101" in {finding.code for finding in found}


def test_sharded_weights_are_not_suggested_in_a_pipeline() -> None:
    """ZeRO stage 3 is suggested without a pipeline only, as in plan and memory."""
    stages = {}
    for pipeline_parallel in (1, 2):
        scenario = example_scenario(
            num_layers=64, pipeline_parallel=pipeline_parallel, data_parallel=8, micro_batch_size=1
        )
        (violation,) = get_rule("ME101").check(scenario)
        stages[pipeline_parallel] = {fix.changes.get("zero_stage") for fix in violation.fixes}

    assert 3 in stages[1]
    assert 3 not in stages[2]


def test_smaller_heads_are_not_suggested() -> None:
    """Heads of 80 become heads of 128, not of 64, which the rule on small heads would report."""
    scenario = example_scenario(num_heads=32, attention="flash")
    (violation,) = get_rule("TC103").check(scenario)
    finding = evaluate(get_rule("TC103"), violation, scenario)

    assert finding is not None
    assert {made.changes["head_dim"] for made in finding.suggestions} == {128}


@pytest.mark.parametrize(
    ("fail_on", "severities", "expected"),
    [
        ("warning", ["info"], 0),
        ("warning", ["info", "warning"], 1),
        ("error", ["warning"], 0),
        ("info", ["info"], 1),
        ("never", ["error"], 0),
        ("info", [], 0),
    ],
)
def test_exit_code(fail_on: str, severities: list[str], expected: int) -> None:
    """The exit code is 1 for findings of at least the given severity."""
    findings = tuple(
        Finding(code="TC101", name="x", severity=severity, field="f", actual=1, wanted="", subject="f", problem="")
        for severity in severities
    )

    assert exit_code(CheckReport(prediction=None, findings=findings), fail_on) == expected


def test_fix_takes_exact_suggestions_only(report: CheckReport) -> None:
    """The vocabulary is padded and the heads stay unchanged."""
    fixed = fix_config(GPT3_2_7B, report)

    assert exact_changes(report) == {"vocab_size": 50304}
    assert (fixed.vocab_size, fixed.num_heads) == (50304, GPT3_2_7B.num_heads)
    assert fix_config(fixed, CheckReport(prediction=None, findings=())) is fixed


def test_better_shapes_keep_the_parameters(report: CheckReport) -> None:
    """Shapes are sorted by sure gain, within 2 % of the parameters, and describe their changes."""
    gains = [shape.gain_low_fraction for shape in report.better_shapes]

    assert gains == sorted(gains, reverse=True)
    assert all(abs(shape.parameters_change_fraction) <= 0.02 for shape in report.better_shapes)
    # With fused attention fewer, wider layers come as near as wider heads: half a percent decides which is first.
    wider_heads = "num_heads 32 -> 20, head_dim 80 -> 128, vocab_size 50257 -> 50304"
    assert any(wider_heads in shape.title for shape in report.better_shapes[:2])


def test_better_shapes_of_a_mixture_of_experts_change_expert_widths() -> None:
    """In a mixture of experts the expert width is varied."""
    scenario = example_scenario(num_layers=4, num_experts=8, num_experts_per_token=2, moe_intermediate_size=1366)

    assert any("moe_intermediate_size" in shape.changes for shape in find_better_shapes(scenario))


def count_predictions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets an entry for each prediction of a scenario."""
    made: list[Any] = []

    def counted(*args: Any, **options: Any) -> Any:
        made.append(options)
        return predict(*args, **options)

    monkeypatch.setattr("shapewright.prediction.scenario.predict", counted)
    return made


def test_a_check_needs_few_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole check needs at most a few dozen predictions."""
    made = count_predictions(monkeypatch)
    scenario = example_scenario(num_heads=32, vocab_size=50257, attention="unfused")
    for rule in list_rules():
        list(rule.check(scenario))
    find_better_shapes(scenario)

    assert 1 < len(made) <= 40


@pytest.mark.parametrize("name", ["tpu-v6e", "gaudi3", "mi300x", "groq-lpu-v1", "cerebras-wse-2", "rtx-4090", "t4"])
def test_devices_without_tiles_or_links_are_checked_too(name: str) -> None:
    """On devices priced by the roofline, rules on tiles do not fire and nothing fails."""
    device = load_device(name)
    dtype = "bf16" if "bf16" in device.dense_flops_per_s else "fp16"
    attention = "unfused" if name == "t4" else "flash"
    found = check_scenario(Scenario.of(GPT3_2_7B, device, Workload(dtype=dtype, attention=attention)))

    assert found.prediction is not None
    if device.roofline_only:
        assert not {"WQ102", "WQ103", "TC101"} & {finding.code for finding in found.findings}


def test_equal_scenarios_are_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed copies share a cache of predictions, so a change back needs no new prediction."""
    made = count_predictions(monkeypatch)
    scenario = example_scenario()
    wider = scenario.try_replace({"vocab_size": 51200})
    assert wider is not None
    back = wider.try_replace({"vocab_size": 50304})
    assert back is not None

    assert back.predict() is scenario.predict()
    assert len(made) == 1


def test_contradictory_changes_give_none() -> None:
    """try_replace returns None for values that config, workload or layout refuse."""
    scenario = example_scenario()

    assert scenario.try_replace({"num_kv_heads": 3}) is None
    assert scenario.try_replace({"micro_batch_size": 0}) is None
    assert scenario.try_replace({"virtual_pipeline": 2}) is None


def test_json_is_plain_and_whole(report: CheckReport) -> None:
    """The JSON form survives a round trip and holds every finding, suggestion and shape."""
    written = check_output(report, example_scenario()).to_json()

    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert written["schema_version"] == 1
    assert [finding["code"] for finding in written["findings"]] == [finding.code for finding in report.findings]
    assert {"cost_s", "cost_fraction", "suggestions", "actual", "wanted", "field"} <= written["findings"][0].keys()
    assert len(written["better_shapes"]) == len(report.better_shapes)


def test_sarif_has_the_required_fields(report: CheckReport) -> None:
    """Required properties, resolvable rule indices, allowed levels, and every rule with its help."""
    log = json.loads(json.dumps(to_sarif(report, "my model/config.json"), allow_nan=False))
    (run,) = log["runs"]
    driver = run["tool"]["driver"]

    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    assert driver["name"] == "shapewright"
    assert [rule["id"] for rule in driver["rules"]] == [rule.code for rule in list_rules()]
    assert all(rule["shortDescription"]["text"] and rule["help"]["markdown"] for rule in driver["rules"])
    assert len(run["results"]) == len(report.findings) > 0
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "my%20model/config.json"
        assert location["logicalLocations"][0]["fullyQualifiedName"]


def test_findings_of_the_job_come_before_those_of_one_that_can_run() -> None:
    """Seven devices of a node of eight are a finding of the layout as given, not of the four that are assumed."""
    report = check_scenario(build_scenario("llama-3-70b", device="h100-sxm-80gb", layout={"tensor_parallel": 7}))
    assumed = [finding.is_assumed for finding in report.findings]

    assert assumed == sorted(assumed)
    assert {finding.code: finding.is_assumed for finding in report.findings}["PL108"] is False
    assert assumed[-1]


@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_a_block_of_latents_is_as_large_as_a_state(tensor_parallel: int) -> None:
    """Kimi Linear caches a latent of 512 + 64 elements a token, complete on each device: 1,152 bytes.

    A state of its other layers on t devices: 32 heads of 128 x 128 in fp32 and the last 3 inputs of 3 convolutions over
    4,096 channels, over t.
    """
    workload = {"phase": "decode", "context_len": 1000, "kv_block_tokens": 16}
    scenario = build_scenario(
        "kimi-linear-48b-a3b", "h200-sxm-141gb", workload=workload, layout={"tensor_parallel": tensor_parallel}
    )
    (violation,) = get_rule("SV103").check(scenario)
    state_bytes = (32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2) / tensor_parallel

    tokens = {1: 1888, 4: 480}[tensor_parallel]
    assert tokens - 16 < state_bytes / 1152 <= tokens
    assert violation.fixes[0].changes == {"kv_block_tokens": tokens}


def test_a_layer_with_attention_and_a_scan_has_blocks_and_a_state() -> None:
    """Falcon-H1 7B: 24 heads of 128 with states of 256 in fp32, the last 3 inputs of 3,072 + 2 x 256 channels.

    Its attention caches 2 heads of 128: 1,024 bytes a token in bf16, so a state is as large as 3,093 tokens.
    """
    workload = {"phase": "decode", "context_len": 1000, "kv_block_tokens": 16}
    (violation,) = get_rule("SV103").check(build_scenario("falcon-h1-7b", "h200-sxm-141gb", workload=workload))

    assert 3088 < (24 * 128 * 256 * 4 + 3 * (3072 + 2 * 256) * 2) / 1024 <= 3104
    assert violation.fixes[0].changes == {"kv_block_tokens": 3104}


@pytest.mark.parametrize(("tensor_parallel", "padded"), [(1, 50304), (8, 50688)])
def test_logits_of_fp8_steps_need_alignment_in_16_bits(tensor_parallel: int, padded: int) -> None:
    """Logits run in bf16 beside fp8 GEMMs: rows of 128 bytes on each device are 64 elements, not 128."""
    workload = {"dtype": "fp8", "micro_batch_size": 1, "seq_len": 4096}
    layout = {"tensor_parallel": tensor_parallel}
    scenario = build_scenario(
        "llama-3-8b", "h100-sxm-80gb", overrides={"vocab_size": 50257}, workload=workload, layout=layout
    )
    (violation,) = get_rule("TC101").check(scenario)

    assert violation.fixes[0].changes == {"vocab_size": padded}
    assert padded % (64 * tensor_parallel) == 0 < padded - 50257 <= 64 * tensor_parallel
    assert f"is not a multiple of {64 * tensor_parallel} (bf16 on h100-sxm-80gb" in violation.problem
    changes = [shape.changes for shape in find_better_shapes(scenario, limit=50)]
    assert {each["vocab_size"] for each in changes if "vocab_size" in each} == {padded}


def test_other_heads_of_one_width_do_not_align_a_shard() -> None:
    """2,560 elements of heads over 8 devices are 320 each, however many heads share them; 3,072 are 384 = 3 x 128."""
    workload = {"phase": "prefill", "dtype": "fp8", "micro_batch_size": 2, "seq_len": 2048}
    scenario = build_scenario("opt-2.7b", "h100-sxm-80gb", workload=workload, layout={"tensor_parallel": 8})
    (violation,) = (each for each in get_rule("PL104").check(scenario) if each.field == "config.num_heads")
    changed = [{"num_heads": 32, "head_dim": 80, **fix.changes} for fix in violation.fixes]

    assert "= 320 on one device" in violation.problem
    assert changed
    assert all(each["num_heads"] * each["head_dim"] // 8 % 128 == 0 for each in changed)


@pytest.mark.parametrize(("num_layers", "lost"), [(33, 3 / 36), (34, 2 / 36), (30, 2 / 32)])
def test_uneven_stages_cost_no_more_than_the_layers_that_they_lack(num_layers: int, lost: float) -> None:
    """33 layers on 4 stages take as long as 36; one stage instead, which is suggested, saves the bubble as well."""
    changes = {"num_layers": num_layers, "pipeline_parallel": 4, "global_batch_size": 16, "micro_batch_size": 1}
    scenario = example_scenario(device="a100-sxm-80gb", **changes)
    report = check_scenario(scenario, search_shapes=False)
    (finding,) = (each for each in report.findings if each.code == "PL106")

    assert finding.suggestions[0].changes["pipeline_parallel"] == 1
    assert 0.0 < (finding.cost_fraction or 0.0) <= lost * (1.0 + 1e-9)
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    ("workload", "redundant"),
    [
        ({"phase": "decode", "micro_batch_size": 64, "context_len": 4000}, ("k", "v", "fused")),
        ({"phase": "prefill", "micro_batch_size": 1, "seq_len": 4096}, ("k", "v")),
    ],
)
def test_replicated_keys_cost_the_work_that_is_done_twice(workload: dict[str, Any], redundant: tuple[str, ...]) -> None:
    """4 key-value heads on 8 devices: half of the projections, and in decode of reading the cache, is redundant.

    The suggested degree of 4 saves 40 %, most of it all-reduces, which are no cost of replication.
    """
    layout = {"tensor_parallel": 8}
    report = check_scenario(
        build_scenario("qwen3-30b-a3b", "h100-sxm-80gb", workload=workload, layout=layout), search_shapes=False
    )
    (finding,) = (each for each in report.findings if each.code == "PL103")
    assert report.prediction is not None
    of_keys_s = sum(
        each.total_time_s
        for each in report.prediction.operations
        if each.operation.name in {f"attention.{role}" for role in redundant}
    )

    assert finding.suggestions[0].changes == {"tensor_parallel": 4, "data_parallel": 2}
    assert 0.0 < (finding.cost_s or 0.0) <= 0.5 * of_keys_s * (1.0 + 1e-9)


def test_a_gate_of_attention_is_no_replicated_head() -> None:
    """2 of 16 heads of Qwen3-Next with their gates are 1,024 of the 1,536 columns that keys and values fill up."""
    workload, layout = {"phase": "prefill", "micro_batch_size": 1, "seq_len": 4096}, {"tensor_parallel": 8}
    scenario = build_scenario("qwen3-next-80b-a3b", "h100-sxm-80gb", workload=workload, layout=layout)
    report = check_scenario(scenario.replace(fused_qkv=True), search_shapes=False)
    (finding,) = (each for each in report.findings if each.code == "PL103")
    assert report.prediction is not None
    (fused_s,) = (each.total_time_s for each in report.prediction.operations if each.operation.name == "attention.qkv")

    assert 0.0 < (finding.cost_s or 0.0) <= 0.75 * 512 / 1536 * fused_s * (1.0 + 1e-9)


@pytest.mark.parametrize(
    ("kernels", "tensor_parallel", "gib"),
    [
        (None, 2, 131072 * 64128 * (4 + 2) / 2**30),
        ("fused", 2, 131072 * 64128 * 2 / 2**30),
        ("fused", 1, 4096 * 128256 * 2 / 2**30),
    ],
)
def test_large_logits_are_those_of_the_kernels(kernels: str | None, tensor_parallel: int, gib: float) -> None:
    """PyTorch keeps a softmax in fp32 and its gradient; Liger writes the gradient over logits in bf16.

    On one device Liger also takes 131,072 tokens in chunks: 128,256 entries are 31.3 times 4,096, so 1 / 32 each.
    """
    workload = {"micro_batch_size": 16, "seq_len": 8192, "kernels": kernels, "recompute": "full"}
    layout = {"tensor_parallel": tensor_parallel}
    scenario = build_scenario("llama-3-8b", "h100-sxm-80gb", workload=workload, layout=layout)
    found = [violation.problem for violation in get_rule("ME102").check(scenario)]

    assert bool(found) == (gib > 7.91)
    assert all(f"{gib:.3g} GiB" in problem for problem in found)


def test_memory_that_is_exceeded_costs_no_time() -> None:
    """A smaller micro-batch fits, and also shortens the bubble: that is the cost of PL107, and ME101 comes first."""
    workload = {"micro_batch_size": 16, "global_batch_size": 64}
    scenario = build_scenario("llama-3-8b", "h100-sxm-80gb", workload=workload, layout={"pipeline_parallel": 4})
    report = check_scenario(scenario, search_shapes=False)
    first, *others = report.findings
    bubble = next(finding for finding in others if finding.code == "PL107")

    assert (first.code, first.severity, first.cost_s) == ("ME101", "error", None)
    assert first.suggestions[0].changes == {"micro_batch_size": 1}
    assert bubble.cost_fraction == pytest.approx(bubble.suggestions[0].predicted_gain_fraction)


@pytest.mark.parametrize(
    "workload",
    [
        {"phase": "prefill", "micro_batch_size": 1, "seq_len": 2048},
        {"phase": "decode", "micro_batch_size": 64, "context_len": 2048},
    ],
)
def test_a_group_across_nodes_costs_no_more_than_it_communicates(workload: dict[str, Any]) -> None:
    """One device instead of 16 saves 63 % of a decode step of Llama-3-8B, of which communication takes 46 %."""
    scenario = build_scenario("llama-3-8b", "h100-sxm-80gb", workload=workload, layout={"tensor_parallel": 16})
    report = check_scenario(scenario, search_shapes=False)
    (finding,) = (each for each in report.findings if each.code == "PL108")
    sent_s = sum(
        each.total_time_s
        for each in scenario.predict().operations
        if each.operation.name.endswith(("all_reduce", "all_gather"))
    )

    assert finding.suggestions[0].changes["tensor_parallel"] < 16
    assert 0.0 < (finding.cost_s or 0.0) <= sent_s * (1.0 + 1e-9)


@pytest.mark.parametrize(
    ("model", "tensor_parallel", "code"), [("llama-3-8b", 16, "PL108"), ("qwen3-30b-a3b", 8, "PL103")]
)
def test_bounds_count_the_layers_of_all_stages(model: str, tensor_parallel: int, code: str) -> None:
    """A token passes four stages one after the other: their shares of its time are those of one stage of all layers."""
    workload = {"phase": "decode", "micro_batch_size": 64, "context_len": 2048}
    costs = []
    for stages in (1, 4):
        layout = {"tensor_parallel": tensor_parallel, "pipeline_parallel": stages}
        scenario = build_scenario(model, "h100-sxm-80gb", workload=workload, layout=layout)
        (finding,) = (each for each in check_scenario(scenario, search_shapes=False).findings if each.code == code)
        costs.append(finding.cost_fraction)

    assert costs[1] == pytest.approx(costs[0], rel=0.03)


def test_large_gemms_are_those_of_all_stages() -> None:
    """The projections of queries take 5 % of a prompt, in one stage as in eight one after the other."""
    workload = {"phase": "prefill", "micro_batch_size": 1, "seq_len": 2112}
    names = [
        {
            each.operation.name
            for each in list_big_gemms(
                build_scenario(
                    "llama-3-8b", "h100-sxm-80gb", workload=workload, layout={"pipeline_parallel": stages}
                ).predict()
            )
        }
        for stages in (1, 8)
    ]

    assert "attention.q" in names[0]
    assert names[1] == names[0]


@pytest.mark.parametrize(
    ("windows", "is_noted"),
    [
        ((512, 512, 0) * 6 + (512, 0), False),  # 13 windowed layers fill two groups of 7 but for one of 20 layers: 5 %
        ((512, 512, 512, 0) * 3 + (512, 512, 0), True),  # 11 fill three groups of 4 but for one of 15
    ],
)
def test_few_padding_layers_are_not_noted(windows: tuple[int, ...], is_noted: bool) -> None:
    """Up to a twentieth of the layers."""
    config = dataclasses.replace(read_model("gpt3-125m").config, num_layers=len(windows), attention_windows=windows)
    job = Workload(phase="decode", micro_batch_size=1, context_len=1000, kv_block_tokens=16)
    violations = list(get_rule("SV103").check(Scenario.of(config, load_device("h100-sxm-80gb"), job)))

    assert [each.field for each in violations] == ["config.num_layers"] * is_noted
