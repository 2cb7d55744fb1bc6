"""Tensors of a traced module: inputs from texts such as ``tokens=int64[4,2048]``, and meta tensors as parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from shapewright.core.errors import TraceError, close_names, short_repr
from shapewright.core.records import dataclass

_ALIASES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "double": "float64", "fp64": "float64", "long": "int64", "int": "int64",
}  # fmt: skip
DTYPE_NAMES = (
    "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
)  # fmt: skip
_ENTRY = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)\s*=\s*)?(?P<value>[A-Za-z_]\w*\s*\[[^\]]*\]|[^,\[\]]+)")
_TENSOR = re.compile(r"([A-Za-z_]\w*)\s*\[([\d\s,]*)\]")
_MOST_ELEMENTS = 2**40


@dataclass(frozen=True)
class TensorSpec:
    """Element format by its torch name, and sizes."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        product = 1
        for size in self.shape:
            product *= size
        return product


InputValue = TensorSpec | int | float | bool | None | str
Inputs = dict[str, Any]
"""Values by name; positional ones are named by their number."""


def parse_inputs(text: str) -> Inputs:
    """Parse inputs such as ``tokens=int64[4,2048], length=128``.

    >>> {name: str(value) for name, value in parse_inputs("tokens=int64[4,2048], n=128, bf16[3]").items()}
    {'tokens': 'int64[4,2048]', 'n': '128', '0': 'bfloat16[3]'}

    Raises:
        TraceError: the text is malformed.
    """
    inputs: Inputs = {}
    rest, positional = text.strip(), 0
    while rest:
        found = _ENTRY.match(rest)
        if found is None:
            raise _malformed(rest)
        name = found["name"]
        if name is None:
            name, positional = str(positional), positional + 1
        if name in inputs:
            raise TraceError(f"inputs name {name!r} twice", advice="give each input once", field="inputs")
        inputs[name] = _parse_value(found["value"].strip())
        rest = rest[found.end() :].lstrip()
        if rest and not rest.startswith(","):
            raise _malformed(rest)
        rest = rest[1:].lstrip()
    if not inputs:
        raise _malformed(text)
    return inputs


def _malformed(text: str) -> TraceError:
    return TraceError(
        f"inputs cannot be read at {short_repr(text)}",
        advice='write them as "tokens=int64[4,2048], length=128": name=dtype[sizes] or name=number, comma-separated',
        field="inputs",
    )


def _parse_value(text: str) -> InputValue:
    tensor = _TENSOR.fullmatch(text)
    if tensor is not None:
        return tensor_spec(tensor[1], [int(size) for size in tensor[2].replace(" ", "").split(",") if size])
    constants: dict[str, InputValue] = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    raise _malformed(text)


def tensor_spec(dtype: str, shape: Sequence[int]) -> TensorSpec:
    """Check the element format and the sizes of an input.

    Raises:
        TraceError: the format is unknown, or the tensor is larger than any device.
    """
    name = _ALIASES.get(dtype, dtype)
    if name not in DTYPE_NAMES:
        hint = close_names(name, DTYPE_NAMES) or f"choose one of {', '.join(DTYPE_NAMES)}"
        raise TraceError(f"unknown dtype {dtype!r} of an input; {hint}", field="inputs")
    spec = TensorSpec(name, tuple(shape))
    if not 0 < spec.num_elements <= _MOST_ELEMENTS:
        raise TraceError(
            f"an input of {spec} has {spec.num_elements} elements; sizes must be positive, 2**40 elements at most",
            field="inputs",
        )
    return spec


def describe_inputs(inputs: Mapping[str, Any]) -> str:
    """Inputs as text, in the form that parse_inputs reads."""
    return ", ".join(str(value) if name.isdigit() else f"{name}={value}" for name, value in inputs.items())


def count_tokens(inputs: Mapping[str, Any]) -> tuple[int, bool]:
    """Tokens of a step: elements of the first integer tensor, otherwise the first size of the first tensor.

    Three sizes are sequences, tokens and width, so that the first two count.

    Returns:
        The number, and whether it is one of samples, such as images, since no input has a size of tokens.

    >>> count_tokens(parse_inputs("tokens=int64[4,2048]")), count_tokens(parse_inputs("image=bf16[8,3,224,224]"))
    ((8192, False), (8, True))
    """
    specs = [value for value in inputs.values() if isinstance(value, TensorSpec)]
    whole = [spec for spec in specs if spec.dtype in ("int64", "int32") and len(spec.shape) > 1]
    if whole:
        return whole[0].num_elements, False
    sizes = specs[0].shape if specs else ()
    return prod(sizes[:2] if len(sizes) == 3 else sizes[:1]), len(sizes) != 3


def check_signature(forward: Any, inputs: Mapping[str, Any], type_name: str) -> None:
    """Check that a module's forward function takes the inputs.

    Raises:
        TraceError: it does not.
    """
    import inspect

    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return
    positional, named = split_inputs(inputs)
    known = [name for name in signature.parameters if name != "self"]
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    for name in named:
        if name not in known and not takes_any:
            raise TraceError(
                f"{type_name}.forward has no input {name!r}",
                advice=f"{close_names(name, known)} it takes {', '.join(known) or 'nothing'}".strip(),
                field="inputs",
            )
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        raise TraceError(
            f"the inputs do not fit {type_name}.forward({', '.join(known)}): {error}",
            advice="name every required input",
            field="inputs",
        ) from None


def split_inputs(inputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split inputs into positional and named ones."""
    positional = [value for name, value in inputs.items() if name.isdigit()]
    return positional, {name: value for name, value in inputs.items() if not name.isdigit()}


def most_common(counts: Counter[str], default: str) -> str:
    """Key with the largest count."""
    return counts.most_common(1)[0][0] if counts else default


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; other tensors as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def meta_tensors(module: Any, float_type: Any, complete: Callable[[Any, Any], Any | None]) -> dict[str, Any]:
    """Meta tensors for the parameters and buffers of a module, shared ones once under each of their names.

    Args:
        complete: Function that returns the tensor to use for a parameter that is sharded, None for others.
    """
    import torch

    made: dict[int, Any] = {}
    tensors: dict[str, Any] = {}
    for name, one in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        if id(one) not in made:
            wanted = float_type if float_type is not None and one.is_floating_point() else one.dtype
            whole = complete(one, float_type)
            if whole is not None:
                made[id(one)] = whole
            elif one.is_meta and wanted == one.dtype:
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
