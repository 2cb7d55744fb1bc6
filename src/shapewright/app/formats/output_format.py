"""OutputFormat: which models, workloads and layouts a config format of a training framework can express."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, fields

from shapewright.core.errors import ConfigError, LayoutError, WorkloadError
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.recompute import CORE, MODULES, read_modules
from shapewright.workload.workload import OFFLOADS, RECOMPUTE_MODES, Workload

# Fields of the implementation, not of the model: its name and which GEMMs are fused.
_IMPLEMENTATION_FIELDS = ("name", "model_type", "fused_qkv", "fused_gate_up")
_FUSED_WORDS = {"fused_qkv": "queries, keys and values", "fused_gate_up": "gate and up projection"}
_MAX_PADDING = 512  # of the vocabulary, per tensor-parallel device; Megatron-LM's default is 128
DATA_PARALLEL_ONLY = dict.fromkeys(
    ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"), (1,)
)
"""Run values of frameworks that distribute a job by data parallelism and sharding alone."""

_EXPERT_FIELDS = (
    "num_experts_per_token",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_expert_gate",
    "router_bias",
    "expert_bias",
    "expert_clamp",
    "moe_layers",
)

_SAME_AS_DEFAULT = {"optimizer": "adam"}  # where weight decay is part of the gradient, at the same cost


Untimed = Mapping[str, float]
"""Values that model, workload and layout do not have, by name: those of ``models.untimed_values``, the ``RunSchedule``
of a run, and the ``node_size`` of the device. Those unknown are missing."""


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """Config format of one training framework.

    Attributes:
        name: Name of the format.
        project: Name of the framework.
        written_fields: Fields of TransformerConfig that the format writes with any value.
        fixed_values: Supported values of other fields of TransformerConfig; fields in neither have their defaults,
            which are those of a plain decoder.
        write: Writes config, workload, layout and untimed values; workload and layout can be None.
        suffix: Suffix of the file name.
        run_values: Supported values of fields of Workload and ParallelLayout; fields that are missing support any
            value. A plan can be restricted to them.
        offloads: Supported fields of Workload that move data to host memory.
        fused: Which GEMMs the framework fuses, by field of TransformerConfig; empty where the training script decides.
        supports_end_layers: Whether embedding and loss can count as layers when layers are assigned to stages.
        unwritten: Fields of Workload that the format does not write, so that they must have their defaults.
        selective_modules: Modules that its selective recomputation can repeat.
    """

    name: str
    project: str
    written_fields: frozenset[str]
    fixed_values: Mapping[str, tuple[object, ...]]
    write: Callable[[TransformerConfig, Workload | None, ParallelLayout | None, Untimed], str]
    suffix: str
    run_values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    offloads: frozenset[str] = frozenset()
    fused: Mapping[str, bool] = field(default_factory=dict)
    supports_end_layers: bool = False
    unwritten: tuple[str, ...] = ("optimizer", "loss_chunks", "packed", "kernels", "recompute_layers")
    selective_modules: tuple[str, ...] = tuple(MODULES)

    @property
    def choices(self) -> dict[str, tuple[object, ...]]:
        """Supported values of run fields, including offload fields that are not supported."""
        return {**{name: (False,) for name in OFFLOADS if name not in self.offloads}, **self.run_values}


def keep_expressible(
    target: OutputFormat, kept: Mapping[str, tuple[object, ...]], *, recompute_modules: str = CORE
) -> dict[str, tuple[object, ...]]:
    """Restrict the values that fields of a plan may take to those that a format can express.

    Args:
        target: The format.
        kept: Values by field that the user keeps.
        recompute_modules: Modules that selective recomputation repeats.

    Raises:
        ConfigError: none of the kept values of a field is among them.
    """
    restricted, choices = dict(kept), target.choices
    if not _can_repeat(target, recompute_modules):
        modes = choices.get("recompute", RECOMPUTE_MODES)
        choices["recompute"] = tuple(mode for mode in modes if mode != "selective")
    for name, expressible in choices.items():
        both = tuple(value for value in kept.get(name, expressible) if value in expressible)
        if not both:
            words = ", ".join(map(str, expressible))
            raise ConfigError(f"keep={name}: {target.name} can express only {words}; keep those")
        restricted[name] = both
    return restricted


def note_on_limits(
    names: Sequence[str], kept: Mapping[str, tuple[object, ...]], expressible: Mapping[str, tuple[object, ...]]
) -> tuple[Note, ...]:
    """Say which values of plans are tried because formats cannot express others.

    Args:
        names: The formats.
        kept: Values by field that the user keeps.
        expressible: The same, restricted by ``keep_expressible``.
    """
    limited = [
        f"{name}={' or '.join(map(str, values))}" for name, values in expressible.items() if kept.get(name) != values
    ]
    if not limited:
        return ()
    text = f"{' and '.join(names)} can express only {', '.join(limited)}; other plans are not tried"
    return (Note(text, "formats"),)


def fused_as_trained(target: OutputFormat, config: TransformerConfig) -> tuple[dict[str, bool], tuple[Note, ...]]:
    """Fields of a model that the framework runs with other fused GEMMs than the model, with a note that says so."""
    changed = {name: value for name, value in target.fused.items() if getattr(config, name) != value}
    if not config.gated_mlp:
        changed.pop("fused_gate_up", None)
    if not changed:
        return {}, ()
    words = [f"{_FUSED_WORDS[name]} are {'one GEMM' if is_one else 'GEMMs apart'}" for name, is_one in changed.items()]
    return changed, (Note(f"{' and '.join(words)} in {target.project}, as in the plans", "formats"),)


def check_pipeline_schedule(target: OutputFormat, layout: ParallelLayout) -> None:
    """Check that the framework supports the pipeline schedule and the assignment of layers to stages.

    Raises:
        LayoutError: the framework does not support them.
    """
    allowed = target.run_values.get("pipeline_schedule", ("1f1b",))
    if layout.pipeline_schedule not in allowed:
        words = " and ".join(str(each) for each in allowed)
        raise layout_error(
            target.name,
            f"pipeline_schedule={layout.pipeline_schedule!r}",
            f"{target.project} has {words}",
        )
    if any(layout.ends_as_layers) and not target.supports_end_layers:
        raise layout_error(
            target.name,
            "embedding or loss that count as layers",
            f"{target.project} assigns layers differently",
        )


def check_offload(target: OutputFormat, workload: Workload) -> None:
    """Check that the framework supports the offloads of a workload.

    Raises:
        WorkloadError: an offload is not supported.
    """
    for name in OFFLOADS:
        if getattr(workload, name) and name not in target.offloads:
            raise workload_error(target.name, FieldName(name), f"{target.project} does not support this offload")


def check_recompute(target: OutputFormat, workload: Workload) -> None:
    """Check that the framework can repeat the modules of selective recomputation.

    Raises:
        WorkloadError: it repeats others.
    """
    if workload.recompute == "selective" and not _can_repeat(target, workload.recompute_modules):
        raise workload_error(
            target.name,
            f"recompute_modules={workload.recompute_modules!r}",
            f"it repeats {', '.join(target.selective_modules)}",
        )


def _can_repeat(target: OutputFormat, modules: str) -> bool:
    return set(read_modules(modules)) <= set(target.selective_modules)


def check_unwritten(target: OutputFormat, workload: Workload) -> None:
    """Check that the file would not leave out a field of a workload that its step depends on.

    Raises:
        WorkloadError: a field that the format does not write has another value than its default.
    """
    for spec in fields(Workload):
        value = getattr(workload, spec.name)
        if spec.name in target.unwritten and value not in (spec.default, _SAME_AS_DEFAULT.get(spec.name)):
            raise workload_error(target.name, f"{spec.name}={value!r}", f"it requires {spec.default!r}")


def check_model(target: OutputFormat, config: TransformerConfig) -> None:
    """Check that the format can express every field of a model.

    Raises:
        ConfigError: a field has a value that the format cannot express.
    """
    ignored = unused_fields(config)
    for spec in fields(config):
        if spec.name in target.written_fields or spec.name in ignored:
            continue
        value, allowed = getattr(config, spec.name), target.fixed_values.get(spec.name, (spec.default,))
        if value not in allowed:
            values = " or ".join(repr(each) for each in allowed)
            raise model_error(target.name, f"{spec.name}={value!r}", f"{target.project} requires {values}")


def _cannot_express(form_name: str, what: str, why: str) -> str:
    return with_fields("format {form_name} cannot express {what}: {why}", form_name=form_name, what=what, why=why)


def model_error(form_name: str, what: str, why: str) -> ConfigError:
    """Make the error for a model that a format cannot express."""
    return ConfigError(_cannot_express(form_name, what, why), advice="change the model or choose another format")


def workload_error(form_name: str, what: str, why: str) -> WorkloadError:
    """Make the error for a workload that a format cannot express."""
    return WorkloadError(_cannot_express(form_name, what, why), advice="change it or choose another format")


def check_training_workload(form_name: str, workload: Workload, dtypes: Collection[str]) -> None:
    """Check that a workload is training in a supported dtype, with full recomputation or none.

    Args:
        dtypes: Dtypes that the framework trains in.

    Raises:
        WorkloadError: the phase, dtype or recomputation is not supported.
    """
    if not workload.is_training:
        raise workload_error(form_name, f"phase={workload.phase!r}", "the format is for training runs")
    if workload.dtype not in dtypes:
        raise workload_error(form_name, f"dtype={workload.dtype!r}", f"supported are {', '.join(dtypes)}")
    if workload.recompute == "selective":
        raise workload_error(form_name, "recompute='selective'", "only full recomputation or none is supported")


def layout_error(form_name: str, what: str, why: str) -> LayoutError:
    """Make the error for a layout that a format cannot express."""
    return LayoutError(_cannot_express(form_name, what, why), advice="change it or choose another format")


def unused_fields(config: TransformerConfig) -> frozenset[str]:
    """Fields whose values have no effect on this model."""
    ignored = {*_IMPLEMENTATION_FIELDS}
    if not config.is_hybrid:
        ignored.update(spec.name for spec in fields(config) if spec.name.startswith("linear_"))
    if not config.is_moe:
        ignored.update(_EXPERT_FIELDS)
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


def check_head_dims(target: OutputFormat, config: TransformerConfig) -> None:
    """Check that head_dim is hidden_size / num_heads.

    Raises:
        ConfigError: head_dim or v_head_dim differs from it.
    """
    if config.num_heads * config.head_dim != config.hidden_size or config.v_head_dim != config.head_dim:
        raise model_error(
            target.name,
            f"head_dim={config.head_dim} with num_heads={config.num_heads} and hidden_size={config.hidden_size}",
            f"{target.project} requires " + with_fields("{head_dim} = {v_head_dim} = {hidden_size} / {num_heads}"),
        )


def check_embedding_width(target: OutputFormat, config: TransformerConfig) -> None:
    """Check that embeddings are as wide as the residual stream.

    Raises:
        ConfigError: embedding_size is not hidden_size.
    """
    if config.embedding_size != config.hidden_size:
        raise model_error(
            target.name,
            f"embedding_size={config.embedding_size}",
            with_fields("{embedding_size} must equal {hidden_size}"),
        )


def vocab_padding(target: OutputFormat, config: TransformerConfig, num_shards: int) -> int:
    """Padding unit of the tokenizer's vocabulary that results in vocab_size.

    Frameworks pad to a multiple of this unit times the tensor-parallel degree. The unit is the largest power of two
    that divides vocab_size, up to 512, so that the widest range of tokenizers is padded to vocab_size.

    Raises:
        ConfigError: vocab_size is not a multiple of the tensor-parallel degree.
    """
    if config.vocab_size % num_shards:
        raise model_error(
            target.name,
            f"vocab_size={config.vocab_size} over {num_shards} devices",
            f"{target.project} pads it to a multiple of the tensor-parallel degree",
        )
    share = config.vocab_size // num_shards
    return min(share & -share, _MAX_PADDING)


def num_replicas(layout: ParallelLayout | None) -> int:
    """Number of data-parallel replicas."""
    return layout.data_parallel if layout else 1


def unwritten_scaling(untimed: Untimed) -> list[str]:
    """Comment on the scaling of rotary positions, for formats that are written without it."""
    factor = untimed.get("rope_scaling_factor")
    return [] if factor is None else [f"# Not written: scaling of rotary positions (llama3, factor {factor:g})."]
