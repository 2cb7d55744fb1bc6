"""Backend: the device that is measured, behind one small class for CUDA, ROCm and CPU; bench.open_device finds it.

ROCm's PyTorch calls itself CUDA, so the two differ in names and versions alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shapewright.bench.graphs import fills_results
from shapewright.bench.host import host_available_bytes
from shapewright.bench.inputs import InputPool
from shapewright.errors import BenchError

# Share of the free memory that the inputs and outputs of one row may take.
_USABLE_FRACTION = 0.7
# Part of a GPU's memory that may lie idle between rows: each graph leaves a pool behind that no later one can use, and
# while a graph is captured the allocator gives nothing back.
_IDLE_FRACTION = 0.2
# Wait on the device before a replay is timed, 0.1 ms at 2 GHz: longer than the host takes to hand a graph over, which
# would else be part of the time. [cycle]
_HEAD_START_CYCLES = 200_000


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What is known of a device without touching it; processes can send it to each other.

    Attributes:
        is_cuda: Whether calls are asynchronous and device events can time them.
        name: Canonical name of its device file, or what the driver calls it.
        facts: Properties that the driver reports.
        driver: Version of the driver; empty where there is none.
        runtime: CUDA or ROCm with its version, or the processor and its threads.
        torch_version: Version of PyTorch.
        dtypes: Element formats that it multiplies.
        cache_bytes: Size of the last-level cache. [byte]
        most_flops: Largest operation that is worth measuring here. [flop]
    """

    is_cuda: bool
    name: str
    facts: Mapping[str, Any]
    driver: str
    runtime: str
    torch_version: str
    dtypes: tuple[str, ...]
    cache_bytes: float
    most_flops: float

    @property
    def library(self) -> str:
        """Library and versions, as measured tables name them."""
        return f"torch {self.torch_version} {self.runtime}"

    def require_dtypes(self, dtypes: tuple[str, ...]) -> None:
        """Refuse element formats that the device lacks.

        Raises:
            BenchError: it lacks one.
        """
        for dtype in dtypes:
            if dtype not in self.dtypes:
                raise BenchError(
                    f"dtype {dtype!r} cannot be measured on {self.name}; --dtype takes {', '.join(self.dtypes)} there"
                )


@dataclass(frozen=True, kw_only=True)
class Backend(DeviceFacts):
    """A device and how to time on it.

    On a GPU everything runs on one stream beside the default one, warm-up and capture alike: libraries keep handles
    and workspaces per stream, and what they set up for the first call must not happen during a capture.

    Attributes:
        torch_device: The torch.device.
        pool: Random numbers for inputs.
        clock: Time that a CPU's rows are measured by. [s]
        read_state: Gives clocks, power and temperature now.
        broken_captures: What captures failed of; torch's allocator and random numbers are not to be trusted after one,
            so the process should measure nothing more.
        names_kernels: Whether rows name the kernels that ran.
    """

    torch_device: Any
    pool: InputPool
    clock: Callable[[], float] = time.perf_counter
    read_state: Callable[[], dict[str, float]] = field(default=dict)
    broken_captures: list[str] = field(default_factory=list)
    names_kernels: bool = False

    def describe(self) -> DeviceFacts:
        """The facts alone."""
        return DeviceFacts(**{spec.name: getattr(self, spec.name) for spec in fields(DeviceFacts)})

    @property
    def eager_method(self) -> str:
        """How calls that no graph replays are timed, for the record."""
        if self.is_cuda:
            return "eager"
        return "processor" if self.clock is time.process_time else "host"

    def synchronize(self) -> None:
        """Wait for everything that was started."""
        if self.is_cuda:
            import torch

            torch.cuda.synchronize(self.torch_device)

    def elapsed_s(self, run: Callable[[], object], *, is_replay: bool = False) -> float:
        """Time between two points of the device's own stream, or of the clock on a CPU. [s]

        Args:
            run: What is timed.
            is_replay: Whether it hands a graph over, which takes the host some time while the device could begin.
        """
        if not self.is_cuda:
            begin = self.clock()
            run()
            return self.clock() - begin
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if is_replay:
            torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def capture(self, run: Callable[[], object]) -> Callable[[], object] | None:
        """Record calls as a graph that is replayed without launch cost; None where that cannot be done.

        The graph is believed only when a replay fills the last call's results again: what ran past the capture, on
        another stream, would make an empty graph and a time of nothing.

        Args:
            run: Makes the calls, all warm, and returns the results of the last one.
        """
        if not self.is_cuda:
            return None
        import torch

        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph would collect garbage and empty the allocator's cache around it, row after row.
            graph.capture_begin()
            try:
                results = run()
            finally:
                graph.capture_end()
            self.synchronize()
        except torch.cuda.OutOfMemoryError:  # it has no memory beside what the calls themselves use
            torch.cuda.empty_cache()
            return None
        except RuntimeError as error:
            self.broken_captures.append(str(error))
            return None
        return graph.replay if fills_results(graph.replay, results) else None

    def trim(self) -> None:
        """Give memory back that rows left behind, if it is much."""
        if not self.is_cuda:
            return
        import torch

        idle_bytes = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        if idle_bytes > _IDLE_FRACTION * float(self.facts["memory_bytes"]):
            torch.cuda.empty_cache()

    def peak_bytes(self, run: Callable[[], object]) -> float | None:
        """Most memory that tensors held at once during a call, by torch's own counter; None on a CPU. [byte]"""
        if not self.is_cuda:
            return None
        import torch

        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run()
        self.synchronize()
        return float(torch.cuda.max_memory_allocated(self.torch_device) - self.pool.num_bytes)

    def usable_bytes(self) -> float:
        """Memory that one row may fill. [byte]"""
        if self.is_cuda:
            import torch

            free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
            reusable_bytes = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(
                self.torch_device
            )
            return _USABLE_FRACTION * float(free_bytes + reusable_bytes + self.pool.num_bytes)
        return _USABLE_FRACTION * (host_available_bytes() + self.pool.num_bytes)

    def release(self) -> None:
        """Give memory that no tensor holds back, the pool's too."""
        self.pool.clear()
        if self.is_cuda:
            import torch

            torch.cuda.empty_cache()
