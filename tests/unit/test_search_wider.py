"""Search over several devices, layouts and experts, with what a run costs, as a page, and on Ray."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from command_line import run as run_command
from shapewright.app.api.searches import search
from shapewright.core.errors import BenchError, ConfigError, WorkloadError
from shapewright.measure.bench.device.backend import DeviceFacts
from shapewright.measure.bench.suites.layers import list_model_cases
from shapewright.measure.bench.verify import verify_search
from shapewright.measure.bench.worker import WorkerDiedError
from shapewright.measure.store.record import Case, Row, Run, row_facts
from shapewright.models.hf_config import read_hf_config
from shapewright.models.parameters import count_parameters
from shapewright.models.write import to_config_json
from shapewright.optimize.search import engine as search_engine
from shapewright.optimize.search.request import field_of
from shapewright.prediction.predict import predict
from shapewright.prediction.training_run import TrainingRun, estimate_run_cost

DEVICES = ("h100-sxm-80gb", "a100-sxm-80gb", "mi300x")


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the search command."""
    return run_command(["search", *arguments], capsys)


def test_one_shape_for_several_devices_is_the_least_regretted() -> None:
    """Rank 1 has the least worst regret of the list and of the shapes that are best on one device alone."""
    result = search("gpt3-2.7b", devices=DEVICES)

    def worst(candidate: Any) -> float:
        return max(there.regret for there in candidate.on_devices.values())

    assert list(result.best_on) == list(DEVICES)
    regrets = [worst(candidate) for candidate in result.candidates]
    assert regrets == sorted(regrets)
    assert regrets[0] <= min(worst(best) for best in result.best_on.values()) + 1e-9
    assert worst(result.baseline) > regrets[0]
    for name, best in result.best_on.items():
        assert best.on_devices[name].regret == pytest.approx(1.0)
        assert all(shape.on_devices[name].regret > 1.0 - 1e-9 for shape in result.candidates)
        # best there alone: at least as good at equal size as a search for that device finds
        alone = search("gpt3-2.7b", device=name)
        assert best.on_devices[name].equal_size_speedup == pytest.approx(
            max(shape.equal_size_speedup for shape in (*alone.candidates, *alone.front))
        )


def test_a_width_on_no_grid_is_one_change_from_its_neighbor(capsys: pytest.CaptureFixture[str]) -> None:
    """4097 instead of 4096: the verdict is to change the width alone, not other fields for the last of the gain."""
    words = ["llama-3-8b", "--hidden-size", "4097", "--head-dim", "128", "--device", "h100-sxm-80gb"]
    _, out, _ = run([*words, "--json"], capsys)
    found = json.loads(out)

    assert found["verdict"]["text"].startswith("change width 4097 -> 4096: to the same loss 3.")
    single = found["candidates"][found["best_by_num_changes"]["1"] - 1]
    assert {name for name in single["changes"] if name != "embedding_size"} == {"hidden_size"}
    most = max(shape["net_speedup"] for shape in found["candidates"])
    assert found["verdict"]["net_speedup"] - 1.0 >= 0.95 * (most - 1.0)


def test_a_list_by_speed_shows_what_it_is_ordered_by(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed-up at equal size, by which shapes are listed, stays on a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(["gpt3-2.7b", "--device", "a100-sxm-40gb", "--top", "4"], capsys)
    heading, *lines = out[out.index("\nrank  changes") :].strip().split("\n")
    at = heading.index("at equal size")
    rows = [line for line in lines[: lines.index("")] if line[3:4].isdigit()]
    shown = [float(line[at : at + len("at equal size")].strip(" x")) for line in rows]

    assert len(shown) >= 4
    assert shown == sorted(shown, reverse=True)


def test_a_device_that_no_shape_fits_is_named() -> None:
    """8 B parameters train on none of one die of MI250X, whatever the micro-batch; an MI355X has room."""
    with pytest.raises(ConfigError, match=r"no shape fits the 59.6 GiB of mi250x-gcd, where the baseline"):
        search("llama-3-8b", devices=["mi355x", "mi250x-gcd"], vary=["micro_batch"])


def test_layouts_are_searched_together_with_micro_batches() -> None:
    """Every listed layout has the baseline's devices and batch, fits, and equals its prediction."""
    requested = {"seq_len": 8192, "micro_batch_size": 1, "global_batch_size": 128}
    layout = {"tensor_parallel": 8, "data_parallel": 2, "zero_stage": 1}
    result = search(
        "llama-3-8b",
        device="h100-sxm-80gb",
        vary=("layout", "micro_batch", "recompute"),
        workload=requested,
        layout=layout,
    )
    best = result.candidates[0]

    assert best.speedup.factor > 1.05
    assert "layout" in best.changed_fields
    for shape in (*result.candidates, *result.front):
        one = shape.prediction
        assert one.layout.num_devices == 16
        assert one.tokens_per_step == 128 * 8192
        assert one.memory.total_bytes <= one.device.memory_bytes
        again = predict(one.config, device=one.device, workload=one.workload, layout=one.layout)
        assert again.step_time_s == one.step_time_s


def test_a_layout_that_does_not_fit_is_mended() -> None:
    """Where the baseline does not fit and its layout may change, the listed shapes fit."""
    layout = {"data_parallel": 16}
    requested = {"micro_batch_size": 1, "global_batch_size": 64}
    result = search("gpt3-13b", device="a100-sxm-40gb", vary=("layout", "recompute"), workload=requested, layout=layout)

    assert any("the listed shapes fit" in note for note in result.notes)
    assert all(
        shape.prediction.memory.total_bytes <= shape.prediction.device.memory_bytes for shape in result.candidates
    )


def test_experts_keep_total_and_active_parameters() -> None:
    """Other numbers and widths of experts are listed at equal parameters in all and per token."""
    result = search(
        "mixtral-8x7b",
        device="h200-sxm-141gb",
        vary=("experts",),
        layout={"expert_parallel": 8, "data_parallel": 8, "zero_stage": 3},
        guard="free",
        overrides={"moe_intermediate_size": 14300, "intermediate_size": 14300},
    )
    own = result.baseline.prediction.parameters

    assert result.candidates
    for shape in result.candidates:
        counts = shape.prediction.parameters
        assert shape.changed_fields == ("experts",)
        assert counts.total == pytest.approx(own.total, rel=0.02)
        assert counts.active == pytest.approx(own.active, rel=0.02)


def test_no_number_of_experts_is_surely_better() -> None:
    """Fewer, larger experts are faster, and no loss varies their number: they are at most worth a trial."""
    result = search(
        "qwen3-30b-a3b",
        device="h100-sxm-80gb",
        vary=("experts",),
        train_tokens=3e11,
        workload={"seq_len": 4096, "micro_batch_size": 1, "global_batch_size": 32},
        layout={"data_parallel": 8, "expert_parallel": 8, "zero_stage": 3},
    )

    assert result.verdict is not None
    assert result.verdict.code in ("keep", "trial")
    for shape in result.candidates:
        assert shape.effect is not None
        assert shape.effect.net_speedup is not None
        assert (
            shape.effect.net_speedup.high / shape.effect.net_speedup.low > 2.0 * shape.speedup.high / shape.speedup.low
        )


def test_layout_and_batch_are_printed_as_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layout and batch of the written shape are printed as flags, and are columns of --csv."""
    target = tmp_path / "best.json"
    words = ["llama-3-8b", "--device", "h100-sxm-80gb", "--tp", "8", "--dp", "2", "--micro-batch-size", "1"]
    words += ["--global-batch", "64", "--zero-stage", "1", "--vary", "layout,micro_batch", "--csv", "-o", str(target)]
    code, out, err = run(words, capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    first = rows[1]

    assert code == 0
    assert rows[0]["tensor_parallel"] == "8"
    assert "layout" in first["changed_fields"]
    assert f"--tensor-parallel {first['tensor_parallel']} " in err


def test_dense_models_have_no_experts_to_vary() -> None:
    """Varying experts of a dense model is an error."""
    with pytest.raises(ConfigError, match="this model is dense"):
        search("gpt2", device="l40s", vary=("experts",))


def test_horizon_is_arithmetic_on_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Hours are tokens over speed, energy hours times the board's power, money hours times the price."""
    words = ["gpt3-2.7b", "--device", "a100-sxm-80gb", "--train-tokens", "300b", "--usd-per-hour", "2", "--json"]
    code, out, _ = run([*words, "--objective", "cost"], capsys)
    facts = json.loads(out)
    base, first = facts["horizon"]["baseline"], facts["candidates"][0]
    hours = 300e9 / facts["baseline"]["tokens_per_s_per_device"] / 3600

    assert code == 0
    assert base["device_hours"] == pytest.approx(hours)
    assert base["energy_kwh"] == pytest.approx(hours * 0.4)  # 400 W
    assert base["usd"] == pytest.approx(2 * hours)
    left = hours - first["saves"]["device_hours"]
    assert left * first["net_speedup"] == pytest.approx(hours)
    assert first["saves_low"]["usd"] <= first["saves"]["usd"] <= first["saves_high"]["usd"]


def test_horizon_refuses_numbers_that_are_none() -> None:
    """Zero tokens, a negative price, a cost without a price and tokens outside training are refused."""
    with pytest.raises(WorkloadError, match="train_tokens=0"):
        TrainingRun(train_tokens=0)
    with pytest.raises(WorkloadError, match="usd_per_hour=-1"):
        search("gpt2", device="l40s", usd_per_hour=-1.0)
    with pytest.raises(WorkloadError, match="needs the price"):
        search("gpt2", device="l40s", objective="cost")
    with pytest.raises(WorkloadError, match="no effect in decode"):
        search("gpt2", device="l40s", objective="decode-latency", train_tokens=1)
    with pytest.raises(WorkloadError, match="does not depend on prices; omit objective='cost'"):
        search("gpt2", devices=DEVICES, usd_per_hour=2.0)


def test_cost_without_price_or_power_omits_them() -> None:
    """Unknown quantities are omitted."""
    prediction = search("gpt2", device="l40s", vary=("vocab",)).baseline.prediction
    bill = estimate_run_cost(
        replace(prediction, device=replace(prediction.device, tdp_watts=None)), TrainingRun(train_tokens=10**9)
    )

    assert (bill.energy_kwh, bill.usd) == (None, None)


def test_page_holds_figure_and_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--html writes one page with the front and the list."""
    page = tmp_path / "search.html"
    words = ["gpt3-2.7b", "--devices", ",".join(DEVICES), "--top", "4", "--html", str(page), "--train-tokens", "1t"]
    code, out, err = run(words, capsys)
    text = page.read_text(encoding="utf-8")

    assert (code, err) == (0, f"wrote {page}\n")
    assert "regret" in out
    assert "device hours" in out
    assert "Pareto front" in text
    assert "a 32 -&gt; 20" in text or "a 32 -> 20" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt2"], "give --device NAME, or --devices"),
        (["gpt2", "--device", "l40s", "--devices", "l40s"], "--device and --devices cannot be combined"),
        (["gpt2", "--devices", "l40s,h1000"], "h1000"),
        (["gpt2", "--device", "l40s", "--train-tokens", "lots"], "'lots' is no number of tokens"),
        (["gpt2", "--device", "l40s", "--address", "auto"], "no effect without engine='ray'"),
        (["gpt2", "--device", "l40s", "--vary", "recompute", "--phase", "prefill"], "no meaning in phase='prefill'"),
        (["gpt2", "--device", "l40s", "--html", "-"], "need a file name"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid input gives one line on standard error and exit code 2."""
    code, out, err = run(words, capsys)

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_jobs_cut_a_space_without_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """However finely a space is cut, every shape is looked at once and the best are the same."""
    whole = search("gpt3-1.3b", device="h100-sxm-80gb", top=50)
    monkeypatch.setattr(search_engine, "_SHAPES_OF_A_JOB", 20_000)
    stated: list[tuple[int, int]] = []
    parts = search("gpt3-1.3b", device="h100-sxm-80gb", top=50, progress=lambda *counts: stated.append(counts))

    assert replace(parts.tally, nearest_parameters=0) == replace(whole.tally, nearest_parameters=0)
    assert [shape.config for shape in parts.candidates] == [shape.config for shape in whole.candidates]
    assert [shape.config for shape in parts.front] == [shape.config for shape in whole.front]
    assert stated == sorted(stated)
    assert {num_shapes for _, num_shapes in stated} == {whole.tally.num_shapes}
    assert stated[-1][0] == whole.tally.num_shapes


@dataclass
class Fragile:
    """Measures everything as a millisecond, but for names that take its process with them."""

    deadly: tuple[str, ...]
    requested: list[str] = field(default_factory=list)
    max_flops: float = 1e30

    @property
    def facts(self) -> DeviceFacts:
        """Of no device that there is."""
        return DeviceFacts(
            is_cuda=False, name="d", facts={}, driver="", runtime="", torch_version="2", dtypes=("bf16", "fp32"),
            cache_bytes=1.0, max_operation_flops=self.max_flops,
        )  # fmt: skip

    def measure(self, case: Case, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
        """A row, or no process any more."""
        del budget_s, ci_fraction
        self.requested.append(case.operation.name)
        if case.operation.name.startswith(self.deadly):
            raise WorkerDiedError("was killed")
        return Row(**row_facts(case, run), measured_utc="", status="ok", median_s=1e-3)


def test_verify_survives_a_crashed_process() -> None:
    """A candidate that crashes the measuring process is skipped and named; after five the run ends."""
    overrides = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1001}
    workload = {"dtype": "bf16", "micro_batch_size": 1, "seq_len": 64}
    found = search(None, device="a100-sxm-80gb", vary=("vocab",), workload=workload, overrides=overrides)
    measurer = Fragile(("residual",))
    verified = verify_search(found, 1, measurer, budget_s=60.0)

    assert verified.num_rounds == 3
    assert measurer.requested.count("residual") == 1
    assert any("failed here" in note and "residual" in note for note in verified.notes)
    with pytest.raises(BenchError, match="5 measuring processes died"):
        verify_search(found, 1, Fragile(("",)), budget_s=60.0)


def test_verify_counts_equal_operations_that_are_measured_once() -> None:
    """Projections of one size are one measurement; all of them are in the covered share of the predicted step."""
    overrides = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1001, "gated_mlp": True}
    workload = {"dtype": "bf16", "micro_batch_size": 1, "seq_len": 64}
    found = search(None, device="a100-sxm-80gb", vary=("vocab",), workload=workload, overrides=overrides)
    covered = []
    for job in (found.baseline.prediction, found.candidates[0].prediction):
        listed = list_model_cases(job.config, job.workload, job.layout)
        entries = job.busiest_operations
        left = sum(entry.total_time_s for entry in entries if entry.operation.name not in listed.skipped)
        covered.append(left / sum(entry.total_time_s for entry in entries))
        assert len(listed.cases) < len({entry.operation.name for entry in entries} - listed.skipped.keys())

    verified = verify_search(found, 1, Fragile(()), budget_s=60.0).shapes[0]
    assert verified.covered_fraction == pytest.approx(min(covered))


def test_verify_leaves_out_of_both_what_is_too_large_in_one() -> None:
    """Logits of 1,001 words may be measured and those of 1,024 not: both are left out of time, share and speedup."""
    overrides = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1001}
    workload = {"dtype": "bf16", "micro_batch_size": 1, "seq_len": 64}
    found = search(None, device="a100-sxm-80gb", vary=("vocab",), workload=workload, overrides=overrides)
    limit = 2.0 * 64 * 128 * 1001
    assert found.candidates[0].config.vocab_size > 1001
    verified = verify_search(found, 1, Fragile((), max_flops=limit), budget_s=60.0).shapes[0]

    assert "logits" not in verified.modules
    assert verified.measured == pytest.approx(1.0)
    assert verified.predicted_of_measured == pytest.approx(1.0, abs=0.01)


def test_verify_measures_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Baseline and shapes are measured on this machine's CPU and shown with their predictions."""
    pytest.importorskip("torch", reason="needs the bench extra")
    model = ["--hidden-size", "128", "--num-layers", "2", "--num-heads", "4", "--vocab-size", "1001"]
    requested = ["--device", "a100-sxm-80gb", "--dtype", "bf16", "--micro-batch-size", "1", "--seq-len", "64"]
    words = [*model, *requested, "--vary", "vocab", "--verify", "1", "--verify-budget", "1", "--json"]
    code, out, _ = run(words, capsys)
    found = json.loads(out)["verification"]
    shape = found["shapes"][0]

    assert code == 0
    assert found["num_rounds"] >= 1
    assert shape["rank"] == 1
    assert 0.0 < shape["measured_low"] <= shape["measured"] <= shape["measured_high"]
    assert 0.0 < shape["covered_fraction"] <= 1.0
    assert {"attention", "mlp", "logits"} <= set(shape["modules"])
    # nothing but the logits differs: the rest was measured once for both
    before_s, after_s = shape["modules"]["mlp"]["baseline_s"], shape["modules"]["mlp"]["shape_s"]
    assert before_s == after_s
    assert run([*model, *requested, "--verify-budget", "1"], capsys)[0] == 2


@pytest.mark.parametrize("keep", [{"heads": 7}, {"head_dim": 1000}, {"width": 2500, "head_dim": 72}, {"width": 100}])
def test_heads_that_do_not_fit_come_with_the_nearest_that_do(keep: dict[str, int]) -> None:
    """Each value that the refusal names leaves shapes, all else kept."""
    with pytest.raises(ConfigError, match="the nearest value that does") as refusal:
        search("gpt3-2.7b", device="a100-sxm-80gb", keep=keep)

    named = re.findall(r"(\w+)=(\d+)", str(refusal.value).split("the nearest value that does: ")[1])
    assert named
    for name, value in named:
        kept = {field_of(key): number for key, number in keep.items()} | {name: int(value)}
        found = search("gpt3-2.7b", device="a100-sxm-80gb", keep=kept, tolerance_fraction=10.0)
        assert found.tally.num_shapes


def test_front_names_the_ranks_of_the_list() -> None:
    """A shape of the front has the rank of the list, or none; --pick and --explain take it."""
    result = search("gpt3-2.7b", device="a100-sxm-80gb", vary=["heads", "ffn", "vocab"], top=4)
    listed = {candidate.rank: candidate.config for candidate in result.candidates}
    assert any(shape.rank for shape in result.front)
    assert any(not shape.rank for shape in result.front)
    assert all(listed[shape.rank] == shape.config for shape in result.front if shape.rank)


@pytest.mark.parametrize("model", ["gpt3-2.7b", "mixtral-8x7b"])
def test_front_starts_with_the_best_listed_shape(model: str) -> None:
    """The shape of rank 1 leads the front, though rounding puts it behind others here."""
    result = search(model, device="h100-sxm-80gb", top=1)
    assert result.front[0].rank == 1
    assert result.front[0].config == result.candidates[0].config


def test_notes_list_skipped_rows() -> None:
    """Experts are outside the guard, and narrower heads read less cache only where nothing pads them."""
    experts = search("mixtral-8x7b", device="h100-sxm-80gb", vary=["experts"], layout={"tensor_parallel": 8})
    assert any("no guard limits the number of experts" in note for note in experts.notes)
    requested = {"phase": "decode", "context_len": 8192}
    decode = search("llama-3-8b", device="h100-sxm-80gb", workload=requested, top=4)
    is_odd = [shape.config.head_dim % 32 != 0 for shape in decode.candidates]
    assert any("stores heads unpadded" in note for note in decode.notes) == any(is_odd)


def test_more_key_value_heads_are_noted_in_training() -> None:
    """More key-value heads train faster but enlarge the cache; noted in training unless they are kept."""
    usual = search("llama-3-8b", device="h100-sxm-80gb", top=4)
    decode = search("llama-3-8b", device="h100-sxm-80gb", workload={"phase": "decode", "context_len": 8192}, top=4)
    kept = search("llama-3-8b", device="h100-sxm-80gb", keep={"num_kv_heads": 8}, top=4)
    own = usual.baseline.kv_bytes_per_token
    worse = [str(shape.rank) for shape in usual.candidates if shape.kv_bytes_per_token > 1.1 * own]
    (message,) = [note for note in usual.notes if "times the KV cache per token" in note]

    assert worse
    assert re.findall(r"[0-9]+", message.partition(" ha")[0]) == worse
    assert "keep num_kv_heads=8" in message
    assert not any("times the KV cache per token" in note for note in (*kept.notes, *decode.notes))


@pytest.mark.parametrize(
    ("model", "fixed"),
    [
        ("jamba-v0.1", "width"),  # Mamba layers are twice as wide as the residual stream
        ("mamba2-2.7b", "width"),
        ("minimax-text-01", "heads"),  # linear attention has as many heads
        ("llama-4-scout", ""),  # the shared expert has the routed experts' width
        ("qwen3.5-35b-a3b", ""),  # no key for the width of a dense MLP, which no layer has
        ("deepseek-v3", "heads"),
    ],
)
def test_every_listed_shape_can_be_written(model: str, fixed: str) -> None:
    """What a config.json cannot hold is not varied, and what follows a field follows it in the listed shapes too."""
    found = search(model, device="h100-sxm-80gb", top=10)
    varied = {name for shape in found.candidates for name in shape.changed_fields}

    for shape in found.candidates:
        written = read_hf_config(to_config_json(found.model, shape.config)).config
        assert count_parameters(written) == count_parameters(shape.config)
    assert fixed not in varied
    assert not fixed or any(note.startswith(f"{fixed} is not varied") for note in found.notes)


def test_a_shared_expert_follows_the_width_of_the_others() -> None:
    """Where one number is the width of all experts, a search changes them together."""
    found = search("deepseek-v3", device="h100-sxm-80gb", vary=("ffn", "width"), train_tokens=10**13, top=5)

    assert found.candidates
    for shape in found.candidates:
        assert shape.config.shared_expert_intermediate_size == shape.config.moe_intermediate_size
        assert shape.config.intermediate_size == 18432
