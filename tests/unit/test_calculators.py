"""Small calculators: formulas that evaluate to their numbers, batches that multiply, and the three commands."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import run
from shapewright.core.errors import LayoutError, ShapewrightError, WorkloadError
from shapewright.lowering.flops import count_convention_flops, count_model_flops
from shapewright.models.parameters import count_parameters
from shapewright.models.read import list_presets, read_model
from shapewright.prediction.calculators.flops import count_flops
from shapewright.prediction.calculators.parameters import explain_parameters
from shapewright.prediction.calculators.training import (
    BatchRequest,
    bubble_fraction,
    count_replicas,
    estimate_budget,
    solve_batch,
)
from shapewright.prediction.training_run import count_chinchilla_tokens
from shapewright.workload.workload import Workload


def value_of(numbers: str) -> float:
    """Evaluate sums and products of integers with brackets."""
    assert set(numbers) <= set("0123456789*+-() .e")
    return float(eval(numbers))


@pytest.mark.parametrize("preset", [*list_presets(), {"model_type": "deepseek_v4"}], ids=str)
def test_every_formula_comes_to_its_count(preset: str | dict[str, str]) -> None:
    """Of each model, the formula of each component with its numbers put in is the exact count; all add up."""
    config = read_model(preset).config
    terms = explain_parameters(config)
    for term in terms:
        assert value_of(term.numbers) == term.value, term
    assert sum(term.value for term in terms) == count_parameters(config).total


def test_layers_of_multi_token_prediction_are_no_logits() -> None:
    """One further token of Mixtral: twice 2 * 4096 * 32,000 for logits; a layer more than 32, and one of 2 h to h."""
    plain, further = (
        count_flops(read_model("mixtral-8x7b", {"num_mtp_layers": num_layers}).config, Workload(seq_len=2048))
        for num_layers in (0, 1)
    )

    assert 2.0 * further.head_weights == 2 * 2 * 4096 * 32_000
    assert further.layer_weights == pytest.approx(plain.layer_weights * 33 / 32 + 2 * 4096**2)


def test_flops_of_scans_by_hand() -> None:
    """Falcon Mamba: 64 scans of 8,192 channels with states of 16 (update and output), and convolutions of width 4."""
    config, step = read_model("falcon-mamba-7b").config, Workload(seq_len=4096)
    found = count_flops(config, step)
    terms = {term.name: term.value for term in found.terms}

    assert terms["scans, forward"] == 64 * (2 * 2 * 8192 * 16 + 2 * 8192 * 4)
    assert terms["forward"] == sum(terms[f"{part}, forward"] for part in ("layers", "attention", "scans", "logits"))
    assert found.training_flops == pytest.approx(found.conventions["megatron"].model_flops)


@pytest.mark.parametrize(
    "preset",
    [
        "gpt2", "llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-9b", "bert-base", "llama-3.2-11b-vision",
        {"model_type": "deepseek_v4"},
    ],
    ids=str,
)  # fmt: skip
def test_flops_of_a_token_are_those_of_a_step(preset: str | dict[str, str]) -> None:
    """Three forward passes of layers, attention and logits are the model FLOPs of one sequence over its tokens."""
    config = read_model(preset).config
    step = Workload(seq_len=256, micro_batch_size=1, global_batch_size=1)
    found = count_flops(config, step)
    for term in found.terms:
        if term.formula != "A":
            assert value_of(term.numbers) == pytest.approx(term.value)
    assert found.training_flops == pytest.approx(count_model_flops(config, step) / 256)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_conventions_of_a_token_are_those_of_a_step(recompute: str) -> None:
    """Eight sequences of 256 tokens are 2048 tokens, by every convention and with what is computed again; 6 N, 8 N."""
    config = read_model("mixtral-8x7b").config
    step = Workload(seq_len=256, micro_batch_size=4, global_batch_size=8, recompute=recompute)
    found = count_flops(config, step)
    for name, counted in found.conventions.items():
        whole = count_convention_flops(config, step, 8, name)
        assert counted.model_flops * 2048 == pytest.approx(whole.model_flops), name
        assert (counted.hardware_flops is None) == (whole.hardware_flops is None)
        if counted.hardware_flops is not None and whole.hardware_flops is not None:
            assert counted.hardware_flops * 2048 == pytest.approx(whole.hardware_flops), name
    active = count_parameters(config).active
    rule = found.conventions["6n"]
    assert (rule.model_flops, rule.hardware_flops) == (
        pytest.approx(6.0 * active),
        pytest.approx((8.0 if recompute == "full" else 6.0) * active),
    )


@given(
    batch=st.integers(1, 5000),
    replicas=st.sampled_from((1, 2, 3, 8)),
    degrees=st.tuples(st.sampled_from((1, 2, 8)), st.sampled_from((1, 4)), st.sampled_from((1, 2))),
)
def test_every_solution_multiplies(batch: int, replicas: int, degrees: tuple[int, int, int]) -> None:
    """Each solution's product is the batch; together they are all divisors of a replica's share."""
    tensor, pipeline, context = degrees
    request = BatchRequest(
        num_devices=replicas * prod(degrees),
        global_batch_size=batch,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        context_parallel=context,
    )
    if batch % replicas:
        with pytest.raises(WorkloadError, match=r"must be a multiple of data_parallel"):
            solve_batch(request)
        return
    found = solve_batch(request)
    share = batch // replicas
    assert all(one.micro_batch_size * one.data_parallel * one.num_microbatches == batch for one in found)
    assert [one.micro_batch_size for one in found] == [size for size in range(1, share + 1) if share % size == 0]


def test_batches_of_the_seed_text() -> None:
    """4 * 8 = 32; 8 devices with t = p = 2 leave 2 replicas and with 4 sequences each a batch of 8; 4 * 8 * 4 = 128."""
    (one,) = solve_batch(BatchRequest(micro_batch_size=4, data_parallel=8))
    (two,) = solve_batch(BatchRequest(micro_batch_size=4, num_devices=8, tensor_parallel=2, pipeline_parallel=2))
    (three,) = solve_batch(BatchRequest(micro_batch_size=4, data_parallel=8, num_microbatches=4))
    assert [found.global_batch_size for found in (one, two, three)] == [32, 8, 128]
    assert count_replicas(8, 2, 2) == 2
    # Eight devices without any other axis are eight replicas.
    (plain,) = solve_batch(BatchRequest(micro_batch_size=4, num_devices=8))
    assert (plain.data_parallel, plain.global_batch_size, plain.bubble_fraction) == (8, 32, 0.0)


def test_bubbles_of_the_paper() -> None:
    """P = 8, m = 64: 0.109375 of the ideal time, a third of it with three chunks (arXiv 2104.04473, section 2.2)."""
    assert bubble_fraction(8, 64) == 0.109375
    assert bubble_fraction(8, 64, 3) == pytest.approx(0.036458, abs=1e-6)
    (found,) = solve_batch(BatchRequest(micro_batch_size=1, data_parallel=1, num_microbatches=64, pipeline_parallel=8))
    assert found.bubble_fraction == pytest.approx(7 / 71)


def test_budget_by_hand() -> None:
    """1 B parameters, 20 B tokens: 1.2e20 FLOPs; 8 devices at 100 TFLOP/s take 150,000 s; at 2 USD an hour 667 USD."""
    assert count_chinchilla_tokens(1e9) == 20e9
    budget = estimate_budget(1e9, 20e9, num_devices=8, flops_per_s_per_device=100e12, usd_per_hour=2.0)
    assert budget.flops == pytest.approx(1.2e20)
    assert budget.training_s == pytest.approx(150_000)
    assert budget.usd == pytest.approx(150_000 / 3600 * 8 * 2)
    assert budget.tokens_per_parameter == 20
    # One forward pass more of the three that a step is worth.
    again = estimate_budget(1e9, 20e9, num_devices=8, flops_per_s_per_device=100e12, recompute="full")
    assert (again.flops, again.training_s) == (pytest.approx(1.6e20), pytest.approx(200_000))
    assert (again.training_days, again.usd) == (pytest.approx(200_000 / 86_400), None)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: BatchRequest(num_devices=0), WorkloadError, "num_devices=0"),
        (lambda: solve_batch(BatchRequest()), WorkloadError, "underdetermined"),
        (lambda: solve_batch(BatchRequest(num_devices=6, tensor_parallel=4)), LayoutError, "try 4 or 8"),
        (lambda: solve_batch(BatchRequest(num_devices=8, data_parallel=4)), LayoutError, "which gives 8"),
        (
            lambda: solve_batch(BatchRequest(global_batch_size=9, micro_batch_size=2, data_parallel=2)),
            WorkloadError,
            "must be a multiple of micro_batch_size=2 .* try 8 or 12",
        ),
        (
            lambda: solve_batch(
                BatchRequest(global_batch_size=9, micro_batch_size=2, data_parallel=2, num_microbatches=2)
            ),
            WorkloadError,
            "global_batch_size=9 must be .* try 8",
        ),
        (lambda: estimate_budget(1e9, 0), WorkloadError, "train_tokens=0"),
    ],
)
def test_bad_numbers_are_refused(call: object, error: type[ShapewrightError], words: str) -> None:
    """Each error states the wrong value and the allowed ones."""
    assert callable(call)
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("arguments", "shown", "explained"),
    [
        (["params", "llama-3-8b"], "8,030,261,248 parameters", "L*(3*h*f)"),
        (["flops", "gpt3-175b", "--train-tokens", "300b", "--gpus", "1024", "--tflops", "140"], "Chinchilla", "6 P T"),
        (["batch", "--global-batch", "2048", "--gpus", "512", "--tp", "8", "--pp", "4"], "bubble", "(p - 1) / (v m"),
    ],
)
def test_commands_explain_themselves(
    arguments: list[str], shown: str, explained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers without --explain, and their formulas with it; JSON has a schema version."""
    code, short, err = run(arguments, capsys)
    _, long, _ = run([*arguments, "--explain"], capsys)
    _, out, _ = run([*arguments, "--json"], capsys)

    assert (code, err) == (0, "")
    assert shown in short
    assert explained not in short
    assert explained in long
    assert json.loads(out)["schema_version"] == 1


@pytest.mark.parametrize("command", ["params", "flops"])
def test_notes_of_reading_a_config_are_shown(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of a model that is not known come with what was assumed of it, in words as in JSON."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "brandnew", **sizes}), encoding="utf-8")

    _, out, _ = run([command, str(path)], capsys)
    _, as_json, _ = run([command, str(path), "--json"], capsys)

    (note,) = json.loads(as_json)["notes"]
    assert note.startswith("model_type 'brandnew' is not known")
    assert out.splitlines()[-2] == f"note: {note}"


def test_budget_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A share of a device's peak is a rate; the price of an hour gives the cost of the run."""
    rate = ["--device", "h100-sxm-80gb", "--mfu", "0.4", "--usd-per-hour", "2"]
    _, out, _ = run(["flops", "llama-3-8b", "--train-tokens", "15t", "--gpus", "1024", *rate, "--json"], capsys)
    budget = json.loads(out)["budget"]
    assert budget["flops"] == pytest.approx(6 * 8_030_261_248 * 15e12)
    assert budget["training_days"] == pytest.approx(budget["flops"] / (1024 * 0.4 * 989.4e12) / 86400, rel=1e-3)
    assert budget["usd"] == pytest.approx(budget["training_days"] * 24 * 1024 * 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["flops", "gpt2", "--gpus", "4"], "need --train-tokens as well"),
        (["flops", "gpt2", "--train-tokens", "many"], "is not a count such as 15t"),
        (["flops", "gpt2", "--train-tokens", "1b", "--mfu", "0.4"], "belong together"),
        (
            ["flops", "gpt2", "--train-tokens", "1b", "--mfu", "40", "--device", "l4"],
            "--mfu=40.0 must be a number above 0",
        ),
        (["flops", "gpt2", "--train-tokens", "1b", "--tflops", "-1"], "--tflops=-1.0 must be a number above 0"),
        (["flops", "gpt2", "--seq-len", "0"], "seq_len=0"),
        (["batch", "--gpus", "0", "--global-batch", "4"], "num_devices=0"),
        (["params"], "a model without a config needs --hidden-size"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run(arguments, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
