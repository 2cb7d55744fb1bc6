"""Arguments of the Python API: shared values cannot change, and those of another type or without end are refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import shapewright
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.software import load_software

JOB: dict[str, Any] = {"device": "h100-sxm-80gb", "software": "fsdp-2024"}


@pytest.mark.parametrize(
    "change",
    [
        lambda rates: rates.__setitem__("bf16", 1.0),
        lambda rates: rates.update(bf16=1.0),
        lambda rates: rates.__ior__({"bf16": 1.0}),
        lambda rates: rates.pop("bf16", None),
        lambda rates: rates.setdefault("fp3", 1.0),
        lambda rates: rates.__delitem__("bf16"),
        lambda rates: rates.popitem(),
        lambda rates: rates.clear(),
    ],
)
def test_shared_tables_refuse_changes(change: Callable[[Any], object]) -> None:
    """A rate that one caller changed gave all later predictions of the process another MFU, a tenth at ten times it."""
    before = shapewright.predict("gpt2", **JOB)
    prediction = shapewright.predict("gpt2", **JOB)
    for table in (
        load_device("h100-sxm-80gb").dense_flops_per_s,
        prediction.device.sparse_flops_per_s,
        load_software("fsdp-2024").workload,
        load_software("fsdp-2024").attention_factor,
        prediction.device.provenance,
        prediction.device.provenance["num_sms"],
        prediction.device.sources,
        prediction.device.own_records,
        load_record("gemm", prediction.device).parameters,
        load_record("gemm", prediction.device).interval,
        load_record("gemm", prediction.device).provenance,
    ):
        with pytest.raises(TypeError, match="shared and cannot be changed"):
            change(table)

    after = shapewright.predict("gpt2", **JOB)
    assert (after.mfu, after.step_time_s) == (before.mfu, before.step_time_s)


def test_devices_of_callers_are_theirs() -> None:
    """A device made from a caller's dictionary keeps its rates, and can be copied, pickled and replaced."""
    rates = {"bf16": 1e15}
    device = replace(load_device("h100-sxm-80gb"), dense_flops_per_s=rates)
    rates["bf16"] = 1.0

    assert device.peak_flops_per_s("bf16") == 1e15
    for made in (copy.copy(device), copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert made == device
        assert made.dense_flops_per_s == {"bf16": 1e15}


def test_an_error_that_is_raised_again_keeps_no_frames() -> None:
    """The error of a step that cannot run is kept; raised in a loop it held the frames of all calls before."""
    scenario = shapewright.build_scenario("gpt2", **JOB).replace(tensor_parallel=7)
    lengths = []
    for _ in range(3):
        with pytest.raises(shapewright.ShapewrightError) as caught:
            scenario.predict()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))

    assert lengths == lengths[:1] * 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (range(1, 10**12), "more than 10000 values"),
        (itertools.count(1), "more than 10000 values"),
        (4, "micro_batch_size=4 must be a list of values"),
        ("bf16", "micro_batch_size='bf16' must be a list of values"),
    ],
)
def test_endless_axes_are_refused_at_once(values: Any, words: str) -> None:
    """No more values of a sweep are made than it may have; those of a long range filled the memory."""
    with pytest.raises(shapewright.ShapewrightError, match=words):
        shapewright.sweep("gpt2", **JOB, axes={"micro_batch_size": values})


@pytest.mark.parametrize(
    ("part", "value"),
    [("workload", "train"), ("workload", [("seq_len", 8)]), ("layout", 8), ("overrides", [1]), ("software", 3)],
)
def test_parts_of_another_type_are_errors_that_say_so(part: str, value: Any) -> None:
    """An argument of another type is an error of this package that names it."""
    parts: dict[str, Any] = {"device": "h100-sxm-80gb", part: value}
    with pytest.raises(shapewright.ShapewrightError, match=f"^{part}=.* must be "):
        shapewright.predict("gpt2", **parts)
