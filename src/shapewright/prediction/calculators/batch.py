"""Batches: integer solutions of B = b * dp * m, and the pipeline bubble of each.

Legend: B global batch, b micro-batch, dp replicas, m micro-batches that a replica accumulates (gradient accumulation
steps), n devices, t p c tensor, pipeline and context degrees, v chunks of a stage.

    replicas     dp = n / (t p c)
    bubble       (p - 1) / (v m) relative to the time without bubble, (p - 1) / (v m + p - 1) relative to the total
"""

from __future__ import annotations

from dataclasses import dataclass

from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.core.numeric import divisors
from shapewright.core.ranges import check_integer

_LARGEST = 2**30
_MOST_SOLUTIONS = 10_000


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """Known parameters of a batch; None for unknown ones.

    Attributes:
        num_devices: n.
        global_batch_size: B.
        micro_batch_size: b.
        num_microbatches: m.
        data_parallel: dp.
        tensor_parallel: t.
        pipeline_parallel: p.
        context_parallel: c.
        virtual_pipeline: v.

    Raises:
        WorkloadError: a number is not a positive integer.
    """

    num_devices: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    num_microbatches: int | None = None
    data_parallel: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    virtual_pipeline: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                word = {"num_microbatches": "accumulation"}.get(name, name)
                check_integer(word, value, 1, _LARGEST, error=WorkloadError)


@dataclass(frozen=True, kw_only=True)
class BatchSolution:
    """One solution of the batch equation.

    Attributes:
        global_batch_size: B.
        micro_batch_size: b.
        data_parallel: dp.
        num_microbatches: m.
        bubble_fraction: Share of the step that is pipeline bubble.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel: int
    num_microbatches: int
    bubble_fraction: float


def count_replicas(
    num_devices: int, tensor_parallel: int = 1, pipeline_parallel: int = 1, context_parallel: int = 1
) -> int:
    """Count the replicas of a job: n / (t p c).

    >>> count_replicas(8, 2, 2)
    2

    Raises:
        LayoutError: the degrees do not divide the devices.
    """
    each = tensor_parallel * pipeline_parallel * context_parallel
    if num_devices % each:
        below = num_devices // each * each
        allowed = f"{below} or {below + each}" if below else f"{each}"
        raise LayoutError(
            f"num_devices={num_devices} must be a multiple of tensor * pipeline * context = {tensor_parallel} * "
            f"{pipeline_parallel} * {context_parallel} = {each}; try {allowed}"
        )
    return num_devices // each


def solve_batch(request: BatchRequest) -> tuple[BatchSolution, ...]:
    """Find all solutions of the batch equation.

    With a known global batch these are all splits into micro-batch, replicas and accumulation; otherwise the global
    batch is computed.

    Args:
        request: The known parameters.

    Raises:
        LayoutError: devices and degrees contradict each other.
        WorkloadError: the batch is underdetermined, or has no solution.

    >>> found = solve_batch(BatchRequest(global_batch_size=8, data_parallel=2))
    >>> [(one.micro_batch_size, one.num_microbatches) for one in found]
    [(1, 4), (2, 2), (4, 1)]
    """
    replicas = _known_replicas(request)
    batch = request.global_batch_size
    if batch is None:
        if request.micro_batch_size is None or replicas is None:
            raise WorkloadError(
                "the batch is underdetermined; "
                "give global_batch_size, or micro_batch_size with num_devices or data_parallel"
            )
        accumulated = request.num_microbatches or 1
        return (_solution(request, request.micro_batch_size, replicas, accumulated),)
    options = [replicas] if replicas is not None else divisors(batch)
    found = []
    for count in options:
        if batch % count:
            continue
        for micro_batch_size in divisors(batch // count):
            accumulated = batch // count // micro_batch_size
            if request.micro_batch_size in (None, micro_batch_size) and request.num_microbatches in (None, accumulated):
                found.append(_solution(request, micro_batch_size, count, accumulated))
    if not found:
        raise WorkloadError(_describe_unsolvable(request, replicas, batch))
    return tuple(found[:_MOST_SOLUTIONS])


def bubble_fraction(pipeline_parallel: int, num_microbatches: int, virtual_pipeline: int = 1) -> float:
    """Return the bubble relative to the time without bubble: (p - 1) / (v m).

    >>> bubble_fraction(8, 64), round(bubble_fraction(8, 64, 3), 6)
    (0.109375, 0.036458)

    Source: arXiv 2104.04473, section 2.2.
    """
    return (pipeline_parallel - 1) / (virtual_pipeline * num_microbatches)


def _known_replicas(request: BatchRequest) -> int | None:
    if request.num_devices is None:
        return request.data_parallel
    replicas = count_replicas(
        request.num_devices, request.tensor_parallel, request.pipeline_parallel, request.context_parallel
    )
    if request.data_parallel not in (None, replicas):
        raise LayoutError(
            f"data_parallel={request.data_parallel} contradicts num_devices={request.num_devices} over "
            f"tensor * pipeline * context = {request.num_devices // replicas}, which gives {replicas}; omit one of them"
        )
    return replicas


def _solution(request: BatchRequest, micro_batch_size: int, replicas: int, accumulated: int) -> BatchSolution:
    bubble = bubble_fraction(request.pipeline_parallel, accumulated, request.virtual_pipeline)
    return BatchSolution(
        global_batch_size=micro_batch_size * replicas * accumulated,
        micro_batch_size=micro_batch_size,
        data_parallel=replicas,
        num_microbatches=accumulated,
        bubble_fraction=bubble / (1.0 + bubble),
    )


def _describe_unsolvable(request: BatchRequest, replicas: int | None, batch: int) -> str:
    known = {"micro_batch_size": request.micro_batch_size, "data_parallel": replicas}
    known |= {"accumulation": request.num_microbatches}
    step = 1
    for value in known.values():
        step *= value or 1
    words = " * ".join(f"{name}={value}" for name, value in known.items() if value)
    below = batch // step * step
    allowed = f"{below} or {below + step}" if below else f"{step}"
    reason = "must be" if all(known.values()) else "must be a multiple of"
    return f"global_batch_size={batch} {reason} {words}; try {step if all(known.values()) else allowed}"
