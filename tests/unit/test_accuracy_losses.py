"""Tables of losses: errors in nats, differences, order, known and unknown recipes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import run
from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.accuracy.statistics import loss_errors
from shapewright.prediction.loss.law import load_loss_law
from shapewright.prediction.loss.terms import ShapeForLoss

RECIPE = "morph, cosine to 3e-5, dclm"
SHAPES = ((512, 8), (640, 5), (768, 12), (896, 9), (1024, 16), (1152, 12))


def loss_row(width: int, depth: int, **changes: Any) -> dict[str, Any]:
    """One run with the loss that the law of its recipe predicts."""
    row = {
        "source": "morph",
        "schedule": "cosine to 3e-5",
        "data": "dclm",
        "hidden_size": width,
        "num_layers": depth,
        "num_heads": width // 64,
        "num_kv_heads": width // 64,
        "head_dim": 64,
        "intermediate_size": 4 * width,
        "gated_mlp": 1,
        "tokens": 10_000_000_000,
        "batch_tokens": "",
    }
    shape = ShapeForLoss(
        num_parameters=16 * depth * width**2,
        **{name: row[name] for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")},
        intermediate_size=4 * width,
        gated_mlp=True,
    )
    return {**row, "loss": float(load_loss_law(RECIPE).loss_nats(shape, 1e10)), **changes}


def write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the table into a folder, and return the folder."""
    with (folder / "loss_by_shape.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_predicted_losses_have_no_error(tmp_path: Path) -> None:
    """Losses of a known recipe that are as predicted are without error and inside their intervals."""
    (row,) = evaluate_folder(write(tmp_path, [loss_row(*shape) for shape in SHAPES])).rows

    assert (row.table, row.library, row.rows, row.coverage_90) == ("loss_by_shape", "morph", len(SHAPES), 1.0)
    assert row.mean_error_nats == pytest.approx(0.0, abs=1e-9)
    assert row.roofline_mape is None


def test_order_by_hand() -> None:
    """Of three models of one size the pair 0.02 apart is wrong and 0.05 right; 0.005 apart and others do not count."""
    errors = loss_errors(
        predicted=np.array([3.00, 3.01, 3.06, 2.0, 9.0]),
        measured=np.array([3.02, 3.00, 3.05, 2.0, 9.0]),
        group=np.array([0, 0, 0, 0, 1]),
        log_parameters=np.array([0.0, 0.1, 0.14, 3.0, 0.0]),
        log_tokens=np.zeros(5),
    )

    # errors 0.02, 0.01, 0.01, 0, 0; differences 3.00 - 3.02 as 0.01, 0.05 as 0.05, 0.03 as 0.06
    assert errors.mean_nats == pytest.approx(0.04 / 5)
    assert errors.difference_nats == pytest.approx(0.03)
    assert errors.order_fraction == pytest.approx(2 / 3)


def test_level_of_an_unknown_recipe_is_estimated(tmp_path: Path) -> None:
    """Half a nat more by another tokenizer is taken from the rows, and a note says so."""
    rows = [loss_row(*shape) for shape in SHAPES]
    rows = [{**row, "source": "mine", "loss": row["loss"] + 0.5} for row in rows]

    evaluation = evaluate_folder(write(tmp_path, rows))

    assert evaluation.rows[0].mean_error_nats < 0.02
    assert any("'mine, cosine to 3e-5, dclm' are estimated from its own 6 rows" in note for note in evaluation.notes)


def test_too_few_rows_of_an_unknown_recipe_are_skipped(tmp_path: Path) -> None:
    """Two losses tell no level."""
    rows = [loss_row(*shape) for shape in SHAPES] + [loss_row(*shape, source="mine") for shape in SHAPES[:2]]

    evaluation = evaluate_folder(write(tmp_path, rows))

    assert evaluation.skipped["loss_by_shape"] == {
        "mine, cosine to 3e-5, dclm: an unknown recipe with fewer than 3 losses": 2
    }


def test_worse_and_diverged_runs_are_skipped(tmp_path: Path) -> None:
    """Of equal runs the best one counts; one of a wide model that stays above 4.5 nats beside it diverged."""
    worse = loss_row(512, 8)
    rows = [loss_row(*shape) for shape in SHAPES]
    rows += [{**worse, "loss": worse["loss"] + 0.1}, {**worse, "loss": 6.0}]

    evaluation = evaluate_folder(write(tmp_path, rows))

    assert evaluation.rows[0].rows == len(SHAPES)
    assert sum(evaluation.skipped["loss_by_shape"].values()) == 2
    assert evaluation.skipped["loss_by_shape"]["the run diverged"] == 1


def test_losses_are_of_no_device(tmp_path: Path) -> None:
    """Choosing a device leaves nothing to evaluate."""
    with pytest.raises(MeasuredFileError, match="nothing to evaluate"):
        evaluate_folder(write(tmp_path, [loss_row(512, 8)]), devices=["h100-sxm-80gb"])


def test_command_prints_nats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has columns for losses, and the JSON their keys."""
    folder = str(write(tmp_path, [loss_row(*shape) for shape in SHAPES]))

    assert "difference" in run(["accuracy", folder], capsys)[1]
    assert '"mean_error_nats": ' in run(["accuracy", folder, "--json"], capsys)[1]
