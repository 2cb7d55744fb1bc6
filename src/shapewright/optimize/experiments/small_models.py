"""Small models with the proportions of a large one, as runs of ``shapewright proxy`` with their cost."""

from __future__ import annotations

from dataclasses import replace
from math import log2
from typing import TYPE_CHECKING, Any

from shapewright.core.records import dataclass
from shapewright.models.transformer import FIELD_NAMES, TransformerConfig
from shapewright.prediction.loss.terms import ShapeForLoss
from shapewright.prediction.predict import predict
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.hardware.device import Device

# Tokens per parameter of compute-optimal training. Source: Hoffmann et al. 2022, arXiv 2203.15556, table 3.
_TOKENS_PER_PARAMETER = 20.0
# Batches grow as the square root of the tokens, from 2**15 tokens at 4 M parameters.
_LOG2_BATCH_TOKENS, _BATCH_REFERENCE_SIZE = 15.0, 4e6
_SECONDS_PER_HOUR = 3600.0
_SEQ_LEN = 1024
_TOKENS_PER_PASS = 2**14
_VOCAB_SIZE = 256  # of bytes


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A small model to train.

    Attributes:
        name: Name in the file of runs.
        config: The model, with a vocabulary of bytes.
        num_parameters: Parameters without embeddings.
        train_tokens: Tokens of one seed.
        num_seeds: Seeds.
        batch_tokens: Tokens of an optimizer step.
        gpu_hours: Predicted time of all seeds on one device. [h]
    """

    name: str
    config: TransformerConfig
    num_parameters: int
    train_tokens: float
    num_seeds: int
    batch_tokens: int
    gpu_hours: float

    def run_columns(self) -> dict[str, Any]:
        """Return the columns of the run in a file of ``shapewright proxy``."""
        defaults = TransformerConfig(hidden_size=64, num_layers=1, num_heads=1, vocab_size=_VOCAB_SIZE)
        always = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        family = ("norm", "activation", "gated_mlp", "fused_qkv", "fused_gate_up")
        fields = [
            name
            for name in FIELD_NAMES
            if name in (*always, *family) or getattr(self.config, name) != getattr(defaults, name)
        ]
        skipped = ("name", "model_type", "vocab_size", "v_head_dim", "embedding_size", "moe_intermediate_size")
        return {
            "name": self.name,
            **{name: getattr(self.config, name) for name in fields if name not in skipped},
            "train_tokens": round(self.train_tokens),
            "seq_len": _SEQ_LEN,
            "batch_tokens": self.batch_tokens,
            "micro_batch_size": min(_TOKENS_PER_PASS, self.batch_tokens) // _SEQ_LEN,
        }

    def with_seeds(self, num_seeds: int) -> Experiment:
        """Return the same model with another number of seeds."""
        hours = self.gpu_hours / self.num_seeds * num_seeds
        return replace(self, num_seeds=num_seeds, gpu_hours=hours)


def make_experiment(name: str, config: TransformerConfig, num_parameters: float, device: Device) -> Experiment:
    """Make the run of a small model, with one seed and its predicted time.

    Args:
        name: Name in the file of runs.
        num_parameters: Its nominal size, without embeddings: models of one size have the same tokens and batch.
        device: Device that it is trained on.
    """
    tokens = _TOKENS_PER_PARAMETER * num_parameters
    batch_tokens = 2 ** round(_LOG2_BATCH_TOKENS + 0.5 * log2(num_parameters / _BATCH_REFERENCE_SIZE))
    workload = Workload(
        micro_batch_size=_TOKENS_PER_PASS // _SEQ_LEN,
        seq_len=_SEQ_LEN,
        global_batch_size=batch_tokens // _SEQ_LEN,
        dtype="bf16" if "bf16" in device.dense_flops_per_s else "fp32",
    )
    step_s = predict(config, device=device, workload=workload).step_time_s
    return Experiment(
        name=name,
        config=config,
        num_parameters=int(ShapeForLoss.of(config).num_parameters),
        train_tokens=tokens,
        num_seeds=1,
        batch_tokens=batch_tokens,
        gpu_hours=tokens / batch_tokens * step_s / _SECONDS_PER_HOUR,
    )


def scale_down(
    config: TransformerConfig, scale: float, growth: float, num_parameters: float | None = None
) -> TransformerConfig:
    """Return a small model of the same proportions, with a vocabulary of bytes.

    Width and depth are scaled so that the width per layer keeps its ratio to the best one for the size, which grows as
    the size to the power of ``growth``. Heads keep their dimension and become fewer; the MLP width absorbs the
    rounding.

    Args:
        scale: Parameters of the small model over those of the model.
        growth: Exponent of the best width per layer over size.
        num_parameters: Parameters without embeddings that the small model is given; default: ``scale`` times its own.

    >>> large = TransformerConfig(hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, vocab_size=128256)
    >>> small = scale_down(large, 1 / 64, 0.0)
    >>> small.hidden_size, small.num_layers, small.num_heads, small.num_kv_heads, small.head_dim
    (1024, 8, 8, 2, 128)
    """
    width = scale ** ((1.0 + growth) / 3.0)
    group = config.num_heads // config.num_kv_heads
    kv_heads = max(1, round(config.num_heads * width / group))
    heads = max(1, round(config.num_heads * width)) if kv_heads == 1 else kv_heads * group
    is_square = config.num_heads * config.head_dim == config.hidden_size
    hidden_size = heads * config.head_dim if is_square else max(8, 8 * round(config.hidden_size * width / 8.0))
    num_layers = max(1, round(config.num_layers * scale ** ((1.0 - 2.0 * growth) / 3.0)))
    small = replace(
        config,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        v_head_dim=0,
        intermediate_size=8,
        moe_intermediate_size=0,
        embedding_size=0,
        attention_windows=(),
        rotary_layers=(),
        vocab_size=_VOCAB_SIZE,
        max_position_embeddings=_SEQ_LEN,
        position_offset=0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    wanted = scale * float(ShapeForLoss.of(config).num_parameters) if num_parameters is None else num_parameters
    per_width = num_layers * (2 + config.gated_mlp) * hidden_size
    missing = wanted - float(ShapeForLoss.of(small).num_parameters)
    return replace(small, intermediate_size=8 + max(0, 8 * round(missing / per_width / 8.0)))
