"""Conventions of published FLOP rates: FLOPs per token of a training step, as a formula in a model's sizes.

Legend: W weights of the layers and of one logit matrix, N parameters that a token uses, N' those without the token
embedding, L layers with attention, h width of all query heads, s tokens of a sequence.

Conventions differ in attention (all query-key pairs, the causal half, or none) and in embeddings (counted as arithmetic
or not), so a FLOP rate is meaningful only with its convention.
"""

from __future__ import annotations

from shapewright.core.errors import WorkloadError, close_names
from shapewright.core.records import dataclass


@dataclass(frozen=True, kw_only=True)
class FlopConvention:
    """A convention for counting the FLOPs of a training step.

    Attributes:
        name: Name to select it by.
        formula: FLOPs per token, in the letters of this module.
        used_by: Publications and software that use it.
        source: Source of the formula.
        counts_repeats: Whether it also says what recomputation adds (HFU).
    """

    name: str
    formula: str
    used_by: str
    source: str
    counts_repeats: bool = True


CONVENTIONS = {
    convention.name: convention
    for convention in (
        FlopConvention(
            name="megatron",
            formula="6 W + 12 L h s",
            used_by="Megatron-LM papers, NeMo to 25.07, BLOOM",
            source="arXiv 2205.05198, eq. 7 and 9; arXiv 2104.04473, eq. 3 (full recomputation)",
        ),
        FlopConvention(
            name="megatron-causal",
            formula="6 W + 6 L h s",
            used_by="Megatron-Bridge, NeMo from 25.09",
            source="NVIDIA/Megatron-LM at d98e8a6, megatron/training/training.py, which halves the causal core",
        ),
        FlopConvention(
            name="torchtitan",
            formula="6 N + 12 L h s",
            used_by="torchtitan to April 2024",
            source="pytorch/torchtitan, train.py before pull request 280; N without the token embedding since then",
            counts_repeats=False,
        ),
        FlopConvention(
            name="torchtitan-no-embedding",
            formula="6 N' + 12 L h s",
            used_by="torchtitan since April 2024, nanochat",
            source=(
                "pytorch/torchtitan, get_nparams_and_flops; a tied embedding is counted, as logits; h is the mean "
                "width of queries and values"
            ),
            counts_repeats=False,
        ),
        FlopConvention(
            name="llm-foundry",
            formula="6 N + 12 L h s",
            used_by="MosaicML llm-foundry",
            source="mosaicml/llm-foundry, scripts/train/benchmarking; HFU is 4/3 of MFU with full recomputation",
        ),
        FlopConvention(
            name="6n",
            formula="6 N",
            used_by="rule of thumb",
            source="arXiv 2001.08361, section 2.1; 8 N with full recomputation",
        ),
    )
}


def get_convention(name: str) -> FlopConvention:
    """Look up a convention by name.

    Raises:
        WorkloadError: the convention is unknown.
    """
    if name not in CONVENTIONS:
        hint = close_names(name, CONVENTIONS)
        raise WorkloadError(
            f"unknown FLOP convention {name!r}; {hint + ' ' if hint else ''}choose one of {', '.join(CONVENTIONS)}"
        )
    return CONVENTIONS[name]
