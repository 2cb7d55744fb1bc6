"""Prices that are kept: what decides them, and whether others in the cache or in the call matter."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.lowering.model import lower
from shapewright.lowering.operations.base import UNPRICED_FIELDS
from shapewright.models.read import read_model
from shapewright.pricing import operations as pricing
from shapewright.pricing.operations import PRICED_BY, price_key, price_operations
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.lowering.operations.operation import Operation

JOBS = (
    Workload(micro_batch_size=1, seq_len=1024),
    Workload(micro_batch_size=1, seq_len=1024, attention="unfused", kernels="torch"),
    Workload(phase="prefill", micro_batch_size=1, seq_len=1024, dtype="fp8"),
    Workload(phase="decode", micro_batch_size=8, context_len=1024, weight_dtype="int4"),
    Workload(phase="decode", micro_batch_size=8, context_len=1024, kv_cache_dtype="fp8"),
)
MODELS = ("mixtral-8x7b", "deepseek-v2-lite", "qwen3-next-80b-a3b", "falcon-mamba-7b")


@pytest.fixture(name="operations", scope="module")
def list_operations() -> list[Operation]:
    """Operations of every kind, of jobs that differ in little."""
    layout = ParallelLayout(tensor_parallel=2)
    found = [one for name in MODELS for job in JOBS for one in lower(read_model(name).config, job, layout)]
    assert {type(one) for one in found} >= set(PRICED_BY) - {pricing.SparseAttention}
    return list({price_key(one): one for one in found}.values())


def test_every_priced_field_is_in_the_key(operations: list[Operation]) -> None:
    """An operation that differs in one field is another to price, unless the field says what it is for."""
    for kind in PRICED_BY:
        one = next((each for each in operations if type(each) is kind), None)
        if one is None:
            continue
        for spec in fields(kind):
            other: Any = object()  # unlike any value
            changed = one.changed(**{spec.name: other})

            assert (price_key(changed) == price_key(one)) == (spec.name in UNPRICED_FIELDS), (kind, spec.name)


def test_other_operations_in_call_and_cache_do_not_matter(operations: list[Operation]) -> None:
    """Alone and before all others, among all others, and again from the cache, an operation has the same price."""
    device, random = load_device("h100-sxm-80gb"), Random(3)
    some = random.sample(operations, 60)

    def prices(*calls: list[Operation]) -> list[float]:
        found = [price for call in calls for price in price_operations(call, device)]
        return [float(end) for each in found for end in (each.time_s, each.low_s, each.high_s)]

    pricing._price_cache.clear()
    alone = prices(*([one] for one in some))
    pricing._price_cache.clear()
    together = prices([*operations, *some])[-len(alone) :]

    assert together == pytest.approx(alone, rel=1e-12)
    assert prices(some) == together


def test_devices_of_one_name_have_prices_of_their_own(operations: list[Operation]) -> None:
    """A device with half of the bandwidth is not the one that was priced before, whatever it is called."""
    own = load_device("h100-sxm-80gb")
    slower = replace(own, memory_bandwidth_bytes_per_s=0.5 * own.memory_bandwidth_bytes_per_s)
    norm = next(one for one in operations if one.role == "" and one.block == "norm")
    times = [float(price_operations([norm], device)[0].time_s) for device in (own, slower, own)]

    assert times[1] > 1.3 * times[0]
    assert times[2] == times[0]


@pytest.mark.parametrize("name", MODELS)
def test_passes_lowered_together_have_the_keys_of_each(name: str) -> None:
    """Sizes in arrays are the operations that they stand for."""
    config, sizes = read_model(name).config, [1, 7, 64, 7]
    job = Workload(phase="decode", micro_batch_size=1, context_len=512)
    together = lower(config, job.resized(micro_batch_size=np.array(sizes)), ParallelLayout())
    singles = [one.single_sizes(len(sizes)) for one in together]

    for row, size in enumerate(sizes):
        alone = lower(config, replace(job, micro_batch_size=size), ParallelLayout())
        assert [price_key(each[row]) for each in singles] == [price_key(one) for one in alone]
