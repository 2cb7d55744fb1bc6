"""Hostile files are used or refused in one printable line: a short run of each attack, and every input that once broke.

``make fuzz`` runs many more, and adds to the corpus.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from command_line import run as run_command
from fuzz.hostile import ATTACKS, Attack, outcome
from fuzz.measurements import sound_store, true_rows
from shapewright.app.formats.registry import read_job
from shapewright.core.child_process import SOURCE_FOLDER
from shapewright.core.errors import ConfigError, MeasuredFileError, StoreError
from shapewright.measure.store.database import Store
from shapewright.measure.store.merge import rescue_store

pytest.importorskip("yaml", reason="YAML files need the yaml extra")

CORPUS = sorted(path for path in (Path(__file__).parent / "corpus").rglob("*") if path.is_file())
EXAMPLES = {"lines": 25, "bases": 30, "parquet": 25, "csv": 40, "devices": 60, "calibration": 60, "stores": 60}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_files_are_used_or_refused(name: str, tmp_path: Path) -> None:
    """Each attack with seeds that Hypothesis chooses; some files are used, and some refused.

    With HYPOTHESIS_PROFILE=explore ten times as many, and others each time.
    """
    attack = ATTACKS[name]
    path = tmp_path / f"{name}{attack.suffix}"
    seen = set()

    @settings(
        max_examples=EXAMPLES.get(name, 100) * settings.default.max_examples // 100,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.integers(0, 2**32))
    def attack_with(seed: int) -> None:
        path.write_bytes(attack.make(Random(seed)))
        seen.add(outcome(attack, path, seed))

    attack_with()

    assert ("used" if name == "bases" else "refused") in seen


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_inputs_that_broke_something_do_not_any_more(path: Path) -> None:
    """Every input of the corpus."""
    assert outcome(ATTACKS[path.parent.name], path, 0) in ("used", "refused")


def test_a_reader_that_breaks_is_noticed(tmp_path: Path) -> None:
    """A traceback, a wrong answer and a message of several lines are not taken for refusals."""
    path = tmp_path / "x.json"
    path.write_text("{}", encoding="utf-8")

    def fail(error: Exception) -> Attack:
        def use(_path: Path, _chance: Random) -> None:
            raise error

        return replace(ATTACKS["configs"], use=use)

    with pytest.raises(KeyError):
        outcome(fail(KeyError("hidden_size")), path, 0)
    with pytest.raises(AssertionError, match="of 3000 characters"):
        outcome(fail(MeasuredFileError("x" * 3000)), path, 0)
    assert outcome(fail(ConfigError("refused")), path, 0) == "refused"


def test_stores_survive_faults() -> None:
    """A few kills, power losses and full disks, in a process of its own, which forks."""
    script = Path(__file__).with_name("store_faults.py")
    run = subprocess.run(
        [sys.executable, str(script), "--count", "4"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": SOURCE_FOLDER},
    )  # fmt: skip

    assert run.returncode == 0, run.stderr
    assert run.stdout.count("nothing lost") == 3


def test_sound_rows_of_damaged_stores_are_rescued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a hundred damaged stores many rows are copied, and only as they were measured."""
    path, target = tmp_path / "damaged.sqlite", tmp_path / "new.sqlite"
    num_rescued = num_partly = 0
    for seed in range(100):
        path.write_bytes(ATTACKS["stores"].make(Random(seed)))
        target.unlink(missing_ok=True)
        try:
            counts, lost = rescue_store(target, path)
        except StoreError:
            continue
        with Store(target, read_only=True) as store:
            rows = store.rows()
            assert store.verify() == []
        assert all(row == true_rows()[row.key] for row in rows)
        assert counts["added"] == len(rows)
        assert lost or len(rows) == 40
        num_rescued += len(rows)
        num_partly += 0 < len(rows) < 40

    assert num_rescued > 1000
    assert num_partly > 10
    path.write_bytes(sound_store())
    target.unlink(missing_ok=True)
    code, out, _ = run_command(["store", "rescue", str(target), str(path)], capsys)
    assert code == 0
    assert "rows added" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: FSDP\nfsdp_config: many\n", "'many' stands where an object with keys belongs"),
        ("distributed_type: FSDP\na: " + "[" * 60, "nests deeper than 50 levels"),
        ('{"train_batch_size": ' + '{"a":' * 5000, "nests deeper than 50 levels"),
        ('# Add\n#     "x": Arguments(dim=1, 2),\n[model]\nflavor = "x"\n', "not valid Python"),
        ("n_embd: 1\n" * 20_000, "is larger than 128 KiB"),
        ("pretrain_gpt.py --num-layers 9 --hidden-size 64 --window-size none", "a value does not fit its key"),
        ("n_embd: 64\nn_layer: 2\npadding_multiple: 0\n", "a value does not fit its key .*zero"),
    ],
)
def test_broken_files_of_trainers(text: str, words: str, tmp_path: Path) -> None:
    """Values of another type, deep nesting, broken calls in comments and very long files are errors with a reason."""
    path = tmp_path / "job.txt"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=words):
        read_job(path)


def test_variables_of_a_script_do_not_multiply(tmp_path: Path) -> None:
    """A long value that is named many times is refused, instead of growing to gigabytes."""
    path = tmp_path / "train.sh"
    path.write_text(f"A={'1' * 50_000}\npython pretrain.py --num-layers 2 --data {'$A' * 20_000}\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="without end"):
        read_job(path)


def test_blank_lines_take_linear_time(tmp_path: Path) -> None:
    """The format of a file of 100,000 blank lines is found at once; it would take minutes if each began a search."""
    path = tmp_path / "blank.yaml"
    path.write_text("\n" * 100_000 + "n_embd: 8\n", encoding="utf-8")

    assert read_job(path).fields["hidden_size"] == 8
