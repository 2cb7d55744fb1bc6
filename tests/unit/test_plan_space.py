"""The space of plans and its order against brute force: every split, every schedule, every plan that is not beaten."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.collective import Collective
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.plan.findings import pareto_front, sort_plans
from shapewright.optimize.plan.notes import describe_layout
from shapewright.optimize.plan.request import PlanRequest
from shapewright.optimize.plan.result import Breakdown, Difference, break_down, explain_difference
from shapewright.optimize.plan.space import Schedule, Split, list_device_counts, list_schedules, list_splits
from shapewright.prediction.build import build_scenario
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

H100 = load_device("h100-sxm-80gb")
KEEPS: tuple[dict[str, tuple[Any, ...]], ...] = (
    {},
    {"tensor_parallel": (4, 16)},
    {"pipeline_parallel": (1, 3)},
    {"data_parallel": (2,), "sequence_parallel": (False,)},
    {"context_parallel": (1, 2, 5)},
    {"expert_parallel": (2,), "micro_batch_size": (0, 2, 3)},
    {"expert_tensor_parallel": (None, 2)},
    {"expert_tensor_parallel": (1,), "sequence_parallel": (True,)},
)


def list_by_trial(config: TransformerConfig, seq_len: int, batch: int, request: PlanRequest) -> set[Split]:
    """Every combination of divisors that keeps the rules, one after the other."""
    kept, num_devices = request.kept, request.num_devices
    numbers = [each for each in range(1, num_devices + 1) if num_devices % each == 0]
    experts = range(1, max(config.num_experts, 1) + 1)
    found = set()
    for tensor, pipeline, context in itertools.product(numbers, repeat=3):
        data = num_devices // (tensor * pipeline * context)
        if tensor * pipeline * context * data != num_devices or batch % data:
            continue
        if "tensor_parallel" not in kept and tensor > 8:  # a node of H100s
            continue
        if (
            "context_parallel" not in kept
            and context > 1
            and (context > 64 or seq_len % context or seq_len // context < 1024)
        ):
            continue
        stage = -(-config.num_layers // pipeline)
        if stage * (pipeline - 1) >= config.num_layers:  # the last stage is empty
            continue
        sizes = [size for size in range(1, batch // data + 1) if batch // data % size == 0]
        if "micro_batch_size" not in kept:
            sizes = [size for size in sizes if size <= 256]
        widths: set[int | None] = {None}
        if config.num_experts:
            given = [None if width == tensor else width for width in kept.get("expert_tensor_parallel", ())]
            widths = set(given) if given else {None, None if tensor == 1 else 1}
        for expert, width, sequence, size in itertools.product(experts, widths, (True, False), sizes):
            if config.num_experts % expert or num_devices // pipeline % (expert * (width or tensor)):
                continue
            if width is not None and not sequence:
                continue
            if tensor == 1 and sequence != kept.get("sequence_parallel", (True,))[0]:
                continue
            split = Split(tensor, pipeline, data, context, expert, sequence, size, batch // data // size, width)
            names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel")
            names += ("micro_batch_size",) + (("sequence_parallel",) if tensor > 1 else ())
            if all(request.allows(name, getattr(split, name)) for name in names):
                found.add(split)
    return found


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_splits_are_all_that_keep_the_rules(keep: dict[str, tuple[Any, ...]]) -> None:
    """Random numbers of devices, layers, experts, sequences and tokens; none is missing, and none is listed twice."""
    random = Random(11)
    for _ in range(25):
        num_devices = random.choice((1, 4, 6, 8, 12, 16, 48))
        num_experts = random.choice((0, 0, 4, 6))
        experts = {"num_experts": num_experts, "num_experts_per_token": 2, "moe_intermediate_size": 64}
        config = TransformerConfig(
            hidden_size=64,
            num_layers=random.choice((1, 3, 4, 10)),
            num_heads=1,
            vocab_size=64,
            **experts if num_experts else {},
        )
        seq_len, batch = random.choice((1024, 3072, 4096, 5120)), random.choice((1, 6, 12, 48, 1024))
        scenario = Scenario.of(config, H100, Workload(seq_len=seq_len))
        request = PlanRequest(num_devices=num_devices, kept=keep)
        listed = list(list_splits(scenario, request, num_devices=num_devices, global_batch_size=batch))

        assert len(listed) == len(set(listed))
        assert set(listed) == list_by_trial(config, seq_len, batch, request)


def test_the_widest_context_axis_has_64_devices() -> None:
    """128 devices of at least 1,024 tokens each would hold 131,072 tokens; 64 are tried."""
    config = TransformerConfig(hidden_size=64, num_layers=1, num_heads=1, vocab_size=64)
    scenario = Scenario.of(config, H100, Workload(seq_len=131072))
    splits = list_splits(scenario, PlanRequest(num_devices=128), num_devices=128, global_batch_size=128)

    assert {split.context_parallel for split in splits} == {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize(
    ("layers", "stages", "keep", "chunks"),
    [
        (12, 2, {}, {1, 2, 3, 6}),  # six layers on each stage
        (12, 4, {}, {1, 3}),
        (11, 4, {}, {1}),  # three on the fullest, but twelve chunks are more than there are layers
        (12, 12, {}, {1}),
        (12, 2, {"virtual_pipeline": (2, 5)}, {2}),
        (12, 2, {"pipeline_schedule": ("gpipe", "dualpipe")}, {1}),
        (12, 3, {"pipeline_schedule": ("dualpipe",)}, set()),  # an odd number of stages
        (12, 1, {"virtual_pipeline": (2,)}, set()),
        (12, 1, {}, {1}),
    ],
)
def test_schedules_by_hand(layers: int, stages: int, keep: dict[str, tuple[Any, ...]], chunks: set[int]) -> None:
    """Chunks divide the layers of a stage; other schedules have one; DualPipe is tried only if it is kept."""
    config = TransformerConfig(hidden_size=64, num_layers=layers, num_heads=1, vocab_size=64)
    request = PlanRequest(num_devices=stages, kept=keep)
    names = ("1f1b",) if stages == 1 else ("1f1b", "gpipe", "zero-bubble")
    if stages % 2 == 0 and "dualpipe" in keep.get("pipeline_schedule", ()):
        names = (*names, "dualpipe")
    allowed = [name for name in names if request.allows("pipeline_schedule", name)]
    expected = [Schedule(1, name) for name in allowed if request.allows("virtual_pipeline", 1) and chunks]
    expected += [Schedule(count, "1f1b") for count in sorted(chunks - {1})]

    assert list_schedules(config, stages, request) == expected


@pytest.mark.parametrize(
    ("objective", "given", "counts"),
    [("cost", 96, [96, 48, 24]), ("cost", 8, [8, 4, 2, 1]), ("cost", 6, [6, 3]), ("time", 96, [96])],
)
def test_the_lowest_cost_is_also_looked_for_on_fewer_devices(objective: str, given: int, counts: list[int]) -> None:
    """Halves that fill nodes of eight devices, or fit in one: 12 devices leave half a node."""
    assert list_device_counts(H100, PlanRequest(num_devices=given, objective=objective)) == counts


def random_plans(random: Random) -> dict[str, Any]:
    """A table of plans with few distinct values, so that ties occur."""
    columns = {
        "step_s": (1.0, 1.5, 2.0),
        "bytes": (990.0, 1000.0, 1005.0, 1010.0, 2000.0, 3000.0),
        "split": (0,),
        "policy": (0, 1, 2),
        "sharding": (0, 1, 3),
        "schedule": (0, 1),
        "devices": (4, 8, 16),
    }
    rows = [[random.choice(values) for values in columns.values()] for _ in range(random.randint(1, 30))]
    return dict(zip(columns, map(np.array, zip(*rows, strict=True)), strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_of_the_front_is_beaten_and_every_other_one_is(seed: int) -> None:
    """In time, memory to a hundredth, and devices."""
    table = random_plans(Random(seed))
    front = pareto_front(table)
    names = ("devices", "step_s", "bytes")
    kept, every = (list(zip(*(each[name].tolist() for name in names), strict=True)) for each in (front, table))

    assert front["step_s"].tolist() == sorted(front["step_s"])
    for index, (devices, step_s, needed) in enumerate(kept):
        for other, plan in enumerate(kept):
            if other != index and plan[0] <= devices and plan[1] <= step_s:
                assert needed <= 0.99 * plan[2]
    for devices, step_s, needed in every:
        assert any(plan[0] <= devices and plan[1] <= step_s and needed >= 0.99 * plan[2] for plan in kept)


@pytest.mark.parametrize("seed", range(20))
def test_order_of_equal_plans(seed: int) -> None:
    """After the objective: plans that are not tight, less sharding, then less memory (or time), policy and schedule."""
    table = random_plans(Random(seed))
    rows = [dict(zip(table, row, strict=True)) for row in zip(*(each.tolist() for each in table.values()), strict=True)]
    ways = {
        # Equal costs go to more devices: steps of 1, 1.5 and 2 s on 4 to 16 have costs of 4 to 32.
        "cost": lambda row: (row["step_s"] * row["devices"], -row["devices"], row["step_s"], row["bytes"] > 2000.0),
        "time": lambda row: (row["step_s"], row["bytes"] > 2000.0),
        "memory": lambda row: (row["bytes"],),
    }
    for objective, first in ways.items():

        def key(row: dict[str, float], first: Any = first, objective: str = objective) -> tuple[float, ...]:
            middle = ("step_s", "sharding") if objective == "memory" else ("sharding", "bytes")
            return (*first(row), *(row[name] for name in (*middle, "policy", "schedule")))

        order = sort_plans(table, objective, 2000.0)
        assert [key(rows[row]) for row in order.tolist()] == sorted(map(key, rows))


def test_costs_within_a_thousandth_go_to_more_devices() -> None:
    """The cost of eight devices is 0.05 % higher, that of sixteen 0.3 %."""
    table = {name: np.zeros(3) for name in ("split", "policy", "sharding", "schedule", "bytes")}
    table |= {"devices": np.array([4, 8, 16]), "step_s": np.array([4.0, 2.001, 1.003])}

    assert sort_plans(table, "cost").tolist() == [1, 0, 2]


def test_a_plan_in_one_phrase() -> None:
    """Degrees of one, no sharding, 1F1B and kept activations go without saying."""
    plain = {"micro_batch_size": 3, "recompute": "none", "offload_activations": False, "offload_optimizer": False}
    every = ParallelLayout(
        tensor_parallel=2,
        pipeline_parallel=3,
        virtual_pipeline=4,
        data_parallel=40,
        context_parallel=6,
        expert_parallel=8,
        expert_tensor_parallel=1,
        zero_stage=1,
        sequence_parallel=True,
    )
    moved = {**plain, "recompute": "full", "offload_activations": True, "offload_optimizer": True}

    assert describe_layout(ParallelLayout(), plain) == "micro-batch 3"
    assert describe_layout(ParallelLayout(sequence_parallel=False), plain) == "micro-batch 3"
    assert describe_layout(every, moved) == (
        "tp 2, pp 3, vpp 4, dp 40, cp 6, ep 8, etp 1, zero 1, micro-batch 3, full recompute, activations on host, "
        "optimizer on host"
    )
    other = replace(every, sequence_parallel=False, expert_tensor_parallel=None, virtual_pipeline=1)
    words = describe_layout(replace(other, pipeline_schedule="gpipe"), plain)
    assert words == "tp 2, pp 3, dp 40, cp 6, ep 8, zero 1, no sp, gpipe, micro-batch 3"


def test_the_difference_of_two_steps_by_hand() -> None:
    """The bubble costs 3 s more and sends a second, GEMMs 2 s less; without a slower part it is memory."""
    best, other = (
        Breakdown({"GEMMs": 3.0, "bubble": 2.0}, {}),
        Breakdown({"GEMMs": 1.0, "bubble": 5.0, "sends": 1.0}, {}),
    )

    assert explain_difference(best, other) == Difference("bubble", lost_s=3.0, gained_s=2.0, slower_by_s=2.0)
    assert explain_difference(other, best) == Difference("GEMMs", lost_s=2.0, gained_s=4.0, slower_by_s=-2.0)
    assert explain_difference(best, best) == Difference("memory", lost_s=0.0, gained_s=0.0, slower_by_s=0.0)
    less = Breakdown({"GEMMs": 2.5, "bubble": 2.0}, {})
    assert explain_difference(best, less) == Difference("memory", lost_s=0.0, gained_s=0.5, slower_by_s=-0.5)


@pytest.mark.parametrize(
    "layout", [{"tensor_parallel": 4, "data_parallel": 4}, {"pipeline_parallel": 2, "data_parallel": 8}]
)
def test_parts_of_a_step_hold_each_operation_once(layout: dict[str, int]) -> None:
    """What is between nodes has ranks in several; exposed and hidden communication are all of it."""
    job = {"global_batch_size": 64, "micro_batch_size": 1, "seq_len": 1024, "recompute": "full"}
    prediction = build_scenario("llama-3.2-1b", H100, workload=job, layout=layout).predict()
    found = break_down(prediction)
    expected: dict[str, float] = {}
    for entry in prediction.busiest_operations:
        operation = entry.operation
        name = "memory-bound operations"
        if isinstance(operation, Collective):
            name = f"{operation.axis} communication "
            name += "between nodes" if operation.num_ranks > operation.ranks_per_node else "in node"
        elif operation.pass_name in ("step", "recompute"):
            name = {"step": "optimizer step", "recompute": "recomputation"}[operation.pass_name]
        elif operation.kind in ("gemm", "attention"):
            name = {"gemm": "GEMMs", "attention": "attention"}[operation.kind]
        expected[name] = expected.get(name, 0.0) + float(entry.price.time_s) * int(operation.repeats)

    for name, all_s in expected.items():
        assert found.parts[name] + found.hidden.get(name, 0.0) == pytest.approx(all_s, rel=1e-9), name
    assert set(found.parts) - set(expected) == ({"pipeline bubble"} if "pipeline_parallel" in layout else set())
    assert list(found.parts.values()) == sorted(found.parts.values(), reverse=True)
    assert sum(found.parts.values()) == pytest.approx(prediction.step_time_s)
