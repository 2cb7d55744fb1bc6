"""The lint: what a check finds and costs, reports, fixes and the paper's own case."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shapewright.config import read_model
from shapewright.errors import LayoutError, UnknownRuleError
from shapewright.hardware import load_device
from shapewright.layout import ParallelLayout
from shapewright.lint import (
    CheckReport,
    Finding,
    check_model,
    exact_changes,
    exit_code,
    find_better_shapes,
    fix_config,
    get_rule,
    list_rules,
    to_json,
    to_sarif,
)
from shapewright.lint.check import find_violations
from shapewright.lint.example import example_case
from shapewright.lint.judge import judge
from shapewright.workload import Workload

A100 = load_device("a100-sxm-40gb")
GPT3_2_7B = read_model("gpt3-2.7b").config


def check_gpt3(**changes: Any) -> CheckReport:
    """Check GPT-3 2.7B as published on an A100, training in fp16 with four sequences of 2048."""
    workload = Workload(**{"micro_batch_size": 4, "seq_len": 2048, "dtype": "fp16", **changes})
    return check_model(GPT3_2_7B, device=A100, workload=workload)


@pytest.fixture(scope="module")
def report() -> CheckReport:
    """GPT-3 2.7B on an A100 with fused attention."""
    return check_gpt3()


@pytest.mark.parametrize("attention", ["unfused", "flash"])
@pytest.mark.parametrize("phase", ["train", "prefill"])
def test_gpt3_2_7b_is_told_to_use_20_heads(attention: str, phase: str) -> None:
    """The paper's case by itself: 32 heads of 80 should be 20 of 128, and this is the best change of heads."""
    found = check_gpt3(attention=attention, phase=phase)
    heads = [finding for finding in found.findings if finding.code == "TC103"]
    best = heads[0].suggestions[0]

    assert dict(best.changes)["num_heads"] == 20
    assert (best.kind, best.parameters_change_fraction) == ("retrain", 0.0)
    of_heads = next(shape for shape in found.better_shapes if shape.changes["num_heads"] != 32)
    assert of_heads.changes["num_heads"] == 20
    assert found.better_shapes[0].speedup > 1.0


def test_gpt3_2_7b_is_told_to_pad_its_vocabulary(report: CheckReport) -> None:
    """50257 is odd: padding to 50304 is exact, and names the logit GEMM as what suffers."""
    finding = next(finding for finding in report.findings if finding.code == "TC101")

    assert finding.message.startswith("vocab_size=50257 is not a multiple of 64 (fp16 on a100-sxm-40gb): logits")
    assert [(suggestion.kind, dict(suggestion.changes)) for suggestion in finding.suggestions] == [
        ("exact", {"vocab_size": 50304})
    ]


def test_findings_are_sorted_by_cost(report: CheckReport) -> None:
    """What cannot run comes first, then the costliest."""
    stops = [finding.severity == "error" and finding.cost_s is None for finding in report.findings]
    costs = [finding.cost_s or 0.0 for finding in report.findings if finding.cost_s or finding.severity != "error"]

    assert stops == sorted(stops, reverse=True)
    assert costs == sorted(costs, reverse=True)


def test_cost_is_what_the_suggestion_saves(report: CheckReport) -> None:
    """The cost of an exact fix is the step as it is less the step with the fix."""
    finding = next(finding for finding in report.findings if finding.code == "TC101")
    fixed = check_model(
        fix_config(GPT3_2_7B, report),
        device=A100,
        workload=Workload(micro_batch_size=4, seq_len=2048, dtype="fp16"),
        look_around=False,
    )

    assert report.prediction is not None
    assert fixed.prediction is not None
    assert finding.cost_s == pytest.approx(report.prediction.step_time_s - fixed.prediction.step_time_s)


def test_ignored_findings_are_counted(report: CheckReport) -> None:
    """Code, name and family all suppress, and the report says how many findings it left out."""
    workload = Workload(micro_batch_size=4, seq_len=2048, dtype="fp16")
    found = check_model(
        GPT3_2_7B, device=A100, workload=workload, ignore=("vocab-not-aligned", "ME"), look_around=False
    )
    left_out = [finding for finding in report.findings if finding.code == "TC101" or finding.code.startswith("ME")]

    assert found.num_suppressed == len(left_out) > 0
    assert [finding.code for finding in found.findings] == [
        finding.code for finding in report.findings if finding not in left_out
    ]


def test_ignoring_an_unknown_rule_is_an_error() -> None:
    """A misspelt rule would otherwise be ignored in silence."""
    with pytest.raises(UnknownRuleError, match="TC999"):
        check_model(GPT3_2_7B, device=A100, workload=Workload(dtype="fp16"), ignore=["TC999"])


def test_a_step_that_cannot_run_is_a_finding() -> None:
    """Heads that do not divide give a report without a prediction, with a way out."""
    found = check_model(
        GPT3_2_7B, device=A100, workload=Workload(dtype="fp16"), layout=ParallelLayout(tensor_parallel=6)
    )

    assert found.prediction is None
    assert "tensor_parallel=6" in found.problem
    assert found.better_shapes == ()
    assert [finding.code for finding in found.findings if finding.severity == "error"] == ["PL101", "PL102", "PL109"]
    assert exit_code(found, "error") == 1


def test_a_step_that_cannot_run_for_no_rule_of_ours_is_an_error() -> None:
    """What no rule explains is raised as it is."""
    with pytest.raises(LayoutError, match="expert_parallel"):
        check_model(
            GPT3_2_7B,
            device=A100,
            workload=Workload(dtype="fp16"),
            layout=ParallelLayout(data_parallel=2, expert_parallel=2),
        )


def test_severity_has_a_ceiling_where_a_default_decides() -> None:
    """A bubble that follows from a batch that nobody gave is told, but fails nothing."""
    given = example_case(pipeline_parallel=4, micro_batch_size=4, global_batch_size=16)
    assumed = example_case(pipeline_parallel=4, micro_batch_size=4)
    severities = []
    for case in (given, assumed):
        (violation,) = get_rule("PL107").check(case)
        finding = judge(get_rule("PL107"), violation, case)
        assert finding is not None
        severities.append(finding.severity)

    assert severities == ["error", "info"]


def test_uneven_stages_cost_no_more_than_the_layers_too_few() -> None:
    """33 layers on 4 stages waste a twelfth; one stage saves more, having no bubble: no fault of the 33."""
    case = example_case(num_layers=33, pipeline_parallel=4, global_batch_size=16, device="a100-sxm-80gb")
    (violation,) = get_rule("PL106").check(case)
    finding = judge(get_rule("PL106"), violation, case)

    assert finding is not None
    assert finding.cost_fraction == pytest.approx(1.0 - 33 / 36)
    assert (finding.suggestions[0].predicted_gain_fraction or 0.0) > 0.2
    assert "slower" not in finding.message


def test_a_layout_that_does_not_fit_gets_none_that_needs_more() -> None:
    """Where memory is exceeded, changes of layout and batch fit or need no more than now; better shapes stay."""
    case = example_case(num_layers=48, tensor_parallel=2, data_parallel=2, micro_batch_size=8, vocab_size=50257)
    found = find_violations(case)
    runtime = [made for finding in found for made in finding.suggestions if made.kind == "runtime"]

    assert not case.fits
    assert runtime
    for made in runtime:
        after = case.changed(made.changes)
        assert after is not None
        assert after.prediction.memory.total_bytes <= case.prediction.memory.total_bytes
    assert "TC101" in {finding.code for finding in found}


def test_memory_asks_for_no_sharded_weights_under_a_pipeline() -> None:
    """ZeRO stage 3 is a remedy of replicas alone, as plan and memory have it."""
    stages = {}
    for pipeline_parallel in (1, 2):
        case = example_case(num_layers=64, pipeline_parallel=pipeline_parallel, data_parallel=8, micro_batch_size=1)
        (violation,) = get_rule("ME101").check(case)
        stages[pipeline_parallel] = {repair.changes.get("zero_stage") for repair in violation.repairs}

    assert 3 in stages[1]
    assert 3 not in stages[2]


def test_heads_of_a_narrower_width_are_not_asked_for() -> None:
    """80 wide heads become 128 wide, and not 64 wide, which the next rule would find too small."""
    case = example_case(num_heads=32, attention="flash")
    (violation,) = get_rule("TC103").check(case)
    finding = judge(get_rule("TC103"), violation, case)

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
    """1 from the given severity on."""
    findings = tuple(
        Finding(code="TC101", name="x", severity=severity, field="f", actual=1, wanted="", message="")
        for severity in severities
    )

    assert exit_code(CheckReport(prediction=None, findings=findings), fail_on) == expected


def test_fix_takes_exact_suggestions_only(report: CheckReport) -> None:
    """The vocabulary is padded and the heads stay."""
    fixed = fix_config(GPT3_2_7B, report)

    assert exact_changes(report) == {"vocab_size": 50304}
    assert (fixed.vocab_size, fixed.num_heads) == (50304, GPT3_2_7B.num_heads)
    assert fix_config(fixed, CheckReport(prediction=None, findings=())) is fixed


def test_better_shapes_keep_the_parameters(report: CheckReport) -> None:
    """Shapes are sorted by what they gain, within 2 % of the parameters, and say what changes."""
    gains = [shape.gain_fraction for shape in report.better_shapes]

    assert gains == sorted(gains, reverse=True)
    assert all(abs(shape.parameters_change_fraction) <= 0.02 for shape in report.better_shapes)
    # With fused attention fewer, wider layers come as near as wider heads: half a percent decides which is first.
    wider_heads = "num_heads 32 -> 20, head_dim 80 -> 128, vocab_size 50257 -> 50304"
    assert any(wider_heads in shape.title for shape in report.better_shapes[:2])


def test_better_shapes_of_a_mixture_of_experts_change_expert_widths() -> None:
    """With experts the MLP width that matters is theirs."""
    case = example_case(num_layers=4, num_experts=8, num_experts_per_token=2, moe_intermediate_size=1366)

    assert any("moe_intermediate_size" in shape.changes for shape in find_better_shapes(case))


def test_a_check_asks_for_few_predictions() -> None:
    """The whole check stays cheap because rules ask for little: at most a few dozen predictions."""
    case = example_case(num_heads=32, vocab_size=50257, attention="unfused")
    for rule in list_rules():
        list(rule.check(case))
    find_better_shapes(case)

    assert case.num_predictions <= 40


@pytest.mark.parametrize("name", ["tpu-v6e", "gaudi3", "mi300x", "groq-lpu-v1", "cerebras-wse-2", "rtx-4090", "t4"])
def test_devices_without_tiles_or_links_are_checked_too(name: str) -> None:
    """Where only a bound can be given, rules on tiles keep silent and nothing fails."""
    device = load_device(name)
    dtype = "bf16" if "bf16" in device.dense_flops_per_s else "fp16"
    attention = "unfused" if name == "t4" else "flash"
    found = check_model(GPT3_2_7B, device=device, workload=Workload(dtype=dtype, attention=attention))

    assert found.prediction is not None
    if device.roofline_only:
        assert not {"WQ102", "WQ103", "TC101"} & {finding.code for finding in found.findings}


def test_asking_twice_predicts_once() -> None:
    """A changed copy shares what is known, and a change back is the situation itself."""
    case = example_case()
    wider = case.changed({"vocab_size": 51200})
    assert wider is not None
    back = wider.changed({"vocab_size": 50304})
    assert back is not None

    assert back.prediction is case.prediction
    assert case.num_predictions == 1


def test_contradictory_changes_are_no_situation() -> None:
    """Values that config, workload or layout refuse give None."""
    case = example_case()

    assert case.changed({"num_kv_heads": 3}) is None
    assert case.changed({"micro_batch_size": 0}) is None
    assert case.changed({"virtual_pipeline": 2}) is None


def test_json_is_plain_and_whole(report: CheckReport) -> None:
    """The JSON form survives a round trip and holds every finding, suggestion and shape."""
    written = to_json(report)

    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert written["schema_version"] == 1
    assert [finding["code"] for finding in written["findings"]] == [finding.code for finding in report.findings]
    assert {"cost_s", "cost_fraction", "suggestions", "actual", "wanted", "field"} <= written["findings"][0].keys()
    assert len(written["better_shapes"]) == len(report.better_shapes)


def test_sarif_has_what_2_1_0_requires(report: CheckReport) -> None:
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
