"""FLOPs of a token, by part and by FLOP convention.

Legend: W layer weights that a token is multiplied with, A attention FLOPs of a token in the forward pass, S those of
scans and short convolutions, V weights of the logit matrix.

    forward            2 W + A + S + 2 V         one multiplication and one addition per weight
    training           3 (2 W + A + S + 2 V)     the backward pass has twice the FLOPs of the forward pass
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.lowering.checks import validate_lengths
from shapewright.lowering.flops import StepFlops, count_convention_flops
from shapewright.lowering.model import lower
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.models.flop_conventions import CONVENTIONS
from shapewright.prediction.calculators.parameters import Term, substitute
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """FLOPs of one token, averaged over a sequence.

    Attributes:
        config: The model.
        seq_len: Tokens of the sequence.
        recompute: Activation recomputation, which hardware FLOPs count.
        layer_weights: W.
        attention_flops: A, masked scores included; the average of the tokens. [flop]
        head_weights: V.
        conventions: Training FLOPs of a token by convention. [flop]
        scan_flops: S, of layers that keep a state in place of keys and values. [flop]
        untrained_flops: I, forward FLOPs of an indexer, which has no backward pass; a part of 2 W and A. [flop]
    """

    config: TransformerConfig
    seq_len: int
    recompute: str
    layer_weights: float
    attention_flops: float
    head_weights: float
    conventions: dict[str, StepFlops]
    scan_flops: float = 0.0
    untrained_flops: float = 0.0

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward pass, with the logits of every token. [flop]"""
        return 2.0 * self.layer_weights + self.attention_flops + self.scan_flops + 2.0 * self.head_weights

    @property
    def training_flops(self) -> float:
        """FLOPs of the forward and the backward pass. [flop]"""
        return 3.0 * self.forward_flops - 2.0 * self.untrained_flops

    @property
    def terms(self) -> tuple[Term, ...]:
        """The FLOPs by part, with formulas."""
        values = {
            "W": self.layer_weights,
            "A": self.attention_flops,
            "V": self.head_weights,
            "L": self.config.num_layers,
            "a": self.config.num_heads,
            "d": self.config.head_dim,
            "d_v": self.config.v_head_dim,
            "s": self.seq_len,
            "S": self.scan_flops,
            "I": self.untrained_flops,
        }
        total = "2*W + A + S + 2*V" if self.scan_flops else "2*W + A + 2*V"
        untrained = " - 2*I" if self.untrained_flops else ""
        rows = [
            ("layers, forward", "2*W", 2.0 * self.layer_weights),
            ("attention, forward", _attention_formula(self.config, self.attention_flops, values), self.attention_flops),
            *([("scans, forward", "S", self.scan_flops)] if self.scan_flops else []),
            ("logits, forward", "2*V", 2.0 * self.head_weights),
            ("forward", total, self.forward_flops),
            ("forward and backward", f"3*({total}){untrained}", self.training_flops),
        ]
        return tuple(Term(name, formula, substitute(formula, values), value) for name, formula, value in rows)


def count_flops(config: TransformerConfig, workload: Workload) -> FlopsPerToken:
    """Count the FLOPs of a token.

    Args:
        workload: Only its seq_len and its recomputation have an effect.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> from shapewright.workload.workload import Workload
    >>> gpt_22b = TransformerConfig(hidden_size=6144, num_layers=48, num_heads=64, vocab_size=51200)
    >>> found = count_flops(gpt_22b, Workload(seq_len=2048))
    >>> found.layer_weights == 12 * 48 * 6144**2, found.attention_flops == 48 * 4 * 2048 * 6144
    (True, True)
    """
    validate_lengths(config, workload)
    step = replace(workload.with_recompute("none"), phase="train", micro_batch_size=1, global_batch_size=1)
    tokens = float(step.seq_len)
    weights = attention = scans = head = untrained = 0.0
    for operation in lower(config, step, ParallelLayout()):
        if operation.pass_name != "forward":
            continue
        flops = float(operation.flops) * int(operation.repeats) / tokens
        if operation.block == "indexer":
            untrained += flops
        if isinstance(operation, Scan | CausalConv):
            scans += flops
        elif operation.multiplies_activations:
            attention += flops
        elif isinstance(operation, Gemm | GroupedGemm) and operation.block == "logits":
            head += 0.5 * flops
        elif isinstance(operation, Gemm | GroupedGemm):
            weights += 0.5 * flops
    kept = replace(step, recompute=workload.recompute, recompute_layers=workload.recompute_layers)
    return FlopsPerToken(
        config=config,
        seq_len=step.seq_len,
        recompute=kept.recompute,
        layer_weights=weights,
        attention_flops=attention,
        head_weights=head,
        scan_flops=scans,
        untrained_flops=untrained,
        conventions={name: _per_token(count_convention_flops(config, kept, 1, name), tokens) for name in CONVENTIONS},
    )


def _per_token(flops: StepFlops, tokens: float) -> StepFlops:
    hardware = None if flops.hardware_flops is None else flops.hardware_flops / tokens
    return StepFlops(flops.model_flops / tokens, hardware)


def _attention_formula(config: TransformerConfig, attention_flops: float, values: dict[str, float]) -> str:
    """Return the closed formula of the attention FLOPs; ``A`` where it does not hold, as with windows or an encoder."""
    v = "d" if config.v_head_dim == config.head_dim else "d_v"
    formula = "4*L*a*d*s" if v == "d" else "2*L*a*(d + d_v)*s"
    expected = 2.0 * values["L"] * values["a"] * (values["d"] + values["d_v"]) * values["s"]
    return formula if abs(expected - attention_flops) <= 1e-9 * expected else "A"
