"""The bench command on a CPU, with tiny shapes."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import local_measurer
import pytest
from local_measurer import LocalMeasurer

from calibration_files import write_late_calibration
from command_line import run
from shapewright.measure.bench import request, worker
from shapewright.measure.bench.device.backend import Backend
from shapewright.measure.bench.device.open_device import open_backend
from shapewright.measure.bench.worker import WorkerOptions
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import OK


@pytest.fixture
def in_process(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in the current process, which has already imported torch."""

    @contextmanager
    def open_measurer(options: WorkerOptions) -> Iterator[LocalMeasurer]:
        yield LocalMeasurer(backend if options.cpu else open_backend())

    monkeypatch.setattr(request, "open_measurer", open_measurer)


@pytest.mark.usefixtures("in_process")
def test_smoke_suite_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json, stdout is JSON only; rows are stored, and repeating the command continues where it ended."""
    path = str(tmp_path / "s.sqlite")
    arguments = ["bench", "smoke", "--cpu", "--budget", "1s", "--store", path, "--json"]
    code, out, err = run(arguments, capsys)
    first = json.loads(out)
    second = json.loads(run(arguments, capsys)[1])
    shown = json.loads(run(["store", "show", path, "--json"], capsys)[1])

    assert (code, err) == (0, "")
    assert first["device"] == "cpu"
    assert len(first["rows"]) == first["num_measured"] > 0
    assert second["num_known"] == first["num_measured"]
    assert len(shown["rows"]) == first["num_measured"] + second["num_measured"]
    assert {row["status"] for row in shown["rows"]} == {OK}
    code, out, err = run(["store", "verify", path], capsys)
    assert (code, err) == (0, "")
    assert out.startswith(f"{len(shown['rows'])} rows, all sound\nnext: shapewright store export ")


@pytest.mark.usefixtures("in_process")
def test_operations_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The GEMMs of a small model, forward and backward, have repeats, times and predictions."""
    shape = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 32}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    options = ["--micro-batch-size", "2", "--seq-len", "16", "--device", "h100-sxm-80gb", "--budget", "9s",
               "--ci-fraction", "0.5"]  # fmt: skip
    store = ["--store", str(tmp_path / "s.sqlite")]
    code, out, _ = run(
        ["bench", "--shapes-from", str(tmp_path / "config.json"), "--cpu", *options, *store, "--json"], capsys
    )
    rows = {(row["name"], row["layout"]): row for row in json.loads(out)["rows"]}
    up = rows["mlp.up", "NT"]

    assert code == 0
    assert (up["m"], up["n"], up["k"], up["repeats"]) == (32, 256, 64, 2)
    assert up["median_s"] > 0.0 < up["predicted_s"]
    assert rows["norm", ""]["median_s"] > 0.0
    assert {layout for _, layout in rows} >= {"NT", "NN", "TN"}
    assert any(row["sizes"].get("is_backward") for row in rows.values())


@pytest.mark.usefixtures("in_process")
def test_predictions_use_the_given_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A calibration applies to the device of --device, and is ignored if another device was measured."""
    late = str(write_late_calibration(tmp_path / "late.json", 100.0))
    bench = ["bench", "smoke", "--cpu", "--budget", "0.5s", "--store", str(tmp_path / "s.sqlite"), "--json"]
    named = ["--device", "h100_sxm"]

    usual = json.loads(run([*bench, *named], capsys)[1])["rows"]
    own = {row["key"]: row for row in json.loads(run([*bench, *named, "--calibration", late], capsys)[1])["rows"]}
    code, out, err = run([*bench, "--calibration", late], capsys)

    gemms = [row for row in usual if row["kind"] == "gemm"]
    assert gemms
    assert all(own[row["key"]]["predicted_s"] > 5.0 * row["predicted_s"] for row in gemms)
    assert code == 0
    assert all(row["predicted_s"] is None for row in json.loads(out)["rows"])
    assert "--calibration is of h100-sxm-80gb, and cpu was measured: its records are not used" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench"], ["smoke", "--shapes-from"]),
        (["bench", "smok", "--cpu"], ["'smok'", "did you mean 'smoke'"]),
        (["bench", "smoke", "--cpu", "--dtype", "tf32"], ["tf32", "fp32, bf16, fp16"]),
        (["bench", "smoke,layr", "--cpu"], ["'layr'", "did you mean 'layer'"]),
        (["bench", "smoke", "--cpu", "--num-ranks", "2"], ["--num-ranks", "collectives"]),
        (["bench", "smoke", "--cpu", "--kernel-names"], ["--kernel-names", "no effect with --cpu"]),
        (["bench", "smoke", "--cpu", "--dtype", "fp9"], ["fp9", "did you mean"]),
        (["bench", "smoke", "--cpu", "--budget", "soon"], ["soon", "8m"]),
        (["bench", "smoke", "--cpu", "--budget", "-1s"], ["-1s", "8m"]),
        (["bench", "smoke", "--cpu", "--calibration", "none.json"], ["none.json", "'shapewright calibrate' wrote"]),
        (["bench", "smoke", "--cpu", "--seq-len", "8"], ["--seq-len", "no effect"]),
        (["bench", "smoke", "--cpu", "--store", "nowhere/s.sqlite"], ["nowhere/s.sqlite", "existing, writable folder"]),
        (["bench", "--shapes-from", "gpt22", "--cpu"], ["gpt22"]),
        (["store", "show", "nothing.sqlite"], ["no store at nothing.sqlite", "shapewright bench"]),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("in_process")
def test_bad_input_is_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Errors are one line with the value and advice, exit code 2, and create no file."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(arguments, capsys)

    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(word in err for word in words)
    assert list(tmp_path.iterdir()) == []


def test_missing_torch_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without PyTorch the error is one line with the install command, and no store is created."""
    lines = (f"import sys; sys.path[:0] = {sys.path!r}", "sys.modules['torch'] = None",
             "from shapewright.measure.bench.worker import main", "main()")  # fmt: skip
    program = "\n".join(lines)
    (tmp_path / "worker.py").write_text(program, encoding="utf-8")
    monkeypatch.setattr(worker, "COMMAND", (sys.executable, str(tmp_path / "worker.py")))
    monkeypatch.chdir(tmp_path)
    code, out, err = run(["bench", "smoke", "--cpu"], capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'shapewright[bench]'" in err
    assert [path.name for path in tmp_path.iterdir()] == ["worker.py"]


@pytest.mark.usefixtures("in_process")
def test_interrupt_keeps_finished_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the fourth row keeps three rows, reports that, and exits with 130."""
    original, calls = local_measurer.measure_case, builtins.list[None]()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(local_measurer, "measure_case", interrupted)
    path = tmp_path / "s.sqlite"
    code, out, err = run(["bench", "pointwise", "--cpu", "--budget", "2s", "--store", str(path)], capsys)
    with Store(path, read_only=True) as store:
        assert len(store.rows()) == 3

    assert (code, out) == (130, "")
    assert "every finished row" in err
