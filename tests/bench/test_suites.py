"""Suites: their cases and order, and checks of operations against float64."""

from __future__ import annotations

import math

import pytest
from bench_cases import CASES, CHAINS

from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.bench import measuring
from shapewright.measure.bench.device.backend import Backend, InputPool
from shapewright.measure.bench.measuring import prepare
from shapewright.measure.bench.suites.registry import (
    CALIBRATION,
    COLLECTIVES,
    MAMF,
    SUITES,
    coarse_first,
    make_suite,
)
from shapewright.measure.store.record import Case

torch = pytest.importorskip("torch", reason="measuring needs the bench extra")


@pytest.mark.parametrize("small", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", sorted(set(SUITES) - {MAMF, COLLECTIVES, CALIBRATION, "compiled"}))
def test_suites_contain_distinct_cases(name: str, small: bool) -> None:
    """Cases of a suite are distinct, and their order depends on the seed only."""
    cases = make_suite(name, ("bf16",), small=small, seed=1)
    keys = [case.key("d", "l") for case in cases]

    assert len(set(keys)) == len(keys) >= (8 if small else 20)
    assert keys == [case.key("d", "l") for case in make_suite(name, ("bf16",), small=small, seed=1)]
    assert keys != [case.key("d", "l") for case in make_suite(name, ("bf16",), small=small, seed=2)]


def test_small_budgets_reach_every_sweep() -> None:
    """The first tenth of the alignment suite covers all three layouts and the end of a sweep."""
    cases = make_suite("alignment", ("bf16",), small=False, seed=0)
    first = [case.operation for case in cases[: len(cases) // 10]]

    assert {operation.layout for operation in first if isinstance(operation, Gemm)} == {"NT", "NN", "TN"}
    assert {operation.m - 8192 for operation in first if isinstance(operation, Gemm)} >= {0, 128}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17])
def test_coarse_first_is_a_permutation(count: int) -> None:
    """Every index occurs once, both ends first."""
    order = coarse_first(count)

    assert sorted(order) == list(range(count))
    assert order[:2] == [0, count - 1][: min(2, count)]


@pytest.mark.parametrize("case", [*CASES, *CHAINS], ids=lambda case: f"{case.operation.kind}-{case.key('', '')[-60:]}")
def test_operations_are_checked_against_float64(case: Case, backend: Backend) -> None:
    """Each operation passes its check, and a modified or NaN result does not."""
    prepared = prepare(case, backend)
    found = prepared.call(*prepared.inputs[0])
    tolerance = measuring.TOLERANCE_FRACTION[case.operation.dtype]

    assert prepared.check(found, prepared.inputs[0]) <= tolerance
    for spoil in (lambda part: part * 1.1, lambda part: part.double().masked_fill(part == part.max(), math.nan)):
        parts = (
            tuple(spoil(part) if part.is_floating_point() else part for part in found)
            if isinstance(found, tuple | list)
            else spoil(found)
        )
        assert not prepared.check(parts, prepared.inputs[0]) <= tolerance


def test_inputs_have_the_layout_of_the_operation(backend: Backend) -> None:
    """The layout determines the strides of both operands, and input sets differ."""
    for layout, strides in {"NT": ((21, 1), (1, 21)), "NN": ((21, 1), (33, 1)), "TN": ((1, 17), (33, 1))}.items():
        prepared = prepare(Case(operation=Gemm(name="x", dtype="fp32", m=17, n=33, k=21, layout=layout)), backend)
        a, b = prepared.inputs[0]

        assert (tuple(a.shape), tuple(b.shape)) == ((17, 21), (21, 33))
        assert (a.stride(), b.stride()) == strides
        assert not torch.equal(a, prepared.inputs[1][0])


def test_each_row_gets_its_inputs_once() -> None:
    """Slices of one row do not overlap, are aligned and random, and are reused for the next row."""
    pool = InputPool(torch.device("cpu"))
    first, second = pool.take((3, 5), torch.float32), pool.take((7,), torch.float32)
    whole = pool.take((3000, 3000), torch.float32)
    held = pool.num_bytes
    pool.begin()
    again = pool.take((3, 5), torch.float32)

    assert second.data_ptr() - first.data_ptr() == 512
    assert abs(float(whole.std()) - 1.0) < 0.01
    assert torch.equal(first, again)
    assert first.data_ptr() == again.data_ptr()
    assert pool.num_bytes == held
    integers = pool.take((5000,), torch.int8)
    assert 25 < float(integers.float().std()) < 40
    pool.clear()
    assert pool.num_bytes == 0
