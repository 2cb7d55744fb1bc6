"""Run a module on the meta device, forward and backward, and summarize what PyTorch dispatches."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapewright.core.errors import MissingExtraError, ShapewrightError, TraceError, first_line
from shapewright.lowering.torch_trace.inputs import (
    TensorSpec,
    check_signature,
    count_tokens,
    describe_inputs,
    most_common,
    parse_inputs,
    split_inputs,
    tensor_spec,
)
from shapewright.lowering.torch_trace.operators import dtype_of
from shapewright.lowering.torch_trace.recorder import Recorder, is_user_frame
from shapewright.lowering.torch_trace.storages import GRADIENTS, INPUTS, WEIGHTS
from shapewright.lowering.torch_trace.summarize import (
    fuse_calls,
    list_linears,
    list_modules,
    list_operations,
    list_unknown,
)
from shapewright.lowering.torch_trace.trace import Trace, TracedModule

PHASES = ("train", "prefill")

_lock = threading.Lock()


def require_torch() -> Any:
    """Import torch.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("tracing needs PyTorch; install it with: pip install 'shapewright[trace]'") from None
    return torch


def trace_module(
    module: Any,
    inputs: str | Mapping[str, Any] | Sequence[Any],
    *,
    phase: str = "train",
    dtype: str | None = None,
    fused: bool = False,
    values: Mapping[str, int] | None = None,
    source: str = "",
    assumes_values: bool = False,
) -> Trace:
    """Run a module on the meta device and list its operations, modules and memory.

    The module is not changed: parameters that have memory are replaced by meta tensors while it runs.

    Args:
        module: A torch.nn.Module.
        inputs: Inputs as text, such as ``tokens=int64[4,2048]``, or tensors and numbers by name or in order. Values of
            tensors are not read.
        phase: ``train`` for forward and backward pass, ``prefill`` for the forward pass alone.
        dtype: Element format to convert floating parameters and inputs to; None leaves them as they are.
        fused: Whether chains of pointwise operations are merged as torch.compile merges them.
        values: Values that the control flow depends on, by line: ``{"model.py:33": 512}``.
        source: Where the module comes from, for reports.
        assumes_values: Whether values that are not given are taken as 1 or true.

    Returns:
        The trace; ``shapewright.predict`` and ``shapewright.check`` take it in place of a model.

    Raises:
        MissingExtraError: PyTorch is not installed.
        TraceError: the module cannot run on the meta device, or the inputs do not fit it.

    Assumes: one device. Parameters that are DTensors are traced as the rank that runs has them.
    """
    torch = require_torch()
    if not isinstance(module, torch.nn.Module):
        raise TraceError(f"expected a torch.nn.Module, got {type(module).__name__}")
    if phase not in PHASES:
        raise TraceError(f"phase={phase!r} of a trace; choose train or prefill (a forward pass)", field="phase")
    specs = _read_inputs(inputs)
    type_name = type(module).__name__
    check_signature(module.forward, specs, type_name)
    with _lock, user_errors(f"{type_name}.forward"):
        return _trace(
            module,
            specs,
            is_training=phase == "train",
            dtype=dtype,
            fused=fused,
            values=values,
            source=source or "Python",
            assumes_values=assumes_values,
        )


def _read_inputs(inputs: str | Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    if isinstance(inputs, str):
        return parse_inputs(inputs)
    named = inputs if isinstance(inputs, Mapping) else {str(index): value for index, value in enumerate(inputs)}
    read: dict[str, Any] = {}
    for name, value in named.items():
        is_tensor = hasattr(value, "untyped_storage")
        read[str(name)] = (
            tensor_spec(str(value.dtype).removeprefix("torch."), tuple(value.shape)) if is_tensor else value
        )
    return read


def _trace(
    module: Any,
    specs: Mapping[str, Any],
    *,
    is_training: bool,
    dtype: str | None,
    fused: bool,
    values: Mapping[str, int] | None,
    source: str,
    assumes_values: bool,
) -> Trace:
    import torch

    from shapewright.lowering.torch_trace.fused_kernels import replaced_kernels

    float_type = None if dtype is None else getattr(torch, tensor_spec(dtype, (1,)).dtype)
    # A module that torch.compile has wrapped has one more name in front.
    names = dict(module.named_modules())
    paths = {id(each): _clean(name) for name, each in names.items()}
    recorder = Recorder(paths, values=values, assumes_values=assumes_values)
    tensors = _meta_tensors(module, float_type)
    owners = {}
    for name, tensor in tensors.items():
        path = _clean(name).rpartition(".")[0]
        recorder.register(_local(tensor), WEIGHTS, path)
        owners[name] = path
    made = {name: _make_input(value, float_type) for name, value in specs.items()}
    for value in made.values():
        if hasattr(value, "untyped_storage"):
            recorder.register(value, INPUTS)
    was_training = {id(each): each.training for each in names.values()}
    try:
        if is_training:
            module.train()
        with ExitStack() as stack:
            stack.enter_context(recording(recorder))
            stack.enter_context(replaced_kernels(recorder))
            stack.enter_context(_swapped(module, tensors))
            grad_mode = torch.enable_grad() if is_training else torch.no_grad()
            stack.enter_context(grad_mode)
            positional, named = split_inputs(made)
            outputs = _differentiable(module(*positional, **named), is_training=is_training)
            recorder.start_backward()
            if is_training:
                if not outputs:
                    raise TraceError(
                        "no output of the module requires a gradient, so there is no backward pass",
                        advice="trace the forward pass alone with phase='prefill'",
                        field="phase",
                    )
                gradients = [torch.empty_like(one) for one in outputs]
                torch.autograd.backward(outputs, gradients)
            del outputs
        for name, tensor in tensors.items():
            gradient = getattr(tensor, "grad", None)
            if gradient is not None:
                serial = recorder.storages.serial_of(_local(gradient))
                recorder.storages.storages[serial].category = GRADIENTS
                recorder.storages.storages[serial].path = owners[name]
    finally:
        recorder.storages.close()
        for each in names.values():
            each.training = was_training[id(each)]
    return _summarize(module, recorder, tensors, specs, is_training=is_training, fused=fused, source=source)


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


def _local(tensor: Any) -> Any:
    """This rank's part of a DTensor; other tensors as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def _meta_tensors(module: Any, float_type: Any) -> dict[str, Any]:
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
def _swapped(module: Any, tensors: Mapping[str, Any]) -> Iterator[None]:
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


def _make_input(value: Any, float_type: Any) -> Any:
    import torch

    if not isinstance(value, TensorSpec):
        return value
    dtype = getattr(torch, value.dtype)
    dtype = float_type if float_type is not None and dtype.is_floating_point else dtype
    return torch.empty(value.shape, dtype=dtype, device="meta")


def _differentiable(output: Any, *, is_training: bool) -> list[Any]:
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


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Install the recorder: the dispatch mode, the hooks of modules, the meta device as default; nothing compiled."""
    import torch
    from torch.nn.modules import module as hooks
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names = {one.__name__ for one in types}
            if "DTensor" in names:
                return NotImplemented  # its local operators come back one by one
            if "FakeTensor" in names:
                return func(*args, **(kwargs or {}))  # a library infers shapes: nothing runs
            return recorder.dispatch(self, func, args, kwargs or {})

    handles = [
        hooks.register_module_forward_pre_hook(recorder.enter_module),
        hooks.register_module_forward_hook(recorder.leave_module, always_call=True),
    ]
    try:
        with ExitStack() as stack:
            if hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.device("meta"))
            stack.enter_context(Mode())
            yield
    finally:
        for handle in handles:
            handle.remove()


def _summarize(
    module: Any,
    recorder: Recorder,
    tensors: Mapping[str, Any],
    specs: Mapping[str, Any],
    *,
    is_training: bool,
    fused: bool,
    source: str,
) -> Trace:
    import torch

    calls = recorder.calls
    memory, peak_by_path = recorder.storages.summarize()
    saved_by_path = recorder.storages.saved_by_path()
    own: dict[str, list[Any]] = {}
    seen: set[int] = set()
    parameter_counts: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            own.setdefault(_clean(name).rpartition(".")[0], []).append(tensor)
    rows = []
    total = trainable = 0
    paths = dict.fromkeys(_clean(name) for name, _ in module.named_modules())
    types = {_clean(name): type(each).__name__ for name, each in module.named_modules()}
    for path in dict.fromkeys((*paths, *peak_by_path, *saved_by_path)):
        held = own.get(path, [])
        parameters = [_local(one) for one in held if isinstance(one, torch.nn.Parameter)]
        count = sum(one.numel() for one in parameters)
        own_trainable = sum(
            _local(one).numel() for one in held if isinstance(one, torch.nn.Parameter) and one.requires_grad
        )
        total, trainable = total + count, trainable + own_trainable
        for one in parameters:
            parameter_counts[dtype_of(one)] += one.numel()
        row = TracedModule(
            path=path or "(model)",
            type_name=types.get(path, path.rpartition(".")[2]),
            num_parameters=count,
            num_trainable=own_trainable,
            weights_bytes=float(sum(_local(one).numel() * one.element_size() for one in held)),
            saved_bytes=float(saved_by_path[path]) if is_training else 0.0,
            peak_bytes=float(peak_by_path[path]),
        )
        if row.num_parameters or row.weights_bytes or row.saved_bytes or row.peak_bytes:
            rows.append(row)
    flops: Counter[str] = Counter()
    for call in calls:
        flops[call.work.dtype] += int(call.work.flops)
    parameter_dtype = most_common(parameter_counts, "fp32")
    notes = dict(recorder.notes)
    if is_training and any(call.pass_name == "recompute" for call in calls):
        notes["activation checkpointing: parts of the forward pass run again in the backward pass"] = None
    if any("float64" in str(one.dtype) for one in tensors.values()):
        notes["float64 is priced as fp32, with its own bytes in memory"] = None
    if not is_training:
        memory = replace(memory, saved_bytes=0.0)
    return Trace(
        source=source,
        module_type=type(module).__name__,
        inputs=describe_inputs(specs),
        phase="train" if is_training else "prefill",
        dtype=most_common(flops, parameter_dtype),
        parameter_dtype=parameter_dtype,
        is_fused=fused,
        num_parameters=total,
        num_trainable=trainable,
        num_tokens=count_tokens(specs),
        operations=list_operations(fuse_calls(calls) if fused else calls),
        linears=list_linears(calls),
        modules=list_modules(rows),
        memory=memory,
        unknown_operators=list_unknown(calls),
        notes=tuple(notes),
    )


@contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into one line with its place, and keep its traceback."""
    try:
        yield
    except ShapewrightError as error:
        if isinstance(error, TraceError) and not error.user_traceback:
            error.user_traceback = traceback.format_exc()
        raise
    except Exception as error:
        raise describe_error(error, what) from None


_CUDA_WORDS = ("CUDA", "cuda", "NVIDIA", "HIP")
_VALUE_WORDS = ("meta tensor", "Meta tensor", "data-dependent", "nonzero")


def describe_error(error: BaseException, what: str) -> TraceError:
    """One line for an exception of the user's code.

    Args:
        error: The exception.
        what: What ran: the builder, or the module's forward function.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_user_frame(frame.filename)]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}: " if own else f"{what}: "
    words = first_line(error)
    advice = "--traceback shows where"
    if isinstance(error, MemoryError) or "allocate" in words:
        words, advice = "allocates real memory", "make tensors on the meta device: leave the device out"
    elif any(word in words for word in _CUDA_WORDS):
        words = f"asks for CUDA ({words})"
        advice = "a trace runs on the meta device; leave the device out, or take it from an input (x.device)"
    elif any(word in words for word in _VALUE_WORDS):
        words = f"needs the value of a tensor, which the meta device does not have ({words})"
        advice = "make small constants with device='cpu', or pass sizes as numbers (--inputs 'length=128')"
    elif (
        "expanded size" in words or "must match" in words or "cannot be multiplied" in words or "reduction dim" in words
    ):
        advice = "check the sizes of the inputs; --traceback shows where"
    start = error.__traceback__
    while start is not None and not is_user_frame(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    text = "".join(traceback.format_exception(type(error), error, start or error.__traceback__))
    return TraceError(f"{place}{type(error).__name__}: {words}", advice=advice, user_traceback=text)
