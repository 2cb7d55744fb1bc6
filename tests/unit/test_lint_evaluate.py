"""evaluate: cost of a violation and choice of suggestions, for hand-made violations on GPT-3 2.7B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.core.errors import LayoutError
from shapewright.lint.combined import combine_fixes
from shapewright.lint.evaluate import evaluate, find_hidden_findings, rate_severity, run_rules
from shapewright.lint.example import example_scenario
from shapewright.lint.rule import Finding, Fix, SuggestionKind, Violation, get_rule
from shapewright.prediction.scenario import Scenario


def fix(kind: SuggestionKind = "exact", common_changes: dict[str, Any] | None = None, **changes: Any) -> Fix:
    """Build a fix with its changes as title."""
    return Fix(kind=kind, title=str(changes), changes=changes, common_changes=common_changes or {})


def judged(scenario: Scenario, *fixes: Fix, **fields: Any) -> Finding | None:
    """Evaluate a violation with these fixes."""
    violation = Violation(field="config.vocab_size", actual=50257, wanted="", problem="is odd", fixes=fixes, **fields)
    return evaluate(get_rule("TC101"), violation, scenario)


def changes_of(finding: Finding | None) -> list[dict[str, Any]]:
    """Changes of the suggestions of a finding."""
    assert finding is not None
    return [dict(made.changes) for made in finding.suggestions]


@pytest.mark.parametrize(
    ("least", "cost_fraction", "expected"),
    [
        (None, 0.0019, None),
        (None, 0.002, "info"),
        (None, 0.0099, "info"),
        (None, 0.01, "warning"),
        (None, 0.099, "warning"),
        (None, 0.10, "error"),
        ("warning", 0.0, "warning"),
        ("info", 0.05, "warning"),
        ("error", 0.0, "error"),
        (None, 0.0, None),
    ],
)
def test_severity_follows_the_cost(least: str | None, cost_fraction: float, expected: str | None) -> None:
    """Below 0.2 % a violation is not reported by default; from 1 % it is a warning, from 10 % an error."""
    assert rate_severity(least, cost_fraction) == expected


def test_maximum_severity_only_lowers() -> None:
    """A maximum lowers the minimum severity, and does not raise a lower severity."""
    assert rate_severity(None, 0.5, "info") == "info"
    assert rate_severity("error", 0.5, "warning") == "warning"
    assert rate_severity(None, 0.005, "warning") == "info"
    assert rate_severity(None, 0.0, "warning") is None


def test_suggestions_are_the_best_three_or_the_best() -> None:
    """More padding aligns better: 50258 to 4 bytes, 50260 to 8, 50264 to 16, 50304 to 128; 50259 is odd again."""
    scenario = example_scenario(vocab_size=50257)
    fixes = [fix(vocab_size=size) for size in (50259, 50258, 50304, 50260, 50264)]
    several = changes_of(judged(scenario, *fixes))

    assert several[0] == {"vocab_size": 50304}
    assert len(several) == 3
    assert {"vocab_size": 50259} not in several
    assert changes_of(judged(scenario, *fixes, only_best=True)) == [{"vocab_size": 50304}]


def test_common_changes_apply_to_both_sides() -> None:
    """The gain of a fix compared at 8 sequences is the gain at 8 sequences, not at one."""
    one, eight = (example_scenario(vocab_size=50257, micro_batch_size=size) for size in (1, 8))
    common_changes = {"micro_batch_size": 8}
    at_one, at_eight = (
        judged(one, fix(common_changes=common_changes, vocab_size=50304)),
        judged(eight, fix(vocab_size=50304)),
    )

    assert at_one is not None
    assert at_eight is not None
    assert at_one.suggestions[0].predicted_gain_fraction == at_eight.suggestions[0].predicted_gain_fraction
    assert changes_of(at_one) == [{"vocab_size": 50304}]
    # The share of the step is that of 8 sequences, the seconds are those of the step as it is.
    assert at_one.cost_fraction == at_eight.cost_fraction
    assert at_one.cost_s == pytest.approx(one.predict().step_time_s * (at_eight.cost_fraction or 0.0))


def test_smaller_models_get_no_credit_for_size() -> None:
    """Half of the layers take half of the time with half of the parameters; 16 of 12 h^2 are 45 % of 2.78 billion."""
    scenario = example_scenario()
    as_model = judged(scenario, fix("retrain", num_layers=16), least_severity="error")
    as_layout = judged(scenario, fix("runtime", num_layers=16))

    assert as_model is not None
    assert as_layout is not None
    assert as_model.suggestions[0].parameters_change_fraction == pytest.approx(-16 * 12 * 2560**2 / 2.78e9, rel=0.01)
    assert (as_model.cost_fraction or 0.0) < 0.05
    assert as_layout.cost_fraction == pytest.approx(0.48, abs=0.03)


def test_slower_fixes_stay_where_the_cost_is_not_time() -> None:
    """For steps that cannot run, and for violations without a cost, slower fixes are suggested, without a gain."""
    scenario = example_scenario()
    slower = fix(num_layers=40)

    assert judged(scenario, slower) is None
    assert changes_of(judged(scenario, slower, least_severity="warning")) == []
    for fields in ({"least_severity": "error"}, {"least_severity": "info", "has_cost": False}):
        finding = judged(scenario, slower, **fields)
        assert changes_of(finding) == [{"num_layers": 40}]
        assert finding is not None
        assert finding.message == "vocab_size=50257 is odd; {'num_layers': 40}"
        assert finding.suggestions[0].predicted_gain_fraction is None
        assert finding.cost_fraction is None


def test_fixes_of_a_step_that_cannot_run_must_change_the_error() -> None:
    """20 heads divide over 4 devices, not over 6; contradictory heads and longer sequences do not change the error."""
    scenario = example_scenario(tensor_parallel=6)
    fixes = [fix(tensor_parallel=4), fix(num_kv_heads=3), fix(seq_len=1024)]

    assert changes_of(judged(scenario, *fixes, least_severity="error")) == [{"tensor_parallel": 4}]
    assert judged(scenario, *fixes) is None


def test_a_step_that_cannot_run_has_no_prediction() -> None:
    """Scenario.predict raises the error."""
    scenario = example_scenario(tensor_parallel=6)

    assert not scenario.is_possible
    assert not scenario.fits
    with pytest.raises(LayoutError, match="tensor_parallel=6"):
        _ = scenario.predict()


def test_memory_is_checked_before_predicting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that needs too much memory is not priced; one that needs exactly the device memory fits."""
    scenario = example_scenario()
    needed_bytes = scenario.predict().memory.total_bytes
    exact, short = (
        Scenario.of(
            scenario.config, replace(scenario.device, memory_bytes=memory_bytes), scenario.workload, scenario.layout
        )
        for memory_bytes in (needed_bytes, needed_bytes - 1.0)
    )

    assert exact.fits
    monkeypatch.setattr("shapewright.prediction.scenario.predict", pytest.fail)
    assert not short.fits


def test_time_per_token_is_that_of_all_devices() -> None:
    """Two replicas of 4 x 2048 tokens: device time of both over 16384 tokens."""
    scenario = example_scenario(data_parallel=2, micro_batch_size=4, seq_len=2048)

    assert scenario.time_per_token_s == pytest.approx(2 * scenario.predict().step_time_s / 16384)


@pytest.mark.parametrize("changes", [{"num_heads": 31}, {"hidden_size": 2600, "tensor_parallel": 7}])
def test_changes_that_cannot_run_uncover_no_findings(changes: dict[str, Any]) -> None:
    """Nothing is predicted, and nothing raised, for changes that contradict the model or cannot be distributed."""
    assert find_hidden_findings(example_scenario(vocab_size=50257), changes, ()) == []


def test_a_fix_that_needs_another_is_part_of_the_combined_fix() -> None:
    """More sequences do not fit beside the logits of a large vocabulary; with a smaller one they save further time."""
    scenario = example_scenario(vocab_size=150_001, device="h200-sxm-141gb")
    vocabulary = judged(scenario, fix(vocab_size=50_304))
    assert vocabulary is not None
    batch = {"micro_batch_size": 16}
    larger = replace(vocabulary.suggestions[0], changes=batch, compared_at={})
    sequences = replace(vocabulary, field="workload.micro_batch_size", suggestions=(larger,))
    assert not scenario.replace(**batch).fits

    combined, shares, _ = combine_fixes(scenario, [sequences, vocabulary])

    assert combined is not None
    assert combined.changes == {"vocab_size": 50_304, **batch}
    assert 0.0 < shares[0] < shares[1]


def test_given_weights_are_padded_and_not_reshaped() -> None:
    """For a model that adapters are added to, rows of padding are suggested, and no other number of heads or width."""
    odd = {"vocab_size": 50_257, "hidden_size": 2624, "head_dim": 82, "num_heads": 32}
    found = {finding.code: finding for finding in run_rules(example_scenario(finetune="lora", **odd))}
    trained = {finding.code: finding for finding in run_rules(example_scenario(**odd))}

    assert changes_of(found["TC101"]) == changes_of(trained["TC101"]) == [{"vocab_size": 50_304}]
    assert changes_of(trained["TC103"])
    assert changes_of(found["TC103"]) == []
    assert (trained["TC103"].severity, found["TC103"].severity) == ("warning", "info")
