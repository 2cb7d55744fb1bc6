"""Workload and layout: derived lengths, and errors with remedies."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from shapewright.core.errors import LayoutError, ShapewrightError, WorkloadError
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload


@pytest.mark.parametrize(
    ("phase", "context_len", "query_len", "kv_len"),
    [
        ("train", 0, 2048, 2048),
        ("prefill", 0, 2048, 2048),
        ("prefill", 512, 2048, 2560),  # a prompt after a cached prefix
        ("decode", 0, 1, 1),
        ("decode", 2047, 1, 2048),  # the new token sees itself
    ],
)
def test_query_and_key_lengths_by_phase(phase: str, context_len: int, query_len: int, kv_len: int) -> None:
    """Training and prefill run the sequence, decode one token; both see what is cached before them."""
    workload = Workload(phase=phase, seq_len=2048, context_len=context_len)
    assert (workload.query_len, workload.kv_len) == (query_len, kv_len)
    assert workload.is_training == (phase == "train")


def test_dtypes_are_resolved() -> None:
    """Other spellings of a dtype are stored under the one name."""
    workload = Workload(dtype="torch.bfloat16", kv_cache_dtype="fp8_e4m3")
    assert (workload.dtype, workload.kv_cache_dtype) == ("bf16", "fp8")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"phase": "training"}, "phase='training' is unknown; choose one of train, prefill, decode"),
        ({"attention": "fused"}, "attention='fused' is unknown; choose one of flash, unfused"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be an integer from 1 to 2**40"),
        ({"seq_len": -1}, "seq_len=-1 must be an integer from 1 to 2**40"),
        ({"seq_len": 2.0}, "seq_len=2.0 must be an integer"),
        ({"seq_len": float("nan")}, "seq_len=nan must be an integer"),
        ({"seq_len": "2048"}, "seq_len='2048' must be an integer"),
        ({"seq_len": True}, "seq_len=True must be an integer"),
        ({"seq_len": 10**18}, "must be an integer from 1 to 2**40"),
        ({"context_len": -1}, "context_len=-1 must be an integer from 0 to 2**40"),
        ({"global_batch_size": 0}, "global_batch_size=0 must be an integer"),
        ({"dtype": "bf61"}, "unknown dtype 'bf61'"),
        ({"phase": "decode", "recompute": "full"}, "recompute='full' has no effect in decode"),
    ],
)
def test_invalid_workload_is_rejected(fields: dict[str, Any], message: str) -> None:
    """A value out of range or a word not known is one line with the value and what is allowed."""
    with pytest.raises(WorkloadError, match=re.escape(message)) as caught:
        Workload(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be an integer from 1 to"),
        ({"data_parallel": 1.5}, "data_parallel=1.5 must be an integer"),
        ({"pipeline_parallel": 10**18}, "must be an integer from 1 to"),
        ({"zero_stage": 4}, "zero_stage=4 must be an integer from 0 to 3"),
        (
            {"expert_parallel": 8, "data_parallel": 4},
            "expert_parallel=8 must divide data_parallel * context_parallel = 4",
        ),
        ({"virtual_pipeline": 2}, "virtual_pipeline=2 needs pipeline_parallel above 1"),
        ({"sequence_parallel": "no"}, "sequence_parallel='no' must be true or false"),
    ],
)
def test_invalid_layout_is_rejected(fields: dict[str, Any], message: str) -> None:
    """A degree out of range, or degrees that contradict each other, are one line with the numbers."""
    with pytest.raises(LayoutError, match=re.escape(message)) as caught:
        ParallelLayout(**fields)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ShapewrightError)


def test_expert_parallelism_adds_no_devices() -> None:
    """Expert parallelism adds no devices: 2 * 4 * 8 * 2 with experts over 16 of them are 128."""
    layout = ParallelLayout(
        tensor_parallel=2, pipeline_parallel=4, data_parallel=8, context_parallel=2, expert_parallel=16
    )
    assert layout.num_devices == 128


def test_sequence_parallel_needs_a_tensor_axis() -> None:
    """The sequence is split over the tensor axis only if there is one and it is enabled."""
    alone = ParallelLayout()
    pair = ParallelLayout(tensor_parallel=2)
    assert not alone.splits_sequence_over_tensor
    assert pair.splits_sequence_over_tensor
    assert not dataclasses.replace(pair, sequence_parallel=False).splits_sequence_over_tensor
