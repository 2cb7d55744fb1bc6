"""Recorder: turns every operator that PyTorch dispatches into one of our operations, with its module and pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from shapewright.core.errors import TraceError
from shapewright.core.records import dataclass
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.torch_trace.dispatched import (
    Operator,
    View,
    count_bytes,
    describe_operator,
    is_meta,
    list_tensors,
    make_pointwise,
    move_to_meta,
    read_compute,
    seen_autocast,
    sum_views,
    view_of,
)
from shapewright.lowering.torch_trace.errors import user_line
from shapewright.lowering.torch_trace.operators import (
    GATHERS,
    LIKENESSES,
    OVERWRITES,
    PICKS,
    SCATTERS,
    adds_to_target,
    count_scattered,
    dtype_of,
    filled_mask,
)
from shapewright.lowering.torch_trace.storages import ACTIVATIONS, INPUTS, WEIGHTS, WORKSPACE, Storages
from shapewright.lowering.torch_trace.values import READS_VALUE, SIZED_BY_VALUES, Values


@dataclass
class Call:
    """One dispatched operator.

    Attributes:
        operator: Name of the operator, with its namespace unless that is ``aten``.
        path: Module that it runs in.
        pass_name: ``forward``, ``recompute`` or ``backward``.
        gradient: Gradient that it computes, as in OperationBase.
        work: The operation, without a name.
        reads: Bytes read by serial number of the storage.
        views: Views that they are read through.
        writes: Bytes written by serial number of the storage.
        num_elements: Elements of its largest tensor.
        is_fusible: Whether torch.compile can merge it with operations around it.
        has_weight: Whether it is a GEMM with a parameter, or a gradient of one.
        is_convolution: Whether that GEMM is a convolution.
    """

    operator: str
    path: str
    pass_name: str
    gradient: Any
    work: Operation
    reads: dict[int, float] = field(default_factory=dict)
    views: tuple[View, ...] = ()
    writes: dict[int, float] = field(default_factory=dict)
    num_elements: int = 0
    is_fusible: bool = False
    has_weight: bool = False
    is_convolution: bool = False


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
        self._stack: list[str] = []
        self._operators: dict[Any, Operator] = {}
        self._path_of_node: dict[int, str] = {}
        self._nodes_with_weight: set[int] = set()
        self._weights: set[int] = set()
        self._embedding_rows: dict[int, int] = {}  # of the tables that embeddings read
        self._copied_weights: dict[int, int] = {}  # by their copy
        self._narrow_nodes: dict[int, Any] = {}
        self._values = Values(self.storages, self.notes, given=values or {}, assumes_values=assumes_values)

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

    def note_unused_values(self) -> None:
        """Note which of the given values nothing depended on."""
        for line in self._values.unused:
            self.notes[f"the value given for {line} was not used: nothing there depends on a tensor's value"] = None

    # Calls

    def dispatch(self, mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator and record it."""
        import torch

        facts = self._operators.get(func)
        if facts is None:
            facts = self._operators[func] = describe_operator(func)
        if facts.name in READS_VALUE and is_meta(args[0]):
            return self._values.value_of(args[0])
        if facts.name in SIZED_BY_VALUES and is_meta(args[0]):
            result = self._values.sized_result(facts.name, args, num_returns=len(func._schema.returns))
            self._record(facts, args, kwargs, result)
            return result
        if facts.name in ("index", "_unsafe_index", "index_put_", "index_put", "_index_put_impl_"):
            mask = filled_mask(facts.name, args)
            if mask is not None:
                return self.dispatch(mode, torch.ops.aten.masked_fill_.Scalar, (args[0], mask, 0), {})
            args = self._values.replace_masks(facts.name, args)
        self._refuse_device(kwargs)
        if facts.name == "scaled_dot_product_attention":
            from shapewright.lowering.torch_trace.fused_kernels import scaled_dot_product_attention

            return scaled_dot_product_attention(*args, **kwargs)
        if facts.is_composite:
            with mode:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if facts.name == "_to_copy" and str(kwargs.get("device")) == "cpu" and is_meta(args[0]):
            counts = self._values.counts_of(args[0])
            if counts is not None:
                return counts
        args, kwargs = move_to_meta(args), move_to_meta(kwargs)
        result = func(*args, **kwargs)
        self._record(facts, args, kwargs, result)
        self._values.observe(facts.name, args, result)
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
        """Record an operation in place of operators that were not dispatched, such as fused attention."""
        path, pass_name, node = self._place()
        work = self._narrowed(work, node, is_backward=pass_name == "backward")
        call = Call(operator, path, pass_name, "backward" if pass_name == "backward" else "", work)
        self._note_bytes(call, reads, writes, path, pass_name)
        call.num_elements, call.is_fusible = writes[0].numel(), is_fusible
        self.calls.append(call)
        self._path_of_node.setdefault(node, path)

    def _record(self, facts: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record a call that has run."""
        path, pass_name, node = self._place()
        if not self.in_backward or pass_name == "recompute":
            self._path_of_node.setdefault(node, path)
        sources = [*list_tensors(args), *list_tensors(kwargs.values())]
        outputs = list(list_tensors((result,)))
        known = {self.storages.serial_of(tensor, path, INPUTS) for tensor in sources}
        category = WORKSPACE if self.in_backward else ACTIVATIONS
        place = f"{path}.{facts.name}" if path else facts.name
        written = []
        for tensor in outputs:
            is_alias = self.storages.serial_of(tensor, path, category, place) in known
            if not is_alias or facts.is_mutable:
                written.append(tensor)
        if facts.is_mutable and not written and sources:
            written = list(list_tensors(args[:1])) or sources[:1]  # those of lists write all of the first list
        if facts.is_free or not written or not any(tensor.numel() for tensor in written):
            return
        if facts.name in ("_to_copy", "clone") and self._weights & known and len(known) == 1:
            copy = self.storages.serial_of(written[0])
            self._weights.add(copy)
            self._copied_weights[copy] = next(iter(known))
        if facts.name == "embedding":
            self._embedding_rows[self.storages.serial_of(args[0])] = args[0].shape[0]
        computed = read_compute(facts, args, written[0])
        for gradient, work in computed:
            self._add_compute(facts, gradient, work, known, (path, pass_name, node))
        if computed:
            self._note_bytes(self.calls[-1], sources, written, path, pass_name)
            return
        work = make_pointwise(facts, sources, written)
        gradient = "backward" if pass_name == "backward" else ""
        call = Call(facts.label, path, pass_name, gradient, work)
        self._note_bytes(call, sources, written, path, pass_name, facts, args)
        call.num_elements = max(tensor.numel() for tensor in (*sources, *written))
        call.is_fusible = facts.is_fusible
        self.calls.append(call)

    def embedding_rows(self) -> dict[int, int]:
        """Rows of each embedding table, by the storages of the table and of its copies in other formats."""
        copies = self._copied_weights.items()
        rows = self._embedding_rows
        return rows | {copy: rows[weight] for copy, weight in copies if weight in rows}

    def _add_compute(
        self, facts: Operator, gradient: str, work: Operation, known: set[int], place: tuple[str, str, int]
    ) -> None:
        """Record a GEMM, attention or collective, with the gradient that it is where it runs in the backward pass."""
        path, pass_name, node = place
        is_backward = pass_name == "backward"
        uses_weight = bool(self._weights & known)
        if not is_backward and uses_weight:
            self._nodes_with_weight.add(node)
        if is_backward and not gradient and isinstance(work, Gemm | GroupedGemm):
            gradient = "dgrad" if uses_weight else "wgrad" if node in self._nodes_with_weight else "backward"
        work = self._narrowed(work, node, is_backward=is_backward)
        has_weight = uses_weight or gradient in ("dgrad", "wgrad")
        if is_backward and not gradient:
            gradient = "backward"
        call = Call(facts.label, path, pass_name, gradient, work, has_weight=has_weight)
        call.is_convolution = "convolution" in facts.name
        self.calls.append(call)

    def _narrowed(self, work: Operation, node: int, *, is_backward: bool) -> Operation:
        """Operation in the format of autocast, whose casts are not made inside functions that PyTorch has in Python."""
        narrow = self._narrow_nodes.get(node) if is_backward else seen_autocast()
        if narrow is None or work.dtype != "fp32" or isinstance(work, Pointwise):
            return work
        self._narrow_nodes.setdefault(node, narrow)
        return work.changed(dtype=dtype_of(narrow))

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
        facts: Operator | None = None,
        args: Sequence[Any] = (),
    ) -> None:
        """Note what a call reads and writes, and the sizes of a memory-bound operation."""
        category = ACTIVATIONS if pass_name == "forward" else WORKSPACE
        writes = sum_views(view_of(one, self.storages.serial_of(one, path, category)) for one in written)
        views = [view_of(one, self.storages.serial_of(one, path)) for one in sources]
        reads = sum_views(views)
        if facts is not None and sources:
            self._note_part(facts.name, args, sources[0], written[0], reads, writes)
        call.reads, call.writes = reads, writes
        call.views = tuple(one for one in views if reads.get(one.serial, 0.0) >= one.num_bytes)
        if isinstance(call.work, Pointwise):
            call.work = call.work.changed(read_bytes=sum(reads.values()), written_bytes=sum(writes.values()))

    def _note_part(
        self,
        name: str,
        args: Sequence[Any],
        source: Any,
        written: Any,
        reads: dict[int, float],
        writes: dict[int, float],
    ) -> None:
        """Change the bytes of an operator that does not read all of its first tensor, or does not write all of it."""
        first, target = self.storages.serial_of(source), self.storages.serial_of(written)
        if name in GATHERS:
            reads[first] = sum(writes.values())
        elif name in SCATTERS:
            touched = min(writes[target], float(count_scattered(name, args) * written.element_size()))
            writes[target], reads[target] = touched, touched if adds_to_target(name, args) else 0.0
        elif name in PICKS:
            reads[first] = float(args[1].numel() * source.element_size())
        elif name == "embedding_dense_backward":
            # The table is zeroed, then rows are added.
            writes[target] += float(count_bytes(source))
        elif name in OVERWRITES:
            reads.pop(target, None)
        elif name in LIKENESSES:
            reads.pop(self.storages.serial_of(args[LIKENESSES[name]]))

    # Devices

    def _refuse_device(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse calls that ask for another device."""
        device = kwargs.get("device")
        if device is None or str(device).partition(":")[0] in ("meta", "cpu"):
            return
        raise TraceError(
            f"{user_line()}: the module asks for device {str(device)!r}; a trace runs on the meta device",
            advice="leave the device out, or take it from an input (x.device)",
        )
