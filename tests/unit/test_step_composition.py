"""How operations make up a step: what hides what, and the interval of the sum."""

from __future__ import annotations

from math import sqrt
from random import Random
from typing import Any

import numpy as np
import pytest

import shapewright
from shapewright.lowering.operations.base import STAGES
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.composition.stages import (
    EXPERT_EXCHANGES,
    GRADIENT_GEMMS,
    WEIGHT_GRADIENTS,
    PricedOperation,
    combine_stages,
    exchange_overlap_fraction,
    index_operations,
    lacking_share,
    overlap_communication,
    overlap_pools,
    rebalance_ends,
)
from shapewright.prediction.composition.step import (
    add_exposed_communication,
    compose_sequence,
    compose_step,
    error_correlation,
    parts_of,
)
from shapewright.pricing.calibration.source import CalibrationSource
from shapewright.pricing.price import Price
from shapewright.pricing.software import Software
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

SOFTWARE = Software(overlap_share=0.8, tensor_hidden_fraction=0.5, expert_hidden_fraction=0.6)
OWN, BORROWED = CalibrationSource(transfer="exact"), CalibrationSource(transfer="generic")


def collective(axis: str, *, overlaps: bool) -> Collective:
    """An all-reduce of eight ranks."""
    return Collective(
        name="x", op_name="all_reduce", axis=axis, message_bytes=1e6, num_ranks=8, ranks_per_node=8, overlaps=overlaps
    )


@pytest.mark.parametrize(
    ("operation", "pass_name", "pools"),
    [
        (Gemm(name="x", m=8, n=8, k=8), "forward", ("forward",)),
        (Gemm(name="x", m=8, n=8, k=8), "backward", ("backward", GRADIENT_GEMMS)),
        (GroupedGemm(name="x", groups=2, m=8, n=8, k=8), "backward", ("backward", GRADIENT_GEMMS)),
        (Gemm(name="x", m=8, n=8, k=8), "recompute", ("backward",)),
        (Pointwise(name="x", operation="norm", read_bytes=8.0, written_bytes=8.0), "backward", ("backward",)),
        (collective("tensor", overlaps=True), "backward", (GRADIENT_GEMMS,)),
        (collective("tensor", overlaps=True), "forward", ("forward",)),
        (collective("data", overlaps=True), "backward", ("backward",)),
        (collective("data", overlaps=False), "backward", ()),
        (collective("expert", overlaps=False), "forward", (EXPERT_EXCHANGES,)),
        (Pointwise(name="x", operation="optimizer", read_bytes=8.0, written_bytes=8.0), "step", ()),
    ],
)
def test_what_hides_what(operation: Operation, pass_name: str, pools: tuple[str, ...]) -> None:
    """Gradient GEMMs alone hide the tensor axis in the backward pass; the pass hides the others; nothing the step's."""
    assert overlap_pools(operation, pass_name) == pools


def test_relative_interval_does_not_depend_on_the_number_of_micro_batches() -> None:
    """Eight micro-batches through four stages are as uncertain as sixty-four, and as a device alone."""
    widths = []
    for layout, batch in (({}, 8), ({"pipeline_parallel": 4}, 8), ({"pipeline_parallel": 4}, 64)):
        step = shapewright.predict(
            "llama-3-8b",
            device="h100-sxm-80gb",
            workload={"micro_batch_size": 1, "global_batch_size": batch},
            layout=layout,
        )
        widths.append((step.step_time_high_s / step.step_time_s, step.step_time_low_s / step.step_time_s))

    assert widths[1:] == [pytest.approx(widths[0], rel=0.05)] * 2


def priced(operation: Operation, time_s: float, **changes: Any) -> PricedOperation:
    """An operation that takes a round time."""
    ends: dict[str, Any] = {"low_s": time_s, "high_s": time_s, "calibration": OWN} | changes
    parts: Any = dict.fromkeys(("compute_s", "memory_s", "start_s", "roofline_s"), 0.0)
    return PricedOperation(operation, Price(time_s=time_s, **parts, **ends))


def gemm(pass_name: str = "forward", **changes: Any) -> Gemm:
    """A GEMM of a pass."""
    return Gemm(name="x", m=8, n=8, k=8, pass_name=pass_name, **changes)


def sent(axis: str, pass_name: str, *, overlaps: bool = True, **changes: Any) -> Collective:
    """A collective of a pass."""
    return collective(axis, overlaps=overlaps).changed(pass_name=pass_name, **changes)


def test_hidden_communication_by_hand() -> None:
    """Forward 10 s of computation, backward 8 s of GEMMs and 4 s of others; communication in two halves.

    0.8 of the forward pass hides 8 of 16 s, 0.8 of the backward pass 9.6 of 24 s; half of the tensor axis' 16 s is
    hidden for the 8 s that its GEMMs take; 0.6 of the 44 s of exchanges for the 22 s that both passes take.
    """
    norm = Pointwise(name="x", operation="norm", read_bytes=8.0, written_bytes=8.0, pass_name="backward")
    entries = [
        priced(gemm(repeats=5), 2.0),
        priced(gemm("backward"), 8.0),
        priced(norm, 4.0),
        priced(sent("data", "forward", repeats=2), 8.0),
        priced(sent("data", "backward"), 10.0),
        priced(sent("pipeline", "backward"), 14.0),
        priced(sent("tensor", "backward", repeats=4), 4.0),
        priced(sent("tensor", "backward", overlaps=False), 3.0),
        priced(sent("expert", "forward"), 22.0),
        priced(sent("expert", "backward", overlaps=False), 22.0),
        priced(gemm("step"), 100.0),
    ]
    exposed = [entry.exposed_fraction for entry in overlap_communication(entries, SOFTWARE, 0.6)]

    assert exposed == pytest.approx([1, 1, 1, 0.5, 0.6, 0.6, 0.75, 1, 0.7, 0.7, 1])


@pytest.mark.parametrize(
    ("axis", "seconds", "exposed"), [("tensor", 4.0, 0.5), ("expert", 10.0, 0.4), ("data", 4.0, 0.0)]
)
def test_short_communication_is_hidden_up_to_the_share_that_can_be(axis: str, seconds: float, exposed: float) -> None:
    """Beside a backward pass of 10 s: half of the tensor axis', 0.4 of the exchanges', none of the data axis'."""
    entries = [priced(gemm("backward"), 10.0), priced(sent(axis, "backward"), seconds)]

    assert overlap_communication(entries, SOFTWARE, 0.6)[1].exposed_fraction == pytest.approx(exposed)


def test_a_step_without_overlapping_communication_is_left_as_it_is() -> None:
    """Neither operations that hide nothing nor collectives that take no time change."""
    plain = [priced(gemm(), 1.0), priced(sent("data", "backward", overlaps=False), 1.0)]

    assert overlap_communication(plain) is plain
    assert overlap_communication([priced(sent("data", "backward"), 0.0)])[0].exposed_fraction == 1.0


@pytest.mark.parametrize("seed", range(30))
def test_sums_of_parts_are_those_of_operations(seed: int) -> None:
    """Random operations one by one and in parts: each stage has the same exposed time."""
    random = Random(seed)
    entries = []
    for _ in range(random.randint(1, 12)):
        stage, pass_name = random.choice(STAGES), random.choice(("forward", "backward", "recompute"))
        seconds = random.choice((0.0, 1.0, 2.5, 7.0))
        axis = random.choice(("", "tensor", "data", "expert"))
        operation: Operation = gemm(pass_name, stage=stage, gradient=random.choice(("", "wgrad")))
        if axis:
            operation = sent(axis, pass_name, overlaps=random.random() < 0.7, stage=stage)
        entries.append(priced(operation, seconds))
    share = random.choice((0.0, 0.3, 0.75))
    parts: dict[str, float] = {}
    for entry in entries:
        for part in parts_of(entry.operation):
            parts[part] = parts.get(part, 0.0) + entry.total_time_s
    found = add_exposed_communication(parts, SOFTWARE, share)
    alone = overlap_communication(entries, SOFTWARE, share)

    for stage in STAGES:
        assert found[stage] == pytest.approx(
            sum(entry.total_time_s for entry in alone if entry.operation.stage == stage)
        )
    gradients = [each for each in entries if each.operation.is_weight_gradient and each.operation.stage == "every"]
    assert found[WEIGHT_GRADIENTS] == pytest.approx(sum(each.total_time_s for each in gradients))


def test_operations_of_one_name_are_numbered_by_pass() -> None:
    """Three of the forward pass, one of the backward pass."""
    entries = [priced(gemm(pass_name), 1.0) for pass_name in ("forward", "forward", "backward", "forward")]
    found = index_operations(entries)

    assert list(found) == [("x", "forward", 0), ("x", "forward", 1), ("x", "backward", 0), ("x", "forward", 2)]
    assert list(found.values()) == entries


@pytest.mark.parametrize(
    ("source", "shared", "correlation"),
    [(OWN, 0.9, 0.3), (BORROWED, 0.9, 0.93), (BORROWED, 0.1, 0.5), (BORROWED, 0.0, 0.5)],
)
def test_correlation_of_errors(source: CalibrationSource, shared: float, correlation: float) -> None:
    """With borrowed records the shared part s correlates wholly, the rest as with an own record: s + 0.3 (1 - s)."""
    price = priced(gemm(), 1.0, calibration=source, shared_error=shared).price

    assert error_correlation(price) == pytest.approx(correlation)


def test_interval_of_a_sum_by_hand() -> None:
    """Half-widths of 1 and 2 s below and 2 and 6 s above: sqrt(0.7 (a^2 + b^2) + 0.3 (a + b)^2).

    An operation that takes no time, and one whose time is hidden, add nothing.
    """
    entries = [
        priced(gemm(), 10.0, low_s=9.0, high_s=12.0),
        priced(gemm(repeats=2), 5.0, low_s=4.0, high_s=8.0),
        priced(gemm(), 0.0, low_s=0.0, high_s=5.0),
    ]
    hidden = PricedOperation(sent("data", "forward"), priced(gemm(), 3.0, low_s=1.0, high_s=9.0).price, 0.0)
    low_s, high_s = sqrt(0.7 * 5 + 0.3 * 9), sqrt(0.7 * 40 + 0.3 * 64)
    times = compose_sequence([*entries, hidden])

    assert times.step_s == pytest.approx(20.0)
    assert times.step_low_s == pytest.approx(20.0 - low_s)
    assert times.step_high_s == pytest.approx(20.0 + high_s)
    assert (times.bubble_s, times.layer_forward_s) == (0.0, 0.0)

    # In a pipeline of 4 stages and 4 micro-batches the bubble of 15 s is as uncertain as the 20 s.
    model = TransformerConfig(hidden_size=64, num_layers=8, num_heads=1, vocab_size=64)
    job = Workload(micro_batch_size=1, global_batch_size=4)
    step = compose_step([*entries, hidden], model, job, ParallelLayout(pipeline_parallel=4))
    assert (step.step_s, step.bubble_s) == pytest.approx((35.0, 15.0))
    assert step.step_low_s == pytest.approx(35.0 - 1.75 * low_s)
    assert step.step_high_s == pytest.approx(35.0 + 1.75 * high_s)
    # Four micro-batches through two layers on each stage.
    assert step.layer_forward_s == pytest.approx(20.0 / 8)


def test_an_interval_does_not_go_below_zero() -> None:
    """Half-widths larger than the time end at zero."""
    times = compose_sequence([priced(gemm(), 1.0, low_s=-3.0, high_s=2.0)])

    assert times.step_low_s == 0.0


def test_a_single_pass_waits_for_the_layers_that_there_are() -> None:
    """30 layers on 4 stages of at most 8, a second each: 30 s, of which 22 s are waited."""
    model = TransformerConfig(hidden_size=64, num_layers=30, num_heads=1, vocab_size=64)
    layout = ParallelLayout(pipeline_parallel=4)
    lacking = lacking_share(model, Workload(phase="prefill"), layout)
    sums = {"every": 8.0, "first": 0.0, "last": 0.0, "step": 0.0, WEIGHT_GRADIENTS: 0.0}

    assert combine_stages(sums, 1, layout, lacking=lacking) == (pytest.approx(30.0), pytest.approx(22.0))
    assert lacking_share(model, Workload(), layout) == 0.0


def test_the_busiest_stage_waits_for_the_faster_end() -> None:
    """Of 8 micro-batches, 3 waits of a second and one of 2 s for one of them; the slower end takes 40 s in all."""
    sums = {"every": 8.0, "first": 16.0, "last": 40.0, "step": 5.0, WEIGHT_GRADIENTS: 0.0}

    assert combine_stages(sums, 8, ParallelLayout(pipeline_parallel=4)) == (8.0 + 40.0 + 5.0 + 5.0, 5.0)
    assert combine_stages(sums, 8, ParallelLayout(pipeline_parallel=2)) == (8.0 + 40.0 + 5.0 + 3.0, 3.0)
    assert combine_stages(sums, 8, ParallelLayout()) == (8.0 + 56.0 + 5.0, 0.0)


@pytest.mark.parametrize(
    ("schedule", "hidden", "passes", "share"),
    [("1f1b", 0.6, 4, 0.45), ("1f1b", 0.6, 1, 0.0), ("dualpipe", 0.6, 4, 0.5625), ("dualpipe", 0.9, 4, 0.675)],
)
def test_exchanges_overlap_with_other_micro_batches(schedule: str, hidden: float, passes: int, share: float) -> None:
    """Three of four micro-batches have another one beside them; DualPipe hides at least three quarters."""
    layout = ParallelLayout(pipeline_parallel=2, pipeline_schedule=schedule)

    assert exchange_overlap_fraction(Software(expert_hidden_fraction=hidden), layout, passes) == pytest.approx(share)


@pytest.mark.parametrize("ends", [(False, False), (True, False), (False, True), (True, True)])
def test_ends_are_rebalanced_alike_in_arrays_and_alone(ends: tuple[bool, bool]) -> None:
    """Whole seconds, so that ends are equal or end at zero often, with room for 0 to 3 layers at an end."""
    random = Random(7)
    cases = [[random.randint(0, high) for high in (6, 6, 3, 5)] + [random.randint(1, 3)] for _ in range(300)]
    cases[:20] = [[0, *case[1:]] for case in cases[:20]]
    firsts, lasts, layers, spares, mosts = np.array(cases).T
    first, last = rebalance_ends(1.0 * firsts, 1.0 * lasts, 1.0 * layers, spares, mosts, ends)
    number, _ = rebalance_ends(0.0, 1.0 * lasts[:20], 1.0 * layers[:20], spares[:20], mosts[:20], ends)
    assert np.all(number == first[:20])

    for row, (first_s, last_s, layer_s, spare, most) in enumerate(cases):
        alone = rebalance_ends(float(first_s), float(last_s), float(layer_s), spare, most, ends)
        assert (first[row], last[row]) == alone
        if any(ends):
            # Where a layer is missing at all, each end that counts as a layer lacks one.
            missing_s = layer_s if spare else 0
            assert alone == (max(first_s - ends[0] * missing_s, 0), max(last_s - ends[1] * missing_s, 0))
        else:
            # Each layer goes to the end that is slower; no split of at most as many layers leaves less to wait for.
            least = min(
                max(first_s - here * layer_s, last_s - there * layer_s, 0)
                for here in range(min(most, spare) + 1)
                for there in range(min(most, spare - here) + 1)
            )
            assert max(alone) == least
