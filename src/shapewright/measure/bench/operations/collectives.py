"""Collectives between processes of one host: NCCL or RCCL between GPUs, gloo on a CPU.

Every rank runs the same cases in the same order; rank 0 decides on the number of calls and broadcasts it. Results are
checked on non-zero numbers first; timing uses zeros, since repeated sums would overflow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import BenchError
from shapewright.lowering.operations.collective import Collective
from shapewright.measure.bench.device.open_device import open_backend
from shapewright.measure.bench.device.timer import summarize
from shapewright.measure.bench.measuring import failed_row, now_utc, one_line
from shapewright.measure.bench.operations.prepared import torch_dtype
from shapewright.measure.store.record import FAILED, OK, WRONG, Case, Row, Run, row_facts

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend

# Time for all ranks to connect. [s]
_CONNECT_TIMEOUT_S = 60.0
# Duration of a sample, calls per sample, and limits of the number of samples.
_SAMPLE_S = 5e-3
_MAX_CALLS_PER_SAMPLE, _MIN_SAMPLES, _MAX_SAMPLES = 200, 7, 60
_NUM_WARM_UPS = 5


def open_ranks(num_ranks: int, rank: int, rendezvous_file: str, *, cpu: bool) -> Backend:
    """Open this rank's device and connect to the other ranks.

    Args:
        rank: Index of this process; on GPUs also the index of its device.
        rendezvous_file: Path of the file through which the ranks find each other.
        cpu: Use gloo on the CPU instead of NCCL.

    Raises:
        BenchError: there are too few GPUs, or the installed torch has no collectives.
    """
    import torch
    from torch import distributed

    if not distributed.is_available():
        raise BenchError("PyTorch is built without torch.distributed; install a build that has it")
    if not cpu and torch.cuda.device_count() < num_ranks:
        raise BenchError(
            f"num_ranks={num_ranks} needs as many GPUs, and PyTorch sees {torch.cuda.device_count()} on this host; "
            "measure the CPU to use gloo"
        )
    if cpu:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = open_backend(cpu=cpu, device_index=rank)
    name = "gloo" if cpu else "nccl"
    distributed.init_process_group(
        name,
        init_method=f"file://{rendezvous_file}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_CONNECT_TIMEOUT_S),
    )
    library = name if cpu else f"{name} " + ".".join(str(part) for part in torch.cuda.nccl.version())
    # The first collective establishes the connections.
    distributed.all_reduce(torch.zeros(1, device=backend.torch_device))
    backend.synchronize()
    return replace(
        backend,
        runtime=f"{backend.runtime}, {library}",
        collective_library=library,
        clock=time.perf_counter,  # process time would exclude the wait for other ranks
    )


def measure_collective(case: Case, backend: Backend, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
    """Measure one collective; every rank calls this, and the row of rank 0 is stored."""
    del ci_fraction  # all ranks must take the same number of samples
    begin = time.perf_counter()
    row = Row(**row_facts(case, run), measured_utc=now_utc(), status=FAILED, state_before=backend.read_state())
    operation = case.operation
    try:
        if not isinstance(operation, Collective):
            raise BenchError(f"communicating ranks measure collectives only, got {operation.kind}")
        call, is_correct = _prepare(operation, backend)
        if not is_correct:
            return replace(row, status=WRONG, error=f"{operation.op_name} gives wrong results")
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
        kernel=f"{backend.collective_library} {operation.op_name}",
        method=backend.eager_method,
        **asdict(summary),
        calls_per_sample=num_calls,
        num_inputs=1,
        state_after=backend.read_state(),
        figures=figures,
    )


def _prepare(operation: Collective, backend: Backend) -> tuple[Callable[[], object], bool]:
    """The call on zeros, and whether its result on non-zero numbers is correct."""
    import torch
    from torch import distributed

    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    if int(operation.num_ranks) != ranks:
        raise BenchError(f"the case has num_ranks={operation.num_ranks}, and {ranks} ranks are running")
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
        # Each rank sends to the next one, as pipeline stages do.
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
    is_correct = bool((found == expected).all())
    source.zero_()
    # A wrong result on one rank marks the row as wrong on all ranks, so that they stay in step.
    all_correct = torch.tensor([int(is_correct)], device=backend.torch_device)
    distributed.all_reduce(all_correct, op=distributed.ReduceOp.MIN)
    return call, bool(all_correct.item())


def _sample(call: Callable[[], object], backend: Backend, budget_s: float) -> tuple[list[float], int]:
    """Times of one call on the slowest rank, and the number of calls per sample. [s]"""
    import torch
    from torch import distributed

    for _ in range(_NUM_WARM_UPS):
        once_s = backend.elapsed_s(call)
    num_calls = min(_MAX_CALLS_PER_SAMPLE, max(1, round(_SAMPLE_S / max(once_s, 1e-7))))
    num_samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, round(budget_s / max(once_s * num_calls, 1e-7))))
    counts = torch.tensor([num_calls, num_samples], device=backend.torch_device)
    distributed.broadcast(counts, 0)
    num_calls, num_samples = (int(number) for number in counts.tolist())

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
