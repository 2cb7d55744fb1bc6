"""Tracing of files and configs in a child process: limits, and errors in one line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="tracing needs the trace extra (torch)")

from more_models import LIBRARY_FILE

from command_line import run

pytestmark = pytest.mark.oracle

FILE = """
import sys
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 250), nn.Linear(250, 64)

    def forward(self, x, length=None):
        if length is None and self.up(x).sum() > 0:
            return x
        return self.down(torch.relu(self.up(x)))


class Endless(Model):
    def forward(self, x):
        while True:
            pass


class OnDevice(Model):
    def forward(self, x):
        return self.up(x) + torch.zeros(250, device="cuda")


class Large(Model):
    def forward(self, x):
        return self.up(x) + torch.zeros(10**12, device="cpu").sum()


def build():
    return Model()


def pair():
    return nn.Linear(64, 64), "float32[8,64]"


def heavy():
    return nn.Linear(8192, 8192, device="cpu")


def nothing():
    return None


def moved():
    return Model().to("cuda" if torch.cuda.is_available() else "cpu")


def leaves():
    sys.exit(3)


def sharded():
    from torch.distributed.fsdp import fully_shard
    return fully_shard(torch.nn.Linear(8, 8))


def wrapped():
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return FullyShardedDataParallel(torch.nn.Linear(8, 8))


class Detached(Model):
    def forward(self, x):
        return self.up(x).detach()


def fails():
    raise ValueError("no such width")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the file of a user."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(FILE, encoding="utf-8")
    Path("missing.py").write_text("import no_such_module\n", encoding="utf-8")
    Path("arrays.py").write_text("import numpy as np\n\n\ndef build():\n    np.ones(2**42)\n", encoding="utf-8")
    Path("exits.py").write_text("import sys\n\nsys.exit(4)\n", encoding="utf-8")
    Path("wrong.py").write_text("def build(:\n", encoding="utf-8")
    return tmp_path


def predict(*arguments: str) -> list[str]:
    """Arguments of a prediction on an H100."""
    return ["predict", *arguments, "--device", "h100-sxm-80gb"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("missing.py:build", "missing.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("wrong.py:build", "wrong.py cannot be imported: SyntaxError"),
        ("model.py:sharded", "asks for other ranks, and there is no process group; in the builder: torch.distributed."),
        ("model.py:wrapped", "do not run on the meta device; wrap the module with fully_shard (FSDP2)"),
        ("model.py:fails", "ValueError: no such width"),
        ("model.py:nothing", "returned 'NoneType'; it has to return a torch.nn.Module"),
        ("model.py:moved", "the module is moved to a device; a trace runs on the meta device: leave the device out"),
        ("model.py:leaves", "model.py:leaves exits (sys.exit(3)); --traceback shows where"),
        ("exits.py:build", "exits.py exits (sys.exit(4)) when it is imported; put what it runs under if __name__"),
        ("model.py:absent", "model.py has no 'absent'; it has "),
        ("model.py:heavy", "allocates real memory: 'weight' of Linear has [8192, 8192] elements on cpu"),
        ("model.py:Large", "model.py:31: RuntimeError: allocates real memory"),
        ("arrays.py:build", "arrays.py:5: "),
        ("model.py:OnDevice", "model.py:26: "),
        ("model.py:Detached", "there is no backward pass; trace the forward pass alone with --phase prefill"),
        ("model.py:build", "model.py:13: control flow depends on the value of a tensor"),
    ],
)
def test_failures_are_one_line(target: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each failure is one line, with the user's source line if there is one, and exit code 2."""
    code, out, err = run(predict(target, "--inputs", "x=float32[8,64]"), capsys)

    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("folder")
def test_a_traceback_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """The traceback of the user's code follows the line, without frames of this package."""
    code, _, err = run(predict("model.py:fails", "--inputs", "x=float32[8,64]", "--traceback"), capsys)

    assert code == 2
    assert err.splitlines()[1].startswith("Traceback")
    assert 'raise ValueError("no such width")' in err
    assert "torch_trace" not in err


@pytest.mark.usefixtures("folder")
def test_the_traceback_of_a_missing_value_starts_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Control flow on a value is shown from the user's first line, as an exception is."""
    _, _, err = run(predict("model.py:build", "--inputs", "x=float32[8,64]", "--traceback"), capsys)

    assert err.splitlines()[1].startswith("Traceback")
    assert 'model.py", line 13' in err.splitlines()[2]


@pytest.mark.usefixtures("folder")
def test_an_endless_loop_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """After the time limit the child is ended, and the message names the line that ran."""
    # Long enough to import torch on a busy machine.
    code, _, err = run(predict("model.py:Endless", "--inputs", "x=float32[8,64]", "--time-limit", "40"), capsys)

    assert code == 2
    assert "did not finish within 40 s; it was at model.py:2" in err


@pytest.mark.usefixtures("folder")
def test_a_limit_that_ends_before_the_file_runs_is_not_its_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """A limit too short to import PyTorch says so, instead of naming no line."""
    code, _, err = run(predict("model.py:build", "--inputs", "x=float32[8,64]", "--time-limit", "0.01"), capsys)

    assert code == 2
    assert "within 0.01 s, in which PyTorch was not imported yet" in err


@pytest.mark.usefixtures("folder")
def test_a_config_that_takes_too_long_is_advised_a_shorter_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    """A model of transformers has no endless loop to look for, but may run token by token."""
    Path("config.json").write_text(json.dumps({"model_type": "rwkv"}), encoding="utf-8")
    given = ["config.json", "--trace", "--micro-batch-size", "1", "--seq-len", "512", "--time-limit", "0.01"]
    code, _, err = run(predict(*given), capsys)

    assert code == 2
    assert "give a shorter --seq-len, or allow more with --time-limit" in err


@pytest.mark.usefixtures("folder")
def test_samples_are_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows without a size of tokens are samples, in rates and as a measured rate."""
    given = ["model.py:build", "--inputs", "x=float32[8,64]", "--value", "model.py:13=0", "--device", "h100-sxm-80gb"]
    _, out, _ = run(["predict", *given], capsys)
    assert " samples/s " in out
    assert " tokens/s " not in out

    code, out, _ = run(["mfu", *given, "--images-per-s", "80", "--json"], capsys)
    assert code == 0
    assert json.loads(out)["measured_time_s"] == pytest.approx(8 / 80)


@pytest.mark.usefixtures("folder")
def test_numbers_and_values_decide_control_flow(capsys: pytest.CaptureFixture[str]) -> None:
    """A number that is passed in, or the value that is given for a line, lets the module run."""
    for more in (
        ["--inputs", "x=float32[8,64], length=8"],
        ["--inputs", "x=float32[8,64]", "--value", "model.py:13=0"],
    ):
        code, out, err = run(predict("model.py:build", *more, "--json"), capsys)
        answer = json.loads(out)

        assert (code, err) == (0, "")
        assert "down.wgrad" in {one["name"] for one in answer["operations"]}
        assert answer["trace"]["num_parameters"] == 64 * 250 + 250 + 250 * 64 + 64


@pytest.mark.usefixtures("folder")
def test_the_next_command_keeps_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """A traced module is not searched: its memory comes after its check, with the options that trace it."""
    inputs = ["--inputs", "x=float32[8,64]", "--value", "model.py:13=0", "--dtype", "bf16"]
    _, out, _ = run(["check", "model.py:build", *inputs, "--device", "h100-sxm-80gb"], capsys)
    words = shlex.split(out.splitlines()[-1])

    _, out, _ = run(["report", "model.py:pair", "--device", "h100-sxm-80gb", "-o", "review.html"], capsys)

    assert out.splitlines()[-1].startswith("next: shapewright serve model.py:pair ")
    assert words[:4] == ["next:", "shapewright", "memory", "model.py:build"]
    assert sorted(words[4:]) == sorted([*inputs, "--device", "h100-sxm-80gb"])


def test_kernels_of_libraries_need_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scans, convolutions and flash attention of libraries are one operation each, forward and backward."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(LIBRARY_FILE, encoding="utf-8")
    inputs = ["--inputs", "x=bfloat16[2,32,64]", "--dtype", "bf16", "--json"]
    code, out, err = run(predict("kernels.py:Block", *inputs), capsys)
    answer = json.loads(out)
    kinds = {one["kind"] for one in answer["operations"]}

    assert (code, err) == (0, "")
    assert {"scan", "convolution", "attention"} <= kinds
    names = {one["name"] for one in answer["operations"]}
    kernels = {"causal_conv1d", "mamba", "gated_delta_net", "scaled_dot_product_attention"}
    assert {f"{one}{end}" for one in kernels for end in ("", ".backward")} <= names
    assert answer["trace"]["num_tokens"] == 2 * 32
    for words in ("no measured kernel of mamba scans", "no measured gradient of scans"):
        assert any(words in line for line in answer["warnings"])


def test_configs_are_built_and_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--trace builds the model of a config with transformers; code that the config names is never run."""
    pytest.importorskip("transformers", reason="tracing configs needs the trace extra (transformers)")
    config = {
        "model_type": "rwkv", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 64,
        "attention_hidden_size": 64, "auto_map": {"AutoModelForCausalLM": "evil.Model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')\n", encoding="utf-8")
    arguments = [str(tmp_path), "--trace", "--micro-batch-size", "1", "--seq-len", "16", "--json"]
    code, out, err = run(predict(*arguments), capsys)
    answer = json.loads(out)

    assert (code, err) == (0, "")
    assert answer["trace"]["module_type"] == "RwkvForCausalLM"
    assert any("built by transformers" in note for note in answer["warnings"])
