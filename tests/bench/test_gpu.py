"""What only a GPU can show, in two minutes: run it first on a machine that has one (pytest tests/bench -m gpu).

Everything that a campaign measures is measured once, in its smallest size, and has to be right and replayed from a
graph. Nothing is compared with predictions, but rates with what the device can do at most.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="measuring needs the bench extra")

from shapewright.bench import worker as worker_module
from shapewright.bench.backend import Backend
from shapewright.bench.measuring import measure_case
from shapewright.bench.open_device import open_backend
from shapewright.bench.run import make_run
from shapewright.bench.suites import default_dtypes, make_suite
from shapewright.bench.worker import Worker, WorkerOptions
from shapewright.hardware import list_devices, load_device
from shapewright.operations import Gemm, Pointwise
from shapewright.store.record import FAILED, OK, Case, Row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
    # What a library says while it works is no failure.
    pytest.mark.filterwarnings("default"),
]

SUITES = ("alignment", "batched", "tiles", "random", "attention", "pointwise", "experts", "layer", "decode", "model")
# What is said where a fused kernel that was asked for by name is not made for the call, and where a step is larger than
# the device.
NOT_THERE = ("No available kernel", "of memory may be used", "of memory are free")
# Head widths that every fused kernel has.
USUAL_HEAD_DIMS = (64, 128)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Backend]:
    """The first GPU."""
    opened = open_backend()
    yield opened
    opened.release()


def measured(case: Case, gpu: Backend, budget_s: float = 0.1) -> Row:
    """A row of a case."""
    run = make_run(gpu, suite="gpu", command="pytest")
    return measure_case(case, gpu, run, budget_s=budget_s, ci_fraction=0.02)


def product(m: int, n: int, k: int, dtype: str = "bf16") -> Case:
    """A plain product."""
    return Case(operation=Gemm(name="x", dtype=dtype, m=m, n=n, k=k))


def one_of_each(suite: str, dtypes: tuple[str, ...]) -> list[Case]:
    """The smallest case of every kind, format, layout, kernel and pass that a suite has."""
    found: dict[tuple[Any, ...], Case] = {}
    for case in make_suite(suite, dtypes, small=False, seed=0):
        operation = case.operation
        sizes = case.sizes()
        if operation.kind == "attention" and sizes["head_dim"] not in USUAL_HEAD_DIMS:
            continue
        flags = [
            sizes.get(name)
            for name in ("operation", "num_kernels", "causal", "is_backward", "passes", "values_in_keys")
        ]
        flags.append(sizes.get("read_bytes", 0.0) > 1.5 * sizes.get("written_bytes", 1.0))  # gated activations
        shares = sizes.get("num_heads") != sizes.get("num_kv_heads")
        workload = dict(sizes.get("workload") or {})
        whole = [workload.get(name) for name in ("phase", "attention")]
        one_query = sizes.get("query_len") == 1
        key = (
            operation.kind,
            operation.dtype,
            getattr(operation, "layout", ""),
            case.variant,
            *flags,
            shares,
            *whole,
            one_query,
        )
        if key not in found or float(operation.flops) < float(found[key].operation.flops):
            found[key] = case
    return list(found.values())


@pytest.mark.parametrize("suite", SUITES)
def test_all_kinds_of_a_suite_work(suite: str, gpu: Backend) -> None:
    """One of each is right, and replayed from a graph; training steps are timed as they are issued."""
    gpu.broken_captures.clear()
    cases = one_of_each(suite, default_dtypes(suite, gpu.dtypes, cpu=False))
    rows = [measured(case, gpu) for case in cases]
    bad = [f"{row.kind} {row.name} {row.variant} {row.dtype} {row.layout} {row.status} {row.error}" for row in rows
           if row.status != OK and not any(words in row.error for words in NOT_THERE)]  # fmt: skip
    issued = [f"{row.kind} {row.name} {row.variant} {row.dtype} {row.layout}" for row in rows
              if row.status == OK and row.method != "graph" and suite != "model"]  # fmt: skip

    assert bad == []
    assert issued == []
    assert gpu.broken_captures == []


def test_the_gpu_is_known_by_its_name(gpu: Backend) -> None:
    """What the driver calls it is the name of a device file, where there is one."""
    assert gpu.facts["num_sms"] > 0
    assert 1e6 < gpu.cache_bytes < 1e9
    for words, name in (("NVIDIA H200", "h200-sxm-141gb"), ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb")):
        if gpu.facts["name"] == words:
            assert gpu.name == name


def test_clocks_and_power_are_read(gpu: Backend) -> None:
    """In Hz and watts, during the campaign and without any setting being touched."""
    measured(product(4096, 4096, 4096), gpu)
    state = gpu.read_state()
    if not state:
        pytest.skip("this driver, or this maker's, tells nothing through NVML")
    assert 1e8 < state.get("sm_clock_hz", 1e9) < 5e9
    assert 10.0 < state.get("power_watts", 100.0) < 2e3
    assert gpu.driver


def test_a_tiny_product_is_timed_without_its_launch(gpu: Backend) -> None:
    """Replayed from a graph it is far shorter than issued by the host, and the launch is told apart."""
    row = measured(product(64, 64, 64, "fp16"), gpu)

    assert (row.status, row.method) == (OK, "graph")
    assert row.launch_s is not None
    assert 1e-7 < (row.median_s or 0.0) < 2e-5


def test_rates_are_possible(gpu: Backend) -> None:
    """No product beats the data sheet, nor any stream the memory; both come near to it."""
    if gpu.name not in list_devices():
        pytest.skip("no device file says what this GPU can do")
    device = load_device(gpu.name)
    row = measured(product(8192, 8192, 8192), gpu, 1.0)
    size_bytes = 2.0**31
    add = Pointwise(name="x", dtype="bf16", operation="residual", read_bytes=2 * size_bytes, written_bytes=size_bytes)
    stream = measured(Case(operation=add, row_width=8192), gpu, 1.0)

    assert 0.4 < row.flops / (row.median_s or 1.0) / device.peak_flops_per_s("bf16") < 1.02
    assert 0.5 < stream.num_bytes / (stream.median_s or 1.0) / device.memory_bandwidth_bytes_per_s < 1.02
    assert row.is_cold
    assert stream.is_cold


def test_the_same_thing_takes_as_long_again(gpu: Backend) -> None:
    """Medians of two rounds over some sizes are within a few percent of each other."""
    cases = [product(m, 4096, 2560) for m in (256, 1000, 4096, 8192)]
    rounds = [[measured(case, gpu, 0.3).median_s or 0.0 for case in cases] for _ in range(2)]
    off = sorted(abs(first / second - 1.0) for first, second in zip(*rounds, strict=True))

    assert off[len(off) // 2] < 0.05


def test_rows_leave_no_memory_behind(gpu: Backend) -> None:
    """Rows whose graphs hold more together than the device has are all replayed, the last as the first."""
    side = int((gpu.facts["memory_bytes"] / 64 / 2) ** 0.5) // 256 * 256
    rows = [measured(product(side + 256 * (index % 2), side, 64), gpu, 0.03) for index in range(40)]

    assert {(row.status, row.method, row.error) for row in rows} == {(OK, "graph", "")}


def test_too_large_a_row_costs_itself_alone(gpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not there fails the row, whether it was foreseen or not; the next one is fine."""
    large = product(700_000, 700_000, 64)
    foreseen = measured(large, gpu)
    monkeypatch.setattr(Backend, "usable_bytes", lambda _self: 1e18)
    unforeseen = measured(large, gpu)
    monkeypatch.undo()

    assert "of memory are free" in foreseen.error
    assert unforeseen.status == FAILED
    assert "out of memory" in unforeseen.error.lower()
    assert measured(product(512, 512, 512), gpu).status == OK


# A worker in which one size reads beyond the end of a tensor, on the device.
POISONER = """
import torch
from shapewright.bench import measuring, worker

prepare = measuring.prepare

def prepare_or_spoil(case, backend):
    prepared = prepare(case, backend)
    if case.operation.m == 1001:
        torch.zeros(4, device=backend.torch_device)[torch.tensor([1 << 30], device=backend.torch_device)].sum().item()
    return prepared

measuring.prepare = prepare_or_spoil
worker.main()
"""


def test_a_spoilt_context_costs_its_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access nothing works in the process: the row says so, and the next one is a new process's."""
    (tmp_path / "poisoner.py").write_text(POISONER, encoding="utf-8")
    monkeypatch.setattr(worker_module, "COMMAND", (sys.executable, str(tmp_path / "poisoner.py")))
    with Worker(WorkerOptions()) as worker:
        run = make_run(worker.facts, suite="gpu", command="pytest")
        rows = [worker.measure(product(m, 512, 512), run, budget_s=0.1, ci_fraction=0.02) for m in (512, 1001, 1000)]

    assert [row.status for row in rows] == [OK, FAILED, OK]
    assert "context was lost" in rows[1].error


def test_kernels_are_named(gpu: Backend) -> None:
    """With --kernel-names a row says which of the library's kernels ran, and nothing breaks by asking."""
    if torch.version.hip:
        pytest.skip("graphs of ROCm are written down in another form")
    row = measured(product(4096, 4096, 4096), replace(gpu, names_kernels=True))

    assert row.status == OK
    assert "<<<" in row.kernel
    assert gpu.broken_captures == []


def test_formats_of_the_device_are_those_of_its_capability(gpu: Backend) -> None:
    """Every format that the bench says it has can be multiplied."""
    rows = {dtype: measured(product(256, 256, 256, dtype), gpu) for dtype in gpu.dtypes}

    assert {dtype: row.error for dtype, row in rows.items() if row.status != OK} == {}
