"""The request of a search: fields to vary and to keep, the size of the model, and the limits of the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import ConfigError, close_names
from shapewright.core.ranges import check_integer, check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields
from shapewright.models.transformer import FIELD_NAMES, LAYER_PATTERNS
from shapewright.models.write import to_config_json
from shapewright.optimize.search.objective import Goal
from shapewright.optimize.search.space.guard import check_guard, has_grouped_heads

if TYPE_CHECKING:
    from shapewright.models.read import Model
    from shapewright.models.transformer import TransformerConfig

VARIED = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "kv_heads": "num_kv_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "depth": "num_layers",
    "width": "hidden_size",
    "micro_batch": "micro_batch_size",
}
"""Names of what can be varied on an axis of the grid, with the field of each."""

VARIED_IN_BRANCHES = ("experts", "layout", "recompute", "layer_types")
"""What else can be varied, with a grid for each combination; see search.branches."""

DEFAULT_VARIED = ("heads", "kv_heads", "ffn", "vocab", "depth", "width")

DEFAULT_VARIED_WITH_STAGES = (*DEFAULT_VARIED, "micro_batch")
"""The same for training over pipeline stages, where the micro-batch size decides the size of the bubble."""

FEWEST_PARAMETERS, MOST_PARAMETERS = 100_000, 10**14
"""Model sizes that a search accepts."""

LARGEST_TOLERANCE = 10.0

# Change of a width with which _why_fixed tests whether a config format can hold it. [element]
_TEST_STEP = 64


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What to search for.

    Attributes:
        vary: Keys of VARIED, and VARIED_IN_BRANCHES.
        keep: Values that fields must have, by the field's name or its key in VARIED.
        num_parameters: Parameters that shapes should have; None for as many as the baseline.
        tolerance_fraction: Accepted deviation from them, as a fraction.
        guard: One of the quality guards of search.space.guard.
        top: How many shapes to list; the recommended one is listed in any case.
        goal: What to minimize, and the training run that it concerns.

    Raises:
        ConfigError: an unknown field, a contradiction, or a size out of range.
    """

    vary: tuple[str, ...] = DEFAULT_VARIED
    keep: Mapping[str, int] = field(default_factory=dict)
    num_parameters: int | None = None
    tolerance_fraction: float = 0.02
    guard: str = "usual"
    top: int = 20
    goal: Goal = field(default_factory=Goal)

    def __post_init__(self) -> None:
        for name in self.vary:
            if name not in (*VARIED, *VARIED_IN_BRANCHES):
                choices = ", ".join((*VARIED, *VARIED_IN_BRANCHES))
                raise ConfigError(f"vary={name!r} is not known; {_hint(name)}choose among {choices}")
        check_guard(self.guard)
        if "layer_types" in self.vary and self.guard != "free":
            raise ConfigError(
                "vary='layer_types' changes the ratio of attention to other layers, whose effect on the loss no law "
                f"knows; it needs guard='free', not {self.guard!r}"
            )
        if self.num_parameters is not None:
            check_num_parameters(self.num_parameters)
        hint = "give a fraction such as 0.02 or 2%"
        check_number("tolerance_fraction", self.tolerance_fraction, 0, LARGEST_TOLERANCE, error=ConfigError, hint=hint)
        check_integer("top", self.top, 1, error=ConfigError)
        kept: dict[str, int] = {}
        for name, value in self.keep.items():
            field_name = field_of(name)
            if kept.setdefault(field_name, value) != value:
                raise ConfigError(
                    f"keep has {field_name}={kept[field_name]} and {field_name}={value}; give one of them"
                )
            check_integer(f"keep {name}", value, 1, error=ConfigError)
        object.__setattr__(self, "keep", kept)

    def free_fields(self) -> tuple[str, ...]:
        """Return the fields to vary that are not kept."""
        return tuple(name for name in self.vary if VARIED.get(name) not in self.keep)


def check_num_parameters(num_parameters: float) -> None:
    """Check that a search accepts a number of parameters.

    Raises:
        ConfigError: it is out of range.
    """
    hint = "give a count such as 2.7b"
    check_number("num_parameters", num_parameters, FEWEST_PARAMETERS, MOST_PARAMETERS, error=ConfigError, hint=hint)


def field_of(name: str) -> str:
    """Return the field that a key of ``keep`` names.

    Raises:
        ConfigError: there is no such field, or a search does not change it.
    """
    field_name = VARIED.get(name, name)
    field_name = "intermediate_size" if field_name == "moe_intermediate_size" else field_name
    if field_name in VARIED.values():
        return field_name
    if field_name in FIELD_NAMES:
        raise ConfigError(f"keep={name} has no effect: a search never changes it; leave it out")
    if name in VARIED_IN_BRANCHES:
        raise ConfigError(f"keep={name} takes no value: leave {name} out of vary to keep the model's own")
    raise ConfigError(
        f"keep={name!r} is not a field of a model; {_hint(name)}choose among {', '.join(VARIED.values())}"
    )


def ffn_field(config: TransformerConfig) -> str:
    """Return the field of the MLP width that a search varies: that of the experts in a mixture of experts."""
    return "moe_intermediate_size" if config.is_moe else "intermediate_size"


def _hint(name: str) -> str:
    own = [word for word, field in VARIED.items() if field == name]
    hint = f"did you mean {own[0]!r}?" if own else close_names(name, (*VARIED, *VARIED_IN_BRANCHES))
    return f"{hint} " if hint else ""


def keep_expressible(model: Model, request: SearchRequest) -> tuple[SearchRequest, tuple[str, ...]]:
    """Remove fields that the model's config format cannot hold from the default ones, with a note for each.

    Raises:
        ConfigError: a field that the user named cannot be varied.
    """
    kept, reasons = split_expressible(model, request.vary, request.guard)
    if reasons and request.vary not in (DEFAULT_VARIED, DEFAULT_VARIED_WITH_STAGES):
        name, reason = next(iter(reasons.items()))
        raise ConfigError(f"vary={name} is not possible: " + reason, advice="leave it out")
    return replace(request, vary=kept), notes_on_fixed(reasons)


def notes_on_fixed(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note for each field that a search leaves out."""
    return tuple(f"{name} is not varied: " + reason for name, reason in reasons.items())


def split_expressible(model: Model, vary: Sequence[str], guard: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the fields that can be varied, and why each of the others cannot."""
    reasons = {name: _why_fixed(model, name) for name in vary}
    if "depth" in reasons and guard != "free":
        reasons["depth"] = reasons["depth"] or _why_layers_repeat_unevenly(model.config)
    kept = tuple(name for name, reason in reasons.items() if not reason)
    return kept, {name: reason for name, reason in reasons.items() if reason}


def _why_fixed(model: Model, name: str) -> str:
    """Return why a field cannot be varied, or an empty string."""
    config = model.config
    if config.patches is not None and name == "vocab":
        return "a model of images has no vocabulary"
    if config.shares_keys and name in ("heads", "head_dim", "kv_heads"):
        shared = (
            "multi-head latent attention share one latent" if config.is_mla else "compressed attention share one key"
        )
        return f"the heads of {shared}"
    is_plain = config.num_kv_heads == config.num_heads and model.raw is not None
    if name == "kv_heads" and is_plain and not has_grouped_heads(config.model_type):
        return f"no public model of model_type {config.model_type!r} has fewer key-value heads than heads"
    if name == "depth":
        lists = {name: getattr(config, name) for name in LAYER_PATTERNS}
        if config.stack == "encoder-decoder":
            return "an encoder-decoder has two depths"
        for field_name, pattern in lists.items():
            if len(pattern) >= config.num_layers > 1:
                return with_fields("{name} names every layer", name=FieldName(field_name))
    if model.raw is None:
        return ""
    if not _can_write(model, config):
        config = _with_square_heads(config)
    changes = _example_change(config, name)
    if not changes or _can_write(model, replace(config, **changes)):
        return ""
    if name == "width":
        return f"a config.json of model_type {config.model_type!r} has sizes that follow it"
    return f"a config.json of model_type {config.model_type!r} has no field for it"


def _why_layers_repeat_unevenly(config: TransformerConfig) -> str:
    """Return why another depth of a hybrid would change the ratio of its kinds of layers, or an empty string."""
    period = config.hybrid_period
    if config.num_layers % period == 0:
        return ""
    return (
        f"the pattern of {period} layers does not divide the {config.num_layers}, so other depths have other shares of "
        + with_fields("each layer type; vary it with {guard:free}")
    )


def needs_square_heads(model: Model) -> bool:
    """Return whether the form of the model's config has no head width, so that heads divide the hidden size."""
    config = model.config
    if model.raw is None or config.shares_keys:
        return False
    if config.num_heads * config.head_dim != config.hidden_size and _can_write(model, config):
        return False
    config = _with_square_heads(config)
    return not _can_write(model, replace(config, **_example_change(config, "head_dim")))


def _with_square_heads(config: TransformerConfig) -> TransformerConfig:
    """Return the model with the hidden size of its heads, as a form without a head width has it."""
    width = config.num_heads * config.head_dim
    embedding_size = width if config.embedding_size == config.hidden_size else config.embedding_size
    return replace(config, hidden_size=width, embedding_size=embedding_size)


def _can_write(model: Model, config: TransformerConfig) -> bool:
    """Return whether the form of the model's config can hold a changed model."""
    try:
        to_config_json(model, config)
    except ConfigError:
        return False
    return True


def _example_change(config: TransformerConfig, name: str) -> dict[str, Any]:
    """Return one valid change of a field, with the fields that follow it."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    changes: dict[str, Any] = {}
    if name == "heads" and not heads % 2 and not kv_heads % 2:
        changes = {"num_heads": heads // 2, "num_kv_heads": kv_heads // 2, "head_dim": 2 * head_dim}
    elif name == "kv_heads":
        changes = {"num_kv_heads": 1 if kv_heads > 1 else heads}
    elif name == "head_dim":
        changes = {"head_dim": 2 * head_dim}
    elif name == "ffn":
        changes = {ffn_field(config): getattr(config, ffn_field(config)) + _TEST_STEP}
    elif name == "width":
        # Twice of everything that a search scales with the width.
        changes = {"hidden_size": 2 * config.hidden_size}
        scaled = [ffn_field(config)] + ([] if config.shares_keys else ["num_heads", "num_kv_heads"])
        changes |= {field_name: 2 * getattr(config, field_name) for field_name in scaled}
    elif name == "experts" and config.is_moe:
        changes = {"num_experts": 2 * config.num_experts}
    elif name == "vocab":
        changes = {"vocab_size": config.vocab_size + _TEST_STEP}
    followers = followers_of(config)
    return changes | {name: changes[leader] for name, leader in followers.items() if leader in changes}


def followers_of(config: TransformerConfig) -> dict[str, str]:
    """Return the fields that have the value of another field in the baseline, and follow it."""
    pairs = {
        "v_head_dim": "head_dim",
        "embedding_size": "hidden_size",
        "num_encoder_layers": "num_layers",
    }
    if config.is_moe:
        pairs |= dict.fromkeys(("intermediate_size", "shared_expert_intermediate_size"), "moe_intermediate_size")
    if config.is_mla:
        del pairs["v_head_dim"]
    return {
        follower: leader for follower, leader in pairs.items() if getattr(config, follower) == getattr(config, leader)
    }
