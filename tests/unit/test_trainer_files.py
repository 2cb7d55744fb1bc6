"""Trainer files read by the arguments that the trainers take: recorded grammars of Megatron-LM and torchtitan.

trainer_grammars.json holds the arguments of Megatron-LM's arguments.py and the fields of torchtitan's job config and
model arguments, with type and choices, and their sources. Neither parser can be imported without a GPU build of
PyTorch's extensions; torchtitan 0.2's is used where the package is installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import shlex
import sys
import tomllib
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import pytest

import shapewright
from shapewright.app.formats.registry import write_format
from shapewright.core.errors import ShapewrightError
from shapewright.models.read import list_presets, read_model
from shapewright.models.write import untimed_values
from shapewright.optimize.design.result import Design
from shapewright.prediction.build import build_scenario

GRAMMARS = json.loads(Path(__file__).with_name("trainer_grammars.json").read_text(encoding="utf-8"))
TYPES: dict[str, Any] = {"int": int, "float": float, "str": str}
DENSE = [
    name
    for name in list_presets()
    if not (config := read_model(name).config).is_moe and not config.is_mla and config.patches is None
]


def parse_megatron(text: str) -> dict[str, Any]:
    """Read arguments as Megatron-LM's parser does; an argument or value that it does not take raises."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, entry in GRAMMARS["megatron"]["arguments"].items():
        parser.add_argument(name, **{**entry, **({"type": TYPES[entry["type"]]} if "type" in entry else {})})
    words = shlex.split(text)
    found, unknown = parser.parse_known_args(words)
    if unknown:
        raise argparse.ArgumentError(None, f"unrecognized arguments: {unknown}")
    return vars(found)


def check_value(annotation: str, value: Any) -> None:
    """Check a value against an annotation of torchtitan, such as ``Literal["1F1B"]`` or ``int | None``."""
    kinds = {"int": int, "float": float, "str": str, "bool": bool, "None": type(None)}
    if annotation.startswith("Literal["):
        assert value in get_args(eval_literal(annotation))
        return
    allowed = tuple(kinds[part] for part in annotation.split(" | "))
    assert type(value) in allowed, (annotation, value)


def eval_literal(annotation: str) -> Any:
    """The Literal type of an annotation."""
    values = ast.literal_eval(f"({annotation.removeprefix('Literal[').removesuffix(']')},)")
    return Literal[values]


def parse_torchtitan(text: str) -> dict[str, Any]:
    """Read a job config as torchtitan's does: known sections and fields of their types, and the flavor's arguments."""
    content = tomllib.loads(text)
    for section, values in content.items():
        fields = GRAMMARS["torchtitan"]["sections"][section]
        for name, value in values.items():
            check_value(fields[name], value)
    line = next(line for line in text.splitlines() if "ModelArgs(" in line)
    call = ast.parse(line.partition(": ")[2].rstrip(",")).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    arguments = GRAMMARS["torchtitan"]["flavors"][content["model"]["name"]]
    for keyword in call.value.keywords:
        check_value(arguments[str(keyword.arg)], ast.literal_eval(keyword.value))
    return content


def parse_with_torchtitan(folders: list[str], file: Path) -> Any:
    """Read a job config with torchtitan 0.2's own parser; its package itself needs kernels of a GPU build."""
    package = ModuleType("torchtitan")
    package.__path__ = folders
    sys.modules["torchtitan"] = package
    try:
        manager = importlib.import_module("torchtitan.config.manager")
        return manager.ConfigManager().parse_args(["--job.config_file", str(file)])
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
            del sys.modules[name]


@pytest.mark.parametrize("form", ["megatron-args", "torchtitan-toml"])
def test_presets_parse(form: str) -> None:
    """Every dense preset that the format can express is read back with its sizes."""
    num_read = 0
    for name in DENSE:
        scenario = build_scenario(name, "h100-sxm-80gb", workload={"global_batch_size": 64, "seq_len": 512})
        try:
            text = write_format(
                form,
                scenario.config,
                workload=scenario.workload,
                layout=scenario.layout,
                untimed=untimed_values(scenario.model),
            )
        except ShapewrightError:
            continue
        num_read += 1
        if form == "megatron-args":
            found = parse_megatron(text)
            assert (found["num_layers"], found["hidden_size"]) == (
                scenario.config.num_layers,
                scenario.config.hidden_size,
            )
        else:
            assert parse_torchtitan(text)["training"]["seq_len"] == 512
    assert num_read > 10


@pytest.mark.parametrize(
    ("family", "size", "devices", "keep"),
    [
        ("llama", 10**9, 8, {}),
        ("llama", 30 * 10**9, 64, {"pp": 4, "tp": 2, "zero": (0,), "schedule": "1f1b"}),
        ("qwen3", 4 * 10**9, 16, {"recompute": "full"}),
    ],
)
def test_designs_parse(family: str, size: int, devices: int, keep: dict[str, Any], tmp_path: Path) -> None:
    """A design that both trainers must express has files that both take, with its layout, batch and length of run."""
    result = shapewright.design(
        family=family,
        num_parameters=size,
        train_tokens=20 * size,
        num_devices=devices,
        device="h100-sxm-80gb",
        keep=keep,
        formats=("megatron-args", "torchtitan-toml"),
        top=2,
    )
    best: Design = result.best
    megatron, torchtitan = (
        write_format(
            form, best.config, workload=best.workload, layout=best.plan.layout, untimed=asdict(best.run.schedule)
        )
        for form in ("megatron-args", "torchtitan-toml")
    )
    arguments, content = parse_megatron(megatron), parse_torchtitan(torchtitan)

    assert arguments["tensor_model_parallel_size"] == best.plan.layout.tensor_parallel
    assert arguments["global_batch_size"] == best.workload.global_batch_size
    assert arguments["micro_batch_size"] == best.workload.micro_batch_size
    assert content["parallelism"]["tensor_parallel_degree"] == best.plan.layout.tensor_parallel
    assert content["parallelism"]["pipeline_parallel_degree"] == best.plan.layout.pipeline_parallel
    steps = arguments["train_iters"]
    tokens_per_step = arguments["global_batch_size"] * arguments["seq_length"]
    assert (steps - 1) * tokens_per_step < 20 * size <= steps * tokens_per_step
    assert content["training"]["steps"] == steps
    assert arguments["lr_warmup_iters"] == content["lr_scheduler"]["warmup_steps"]
    assert arguments["min_lr"] == pytest.approx(content["lr_scheduler"]["min_lr_factor"] * arguments["lr"], rel=0.01)

    if (installed := find_spec("torchtitan")) is not None:
        file = tmp_path / "job.toml"
        file.write_text(torchtitan, encoding="utf-8")
        job = parse_with_torchtitan(list(installed.submodule_search_locations or ()), file)
        assert (job.training.steps, job.training.seq_len) == (steps, best.workload.seq_len)
        assert job.lr_scheduler.decay_type == "cosine"


@pytest.mark.parametrize(
    "text", ["--num-layer 4", "--num-layers four", "--recompute-method some", "--swiglu yes", "--hidden-size"]
)
def test_what_megatron_would_refuse_is_refused(text: str) -> None:
    """The recorded grammar can fail: an unknown argument, a value of another type, no choice, a value too many."""
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse_megatron(text)


@pytest.mark.parametrize("line", ["seq_length = 4", 'seq_len = "4"', "seq_len = 4.5"])
def test_what_torchtitan_would_refuse_is_refused(line: str) -> None:
    """The recorded grammar can fail: an unknown field, and values of another type."""
    flavor = '#     "x": Qwen3ModelArgs(dim=64),\n[model]\nname = "qwen3"\nflavor = "x"\n[training]\n'
    parse_torchtitan(flavor + "seq_len = 4\n")
    with pytest.raises((AssertionError, KeyError)):
        parse_torchtitan(flavor + line + "\n")
