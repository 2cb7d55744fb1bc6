"""The command line: options, examples, exit codes, standard output and standard error."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import pty
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from calibration_files import H100, write_late_calibration
from command_line import COMMANDS, examples, run
from shapewright.app.report.page import find_browser
from shapewright.core.child_process import SOURCE_FOLDER
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import Case, Row, Run, row_facts
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.model_runs import proxy_run
from shapewright.workload.workload import Workload

SURFACE = Path(__file__).with_name("cli_surface.json")
DEMO = ["gpt3-2.7b", "--device", "a100-sxm-40gb", "--attention", "unfused", "--dtype", "fp16"]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def test_options_are_unchanged() -> None:
    """Commands and options are a promise: who changes them changes cli_surface.json and the changelog too."""
    surface = {
        path: sorted(option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts))
        for path, command in COMMANDS.items()
    }
    assert surface == json.loads(SURFACE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [path for path in COMMANDS if path])
def test_every_command_explains_itself(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help of each command has a description and an example that starts with the command."""
    code, out, err = run([*path.split(), "--help"], capsys)

    assert (code, err) == (0, "")
    assert "Examples:" in out
    assert f"shapewright {path}" in out.partition("Examples:")[2]


def measure_little(folder: Path) -> None:
    """Write two measured GEMMs in both formats that the accuracy command reads."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet tables need the fit extra")
    folder.mkdir()
    rows = {"device": "h100_sxm", "library": "x 1", "kernel": "x", "dtype": "bf16", "m": 4096, "n": 4096, "k": 4096}
    table = {name: [value, value] for name, value in rows.items()} | {"latency_s": [2.1e-4, 2.2e-4]}
    parquet.write_table(importlib.import_module("pyarrow").table(table), folder / "gemm.parquet")
    text = "sweep,gpu,batch,m,n,k,tflops\nmm,a100,1,4096,4096,4096,240.0\nmm,a100,1,8192,8192,8192,260.0\n"
    (folder / "paper_gemm.csv").write_text(text, encoding="utf-8")
    (folder / "mm.out").write_text("Throughput (in TFLOP/s) for 1024x1280x1024: 68.985\n", encoding="utf-8")


def measure_gemms(path: Path) -> None:
    """Write a store with as many GEMMs as a fit needs."""
    pytest.importorskip("scipy", reason="fitting needs the fit extra")
    pytest.importorskip("pandas", reason="fitting needs the fit extra")
    run = Run(
        run_id="r", started_utc="", command="", suite="s", device="h100-sxm-80gb", device_facts={}, driver="",
        runtime="", torch_version="", library="l", shapewright_version="",
    )  # fmt: skip
    cases = [Case(operation=Gemm(name="x", dtype="fp32", m=64, n=64 * n, k=64)) for n in range(1, 10)]
    rows = [Row(**row_facts(case, run), measured_utc="", status="ok", median_s=1e-5) for case in cases]
    with Store(path) as store:
        store.add_all([run], rows)


def store_losses(path: Path) -> None:
    """Write a store with the losses of three proxy models."""
    run = Run(
        run_id="r", started_utc="", command="", suite="proxy", device="cpu", device_facts={}, driver="",
        runtime="", torch_version="", library="l", shapewright_version="",
    )  # fmt: skip
    recipe = {"learning_rate": 0.01, "warmup_fraction": 0.1, "final_fraction": 0.1, "weight_decay": 0.1, "text": "x"}
    training = {**recipe, "batch_tokens": 512, "train_tokens": 1024_000, "trained_tokens": 1024_000}
    rows = []
    for layers, loss_nats in ((1, 1.7), (2, 1.6), (4, 1.5)):
        config = TransformerConfig(hidden_size=64, num_layers=layers, num_heads=4, vocab_size=256)
        case = Case(operation=proxy_run(config, Workload(dtype="fp32"), training))
        figures = {"loss_nats": loss_nats}
        rows.append(Row(**row_facts(case, run), measured_utc="", status="ok", median_s=1e-2, figures=figures))
    with Store(path) as store:
        store.add_all([run], rows)


MY_MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

def build():
    return Model()
"""


@pytest.mark.parametrize("example", examples())
def test_examples_of_help_run(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples of help pages run as printed, given a config.json, a device file and measured tables."""
    monkeypatch.chdir(tmp_path)
    if example.split()[1] in ("bench", "proxy"):
        pytest.importorskip("torch", reason="measuring needs the bench extra")
        if "--cpu" not in example:
            pytest.skip("needs an accelerator")
    if "--pdf" in example and find_browser() is None:
        pytest.skip("needs Chromium, Chrome or Edge")
    if "gemms.sqlite" in example:
        measure_gemms(tmp_path / "gemms.sqlite")
    if example.split()[1] == "serve":
        pytest.importorskip("fastapi", reason="the explorer needs the serve extra")
        monkeypatch.setattr("shapewright.app.explorer.serve.serve", lambda *_arguments, say, **_options: say("served"))
    if example.split()[1] == "mcp":
        pytest.importorskip("mcp", reason="the MCP server needs the mcp extra")
        monkeypatch.setattr("mcp.server.MCPServer.run", lambda *_arguments: print("served"))
    if "--losses proxy.sqlite" in example:
        store_losses(tmp_path / "proxy.sqlite")
    if "measured.sqlite" in example:
        Store(tmp_path / "measured.sqlite").close()
    if "cpu.json" in example:
        write_late_calibration(tmp_path / "cpu.json", 1.0, replace(H100, name="cpu", aliases=()))
    if "./measured" in example:
        measure_little(tmp_path / "measured")
    Path("runs.csv").write_text(
        "hidden_size,num_layers,num_heads,train_tokens,batch_tokens,seq_len\n32,2,4,1280,256,64\n", encoding="utf-8"
    )
    if "my_model.py" in example:
        pytest.importorskip("torch", reason="tracing needs the trace extra")
        Path("my_model.py").write_text(MY_MODEL, encoding="utf-8")
    Path("book.txt").write_text("it was the best of times, it was the worst of times, " * 1000, encoding="utf-8")
    Path("requests.csv").write_text("arrival_s,prompt_len,output_len\n0,500,20\n1,900,30\n", encoding="utf-8")
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 5e6, "args": {"device": 0}}
    embedding = {"name": "aten::embedding", "args": {"Input Dims": [[128256, 4096], [1, 8192]]}}
    trace = {"traceEvents": [kernel, kernel | embedding | {"cat": "cpu_op"}]}
    Path("profile.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    Path("config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    Path("my-gpu.toml").write_text(run(["devices", "template"], capsys)[1], encoding="utf-8")
    table = "device,library,kernel,dtype,m,n,k,latency_us\nh100-sxm-80gb,torch 2.8,gemm,bf16,4096,4096,4096,230\n"
    Path("gemms.csv").write_text(table, encoding="utf-8")
    command, _, standard_input = example.partition(" > ")[0].partition(" < ")
    if standard_input:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(standard_input).read_bytes())))
    words = shlex.split(command)[1:]
    code, out, err = run(words, capsys)

    assert code in {0, 1}
    assert out
    assert all(line.startswith(("wrote ", "note: ", "proxy ")) for line in err.splitlines())


def test_paper_case_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-3 2.7B on an A100: check proposes 20 heads, first among the better shapes."""
    code, out, err = run(["check", *DEMO, "--micro-batch-size", "4", "--seq-len", "2048"], capsys)

    assert (code, err) == (1, "")
    assert "TC103 head-dim-not-aligned" in out
    assert "use num_heads=20" in out
    assert "num_heads 32 -> 20" in out.partition("nearest better shapes")[2].splitlines()[2]


@pytest.mark.parametrize(("fail_on", "expected"), [("info", 1), ("warning", 1), ("error", 0), ("never", 0), (None, 1)])
def test_exit_code_follows_severity(fail_on: str | None, expected: int, capsys: pytest.CaptureFixture[str]) -> None:
    """1 where a finding is at least as severe as --fail-on, and 0 otherwise; here the worst is a warning."""
    arguments = ["check", *DEMO, "--ignore", "TC103,ME101", *(["--fail-on", fail_on] if fail_on else [])]
    code, out, _ = run(arguments, capsys)

    assert "warning: TC101" in out
    assert "error: " not in out
    assert code == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "gpt2", "--device", "h100-sxm-80bg"], ["h100-sxm-80bg", "did you mean 'h100-sxm-80gb'"]),
        (["predict", "gpt22", "--device", "h100-sxm-80gb"], ["gpt22", "'gpt2'"]),
        (["predict", "gpt2"], ["--device", "shapewright devices"]),
        (["predict", "gpt2", "--device", "a100-sxm-40gb", "--dtype", "fp8"], ["fp8", "bf16, fp16", "set dtype"]),
        (["predict", "gpt2", "--device", "cerebras-wse-3"], ["cerebras-wse-3", "bf16", "device file"]),
        (["predict", "gpt2", "--device", "h100-sxm-80gb", "--tp", "5"], ["tensor_parallel=5", "num_heads=12", "try 4"]),
        (["predict", "gpt2", "--device", "h100-sxm-80gb", "--num-heads", "7"], ["num_heads=7", "768", "try"]),
        (["predict", "gpt2", "--device", "h100-sxm-80gb", "--seq-len", "x"], ["--seq-len", "'x'", "predict --help"]),
        (["predict", "gpt2", "--device", "h100-sxm-80gb", "--seq-len", "-1"], ["seq_len=-1", "from 1 to 2**40"]),
        (["predict", "gpt2", "--device", "h100-sxm-80gb", "--seq-len", str(10**18)], [str(10**18), "from 1 to 2**40"]),
        (
            ["predict", "gpt2", "--device", "h100-sxm-80gb", "--hidden-dropout", "nan"],
            ["hidden_dropout=nan", "below 1"],
        ),
        (["predict", "gpt2", "--device", "h100-sxm-80gb", "--explain", "qkv"], ["'qkv'", "attention.qkv"]),
        (["predict", "gpt2", "--device", "h100-sxm-80gb", "--all", "--json"], ["--all", "no effect"]),
        (
            ["predict", "--device", "h100-sxm-80gb"],
            ["--hidden-size, --num-layers, --num-heads, --vocab-size", "config.json"],
        ),
        (["predict", "gpt2", "--device", "./nothing.toml"], ["./nothing.toml", "template"]),
        (["check", "gpt2", "--device", "h100-sxm-80gb", "--ignore", "TC999"], ["TC999", "TC109"]),
        (["check", "gpt2", "--device", "h100-sxm-80gb", "--fix"], ["--fix", "-o FILE"]),
        (["check", "gpt2", "--device", "h100-sxm-80gb", "-o", "x.json"], ["-o", "--fix"]),
        (["check", "gpt2", "--device", "h100-sxm-80gb", "--fix", "-o", "-"], ["-o", "file name"]),
        (["check", "gpt2", "--device", "h100-sxm-80gb", "--json", "--format", "sarif"], ["cannot be combined"]),
        (["rule", "TC1O1"], ["TC1O1"]),
        (["models", "nonesuch"], ["nonesuch", "shapewright models"]),
        (["devices", "show", "rtx"], ["'rtx'", "choose one"]),
        (["chek"], ["no command 'chek'; did you mean 'check'?; see 'shapewright --help'"]),
        (["xyzzy"], ["no command 'xyzzy'; see 'shapewright --help'"]),
        (["devices", "h100-sxm-80gb"], ["'devices show h100-sxm-80gb'"]),
        (["predict", "gpt2", "--device", "h100-sxm-80gb", "--bogus"], ["--bogus", "predict --help"]),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on stderr that names the value and the way out, nothing on stdout, exit code 2."""
    monkeypatch.setenv("PATH", "")  # no nvidia-smi: this machine's GPU is no default
    monkeypatch.delenv("SHAPEWRIGHT_DEVICE", raising=False)
    code, out, err = run(arguments, capsys)

    assert (code, out) == (2, "")
    assert err.startswith("shapewright: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for word in words:
        assert word in err


def test_help_lists_common_options_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Common options come in the first 135 lines of --help-all, before advanced ones; CONFIG has no separate row."""
    _, out, _ = run(["predict", "--help-all"], capsys)
    common, _, finer = out.partition("\nWorkload, advanced:")

    assert common.count("\n") < 135
    assert "--intermediate-size" in common
    assert "--num-experts " in common
    assert "--recompute-modules" in finer
    assert "--lm-head-bias" in finer
    assert "\n  [CONFIG]\n" not in out


def test_json_is_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one JSON object and nothing else, also where there are notes to make."""
    code, out, err = run(
        ["predict", "gpt2", "--device", "mi300x", "--phase", "decode", "--seq-len", "9", "--json"], capsys
    )
    facts = json.loads(out)

    assert (code, err) == (0, "")
    assert any("uncalibrated" in warning for warning in facts["warnings"])
    assert any("seq_len=9 has no effect" in note for note in facts["notes"])


@pytest.mark.parametrize("command", ["devices", "devices show h100-sxm-80gb", "models llama", "rule", "rule TC101"])
def test_lists_come_as_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every list and page has a JSON form with a schema version."""
    code, out, _ = run([*command.split(), "--json"], capsys)

    assert code == 0
    assert json.loads(out)["schema_version"] == 1


def test_bridged_card_names_its_links_beyond_the_bridge(capsys: pytest.CaptureFixture[str]) -> None:
    """A40's pair has A100's protocols, more of them L40S's over PCIe; A100 SXM has its own links and says nothing."""
    bridged, own = (run(["devices", "show", name], capsys)[1] for name in ("a40", "a100-sxm-80gb"))

    assert "collectives of more than 2 in a node, over PCIe, from l40s" in " ".join(bridged.split())
    assert "over PCIe" not in own


def test_records_of_fp32_are_measurements_too(capsys: pytest.CaptureFixture[str]) -> None:
    """P100 has records of fp32 alone; it had been listed as unmeasured."""
    p100, h100 = (run(["devices", "show", name], capsys)[1] for name in ("p100-pcie-16gb", "h100-sxm-80gb"))

    assert "measured: gemm-fp32, pointwise-fp32" in p100
    assert "measured: gemm, moe, attention, collectives, gemm-fp32" in h100


def test_flags_alone_describe_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Four flags are a model; further ones change it, on top of a preset too."""
    shape = ["--hidden-size", "1024", "--num-layers", "2", "--num-heads", "16", "--vocab-size", "32000"]
    alone = json.loads(run(["predict", *shape, "--device", "h100-sxm-80gb", "--json"], capsys)[1])
    on_top = json.loads(run(["predict", "gpt2", "--num-layers", "3", "--device", "h100-sxm-80gb", "--json"], capsys)[1])

    assert (alone["config"]["head_dim"], alone["config"]["num_layers"]) == (64, 2)
    assert (on_top["config"]["hidden_size"], on_top["config"]["num_layers"]) == (768, 3)


def test_user_device_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is a valid device file; its predictions are marked as those of an unmeasured device."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(run(["devices", "template"], capsys)[1], encoding="utf-8")
    code, out, _ = run(["predict", "gpt2", "--device", "./mine.toml", "--json"], capsys)
    facts = json.loads(out)

    assert code == 0
    assert facts["device"]["name"] == "my-device-80gb"
    assert facts["calibration"] == "uncalibrated"


def python(*arguments: str) -> list[str]:
    """Command line of a fresh interpreter that runs the package."""
    return [sys.executable, "-m", "shapewright", *arguments]


def test_pipe_and_no_color() -> None:
    """Into a pipe go 160 columns without one escape sequence; on a terminal NO_COLOR turns colour off."""
    piped = subprocess.run(python("check", *DEMO), capture_output=True, text=True, check=False)
    assert "\x1b" not in piped.stdout
    assert "\x1b[" in on_terminal(["check", *DEMO], {"TERM": "xterm-256color"})
    plain = on_terminal(["check", *DEMO], {"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert not any(f"\x1b[{code}m" in plain for code in (31, 32, 33, 36, "1;31"))


def on_terminal(arguments: list[str], environment: dict[str, str]) -> str:
    """Return what a command prints if its output is a terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(python(*arguments), stdout=follower, env={**os.environ, **environment})
    os.close(follower)
    printed = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux's way of saying that the other end is closed
            break
        if not chunk:
            break
        printed += chunk
    process.wait()
    os.close(leader)
    return printed.decode()


def test_reader_that_goes_away_is_no_error() -> None:
    """A command piped into head ends quietly."""
    process = subprocess.Popen(python("models", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    complaint = process.stderr.read()
    process.stderr.close()

    assert (process.wait(), complaint) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_is_one_line() -> None:
    """A failed write gives a one-line error."""
    with Path("/dev/full").open("w") as full:
        outcome = subprocess.run(python("devices"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert outcome.returncode == 2
    assert outcome.stderr.startswith("shapewright: cannot write the output")
    assert outcome.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_message_that_cannot_be_written_keeps_its_exit_code() -> None:
    """Where standard error is full as well, a usage error is still 2: 1 would mean findings."""
    with Path("/dev/full").open("w") as full:
        outcome = subprocess.run(python("devices", "nothing"), stdout=full, stderr=full, check=False)

    assert outcome.returncode == 2


@pytest.mark.parametrize("columns", ["0", "-5", "wide", "9" * 5000, "\u00b2"])
def test_width_that_is_no_number(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """COLUMNS without a usable width neither fails nor empties the output."""
    monkeypatch.delenv("COLUMNS", raising=False)
    _, usual, _ = run(["params", "gpt2"], capsys)
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run(["params", "gpt2"], capsys)

    assert code == 0
    assert " ".join(out.split()) == " ".join(usual.split())


def test_deleted_working_directory(tmp_path: Path) -> None:
    """A command that reads no file runs where the working directory is gone."""
    gone = tmp_path / "gone"
    gone.mkdir()
    lines = "import os, sys; os.rmdir(os.getcwd()); from shapewright.app.cli import main; main(sys.argv[1:])"
    outcome = subprocess.run(
        [sys.executable, "-P", "-c", lines, "check", "gpt2", "--device", "h100-sxm-80gb"],
        cwd=gone, env={**os.environ, "PYTHONPATH": SOURCE_FOLDER}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert outcome.returncode in (0, 1), outcome.stderr
    assert "gpt2" in outcome.stdout.lower()


def test_interrupt_prints_one_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupted command prints that it stopped, without a traceback, and exits with 130."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shapewright.app.report.outputs.catalogue.devices_output", interrupt)
    code, out, err = run(["devices"], capsys)

    assert (code, out, err.strip()) == (130, "", "stopped")


@pytest.mark.parametrize("arguments", [["devices"], ["models", "--json"]])
def test_closed_pipe_is_not_an_error(arguments: list[str]) -> None:
    """``shapewright ... | head`` ends with exit code 0 and no words: 1 would mean findings."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    outcome = subprocess.run(
        [sys.executable, "-m", "shapewright", *arguments],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write_end)
    assert (outcome.returncode, outcome.stderr) == (0, "")
