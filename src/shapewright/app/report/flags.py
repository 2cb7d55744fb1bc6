"""Names of flags: errors and notes of the library name fields, the command line the flags that set them."""

from __future__ import annotations

from functools import cache

from shapewright.core.texts import FieldName, Text

SHORT_FLAGS = {
    "tensor_parallel": "--tp",
    "pipeline_parallel": "--pp",
    "data_parallel": "--dp",
    "context_parallel": "--cp",
    "expert_parallel": "--ep",
    "expert_tensor_parallel": "--etp",
    "global_batch_size": "--global-batch",
}
# Flags that are not spelled like their field.
_OTHER_FLAGS = {
    "global_batch_size": "--global-batch",
    "num_devices": "--gpus",
    "target_loss_nats": "--target-loss",
    "headroom_fraction": "--headroom",
    "tolerance_fraction": "--tolerance",
    "num_parameters": "--params",
    "prompt_len": "--isl",
    "output_len": "--osl",
    "cached_len": "--cached-prefix",
    "ttft_limit_s": "--ttft",
    "tpot_limit_s": "--tpot",
    "requests_per_s": "--load",
    "ttft_p90_s": "--ttft-p90",
    "tpot_p90_s": "--tpot-p90",
    "num_requests": "--requests",
    "num_layouts": "--layouts",
    "inter_node_bandwidth_bytes_per_s": "--network-gbit-per-s",
    "values": "--value",
    "time_limit_s": "--time-limit",
    "user_traceback": "--traceback",
    "tables": "--table",
}
# Fields besides those of model, workload and layout whose flags are spelled like them.
_OTHER_FIELDS = (
    "node_size", "train_tokens", "hours", "gpu_hours", "usd", "usd_per_hour", "serve_tokens", "straggler_factor",
    "global_batch_tokens", "tokenizer_vocab", "max_num_seqs", "max_num_batched_tokens", "software", "server", "keep",
    "device", "calibration", "inputs", "fused", "try_offload", "seconds", "tokens_per_s", "tokens_per_s_per_device",
    "steps_per_s", "images_per_s",
)  # fmt: skip


def with_flags(text: str) -> str:
    """Write a text with flags in place of the fields that it names.

    >>> from shapewright.core.texts import with_fields
    >>> with_flags("tensor_parallel=6 must divide num_heads=64; " + with_fields("change {tensor_parallel}"))
    'tensor_parallel=6 must divide num_heads=64; change --tensor-parallel'
    >>> with_flags(with_fields("does not fit; set {recompute:full}"))
    'does not fit; set --recompute full'
    >>> with_flags(with_fields("or set {sequence_parallel:False}"))
    'or set --no-sequence-parallel'
    >>> with_flags(with_fields("set {software} for another stack; {keep} zero_stage=0,1 to reduce gradients once"))
    'set --software for another stack; --keep zero_stage=0,1 to reduce gradients once'
    """
    return text.spelled(_spell) if isinstance(text, Text) else text


def flag_of(name: str) -> str:
    """Return the flag that is spelled like a field or an argument."""
    return "--" + name.replace("_", "-")


def field_named(word: str) -> str:
    """Return the field that a word names: the field with hyphens or underscores, or a flag that is spelled otherwise.

    >>> field_named("micro-batch-size"), field_named("tp"), field_named("seq_len"), field_named("--isl")
    ('micro_batch_size', 'tensor_parallel', 'seq_len', 'prompt_len')
    """
    cleaned = word.strip().lstrip("-").replace("_", "-")
    spelled = {flag.lstrip("-"): name for name, flag in (_OTHER_FLAGS | SHORT_FLAGS).items()}
    return spelled.get(cleaned, cleaned.replace("-", "_"))


def _spell(name: FieldName) -> str:
    """Return what to type to set a field, to a value where the text advises one; the field if it has no flag."""
    if name.field == "guard" and name.value:
        return f"--{name.value}"  # each of its values is a flag of its own
    flag = flags_by_field().get(name.field)
    if flag and name.value == "False":
        return flag.replace("--", "--no-", 1)
    return f"{flag} {name.value}".rstrip() if flag else name


@cache
def flags_by_field() -> dict[str, str]:
    """Flags of every field that the command line can set."""
    from shapewright.core.fields import documented_fields
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

    names = [spec.name for cls in (Workload, ParallelLayout, TransformerConfig) for spec, _ in documented_fields(cls)]
    flags = {name: flag_of(name) for name in (*names, *_OTHER_FIELDS) if name != "model_type"}
    return flags | _OTHER_FLAGS
