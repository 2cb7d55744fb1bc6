"""Recorder: turns every operator that PyTorch dispatches into one of our operations, with its module and pass."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapewright.core.errors import TraceError
from shapewright.lowering.operations import Gemm, GroupedGemm, Operation, Pointwise
from shapewright.lowering.torch_trace.operators import (
    FREE,
    FUSIBLE_KINDS,
    FUSIBLE_NAMES,
    GATHERS,
    SCATTERS,
    UNKNOWN,
    dtype_of,
    kind_of,
    read_collective,
    read_convolution,
    read_gemm,
)
from shapewright.lowering.torch_trace.storages import (
    ACTIVATIONS,
    INPUTS,
    WEIGHTS,
    WORKSPACE,
    Storages,
)

# Values that meta tensors do not have: .item(), the truth of a tensor, and results whose size depends on values.
_READS_VALUE = {"_local_scalar_dense", "is_nonzero", "item"}
_HAS_VALUE_SIZE = {"nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim"}

_OWN_FOLDER = str(Path(__file__).parent)
_LIBRARY_PARTS = ("/contextlib.py", "/functools.py", "/importlib/", "<frozen")


@dataclass(slots=True)
class Call:
    """One dispatched operator.

    Attributes:
        operator: Name of the operator, with its namespace unless that is ``aten``.
        path: Module that it runs in.
        pass_name: ``forward``, ``recompute`` or ``backward``.
        gradient: Gradient that it computes, as in OperationBase.
        work: The operation, without a name.
        reads: Bytes read by serial number of the storage.
        writes: Bytes written by serial number of the storage.
        num_elements: Elements of its largest tensor.
        is_fusible: Whether torch.compile can merge it with operations around it.
        has_weight: Whether it is a GEMM with a parameter, or a gradient of one.
    """

    operator: str
    path: str
    pass_name: str
    gradient: Any
    work: Operation
    reads: dict[int, float] = field(default_factory=dict)
    writes: dict[int, float] = field(default_factory=dict)
    num_elements: int = 0
    is_fusible: bool = False
    has_weight: bool = False


@dataclass(slots=True)
class _Operator:
    """What is known of an operator before its arguments."""

    name: str
    label: str
    kind: str
    is_mutable: bool
    is_free: bool
    is_composite: bool
    is_fusible: bool


class Recorder:
    """Records calls while a module runs."""

    def __init__(
        self,
        paths: Mapping[int, str],
        *,
        values: Mapping[str, int] | None = None,
        assumes_values: bool = False,
    ) -> None:
        """Start with nothing recorded.

        Args:
            paths: Path by identity of each module.
            values: Value that a tensor has, or number of rows that a selection has, by line (``file.py:12``).
            assumes_values: Whether a value that is not given is taken as 1 or true instead of refused.
        """
        self.calls: list[Call] = []
        self.storages = Storages()
        self.in_backward = False
        self.notes: dict[str, None] = {}
        self._paths = paths
        self._values = dict(values or {})
        self._assumes_values = assumes_values
        self._stack: list[str] = []
        self._operators: dict[Any, _Operator] = {}
        self._path_of_node: dict[int, str] = {}
        self._nodes_with_weight: set[int] = set()
        self._weights: set[int] = set()

    # Modules

    def enter_module(self, module: Any, *_: Any) -> None:
        """Note that a module begins to run."""
        path = self._paths.get(id(module))
        if path is None:
            path = ".".join(filter(None, (self._stack[-1] if self._stack else "", type(module).__name__)))
        self._stack.append(path)

    def leave_module(self, *_: Any) -> None:
        """Note that a module has run."""
        if self._stack:
            self._stack.pop()

    def register(self, tensor: Any, category: str, path: str = "") -> None:
        """Enter a parameter, buffer or input."""
        serial = self.storages.serial_of(tensor, path, category, category)
        if category == WEIGHTS:
            self._weights.add(serial)

    def start_backward(self) -> None:
        """Note that the forward pass has ended."""
        self.in_backward = True
        self._stack.clear()
        self.storages.start_backward()

    # Calls

    def dispatch(self, mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and record it."""
        facts = self._operators.get(func)
        if facts is None:
            facts = self._operators[func] = _describe(func)
        if facts.name in _READS_VALUE and _is_meta(args[0]):
            return self._value_of(args[0])
        if facts.name in _HAS_VALUE_SIZE and _is_meta(args[0]):
            return self._sized_result(facts, func, args, kwargs)
        if facts.name in ("index", "_unsafe_index", "index_put_", "index_put", "_index_put_impl_"):
            args = self._replace_masks(facts.name, args)
        self._refuse_device(kwargs)
        if facts.name == "scaled_dot_product_attention":
            from shapewright.lowering.torch_trace.fused_kernels import scaled_dot_product_attention

            return scaled_dot_product_attention(*args, **kwargs)
        if facts.is_composite:
            with mode:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = _all_on_meta(args), _all_on_meta(kwargs)
        result = func(*args, **kwargs)
        self._record(facts, args, kwargs, result)
        return result

    def add(
        self,
        operator: str,
        work: Operation,
        reads: Sequence[Any],
        writes: Sequence[Any],
        *,
        is_fusible: bool = False,
    ) -> None:
        """Record an operation that stands for operators that were not dispatched, such as fused attention."""
        path, pass_name, node = self._place()
        call = Call(operator, path, pass_name, "backward" if pass_name == "backward" else "", work)
        self._note_bytes(call, reads, writes, path, pass_name)
        call.num_elements, call.is_fusible = writes[0].numel(), is_fusible
        self.calls.append(call)
        self._path_of_node.setdefault(node, path)

    def _record(self, facts: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a call that has run."""
        path, pass_name, node = self._place()
        if not self.in_backward or pass_name == "recompute":
            self._path_of_node.setdefault(node, path)
        sources = [*_tensors(args), *_tensors(kwargs.values())]
        outputs = list(_tensors((result,)))
        known = {self.storages.serial_of(tensor, path, INPUTS) for tensor in sources}
        category = WORKSPACE if self.in_backward else ACTIVATIONS
        place = f"{path}.{facts.name}" if path else facts.name
        written = []
        for tensor in outputs:
            is_alias = self.storages.serial_of(tensor, path, category, place) in known
            if not is_alias or facts.is_mutable:
                written.append(tensor)
        if facts.is_mutable and not written and sources:
            written = sources[:1]
        if facts.is_free or not written or not any(tensor.numel() for tensor in written):
            return
        if facts.name in ("_to_copy", "clone") and self._weights & known and len(known) == 1:
            self._weights.add(self.storages.serial_of(written[0]))
        computed = _read_compute(facts, args, written[0])
        for gradient, work in computed:
            self._add_compute(facts, gradient, work, known, (path, pass_name, node))
        if computed:
            self._note_bytes(self.calls[-1], sources, written, path, pass_name)
            return
        work = _pointwise(facts, sources, written)
        gradient = "backward" if pass_name == "backward" else ""
        call = Call(facts.label, path, pass_name, gradient, work)
        self._note_bytes(call, sources, written, path, pass_name, facts)
        call.num_elements = max(tensor.numel() for tensor in (*sources, *written))
        call.is_fusible = facts.is_fusible
        self.calls.append(call)

    def _add_compute(
        self, facts: _Operator, gradient: str, work: Operation, known: set[int], place: tuple[str, str, int]
    ) -> None:
        """Record a GEMM, attention or collective, with the gradient that it is where it runs in the backward pass."""
        path, pass_name, node = place
        is_backward = pass_name == "backward"
        uses_weight = bool(self._weights & known)
        if not is_backward and uses_weight:
            self._nodes_with_weight.add(node)
        if is_backward and not gradient and isinstance(work, Gemm | GroupedGemm):
            gradient = "dgrad" if uses_weight else "wgrad" if node in self._nodes_with_weight else "backward"
        has_weight = uses_weight or gradient in ("dgrad", "wgrad")
        if is_backward and not gradient:
            gradient = "backward"
        self.calls.append(Call(facts.label, path, pass_name, gradient, work, has_weight=has_weight))

    def _place(self) -> tuple[str, str, int]:
        """Module, pass and number of the autograd node of the call that runs now."""
        import torch

        path = self._stack[-1] if self._stack else ""
        if not self.in_backward:
            return path, "forward", torch.autograd._get_sequence_nr() - 1
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if self._stack or torch.is_grad_enabled():
            # A part of the forward pass runs again: activation checkpointing.
            return path or self._path_of_node.get(number, ""), "recompute", torch.autograd._get_sequence_nr() - 1
        return self._path_of_node.get(number, ""), "backward", number

    def _note_bytes(
        self,
        call: Call,
        sources: Sequence[Any],
        written: Sequence[Any],
        path: str,
        pass_name: str,
        facts: _Operator | None = None,
    ) -> None:
        """Note what a call reads and writes, and the sizes of a memory-bound operation."""
        category = ACTIVATIONS if pass_name == "forward" else WORKSPACE
        writes = {self.storages.serial_of(one, path, category): float(_num_bytes(one)) for one in written}
        reads = {self.storages.serial_of(one, path): float(_num_bytes(one)) for one in sources}
        if facts is not None:
            name = facts.name
            if name in GATHERS and sources:
                reads[self.storages.serial_of(sources[0])] = sum(writes.values())
            elif name in SCATTERS and sources:
                target = self.storages.serial_of(written[0])
                touched = min(writes[target], float(_num_bytes(sources[-1])))
                writes[target], reads[target] = touched, 0.0
            elif name == "embedding_dense_backward":
                # The table is zeroed, then rows are added.
                target = self.storages.serial_of(written[0])
                writes[target] += float(_num_bytes(sources[0]))
            elif name in ("copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_"):
                reads.pop(self.storages.serial_of(written[0]), None)
        call.reads, call.writes = reads, writes
        if isinstance(call.work, Pointwise):
            call.work = call.work.changed(read_bytes=sum(reads.values()), written_bytes=sum(writes.values()))

    # Values

    def _value_of(self, tensor: Any) -> Any:
        """Value of a tensor with one element."""
        import torch

        line = _user_line()
        given = self._values.get(line)
        if given is not None:
            return bool(given) if tensor.dtype == torch.bool else given
        if self._assumes_values:
            return True if tensor.dtype == torch.bool else 1
        raise TraceError(
            f"{line}: control flow depends on the value of a tensor, which the meta device does not have",
            advice=f"give the value with --value {line}=N, or pass it to the module as a number, such as "
            f"--inputs 'length=128'",
        )

    def _num_rows(self, name: str) -> int:
        """Rows of a result whose size depends on values."""
        line = _user_line()
        given = self._values.get(line)
        if given is not None:
            return given
        raise TraceError(
            f"{line}: the size of the result of {name} depends on the values of a tensor, which the meta device does "
            "not have",
            advice=f"give its number of rows with --value {line}=ROWS",
        )

    def _sized_result(self, facts: _Operator, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Result of an operator whose size depends on values."""
        import torch

        source = args[0]
        if facts.name == "nonzero":
            result: Any = torch.empty(self._num_rows("nonzero"), source.dim(), dtype=torch.int64, device="meta")
        elif facts.name == "masked_select":
            result = torch.empty(self._num_rows("masked_select"), dtype=source.dtype, device="meta")
        else:
            rows = self._num_rows("unique")
            first = torch.empty(rows, dtype=source.dtype, device="meta")
            indices = torch.empty(source.shape, dtype=torch.int64, device="meta")
            result = (first, indices, torch.empty(rows, dtype=torch.int64, device="meta"))[: len(func._schema.returns)]
        self._record(facts, args, kwargs, result)
        return result

    def _replace_masks(self, name: str, args: Sequence[Any]) -> Sequence[Any]:
        """Replace boolean masks of an indexing call by indices, whose number has to be given."""
        import torch

        if len(args) < 2 or not isinstance(args[1], list | tuple):
            return args
        masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8) and _is_meta(one)]
        if not masks:
            return args
        if "put" in name and args[2].numel() == 1:
            # Every element may be written: the traffic is that of the whole tensor.
            rows = masks[0].numel()
        elif "put" in name:
            rows = args[2].shape[0] if args[2].dim() else 1
        else:
            rows = self._num_rows("indexing by a mask")
        indices: list[Any] = []
        for one in args[1]:
            if one is None or one.dtype not in (torch.bool, torch.uint8):
                indices.append(one)
            else:
                indices += [torch.empty(rows, dtype=torch.int64, device="meta") for _ in range(one.dim())]
        return (args[0], indices, *args[2:])

    def _refuse_device(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse calls that ask for another device."""
        device = kwargs.get("device")
        if device is None or str(device).partition(":")[0] in ("meta", "cpu"):
            return
        raise TraceError(
            f"{_user_line()}: the module asks for device {str(device)!r}; a trace runs on the meta device",
            advice="leave the device out, or take it from an input (x.device)",
        )


def _read_compute(facts: _Operator, args: Sequence[Any], output: Any) -> list[tuple[str, Operation]]:
    """GEMMs, attention or collectives of a call; empty for a memory-bound one."""
    gemm = read_gemm(facts.name, args, dtype_of)
    if gemm is not None:
        return [("", gemm)]
    if "convolution" in facts.name:
        return read_convolution(facts.name, args, output, dtype_of)
    if facts.label.startswith(("_c10d_functional", "c10d")):
        sizes = [one for one in args if isinstance(one, int) and not isinstance(one, bool)]
        num_bytes = max(map(_num_bytes, [*_tensors(args), output]))
        found = read_collective(facts.name, _group_size(sizes, args), float(num_bytes))
        return [] if found is None else [("", found)]
    if "attention" in facts.name:
        from shapewright.lowering.torch_trace.fused_kernels import read_attention

        attention = read_attention(facts.name, args, dtype_of)
        return [] if attention is None else [("", attention)]
    return []


def _group_size(sizes: Sequence[int], args: Sequence[Any]) -> int:
    """Ranks of the group of a collective: an argument, or those of the group that the last argument names."""
    if sizes:
        return int(sizes[0])
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return int(dist.get_world_size(_resolve_process_group(args[-1])))
    except Exception:
        return int(dist.get_world_size()) if dist.is_initialized() else 1


def _pointwise(facts: _Operator, sources: Sequence[Any], written: Sequence[Any]) -> Pointwise:
    """Memory-bound operation of a call, whose bytes are noted later."""
    floating = [one for one in (*written, *sources) if one.dtype.is_floating_point]
    dtype = dtype_of((floating or list(written))[0])
    return Pointwise(name="", operation=facts.kind, read_bytes=0.0, written_bytes=0.0, dtype=dtype)


def _describe(func: Any) -> _Operator:
    """Look up what is known of an operator."""
    import torch

    schema = func._schema
    space, _, name = schema.name.partition("::")
    # Gradients and in-place forms of elementwise operators are elementwise, with or without the tag.
    forward = getattr(torch.ops.aten, name.removesuffix("_backward").rstrip("_"), func)
    tagged = (func, *(getattr(forward, overload) for overload in getattr(forward, "overloads", list)()))
    is_pointwise = any(torch.Tag.pointwise in one.tags for one in tagged)
    kind = kind_of(name, is_pointwise=is_pointwise) if space in ("aten", "prims") else UNKNOWN
    if "convolution" in name:
        kind = "other"  # depthwise: memory traffic
    return _Operator(
        name=name,
        label=name if space == "aten" else schema.name,
        kind=kind,
        is_mutable=schema.is_mutable,
        is_free=name in FREE or space == "prim",
        is_composite=space == "aten"
        and name not in FREE
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        is_fusible=kind in FUSIBLE_KINDS or name in FUSIBLE_NAMES,
    )


def _num_bytes(tensor: Any) -> int:
    """Bytes of the distinct elements of a tensor: expanded dimensions count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride != 0 or size == 0 else 1
    return int(elements * tensor.element_size())


def _is_meta(value: Any) -> bool:
    return bool(getattr(value, "is_meta", False))


def _tensors(values: Any) -> Iterator[Any]:
    """Tensors in nested lists and tuples."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _all_on_meta(values: Any) -> Any:
    """Arguments of a call that mixes devices, all on the meta device: constants of a module may be on the CPU."""
    import torch

    is_mapping = isinstance(values, Mapping)
    found = list(_tensors(values.values() if is_mapping else values))
    if not any(one.is_meta for one in found) or all(one.is_meta or one.dim() == 0 for one in found):
        return values

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.is_meta or value.dim() == 0 else torch.empty_like(value, device="meta")
        return type(value)(map(moved, value)) if isinstance(value, list | tuple) else value

    return {name: moved(value) for name, value in values.items()} if is_mapping else tuple(map(moved, values))


def is_user_frame(filename: str) -> bool:
    """Whether a frame belongs to the user's code or a library of models, not to PyTorch or to this package."""
    import torch

    folders = (_OWN_FOLDER, str(Path(torch.__file__).parent))
    return not filename.startswith(folders) and not any(part in filename for part in _LIBRARY_PARTS)


def _user_line() -> str:
    """Innermost line of the user's code that runs now, as ``file.py:12``."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_frame(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "?"
