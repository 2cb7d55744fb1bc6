"""An H200 that is not there: torch's device calls on a clock of its own, behind everything that the bench does.

Run as a program it is the command line, or, given the number of a descriptor, the worker that the command line starts.
Calls take what the package predicts for the device, times what SIMULATED_GPU (JSON) says: ``class_factor`` on products
whose contiguous rows are multiples of ``class_bytes`` and no more, ``bandwidth_factor`` on what pointwise operations
move, ``noise`` (deviation of a row's logarithm), ``strays`` (share of rows that take 1.5 times as long). ``oom_bytes``
bounds what graphs may allocate.
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

# What the host takes to issue one call, and to hand a graph over: per graph, and per call in it. [s]
CALL_S, GRAPH_S, NODE_S = 6e-6, 1e-5, 2e-7
CLOCK_HZ = 1.98e9
MEMORY_BYTES = 150_109_880_320.0
# What a launched kernel waits for before it begins: none begins before it was issued. [s]
DEVICE_START_S = 2e-6

SETTINGS = json.loads(os.environ.get("SIMULATED_GPU", "{}"))


class SimulatedGpu:
    """Host and device, each with its time, and the device's memory.

    Attributes:
        host_s: The host's time. [s]
        device_s: When the device will have done everything that it was given. [s]
        recorded: Calls of the capture that is under way, as their times; None where none is. [s]
        row_bytes: What a call of this row writes. [byte]
        result: What every call returns; a tensor.
        left_bytes: What pools of dropped graphs still hold. [byte]
    """

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0
        self.recorded: list[float] | None = None
        self.left_bytes = 0.0
        self.row_bytes = 0.0
        self.result: Any = None

    def launch(self, time_s: float) -> None:
        """Issue one call."""
        if self.recorded is not None:
            self.recorded.append(time_s)
            self.host_s += CALL_S
            return
        self.host_s += CALL_S
        self.device_s = max(self.device_s, self.host_s + DEVICE_START_S) + time_s

    def synchronize(self, _device: Any = None) -> None:
        """Wait for the device."""
        self.host_s = max(self.host_s, self.device_s)


GPU = SimulatedGpu()


class Event:
    """A point of the stream."""

    def __init__(self, **_: Any) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        """Where the stream is now: not before the host says so."""
        GPU.device_s = max(GPU.device_s, GPU.host_s)
        self.at_s = GPU.device_s

    def synchronize(self) -> None:
        """Wait for it."""
        GPU.synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, in steps of half a microsecond."""
        return round((end.at_s - self.at_s) / 5e-7) * 5e-4


class Graph:
    """Calls in a row; its pool stays when it is dropped."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def capture_begin(self) -> None:
        """Begin; the results of a capture take memory that no other graph can use."""
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
        """Write down one kernel."""
        Path(path).write_text(r"| {ID | 0 (topoId: 0) | simulated_256x128\<\<\<132,384,0\>\>\>}", encoding="utf-8")

    def replay(self) -> None:
        """Hand all calls over at once."""
        GPU.host_s += GRAPH_S + NODE_S * len(self.times_s)
        GPU.device_s = max(GPU.device_s, GPU.host_s + DEVICE_START_S) + sum(self.times_s)
        GPU.result.fill_(1.0)


def out_of_memory() -> Exception:
    """What torch raises."""
    import torch

    return torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def true_s(case: Any, device: Any) -> float:
    """What one call takes, as long as the process lives. [s]"""
    from shapewright.operations.gemm import contiguous_dims
    from shapewright.perf.pricing import price_operations

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
    """An operation whose calls advance the device's time."""
    from shapewright.bench.prepared import Prepared, num_input_sets

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
    return Prepared(inputs=inputs, call=call, check=lambda *_: 0.0, kernel="simulated", set_bytes=set_bytes)


class Nvml:
    """NVML's functions, of a driver that does not let everyone read everything."""

    def __getattr__(self, _name: str) -> Any:
        return self.refuse

    def refuse(self, *_: Any) -> int:
        """NVML_ERROR_NO_PERMISSION."""
        return 4

    def nvmlDeviceGetHandleByUUID(self, name: bytes, _handle: Any) -> int:
        """Knows one GPU."""
        return 0 if name == b"GPU-1234" else 2

    def nvmlDeviceGetClockInfo(self, _handle: Any, _clock: int, value: Any) -> int:
        """MHz."""
        value._obj.value = 1980
        return 0


def open_backend(**_: Any) -> Any:
    """The GPU as the bench opens it."""
    import torch

    from shapewright.bench import open_device
    from shapewright.hardware import load_device

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
    """Be the worker."""
    import torch

    from shapewright.bench import backend, measuring, nvml, open_device, timer, worker

    GPU.result = torch.ones(3)
    nvml._load = Nvml
    describe = backend.Backend.describe

    def without_device(self: Any) -> Any:
        found = describe(self)
        return replace(found, facts={name: value for name, value in found.facts.items() if name != "device"})

    backend.Backend.describe = without_device
    open_device.open_backend, measuring.prepare = open_backend, prepare
    timer.time = SimpleNamespace(monotonic=lambda: GPU.host_s)
    worker.main()


def main() -> None:
    """The command line; what Python itself is asked for otherwise is done as usual."""
    from shapewright.bench import worker
    from shapewright.cli import main as run

    worker.COMMAND = (sys.executable, str(Path(__file__)))
    run(sys.argv[1:])


if __name__ == "__main__":
    serve() if len(sys.argv) == 2 and sys.argv[1].isdigit() else main()
