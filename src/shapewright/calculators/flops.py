"""FLOPs of a token: of the weights, of attention, of the logits, and of a training step by each convention.

Legend: W weights that a token is multiplied with in the layers, A attention FLOPs of a token in the forward pass, V
weights of the logit matrix.

    forward            2 W + A + 2 V             a multiplication and an addition for each weight
    training           three times that          the backward pass is worth two forward passes
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shapewright.calculators.term import Term, put_in
from shapewright.layout import ParallelLayout
from shapewright.lowering import lower, validate_lengths
from shapewright.lowering.conventions import CONVENTIONS, StepFlops, count_step_flops
from shapewright.operations import Attention, Gemm, GroupedGemm

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.workload import Workload

_CORE_ROLES = ("score", "over_value")


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """FLOPs of one token of a sequence.

    Attributes:
        config: The model.
        seq_len: Tokens of the sequence.
        recompute: Activation recomputation, which hardware FLOPs count.
        layer_weights: W.
        attention_flops: A, the whole square; of one token on average. [flop]
        head_weights: V.
        conventions: Training FLOPs of a token by convention. [flop]
    """

    config: TransformerConfig
    seq_len: int
    recompute: str
    layer_weights: float
    attention_flops: float
    head_weights: float
    conventions: dict[str, StepFlops]

    @property
    def forward_flops(self) -> float:
        """Forward pass, logits of every token. [flop]"""
        return 2.0 * self.layer_weights + self.attention_flops + 2.0 * self.head_weights

    @property
    def training_flops(self) -> float:
        """Forward and backward pass. [flop]"""
        return 3.0 * self.forward_flops

    @property
    def terms(self) -> tuple[Term, ...]:
        """The parts with their formulas."""
        values = {
            "W": self.layer_weights,
            "A": self.attention_flops,
            "V": self.head_weights,
            "L": self.config.num_layers,
            "a": self.config.num_heads,
            "d": self.config.head_dim,
            "d_v": self.config.v_head_dim,
            "s": self.seq_len,
        }
        rows = [
            ("layers, forward", "2*W", 2.0 * self.layer_weights),
            ("attention, forward", _attention_formula(self.config, self.attention_flops, values), self.attention_flops),
            ("logits, forward", "2*V", 2.0 * self.head_weights),
            ("forward", "2*W + A + 2*V", self.forward_flops),
            ("forward and backward", "3*(2*W + A + 2*V)", self.training_flops),
        ]
        return tuple(Term(name, formula, put_in(formula, values), value) for name, formula, value in rows)


def count_flops(config: TransformerConfig, workload: Workload) -> FlopsPerToken:
    """Count the FLOPs of a token.

    Args:
        config: The model.
        workload: Its seq_len and its recompute count.

    >>> from shapewright.config import TransformerConfig
    >>> from shapewright.workload import Workload
    >>> gpt_22b = TransformerConfig(hidden_size=6144, num_layers=48, num_heads=64, vocab_size=51200)
    >>> found = count_flops(gpt_22b, Workload(seq_len=2048))
    >>> found.layer_weights == 12 * 48 * 6144**2, found.attention_flops == 48 * 4 * 2048 * 6144
    (True, True)
    """
    validate_lengths(config, workload)
    step = replace(workload.with_recompute("none"), phase="train", micro_batch_size=1, global_batch_size=1)
    tokens = float(step.seq_len)
    weights = attention = head = 0.0
    for operation in lower(config, step, ParallelLayout()):
        if operation.pass_name != "forward":
            continue
        if isinstance(operation, Attention) or operation.name.rpartition(".")[2] in _CORE_ROLES:
            attention += float(operation.flops) * int(operation.repeats) / tokens
        elif isinstance(operation, Gemm | GroupedGemm):
            share = float(operation.flops) * int(operation.repeats) / (2.0 * tokens)
            if operation.stage == "last":
                head += share
            else:
                weights += share
    kept = replace(step, recompute=workload.recompute, recompute_layers=workload.recompute_layers)
    return FlopsPerToken(
        config=config,
        seq_len=step.seq_len,
        recompute=kept.recompute,
        layer_weights=weights,
        attention_flops=attention,
        head_weights=head,
        conventions={name: _per_token(count_step_flops(config, kept, 1, name), tokens) for name in CONVENTIONS},
    )


def _per_token(flops: StepFlops, tokens: float) -> StepFlops:
    hardware = None if flops.hardware_flops is None else flops.hardware_flops / tokens
    return StepFlops(flops.model_flops / tokens, hardware)


def _attention_formula(config: TransformerConfig, attention_flops: float, values: dict[str, float]) -> str:
    """Formula of the attention core where one says it: not with windows, latents or an encoder."""
    v = "d" if config.v_head_dim == config.head_dim else "d_v"
    formula = "4*L*a*d*s" if v == "d" else "2*L*a*(d + d_v)*s"
    expected = 2.0 * values["L"] * values["a"] * (values["d"] + values["d_v"]) * values["s"]
    return formula if abs(expected - attention_flops) <= 1e-9 * expected else "A"
