"""The study's text agrees with its stored numbers, and those with current predictions."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "write_study.py"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("write_study", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["write_study.py", "write_time_to_loss.py"])
def test_pages_equal_the_stored_numbers(name: str) -> None:
    """The page equals the one generated from its JSON, character by character."""
    outcome = subprocess.run(
        [sys.executable, SCRIPT.with_name(name), "--check"], capture_output=True, text=True, check=False
    )

    assert (outcome.returncode, outcome.stderr) == (0, "")


@pytest.mark.parametrize(("model", "device"), [("gpt2", "a100-sxm-80gb"), ("llama-2-7b", "h100-sxm-80gb")])
def test_stored_rows_are_still_true(study: ModuleType, model: str, device: str) -> None:
    """Two rows predicted again are close to the stored ones; otherwise the study is stale."""
    rows = json.loads(study.STORED.read_text(encoding="utf-8"))["rows"]
    stored = next(row for row in rows if (row["model"], row["device"]) == (model, device))
    fresh = study.study_one(model, device)

    assert fresh["mfu"] == pytest.approx(stored["mfu"], rel=0.1)
    assert fresh["fastest"]["speedup"] == pytest.approx(stored["fastest"]["speedup"], abs=0.06)
    assert fresh["fastest"]["net"] == pytest.approx(stored["fastest"]["net"], abs=0.1)


def test_study_covers_its_models_and_devices(study: ModuleType) -> None:
    """Twenty models on four devices, each once."""
    rows = json.loads(study.STORED.read_text(encoding="utf-8"))["rows"]
    pairs = [(row["model"], row["device"]) for row in rows]

    assert pairs == [(model, device) for model in study.MODELS for device in study.DEVICES]
    assert (len(study.MODELS), len(study.DEVICES)) == (20, 4)


def test_measured_times_to_a_loss_are_in_order() -> None:
    """Of the Gemstones pairs, nine in ten are in the measured order, with measured steps and with predicted ones."""
    pairs = json.loads((ROOT / "docs" / "time-to-loss.json").read_text(encoding="utf-8"))["pairs"]
    for label in ("predicted_tokens_ratio", "predicted_ratio"):
        right = sum((pair[label] > 1.0) == (pair["measured_ratio"] > 1.0) for pair in pairs)
        assert right >= 0.9 * len(pairs)
