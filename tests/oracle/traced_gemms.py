"""GEMMs of a Hugging Face model on the meta device, forward and backward, as the tracer records them.

PyTorch may compute C transposed (B^T A^T), so every GEMM is turned such that m <= n: a comparison of recorded GEMMs
cannot see such a swap, and does not need to, since the work is the same. FLOPs are those of PyTorch's own counter,
which does not count grouped GEMMs and counts the outer products of rotary positions: it gets formulas for both.
"""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.torch_trace.recorder import Recorder
from shapewright.lowering.torch_trace.run import recording, trace_module

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import PreTrainedModel

    from shapewright.lowering.operations.operation import Operation

aten = torch.ops.aten

# Layout of the transposed GEMM: C^T = B^T A^T.
_TRANSPOSED = {"NN": "TT", "TT": "NN", "NT": "NT", "TN": "TN"}


class TracedGemm(NamedTuple):
    """One GEMM, transposed if necessary so that m <= n.

    Attributes:
        batch: Independent GEMMs of one call.
        m: Smaller dimension of the result.
        n: Larger dimension of the result.
        k: Contracted dimension.
        groups: Weight matrices of a grouped GEMM, 1 for all others.
        layout: How the operands lie in memory, as Gemm has it; empty where it is not compared.
    """

    batch: int
    m: int
    n: int
    k: int
    groups: int = 1
    layout: str = ""


def turn(batch: int, m: int, n: int, k: int, *, groups: int = 1, layout: str = "") -> TracedGemm:
    """Put the smaller dimension of the result first."""
    swapped = m > n or (m == n and layout == "TT")
    layout = _TRANSPOSED[layout] if swapped and layout else layout
    return TracedGemm(batch, min(m, n), max(m, n), k, groups, layout)


def count_gemms(operations: Iterable[Operation], *passes: str) -> Counter[TracedGemm]:
    """Count the GEMMs of some passes."""
    gemms: Counter[TracedGemm] = Counter()
    for operation in operations:
        if operation.pass_name not in passes or not isinstance(operation, Gemm | GroupedGemm):
            continue
        batch, groups = (1, operation.groups) if isinstance(operation, GroupedGemm) else (operation.batch, 1)
        gemm = turn(batch, operation.m, operation.n, operation.k, groups=groups, layout=operation.layout)
        gemms[gemm] += operation.repeats
    return gemms


def without_layout(gemms: Counter[TracedGemm]) -> Counter[TracedGemm]:
    """Count again by dimensions alone."""
    merged: Counter[TracedGemm] = Counter()
    for gemm, count in gemms.items():
        merged[gemm._replace(layout="")] += count
    return merged


def without_groups(gemms: Counter[TracedGemm]) -> Counter[TracedGemm]:
    """Merge counts of grouped GEMMs that differ only in the number of groups."""
    merged: Counter[TracedGemm] = Counter()
    for gemm, count in gemms.items():
        merged[gemm._replace(groups=1)] += count
    return merged


def _grouped_flops(first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of a grouped GEMM: rows x columns x contraction, whichever dimension is grouped."""
    return 2 * first[0] * first[1] * second[-1]


def _batched_flops(first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of a batched GEMM; outer products are not part of the model."""
    return 2 * first[0] * first[1] * first[2] * second[-1] if first[2] > 1 else 0


def count_flops(*, has_convolutions: bool = True) -> FlopCounterMode:
    """PyTorch's counter of FLOPs, on request without convolutions: it counts gradients of grouped ones wrongly."""
    formulas: dict[Any, Any] = {aten._grouped_mm: _grouped_flops, aten.bmm: _batched_flops}
    if not has_convolutions:
        formulas |= dict.fromkeys((aten.convolution, aten.convolution_backward), lambda *_, **__: 0)
    return FlopCounterMode(display=False, custom_mapping=formulas)


class Trace(NamedTuple):
    """GEMMs of a forward pass and of a whole training step, with FLOP counts; that of the step is PyTorch's own."""

    forward: Counter[TracedGemm]
    whole: Counter[TracedGemm]
    forward_flops: int
    whole_flops: int


def trace_training(model: PreTrainedModel, batch_size: int, seq_len: int) -> Trace:
    """Run forward and backward on meta tensors."""
    ids = f"int64[{batch_size},{seq_len}]"
    inputs = f"input_ids={ids}" + (f",decoder_input_ids={ids}" if model.config.is_encoder_decoder else "")
    model.config.use_cache = False
    with count_flops() as counter:
        found = trace_module(model, inputs, assumes_values=True)
    return Trace(
        count_gemms(found.operations, "forward"),
        count_gemms(found.operations, "forward", "backward"),
        int(sum(one.flops * one.repeats for one in found.operations if one.pass_name == "forward")),
        counter.get_total_flops(),
    )


class RecordedGemms:
    """GEMMs of what ran so far under ``record_gemms``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def gemms(self) -> Counter[TracedGemm]:
        """Their counts."""
        return count_gemms((call.work for call in self._recorder.calls), "forward")


@contextmanager
def record_gemms() -> Iterator[RecordedGemms]:
    """Record the GEMMs of what runs inside."""
    recorder = Recorder({}, assumes_values=True)
    with recording(recorder):
        yield RecordedGemms(recorder)


def cache_name(model: PreTrainedModel) -> str:
    """Return the name of the KV cache among a model's arguments and outputs, which transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def trace_prefill(model: PreTrainedModel, batch_size: int, seq_len: int) -> tuple[Counter[TracedGemm], Any]:
    """Run a prompt and keep its KV cache; return the GEMMs, with logits of the last token only, and the cache."""
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device="meta")
    model.eval()
    with torch.no_grad(), record_gemms() as recorded:
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return recorded.gemms, output[cache_name(model)]


def trace_decode(model: PreTrainedModel, batch_size: int, context_len: int) -> Counter[TracedGemm]:
    """Run one new token per sequence against a cache of ``context_len`` tokens."""
    _, cache = trace_prefill(model, batch_size, context_len)
    ids = torch.zeros(batch_size, 1, dtype=torch.long, device="meta")
    with torch.no_grad(), record_gemms() as recorded:
        model(input_ids=ids, use_cache=True, **{cache_name(model): cache})
    return recorded.gemms
