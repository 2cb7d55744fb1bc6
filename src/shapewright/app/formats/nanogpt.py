"""nanoGPT: config file of train.py, a Python file of assignments.

Source: train.py and model.py of karpathy/nanoGPT, master of 2024 and 2025.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shapewright.app.formats.output_format import (
    OutputFormat,
    Untimed,
    check_embedding_width,
    check_head_dims,
    layout_error,
    model_error,
    num_replicas,
    workload_error,
)
from shapewright.app.formats.reading import DTYPES, Reading, Values, literal, parse_python
from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.texts import with_fields

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

# Default of train.py for data sets without a meta.pkl.
_VOCAB_SIZE = 50304
_RUN = {
    "max_iters": "num_steps",
    "lr_decay_iters": "num_steps",
    "warmup_iters": "warmup_steps",
    "learning_rate": "learning_rate",
    "min_lr": "final_learning_rate",
    "weight_decay": "weight_decay",
    "beta1": "beta1",
    "beta2": "beta2",
    "grad_clip": "gradient_clip",
}
_SIZES = {"n_layer": "num_layers", "n_head": "num_heads", "n_embd": "hidden_size"}
_DEFAULTS = {"n_layer": 12, "n_head": 12, "n_embd": 768}
_MUST_BE_LITERAL = frozenset((*_SIZES, "block_size", "vocab_size", "batch_size"))
# Functions that may set any name.
_SETTERS = frozenset(("exec", "eval", "globals", "locals", "vars", "setattr"))
# Weights that init_from names; they set all sizes but the context, which may be cut.
_PRETRAINED = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
_OF_PRETRAINED = {"vocab_size": 50257, "bias": True}
_PRETRAINED_BLOCK = 1024
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def write_python(
    config: TransformerConfig,
    workload: Workload | None,
    layout: ParallelLayout | None,
    untimed: Untimed,
) -> str:
    """Write a config; what is not known keeps the defaults of train.py."""
    check_head_dims(FORM, config)
    check_embedding_width(FORM, config)
    if config.vocab_size != _VOCAB_SIZE:
        raise model_error(
            FORM.name, f"vocab_size={config.vocab_size}", f"train.py uses that of the data set, or {_VOCAB_SIZE}"
        )
    if config.num_kv_heads != config.num_heads:
        raise model_error(FORM.name, f"num_kv_heads={config.num_kv_heads}", "grouped-query attention is not supported")
    if config.intermediate_size != 4 * config.hidden_size:
        raise model_error(
            FORM.name, f"intermediate_size={config.intermediate_size}", with_fields("it must be 4 * {hidden_size}")
        )
    if len({config.norm_bias, config.qkv_bias, config.attention_out_bias, config.mlp_bias}) > 1:
        raise model_error(FORM.name, "biases in some layers only", "one setting applies to all layers")
    if config.hidden_dropout != config.attention_dropout:
        raise model_error(
            FORM.name,
            with_fields("{hidden_dropout} and {attention_dropout} that differ"),
            "there is one dropout setting",
        )
    block = config.max_position_embeddings if workload is None else workload.seq_len
    if block != config.max_position_embeddings:
        raise workload_error(
            FORM.name,
            f"seq_len={block} with max_position_embeddings={config.max_position_embeddings}",
            "block_size sets both",
        )
    lines = [
        *(f"{theirs} = {getattr(config, ours)}" for theirs, ours in _SIZES.items()),
        f"block_size = {block}",
        f"bias = {config.mlp_bias}",
        f"dropout = {config.hidden_dropout!r}",
        f"# vocab_size is {_VOCAB_SIZE}, the default of train.py for data sets without a meta.pkl",
    ]
    if layout is not None and layout.num_devices != layout.data_parallel:
        raise layout_error(FORM.name, "model parallelism", "only data parallelism is supported")
    if layout is not None and layout.zero_stage:
        raise layout_error(FORM.name, f"zero_stage={layout.zero_stage}", "ZeRO is not supported")
    if workload is not None:
        lines += _workload_settings(workload, layout)
    lines += [f"{key} = {untimed[name]!r}" for key, name in _RUN.items() if name in untimed]
    return "\n".join(lines) + "\n"


def _workload_settings(workload: Workload, layout: ParallelLayout | None) -> list[str]:
    if not workload.is_training:
        raise workload_error(FORM.name, f"phase={workload.phase!r}", "the format is for training runs")
    if workload.recompute != "none":
        raise workload_error(FORM.name, f"recompute={workload.recompute!r}", "recomputation is not supported")
    if workload.dtype not in _PRECISIONS:
        raise workload_error(FORM.name, f"dtype={workload.dtype!r}", f"supported are {', '.join(_PRECISIONS)}")
    if workload.attention != "flash":
        raise workload_error(FORM.name, f"attention={workload.attention!r}", "it uses fused attention")
    # Sum over all devices: train.py divides it by the number of devices.
    passes = (
        workload.global_batch_size or workload.micro_batch_size * num_replicas(layout)
    ) // workload.micro_batch_size
    return [
        f"batch_size = {workload.micro_batch_size}",
        f"gradient_accumulation_steps = {passes}",
        f'dtype = "{_PRECISIONS[workload.dtype]}"',
    ]


def read_nanogpt(text: str) -> Reading:
    """Read a config file of nanoGPT, on top of the defaults of train.py."""
    assignments, unread = _read_assignments(parse_python(text))
    values = Values(_with_pretrained(assignments))
    has_bias = values.flag("bias")
    dropout = values.number("dropout", default=0.0)
    block = values.number("block_size", default=1024)
    micro_batch = values.number("batch_size", default=12)
    passes = values.number("gradient_accumulation_steps", default=40)
    biases = dict.fromkeys(("norm_bias", "qkv_bias", "attention_out_bias", "mlp_bias"), has_bias)
    return Reading(
        format="nanogpt",
        fields={
            **{ours: values.number(theirs, default=_DEFAULTS[theirs]) for theirs, ours in _SIZES.items()},
            "vocab_size": values.number("vocab_size", default=_VOCAB_SIZE),
            "max_position_embeddings": block,
            "norm": "layernorm",
            "activation": "gelu",
            "tied_embeddings": True,
            "position_embedding": "learned",
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
            "fused_qkv": True,
            **biases,
        },
        # Passes are summed over all devices.
        workload={
            "phase": "train",
            "seq_len": block,
            "micro_batch_size": micro_batch,
            "global_batch_size": micro_batch * passes,
            "dtype": DTYPES.get(values.get("dtype", default="bfloat16"), "bf16"),
            "attention": "flash",
            "recompute": "none",
        },
        unread=tuple(sorted((*unread, *values.unread()))),
    )


def _read_assignments(module: ast.Module) -> tuple[dict[str, Any], list[str]]:
    """Values of names that are set to literals, and what else may set a name, which is not run.

    Raises:
        ConfigError: a size of the model is set by something that is not run.
    """
    found: dict[str, Any] = {}
    unread: dict[str, None] = {}
    for statement in module.body:
        values = dict(_literals(statement))
        found |= values
        for node in ast.walk(statement):
            if not isinstance(node, ast.Name) or node.id in values:
                continue
            if node.id in _SETTERS:
                unread[f"{node.id}(...)"] = None
            elif isinstance(node.ctx, ast.Store):
                if node.id in _MUST_BE_LITERAL:
                    raise ConfigError(
                        f"{node.id} is set by a statement that is not run (line {statement.lineno}); write its value "
                        f"into the file, as in {node.id} = {_DEFAULTS.get(node.id, 1024)}"
                    )
                unread[node.id] = None
    return found, list(unread)


def _literals(statement: ast.stmt) -> Iterator[tuple[str, Any]]:
    """Names that an assignment sets, with their values; none of those whose value is no literal."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(statement, ast.Assign):
        pairs = [(target, statement.value) for target in statement.targets]
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        pairs = [(statement.target, statement.value)]
    for target, value in pairs:
        parts = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            parts = list(zip(target.elts, value.elts, strict=True))
        for each, its in parts:
            if isinstance(each, ast.Name):
                with suppress(ValueError, TypeError, RecursionError):
                    yield each.id, literal(its)


def _with_pretrained(assignments: dict[str, Any]) -> dict[str, Any]:
    """Assignments with the sizes of the weights that ``init_from`` names; those of a checkpoint are not known."""
    start = assignments.get("init_from", "scratch")
    if start == "resume":
        return assignments
    others = {name: value for name, value in assignments.items() if name != "init_from"}
    if start == "scratch":
        return others
    if start not in _PRETRAINED:
        known = ", ".join(("scratch", "resume", *_PRETRAINED))
        raise ConfigError(f"init_from={short_repr(start)} is not known; choose one of {known}")
    block = min(others.get("block_size", _PRETRAINED_BLOCK), _PRETRAINED_BLOCK)
    return {**others, **_PRETRAINED[start], **_OF_PRETRAINED, "block_size": block}


FORM = OutputFormat(
    name="nanogpt",
    project="nanoGPT",
    written_fields=frozenset(
        (
            *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "intermediate_size"),
            *("max_position_embeddings", "norm_bias", "hidden_dropout", "attention_dropout", "qkv_bias"),
            *("attention_out_bias", "mlp_bias", "embedding_size", "vocab_size"),
        )
    ),
    fixed_values={
        "norm": ("layernorm",),
        "activation": ("gelu", "gelu_new"),
        "gated_mlp": (False,),
        "tied_embeddings": (True,),
        "position_embedding": ("learned",),
    },
    write=write_python,
    suffix=".py",
    fused={"fused_qkv": True},
    run_values={
        "tensor_parallel": (1,),
        "pipeline_parallel": (1,),
        "context_parallel": (1,),
        "expert_parallel": (1,),
        "zero_stage": (0,),
        "recompute": ("none",),
    },
)
