"""search_shapes: from a question and a request to shapes of the same size that run faster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shapewright.errors import ConfigError
from shapewright.layout import ParallelLayout
from shapewright.perf.software import TUNED, software_of
from shapewright.search.branches import list_branches
from shapewright.search.engine import explore, run_here
from shapewright.search.expressible import keep_expressible
from shapewright.search.finder import WORTH_IT, Finder
from shapewright.search.findings import Findings
from shapewright.search.job import Limits
from shapewright.search.memory import kv_bytes_per_token
from shapewright.search.refusal import refuse_empty
from shapewright.search.result import Candidate, SearchResult
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.config import Model
    from shapewright.hardware import Device
    from shapewright.search.engine import Progress, Runner
    from shapewright.search.request import SearchRequest
    from shapewright.workload import Workload

# Head widths that flash-attn's kernels are compiled for are multiples of it. [element]
_COMPILED_HEAD_UNIT = 32
# Key-value heads are cut to save cache: a tenth more is what widths and depths bring about anyway.
_MUCH_MORE_CACHE = 1.1
_HEAD_NOTE = (
    "a head width that is no multiple of 32 is computed as the next one; it reads less cache, as predicted here, only "
    "where the serving library stores heads unpadded"
)
# Source: arXiv 2402.07871 (Scaling laws for fine-grained mixture of experts).
_EXPERTS_NOTE = (
    "experts are held to equal total and active parameters, and no guard judges their number or how many a token uses: "
    "fewer, larger ones lose more in published fits (arXiv 2402.07871)"
)


def search_shapes(
    model: Model,
    device: Device,
    workload: Workload,
    layout: ParallelLayout,
    request: SearchRequest,
    *,
    others: Sequence[tuple[Device, Workload]] = (),
    per_step: bool = False,
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
    software: str = TUNED,
    run: Runner = run_here,
    progress: Progress | None = None,
) -> SearchResult:
    """Look for shapes of the same size that run faster.

    Args:
        model: The baseline; shapes are written in its form, so only fields that the form can hold are varied.
        device: What it runs on.
        workload: What is run.
        layout: How it is spread.
        request: What to vary, and how far.
        others: Further devices, each with the workload there: shapes are then ranked by the worst regret, which is
            their time over that of the shape that is best on a device.
        per_step: Make the step short (latency), and not the time of a token (throughput).
        notes: What there is to say about the question.
        uncalibrated: Price as if nobody had measured the device.
        software: Training software that runs it, as predict takes it.
        run: Runs the jobs of the search.
        progress: Told how many shapes of how many are done.

    Raises:
        ShapewrightError: the baseline cannot run, or the space is empty; says which constraint emptied it.
    """
    start_s = time.perf_counter()
    if per_step and "micro_batch" in request.free_fields():
        raise ConfigError("--vary micro_batch has no meaning for decode-latency, where 1 is fastest; leave it out")
    request, remarks = keep_expressible(model, request)
    stack = software_of(software, workload.phase)
    workload, more = hold_global_batch(stack.settle(workload), layout, request)
    notes += (*remarks, *more)
    if "experts" in request.free_fields() and model.config.is_moe:
        notes += (_EXPERTS_NOTE,)
    branches = list_branches(model.config, device, workload, layout, request)
    places = [(device, workload), *((other, stack.settle(theirs)) for other, theirs in others)]
    finders = [
        Finder(branches, place, request, per_step=per_step, uncalibrated=uncalibrated, software=stack)
        for place in places
    ]
    first = finders[0]
    limits, more = first.limits(request)
    notes += more
    for finder in finders[1:]:
        theirs, more = finder.limits(request)
        limits = replace(limits, memory_bytes=min(limits.memory_bytes, theirs.memory_bytes))
        notes += more
    least: dict[str, Findings] = {}
    if others:
        least = _find_least(finders, limits, request, run, progress)
        limits = _by_regret(limits, finders, least)
    findings = explore(first.jobs(limits, finders), run, progress)
    refuse_empty(findings, limits, first.spaces[0])
    tell = partial(_on_devices, finders, limits.least_costs)
    candidates = tuple(tell(candidate) for candidate in first.list_candidates(findings, request.top))
    notes += _say_what_came(candidates, findings, first, request)
    return SearchResult(
        model=model,
        baseline=tell(first.baseline),
        candidates=candidates,
        front=tuple(tell(candidate) for candidate in first.list_front(findings, candidates)),
        best_on={
            finder.device.name: tell(found)
            for finder in finders
            for found in first.list_best(least.get(finder.device.name))
        },
        tally=findings.tally,
        ranges=first.spaces[0].ranges,
        elapsed_s=time.perf_counter() - start_s,
        is_complete=findings.is_complete,
        notes=tuple(dict.fromkeys(notes)),
    )


def _find_least(
    finders: Sequence[Finder], limits: Limits, request: SearchRequest, run: Runner, progress: Progress | None
) -> dict[str, Findings]:
    """The best shapes of each device alone, by its name."""
    least = {}
    for finder in finders:
        own, _ = finder.limits(request)
        # Without bounds on time, so that the best is found even where no shape beats the baseline.
        own = replace(own, memory_bytes=limits.memory_bytes, cost=float("inf"), token_s=float("inf"))
        least[finder.device.name] = explore(finder.jobs(own, [finder]), run, progress)
        refuse_empty(least[finder.device.name], own, finders[0].spaces[0])
    return least


def _by_regret(limits: Limits, finders: Sequence[Finder], least: Mapping[str, Findings]) -> Limits:
    """Limits under which the cost of a shape is its worst regret over the devices."""
    least_costs = tuple(float(found.best["cost"].min()) for found in least.values() if found.best is not None)
    own_costs = [finder.own_cost for finder in finders]
    worst = max(cost / least_cost for cost, least_cost in zip(own_costs, least_costs, strict=True))
    return replace(limits, least_costs=least_costs, token_s=float("inf"), cost=worst * WORTH_IT)


def _say_what_came(
    candidates: Sequence[Candidate], findings: Findings, finder: Finder, request: SearchRequest
) -> tuple[str, ...]:
    """What there is to say about what was found, and about what was not."""
    notes = []
    config, device = finder.own.config, finder.device
    if not candidates:
        experts = " experts" if config.is_moe and "experts" not in request.vary else ""
        notes.append(
            f"no shape inside the limits is predicted to be faster; widen them with --vary{experts}, --tolerance or "
            f"--free"
        )
    notes += _say_cache(candidates, finder)
    decodes = finder.own.workload.phase == "decode"
    if decodes and any(shape.config.head_dim % _COMPILED_HEAD_UNIT for shape in candidates):
        notes.append(_HEAD_NOTE)
    if findings.tally.too_large:
        words = f"{findings.tally.too_large:,} faster shapes do not fit the memory of {device.name}"
        least_bytes = findings.tally.least_memory_bytes
        if not candidates and least_bytes is not None:
            words += f": the least of them needs {format_bytes(least_bytes)} of {format_bytes(device.memory_bytes)}"
        notes.append(words)
    return tuple(notes)


def _say_cache(candidates: Sequence[Candidate], finder: Finder) -> list[str]:
    """That shapes which train faster keep more keys and values, which only serving pays for."""
    config, workload = finder.own.config, finder.own.workload
    own_bytes = kv_bytes_per_token(config, workload)
    if not workload.is_training or own_bytes <= 0.0:
        return []
    growth = {
        shape.rank: shape.kv_bytes_per_token / own_bytes
        for shape in candidates
        if shape.config.num_kv_heads > config.num_kv_heads
    }
    worse = [rank for rank, factor in growth.items() if factor > _MUCH_MORE_CACHE]
    if not worse:
        return []
    which = f"ranks {', '.join(map(str, worse))} keep" if len(worse) > 1 else f"rank {worse[0]} keeps"
    return [
        f"{which} up to {max(growth.values()):.1f} times as many bytes of keys and values for a token, which training "
        f"does not pay for and serving does; --keep num_kv_heads={config.num_kv_heads} leaves them as they are"
    ]


def hold_global_batch(
    workload: Workload, layout: ParallelLayout, request: SearchRequest
) -> tuple[Workload, tuple[str, ...]]:
    """Give a training step the global batch of the baseline where layouts differ, so that all of them do the same work.

    Without one, each layout would take a micro-batch per replica and stage.
    """
    if "layout" not in request.free_fields() or not workload.is_training or workload.global_batch_size is not None:
        return workload, ()
    passes = workload.micro_batch_size * layout.data_parallel * layout.pipeline_parallel
    words = f"global batch held at the baseline's {passes} sequences, one micro-batch per replica and stage"
    return replace(workload, global_batch_size=passes), (f"{words}; give --global-batch for yours",)


def _on_devices(finders: Sequence[Finder], least_costs: Sequence[float], candidate: Candidate) -> Candidate:
    """A candidate with what it does on each of several devices."""
    if not least_costs:
        return candidate
    places = {
        finder.device.name: finder.on_device(candidate, least)
        for finder, least in zip(finders, least_costs, strict=True)
    }
    return replace(candidate, on_devices=places)
