"""The device under test, with one interface for CUDA, ROCm and CPU; see open_device for how it is opened.

PyTorch exposes ROCm through torch.cuda, so CUDA and ROCm differ only in names and versions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any

from shapewright.core.errors import BenchError
from shapewright.core.numeric import round_up
from shapewright.core.records import dataclass
from shapewright.measure.bench.device.system_info import host_available_bytes

# Fill value of floating-point results, to check that a replay overwrites them: exact in every format, tens of standard
# deviations from any result here, and changed by in-place updates. Integer results are filled with their minimum.
_MARK = -12288.0
# Share of the free memory available to the inputs and outputs of one row.
_USABLE_FRACTION = 0.7
# Largest share of a GPU's memory that may be cached but unused between rows: each graph leaves a memory pool that later
# graphs cannot use, and the allocator frees nothing during a capture.
_MAX_UNUSED_FRACTION = 0.2
# The device spins for 0.1 ms (at 2 GHz) before a timed replay: longer than the host needs to submit the graph, which
# would otherwise be part of the measured time. [cycle]
_SPIN_CYCLES = 200_000
# Alignment of each slice, the same as that of a newly allocated tensor. [byte]
_ALIGNMENT_BYTES = 512
# Smallest chunk that is drawn at once, so that small tensors share one. [byte]
_CHUNK_BYTES = 32 << 20
# 8-bit formats are converted from fp32 in parts of this size, which limits the temporary memory. [element]
_MAX_DRAWN_ELEMENTS = 16 << 20
# Above this size the pool is dropped when a new row begins. [byte]
_MAX_POOL_BYTES = 2 << 30
# Standard deviation of 8-bit integers: three of them are within the range.
_INT8_DEVIATION = 32.0


class InputPool:
    """Pool of random input tensors that successive rows share.

    Drawing and allocating new numbers for every row would take longer than measuring many of the rows.

    Args:
        torch_device: Device that holds the numbers.
    """

    def __init__(self, torch_device: Any) -> None:
        self._torch_device = torch_device
        # Chunks by torch.dtype, each with the number of elements that the current row has taken.
        self._chunks: dict[Any, list[tuple[Any, int]]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that the pool holds. [byte]"""
        return sum(chunk.nbytes for chunks in self._chunks.values() for chunk, _ in chunks)

    def begin(self) -> None:
        """Begin a new row: everything that the last row took can be handed out again."""
        if self.num_bytes > _MAX_POOL_BYTES:
            self._chunks.clear()
        self._chunks = {kind: [(chunk, 0) for chunk, _ in chunks] for kind, chunks in self._chunks.items()}

    def clear(self) -> None:
        """Free the memory."""
        self._chunks.clear()

    def take(self, shape: tuple[int, ...], kind: Any) -> Any:
        """A tensor of random normal numbers that the current row has not taken yet; callers must not write to it."""
        count = math.prod(shape)
        step = max(1, _ALIGNMENT_BYTES // kind.itemsize)
        padded = round_up(count, step)
        chunks = self._chunks.setdefault(kind, [])
        for index, (chunk, taken) in enumerate(chunks):
            if taken + padded <= chunk.numel():
                chunks[index] = (chunk, taken + padded)
                return chunk[taken : taken + count].view(shape)
        chunk = _draw(max(padded, _CHUNK_BYTES // kind.itemsize), kind, self._torch_device)
        chunks.append((chunk, padded))
        return chunk[:count].view(shape)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Description of a device that can be sent between processes.

    Attributes:
        is_cuda: Whether calls are asynchronous and device events can time them.
        name: Canonical name of the device file, or the name that the driver reports.
        facts: Properties that the driver reports.
        driver: Driver version; empty on a CPU.
        runtime: CUDA or ROCm with its version, or the processor and its threads.
        torch_version: Version of PyTorch.
        dtypes: Element formats supported by its GEMMs.
        cache_bytes: Size of the last-level cache. [byte]
        max_operation_flops: Limit above which operations are not measured on this device. [flop]
    """

    is_cuda: bool
    name: str
    facts: Mapping[str, Any]
    driver: str
    runtime: str
    torch_version: str
    dtypes: tuple[str, ...]
    cache_bytes: float
    max_operation_flops: float

    @property
    def library(self) -> str:
        """Library and versions, as in measured tables."""
        return f"torch {self.torch_version} {self.runtime}"

    def require_dtypes(self, dtypes: tuple[str, ...]) -> None:
        """Check that the device supports all element formats.

        Raises:
            BenchError: a format is not supported.
        """
        for dtype in dtypes:
            if dtype not in self.dtypes:
                raise BenchError(
                    f"dtype={dtype!r} cannot be measured on {self.name}, which supports {', '.join(self.dtypes)}"
                )


@dataclass(frozen=True, kw_only=True)
class Backend(DeviceFacts):
    """An open device, with its timing and memory functions.

    On a GPU everything runs on one non-default stream, the warm-up and the capture included: libraries keep handles and
    workspaces per stream, and must not create them during a capture.

    Attributes:
        torch_device: The torch.device.
        pool: Random numbers for inputs.
        clock: Clock that times calls on a CPU. [s]
        read_state: Reads the current clocks, power and temperature.
        broken_captures: Errors of failed graph captures; torch's allocator and random number state are unreliable after
            one, so the process should measure nothing more.
        names_kernels: Whether rows record the names of the kernels that ran.
        collective_library: Library that runs collectives, with its version; empty without communicating processes.
    """

    torch_device: Any
    pool: InputPool
    clock: Callable[[], float] = time.perf_counter
    read_state: Callable[[], dict[str, float]] = field(default=dict)
    broken_captures: list[str] = field(default_factory=list)
    names_kernels: bool = False
    collective_library: str = ""

    def describe(self) -> DeviceFacts:
        """The device's description, without what belongs to this process."""
        return DeviceFacts(**{spec.name: getattr(self, spec.name) for spec in fields(DeviceFacts)})

    @property
    def eager_method(self) -> str:
        """Timing method of calls that are not replayed from a graph; see Row.method."""
        if self.is_cuda:
            return "eager"
        return "processor" if self.clock is time.process_time else "host"

    def synchronize(self) -> None:
        """Wait for all submitted work."""
        if self.is_cuda:
            import torch

            torch.cuda.synchronize(self.torch_device)

    def elapsed_s(self, run: Callable[[], object], *, is_replay: bool = False) -> float:
        """Time of a function by device events, or by the clock on a CPU. [s]

        Args:
            is_replay: Whether it replays a graph; the device then waits until the host has submitted it.
        """
        if not self.is_cuda:
            begin = self.clock()
            run()
            return self.clock() - begin
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if is_replay:
            torch.cuda._sleep(_SPIN_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def capture(self, run: Callable[[], object]) -> Callable[[], object] | None:
        """Capture calls as a graph that can be replayed without launch cost; None if that is not possible.

        The graph is accepted only if a replay writes the last call's results: work on another stream would escape the
        capture, and an empty graph would be timed.

        Args:
            run: Makes the calls, all of them warmed up, and returns the results of the last one.
        """
        if not self.is_cuda:
            return None
        import torch

        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Not torch.cuda.graph, which collects garbage and empties the allocator's cache for every row.
            graph.capture_begin()
            try:
                results = run()
            finally:
                graph.capture_end()
            self.synchronize()
        except torch.cuda.OutOfMemoryError:  # the graph's pool needs as much memory as the calls
            torch.cuda.empty_cache()
            return None
        except RuntimeError as error:
            self.broken_captures.append(str(error))
            return None
        return graph.replay if writes_results(graph.replay, results) else None

    def trim(self) -> None:
        """Free cached memory of earlier rows if it exceeds a limit."""
        if self.is_cuda and self._cached_bytes() > _MAX_UNUSED_FRACTION * float(self.facts["memory_bytes"]):
            import torch

            torch.cuda.empty_cache()

    def _cached_bytes(self) -> int:
        """Memory that torch's allocator keeps and no tensor uses. [byte]"""
        import torch

        return int(torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device))

    def peak_bytes(self, run: Callable[[], object]) -> float | None:
        """Peak memory of tensors during a call, as torch counts it, without the input pool; None on a CPU. [byte]"""
        if not self.is_cuda:
            return None
        import torch

        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run()
        self.synchronize()
        return float(torch.cuda.max_memory_allocated(self.torch_device) - self.pool.num_bytes)

    def usable_bytes(self) -> float:
        """Memory available to one row. [byte]"""
        if self.is_cuda:
            import torch

            free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
            return _USABLE_FRACTION * float(free_bytes + self._cached_bytes() + self.pool.num_bytes)
        return _USABLE_FRACTION * (host_available_bytes() + self.pool.num_bytes)

    def release(self) -> None:
        """Free all memory that is not in use, the input pool included."""
        self.pool.clear()
        if self.is_cuda:
            import torch

            torch.cuda.empty_cache()


def writes_results(replay: Callable[[], object], results: object) -> bool:
    """Whether replaying a captured graph writes all of its results.

    Args:
        results: A tensor, or tensors in tuples and lists.
    """
    import torch

    # A boolean mask has no unused value to mark it with; it always comes with another result.
    tensors = [tensor.detach() for tensor in flatten_tensors(results) if tensor.dtype != torch.bool]
    marks = [_MARK if part.is_floating_point() else torch.iinfo(part.dtype).min for part in tensors]
    for tensor, mark in zip(tensors, marks, strict=True):
        tensor.fill_(mark)
    replay()
    return bool(tensors) and all(bool((tensor != mark).all()) for tensor, mark in zip(tensors, marks, strict=True))


def flatten_tensors(results: object) -> list[Any]:
    """Tensors in tuples and lists, in order.

    >>> flatten_tensors((None, [None]))
    []
    """
    if isinstance(results, tuple | list):
        return [tensor for part in results for tensor in flatten_tensors(part)]
    return [results] if hasattr(results, "fill_") else []


def _draw(count: int, kind: Any, torch_device: Any) -> Any:
    """Draw random normal numbers; 8-bit formats are converted from fp32."""
    import torch

    if kind.is_floating_point and kind.itemsize > 1:
        return torch.randn(count, device=torch_device, dtype=kind)
    drawn = torch.empty(count, device=torch_device, dtype=kind)
    for start in range(0, count, _MAX_DRAWN_ELEMENTS):
        part = drawn[start : start + _MAX_DRAWN_ELEMENTS]
        numbers = torch.randn(part.numel(), device=torch_device)
        if not kind.is_floating_point:
            numbers = (numbers * _INT8_DEVIATION).round().clamp(-127, 127)
        part.copy_(numbers)
    return drawn
