"""Find changes that make a job fit in memory: recomputation, sharding, parallelism, offload, smaller batches.

Changes on the same devices come first, then changes on the fewest additional devices. Within each group they are
ranked by predicted device time per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, product
from math import gcd, prod
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import ShapewrightError
from shapewright.core.numeric import divisors
from shapewright.core.records import dataclass
from shapewright.hardware.nodes import is_whole_allocation
from shapewright.lowering.checks import validate_layout
from shapewright.lowering.counts import num_microbatches
from shapewright.lowering.model import lower
from shapewright.lowering.operations.collective import Collective
from shapewright.pricing.host import LINK_FRACTION, host_link_bytes_per_s
from shapewright.workload.layout import MAX_ZERO_STAGE_IN_PIPELINES
from shapewright.workload.workload import OFFLOADS, RECOMPUTE_MODES

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Effect of one offload option, relative to the same job without it.

    Attributes:
        total_bytes: Device memory with the option. [byte]
        freed_bytes: Device memory that it frees. [byte]
        host_bytes: Host memory that it uses for one device. [byte]
        moved_bytes: Bytes over the host link in one step, both directions together. [byte]
        transfer_s: Time of the longer direction; None where the rate of the link is unknown. [s]
        exposed_s: Increase of the step time; None where either step cannot be priced. [s]
        exposed_fraction: Share of the copy time that is exposed; None where either step cannot be priced, or where the
            host does more than copy.
        step_time_s: Predicted step with the option; None where either step cannot be priced. [s]
    """

    total_bytes: float
    freed_bytes: float
    host_bytes: float
    moved_bytes: float
    transfer_s: float | None
    exposed_s: float | None
    exposed_fraction: float | None
    step_time_s: float | None


def estimate_offload(scenario: Scenario, option: str = "offload_activations") -> Offload | None:
    """Estimate the effect of an offload option on the fullest stage; None where the option is not possible.

    Args:
        scenario: The job, with or without the option.
        option: One of OFFLOADS.
    """
    try:
        without, with_option = (scenario.replace(**{option: is_on}) for is_on in (False, True))
    except ShapewrightError:  # not training, or an optimizer that cannot run on the host
        return None
    before, after = (job.estimate_memory() for job in (without, with_option))
    of_optimizer = option == "offload_optimizer"
    moved_bytes, longer_bytes = _moved_bytes(with_option, of_optimizer=of_optimizer)
    transfer_s: float | None = None
    try:
        transfer_s = longer_bytes / (LINK_FRACTION * host_link_bytes_per_s(scenario.device))
        steps = [job.predict().step_time_s for job in (without, with_option)]
    except ShapewrightError:
        steps = []
    exposed_s = steps[1] - steps[0] if steps else None
    copies_s = moved_bytes / longer_bytes * transfer_s if transfer_s and longer_bytes else 0.0
    return Offload(
        total_bytes=after.total_bytes,
        freed_bytes=before.total_bytes - after.total_bytes,
        host_bytes=after.host_bytes - before.host_bytes,
        moved_bytes=moved_bytes,
        transfer_s=transfer_s,
        exposed_s=exposed_s,
        exposed_fraction=None if exposed_s is None or of_optimizer or not copies_s else exposed_s / copies_s,
        step_time_s=steps[1] if steps else None,
    )


def _moved_bytes(scenario: Scenario, *, of_optimizer: bool) -> tuple[float, float]:
    """Return the bytes copied over the host link in one step, and those of its longer direction.

    Args:
        of_optimizer: Whether to count the copies of the optimizer, or all others.
    """
    to_host_bytes = from_host_bytes = 0.0
    for operation in lower(scenario.config, scenario.workload, scenario.layout, node_size=scenario.device.node_size):
        if not isinstance(operation, Collective) or operation.op_name != "host_copy":
            continue
        if (operation.block == "optimizer") == of_optimizer:
            moved = float(operation.message_bytes) * int(operation.repeats)
            if operation.role == "to_host":
                to_host_bytes += moved
            else:
                from_host_bytes += moved
    return to_host_bytes + from_host_bytes, max(to_host_bytes, from_host_bytes)


MOST_DEVICES = 2**18
_MOST_OPTIONS = 3  # per number of devices
_MOST_LARGER_JOBS = 2  # numbers of devices beyond the present one
# A prediction takes milliseconds.
_MOST_PRICED = 64

_LARGEST_COUNT = 2**40
# Chunks of the loss: few enough that the logit GEMM keeps many rows, and enough to make the logits small.
_LOSS_CHUNKS = 8

_Split = tuple[int, int, int, int, int]  # tensor, pipeline, data, context and expert degree
_CHANGES_OF_JOB = {"micro_batch_size", "dtype", "kv_cache_dtype"}
_LAYOUT_FIELDS = (
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "context_parallel",
    "expert_parallel",
    "zero_stage",
)


@dataclass(frozen=True, kw_only=True)
class FitOption:
    """Changes that make a job fit.

    Attributes:
        changes: New values by field name of Workload and ParallelLayout.
        needed_bytes: Memory of one device with the changes. [byte]
        num_devices: Devices of the changed job.
        step_time_s: Predicted step of the changed job; None where it cannot be priced. [s]
        slowdown_fraction: Increase of device time per token over the job that does not fit, as a fraction; negative for
            a speed-up; None where it cannot be priced.
    """

    changes: Mapping[str, Any]
    needed_bytes: float
    num_devices: int
    step_time_s: float | None
    slowdown_fraction: float | None


def find_fit_options(scenario: Scenario) -> tuple[tuple[FitOption, ...], FitOption | None]:
    """Find changes that make a job fit: first on the same devices, then on more, in each group the fastest first.

    A set of changes is omitted if a subset or a weaker form of it is sufficient.

    Args:
        scenario: A job that does not fit.

    Returns:
        The options: at most three on the same devices, and at most three on each of the two smallest larger numbers of
        devices that are sufficient. And, if nothing fits on up to MOST_DEVICES, the change that comes closest to
        fitting; otherwise None.
    """
    before = _predict_times(scenario)
    splits, closest = _larger_splits(scenario)
    options: list[FitOption] = []
    for fitting in (_fitting(scenario, _same_devices(scenario)), *_fitting_on_more(scenario, splits)):
        priced = [_price(after, changes, before) for changes, after in fitting[:_MOST_PRICED]]
        options += sorted(priced, key=_by_slowdown)[:_MOST_OPTIONS]
    present = scenario.layout.num_devices
    ordered = sorted(options, key=lambda option: (option.num_devices > present, *_by_slowdown(option)))
    return tuple(ordered), None if ordered else closest


def _changed(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario | None:
    """Copy the job with changes; None where they contradict each other or do not divide the model."""
    try:
        changed = scenario.replace(**changes)
        validate_layout(changed.config, changed.workload, changed.layout)
        num_microbatches(changed.workload, changed.layout)
    except ShapewrightError:
        return None
    return changed


def _needed_bytes(scenario: Scenario) -> float:
    """Return the memory of one device of the fullest stage. [byte]"""
    return scenario.estimate_memory().total_bytes


def _predict_times(scenario: Scenario) -> tuple[float, float] | None:
    """Predict the time of a step and the device time per token; None where the job cannot be priced. [s]"""
    outcome = scenario.outcome
    return None if isinstance(outcome, ShapewrightError) else (outcome.step_time_s, scenario.time_per_token_s)


def _by_slowdown(option: FitOption) -> tuple[bool, float]:
    """Sort key of the slowdown, options without a price last."""
    return option.slowdown_fraction is None, option.slowdown_fraction or 0.0


def _fitting_on_more(scenario: Scenario, splits: list[_Split]) -> list[list[tuple[dict[str, Any], Scenario]]]:
    """Find what fits on the fewest larger numbers of devices, if possible with the same batch and formats."""
    found: list[list[tuple[dict[str, Any], Scenario]]] = []
    for keeps_job in (True, False):
        for _, group in groupby(_more_devices(scenario, splits, keeps_job=keeps_job), key=lambda entry: entry[0]):
            fitting = _fitting(scenario, (changes for _, changes in group))
            if fitting:
                found.append(fitting)
            if len(found) == _MOST_LARGER_JOBS:
                return found
        if found:
            break
    return found


def _price(after: Scenario, changes: Mapping[str, Any], before: tuple[float, float] | None) -> FitOption:
    priced = _predict_times(after)
    return FitOption(
        changes=changes,
        needed_bytes=_needed_bytes(after),
        num_devices=after.layout.num_devices,
        step_time_s=priced[0] if priced else None,
        slowdown_fraction=priced[1] / before[1] - 1.0 if priced and before else None,
    )


def _fitting(scenario: Scenario, candidates: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], Scenario]]:
    """Select the candidates that are possible and fit, the fewest and weakest changes first.

    A set of changes of which a subset or a weaker form is sufficient is omitted, without an estimate of its memory.
    """
    kept: list[tuple[dict[str, Any], Scenario]] = []
    for changes in sorted(candidates, key=lambda entry: (len(entry), *_strengths(entry))):
        if not changes or any(_is_weaker(weaker, changes) for weaker, _ in kept):
            continue
        after = _changed(scenario, changes)
        if after is not None and _needed_bytes(after) <= scenario.device.memory_bytes:
            kept.append((changes, after))
    return kept


def _is_weaker(weaker: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Whether a set of changes is a subset of another, with at most the same strength of each change."""
    if not weaker.keys() <= changes.keys():
        return False
    plain = weaker.keys() - {"zero_stage", "recompute", "micro_batch_size"}
    return all(weaker[name] == changes[name] for name in plain) and all(
        mine <= other for mine, other in zip(_strengths(weaker), _strengths(changes), strict=True)
    )


def _strengths(changes: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the strength of sharding, recomputation and micro-batch reduction; 0 where unchanged."""
    recompute = changes.get("recompute")
    batch_size = changes.get("micro_batch_size")
    return (
        changes.get("zero_stage", 0),
        0 if recompute is None else RECOMPUTE_MODES.index(recompute),
        0 if batch_size is None else _LARGEST_COUNT // batch_size,
    )


def _same_devices(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Yield combinations of changes on the same number of devices."""
    layout = scenario.layout
    splits: list[_Split] = []
    for tensor, pipeline in _model_splits(scenario):
        factor, rest = divmod(tensor * pipeline, layout.tensor_parallel * layout.pipeline_parallel)
        if not rest and layout.data_parallel % factor == 0:
            data = layout.data_parallel // factor
            experts = _expert_degrees(scenario, data * layout.context_parallel)
            splits += [(tensor, pipeline, data, layout.context_parallel, expert) for expert in experts]
    for split, changes in product(splits, _workload_changes(scenario)):
        for stage in _zero_stages(scenario, split):
            yield _changed_fields(scenario, split, stage) | changes


def _more_devices(
    scenario: Scenario, splits: Iterable[_Split], *, keeps_job: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield changes with their number of devices, the smallest first."""
    job_changes = [
        changes for changes in _workload_changes(scenario) if not (keeps_job and changes.keys() & _CHANGES_OF_JOB)
    ]
    for split in splits:
        stages = _zero_stages(scenario, split)
        # The last entries save the most memory: where they are not sufficient, no other combination is.
        strongest = _changed(scenario, _changed_fields(scenario, split, stages[-1]) | job_changes[-1])
        if strongest is not None and _needed_bytes(strongest) > scenario.device.memory_bytes:
            continue
        for changes, stage in product(job_changes, stages):
            yield _num_devices(split), _changed_fields(scenario, split, stage) | changes


def _larger_splits(scenario: Scenario) -> tuple[list[_Split], FitOption | None]:
    """Find splits over more devices (whole nodes) that may fit, the fewest devices first, and the closest to fitting.

    Splits of one family have more and more replicas at one expert degree, or more and more context ranks, or replicas
    that divide the experts among them. Memory per device never grows along a family: where the largest split does not
    fit with the strongest changes, no split of the family does.
    """
    layout, strongest = scenario.layout, _workload_changes(scenario)[-1]
    growths = [2**power for power in range(MOST_DEVICES.bit_length())] if scenario.workload.is_training else [1]
    data, context, expert = layout.data_parallel, layout.context_parallel, layout.expert_parallel
    degrees = _expert_degrees(scenario, scenario.config.num_experts)
    by_axis = (
        *([(data * growth, context, each) for growth in growths if not data * growth % each] for each in degrees),
        [(data, context * growth, expert) for growth in growths],
        [(data * each // expert, context, each) for each in degrees],
    )
    kept: set[_Split] = set()
    closest: FitOption | None = None
    for (tensor, pipeline), axis in product(_model_splits(scenario), by_axis):
        family = [
            split
            for split in ((tensor, pipeline, *others) for others in axis)
            if layout.num_devices < _num_devices(split) <= MOST_DEVICES
            and is_whole_allocation(_num_devices(split), scenario.device)
        ]
        for split in reversed(family):
            changes = _changed_fields(scenario, split, _zero_stages(scenario, split)[-1]) | strongest
            after = _changed(scenario, changes)
            if after is None:
                continue
            needed_bytes = _needed_bytes(after)
            if needed_bytes <= scenario.device.memory_bytes:
                kept.update(family)
            elif closest is None or needed_bytes < closest.needed_bytes:
                closest = FitOption(
                    changes=changes,
                    needed_bytes=needed_bytes,
                    num_devices=_num_devices(split),
                    step_time_s=None,
                    slowdown_fraction=None,
                )
            break
    return sorted(kept, key=lambda split: (_num_devices(split), split)), closest


def _num_devices(split: _Split) -> int:
    """Return the devices of a split; ranks of the expert axis are replicas or context ranks."""
    return prod(split[:4])


def _expert_degrees(scenario: Scenario, num_replicas: int) -> list[int]:
    """Return the expert degrees that divide experts and replicas, multiples of the present one, which is the first."""
    present, experts = scenario.layout.expert_parallel, scenario.config.num_experts
    more = divisors(gcd(experts, num_replicas)) if scenario.config.is_moe else ()
    return [present, *(degree for degree in more if degree > present and degree % present == 0)]


def _changed_fields(scenario: Scenario, split: _Split, zero_stage: int) -> dict[str, Any]:
    """Return the fields of a split that differ from the present layout."""
    values = dict(zip(_LAYOUT_FIELDS, (*split, zero_stage), strict=True))
    return {name: value for name, value in values.items() if value != getattr(scenario.layout, name)}


def _model_splits(scenario: Scenario) -> list[tuple[int, int]]:
    """Return tensor degrees inside a node and stage counts that divide the layers, multiples of the present ones."""
    layout = scenario.layout
    tensors = [degree for degree in divisors(scenario.device.node_size) if degree % layout.tensor_parallel == 0]
    stages = [count for count in divisors(scenario.config.num_layers) if count % layout.pipeline_parallel == 0]
    return list(product(tensors or [layout.tensor_parallel], stages or [layout.pipeline_parallel]))


def _zero_stages(scenario: Scenario, split: _Split) -> range:
    """Return the ZeRO stages from the present one up, where there are replicas or context ranks to shard over."""
    present, replicas = scenario.layout.zero_stage, split[2] * split[3]
    most = MAX_ZERO_STAGE_IN_PIPELINES if split[1] > 1 else 3
    return range(present, max(present, most if scenario.workload.is_training and replicas > 1 else present) + 1)


def _workload_changes(scenario: Scenario) -> list[dict[str, Any]]:
    """Return combinations of recomputation, fused attention, offload, narrower formats and smaller batches."""
    workload = scenario.workload
    choices: list[list[dict[str, Any]]] = [[{}]]
    choices.append([{}, *({"micro_batch_size": size} for size in _halves(workload.micro_batch_size))])
    if workload.attention == "unfused":
        choices.append([{}, {"attention": "flash"}])
    if workload.is_training:
        stronger = RECOMPUTE_MODES[RECOMPUTE_MODES.index(workload.recompute) + 1 :]
        choices.append([{}, *({"recompute": mode} for mode in stronger)])
        if workload.recompute_layers is not None and workload.recompute_layers < scenario.config.num_layers:
            choices.append([{}, {"recompute_layers": scenario.config.num_layers}])
        if workload.loss_chunks == 1 and workload.kernels != "fused":
            choices.append([{}, {"loss_chunks": _LOSS_CHUNKS}])
        choices += [[{}, {name: True}] for name in OFFLOADS if not getattr(workload, name)]
    else:
        if get_dtype(workload.kv_cache_dtype or workload.dtype).bits > 8:
            choices.append([{}, {"kv_cache_dtype": "fp8"}])
        if "fp8" in scenario.device.dense_flops_per_s and get_dtype(workload.dtype).bits > 8:
            choices.append([{}, {"dtype": "fp8"}])
    combined = []
    for parts in product(*choices):
        changes: dict[str, Any] = {}
        for part in parts:
            changes |= part
        combined.append(changes)
    return combined


def _halves(batch_size: int) -> list[int]:
    """Return a batch divided by 2, 4, 8... while that is an integer, and 1."""
    found = [batch_size >> power for power in range(1, batch_size.bit_length()) if batch_size % (1 << power) == 0]
    return found if batch_size == 1 or 1 in found else [*found, 1]
