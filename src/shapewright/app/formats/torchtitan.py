"""torchtitan: job config in TOML, with the flavor to add to the model's Python file.

The job config names a flavor of a model; the sizes of flavors are defined in a Python table of the model's package.
The output is the TOML file and, as a comment at its top, the line to add to that table.

Source: torchtitan/models/llama3 and qwen3 (model/args.py, train_configs), config/job_config.py and
distributed/pipeline_parallel.py of pytorch/torchtitan 0.2, the last version with TOML.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shapewright.app.formats.output_format import (
    OutputFormat,
    Untimed,
    check_embedding_width,
    check_pipeline_schedule,
    layout_error,
    model_error,
    num_replicas,
    unwritten_scaling,
    workload_error,
)
from shapewright.app.formats.reading import Reading, Values, given, literal, parse_python
from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.files import parse_toml
from shapewright.core.numeric import round_up
from shapewright.core.texts import with_fields
from shapewright.workload.recompute import ALTERNATE

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_FLAVOR = "shapewright"
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}
# 1F1B with several virtual stages per device.
_INTERLEAVED = "Interleaved1F1B"


def write_toml(
    config: TransformerConfig, workload: Workload | None, layout: ParallelLayout | None, untimed: Untimed
) -> str:
    """Write flavor and job config, without data."""
    check_embedding_width(FORM, config)
    if config.v_head_dim != config.head_dim:
        raise model_error(
            FORM.name, f"v_head_dim={config.v_head_dim}", with_fields("{v_head_dim} must equal {head_dim}")
        )
    model, table, arguments = _flavor(config)
    names = {"rotary_base": "rope_theta", "norm_epsilon": "norm_eps"}
    more = [f"{key}={float(untimed[name])!r}" for name, key in names.items() if name in untimed]
    arguments = ", ".join([arguments.removesuffix(")"), *more]) + ")"
    lines = [
        *unwritten_scaling(untimed),
        *([f"# The model is qwen3, since llama3 has no {_missing_in_llama3(config)}."] if model == "qwen3" else []),
        f"# Add to {table} in torchtitan/models/{model}/__init__.py:",
        f'#     "{_FLAVOR}": {arguments},',
        "",
        "[model]",
        f'name = "{model}"',
        f'flavor = "{_FLAVOR}"',
    ]
    if workload is not None:
        lines += _training(workload, layout, untimed)
    if layout is not None:
        lines += _parallelism(config, layout, workload)
    if "num_steps" in untimed:
        final_fraction = untimed["final_learning_rate"] / untimed["learning_rate"]
        names = {"learning_rate": "lr", "weight_decay": "weight_decay", "beta1": "beta1", "beta2": "beta2"}
        lines += ["", "[optimizer]", 'name = "AdamW"', *(f"{key} = {untimed[name]!r}" for name, key in names.items())]
        lines += ["", "[lr_scheduler]", f"warmup_steps = {untimed['warmup_steps']}", 'decay_type = "cosine"']
        lines.append(f"min_lr_factor = {final_fraction:.3g}")
    return "\n".join(lines) + "\n"


def _flavor(config: TransformerConfig) -> tuple[str, str, str]:
    """Model name, name of its flavor table, and arguments of the flavor."""
    sizes = (
        f"dim={config.hidden_size}, n_layers={config.num_layers}, n_heads={config.num_heads}, "
        f"n_kv_heads={config.num_kv_heads}, vocab_size={config.vocab_size}, "
        f"max_seq_len={config.max_position_embeddings}"
    )
    whole_heads = config.num_heads * config.head_dim == config.hidden_size
    if whole_heads and config.qk_norm == "none" and not config.tied_embeddings:
        # torchtitan truncates the width to an integer and rounds it up to a multiple: 0.5 protects it if that is 1.
        multiple = config.intermediate_size & -config.intermediate_size
        multiplier = (config.intermediate_size + (0.5 if multiple == 1 else 0.0)) / int(8 * config.hidden_size / 3)
        return (
            "llama3",
            "llama3_args",
            f"TransformerModelArgs({sizes}, ffn_dim_multiplier={multiplier!r}, multiple_of={multiple})",
        )
    return (
        "qwen3",
        "qwen3_args",
        f"Qwen3ModelArgs({sizes}, head_dim={config.head_dim}, hidden_dim={config.intermediate_size}, "
        f"qk_norm={config.qk_norm != 'none'}, enable_weight_tying={config.tied_embeddings})",
    )


def _missing_in_llama3(config: TransformerConfig) -> str:
    """Properties of a model that torchtitan's llama3 cannot express."""
    found = {
        "tied embeddings": config.tied_embeddings,
        "norm of queries and keys": config.qk_norm != "none",
        "head width apart from hidden_size / num_heads": config.num_heads * config.head_dim != config.hidden_size,
    }
    return " and no ".join(words for words, is_there in found.items() if is_there)


def _training(workload: Workload, layout: ParallelLayout | None, untimed: Untimed) -> list[str]:
    if not workload.is_training:
        raise workload_error(FORM.name, f"phase={workload.phase!r}", "the format is for training runs")
    if workload.dtype != "bf16":
        raise workload_error(FORM.name, f"dtype={workload.dtype!r}", "only bf16 mixed precision is supported")
    if workload.attention != "flash":
        raise workload_error(FORM.name, f"attention={workload.attention!r}", "it uses fused attention")
    lines = ["", "[training]", f"seq_len = {workload.seq_len}"]
    if layout is not None and layout.pipeline_parallel > 1:
        # The local batch is the batch of one step, which the pipeline splits into micro-batches.
        default = workload.micro_batch_size * layout.pipeline_parallel
        local = workload.global_batch_size // layout.data_parallel if workload.global_batch_size else default
        lines.append(f"local_batch_size = {local}")
    else:
        lines.append(f"local_batch_size = {workload.micro_batch_size}")
        if workload.global_batch_size is not None:
            lines.append(f"global_batch_size = {workload.global_batch_size}")
    names = {"num_steps": "steps", "gradient_clip": "max_norm"}
    lines += [f"{key} = {untimed[name]!r}" for name, key in names.items() if name in untimed]
    lines += ["", "[activation_checkpoint]", f'mode = "{workload.recompute}"']
    if workload.recompute == "selective":
        # An integer n instead would checkpoint every n-th layer.
        lines.append('selective_ac_option = "op"')
    return lines


def _parallelism(config: TransformerConfig, layout: ParallelLayout, workload: Workload | None) -> list[str]:
    check_pipeline_schedule(FORM, layout)
    sharded = layout.zero_stage in (2, 3)
    replicas = num_replicas(layout)
    if layout.zero_stage == 1:
        raise layout_error(FORM.name, "zero_stage=1", "FSDP shards gradients too; use 0, 2 or 3")
    if layout.zero_stage == 0 and layout.context_parallel > 1:
        raise layout_error(
            FORM.name,
            f"zero_stage=0 with context_parallel={layout.context_parallel}",
            "FSDP shards weights over devices that share a sequence; use 2 or 3",
        )
    if layout.expert_parallel > 1:
        raise layout_error(FORM.name, f"expert_parallel={layout.expert_parallel}", "the models are dense")
    return [
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {1 if sharded else replicas}",
        f"data_parallel_shard_degree = {replicas if sharded else 1}",
        *([f'fsdp_reshard_after_forward = "{"always" if layout.zero_stage == 3 else "never"}"'] if sharded else []),
        f"tensor_parallel_degree = {layout.tensor_parallel}",
        f"pipeline_parallel_degree = {layout.pipeline_parallel}",
        *(_pipeline(config, layout, workload) if layout.pipeline_parallel > 1 else ()),
        f"context_parallel_degree = {layout.context_parallel}",
    ]


def _pipeline(config: TransformerConfig, layout: ParallelLayout, workload: Workload | None) -> Iterator[str]:
    """Schedule and layers per chunk; torchtitan counts embedding and output as layers by default."""
    chunks = layout.virtual_pipeline
    yield f'pipeline_parallel_schedule = "{_INTERLEAVED if chunks > 1 else _SCHEDULES[layout.pipeline_schedule]}"'
    per_chunk = -(-config.num_layers // layout.pipeline_parallel) // chunks
    spare = layout.pipeline_parallel * chunks * per_chunk - config.num_layers
    if spare > 2 * (per_chunk - 1):
        raise layout_error(
            FORM.name,
            f"{config.num_layers} layers on {layout.pipeline_parallel} stages of {chunks}",
            "only the first and the last chunk can have fewer layers, at least one each",
        )
    yield f"pipeline_parallel_layers_per_stage = {per_chunk}"
    before = int(layout.ends_as_layers[0]) if any(layout.ends_as_layers) else spare // 2
    yield f"pipeline_parallel_first_stage_less_layers = {before}"
    yield f"pipeline_parallel_last_stage_less_layers = {spare - before}"
    if workload is not None:
        yield f"pipeline_parallel_microbatch_size = {workload.micro_batch_size}"


_SIZES = {
    "dim": "hidden_size", "n_layers": "num_layers", "n_heads": "num_heads", "n_kv_heads": "num_kv_heads",
    "vocab_size": "vocab_size", "head_dim": "head_dim", "hidden_dim": "intermediate_size",
}  # fmt: skip
_LAYOUT = {
    "tensor_parallel_degree": "tensor_parallel", "pipeline_parallel_degree": "pipeline_parallel",
    "context_parallel_degree": "context_parallel", "expert_parallel_degree": "expert_parallel",
}  # fmt: skip
# Names of the converter of linear layers to fp8, now and before 0.2.
_FLOAT8 = {"quantize.linear.float8", "float8"}
# Defaults of config/job_config.py.
_LOCAL_BATCH, _EVERY_LAYERS = 8, "2"
_DEFAULTS = {"n_layers": 32, "n_heads": 32, "dim": 4096, "multiple_of": 256, "vocab_size": 128256}
_COMMENTED = re.compile(r'^#\s+"([^"]+)": (\w+\(.*\)),$', re.MULTILINE)


def find_flavors(text: str) -> dict[str, dict[str, Any]]:
    """Flavors of a Python file of torchtitan, by name: the literal arguments of calls in a table, never run."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(parse_python(text)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Call):
                    found[key.value] = _arguments(value)
    return found


def _arguments(call: ast.Call) -> dict[str, Any]:
    arguments: dict[str, Any] = {"class": getattr(call.func, "id", "")}
    for keyword in call.keywords:
        try:
            arguments[str(keyword.arg)] = literal(keyword.value)
        except (ValueError, TypeError, RecursionError):
            arguments[str(keyword.arg)] = _source(keyword.value)
    return arguments


def _source(node: ast.expr) -> str:
    """Words of an expression that is no literal, such as the experts of a mixture: it is named, and never taken."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return type(node).__name__


def read_flavor(text: str, flavor: str) -> Reading:
    """Read one flavor of a Python file of torchtitan.

    Raises:
        ConfigError: the file has no such flavor.
    """
    flavors = {name: args for name, args in find_flavors(text).items() if "dim" in args}
    if not flavor and len(flavors) == 1:
        flavor = next(iter(flavors))
    if flavor not in flavors:
        known = ", ".join(flavors) or "none"
        raise ConfigError(f"no flavor {short_repr(flavor)}; the file has {known}: give FILE.py::FLAVOR")
    fields, untimed, unread = _flavor_fields(flavors[flavor])
    return Reading(format="torchtitan-toml", fields=fields, untimed=untimed, unread=unread)


def _flavor_fields(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float], tuple[str, ...]]:
    values = Values({**_DEFAULTS, **given(arguments)})
    is_qwen3 = str(values.get("class", default="")).startswith("Qwen3")
    fields = values.pick(_SIZES)
    if "intermediate_size" not in fields:
        multiplier = values.number("ffn_dim_multiplier")
        if not all(map(math.isfinite, (fields["hidden_size"], multiplier or 0.0))):
            raise ConfigError("dim and ffn_dim_multiplier must be finite numbers; write their values into the file")
        width = int(8 * fields["hidden_size"] / 3)
        width = width if multiplier is None else int(multiplier * width)
        fields["intermediate_size"] = round_up(width, values.number("multiple_of"))
    values.skip("multiple_of", "ffn_dim_multiplier")
    fields["max_position_embeddings"] = values.number("max_seq_len", default=4096 if is_qwen3 else 131072)
    fields |= {
        "norm": "rmsnorm", "activation": "silu", "gated_mlp": True, "position_embedding": "rotary",
        "qk_norm": "per-head" if values.flag("qk_norm", default=is_qwen3) else "none",
        "tied_embeddings": values.flag("enable_weight_tying"),
    }  # fmt: skip
    untimed = values.pick({"rope_theta": "rotary_base", "norm_eps": "norm_epsilon"})
    return fields, untimed, values.unread()


def read_torchtitan(text: str) -> Reading:
    """Read a job config in TOML; its flavor is in a comment at its top, or given as FILE.py::FLAVOR.

    Raises:
        ConfigError: the file is not valid TOML.
    """
    try:
        file = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"the file is not valid TOML: {str(error)[:150]}; check that it is complete") from None
    flavors = {name: _call_arguments(call) for name, call in _COMMENTED.findall(text)}
    model = Values(file.get("model") or {})
    arguments = flavors.get(model.get("flavor", default=""), {})
    model.skip("name", "tokenizer_path", "hf_assets_path", "print_after_conversion")
    fields, untimed, unread = _flavor_fields(arguments) if arguments else ({}, {}, ("model.flavor",))
    layout, not_laid_out = _read_layout(Values(file.get("parallelism") or {}), fields.get("num_layers"))
    workload, not_trained = _read_workload(file, layout, fields.get("num_layers"))
    converters = set(model.get("converters", default=()))
    if converters and converters <= _FLOAT8:
        workload["dtype"] = "fp8"
    not_converted = ("model.converters",) if converters - _FLOAT8 else ()
    others = set(file) - {"model", "parallelism", "training", "activation_checkpoint"}
    return Reading(
        format="torchtitan-toml",
        fields=fields,
        workload=workload,
        layout=layout,
        untimed=untimed,
        unread=(
            *unread,
            *not_converted,
            *(f"model.{key}" for key in model.unread()),
            *not_laid_out,
            *not_trained,
            *sorted(others),
        ),
    )


def _call_arguments(text: str) -> dict[str, Any]:
    statements = parse_python(text).body
    call = statements[0].value if statements and isinstance(statements[0], ast.Expr) else None
    return _arguments(call) if isinstance(call, ast.Call) else {}


def _read_layout(values: Values, num_layers: int | None) -> tuple[dict[str, Any], list[str]]:
    layout: dict[str, Any] = values.pick(_LAYOUT)
    replicas = values.number("data_parallel_replicate_degree", default=1)
    shards = values.number("data_parallel_shard_degree", default=-1)
    if shards >= 1:
        layout["data_parallel"] = replicas * shards
    reshards = values.get("fsdp_reshard_after_forward", default="default")
    has_stages = layout.get("pipeline_parallel", 1) > 1
    # By default weights stay gathered where there are pipeline stages.
    keeps = reshards == "never" or (reshards == "default" and has_stages)
    # parallel_dims.py, fsdp_enabled: devices that share a sequence shard the weights as well.
    is_whole = shards == 1 and layout.get("context_parallel", 1) == 1
    layout["zero_stage"] = 0 if is_whole else 2 if keeps else 3
    schedule = str(values.get("pipeline_parallel_schedule", default="1F1B")).lower()
    is_interleaved = schedule == _INTERLEAVED.lower()
    schedule = "1f1b" if is_interleaved else schedule
    not_priced = []
    if has_stages and schedule in _SCHEDULES:
        layout["pipeline_schedule"] = schedule
    elif has_stages:
        not_priced.append("pipeline_parallel_schedule")
    spare = [values.number(f"pipeline_parallel_{end}_stage_less_layers", default=1) for end in ("first", "last")]
    per_chunk = values.number("pipeline_parallel_layers_per_stage")
    if has_stages and per_chunk and num_layers:
        layout["virtual_pipeline"] = -(-(num_layers + sum(spare)) // per_chunk) // layout["pipeline_parallel"]
    elif has_stages and per_chunk:
        not_priced.append("pipeline_parallel_layers_per_stage")
    elif has_stages and is_interleaved:
        layout["virtual_pipeline"] = 2  # pipeline_parallel.py: two for schedules of several stages
    if replicas > 1 and not is_whole:  # weights are replicated over some devices, and sharded over the others alone
        not_priced.append("data_parallel_replicate_degree")
    values.skip("pipeline_parallel_microbatch_size")
    return layout, [f"parallelism.{key}" for key in (*values.unread(), *not_priced)]


def _read_workload(
    file: Mapping[str, Any], layout: Mapping[str, Any], num_layers: int | None
) -> tuple[dict[str, Any], list[str]]:
    train, saved = Values(file.get("training") or {}), Values(file.get("activation_checkpoint") or {})
    workload: dict[str, Any] = {"phase": "train", "dtype": "bf16", "attention": "flash"}
    workload |= train.pick({"seq_len": "seq_len"})
    whole = train.number("global_batch_size")
    if whole is not None and whole > 0:  # -1 is one local batch of each replica
        workload["global_batch_size"] = whole
    local = train.number("local_batch_size", "batch_size", default=_LOCAL_BATCH)
    if layout.get("pipeline_parallel", 1) > 1:
        # The local batch is split into micro-batches; the default is one sequence each.
        section = file.get("parallelism") or {}
        workload["micro_batch_size"] = section.get("pipeline_parallel_microbatch_size", 1)
        if "data_parallel" in layout:
            workload.setdefault("global_batch_size", local * layout["data_parallel"])
    else:
        workload["micro_batch_size"] = local
    workload["recompute"] = saved.get("mode", default="selective")
    option = str(saved.get("selective_ac_option", default=_EVERY_LAYERS))
    not_priced = []
    if workload["recompute"] == "selective" and option.isdigit():
        # Every n-th layer of a device is recomputed as a whole (distributed/activation_checkpoint.py).
        if num_layers is None:
            not_priced.append("activation_checkpoint.selective_ac_option")
        else:
            layers = num_layers // layout.get("pipeline_parallel", 1) // max(int(option), 1)
            workload |= {"recompute": "full", "recompute_layers": layers} if layers else {"recompute": "none"}
    elif workload["recompute"] == "selective":
        workload["recompute_modules"] = ALTERNATE
    return workload, [*(f"training.{key}" for key in train.unread()), *not_priced]


FORM = OutputFormat(
    name="torchtitan-toml",
    project="torchtitan (llama3, qwen3)",
    written_fields=frozenset(
        (
            *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "intermediate_size"),
            *("vocab_size", "max_position_embeddings", "tied_embeddings", "embedding_size"),
        )
    ),
    fixed_values={
        "norm": ("rmsnorm",),
        "norm_bias": (False,),
        "hidden_dropout": (0.0,),
        "attention_dropout": (0.0,),
        "qkv_bias": (False,),
        "attention_out_bias": (False,),
        "qk_norm": ("none", "per-head"),
        "activation": ("silu",),
        "gated_mlp": (True,),
        "mlp_bias": (False,),
        "position_embedding": ("rotary",),
    },
    write=write_toml,
    suffix=".toml",
    fused={"fused_qkv": False, "fused_gate_up": False},
    run_values={
        "expert_parallel": (1,),
        "zero_stage": (0, 2, 3),
        "pipeline_schedule": tuple(_SCHEDULES),
        "sequence_parallel": (True,),
    },
    supports_end_layers=True,
    selective_modules=(ALTERNATE,),
)
