"""Outputs of ``params``, ``flops`` and ``batch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shapewright.app.report.outputs.model import Output, described, take
from shapewright.core.records import dataclass
from shapewright.models.flop_conventions import CONVENTIONS
from shapewright.models.parameters import count_parameters
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.calculators.parameters import Term, explain_parameters
from shapewright.prediction.calculators.training import BatchSolution, TrainingBudget
from shapewright.prediction.training_run import CHINCHILLA_TOKENS_PER_PARAMETER

if TYPE_CHECKING:
    from shapewright.models.read import Model
    from shapewright.prediction.calculators.flops import FlopsPerToken


@dataclass(frozen=True, kw_only=True)
class ParamsOutput(Output):
    """Parameters of a model."""

    config: TransformerConfig
    total: int = described("all parameters")
    active: int = described("parameters that one token uses")
    non_embedding: int = described("parameters without embeddings")
    components: list[Term] = described("terms that add up to the total")
    source: str
    notes: list[str]


def params_output(model: Model) -> ParamsOutput:
    """Output of the parameters of a model."""
    return take(
        ParamsOutput,
        count_parameters(model.config),
        config=model.config,
        components=explain_parameters(model.config),
        source=model.source,
        notes=model.notes,
    )


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """Training FLOPs of one token by one convention."""

    formula: str = described("FLOPs of one token")
    used_by: str = described("projects and papers that use it")
    model_flops_per_token: float = described("model FLOPs of one token")
    hardware_flops_per_token: float | None = described("the same with recomputation; null where it has none")


@dataclass(frozen=True, kw_only=True)
class FlopsOutput(Output):
    """FLOPs of one token, and the budget of a training run."""

    config: TransformerConfig
    seq_len: int = described("tokens of a sequence")
    recompute: str = described("activation recomputation, which hardware FLOPs count")
    per_token: list[Term] = described("forward FLOPs of layers, attention and logits, their sum, and three times it")
    conventions: dict[str, TokenFlops] = described("training FLOPs by convention")
    chinchilla_tokens: float = described("20 tokens per parameter that one token uses")
    budget: TrainingBudget | None = described("the training run; null without `--train-tokens`")
    source: str
    notes: list[str]


def flops_output(found: FlopsPerToken, budget: TrainingBudget | None, model: Model) -> FlopsOutput:
    """Output of the FLOPs of a token and of a training run."""
    return take(
        FlopsOutput,
        found,
        per_token=found.terms,
        conventions={
            name: take(
                TokenFlops,
                CONVENTIONS[name],
                model_flops_per_token=flops.model_flops,
                hardware_flops_per_token=flops.hardware_flops,
            )
            for name, flops in found.conventions.items()
        },
        chinchilla_tokens=CHINCHILLA_TOKENS_PER_PARAMETER * count_parameters(found.config).active,
        budget=budget,
        source=model.source,
        notes=model.notes,
    )


@dataclass(frozen=True, kw_only=True)
class BatchOutput(Output):
    """Combinations of micro-batch, replicas and accumulation that make a global batch."""

    solutions: list[BatchSolution] = described("the combinations")


def batch_output(solutions: Sequence[BatchSolution]) -> BatchOutput:
    """Output of the solutions of a batch."""
    return BatchOutput(solutions=list(solutions))
