"""Whole layers and whole steps, made ready to be measured like any operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shapewright.bench.prepared import Prepared, num_input_sets, relative_error, torch_dtype
from shapewright.bench.torch_layer import make_layer, make_pass, require_supported, run_layer
from shapewright.bench.torch_model import Decoder, make_optimizer_step
from shapewright.errors import BenchError
from shapewright.layout import ParallelLayout
from shapewright.memory import list_saved_tensors
from shapewright.whole import FORWARD

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend
    from shapewright.bench.torch_layer import MakeTensor
    from shapewright.whole import LayerRun, StepRun

COMPILED = "compiled"
# The first tokens of a causal model do not depend on later ones: so many are computed again in fp32.
_CHECKED_TOKENS = 16
# Rounding of a chain of a dozen operations, for the formats that a layer is computed in: some times that of one.
_LAYER_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
# A fresh model knows nothing: its loss is the logarithm of the vocabulary, give or take what random logits add.
_LOSS_ROOM = 2.0


def prepare_layer(part: LayerRun, backend: Backend, variant: str) -> Prepared:
    """Make one layer ready: forward, or forward and backward with the gradients of input and weights.

    Args:
        part: The layer.
        backend: Where it runs.
        variant: COMPILED, or empty to run it as it is.

    Raises:
        BenchError: it is of a kind that is not measured whole, or does not fit.
    """
    import torch

    config, workload = part.question()
    require_supported(config, workload)
    _set_precision(part.dtype)
    with_gradient = part.passes != FORWARD
    saved = sum(tensor.num_bytes for tensor in list_saved_tensors(config, workload, ParallelLayout()))
    make = _make_weights(backend, part.dtype, requires_grad=with_gradient)
    _require_room(saved + _weight_bytes(part.operations()), backend)
    weights = make_layer(config, make)
    lead = (workload.micro_batch_size, workload.query_len, config.hidden_size)
    set_bytes = 2.0 * math.prod(lead) * torch_dtype(part.dtype).itemsize
    draw = _make_weights(backend, part.dtype, requires_grad=False)
    inputs = [
        (draw(lead, 1.0).requires_grad_(with_gradient), draw(lead, 1.0))
        for _ in range(min(2, num_input_sets(set_bytes, backend)))
    ]
    shared = make_pass(config, workload, inputs[0][0])

    def forward(x: Any) -> Any:
        return run_layer(weights, x, shared)

    run = forward
    if variant == COMPILED:
        # What was compiled for other layers counts towards a limit after which nothing is compiled, silently. A part
        # that runs as it is would be no compiled layer.
        torch.compiler.reset()
        run = torch.compile(forward, dynamic=False, fullgraph=True)
    learned = list(weights.values())

    def call(x: Any, gradient: Any) -> Any:
        if not with_gradient:
            with torch.no_grad():
                return run(x)
        out = run(x)
        return out, torch.autograd.grad(out, [x, *learned], gradient)

    def check(found: Any, arguments: tuple[Any, ...]) -> float:
        out, gradients = found if with_gradient else (found, ())
        if not all(bool(tensor.isfinite().all()) for tensor in (out, *gradients)):
            return float("nan")
        return _error_of_layer(out, arguments[0], weights, part)

    def figures() -> dict[str, float]:
        found = _peak(backend, lambda: call(*inputs[0]))
        if with_gradient and variant != COMPILED:
            found["activation_bytes"] = count_saved_bytes(lambda: forward(inputs[0][0]), learned)
        return found

    return Prepared(
        inputs=inputs,
        call=call,
        check=check,
        kernel=f"torch {variant or 'eager'} {workload.attention}",
        set_bytes=float(part.num_bytes),
        tolerance=_LAYER_TOLERANCE[part.dtype],
        figures=figures,
    )


def _error_of_layer(out: Any, x: Any, weights: dict[str, Any], part: LayerRun) -> float:
    """How far the first tokens lie from the same ones in fp32; 0 where what was dropped is not known."""
    import torch

    config, workload = part.question()
    if workload.is_training and (config.hidden_dropout or config.attention_dropout):
        return 0.0
    few = x.detach()[:1, :_CHECKED_TOKENS].float()
    wide = {name: weight.detach().float() for name, weight in weights.items()}
    with torch.no_grad():
        reference = run_layer(wide, few, make_pass(config, workload, few, num_tokens=few.shape[1]))
    return relative_error(out.detach()[:1, :_CHECKED_TOKENS], reference)


def prepare_step(part: StepRun, backend: Backend) -> Prepared:
    """Make a whole step ready: training with its optimiser, a prefill, or one token of decode.

    Raises:
        BenchError: the model is of a kind that is not measured whole, or does not fit.
    """
    import torch

    config, workload = part.question()
    require_supported(config, workload)
    _set_precision(part.dtype)
    _require_room(part.estimate_figures()["peak_memory_bytes"], backend)
    model = Decoder(config, workload, _make_weights(backend, part.dtype, requires_grad=workload.is_training))
    shared = model.shared()
    length = workload.query_len + (1 if workload.is_training else 0)
    tokens = torch.randint(0, config.vocab_size, (workload.micro_batch_size, length), device=backend.torch_device)
    if workload.is_training:
        optimize = make_optimizer_step(model.parameters(), fused=True)

        def call(tokens: Any) -> Any:
            loss = model.loss(tokens, shared)
            loss.backward()
            optimize()
            return loss.detach()

    else:
        cache = model.make_cache()

        def call(tokens: Any) -> Any:
            with torch.no_grad():
                return model.run(tokens, shared, cache)

    def check(found: Any, _arguments: tuple[Any, ...]) -> float:
        if not bool(found.isfinite().all()):
            return float("nan")
        if not workload.is_training:
            return 0.0
        expected = math.log(config.vocab_size)
        return 0.0 if abs(float(found) - expected) < _LOSS_ROOM else math.inf

    return Prepared(
        inputs=[(tokens,)],
        call=call,
        check=check,
        kernel=f"torch eager {workload.attention}",
        set_bytes=float(part.num_bytes),
        # A graph of a training step would need the memory of its activations twice.
        capturable=not workload.is_training,
        tolerance=0.0,
        figures=lambda: _peak(backend, lambda: call(tokens)),
    )


def count_saved_bytes(run: Callable[[], object], parameters: list[Any]) -> float:
    """Bytes of the storages that a forward pass keeps for its backward pass, parameters left out. [byte]"""
    import torch

    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor  # alive until all are counted, or its place would be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    saved_bytes = float(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    del result
    return saved_bytes


def _peak(backend: Backend, run: Callable[[], object]) -> dict[str, float]:
    peak_bytes = backend.peak_bytes(run)
    return {} if peak_bytes is None else {"peak_memory_bytes": peak_bytes}


def _make_weights(backend: Backend, dtype: str, *, requires_grad: bool) -> MakeTensor:
    """Tensors of their own, for an optimiser writes to them."""
    import torch

    kind = torch_dtype(dtype)

    def make(shape: tuple[int, ...], deviation: float) -> Any:
        if deviation == 0.0:
            weight = torch.ones(shape, device=backend.torch_device, dtype=kind)
        else:
            weight = torch.empty(shape, device=backend.torch_device, dtype=kind).normal_(0.0, deviation)
        return weight.requires_grad_(requires_grad)

    return make


def _weight_bytes(operations: Any) -> float:
    """Weights and their gradients, fp32 or narrower. [byte]"""
    return 8.0 * sum(float(entry.n * entry.k) for entry in operations if entry.kind == "gemm" and entry.batch == 1)


def _require_room(wanted_bytes: float, backend: Backend) -> None:
    """Refuse what the planner says will not fit, before the device's memory is full.

    Raises:
        BenchError: it does not fit.
    """
    usable_bytes = backend.usable_bytes()
    if wanted_bytes > usable_bytes:
        raise BenchError(
            f"needs {wanted_bytes / 1e9:.1f} GB, and {usable_bytes / 1e9:.1f} GB of memory may be used; "
            "measure a smaller batch or model"
        )


def _set_precision(dtype: str) -> None:
    import torch

    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
