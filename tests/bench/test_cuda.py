"""The code for CUDA and ROCm devices, tested with fakes of torch's device functions and without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="measuring needs the bench extra")

from shapewright.core.errors import BenchError
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.bench.device import open_device
from shapewright.measure.bench.device.backend import Backend
from shapewright.measure.bench.device.open_device import open_backend
from shapewright.measure.bench.device.timer import measure
from shapewright.measure.bench.measuring import list_kernels
from shapewright.measure.bench.run import make_run
from shapewright.measure.bench.worker import check_device
from shapewright.measure.store.record import Case, Row, row_facts


def open_gpu(monkeypatch: pytest.MonkeyPatch, *, hip: str | None = None, **changes: Any) -> tuple[Backend, list[str]]:
    """Open a fake H200, and record the order of calls."""
    calls: list[str] = []
    facts = {"name": "NVIDIA H200", "multi_processor_count": 132, "total_memory": 150_109_880_320, "major": 9,
             "minor": 0, "L2_cache_size": 62_914_560, "uuid": "1234"}  # fmt: skip
    properties = SimpleNamespace(**{**facts, **changes})
    cuda = SimpleNamespace(
        set_device=lambda index: calls.append(f"device {index}"),
        get_device_properties=lambda _index: properties,
        Stream=lambda _device: "side stream",
        set_stream=lambda stream: calls.append(f"on {stream}"),
    )
    version = SimpleNamespace(cuda=None if hip else "13.0", hip=hip)
    fake = SimpleNamespace(cuda=cuda, version=version, __version__="2.13.0", device=lambda *words: SimpleNamespace(
        type=words[0], index=words[1]))  # fmt: skip

    def no_nvml(_uuid: str) -> None:
        raise OSError("no NVML")

    monkeypatch.setattr(open_device, "Nvml", no_nvml)
    return open_device._gpu_backend(fake, 0), calls


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, formats and cache are those of the GPU, and all work runs on one non-default stream."""
    gpu, calls = open_gpu(monkeypatch)

    assert gpu.name == "h200-sxm-141gb"
    assert gpu.dtypes == ("fp32", "fp16", "tf32", "bf16", "int8", "fp8")
    assert (gpu.cache_bytes, gpu.runtime, gpu.library) == (62_914_560, "cuda 13.0", "torch 2.13.0 cuda 13.0")
    assert calls == ["device 0", "on side stream"]
    assert gpu.read_state() == {}
    assert gpu.describe().is_cuda
    assert open_gpu(monkeypatch, name="Tesla V100", major=7)[0].dtypes == ("fp32", "fp16")
    assert open_gpu(monkeypatch, name="A100", major=8)[0].dtypes == ("fp32", "fp16", "tf32", "bf16", "int8")
    amd, _ = open_gpu(monkeypatch, hip="6.2", name="AMD Instinct MI300X")
    assert (amd.dtypes, amd.runtime) == (("fp32", "fp16", "bf16"), "rocm 6.2")


@pytest.mark.parametrize(
    ("cuda", "message", "words"),
    [
        (None, "", "install a build for the GPU"),
        ("13.0", "", "is built for CUDA and sees no GPU; check the driver"),
        ("13.0", "The NVIDIA driver on your system is too old\n(found 11040).", r"sees no GPU \(The NVIDIA driver"),
    ],
)
def test_errors_explain_a_missing_gpu(
    cuda: str | None, message: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU build, no visible GPU, and a driver that torch warns about have different messages."""

    def is_available() -> bool:
        if message:
            warnings.warn(message, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(BenchError, match=words) as caught:
        open_backend()
    assert "\n" not in str(caught.value)
    assert "measure the CPU" in str(caught.value)


def test_gpu_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch build without kernels for the GPU is one error before the first row, not a failed row per case."""

    def no_kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(open_device, "_gpu_backend", lambda _torch, _index: open_backend(cpu=True))
    monkeypatch.setattr(torch, "ones", no_kernel)
    with pytest.raises(BenchError, match="no kernel image is available for execution on the device; install"):
        open_backend()


class FakeGraph:
    """Records the calls of a capture, and applies their effects on replay."""

    log: list[str]
    fails_at_end = False
    is_empty = False

    def capture_begin(self) -> None:
        """Begin."""
        self.log.append("begin")

    def capture_end(self) -> None:
        """End the capture; a failed capture raises its error here."""
        self.log.append("end")
        if self.fails_at_end:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def enable_debug_mode(self) -> None:
        """Keep what was captured."""

    def debug_dump(self, path: str) -> None:
        """Write a dump as the driver does, of a split-k GEMM with a second kernel for the sum."""
        label = r"| {ID | %d (topoId: %d) | %s\<\<\<%s,0\>\>\>}"
        names = [(0, 1, "nvjet_tst_256x128_64x4", r"\{66,2\},384"), (1, 0, "splitKreduce_kernel", "32,512")]
        Path(path).write_text("\n".join(label % node for node in names), encoding="utf-8")

    def replay(self) -> None:
        """Write the result, unless the write was not captured."""
        self.log.append("replay")
        if not self.is_empty:
            RESULT.fill_(1.0)


RESULT = torch.ones(3)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """A graph class whose instances log their calls."""
    cls = type("Graph", (FakeGraph,), {"log": []})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cls)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: cls.log.append("sync"))
    return cls


def capture(run: Callable[[], object]) -> Callable[[], object] | None:
    """Capture as a GPU does."""
    return open_fake().capture(run)


def open_fake() -> Backend:
    """A CPU backend that claims to be a GPU."""
    return replace(open_backend(cpu=True), is_cuda=True)


def test_captures_contain_no_synchronization(graph: type[FakeGraph]) -> None:
    """The device is synchronized before and after a capture, never during it; one replay verifies the graph."""

    def run() -> Any:
        graph.log.append("call")
        return RESULT

    assert capture(run) is not None
    assert graph.log == ["sync", "begin", "call", "end", "sync", "replay"]


@pytest.mark.parametrize("breaks", [False, True])
def test_rows_name_the_kernels_that_ran(graph: type[FakeGraph], breaks: bool) -> None:
    """Kernels and grids are read from a graph of one call; a failed capture is recorded."""
    gpu = open_fake()
    graph.fails_at_end = breaks
    found = list_kernels(gpu, lambda: RESULT)

    assert found == (
        [] if breaks else ["nvjet_tst_256x128_64x4<<<{66,2},384,0>>>", "splitKreduce_kernel<<<32,512,0>>>"]
    )
    assert bool(gpu.broken_captures) is breaks


def test_failed_captures_are_timed_eagerly(graph: type[FakeGraph]) -> None:
    """After a failed capture, an empty graph or an out-of-memory error, calls are timed individually."""

    def too_large() -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    graph.is_empty = True
    assert capture(lambda: RESULT) is None
    graph.is_empty, graph.fails_at_end = False, True
    gpu = open_fake()
    assert gpu.capture(lambda: RESULT) is None
    assert "during capture" in gpu.broken_captures[0]
    graph.fails_at_end = False
    gpu = open_fake()
    assert gpu.capture(too_large) is None
    assert graph.log[-2:] == ["begin", "end"]
    assert gpu.broken_captures == []


def test_a_replay_does_not_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device spins until a graph has been submitted; individually issued calls start immediately."""
    log: list[str] = []
    event = SimpleNamespace(record=lambda: log.append("event"), synchronize=lambda: None, elapsed_time=lambda _end: 2.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(f"wait {cycles >= 50_000}"))
    gpu = open_fake()

    assert gpu.elapsed_s(lambda: log.append("replay"), is_replay=True) == pytest.approx(2e-3)
    gpu.elapsed_s(lambda: log.append("call"))
    assert log == ["wait True", "event", "replay", "event", "event", "call", "event"]


def test_memory_of_earlier_graphs_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory pools of earlier graphs are freed between rows above a limit, since a capture cannot free them."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 1.0e9)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("freed"))
    gpu = replace(open_fake(), facts={"memory_bytes": 141e9})
    for reserved_bytes in (2e9, 90e9):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device, held=reserved_bytes: held)
        gpu.trim()

    assert log == ["freed"]


def test_a_worker_is_replaced_after_a_failed_capture() -> None:
    """After a failed capture the row is kept, and the process is replaced."""
    run = make_run(open_fake(), suite="x", command="c")
    case = Case(operation=Gemm(name="x", dtype="fp32", m=8, n=8, k=8))
    row = Row(**row_facts(case, run), measured_utc="", status="ok", median_s=1.0)
    gpu = open_fake()

    assert check_device(row, gpu) == (row, True)
    gpu.broken_captures.append("broken")
    assert check_device(row, gpu) == (row, False)


def test_a_row_without_a_graph_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph, the row's method is eager and its launch cost is unknown."""
    gpu = replace(open_backend(cpu=True), is_cuda=True)
    monkeypatch.setattr(Backend, "capture", lambda _self, _run: None)
    monkeypatch.setattr(Backend, "synchronize", lambda _self: None)
    monkeypatch.setattr(Backend, "elapsed_s", lambda _self, run, **_: (run(), 1e-3)[1])
    timing = measure(gpu, lambda: None, [()], budget_s=0.01, ci_fraction=0.5)

    assert (timing.method, timing.launch_s) == ("eager", None)
    assert timing.kernels_s > 0.0
