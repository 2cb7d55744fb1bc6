"""The path of CUDA and ROCm devices, on a stand-in for torch's device calls: no GPU is needed to see their order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="measuring needs the bench extra")

from shapewright.bench import open_device
from shapewright.bench.backend import Backend
from shapewright.bench.kernel_names import list_kernels
from shapewright.bench.open_device import open_backend
from shapewright.bench.run import make_run
from shapewright.bench.timer import measure
from shapewright.bench.worker import judge_device
from shapewright.errors import BenchError
from shapewright.operations import Gemm
from shapewright.store.record import Case, Row, row_facts


def open_gpu(monkeypatch: pytest.MonkeyPatch, *, hip: str | None = None, **changes: Any) -> tuple[Backend, list[str]]:
    """Open an H200 that is not there; what was called, in order."""
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


def test_a_gpu_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name of its device file, formats by its capability, cache by its driver; all work goes to one side stream."""
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
    ("cuda", "said", "words"),
    [
        (None, "", "install its GPU build"),
        ("13.0", "", "is built for CUDA and sees no GPU; look at its driver"),
        ("13.0", "The NVIDIA driver on your system is too old\n(found 11040).", r"sees no GPU \(The NVIDIA driver"),
    ],
)
def test_why_there_is_no_gpu_is_told(cuda: str | None, said: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for a CPU, a build for GPUs without one, and a driver that torch complains of have an advice each."""

    def is_available() -> bool:
        if said:
            warnings.warn(said, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(BenchError, match=words) as caught:
        open_backend()
    assert "\n" not in str(caught.value)
    assert "use --cpu" in str(caught.value)


def test_a_gpu_that_runs_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without kernels for the GPU is one line before the first row, and not thousands of failed rows."""

    def no_kernel(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(open_device, "_gpu_backend", lambda _torch, _index: open_backend(cpu=True))
    monkeypatch.setattr(torch, "ones", no_kernel)
    with pytest.raises(BenchError, match="no kernel image is available for execution on the device; install"):
        open_backend()


class FakeGraph:
    """Keeps the calls made between begin and end, and makes their effects when replayed."""

    log: list[str]
    fails_at_end = False
    is_empty = False

    def capture_begin(self) -> None:
        """Begin."""
        self.log.append("begin")

    def capture_end(self) -> None:
        """End; a capture that was broken says so here."""
        self.log.append("end")
        if self.fails_at_end:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def enable_debug_mode(self) -> None:
        """Keep what was captured."""

    def debug_dump(self, path: str) -> None:
        """Write the graph down as the driver does: a product whose parts are added by a second kernel."""
        label = r"| {ID | %d (topoId: %d) | %s\<\<\<%s,0\>\>\>}"
        names = [(0, 1, "nvjet_tst_256x128_64x4", r"\{66,2\},384"), (1, 0, "splitKreduce_kernel", "32,512")]
        Path(path).write_text("\n".join(label % node for node in names), encoding="utf-8")

    def replay(self) -> None:
        """Fill the result, unless what filled it was not captured."""
        self.log.append("replay")
        if not self.is_empty:
            RESULT.fill_(1.0)


RESULT = torch.ones(3)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """A graph class whose instances write down what happens."""
    cls = type("Graph", (FakeGraph,), {"log": []})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cls)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: cls.log.append("sync"))
    return cls


def capture(run: Callable[[], object]) -> Callable[[], object] | None:
    """Capture as a GPU does."""
    return open_fake().capture(run)


def open_fake() -> Backend:
    """The CPU in the clothes of a GPU."""
    return replace(open_backend(cpu=True), is_cuda=True)


def test_a_capture_has_nothing_in_it_that_waits(graph: type[FakeGraph]) -> None:
    """Waiting ends before the capture begins and starts after it ends; one replay shows that it works."""

    def run() -> Any:
        graph.log.append("call")
        return RESULT

    assert capture(run) is not None
    assert graph.log == ["sync", "begin", "call", "end", "sync", "replay"]


@pytest.mark.parametrize("breaks", [False, True])
def test_rows_name_the_kernels_that_ran(graph: type[FakeGraph], breaks: bool) -> None:
    """A graph of one call tells its kernels and their grids; a capture that breaks is reported."""
    gpu = open_fake()
    graph.fails_at_end = breaks
    found = list_kernels(gpu, lambda: RESULT)

    assert found == (
        [] if breaks else ["nvjet_tst_256x128_64x4<<<{66,2},384,0>>>", "splitKreduce_kernel<<<32,512,0>>>"]
    )
    assert bool(gpu.broken_captures) is breaks


def test_captures_that_do_not_work_are_left(graph: type[FakeGraph]) -> None:
    """A broken capture, an empty graph and too little memory for one mean timing call by call."""

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
    """The device is kept busy until a graph is handed over; calls issued one by one begin at once."""
    log: list[str] = []
    event = SimpleNamespace(record=lambda: log.append("event"), synchronize=lambda: None, elapsed_time=lambda _end: 2.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(f"wait {cycles >= 50_000}"))
    gpu = open_fake()

    assert gpu.elapsed_s(lambda: log.append("replay"), is_replay=True) == pytest.approx(2e-3)
    gpu.elapsed_s(lambda: log.append("call"))
    assert log == ["wait True", "event", "replay", "event", "event", "call", "event"]


def test_what_graphs_leave_behind_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of earlier graphs are freed between rows once they are much: no capture could free them."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 1.0e9)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("freed"))
    gpu = replace(open_fake(), facts={"memory_bytes": 141e9})
    for reserved_bytes in (2e9, 90e9):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device, held=reserved_bytes: held)
        gpu.trim()

    assert log == ["freed"]


def test_a_worker_retires_after_a_broken_capture() -> None:
    """The row that was timed call by call is kept; the process that torch left half in a capture is not."""
    run = make_run(open_fake(), suite="x", command="c")
    case = Case(operation=Gemm(name="x", dtype="fp32", m=8, n=8, k=8))
    row = Row(**row_facts(case, run), measured_utc="", status="ok", median_s=1.0)
    gpu = open_fake()

    assert judge_device(row, gpu) == (row, True)
    gpu.broken_captures.append("broken")
    assert judge_device(row, gpu) == (row, False)


def test_a_row_without_a_graph_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no graph can be made the row says so, and has no launch cost of its own."""
    gpu = replace(open_backend(cpu=True), is_cuda=True)
    monkeypatch.setattr(Backend, "capture", lambda _self, _run: None)
    monkeypatch.setattr(Backend, "synchronize", lambda _self: None)
    monkeypatch.setattr(Backend, "elapsed_s", lambda _self, run, **_: (run(), 1e-3)[1])
    timing = measure(gpu, lambda: None, [()], budget_s=0.01, ci_fraction=0.5)

    assert (timing.method, timing.launch_s) == ("eager", None)
    assert timing.kernels_s > 0.0
