"""Modules wrapped by fully_shard (FSDP2), as one rank of a fake process group runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import shapewright
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.torch_trace.trace import Trace

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp", reason="needs FSDP2")

WIDTH, LAYERS, RANKS = 512, 4, 8
LAYER_WEIGHTS = 2 * 4 * WIDTH * WIDTH


class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
    """An MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            torch.nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Any) -> Any:
        """Up, down and add."""
        return x + self.down(torch.relu(self.up(x)))


class Stack(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, 1000, bias=False)

    def forward(self, tokens: Any) -> Any:
        """Logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    """A process group that sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2 * RANKS)
    yield
    dist.destroy_process_group()


def build() -> Any:
    """The module, on the meta device."""
    with torch.device("meta"):
        return Stack()


def shard(module: Any, *, replicas: int = 1, **options: Any) -> Any:
    """Shard each block and the rest over RANKS ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = {"mesh_shape": (replicas, RANKS), "mesh_dim_names": ("replicate", "shard")}
    mesh = init_device_mesh("cpu", **ranks)
    mesh = mesh if replicas > 1 else mesh["shard"]
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def trace(module: Any, **options: Any) -> Trace:
    """Trace two sequences of 64 tokens."""
    return shapewright.trace(module, "tokens=int64[2,64]", **options)


def predict(found: Trace) -> Any:
    """Prediction on an H100."""
    return shapewright.predict(found, device="h100-sxm-80gb")


def sent(found: Trace) -> dict[tuple[str, str], tuple[int, float]]:
    """Executions and message of the blocks' collectives, by name and pass."""
    return {
        (one.op_name, one.pass_name): (int(one.repeats), float(one.message_bytes))
        for one in found.operations
        if isinstance(one, Collective) and "layers" in one.name
    }


def test_weights_are_gathered_and_gradients_reduced() -> None:
    """A block is gathered for each pass in the format of its policy, and its gradients are reduced in theirs."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = trace(shard(build(), mp_policy=narrow))
    weights, gradients = 2.0 * LAYER_WEIGHTS, 4.0 * LAYER_WEIGHTS

    assert sent(found) == {
        ("all_gather", "forward"): (LAYERS, weights),
        ("all_gather", "backward"): (LAYERS, weights),
        ("reduce_scatter", "backward"): (LAYERS, gradients),
    }
    assert (found.dtype, found.parameter_dtype) == ("bf16", "fp32")
    assert all(one.num_ranks == RANKS and one.overlaps for one in found.operations if isinstance(one, Collective))


def test_kept_weights_are_gathered_once() -> None:
    """Without resharding after the forward pass; the root is gathered once in any case."""
    found = trace(shard(build(), reshard_after_forward=False))
    root = [one for one in found.operations if isinstance(one, Collective) and "layers" not in one.name]

    assert ("all_gather", "backward") not in sent(found)
    assert [(one.op_name, one.pass_name) for one in root] == [
        ("all_gather", "forward"),
        ("reduce_scatter", "backward"),
    ]


def test_replicas_of_shards_reduce_their_parts() -> None:
    """With hybrid sharding, the replicas on other nodes all-reduce an eighth of the gradients."""
    found = trace(shard(build(), replicas=2))
    priced = shapewright.predict(found, device="h100-sxm-80gb")
    between = [
        entry.operation
        for entry in priced.operations
        if isinstance(entry.operation, Collective) and entry.operation.op_name == "all_reduce"
    ]

    assert sent(found)["all_reduce", "backward"] == (LAYERS, 4.0 * LAYER_WEIGHTS / RANKS)
    assert {(one.num_ranks, one.ranks_per_node) for one in between} == {(2, 1)}


def test_computation_is_that_of_the_module_and_memory_is_a_part() -> None:
    """GEMMs equal those without sharding; weights, gradients and optimizer states are an eighth."""
    whole, part = trace(build()), trace(shard(build()))
    one, other = (shapewright.predict(each, device="h100-sxm-80gb") for each in (whole, part))

    def gemms(found: Trace) -> list[Any]:
        return [each for each in found.operations if isinstance(each, Gemm)]

    assert gemms(part) == gemms(whole)
    assert (part.num_parameters, part.num_trainable) == (whole.num_parameters, whole.num_trainable)
    assert part.num_updated == whole.num_parameters // RANKS
    assert part.memory.weights_bytes == pytest.approx(whole.memory.weights_bytes / RANKS, rel=0.01)
    assert other.optimizer_bytes == pytest.approx(one.optimizer_bytes / RANKS, rel=0.01)
    # Two gathered blocks and the root's weights exist besides, and complete gradients of a block and the root.
    complete = 4.0 * (3 * LAYER_WEIGHTS + 4 * 1000 * WIDTH)
    assert part.memory.peak_bytes < whole.memory.weights_bytes / RANKS + complete + whole.memory.saved_bytes
    assert part.memory.peak_bytes < whole.memory.peak_bytes
    assert any("8 ranks" in note for note in part.notes)


def test_another_format_is_that_of_the_shards_too() -> None:
    """A trace in bf16 has gathers, weights and an optimizer of 16 bits, such as GaLore."""
    found = trace(shard(build()), dtype="bf16")
    moments = shapewright.predict(found, device="h100-sxm-80gb", workload={"optimizer": "galore"}).optimizer_bytes

    assert sent(found)["all_gather", "forward"] == (LAYERS, 2.0 * LAYER_WEIGHTS)
    assert found.memory.weights_bytes == pytest.approx(2.0 * found.num_parameters / RANKS, rel=0.01)
    assert moments < 4.0 * found.num_parameters / RANKS


def test_frozen_blocks_and_forward_passes_reduce_nothing() -> None:
    """A frozen block has no gradient to reduce, and a forward pass gathers alone."""
    module = shard(build())
    module.layers[0].requires_grad_(requires_grad=False)
    module.layers[1].requires_grad_(requires_grad=False)

    assert sent(trace(module))["reduce_scatter", "backward"][0] == LAYERS - 2
    assert sent(trace(module, phase="prefill")) == {("all_gather", "forward"): (LAYERS, 4.0 * LAYER_WEIGHTS)}


def test_tensor_and_data_axes_together() -> None:
    """Two tensor ranks halve the GEMMs of a block, and eight data ranks gather the half that a tensor rank holds."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = build()
    mesh = init_device_mesh("cpu", (RANKS, 2), mesh_dim_names=("data", "tensor"))
    for layer in module.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["data"])
    found = trace(fully_shard(module, mesh=mesh["data"]))
    up = next(one for one in found.operations if isinstance(one, Gemm) and one.name == "layers.0-3.up")
    gathered = sent(found)["all_gather", "forward"]

    assert (up.m, up.n, up.k) == (128, 2 * WIDTH, WIDTH)
    assert gathered == (LAYERS, 4.0 * LAYER_WEIGHTS / 2)


def test_rates_are_those_of_the_job() -> None:
    """Each of eight ranks takes two sequences of 64 tokens, and each rank of their replicas too."""
    alone, sharded, replicated = (trace(module) for module in (build(), shard(build()), shard(build(), replicas=2)))
    tokens = [found.tokens_per_s * found.step_time_s for found in map(predict, (alone, sharded, replicated))]

    assert tokens == pytest.approx([128, 128 * RANKS, 2 * 128 * RANKS])


def test_the_module_is_left_as_it_was() -> None:
    """Parameters and hooks of FSDP are back after a trace, so that a second one finds the same."""
    module = shard(build())
    before = dict(module.named_parameters())
    hooks = [dict(each._forward_pre_hooks) for each in module.modules()]
    first, second = trace(module), trace(module)

    assert all(one is before[name] for name, one in module.named_parameters())
    assert [dict(each._forward_pre_hooks) for each in module.modules()] == hooks
    assert first == second
