"""LayerRun, StepRun and ProxyRun: a layer, a step or a training run of a model, measured as a whole.

Their time is predicted from their operations. They hold the non-default fields of their TransformerConfig and Workload,
so that a stored measurement can be predicted later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.lowering.model import lower
from shapewright.memory.estimate import estimate_memory
from shapewright.memory.saved_tensors import list_layer_tensors
from shapewright.models.layers import ATTENTION, NO_MIXER
from shapewright.models.mixer_checks import LINEAR_SIZES
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.predict import predict
from shapewright.pricing.operations import price_operations
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.optimizers import TrainingRecipe
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation

FORWARD, FORWARD_BACKWARD = "forward", "forward+backward"
LAYER_PASSES = (FORWARD, FORWARD_BACKWARD)
# Fields that do not change what runs; the measurement has the name of the model in a field of its own.
_IGNORED_FIELDS = ("name", "model_type")
# Bytes per parameter of a measured step. In mixed precision: 16-bit weights; gradients in 16 bits and a copy in fp32
# for the optimizer; fp32 master weights and two moments.
_MIXED_PRECISION = TrainingRecipe(weight_bytes=2.0, gradient_bytes=6.0, optimizer_bytes=12.0)
_FP32 = TrainingRecipe(weight_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)


@dataclass(frozen=True, kw_only=True)
class _ModelRun:
    """Fields that LayerRun and StepRun share.

    Attributes:
        name: Name of the model.
        dtype: Element format.
        config: Fields of the TransformerConfig that differ from their defaults.
        workload: Fields of the Workload that differ from their defaults or always matter.
    """

    name: str
    dtype: str
    config: Mapping[str, Any] = field(hash=False)
    workload: Mapping[str, Any] = field(hash=False)

    def config_and_workload(self) -> tuple[TransformerConfig, Workload]:
        """Build the model and the workload."""
        shape: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.config.items()
        }
        return TransformerConfig(**shape, name=self.name), Workload(**{**self.workload, "dtype": self.dtype})

    @property
    def flops(self) -> float:
        """FLOPs of all operations. [flop]"""
        return self._flops_and_bytes[0]

    @property
    def num_bytes(self) -> float:
        """Bytes that all operations read from and write to memory. [byte]"""
        return self._flops_and_bytes[1]

    @cached_property
    def _flops_and_bytes(self) -> tuple[float, float]:
        listed = self.operations()
        return (
            sum(float(operation.flops) * int(operation.repeats) for operation in listed),
            sum(float(operation.num_bytes) * int(operation.repeats) for operation in listed),
        )

    def operations(self) -> tuple[Operation, ...]:
        """Operations of the run, each with its number of repeats."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LayerRun(_ModelRun):
    """One decoder layer: its forward pass, or forward and backward pass.

    Attributes:
        passes: One of LAYER_PASSES; a forward pass alone saves no tensors for gradients.

    >>> layer = layer_run(TransformerConfig(hidden_size=64, num_layers=3, num_heads=4, vocab_size=100), Workload())
    >>> len([entry for entry in layer.operations() if entry.kind == "gemm"])
    18
    """

    passes: str = FORWARD_BACKWARD

    kind = "layer"

    def operations(self) -> tuple[Operation, ...]:
        """Operations of the layer, without embedding, logits and optimizer."""
        config, workload = self.config_and_workload()
        wanted = {"forward"} if self.passes == FORWARD else {"forward", "recompute", "backward"}
        return tuple(
            operation
            for operation in lower(config, workload, ParallelLayout())
            if operation.stage == "every" and operation.pass_name in wanted
        )

    def estimate_figures(self) -> dict[str, float]:
        """Estimate the memory that is measured along with the time, by name of the stored figure."""
        if self.passes == FORWARD:
            return {}
        config, workload = self.config_and_workload()
        saved = list_layer_tensors(
            config, workload, ParallelLayout(), config.kind_of_layer(0), has_cross_attention=False
        )
        return {"activation_bytes": sum(tensor.num_bytes for tensor in saved)}


@dataclass(frozen=True, kw_only=True)
class StepRun(_ModelRun):
    """One whole step: a training step with its optimizer, a prefill pass, or a decode step."""

    kind = "step"

    def operations(self) -> tuple[Operation, ...]:
        """Operations of the step."""
        return tuple(lower(*self.config_and_workload(), ParallelLayout()))

    def estimate_figures(self) -> dict[str, float]:
        """Estimate the memory that is measured along with the time, by name of the stored figure."""
        config, workload = self.config_and_workload()
        recipe = (_FP32 if self.dtype in ("fp32", "tf32") else _MIXED_PRECISION) if workload.is_training else None
        memory = estimate_memory(config, workload, ParallelLayout(), recipe=recipe)
        return {"peak_memory_bytes": memory.total_bytes - memory.runtime_bytes}

    @property
    def num_tokens(self) -> int:
        """New tokens of one step."""
        _, workload = self.config_and_workload()
        return workload.micro_batch_size * workload.query_len


@dataclass(frozen=True, kw_only=True)
class ProxyRun(StepRun):
    """Training of a proxy model for a number of tokens: its step, and what else its loss depends on.

    Attributes:
        training: Recipe, ``trained_tokens`` of ``train_tokens``, and the digest of the ``text``.
    """

    training: Mapping[str, Any] = field(hash=False)

    kind = "proxy"


def layer_run(config: TransformerConfig, workload: Workload, *, passes: str = FORWARD_BACKWARD) -> LayerRun:
    """Build the run of the first layer of a model.

    Fields that do not affect the layer are reset, so that equal layers of different models are equal runs.
    """
    has_rotary = config.is_rotary_layer(0)
    kind = config.kind_of_layer(0)
    mixers: dict[str, Any] = {}
    if config.is_hybrid:
        mixers = {"layer_types": (kind.layer_type,), "mlp_layers": (kind.mlp != "none",)}
        if kind.layer_type in (ATTENTION, NO_MIXER):
            mixers |= dict.fromkeys(LINEAR_SIZES, 0)
    single_layer = replace(
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
        **mixers,
    )
    return LayerRun(
        name=config.name or "layer",
        dtype=workload.dtype,
        config=_non_default_fields(single_layer, TransformerConfig),
        workload=_workload_fields(workload),
        passes=passes,
    )


def step_run(config: TransformerConfig, workload: Workload) -> StepRun:
    """Build the run of a whole step of a model on one device."""
    return StepRun(**_step_fields(config, workload))


def proxy_run(config: TransformerConfig, workload: Workload, training: Mapping[str, Any]) -> ProxyRun:
    """Build the run of a proxy model's training; see ProxyRun."""
    return ProxyRun(**_step_fields(config, workload), training=training)


def _step_fields(config: TransformerConfig, workload: Workload) -> dict[str, Any]:
    return {
        "name": config.name or "model",
        "dtype": workload.dtype,
        "config": _non_default_fields(config, TransformerConfig),
        "workload": _workload_fields(workload),
    }


def _workload_fields(workload: Workload) -> dict[str, Any]:
    """Return the fields of a workload that always matter, and those that differ from their defaults."""
    named = ("phase", "attention", "micro_batch_size", "context_len" if workload.phase == "decode" else "seq_len")
    length = "seq_len" if workload.phase == "decode" else "context_len"
    differing = _non_default_fields(workload, Workload, ("dtype", length))
    return {**{name: getattr(workload, name) for name in named}, **differing}


def _non_default_fields(given: Any, cls: type, skipped: Sequence[str] = _IGNORED_FIELDS) -> dict[str, Any]:
    """Return the fields that differ from their defaults, with tuples as lists, as JSON stores them."""
    found = {spec.name: getattr(given, spec.name) for spec in fields(cls) if spec.name not in skipped}
    defaults = {spec.name: spec.default for spec in fields(cls)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in found.items()
        if value != defaults[name]
    }


def predict_times_s(operations: Sequence[Operation | LayerRun | StepRun], device: Device | None) -> list[float | None]:
    """Predict the time of each operation; None where it cannot be priced, or without a device. [s]"""
    if device is None:
        return [None] * len(operations)
    found: list[float | None] = []
    for operation in operations:
        try:
            found.append(_predict_s(operation, device))
        except ShapewrightError:
            found.append(None)
    return found


def _predict_s(operation: Operation | LayerRun | StepRun, device: Device) -> float:
    """Predict the time of one operation, of one layer, or of one step. [s]"""
    if isinstance(operation, StepRun):
        config, workload = operation.config_and_workload()
        return predict(config, device=device, workload=workload).step_time_s
    if isinstance(operation, LayerRun):
        listed = operation.operations()
        prices = price_operations(listed, device)
        return sum(float(price.time_s) * int(entry.repeats) for price, entry in zip(prices, listed, strict=True))
    return float(price_operations([operation], device)[0].time_s)
