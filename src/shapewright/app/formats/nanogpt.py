"""nanoGPT: config file of train.py, a Python file of assignments.

Source: train.py and model.py of karpathy/nanoGPT, master of 2024 and 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from shapewright.models import TransformerConfig
    from shapewright.workload import ParallelLayout, Workload

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
        raise model_error(FORM.name, f"intermediate_size={config.intermediate_size}", "it must be 4 * hidden_size")
    if len({config.norm_bias, config.qkv_bias, config.attention_out_bias, config.mlp_bias}) > 1:
        raise model_error(FORM.name, "biases in some layers only", "one setting applies to all layers")
    if config.hidden_dropout != config.attention_dropout:
        raise model_error(FORM.name, "hidden_dropout and attention_dropout that differ", "there is one dropout setting")
    block = config.max_position_embeddings if workload is None else workload.seq_len
    if block != config.max_position_embeddings:
        raise workload_error(
            FORM.name,
            f"seq_len={block} with max_position_embeddings={config.max_position_embeddings}",
            "block_size sets both",
        )
    lines = [
        f"n_layer = {config.num_layers}",
        f"n_head = {config.num_heads}",
        f"n_embd = {config.hidden_size}",
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
    run_values={
        "tensor_parallel": (1,),
        "pipeline_parallel": (1,),
        "context_parallel": (1,),
        "expert_parallel": (1,),
        "zero_stage": (0,),
        "recompute": ("none",),
    },
)
