"""Timing of calls: medians and their intervals, launch cost, other load, clocks and caches."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.bench import measuring
from shapewright.measure.bench.device import system_info
from shapewright.measure.bench.device.backend import Backend, writes_results
from shapewright.measure.bench.device.system_info import host_cache_bytes
from shapewright.measure.bench.device.timer import measure, summarize
from shapewright.measure.bench.run import Outcome, make_run
from shapewright.measure.store.record import Case

torch = pytest.importorskip("torch", reason="measuring needs the bench extra")


def test_median_interval_covers() -> None:
    """The interval covers the true median in about 95 % of the cases, for skewed distributions too."""
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


def test_timer_measures_a_known_time(backend: Backend) -> None:
    """A call of 3 ms is timed as 3 ms, with rotating inputs; on a CPU the launch cost is unknown."""
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
    # The same inputs may repeat only between two stages of the measurement.
    assert sum(first == second for first, second in pairwise(seen)) <= 3


def test_other_load_does_not_count(backend: Backend) -> None:
    """A single thread is timed in processor time, several threads in wall time."""
    timing = measure(backend, lambda: time.sleep(5e-3), [()], budget_s=0.1, ci_fraction=0.01)

    assert timing.method == "processor"
    assert timing.summary.median_s < 2e-3
    assert replace(backend, clock=time.perf_counter).eager_method == "host"


def test_waiting_for_a_core_is_not_overhead(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a row waits for a core is reported separately, and excluded from the overhead."""
    outcome = Outcome(wall_s=10.0, kernels_s=4.0, waited_s=5.0)
    assert outcome.overhead_fraction == pytest.approx(0.25)
    assert outcome.followed_by(outcome).overhead_fraction == pytest.approx(0.25)

    original = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda *a, **o: (time.sleep(0.3), original(*a, **o))[1])
    case = Case(operation=Gemm(name="x", dtype="fp32", m=64, n=64, k=64))
    row = measuring.measure_case(case, backend, make_run(backend, suite="s", command="c"), budget_s=0.1, ci_fraction=1)

    assert 0.29 < row.figures["waited_s"] <= row.figures["row_s"]


@pytest.mark.parametrize(("sizes", "expected"), [({1: "32K", 3: "32768K", 2: "1024K"}, 2.0**25), ({}, None)])
def test_the_last_level_cache_is_read(sizes: dict[int, str], expected: float | None, tmp_path: Path) -> None:
    """The size of the last-level cache is read, or None if the host does not report it."""
    for level, size in sizes.items():
        (tmp_path / f"index{level}").mkdir()
        (tmp_path / f"index{level}" / "level").write_text(f"{level}\n", encoding="ascii")
        (tmp_path / f"index{level}" / "size").write_text(f"{size}\n", encoding="ascii")

    assert host_cache_bytes(tmp_path) == expected


class Replaying:
    """A device with calls of 2 ms, and 3 ms more of launch cost unless a graph is replayed.

    Its clock is simulated, so that other load has no effect.
    """

    is_cuda = True
    eager_method = "eager"

    def __init__(self) -> None:
        self.is_replaying, self.was_replay, self.now_s = False, False, 0.0

    def clock(self) -> float:
        """The device's time. [s]"""
        return self.now_s

    def read_state(self) -> dict[str, float]:
        """Read the clock during calls."""
        return {"now_s": self.now_s}

    def synchronize(self) -> None:
        """Do nothing, since calls are synchronous."""

    def elapsed_s(self, run: Any, *, is_replay: bool = False) -> float:
        """Time of a run. [s]"""
        begin_s, self.was_replay = self.now_s, False
        run()
        assert is_replay == self.was_replay
        return self.now_s - begin_s

    def call(self, _index: int) -> None:
        """One call."""
        self.now_s += 2e-3 if self.is_replaying else 5e-3

    def capture(self, run: Any) -> Any:
        """A graph of the calls."""

        def replay() -> None:
            self.is_replaying = self.was_replay = True
            run()
            self.is_replaying = False

        return replay


def test_launch_cost_is_separate() -> None:
    """A graph measures the kernel's time; the launch cost of individual calls is separate."""
    device: Any = Replaying()
    timing = measure(device, device.call, [(0,), (1,), (2,)], budget_s=0.1, ci_fraction=0.01)

    assert timing.method == "graph"
    assert timing.calls_per_sample >= 3
    assert timing.summary.median_s == pytest.approx(2e-3)
    assert timing.launch_s == pytest.approx(3e-3)
    # Clocks are read while further calls run, not after the last one.
    assert timing.state["now_s"] >= timing.summary.median_s * timing.calls_per_sample * (timing.summary.num_samples + 1)

    eager = measure(device, device.call, [(0,)], budget_s=0.1, ci_fraction=0.01, capturable=False)

    assert eager.method == "eager"
    assert eager.summary.median_s == pytest.approx(5e-3)
    assert eager.launch_s is None


@pytest.mark.parametrize(
    ("replayed", "is_believed"), [((0, 1), True), ((0,), False), ((), False)], ids=["all", "one", "none"]
)
def test_a_graph_must_write_its_results(replayed: tuple[int, ...], is_believed: bool) -> None:
    """A graph is rejected if a replay does not write its results, since the work was not captured."""
    mask = torch.ones(3, dtype=torch.bool)  # of dropout: any value of it can be right
    results = (torch.ones(3), [torch.ones(2, dtype=torch.int32)], mask)
    parts = [results[0], results[1][0]]

    def replay() -> None:
        for index in replayed:
            parts[index].fill_(1)

    assert writes_results(replay, results) is is_believed
    assert not writes_results(replay, None)


def test_a_graph_may_update_its_results_in_place() -> None:
    """A graph that updates its results in place, such as an optimizer step, is accepted."""
    weight = torch.ones(3)

    assert writes_results(lambda: weight.mul_(0.999), weight)


class FakeNvml:
    """NVML with one GPU at 1980 MHz and 350 W that does not report its temperature."""

    def nvmlDeviceGetHandleByUUID(self, name: bytes, _handle: Any) -> int:
        """Find the only GPU."""
        return 0 if name == b"GPU-1234" else 2

    def nvmlDeviceGetClockInfo(self, _handle: Any, clock: int, value: Any) -> int:
        """MHz of the SMs (1) and of the memory (2)."""
        value._obj.value = {1: 1980, 2: 3201}[clock]
        return 0

    def nvmlDeviceGetPowerUsage(self, _handle: Any, value: Any) -> int:
        """Milliwatts."""
        value._obj.value = 350_000
        return 0

    def nvmlDeviceGetTemperature(self, _handle: Any, _sensor: int, _value: Any) -> int:
        """NVML_ERROR_NOT_SUPPORTED."""
        return 3


def test_state_is_in_base_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks are in Hz and power in watts; refused readings are left out, and an unknown GPU is an error."""
    monkeypatch.setattr(system_info, "_load_nvml", FakeNvml)

    expected = {"sm_clock_hz": 1.98e9, "memory_clock_hz": 3.201e9, "power_watts": 350.0}
    assert system_info.Nvml("1234").state() == pytest.approx(expected)
    with pytest.raises(OSError, match="GPU-5678"):
        system_info.Nvml("5678")
