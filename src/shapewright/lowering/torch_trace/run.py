"""Run a module on the meta device, forward and backward, and summarize what PyTorch dispatches."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from shapewright.core.errors import MissingExtraError, TraceError
from shapewright.core.texts import with_fields
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.torch_trace.dispatched import emulated_autocast
from shapewright.lowering.torch_trace.errors import user_errors
from shapewright.lowering.torch_trace.inputs import (
    check_signature,
    count_tokens,
    describe_inputs,
    differentiable,
    local,
    make_input,
    meta_tensors,
    most_common,
    parse_inputs,
    split_inputs,
    swapped,
    tensor_spec,
)
from shapewright.lowering.torch_trace.operators import dtype_of
from shapewright.lowering.torch_trace.recorder import Call, Recorder
from shapewright.lowering.torch_trace.sharded import Shards, class_name
from shapewright.lowering.torch_trace.storages import GRADIENTS, INPUTS, WEIGHTS
from shapewright.lowering.torch_trace.summarize import (
    fuse_calls,
    list_linears,
    list_modules,
    list_operations,
    list_unknown,
    note_on_loops,
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

    Assumes: one device. Parameters that are DTensors are traced as the rank that runs has them; ``fully_shard`` (FSDP2)
    adds its collectives and keeps this rank's part of weights and gradients.
    """
    torch = require_torch()
    if not isinstance(module, torch.nn.Module):
        raise TraceError(f"expected a torch.nn.Module, got {type(module).__name__}")
    if phase not in PHASES:
        raise TraceError(f"phase={phase!r} of a trace; choose train or prefill (a forward pass)", field="phase")
    specs = _read_inputs(inputs)
    type_name = type(getattr(module, "_orig_mod", module)).__name__
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
    from shapewright.lowering.torch_trace.library_kernels import replaced_libraries

    float_type = None if dtype is None else getattr(torch, tensor_spec(dtype, (1,)).dtype)
    # A module that torch.compile has wrapped has one more name in front.
    names = dict(module.named_modules())
    paths = {id(each): _clean(name) for name, each in names.items()}
    recorder = Recorder(paths, values=values, assumes_values=assumes_values)
    shards = Shards(module)
    tensors = meta_tensors(module, float_type, shards.complete)
    owners = {}
    for name, tensor in tensors.items():
        path = _clean(name).rpartition(".")[0]
        recorder.register(local(tensor), WEIGHTS, path)
        owners[name] = path
    made = {name: make_input(value, float_type) for name, value in specs.items()}
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
            stack.enter_context(replaced_libraries(module))
            stack.enter_context(swapped(module, tensors))
            stack.enter_context(shards.running(recorder, paths))
            grad_mode = torch.enable_grad() if is_training else torch.no_grad()
            stack.enter_context(grad_mode)
            positional, named = split_inputs(made)
            outputs = differentiable(module(*positional, **named), is_training=is_training)
            recorder.start_backward()
            if is_training:
                if not outputs:
                    raise TraceError(
                        "no output of the module requires a gradient, so there is no backward pass",
                        advice=with_fields("trace the forward pass alone with {phase:prefill}"),
                        field="phase",
                    )
                gradients = [torch.empty_like(one) for one in outputs]
                torch.autograd.backward(outputs, gradients)
            del outputs
        for name, tensor in tensors.items():
            gradient = getattr(tensor, "grad", None)
            if gradient is not None:
                serial = recorder.storages.serial_of(local(gradient))
                recorder.storages.storages[serial].category = GRADIENTS
                recorder.storages.storages[serial].path = owners[name]
    finally:
        recorder.storages.close()
        for each in names.values():
            each.training = was_training[id(each)]
    return _summarize(module, recorder, tensors, shards, specs, is_training=is_training, fused=fused, source=source)


def _is_compiled(module: Any) -> bool:
    """Whether torch.compile wraps a module, or module.compile() was called."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


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
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Using `torch.compile")  # its hooks run twice, at the root alone
            if hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.device("meta"))
            stack.enter_context(emulated_autocast())
            stack.enter_context(Mode())
            yield
    finally:
        for handle in handles:
            handle.remove()


def _count_ranks(calls: Sequence[Call]) -> int:
    """Ranks of the process group that a module's collectives run in, at least those of the largest; 1 without any."""
    import torch.distributed as dist

    largest = max((one.work.num_ranks for one in calls if isinstance(one.work, Collective)), default=1)
    return max(int(largest), dist.get_world_size()) if largest > 1 and dist.is_initialized() else int(largest)


def _summarize(
    module: Any,
    recorder: Recorder,
    tensors: Mapping[str, Any],
    shards: Shards,
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
    total = trainable = updated = 0
    paths = dict.fromkeys(_clean(name) for name, _ in module.named_modules())
    types = {_clean(name): class_name(each) for name, each in module.named_modules()}
    for path in dict.fromkeys((*paths, *peak_by_path, *saved_by_path)):
        held = own.get(path, [])
        parameters = [local(one) for one in held if isinstance(one, torch.nn.Parameter)]
        count = sum(one.numel() for one in parameters)
        own_trainable = sum(
            local(one).numel() for one in held if isinstance(one, torch.nn.Parameter) and one.requires_grad
        )
        total, trainable = total + count, trainable + own_trainable
        for one in held:
            if isinstance(one, torch.nn.Parameter):
                part = shards.shard_of(one)
                updated += part.numel() if one.requires_grad else 0
                parameter_counts[dtype_of(part)] += part.numel()
        row = TracedModule(
            path=path or "(model)",
            type_name=types.get(path, path.rpartition(".")[2]),
            num_parameters=count,
            num_trainable=own_trainable,
            weights_bytes=float(sum(part.numel() * part.element_size() for part in map(shards.shard_of, held))),
            saved_bytes=float(saved_by_path[path]) if is_training else 0.0,
            peak_bytes=float(peak_by_path[path]),
        )
        if row.num_parameters or row.weights_bytes or row.saved_bytes or row.peak_bytes:
            rows.append(row)
    flops: Counter[str] = Counter()
    for call in calls:
        flops[call.work.dtype] += int(call.work.flops)
    parameter_dtype = most_common(parameter_counts, "fp32")
    num_tokens, counts_samples = count_tokens(specs)
    recorder.note_unused_values()
    notes = dict(recorder.notes)
    if not fused and any(_is_compiled(each) for each in module.modules()):
        text = "what torch.compile wraps ran operator by operator; {fused} merges pointwise chains as it does"
        notes[with_fields(text)] = None
    if is_training and any(call.pass_name == "recompute" for call in calls):
        notes["activation checkpointing: parts of the forward pass run again in the backward pass"] = None
    loops = note_on_loops(calls)
    if loops:
        notes[loops] = None
    if any("float64" in str(one.dtype) for one in tensors.values()):
        notes["float64 is priced as fp32, with its own bytes in memory"] = None
    if not is_training:
        memory = replace(memory, saved_bytes=0.0)
    return Trace(
        source=source,
        module_type=class_name(getattr(module, "_orig_mod", module)),
        inputs=describe_inputs(specs),
        phase="train" if is_training else "prefill",
        dtype=most_common(flops, parameter_dtype),
        parameter_dtype=parameter_dtype,
        is_fused=fused,
        num_parameters=total,
        num_trainable=trainable,
        num_updated=updated if shards.groups else None,
        num_tokens=num_tokens,
        counts_samples=counts_samples,
        num_ranks=_count_ranks(calls),
        num_replicas=shards.num_replicas,
        operations=list_operations(fuse_calls(calls) if fused else calls),
        linears=list_linears(calls, recorder.embedding_rows()),
        modules=list_modules(rows),
        memory=memory,
        unknown_operators=list_unknown(calls),
        notes=tuple(notes),
    )
