"""Backend: the device that is measured, behind one small class for CUDA, ROCm and CPU.

ROCm's PyTorch calls itself CUDA, so the two differ in names and versions alone.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from shapewright.bench.graphs import fills_results
from shapewright.bench.host import host_available_bytes, host_cache_bytes, host_memory_bytes, processor_name
from shapewright.bench.inputs import InputPool
from shapewright.bench.nvml import Nvml
from shapewright.errors import BenchError, DeviceError, MissingExtraError
from shapewright.hardware import detect_device

# Last-level cache assumed where neither the driver nor the kernel tells. [byte]
_CPU_CACHE_BYTES = 64e6
_GPU_CACHE_BYTES = 128e6
# Share of the free memory that the inputs and outputs of one row may take.
_USABLE_FRACTION = 0.7
# Part of a GPU's memory that may lie idle between rows: each graph leaves a pool behind that no later one can use, and
# while a graph is captured the allocator gives nothing back.
_IDLE_FRACTION = 0.2
# Wait on the device before a replay is timed, 0.1 ms at 2 GHz: longer than the host takes to hand a graph over, which
# would else be part of the time. [cycle]
_HEAD_START_CYCLES = 200_000
# Largest single operation that is worth a CPU's time: about a second on two cores. [flop]
_CPU_MOST_FLOPS = 2e10
_CPU_DTYPES = ("fp32", "bf16", "fp16")
# First compute capability with matrix units for the format. Source: NVIDIA CUDA C++ Programming Guide, table
# "Tensor Core element types per compute capability".
_CUDA_DTYPES: Mapping[str, tuple[int, int]] = {
    "fp32": (0, 0), "fp16": (5, 3), "tf32": (8, 0), "bf16": (8, 0), "int8": (7, 5), "fp8": (8, 9),
}  # fmt: skip


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


def open_backend(*, cpu: bool = False, device_index: int = 0) -> Backend:
    """Find the device to measure.

    Args:
        cpu: Measure the CPU.
        device_index: Which of the visible GPUs.

    Raises:
        MissingExtraError: PyTorch is not installed.
        BenchError: there is no such GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "measuring needs PyTorch, which is not installed; run: pip install 'shapewright[bench]'"
        ) from error
    if cpu:
        return _cpu_backend(torch)
    _require_gpu(torch)
    count = torch.cuda.device_count()
    if not 0 <= device_index < count:
        raise BenchError(f"--device-index {device_index} is not there; this host shows GPUs 0 to {count - 1}")
    try:
        found = _gpu_backend(torch, device_index)
        # A build without kernels for this GPU, or a GPU that another process holds, would else fail row after row.
        torch.ones(1, device=found.torch_device).add_(1.0).item()
    except RuntimeError as error:
        words = (str(error).strip().splitlines() or ["no reason is given"])[0]
        raise BenchError(
            f"the GPU cannot be used by PyTorch {torch.__version__}: {words}; install a build for it, free it, or use "
            "--cpu"
        ) from error
    return found


def _require_gpu(torch: Any) -> None:
    """Refuse to go on without a GPU.

    Raises:
        BenchError: PyTorch has none, with what it says of that.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return
    built_for = "ROCm" if getattr(torch.version, "hip", None) else "CUDA" if torch.version.cuda else ""
    if not built_for:
        raise BenchError("PyTorch sees no GPU (CUDA or ROCm); use --cpu to measure the CPU, or install its GPU build")
    words = "".join(f" ({str(entry.message).splitlines()[0]})" for entry in said[-1:])
    raise BenchError(
        f"PyTorch {torch.__version__} is built for {built_for} and sees no GPU{words}; look at its driver and at "
        "CUDA_VISIBLE_DEVICES, or use --cpu to measure the CPU"
    )


def _cpu_backend(torch: Any) -> Backend:
    if "OMP_NUM_THREADS" not in os.environ:
        # Threads wait for each other; one whose core is taken, be it by the process that keeps the store, costs the
        # others whole time slices.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    cache_bytes = host_cache_bytes()
    facts = {
        "processor": processor_name(),
        "num_threads": torch.get_num_threads(),
        "memory_bytes": host_memory_bytes(),
        **({"l2_bytes": cache_bytes} if cache_bytes else {}),
    }
    return Backend(
        is_cuda=False,
        torch_device=torch.device("cpu"),
        pool=InputPool(torch.device("cpu")),
        name="cpu",
        facts=facts,
        driver="",
        # Part of a row's key: another processor, or another number of threads, is another measurement.
        runtime=f"cpu {facts['processor']}, {facts['num_threads']} threads",
        torch_version=str(torch.__version__),
        dtypes=(*_CPU_DTYPES, *_narrow_cpu_dtypes(torch)),
        cache_bytes=cache_bytes or _CPU_CACHE_BYTES,
        most_flops=_CPU_MOST_FLOPS,
        # What other processes take from a single thread is not counted; several threads also wait for each other.
        clock=time.process_time if facts["num_threads"] == 1 else time.perf_counter,
        # A busy host shows in the rows.
        read_state=lambda: {"load_average": os.getloadavg()[0]},
    )


def _narrow_cpu_dtypes(torch: Any) -> tuple[str, ...]:
    """8-bit formats that this torch multiplies on a CPU; older ones lack them."""
    zeros, one = torch.zeros(32, 32), torch.ones(())
    found = []
    with suppress(RuntimeError, AttributeError):
        torch._int_mm(zeros.to(torch.int8), zeros.to(torch.int8).t())
        found.append("int8")
    with suppress(RuntimeError, AttributeError):
        narrow = zeros.to(torch.float8_e4m3fn)
        torch._scaled_mm(narrow, narrow.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        found.append("fp8")
    return tuple(found)


def _gpu_backend(torch: Any, index: int) -> Backend:
    torch.cuda.set_device(index)
    properties = torch.cuda.get_device_properties(index)
    hip = getattr(torch.version, "hip", None)
    facts = {
        "name": properties.name,
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "uuid": str(getattr(properties, "uuid", "")),
    }
    try:
        name = detect_device(properties.name, properties.multi_processor_count, properties.total_memory).name
    except DeviceError:
        name = properties.name
    nvml = None
    if not hip:
        with suppress(OSError):
            nvml = Nvml(facts["uuid"])
    has_matrix_units = {
        dtype for dtype, capability in _CUDA_DTYPES.items() if (properties.major, properties.minor) >= capability
    }
    torch_device = torch.device("cuda", index)
    torch.cuda.set_stream(torch.cuda.Stream(torch_device))
    return Backend(
        is_cuda=True,
        torch_device=torch_device,
        pool=InputPool(torch_device),
        name=name,
        facts=facts,
        driver=nvml.driver() if nvml else "",
        runtime=f"rocm {hip}" if hip else f"cuda {torch.version.cuda}",
        torch_version=str(torch.__version__),
        dtypes=("fp32", "fp16", "bf16") if hip else tuple(dtype for dtype in _CUDA_DTYPES if dtype in has_matrix_units),
        cache_bytes=float(getattr(properties, "L2_cache_size", 0) or _GPU_CACHE_BYTES),
        most_flops=float("inf"),
        read_state=nvml.state if nvml else dict,
    )
