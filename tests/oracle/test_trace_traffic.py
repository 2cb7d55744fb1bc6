"""Bytes of memory-bound operators in traces, by hand: what they read and write, each byte once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="tracing needs the trace extra (torch)")

import shapewright
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.models.transformer import TransformerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.oracle

H100 = load_device("h100-sxm-80gb")
ROWS, WIDTH, CHOSEN = 1024, 256, 64
WHOLE, PART = 2 * ROWS * WIDTH, 2 * CHOSEN * WIDTH  # bf16 [byte]
INDICES = 8 * CHOSEN  # int64 [byte]


def trace_pointwise(function: Callable[..., Any], *, fused: bool = False) -> dict[str, Pointwise]:
    """Memory-bound operations by operator, of a function of a tensor, a part of its rows, and their indices."""

    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, part: Any, rows: Any) -> Any:
            return function(x, part, rows)

    inputs = f"x=bfloat16[{ROWS},{WIDTH}], part=bfloat16[{CHOSEN},{WIDTH}], rows=int64[{CHOSEN}]"
    found = shapewright.trace(Module(), inputs, phase="prefill", fused=fused)
    return {one.name.rpartition(".")[2]: one for one in found.operations if isinstance(one, Pointwise)}


def bytes_of(operation: Pointwise) -> tuple[float, float]:
    """Bytes read and written."""
    return float(operation.read_bytes), float(operation.written_bytes)


def _assign_by_mask(x: Any, _: Any, __: Any) -> Any:
    x[x > 0] = 0
    return x


@pytest.mark.parametrize(
    ("operator", "function", "read", "written"),
    [
        # Only sizes and format are taken of the tensor.
        ("zeros_like", lambda x, _, __: torch.zeros_like(x), 0, WHOLE),
        ("new_zeros", lambda x, _, __: x.new_zeros(CHOSEN), 0, 2 * CHOSEN),
        ("exponential_", lambda x, _, __: x.exponential_(), 0, WHOLE),
        # Rows are added to what is there.
        ("index_add_", lambda x, part, rows: x.index_add_(0, rows, part), 2 * PART + INDICES, PART),
        ("index_copy_", lambda x, part, rows: x.index_copy_(0, rows, part), PART + INDICES, PART),
        ("index_fill_", lambda x, _, rows: x.index_fill_(0, rows, 1.0), INDICES, PART),
        ("index_put_", lambda x, part, rows: x.index_put_((rows,), part, accumulate=True), 2 * PART + INDICES, PART),
        ("scatter_", lambda x, _, rows: x.scatter_(1, rows[:, None], 1.0), INDICES, 2 * CHOSEN),
        # PyTorch runs it as masked_fill_: a byte of mask for each element.
        ("masked_fill_", _assign_by_mask, WHOLE + ROWS * WIDTH, WHOLE),
        # Halves of one tensor are different bytes.
        ("mul", lambda x, _, __: x[:, : WIDTH // 2] * x[:, WIDTH // 2 :], WHOLE, WHOLE / 2),
        ("mul", lambda x, _, __: x * x, WHOLE, WHOLE),
    ],
)  # fmt: skip
def test_parts_of_tensors_are_counted(operator: str, function: Any, read: float, written: float) -> None:
    """Operators read and write the bytes that they touch."""
    assert bytes_of(trace_pointwise(function)[operator]) == (read, written)


def _gate(x: Any, _: Any, __: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


def test_a_merged_chain_reads_both_halves() -> None:
    """A chain whose members read different halves of a tensor reads all of it."""
    (chain,) = trace_pointwise(_gate, fused=True).values()

    assert bytes_of(chain) == (WHOLE, WHOLE / 2)


def test_the_gradient_of_a_plain_activation_has_no_gate() -> None:
    """It reads two tensors and writes one, as an activation with a gate does, and is priced as tables price it."""
    module, workload = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU()), {"micro_batch_size": 4}
    found = shapewright.trace(module, "bfloat16[8192,1024]", dtype="bf16")
    shape = {"hidden_size": 1024, "num_layers": 1, "num_heads": 16, "vocab_size": 4096, "activation": "gelu"}
    table = shapewright.predict(TransformerConfig(**shape), device=H100, workload=workload | {"seq_len": 2048})
    traced = {one.operation.name: one for one in shapewright.predict(found, device=H100).operations}

    own = traced["1.gelu.backward"].price.time_s
    (known,) = (one for one in table.operations if one.operation.name == "mlp.activation.backward")
    assert (own, traced["1.gelu.backward"].operation.num_bytes) == (known.price.time_s, 3 * 2 * 8192 * 4096)


def test_a_chain_with_a_gate_is_priced_as_one() -> None:
    """An activation merged with the product with its gate is one kernel, as in tables."""
    (chain,) = trace_pointwise(_gate, fused=True).values()

    assert chain.is_gated
    assert trace_pointwise(lambda x, _, __: torch.nn.functional.silu(x))["silu"].is_gated is False


def test_cross_entropy_moves_the_bytes_of_tables() -> None:
    """Logits are cast, normalized, and both again backward; the loss of a row reads one element of it."""

    class Module(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(WIDTH, 4096, bias=False)

        def forward(self, x: Any, target: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.head(x).float(), target)

    with torch.device("meta"):
        module = Module()
    found = shapewright.trace(module, f"x=bfloat16[{ROWS},{WIDTH}], target=int64[{ROWS}]", dtype="bf16")
    moved = {
        pass_name: sum(one.num_bytes for one in found.operations if _is_loss(one) and one.pass_name == pass_name)
        for pass_name in ("forward", "backward")
    }
    shape = {"hidden_size": WIDTH, "num_layers": 1, "num_heads": 4, "vocab_size": 4096}
    workload = {"micro_batch_size": 1, "seq_len": ROWS}
    table = shapewright.predict(TransformerConfig(**shape), device=H100, workload=workload)
    expected = {one.operation.pass_name: one.operation.num_bytes for one in table.operations if _is_loss(one.operation)}

    # The rest are targets, weights of the classes and losses of rows, a few bytes each.
    assert moved["forward"] == pytest.approx(3.5 * 4 * ROWS * 4096, rel=2e-3)
    assert moved["backward"] == pytest.approx(5.5 * 4 * ROWS * 4096, rel=2e-3)
    assert moved == pytest.approx(expected, rel=2e-3)


def _is_loss(operation: Any) -> bool:
    """Whether an operation is part of the cross entropy."""
    kinds = ("permute", "softmax", "cross_entropy", "embedding")
    return isinstance(operation, Pointwise) and operation.operation in kinds and "embedding" not in operation.name


def test_the_gradient_of_a_pool_reads_its_own_gradient_alone() -> None:
    """Of the input of the pool only sizes are taken."""
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.AvgPool2d(2))
    found = shapewright.trace(module, "float32[8,3,64,64]")
    (gradient,) = (one for one in found.operations if one.name == "1.avg_pool2d.backward")

    assert isinstance(gradient, Pointwise)
    assert bytes_of(gradient) == (4 * 8 * 16 * 32 * 32, 4 * 8 * 16 * 64 * 64)
