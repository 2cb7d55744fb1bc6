"""Collectives between processes of one host: NCCL or RCCL between GPUs, gloo on a CPU.

Every rank gets the same cases in the same order and goes through the same calls: how many is decided by the first rank
and told to the others. Buffers hold zeros while they are timed, for sums of sums overflow; what a collective computes
is checked before on other numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shapewright.bench.measuring import failed_row, now_utc, one_line
from shapewright.bench.open_device import open_backend
from shapewright.bench.prepared import torch_dtype
from shapewright.bench.statistics import summarize
from shapewright.dtypes import get_dtype
from shapewright.errors import BenchError
from shapewright.operations import Collective
from shapewright.store.record import FAILED, OK, WRONG, Case, Row, Run, row_facts

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend

# Ranks that do not meet within this are not all there. [s]
_LONGEST_MEETING_S = 60.0
# A sample lasts about this long, and there are at least and at most so many.
_SAMPLE_S = 5e-3
_MOST_CALLS, _FEWEST_SAMPLES, _MOST_SAMPLES = 200, 7, 60
_NUM_WARM_UPS = 5


def open_ranks(num_ranks: int, rank: int, meeting: str, *, cpu: bool) -> Backend:
    """Open this rank's device and meet the others.

    Args:
        num_ranks: Processes that take part.
        rank: Which of them this is; on GPUs also its device.
        meeting: File that all ranks find each other by.
        cpu: gloo on the CPU instead of NCCL.

    Raises:
        BenchError: there are too few GPUs, or this torch has no collectives.
    """
    import torch
    from torch import distributed

    if not distributed.is_available():
        raise BenchError("this PyTorch is built without torch.distributed; install one that has it")
    if not cpu and torch.cuda.device_count() < num_ranks:
        raise BenchError(
            f"--num-ranks {num_ranks} needs as many GPUs, and PyTorch sees {torch.cuda.device_count()} on this host; "
            "use --cpu for gloo on the CPU"
        )
    if cpu:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = open_backend(cpu=cpu, device_index=rank)
    name = "gloo" if cpu else "nccl"
    distributed.init_process_group(
        name,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_LONGEST_MEETING_S),
    )
    version = "" if cpu else " " + ".".join(str(part) for part in torch.cuda.nccl.version())
    # A first collective connects the ranks; all of them are there once it is over.
    distributed.all_reduce(torch.zeros(1, device=backend.torch_device))
    backend.synchronize()
    # Ranks wait for each other: only the time of day tells how long.
    return replace(backend, runtime=f"{backend.runtime}, {name}{version}", clock=time.perf_counter)


def measure_collective(case: Case, backend: Backend, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
    """Measure one collective; every rank does, and the first one's row is the one that is kept."""
    del ci_fraction  # ranks take the same number of samples, whatever each of them sees
    begin = time.perf_counter()
    row = Row(**row_facts(case, run), measured_utc=now_utc(), status=FAILED, state_before=backend.read_state())
    operation = case.operation
    try:
        if not isinstance(operation, Collective):
            raise BenchError(f"the ranks measure collectives alone, got {operation.kind}")
        call, is_right = _prepare(operation, backend)
        if not is_right:
            return replace(row, status=WRONG, error=f"{operation.op_name} gives wrong numbers")
        samples, num_calls = _sample(call, backend, budget_s)
    except (BenchError, RuntimeError, ValueError) as error:
        return failed_row(row, one_line(error), backend.read_state())
    summary = summarize(samples)
    figures = {
        "bus_bytes_per_s": float(operation.num_bytes) / summary.median_s,
        "kernels_s": sum(samples) * num_calls,
        "row_s": time.perf_counter() - begin,
    }
    return replace(
        row,
        status=OK,
        measured_utc=now_utc(),
        kernel=f"{backend.runtime.rpartition(', ')[2]} {operation.op_name}",
        method=backend.eager_method,
        **asdict(summary),
        calls_per_sample=num_calls,
        num_inputs=1,
        state_after=backend.read_state(),
        figures=figures,
    )


def _prepare(operation: Collective, backend: Backend) -> tuple[Callable[[], object], bool]:
    """The call on zeros, and whether it is right on other numbers."""
    import torch
    from torch import distributed

    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    if int(operation.num_ranks) != ranks:
        raise BenchError(f"{operation.num_ranks} ranks are asked for, {ranks} are there")
    kind = torch_dtype(operation.dtype)
    elements = round(float(operation.message_bytes) / get_dtype(operation.dtype).num_bytes)
    part = max(1, elements // ranks)
    name = operation.op_name

    def buffer(count: int, value: float) -> Any:
        return torch.full((count,), value, device=backend.torch_device, dtype=kind)

    sizes = {
        "all_reduce": (elements, elements), "all_gather": (part, part * ranks), "reduce_scatter": (part * ranks, part),
        "alltoall": (part * ranks, part * ranks), "send_recv": (elements, elements),
    }[name]  # fmt: skip
    source, target = buffer(sizes[0], rank + 1.0), buffer(sizes[1], 0.0)

    def call() -> object:
        if name == "all_reduce":
            return distributed.all_reduce(source)
        if name == "all_gather":
            return distributed.all_gather_into_tensor(target, source)
        if name == "reduce_scatter":
            return distributed.reduce_scatter_tensor(target, source)
        if name == "alltoall":
            return distributed.all_to_all_single(target, source)
        # Each rank sends to the next one, as stages of a pipeline do.
        sending = distributed.P2POp(distributed.isend, source, (rank + 1) % ranks)
        receiving = distributed.P2POp(distributed.irecv, target, (rank - 1) % ranks)
        works = distributed.batch_isend_irecv([sending, receiving])
        return [work.wait() for work in works]

    call()
    backend.synchronize()
    total = ranks * (ranks + 1) / 2.0
    found = source if name == "all_reduce" else target
    by_rank = torch.arange(1, ranks + 1, device=backend.torch_device, dtype=kind).repeat_interleave(part)
    expected = {
        "all_reduce": total, "reduce_scatter": total, "all_gather": by_rank, "alltoall": by_rank,
        "send_recv": float((rank - 1) % ranks + 1),
    }[name]  # fmt: skip
    is_right = bool((found == expected).all())
    source.zero_()
    # One rank that is wrong makes the row wrong on all, so that all go on together.
    verdict = torch.tensor([int(is_right)], device=backend.torch_device)
    distributed.all_reduce(verdict, op=distributed.ReduceOp.MIN)
    return call, bool(verdict.item())


def _sample(call: Callable[[], object], backend: Backend, budget_s: float) -> tuple[list[float], int]:
    """Times of one call, of the slowest rank each, and how many calls a sample is the mean of. [s]"""
    import torch
    from torch import distributed

    for _ in range(_NUM_WARM_UPS):
        once_s = backend.elapsed_s(call)
    num_calls = min(_MOST_CALLS, max(1, round(_SAMPLE_S / max(once_s, 1e-7))))
    num_samples = min(_MOST_SAMPLES, max(_FEWEST_SAMPLES, round(budget_s / max(once_s * num_calls, 1e-7))))
    plan = torch.tensor([num_calls, num_samples], device=backend.torch_device)
    distributed.broadcast(plan, 0)
    num_calls, num_samples = (int(number) for number in plan.tolist())

    def loop() -> None:
        for _ in range(num_calls):
            call()

    times = []
    for _ in range(num_samples):
        distributed.barrier(device_ids=[backend.torch_device.index] if backend.is_cuda else None)
        times.append(backend.elapsed_s(loop) / num_calls)
    slowest = torch.tensor(times, device=backend.torch_device)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    return [float(number) for number in slowest.tolist()], num_calls
