"""Fine-tuning: trained parameters, frozen weights and adapters, FLOPs, memory, packed documents, plans."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.app.formats.registry import write_format
from shapewright.core.errors import LayoutError, ShapewrightError, WorkloadError
from shapewright.lowering.flops import count_model_flops
from shapewright.lowering.model import lower, lower_parts
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.memory.estimate import estimate_memory
from shapewright.memory.frozen import list_kept_tensors, temporary_weight_bytes
from shapewright.memory.stages import Stage
from shapewright.memory.states import count_stage_parameters, count_trained_parameters
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.finetuning import pack_sequence
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

ONE = ParallelLayout()
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"finetune": "lora"},
    "qlora": {"finetune": "qlora"},
    "dora": {"finetune": "dora", "lora_targets": "q,v"},
    "attention": {"finetune": "lora", "lora_rank": 8, "lora_targets": "attention"},
    "last-layers": {"finetune": "last-layers", "last_layers": 4},
}


def config_of(name: str) -> TransformerConfig:
    """Config of a preset."""
    return read_model(name).config


@pytest.mark.parametrize(
    ("preset", "fields", "expected"),
    [
        # r (n + k) of each adapted matrix and layer; q and v of 4096 x 4096: 2 x 8 x 8192 x 32
        ("llama-2-7b", {"lora_rank": 8, "lora_targets": "q_proj,v_proj"}, 4_194_304),
        # 16 x (4 x 8192 + 3 x (4096 + 11008)) x 32
        ("llama-2-7b", {"lora_rank": 16}, 39_976_960),
        # 16 x (8192 + 2 x 5120 + 8192 + 3 x 18432) x 32
        ("llama-3-8b", {"lora_rank": 16, "lora_targets": "all-linear"}, 41_943_040),
        # 16 x (2 x 16384 + 2 x 9216) x 80
        ("llama-2-70b", {"lora_rank": 16, "lora_targets": "attention"}, 65_536_000),
    ],
)
def test_adapters_equal_hand_counts(preset: str, fields: dict[str, Any], expected: int) -> None:
    """Trained parameters of published adapters, counted by hand from the matrices."""
    workload = Workload(finetune="lora", **fields)
    assert count_trained_parameters(config_of(preset), workload) == expected


def test_dora_has_a_magnitude_for_each_output() -> None:
    """DoRA trains one number more for each output feature of an adapted matrix."""
    lora, dora = (
        count_trained_parameters(config_of("llama-2-7b"), Workload(finetune=method, lora_targets="q"))
        for method in ("lora", "dora")
    )
    assert dora - lora == 32 * 4096


@pytest.mark.parametrize("preset", ["llama-3-8b", "gpt2", "mixtral-8x7b", "deepseek-v2-lite", "flan-t5-base"])
@pytest.mark.parametrize("method", ["lora", "attention"])
def test_lowered_adapters_equal_counted_ones(preset: str, method: str) -> None:
    """The adapters' weights of the lowered GEMMs are those that memory counts, in every kind of layer."""
    config, workload = config_of(preset), Workload(**METHODS[method], micro_batch_size=1, seq_len=64)
    groups = lower_parts(config, workload, ONE).groups
    assert sum(group.num_trained for group in groups) == count_trained_parameters(config, workload)


@pytest.mark.parametrize("tensor_parallel", [2, 8])
def test_adapters_are_sharded_with_their_weights(tensor_parallel: int) -> None:
    """On a tensor axis both counts follow the shard of each matrix."""
    config, layout = config_of("llama-3-8b"), ParallelLayout(tensor_parallel=tensor_parallel)
    workload = Workload(finetune="lora", micro_batch_size=1)
    stage = Stage(config, layout, 0)
    counted = count_stage_parameters(stage, count_parameters(config), workload).trained_dense
    assert counted == sum(group.num_trained for group in lower_parts(config, workload, layout).groups)


@pytest.mark.parametrize("method", ["lora", "qlora", "dora", "attention"])
def test_frozen_weights_have_no_gradient(method: str) -> None:
    """The only weight gradients are those of adapters; embedding and logits have none."""
    operations = lower(config_of("llama-3-8b"), Workload(**METHODS[method], micro_batch_size=1), ONE)
    weighted = [one for one in operations if isinstance(one, Gemm | GroupedGemm) and one.gradient == "wgrad"]
    assert weighted
    assert all(one.is_adapter for one in weighted)
    assert not any(one.block == "embedding" and one.pass_name == "backward" for one in operations)


def test_frozen_norms_leave_out_the_gradient_of_their_weights() -> None:
    """A fused norm's gradient is one kernel, that of PyTorch's chain 14 of 16: without a product and its sum in bf16.

    Of 2 x 36 bytes read and 20 written an element, those read 4 + 2 and write 2.
    """
    config, elements = config_of("llama-3-8b"), 128 * 4096
    for kernels, sizes in ((None, (4, 2, 1)), ("torch", (72 - 6, 20 - 2, 14))):
        job = Workload(finetune="lora", micro_batch_size=1, seq_len=128, kernels=kernels)
        gradient = next(one for one in lower(config, job, ONE) if (one.block, one.gradient) == ("norm", "backward"))
        assert isinstance(gradient, Pointwise)
        found = (gradient.read_bytes / elements, gradient.written_bytes / elements, gradient.num_kernels)
        assert found == sizes


def test_frozen_weights_cost_four_flops_per_token() -> None:
    """2 FLOPs forward and 2 for the input gradient of each frozen weight; adapters cost 6."""
    config = config_of("llama-3-8b")
    tokens = 2048
    workload = Workload(finetune="lora", micro_batch_size=1, seq_len=tokens)
    full = count_model_flops(config, Workload(micro_batch_size=1, seq_len=tokens))
    # Attention: 4 x h x s^2 per layer forward, twice that backward.
    attention = 32 * 3 * 4.0 * 4096 * tokens**2
    weights = (full - attention) / (6 * tokens)
    expected = attention + tokens * (4 * weights + 6 * 41_943_040)
    assert count_model_flops(config, workload) == pytest.approx(expected, rel=1e-12)


def test_layers_below_the_trained_ones_run_forward_only() -> None:
    """With the last 4 of 32 layers trained, the backward pass of layers costs an eighth, that of the logits half."""
    config = config_of("llama-3-8b")
    layers = [config, replace(config, num_layers=4)]
    jobs = [Workload(finetune="last-layers", last_layers=4), Workload()]
    backward = [
        sum(
            one.flops * one.repeats
            for one in lower(model, job, ONE)
            if one.pass_name == "backward" and one.block != "logits"
        )
        for model, job in zip(layers, jobs, strict=True)
    ]
    assert backward[0] == backward[1]
    assert count_trained_parameters(config, jobs[0]) == 4 * 218_112_000


def test_a_full_fine_tune_is_plain_training() -> None:
    """--finetune full changes nothing."""
    config = config_of("gpt2")
    assert lower(config, Workload(finetune="full"), ONE) == lower(config, Workload(), ONE)


def test_quantized_weights_are_converted_in_both_passes() -> None:
    """QLoRA reads 4-bit weights and writes 16-bit ones before each GEMM of either pass: 7 x 2 conversions a layer."""
    operations = lower(config_of("llama-3-8b"), Workload(finetune="qlora", micro_batch_size=1), ONE)
    converted = [one for one in operations if one.is_conversion]
    assert len(converted) == 14
    gate = next(one for one in converted if one.role.startswith("gate"))
    assert isinstance(gate, Pointwise)
    weights = 14336 * 4096
    assert gate.written_bytes == 2 * weights
    assert gate.read_bytes == pytest.approx(weights * (0.5 + 0.127 / 8), rel=0.001)


def test_recomputation_converts_weights_again() -> None:
    """Full recomputation repeats the adapters and the conversions of the forward pass."""
    workload = Workload(finetune="qlora", micro_batch_size=1, recompute="full")
    operations = lower(config_of("llama-3-8b"), workload, ONE)
    passes = {one.pass_name for one in operations if one.is_conversion}
    assert passes == {"forward", "recompute", "backward"}


def test_qlora_fits_where_lora_does_not() -> None:
    """Llama-2 70B with 4-bit frozen weights fits 48 GB (arXiv 2305.14314, abstract); 16-bit ones take 138 GB."""
    fields: dict[str, Any] = {"micro_batch_size": 1, "seq_len": 512, "recompute": "full", "lora_rank": 16}
    config = config_of("llama-2-70b")
    qlora, lora = (
        estimate_memory(config, Workload(finetune=method, optimizer="adamw-8bit", **fields), ONE)
        for method in ("qlora", "lora")
    )
    assert qlora.total_bytes < 48e9
    assert 137e9 < lora.weights_bytes < 139e9


def test_zero_3_shards_frozen_weights_and_gathers_them_as_stored() -> None:
    """With ZeRO stage 3 a rank keeps its share of the frozen weights, and gathers 4-bit ones in 4 bits."""
    config, layout = config_of("llama-3-8b"), ParallelLayout(data_parallel=8, zero_stage=3)
    qlora, lora = Workload(finetune="qlora", micro_batch_size=1), Workload(finetune="lora", micro_batch_size=1)
    whole, sharded = (
        estimate_memory(config, qlora, each).weights_bytes for each in (ParallelLayout(data_parallel=8), layout)
    )
    assert sharded == pytest.approx(whole / 8)
    gathered = [
        sum(
            one.message_bytes * one.repeats
            for one in lower(config, job, layout)
            if one.name == "layers.weights.all_gather"
        )
        for job in (qlora, lora)
    ]
    assert gathered[0] < 0.3 * gathered[1]


def test_zero_3_shards_frozen_experts_over_their_own_replicas() -> None:
    """Where experts are spread over all ranks, only the other weights are sharded further."""
    config, workload = config_of("mixtral-8x7b"), Workload(finetune="lora", lora_targets="q", micro_batch_size=1)
    plain, spread, sharded = (
        estimate_memory(config, workload, layout).weights_bytes
        for layout in (
            ParallelLayout(data_parallel=8),
            ParallelLayout(data_parallel=8, expert_parallel=8),
            ParallelLayout(data_parallel=8, expert_parallel=8, zero_stage=3),
        )
    )
    experts_bytes = (plain - spread) * 8 / 7
    assert sharded == pytest.approx((plain - experts_bytes) / 8 + experts_bytes / 8)


def test_adapters_of_experts_keep_a_row_for_each_expert_of_a_token() -> None:
    """Each further rank keeps one bf16 number for each of two experts a token, in gate_up and in down of 32 layers."""
    config = config_of("mixtral-8x7b")
    narrow, wide = (
        estimate_memory(
            config,
            Workload(finetune="lora", micro_batch_size=1, seq_len=512, lora_targets="gate,up,down", lora_rank=rank),
            ONE,
        ).activations_bytes
        for rank in (16, 48)
    )
    assert wide - narrow == 32 * 2 * (512 * 2) * 2 * 32


def test_inputs_of_frozen_layers_are_not_saved() -> None:
    """Without adapters in the MLP its frozen matrices need no inputs: less is saved than with them."""
    config = config_of("llama-3-8b")
    full, every, attention = (
        estimate_memory(config, Workload(**fields), ONE).activations_bytes
        for fields in ({}, METHODS["lora"], {"finetune": "lora", "lora_targets": "attention"})
    )
    assert attention < full < every * 1.0001
    saved = 32 * 2 * 4 * 2048 * (4096 + 14336)  # input of gate and up, and of down
    adapters = 32 * 2 * 4 * 2048 * 16 * 3
    assert every - attention == saved + adapters


def test_mfu_counts_frozen_weights() -> None:
    """MFU of a measured LoRA step uses its own FLOPs, two thirds of those of full training."""
    common: dict[str, Any] = {"device": "h100-sxm-80gb", "seconds": 1.0, "num_devices": 8, "global_batch_size": 64}
    full, lora = (
        shapewright.mfu("llama-3-8b", workload={"finetune": method}, **common).result.mfu for method in ("full", "lora")
    )
    assert 0.66 < lora / full < 0.70


@pytest.mark.parametrize("convention", ["megatron", "megatron-causal", "torchtitan", "llm-foundry", "6n"])
def test_every_convention_counts_frozen_weights(convention: str) -> None:
    """Each convention loses the same FLOPs of weight gradients, and gains the same of adapters."""
    common: dict[str, Any] = {"device": "h100-sxm-80gb", "seconds": 1.0, "num_devices": 8, "global_batch_size": 64}
    full, lora = (
        next(
            result.flops.model_flops
            for result in shapewright.mfu("llama-3-8b", workload={"finetune": method}, **common).conventions
            if result.name == convention
        )
        for method in ("full", "lora")
    )
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # without embedding and norms
    assert full - lora == pytest.approx(64 * 2048 * (2 * weights - 6 * 41_943_040), rel=1e-9)


def test_documents_attend_to_themselves() -> None:
    """Attention FLOPs of packed documents are the sum of their squares, forward and backward."""
    config = config_of("llama-3-8b")
    workload = Workload(packed="512,1024", seq_len=2048, micro_batch_size=2)  # and one document of the rest, 512
    calls = [one for one in lower(config, workload, ONE) if isinstance(one, Attention)]
    forward = sum(one.flops * one.repeats for one in calls if not one.is_backward)
    assert forward == 32 * 2 * 4 * 4096 * (1024**2 + 2 * 512**2)
    assert sum(one.flops * one.repeats for one in calls if one.is_backward) == 2 * forward


def test_many_documents_are_merged_with_their_pairs() -> None:
    """A sequence of many lengths keeps its tokens, and its query-key pairs within a percent."""
    lengths = pack_sequence("mean:300", 32768)
    assert sum(lengths) == 32768
    calls = [
        one
        for one in lower(config_of("llama-3-8b"), Workload(packed="mean:300", seq_len=32768, micro_batch_size=1), ONE)
        if isinstance(one, Attention) and not one.is_backward
    ]
    assert len(calls) <= 8
    assert sum(one.batch_size * one.query_len**2 for one in calls) == pytest.approx(
        sum(one * one for one in lengths), rel=0.01
    )


@pytest.mark.parametrize("mean", [1, 3, 700, 10**12])
@pytest.mark.parametrize("seq_len", [1, 1000, 131072])
def test_drawn_documents_fill_the_sequence(mean: int, seq_len: int) -> None:
    """Documents of any mean length have at least a token each and fill the sequence exactly."""
    lengths = pack_sequence(f"mean:{mean}", seq_len)
    assert sum(lengths) == seq_len
    assert min(lengths) > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_rank": 8}, "requires finetune='lora'"),
        ({"finetune": "lora", "lora_targets": "gate_pu"}, "did you mean"),
        ({"finetune": "lora", "lora_rank": 0}, "lora_rank=0"),
        ({"finetune": "lora", "lora_dropout": 1.0}, "below 1"),
        ({"finetune": "last-layers"}, "last_layers"),
        ({"finetune": "lora", "phase": "decode"}, "has no effect in decode"),
        ({"packed": "512;64"}, "packed="),
        ({"packed": "4096", "seq_len": 2048}, "more than seq_len"),
        ({"packed": "mean:0"}, "mean:700"),
        ({"packed": "512", "attention": "unfused"}, "flash"),
        ({"weight_dtype": "fp8"}, "finetune='qlora'"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], words: str) -> None:
    """Each message names the field and what to do."""
    with pytest.raises(WorkloadError, match=words):
        Workload(**fields)


def test_targets_that_the_model_lacks_are_refused() -> None:
    """A part of a fused projection, or a gate that the model does not have, is an error with the model's GEMMs."""
    with pytest.raises(WorkloadError, match="qkv"):
        lower(config_of("gpt2"), Workload(finetune="lora", lora_targets="q,v"), ONE)


@pytest.mark.parametrize("fields", [{"finetune": "last-layers", "last_layers": 2}, {"packed": "64"}])
def test_encoder_decoders_have_no_last_layers_and_no_documents(fields: dict[str, Any]) -> None:
    """Both are refused for two stacks, where the last layers of one read the output of the other."""
    with pytest.raises(WorkloadError, match="encoder-decoder"):
        lower(config_of("t5-base"), Workload(seq_len=128, **fields), ONE)


def test_ranks_above_the_width_are_refused() -> None:
    """A rank above the width of the model is no low-rank adapter."""
    with pytest.raises(WorkloadError, match="exceeds hidden_size=768"):
        lower(config_of("gpt2"), Workload(finetune="lora", lora_rank=1024), ONE)


def test_packed_documents_are_not_split_over_a_context_axis() -> None:
    """Context parallelism over documents is refused."""
    with pytest.raises(LayoutError, match="context_parallel"):
        lower(config_of("llama-3-8b"), Workload(packed="512"), ParallelLayout(context_parallel=2))


def test_a_loss_is_not_predicted_for_fine_tuning() -> None:
    """The loss law describes training from scratch, so that a search by loss is refused."""
    with pytest.raises(ShapewrightError, match="objective='time'"):
        shapewright.search(
            "llama-3.2-1b", device="h100-sxm-80gb", workload={"finetune": "lora"}, objective="time-to-loss"
        )


def test_files_of_trainers_do_not_leave_adapters_out() -> None:
    """A format that describes full training refuses adapters; one whose script defines the model does not."""
    config, workload = config_of("llama-3-8b"), Workload(finetune="lora", global_batch_size=8)
    with pytest.raises(WorkloadError, match="describes full training"):
        write_format("megatron-args", config, workload=workload, layout=ONE)
    assert "train_batch_size" in write_format("deepspeed-json", config, workload=workload, layout=ONE)


@pytest.mark.parametrize(("method", "matrices"), [("lora", 0), ("qlora", 1), ("dora", 2)])
def test_converted_weights_exist_for_one_gemm(method: str, matrices: int) -> None:
    """QLoRA converts the largest matrix of Llama-2 7B, 4096 x 11008, to 16 bits; DoRA holds B A and its sum with it."""
    config = config_of("llama-2-7b")
    size = temporary_weight_bytes(config, Workload(finetune=method), ONE, config.patterns.kind_of(0))

    assert size == matrices * 4096 * 11008 * 2


def test_inference_trains_nothing() -> None:
    """No parameter is trained outside a training step."""
    assert count_trained_parameters(config_of("llama-2-7b"), Workload(phase="prefill")) == 0


def test_an_adapter_by_hand() -> None:
    """64 tokens of 4096 through rank 8 and back: a dropped input with a mask of a byte, two GEMMs, and a sum of two."""
    workload = Workload(
        finetune="lora", lora_rank=8, lora_targets="q", lora_dropout=0.1, micro_batch_size=1, seq_len=64
    )
    operations = {one.name: one for one in lower(config_of("llama-2-7b"), workload, ONE)}
    dropout, added = operations["attention.q.lora_dropout"], operations["attention.q.lora_add"]
    inner, outer = operations["attention.q.lora_a"], operations["attention.q.lora_b"]

    assert isinstance(dropout, Pointwise)
    assert isinstance(added, Pointwise)
    assert isinstance(inner, Gemm)
    assert isinstance(outer, Gemm)
    assert (dropout.read_bytes, dropout.written_bytes) == (64 * 4096 * 2, 64 * 4096 * 3)
    assert (inner.m, inner.n, inner.k) == (64, 8, 4096)
    assert (outer.m, outer.n, outer.k) == (64, 4096, 8)
    assert (added.read_bytes, added.written_bytes) == (2 * 64 * 4096 * 2, 64 * 4096 * 2)


def test_a_check_keeps_the_shape_of_given_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """No other heads, layers or widths are suggested for weights that exist; their cost is information."""
    job = ["check", "gpt3-2.7b", "--device", "a100-sxm-40gb", "--micro-batch-size", "1"]
    _, trained, _ = run([*job, "--json"], capsys)
    _, tuned, _ = run([*job, "--finetune", "lora", "--json"], capsys)
    changed = {
        name for finding in json.loads(trained)["findings"] for one in finding["suggestions"] for name in one["changes"]
    }
    assert "num_heads" in changed

    found = json.loads(tuned)
    fixes = [*found["better_shapes"], *(one for finding in found["findings"] for one in finding["suggestions"])]
    assert {name for fix in fixes for name in fix["changes"]} == {"vocab_size", "micro_batch_size"}
    assert {"num_heads", "head_dim"}.isdisjoint(found["combined_fix"]["changes"])
    (heads,) = (finding for finding in found["findings"] if finding["code"] == "TC103")
    assert heads["severity"] == "info"
    assert heads["cost_s"] > 0.0
    assert any("given weights" in note for note in found["notes"])


def test_the_next_command_of_a_check_keeps_given_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """A search for other shapes is no next step of fine-tuning."""
    _, out, _ = run(["check", "llama-3-8b", "--device", "rtx-4090", "--finetune", "qlora"], capsys)

    assert out.rstrip().endswith("next: shapewright memory llama-3-8b --device rtx-4090 --finetune qlora")


@pytest.mark.parametrize(
    "text", ["9" * 5000, "8x" + "9" * 5000, "9" * 5000 + "x8", "mean:" + "9" * 5000, "mean:\u00b2"]
)
def test_lengths_of_thousands_of_digits(text: str) -> None:
    """Python refuses to read such integers, and the message says what is asked for."""
    with pytest.raises(WorkloadError, match=r"packed=.*(such as 512,1536|give it as mean:700)"):
        pack_sequence(text, 4096)


def moved_bytes(**fields: Any) -> dict[str, tuple[float, float]]:
    """Bytes that operations of Llama-2 7B read and write in a step of 64 tokens, besides those of adapters of q."""
    workload = Workload(lora_rank=8, lora_targets="q", micro_batch_size=1, seq_len=64, **fields)
    return {
        one.name: (float(one.read_bytes), float(one.written_bytes))
        for one in lower(config_of("llama-2-7b"), workload, ONE)
        if isinstance(one, Pointwise) and one.pass_name == "forward"
    }


def test_dora_by_hand() -> None:
    """The norm of the rows reads W, then B A and their sum, and writes that; the scale moves each output once."""
    moved = moved_bytes(finetune="dora")
    weights, outputs = 4096 * 4096 * 2, 64 * 4096 * 2

    assert moved["attention.q.dora_norm"] == (3 * weights, weights)
    assert moved["attention.q.dora_scale"] == (outputs, outputs)


def test_stored_weights_are_converted_where_they_are_narrower() -> None:
    """Frozen matrices in 8 bits are written in 16; in the format of their GEMM they are read as they are."""
    moved = moved_bytes(finetune="lora", weight_dtype="fp8")
    converted = {name: moved[name] for name in moved if name.endswith("dequantize")}

    assert set(converted) == {
        f"{name}.dequantize"
        for name in ("attention.q", "attention.k", "attention.v", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert converted["mlp.down.dequantize"] == (4096 * 11008, 2 * 4096 * 11008)
    for same in ({}, {"weight_dtype": "bf16"}, {"dtype": "fp8", "weight_dtype": "fp8"}):
        assert not [name for name in moved_bytes(finetune="lora", **same) if name.endswith("dequantize")]


def test_inputs_of_narrow_gemms_are_quantized_once() -> None:
    """q, out, gate and down read new inputs; the first of each block's readers takes what the norm writes."""
    moved = moved_bytes(finetune="lora", dtype="fp8")
    quantized = {name: moved[name] for name in moved if name.endswith("quantize")}

    narrow = 64 * 4096
    assert quantized == {
        "attention.q.quantize": (0, narrow),
        "attention.out.quantize": (2 * narrow, narrow),
        "mlp.gate.quantize": (0, narrow),
        "mlp.down.quantize": (2 * 64 * 11008, 64 * 11008),
    }
    assert not [name for name in moved_bytes(finetune="lora") if name.endswith("quantize")]


@pytest.mark.parametrize(
    ("targets", "shared", "kept"),
    [
        ("q", 64, {"attention.input"}),
        ("out", 64, set()),
        ("gate", 64, {"mlp.input", "moe.input"}),
        ("gate", 0, {"moe.input"}),
        ("down", 64, {"moe.down_input", "shared_expert.down_input"}),
    ],
)
def test_inputs_of_frozen_experts_are_not_kept(targets: str, shared: int, kept: set[str]) -> None:
    """Only what an adapter reads: the input of a layer of experts is that of the shared one, routed ones have copies.

    The output of attention is kept in any case, for its own backward pass.
    """
    config = TransformerConfig(
        hidden_size=64,
        num_layers=1,
        num_heads=4,
        vocab_size=100,
        gated_mlp=True,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=shared,
    )
    kind = config.kind_of_layer(0)
    found = {
        each.name
        for each in list_kept_tensors(
            config,
            Workload(finetune="lora", lora_targets=targets, micro_batch_size=1, seq_len=16),
            ONE,
            kind,
            has_cross_attention=False,
        )
    }

    inputs = {"attention.input", "mlp.input", "moe.input", "moe.down_input", "shared_expert.down_input"}
    assert found & inputs == kept
    assert "attention.output" in found
