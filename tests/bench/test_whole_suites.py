"""Suites of layers and steps, collectives, and the search for the best matmul rate, on a CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shapewright.app.cli import main
from shapewright.app.report.outputs.measure import repeatability
from shapewright.core.errors import BenchError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.bench.suites.gemm import BestRateSearch, candidate_shapes
from shapewright.measure.bench.suites.registry import choose_dtypes, get_suite, make_suite
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import OK, Case
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.model_runs import FORWARD, LayerRun, StepRun, layer_run, predict_times_s, step_run
from shapewright.prediction.predict import predict
from shapewright.workload.workload import Workload

torch = pytest.importorskip("torch", reason="measuring needs the bench extra")

from local_measurer import LocalMeasurer

from shapewright.measure.bench.device.backend import Backend
from shapewright.measure.bench.measuring import measure_case, prepare
from shapewright.measure.bench.operations.collectives import open_ranks
from shapewright.measure.bench.run import make_run, run_cases

DATA = Path(os.environ.get("SHAPEWRIGHT_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gemm.parquet"


def small_cases(suite: str) -> list[Case]:
    """Cases of a suite for a CPU."""
    return make_suite(suite, ("fp32",), small=True, seed=0)


@pytest.mark.parametrize("suite", ["layer", "model", "decode", "memory"])
def test_layers_and_steps_are_measured(suite: str, backend: Backend, tmp_path: Path) -> None:
    """Layers and steps are measured, and their rows restore the model and workload for predictions."""
    device = load_device("h100-sxm-80gb")
    cases = small_cases(suite)[:6]
    with Store(tmp_path / "s.sqlite") as store:
        run = make_run(backend, suite=suite, command="c")
        # The wide interval ends rows within seconds; the budget allows for other load on the machine.
        run_cases(cases, LocalMeasurer(backend), store, run, budget_s=60.0, ci_fraction=0.5)
        rows = store.rows()

    assert [(row.status, row.error) for row in rows] == [(OK, "")] * len(cases)
    assert [row.operation() for row in rows] == [case.operation for case in cases]
    for row, predicted_s in zip(rows, predict_times_s([row.operation() for row in rows], device), strict=True):
        part = row.operation()
        assert isinstance(part, LayerRun | StepRun)
        config, workload = part.config_and_workload()
        assert predicted_s == pytest.approx(
            predict(config, device=device, workload=workload).step_time_s if isinstance(part, StepRun) else predicted_s
        )
        assert predicted_s
        if isinstance(part, StepRun):
            tokens = workload.micro_batch_size * (1 if workload.phase == "decode" else workload.seq_len)
            assert row.figures["tokens_per_s"] == pytest.approx(tokens / (row.median_s or 0.0))


def test_a_step_grows_by_one_layer_per_layer() -> None:
    """The predicted step of two layers is one layer longer than the step of one layer."""
    device = load_device("h100-sxm-80gb")
    shape = {"hidden_size": 2560, "num_heads": 20, "vocab_size": 50304}
    workload = Workload(seq_len=1024)
    one, two, three = (TransformerConfig(num_layers=layers, **shape) for layers in (1, 2, 3))
    layer_s, forward_s = predict_times_s(
        [layer_run(three, workload), layer_run(three, workload, passes=FORWARD)], device
    )
    steps = predict_times_s([step_run(config, workload) for config in (one, two)], device)
    assert steps[0]
    assert steps[1]
    assert layer_s
    assert forward_s

    # Plus the optimizer of one more layer: 12 h^2 weights, 30 bytes each at 3.35 TB/s, 0.7 ms.
    assert layer_s < steps[1] - steps[0] < layer_s + 2e-3
    assert 0.25 < forward_s / layer_s < 0.45
    assert layer_run(one, workload) == layer_run(three, workload)


def test_activation_bytes_match_the_estimate(backend: Backend) -> None:
    """Activation bytes saved by autograd are within 5 % of the estimate, with fused and unfused attention."""
    shape = {"hidden_size": 96, "num_layers": 1, "num_heads": 6, "vocab_size": 7, "position_embedding": "none"}
    config = TransformerConfig(**shape, fused_qkv=True, mlp_bias=True)
    for attention in ("flash", "unfused"):
        part = layer_run(config, Workload(dtype="fp32", attention=attention, micro_batch_size=2, seq_len=32))
        figures = prepare(Case(operation=part), backend).figures()

        assert figures["activation_bytes"] == pytest.approx(part.estimate_figures()["activation_bytes"], rel=0.05)


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_wrong_layers_are_rejected(passes: str, backend: Backend) -> None:
    """The check of a layer rejects a wrong result and a NaN gradient."""
    (case, *_) = [case for case in small_cases("layer") if getattr(case.operation, "passes", "") == passes]
    prepared = prepare(case, backend)
    found = prepared.call(*prepared.inputs[0])
    out = found[0] if passes != FORWARD else found

    assert prepared.check(found, prepared.inputs[0]) <= (prepared.tolerance or 0.0)
    spoilt = out.detach() * 1.1
    assert prepared.check((spoilt, found[1]) if passes != FORWARD else spoilt, prepared.inputs[0]) > 0.05
    if passes != FORWARD:
        gradients = [found[1][0] * math.nan, *found[1][1:]]
        assert math.isnan(prepared.check((out, gradients), prepared.inputs[0]))


def test_training_steps_reduce_the_loss(backend: Backend) -> None:
    """Measured training steps reduce the loss on the same tokens, in fp32 and with 16-bit weights."""
    config = TransformerConfig(hidden_size=32, num_layers=1, num_heads=4, vocab_size=50, position_embedding="none")
    for dtype in ("fp32", "bf16"):
        part = step_run(config, Workload(dtype=dtype, micro_batch_size=2, seq_len=16))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shapewright.measure.bench.operations.torch_model._LEARNING_RATE", 3e-2)
            prepared = prepare(Case(operation=part), backend)
        losses = [float(prepared.call(*prepared.inputs[0])) for _ in range(15)]

        assert losses[-1] < losses[0] - 0.5


def test_unsupported_models_become_failed_rows(backend: Backend) -> None:
    """Unsupported models and steps that do not fit become failed rows with advice."""
    shape = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    experts = TransformerConfig(**shape, num_experts=4, num_experts_per_token=2)
    windowed = TransformerConfig(**shape, attention_windows=(4,))
    huge = TransformerConfig(hidden_size=8192, num_layers=80, num_heads=64, vocab_size=128000)
    workload = Workload(dtype="fp32", micro_batch_size=1, seq_len=16)
    run = make_run(backend, suite="x", command="c")
    for config, words in ((experts, "num_experts=4"), (windowed, "attention_windows"), (huge, "smaller batch")):
        row = measure_case(Case(operation=step_run(config, workload)), backend, run, budget_s=0.1, ci_fraction=0.01)
        assert row.status == "failed"
        assert words in row.error


def test_dtypes_of_suites() -> None:
    """The alignment suite covers all formats, in sizes that 8-bit GEMMs support; other suites cover one or two."""
    device = ("fp32", "fp16", "tf32", "bf16", "int8", "fp8")
    for suite, dtypes in (("alignment", device), ("layer", ("bf16",)), ("paper", ("bf16", "fp16"))):
        assert choose_dtypes(get_suite(suite).default_dtypes, device, cpu=False) == dtypes
    for dtype, step in (("fp8", 16), ("int8", 8)):
        operations = [case.operation for case in make_suite("alignment", (dtype,), small=False, seed=0)]
        assert len(operations) > 80
        for operation in operations:
            assert isinstance(operation, Gemm)
            assert (operation.layout, operation.n % step, operation.k % step) == ("NT", 0, 0)


def rate_surface(shapes: Any, num_sms: int, seed: int) -> Any:
    """Synthetic rates: waves of one tile, start-up along k, fast and slow sizes, 1 % noise."""
    m, n, k = shapes.T.astype(float)
    tiles = np.ceil(m / 128) * np.ceil(n / 256)
    fill = m * n / (128 * 256) / (np.ceil(tiles / num_sms) * num_sms)
    generator = np.random.default_rng(seed)
    ripple = 1.0 - 0.03 * ((m / 256 + n / 512) % 3 > 1)
    return fill * k / (k + 500.0) * ripple * generator.normal(1.0, 0.01, len(shapes))


def search_best(shapes: Any, rates: Any, num_sms: int, seed: int, at_once: int = 8) -> tuple[float, int]:
    """Best rate found by the search over the best of all shapes, and the number of runs."""
    search = BestRateSearch(shapes, num_sms=num_sms, seed=seed)
    found: dict[int, float] = {}
    while suggested := search.suggest(found, at_once):
        assert not set(suggested) & set(found)
        found |= {index: float(rates[index]) for index in suggested}
    return max(found.values()) / float(rates.max()), len(found)


def test_best_rate_with_one_percent_of_the_runs() -> None:
    """On synthetic rates the search is within 1 % of the best of 13,824 shapes after 138 runs; random search is not."""
    shapes = candidate_shapes(small=False)
    shares, by_chance = [], []
    for seed in range(3):
        rates = rate_surface(shapes, 132, seed)
        share, runs = search_best(shapes, rates, 132, seed)
        shares.append(share)
        assert runs == 138 == round(0.01 * len(shapes))
        by_chance.append(float(np.random.default_rng(seed).choice(rates, runs).max() / rates.max()))

    assert np.median(shares) >= 0.99
    assert np.median(by_chance) < 0.98


@pytest.mark.skipif(not DATA.exists(), reason="needs the recorded sweeps")
def test_best_rate_on_recorded_sweeps() -> None:
    """On recorded sweeps of 23,902 shapes, 239 runs reach 99 % of the best in the median; random search does not."""
    pq = pytest.importorskip("pyarrow.parquet", reason="reading parquet needs the fit extra")
    columns = ["device", "library", "dtype", "m", "n", "k", "latency_s"]
    table = pq.read_table(DATA, columns=columns, filters=[("dtype", "=", "bf16")]).to_pydict()
    devices, libraries = np.array(table["device"]), np.array(table["library"])
    sizes = np.stack([np.array(table[letter], dtype=np.int64) for letter in "mnk"], axis=1)
    rates = 2.0 * sizes.astype(float).prod(1) / np.array(table["latency_s"])
    shares, by_chance = [], []
    for device, num_sms in (("a100_sxm", 108), ("h100_sxm", 132), ("h200_sxm", 132), ("b200_sxm", 148), ("l40s", 142)):
        (library,) = [name for name in set(libraries[devices == device]) if name.startswith("sglang")]
        chosen = (devices == device) & (libraries == library)
        share, runs = search_best(sizes[chosen], rates[chosen], num_sms, 0, at_once=24)
        assert runs <= 240
        shares.append(share)
        draws = [np.random.default_rng(seed).choice(rates[chosen], runs).max() for seed in range(20)]
        by_chance.append(float(np.median(draws) / rates[chosen].max()))

    assert np.median(shares) >= 0.995
    assert min(shares) >= 0.96
    assert max(by_chance) < 0.97


def test_two_ranks_on_loopback(tmp_path: Path) -> None:
    """Every collective runs between two gloo processes with correct results, times and bus rates, and resumes."""
    path = tmp_path / "s.sqlite"
    arguments = ["bench", "collectives", "--cpu", "--num-ranks", "2", "--budget", "2s", "--store", str(path), "--json"]
    every = {"all_reduce", "all_gather", "reduce_scatter", "alltoall", "send_recv"}
    names: set[str] = set()
    for _ in range(8):  # a budget ends a run wherever a busy machine has come to; the next one goes on from there
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        with Store(path, read_only=True) as store:
            rows = store.rows()
        names = {row.name for row in rows}
        if names == every:
            break

    assert names == every
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        assert row.status == OK
        assert row.sizes["num_ranks"] == 2
        assert row.library.endswith("gloo")
        assert row.figures["bus_bytes_per_s"] > 0.0


def test_repeatability_compares_repetitions() -> None:
    """Pairs differ by their repetition only; differences are relative to the smaller time."""

    def row(m: int, repetition: int, median_s: float | None) -> Any:
        same = {"kind": "gemm", "dtype": "fp32", "layout": "NT", "variant": "", "sizes": {"m": m}}
        return SimpleNamespace(**same, repetition=repetition, median_s=median_s)

    rows = [row(1, 1, 1.1), row(1, 0, 1.0), row(2, 0, 2.0), row(2, 1, 1.0), row(3, 0, 1.0), row(4, 1, None)]
    found = repeatability(rows)

    assert found
    assert found.num_pairs == 2
    assert found.median_fraction == pytest.approx((0.1 + 1.0) / 2)
    assert found.largest_fraction == pytest.approx(1.0)
    assert repeatability(rows[4:]) is None


def test_suites_of_the_command_line_run_in_a_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command measures several suites into one store; the summary has rows per minute and overhead."""
    arguments = ["bench", "smoke,mamf", "--cpu", "--budget", "3s", "--store", str(tmp_path / "s.sqlite"), "--json"]
    suites: set[str] = set()
    for _ in range(8):  # on a busy machine a call may end before its second suite has a row; the next one goes on
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        found = json.loads(capsys.readouterr().out)
        assert (stop.value.code, found["suite"], found["num_bad"]) == (0, "smoke,mamf", 0)
        assert found["rows_per_min"] > 0.0
        assert found["overhead_fraction"] > 0.0
        suites = {row["suite"] for row in found["rows"]}
        if suites == {"smoke", "mamf"}:
            break

    assert suites == {"smoke", "mamf"}
    assert found["best_flops_per_s"]["fp32"] > 0.0


def test_campaign_is_resumed(tmp_path: Path) -> None:
    """Blocks write small stores and a description of the machine; a later call measures only the remaining rows."""
    script = Path(__file__).parents[2] / "benchmarks" / "campaign.sh"
    if not script.exists():
        pytest.skip("benchmarks are not beside these tests")

    def run_blocks(out: Path, *blocks: str, **changes: str) -> tuple[int, str]:
        environment = {**os.environ, "CPU": "1", "SECONDS_PER_BLOCK": "1", "PYTHON": sys.executable, **changes}
        ended = subprocess.run(
            ["bash", str(script), str(out), *blocks], env=environment, capture_output=True, text=True, check=False
        )
        return ended.returncode, ended.stdout + ended.stderr

    def keys(out: Path) -> set[str]:
        with Store(out / "layer.sqlite", read_only=True) as store:
            assert store.verify() == []
            return {row.measured_utc + row.key for row in store.rows()}

    code, words = run_blocks(tmp_path / "first", "layer")
    first = keys(tmp_path / "first")
    assert code == 0, words
    code, words = run_blocks(tmp_path / "second", "layer", FROM=str(tmp_path / "first"))
    second = keys(tmp_path / "second")

    assert code == 0, words
    assert f"{len(first)} known before" in words
    assert first < second
    # Completed blocks are skipped.
    (tmp_path / "second" / "done.txt").write_text("layer\n", encoding="utf-8")
    assert run_blocks(tmp_path / "later", "layer", FROM=str(tmp_path / "second")) == (0, "layer: done before\n")
    assert "torch" in (tmp_path / "first" / "environment.txt").read_text(encoding="utf-8")
    assert max(path.stat().st_size for path in (tmp_path / "second").iterdir()) < 16e6
    assert run_blocks(tmp_path / "third", "lair")[0] == 2
    assert not (tmp_path / "third").exists()


def test_too_few_gpus_for_the_ranks() -> None:
    """With fewer GPUs than ranks the error names their number."""
    if torch.cuda.device_count() > 7:
        pytest.skip("there are enough GPUs")
    with pytest.raises(BenchError, match=r"num_ranks=8 needs as many GPUs.*measure the CPU"):
        open_ranks(8, 0, "nowhere", cpu=False)
