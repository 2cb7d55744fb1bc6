"""One layer, or one step, of a model as one thing: measured whole, and predicted from the operations it is made of.

Both carry the fields of their TransformerConfig that differ from the defaults, and those of their Workload, so that a
stored measurement still knows the question that a prediction answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shapewright.config import TransformerConfig
from shapewright.layout import ParallelLayout
from shapewright.lowering import lower
from shapewright.memory import TrainingRecipe, estimate_memory, list_saved_tensors
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.operations import Operation

FORWARD, FORWARD_BACKWARD = "forward", "forward+backward"
LAYER_PASSES = (FORWARD, FORWARD_BACKWARD)
# Names and where a config was read from say nothing about what runs; both are in the name of the measurement.
_SILENT = ("name", "model_type")
# What a measured step keeps of a parameter: 16-bit weights and gradients, gradients once more in fp32 for the
# optimiser, fp32 master weights and two moments. [byte]
_MIXED = TrainingRecipe(weight_bytes=2.0, gradient_bytes=6.0, optimizer_bytes=12.0)
_WIDE = TrainingRecipe(weight_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """What a layer and a step have in common.

    Attributes:
        name: Model that it is of.
        dtype: Element format.
        config: Fields of the TransformerConfig that differ from their defaults.
        workload: Fields of the Workload that say what is run.
    """

    name: str
    dtype: str
    config: Mapping[str, Any] = field(hash=False)
    workload: Mapping[str, Any] = field(hash=False)

    def question(self) -> tuple[TransformerConfig, Workload]:
        """The model and what is run, as objects."""
        shape: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.config.items()
        }
        return TransformerConfig(**shape, name=self.name), Workload(**{**self.workload, "dtype": self.dtype})

    @property
    def flops(self) -> float:
        """By the operations' own counts. [flop]"""
        return self._sums[0]

    @property
    def num_bytes(self) -> float:
        """What the operations move if each reads and writes memory. [byte]"""
        return self._sums[1]

    @cached_property
    def _sums(self) -> tuple[float, float]:
        listed = self.operations()
        return (
            sum(float(operation.flops) * int(operation.repeats) for operation in listed),
            sum(float(operation.num_bytes) * int(operation.repeats) for operation in listed),
        )

    def operations(self) -> tuple[Operation, ...]:
        """What it is made of, each with how often it runs."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LayerRun(_Whole):
    """One decoder layer, forward, or forward and backward.

    Attributes:
        passes: One of LAYER_PASSES; forward alone keeps nothing for a gradient.

    >>> layer = layer_run(TransformerConfig(hidden_size=64, num_layers=3, num_heads=4, vocab_size=100), Workload())
    >>> len([entry for entry in layer.operations() if entry.kind == "gemm"])
    18
    """

    passes: str = FORWARD_BACKWARD

    kind = "layer"

    def operations(self) -> tuple[Operation, ...]:
        """The layer's operations; those of embedding, logits and optimiser are not among them."""
        config, workload = self.question()
        wanted = {"forward"} if self.passes == FORWARD else {"forward", "recompute", "backward"}
        return tuple(
            operation
            for operation in lower(config, workload, ParallelLayout())
            if operation.stage == "every" and operation.pass_name in wanted
        )

    def estimate_figures(self) -> dict[str, float]:
        """What the planner says of the figures that are measured beside the time."""
        if self.passes == FORWARD:
            return {}
        config, workload = self.question()
        saved = list_saved_tensors(config, workload, ParallelLayout(), has_experts=config.is_moe_layer(0))
        return {"activation_bytes": sum(tensor.num_bytes for tensor in saved)}


@dataclass(frozen=True, kw_only=True)
class StepRun(_Whole):
    """One whole step: a training step with its optimiser, a prefill, or one token of decode."""

    kind = "step"

    def operations(self) -> tuple[Operation, ...]:
        """All operations of the step."""
        return tuple(lower(*self.question(), ParallelLayout()))

    def estimate_figures(self) -> dict[str, float]:
        """What the planner says of the figures that are measured beside the time."""
        config, workload = self.question()
        recipe = (_WIDE if self.dtype in ("fp32", "tf32") else _MIXED) if workload.is_training else None
        memory = estimate_memory(config, workload, ParallelLayout(), recipe=recipe)
        return {"peak_memory_bytes": memory.total_bytes - memory.runtime_bytes}

    @property
    def num_tokens(self) -> int:
        """New tokens of one step."""
        _, workload = self.question()
        return workload.micro_batch_size * workload.query_len


def layer_run(config: TransformerConfig, workload: Workload, *, passes: str = FORWARD_BACKWARD) -> LayerRun:
    """The first layer of a model; whatever the layer does not see is left out, so that equal layers are equal."""
    has_rotary = config.is_rotary_layer(0)
    alone = replace(
        config,
        num_layers=1,
        attention_windows=(config.window_of_layer(0),) if config.window_of_layer(0) else (),
        moe_layers=(),
        vocab_size=1,
        max_position_embeddings=workload.kv_len,
        position_embedding="rotary" if has_rotary else "none",
        rotary_layers=(),
        position_offset=0,
        tied_embeddings=False,
        embedding_size=config.hidden_size,
        embedding_norm=False,
        num_token_types=0,
        head_transform=False,
        lm_head_bias=False,
    )
    return LayerRun(
        name=config.name or "layer",
        dtype=workload.dtype,
        config=_differing(alone, TransformerConfig),
        workload=_said(workload),
        passes=passes,
    )


def step_run(config: TransformerConfig, workload: Workload) -> StepRun:
    """A whole step of a model on one device."""
    return StepRun(
        name=config.name or "model",
        dtype=workload.dtype,
        config=_differing(config, TransformerConfig),
        workload=_said(workload),
    )


def _said(workload: Workload) -> dict[str, Any]:
    """A workload's fields: those that always matter, though they have defaults, and what differs besides."""
    named = ("phase", "attention", "micro_batch_size", "context_len" if workload.phase == "decode" else "seq_len")
    length = "seq_len" if workload.phase == "decode" else "context_len"
    differing = _differing(workload, Workload, ("dtype", length))
    return {**{name: getattr(workload, name) for name in named}, **differing}


def _differing(given: Any, cls: type, skipped: Sequence[str] = _SILENT) -> dict[str, Any]:
    """Fields that are not at their defaults, tuples as lists so that they are the same before and after a file."""
    found = {spec.name: getattr(given, spec.name) for spec in fields(cls) if spec.name not in skipped}
    defaults = {spec.name: spec.default for spec in fields(cls)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in found.items()
        if value != defaults[name]
    }
