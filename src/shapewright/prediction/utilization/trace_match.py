"""Match the kernels of a trace to the operations of a prediction, by what they compute.

GEMMs match by their sizes, attention by its pass, collectives by their kind, memory-bound kernels by their class. Equal
GEMMs are one group, as their kernels cannot be told apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.fields import shown
from shapewright.core.records import dataclass
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import LOG_SOFTMAX, Pointwise
from shapewright.lowering.torch_trace.operators import convolution_gemms
from shapewright.prediction.utilization.kineto import CONVOLUTION_OPERATOR

if TYPE_CHECKING:
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.prediction.utilization.kineto import Kernel, Operator

_FP32_TYPES = ("float", "c10::Float")
_CLASSES = (  # of memory-bound kernels, by words in the names of operator and kernel
    ("optimizer", re.compile(r"adam|optimizer|_foreach_|fused_sgd|addcmul|addcdiv|lerp", re.IGNORECASE)),
    ("norm", re.compile(r"layer_?norm|rms_?norm", re.IGNORECASE)),
    ("cross_entropy", re.compile(r"log_softmax|nll_loss|cross_entropy", re.IGNORECASE)),
    ("softmax", re.compile(r"softmax|masked_fill|tril|triu", re.IGNORECASE)),
    ("embedding", re.compile(r"embedding|indexing_backward|index_put|index_select", re.IGNORECASE)),
)
_PREDICTED_CLASSES = {
    "norm": "norm",
    "layernorm": "norm",
    "cross_entropy": "cross_entropy",
    "embedding": "embedding",
    "optimizer": "optimizer",
    "softmax": "softmax",
    "mask": "softmax",
}
_ELEMENTWISE = "elementwise"
_ATTENTION = re.compile(r"scaled_dot_product|flash|fmha|attention", re.IGNORECASE)
_BACKWARD = re.compile(r"backward|bwd", re.IGNORECASE)
_SCAN = re.compile(
    r"gated_delta|delta_rule|chunk_fwd|chunk_bwd|kda|selective_scan|_chunk_scan|_chunk_state", re.IGNORECASE
)
_CONVOLUTION = re.compile(r"causal_conv1d", re.IGNORECASE)
# Not the kernels that convert layouts or add up the gradient of a bias.
_CONVOLUTION_KERNEL = re.compile(
    r"aten::|gemm|cutlass|nvjet|xmma|convolve|fprop|dgrad|wgrad|winograd|Cijk", re.IGNORECASE
)
_GEMM_OPERATORS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm")
_GEMM_KERNEL = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|_mm_|Cijk", re.IGNORECASE)
_COLLECTIVES = {
    "all_reduce": re.compile(r"all_?reduce", re.IGNORECASE),
    "all_gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce_scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "alltoall": re.compile(r"all_?to_?all", re.IGNORECASE),
    "send_recv": re.compile(r"send|recv", re.IGNORECASE),
}
"""Operations of COLLECTIVE_OPS by words in the names of operator, collective and kernel."""
_MOST_NAMES = 4
Key = tuple[Any, ...]


@dataclass(frozen=True)
class MatchedGroup:
    """Kernels of one kind and size, and the predicted operations that they run.

    Attributes:
        name: Names of the predicted operations, or of the kernels where none is predicted.
        kind: ``gemm``, ``grouped_gemm``, ``attention``, ``pointwise``, ``collective`` or ``other``.
        measured_s: Time of the kernels in a step. [s]
        predicted_s: Predicted time of the operations in a step; 0 without any. [s]
        num_measured: Kernels or operators in a step.
        num_predicted: Predicted executions in a step.
        kernel: Name of the longest kernel; empty without any.
        in_fp32: Whether its operators have 32-bit inputs although 16 bits or less were predicted.
    """

    name: str
    kind: str
    measured_s: float
    predicted_s: float
    num_measured: float
    num_predicted: int
    kernel: str
    in_fp32: bool

    @property
    def is_matched(self) -> bool:
        """Whether kernels ran that were predicted."""
        return self.num_predicted > 0 and self.num_measured > 0.0

    @property
    @shown
    def lost_s(self) -> float:
        """Time beyond the prediction; negative where the kernels are faster. [s]"""
        return self.measured_s - self.predicted_s


@dataclass
class GroupSums:
    """Running sums of one group, over the steps of the trace."""

    kind: str
    names: list[str] = field(default_factory=list)
    measured_s: float = 0.0
    predicted_s: float = 0.0
    num_measured: int = 0
    num_predicted: int = 0
    longest: tuple[float, str] = (0.0, "")
    num_fp32: int = 0
    is_narrow: bool = False


def add_prediction(groups: dict[Key, GroupSums], entry: PricedOperation) -> None:
    """Add a predicted operation to its group."""
    operation = entry.operation
    if isinstance(operation, Collective):
        key: Key = ("collective", operation.op_name)
    elif isinstance(operation, Gemm):
        key = gemm_key(int(operation.batch), int(operation.m), int(operation.n), int(operation.k))
    elif isinstance(operation, GroupedGemm):
        key = ("grouped_gemm",)
    elif isinstance(operation, Attention):
        key = ("attention", bool(operation.is_backward))
    elif not isinstance(operation, Pointwise):
        key = (operation.kind, bool(getattr(operation, "is_backward", False)))
    else:
        # The two operators of cross entropy are one class: tables predict them together.
        kind = "cross_entropy" if operation.role == LOG_SOFTMAX else operation.operation
        key = ("pointwise", _PREDICTED_CLASSES.get(kind, _ELEMENTWISE))
    group = groups.setdefault(key, GroupSums(str(key[0])))
    group.names.append(operation.name)
    group.predicted_s += float(entry.price.time_s) * int(operation.repeats)
    group.num_predicted += int(operation.repeats)
    group.is_narrow |= get_dtype(operation.dtype).bits <= 16


def gemm_key(batch: int, m: int, n: int, k: int) -> Key:
    """Return the key of the group of a GEMM; a GEMM and its transpose have the same key.

    >>> gemm_key(1, 8, 4, 2) == gemm_key(1, 4, 8, 2), gemm_key(1, 8, 4, 2) == gemm_key(1, 8, 2, 4)
    (True, False)
    """
    return ("gemm", batch, min(m, n), max(m, n), k)


def merge_gemms(groups: dict[Key, GroupSums]) -> dict[Key, GroupSums]:
    """Merge all GEMMs into one group, for traces that do not record shapes."""
    merged: dict[Key, GroupSums] = {}
    for key, group in groups.items():
        own = merged.setdefault(("gemm",) if key[0] == "gemm" else key, GroupSums(group.kind))
        own.names += group.names
        own.predicted_s += group.predicted_s
        own.num_predicted += group.num_predicted
        own.is_narrow |= group.is_narrow
    return merged


def add_kernel(groups: dict[Key, GroupSums], kernel: Kernel, key: Key, time_s: float) -> None:
    """Add a kernel to the group of the operation that it runs, for which it took a time [s]."""
    group = groups.setdefault(key, GroupSums(str(key[0])))
    group.measured_s += time_s
    group.num_measured += 1
    group.longest = max(group.longest, (time_s, kernel.name))
    group.num_fp32 += bool(kernel.operator and kernel.operator.dtype in _FP32_TYPES)
    if not group.num_predicted and len(group.names) < _MOST_NAMES:
        name = kernel.operator.name if kernel.operator else kernel.name
        group.names += [] if name in group.names else [name]


def kernel_keys(kernel: Kernel) -> list[Key]:
    """Return the key of the group of a kernel; two for an operator of a CPU that computes both gradients at once."""
    operator = kernel.operator
    if operator and not kernel.is_collective and CONVOLUTION_OPERATOR.match(operator.name):
        sizes = _convolution_sizes(operator)
        if sizes == {}:
            return [("pointwise", _ELEMENTWISE)]
        if _CONVOLUTION_KERNEL.search(kernel.name):
            named = [gradient for gradient in ("dgrad", "wgrad") if gradient in kernel.name]
            chosen = [sizes[gradient] for gradient in named or sizes if gradient in sizes] if sizes else []
            is_known = len(chosen) == 1 or kernel.name == operator.name
            return chosen if chosen and is_known else [("gemm",)]
    return [_kernel_key(kernel)]


def _convolution_sizes(operator: Operator) -> dict[str, Key] | None:
    """Return the keys of the GEMMs that a convolution or its gradients run; None if its sizes are unknown.

    Source: pytorch/pytorch, aten/src/ATen/native/native_functions.yaml (arguments of convolution and
    convolution_backward).
    """
    is_backward = operator.name.endswith("_backward")
    dims, settings = operator.dims[is_backward:], operator.arguments[3 + is_backward :]
    if len(dims) < 2 or len(settings) < 6 + is_backward or len(dims[0]) != len(dims[1]):
        return None
    source, weight = dims[:2]
    stride, padding, dilation = ([int(size) for size in re.findall(r"\d{1,9}", text)] for text in settings[:3])
    (groups,) = [int(size) for size in re.findall(r"^\d{1,9}$", settings[5])] or [0]
    if not groups or 0 in stride or not len(stride) == len(padding) == len(dilation) == len(source) - 2:
        return None
    output = operator.dims[0]
    if not is_backward:
        spans = zip(source[2:], padding, dilation, weight[2:], stride, strict=True)
        output = (source[0], weight[0], *((size + 2 * p - d * (w - 1) - 1) // s + 1 for size, p, d, w, s in spans))
    found = convolution_gemms(source, weight, output, transposed=settings[3] == "True", groups=groups)
    wanted = [""]
    if is_backward:
        gradients = zip(("dgrad", "wgrad"), re.findall("True|False", settings[6]), strict=False)
        wanted = [gradient for gradient, is_wanted in gradients if is_wanted == "True"]
    return {name: gemm_key(groups, *found[name][:3]) for name in wanted if found}


def _kernel_key(kernel: Kernel) -> Key:
    operator = kernel.operator
    words = f"{operator.name if operator else ''} {kernel.collective} {kernel.name}"
    if kernel.is_collective:
        return ("collective", next((name for name, pattern in _COLLECTIVES.items() if pattern.search(words)), "other"))
    if operator and operator.name in _GEMM_OPERATORS:
        sizes = _gemm_sizes(operator.name, operator.dims)
        return gemm_key(*sizes) if sizes else ("gemm",)
    if "grouped" in words.lower() and _GEMM_KERNEL.search(words):
        return ("grouped_gemm",)
    for kind, pattern in (("scan", _SCAN), ("convolution", _CONVOLUTION)):
        if pattern.search(words):
            return (kind, bool(_BACKWARD.search(words)))
    if _ATTENTION.search(words):
        return ("attention", bool(_BACKWARD.search(words)))
    if _GEMM_KERNEL.search(words):
        return ("gemm",)
    if kernel.name.startswith(("Memcpy", "Memset")):
        return ("other", "copies")
    return ("pointwise", next((name for name, pattern in _CLASSES if pattern.search(words)), _ELEMENTWISE))


def _gemm_sizes(name: str, dims: Sequence[tuple[int, ...]]) -> tuple[int, int, int, int] | None:
    """Return batch, m, n and k of a GEMM operator by the dimensions of its inputs; None if these are not of a GEMM.

    >>> _gemm_sizes("aten::addmm", ((12,), (8, 4), (4, 12))), _gemm_sizes("aten::linear", ((2, 8, 4), (12, 4)))
    ((1, 8, 12, 4), (1, 16, 12, 4))
    """
    if name in ("aten::addmm", "aten::baddbmm"):
        dims = dims[1:]
    if len(dims) < 2:
        return None
    first, second = dims[0], dims[1]
    if name == "aten::linear" and len(second) == 2:
        rows = 1
        for size in first[:-1]:
            rows *= size
        return 1, rows, second[0], second[1]
    if len(first) == len(second) == 3:
        return first[0], first[1], second[2], first[2]
    return (1, first[0], second[1], first[1]) if len(first) == len(second) == 2 else None


def finish_group(group: GroupSums, steps: int) -> MatchedGroup:
    """Return a group with its times per step, measured and predicted."""
    names = list(dict.fromkeys(group.names))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return MatchedGroup(
        name=", ".join(names[:_MOST_NAMES]) + more,
        kind=group.kind,
        measured_s=group.measured_s / steps,
        predicted_s=group.predicted_s,
        num_measured=group.num_measured / steps,
        num_predicted=group.num_predicted,
        kernel=group.longest[1],
        in_fp32=group.is_narrow and 2 * group.num_fp32 > group.num_measured > 0,
    )
