"""The combined fix of a scenario, and the share of its gain that each finding gets as its cost.

Fixes interact: with an unaligned MLP width, for example, an aligned hidden size saves less. The cost of a finding is
therefore the mean of two gains of its fix, applied alone and applied after all others. Costs are scaled to add up to
the gain of the combined fix, unless a finding bounds its cost; for two findings they are Shapley values. Fields that
another finding is about do not count as part of a fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.lint.rule import SuggestionKind
from shapewright.models.transformer import FIELD_NAMES, with_changes

if TYPE_CHECKING:
    from shapewright.lint.rule import Finding
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

# Fields that describe one choice of heads: they change together or not at all.
_HEADS = frozenset({"num_heads", "num_kv_heads", "head_dim", "v_head_dim"})
_KINDS: tuple[SuggestionKind, ...] = ("exact", "runtime", "retrain")  # from the least to the largest change

Changes = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CombinedFix:
    """The fixes of all findings that save time together.

    Attributes:
        kind: Largest kind of change among them: exact, runtime or retrain.
        title: Every changed field with its new value.
        changes: New values by field.
        codes: Rules whose findings it fixes.
        step_time_before_s: Predicted step time without them, with the values of ``compared_at``. [s]
        step_time_s: Predicted step time with all of them. [s]
        gain_fraction: Share of the time per token that they save, per parameter if the model changes.
        parameters_change_fraction: Relative change of the parameter count.
        compared_at: Values that both sides have in the comparison, such as an equal global batch.
    """

    kind: SuggestionKind
    title: str
    changes: Changes
    codes: tuple[str, ...]
    step_time_before_s: float
    step_time_s: float
    gain_fraction: float
    parameters_change_fraction: float
    compared_at: Changes

    def with_changes(self, config: TransformerConfig, assumed: Changes) -> CombinedFix:
        """Return the fix with the assumed changes, with which the step can run, as a part of it."""
        changes = {**assumed, **self.changes}
        return replace(self, changes=changes, title=describe_changes(config, changes))


@dataclass(frozen=True)
class _FindingFix:
    """The best suggestion of a finding, without changes of fields that another finding is about."""

    index: int
    changes: Changes
    is_retrain: bool


class Combination(NamedTuple):
    """Fixes of several findings together.

    Attributes:
        fix: The combined fix; None where there is nothing to fix.
        shares: Each finding's share of its gain, by index of the finding.
        compared: By index of the finding, the predictions without and with its fix, all other fixes applied; only for
            findings with a fix that is a part of their suggestion.
    """

    fix: CombinedFix | None
    shares: Mapping[int, float]
    compared: Mapping[int, tuple[Prediction, Prediction]]


def combine_fixes(scenario: Scenario, findings: Sequence[Finding]) -> Combination:
    """Combine the best fixes of findings that cost time.

    Args:
        scenario: The scenario; its step can run.
    """
    costly = [index for index, finding in enumerate(findings) if finding.cost_s is not None and finding.suggestions]
    if not costly:
        return Combination(None, {}, {})
    common: dict[str, Any] = {}
    for index in costly:
        for name, value in findings[index].suggestions[0].compared_at.items():
            common[name] = max(common.get(name, value), value)
    base = scenario.try_replace(common)
    if base is None or not base.is_possible:
        common, base = {}, scenario
    fixes = [_reduce_to_own_changes(base, findings, index, costly) for index in costly]
    alone = {fix.index: _gain(base, [fix]) for fix in fixes}
    chosen: list[_FindingFix] = []
    total = 0.0
    for fix in sorted(fixes, key=lambda each: -(alone[each.index] or 0.0)):
        gain = _gain(base, [*chosen, fix])
        if gain is not None and gain > total and _saves_time(base, [*chosen, fix]):
            chosen, total = [*chosen, fix], gain
    if not chosen:
        return Combination(None, {}, {})
    after = _apply(base, chosen)
    assert after is not None
    shares, compared = {}, {}
    for fix in fixes:
        others = [each for each in chosen if each is not fix]
        last = total - (_gain(base, others) or 0.0) if fix in chosen else 0.0
        shares[fix.index] = max(0.0, ((alone[fix.index] or 0.0) + last) / 2.0)
        without = _apply(base, others)
        if fix in chosen and without is not None and fix.changes != findings[fix.index].suggestions[0].changes:
            compared[fix.index] = (without.predict(), after.predict())
    scale = total / sum(shares.values()) if sum(shares.values()) > 0.0 else 0.0
    changes = _state_followers(scenario.config, after.config, drop_unchanged(scenario, _merge(chosen)))
    before = base.predict()
    combined = CombinedFix(
        kind=max((findings[fix.index].suggestions[0].kind for fix in chosen), key=_KINDS.index),
        title=describe_changes(scenario.config, changes),
        changes=changes,
        codes=tuple(findings[fix.index].code for fix in sorted(chosen, key=lambda each: each.index)),
        step_time_before_s=before.step_time_s,
        step_time_s=after.predict().step_time_s,
        gain_fraction=total,
        parameters_change_fraction=after.predict().parameters.total / before.parameters.total - 1.0,
        compared_at=common,
    )
    return Combination(combined, {index: share * scale for index, share in shares.items()}, compared)


def drop_unchanged(scenario: Scenario, changes: Changes) -> dict[str, Any]:
    """Return the changes without fields that keep their value."""
    parts = (scenario.config, scenario.workload, scenario.layout)
    present = {name: getattr(part, name) for part in parts for name in changes if hasattr(part, name)}
    return {name: value for name, value in changes.items() if name not in present or present[name] != value}


def _state_followers(old: TransformerConfig, new: TransformerConfig, changes: Changes) -> dict[str, Any]:
    """Return the changes of a fix with fields that keep their value where typing the others alone would change them.

    A width of the MLP of four times the hidden size, for example, follows a typed hidden size.
    """
    try:
        typed = with_changes(old, {name: value for name, value in changes.items() if hasattr(old, name)})
    except ShapewrightError:
        return dict(changes)
    followers = {name: getattr(new, name) for name in FIELD_NAMES if getattr(typed, name) != getattr(new, name)}
    return {**changes, **followers}


def describe_changes(config: TransformerConfig, changes: Changes) -> str:
    """Describe changes as ``field=value`` pairs, without fields that follow another one."""
    return ", ".join(f"{name}={value}" for name, value in independent_changes(config, changes).items())


def independent_changes(config: TransformerConfig, changes: Changes) -> dict[str, Any]:
    """Return the changes without fields that follow another one.

    ``v_head_dim`` follows ``head_dim``, for example, if both are equal in the model and after the changes.
    """
    followers = {
        "v_head_dim": ("head_dim", config.v_head_dim == config.head_dim),
        "embedding_size": ("hidden_size", config.embedding_size == config.hidden_size),
        "num_kv_heads": ("num_heads", config.num_kv_heads == config.num_heads),
    }
    independent = {}
    for name, value in changes.items():
        leader, follows = followers.get(name, ("", False))
        if not (follows and changes.get(leader) == value):
            independent[name] = value
    return independent


def _reduce_to_own_changes(
    base: Scenario, findings: Sequence[Finding], index: int, costly: Sequence[int]
) -> _FindingFix:
    """Return the best suggestion of a finding, without changes of fields that another finding is about.

    The whole suggestion is used where the remaining changes leave out the finding's own field or cannot run.
    """
    suggestion = findings[index].suggestions[0]
    owned = {findings[other].field.rpartition(".")[2] for other in costly if other != index}
    own = findings[index].field.rpartition(".")[2]
    if owned & _HEADS and own not in _HEADS:
        owned |= _HEADS
    changes = {name: value for name, value in suggestion.changes.items() if name == own or name not in owned}
    after = base.try_replace(changes) if own in changes else None
    if after is None or not after.is_possible:
        changes = dict(suggestion.changes)
    return _FindingFix(index, changes, suggestion.kind == "retrain")


def _merge(fixes: Sequence[_FindingFix]) -> dict[str, Any]:
    """Join the changes of fixes; the first one that sets a field decides."""
    changes: dict[str, Any] = {}
    for fix in fixes:
        for name, value in fix.changes.items():
            changes.setdefault(name, value)
    return changes


def _apply(base: Scenario, fixes: Sequence[_FindingFix]) -> Scenario | None:
    """Apply fixes; None where the result cannot run, or no longer fits in memory."""
    after = base.try_replace(_merge(fixes))
    if after is None or not after.is_possible or (base.fits and not after.fits):
        return None
    return after


def _gain(base: Scenario, fixes: Sequence[_FindingFix]) -> float | None:
    """Share of the time per token that fixes save, per parameter if one changes the model; None if not applicable."""
    if not fixes:
        return 0.0
    after = _apply(base, fixes)
    if after is None:
        return None
    ratio = after.time_per_token_s / base.time_per_token_s
    if any(fix.is_retrain for fix in fixes):
        ratio *= base.predict().parameters.active / after.predict().parameters.active
    return 1.0 - ratio


def _saves_time(base: Scenario, fixes: Sequence[_FindingFix]) -> bool:
    after = _apply(base, fixes)
    return after is not None and after.time_per_token_s < base.time_per_token_s
