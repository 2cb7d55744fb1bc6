"""What travels in a training step, by the formulas that papers and benchmarks use.

Legend: n ranks, P parameters, t tensor degree, b s h a micro-batch's hidden states.

Bus bandwidth is what a link would carry if a ring ran on it: algorithm bandwidth times the factor below
(nccl-tests, PERFORMANCE.md). The prices of ``perf.collectives`` rest on the same volumes.
"""

from __future__ import annotations

from shapewright.errors import LayoutError, WorkloadError

_ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "alltoall": 1.0}
# Parameters' worth of traffic per step: gradients reduced, weights gathered (arXiv 1910.02054, section 7).
_TRAFFIC_BY_STAGE = (2.0, 2.0, 2.0, 3.0)


def bus_fraction(op_name: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: 2 (n - 1) / n of an all_reduce, (n - 1) / n of the others.

    >>> bus_fraction("all_reduce", 8), bus_fraction("all_gather", 8), bus_fraction("send_recv", 2)
    (1.75, 0.875, 1.0)

    Raises:
        WorkloadError: the operation is not known, or has no ranks.
    """
    if num_ranks < 1:
        raise WorkloadError(f"num_ranks={num_ranks} must be 1 at least")
    if op_name == "send_recv":
        return 1.0
    if op_name not in _ROUNDS:
        raise WorkloadError(f"unknown collective {op_name!r}; choose one of {', '.join((*_ROUNDS, 'send_recv'))}")
    return _ROUNDS[op_name] * (num_ranks - 1) / num_ranks


def count_gradient_traffic_bytes(num_parameters: float, element_bytes: float, zero_stage: int) -> float:
    """Bytes that replicas exchange in a step, the factor (n - 1) / n left out: 2 P, with ZeRO stage 3 3 P. [byte]

    >>> count_gradient_traffic_bytes(10e9, 2, 0), count_gradient_traffic_bytes(10e9, 2, 3)
    (40000000000.0, 60000000000.0)

    Raises:
        LayoutError: there is no such stage.

    Source: arXiv 1910.02054, section 7.
    """
    if not 0 <= zero_stage < len(_TRAFFIC_BY_STAGE):
        raise LayoutError(f"zero_stage={zero_stage} must be from 0 to 3")
    return _TRAFFIC_BY_STAGE[zero_stage] * num_parameters * element_bytes


def count_tensor_parallel_elements(
    micro_batch_size: int, seq_len: int, hidden_size: int, tensor_parallel: int
) -> float:
    """Elements that a device sends per layer and micro-batch: four all_reduces of b s h, 8 b s h (t - 1) / t.

    >>> count_tensor_parallel_elements(1, 2048, 12288, 8) == 8 * 2048 * 12288 * 7 / 8
    True

    Source: arXiv 2104.04473, section 3.2.
    """
    return 4.0 * bus_fraction("all_reduce", tensor_parallel) * micro_batch_size * seq_len * hidden_size
