"""Memory against the tables of the papers, Megatron-LM's own calculator, and hand-worked numbers."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from shapewright.core.errors import WorkloadError
from shapewright.core.units import GIB, MIB
from shapewright.lowering.model import lower
from shapewright.memory.activations import ActivationTerms, estimate_activation_terms, estimate_layer
from shapewright.memory.estimate import (
    CUDA_CONTEXT_BYTES,
    MemoryEstimate,
    count_cached_elements,
    count_microbatches_in_flight,
    estimate_kv_cache,
    estimate_memory,
    estimate_stage_caches,
    estimate_stages,
)
from shapewright.memory.saved_tensors import list_layer_tensors, list_saved_tensors
from shapewright.memory.stages import Stage
from shapewright.memory.states import DeviceParameters, count_stage_parameters, estimate_states
from shapewright.memory.tensors import select_kept_tensors, sum_bytes
from shapewright.models.hf_config import read_hf_config
from shapewright.models.parameters import count_parameters
from shapewright.models.read import list_presets, read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.optimizers import TrainingRecipe
from shapewright.workload.workload import RECOMPUTE_MODES, Workload

if TYPE_CHECKING:
    from shapewright.models.layers import LayerKind

# 16-bit weights and gradients, fp32 weights and moments: 2 + 2 + K bytes, K = 12 (arXiv 1910.02054, section 3.1).
NARROW_GRADIENTS = Workload(optimizer="adamw-narrow-gradients")
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def megatron(num_layers: int, hidden_size: int, num_heads: int) -> TransformerConfig:
    """Return a GPT as arXiv 2205.05198 and Megatron's calculator count it: tied, positions and biases left out."""
    return TransformerConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=51200,
        tied_embeddings=True,
        norm_bias=True,
        **DROPOUT,
    )


def tiny(num_layers: int = 1, **fields: Any) -> TransformerConfig:
    """Return a GPT of four heads of 16."""
    return TransformerConfig(hidden_size=64, num_layers=num_layers, num_heads=4, vocab_size=100, **fields)


def llama_memory(workload: Workload | None = None, **layout: Any) -> MemoryEstimate:
    """Memory of Llama-3-8B."""
    return estimate_memory(LLAMA_3_8B, workload or Workload(), ParallelLayout(**layout))


def states_bytes(memory: MemoryEstimate) -> float:
    """Weights, gradients and optimizer states of a device."""
    return memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes


def kept_bytes(workload: Workload, config: TransformerConfig | None = None) -> float:
    """Bytes that a layer saves for backward, of Llama-3-8B if none is given."""
    return sum(tensor.num_bytes for tensor in list_saved_tensors(config or LLAMA_3_8B, workload, ParallelLayout()))


# Model, pipeline stages, chunks per stage, micro-batch: arXiv 2205.05198, Table 3.
MODELS = {
    "22B": (megatron(48, 6144, 64), 1, 1, 4),
    "175B": (megatron(96, 12288, 96), 8, 3, 1),
    "530B": (megatron(105, 20480, 128), 35, 3, 1),
    "1T": (megatron(128, 25600, 160), 64, 1, 1),
}
LLAMA_3_8B = TransformerConfig(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    norm="rmsnorm",
    gated_mlp=True,
    activation="silu",
)


# Columns of arXiv 2205.05198 Table 2: tensor parallel degree, sequence parallel, recomputation.
SCHEMES = (
    (1, False, "none"),
    (8, False, "none"),
    (8, True, "none"),
    (8, False, "selective"),
    (8, True, "selective"),
    (8, False, "full"),
)


@pytest.mark.parametrize(
    ("model", "expected_gib"),
    [
        ("22B", (6.5938, 1.2344, 0.8242, 0.6094, 0.1992, 0.0938)),
        ("175B", (2.6719, 0.5391, 0.3340, 0.3047, 0.0996, 0.0469)),
        ("530B", (3.8281, 0.8203, 0.4785, 0.5078, 0.1660, 0.0781)),
        ("1T", (4.7852, 1.0254, 0.5981, 0.6348, 0.2075, 0.0977)),
    ],
)
def test_activations_of_a_layer_match_table_2(model: str, expected_gib: tuple[float, ...]) -> None:
    """Per layer, in GiB, the six schemes of arXiv 2205.05198 Table 2 at s = 2048."""
    config, _, _, batch = MODELS[model]
    for (degree, sequence_parallel, recompute), expected in zip(SCHEMES, expected_gib, strict=True):
        workload = Workload(micro_batch_size=batch, seq_len=2048, attention="unfused", recompute=recompute)
        layout = ParallelLayout(tensor_parallel=degree, sequence_parallel=sequence_parallel)
        kept = select_kept_tensors(list_saved_tensors(config, workload, layout), recompute)
        assert sum(saved.num_bytes for saved in kept) / GIB == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("model", "states_mib", "activations_mib"),
    [
        ("22B", 47351.46, 10022.01),
        ("175B", 48016.18, 12679.02),
        ("530B", 34654.24, 23861.76),
        ("1T", 36566.03, 27600.12),
    ],
)
def test_first_stage_agrees_with_megatrons_calculator(model: str, states_mib: float, activations_mib: float) -> None:
    """Weights with optimizer, and activations with logits, equal what NVIDIA/Megatron-LM at d98e8a6 prints.

    It also counts 8 bytes a token for the token ids, which is the difference of at most 0.2 MiB.
    """
    config, stages, chunks, batch = MODELS[model]
    workload = Workload(
        micro_batch_size=batch,
        seq_len=2048,
        attention="unfused",
        recompute="selective",
        global_batch_size=4 * stages * batch,
    )
    layout = ParallelLayout(tensor_parallel=8, pipeline_parallel=stages, virtual_pipeline=chunks)
    memory = estimate_memory(config, workload, layout)
    assert memory.stage == 0
    assert states_bytes(memory) / MIB == pytest.approx(states_mib, abs=0.1)
    assert (memory.activations_bytes + memory.logits_bytes) / MIB == pytest.approx(activations_mib, abs=0.2)


def test_distributed_optimizer_agrees_with_megatrons_calculator() -> None:
    """Llama-3-8B over 8 replicas with sharded optimizer states: 6 + 12/8 bytes a parameter, 57,436.90 MiB."""
    workload = Workload(micro_batch_size=1, seq_len=8192, global_batch_size=8)
    found_bytes = states_bytes(llama_memory(workload, data_parallel=8, zero_stage=1))
    assert found_bytes == 8_030_261_248 * 7.5
    assert found_bytes / MIB == pytest.approx(57436.90, abs=0.01)


@pytest.mark.parametrize(("zero_stage", "expected_gb"), [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)])
def test_zero_stages_match_figure_1(zero_stage: int, expected_gb: float) -> None:
    """7.5 B parameters on 64 replicas: 120, 31.4, 16.6 and 1.9 GB (arXiv 1910.02054, Figure 1).

    Stage 3 gathers, per parameter of the largest layer, 2 layers * 2 bytes of weights + 2 bytes of gradients.
    """
    layout = ParallelLayout(data_parallel=64, zero_stage=zero_stage)
    parameters = DeviceParameters(dense=7.5e9, experts=0.0, largest_layer=2e8)
    states = estimate_states(parameters, NARROW_GRADIENTS, layout)
    total_bytes = states.weights_bytes + states.gradients_bytes + states.optimizer_bytes
    assert total_bytes / 1e9 == pytest.approx(expected_gb, rel=1e-12)
    assert states.gathered_bytes == (6 * 2e8 if zero_stage == 3 else 0)


@pytest.mark.parametrize(("dtype", "bytes_per_parameter"), [("bf16", 18), ("fp16", 18), ("fp8", 18), ("fp32", 16)])
def test_usual_recipe_follows_the_dtype(dtype: str, bytes_per_parameter: int) -> None:
    """Mixed AdamW keeps 18 bytes a parameter, fp32 AdamW 16 (Megatron-LM's table)."""
    assert states_bytes(llama_memory(Workload(dtype=dtype))) == bytes_per_parameter * 8_030_261_248


def test_given_recipe_is_used() -> None:
    """SGD with momentum in bf16 keeps 2 + 2 + 2 bytes per parameter if given as a recipe."""
    recipe = TrainingRecipe(weight_bytes=2, gradient_bytes=2, optimizer_bytes=2)
    memory = estimate_memory(LLAMA_3_8B, Workload(), ParallelLayout(), recipe=recipe)
    assert memory.optimizer_bytes == 2 * 8_030_261_248


@pytest.mark.parametrize(
    ("dtype", "stored", "width"),
    [
        ("bf16", None, 2.0),
        ("fp8", None, 1.0),
        ("fp4", None, 0.5 + 2 / 128),
        ("fp32", None, 4.0),
        ("bf16", "int8", 1.0),
        ("bf16", "int4", 0.5 + 2 / 128),
    ],
)
def test_inference_keeps_weights_in_the_dtype(dtype: str, stored: str | None, width: float) -> None:
    """No gradients and no optimizer; layers as wide as their format, embeddings and logits 16 bits at least.

    Formats of four bits have a 16-bit scale for each group of 128 weights.
    """
    memory = llama_memory(Workload(phase="decode", dtype=dtype, weight_dtype=stored))
    outside = 2 * 128_256 * 4096 + 4096
    assert (memory.gradients_bytes, memory.optimizer_bytes, memory.workspace_bytes) == (0, 0, 0)
    assert memory.weights_bytes == width * (8_030_261_248 - outside) + max(width, 2.0) * outside


def test_kv_cache_of_llama_3() -> None:
    """2 * 2 bytes * 32 layers * 8 heads * 128 = 131,072 bytes a token; 8192 tokens are 1 GiB."""
    workload = Workload(phase="decode", micro_batch_size=1, context_len=8191)
    assert llama_memory(workload).kv_cache_bytes == 131_072 * 8192 == GIB
    assert llama_memory(dataclasses.replace(workload, kv_cache_dtype="fp8")).kv_cache_bytes == GIB / 2


def test_few_kv_heads_are_replicated() -> None:
    """8 key-value heads over 16 ranks: every rank keeps one, in the cache and in the weights.

    Weights: 8 heads more of K and V: 8 * 2 * 128 * 4096 * 32 layers = 268,435,456 parameters over all 16 ranks.
    """
    workload = Workload(phase="decode", micro_batch_size=1, context_len=8191)
    split_8, split_16 = (llama_memory(workload, tensor_parallel=degree) for degree in (8, 16))
    assert split_8.kv_cache_bytes == split_16.kv_cache_bytes == GIB / 8
    norms = (2 * 32 + 1) * 4096
    assert split_16.weights_bytes == 2 * ((8_030_261_248 - norms + 268_435_456) / 16 + norms)


def test_kv_cache_of_mla_is_the_latent() -> None:
    """DeepSeek-V3 keeps 512 + 64 elements a token and layer, whole on every tensor rank (arXiv 2405.04434)."""
    config = TransformerConfig(
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        head_dim=192,
        v_head_dim=128,
        vocab_size=129280,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
    )
    assert count_cached_elements(config) == count_cached_elements(config, tensor_parallel=8) == 576
    workload = Workload(phase="decode", micro_batch_size=1, context_len=0)
    # 576 elements * 2 bytes * 61 layers = 70,272 bytes a token
    assert estimate_memory(config, workload, ParallelLayout()).kv_cache_bytes == 70_272


def test_windowed_layers_keep_their_window() -> None:
    """Of 4 layers, 3 keep 128 tokens and 1 keeps all 1001: 2 heads * 2 * 16 * 2 bytes * (3 * 128 + 1001)."""
    config = tiny(num_layers=4, num_kv_heads=2, attention_windows=(128, 128, 128, 0))
    workload = Workload(phase="decode", micro_batch_size=1, context_len=1000)
    assert estimate_memory(config, workload, ParallelLayout()).kv_cache_bytes == 128 * (3 * 128 + 1001)


@pytest.mark.parametrize(
    ("stages", "chunks", "stage", "batch", "expected"),
    [
        (1, 1, 0, None, 1),
        (4, 1, 0, None, 4),  # 1F1B: the first stage starts all four before the first comes back
        (4, 1, 3, None, 1),
        (4, 1, 0, 2, 2),  # never more than the step has
        (4, 2, 0, 4, 4),  # 2 x 3 + 4 + 1 = 11 chunks, but the step has 8
        (4, 2, 3, 4, 2.5),  # 4 + 1 = 5 chunks of half a stage
        (8, 3, 0, 64, 31 / 3),  # p (1 + (p - 1) / (p v)) = 8 * (1 + 7/24) = 10.333
        (64, 1, 0, 64, 64),
    ],
)
def test_microbatches_in_flight(stages: int, chunks: int, stage: int, batch: int | None, expected: float) -> None:
    """1F1B and interleaved schedules keep as many micro-batches as arXiv 2104.04473 and 2205.05198 state."""
    workload = Workload(micro_batch_size=1, global_batch_size=batch)
    layout = ParallelLayout(pipeline_parallel=stages, virtual_pipeline=chunks)
    assert count_microbatches_in_flight(workload, layout, stage) == pytest.approx(expected)


def test_logits_of_a_long_sequence() -> None:
    """Llama-3-8B at 32,768 tokens: 4 bytes * 32768 * 128256 = 15.66 GiB (stas00/ml-engineering)."""
    memory = llama_memory(Workload(micro_batch_size=1, seq_len=32768))
    assert memory.logits_bytes / GIB == pytest.approx(15.66, abs=0.005)


def test_full_recomputation_of_llama_3() -> None:
    """Llama-3-8B, 32,768 tokens: checkpoints 8 GiB (one hidden state of 0.25 GiB a layer) and one layer at work."""
    whole = Workload(micro_batch_size=1, seq_len=32768)
    checkpointed = llama_memory(dataclasses.replace(whole, recompute="full"))
    # 32 layers' inputs of 0.25 GiB, the final norm's input and output
    assert checkpointed.activations_bytes / GIB == 32 * 0.25 + 2 * 0.25
    logit_gradient = 2 * 32768 * 128256
    assert checkpointed.workspace_bytes == max(kept_bytes(whole) - 0.25 * GIB, logit_gradient)
    assert checkpointed.total_bytes < llama_memory(whole).total_bytes


def test_swiglu_layer_by_hand() -> None:
    """Llama-3-8B, one token, flash: 4h + (q, k, v, o) + 4f = 16384 + 10240 + 57344 elements of 2 bytes; fused 3f."""
    # residual stream: layer input, attention input, second norm's input, MLP input = 4 * 4096 = 16384
    # attention: q 4096, k 1024, v 1024, o 4096 = 10240; MLP: gate, silu(gate), up, product = 4 * 14336 = 57344
    workload = Workload(micro_batch_size=1, seq_len=1)
    assert kept_bytes(dataclasses.replace(workload, fused_activation=False)) == 2 * (16384 + 10240 + 57344)
    assert kept_bytes(workload) == 2 * (16384 + 10240 + 3 * 14336)


def test_narrow_inputs_are_saved_quantized() -> None:
    """In fp8, inputs of attention, MLP and down projection take 1 + 1/32 bytes, attention's output as much more."""
    wide = Workload(micro_batch_size=1, seq_len=1, dtype="fp8")
    narrow = dataclasses.replace(wide, narrow_inputs=True)
    # Two inputs of h and one of f give up 2 - 33/32 bytes each; flash attention needs its output of h in 16 bits too.
    assert kept_bytes(wide) - kept_bytes(narrow) == (2 * 4096 + 14336) * (2 - 33 / 32) - 4096 * 33 / 32
    assert kept_bytes(dataclasses.replace(narrow, dtype="bf16")) == kept_bytes(dataclasses.replace(wide, dtype="bf16"))


@pytest.mark.parametrize(("expert_parallel", "num_rows"), [(1, 4096 * 2), (2, 4096 * 2 // 4)])
def test_expert_outputs_are_the_rows_that_a_device_sums(expert_parallel: int, num_rows: int) -> None:
    """Without an exchange each of four devices has a part of both rows of all 4096 tokens; with one, its own rows."""
    config = tiny(gated_mlp=True, num_experts=8, num_experts_per_token=2, moe_intermediate_size=32)
    layout = ParallelLayout(tensor_parallel=4, data_parallel=2, expert_parallel=expert_parallel)
    workload = Workload(micro_batch_size=1, seq_len=4096, fused_activation=False)
    (output,) = (
        tensor
        for tensor in list_saved_tensors(config, workload, layout, has_experts=True)
        if tensor.name == "moe.output"
    )

    assert (output.rows, output.columns) == (num_rows, config.hidden_size)


def test_a_server_gets_back_the_rows_that_a_device_sends() -> None:
    """Whole experts over two replicas of four devices: each device sends both rows of a fourth of 4096 tokens."""
    config = tiny(gated_mlp=True, num_experts=8, num_experts_per_token=2, moe_intermediate_size=32)
    layout = ParallelLayout(tensor_parallel=4, data_parallel=2, expert_parallel=8, expert_tensor_parallel=1)
    prompt = Workload(phase="prefill", micro_batch_size=1, seq_len=4096)
    tensors = {tensor.name: tensor for tensor in list_saved_tensors(config, prompt, layout, has_experts=True)}
    sent: Any = next(each for each in lower(config, prompt, layout) if each.name == "moe.permute")

    assert tensors["moe.output"].rows == 4096 // 4 * 2
    assert tensors["moe.output"].num_bytes == sent.written_bytes


def test_fused_activation_saves_no_expert_outputs() -> None:
    """A fused activation applies the routing weights, so neither its factors nor expert outputs are saved."""
    config = tiny(gated_mlp=True, num_experts=8, num_experts_per_token=2, moe_intermediate_size=32)
    names = [
        {tensor.name for tensor in list_saved_tensors(config, workload, ParallelLayout(), has_experts=True)}
        for workload in (Workload(fused_activation=False), Workload())
    ]
    assert names[0] - names[1] == {"moe.activation_output", "moe.output"}
    assert not names[1] - names[0]


def test_narrow_inputs_require_training() -> None:
    """Nothing is kept for a backward pass in inference."""
    with pytest.raises(WorkloadError, match="narrow_inputs has no effect in decode"):
        Workload(phase="decode", narrow_inputs=True)


def test_relu_saves_only_its_output() -> None:
    """ReLU's gradient follows from its output, so one tensor of width f less is kept than with GELU."""
    workload = Workload(micro_batch_size=1, seq_len=8)
    assert kept_bytes(workload, tiny()) - kept_bytes(workload, tiny(activation="relu")) == 2 * 8 * 256


def test_expert_parallel_memory() -> None:
    """8 experts over 4 ranks leave 2 a rank; a token sent to 2 experts is kept twice."""
    config = tiny(num_layers=2, num_experts=8, num_experts_per_token=2, moe_intermediate_size=96, gated_mlp=True)
    layout = ParallelLayout(data_parallel=4, expert_parallel=4)
    workload = Workload(micro_batch_size=1, seq_len=16)
    alone, spread = (estimate_memory(config, workload, chosen) for chosen in (ParallelLayout(), layout))
    # 6 of 8 experts elsewhere: 2 layers * 6 experts * 3 matrices * 64 * 96 parameters of 2 bytes
    assert alone.weights_bytes - spread.weights_bytes == 2 * 2 * 6 * 3 * 64 * 96
    tensors = {tensor.name: tensor for tensor in list_saved_tensors(config, workload, layout, has_experts=True)}
    assert (tensors["moe.input"].rows, tensors["moe.input"].columns) == (32, 64)
    assert (tensors["moe.down_input"].rows, tensors["moe.down_input"].columns) == (32, 96)


def test_context_parallel_splits_tokens() -> None:
    """Four context ranks keep a quarter of every activation with flash attention."""
    workload = Workload(micro_batch_size=1, seq_len=4096)
    whole, quarter = llama_memory(workload), llama_memory(workload, context_parallel=4)
    assert quarter.activations_bytes == whole.activations_bytes / 4
    assert quarter.logits_bytes == whole.logits_bytes / 4


def test_last_stage_has_a_copy_of_a_tied_embedding() -> None:
    """With two stages the last holds its own copy of a tied embedding, as it would of a separate matrix."""
    tied = dataclasses.replace(LLAMA_3_8B, tied_embeddings=True)
    # A micro-batch of one token: activations are small and the last stage, with the final norm, is the larger.
    workload, layout = Workload(micro_batch_size=1, seq_len=1), ParallelLayout(pipeline_parallel=2)
    memories = [estimate_memory(config, workload, layout) for config in (tied, LLAMA_3_8B)]
    assert memories[0].weights_bytes == memories[1].weights_bytes


def test_any_stage_can_need_most_memory() -> None:
    """If only some layers have experts, the stage with those is found."""
    with_experts = (False, False, True, True, False, False)
    config = tiny(num_layers=6, num_experts=64, num_experts_per_token=1, moe_layers=with_experts)
    memory = estimate_memory(config, Workload(micro_batch_size=1, seq_len=8), ParallelLayout(pipeline_parallel=3))
    assert memory.stage == 1


def test_unfused_prefill_needs_scores_and_weights() -> None:
    """Attention of one layer: scores and their softmax, 2 * 4 heads * 64 * 64, plus q, k, v, o and the residual."""
    workload = Workload(phase="prefill", micro_batch_size=1, seq_len=64, attention="unfused")
    memory = estimate_memory(tiny(num_layers=2), workload, ParallelLayout())
    # attention's input, q, k, v and o: 5 * 64 * 64; the residual stream twice: 2 * 64 * 64
    assert memory.activations_bytes == 2 * (2 * 4 * 64 * 64 + 5 * 64 * 64 + 2 * 64 * 64)


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
def test_weights_of_every_preset(phase: str) -> None:
    """On one device the weights of every preset are its parameters, two bytes each."""
    names = [preset if isinstance(preset, str) else preset.name for preset in list_presets()]
    assert len(names) >= 60
    for name in names:
        config = read_model(name).config
        workload = Workload(phase=phase, micro_batch_size=1, seq_len=128)
        memory = estimate_memory(config, workload, ParallelLayout())
        assert memory.weights_bytes == 2 * count_parameters(config).total, name
        assert (memory.kv_cache_bytes > 0) == (phase != "train" and config.stack != "encoder"), name


def test_total_is_the_sum_of_its_parts() -> None:
    """Each part counts once, the runtime's context among them."""
    memory = MemoryEstimate(
        weights_bytes=1, gradients_bytes=10, optimizer_bytes=100, activations_bytes=1e3, logits_bytes=1e4,
        kv_cache_bytes=1e5, gathered_bytes=1e6, workspace_bytes=1e7, runtime_bytes=CUDA_CONTEXT_BYTES,
    )  # fmt: skip
    assert memory.total_bytes == 11_111_111 + CUDA_CONTEXT_BYTES


def test_sparse_attention_caches_its_indexer() -> None:
    """DeepSeek-V3.2 caches a latent of 512, a rotary key of 64 and an indexer's key of 128 for each token and layer."""
    config = read_hf_config({"model_type": "deepseek_v32"}).config

    assert count_cached_elements(config) == 512 + 64 + 128


def test_clamped_experts_keep_two_inputs() -> None:
    """The clamp of gpt-oss keeps gate and up of each of four experts a token, in bf16."""
    config = read_model("gpt-oss-20b").config
    workload = Workload(micro_batch_size=1, seq_len=512, fused_experts=False)
    clamped, free = (
        estimate_memory(each, workload, ParallelLayout()).activations_bytes
        for each in (config, dataclasses.replace(config, expert_clamp=False))
    )

    assert clamped - free == 24 * 512 * 4 * 2 * 2880 * 2


@pytest.mark.parametrize(
    ("preset", "norms"),
    [("phi-2", [("norm_0", "output")]), ("falcon-40b", [("norm_0", "output"), ("norm_1", "output")])],
)
def test_parallel_blocks_save_the_output_of_each_norm(preset: str, norms: list[tuple[str, str]]) -> None:
    """Attention and MLP of Phi-2 read one norm of the layer's input, those of Falcon 40B one each."""
    saved = list_saved_tensors(read_model(preset).config, Workload(), ParallelLayout())

    assert [(each.block, each.role) for each in saved if each.block.startswith("norm")] == norms


def test_down_projections_to_latents_are_on_every_rank() -> None:
    """Two tensor ranks of DeepSeek-V2-Lite both hold norms, routers and 27 projections of 2048 to 512 + 64."""
    config = read_model("deepseek-v2-lite").config
    counts = count_parameters(config)
    whole, half = (
        count_stage_parameters(Stage(config, ParallelLayout(tensor_parallel=degree), 0), counts, Workload()).dense
        for degree in (1, 2)
    )
    routers = sum(group.num_layers * layer.router for group, layer in counts.layers)

    assert 2 * half - whole == counts.by_component["norms"] + config.hidden_size + routers + 27 * 2048 * (512 + 64)


@pytest.mark.parametrize("layers", [1, 32])
@pytest.mark.parametrize("offloads", [False, True])
def test_recomputing_every_layer_by_number_is_full_recomputation(layers: int, offloads: bool) -> None:
    """recompute_layers of all the layers needs what full recomputation without a number does."""
    config = dataclasses.replace(read_model("llama-2-7b").config, num_layers=layers)
    whole, counted = (
        estimate_memory(
            config,
            Workload(micro_batch_size=1, recompute="full", recompute_layers=number, offload_activations=offloads),
            ParallelLayout(),
        )
        for number in (None, layers)
    )
    assert counted == whole


@pytest.mark.parametrize(("pages", "tokens"), [({}, 10 + 100), ({"kv_block_tokens": 16}, 16 + 112)])
def test_cache_of_an_encoder_decoder_by_hand(pages: dict[str, Any], tokens: int) -> None:
    """Each of 12 layers of T5-base keeps 12 heads of 64, keys and values, of 1 + 9 tokens and of 100 source tokens.

    In blocks of 16 tokens, 10 tokens take one block and 100 source tokens take seven.
    """
    workload = Workload(phase="decode", micro_batch_size=1, context_len=9, seq_len=100, **pages)
    memory = estimate_memory(read_model("flan-t5-base").config, workload, ParallelLayout())

    assert memory.kv_cache_bytes == 12 * tokens * 2 * 12 * 64 * 2


@pytest.mark.parametrize(("dtype", "copies"), [("bf16", 2), ("fp32", 0)])
def test_norms_of_pytorch_copy_narrow_inputs_to_fp32(dtype: str, copies: int) -> None:
    """Both norms of a Llama layer keep their input in fp32 where it is not in fp32 already."""
    saved = list_saved_tensors(LLAMA_3_8B, Workload(kernels="torch", dtype=dtype), ParallelLayout())

    assert sum(tensor.role == "fp32_input" for tensor in saved) == copies


@pytest.mark.parametrize(
    "preset", ["gpt3-125m", "llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-next-80b-a3b"]
)
def test_what_is_not_kept_is_recomputed(preset: str) -> None:
    """Every kind of layer saves the same tensors in all, however many of them are recomputed."""
    config = read_model(preset).config
    for kind in config.count_kinds(range(config.num_layers)):
        found = [
            estimate_layer(
                config,
                Workload(micro_batch_size=2, seq_len=512, recompute=mode),
                ParallelLayout(),
                kind=kind,
                has_cross_attention=False,
            )
            for mode in RECOMPUTE_MODES
        ]
        whole = list_layer_tensors(
            config, Workload(micro_batch_size=2, seq_len=512), ParallelLayout(), kind, has_cross_attention=False
        )

        assert [each.kept_bytes + each.recomputed_bytes for each in found] == [sum_bytes(whole)] * len(found)
        assert found[0].recomputed_bytes == 0.0


@pytest.mark.parametrize(("in_flight", "expected"), [(1, 10 + 3), (2, 20 + 6), (4, 40 + 7)])
def test_offloaded_activations_in_transit(in_flight: int, expected: float) -> None:
    """Beside 10 bytes of each micro-batch the device holds 7 of the offloaded ones, or all, 3 of each."""
    terms = ActivationTerms(10.0, 0.0, 0.0, 0.0, host_bytes=3.0, in_transit_bytes=7.0)

    assert terms.on_device_bytes(in_flight) == expected
    assert dataclasses.replace(terms, host_bytes=0.0).on_device_bytes(in_flight) == 10 * in_flight


def test_only_layers_with_a_backward_pass_save_tensors() -> None:
    """Of three dense layers and one of experts, the last, or the last two."""
    config = tiny(
        4, num_experts=4, num_experts_per_token=2, moe_intermediate_size=64, moe_layers=(False, False, False, True)
    )
    dense, experts = (config.kind_of_layer(index) for index in (0, 3))

    def saved_bytes(last_layers: int, recompute: str, recompute_layers: int | None = None) -> float:
        job = Workload(
            micro_batch_size=1,
            seq_len=64,
            finetune="last-layers",
            last_layers=last_layers,
            recompute=recompute,
            recompute_layers=recompute_layers,
        )
        return estimate_activation_terms(Stage(config, ParallelLayout(), 0), job).microbatch_bytes

    def kept_bytes(kind: LayerKind, recompute: str) -> float:
        job = Workload(micro_batch_size=1, seq_len=64, recompute=recompute)
        return estimate_layer(config, job, ParallelLayout(), kind=kind, has_cross_attention=False).kept_bytes

    for recompute in ("none", "full"):
        assert saved_bytes(1, recompute) == kept_bytes(experts, recompute)
        assert saved_bytes(2, recompute) == kept_bytes(experts, recompute) + kept_bytes(dense, recompute)
    # The first two and three layers run again: none that is trained, or the dense one of the two.
    assert saved_bytes(2, "full", 2) == saved_bytes(2, "none")
    assert saved_bytes(2, "full", 3) == kept_bytes(experts, "none") + kept_bytes(dense, "full")


@pytest.mark.parametrize("seed", range(40))
def test_memory_is_that_of_the_fullest_of_all_stages(seed: int) -> None:
    """Random mixtures of layers, windows, stages and jobs; and a stage alone needs what it needs among others."""
    random = Random(seed)
    num_layers = random.randint(4, 24)
    fields: dict[str, Any] = {"attention_windows": random.choice(((0,), (64,), (64, 0), (64, 64, 0)))}
    if random.random() < 0.5:
        pattern = (*(random.random() < 0.5 for _ in range(random.randint(0, num_layers - 1))), True)
        fields |= {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": random.choice((16, 512))}
        fields |= {"moe_layers": pattern}
    config = dataclasses.replace(tiny(num_layers, **fields), vocab_size=random.choice((10, 100_000)))
    stages = random.choice([count for count in (2, 3, 4) if -(-num_layers // count) * (count - 1) < num_layers])
    job = random.choice(
        (
            Workload(micro_batch_size=2, seq_len=256, recompute=random.choice(RECOMPUTE_MODES)),
            Workload(micro_batch_size=2, seq_len=256, global_batch_size=32),
            Workload(phase="prefill", micro_batch_size=2, seq_len=256),
            Workload(phase="decode", micro_batch_size=200, context_len=2000, kv_block_tokens=random.choice((1, 16))),
        )
    )
    layout = ParallelLayout(pipeline_parallel=stages, pipeline_schedule=random.choice(("1f1b", "gpipe", "zero-bubble")))
    every = estimate_stages(config, job, layout)

    assert [each.stage for each in every] == list(range(stages))
    assert estimate_memory(config, job, layout).total_bytes == max(each.total_bytes for each in every)
    caches = estimate_stage_caches(config, job, layout)
    assert caches == tuple(each.kv_cache_bytes for each in every)
    if job.phase != "train":
        for index, each in enumerate(every):
            kinds = config.count_kinds(layout.layers_of_stage(num_layers, index))
            assert each.kv_cache_bytes == sum(
                estimate_kv_cache(config, job, layout, [(kind, count)]) for kind, count in kinds.items()
            )


def test_cache_of_an_encoder_decoder_after_its_prompt() -> None:
    """The decoder has its start token, and the cross-attention of 12 layers 100 tokens."""
    memory = estimate_memory(
        read_model("flan-t5-base").config, Workload(phase="prefill", micro_batch_size=1, seq_len=100), ParallelLayout()
    )

    assert memory.kv_cache_bytes == 12 * (1 + 100) * 2 * 12 * 64 * 2


@pytest.mark.parametrize(
    ("schedule", "fields", "num_logits", "num_ends"),
    [("1f1b", {}, 1, 1), ("gpipe", {}, 8, 8), ("gpipe", {"loss_chunks": 4}, 0.25, 8)],
)
def test_the_last_stage_of_gpipe_keeps_the_logits_of_a_step(
    schedule: str, fields: dict[str, Any], num_logits: float, num_ends: int
) -> None:
    """Eight micro-batches of 128 tokens pass it before the first backward pass, each with its softmax in fp32.

    The inputs of the final norm and of the logits, 2 bytes each, stay as long; a loss in four chunks keeps no logits.
    """
    config = read_model("llama-3.2-1b").config
    job = Workload(micro_batch_size=1, global_batch_size=8, seq_len=128, **fields)
    layout = ParallelLayout(pipeline_parallel=4, pipeline_schedule=schedule)
    in_flight = 8 if schedule == "gpipe" else 1
    *_, before, last = estimate_stages(config, job, layout)
    layers_bytes = before.activations_bytes / (8 if schedule == "gpipe" else 2)

    assert last.logits_bytes == num_logits * 128 * config.vocab_size * 4
    assert last.activations_bytes - in_flight * layers_bytes == num_ends * 2 * 128 * config.hidden_size * 2
