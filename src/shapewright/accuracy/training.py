"""published_training_throughput.csv: tokens per second and device that vendors and labs published.

Judged are pre-training rows that state shape, batches, layout and a time, each as the generation of software that its
source names would run it. What a row leaves open is taken as that software did it, and said: no recomputation and
fused attention where checkpointing and attention are not stated; sequence parallelism where attention is fused (both
came to Megatron in 2022); optimiser states sharded over replicas where NeMo states no sharding; and what follows from
the rest (accuracy.training_gaps). MFU is not used, and TFLOP/s where their convention is known alone: they differ. Here
the bias is of tokens/s: above zero means promising too much.

Rows of mixtures of experts state layout and batches but not the model's shape, which is that of the preset they name.
They are a table of their own, ``published_training_throughput/moe``; which generation ran them is in
accuracy.training_software. What NVIDIA's recipes state and its tables do not is read from the recipes: optimiser states
sharded over replicas, gradients summed in 16 bits (``grad_reduce_in_fp32 = False``), and products in fp8 and fp4 by
Transformer Engine, which keeps their inputs as narrow as it read them (pytorch/module/linear.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.accuracy.chunk import Chunk, Prices
from shapewright.accuracy.read import Format
from shapewright.accuracy.training_gaps import fill_gaps, preset_of
from shapewright.accuracy.training_software import (
    NVIDIA,
    software_of,
    software_of_experts,
)
from shapewright.adding_up import add_up
from shapewright.config import TransformerConfig, read_model
from shapewright.errors import ShapewrightError
from shapewright.layout import ParallelLayout
from shapewright.predict import predict
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.accuracy.columns import Columns
    from shapewright.accuracy.context import Context
    from shapewright.hardware import Device
    from shapewright.predict import Prediction

    Number = Callable[..., float]

# A row without one of these has no full configuration.
_NEEDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "vocab_size",
    "seq_len",
    "micro_batch",
    "global_batch",
    "num_gpus",
    "tp",
    "pp",
)
# What a preset says of a model that is named.
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size")
_OTHER_COUNTS = ("num_kv_heads", "vp", "cp", "ep")
_LARGEST_COUNT = 1e9
FORMAT = Format(
    numbers={},
    labels=("source", "model", "gpu", "dtype", "fsdp_zero", "activation_checkpointing"),
    optional=(
        *_NEEDED,
        "num_kv_heads",
        "gated_mlp",
        "moe",
        "vp",
        "cp",
        "ep",
        "sequence_parallel",
        "flash_attention",
        "tokens_per_s_per_gpu",
        "tflops_per_gpu",
        "iter_time_s",
    ),
)
_RECOMPUTE = {"": "none", "none": "none", "full": "full", "selective": "selective", "selective op": "selective"}
# Its table 2 sets DeepSpeed's ZeRO-3 of its time beside Megatron's pipelines: 1.6 to 5 times slower than their links
# allow, the more devices the slower, and no other row tells of that software.
_PTD_P = "2104.04473"
_UNFUSED_ARCHITECTURES = ("volta", "turing")


@dataclass(frozen=True)
class PublishedRun:
    """One published row, complete.

    Attributes:
        source: Who published it.
        software: Generation of software that the source names.
        device: What it ran on.
        config: The model.
        workload: Batches, length and element format.
        layout: How it was spread.
        tokens_per_s_per_device: What was measured.
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


class _UnusableRowError(ShapewrightError):
    """A row lacks something, or describes what is not predicted."""


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Predict every complete row; the library is the first word of the source, parts are sources and models."""
    for run in read_runs(columns, context, has_experts=None):
        try:
            prediction = predict(
                run.config,
                device=context.priced(run.device),
                workload=run.workload,
                layout=run.layout,
                uncalibrated=context.uncalibrated,
                software=run.software,
            )
        except ShapewrightError as error:
            context.skipped[str(error)] += 1
            continue
        yield Chunk(
            table=f"published_training_throughput{'/moe' if run.config.is_moe else ''}",
            device=run.device.name,
            dtype=run.workload.dtype,
            library=run.source.split(" ")[0],
            part=f"{run.source}: {run.config.name}",
            measured=np.array([run.tokens_per_s_per_device]),
            prices=_prices_of(prediction),
            seconds=np.array([run.step_s]),
        )


def read_runs(columns: Columns, context: Context, *, has_experts: bool | None = False) -> Iterator[PublishedRun]:
    """Complete the rows that can be; why others cannot is counted in the context.

    Args:
        columns: The table.
        context: How it is judged.
        has_experts: Whether models have experts; None for both kinds.
    """
    assumed: Counter[str] = Counter()
    for (gpu,), rows in columns.groups("gpu"):
        device = context.device_of(gpu, rows.num_rows)
        for row in range(rows.num_rows if device else 0):
            assert device is not None
            try:
                run = _read_run(rows, row, device, assumed)
            except ShapewrightError as error:
                context.skipped[str(error)] += 1
            else:
                if has_experts in (None, run.config.is_moe):
                    yield run
        context.advance(rows.num_rows)
    if assumed:
        listed = "; ".join(f"{count} rows {what}" for what, count in assumed.most_common())
        context.note(f"published_training_throughput: tokens/s, a bias above 0 promises too much; assumed: {listed}")


def _prices_of(prediction: Prediction) -> Prices:
    """Tokens per second and device; the longest step makes the lowest of them."""
    tokens = prediction.tokens_per_step / prediction.layout.num_devices
    bounds = [
        replace(entry, price=replace(entry.price, time_s=entry.price.roofline_s)) for entry in prediction.operations
    ]
    roofline_s = add_up(bounds, prediction.config, prediction.workload, prediction.layout).step_s
    return Prices(
        predicted=np.array([tokens / prediction.step_time_s]),
        low=np.array([tokens / prediction.step_time_high_s]),
        high=np.array([tokens / max(prediction.step_time_low_s, 1e-12)]),
        roofline=np.array([tokens / roofline_s]),
    )


def _read_run(rows: Columns, row: int, device: Device, assumed: Counter[str]) -> PublishedRun:
    """Complete one row.

    Raises:
        _UnusableRowError: it lacks a field, or is no pre-training.
        ShapewrightError: its fields contradict each other.
    """
    model, source = rows.labels["model"][row], rows.labels["source"][row]
    if "(SFT)" in source:
        raise _UnusableRowError("fine-tuning on packed sequences")
    if source.startswith(_PTD_P) and "ZeRO-3" in rows.labels["fsdp_zero"][row]:
        raise _UnusableRowError("ZeRO-3 of 2021, whose communication took a multiple of what its links allow")
    found: Counter[str] = Counter()
    numbers = fill_gaps({name: float(column[row]) for name, column in rows.numbers.items()}, model, source, found)

    def number(name: str, default: float = np.nan) -> float:
        value = numbers[name]
        return default if np.isnan(value) else value

    preset = preset_of(model) if number("moe", 0.0) > 0.0 else None
    is_known = preset is not None
    if number("moe", 0.0) > 0.0 and not is_known:
        raise _UnusableRowError("mixture of experts whose shape is not stated and that names no preset as it is")
    needed = [name for name in _NEEDED if not (is_known and name in _SHAPE)]
    missing = [name for name in needed if not number(name, 0.0) > 0.0]
    if missing:
        raise _UnusableRowError(f"not stated: {', '.join(missing)}")
    for name in (*needed, *_OTHER_COUNTS):
        value = number(name, 1.0)
        if not 0.0 < value <= _LARGEST_COUNT or value != int(value):
            raise _UnusableRowError(f"{name}={value:g} is no whole number from 1 to {_LARGEST_COUNT:g}")
    dtype = _read_dtype(rows.labels["dtype"][row])
    sharded = int(number("tp")) * int(number("pp")) * int(number("cp", 1.0))
    if int(number("num_gpus")) % sharded:
        raise _UnusableRowError("num_gpus is not a multiple of tp * pp * cp")
    if number("num_gpus") > device.node_size and device.inter_node_bandwidth_bytes_per_s is None:
        raise _UnusableRowError(f"{device.name} has no rate between nodes")
    measured = number("tokens_per_s_per_gpu")
    if np.isnan(measured):
        measured = number("global_batch") * number("seq_len") / number("iter_time_s") / number("num_gpus")
    if not measured > 0.0:
        raise _UnusableRowError("neither tokens/s nor the time of a step is stated")
    assumed.update(found)
    fused = number("flash_attention")
    if np.isnan(fused):
        fused = float(device.architecture not in _UNFUSED_ARCHITECTURES)
        assumed["do not state their attention: fused where the device has it"] += 1
    checkpointing = rows.labels["activation_checkpointing"][row]
    if checkpointing not in _RECOMPUTE:
        raise _UnusableRowError(f"activation checkpointing {checkpointing!r} is not modelled")
    if not checkpointing:
        assumed["do not state activation checkpointing: none"] += 1
    software = software_of(source)
    own_software = software
    if preset is not None:
        config = read_model(preset).config
        words, num_stages = rows.labels["dtype"][row], int(number("pp"))
        own_software = software_of_experts(source, preset, device, words, num_stages)
    else:
        config = _make_config(number, name=model)
    return PublishedRun(
        source=source,
        software=own_software,
        device=device,
        config=config,
        workload=Workload(
            micro_batch_size=int(number("micro_batch")),
            global_batch_size=int(number("global_batch")),
            seq_len=int(number("seq_len")),
            dtype=dtype,
            attention="flash" if fused else "unfused",
            optimizer="adamw-narrow-gradients" if software == NVIDIA else "adamw",
            narrow_inputs=software == NVIDIA and dtype in ("fp8", "fp4"),
            recompute=_RECOMPUTE[checkpointing],
        ),
        layout=ParallelLayout(
            tensor_parallel=int(number("tp")),
            pipeline_parallel=int(number("pp")),
            data_parallel=int(number("num_gpus")) // sharded,
            context_parallel=int(number("cp", 1.0)),
            expert_parallel=int(number("ep", 1.0)) if is_known else 1,
            virtual_pipeline=_num_chunks(config.num_layers, int(number("pp")), int(number("vp", 1.0)), assumed),
            sequence_parallel=bool(number("sequence_parallel", fused)),
            zero_stage=_read_zero_stage(rows.labels["fsdp_zero"][row], software, assumed),
        ),
        tokens_per_s_per_device=measured,
    )


def _make_config(number: Number, *, name: str) -> TransformerConfig:
    """The model: Llama's layers with a gated MLP, GPT's without (the table says no more)."""
    gated = number("gated_mlp", 0.0) > 0.0
    return TransformerConfig(
        name=name,
        hidden_size=int(number("hidden_size")),
        num_layers=int(number("num_layers")),
        num_heads=int(number("num_attention_heads")),
        num_kv_heads=int(number("num_kv_heads", number("num_attention_heads"))),
        intermediate_size=int(number("ffn_hidden_size")),
        vocab_size=int(number("vocab_size")),
        max_position_embeddings=int(number("seq_len")),
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


def _num_chunks(num_layers: int, num_stages: int, num_chunks: int, assumed: Counter[str]) -> int:
    """Model chunks of each stage; Megatron can count embedding and head as layers, so that there may be two more."""
    if num_stages == 1:
        return 1
    if num_stages * num_chunks <= num_layers or num_stages * num_chunks > num_layers + 2:
        return num_chunks
    assumed["count embedding and head as layers: one chunk per stage less"] += 1
    return num_chunks - 1


def _read_dtype(word: str) -> str:
    """Element format of the products from words such as ``amp_bf16``, ``fp16/bf16 mixed`` or ``fp8-cs``."""
    for mark, name in (("nvfp4", "fp4"), ("fp8", "fp8"), ("fp16", "fp16"), ("bf16", "bf16")):
        if mark in word:
            return name
    raise _UnusableRowError("not stated: dtype")


def _read_zero_stage(word: str, software: str, assumed: Counter[str]) -> int:
    """Sharding over replicas from words such as ``FULL_SHARD/PURE``, ``FSDP2`` or ``ZeRO-1``.

    NeMo's and Megatron-Bridge's recipes shard optimiser states over replicas (their distributed optimizer) also where
    the table says DDP or nothing; with whole states most of their published layouts would not fit their devices.
    """
    if "ZeRO-3" in word or "FSDP" in word or "FULL_SHARD" in word:
        return 3
    if software == NVIDIA and "ZeRO" not in word:
        assumed["are of NeMo and state no sharding: optimiser states over replicas"] += 1
        return 1
    return 2 if "SHARD_GRAD_OP" in word else 1 if "ZeRO-1" in word else 0
