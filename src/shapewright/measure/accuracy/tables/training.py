"""Evaluate published_training_throughput.csv and tables of its columns: published tokens per second and device.

Rows with a time are completed to runs. Unstated fields are set as the software of the source does, and counted: no
recomputation and fused attention if checkpointing and attention are not stated; sequence parallelism with fused
attention (both came to Megatron in 2022); optimizer states sharded over replicas if NeMo states no sharding. MFU is not
used, and TFLOP/s only if their convention is known, since conventions differ.

Each run is predicted with the generation of software that its source names; the bias is of tokens/s, so a positive one
is optimistic. Rows of mixtures of experts are a table of their own, ``published_training_throughput/moe``.

Settings that NVIDIA's recipes state and its tables do not are read from the recipes: optimizer states sharded over
replicas, gradients reduced in 16 bits (``grad_reduce_in_fp32 = False``), and GEMMs in fp8 and fp4 by Transformer
Engine, which keeps their inputs in that format (pytorch/module/linear.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.measure.accuracy.chunk import Chunk, Prices, roofline_step_s
from shapewright.measure.accuracy.tables.published_rows import (
    PublishedRow,
    UnusableRowError,
    read_row,
    recomputed_modules,
    software_of,
    software_of_experts,
)
from shapewright.memory.estimate import estimate_memory
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.predict import predict
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.recompute import ALTERNATE, CORE
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.context import Context
    from shapewright.prediction.predict import Prediction

_LORA_TARGETS = {"qkv, attention output": "attention"}
# Source: mlcommons/training, llama2_70b_lora (the reference's lora_dropout, a fixed hyperparameter).
_MLPERF_LORA_DROPOUT = 0.1
# Adapters of Megatron-Bridge's Llama 3 70B, which its tables do not state. Source: NVIDIA-NeMo/Megatron-Bridge,
# scripts/performance (target_modules: linear_qkv) and peft/lora.py (dim 32, dropout 0).
_BRIDGE_LORA = {"finetune": "lora", "lora_rank": 32, "lora_targets": "qkv"}
# Recomputation and recomputed modules.
_RECOMPUTE = {
    "": ("none", CORE),
    "none": ("none", CORE),
    "full": ("full", CORE),
    "selective": ("selective", CORE),
    "selective op": ("selective", ALTERNATE),
    "selective per op": ("selective", ALTERNATE),
}


@dataclass(frozen=True)
class PublishedRun:
    """One published row, completed.

    Attributes:
        source: Publisher.
        software: Generation of software that the source names.
        device: The device.
        config: The model.
        workload: Batches, length and element format.
        layout: Parallel layout.
        tokens_per_s_per_device: Measured throughput.
    """

    source: str
    software: str
    device: Device
    config: TransformerConfig
    workload: Workload
    layout: ParallelLayout
    tokens_per_s_per_device: float

    @property
    def step_s(self) -> float:
        """Measured time of a step. [s]"""
        assert self.workload.global_batch_size is not None
        tokens = self.workload.global_batch_size * self.workload.seq_len
        return tokens / (self.tokens_per_s_per_device * self.layout.num_devices)


def read_runs(columns: Columns, context: Context, *, has_experts: bool | None = False) -> Iterator[PublishedRun]:
    """Complete the rows that can be completed; reasons for the others are counted in the context.

    Args:
        has_experts: Whether models have experts; None for both kinds.
    """
    assumed: Counter[str] = Counter()
    for device, _, rows in context.device_groups(columns, "gpu"):
        for row in range(rows.num_rows):
            try:
                run = _read_run(rows, row, device, assumed)
            except ShapewrightError as error:
                context.skipped[str(error)] += 1
            else:
                if has_experts in (None, run.config.is_moe):
                    yield run
    if assumed:
        listed = "; ".join(f"{count} rows {what}" for what, count in assumed.most_common())
        context.note(
            f"published_training_throughput: values are tokens/s, so a positive bias is optimistic; assumed: {listed}"
        )


def _read_run(rows: Columns, place: int, device: Device, assumed: Counter[str]) -> PublishedRun:
    """Complete one row.

    Raises:
        UnusableRowError: it lacks a field, or is not pre-training.
        ShapewrightError: its fields contradict each other.
    """
    filled: Counter[str] = Counter()
    row = read_row(rows, place, filled)
    dtype = _read_dtype(row.labels["dtype"])
    num_sharded = _count_sharded(row, device)
    tokens_per_s = _read_tokens_per_s(row)
    assumed.update(filled)
    is_fused = _read_attention(row, device, assumed)
    recompute, modules = _read_recompute(row, device, assumed)
    config = _make_config(row) if row.preset is None else read_model(row.preset).config
    if modules == ALTERNATE:  # torchtitan counts separate projections
        config = replace(config, fused_qkv=False, fused_gate_up=False)
    run = PublishedRun(
        source=row.source,
        software=_software_of(row, device),
        device=device,
        config=config,
        workload=Workload(
            micro_batch_size=row.count("micro_batch"),
            global_batch_size=row.count("global_batch"),
            seq_len=row.count("seq_len"),
            dtype=dtype,
            attention="flash" if is_fused else "unfused",
            optimizer="adamw-narrow-gradients" if row.is_nvidia else "adamw",
            narrow_inputs=row.is_nvidia and dtype in ("fp8", "fp4"),
            recompute=recompute,
            recompute_modules=modules,
            **_read_adapters(row, dtype),
        ),
        layout=ParallelLayout(
            tensor_parallel=row.count("tp"),
            pipeline_parallel=row.count("pp"),
            data_parallel=row.count("num_gpus") // num_sharded,
            context_parallel=row.count("cp", 1.0),
            expert_parallel=1 if row.preset is None else row.count("ep", 1.0),
            expert_tensor_parallel=_pieces_of_experts(row, assumed),
            virtual_pipeline=_num_chunks(config.num_layers, row.count("pp"), row.count("vp", 1.0), assumed),
            sequence_parallel=bool(row.number("sequence_parallel", float(is_fused))),
            zero_stage=_read_zero_stage(row, assumed),
        ),
        tokens_per_s_per_device=tokens_per_s,
    )
    return run if row.labels["activation_checkpointing"] else _recompute_to_fit(run, assumed)


def _recompute_to_fit(run: PublishedRun, assumed: Counter[str]) -> PublishedRun:
    """Recompute as many layers of a run with adapters as its memory needs; the others' generations were fitted without.

    A run that states no checkpointing and does not fit without has some.
    """
    if not run.workload.has_adapters:
        return run
    for num_layers in range(run.config.num_layers + 1):
        changes: dict[str, Any] = {"recompute": "full", "recompute_layers": num_layers} if num_layers else {}
        workload = replace(run.workload, **changes)
        if estimate_memory(run.config, workload, run.layout).total_bytes <= run.device.memory_bytes:
            if num_layers:
                assumed["do not fit without activation checkpointing: as many layers recomputed as needed"] += 1
            return replace(run, workload=workload)
    return run


def _read_adapters(row: PublishedRow, dtype: str) -> dict[str, Any]:
    """Return the fields of the workload of a row that trains adapters; empty for others.

    Frozen weights are stored in the format of their GEMMs: in 16 bits, 70B would not fit the devices of these rows.
    """
    if "LoRA" in row.source:
        return dict(_BRIDGE_LORA)
    rank = row.numbers.get("lora_rank", 0.0)
    if not rank > 0.0:
        return {}
    return {
        "finetune": "lora",
        "lora_rank": int(rank),
        "lora_targets": _LORA_TARGETS.get(row.labels.get("lora_targets", ""), "all-linear"),
        "lora_dropout": _MLPERF_LORA_DROPOUT,
        "weight_dtype": dtype,
    }


def _count_sharded(row: PublishedRow, device: Device) -> int:
    """Return the number of devices of one replica."""
    num_sharded = row.count("tp") * row.count("pp") * row.count("cp", 1.0)
    if row.count("num_gpus") % num_sharded:
        raise UnusableRowError("num_gpus is not a multiple of tp * pp * cp")
    if row.number("num_gpus") > device.node_size and device.inter_node_bandwidth_bytes_per_s is None:
        raise UnusableRowError(f"{device.name} has no rate between nodes")
    return num_sharded


def _read_tokens_per_s(row: PublishedRow) -> float:
    """Return measured tokens per second and device, or the value implied by the step time."""
    tokens_per_s = row.number("tokens_per_s_per_gpu")
    if np.isnan(tokens_per_s):
        tokens_per_step = row.number("global_batch") * row.number("seq_len")
        tokens_per_s = tokens_per_step / row.number("iter_time_s") / row.number("num_gpus")
    if not tokens_per_s > 0.0:
        raise UnusableRowError("neither tokens/s nor the time of a step is stated")
    return tokens_per_s


def _read_attention(row: PublishedRow, device: Device, assumed: Counter[str]) -> bool:
    """Whether attention was fused."""
    stated = row.number("flash_attention")
    if not np.isnan(stated):
        return bool(stated)
    assumed["do not state their attention: fused where the device has it"] += 1
    return device.architecture_facts.has_fused_attention


def _read_recompute(row: PublishedRow, device: Device, assumed: Counter[str]) -> tuple[str, str]:
    """Return the recomputation, and the recomputed modules if it was selective."""
    words = row.labels["activation_checkpointing"]
    if words not in _RECOMPUTE:
        raise UnusableRowError(f"activation checkpointing {words!r} is not modelled")
    if words:
        return _RECOMPUTE[words]
    own = None
    if row.preset is not None:
        own = recomputed_modules(row.preset, device, row.labels["dtype"], _software_of(row, device))
    if own is not None:
        assumed["do not state activation checkpointing: selective, as in NVIDIA's recipes"] += 1
        return "selective", own
    assumed["do not state activation checkpointing: none"] += 1
    return _RECOMPUTE[words]


def _software_of(row: PublishedRow, device: Device) -> str:
    """Return the generation of software; mixtures of experts have generations of their own."""
    if row.preset is None:
        return software_of(row.source, row.labels.get("framework", ""))
    return software_of_experts(row.source, row.preset, device, row.labels["dtype"], row.count("pp"))


def _make_config(row: PublishedRow) -> TransformerConfig:
    """Build the model: Llama's layers with a gated MLP, GPT's without (the table states no more)."""
    gated = row.number("gated_mlp", 0.0) > 0.0
    return TransformerConfig(
        name=row.labels["model"],
        hidden_size=row.count("hidden_size"),
        num_layers=row.count("num_layers"),
        num_heads=row.count("num_attention_heads"),
        num_kv_heads=row.count("num_kv_heads", row.number("num_attention_heads")),
        intermediate_size=row.count("ffn_hidden_size"),
        vocab_size=row.count("vocab_size"),
        max_position_embeddings=row.count("seq_len"),
        fused_qkv=True,
        gated_mlp=gated,
        fused_gate_up=gated,
        norm="rmsnorm" if gated else "layernorm",
        norm_bias=not gated,
        qkv_bias=not gated,
        attention_out_bias=not gated,
        mlp_bias=not gated,
        position_embedding="rotary" if gated else "learned",
        tied_embeddings=not gated,
    )


def _pieces_of_experts(row: PublishedRow, assumed: Counter[str]) -> int | None:
    """Return the tensor parallel degree of experts, which no table states; None for Megatron's default.

    NVIDIA's recipes with experts do not shard them (``expert_tensor_parallel_size = 1``), and an expert parallel degree
    that replicas alone cannot hold implies the same.
    """
    if row.preset is None or row.count("tp") == 1:
        return None
    replicas = row.count("num_gpus") // (row.count("tp") * row.count("pp"))
    if row.is_nvidia or replicas % row.count("ep", 1.0):
        assumed["use tensor parallelism and do not state it for experts: experts are not sharded"] += 1
        return 1
    return None


def _num_chunks(num_layers: int, num_stages: int, num_chunks: int, assumed: Counter[str]) -> int:
    """Return the model chunks per stage; Megatron can count embedding and head as layers, so there may be two more."""
    if num_stages == 1:
        return 1
    if num_stages * num_chunks <= num_layers or num_stages * num_chunks > num_layers + 2:
        return num_chunks
    assumed["count embedding and head as layers: one chunk per stage less"] += 1
    return num_chunks - 1


def _read_dtype(word: str) -> str:
    """Return the element format of the GEMMs from names such as ``amp_bf16``, ``fp16/bf16 mixed`` or ``fp8-cs``."""
    for mark, name in (("nvfp4", "fp4"), ("fp8", "fp8"), ("fp16", "fp16"), ("bf16", "bf16")):
        if mark in word:
            return name
    raise UnusableRowError("not stated: dtype")


def _read_zero_stage(row: PublishedRow, assumed: Counter[str]) -> int:
    """Return the sharding over replicas from names such as ``FULL_SHARD/PURE``, ``FSDP2`` or ``ZeRO-1``.

    NeMo's and Megatron-Bridge's recipes shard optimizer states over replicas (their distributed optimizer) also if the
    table states DDP or nothing; with whole states most of their published layouts would not fit their devices.
    """
    words = row.labels["fsdp_zero"]
    if "ZeRO-3" in words or "FSDP" in words or "FULL_SHARD" in words:
        return 3
    if row.is_nvidia and "ZeRO" not in words:
        assumed["are from NeMo and state no sharding: optimizer states sharded over replicas"] += 1
        return 1
    return 2 if "SHARD_GRAD_OP" in words else 1 if "ZeRO-1" in words else 0


def price(columns: Columns, context: Context, *, table: str) -> Iterator[Chunk]:
    """Predict every complete row; the library is the first word of the source, parts are sources and models.

    Mixtures of experts and rows that train adapters are tables of their own, such as ``training_mlperf/lora``.
    """
    for run in read_runs(columns, context, has_experts=None):
        try:
            prediction = predict(
                run.config,
                device=context.with_pricing(run.device),
                workload=run.workload,
                layout=run.layout,
                software=run.software,
            )
        except ShapewrightError as error:
            context.skipped[str(error)] += 1
            continue
        yield Chunk(
            table=f"{table}{'/moe' if run.config.is_moe else ''}{'/lora' if run.workload.has_adapters else ''}",
            device=run.device.name,
            dtype=run.workload.dtype,
            library=run.source.split(" ")[0],
            part=f"{run.source}: {run.config.name}",
            measured=np.array([run.tokens_per_s_per_device]),
            prices=_prices_of(prediction),
            seconds=np.array([run.step_s]),
        )


def _prices_of(prediction: Prediction) -> Prices:
    """Return tokens per second and device; the longest step gives the lowest throughput."""
    tokens = prediction.tokens_per_step / prediction.layout.num_devices
    roofline_s = roofline_step_s(prediction.operations, prediction.config, prediction.workload, prediction.layout)
    return Prices(
        predicted=np.array([tokens / prediction.step_time_s]),
        low=np.array([tokens / prediction.step_time_high_s]),
        high=np.array([tokens / max(prediction.step_time_low_s, 1e-12)]),
        roofline=np.array([tokens / roofline_s]),
    )
