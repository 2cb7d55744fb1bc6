"""Any config file or flag value gives a result or a one-line error on the command line."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shapewright.app.cli import main
from shapewright.core.errors import ShapewrightError
from shapewright.core.fields import documented_fields
from shapewright.models.read import load_preset
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.build import build_scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

# One of each family: dense, gated, mixture, latent attention, encoder, encoder-decoder.
REAL_CONFIGS: tuple[dict[str, Any], ...] = tuple(
    load_preset(name).config
    for name in (
        "gpt3-2.7b",
        "llama-3-8b",
        "mixtral-8x7b",
        "deepseek-v2-lite",
        "bert-base",
        "t5-base",
        "gemma-2-2b",
        "falcon-7b",
    )
)
FIELDS = [
    (part, spec.name)
    for part, cls in (("workload", Workload), ("layout", ParallelLayout), ("overrides", TransformerConfig))
    for spec, _ in documented_fields(cls)
]
ODD_VALUES = st.one_of(
    st.sampled_from([None, True, 0, -1, 1, 3, 7, 4097, 2**40, 10**18, 1.5, "4096", "", [], {}, float("inf"), "\n"]),
    st.sampled_from([1, 2, 3, 5, 12, 96, 257, 65_537]),
    st.integers(-5, 5),
)
DEVICES = st.sampled_from(["a100-sxm-40gb", "h100-sxm-80gb", "v100-sxm2-16gb", "mi300x", "tpu-v5p", "groq-lpu-v1"])
FLAGS = st.lists(
    st.sampled_from(
        [
            ("--tp", "2"),
            ("--tp", "3"),
            ("--pp", "5"),
            ("--pp", "1000"),
            ("--dp", "0"),
            ("--cp", "3"),
            ("--ep", "7"),
            ("--zero-stage", "9"),
            ("--dtype", "fp8"),
            ("--dtype", "float3"),
            ("--phase", "decode"),
            ("--phase", "prefill"),
            ("--recompute", "full"),
            ("--attention", "unfused"),
            ("--seq-len", "1"),
            ("--seq-len", "1000003"),
            ("--micro-batch-size", "-4"),
            ("--global-batch-size", "7"),
            ("--context-len", "nan"),
            ("--hidden-size", "1000000000000000000"),
            ("--num-heads", "7"),
            ("--head-dim", "1"),
            ("--hidden-dropout", "inf"),
            ("--attention-windows", "0,,4"),
            ("--moe-layers", "true,perhaps"),
            ("--num-layers", "3"),
            ("--ignore", "TC"),
            ("--explain", "mlp"),
        ]
    ),
    max_size=3,
    unique_by=lambda flag: flag[0],
)


@st.composite
def mutated_texts(draw: st.DrawFn) -> bytes:
    """A real config.json with fields dropped or replaced, or its text cut or spoilt."""
    config = dict(draw(st.sampled_from(REAL_CONFIGS)))
    for key in draw(st.lists(st.sampled_from(sorted(config)), max_size=2, unique=True)):
        if draw(st.booleans()):
            config.pop(key)
        else:
            config[key] = draw(ODD_VALUES)
    text = json.dumps(config).encode()
    kind = draw(st.sampled_from(["whole", "whole", "whole", "cut", "spoilt", "wrapped"]))
    if kind == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if kind == "spoilt":
        place = draw(st.integers(0, len(text) - 1))
        return text[:place] + draw(st.binary(min_size=1, max_size=3)) + text[place + 1 :]
    return b"[" * 70 + text if kind == "wrapped" else text


def answer(arguments: list[str]) -> tuple[int, str, str]:
    """Run the command line in this process; give exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code, out.getvalue(), err.getvalue()


def check_answer(code: int, out: str, err: str) -> None:
    """Check for a result in the requested form, or one error line without output."""
    assert code in {0, 1, 2}
    if code == 2:
        assert out == ""
        assert err.startswith("shapewright: ")
        assert len(err) > len("shapewright: \n")
        assert err.count("\n") == 1
        assert err.endswith("\n")
    else:
        assert err == ""
        assert out


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=mutated_texts(), command=st.sampled_from(["check", "predict"]), device=DEVICES, flags=FLAGS)
def test_any_config_and_flags(
    tmp_path: Path, text: bytes, command: str, device: str, flags: list[tuple[str, str]]
) -> None:
    """Exit code 0, 1 or 2, one line on stderr when 2, and never a traceback."""
    path = tmp_path / "config.json"
    path.write_bytes(text)
    words = [word for flag in flags for word in flag]
    check_answer(*answer([command, str(path), "--device", device, *words]))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=mutated_texts(), device=DEVICES)
def test_json_is_strict(tmp_path: Path, text: bytes, device: str) -> None:
    """--json prints one JSON object of finite numbers for any config."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON number")

    path = tmp_path / "config.json"
    path.write_bytes(text)
    code, out, err = answer(["predict", str(path), "--device", device, "--json"])
    check_answer(code, out, err)
    if code == 0:
        facts = json.loads(out, parse_constant=refuse)
        assert facts["step_time_low_s"] <= facts["step_time_s"] <= facts["step_time_high_s"]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    line=st.integers(0, 60),
    replacement=st.sampled_from(["nan", "inf", "-1", "0", '"x"', "1e400", "[", "true", "", "2024-01-01", "1e18"]),
)
def test_any_device_file(tmp_path: Path, line: int, replacement: str) -> None:
    """A device file with one value spoilt is a device, or one line."""
    _, template, _ = answer(["devices", "template"])
    lines = template.splitlines()
    place = line % len(lines)
    key, equals, _ = lines[place].removeprefix("# ").partition("=")
    if equals:
        lines[place] = f"{key}= {replacement}"
    path = tmp_path / "device.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    check_answer(*answer(["predict", "gpt2", "--device", str(path)]))


@pytest.mark.parametrize(
    "source",
    [
        "",
        " ",
        "\0",
        "..",
        "/",
        "/dev/null",
        "a/b/c",
        "gpt2/",
        "~",
        "-",
        "x" * 5000,
        "file:///etc/hosts",
        "gpt2\n",
        "\udcff",
    ],
)
def test_any_source(source: str) -> None:
    """A CONFIG that is no model is one line."""
    code, out, err = answer(["predict", "--device", "h100-sxm-80gb", "--", source])

    check_answer(code, out, err)
    assert code == 2


@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_values_of_another_type_are_errors(part: str, name: str) -> None:
    """A value of any type in any field gives a scenario or an error of the package, from Python too."""
    for value in (3, [], {}, 1.5, None, "x", True, object(), [1], float("nan")):
        with contextlib.suppress(ShapewrightError):
            build_scenario("gpt2", "h100-sxm-80gb", **{part: {name: value}})  # type: ignore[arg-type]
