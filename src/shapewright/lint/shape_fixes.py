"""Fixes that change the shape of a model: aligned widths, other head counts, hidden sizes and depths.

Legend: h hidden_size, a num_heads, a_kv num_kv_heads, d head_dim, f intermediate_size, L num_layers.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.numeric import round_up
from shapewright.core.records import dataclass
from shapewright.lint.rule import Fix
from shapewright.lowering.shard import wide_gemm_dtype

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.layout import ParallelLayout

# Head dimensions that fused attention kernels are compiled for; others are padded to the next larger one.
# Source: Dao-AILab/flash-attention, one file per head dimension under csrc/flash_attn/src (v2) and hopper (v3).
FUSED_HEAD_DIMS = (32, 64, 96, 128, 192, 256)

# Alignment that vector loads of fused attention kernels need. [byte] Source: flash-attention kernels require head
# dimensions that are multiples of 8 fp16 elements; its Python layer pads others.
FUSED_ALIGNMENT_BYTES = 16


def full_width_multiple(device: Device, dtype: str) -> int:
    """Return the multiple, in elements, of a contiguous dimension that allows full-width loads.

    >>> from shapewright.hardware.loader import load_device
    >>> [full_width_multiple(load_device(name), "fp16") for name in ("a100-sxm-40gb", "v100-sxm2-16gb")]
    [64, 8]
    """
    return device.architecture_facts.full_width_bytes * 8 // get_dtype(dtype).bits


def nearest_multiples(value: int, multiple: int) -> tuple[int, ...]:
    """Return the nearest multiples below and above a value, nearest first, without zero and the value itself.

    >>> nearest_multiples(10922, 64), nearest_multiples(30, 64)
    ((10944, 10880), (64,))
    """
    above = round_up(value, multiple)
    found = sorted({above, above - multiple} - {0, value}, key=lambda candidate: abs(candidate - value))
    return tuple(found)


def largest_power_of_two(value: int) -> int:
    """Return the largest power of two that divides a number.

    >>> largest_power_of_two(80), largest_power_of_two(50257)
    (16, 1)
    """
    return value & -value


def list_mlp_width_fields(config: TransformerConfig) -> tuple[str, ...]:
    """Return the names of the MLP width fields that the model uses."""
    names = []
    if not config.is_moe or any(not group.is_moe for group in config.layer_groups()):
        names.append("intermediate_size")
    if config.is_moe:
        names.append("moe_intermediate_size")
    if config.shared_expert_intermediate_size:
        names.append("shared_expert_intermediate_size")
    return tuple(names)


def count_width_shards(layout: ParallelLayout, name: str) -> int:
    """Return the number of devices that an MLP width is split over; routed experts may have their own."""
    return layout.expert_tensor_degree if name == "moe_intermediate_size" else layout.tensor_parallel


def width_degree_field(layout: ParallelLayout, name: str) -> str:
    """Return the name of the layout field that splits an MLP width."""
    has_own_degree = name == "moe_intermediate_size" and layout.has_own_expert_degree
    return "expert_tensor_parallel" if has_own_degree else "tensor_parallel"


def whole_expert_fixes(scenario: Scenario) -> tuple[Fix, ...]:
    """Suggest expert parallelism with whole experts instead of experts split over the tensor axis, where possible."""
    layout = scenario.layout
    expert_shards = layout.expert_tensor_degree
    degree = layout.expert_parallel * expert_shards
    # In training, whole experts need devices that send different tokens.
    sends_own_tokens = layout.sequence_parallel or layout.tensor_parallel == 1 or not scenario.workload.is_training
    if expert_shards == 1 or scenario.config.num_experts % degree or not sends_own_tokens:
        return ()
    title = f"use expert_tensor_parallel=1 with expert_parallel={degree}"
    return (Fix(kind="runtime", title=title, changes={"expert_tensor_parallel": 1, "expert_parallel": degree}),)


def width_fixes(scenario: Scenario, name: str) -> tuple[Fix, ...]:
    """Suggest the nearest MLP widths that are multiples of a full-width load, or of four, on each device."""
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype) * count_width_shards(scenario.layout, name)
    width = getattr(scenario.config, name)
    # The first multiple gives aligned loads, the second whole tiles of the usual kernels (64 and 256 fp16 elements).
    candidates = dict.fromkeys((*nearest_multiples(width, multiple), *nearest_multiples(width, 4 * multiple)))
    return tuple(Fix(kind="retrain", title=f"use {candidate}", changes={name: candidate}) for candidate in candidates)


HEAD_DIMS = (64, 80, 96, 128, 160, 192, 256)
"""Head dimensions of published models that fused kernels support."""

USUAL_HEAD_DIM = 128
"""Head dimension of most models published since 2023; wider heads are faster, but rare."""

_SMALLEST_SPLIT = 2  # even head counts stay even, since an odd one does not allow tensor parallelism

Changes = dict[str, Any]


def with_head_dim(config: TransformerConfig, head_dim: int) -> Changes | None:
    """Change the head dimension at the same a d and a_kv d, so with the same parameter count.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> gpt3_2_7b = TransformerConfig(hidden_size=2560, num_layers=32, num_heads=32, vocab_size=50257)
    >>> with_head_dim(gpt3_2_7b, 128)["num_heads"]
    20
    """
    if config.shares_keys or config.v_head_dim != config.head_dim or head_dim == config.head_dim:
        return None
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if query_width % head_dim or kv_width % head_dim:
        return None
    num_heads, num_kv_heads = query_width // head_dim, kv_width // head_dim
    if num_heads % num_kv_heads or not keeps_divisibility(config.num_heads, num_heads, _SMALLEST_SPLIT):
        return None
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
    }


def keeps_divisibility(old: int, new: int, largest: int) -> bool:
    """Return whether a new head count is divisible by the powers of two, up to a limit, that divide the old one.

    >>> keeps_divisibility(32, 20, 4), keeps_divisibility(14, 7, 2), keeps_divisibility(25, 5, 2)
    (True, False, True)
    """
    return new % min(largest, largest_power_of_two(old)) == 0


def candidate_head_dims(config: TransformerConfig) -> tuple[int, ...]:
    """Return head dimensions to try: up to 128, or up to twice the model's own where that is 128 or more.

    Fewer and wider heads are nearly always faster; without a limit every model would get heads of 256. The paper
    changes head_dim from 80 to 128 and from 128 to 256 (arXiv 2401.14489).
    """
    largest = USUAL_HEAD_DIM if config.head_dim < USUAL_HEAD_DIM else 2 * config.head_dim
    return tuple(width for width in HEAD_DIMS if width <= largest and width != config.head_dim)


def has_square_attention(config: TransformerConfig) -> bool:
    """Return whether a d equals h."""
    return not config.is_mla and config.num_heads * config.head_dim == config.hidden_size


def with_hidden_size(config: TransformerConfig, hidden_size: int, multiple: int) -> Changes | None:
    """Change the hidden size, with heads and MLP width in proportion; None where no head count fits.

    The head dimension stays where it divides the new hidden size; otherwise the nearest usual one is chosen. Queries
    per key-value head and f / h stay, with f rounded to a multiple; experts keep their width.
    """
    changes: Changes = {"hidden_size": hidden_size}
    if has_square_attention(config):
        queries_per_kv = config.num_heads // config.num_kv_heads
        usual = sorted({config.head_dim, *HEAD_DIMS}, key=lambda width: abs(width - config.head_dim))
        for head_dim in usual:
            num_heads, rest = divmod(hidden_size, head_dim)
            if not rest and num_heads and num_heads % queries_per_kv == 0:
                changes |= {"num_heads": num_heads, "num_kv_heads": num_heads // queries_per_kv, "head_dim": head_dim}
                changes["v_head_dim"] = head_dim if config.v_head_dim == config.head_dim else config.v_head_dim
                break
        else:
            return None
    if "intermediate_size" in list_mlp_width_fields(config):
        ratio = config.intermediate_size / config.hidden_size
        changes["intermediate_size"] = max(multiple, round(ratio * hidden_size / multiple) * multiple)
    if config.embedding_size == config.hidden_size:
        changes["embedding_size"] = hidden_size
    return changes


def can_change_depth(config: TransformerConfig) -> bool:
    """Return whether the depth can change: one stack, and no pattern of MLPs or mixers that names every layer."""
    named = max(len(config.moe_layers), len(config.layer_types), len(config.mlp_layers))
    return config.stack != "encoder-decoder" and named < config.num_layers


# Head dimension at which attention throughput saturates. Source: flash-attention's benchmark figures (head dimension 64
# against 128); arXiv 2401.14489, figure 12 (flat from h/a of about 80 on).
LARGE_ENOUGH_HEAD_DIM = 128

_ATTENTION_BITS = 16  # attention runs in 16 bits also where GEMMs run in 8 bits or less


@dataclass(frozen=True)
class HeadDimProblem:
    """Reason why a head dimension is slow.

    Attributes:
        text: Continues ``head_dim=80 `` in the message.
        wanted: Description of valid values.
    """

    text: str
    wanted: str


def head_dim_problem(scenario: Scenario, head_dim: int = 0) -> HeadDimProblem | None:
    """Find why a head dimension is slow with the attention kernels in use; None where it is not.

    Args:
        head_dim: The head dimension; 0 for that of the model.
    """
    head_dim = head_dim or scenario.config.head_dim
    if scenario.config.shares_keys:
        return None
    if scenario.workload.attention == "unfused":
        dtype = wide_gemm_dtype(scenario.workload.dtype)
        multiple = full_width_multiple(scenario.device, dtype)
        if head_dim % multiple == 0:
            return None
        return HeadDimProblem(
            text=f"is not a multiple of {multiple} (unfused, {dtype} on {scenario.device.name})",
            wanted=f"a multiple of {multiple}",
        )
    wanted = "one of " + ", ".join(map(str, FUSED_HEAD_DIMS))
    multiple = FUSED_ALIGNMENT_BYTES * 8 // _ATTENTION_BITS
    if head_dim % multiple:
        return HeadDimProblem(text=f"is not a multiple of {multiple}, so fused attention pads it", wanted=wanted)
    if head_dim in FUSED_HEAD_DIMS:
        return None
    larger = next((width for width in FUSED_HEAD_DIMS if width > head_dim), None)
    if larger is None:
        return HeadDimProblem(text=f"is above {FUSED_HEAD_DIMS[-1]}, which fused kernels stop at", wanted=wanted)
    return HeadDimProblem(text=f"runs in the fused kernel for {larger}, padded", wanted=wanted)


def head_count_fixes(scenario: Scenario, *, larger_only: bool, smallest: int = 0) -> tuple[Fix, ...]:
    """Suggest other head counts at the same total width, with head dimensions that the kernels support."""
    fixes = []
    for head_dim in candidate_head_dims(scenario.config):
        if (
            head_dim < smallest
            or (larger_only and head_dim <= scenario.config.head_dim)
            or head_dim_problem(scenario, head_dim)
        ):
            continue
        changes = with_head_dim(scenario.config, head_dim)
        if changes and _divide_over_tensor_axis(
            changes["num_heads"], changes["num_kv_heads"], scenario.layout.tensor_parallel
        ):
            title = f"use num_heads={changes['num_heads']} (head_dim {head_dim})"
            fixes.append(Fix(kind="retrain", title=title, changes=changes))
    return tuple(fixes)


def split_head_fixes(scenario: Scenario) -> tuple[Fix, ...]:
    """Suggest the nearest head counts below and above that divide over the tensor axis, of the same head dimension."""
    config, t = scenario.config, scenario.layout.tensor_parallel
    queries_per_kv = config.num_heads // config.num_kv_heads
    found: dict[int, int] = {}
    for num_heads in nearest_multiples(config.num_heads, t) if config.num_heads % t else (config.num_heads,):
        # The number of queries per key-value head stays as close to the present one as possible.
        counts = [
            count
            for count in range(1, num_heads + 1)
            if num_heads % count == 0 and _divide_over_tensor_axis(num_heads, count, t)
        ]
        if counts:
            found[num_heads] = min(counts, key=lambda count: abs(log(num_heads / count / queries_per_kv)))
    fixes = []
    for num_heads, num_kv_heads in found.items():
        changes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        title = f"use num_heads={num_heads}" + (f", num_kv_heads={num_kv_heads}" if queries_per_kv > 1 else "")
        fixes.append(Fix(kind="retrain", title=title, changes=changes))
    return tuple(fixes)


def head_dim_fixes(scenario: Scenario) -> tuple[Fix, ...]:
    """Suggest the nearest supported head dimensions at the same head count."""
    own = scenario.config.head_dim
    supported = [width for width in HEAD_DIMS if head_dim_problem(scenario, width) is None]
    nearest = [width for width in supported if width < own][-1:] + [width for width in supported if width > own][:1]
    fixes = []
    for width in nearest:
        changes = {"head_dim": width}
        if scenario.config.v_head_dim == own:
            changes["v_head_dim"] = width
        fixes.append(Fix(kind="retrain", title=f"use head_dim={width}", changes=changes))
    return tuple(fixes)


def drop_smaller_heads(scenario: Scenario, fixes: tuple[Fix, ...]) -> tuple[Fix, ...]:
    """Drop fixes with smaller heads, if a fix without smaller heads is faster than the present shape.

    Otherwise a suggestion would violate the rule on small heads.
    """
    least = min(scenario.config.head_dim, LARGE_ENOUGH_HEAD_DIM)
    not_smaller = tuple(fix for fix in fixes if fix.changes["head_dim"] >= least)
    return not_smaller if any(_is_faster(scenario, fix) for fix in not_smaller) else fixes


def _is_faster(scenario: Scenario, fix: Fix) -> bool:
    after = scenario.try_replace(fix.changes)
    if after is None or not scenario.is_possible or not after.is_possible:
        return False
    return after.time_per_token_s < scenario.time_per_token_s


def _divide_over_tensor_axis(num_heads: int, num_kv_heads: int, degree: int) -> bool:
    """Whether heads divide over the tensor axis, with replicated key-value heads if necessary."""
    return num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)
