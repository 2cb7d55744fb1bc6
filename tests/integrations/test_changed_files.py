"""Changed config files: the command, the hook in a repository, and the steps of the GitHub Action in a shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import pytest
import yaml

from command_line import run
from shapewright.app.integrations.changed_files import check_files, write_comment
from shapewright.core.child_process import child_environment
from shapewright.prediction.build import build_scenario

ROOT = Path(__file__).parents[2]
GOOD = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 32,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
BAD = {**GOOD, "vocab_size": 128255}
H100 = ["--device", "h100-sxm-80gb"]


def write(folder: Path, **configs: Any) -> None:
    """Write config files, one in a folder of its own for each name."""
    for name, config in configs.items():
        (folder / name).mkdir(exist_ok=True)
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / name / "config.json").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("limit", "code"), [("2%", 1), ("90%", 0)])
def test_cost_above_the_limit_fails(
    limit: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Findings of all files come as lines, as one SARIF run and as rows of a comment."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, good=GOOD, bad=BAD, tokenizer={"vocab": 3})
    files = [f"./{name}/config.json" for name in ("good", "bad", "tokenizer")]
    outputs = ["--sarif", "s.sarif", "--comment", "c.md", "--fail-above", limit]
    found, out, err = run(["check-files", *files, *H100, *outputs], capsys)
    results = json.loads(Path("s.sarif").read_text(encoding="utf-8"))["runs"]
    comment = Path("c.md").read_text(encoding="utf-8")

    assert (found, err) == (code, "")
    assert "TC101 vocab_size=128255" in out
    assert "tokenizer/config.json: describes no model" in out
    assert len(results) == 1
    places = {entry["ruleId"]: entry["locations"][0]["physicalLocation"] for entry in results[0]["results"]}
    assert places["TC101"]["artifactLocation"] == {"uri": "bad/config.json", "index": 1}
    assert comment.startswith("<!-- shapewright -->\n### Shapes of 2 changed configs on NVIDIA H100")
    assert "`bad/config.json`" in comment
    assert "128256" in comment
    assert (":x:" in comment) == bool(code)
    # The fix comes with its total, then how many fail, and the next command checks a file that has findings.
    assert "combined fix of TC101: vocab_size=128256: step " in out
    assert "vocab_size=128256: step " in comment
    verdict = "1 of 2 fail (limit 2 % of the step)" if code else "none costs over 90 %"
    assert out.splitlines()[-2:] == [verdict, "next: shapewright check bad/config.json --device h100-sxm-80gb"]


def test_findings_that_do_not_count_are_not_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that needs several devices is no error of its config.json, in the lines as in the SARIF log."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, large={**GOOD, "num_hidden_layers": 32}, bad=BAD)
    files = ["large/config.json", "bad/config.json"]
    code, out, _ = run(["check-files", *files, *H100, "--sarif", "s.sarif"], capsys)
    found = json.loads(Path("s.sarif").read_text(encoding="utf-8"))["runs"][0]

    assert (code, "ME101" in out) == (1, False)
    assert [result["ruleId"] for result in found["results"]] == ["TC101"]
    assert "properties" not in found  # a combined fix would be of one of the files


def test_the_next_command_keeps_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fields of --set become the flags of ``check``, so that it shows the same findings."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, bad=BAD)
    settings = ["--set=dp=2", "--set=sequence_parallel=false", "--set=dtype=fp8", "--ignore=TC102"]
    out = run(["check-files", "bad/config.json", *H100, *settings], capsys)[1]

    flags = "--dtype fp8 --dp 2 --no-sequence-parallel --ignore TC102"
    assert out.splitlines()[-1] == f"next: shapewright check bad/config.json {flags} --device h100-sxm-80gb"


def test_what_costs_and_savings_are_is_said_where_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line of ``check`` is also here: a width of 3000 costs 1 %, but what it sets saves 67 % with the MLP."""
    monkeypatch.chdir(tmp_path)
    odd = {**GOOD, "hidden_size": 3000, "num_attention_heads": 30, "head_dim": 100, "intermediate_size": 11007}
    write(tmp_path, bad=BAD, odd=odd)
    line = "costs: each finding's share of what all cost together; savings: of all that the line sets"
    alone, both = (run(["check-files", *files, *H100], capsys)[1] for files in (
        ["bad/config.json"], ["bad/config.json", "odd/config.json"],
    ))  # fmt: skip

    assert line not in alone
    assert both.splitlines().count(f"  {line}") == 1
    assert both.index("odd/config.json: ") < both.index(line) < both.rindex("combined fix of ")


def test_a_missing_file_has_no_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read cannot be checked either."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(["check-files", "nosuch.json", *H100], capsys)

    assert code == 1
    assert "next:" not in out


def test_unusable_files_fail_and_batch_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A malformed config fails; settings reach the prediction, and only findings about the model count."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, broken='{"model_type": "llama"', good=GOOD)
    assert run(["check-files", "broken/config.json", *H100], capsys)[0] == 1
    one = run(["check-files", "good/config.json", *H100, "--set", "micro_batch_size=1"], capsys)
    two = run(["check-files", "good/config.json", *H100, "--set", "micro_batch_size=1", "--set", "tp=2"], capsys)

    assert one[0] == two[0] == 0
    assert one[1] != two[1]
    assert "micro_batch_size" not in one[1]
    assert "FIELD=VALUE" in run(["check-files", *H100, "--set", "tp"], capsys)[2]


def test_files_of_trainers_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Argument lists and other formats are read too; the hook's pattern can be widened to them."""
    monkeypatch.chdir(tmp_path)
    sizes = (
        "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --swiglu --bf16 --make-vocab-size-divisible-by 1"
    )
    Path("gpt.args").write_text(
        f"{sizes} --vocab-size 128255 --make-vocab-size-divisible-by 1 --ffn-hidden-size 14336\n", encoding="utf-8"
    )
    code, out, _ = run(["check-files", "gpt.args", *H100], capsys)

    assert code == 1
    assert "TC101 vocab_size=128255" in out


def git(folder: Path, *arguments: str) -> str:
    """Run git with a fixed identity, without the user's settings."""
    known = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    clean = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-c", "init.defaultBranch=main", *arguments]
    outcome = subprocess.run(
        command, cwd=folder, env={**os.environ, **known, **clean}, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_pre_commit_runs_the_hook(tmp_path: Path) -> None:
    """pre-commit installs the hook from a repository of these files, and stops a commit with a slow shape.

    A path that reads like an option sets none: a folder named so would have a file of the commit overwritten.
    """
    pytest.importorskip("pre_commit", reason="needs pre-commit, which the test extra installs")
    hooks, work = tmp_path / "hooks", tmp_path / "work"
    work.mkdir()
    shutil.copytree(ROOT / "src", hooks / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".pre-commit-hooks.yaml"):
        shutil.copy(ROOT / name, hooks / name)
    for folder in (hooks, work):
        git(folder, "init", "--quiet")
    git(hooks, "add", "--all")
    git(hooks, "commit", "--quiet", "--message", "hooks")
    hook = {"id": "shapewright", "args": H100}
    settings = {"repos": [{"repo": str(hooks), "rev": git(hooks, "rev-parse", "HEAD"), "hooks": [hook]}]}
    (work / ".pre-commit-config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    environment = {**os.environ, "PRE_COMMIT_HOME": str(tmp_path / "home")}
    environment.pop("PYTHONPATH", None)  # the hook runs what it installed
    outcomes = []
    for config in (BAD, GOOD):
        write(work, model=config, kept={"vocab": 3}, **{"--sarif=kept": GOOD})
        git(work, "add", "--all")
        outcomes.append(
            subprocess.run(
                [sys.executable, "-m", "pre_commit", "run"],
                cwd=work, env=environment, capture_output=True, text=True, check=False,
            )
        )  # fmt: skip
    words = outcomes[0].stdout + outcomes[0].stderr
    if "Failed to establish" in words or "No matching distribution" in words or "Temporary failure" in words:
        pytest.skip("pre-commit needs a package index to install the hook")

    assert (outcomes[0].returncode, outcomes[1].returncode) == (1, 0), words
    assert "TC101 vocab_size=128255" in words
    assert json.loads((work / "kept" / "config.json").read_text(encoding="utf-8")) == {"vocab": 3}


STEPS: dict[str, dict[str, Any]] = {
    step["name"]: step for step in yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
}


def shell(step: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a step of the action as a runner does, with stand-ins of the programs that it installs and calls."""
    runner = folder.parent / "runner"
    if not runner.exists():
        programs = runner / "shapewright" / "bin"
        programs.mkdir(parents=True)
        (programs / "shapewright").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m shapewright "$@"\n')
        (programs / "gh").write_text(
            '#!/bin/sh\necho "$@" >> "$RUNNER_TEMP/gh.log"\ncase "$*" in\n'
            '*graphql*) echo "github-actions[bot]";; *--paginate*) echo "$FOUND";; *) exit "${REFUSED:-0}";; esac\n'
        )
        for program in programs.iterdir():
            program.chmod(0o755)
    files = {f"GITHUB_{name}": str(runner / name.lower()) for name in ("OUTPUT", "STEP_SUMMARY")}
    paths = {"RUNNER_TEMP": str(runner), **files}
    search = f"{runner / 'shapewright' / 'bin'}:{os.environ['PATH']}"
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[step]["run"]]
    whole = {**child_environment(), **paths, **environment, "PATH": search}
    return subprocess.run(command, cwd=folder, env=whole, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("git") is None or shutil.which("bash") is None, reason="needs git and bash")
def test_steps_of_the_action(tmp_path: Path) -> None:
    """Changed configs alone are checked; the comment is made once and then renewed; a slow shape fails the job."""
    work, runner = tmp_path / "work tree", tmp_path / "runner"
    work.mkdir()
    git(work, "init", "--quiet")
    write(work, old=BAD, new=GOOD)
    git(work, "add", "--all")
    git(work, "commit", "--quiet", "--message", "base")
    inputs = {
        "BASE": git(work, "rev-parse", "HEAD"), "DEVICE": "h100-sxm-80gb", "FAIL_ABOVE": "2%",
        "OPTIONS": "--set=tp=1\n", "PATTERNS": "config.json\n**/config.json\n",
    }  # fmt: skip
    unchanged = shell("Check", work, **inputs)
    assert "no config file changed" in unchanged.stdout, unchanged.stderr
    write(work, new=BAD, **{"a new one": BAD})
    git(work, "add", "--all")
    git(work, "commit", "--quiet", "--message", "head")
    checked = shell("Check", work, **inputs)

    assert checked.returncode == 0, checked.stderr
    assert "a new one/config.json" in checked.stdout
    assert "old/config.json" not in checked.stdout
    assert (runner / "output").read_text().split() == ["count=0", "count=2", "code=1"]
    assert json.loads((runner / "shapewright.sarif").read_text(encoding="utf-8"))["version"] == "2.1.0"
    for found, method in (
        ("", "POST repos/o/r/issues/7/comments"),
        ("40 someone\n41 github-actions[bot]\n42 github-actions[bot]", "PATCH repos/o/r/issues/comments/41"),
        ("40 someone", "POST repos/o/r/issues/7/comments"),
    ):
        said = shell("Comment", work, NUMBER="7", REPOSITORY="o/r", GH_TOKEN="x", FOUND=found)
        assert said.returncode == 0, said.stderr
        assert f"--method {method} " in (runner / "gh.log").read_text().splitlines()[-1]
    # The token of a fork may not comment, which is no failure of the shapes.
    refused = shell("Comment", work, NUMBER="7", REPOSITORY="o/r", GH_TOKEN="x", FOUND="", REFUSED="1")
    assert (refused.returncode, refused.stdout.startswith("::warning::")) == (0, True)
    assert "`a new one/config.json`" in (runner / "step_summary").read_text(encoding="utf-8")
    assert shell("Fail above the limit", work).returncode == 1
    assert shell("Check", work, **{**inputs, "DEVICE": "no-such-device"}).returncode != 0


@pytest.mark.skipif(shutil.which("git") is None or shutil.which("bash") is None, reason="needs git and bash")
def test_names_of_files_are_data(tmp_path: Path) -> None:
    """Names that a runner, a code scanner or a comment would act on stay names, and a symbolic link is passed over."""
    work, runner = tmp_path / "work", tmp_path / "runner"
    work.mkdir()
    git(work, "init", "--quiet")
    names = (b"::error::x", b"a\n::error::y", b"not utf-8 \xff", b"javascript:alert(1)", b"100%41#?")
    for name in names:
        os.mkdir(os.path.join(os.fsencode(work), name))  # noqa: PTH102, PTH118
        path = os.path.join(os.fsencode(work), name, b"config.json")  # noqa: PTH118
        Path(os.fsdecode(path)).write_text(json.dumps(BAD), encoding="utf-8")
    (work / "link").mkdir()
    (work / "link" / "config.json").symlink_to("/etc/hostname")
    write(work, **{"@someone": '{"model_type": "@someone/everyone ![](http://x/y.png)"}'})
    git(work, "add", "--all")
    git(work, "commit", "--quiet", "--message", "head")
    inputs = {"DEVICE": "h100-sxm-80gb", "FAIL_ABOVE": "2%", "OPTIONS": "", "PATTERNS": "**/config.json\n"}
    checked = shell("Check", work, BASE="0" * 40, **inputs)
    lines = checked.stdout.splitlines()

    assert checked.returncode == 0, checked.stderr
    stop = lines[0].removeprefix("::stop-commands::")
    assert len(stop) == 32
    assert lines[-1] == f"::{stop}::"
    assert not any(line.startswith("::error::y") for line in lines)
    log = json.loads((runner / "shapewright.sarif").read_text(encoding="utf-8"))
    uris = [artifact["location"]["uri"] for artifact in log["runs"][0]["artifacts"]]
    assert sorted(map(unquote_to_bytes, uris)) == sorted(name + b"/config.json" for name in names)
    assert all(urlsplit(uri).scheme == "" for uri in uris)
    comment = (runner / "shapewright.md").read_text(encoding="utf-8")
    assert "`@someone/config.json` | | | `" in comment
    assert "hostname" not in checked.stdout + comment


def test_long_comments_are_cut_and_mention_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment keeps within GitHub's 65,536 characters, failures first; a path in it mentions no user or team.

    Source: GitHub's REST API refuses longer bodies ("Body is too long (maximum is 65536 characters)").
    """
    monkeypatch.chdir(tmp_path)
    write(tmp_path, good=GOOD, **{"@org-team": BAD})
    build = partial(build_scenario, device="h100-sxm-80gb")
    good, bad = check_files(["good/config.json", "@org-team/config.json"], build)
    comment = write_comment([good, *[bad] * 1000], "H100", 0.02)
    short = write_comment([good, bad], "H100", 0.02)
    rows = [line for line in short.splitlines() if line.startswith("| ")]

    assert not good.fails(0.02)
    assert ":x: `@org-team/config.json`" in rows[2]
    assert "`good/config.json`" in rows[3]
    assert "<summary><code>@org-team/config.json</code>: " in short
    assert "left out" not in short
    assert len(comment) < 65_536
    shown = comment.count(":x:") + comment.count("<summary>")
    lists = 1000 + bool(good.findings)
    assert f"left out, as a comment has a largest size: {1001 + lists - shown:,};" in comment


def test_install_runs_nothing_of_the_checkout(tmp_path: Path) -> None:
    """Modules beside the checked files, which a pull request may bring, are not imported by the install step."""
    for name in ("venv", "pip", "json"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n", encoding="utf-8")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    (programs / "python3").chmod(0o755)
    command = STEPS["Install"]["run"].replace("-m pip install", "-m pip --version")
    paths = {"PATH": f"{programs}:{os.environ['PATH']}", "RUNNER_TEMP": str(tmp_path / "r"), "SOURCE": str(ROOT)}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**child_environment(), **paths}, check=False)

    assert (tmp_path / "r" / "shapewright" / "bin" / "python").exists()
    assert not (tmp_path / "ran").exists()


def test_action_takes_inputs_from_the_environment() -> None:
    """No expression is pasted into a script, where a branch or file name could become a command."""
    assert [name for name, step in STEPS.items() if "${{" in step.get("run", "")] == []
    assert STEPS["Upload findings"]["uses"].startswith("github/codeql-action/upload-sarif@")


def test_files_without_findings_have_a_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next command looks closer at the first model, where none has a finding."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, good=GOOD)
    code, out, _ = run(["check-files", "good/config.json", *H100], capsys)

    assert code == 0
    assert out.endswith("next: shapewright check good/config.json --device h100-sxm-80gb\n")
