"""Searches: results compared with the paper and published models, and their output."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from command_line import run as run_command
from shapewright.app.api.searches import search as api_search
from shapewright.app.figures.chart import Points
from shapewright.app.figures.shapes import speedup_chart
from shapewright.app.report.outputs.search import search_output
from shapewright.models.read import read_model
from shapewright.optimize.search import engine as search_engine
from shapewright.optimize.search.request import SearchRequest
from shapewright.optimize.search.result import SearchResult
from shapewright.optimize.search.search import search_shapes
from shapewright.prediction.build import build_scenario

PAPER = {"attention": "unfused", "dtype": "fp16", "micro_batch_size": 4, "seq_len": 2048}
PAPER_WORDS = ["gpt3-2.7b", "--device", "a100-sxm-40gb", "--attention", "unfused", "--dtype", "fp16"]
BLOOM_LIKE = {
    "hidden_size": 14400,
    "num_layers": 70,
    "num_heads": 120,
    "vocab_size": 250880,
    "position_embedding": "alibi",
    "tied_embeddings": True,
}


def search(source: str | None, device: str, request: SearchRequest | None = None, **requested: Any) -> SearchResult:
    """Search around a model."""
    return search_shapes(build_scenario(source, device, **requested), request or SearchRequest(), notes=())


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the search command."""
    return run_command(["search", *arguments], capsys)


@pytest.fixture(scope="module")
def paper_result() -> SearchResult:
    """GPT-3 2.7B as published, on an A100."""
    return search("gpt3-2.7b", "a100-sxm-40gb", workload=PAPER)


def test_twenty_heads_lead_among_single_changes(paper_result: SearchResult) -> None:
    """The paper's case: 20 heads of 128 for 32 of 80, a layer 1.12 to 1.24 times faster."""
    singles = [shape for shape in paper_result.candidates if len(shape.changed_fields) == 1]
    best = paper_result.best_by_num_changes()[1]

    assert best == singles[0]
    assert (best.changed_fields, best.config.num_heads, best.config.head_dim) == (("heads",), 20, 128)
    assert 1.12 <= best.layer_speedup <= 1.24
    assert best.parameters_change_fraction == pytest.approx(0.0, abs=1e-4)
    assert best.speedup.low <= best.speedup.factor <= best.speedup.high
    assert best.speedup.probability_faster > 0.9


def test_padded_vocabulary_is_listed_with_its_gain(paper_result: SearchResult) -> None:
    """v=50257 is no multiple of 8: padding it alone is listed, and what it gains is the logits."""
    padded = next(shape for shape in paper_result.candidates if shape.changed_fields == ("vocab",))

    assert padded.config.vocab_size > 50257
    assert padded.config.vocab_size % 64 == 0
    assert padded.speedup.factor > 1.01
    assert padded.layer_speedup == pytest.approx(1.0)
    assert padded.gains[0].module == "logits"
    assert "aligned to 128 bytes, were 2" in padded.gains[0].reason


def test_points_of_the_front_have_the_intervals_of_their_factors(paper_result: SearchResult) -> None:
    """In a label, each factor is followed by its own interval: that of the speed-up is not that to the same loss."""
    found = search_output(paper_result)
    labels = next(part.labels for part in speedup_chart(found).series if isinstance(part, Points))

    assert any(shape.effect.net_speedup is not None and not shape.effect.is_free for shape in found.pareto)
    for shape, label in zip(found.pareto, labels, strict=True):
        factors = re.findall(r"([\d.]+)x \(([\d.]+) to ([\d.]+)\)", label)
        assert len(factors) == label.count("x ") == (1 if shape.effect.is_free else 2)
        assert all(float(low) <= float(middle) <= float(high) for middle, low, high in factors)


def test_candidates_are_predictions_inside_the_limits(paper_result: SearchResult) -> None:
    """Every listed shape is faster, of the same size, inside the guard, and ranked by speed at equal size."""
    own = paper_result.baseline.prediction
    for shape in (*paper_result.candidates, *paper_result.front):
        assert abs(shape.parameters_change_fraction) <= 0.02
        assert shape.speedup.factor > 1.0
        assert shape.speedup.factor == pytest.approx(own.step_time_s / shape.prediction.step_time_s)
        for name, (low, high) in paper_result.ranges.items():
            assert low * 0.999 <= shape.measures[name][0] <= high * 1.001
    sizes = [shape.equal_size_speedup for shape in paper_result.candidates]
    assert sizes == sorted(sizes, reverse=True)
    assert [shape.rank for shape in paper_result.candidates] == list(range(1, len(sizes) + 1))


def test_space_adds_up(paper_result: SearchResult) -> None:
    """Every shape of the space is either pruned for a reason or priced."""
    tally = paper_result.tally

    assert tally.pruned + tally.priced == tally.num_shapes
    assert tally.faster + tally.too_large <= tally.priced


def test_bloom_moves_to_a_width_that_splits_well() -> None:
    """h=14400 over 8 devices leaves 1800 a device; a multiple of 64 a device is found, jointly with the micro-batch."""
    request = SearchRequest(vary=("heads", "ffn", "vocab", "width", "micro_batch"))
    workload = {"attention": "unfused", "micro_batch_size": 1, "global_batch_size": 512}
    layout = {"tensor_parallel": 8, "pipeline_parallel": 10}
    result = search(None, "a100-sxm-80gb", request, overrides=BLOOM_LIKE, workload=workload, layout=layout)
    best = result.candidates[0]
    reshaped = next(shape for shape in result.candidates if "micro_batch" not in shape.changed_fields)

    assert best.config.hidden_size // 8 % 64 == 0
    assert best.speedup.factor > 1.10
    assert reshaped.config.hidden_size // 8 % 64 == 0
    assert reshaped.speedup.factor > 1.05
    assert best.prediction.memory.total_bytes <= best.prediction.device.memory_bytes


def test_a_batch_that_grows_with_the_micro_batch_is_noted() -> None:
    """Without a global batch, a larger micro-batch trains on larger steps, which the loss law does not know."""
    grown, held, fixed = (
        api_search("gpt2", device="l40s", vary=vary, workload={"global_batch_size": batch}, train_tokens=10**9, top=2)
        for vary, batch in ((("micro_batch",), None), (("micro_batch",), 64), (("vocab",), None))
    )

    assert any("the batch of a step grows with the micro-batch" in note for note in grown.notes)
    assert not any("the batch of a step grows" in note for result in (held, fixed) for note in result.notes)


def test_stages_vary_the_micro_batch_by_default() -> None:
    """With pipeline stages the default search varies the micro-batch and notes that; --keep fixes it."""
    requested = {"attention": "unfused", "micro_batch_size": 1, "global_batch_size": 512}
    layout = {"tensor_parallel": 8, "pipeline_parallel": 10}
    joint = api_search(None, device="a100-sxm-80gb", overrides=BLOOM_LIKE, workload=requested, layout=layout)
    kept = api_search(
        None,
        device="a100-sxm-80gb",
        overrides=BLOOM_LIKE,
        workload=requested,
        layout=layout,
        keep={"micro_batch_size": 1},
    )
    best = joint.candidates[0]

    assert any("micro_batch is varied too" in note for note in joint.notes)
    assert best.config.hidden_size // 8 % 64 == 0
    assert best.speedup.factor > 1.10
    assert all(shape.prediction.workload.micro_batch_size == 1 for shape in kept.candidates)
    assert not any("micro_batch is varied too" in note for note in kept.notes)


def test_micro_batches_of_stages_share_one_global_batch() -> None:
    """Half the micro-batch is twice as many of them in a step of as many sequences, which halves the bubble."""
    layout = {"tensor_parallel": 8, "pipeline_parallel": 10}
    found = api_search(
        None,
        device="a100-sxm-80gb",
        overrides=BLOOM_LIKE,
        layout=layout,
        vary=("micro_batch",),
        workload={"micro_batch_size": 4},
    )
    alone = next(shape.prediction for shape in found.candidates if shape.prediction.workload.micro_batch_size == 1)

    assert any("global batch is held at the baseline's 40 sequences" in note for note in found.notes)
    assert alone.tokens_per_step == found.baseline.prediction.tokens_per_step
    assert alone.bubble_time_s < 0.5 * found.baseline.prediction.bubble_time_s
    assert found.verdict is not None
    assert set(found.verdict.changes) == {"micro_batch_size"}


def test_swiglu_width_is_aligned() -> None:
    """8/3 of 4096 is 10922, a multiple of 2: an aligned width is chosen and the MLP gains more than a quarter."""
    request = SearchRequest(vary=("ffn",))
    result = search("llama-7b", "h100-sxm-80gb", request, overrides={"intermediate_size": 10922})
    best = result.candidates[0]

    def mlp_gemms_s(prediction: Any) -> float:
        entries = prediction.operations
        return sum(
            entry.total_time_s
            for entry in entries
            if entry.operation.name.startswith("mlp.") and entry.operation.kind == "gemm"
        )

    assert best.config.intermediate_size % 64 == 0
    assert mlp_gemms_s(result.baseline.prediction) / mlp_gemms_s(best.prediction) > 1.25


def test_shapes_fit_where_the_baseline_fits() -> None:
    """A larger micro-batch is faster until memory ends: what is listed fits."""
    request = SearchRequest(vary=("micro_batch",))
    result = search("gpt3-1.3b", "a100-sxm-40gb", request, workload={"micro_batch_size": 1, "recompute": "full"})
    device = result.baseline.prediction.device

    assert result.baseline.prediction.memory.total_bytes < device.memory_bytes
    assert result.candidates
    assert all(shape.prediction.memory.total_bytes <= device.memory_bytes for shape in result.candidates)
    assert result.tally.too_large > 0


def test_fields_that_the_form_cannot_hold_stay() -> None:
    """GPT-2's config.json has no key-value heads: they are not varied, and requesting them is an error."""
    result = search("gpt2", "h100-sxm-80gb")

    assert any("kv_heads is not varied" in note for note in result.notes)
    assert all(shape.config.num_kv_heads == shape.config.num_heads for shape in result.candidates)


def test_interrupt_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in the middle prints what there is, and exits with 130."""
    calls = iter(range(1000))

    def stop_after_some(*_: object) -> None:
        if next(calls) == 15:
            raise KeyboardInterrupt

    monkeypatch.setattr(search_engine, "_CHUNK", 20_000)
    monkeypatch.setattr("shapewright.app.cli.commands.search.counting_line", lambda _words: stop_after_some)
    code, out, _ = run([*PAPER_WORDS], capsys)

    assert code == 130
    assert "interrupted, best so far" in out
    assert "rank" in out


def test_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """The keys that others read are there, with numbers that agree with each other."""
    code, out, err = run([*PAPER_WORDS, "--json", "--top", "5"], capsys)
    facts = json.loads(out)

    assert (code, err) == (0, "")
    assert facts["schema_version"] == 1
    assert len(facts["candidates"]) == 5
    assert facts["space"]["size"] == facts["space"]["priced"] + facts["space"]["pruned"]
    assert facts["elapsed_s"] > 0.0
    assert facts["baseline"]["speedup"] == 1.0
    first = facts["candidates"][0]
    assert {"rank", "config", "changed_fields", "parameters_change", "step_time_s", "memory_bytes"} <= set(first)
    assert first["speedup_low"] <= first["speedup"] <= first["speedup_high"]
    assert first["speedup"] == pytest.approx(facts["baseline"]["step_time_s"] / first["step_time_s"])


def test_csv_has_a_row_for_each_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """The baseline first, then the list."""
    code, out, _ = run([*PAPER_WORDS, "--csv", "--top", "4"], capsys)
    rows = list(csv.DictReader(io.StringIO(out)))

    assert code == 0
    assert [row["rank"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0]["num_heads"] == "32"


def test_best_is_written_in_the_form_it_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Hugging Face config.json is written back with its unknown keys, and reads as the chosen shape."""
    source, target = tmp_path / "config.json", tmp_path / "best.json"
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 10922,
        "vocab_size": 32000,
        "bos_token_id": 1,
    }
    source.write_text(json.dumps(config), encoding="utf-8")
    words = [str(source), "--device", "h100-sxm-80gb", "--vary", "ffn", "-o", str(target), "--json"]
    code, out, err = run(words, capsys)
    written = json.loads(target.read_text(encoding="utf-8"))

    assert code == 0
    assert err == f"wrote {target} (rank 1)\n"
    assert written["bos_token_id"] == 1
    assert set(written) == set(config)
    assert (
        read_model(target).config.intermediate_size == json.loads(out)["candidates"][0]["config"]["intermediate_size"]
    )


def test_explain_shows_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    """Baseline and shape are shown side by side, GEMM by GEMM."""
    code, out, _ = run([*PAPER_WORDS, "--vary", "heads", "--explain", "1"], capsys)
    score = next(line for line in out.splitlines() if line.startswith("attention.score "))

    assert code == 0
    assert "128 x 2048 x 2048 x 80" in score
    assert "80 x 2048 x 2048 x 128" in score
    assert "32 -> 128" in score


def test_explain_as_json_has_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    """The operations of ``--explain --json`` have both sides."""
    code, out, _ = run([*PAPER_WORDS, "--vary", "heads", "--explain", "1", "--json"], capsys)
    facts = json.loads(out)
    score = next(entry for entry in facts["operations"] if entry["name"] == "attention.score")

    assert code == 0
    assert (score["before"]["shape"], score["after"]["shape"]) == ("128 x 2048 x 2048 x 80", "80 x 2048 x 2048 x 128")
    assert score["saved_fraction"] > 0.0
    assert facts["shape"]["rank"] == 1


def test_size_alone_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a config the baseline is a public model of the family, scaled."""
    words = ["--params", "3b", "--family", "llama", "--device", "h200-sxm-141gb", "--top", "3", "--json"]
    code, out, _ = run(words, capsys)
    facts = json.loads(out)

    assert code == 0
    assert all(shape["parameters"] == pytest.approx(3e9, rel=0.02) for shape in facts["candidates"])


def test_a_family_with_another_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    """--params with --vocab-size scales a public model of that vocabulary; fewer than all sizes need no whole model."""
    words = ["--params", "1.5b", "--vocab-size", "100352", "--device", "h200-sxm-141gb", "--vary", "ffn", "--json"]
    code, out, _ = run(words, capsys)
    baseline = json.loads(out)["baseline"]

    assert code == 0
    assert (baseline["config"]["model_type"], baseline["config"]["vocab_size"]) == ("llama", 100352)
    assert baseline["parameters"] == pytest.approx(1.5e9, rel=0.02)


def test_a_size_may_be_a_whole_float() -> None:
    """1e8 parameters are as many as 100000000."""
    one, other = (api_search("gpt2", device="l40s", num_parameters=size, vary=["ffn"]) for size in (1e8, 100_000_000))

    assert one.baseline.config == other.baseline.config


def test_latency_is_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """--objective decode-latency decodes, and compares steps."""
    words = ["llama-3.2-1b", "--device", "l40s", "--objective", "decode-latency", "--context-len", "4000", "--json"]
    code, out, _ = run(words, capsys)
    facts = json.loads(out)

    assert code == 0
    assert facts["workload"]["phase"] == "decode"
    for shape in facts["candidates"]:
        assert shape["speedup"] == pytest.approx(facts["baseline"]["step_time_s"] / shape["step_time_s"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "l40s"], "nothing to search"),
        (["gpt2", "--device", "l40s", "--params", "0"], "num_parameters=0 must be a number from 100000 to 1e+14"),
        (["gpt2", "--device", "l40s", "--params", "1000000000000000000"], "no number of parameters"),
        (["gpt2", "--device", "l40s", "--params", "many"], "no number of parameters"),
        (["gpt2", "--device", "l40s", "--vary", "colour"], "'colour' is not known"),
        (["gpt2", "--device", "l40s", "--vary", "colour", "--vary", "ffn"], "'colour' is not known"),
        (["gpt2", "--device", "l40s", "--vary", "kv_heads"], "no public model of model_type 'gpt2'"),
        (["gpt2", "--device", "l40s", "--keep", "heads"], "is not FIELD=VALUE"),
        (
            ["gpt2", "--device", "l40s", "--keep", "heads=6", "--keep", "num_heads=8"],
            "--keep names --num-heads twice; give it once, such as heads=32",
        ),
        (["gpt2", "--device", "l40s", "--keep", "width=700", "--keep", "heads=11"], "no heads divide the width"),
        (["gpt2", "--device", "l40s", "--vary", "ffn", "--keep", "depth=1000"], "quality guard leaves none"),
        (["gpt2", "--device", "l40s", "--vary", "vocab", "--keep", "depth=13"], "the nearest inside the guard has"),
        (["gpt2", "--device", "l40s", "--vary", "heads", "--keep", "heads=12"], "nothing is left to search"),
        (["gpt2", "--device", "l40s", "--tolerance", "lots"], "is not a fraction"),
        (["gpt2", "--device", "l40s", "--family", "gpt"], "family has no effect"),
        (["--params", "3b", "--family", "lama", "--device", "l40s"], "did you mean"),
        (["gpt2", "--device", "l40s", "--strict", "--free"], "cannot be combined"),
        (["gpt2", "--device", "l40s", "--objective", "prefill", "--phase", "decode"], "give one of them"),
        (
            ["gpt2", "--device", "l40s", "--phase", "decode", "--vary", "micro_batch"],
            "no meaning for the latency of decode",
        ),
        (["gpt2", "--device", "l40s", "--tp", "5"], "tensor_parallel=5 must divide"),
        (["gpt2", "--device", "l40s", "--vary", "vocab", "--explain", "99"], "--explain 99"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid input gives one line on standard error and exit code 2."""
    code, out, err = run(words, capsys)

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_best_shape_is_written_for_a_framework(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--format writes shape and batch in a framework's format; without -o it has no effect, which is an error."""
    path = tmp_path / "best.args"
    requested = ["gpt3-2.7b", "--device", "a100-sxm-40gb", "--vary", "heads", "--format", "megatron-args"]
    code, _, _ = run([*requested, "-o", str(path), "--micro-batch-size", "2"], capsys)
    words = path.read_text(encoding="utf-8").splitlines()

    assert code == 0
    assert {"--hidden-size 2560", "--num-attention-heads 20", "--micro-batch-size 2", "--seq-length 2048"} <= set(words)
    assert run(requested, capsys)[0] == 2
    assert "unknown format 'megatron'" in run([*requested[:-1], "megatron", "-o", str(path)], capsys)[2]
