"""What a violation costs, and which repairs become suggestions: hand-made violations on GPT-3 2.7B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.errors import LayoutError
from shapewright.lint import get_rule
from shapewright.lint.example import example_case
from shapewright.lint.finding import Finding, SuggestionKind
from shapewright.lint.judge import judge, severity_of
from shapewright.lint.rule import Repair, Violation
from shapewright.lint.what_if import WhatIf


def repair(kind: SuggestionKind = "exact", at_equal: dict[str, Any] | None = None, **changes: Any) -> Repair:
    """A repair that is titled by what it changes."""
    return Repair(kind=kind, title=str(changes), changes=changes, at_equal=at_equal or {})


def judged(case: WhatIf, *repairs: Repair, **fields: Any) -> Finding | None:
    """What a violation with these repairs comes to."""
    violation = Violation(
        field="config.vocab_size", actual=50257, wanted="", problem="is odd", repairs=repairs, **fields
    )
    return judge(get_rule("TC101"), violation, case)


def changes_of(finding: Finding | None) -> list[dict[str, Any]]:
    """What its suggestions change."""
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
    """Below 0.2 % a violation is quiet unless it counts by itself; from 1 % it is a warning, from 10 % an error."""
    assert severity_of(least, cost_fraction) == expected


def test_a_ceiling_lowers_and_never_raises() -> None:
    """What counts whatever it costs is quieter under a ceiling, and what is quieter anyway stays so."""
    assert severity_of(None, 0.5, "info") == "info"
    assert severity_of("error", 0.5, "warning") == "warning"
    assert severity_of(None, 0.005, "warning") == "info"
    assert severity_of(None, 0.0, "warning") is None


def test_suggestions_are_the_best_three_or_the_best() -> None:
    """More padding aligns better: 50258 to 4 bytes, 50260 to 8, 50264 to 16, 50304 to 128; 50259 is odd again."""
    case = example_case(vocab_size=50257)
    repairs = [repair(vocab_size=size) for size in (50259, 50258, 50304, 50260, 50264)]
    several = changes_of(judged(case, *repairs))

    assert several[0] == {"vocab_size": 50304}
    assert len(several) == 3
    assert {"vocab_size": 50259} not in several
    assert changes_of(judged(case, *repairs, only_best=True)) == [{"vocab_size": 50304}]


def test_both_sides_are_priced_at_what_is_made_equal() -> None:
    """A repair that is compared at 8 sequences gains what it gains there, and not with one."""
    one, eight = (example_case(vocab_size=50257, micro_batch_size=size) for size in (1, 8))
    at_equal = {"micro_batch_size": 8}
    at_one, at_eight = (
        judged(one, repair(at_equal=at_equal, vocab_size=50304)),
        judged(eight, repair(vocab_size=50304)),
    )

    assert at_one is not None
    assert at_eight is not None
    assert at_one.suggestions[0].predicted_gain_fraction == at_eight.suggestions[0].predicted_gain_fraction
    assert changes_of(at_one) == [{"vocab_size": 50304}]
    # The share of the step is that of 8 sequences, the seconds are those of the step as it is.
    assert at_one.cost_fraction == at_eight.cost_fraction
    assert at_one.cost_s == pytest.approx(one.prediction.step_time_s * (at_eight.cost_fraction or 0.0))


def test_a_smaller_model_gains_nothing_by_being_smaller() -> None:
    """Half the layers take half the time for half the parameters; 16 of 12 h^2 are 45 % of 2.78 billion."""
    case = example_case()
    as_model = judged(case, repair("retrain", num_layers=16), severity="error")
    as_layout = judged(case, repair("runtime", num_layers=16))

    assert as_model is not None
    assert as_layout is not None
    assert as_model.suggestions[0].parameters_change_fraction == pytest.approx(-16 * 12 * 2560**2 / 2.78e9, rel=0.01)
    assert (as_model.cost_fraction or 0.0) < 0.05
    assert as_layout.cost_fraction == pytest.approx(0.48, abs=0.03)


def test_slower_repairs_stay_where_time_is_not_the_matter() -> None:
    """What cannot run, and what asks another question, is mended by a slower step too, which says no gain."""
    case = example_case()
    slower = repair(num_layers=40)

    assert judged(case, slower) is None
    assert changes_of(judged(case, slower, severity="warning")) == []
    for fields in ({"severity": "error"}, {"severity": "info", "has_cost": False}):
        finding = judged(case, slower, **fields)
        assert changes_of(finding) == [{"num_layers": 40}]
        assert finding is not None
        assert finding.message == "vocab_size=50257 is odd; {'num_layers': 40}"
        assert finding.suggestions[0].predicted_gain_fraction is None
        assert finding.cost_fraction is None


def test_repairs_of_what_cannot_run_must_change_why() -> None:
    """20 heads do not divide over 6 devices: 4 devices do, contradictory heads and a longer text mend nothing."""
    case = example_case(tensor_parallel=6)
    repairs = [repair(tensor_parallel=4), repair(num_kv_heads=3), repair(seq_len=1024)]

    assert changes_of(judged(case, *repairs, severity="error")) == [{"tensor_parallel": 4}]
    assert judged(case, *repairs) is None


def test_what_cannot_run_has_no_prediction() -> None:
    """Asked for one, it raises why."""
    case = example_case(tensor_parallel=6)

    assert not case.is_possible
    assert not case.fits
    with pytest.raises(LayoutError, match="tensor_parallel=6"):
        _ = case.prediction


def test_memory_is_asked_before_a_prediction_and_may_be_used_up() -> None:
    """A step that is too large is refused unpriced; one that needs all there is fits."""
    case = example_case()
    needed_bytes = case.prediction.memory.total_bytes
    exact, short = (
        WhatIf(case.config, replace(case.device, memory_bytes=memory_bytes), case.workload, case.layout)
        for memory_bytes in (needed_bytes, needed_bytes - 1.0)
    )

    assert exact.fits
    assert not short.fits
    assert short.num_predictions == 0


def test_time_per_token_is_that_of_all_devices() -> None:
    """Two replicas of 4 x 2048 tokens: their devices' time over 16384 tokens."""
    case = example_case(data_parallel=2, micro_batch_size=4, seq_len=2048)

    assert case.time_per_token_s == pytest.approx(2 * case.prediction.step_time_s / 16384)
