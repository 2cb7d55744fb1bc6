"""Trace: the operations of a traced PyTorch module, its modules, and its memory over time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, fields
from typing import Any, get_args

from shapewright.core.notebook import NotebookDisplay
from shapewright.core.records import dataclass
from shapewright.lowering.operations.operation import Operation

_KINDS: dict[str, type] = {cls.kind: cls for cls in get_args(Operation)}


@dataclass(frozen=True, kw_only=True)
class TracedModule:
    """One module of the traced model without its submodules, or several equal ones.

    Attributes:
        path: Path in the model, such as ``layers.0.attn``; of several equal modules with ranges, ``layers.0-31.attn``.
        type_name: Name of its class.
        count: Number of equal modules.
        num_parameters: Parameters of one of them, shared ones where they first occur.
        num_trainable: Those that require a gradient.
        weights_bytes: Parameters and buffers of one of them. [byte]
        saved_bytes: Tensors that one of them made in the forward pass and that exist when it ends. [byte]
        peak_bytes: Tensors that one of them made and that exist at the peak, gradients included. [byte]
    """

    path: str
    type_name: str
    count: int = 1
    num_parameters: int = 0
    num_trainable: int = 0
    weights_bytes: float = 0.0
    saved_bytes: float = 0.0
    peak_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TracedLinear:
    """A linear layer or convolution that ran, or several equal ones: the widths that decide alignment and tiles.

    Attributes:
        path: Path of the module, as in TracedModule.
        count: Executions in the forward pass.
        num_rows: Rows of the input. [element]
        in_features: Contracted width. [element]
        out_features: Width of the output. [element]
        operation_name: Name of its forward operation, with which those of its gradients begin.
        is_convolution: Whether it is a convolution, which contracts channels and kernel.
        is_vocabulary: Whether its outputs are tokens or classes, which can be added but not left out.
    """

    path: str
    count: int
    num_rows: int
    in_features: int
    out_features: int
    operation_name: str
    is_convolution: bool = False
    is_vocabulary: bool = False

    @property
    def out_channels(self) -> int:
        """Width of the output, as a convolution names it. [element]"""
        return self.out_features


@dataclass(frozen=True, kw_only=True)
class UnknownOperator:
    """Calls of an operator that has no model of its own: priced as memory traffic, with a wide interval.

    Attributes:
        name: Operator, such as ``mylib::scan``.
        count: Calls in a step.
        num_bytes: Bytes of the tensors of all calls. [byte]
        bytes_fraction: Share of the bytes of the step.
    """

    name: str
    count: int
    num_bytes: float
    bytes_fraction: float


@dataclass(frozen=True, kw_only=True)
class TracedMemory:
    """Memory of a traced step on one device, as PyTorch's allocation of tensors in eager mode has it.

    Attributes:
        weights_bytes: Parameters and buffers. [byte]
        inputs_bytes: Inputs. [byte]
        gradients_bytes: Gradients at the peak. [byte]
        activations_bytes: Tensors of the forward pass that exist at the peak. [byte]
        workspace_bytes: Tensors of the backward pass that exist at the peak and are no gradients of parameters. [byte]
        saved_bytes: Tensors that exist between the forward and the backward pass, without weights. [byte]
        peak_bytes: Largest sum of all tensors over the step. [byte]
        peak_operation: Operation that reaches it.
        timeline_bytes: Sum of all tensors after each of a few hundred points of the step. [byte]
        backward_start: Index in the timeline at which the backward pass begins.
    """

    weights_bytes: float
    inputs_bytes: float
    gradients_bytes: float
    activations_bytes: float
    workspace_bytes: float
    saved_bytes: float
    peak_bytes: float
    peak_operation: str
    timeline_bytes: tuple[float, ...] = ()
    backward_start: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace(NotebookDisplay):
    """What a PyTorch module runs for given inputs, in terms that can be priced on any device.

    Attributes:
        source: Where the module comes from, such as ``my_model.py:build``.
        module_type: Class of the module.
        inputs: Inputs as text, such as ``tokens=int64[4,2048]``.
        phase: ``train`` (forward and backward pass) or ``prefill`` (forward pass alone).
        dtype: Element format of most FLOPs.
        parameter_dtype: Element format of most parameters.
        is_fused: Whether chains of pointwise operations are merged as torch.compile merges them.
        num_parameters: Parameters, shared ones once.
        num_trainable: Those that require a gradient.
        num_tokens: Tokens of a step of the traced rank: elements of the first integer input, otherwise its first size,
            or the first two of three.
        operations: Operations with their module path as name; equal ones of equal layers are listed once.
        linears: Linear layers.
        modules: Modules that have parameters or made tensors, in the order of the model.
        memory: Memory.
        unknown_operators: Operators without a model, those with most bytes first.
        notes: How the module was run, one line each.
        num_updated: Trainable parameters that the optimizer of one rank updates, where FSDP shards them; None for all.
        counts_samples: Whether ``num_tokens`` counts samples, such as images: no input has a size of tokens.
        num_ranks: Ranks that the module is distributed over, of which one is traced; 1 if it runs no collective.
        num_replicas: Ranks that take inputs of their own in a step, as those of FSDP do.
    """

    source: str
    module_type: str
    inputs: str
    phase: str
    dtype: str
    parameter_dtype: str
    is_fused: bool
    num_parameters: int
    num_trainable: int
    num_tokens: int
    operations: tuple[Operation, ...]
    linears: tuple[TracedLinear, ...]
    modules: tuple[TracedModule, ...]
    memory: TracedMemory
    unknown_operators: tuple[UnknownOperator, ...] = ()
    notes: tuple[str, ...] = field(default=())
    num_updated: int | None = None
    counts_samples: bool = False
    num_ranks: int = 1
    num_replicas: int = 1

    @property
    def is_training(self) -> bool:
        """Whether the step has a backward pass."""
        return self.phase == "train"

    @property
    def num_job_tokens(self) -> int:
        """Tokens of a step of the whole job."""
        return self.num_tokens * self.num_replicas

    @property
    def title(self) -> str:
        """Name in reports: class and source."""
        return f"{self.module_type} of {self.source}"

    def to_json(self) -> dict[str, Any]:
        """Convert to values that ``json`` can write."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return values | {
            "operations": [{"kind": one.kind, **asdict(one)} for one in self.operations],
            "linears": [asdict(one) for one in self.linears],
            "modules": [asdict(one) for one in self.modules],
            "memory": asdict(self.memory),
            "unknown_operators": [asdict(one) for one in self.unknown_operators],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Trace:
        """Make a trace of what ``to_json`` returned, after a round trip through text."""
        operations = []
        for one in values["operations"]:
            given = dict(one)
            operations.append(_KINDS[given.pop("kind")](**given))
        memory = dict(values["memory"])
        memory["timeline_bytes"] = tuple(memory["timeline_bytes"])
        return cls(
            **{
                **values,
                "operations": tuple(operations),
                "linears": tuple(TracedLinear(**one) for one in values["linears"]),
                "modules": tuple(TracedModule(**one) for one in values["modules"]),
                "memory": TracedMemory(**memory),
                "unknown_operators": tuple(UnknownOperator(**one) for one in values["unknown_operators"]),
                "notes": tuple(values["notes"]),
            }
        )


_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def path_pattern(path: str) -> str:
    """Path with a star in place of each index.

    >>> path_pattern("model.layers.3.mlp.up_proj")
    'model.layers.*.mlp.up_proj'
    """
    return _INDEX.sub("*", path)


def merge_paths(paths: Iterable[str]) -> str:
    """One path for several that differ only in their indices.

    >>> merge_paths(["layers.0.up", "layers.1.up", "layers.2.up", "layers.5.up"])
    'layers.0-2,5.up'
    """
    listed = list(dict.fromkeys(paths))
    if len(listed) == 1:
        return listed[0]
    columns = zip(*([int(index) for index in _INDEX.findall(path)] for path in listed), strict=True)
    ranges = iter([_ranges(sorted(set(column))) for column in columns])
    return _INDEX.sub(lambda _: next(ranges), listed[0])


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as text, consecutive ones as a range."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def share_within(path: str, parent: str) -> float:
    """Share of the modules of one path that are those of another path or parts of them; both may have ranges.

    >>> [share_within("layers.0-3.up", parent) for parent in ("layers.0-3", "layers.0,2-9", "head")]
    [1.0, 0.75, 0.0]

    Assumes: of a path with several ranges, every combination exists.
    """
    parts, parent_parts = path.split("."), parent.split(".")
    if len(parts) < len(parent_parts):
        return 0.0
    share = 1.0
    for part, parent_part in zip(parts, parent_parts, strict=False):
        if part == parent_part:
            continue
        own, others = _indices(part), _indices(parent_part)
        share *= len(own & others) / len(own) if own else 0.0
    return share


def _indices(part: str) -> set[int]:
    """Indices of a part of a path with ranges, empty for a name.

    >>> sorted(_indices("0-2,5")), _indices("up")
    ([0, 1, 2, 5], set())
    """
    if not re.fullmatch(r"\d[\d,-]*", part):
        return set()
    ends = [[int(end) for end in one.split("-")] for one in part.split(",")]
    return {index for one in ends for index in range(one[0], one[-1] + 1)}
