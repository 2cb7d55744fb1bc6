"""Results in Python: a line when printed, dicts and frames; public names and unknown keywords."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import shapewright
from shapewright.core.notebook import NotebookDisplay


def _results() -> list[NotebookDisplay]:
    """One result of each kind that is quick to make."""
    on = {"device": "h100-sxm-80gb"}
    return [
        shapewright.predict("gpt2", **on),
        shapewright.check("gpt2", **on),
        shapewright.fits("gpt2", **on),
        shapewright.compare("gpt2", devices=["h100-sxm-80gb", "a100-sxm-80gb"]),
        shapewright.sweep("gpt2", axes={"micro_batch_size": [1, 2]}, **on),
        shapewright.plan("gpt2", num_devices=8, global_batch_size=64, **on),
        shapewright.serve_plan("gpt2", prompt_len=100, output_len=10, **on),
        shapewright.search("gpt2", **on),
        shapewright.mfu("gpt2", seconds=1.0, num_devices=1, global_batch_size=64, **on),
    ]


def test_results_are_short_and_become_dicts_and_frames() -> None:
    """Printing a result takes a line, to_dict is the JSON of the command, to_frame has its rows."""
    pytest.importorskip("pandas", reason="to_frame needs pandas")
    for result in _results():
        assert len(repr(result)) < 1000
        assert str(result).startswith(type(result).__name__)
        assert json.loads(json.dumps(result.to_dict()))["schema_version"] == 1
        assert len(result.to_frame()) >= 1


def test_public_names_are_listed() -> None:
    """dir() lists the functions before they are imported."""
    assert {"predict", "check", "search", "TransformerConfig"} <= set(dir(shapewright))
    assert not {"Any", "TYPE_CHECKING", "annotations"} & set(dir(shapewright))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"tp": 2}, "tensor_parallel is a field: layout={'tensor_parallel': 2}"),
        ({"seq_len": 4096}, "seq_len is a field: workload={'seq_len': 4096}"),
        ({"hidden_size": 64}, "hidden_size is a field: overrides={'hidden_size': 64}"),
        ({"hiden_size": 64}, "did you mean 'hidden_size'"),
        ({"zero_stag": 1}, "did you mean 'zero_stage'? fields are given as layout={...}"),
        ({"devise": "h100"}, "did you mean 'device'"),
    ],
)
def test_unknown_keywords_are_explained(keywords: dict[str, Any], words: str) -> None:
    """A keyword that a function does not have names the argument that takes it."""
    with pytest.raises(TypeError, match=re.escape(words)):
        shapewright.predict("gpt2", device="h100-sxm-80gb", **keywords)


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"layout": {"tp": 2}}, "tensor_parallel"),
        ({"layout": {"cp": 2}}, "context_parallel"),
        ({"workload": {"mbs": 2}}, "micro_batch_size"),
    ],
)
def test_initials_of_a_field_name_it(parts: dict[str, dict[str, int]], field: str) -> None:
    """Degrees are known by two letters, which the command line takes and a layout does not."""
    with pytest.raises(shapewright.ShapewrightError, match=f"did you mean '{field}'"):
        shapewright.predict("gpt2", device="h100-sxm-80gb", **parts)


@pytest.mark.parametrize(
    ("flag", "argument"), [("isl", "prompt_len"), ("gpus", "num_devices"), ("load", "requests_per_s")]
)
def test_flags_given_as_keywords_name_their_argument(flag: str, argument: str) -> None:
    """The command line's word for an argument is explained."""
    with pytest.raises(TypeError, match=f"did you mean '{argument}'"):
        shapewright.serve_plan("gpt2", device="h100-sxm-80gb", **{flag: 100})
