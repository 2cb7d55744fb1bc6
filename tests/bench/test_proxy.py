"""Proxy runs: reading their file, training, resuming, and what is stored when the process is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the bench extra")

import shapewright
from shapewright.core.errors import BenchError, ConfigError
from shapewright.measure.bench.device.open_device import open_backend
from shapewright.measure.proxy.run import FINISHED, UNFINISHED, ProxyOutcome, ProxyRequest, train_proxies
from shapewright.measure.proxy.runs import ProxyRecipe, make_spec, read_runs
from shapewright.measure.proxy.text import ByteText, read_text
from shapewright.measure.proxy.train import Trainer, learning_rate_factor, make_decoder, make_optimizer
from shapewright.measure.store.database import Store
from shapewright.models.parameters import count_parameters

SMALL = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64, "seq_len": 16, "batch_tokens": 128,
    "train_tokens": 1280,
}  # fmt: skip
NEVER = float("inf")


@pytest.fixture
def text() -> ByteText:
    """Text whose next byte is easy to guess."""
    return ByteText(np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 400, dtype=np.uint8))


def train(store: Path, text: ByteText, *specs: dict[str, Any], **options: Any) -> ProxyOutcome:
    """Train models on the CPU."""
    request = ProxyRequest(specs=[make_spec(spec) for spec in specs], text=text, cpu=True, **options)
    return train_proxies(request, store)


def losses(outcome: ProxyOutcome) -> list[list[float]]:
    """Recorded losses, model by model."""
    return [[row.figures["loss_nats"] for row in result.rows] for result in outcome.results]


def test_quartiles_lie_between_the_steps(text: ByteText, tmp_path: Path) -> None:
    """Of two steps between two losses, too, a quartile is a quarter of the way from one to the other."""
    (result,) = train(tmp_path / "s.sqlite", text, SMALL).results
    for row in result.rows:
        assert row.num_samples == 2
        assert row.q1_s == pytest.approx(0.75 * row.min_s + 0.25 * row.max_s)
        assert row.q3_s == pytest.approx(0.25 * row.min_s + 0.75 * row.max_s)


def test_loss_falls_from_that_of_a_uniform_guess(text: ByteText, tmp_path: Path) -> None:
    """An untied model starts at ln 256 and learns a repeated sentence."""
    first: list[float] = []
    outcome = train(
        tmp_path / "s.sqlite",
        text,
        SMALL | {"train_tokens": 12_800, "learning_rate": 2e-3},
        on_step=lambda _spec, _seed, step: first.append(step.train_loss_nats),
    )

    assert first[0] == pytest.approx(np.log(256.0))
    (found,) = losses(outcome)
    assert len(found) == 5
    assert found[-1] < 0.5 * first[0]
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_kv_heads": 1, "tied_embeddings": True},
        {"head_dim": 16, "gated_mlp": False, "activation": "gelu", "norm": "layernorm", "norm_bias": True},
        {"position_embedding": "learned", "max_position_embeddings": 64, "fused_qkv": False, "qkv_bias": True},
        {"embedding_size": 16, "mlp_bias": True, "qk_norm": "per-head"},
    ],
)
def test_parameters_are_as_counted(fields: dict[str, Any]) -> None:
    """The trained model has exactly the parameters that count_parameters reports."""
    spec = make_spec(SMALL | fields)

    weights = make_decoder(spec, 0, torch.device("cpu")).parameters()

    assert sum(weight.numel() for weight in weights) == count_parameters(spec.config).total


def test_stopped_run_resumes_with_the_same_losses(text: ByteText, tmp_path: Path) -> None:
    """A run that is stopped after each few steps records the losses of an uninterrupted one, bit by bit."""
    spec, backend = make_spec(SMALL), open_backend(cpu=True)

    def make() -> Trainer:
        return Trainer(
            spec, seed=3, text=text, backend=backend, dtype="fp32", checkpoint=tmp_path / "state.npz"
        )  # fmt: skip

    whole = [record.loss_nats for record in make().train(lambda: True, lambda _step: None)]
    (tmp_path / "state.npz").unlink()
    pieces: list[float] = []
    for _ in range(4):
        left = iter((True, True, True))
        pieces += [record.loss_nats for record in make().train(lambda: next(left, False), lambda _step: None)]  # noqa: B023

    assert pieces == whole
    assert make().step == spec.num_steps


def test_seeds_are_reproducible_and_differ(text: ByteText, tmp_path: Path) -> None:
    """The same seed gives the same loss in another store; another seed another one."""
    once = losses(train(tmp_path / "a.sqlite", text, SMALL, num_seeds=2))
    again = losses(train(tmp_path / "b.sqlite", text, SMALL, num_seeds=2))

    assert once == again
    assert once[0] != once[1]


def test_micro_batches_add_up_to_the_batch(text: ByteText, tmp_path: Path) -> None:
    """Gradients of micro-batches, of unequal sizes too, add up to those of the batch."""
    one = losses(train(tmp_path / "a.sqlite", text, SMALL))[0]
    parts = losses(train(tmp_path / "b.sqlite", text, SMALL | {"micro_batch_size": 3}))[0]

    assert parts == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 1, "head_dim": 10}])
@pytest.mark.parametrize("query_block", [1, 6, 16, 64])
def test_blocks_of_attention_equal_the_kernel(query_block: int, fields: dict[str, Any], text: ByteText) -> None:
    """Losses and gradients of a model do not depend on how causal attention is cut into blocks of queries."""
    spec = make_spec(SMALL | fields)
    tokens = torch.from_numpy(text.batch(0, seed=0, batch_size=2, seq_len=16).astype(np.int64))
    found = []
    for block in (0, query_block):
        decoder = make_decoder(spec, 0, torch.device("cpu"))
        decoder.outer["logits"].data.normal_(generator=torch.Generator().manual_seed(1))
        loss = decoder.loss(tokens, replace(decoder.pass_context(), query_block=block))
        loss.backward()
        found.append([loss, *(weight.grad for weight in decoder.parameters())])

    for kernel, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, kernel, rtol=1e-4, atol=1e-5)


def test_finished_runs_are_not_repeated(text: ByteText, tmp_path: Path) -> None:
    """A second call trains only what is new, and the budget ends training with a state to resume from."""
    store = tmp_path / "s.sqlite"
    train(store, text, SMALL)
    steps: list[str] = []
    wider = SMALL | {"hidden_size": 64, "name": "wider"}

    stopped = train(store, text, SMALL, wider, budget_s=1e-9)
    both = train(store, text, SMALL, wider, on_step=lambda spec, _seed, _step: steps.append(spec.name))

    assert [result.state for result in stopped.results] == [FINISHED, UNFINISHED]
    assert [result.state for result in both.results] == [FINISHED, FINISHED]
    assert set(steps) == {"wider"}
    assert not list(tmp_path.glob("s.sqlite.proxy/*.npz"))  # nothing is left to resume


def test_diverged_run_is_stored_as_failed(text: ByteText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite fails its run with advice, and the next run is trained."""
    hot = SMALL | {"learning_rate": 10.0, "hidden_size": 64}
    losses_of = Trainer._token_losses

    def poisoned(trainer: Trainer, tokens: Any) -> Any:
        is_over = trainer.spec.config.hidden_size == 64 and trainer.step > 2
        return losses_of(trainer, tokens) * (float("nan") if is_over else 1.0)

    monkeypatch.setattr(Trainer, "_token_losses", poisoned)
    outcome = train(tmp_path / "s.sqlite", text, hot, SMALL)

    assert [result.state for result in outcome.results] == ["failed", FINISHED]
    assert "lower learning_rate=10" in outcome.results[0].rows[-1].error


def test_killed_process_keeps_recorded_losses(tmp_path: Path) -> None:
    """After kill -9 every recorded loss is in the store, and the same command ends as an uninterrupted run does."""
    (tmp_path / "text.txt").write_bytes(b"pack my box with five dozen liquor jugs. " * 2000)
    (tmp_path / "runs.jsonl").write_text(json.dumps(SMALL | {"train_tokens": 128 * 400}), encoding="utf-8")
    command = [
        sys.executable, "-m", "shapewright", "proxy", "runs.jsonl", "--text", "text.txt", "--cpu", "--json", "--store",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(shapewright.__file__).parents[1])}
    whole = subprocess.run([*command, "whole.sqlite"], cwd=tmp_path, env=env, capture_output=True, check=True)

    process = subprocess.Popen(
        [*command, "killed.sqlite"], cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120.0
    while not (kept := _stored_losses(tmp_path / "killed.sqlite")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = _stored_losses(tmp_path / "killed.sqlite")
    resumed = subprocess.run([*command, "killed.sqlite"], cwd=tmp_path, env=env, capture_output=True, check=True)

    assert kept
    assert _stored_losses(tmp_path / "killed.sqlite")[: len(kept)] == kept
    assert _stored_losses(tmp_path / "killed.sqlite") == _stored_losses(tmp_path / "whole.sqlite")
    ends = [json.loads(found.stdout)["runs"][0] for found in (whole, resumed)]
    assert ends[0]["loss_nats"] == ends[1]["loss_nats"]
    assert ends[0]["state"] == "finished"


def _stored_losses(path: Path) -> list[float]:
    if not path.exists():
        return []
    with Store(path) as store:
        return [row.figures["loss_nats"] for row in store.rows()]


def test_learning_rate_follows_width_and_schedule() -> None:
    """The rate of a matrix is inverse to its fan-in, its decay per step is not, and the cosine ends at its fraction."""
    recipe = ProxyRecipe(learning_rate=1e-3, weight_decay=0.1)
    groups = make_optimizer(make_decoder(make_spec(SMALL), 0, torch.device("cpu")), recipe).param_groups

    assert sorted(group["scale"] for group in groups) == [1.0, 4.0, 8.0]  # vectors; fan-in 64 and 32
    assert {round(group["scale"] * group["weight_decay"], 12) for group in groups if group["scale"] > 1.0} == {0.1}
    factors = [learning_rate_factor(step, 100, recipe) for step in range(101)]
    assert max(factors) == factors[5] == 1.0
    assert factors[100] == pytest.approx(recipe.final_fraction)


def test_batches_cover_the_text_once_per_epoch() -> None:
    """An epoch visits each window once; held-out windows are never trained on; shapes see the same text."""
    numbers = ByteText(np.random.default_rng(0).integers(0, 256, 60_000).astype(np.uint8))
    count = numbers.num_windows(32)
    epoch = numbers.batch(0, seed=0, batch_size=count, seq_len=32)
    held_out = numbers.held_out(10**9, 32)

    assert len({bytes(window) for window in epoch}) == count
    assert not {bytes(window) for window in epoch} & {bytes(window) for window in held_out}
    assert 0.01 < len(held_out) / count < 0.05
    assert not np.array_equal(epoch, numbers.batch(0, seed=1, batch_size=count, seq_len=32))
    assert not np.array_equal(epoch, numbers.batch(1, seed=0, batch_size=count, seq_len=32))


def test_runs_file_forms(tmp_path: Path) -> None:
    """A csv and a jsonl file with the same columns are the same runs; configs keep what is not changed."""
    (tmp_path / "r.csv").write_text(
        "name,hidden_size,num_layers,num_heads,tied_embeddings,learning_rate\na,32,2,4,true,\n"
    )
    (tmp_path / "r.jsonl").write_text(
        '{"name": "a", "hidden_size": 32, "num_layers": 2, "num_heads": 4, "tied_embeddings": true}\n'
    )
    assert read_runs(tmp_path / "r.csv") == read_runs(tmp_path / "r.jsonl")

    assert make_spec(SMALL | {"train_tokens": "20k"}) == make_spec(SMALL | {"train_tokens": 20_000})
    (spec,) = [make_spec({"config": "llama-3.2-1b", "hidden_size": 128, "num_layers": 4, "head_dim": 16})]
    assert (spec.config.num_kv_heads, spec.config.vocab_size, spec.config.gated_mlp) == (8, 256, True)
    assert spec.train_tokens == pytest.approx(20 * spec.num_parameters, rel=0.01)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no runs"),
        ("hidden_size,num_layers,num_heads\n", "has no runs"),
        ("hidden_size,num_layers\n64,2\n", "missing: num_heads"),
        ("hiden_size,num_layers,num_heads\n64,2,4\n", "did you mean 'hidden_size'"),
        ("hidden_size,num_layers,num_heads\n64,2\n", "another number"),
        ("hidden_size,num_layers,num_heads\n64,2,5\n", "line 2"),
        ("hidden_size,num_layers,num_heads,learning_rate\n64,2,4,nan\n", "learning_rate=nan"),
        ("hidden_size,num_layers,num_heads,train_tokens\n64,2,4,-5\n", "train_tokens=-5"),
        ("hidden_size,num_layers,num_heads,train_tokens,tokens_per_parameter\n64,2,4,5,5\n", "give one of them"),
        ("hidden_size,num_layers,num_heads,batch_tokens\n64,2,4,1000\n", "try 1024"),
        ("hidden_size,num_layers,num_heads\n64,2,4\n64,2,4\n", "are the same"),
    ],
)
def test_bad_runs_are_refused(content: str, message: str, tmp_path: Path) -> None:
    """A malformed file of runs is one error that names the problem."""
    path = tmp_path / "runs.csv"
    path.write_text(content, encoding="utf-8")

    with pytest.raises((BenchError, ConfigError), match=message):
        read_runs(path)


def test_bad_text_and_models_are_refused(text: ByteText, tmp_path: Path) -> None:
    """Missing, empty and short texts, and models that the trainer lacks, are refused before training."""
    (tmp_path / "empty.txt").touch()
    with pytest.raises(BenchError, match="the text is empty"):
        read_text([tmp_path / "empty.txt"])
    with pytest.raises(BenchError, match="cannot read text"):
        read_text([tmp_path / "missing.txt"])
    with pytest.raises(BenchError, match="too few for windows"):
        train(tmp_path / "s.sqlite", ByteText(np.zeros(50, np.uint8)), SMALL)
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16}
    with pytest.raises(BenchError, match="num_experts=4"):
        train(tmp_path / "s.sqlite", text, SMALL, SMALL | experts)
    assert not (tmp_path / "s.sqlite").exists()


def test_damaged_checkpoint_is_refused(text: ByteText, tmp_path: Path) -> None:
    """An unreadable checkpoint is an error with advice, never a silent restart."""
    path = tmp_path / "state.npz"
    path.write_bytes(b"no archive")

    with pytest.raises(BenchError, match="damaged"):
        Trainer(make_spec(SMALL), seed=0, text=text, backend=open_backend(cpu=True), dtype="fp32", checkpoint=path)


def test_checkpoint_with_a_damaged_part_is_refused(text: ByteText, tmp_path: Path) -> None:
    """Cut files, flipped bits, and arrays of another type, shape or range are all found before training goes on."""
    path = tmp_path / "state.npz"

    def trainer() -> Trainer:
        return Trainer(
            make_spec(SMALL), seed=0, text=text, backend=open_backend(cpu=True), dtype="fp32", checkpoint=path
        )

    list(trainer().train(iter((True, True, False)).__next__, lambda _step: None))
    sound = path.read_bytes()
    assert trainer().step == 2
    with np.load(path) as stored:
        arrays = dict(stored)
    flipped = bytearray(sound)
    flipped[len(sound) // 2] ^= 1
    for content in (sound[:-100], sound[: len(sound) // 2], bytes(flipped), b""):
        path.write_bytes(content)
        with pytest.raises(BenchError, match="is damaged"):
            trainer()
    for name, value in (
        ("step", np.array(-1)), ("step", np.array(11)), ("step", np.array([1, 2])), ("step", np.array(2.0)),
        ("losses", np.array("x")), ("losses", np.array(1.0)), ("steps_s", np.array([1.0])), ("elapsed_s", np.array(1j)),
        ("0.weight", arrays["0.weight"][:1]), ("1.exp_avg", arrays["1.exp_avg"].astype(np.float64)),
    ):  # fmt: skip
        np.savez(path, **(arrays | {name: value}))  # type: ignore[arg-type]
        with pytest.raises(BenchError, match="is damaged"):
            trainer()


def test_budget_that_ends_before_the_first_step(text: ByteText, tmp_path: Path) -> None:
    """A run without a step has no state to write, and starts at its first step next time."""
    path = tmp_path / "state.npz"
    trainer = Trainer(
        make_spec(SMALL), seed=0, text=text, backend=open_backend(cpu=True), dtype="fp32", checkpoint=path
    )

    assert list(trainer.train(lambda: False, lambda _step: None)) == []
    assert not path.exists()


@pytest.mark.parametrize("tokens", ["1" + "0" * 400, "1e300", "NaN", "Infinity", "-1"])
@pytest.mark.parametrize("column", ["train_tokens", "tokens_per_parameter"])
def test_tokens_out_of_range(column: str, tokens: str, tmp_path: Path) -> None:
    """Numbers of tokens that no training reaches are refused, before their steps are counted."""
    path = tmp_path / "runs.jsonl"
    path.write_text(f'{{"hidden_size": 32, "num_layers": 1, "num_heads": 2, "{column}": {tokens}}}\n', encoding="utf-8")

    with pytest.raises(BenchError, match=rf"line 1: {column}=.* must be a number above 0"):
        read_runs(path)


def test_runs_and_text_are_regular_files(tmp_path: Path) -> None:
    """A pipe as runs or text is refused instead of waited for, an endless device too; long fields of csv are errors."""
    pipe, long = tmp_path / "pipe.csv", tmp_path / "long.csv"
    os.mkfifo(pipe)
    long.write_text(f"hidden_size,num_layers\n{'x' * 140_000},2\n", encoding="utf-8")

    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(BenchError, match="not a regular file"):
            read_runs(path)
        with pytest.raises(BenchError, match="not a regular file"):
            read_text([path])
    with pytest.raises(BenchError, match="line 2 is not csv"):
        read_runs(long)
