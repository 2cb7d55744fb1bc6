"""What a format can express: the fields that it writes, and the values that the framework's code fixes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields

from shapewright.config import TransformerConfig
from shapewright.errors import ConfigError, LayoutError, WorkloadError
from shapewright.layout import ParallelLayout
from shapewright.workload import Workload

# How code spells the same model: the name, and which of its products are carried out as one.
_NOT_THE_MODEL = ("name", "model_type", "fused_qkv", "fused_gate_up")
_LARGEST_PADDING = 512  # of a vocabulary, for each device of the tensor axis; Megatron-LM's own default is 128
PLAIN_DECODER: dict[str, tuple[object, ...]] = {
    "stack": ("decoder",),
    "num_encoder_layers": (0,),
    "parallel_attention_mlp": (False,),
    "norm_affine": (True,),
    "num_norms_per_layer": (2,),
    "has_final_norm": (True,),
    "attention_windows": ((),),
    "attention_window_kind": ("sliding",),
    "rotary_layers": ((),),
    "qk_norm": ("none",),
    "qk_norm_bias": (False,),
    "attention_sinks": (False,),
    "q_lora_rank": (0,),
    "kv_lora_rank": (0,),
    "qk_rope_head_dim": (0,),
    "num_experts": (0,),
    "num_experts_per_token": (0,),
    "moe_intermediate_size": (0,),
    "shared_expert_intermediate_size": (0,),
    "shared_expert_gate": (False,),
    "router_bias": (False,),
    "expert_bias": (False,),
    "expert_clamp": (False,),
    "moe_layers": ((),),
    "embedding_norm": (False,),
    "num_token_types": (0,),
    "position_offset": (0,),
    "num_relative_buckets": (0,),
    "head_transform": (False,),
    "lm_head_bias": (False,),
}
"""What a plain decoder has of the fields that few models use."""

_OFFLOADS = ("offload_activations", "offload_optimizer")
_OF_EXPERTS = (
    "num_experts_per_token",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_expert_gate",
    "router_bias",
    "expert_bias",
    "expert_clamp",
    "moe_layers",
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How one framework takes a model.

    Attributes:
        name: What ``--format`` calls it.
        project: The framework, and the version whose names these are.
        written: Fields of TransformerConfig that it writes, whatever their value.
        fixed: Values that the framework's code has, by the other fields of TransformerConfig; for those that are in
            neither, PLAIN_DECODER tells.
        write: Writes config, workload and layout; either of the latter is None where nothing was asked of it.
        suffix: End of the file's name.
        runs: Values of fields of Workload and ParallelLayout that it can be told, for a plan to keep to; any value of
            those that are missing.
        offloads: Fields of Workload that keep something in the host's memory and that it can be told.
        counts_ends: Whether it can be told to count embedding and loss as layers where stages are cut.
    """

    name: str
    project: str
    written: frozenset[str]
    fixed: Mapping[str, tuple[object, ...]]
    write: Callable[[TransformerConfig, Workload | None, ParallelLayout | None], str]
    suffix: str
    runs: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    offloads: frozenset[str] = frozenset()
    counts_ends: bool = False

    @property
    def choices(self) -> dict[str, tuple[object, ...]]:
        """``runs`` with what it cannot be told of the host's memory."""
        return {**{name: (False,) for name in _OFFLOADS if name not in self.offloads}, **self.runs}


def refuse_other_schedules(form: Form, layout: ParallelLayout) -> None:
    """Refuse a cut of a pipeline and an order of its passes that the framework does not have.

    Raises:
        LayoutError: it has others.
    """
    allowed = form.runs.get("pipeline_schedule", ("1f1b",))
    if layout.pipeline_schedule not in allowed:
        words = " and ".join(str(each) for each in allowed)
        raise cannot_spread(form.name, f"pipeline_schedule={layout.pipeline_schedule!r}", f"{form.project} has {words}")
    if any(layout.counted_ends) and not form.counts_ends:
        raise cannot_spread(
            form.name, "ends of the model that count as layers", f"{form.project} cuts stages otherwise"
        )


def refuse_offload(form: Form, workload: Workload) -> None:
    """Refuse what a framework cannot be told to keep in the host's memory.

    Raises:
        WorkloadError: something of it is asked for.
    """
    for name in _OFFLOADS:
        if getattr(workload, name) and name not in form.offloads:
            raise cannot_run(form.name, name, f"{form.project} moves more than that, or nothing")


def refuse_inexpressible(form: Form, config: TransformerConfig) -> None:
    """Say which field a format cannot express, if there is one.

    Raises:
        ConfigError: a field has a value that the framework cannot be told.
    """
    ignored = fields_without_effect(config)
    for spec in fields(config):
        if spec.name in form.written or spec.name in ignored:
            continue
        value, allowed = getattr(config, spec.name), (PLAIN_DECODER | dict(form.fixed))[spec.name]
        if value not in allowed:
            words = " or ".join(repr(each) for each in allowed)
            raise cannot(form.name, f"{spec.name}={value!r}", f"{form.project} has {words}")


def cannot(form_name: str, what: str, why: str) -> ConfigError:
    """The error for a model that a format cannot express."""
    return ConfigError(f"--format {form_name} cannot express {what}: {why}; ask without it, or keep another value")


def cannot_run(form_name: str, what: str, why: str) -> WorkloadError:
    """The error for a workload that a format cannot express."""
    return WorkloadError(f"--format {form_name} cannot express {what}: {why}; ask without it")


def refuse_other_runs(form_name: str, workload: Workload, dtypes: Collection[str]) -> None:
    """Refuse what no config of a training run can say that checkpoints whole layers or none.

    Args:
        form_name: The format.
        workload: What is to be run.
        dtypes: Formats of numbers that the framework trains in.

    Raises:
        WorkloadError: it is no training, in another format of numbers, or recomputes parts of layers.
    """
    if not workload.is_training:
        raise cannot_run(form_name, f"phase={workload.phase!r}", "this is the config of a training run")
    if workload.dtype not in dtypes:
        raise cannot_run(form_name, f"dtype={workload.dtype!r}", f"it has {', '.join(dtypes)}")
    if workload.recompute == "selective":
        raise cannot_run(form_name, "recompute='selective'", "it checkpoints whole layers or none")


def cannot_spread(form_name: str, what: str, why: str) -> LayoutError:
    """The error for a layout that a format cannot express."""
    return LayoutError(f"--format {form_name} cannot express {what}: {why}; ask without it")


def fields_without_effect(config: TransformerConfig) -> frozenset[str]:
    """Fields whose value changes nothing about this model."""
    ignored = {*_NOT_THE_MODEL}
    if not config.is_moe:
        ignored.update(_OF_EXPERTS)
    elif not config.shared_expert_intermediate_size:
        ignored.add("shared_expert_gate")
    if config.stack != "encoder-decoder":
        ignored.add("num_encoder_layers")
    if config.qk_norm == "none":
        ignored.add("qk_norm_bias")
    if not any(config.attention_windows):
        ignored.update(("attention_windows", "attention_window_kind"))
    if not config.is_mla:
        ignored.update(("q_lora_rank", "qk_rope_head_dim"))
    if config.position_embedding != "learned":
        ignored.add("position_offset")
    if config.position_embedding != "relative":
        ignored.add("num_relative_buckets")
    return frozenset(ignored)


def refuse_other_head_dims(form: Form, config: TransformerConfig) -> None:
    """Refuse heads that do not share the hidden size evenly.

    Raises:
        ConfigError: head_dim is not hidden_size / num_heads, or values have a width of their own.
    """
    if config.num_heads * config.head_dim != config.hidden_size or config.v_head_dim != config.head_dim:
        raise cannot(
            form.name,
            f"head_dim={config.head_dim} with num_heads={config.num_heads} and hidden_size={config.hidden_size}",
            f"{form.project} has head_dim = hidden_size / num_heads for all of queries, keys and values",
        )


def refuse_other_embedding_width(form: Form, config: TransformerConfig) -> None:
    """Refuse embeddings of another width than the residual stream.

    Raises:
        ConfigError: embedding_size is not hidden_size.
    """
    if config.embedding_size != config.hidden_size:
        raise cannot(form.name, f"embedding_size={config.embedding_size}", "embeddings are hidden_size wide there")


def vocab_padding(form: Form, config: TransformerConfig, num_shards: int) -> int:
    """Unit to which a framework should pad the tokenizer's vocabulary, so that vocab_size comes out.

    Frameworks pad to a multiple of this unit times the devices of the tensor axis. The largest power of two that
    divides vocab_size is taken, up to 512, so that the range of tokenizers that end up at vocab_size is the widest.

    Raises:
        ConfigError: the vocabulary is not a multiple of the devices of the tensor axis.
    """
    if config.vocab_size % num_shards:
        raise cannot(
            form.name,
            f"vocab_size={config.vocab_size} over {num_shards} devices",
            f"{form.project} pads it to a multiple of the devices of the tensor axis",
        )
    share = config.vocab_size // num_shards
    return min(share & -share, _LARGEST_PADDING)


def replicas_of(layout: ParallelLayout | None) -> int:
    """Replicas that see other sequences."""
    return layout.data_parallel if layout else 1
