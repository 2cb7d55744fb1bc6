"""Layouts that an instance of a server may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from shapewright.errors import LayoutError
from shapewright.layout import ParallelLayout
from shapewright.lowering import validate_layout

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.workload import Workload

MOST_STAGES = 8
_VARIED = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel", "expert_tensor_parallel")


def candidate_layouts(
    config: TransformerConfig, device: Device, workload: Workload, most_devices: int, given: Mapping[str, Any]
) -> Iterator[ParallelLayout]:
    """Layouts of one instance, fewest devices first.

    Tensor degrees stay inside a node. An instance holds the experts of a layer once. They are cut as other matrices are
    (each device of the expert axis is then a replica of the attention, with sequences of its own), or left whole, so
    that the expert axis runs over the tensor axis too: over that of one replica, or of several.

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
    for tensor, pipeline, expert in product(tensors, stages, experts):
        for cut in _cuts(config, tensor, given):
            replicas, rest = divmod(expert * cut, tensor)
            if rest or replicas != given.get("data_parallel", replicas) or tensor * pipeline * replicas > most_devices:
                continue
            try:
                layout = ParallelLayout(
                    tensor_parallel=tensor,
                    pipeline_parallel=pipeline,
                    data_parallel=replicas,
                    expert_parallel=expert,
                    expert_tensor_parallel=None if cut == tensor else cut,
                )
                validate_layout(config, workload, layout)
            except LayoutError:
                continue
            found.append(layout)
    yield from sorted(found, key=lambda layout: (layout.num_devices, layout.pipeline_parallel, layout.expert_parallel))


def degrees_of(layout: ParallelLayout) -> dict[str, int | None]:
    """Degrees of an instance by field name; None where experts are cut as other matrices are."""
    return {name: getattr(layout, name) for name in _VARIED}


def least_devices(given: Mapping[str, int]) -> int:
    """Devices of an instance that has the fixed degrees, however its experts are cut."""
    tensor, pipeline, replicas, experts = (given.get(name, 1) for name in _VARIED[:4])
    return tensor * pipeline * max(replicas, experts)


def check_given(config: TransformerConfig, given: Mapping[str, Any]) -> None:
    """Refuse degrees that an instance of the model has not.

    Raises:
        LayoutError: a degree is given that is not searched, is no number of devices, or spreads experts that there are
            not.
    """
    for name, value in given.items():
        if name in _VARIED and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise LayoutError(f"{name}={value!r} must be a whole number of devices from 1; leave it out to look at all")
        if name not in _VARIED:
            raise LayoutError(
                f"{name} is not a choice of serve-plan; it looks at {', '.join(_VARIED)} (replicas come with --gpus)"
            )
        if name in ("data_parallel", "expert_tensor_parallel") and value > 1 and not config.num_experts:
            raise LayoutError(
                f"{name}={value} needs a model with experts, but num_experts=0; leave it out (replicas of an instance "
                f"come with --gpus)"
            )


def check_divides(config: TransformerConfig, workload: Workload, given: Mapping[str, int]) -> None:
    """Refuse degrees that do not divide the model, whatever the others are.

    Raises:
        LayoutError: one of them does not.
    """
    for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
        value = given.get(name, 1)
        more = {"data_parallel": value} if name == "expert_parallel" else {}
        degrees: dict[str, Any] = {name: value, **more}
        validate_layout(config, workload, ParallelLayout(**degrees))


def _cuts(config: TransformerConfig, tensor: int, given: Mapping[str, Any]) -> list[int]:
    """Devices that may share each expert's matrices: those of the tensor axis, or one, or what was given."""
    if not config.num_experts:
        return [tensor]
    return sorted({given.get("expert_tensor_parallel", cut) for cut in (tensor, 1)}, reverse=True)


def _degrees(given: Mapping[str, Any], name: str, most: int) -> list[int]:
    """Powers of two up to a limit, or what was given."""
    if given.get(name) is not None:
        return [given[name]]
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
