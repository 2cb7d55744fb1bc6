"""Tests that need a GPU; they take two minutes (pytest tests/bench -m gpu).

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

from shapewright.hardware.loader import list_devices, load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.bench import worker as worker_module
from shapewright.measure.bench.device.backend import Backend
from shapewright.measure.bench.device.open_device import open_backend
from shapewright.measure.bench.measuring import measure_case
from shapewright.measure.bench.run import make_run
from shapewright.measure.bench.suites.registry import choose_dtypes, get_suite, make_suite
from shapewright.measure.bench.worker import Worker, WorkerOptions
from shapewright.measure.store.record import FAILED, OK, Case, Row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
    # Warnings of libraries are not failures.
    pytest.mark.filterwarnings("default"),
]

SUITES = ("alignment", "batched", "tiles", "random", "attention", "pointwise", "experts", "layer", "decode", "model")
# Errors of cases that a device does not support: no such fused kernel, and too little memory.
UNSUPPORTED = ("No available kernel", "GB are available")
# Head dimensions that every fused kernel supports.
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


def plain_gemm(m: int, n: int, k: int, dtype: str = "bf16") -> Case:
    """A plain GEMM."""
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
def test_all_kinds_of_cases_are_measured(suite: str, gpu: Backend) -> None:
    """Each of these cases is correct and replayed from a graph; training steps are timed eagerly."""
    gpu.broken_captures.clear()
    cases = one_of_each(suite, choose_dtypes(get_suite(suite).default_dtypes, gpu.dtypes, cpu=False))
    rows = [measured(case, gpu) for case in cases]
    bad = [f"{row.kind} {row.name} {row.variant} {row.dtype} {row.layout} {row.status} {row.error}" for row in rows
           if row.status != OK and not any(words in row.error for words in UNSUPPORTED)]  # fmt: skip
    issued = [f"{row.kind} {row.name} {row.variant} {row.dtype} {row.layout}" for row in rows
              if row.status == OK and row.method != "graph" and suite != "model"]  # fmt: skip

    assert bad == []
    assert issued == []
    assert gpu.broken_captures == []


def test_the_gpu_has_the_name_of_its_device_file(gpu: Backend) -> None:
    """The driver's name is mapped to a device file, if there is one."""
    assert gpu.facts["num_sms"] > 0
    assert 1e6 < gpu.cache_bytes < 1e9
    for words, name in (("NVIDIA H200", "h200-sxm-141gb"), ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb")):
        if gpu.facts["name"] == words:
            assert gpu.name == name


def test_clocks_and_power_are_read(gpu: Backend) -> None:
    """Clocks and power are read in Hz and watts, and no setting is changed."""
    measured(plain_gemm(4096, 4096, 4096), gpu)
    state = gpu.read_state()
    if not state:
        pytest.skip("this driver, or this maker's, tells nothing through NVML")
    assert 1e8 < state.get("sm_clock_hz", 1e9) < 5e9
    assert 10.0 < state.get("power_watts", 100.0) < 2e3
    assert gpu.driver


def test_small_gemms_are_timed_without_launch_cost(gpu: Backend) -> None:
    """A small GEMM is much faster in a graph than individually issued, and its launch cost is reported separately."""
    row = measured(plain_gemm(64, 64, 64, "fp16"), gpu)

    assert (row.status, row.method) == (OK, "graph")
    assert row.launch_s is not None
    assert 1e-7 < (row.median_s or 0.0) < 2e-5


def test_rates_are_below_the_data_sheet_peaks(gpu: Backend) -> None:
    """GEMM rates and bandwidths stay below the data-sheet peaks and come close to them."""
    if gpu.name not in list_devices():
        pytest.skip("no device file says what this GPU can do")
    device = load_device(gpu.name)
    row = measured(plain_gemm(8192, 8192, 8192), gpu, 1.0)
    size_bytes = 2.0**31
    add = Pointwise(name="x", dtype="bf16", operation="residual", read_bytes=2 * size_bytes, written_bytes=size_bytes)
    stream = measured(Case(operation=add, row_width=8192), gpu, 1.0)

    assert 0.4 < row.flops / (row.median_s or 1.0) / device.peak_flops_per_s("bf16") < 1.02
    assert 0.5 < stream.num_bytes / (stream.median_s or 1.0) / device.memory_bandwidth_bytes_per_s < 1.02
    assert row.is_cold
    assert stream.is_cold


def test_medians_are_repeatable(gpu: Backend) -> None:
    """Medians of two rounds over some sizes differ by a few percent at most."""
    cases = [plain_gemm(m, 4096, 2560) for m in (256, 1000, 4096, 8192)]
    rounds = [[measured(case, gpu, 0.3).median_s or 0.0 for case in cases] for _ in range(2)]
    off = sorted(abs(first / second - 1.0) for first, second in zip(*rounds, strict=True))

    assert off[len(off) // 2] < 0.05


def test_rows_leave_no_memory_behind(gpu: Backend) -> None:
    """Graphs of successive rows that together exceed the device's memory are all replayed."""
    side = int((gpu.facts["memory_bytes"] / 64 / 2) ** 0.5) // 256 * 256
    rows = [measured(plain_gemm(side + 256 * (index % 2), side, 64), gpu, 0.03) for index in range(40)]

    assert {(row.status, row.method, row.error) for row in rows} == {(OK, "graph", "")}


def test_lack_of_memory_fails_one_row(gpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of memory, estimated or not, fails one row; the next one succeeds."""
    large = plain_gemm(700_000, 700_000, 64)
    foreseen = measured(large, gpu)
    monkeypatch.setattr(Backend, "usable_bytes", lambda _self: 1e18)
    unforeseen = measured(large, gpu)
    monkeypatch.undo()

    assert "GB are available" in foreseen.error
    assert unforeseen.status == FAILED
    assert "out of memory" in unforeseen.error.lower()
    assert measured(plain_gemm(512, 512, 512), gpu).status == OK


# A worker in which a case of one size reads beyond the end of a tensor on the device.
POISONER = """
import torch
from shapewright.measure.bench import measuring, worker

prepare = measuring.prepare

def prepare_or_spoil(case, backend):
    prepared = prepare(case, backend)
    if case.operation.m == 1001:
        torch.zeros(4, device=backend.torch_device)[torch.tensor([1 << 30], device=backend.torch_device)].sum().item()
    return prepared

measuring.prepare = prepare_or_spoil
worker.main()
"""


def test_a_lost_context_fails_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access the row records the lost context, and a new process measures the next one."""
    (tmp_path / "poisoner.py").write_text(POISONER, encoding="utf-8")
    monkeypatch.setattr(worker_module, "COMMAND", (sys.executable, str(tmp_path / "poisoner.py")))
    with Worker(WorkerOptions()) as worker:
        run = make_run(worker.facts, suite="gpu", command="pytest")
        rows = [worker.measure(plain_gemm(m, 512, 512), run, budget_s=0.1, ci_fraction=0.02) for m in (512, 1001, 1000)]

    assert [row.status for row in rows] == [OK, FAILED, OK]
    assert "context was lost" in rows[1].error


def test_kernels_are_named(gpu: Backend) -> None:
    """With --kernel-names rows contain the names of the kernels, and measuring still works."""
    if torch.version.hip:
        pytest.skip("dumps of ROCm graphs have another format")
    row = measured(plain_gemm(4096, 4096, 4096), replace(gpu, names_kernels=True))

    assert row.status == OK
    assert "<<<" in row.kernel
    assert gpu.broken_captures == []


def test_formats_of_the_device_are_those_of_its_capability(gpu: Backend) -> None:
    """GEMMs run in every element format that the bench reports."""
    rows = {dtype: measured(plain_gemm(256, 256, 256, dtype), gpu) for dtype in gpu.dtypes}

    assert {dtype: row.error for dtype, row in rows.items() if row.status != OK} == {}
