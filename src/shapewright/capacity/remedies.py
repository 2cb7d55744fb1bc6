"""What makes a job fit in memory: recomputation, sharding, more model parallelism, smaller batches, priced in time.

On the same devices, which come first, and on as few more as it takes; of either, the time per token of all devices
together says which is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from typing import TYPE_CHECKING, Any

from shapewright.capacity.offload import OFFLOADS
from shapewright.dtypes import get_dtype
from shapewright.errors import ShapewrightError
from shapewright.hardware.nodes import fills_units
from shapewright.integers import divisors
from shapewright.layout import MOST_ZERO_STAGE_IN_PIPELINES, ParallelLayout
from shapewright.lowering import num_microbatches, validate_layout
from shapewright.memory import estimate_memory
from shapewright.perf.software import TUNED
from shapewright.predict import predict
from shapewright.workload import RECOMPUTE_MODES, Workload

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device

MOST_DEVICES = 2**18
_MOST_REMEDIES = 3  # on each number of devices
_MOST_LARGER_JOBS = 2  # numbers of devices beyond the present one that are looked at
# Predictions take some milliseconds each.
_MOST_PRICED = 64

_LARGEST_COUNT = 2**40
# Parts of a loss that leave little of the logits and products of still many rows.
_LOSS_CHUNKS = 8

_Split = tuple[int, int, int, int]  # tensor, pipeline, data and context degree
_CHANGES_OF_JOB = {"micro_batch_size", "dtype", "kv_cache_dtype"}
_LAYOUT_FIELDS = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "zero_stage")


@dataclass(frozen=True)
class Situation:
    """A job on a device."""

    config: TransformerConfig
    device: Device
    workload: Workload
    layout: ParallelLayout
    uncalibrated: bool = False
    software: str = TUNED

    def changed(self, changes: Mapping[str, Any]) -> Situation | None:
        """The same job with other values; None where they contradict each other or do not divide the model."""
        of_layout = {name: value for name, value in changes.items() if name in _LAYOUT_FIELDS}
        of_workload = {name: value for name, value in changes.items() if name not in _LAYOUT_FIELDS}
        try:
            layout = replace(self.layout, **of_layout)
            workload = replace(self.workload, **of_workload)
            validate_layout(self.config, workload, layout)
            num_microbatches(workload, layout)
        except ShapewrightError:
            return None
        return replace(self, workload=workload, layout=layout)

    @property
    def needed_bytes(self) -> float:
        """Memory of one device of the busiest stage. [byte]"""
        return estimate_memory(self.config, self.workload, self.layout).total_bytes

    def predict_time_per_token(self) -> tuple[float, float] | None:
        """Time of a step, and device time of a token; None where the device cannot be priced. [s]"""
        try:
            prediction = predict(
                self.config,
                device=self.device,
                workload=self.workload,
                layout=self.layout,
                uncalibrated=self.uncalibrated,
                software=self.software,
            )
        except ShapewrightError:
            return None
        return prediction.step_time_s, 1.0 / prediction.tokens_per_s_per_device


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changes that make a job fit.

    Attributes:
        changes: New values by field name of Workload and ParallelLayout.
        needed_bytes: Memory of one device after them. [byte]
        num_devices: Devices of the job after them.
        step_time_s: Predicted time of a step after them; None where the device cannot be priced. [s]
        slowdown_fraction: Device time per token gained on the job that does not fit, as a fraction of it; negative if
            the change is faster as well; None where it cannot be priced.
    """

    changes: Mapping[str, Any]
    needed_bytes: float
    num_devices: int
    step_time_s: float | None
    slowdown_fraction: float | None


def find_remedies(situation: Situation) -> tuple[tuple[Remedy, ...], Remedy | None]:
    """Find changes that make a job fit: those on the same devices first, then on more, each cheapest in time first.

    A set of changes is left out if part of it, or a milder form of it, is enough.

    Args:
        situation: A job that does not fit.

    Returns:
        At most three on the same devices, and on each of the two smallest larger numbers that are enough; none if not
        even MOST_DEVICES are. Then the second is what comes closest to fitting; otherwise it is None.
    """
    before = situation.predict_time_per_token()
    splits, nearest = _larger_splits(situation)
    remedies: list[Remedy] = []
    for fitting in (_fitting(situation, _same_devices(situation)), *_fitting_on_more(situation, splits)):
        priced = [_price(after, changes, before) for changes, after in _minimal(fitting)[:_MOST_PRICED]]
        remedies += sorted(priced, key=_slowdown)[:_MOST_REMEDIES]
    present = situation.layout.num_devices
    ordered = sorted(remedies, key=lambda remedy: (remedy.num_devices > present, *_slowdown(remedy)))
    return tuple(ordered), None if ordered else nearest


def _slowdown(remedy: Remedy) -> tuple[bool, float]:
    """Unpriced ones last."""
    return remedy.slowdown_fraction is None, remedy.slowdown_fraction or 0.0


def _fitting_on_more(situation: Situation, splits: list[_Split]) -> list[list[tuple[dict[str, Any], Situation]]]:
    """What fits on the fewest devices that are enough, if possible without smaller batches and narrower formats."""
    found: list[list[tuple[dict[str, Any], Situation]]] = []
    for keeps_job in (True, False):
        for _, group in groupby(_more_devices(situation, splits, keeps_job=keeps_job), key=lambda entry: entry[0]):
            fitting = _fitting(situation, (changes for _, changes in group))
            if fitting:
                found.append(fitting)
            if len(found) == _MOST_LARGER_JOBS:
                return found
        if found:
            break
    return found


def _price(after: Situation, changes: Mapping[str, Any], before: tuple[float, float] | None) -> Remedy:
    priced = after.predict_time_per_token()
    return Remedy(
        changes=changes,
        needed_bytes=after.needed_bytes,
        num_devices=after.layout.num_devices,
        step_time_s=priced[0] if priced else None,
        slowdown_fraction=priced[1] / before[1] - 1.0 if priced and before else None,
    )


def _fitting(situation: Situation, candidates: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], Situation]]:
    """Candidates that are possible and fit, fewest and mildest changes first."""
    found = []
    for changes in candidates:
        after = situation.changed(changes)
        if changes and after is not None and after.needed_bytes <= situation.device.memory_bytes:
            found.append((changes, after))
    return sorted(found, key=lambda entry: (len(entry[0]), *_strengths(entry[0])))


def _minimal(fitting: list[tuple[dict[str, Any], Situation]]) -> list[tuple[dict[str, Any], Situation]]:
    """Leave out every set of changes of which a part, or a milder form, is enough."""
    kept: list[tuple[dict[str, Any], Situation]] = []
    for changes, after in fitting:
        if not any(_is_part(milder, changes) for milder, _ in kept):
            kept.append((changes, after))
    return kept


def _is_part(milder: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    """Whether one set of changes holds another, as strong or stronger in what has degrees."""
    if not milder.keys() <= changes.keys():
        return False
    plain = milder.keys() - {"zero_stage", "recompute", "micro_batch_size"}
    return all(milder[name] == changes[name] for name in plain) and all(
        mine <= other for mine, other in zip(_strengths(milder), _strengths(changes), strict=True)
    )


def _strengths(changes: Mapping[str, Any]) -> tuple[int, int, int]:
    """How far sharding, recomputation and the cut of the micro-batch go; 0 where they are left alone."""
    recompute = changes.get("recompute")
    batch_size = changes.get("micro_batch_size")
    return (
        changes.get("zero_stage", 0),
        0 if recompute is None else RECOMPUTE_MODES.index(recompute),
        0 if batch_size is None else _LARGEST_COUNT // batch_size,
    )


def _same_devices(situation: Situation) -> Iterator[dict[str, Any]]:
    """Combinations of changes that need no further device."""
    layout = situation.layout
    present = (layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel, layout.context_parallel)
    splits = [present]
    for tensor, pipeline in _model_splits(situation):
        factor = tensor * pipeline // (layout.tensor_parallel * layout.pipeline_parallel)
        if factor > 1 and layout.data_parallel % factor == 0:
            splits.append((tensor, pipeline, layout.data_parallel // factor, layout.context_parallel))
    for split, changes in product(splits, _workload_changes(situation)):
        for stage in _zero_stages(situation, split):
            yield _only_new(situation, split, stage) | changes


def _more_devices(
    situation: Situation, splits: Iterable[_Split], *, keeps_job: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Larger jobs with their number of devices, the smallest first."""
    job_changes = [
        changes for changes in _workload_changes(situation) if not (keeps_job and changes.keys() & _CHANGES_OF_JOB)
    ]
    for split in splits:
        stages = _zero_stages(situation, split)
        # The last entries are the strongest: where they are not enough, nothing is.
        strongest = situation.changed(_only_new(situation, split, stages[-1]) | job_changes[-1])
        if strongest is not None and strongest.needed_bytes > situation.device.memory_bytes:
            continue
        for changes, stage in product(job_changes, stages):
            yield prod(split), _only_new(situation, split, stage) | changes


def _larger_splits(situation: Situation) -> tuple[list[_Split], Remedy | None]:
    """Splits of more devices, whole nodes, the fewest first, that may be enough; and what comes closest if none is.

    A family grows in replicas or in context ranks, not in both. More of them never need more memory of a device, so
    one whose largest member does not fit with everything turned on has none that does.
    """
    layout, strongest = situation.layout, _workload_changes(situation)[-1]
    growths = [2**power for power in range(MOST_DEVICES.bit_length())] if situation.workload.is_training else [1]
    by_axis = (
        [(layout.data_parallel * growth, layout.context_parallel) for growth in growths],
        [(layout.data_parallel, layout.context_parallel * growth) for growth in growths],
    )
    kept: set[_Split] = set()
    nearest: Remedy | None = None
    for (tensor, pipeline), axis in product(_model_splits(situation), by_axis):
        family = [
            split
            for split in ((tensor, pipeline, *pair) for pair in axis)
            if layout.num_devices < prod(split) <= MOST_DEVICES and fills_units(prod(split), situation.device)
        ]
        for split in reversed(family):
            changes = _only_new(situation, split, _zero_stages(situation, split)[-1]) | strongest
            after = situation.changed(changes)
            if after is None:
                continue
            needed_bytes = after.needed_bytes
            if needed_bytes <= situation.device.memory_bytes:
                kept.update(family)
            elif nearest is None or needed_bytes < nearest.needed_bytes:
                nearest = Remedy(
                    changes=changes,
                    needed_bytes=needed_bytes,
                    num_devices=prod(split),
                    step_time_s=None,
                    slowdown_fraction=None,
                )
            break
    return sorted(kept, key=lambda split: (prod(split), split)), nearest


def _only_new(situation: Situation, split: _Split, zero_stage: int) -> dict[str, Any]:
    """Those fields of a layout that differ from what they are."""
    values = dict(zip(_LAYOUT_FIELDS, (*split, zero_stage), strict=True))
    return {name: value for name, value in values.items() if value != getattr(situation.layout, name)}


def _model_splits(situation: Situation) -> list[tuple[int, int]]:
    """Tensor degrees inside a node and numbers of stages that divide the layers, multiples of the present ones."""
    layout = situation.layout
    tensors = [degree for degree in divisors(situation.device.node_size) if degree % layout.tensor_parallel == 0]
    stages = [count for count in divisors(situation.config.num_layers) if count % layout.pipeline_parallel == 0]
    return list(product(tensors or [layout.tensor_parallel], stages or [layout.pipeline_parallel]))


def _zero_stages(situation: Situation, split: _Split) -> range:
    """Sharding at least as far as it is, where there are replicas (context ranks are some) to shard over."""
    present, replicas = situation.layout.zero_stage, split[2] * split[3]
    most = MOST_ZERO_STAGE_IN_PIPELINES if split[1] > 1 else 3
    return range(present, max(present, most if situation.workload.is_training and replicas > 1 else present) + 1)


def _workload_changes(situation: Situation) -> list[dict[str, Any]]:
    """Combinations of recomputation, fused attention, narrower formats and smaller batches; none of them first."""
    workload = situation.workload
    choices: list[list[dict[str, Any]]] = [[{}]]
    choices.append([{}, *({"micro_batch_size": size} for size in _halves(workload.micro_batch_size))])
    if workload.attention == "unfused":
        choices.append([{}, {"attention": "flash"}])
    if workload.is_training:
        stronger = RECOMPUTE_MODES[RECOMPUTE_MODES.index(workload.recompute) + 1 :]
        choices.append([{}, *({"recompute": mode} for mode in stronger)])
        if workload.recompute_layers is not None and workload.recompute_layers < situation.config.num_layers:
            choices.append([{}, {"recompute_layers": situation.config.num_layers}])
        if workload.loss_chunks == 1:
            choices.append([{}, {"loss_chunks": _LOSS_CHUNKS}])
        choices += [[{}, {name: True}] for name in OFFLOADS if not getattr(workload, name)]
    else:
        if get_dtype(workload.kv_cache_dtype or workload.dtype).bits > 8:
            choices.append([{}, {"kv_cache_dtype": "fp8"}])
        if "fp8" in situation.device.dense_flops_per_s and get_dtype(workload.dtype).bits > 8:
            choices.append([{}, {"dtype": "fp8"}])
    combined = []
    for parts in product(*choices):
        changes: dict[str, Any] = {}
        for part in parts:
            changes |= part
        combined.append(changes)
    return combined


def _halves(batch_size: int) -> list[int]:
    """Half of a batch, half of that, and so on while it stays whole, and 1."""
    found = [batch_size >> power for power in range(1, batch_size.bit_length()) if batch_size % (1 << power) == 0]
    return found if batch_size == 1 or 1 in found else [*found, 1]
