"""Tensors of a traced module: meta tensors in place of its parameters, its inputs, and the outputs to differentiate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shapewright.lowering.torch_trace.inputs import TensorSpec


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; other tensors as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def meta_tensors(module: Any, float_type: Any) -> dict[str, Any]:
    """Meta tensors for the parameters and buffers of a module, shared ones once under each of their names."""
    import torch

    made: dict[int, Any] = {}
    tensors: dict[str, Any] = {}
    for name, one in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        if id(one) not in made:
            wanted = float_type if float_type is not None and one.is_floating_point() else one.dtype
            if one.is_meta and wanted == one.dtype:
                made[id(one)] = one
            else:
                changed = torch.empty_like(one, device="meta", dtype=wanted)
                made[id(one)] = (
                    torch.nn.Parameter(changed, requires_grad=one.requires_grad)
                    if isinstance(one, torch.nn.Parameter)
                    else changed
                )
        tensors[name] = made[id(one)]
    return tensors


@contextmanager
def swapped(module: Any, tensors: Mapping[str, Any]) -> Iterator[None]:
    """Replace the parameters and buffers of a module, and restore them with their gradients afterwards."""
    places = []
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        holder = module.get_submodule(path)
        table = holder._parameters if own in holder._parameters else holder._buffers
        places.append((table, own, table[own], tensor))
    # A module's own tensors may have gradients of a real step.
    kept = [(one, one.grad) for _, _, one, _ in places if one.grad is not None]
    for one, _ in kept:
        one.grad = None
    try:
        for table, own, _, tensor in places:
            table[own] = tensor
        yield
    finally:
        for table, own, before, _ in places:
            table[own] = before
        for one, gradient in kept:
            one.grad = gradient


def make_input(value: Any, float_type: Any) -> Any:
    """Meta tensor of an input, floating ones in the wanted format; other values as they are."""
    import torch

    if not isinstance(value, TensorSpec):
        return value
    dtype = getattr(torch, value.dtype)
    dtype = float_type if float_type is not None and dtype.is_floating_point else dtype
    return torch.empty(value.shape, dtype=dtype, device="meta")


def differentiable(output: Any, *, is_training: bool) -> list[Any]:
    """Outputs that the backward pass starts from: the loss if there is one, otherwise all that require a gradient."""
    if not is_training:
        return []
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = list(_output_tensors(loss if hasattr(loss, "requires_grad") else output))
    scalars = [one for one in found if one.dim() == 0]
    return scalars[:1] or found


def _output_tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "requires_grad"):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _output_tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _output_tensors(one)
