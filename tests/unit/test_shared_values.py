"""Devices and software generations are shared by all predictions of a process: callers cannot change them."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import shapewright
from shapewright.hardware.loader import load_device
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
