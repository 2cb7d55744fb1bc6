"""Preparation of whole decoder layers and whole steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import BenchError
from shapewright.measure.bench.operations.prepared import (
    PreparedCall,
    num_input_sets,
    relative_error,
    set_precision,
    torch_dtype,
)
from shapewright.measure.bench.operations.torch_layer import make_layer, make_pass_context, require_supported, run_layer
from shapewright.measure.bench.operations.torch_model import Decoder, make_optimizer_step
from shapewright.memory.saved_tensors import list_saved_tensors
from shapewright.prediction.model_runs import FORWARD
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend
    from shapewright.measure.bench.operations.torch_layer import MakeTensor
    from shapewright.prediction.model_runs import LayerRun, StepRun

COMPILED = "compiled"
"""Variant of a layer that runs under torch.compile."""
# Number of first tokens that are recomputed in fp32; in a causal model they do not depend on later ones.
_CHECKED_TOKENS = 16
# Largest accepted error of a layer by element format: several times that of one operation, for a chain of a dozen.
_LAYER_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}
# The loss of an untrained model is the logarithm of the vocabulary size, up to the effect of random logits.
_LOSS_TOLERANCE = 2.0


def prepare_layer(layer: LayerRun, backend: Backend, variant: str) -> PreparedCall:
    """Prepare one layer: forward, or forward and backward with the gradients of the input and all weights.

    Args:
        variant: COMPILED for torch.compile, or empty for eager mode.

    Raises:
        BenchError: the model is of an unsupported kind, or the layer does not fit.
    """
    import torch

    config, workload = layer.config_and_workload()
    require_supported(config, workload)
    set_precision(layer.dtype)
    with_gradient = layer.passes != FORWARD
    saved = sum(tensor.num_bytes for tensor in list_saved_tensors(config, workload, ParallelLayout()))
    make = _make_weights(backend, layer.dtype, requires_grad=with_gradient)
    _require_memory(saved + _weight_bytes(layer.operations()), backend)
    weights = make_layer(config, make)
    lead = (workload.micro_batch_size, workload.query_len, config.hidden_size)
    set_bytes = 2.0 * math.prod(lead) * torch_dtype(layer.dtype).itemsize
    draw = _make_weights(backend, layer.dtype, requires_grad=False)
    inputs = [
        (draw(lead, 1.0).requires_grad_(with_gradient), draw(lead, 1.0))
        for _ in range(min(2, num_input_sets(set_bytes, backend)))
    ]
    context = make_pass_context(config, workload, inputs[0][0])

    def forward(x: Any) -> Any:
        return run_layer(weights, x, context)

    run = forward
    if variant == COMPILED:
        # Without the reset, graphs of earlier layers count towards torch's limit, after which layers silently run in
        # eager mode. fullgraph makes a layer that cannot be compiled as a whole an error.
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
        return _layer_error(out, arguments[0], weights, layer)

    def figures() -> dict[str, float]:
        found = _peak(backend, lambda: call(*inputs[0]))
        if with_gradient and variant != COMPILED:
            found["activation_bytes"] = count_saved_bytes(lambda: forward(inputs[0][0]), learned)
        return found

    return PreparedCall(
        inputs=inputs,
        call=call,
        check=check,
        kernel=f"torch {variant or 'eager'} {workload.attention}",
        set_bytes=float(layer.num_bytes),
        tolerance=_LAYER_TOLERANCE[layer.dtype],
        figures=figures,
    )


def _layer_error(out: Any, x: Any, weights: dict[str, Any], layer: LayerRun) -> float:
    """Error of the first tokens against fp32; 0 with dropout, whose mask is not known."""
    import torch

    config, workload = layer.config_and_workload()
    if workload.is_training and (config.hidden_dropout or config.attention_dropout):
        return 0.0
    few = x.detach()[:1, :_CHECKED_TOKENS].float()
    wide = {name: weight.detach().float() for name, weight in weights.items()}
    with torch.no_grad():
        reference = run_layer(wide, few, make_pass_context(config, workload, few, num_tokens=few.shape[1]))
    return relative_error(out.detach()[:1, :_CHECKED_TOKENS], reference)


def prepare_step(step: StepRun, backend: Backend) -> PreparedCall:
    """Prepare a whole step: a training step with its optimizer, a prefill, or one decode step.

    Raises:
        BenchError: the model is of an unsupported kind, or the step does not fit.
    """
    import torch

    config, workload = step.config_and_workload()
    require_supported(config, workload)
    set_precision(step.dtype)
    _require_memory(step.estimate_figures()["peak_memory_bytes"], backend)
    model = Decoder(config, workload, _make_weights(backend, step.dtype, requires_grad=workload.is_training))
    context = model.pass_context()
    length = workload.query_len + (1 if workload.is_training else 0)
    tokens = torch.randint(0, config.vocab_size, (workload.micro_batch_size, length), device=backend.torch_device)
    if workload.is_training:
        optimize = make_optimizer_step(model.parameters())

        def call(tokens: Any) -> Any:
            loss = model.loss(tokens, context)
            loss.backward()
            optimize()
            return loss.detach()

    else:
        cache = model.make_cache()

        def call(tokens: Any) -> Any:
            with torch.no_grad():
                return model.run(tokens, context, cache)

    def check(found: Any, _arguments: tuple[Any, ...]) -> float:
        if not bool(found.isfinite().all()):
            return float("nan")
        if not workload.is_training:
            return 0.0
        expected = math.log(config.vocab_size)
        return 0.0 if abs(float(found) - expected) < _LOSS_TOLERANCE else math.inf

    return PreparedCall(
        inputs=[(tokens,)],
        call=call,
        check=check,
        kernel=f"torch eager {workload.attention}",
        set_bytes=float(step.num_bytes),
        # A graph of a training step would need the memory of the activations a second time.
        capturable=not workload.is_training,
        tolerance=0.0,
        figures=lambda: _peak(backend, lambda: call(tokens)),
    )


def count_saved_bytes(run: Callable[[], object], parameters: list[Any]) -> float:
    """Bytes that a forward pass saves for its backward pass, without the parameters. [byte]"""
    import torch

    parameter_storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            kept[storage.data_ptr()] = tensor  # keeps the storage alive, so that its address is not reused
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
    """A function that makes new tensors, not slices of the input pool: the optimizer writes to weights."""
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
    """Upper limit of the memory of weights and their gradients, at 4 bytes each. [byte]"""
    return 8.0 * sum(float(entry.n * entry.k) for entry in operations if entry.kind == "gemm" and entry.batch == 1)


def _require_memory(needed_bytes: float, backend: Backend) -> None:
    """Check the estimated memory against what is available, before anything is allocated.

    Raises:
        BenchError: it does not fit.
    """
    usable_bytes = backend.usable_bytes()
    if needed_bytes > usable_bytes:
        raise BenchError(
            f"needs {needed_bytes / 1e9:.1f} GB of memory, {usable_bytes / 1e9:.1f} GB are available; "
            "measure a smaller batch or model"
        )
