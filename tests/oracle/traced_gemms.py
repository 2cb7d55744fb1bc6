"""Record the GEMMs of a Hugging Face model on the meta device, forward and backward.

What PyTorch calls mm, addmm, bmm, baddbmm and _grouped_mm is written down in BLAS letters, C[m,n] = A[m,k] B[k,n], with
the layout that the strides of A and B tell. PyTorch may compute C transposed (B^T A^T), so every product is turned such
that m <= n: comparing recorded products cannot see such a swap, and needs not, for the work is the same.

Traps that this file goes around:

- Masks ask for the value of a tensor (``.item()``), which meta tensors have not: answered with True or 1.
- Rotary positions are made by a batched product of frequencies and positions, an outer product (bmm with k = 1): not a
  GEMM of the model, left out of the products and of the FLOPs.
- scaled_dot_product_attention is decomposed into products on the meta device; ``eager`` attention is recorded instead.
- Grouped products exist in bf16 alone, and PyTorch's FLOP counter does not count them: it is taught their formula.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

aten = torch.ops.aten

_SINGLE_GEMMS = (aten.mm.default, aten.addmm.default)
_BATCHED_GEMMS = (aten.bmm.default, aten.baddbmm.default)
# Layout of the transposed product: C^T = B^T A^T.
_TRANSPOSED = {"NN": "TT", "TT": "NN", "NT": "NT", "TN": "TN"}


class TracedGemm(NamedTuple):
    """One GEMM, transposed if necessary so that m <= n.

    Attributes:
        batch: Independent products of one call.
        m: Smaller dimension of the result.
        n: Larger dimension of the result.
        k: Contracted dimension.
        groups: Weight matrices of a grouped product, 1 for all others.
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


class GemmRecorder(TorchDispatchMode):
    """Count every dispatched GEMM, and separately the FLOPs of outer products, which are not part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms: Counter[TracedGemm] = Counter()
        self.outer_product_flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a call, then run it."""
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        gemm = _gemm_of(func, args)
        if gemm is not None and func in _BATCHED_GEMMS and gemm.k == 1:
            self.outer_product_flops += 2 * gemm.batch * gemm.m * gemm.n
        elif gemm is not None:
            self.gemms[gemm] += 1
        return func(*args, **(kwargs or {}))


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


def _gemm_of(func: Any, args: Sequence[Any]) -> TracedGemm | None:
    """Read a dispatched GEMM in BLAS letters; None for other operators."""
    if func in _SINGLE_GEMMS or func in _BATCHED_GEMMS:
        first, second = args[-2:]
        m, k = first.shape[-2:]
        batch = first.shape[0] if func in _BATCHED_GEMMS else 1
        return turn(batch, m, second.shape[-1], k, layout=_letter_of(first) + _letter_of(second))
    if func is aten._grouped_mm.default:
        first, second = args[0], args[1]
        m, k = first.shape
        # Rows are split over the groups, or for the gradient of weights (two matrices) the contraction.
        groups = second.shape[0] if second.dim() == 3 else args[2].shape[0]
        return turn(1, m, second.shape[-1], k, groups=groups, layout=_letter_of(first) + _letter_of(second))
    return None


def _letter_of(matrix: torch.Tensor) -> str:
    """N where rows lie in memory one after another, T where columns do."""
    return "N" if matrix.stride(-1) == 1 else "T"


def _grouped_flops(first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of a grouped GEMM: rows x columns x contraction, whichever dimension is grouped."""
    return 2 * first[0] * first[1] * second[-1]


class Trace(NamedTuple):
    """GEMMs of a forward pass and of a whole training step, with PyTorch's own FLOP counts."""

    forward: Counter[TracedGemm]
    whole: Counter[TracedGemm]
    forward_flops: int
    whole_flops: int


def trace_training(model: PreTrainedModel, batch_size: int, seq_len: int) -> Trace:
    """Run forward and backward on meta tensors."""
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    model.config.use_cache = False
    model.train()
    counter = FlopCounterMode(display=False, custom_mapping={aten._grouped_mm: _grouped_flops})
    with counter, GemmRecorder() as recorder:
        logits = model(**inputs).logits
        forward = recorder.gemms.copy()
        forward_flops = counter.get_total_flops() - recorder.outer_product_flops
        logits.float().sum().backward()
    whole_flops = counter.get_total_flops() - recorder.outer_product_flops
    return Trace(forward, recorder.gemms, forward_flops, whole_flops)


def trace_prefill(model: PreTrainedModel, batch_size: int, seq_len: int) -> tuple[Counter[TracedGemm], Any]:
    """Run a prompt and keep its KV cache; return the GEMMs, with logits of the last token only, and the cache."""
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device="meta")
    model.eval()
    with torch.no_grad(), GemmRecorder() as recorder:
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return recorder.gemms, output.past_key_values


def trace_decode(model: PreTrainedModel, batch_size: int, context_len: int) -> Counter[TracedGemm]:
    """Run one new token per sequence against a cache of ``context_len`` tokens."""
    _, cache = trace_prefill(model, batch_size, context_len)
    ids = torch.zeros(batch_size, 1, dtype=torch.long, device="meta")
    with torch.no_grad(), GemmRecorder() as recorder:
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return recorder.gemms
