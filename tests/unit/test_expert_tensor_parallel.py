"""Routed experts that are split over another number of devices than other matrices (expert_tensor_parallel)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.app.formats.registry import write_format
from shapewright.core.errors import LayoutError
from shapewright.hardware.loader import load_device
from shapewright.lint.check import check_scenario
from shapewright.lowering.model import lower
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.memory.estimate import estimate_memory
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.plan.notes import describe_layout
from shapewright.prediction.predict import predict
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

H, E, K, F = 64, 16, 2, 96
CONFIG = TransformerConfig(
    hidden_size=H,
    num_heads=8,
    num_layers=4,
    vocab_size=96,
    max_position_embeddings=64,
    num_experts=E,
    num_experts_per_token=K,
    moe_intermediate_size=F,
    gated_mlp=True,
)
B, S = 2, 32
TRAINING = Workload(micro_batch_size=B, seq_len=S)
TOKENS = B * S
WHOLE = ParallelLayout(tensor_parallel=4, data_parallel=2, expert_parallel=8, expert_tensor_parallel=1, zero_stage=1)
HALVES = replace(WHOLE, expert_parallel=4, expert_tensor_parallel=2)
INSIDE = ParallelLayout(tensor_parallel=4, expert_parallel=4, expert_tensor_parallel=1)


def find(layout: ParallelLayout, name: str, workload: Workload = TRAINING) -> list[Operation]:
    """Operations of the forward pass and of the step whose name begins so."""
    passes = ("forward", "step")
    return [each for each in lower(CONFIG, workload, layout) if each.name.startswith(name) and each.pass_name in passes]


def only(layout: ParallelLayout, name: str, workload: Workload = TRAINING) -> Any:
    """The one of these."""
    (found,) = find(layout, name, workload)
    return found


def test_whole_experts() -> None:
    """A device sends the k_e rows of its T / t tokens to 8 devices, and computes as many with whole matrices."""
    gemm, exchange = only(WHOLE, "moe.gate_up"), only(WHOLE, "moe.dispatch")
    assert isinstance(gemm, GroupedGemm)
    assert (gemm.m, gemm.n, gemm.k, gemm.groups) == (TOKENS // 4 * K, 2 * F, H, E // 8)
    assert (exchange.num_ranks, exchange.ranks_per_node) == (8, 8)
    assert exchange.message_bytes == TOKENS // 4 * K * H * 2
    assert find(WHOLE, "moe.all_gather") == find(WHOLE, "moe.reduce_scatter") == []


def test_shared_experts_gather_rows() -> None:
    """With two pieces a device computes the rows of both devices that share an expert, each with half the columns."""
    gemm, gather = only(HALVES, "moe.gate_up"), only(HALVES, "moe.all_gather")
    assert (gemm.m, gemm.n, gemm.groups) == (TOKENS // 4 * K * 2, F, E // 4)
    assert (gather.num_ranks, gather.message_bytes) == (2, TOKENS // 4 * K * 2 * H * 2)
    assert only(HALVES, "moe.reduce_scatter").message_bytes == gather.message_bytes
    # The product keeps what it read, as memory counts it, so that the backward pass gathers no rows again.
    assert not [each for each in lower(CONFIG, TRAINING, HALVES) if each.name == "moe.backward.gather_again"]


def test_default_is_the_tensor_degree() -> None:
    """Asking for as many pieces as the tensor axis has devices changes no operation."""
    layout = ParallelLayout(tensor_parallel=4, data_parallel=2, expert_parallel=2)
    assert lower(CONFIG, TRAINING, layout) == lower(CONFIG, TRAINING, replace(layout, expert_tensor_parallel=4))


def test_expert_replicas() -> None:
    """16 devices hold 8 shares of the experts twice: gradients go between two of them, others between four replicas."""
    layout = replace(WHOLE, data_parallel=4)
    assert (layout.num_expert_replicas, WHOLE.num_expert_replicas) == (2, 1)
    gradients = {
        each.name.split(".")[0]: each
        for each in lower(CONFIG, TRAINING, layout)
        if isinstance(each, Collective) and each.axis == "data" and each.pass_name == "backward"
    }
    assert (gradients["experts"].num_ranks, gradients["layers"].num_ranks) == (2, 4)
    # Copies are 8 devices apart, so in nodes of 8 no two of them share one.
    assert gradients["experts"].ranks_per_node == 1
    assert all(each.name.split(".")[0] != "experts" for each in lower(CONFIG, TRAINING, WHOLE) if _is_gradient(each))


def _is_gradient(operation: Operation) -> bool:
    return isinstance(operation, Collective) and operation.axis == "data"


@pytest.mark.parametrize("layout", [WHOLE, HALVES, replace(WHOLE, data_parallel=8, expert_parallel=2)])
def test_memory_of_expert_weights_and_states(layout: ParallelLayout) -> None:
    """Weights of experts are divided by both degrees, their optimizer states also by the replicas."""
    alike = ParallelLayout(tensor_parallel=4, data_parallel=layout.data_parallel, zero_stage=1)
    experts = CONFIG.num_layers * E * 3 * F * H
    whole, own = (estimate_memory(CONFIG, TRAINING, each) for each in (alike, layout))
    pieces = layout.expert_parallel * layout.expert_tensor_degree
    assert own.weights_bytes - whole.weights_bytes == pytest.approx(2.0 * experts * (1 / pieces - 1 / 4))
    copies = layout.num_expert_replicas
    shares = 1 / (pieces * copies) - 1 / (4 * layout.data_parallel)
    assert shares == 0.0  # all devices of a stage hold all states once, whichever way
    assert own.optimizer_bytes == pytest.approx(whole.optimizer_bytes)


def test_activation_memory_inside_experts() -> None:
    """A lower expert tensor degree gives wider matrices with fewer rows; GEMM inputs are gathered over the shards."""
    alike = ParallelLayout(tensor_parallel=4, data_parallel=2, expert_parallel=2)
    read = {1: WHOLE, 2: HALVES, 4: alike}
    kept = {pieces: estimate_memory(CONFIG, TRAINING, each).activations_bytes for pieces, each in read.items()}
    gathered = CONFIG.num_layers * TOKENS // 4 * K * H * 2
    assert kept[4] - kept[2] == 2 * gathered
    assert kept[2] - kept[1] == gathered


def test_server_with_experts_inside_the_tensor_axis() -> None:
    """Each device computes the rows of its experts from tokens that all devices have, followed by one all_reduce."""
    workload = Workload(phase="prefill", micro_batch_size=B, seq_len=S)
    gemm = only(INSIDE, "moe.gate_up", workload)
    assert (gemm.m, gemm.n, gemm.groups) == (TOKENS * K // 4, 2 * F, E // 4)
    assert only(INSIDE, "moe.all_reduce", workload).message_bytes == TOKENS * H * 2
    assert find(INSIDE, "moe.dispatch", workload) == find(INSIDE, "moe.permute", workload) == []
    # sglang's moe_tp_size 2 beside moe_ep_size 2
    assert only(replace(INSIDE, expert_parallel=2, expert_tensor_parallel=2), "moe.gate_up", workload).n == F


def test_server_with_experts_over_replicas() -> None:
    """Each device of the tensor axis sends a share of the tokens, and all get all results back."""
    workload = Workload(phase="decode", micro_batch_size=6, context_len=S)
    layout = replace(INSIDE, data_parallel=2, expert_parallel=8)
    assert only(layout, "moe.dispatch", workload).message_bytes == 2 * K * H * 2  # two of six tokens, rounded up
    assert only(layout, "moe.gate_up", workload).m == 2 * 6 * K // 8  # rows of two replicas on 8 devices
    assert only(layout, "moe.outputs.all_gather", workload).message_bytes == 6 * H * 2


@pytest.mark.parametrize(
    ("fields", "workload", "message"),
    [
        ({"sequence_parallel": False}, {}, "requires sequence_parallel"),
        ({"expert_parallel": 1, "expert_tensor_parallel": 5, "data_parallel": 5}, {}, "divide moe_intermediate_size"),
        ({"expert_parallel": 2}, {"phase": "decode", "context_len": 8}, "is not supported by serving"),
    ],
)
def test_unsupported_degrees_are_rejected(fields: dict[str, Any], workload: dict[str, Any], message: str) -> None:
    """The message states the problem and a remedy."""
    with pytest.raises(LayoutError, match=message):
        lower(CONFIG, replace(TRAINING, **workload), replace(WHOLE, **fields))


def test_expert_degrees_must_divide_a_stage() -> None:
    """The message names both degrees and the devices, and suggests expert_tensor_parallel if it is not given."""
    with pytest.raises(LayoutError, match=r"expert_tensor_parallel = 8 \* 2 must divide .* = 4 \* 2 \* 1"):
        replace(WHOLE, expert_tensor_parallel=2)
    with pytest.raises(LayoutError, match="or use expert_tensor_parallel=1"):
        replace(WHOLE, expert_tensor_parallel=None)
    with pytest.raises(LayoutError, match=r"expert_tensor_parallel=0 must be an integer from 1"):
        replace(WHOLE, expert_tensor_parallel=0)


def test_dense_model_rejects_expert_degrees() -> None:
    """expert_tensor_parallel requires a model with experts."""
    with pytest.raises(LayoutError, match="requires a model with experts"):
        lower(read_model("llama-3-8b").config, TRAINING, ParallelLayout(tensor_parallel=4, expert_tensor_parallel=1))


def test_plan_text_and_megatron_arguments() -> None:
    """The plan text names the degree, and Megatron-LM's arguments contain it unless it is the default."""
    workload: dict[str, Any] = {name: getattr(TRAINING, name) for name in ("micro_batch_size", "recompute")}
    words = describe_layout(WHOLE, {**workload, "offload_activations": False, "offload_optimizer": False})
    assert "ep 8, etp 1" in words
    config = read_model("mixtral-8x7b").config
    assert "--expert-tensor-parallel-size 1" in write_format("megatron-args", config, layout=WHOLE)
    alike = replace(WHOLE, expert_parallel=2, expert_tensor_parallel=None)
    assert "--expert-tensor-parallel-size" not in write_format("megatron-args", config, layout=alike)


def test_lint_suggests_whole_experts() -> None:
    """Experts of 832 over 4 devices are 208 wide, which loses alignment; whole ones do not, and are suggested."""
    config = replace(read_model("qwen3-30b-a3b").config, moe_intermediate_size=832)
    layout = ParallelLayout(tensor_parallel=4, data_parallel=2)
    report = check_scenario(Scenario.of(config, load_device("h100-sxm-80gb"), Workload(seq_len=4096), layout))
    repairs = [
        suggestion
        for finding in report.findings
        if finding.code == "PL104"
        for suggestion in finding.suggestions
        if "expert_tensor_parallel" in suggestion.changes
    ]
    assert [each.changes for each in repairs] == [{"expert_tensor_parallel": 1, "expert_parallel": 4}]


def test_zero_shards_experts_that_have_replicas_in_the_tensor_axis() -> None:
    """Whole experts over 2 of 4 devices of a tensor axis are on two each, so that ZeRO halves their states."""
    for expert_parallel, num_replicas in ((2, 2), (4, 1)):
        layout = replace(INSIDE, expert_parallel=expert_parallel, sequence_parallel=True, zero_stage=1)
        found = predict(CONFIG, device=load_device("h100-sxm-80gb"), workload=TRAINING, layout=layout)
        is_noted = any("no effect with a single replica" in note for note in found.warnings)
        assert is_noted is (num_replicas == 1)
        whole = estimate_memory(CONFIG, TRAINING, replace(layout, zero_stage=0))
        assert (found.memory.optimizer_bytes < whole.optimizer_bytes) is (num_replicas > 1)
