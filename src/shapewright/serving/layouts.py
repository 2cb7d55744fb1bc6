"""Layouts that an instance of a server may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shapewright.errors import LayoutError
from shapewright.layout import ParallelLayout
from shapewright.lowering import validate_layout

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.workload import Workload

MOST_STAGES = 8
_VARIED = ("tensor_parallel", "pipeline_parallel", "expert_parallel")


def candidate_layouts(
    config: TransformerConfig, device: Device, workload: Workload, most_devices: int, given: Mapping[str, Any]
) -> Iterator[ParallelLayout]:
    """Layouts of one instance, fewest devices first.

    Tensor degrees stay inside a node. Expert parallel ranks hold attention as replicas, each with sequences of its own
    (data parallel attention); so an expert degree is a data degree as well.

    Args:
        config: The model.
        device: Gives the size of a node.
        workload: An inference workload, for what it forbids.
        most_devices: Devices that an instance may have.
        given: Degrees that are fixed, by field name.
    """
    tensors = _degrees(given, "tensor_parallel", min(device.node_size, most_devices))
    stages = _degrees(given, "pipeline_parallel", min(MOST_STAGES, config.num_layers, most_devices))
    experts = _degrees(given, "expert_parallel", most_devices if config.num_experts else 1)
    found = []
    for tensor in tensors:
        for pipeline in stages:
            for expert in experts:
                if tensor * pipeline * expert > most_devices:
                    continue
                try:
                    layout = ParallelLayout(
                        tensor_parallel=tensor,
                        pipeline_parallel=pipeline,
                        data_parallel=expert,
                        expert_parallel=expert,
                    )
                    validate_layout(config, workload, layout)
                except LayoutError:
                    continue
                found.append(layout)
    yield from sorted(found, key=lambda layout: (layout.num_devices, layout.pipeline_parallel, layout.expert_parallel))


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse degrees that a server's layout has not.

    Raises:
        LayoutError: a degree is given that is not searched, or is no number of devices.
    """
    for name, value in given.items():
        if name in _VARIED and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise LayoutError(f"{name}={value!r} must be a whole number of devices from 1; leave it out to look at all")
        if name not in _VARIED:
            raise LayoutError(
                f"{name} is not a choice of serve-plan; it looks at {', '.join(_VARIED)} (replicas come with --gpus)"
            )


def check_divides(config: TransformerConfig, workload: Workload, given: Mapping[str, int]) -> None:
    """Refuse degrees that do not divide the model, whatever the others are.

    Raises:
        LayoutError: one of them does not.
    """
    for name, value in given.items():
        more = {"data_parallel": value} if name == "expert_parallel" else {}
        degrees: dict[str, Any] = {name: value, **more}
        validate_layout(config, workload, ParallelLayout(**degrees))


def _degrees(given: Mapping[str, Any], name: str, most: int) -> list[int]:
    """Powers of two up to a limit, or what was given."""
    if given.get(name) is not None:
        return [given[name]]
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
