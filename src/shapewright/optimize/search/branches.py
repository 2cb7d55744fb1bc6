"""Branches of a search (layouts, recomputation, experts, layer types), and codes of the fields that a shape changes.

A grid of shapes has one layout, recomputation mode, set of experts and pattern of layer types. Each combination of them
is a branch with a grid of its own; the results of all branches are ranked together. The first branch is the baseline's.

The layouts of a search are the splits that a plan looks at, on as many devices as the baseline has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import ConfigError, ShapewrightError, WorkloadError
from shapewright.core.records import dataclass
from shapewright.lowering.checks import validate_layout
from shapewright.lowering.counts import num_microbatches
from shapewright.models.layers import ATTENTION
from shapewright.models.write import to_config_json
from shapewright.optimize.search.request import ffn_field
from shapewright.workload.workload import RECOMPUTE_MODES

if TYPE_CHECKING:
    from jaxtyping import Int

    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.search.request import SearchRequest
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.layout import ParallelLayout

    PerShape = Int[np.ndarray, " shapes"]

CHANGES = (
    "width",
    "depth",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "micro_batch",
    "experts",
    "layout",
    "recompute",
    "layer_types",
)
"""Fields that may change, in the order of the bits of a code; the last four are those of a branch."""

_PERIODS_OF_ATTENTION = (2, 3, 4, 6, 8, 12)
_EXPERT_UNIT = 64  # elements: a multiple of it keeps the rows of an expert aligned to a cache line
_MOST_SPLITS, _MOST_MERGES = 4, 4  # from a quarter of the baseline's number of experts to four times as many
_MOST_SHARED_EXPERTS = 4
_MOST_EXPERTS_PER_TOKEN = 32
_MOST_EXPERTS = 1024


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One combination of layout, recomputation, experts and layer types.

    Attributes:
        changes: Fields of the baseline's scenario that differ, as Scenario.replace takes them.
        changed: What differs, of ``experts``, ``layout``, ``recompute`` and ``layer_types``.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """Code of what differs, see encode_changes."""
        return encode_names(self.changed)


def list_branches(scenario: Scenario, request: SearchRequest) -> list[Branch]:
    """Return the branches of a request, the baseline's first.

    Raises:
        ConfigError: experts are to be varied and the model is dense.
        WorkloadError: recomputation is to be varied in inference.
    """
    config, workload = scenario.config, scenario.workload
    free = request.free_fields()
    layouts: list[dict[str, Any]] = [{}]
    if "layout" in free:
        layouts += [{"layout": layout} for layout in other_layouts(scenario)]
    modes: list[dict[str, Any]] = [{}]
    if "recompute" in free:
        if not workload.is_training:
            raise WorkloadError(f"vary=recompute has no meaning in phase={workload.phase!r}; leave it out")
        modes += [{"recompute": mode} for mode in RECOMPUTE_MODES if mode != workload.recompute]
    experts: list[dict[str, Any]] = [{}]
    if "experts" in free:
        if not config.is_moe:
            raise ConfigError("vary=experts needs a mixture of experts, and this model is dense; leave it out")
        experts += _other_experts(config, request.tolerance_fraction)
    patterns: list[dict[str, Any]] = [{}]
    if request.guard == "free":
        patterns += [{"layer_types": pattern} for pattern in _other_patterns(scenario)]
    branches = []
    for fields in product(experts, layouts, modes, patterns):
        parts = dict(zip(("experts", "layout", "recompute", "layer_types"), fields, strict=True))
        changed = tuple(name for name, values in parts.items() if values)
        changes = {name: value for values in fields for name, value in values.items()}
        branches.append(Branch(changes=changes, changed=changed))
    return [branch for branch in branches if not branch.changed or _divides_batch(scenario, branch)]


def other_layouts(scenario: Scenario) -> Iterator[ParallelLayout]:
    """Yield the other layouts of the same number of devices that divide the model and the batch.

    ZeRO stage, interleaving, schedule and sequence parallelism are the baseline's.

    Args:
        scenario: The baseline; its own layout is left out.
    """
    from shapewright.optimize.plan.request import PlanRequest
    from shapewright.optimize.plan.space import list_splits

    workload, layout = scenario.workload, scenario.layout
    # One micro-batch size for each split: a search varies it on an axis of the grid.
    kept = {"micro_batch_size": (1,), "sequence_parallel": (layout.sequence_parallel,)}
    request = PlanRequest(num_devices=layout.num_devices, kept=kept)
    splits = list_splits(
        scenario,
        request,
        num_devices=layout.num_devices,
        # In inference every replica has its own batch.
        global_batch_size=workload.global_batch_size or layout.num_devices,
    )
    for split in splits:
        try:
            other = replace(layout, **split.degrees)
            validate_layout(scenario.config, workload, other)
            num_microbatches(workload, other)
        except ShapewrightError:
            continue
        if other != layout:
            yield other


def _other_patterns(scenario: Scenario) -> Iterator[tuple[str, ...]]:
    """Yield other layer patterns of a hybrid: attention in every second to twelfth layer, the other mixer between.

    None if the model has several other mixers, or layers without an MLP; patterns that its config cannot hold are left
    out.
    """
    config, model = scenario.config, scenario.model
    kinds = set(config.layer_types)
    if len(kinds) != 2 or ATTENTION not in kinds or config.mlp_layers:
        return
    (linear,) = kinds - {ATTENTION}
    for period in _PERIODS_OF_ATTENTION:
        pattern = (*[linear] * (period - 1), ATTENTION)
        if pattern == config.layer_types or period > config.num_layers:
            continue
        try:
            to_config_json(model, replace(config, layer_types=pattern))
        except ConfigError:
            continue
        yield pattern


def _divides_batch(scenario: Scenario, branch: Branch) -> bool:
    """Return whether the branch's layout divides the batch, with the baseline's micro-batch size."""
    changed = scenario.replace(**branch.changes)
    try:
        num_microbatches(changed.workload, changed.layout)
    except ShapewrightError:
        return False
    return True


def _other_experts(config: TransformerConfig, tolerance: float) -> Iterator[dict[str, int]]:
    """Yield other numbers and widths of experts with equal total and active parameters, as fields of the config.

    With E routed experts of width f, k of them per token and n shared ones of that width, the total is (E + n) f and
    the active part (k + n) f. The width follows from the active part; the total must then be within the tolerance.
    """
    own = config.moe_intermediate_size
    total = config.num_experts * own + config.shared_expert_intermediate_size
    active = config.num_experts_per_token * own + config.shared_expert_intermediate_size
    has_shared = config.shared_expert_intermediate_size > 0
    numbers = [config.num_experts * factor for factor in range(1, _MOST_SPLITS + 1) if factor & (factor - 1) == 0]
    numbers += [config.num_experts // factor for factor in (2, _MOST_MERGES) if config.num_experts % factor == 0]
    seen = {(config.num_experts, config.num_experts_per_token, config.shared_expert_intermediate_size)}
    for num_experts in sorted(number for number in set(numbers) if 1 < number <= _MOST_EXPERTS):
        for num_shared in range(_MOST_SHARED_EXPERTS + 1) if has_shared else (0,):
            for per_token in range(1, min(num_experts, _MOST_EXPERTS_PER_TOKEN) + 1):
                width = round(active / (per_token + num_shared) / _EXPERT_UNIT) * _EXPERT_UNIT
                if width < _EXPERT_UNIT:
                    continue
                new_total, new_active = (num_experts + num_shared) * width, (per_token + num_shared) * width
                if max(abs(new_total / total - 1.0), abs(new_active / active - 1.0)) > tolerance:
                    continue
                shared = num_shared * width
                if (num_experts, per_token, shared) in seen:
                    continue
                seen.add((num_experts, per_token, shared))
                yield {
                    # Dense layers that are as wide as an expert keep its width.
                    "intermediate_size": width if config.intermediate_size == own else config.intermediate_size,
                    "num_experts": num_experts,
                    "num_experts_per_token": per_token,
                    "moe_intermediate_size": width,
                    "shared_expert_intermediate_size": shared,
                }


def encode_changes(shapes: Mapping[str, PerShape], scenario: Scenario, ffn_spacing: float) -> PerShape:
    """Encode which fields differ from the baseline, one bit for each of CHANGES.

    A field that only follows another does not count: an MLP is unchanged if it keeps its ratio to the hidden size, or
    is the nearest on the grid to one that does.

    Args:
        shapes: Varied fields, one entry per shape.
        ffn_spacing: Distance of neighboring MLP widths on the grid. [element]
    """
    config, name = scenario.config, ffn_field(scenario.config)
    width, heads, head_dim, kv_heads = (
        shapes[field] for field in ("hidden_size", "num_heads", "head_dim", "num_kv_heads")
    )
    has_other_width = width != config.hidden_size
    has_other_heads = head_dim != config.head_dim
    if not config.is_mla:
        # Equal heads at another width do not count: their ratio to a width that is off the grid changes slightly.
        has_other_heads = has_other_heads | (
            (heads != config.num_heads)
            & (heads * head_dim * config.hidden_size != config.num_heads * config.head_dim * width)
        )
    has_other_groups = (heads * config.num_kv_heads != kv_heads * config.num_heads) & (kv_heads != config.num_kv_heads)
    own = getattr(config, name)
    within = np.where(has_other_width, ffn_spacing / 2.0, 0.0)
    has_other_ffn = np.abs(shapes[name] * config.hidden_size - own * width) > within * config.hidden_size
    bits = {
        "width": has_other_width,
        "depth": shapes["num_layers"] != config.num_layers,
        "heads": has_other_heads,
        "kv_heads": has_other_groups,
        "ffn": has_other_ffn,
        "vocab": shapes["vocab_size"] != config.vocab_size,
        "micro_batch": shapes["micro_batch_size"] != scenario.workload.micro_batch_size,
    }
    code: Any = np.zeros(len(width), dtype=np.int64)
    for bit, change in enumerate(bits):
        code = code | (bits[change].astype(np.int64) << bit)
    return np.asarray(code)


def encode_names(changed: Iterable[str]) -> int:
    """Encode the names of changed fields.

    >>> encode_names(("heads", "vocab")) == 0b100100
    True
    """
    return sum(1 << CHANGES.index(change) for change in changed)


def decode_changes(code: int) -> tuple[str, ...]:
    """Return the names of the changed fields.

    >>> decode_changes(0b100100)
    ('heads', 'vocab')
    """
    return tuple(change for bit, change in enumerate(CHANGES) if code >> bit & 1)
