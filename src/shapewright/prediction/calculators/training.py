"""Batches and budgets of training runs: solutions of B = b * dp * m with their bubble; tokens, FLOPs, days and cost.

Legend: B global batch, b micro-batch, dp replicas, m micro-batches that a replica accumulates (gradient accumulation
steps), n devices, t p c tensor, pipeline and context degrees, v chunks of a stage, P active parameters, T tokens, X
achieved FLOP/s per device, u price of a device hour.

    replicas            dp = n / (t p c)
    bubble              (p - 1) / (v m) of the time without bubble, (p - 1) / (v m + p - 1) of the total
    Chinchilla tokens   T = 20 P
    FLOPs               6 P T, or 8 P T with full recomputation
    days                FLOPs / (n X) / 86400
    cost                hours * n * u
"""

from __future__ import annotations

from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.core.fields import shown
from shapewright.core.numeric import divisors
from shapewright.core.ranges import check_integer, check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.lowering.flops import count_rule_of_thumb_flops, estimate_training_s

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
                shown_name = {"num_microbatches": "accumulation"}.get(name, name)
                check_integer(shown_name, value, 1, _LARGEST, error=WorkloadError)


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
    replica_devices = tensor_parallel * pipeline_parallel * context_parallel
    if num_devices % replica_devices:
        below = num_devices // replica_devices * replica_devices
        allowed = f"{below} or {below + replica_devices}" if below else f"{replica_devices}"
        raise LayoutError(
            f"num_devices={num_devices} must be a multiple of tensor * pipeline * context = {tensor_parallel} * "
            f"{pipeline_parallel} * {context_parallel} = {replica_devices}; try {allowed}",
            field="num_devices",
        )
    return num_devices // replica_devices


def solve_batch(request: BatchRequest) -> tuple[BatchSolution, ...]:
    """Find all solutions of the batch equation.

    With a known global batch these are all splits into micro-batch, replicas and accumulation; otherwise the global
    batch is computed.

    Raises:
        LayoutError: devices and degrees contradict each other.
        WorkloadError: too few numbers are known, or they have no solution.

    >>> found = solve_batch(BatchRequest(global_batch_size=8, data_parallel=2))
    >>> [(one.micro_batch_size, one.num_microbatches) for one in found]
    [(1, 4), (2, 2), (4, 1)]
    """
    replicas = _known_replicas(request)
    batch = request.global_batch_size
    if batch is None:
        if request.micro_batch_size is None or replicas is None:
            raise WorkloadError(
                "the batch is underdetermined",
                advice=with_fields(
                    "give {global_batch_size}, or {micro_batch_size} with {num_devices} or {data_parallel}"
                ),
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
            f"tensor * pipeline * context = {request.num_devices // replicas}, which gives {replicas}; omit "
            "one of them",
            field="data_parallel",
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


_SECONDS_PER_DAY, _SECONDS_PER_HOUR = 86_400.0, 3600.0
_MOST_TOKENS = 1e18
_MOST_DEVICES = 2**24  # more than a layout can have


@dataclass(frozen=True, kw_only=True)
class TrainingBudget:
    """Budget of a training run.

    Attributes:
        num_parameters: Active parameters per token.
        num_tokens: Tokens of the run.
        flops: FLOPs of the run, recomputation included. [flop]
        num_devices: Number of devices; None if not given.
        flops_per_s_per_device: Achieved rate of each device; None if not given. [flop/s]
        training_s: Duration; None without devices or rate. [s]
        usd: Cost of the run; None without a price.
    """

    num_parameters: float
    num_tokens: float
    flops: float
    num_devices: int | None = None
    flops_per_s_per_device: float | None = None
    training_s: float | None = None
    usd: float | None = None

    @property
    @shown
    def training_days(self) -> float | None:
        """Duration in days."""
        return None if self.training_s is None else self.training_s / _SECONDS_PER_DAY

    @property
    @shown
    def tokens_per_parameter(self) -> float:
        """Tokens per parameter; Chinchilla has 20."""
        return self.num_tokens / self.num_parameters


def estimate_budget(
    num_parameters: float,
    num_tokens: float,
    *,
    num_devices: int | None = None,
    flops_per_s_per_device: float | None = None,
    usd_per_hour: float | None = None,
    recompute: str = "none",
) -> TrainingBudget:
    """Estimate the budget of a training run from its parameter count.

    Args:
        num_parameters: Active parameters per token.
        flops_per_s_per_device: Achieved rate of each device, recomputation included. [flop/s]
        usd_per_hour: Price of one device hour. [USD]
        recompute: ``full`` counts 8 P T instead of 6 P T.

    Raises:
        WorkloadError: a number is out of range.

    Source: arXiv 2001.08361, section 2.1; arXiv 2104.04473, eq. 4.

    >>> budget = estimate_budget(
    ...     175e9, 300e9, num_devices=1024, flops_per_s_per_device=140e12, usd_per_hour=2.0, recompute="full"
    ... )
    >>> round(budget.training_days, 1), round(budget.usd)
    (33.9, 1666667)
    """
    for word, value in (
        ("train_tokens", num_tokens),
        ("achieved rate", flops_per_s_per_device),
        ("usd_per_hour", usd_per_hour),
    ):
        if value is not None:
            check_number(word, value, 0, _MOST_TOKENS, exclude_low=True, error=WorkloadError)
    if num_devices is not None:
        hint = "give the devices of the whole job"
        check_integer("num_devices", num_devices, 1, _MOST_DEVICES, error=WorkloadError, hint=hint)
    training_s = None
    if num_devices is not None and flops_per_s_per_device is not None:
        training_s = estimate_training_s(
            num_parameters,
            num_tokens,
            num_devices=num_devices,
            flops_per_s_per_device=flops_per_s_per_device,
            recompute=recompute,
        )
    usd = None
    if training_s is not None and usd_per_hour is not None and num_devices is not None:
        usd = training_s / _SECONDS_PER_HOUR * num_devices * usd_per_hour
    return TrainingBudget(
        num_parameters=num_parameters,
        num_tokens=num_tokens,
        flops=count_rule_of_thumb_flops(num_parameters, num_tokens, recompute=recompute),
        num_devices=num_devices,
        flops_per_s_per_device=flops_per_s_per_device,
        training_s=training_s,
        usd=usd,
    )
