"""Recomputation of every second GEMM of a layer, as torchtitan's selective checkpointing by operation has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shapewright
from shapewright.app.formats.registry import write_format
from shapewright.app.formats.torchtitan import read_torchtitan
from shapewright.core.errors import WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.lowering.flops import count_hardware_flops, count_model_flops
from shapewright.lowering.model import lower
from shapewright.memory.activations import estimate_layer
from shapewright.models.layers import LayerKind
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.predict import predict
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

PLAIN = Workload(seq_len=4096, micro_batch_size=1)
ALTERNATE = replace(PLAIN, recompute="selective", recompute_modules="alternate_gemms")
ONE = ParallelLayout()
LLAMA = read_model("llama-3-8b").config
AROUND = {"norm", "residual", "mlp.activation"}


def repeated(config: TransformerConfig, workload: Workload = ALTERNATE, layout: ParallelLayout = ONE) -> set[str]:
    """Operations that run again."""
    return {each.name for each in lower(config, workload, layout) if each.pass_name == "recompute"}


def kept_per_token(config: TransformerConfig, layout: ParallelLayout = ONE, kind: LayerKind | None = None) -> float:
    """Elements of 16 bits that a layer keeps for each token."""
    layer = estimate_layer(config, ALTERNATE, layout, kind=kind or LayerKind(), has_cross_attention=False)
    return layer.kept_bytes / 2.0 / ALTERNATE.seq_len


def test_a_llama_layer_repeats_wk_wo_and_w3() -> None:
    """The 2nd, 4th and 6th of wq, wk, wv, wo, w1, w3, w2; hardware FLOPs are those that run."""
    assert repeated(LLAMA) == {"attention.k", "attention.out", "attention.rotary", "mlp.up", *AROUND}
    # h a_kv d + h h + h f of one layer, a multiplication and an addition each.
    by_hand = 2.0 * 4096 * (4096 * 1024 + 4096 * 4096 + 4096 * 14336)
    again = sum(
        float(each.flops) * int(each.repeats) for each in lower(LLAMA, ALTERNATE, ONE) if each.pass_name == "recompute"
    )
    assert again == 32 * by_hand
    hardware = count_hardware_flops(LLAMA, ALTERNATE)
    assert hardware - count_model_flops(LLAMA, ALTERNATE) == pytest.approx(32 * by_hand, rel=1e-12)


def test_hardware_flops_count_what_other_modules_repeat_once() -> None:
    """Only the attention core counts several times (equation 9 of arXiv 2205.05198): an MLP is 3 h f again."""
    workload = replace(PLAIN, recompute="selective", recompute_modules="mlp")
    again = count_hardware_flops(LLAMA, workload) - count_model_flops(LLAMA, workload)
    assert again == pytest.approx(32 * 2.0 * 4096 * 3 * 4096 * 14336, rel=1e-12)


def test_kept_tensors_of_a_llama_layer() -> None:
    """Its input, outputs of wq, wv and w1, and that of attention; w2 feeds a sum, whose gradient reads nothing."""
    assert kept_per_token(LLAMA) == 4096 + 4096 + 1024 + 14336 + 4096


def test_sums_over_the_tensor_axis_are_kept() -> None:
    """The result of the reduce-scatter after wo is kept, as in torchtitan's list, and wo not repeated."""
    layout = ParallelLayout(tensor_parallel=2)
    assert repeated(LLAMA, layout=layout) == {"attention.k", "attention.rotary", "mlp.up", *AROUND}
    assert kept_per_token(LLAMA, layout) == (4096 + 4096 + 1024 + 14336 + 4096 + 4096) / 2


def test_fused_projections_are_one_gemm() -> None:
    """Of qkv, wo, w1 with w3 and w2 only wo runs again; nothing reads the output of w2."""
    fused = replace(LLAMA, fused_qkv=True, fused_gate_up=True)
    assert repeated(fused) == {"attention.out", "attention.rotary", *AROUND}
    assert kept_per_token(fused) == 4096 + (4096 + 2 * 1024) + 2 * 14336 + 4096


def test_gpt_keeps_the_input_of_its_activation() -> None:
    """GPT's qkv and first MLP GEMM are kept: 1 + 3 + 1 + 4 widths."""
    gpt = read_model("gpt3-6.7b").config
    assert repeated(gpt) == {"attention.out", *AROUND}
    assert kept_per_token(gpt) == 9 * 4096


def test_the_last_gemm_counts_where_a_norm_follows() -> None:
    """Gemma-2 normalizes the output of w2, the 7th, which is kept; that of wo is computed again."""
    gemma = read_model("gemma-2-9b").config
    assert repeated(gemma) == {"attention.k", "attention.out", "attention.rotary", "mlp.up", *AROUND}
    assert kept_per_token(gemma) == 3584 + 4096 + 2048 + 4096 + 14336 + 3584


def test_five_gemms_of_latent_attention_shift_the_mlp() -> None:
    """DeepSeek-V3: q_a, kv_a and wo are kept, so that of the MLP the gate, its 6th GEMM, runs again."""
    config = replace(read_model("deepseek-v3").config, num_layers=4, num_mtp_layers=0)
    attention = {"attention.q_a_norm", "attention.q_b", "attention.kv_a_norm", "attention.kv_b", "attention.rotary"}
    experts = {"moe.router", "moe.choose", "moe.permute", "moe.activation"}
    shared = {"shared_expert.gate", "shared_expert.activation"}
    assert repeated(config) == attention | experts | shared | AROUND | {"mlp.gate"}
    # Input, sum after attention, latents of 1,536 and 512 + 64, attention's output of 128 heads; w3.
    common = 7168 + 7168 + 1536 + 576 + 128 * 128
    assert kept_per_token(config) == common + 18432
    # Both halves of the experts' first GEMM for 8 experts a token.
    assert kept_per_token(config, kind=LayerKind(mlp="experts")) == common + 2048 + 8 * 2 * 2048


def test_exchanged_rows_are_kept() -> None:
    """Rows from other devices (all-to-all) are kept, so that they are neither sorted nor sent again."""
    config = replace(read_model("mixtral-8x7b").config, num_layers=2)
    layout = ParallelLayout(data_parallel=4, expert_parallel=4)
    assert "moe.permute" in repeated(config)
    assert not {"moe.permute", "moe.dispatch.alltoall"} & repeated(config, layout=layout)
    kind = LayerKind(mlp="experts")
    assert kept_per_token(config, layout, kind) - kept_per_token(config, ONE, kind) == 2 * 4096


def test_unfused_attention_runs_again() -> None:
    """Its batched GEMMs are no matrix multiplications of torchtitan's list."""
    assert {"attention.score", "attention.softmax"} <= repeated(LLAMA, replace(ALTERNATE, attention="unfused"))


def test_llama_2_13b_slows_down_as_measured() -> None:
    """Its docs/performance.md of 2024-09 has 2,162 tokens/s without checkpointing and 1,904 by operation."""
    config, device = read_model("llama-2-13b").config, load_device("a100-sxm-80gb")
    layout = ParallelLayout(data_parallel=64, zero_stage=3)
    times = [
        predict(
            config,
            device=device,
            workload=replace(workload, micro_batch_size=2, global_batch_size=128),
            layout=layout,
            software="fsdp-2024",
        ).step_time_s
        for workload in (PLAIN, ALTERNATE)
    ]
    assert times[0] / times[1] == pytest.approx(1904 / 2162, rel=0.05)


def test_each_kind_of_layer_repeats_its_own_gemms() -> None:
    """Three GEMMs of a gated delta net and four of attention come before the shared expert of Qwen3-Next."""
    config = read_model("qwen3-next-80b-a3b").config
    repeats = dict.fromkeys(("gate", "up", "down"), 0)
    for each in lower(config, ALTERNATE, ONE):
        if each.pass_name == "recompute" and each.block == "shared_expert" and each.role in repeats:
            repeats[each.role] += int(each.repeats)
    assert repeats == {"gate": 36, "up": 12, "down": 36}


@pytest.mark.parametrize("preset", ["llama-3-8b", "deepseek-v2-lite", "qwen3-next-80b-a3b"])
def test_plans_agree_with_predictions(preset: str) -> None:
    """The time and memory of a plan, priced layer by layer, are those of its prediction."""
    found = shapewright.plan(
        preset, device="b300-sxm-288gb", num_devices=16, global_batch_size=32,
        workload={"recompute_modules": "alternate_gemms", "seq_len": 2048},
        keep={"recompute": ["selective"], "zero_stage": [3]},
    )  # fmt: skip
    best, point = found.plans[0], found.front[0]
    assert best.workload.recompute_modules == "alternate_gemms"
    assert point.step_s == pytest.approx(best.prediction.step_time_s, rel=1e-9)
    assert point.total_bytes == pytest.approx(best.prediction.memory.total_bytes, rel=1e-9)


def test_torchtitan_reads_and_writes_it() -> None:
    """Its option ``op`` is this module and no other."""
    text = write_format("torchtitan-toml", LLAMA, workload=ALTERNATE)
    assert 'selective_ac_option = "op"' in text
    found = read_torchtitan(text).workload
    assert (found["recompute"], found["recompute_modules"]) == ("selective", "alternate_gemms")
    for name, modules in (("torchtitan-toml", "core_attn"), ("megatron-args", "alternate_gemms")):
        with pytest.raises(WorkloadError, match="cannot express recompute_modules"):
            write_format(name, LLAMA, workload=replace(ALTERNATE, recompute_modules=modules))
