"""Measuring on a CPU, with tiny shapes: statistics, suites, timing, correctness, the command line."""

from __future__ import annotations

import builtins
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shapewright.bench import measuring, request, worker
from shapewright.bench import nvml as nvml_module
from shapewright.bench import run as run_module
from shapewright.bench.statistics import summarize
from shapewright.bench.suites import COLLECTIVES, MAMF, coarse_first, make_suite, suite_names
from shapewright.cli import main
from shapewright.errors import BenchError
from shapewright.operations import Attention, Gemm, GroupedGemm, Pointwise
from shapewright.store.export import export_store
from shapewright.store.file import Store
from shapewright.store.record import FAILED, OK, WRONG, Case

torch = pytest.importorskip("torch", reason="measuring needs the bench extra")
torch.set_num_threads(1)  # threads that wait for each other measure the other load of the machine

from shapewright.bench.backend import Backend, fills_results, host_cache_bytes, open_backend  # noqa: E402
from shapewright.bench.inputs import InputPool  # noqa: E402
from shapewright.bench.measuring import prepare  # noqa: E402
from shapewright.bench.run import LocalMeasurer, Outcome, make_run, run_cases  # noqa: E402
from shapewright.bench.timer import measure  # noqa: E402
from shapewright.bench.worker import WorkerOptions  # noqa: E402


@pytest.fixture(scope="module")
def backend() -> Backend:
    """The CPU."""
    return open_backend(cpu=True)


@pytest.fixture
def in_process(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process, which has torch already."""

    @contextmanager
    def open_measurer(options: WorkerOptions) -> Iterator[LocalMeasurer]:
        yield LocalMeasurer(backend if options.cpu else open_backend())

    monkeypatch.setattr(request, "open_measurer", open_measurer)


def call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run the command line; exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, captured.out, captured.err


def test_median_interval_covers() -> None:
    """The interval holds the true median about 95 times in 100, for skewed times too."""
    generator = random.Random(1)
    hits = 0
    for _ in range(400):
        samples = [generator.expovariate(1.0) for _ in range(41)]
        summary = summarize(samples)
        ordered = sorted(samples)
        # Ranks 20 -+ 1.96 sqrt(41) / 2 = 20 -+ 6.3, outwards: 13 and 27.
        assert summary.ci_half_width_s == pytest.approx((ordered[27] - ordered[13]) / 2)
        hits += ordered[13] <= math.log(2.0) <= ordered[27]

    assert 0.93 <= hits / 400 <= 0.995


@pytest.mark.parametrize("small", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", sorted(set(suite_names()) - {MAMF, COLLECTIVES}))
def test_suites_hold_different_cases(name: str, small: bool) -> None:
    """A suite names no case twice, comes in the same order for the same seed and another for another."""
    cases = make_suite(name, ("bf16",), small=small, seed=1)
    keys = [case.key("d", "l") for case in cases]

    assert len(set(keys)) == len(keys) >= (8 if small else 20)
    assert keys == [case.key("d", "l") for case in make_suite(name, ("bf16",), small=small, seed=1)]
    assert keys != [case.key("d", "l") for case in make_suite(name, ("bf16",), small=small, seed=2)]


def test_small_budgets_reach_every_sweep() -> None:
    """A tenth of the alignment suite already has all three layouts and the far end of a sweep."""
    cases = make_suite("alignment", ("bf16",), small=False, seed=0)
    first = [case.operation for case in cases[: len(cases) // 10]]

    assert {operation.layout for operation in first if isinstance(operation, Gemm)} == {"NT", "NN", "TN"}
    assert {operation.m - 8192 for operation in first if isinstance(operation, Gemm)} >= {0, 128}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17])
def test_coarse_first_is_a_permutation(count: int) -> None:
    """Every place comes once, both ends first."""
    order = coarse_first(count)

    assert sorted(order) == list(range(count))
    assert order[:2] == [0, count - 1][: min(2, count)]


def attention(**changes: Any) -> Attention:
    """A small call with shared heads."""
    lengths = {"batch_size": 2, "query_len": 24, "kv_len": 24}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
    return Attention(name="x", dtype="fp32", **{**lengths, **heads, **changes})


def pointwise(kind: str, reads: float, writes: float) -> Pointwise:
    """32 rows of 24 elements in fp32."""
    size_bytes = 32 * 24 * 4
    return Pointwise(
        name=kind, dtype="fp32", operation=kind, read_bytes=reads * size_bytes, written_bytes=writes * size_bytes
    )


CASES = [
    *(Case(operation=Gemm(name="x", dtype=dtype, m=17, n=33, k=21, batch=batch, layout=layout))
      for dtype in ("fp32", "bf16") for layout in ("NT", "NN", "TN", "TT") for batch in (1, 3)),
    *(Case(operation=Gemm(name="x", dtype=dtype, m=32, n=48, k=64)) for dtype in ("int8", "fp8")),
    *(Case(operation=GroupedGemm(name="x", dtype="fp32", m=19, n=8, k=23, groups=3, layout=layout))
      for layout in ("NT", "NN", "TN")),
    *(Case(operation=attention(**changes))
      for changes in ({}, {"causal": False}, {"is_backward": True}, {"is_backward": True, "causal": False},
                      {"query_len": 1}, {"num_kv_heads": 4, "v_head_dim": 8}, {"num_kv_heads": 1, "head_dim": 8})),
    *(Case(operation=pointwise(kind, reads, writes), row_width=24)
      for kind, reads, writes in (("norm", 1, 1), ("activation", 1, 1), ("activation", 2, 1), ("residual", 2, 1),
                                  ("softmax", 1, 1), ("dropout", 1, 1.25), ("bias", 1, 1), ("optimizer", 4, 3))),
    Case(operation=pointwise("norm", 1, 1), row_width=24, variant="rms_norm"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operation.kind}-{case.key('', '')[-60:]}")
def test_operations_are_checked_against_float64(case: Case, backend: Backend) -> None:
    """Each operation agrees with its reference, and a result that is off, or not a number, does not."""
    prepared = prepare(case, backend)
    found = prepared.call(*prepared.inputs[0])
    tolerance = measuring.TOLERANCE_FRACTION[case.operation.dtype]

    assert prepared.check(found, prepared.inputs[0]) <= tolerance
    for spoil in (lambda part: part * 1.1, lambda part: part.double().masked_fill(part == part.max(), math.nan)):
        parts = (
            tuple(spoil(part) if part.is_floating_point() else part for part in found)
            if isinstance(found, tuple | list)
            else spoil(found)
        )
        assert not prepared.check(parts, prepared.inputs[0]) <= tolerance


def test_inputs_are_of_the_operation(backend: Backend) -> None:
    """A layout says which dimension of each operand is contiguous in memory, and inputs differ from set to set."""
    for layout, strides in {"NT": ((21, 1), (1, 21)), "NN": ((21, 1), (33, 1)), "TN": ((1, 17), (33, 1))}.items():
        prepared = prepare(Case(operation=Gemm(name="x", dtype="fp32", m=17, n=33, k=21, layout=layout)), backend)
        a, b = prepared.inputs[0]

        assert (tuple(a.shape), tuple(b.shape)) == ((17, 21), (21, 33))
        assert (a.stride(), b.stride()) == strides
        assert not torch.equal(a, prepared.inputs[1][0])


def test_timer_measures_time(backend: Backend) -> None:
    """A call that waits 3 ms takes 3 ms, its inputs in turn; launch cost is not told apart on a CPU."""
    backend = replace(backend, clock=time.perf_counter)
    seen: list[int] = []

    def wait(index: int) -> None:
        seen.append(index)
        time.sleep(3e-3)

    timing = measure(backend, wait, [(0,), (1,), (2,)], budget_s=0.2, ci_fraction=0.01)

    assert 3e-3 <= timing.summary.median_s <= 10e-3
    assert timing.summary.num_samples >= 3
    assert timing.method == "host"
    assert timing.launch_s is None
    # Only where one stage of the measurement follows another may the same inputs come twice in a row.
    assert sum(first == second for first, second in pairwise(seen)) <= 3


def test_other_load_does_not_count(backend: Backend) -> None:
    """One thread is timed by what it ran, not by what it waited; several threads by the time of day."""
    timing = measure(backend, lambda: time.sleep(5e-3), [()], budget_s=0.1, ci_fraction=0.01)

    assert timing.method == "processor"
    assert timing.summary.median_s < 2e-3
    assert replace(backend, clock=time.perf_counter).eager_method == "host"


def test_waiting_for_a_core_is_no_overhead(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row waits while others run is a figure of its own, and the share of overhead leaves it out."""
    outcome = Outcome(wall_s=10.0, kernels_s=4.0, waited_s=5.0)
    assert outcome.overhead_fraction == pytest.approx(0.25)
    assert outcome.joined(outcome).overhead_fraction == pytest.approx(0.25)

    original = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda *a, **o: (time.sleep(0.3), original(*a, **o))[1])
    case = Case(operation=Gemm(name="x", dtype="fp32", m=64, n=64, k=64))
    row = measuring.measure_case(case, backend, make_run(backend, suite="s", command="c"), budget_s=0.1, ci_fraction=1)

    assert 0.29 < row.figures["waited_s"] <= row.figures["row_s"]


@pytest.mark.parametrize(("sizes", "expected"), [({1: "32K", 3: "32768K", 2: "1024K"}, 2.0**25), ({}, None)])
def test_the_last_cache_is_read_from_the_kernel(sizes: dict[int, str], expected: float | None, tmp_path: Path) -> None:
    """The cache of the highest level counts; a host that does not tell gives none."""
    for level, size in sizes.items():
        (tmp_path / f"index{level}").mkdir()
        (tmp_path / f"index{level}" / "level").write_text(f"{level}\n", encoding="ascii")
        (tmp_path / f"index{level}" / "size").write_text(f"{size}\n", encoding="ascii")

    assert host_cache_bytes(tmp_path) == expected


class Replaying:
    """A device that takes 2 ms for a call and whose host takes 3 ms more to start it, unless a graph is replayed."""

    is_cuda = True
    eager_method = "eager"
    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.is_replaying = False

    def synchronize(self) -> None:
        """Nothing is asynchronous here."""

    def elapsed_s(self, run: Any) -> float:
        """Time by the host's clock."""
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def call(self, _index: int) -> None:
        """One call."""
        time.sleep(2e-3 if self.is_replaying else 5e-3)

    def capture(self, run: Any) -> Any:
        """A graph of the calls."""

        def replay() -> None:
            self.is_replaying = True
            run()
            self.is_replaying = False

        return replay


def test_launch_cost_stands_apart() -> None:
    """What a graph replays is the kernel's time; what issuing calls one by one adds is another figure."""
    device: Any = Replaying()
    timing = measure(device, device.call, [(0,), (1,), (2,)], budget_s=0.1, ci_fraction=0.01)

    assert timing.method == "graph"
    assert timing.calls_per_sample >= 3
    assert 2e-3 <= timing.summary.median_s < 4e-3
    assert timing.launch_s == pytest.approx(3e-3, abs=1.5e-3)

    eager = measure(device, device.call, [(0,)], budget_s=0.1, ci_fraction=0.01, capturable=False)

    assert eager.method == "eager"
    assert eager.summary.median_s >= 5e-3
    assert eager.launch_s is None


@pytest.mark.parametrize(
    ("replayed", "is_believed"), [((0, 1), True), ((0,), False), ((), False)], ids=["all", "one", "none"]
)
def test_a_graph_is_believed_only_if_it_fills_its_results(replayed: tuple[int, ...], is_believed: bool) -> None:
    """What ran beside a capture is not in the graph: results that a replay leaves alone give it away."""
    results = (torch.ones(3), [torch.ones(2, dtype=torch.int32)])
    parts = [results[0], results[1][0]]

    def replay() -> None:
        for index in replayed:
            parts[index].fill_(1)

    assert fills_results(replay, results) is is_believed
    assert not fills_results(replay, None)


def test_inputs_are_handed_out_once_a_row() -> None:
    """Slices of a row do not overlap, begin aligned, are random, and come again for the next row."""
    pool = InputPool(torch.device("cpu"))
    first, second = pool.take((3, 5), torch.float32), pool.take((7,), torch.float32)
    whole = pool.take((3000, 3000), torch.float32)
    held = pool.num_bytes
    pool.begin()
    again = pool.take((3, 5), torch.float32)

    assert second.data_ptr() - first.data_ptr() == 512
    assert abs(float(whole.std()) - 1.0) < 0.01
    assert torch.equal(first, again)
    assert first.data_ptr() == again.data_ptr()
    assert pool.num_bytes == held
    integers = pool.take((5000,), torch.int8)
    assert 25 < float(integers.float().std()) < 40
    pool.clear()
    assert pool.num_bytes == 0


class FakeNvml:
    """NVML of one GPU at 1980 MHz and 350 W that does not tell its temperature."""

    def nvmlDeviceGetHandleByUUID(self, name: bytes, _handle: Any) -> int:  # noqa: N802
        """Knows one GPU."""
        return 0 if name == b"GPU-1234" else 2

    def nvmlDeviceGetClockInfo(self, _handle: Any, clock: int, value: Any) -> int:  # noqa: N802
        """MHz of the SMs (1) and of the memory (2)."""
        value._obj.value = {1: 1980, 2: 3201}[clock]
        return 0

    def nvmlDeviceGetPowerUsage(self, _handle: Any, value: Any) -> int:  # noqa: N802
        """Milliwatts."""
        value._obj.value = 350_000
        return 0

    def nvmlDeviceGetTemperature(self, _handle: Any, _sensor: int, _value: Any) -> int:  # noqa: N802
        """NVML_ERROR_NOT_SUPPORTED."""
        return 3


def test_state_is_in_base_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks in Hz, power in watts; what the driver does not tell is left out, and an unknown GPU is an error."""
    monkeypatch.setattr(nvml_module, "_load", FakeNvml)

    expected = {"sm_clock_hz": 1.98e9, "memory_clock_hz": 3.201e9, "power_watts": 350.0}
    assert nvml_module.Nvml("1234").state() == pytest.approx(expected)
    with pytest.raises(OSError, match="GPU-5678"):
        nvml_module.Nvml("5678")


def measured(cases: list[Case], backend: Backend, folder: Path, **options: Any) -> Any:
    """Run cases into a store; give the outcome."""
    with Store(folder / "s.sqlite") as store:
        return run_cases(
            cases,
            LocalMeasurer(backend),
            store,
            make_run(backend, suite="x", command="c"),
            **{"budget_s": 5.0, **options},
        )


def test_finished_rows_are_not_measured_again(backend: Backend, tmp_path: Path) -> None:
    """A second run has nothing to do, a third does only what was added."""
    cases = [case for case in CASES if isinstance(case.operation, GroupedGemm)]
    first, second = (measured(cases[:2], backend, tmp_path) for _ in range(2))
    third = measured(cases, backend, tmp_path)

    assert [row.status for row in first.measured] == [OK, OK]
    assert all(row.state_before["load_average"] >= 0.0 for row in first.measured)
    assert (second.measured, second.num_known) == ((), 2)
    assert [row.key for row in third.measured] == [cases[2].key("cpu", backend.library)]


def test_errors_become_rows(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot run, and what is wrong, is a row with the reason; the run goes on, and can try those again."""
    good = CASES[0]
    huge = Case(operation=Gemm(name="x", dtype="fp32", m=10**6, n=10**6, k=1))
    windowed = Case(operation=attention(window_size=4))
    monkeypatch.setitem(measuring.TOLERANCE_FRACTION, "bf16", 0.0)
    inexact = replace(good, operation=replace(good.operation, dtype="bf16", m=64))
    outcome = measured([huge, windowed, inexact, good], replace(backend, most_flops=1e30), tmp_path)
    statuses = [row.status for row in outcome.measured]
    words = " ".join(row.error for row in outcome.measured)

    assert statuses == [FAILED, FAILED, WRONG, OK]
    assert "memory" in words
    assert "window" in words
    assert "relative error" in words
    monkeypatch.undo()
    again = measured([huge, windowed, inexact, good], replace(backend, most_flops=1e30), tmp_path, retry_failed=True)
    assert [row.status for row in again.measured] == [FAILED, FAILED, OK]


def test_other_threads_are_another_measurement(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the number of threads decides the time, so rows of one number do not stand for another's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    try:
        other = open_backend(cpu=True)
    finally:
        torch.set_num_threads(1)

    assert other.name == backend.name == "cpu"
    assert CASES[0].key(other.name, other.library) != CASES[0].key(backend.name, backend.library)


def test_budget_ends_the_run(backend: Backend, tmp_path: Path) -> None:
    """Past the budget no row begins; what is left is counted, and so is what is too large for this device."""
    cases = make_suite("pointwise", ("fp32",), small=True, seed=0)
    outcome = measured(cases, backend, tmp_path, budget_s=0.3)

    assert outcome.measured
    assert len(outcome.measured) + outcome.num_left == len(cases)
    assert outcome.wall_s < 2.0
    assert measured(CASES[:1], replace(backend, most_flops=1.0), tmp_path).num_left_out == 1


def test_export_is_what_accuracy_reads(backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a known device come out as tables that the accuracy command judges, and one table has every row."""
    pytest.importorskip("pyarrow", reason="parquet needs the fit extra")
    cases = [CASES[0], CASES[1], *CASES[-9:-2], *(Case(operation=attention(**more)) for more in ({}, {"query_len": 1}))]
    cases = [replace(case, operation=replace(case.operation, dtype="bf16")) for case in cases[:1]] + cases[1:]
    measured(cases, replace(backend, name="h100-sxm-80gb"), tmp_path)
    with Store(tmp_path / "s.sqlite") as store:
        written = export_store(store, tmp_path / "tables")
    code, out, _ = call(["accuracy", str(tmp_path / "tables"), "--json", "--table", "gemm"], capsys)

    assert written == {
        "gemm.parquet": 1, "attention_prefill.parquet": 1, "attention_decode.parquet": 1, "pointwise.parquet": 4,
        "measurements.parquet": len(cases),
    }  # fmt: skip
    assert code == 0
    assert json.loads(out)[0]["rows"] == 1


@pytest.mark.usefixtures("in_process")
def test_smoke_suite_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON alone on stdout, rows in the store, and the same command goes on where the budget ended."""
    path = str(tmp_path / "s.sqlite")
    arguments = ["bench", "smoke", "--cpu", "--budget", "1s", "--store", path, "--json"]
    code, out, err = call(arguments, capsys)
    first = json.loads(out)
    second = json.loads(call(arguments, capsys)[1])
    shown = json.loads(call(["store", "show", path, "--json"], capsys)[1])

    assert (code, err) == (0, "")
    assert first["device"] == "cpu"
    assert len(first["rows"]) == first["num_measured"] > 0
    assert second["num_known"] == first["num_measured"]
    assert len(shown["rows"]) == first["num_measured"] + second["num_measured"]
    assert {row["status"] for row in shown["rows"]} == {OK}
    assert call(["store", "verify", path], capsys) == (0, f"{len(shown['rows'])} rows, all sound\n", "")


@pytest.mark.usefixtures("in_process")
def test_shapes_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The products of one small model, forward and backward, each with its count, its time and its prediction."""
    shape = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    options = ["--micro-batch-size", "2", "--seq-len", "16", "--device", "h100-sxm-80gb", "--budget", "9s",
               "--ci-fraction", "0.5"]  # fmt: skip
    store = ["--store", str(tmp_path / "s.sqlite")]
    code, out, _ = call(
        ["bench", "--shapes-from", str(tmp_path / "config.json"), "--cpu", *options, *store, "--json"], capsys
    )
    rows = {(row["name"], row["layout"]): row for row in json.loads(out)["rows"]}
    up = rows["mlp.up", "NT"]

    assert code == 0
    assert (up["m"], up["n"], up["k"], up["repeats"]) == (32, 256, 64, 2)
    assert up["median_s"] > 0.0 < up["predicted_s"]
    assert rows["norm", ""]["median_s"] > 0.0
    assert {layout for _, layout in rows} >= {"NT", "NN", "TN"}
    assert any(row["sizes"].get("is_backward") for row in rows.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench"], ["smoke", "--shapes-from"]),
        (["bench", "smok", "--cpu"], ["'smok'", "did you mean 'smoke'"]),
        (["bench", "smoke", "--cpu", "--dtype", "tf32"], ["tf32", "fp32, bf16, fp16"]),
        (["bench", "smoke,layr", "--cpu"], ["'layr'", "did you mean 'layer'"]),
        (["bench", "smoke", "--cpu", "--num-ranks", "2"], ["--num-ranks", "collectives"]),
        (["bench", "smoke", "--cpu", "--dtype", "fp9"], ["fp9", "did you mean"]),
        (["bench", "smoke", "--cpu", "--budget", "soon"], ["soon", "8m"]),
        (["bench", "smoke", "--cpu", "--budget", "-1s"], ["-1s", "8m"]),
        (["bench", "smoke", "--cpu", "--seq-len", "8"], ["--seq-len", "no effect"]),
        (["bench", "smoke", "--cpu", "--store", "nowhere/s.sqlite"], ["nowhere/s.sqlite", "folder that exists"]),
        (["bench", "--shapes-from", "gpt22", "--cpu"], ["gpt22"]),
        (["store", "show", "nothing.sqlite"], ["nothing.sqlite", "--store"]),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("in_process")
def test_bad_input_is_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One line that names the value and the way out, exit code 2, and no file is made."""
    monkeypatch.chdir(tmp_path)
    code, out, err = call(arguments, capsys)

    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(word in err for word in words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_says_use_cpu() -> None:
    """Without a GPU the way out is named."""
    with pytest.raises(BenchError, match="use --cpu"):
        open_backend()


def test_no_torch_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without PyTorch one line has the command that installs it, and no store is made."""
    lines = (f"import sys; sys.path[:0] = {sys.path!r}", "sys.modules['torch'] = None",
             "from shapewright.bench.worker import main", "main()")  # fmt: skip
    program = "\n".join(lines)
    (tmp_path / "worker.py").write_text(program, encoding="utf-8")
    monkeypatch.setattr(worker, "COMMAND", (sys.executable, str(tmp_path / "worker.py")))
    monkeypatch.chdir(tmp_path)
    code, out, err = call(["bench", "smoke", "--cpu"], capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'shapewright[bench]'" in err
    assert [path.name for path in tmp_path.iterdir()] == ["worker.py"]


@pytest.mark.usefixtures("in_process")
def test_interrupt_keeps_finished_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the fourth row: three rows are stored, the message says so, exit code 130."""
    original, calls = run_module.measure_case, builtins.list[None]()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(run_module, "measure_case", interrupted)
    path = tmp_path / "s.sqlite"
    code, out, err = call(["bench", "pointwise", "--cpu", "--budget", "2s", "--store", str(path)], capsys)
    with Store(path, must_exist=True) as store:
        assert len(store.rows()) == 3

    assert (code, out) == (130, "")
    assert "every finished row" in err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_graph_and_launch_on_a_gpu(tmp_path: Path) -> None:
    """A tiny product replayed from a graph is far shorter than one issued by the host, and the launch is told apart."""
    gpu = open_backend()
    case = Case(operation=Gemm(name="x", dtype="fp16", m=64, n=64, k=64))
    (row,) = measured([case], gpu, tmp_path).measured

    assert (row.status, row.method) == (OK, "graph")
    assert row.launch_s is not None
    assert 1e-7 < (row.median_s or 0.0) < 2e-5
