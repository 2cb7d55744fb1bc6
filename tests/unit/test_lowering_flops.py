"""FLOPs of lowered models against the formulas and tables of the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowered import gpt
from shapewright.lowering.flops import count_hardware_flops, count_model_flops, sum_flops
from shapewright.lowering.model import lower
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

VOCAB_SIZE, SEQ_LEN = 51200, 2048

# L, h, a, B, b, then model FLOPs and FLOPs with selective recomputation of one iteration.
# Source: arXiv 2205.05198, tables 3 and 5 for the shapes, eq. 7 and eq. 9 for the FLOPs, to seven digits.
TABLE = {
    "22B": (48, 6144, 64, 4, 4, 1.143561e15, 1.202934e15),
    "175B": (96, 12288, 96, 64, 1, 1.410915e17, 1.448914e17),
    "530B": (105, 20480, 128, 280, 1, 1.852230e18, 1.882536e18),
    "1T": (128, 25600, 160, 512, 1, 6.425876e18, 6.510318e18),
}


def iteration(size: str, recompute: str = "none", attention: str = "unfused") -> tuple[TransformerConfig, Workload]:
    """Model and step of one row of the table."""
    num_layers, hidden_size, num_heads, batch, micro_batch, *_ = TABLE[size]
    workload = Workload(
        micro_batch_size=micro_batch,
        seq_len=SEQ_LEN,
        global_batch_size=batch,
        recompute=recompute,
        attention=attention,
    )
    return gpt(num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads), workload


@pytest.mark.parametrize("attention", ["unfused", "flash"])
@pytest.mark.parametrize(("b", "s", "h", "a"), [(4, 2048, 2560, 32), (1, 128, 768, 12), (2, 4096, 6144, 64)])
def test_forward_flops_of_a_layer(b: int, s: int, h: int, a: int, attention: str) -> None:
    """24 b s h^2 + 4 b s^2 h, and 2 b s h v for the logits (arXiv 2401.14489, section on FLOPs)."""
    workload = Workload(micro_batch_size=b, seq_len=s, attention=attention)
    forward = [
        each
        for each in lower(gpt(hidden_size=h, num_heads=a), workload, ParallelLayout())
        if each.pass_name == "forward"
    ]
    logits = sum(each.flops for each in forward if each.name == "logits")
    assert logits == 2 * b * s * h * VOCAB_SIZE
    assert sum_flops(forward, ("forward",)) - logits == 24 * b * s * h**2 + 4 * b * s**2 * h


@pytest.mark.parametrize("attention", ["unfused", "flash"])
@pytest.mark.parametrize("size", TABLE)
def test_model_flops_of_an_iteration(size: str, attention: str) -> None:
    """72 B L s h^2 (1 + s/(6h) + v/(12hL)): arXiv 2205.05198, eq. 7, and the values that follow from its table."""
    config, workload = iteration(size, attention=attention)
    big_b, big_l, s, h = workload.global_batch_size, config.num_layers, SEQ_LEN, config.hidden_size
    assert big_b is not None
    formula = 72 * big_b * big_l * s * h**2 * (1 + s / (6 * h) + VOCAB_SIZE / (12 * h * big_l))
    assert count_model_flops(config, workload) == pytest.approx(formula, rel=1e-12)
    assert count_model_flops(config, workload) == pytest.approx(TABLE[size][5], rel=5e-7)


@pytest.mark.parametrize("size", TABLE)
def test_hardware_flops_with_selective_recomputation(size: str) -> None:
    """72 B L s h^2 (1 + s/(3h) + v/(12hL)): arXiv 2205.05198, eq. 9, on which its published HFU rest."""
    assert count_hardware_flops(*iteration(size, "selective")) == pytest.approx(TABLE[size][6], rel=5e-7)


@pytest.mark.parametrize("size", TABLE)
def test_hardware_flops_with_full_recomputation(size: str) -> None:
    """96 B L s h^2 (1 + s/(6h) + v/(16hL)): arXiv 2104.04473, eq. 3."""
    config, workload = iteration(size, "full")
    big_b, big_l, s, h = workload.global_batch_size, config.num_layers, SEQ_LEN, config.hidden_size
    assert big_b is not None
    formula = 96 * big_b * big_l * s * h**2 * (1 + s / (6 * h) + VOCAB_SIZE / (16 * h * big_l))
    assert count_hardware_flops(config, workload) == pytest.approx(formula, rel=1e-12)
    assert count_model_flops(config, workload) == pytest.approx(TABLE[size][5], rel=5e-7)


@pytest.mark.parametrize(("size", "published"), [("22B", 41.5), ("175B", 51.4), ("530B", 56.0), ("1T", 56.3)])
def test_published_mfu(size: str, published: float) -> None:
    """Step times, devices and MFU of arXiv 2205.05198, table 5 (A100, 312 TFLOP/s): within 0.2 points."""
    time_s, num_devices = {"22B": (1.10, 8), "175B": (13.75, 64), "530B": (37.83, 280), "1T": (71.49, 512)}[size]
    mfu = count_model_flops(*iteration(size)) / time_s / num_devices / 312e12
    assert 100 * mfu == pytest.approx(published, abs=0.2)


def test_selective_recomputation_lowers_the_attention_core_once() -> None:
    """Lowering recomputes 4 b s^2 h per layer and pass; eq. 9 counts three times that."""
    config, workload = iteration("175B", "selective")
    operations = lower(config, workload, ParallelLayout())
    core = 4 * SEQ_LEN**2 * config.hidden_size * config.num_layers * 64
    assert sum_flops(operations, ("recompute",)) == core
    assert count_hardware_flops(config, workload) - count_model_flops(config, workload) == 3 * core


def test_layout_changes_flops_only_through_the_batch() -> None:
    """Two replicas and four stages without a global batch: 2 * 4 micro-batches; with one, slicing does not show."""
    config, workload = iteration("22B")
    layout = ParallelLayout(data_parallel=2, pipeline_parallel=4, tensor_parallel=8)
    one_micro_batch = replace(workload, global_batch_size=None)
    assert count_model_flops(config, one_micro_batch, layout) == 8 * count_model_flops(config, one_micro_batch)
    eight = replace(workload, global_batch_size=32)
    assert count_model_flops(config, eight, layout) == count_model_flops(config, eight)


def test_llama_layer_per_token() -> None:
    """2h(h + 2h a_kv/a) + 2h^2 + 6hf + 4sh per token: grouped queries and a gated MLP (Llama-3-8B)."""
    h, f, s = 4096, 14336, 8192
    config = TransformerConfig(
        hidden_size=h,
        num_layers=1,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=f,
        vocab_size=128256,
        gated_mlp=True,
    )
    forward = lower(config, Workload(micro_batch_size=1, seq_len=s), ParallelLayout())
    layer = sum(each.flops for each in forward if each.pass_name == "forward" and each.name != "logits")
    assert layer / s == 2 * h * (h + 2 * h // 4) + 2 * h**2 + 6 * h * f + 4 * s * h


def test_llama_7b_forward() -> None:
    """b=1, s=4096: 54.125e12 in weights and 8.796e12 in attention, equal to PyTorch's FlopCounterMode (torch 2.13)."""
    config = read_model("llama-7b").config
    operations = lower(config, Workload(micro_batch_size=1, seq_len=4096), ParallelLayout())
    attention = sum_flops((each for each in operations if each.name == "attention.fused"), ("forward",))
    assert attention == pytest.approx(8.796e12, rel=1e-4)
    assert sum_flops(operations, ("forward",)) == pytest.approx(62.921e12, rel=1e-4)


def test_decode_flops_grow_with_the_context() -> None:
    """One token: 24 h^2 + 4 (c + 1) h per layer, 2 h v for the logits."""
    config, h = gpt(num_layers=2, hidden_size=768, num_heads=12), 768
    workload = Workload(phase="decode", micro_batch_size=3, context_len=99)
    assert count_model_flops(config, workload) == 3 * (2 * (24 * h**2 + 4 * 100 * h) + 2 * h * VOCAB_SIZE)


@pytest.mark.parametrize("preset", ["gpt2", "llama-3-8b", "mixtral-8x7b", "deepseek-v3", "flan-t5-xl", "gemma-2-9b"])
@pytest.mark.parametrize("attention", ["unfused", "flash"])
def test_gradients_have_twice_the_flops_of_the_forward_pass(preset: str, attention: str) -> None:
    """Model FLOPs count backward as twice forward, which holds for every lowered GEMM, chunked loss included."""
    config = read_model(preset).config
    workload = Workload(seq_len=512, attention=attention, loss_chunks=3)

    operations = lower(config, workload, ParallelLayout())

    assert sum_flops(operations, ("backward",)) == 2.0 * sum_flops(operations, ("forward",))
    assert count_model_flops(config, workload) == pytest.approx(sum_flops(operations, ("forward", "backward")))


def test_hardware_flops_count_the_first_layers_of_each_stage() -> None:
    """Four stages of Jamba begin with layers 0, 8, 16 and 24, all with Mamba and a dense MLP as layer 0 is.

    Of 32 equal layers in stages of 7, 7, 7, 7 and 4, five of each are 24: three quarters of full recomputation.
    """

    def repeated(name: str, stages: int, layers: int | None) -> float:
        config, layout = read_model(name).config, ParallelLayout(pipeline_parallel=stages)
        job = Workload(micro_batch_size=1, global_batch_size=8, seq_len=128, recompute="full", recompute_layers=layers)
        return count_hardware_flops(config, job, layout) - count_model_flops(config, job, layout)

    assert repeated("jamba-v0.1", 4, 1) == pytest.approx(4 * repeated("jamba-v0.1", 1, 1))
    assert repeated("gpt3-2.7b", 5, 5) == pytest.approx(0.75 * repeated("gpt3-2.7b", 5, None))
    assert repeated("jamba-v0.1", 4, 8) == pytest.approx(repeated("jamba-v0.1", 4, None))
