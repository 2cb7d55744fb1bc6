"""Assume a layout for a measured job with a known number of devices: the fastest simple layout that fits.

Tensor parallelism stays inside a node, and states are sharded over replicas (ZeRO stage 1 or 3). The result explains a
measurement; it is not a plan, since interleaving and the context and expert axes are not tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import LayoutError, ShapewrightError
from shapewright.core.notes import Note
from shapewright.core.texts import with_fields
from shapewright.lowering.checks import validate_layout
from shapewright.lowering.counts import num_microbatches
from shapewright.pricing.software import TUNED_SOFTWARE
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

_DEGREES = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel")
_LARGEST_ASSUMED_MICRO_BATCH = 4


def assume_layout(
    scenario: Scenario,
    num_devices: int,
    given: Mapping[str, Any],
    *,
    keep_micro_batch: bool,
) -> tuple[Scenario, bool]:
    """Complete the layout of a training scenario for a number of devices.

    Args:
        scenario: Training with a global batch; its layout is ignored.
        given: Known fields of ParallelLayout; a missing data_parallel is derived from the number of devices.
        keep_micro_batch: Whether the micro-batch of the workload is known; otherwise it is chosen.

    Returns:
        The scenario with its layout and micro-batch, and with remarks on what was assumed; and whether a layout was
        found. Where none divides model and batch, the layout of the scenario is unchanged.

    Raises:
        LayoutError: the known degrees do not divide the devices.
    """
    if any(given.get(name) is not None for name in _DEGREES):
        known = scenario.replace(layout=_complete(num_devices, given))
        if keep_micro_batch:
            return known, True
        chosen = _with_largest_micro_batch(known)
        return _with_remark(chosen, _micro_batch_note(chosen)), True
    refusal = f"no split of {num_devices} devices is possible"
    # Candidates are ranked with the tuned stack, so that the assumed layout does not depend on the software.
    ranked_with = scenario.replace(software=TUNED_SOFTWARE)
    found: list[tuple[tuple[float, float], Scenario]] = []
    for layout in _candidates(scenario, num_devices, given):
        try:
            validate_layout(scenario.config, scenario.workload, layout)
            candidate = ranked_with.replace(layout=layout)
            if not keep_micro_batch:
                candidate = _with_largest_micro_batch(candidate)
            num_microbatches(candidate.workload, layout)
            missing_bytes = max(candidate.estimate_memory().total_bytes - candidate.device.memory_bytes, 0.0)
            step_s = candidate.predict().step_time_s if missing_bytes == 0.0 else 0.0
        except ShapewrightError as error:
            refusal = error.text
            continue
        found.append(((missing_bytes, step_s), candidate))
    if not found:
        text = f"no waterfall: no layout on {num_devices} devices can run the step: " + refusal
        return _with_remark(scenario, Note(text, "no-waterfall")), False
    _, best = min(found, key=lambda entry: entry[0])
    chosen = scenario.replace(workload=best.workload, layout=best.layout)
    return _with_remark(chosen, _layout_note(chosen)), True


def _with_remark(scenario: Scenario, remark: Note) -> Scenario:
    return scenario.replace(remarks=(*scenario.remarks, remark))


def _complete(num_devices: int, given: Mapping[str, Any]) -> ParallelLayout:
    """Build the layout of known degrees, with the remaining devices on the data axis."""
    fields = {name: value for name, value in given.items() if value is not None}
    if "data_parallel" not in fields:
        # Expert degrees must divide the devices of a stage, which are not known without the data degree.
        expert_degrees = ("expert_parallel", "expert_tensor_parallel")
        without_data = ParallelLayout(**{name: value for name, value in fields.items() if name not in expert_degrees})
        data_parallel, rest = divmod(num_devices, without_data.num_devices)
        if rest:
            raise LayoutError(
                f"num_devices={num_devices} must be a multiple of tensor * pipeline * context = "
                f"{without_data.num_devices}",
                advice=with_fields("change {num_devices} or the degrees"),
                field="num_devices",
            )
        fields["data_parallel"] = data_parallel
    return ParallelLayout(**fields)


def _candidates(scenario: Scenario, num_devices: int, given: Mapping[str, Any]) -> Iterator[ParallelLayout]:
    """Yield every split of the devices into tensor parallelism inside a node, pipeline stages and replicas."""
    fields = {name: value for name, value in given.items() if value is not None}
    pairs = [
        (tensor, pipeline)
        for tensor in range(1, min(scenario.device.node_size, num_devices) + 1)
        if num_devices % tensor == 0
        for pipeline in range(1, min(scenario.config.num_layers, num_devices // tensor) + 1)
        if num_devices // tensor % pipeline == 0
    ]
    for tensor, pipeline in pairs:
        replicas = num_devices // (tensor * pipeline)
        stages = (1, 3) if replicas > 1 else (0,)
        for zero_stage in (fields["zero_stage"],) if "zero_stage" in fields else stages:
            degrees = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "data_parallel": replicas}
            try:
                yield ParallelLayout(**{**fields, **degrees, "zero_stage": zero_stage})
            except LayoutError:
                continue


def _with_largest_micro_batch(scenario: Scenario) -> Scenario:
    """Choose the largest micro-batch up to 4 that divides the batch of a replica and fits in memory; 1 if none does."""
    data_parallel = scenario.layout.data_parallel
    replica_batch = (scenario.workload.global_batch_size or data_parallel) // data_parallel
    for size in range(min(_LARGEST_ASSUMED_MICRO_BATCH, replica_batch), 1, -1):
        candidate = scenario.replace(micro_batch_size=size)
        if replica_batch % size == 0 and candidate.estimate_memory().total_bytes <= scenario.device.memory_bytes:
            return candidate
    return scenario.replace(micro_batch_size=1)


def _micro_batch_note(scenario: Scenario) -> Note:
    size = scenario.workload.micro_batch_size
    text = f"assumed micro_batch_size={size}; set it if the measured one differs"
    return Note(text, "assumed", "micro_batch_size")


def _layout_note(scenario: Scenario) -> Note:
    layout = scenario.layout
    degrees = ", ".join(f"{name}={getattr(layout, name)}" for name in _DEGREES[:3])
    return Note(
        f"assumed for the waterfall: {degrees}, zero_stage={layout.zero_stage}, "
        f"micro_batch_size={scenario.workload.micro_batch_size}; "
        f"set those of the measured job if they differ",
        "assumed",
        "layout",
    )
