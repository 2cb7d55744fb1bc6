"""A user's own losses, from stores and tables: what is read, and what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import run
from shapewright.core.errors import CalibrationError, MeasuredFileError
from shapewright.measure.fit.loss_rows import read_own_losses
from shapewright.measure.fit.loss_runs import calibrate_losses
from shapewright.measure.store.database import Store
from shapewright.measure.store.export import export_store
from shapewright.measure.store.record import OK, Case, Row, Run, row_facts
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.loss.effect import describe_extrapolation, is_far_outside
from shapewright.prediction.loss.law import LossLaw, law_file_content, load_loss_law, read_loss_law, using_loss_law
from shapewright.prediction.loss.terms import ShapeForLoss
from shapewright.prediction.model_runs import proxy_run
from shapewright.workload.workload import Workload

RUN = Run(
    run_id="r", started_utc="", command="", suite="proxy", device="cpu", device_facts={}, driver="", runtime="",
    torch_version="", library="torch 2.9.0", shapewright_version="0",
)  # fmt: skip


def loss_of(num_layers: int, loss_nats: float, *, seed: int = 0, done: float = 1.0, **recipe: Any) -> Row:
    """A stored loss of a model with some layers."""
    config = TransformerConfig(hidden_size=64, num_layers=num_layers, num_heads=4, vocab_size=256, gated_mlp=True)
    training = {
        "batch_tokens": 128, "learning_rate": 0.01, "warmup_fraction": 0.1, "final_fraction": 0.1, "weight_decay": 0.1,
        "text": "abc", "train_tokens": 1280, "trained_tokens": round(done * 1280), **recipe,
    }  # fmt: skip
    operation = proxy_run(config, Workload(seq_len=64, micro_batch_size=2, dtype="fp32"), training)
    facts = row_facts(Case(operation=operation, repetition=seed), RUN)
    return Row(**facts, measured_utc="", status=OK, median_s=1.0, figures={"loss_nats": loss_nats})


def with_coefficients(law: LossLaw, name: str, changes: dict[str, float]) -> LossLaw:
    """The law of another recipe, with some other coefficients."""
    return replace(law, name=name, coefficients={**law.coefficients, **changes})


def store_of(tmp_path: Path, *rows: Row) -> Path:
    """A store with some rows."""
    with Store(tmp_path / "losses.sqlite") as store:
        store.add_all([RUN], rows)
    return tmp_path / "losses.sqlite"


def test_store_and_its_export_give_the_same_rows(tmp_path: Path) -> None:
    """Final losses, mean over seeds, with shapes and tokens; the exported table holds the same."""
    rows = [loss_of(1, 3.0), loss_of(2, 2.5), loss_of(2, 2.7, seed=1), loss_of(2, 9.0, done=0.2), loss_of(3, 2.4)]
    path = store_of(tmp_path, *rows)
    with Store(path) as store:
        export_store(store, tmp_path, format_name="csv")
    skipped = Counter[str]()

    read = read_own_losses(path, skipped)
    again = read_own_losses(tmp_path / "loss_by_shape.csv", skipped)

    assert sorted(read.loss_nats) == pytest.approx([2.4, 2.6, 3.0])
    assert sorted(read.shape.num_layers) == [1, 2, 3]
    assert set(read.tokens) == {1280.0}
    assert sorted(again.loss_nats) == pytest.approx(sorted(read.loss_nats))
    assert set(again.recipe) == set(read.recipe)
    assert not skipped


def test_few_and_mixed_losses_are_refused(tmp_path: Path) -> None:
    """Fewer than three losses, and losses of several recipes, are one clear error."""
    with pytest.raises(MeasuredFileError, match=r"has 2 final losses.*need 3"):
        read_own_losses(store_of(tmp_path, loss_of(1, 3.0), loss_of(2, 2.5)), Counter())
    with pytest.raises(MeasuredFileError, match="losses of 2 recipes"):
        read_own_losses(store_of(tmp_path, loss_of(3, 3.0), loss_of(4, 2.0, text="other")), Counter())


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    """Rows without a number are refused, and tables in bits per byte with the way to convert them."""
    header = (
        "source,schedule,data,hidden_size,num_layers,num_heads,num_kv_heads,head_dim,intermediate_size,gated_mlp,tokens,"
        "batch_tokens"
    )
    rows = "".join(f"me,cosine,books,64,{layers},4,4,16,256,1,1e6,,{{}}\n" for layers in (1, 2, 3))
    path = tmp_path / "mine.csv"
    path.write_text(f"{header},loss\n{rows.format('nan', 2.5, 2.4)}", encoding="utf-8")
    with pytest.raises(MeasuredFileError, match=r"has 1 unusable rows: loss is not a number above 0 \(such as nan\)"):
        read_own_losses(path, Counter())

    path.write_text(f"{header},bits_per_byte\n{rows.format(1, 2, 3)}", encoding="utf-8")
    with pytest.raises(MeasuredFileError, match=r"lacks column 'loss' .*bits per byte x ln 2 x bytes per token"):
        read_own_losses(path, Counter())


@pytest.mark.parametrize(
    ("data", "loss", "message"),
    [
        ("books", "1.1", "bits per byte x ln 2 x bytes per token"),
        ("books", "40", "for a perplexity, give its logarithm"),
        ("bytes of books", "1.1", ""),
    ],
)
def test_other_units_are_refused(data: str, loss: str, message: str, tmp_path: Path) -> None:
    """Bits per byte and perplexities are known by their size; losses per byte are accepted where the data say so."""
    path = tmp_path / "mine.csv"
    rows = [f"me,cosine,{data},{64 * n},{n},{n},{n},64,{256 * n},1,1e9,131072,{loss}\n" for n in (6, 8, 10)]
    path.write_text(HEADER + "".join(rows), encoding="utf-8")
    if not message:
        assert len(calibrate_losses(path).rows) == 3
        return
    with pytest.raises(MeasuredFileError, match=message):
        calibrate_losses(path)


def test_published_proxy_losses_are_fitted() -> None:
    """Models of one width and depth that differ in heads alone scatter, so that a fit to them succeeds."""
    table = Path(__file__).parents[2] / "benchmarks" / "proxy_losses_xeon_2026-11-23.csv"

    assert max(map(abs, calibrate_losses(table).left_out_errors_nats)) < 0.2


@pytest.mark.parametrize("name", ["proxy_losses_xeon_2026-11-23.csv", "proxy_losses_1m_2026-11-30.csv"])
def test_small_models_never_promise_less_than_no_loss(name: str) -> None:
    """Small models alone would put the floor below 0, and so the loss of a model of 3 B; GPT-2 has 0.65 nats a byte."""
    law = calibrate_losses(Path(__file__).parents[2] / "benchmarks" / name).law
    losses = [
        float(law.loss_nats(ShapeForLoss.of(read_model(model).config), tokens))
        for model, tokens in (("gpt2", 1e10), ("llama-3.2-3b", 3e11), ("llama-3-70b", 1.5e13))
    ]

    assert law.coefficients["floor_nats"] == pytest.approx(0.0, abs=1e-9)
    assert losses[0] == pytest.approx(0.6, abs=0.2)
    assert 0.0 < losses[2] < losses[1] < losses[0]


HEADER = (
    "source,schedule,data,hidden_size,num_layers,num_heads,num_kv_heads,head_dim,intermediate_size,gated_mlp,tokens,"
    "batch_tokens,loss\n"
)


def table_of(path: Path, *shapes: tuple[int, int], floor_nats: float) -> Path:
    """A table of losses that follow the reference law with another floor exactly."""
    law = load_loss_law()
    other = with_coefficients(law, "other", {"floor_nats": floor_nats})
    lines = []
    for width, layers in shapes:
        config = TransformerConfig(
            hidden_size=width, num_layers=layers, num_heads=width // 64, vocab_size=256, norm_affine=False
        )
        for tokens in (1e9, 4e9):
            loss_nats = float(other.loss_nats(ShapeForLoss.of(config), tokens))
            heads = f"{width // 64},{width // 64},64,{4 * width},0"
            lines.append(f"me,cosine,books,{width},{layers},{heads},{tokens:.0f},,{loss_nats:.8f}\n")
    path.write_text(HEADER + "".join(lines), encoding="utf-8")
    return path


def test_fit_finds_another_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses of the law with another floor are fitted, left-out models are predicted, and the file restores the law."""
    shapes = ((256, 4), (512, 8), (768, 12), (512, 16), (1024, 8))
    path = table_of(tmp_path / "mine.csv", *shapes, floor_nats=0.3)
    code, out, err = run(["calibrate", "--losses", str(path), "-o", str(tmp_path / "law.json"), "--json"], capsys)
    found = json.loads(out)
    law = read_loss_law(tmp_path / "law.json")

    assert (code, err) == (0, "")
    assert found["num_losses"] == 10
    assert found["mean_error_nats"] < 0.002
    assert found["left_out_mean_error_nats"] < 0.02
    after = {one["name"]: one for one in found["coefficients"]}
    assert after["curvature"]["after_standard_deviation"] <= after["curvature"]["before_standard_deviation"]
    assert law.coefficients == {name: one["after"] for name, one in after.items()}
    assert law.name == found["recipe"] == "me, cosine, books"
    assert np.array_equal(law.covariance, calibrate_losses(path).law.covariance)


def test_the_range_of_an_own_law_is_that_of_its_runs(tmp_path: Path) -> None:
    """A law of small models notes that a large one is extrapolated, and still decides where the reference does."""
    law = calibrate_losses(table_of(tmp_path / "mine.csv", (256, 4), (512, 8), (768, 12), floor_nats=0.3)).law
    path = tmp_path / "law.json"
    path.write_text(json.dumps(law_file_content(law)), encoding="utf-8")
    config = read_model("gpt3-13b").config

    assert law.parameters_range == pytest.approx((12 * 256**2 * 4, 12 * 768**2 * 12), rel=0.01)
    assert law.tokens_range == (1e9, 4e9)
    with using_loss_law(path):
        notes = describe_extrapolation(config, 1e10)
        assert [note.field for note in notes if note.code == "loss-extrapolated"] == ["num_parameters", "train_tokens"]
        assert not is_far_outside(config, 1e10)


@pytest.mark.parametrize("raised_nats", [0.0, 0.3])
def test_losses_that_contradict_each_other_are_named(
    raised_nats: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger model with a higher loss is named beside the smaller one; losses that follow a law are not."""
    path = table_of(tmp_path / "mine.csv", (256, 4), (512, 8), floor_nats=0.3)
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = lines[3].split(",")
    cells[-1] = f"{float(lines[1].rpartition(',')[2]) + raised_nats:.4f}" if raised_nats else cells[-1]
    path.write_text("\n".join([*lines[:3], ",".join(cells)]), encoding="utf-8")
    code, out, _ = run(["calibrate", "--losses", str(path), "-o", str(tmp_path / "law.json")], capsys)
    notes = [line for line in out.splitlines() if "losses contradict" in line]

    assert code == 0
    assert len(notes) == (1 if raised_nats else 0)
    if notes:
        assert "512 x 8 (25.2 M parameters, 1 B tokens) has" in notes[0]
        assert "the smaller 256 x 4 (3.15 M parameters, 1 B tokens) has" in notes[0]


def law_with(name: str, value: float) -> dict[str, Any]:
    """The reference law with another coefficient."""
    law: dict[str, Any] = law_file_content(load_loss_law())["law"]
    return law | {"coefficients": law["coefficients"] | {name: value}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "shapewright calibration"}, "is not a loss law"),
        ({"schema_version": 99}, "schema version 99"),
        ({"law": {}}, "is malformed"),
        ({"law": law_file_content(load_loss_law())["law"] | {"scatter_nats": -1.0}}, "out of range"),
        ({"law": law_file_content(load_loss_law())["law"] | {"scatter_length": 1e-300}}, "out of range"),
        ({"law": law_file_content(load_loss_law())["law"] | {"scatter_nats": 10**400}}, "is malformed"),
        ({"law": law_file_content(load_loss_law())["law"] | {"tokens_range": ["1", None]}}, "is malformed"),
        ({"law": law_file_content(load_loss_law())["law"] | {"tokens_range": [1.0, math.inf]}}, "out of range"),
        ({"law": law_with("token_exponent", 0.0)}, "out of range"),
        ({"law": law_with("log_capacity_nats", 1e3)}, "out of range"),
        ({"schema_version": "9" * 5000}, r"schema version '9{30,40}\.\.\."),
    ],
)
def test_bad_law_files_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Other files, other versions and damaged laws are errors that say what to do."""
    path = tmp_path / "law.json"
    path.write_text(json.dumps(law_file_content(load_loss_law()) | change), encoding="utf-8")

    with pytest.raises(CalibrationError, match=message):
        read_loss_law(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --store PATH or --losses PATH"),
        (["--store", "a", "--losses", "b"], "give either --store PATH or --losses PATH"),
        (["--losses", "missing.csv"], "missing.csv"),
        (["--losses", "missing.csv", "--device", "cpu"], "--device has no effect with --losses"),
    ],
)
def test_bad_calls_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with advice, exit code 2."""
    code, out, err = run(["calibrate", "-o", str(tmp_path / "law.json"), *arguments], capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_own_law_changes_the_judgement_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--loss-law judges by the file's law until the command ends, and a note names its recipe."""
    own = with_coefficients(load_loss_law(), "my books", {"curvature": 0.5, "log_best_width_per_layer": 6.0})
    path = tmp_path / "law.json"
    path.write_text(json.dumps(law_file_content(own)), encoding="utf-8")
    arguments = [
        "search",
        "gpt2",
        "--device",
        "a100-sxm-80gb",
        "--vary",
        "depth,width",
        "--train-tokens",
        "30b",
        "--json",
    ]

    usual = json.loads(run(arguments, capsys)[1])
    found = json.loads(run([*arguments, "--loss-law", str(path)], capsys)[1])
    again = json.loads(run(arguments, capsys)[1])

    assert any("my books" in note for note in found["notes"])
    assert not any("my books" in note for note in again["notes"])
    assert usual["candidates"] == again["candidates"]
    code, _, err = run([*arguments, "--loss-law", str(tmp_path / "missing.json")], capsys)
    assert code == 2
    assert "missing.json cannot be read" in err
    assert run(["search", "gpt2", "--device", "l40s", "--engine", "ray", "--loss-law", str(path)], capsys)[0] == 2


def test_law_in_use_ends_with_its_block(tmp_path: Path) -> None:
    """using_loss_law applies inside its block only; named recipes stay what they are."""
    own = with_coefficients(load_loss_law(), "mine", {"floor_nats": 0.1})
    path = tmp_path / "law.json"
    path.write_text(json.dumps(law_file_content(own)), encoding="utf-8")

    with using_loss_law(path):
        assert load_loss_law().name == "mine"
        assert load_loss_law("reference").name == "reference"
    assert load_loss_law().name == "reference"
