"""Ways to spread a model over a number of devices: every plain layout that divides model and batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import TYPE_CHECKING, Any

from shapewright.errors import ShapewrightError
from shapewright.layout import ParallelLayout
from shapewright.lowering import num_microbatches, validate_layout

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.workload import Workload

# Sequences shorter than this are not worth cutting: rings of context devices are for long ones. [token]
_SHORTEST_PART = 4096
_MOST_CONTEXT_DEVICES = 64


def enumerate_layouts(
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    num_devices: int,
    given: Mapping[str, Any] | None = None,
) -> Iterator[ParallelLayout]:
    """Go through layouts of exactly so many devices that the model and the batch can run on.

    Tensor groups stay inside a node; context groups keep at least 4096 tokens a device; expert groups are divisors of
    the experts. ZeRO stage, interleaving and sequence parallelism are not varied: they are as given.

    Args:
        config: The model; of a search, the baseline.
        device: The device, whose node bounds the tensor axis.
        workload: Batch and sequence length; a degree that does not divide them is left out.
        num_devices: Devices of the job.
        given: Fields of ParallelLayout that every layout must have.

    Yields:
        Layouts by tensor, pipeline, context and expert degree, the smallest first.
    """
    fixed = {name: value for name, value in (given or {}).items() if value is not None}
    for tensor in _divisors(num_devices, min(device.node_size, num_devices)):
        for pipeline in _divisors(num_devices // tensor, config.num_layers):
            rest = num_devices // (tensor * pipeline)
            longest = max(1, min(_MOST_CONTEXT_DEVICES, workload.seq_len // _SHORTEST_PART))
            for context in _divisors(rest, longest):
                data = rest // context
                most_expert = gcd(config.num_experts, data * context) if config.is_moe else 1
                for expert in _divisors(most_expert, most_expert):
                    degrees = {
                        "tensor_parallel": tensor,
                        "pipeline_parallel": pipeline,
                        "context_parallel": context,
                        "data_parallel": data,
                        "expert_parallel": expert,
                    }
                    if any(fixed.get(name, degree) != degree for name, degree in degrees.items()):
                        continue
                    try:
                        layout = ParallelLayout(**{**fixed, **degrees})
                        validate_layout(config, workload, layout)
                        num_microbatches(workload, layout)
                    except ShapewrightError:
                        continue
                    yield layout


def _divisors(number: int, largest: int) -> list[int]:
    """Divisors up to a largest one, the smallest first.

    >>> _divisors(80, 10)
    [1, 2, 4, 5, 8, 10]
    """
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]
