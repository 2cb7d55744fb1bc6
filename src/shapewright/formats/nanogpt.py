"""nanoGPT: a Python file of assignments, as train.py takes it.

Source: train.py and model.py of karpathy/nanoGPT, master of 2024 and 2025 (they no longer change).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.formats.form import (
    Form,
    cannot,
    cannot_run,
    cannot_spread,
    refuse_other_embedding_width,
    refuse_other_head_dims,
    replicas_of,
)

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload

# What train.py takes where the data set says nothing of its vocabulary.
_VOCAB_SIZE = 50304
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def write_python(config: TransformerConfig, workload: Workload | None, layout: ParallelLayout | None) -> str:
    """Write a config; data, optimiser and schedule keep train.py's values."""
    refuse_other_head_dims(FORM, config)
    refuse_other_embedding_width(FORM, config)
    if config.vocab_size != _VOCAB_SIZE:
        raise cannot(FORM.name, f"vocab_size={config.vocab_size}", f"train.py takes the data set's, or {_VOCAB_SIZE}")
    if config.num_kv_heads != config.num_heads:
        raise cannot(FORM.name, f"num_kv_heads={config.num_kv_heads}", "every head there has keys of its own")
    if config.intermediate_size != 4 * config.hidden_size:
        raise cannot(FORM.name, f"intermediate_size={config.intermediate_size}", "its MLP is 4 * hidden_size wide")
    if len({config.norm_bias, config.qkv_bias, config.attention_out_bias, config.mlp_bias}) > 1:
        raise cannot(FORM.name, "biases in some places alone", "it has biases everywhere or nowhere")
    if config.hidden_dropout != config.attention_dropout:
        raise cannot(FORM.name, "hidden_dropout and attention_dropout that differ", "it has one dropout")
    block = config.max_position_embeddings if workload is None else workload.seq_len
    if block != config.max_position_embeddings:
        raise cannot_run(
            FORM.name,
            f"seq_len={block} with max_position_embeddings={config.max_position_embeddings}",
            "its block_size is both",
        )
    lines = [
        f"n_layer = {config.num_layers}",
        f"n_head = {config.num_heads}",
        f"n_embd = {config.hidden_size}",
        f"block_size = {block}",
        f"bias = {config.mlp_bias}",
        f"dropout = {config.hidden_dropout!r}",
        f"# vocab_size is {_VOCAB_SIZE}, which train.py takes unless the data set has a meta.pkl",
    ]
    if layout is not None and layout.num_devices != layout.data_parallel:
        raise cannot_spread(FORM.name, "a model spread over devices", "it copies the model to each of them")
    if layout is not None and layout.zero_stage:
        raise cannot_spread(FORM.name, f"zero_stage={layout.zero_stage}", "it shards nothing")
    if workload is not None:
        lines += _batch(workload, layout)
    return "\n".join(lines) + "\n"


def _batch(workload: Workload, layout: ParallelLayout | None) -> list[str]:
    if not workload.is_training:
        raise cannot_run(FORM.name, f"phase={workload.phase!r}", "this is the config of a training run")
    if workload.recompute != "none":
        raise cannot_run(FORM.name, f"recompute={workload.recompute!r}", "it keeps all activations")
    if workload.dtype not in _PRECISIONS:
        raise cannot_run(FORM.name, f"dtype={workload.dtype!r}", f"it has {', '.join(_PRECISIONS)}")
    if workload.attention != "flash":
        raise cannot_run(FORM.name, f"attention={workload.attention!r}", "its attention is fused where PyTorch can")
    # Over all devices: train.py divides it by their number.
    passes = (
        workload.global_batch_size or workload.micro_batch_size * replicas_of(layout)
    ) // workload.micro_batch_size
    return [
        f"batch_size = {workload.micro_batch_size}",
        f"gradient_accumulation_steps = {passes}",
        f'dtype = "{_PRECISIONS[workload.dtype]}"',
    ]


FORM = Form(
    name="nanogpt",
    project="nanoGPT",
    written=frozenset(
        (
            *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "intermediate_size"),
            *("max_position_embeddings", "norm_bias", "hidden_dropout", "attention_dropout", "qkv_bias"),
            *("attention_out_bias", "mlp_bias", "embedding_size", "vocab_size"),
        )
    ),
    fixed={
        "norm": ("layernorm",),
        "activation": ("gelu", "gelu_new"),
        "gated_mlp": (False,),
        "tied_embeddings": (True,),
        "position_embedding": ("learned",),
    },
    write=write_python,
    suffix=".py",
    runs={
        "tensor_parallel": (1,),
        "pipeline_parallel": (1,),
        "context_parallel": (1,),
        "expert_parallel": (1,),
        "zero_stage": (0,),
        "recompute": ("none",),
    },
)
