"""A simulated H200: torch's device functions on a simulated clock, below all code of the bench.

As a program this is the command line, or, with a file descriptor as its argument, the worker of that command line.
Calls take the predicted time, modified by the environment variable SIMULATED_GPU (JSON): ``class_factor`` for GEMMs
whose contiguous rows are aligned to exactly ``class_bytes``, ``bandwidth_factor`` for pointwise operations, ``noise``
(standard deviation of a row's log time), ``strays`` (share of rows that take 1.5 times as long). ``oom_bytes`` limits
the memory of graphs.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Host time to launch one call, and to submit a graph: per graph, and per call in it. [s]
CALL_S, GRAPH_S, NODE_S = 6e-6, 1e-5, 2e-7
CLOCK_HZ = 1.98e9
MEMORY_BYTES = 150_109_880_320.0
# Latency between the launch and the start of a kernel. [s]
DEVICE_START_S = 2e-6

SETTINGS = json.loads(os.environ.get("SIMULATED_GPU", "{}"))


class SimulatedGpu:
    """Simulated clocks of the host and the device, and the memory of the device.

    Attributes:
        host_s: Time of the host. [s]
        device_s: Time at which the device finishes all launched calls. [s]
        recorded: Times of the calls of the current capture; None outside a capture. [s]
        row_bytes: Bytes that a call of the current row writes. [byte]
        result: Tensor that every call returns.
        left_bytes: Memory of the pools of deleted graphs. [byte]
    """

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0
        self.recorded: list[float] | None = None
        self.left_bytes = 0.0
        self.row_bytes = 0.0
        self.result: Any = None

    def launch(self, time_s: float) -> None:
        """Launch one call."""
        if self.recorded is not None:
            self.recorded.append(time_s)
            self.host_s += CALL_S
            return
        self.host_s += CALL_S
        self.device_s = max(self.device_s, self.host_s + DEVICE_START_S) + time_s

    def synchronize(self, _device: Any = None) -> None:
        """Let the host wait for the device."""
        self.host_s = max(self.host_s, self.device_s)


GPU = SimulatedGpu()


class Event:
    """A device event."""

    def __init__(self, **_: Any) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        """Record the time at which the stream reaches the event, not before the host's time."""
        GPU.device_s = max(GPU.device_s, GPU.host_s)
        self.at_s = GPU.device_s

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        GPU.synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Time between events in ms, with a resolution of 0.5 us."""
        return round((end.at_s - self.at_s) / 5e-7) * 5e-4


class Graph:
    """A captured graph, whose memory pool stays allocated after the graph is deleted."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def capture_begin(self) -> None:
        """Begin a capture; its results take memory that other graphs cannot use."""
        if GPU.left_bytes + GPU.row_bytes > float(SETTINGS.get("oom_bytes", MEMORY_BYTES)):
            raise out_of_memory()
        GPU.recorded = self.times_s
        GPU.left_bytes += GPU.row_bytes

    def capture_end(self) -> None:
        """End."""
        GPU.recorded = None

    def enable_debug_mode(self) -> None:
        """Keep what was captured."""

    def debug_dump(self, path: str) -> None:
        """Write a dump with one kernel."""
        Path(path).write_text(r"| {ID | 0 (topoId: 0) | simulated_256x128\<\<\<132,384,0\>\>\>}", encoding="utf-8")

    def replay(self) -> None:
        """Launch all captured calls at once."""
        GPU.host_s += GRAPH_S + NODE_S * len(self.times_s)
        GPU.device_s = max(GPU.device_s, GPU.host_s + DEVICE_START_S) + sum(self.times_s)
        GPU.result.fill_(1.0)


def out_of_memory() -> Exception:
    """The error that torch raises."""
    import torch

    return torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def true_s(case: Any, device: Any) -> float:
    """Simulated time of one call, the same during the whole process. [s]"""
    from shapewright.lowering.operations.gemm import contiguous_dims
    from shapewright.pricing.operations import price_operations

    operation = case.operation
    time_s = float(price_operations([operation], device)[0].time_s)
    generator = random.Random(hashlib.sha256(case.key("", "").encode()).hexdigest())
    if operation.kind == "gemm" and SETTINGS.get("class_bytes"):
        width = {"fp32": 4, "tf32": 4, "fp8": 1, "int8": 1}.get(operation.dtype, 2)
        widths = [getattr(operation, letter) * width for letter in contiguous_dims(operation.layout)]
        if min(size & -size for size in widths) == SETTINGS["class_bytes"]:
            time_s *= SETTINGS["class_factor"]
    if operation.kind == "pointwise":
        time_s /= SETTINGS.get("bandwidth_factor", 1.0)
    time_s *= generator.lognormvariate(0.0, SETTINGS.get("noise", 0.0))
    return time_s * (1.5 if generator.random() < SETTINGS.get("strays", 0.0) else 1.0)


def prepare(case: Any, backend: Any) -> Any:
    """Prepare an operation whose calls advance the device's clock."""
    from shapewright.measure.bench.operations.prepared import PreparedCall, num_input_sets

    operation = case.operation
    set_bytes = float(operation.num_bytes)
    count = num_input_sets(set_bytes, backend)
    time_s = true_s(case, backend.facts["device"])
    samples = random.Random(1)
    GPU.row_bytes = set_bytes / 2

    def call(_index: int) -> Any:
        GPU.launch(time_s * samples.lognormvariate(0.0, 3e-3))
        return GPU.result

    inputs = [(index,) for index in range(count)]
    return PreparedCall(inputs=inputs, call=call, check=lambda *_: 0.0, kernel="simulated", set_bytes=set_bytes)


class Nvml:
    """NVML with a driver that refuses some readings."""

    def __getattr__(self, _name: str) -> Any:
        return self.refuse

    def refuse(self, *_: Any) -> int:
        """NVML_ERROR_NO_PERMISSION."""
        return 4

    def nvmlDeviceGetHandleByUUID(self, name: bytes, _handle: Any) -> int:
        """Find the only GPU."""
        return 0 if name == b"GPU-1234" else 2

    def nvmlDeviceGetClockInfo(self, _handle: Any, _clock: int, value: Any) -> int:
        """Clock in MHz."""
        value._obj.value = 1980
        return 0


def open_backend(**_: Any) -> Any:
    """Open the simulated GPU."""
    import torch

    from shapewright.hardware.loader import load_device
    from shapewright.measure.bench.device import open_device

    facts = {"name": "NVIDIA H200", "multi_processor_count": 132, "total_memory": int(MEMORY_BYTES), "major": 9,
             "minor": 0, "L2_cache_size": 62_914_560, "uuid": "1234"}  # fmt: skip
    fakes: dict[str, Any] = {
        "set_device": lambda _index: None, "get_device_properties": lambda _index: SimpleNamespace(**facts),
        "Stream": lambda _device: None, "set_stream": lambda _stream: None, "Event": Event, "CUDAGraph": Graph,
        "synchronize": GPU.synchronize, "_sleep": lambda cycles: GPU.launch(cycles / CLOCK_HZ),
        "mem_get_info": lambda _device: (MEMORY_BYTES - GPU.left_bytes, MEMORY_BYTES),
        "memory_reserved": lambda _device: GPU.left_bytes, "memory_allocated": lambda _device: 0.0,
        "empty_cache": lambda: setattr(GPU, "left_bytes", 0.0),
    }  # fmt: skip
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    opened = open_device._gpu_backend(torch, 0)
    shown = {**opened.facts, "device": load_device(opened.name)}
    return replace(opened, facts=shown)


def serve() -> None:
    """Run as a worker process."""
    import torch

    from shapewright.measure.bench import measuring, worker
    from shapewright.measure.bench.device import backend, open_device, system_info, timer

    GPU.result = torch.ones(3)
    system_info._load_nvml = Nvml
    describe = backend.Backend.describe

    def without_device(self: Any) -> Any:
        found = describe(self)
        return replace(found, facts={name: value for name, value in found.facts.items() if name != "device"})

    backend.Backend.describe = without_device
    open_device.open_backend, measuring.prepare = open_backend, prepare
    timer.time = SimpleNamespace(monotonic=lambda: GPU.host_s)
    worker.main()


def main() -> None:
    """Run the command line with simulated workers."""
    from shapewright.app.cli import main as run
    from shapewright.measure.bench import worker

    worker.COMMAND = (sys.executable, str(Path(__file__)))
    run(sys.argv[1:])


if __name__ == "__main__":
    serve() if len(sys.argv) == 2 and sys.argv[1].isdigit() else main()
