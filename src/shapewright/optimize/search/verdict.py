"""Verdict of a search: keep the shape, or the change to make, with its certainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from shapewright.models.layers import describe_pattern
from shapewright.optimize.search.result import Verdict

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.loss.effect import LossEffect
    from shapewright.prediction.speedup import Speedup


@runtime_checkable
class Judged(Protocol):
    """A shape compared with a baseline: a candidate of a search, or a design with its own plan."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def config(self) -> TransformerConfig:
        """The shape."""

    @property
    def changes(self) -> Mapping[str, tuple[Any, Any]]:
        """Old and new value of every field that differs."""

    @property
    def speedup(self) -> Speedup:
        """Ratio of its throughput to the baseline's."""

    @property
    def effect(self) -> LossEffect | None:
        """What it does to the loss; None where that is not known."""

    @property
    def gain(self) -> Speedup | None:
        """What it gains at the same loss; None where that is not known."""

    @property
    def is_free(self) -> bool:
        """Whether it keeps the loss."""


Shape = TypeVar("Shape", bound=Judged)

LEAST_CHANCE = 0.75
"""A shape is proposed for a trial if it is better with more than this probability; of several, the surest.

Of many shapes, the largest gain is that of the largest change, with the widest interval."""

# A change of fewer fields is preferred if it has this share of the largest gain: the rest is within the error, and each
# changed field may have costs that are not predicted, such as a larger cache in serving.
_MOST_OF_THE_GAIN = 0.95

VERDICTS = {
    "keep": "nothing is better with more than 75 % certainty",
    "free": "a change that keeps the loss is faster, at 95 % certainty",
    "change": "a change that trades loss for speed, or speed for loss, reaches the loss sooner, at 95 % certainty",
    "trial": "a change is better with more than 75 % certainty, and less than 95 %",
    "trade": "in inference, faster shapes have another loss",
}
"""Meaning of each code."""

# Fields that a change does not name where they have the value of another field, before and after it.
_FOLLOWERS = {"num_kv_heads": "num_heads", "v_head_dim": "head_dim", "intermediate_size": "moe_intermediate_size"}

# Words for fields in a sentence, in the order in which they are named.
_WORDS = {
    "num_layers": "layers",
    "hidden_size": "width",
    "num_heads": "heads",
    "num_kv_heads": "KV heads",
    "head_dim": "head width",
    "intermediate_size": "MLP width",
    "moe_intermediate_size": "expert width",
    "num_experts": "experts",
    "num_experts_per_token": "experts per token",
    "shared_expert_intermediate_size": "shared experts' width",
    "vocab_size": "vocabulary",
    "micro_batch_size": "micro-batch",
    "recompute": "recomputation",
    "tensor_parallel": "tensor parallel",
    "pipeline_parallel": "pipeline parallel",
    "data_parallel": "data parallel",
    "context_parallel": "context parallel",
    "expert_parallel": "expert parallel",
}


def describe_change(candidate: Judged) -> str:
    """Return the changed fields in words, without those that follow from others: ``layers 32 -> 30``."""
    changes = name_changes(candidate.changes)
    words = {name: _WORDS.get(name, name.replace("_", " ")) for name in changes}
    ordered = sorted(changes, key=lambda name: [*_WORDS, name].index(name))
    return ", ".join(f"{words[name]} {changes[name][0]} -> {changes[name][1]}" for name in ordered)


def name_changes(changes: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Return old and new values of the changed fields, without fields that follow another one before and after."""
    named = {
        name: values
        for name, values in changes.items()
        if name not in _FOLLOWERS or values != changes.get(_FOLLOWERS[name])
    }
    if "layer_types" in named:
        old, new = named["layer_types"]
        named["layer_types"] = (describe_pattern(tuple(old)), describe_pattern(tuple(new)))
    return named


def _count_changes(candidate: Judged) -> int:
    """Return the number of changed fields; the number of heads and their width count once."""
    changes = name_changes(candidate.changes)
    return len(changes) - ("num_heads" in changes and "head_dim" in changes)


def recommend(candidates: Sequence[Shape], *, only_free: bool = False) -> tuple[str, Shape] | None:
    """Return the shape to change to, or to try, with the code of the verdict; None to keep the baseline.

    A shape is recommended if its whole 90 % interval is above 1. Changes that keep the loss come first. A change of the
    loss is recommended instead only if the lower end of its interval is above the net speed-up of the best of them; of
    several such changes, one of fewer fields with nearly all of the gain is preferred.

    Args:
        only_free: Whether changes of the loss are only proposed for a trial, because the loss law is far from its data.
    """
    known = [(candidate, net) for candidate in candidates if (net := candidate.gain) is not None]
    free = [(candidate, net) for candidate, net in known if candidate.is_free and net.low > 1.0]
    best_free = max(free, key=lambda pair: pair[1].factor, default=None)
    least = best_free[1].factor if best_free else 1.0
    sure = [(candidate, net) for candidate, net in known if not candidate.is_free and net.low > least]
    if sure and not only_free:
        most = max(sure, key=lambda pair: pair[1].low)[1].factor - 1.0
        nearly = [pair for pair in sure if pair[1].factor - 1.0 >= _MOST_OF_THE_GAIN * most]
        fewest = min(_count_changes(candidate) for candidate, _ in nearly)
        return "change", max(
            (pair for pair in nearly if _count_changes(pair[0]) == fewest), key=lambda pair: pair[1].low
        )[0]
    if best_free:
        return "free", best_free[0]
    likely = [(candidate, net) for candidate, net in known if net.probability_faster > LEAST_CHANCE]
    return ("trial", max(likely, key=lambda pair: pair[1].probability_faster)[0]) if likely else None


def judge_search(
    candidates: Sequence[Judged], *, is_training: bool, only_free: bool = False, unit: str = ""
) -> Verdict | None:
    """Return the verdict on a baseline; None where the loss law does not describe the model.

    Args:
        candidates: Shapes compared with it, best first.
        is_training: Whether training is compared, where speed and loss give one number: the time to the same loss.
        unit: Unit of the gains, in words, if it is not time.
    """
    if any(candidate.effect is None for candidate in candidates):
        return None
    if not is_training:
        return _judge_inference(candidates)
    found = recommend(candidates, only_free=only_free)
    if found is None:
        return Verdict(code="keep", text=f"keep your shape: {VERDICTS['keep']}")
    code, best = found
    net = best.gain
    assert net is not None
    interval = f"{net.factor:.3g}x ({net.low:.3g} to {net.high:.3g}){unit}"
    change = describe_change(best)
    depth = best.changes.get("num_layers")
    if code == "free":
        text = f"change {change}: same loss, {interval}"
    elif code == "change":
        direction = "" if depth is None else "deeper is better: " if depth[1] > depth[0] else "shallower is better: "
        text = f"{direction}change {change}: to the same loss {interval}"
    else:
        text = (
            f"keep your shape until a trial shows more: {change} is better with {100.0 * net.probability_faster:.0f} % "
            f"certainty, to the same loss {interval}"
        )
    return _verdict(code, text, best, net)


def _verdict(code: str, text: str, best: Judged, net: Speedup) -> Verdict:
    return Verdict(
        code=code,
        text=text,
        rank=best.rank,
        changes=best.changes,
        net_speedup=net.factor,
        net_speedup_low=net.low,
        net_speedup_high=net.high,
        chance_better=net.probability_faster,
    )


def _judge_inference(candidates: Sequence[Judged]) -> Verdict:
    """Return the verdict of a search in inference: a change that keeps the loss, else the first and its loss."""
    free = [shape for shape in candidates if shape.is_free and shape.speedup.low > 1.0]
    best = max(free, key=lambda shape: shape.speedup.factor, default=None)
    code = "free"
    if best is None:
        if not candidates:
            return Verdict(code="keep", text=f"keep your shape: {VERDICTS['keep']}")
        code, best = "trade", candidates[0]
    speedup, effect = best.speedup, best.effect
    assert effect is not None
    interval = f"{speedup.factor:.3g}x ({speedup.low:.3g} to {speedup.high:.3g})"
    text = f"change {describe_change(best)}: same loss, {interval}"
    if code == "trade":
        text = (
            f"faster shapes change the loss: {describe_change(best)} is {interval} for a loss difference of "
            f"{effect.difference_nats:+.3f} nats ({effect.difference_low_nats:+.3f} to "
            f"{effect.difference_high_nats:+.3f})"
        )
    return _verdict(code, text, best, speedup)
