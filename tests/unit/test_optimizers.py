"""Optimizers: bytes of states a parameter, sources, and names that are none."""

from __future__ import annotations

import pytest

import shapewright
from shapewright.core.errors import WorkloadError
from shapewright.lowering.model import lower
from shapewright.lowering.operations.gemm import Gemm
from shapewright.memory.estimate import MemoryEstimate, estimate_memory
from shapewright.models.read import read_model
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.optimizers import OPTIMIZERS, Optimizer, find_recipe
from shapewright.workload.workload import Workload

LLAMA_3_8B_PARAMETERS = 8_030_261_248
LLAMA_3_8B_EMBEDDINGS = 2 * 128_256 * 4096 + 4096  # and the final norm


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"),
    [
        ("adamw", 2 + 4 + 4 + 8),
        ("adamw-narrow-gradients", 2 + 2 + 4 + 8),
        ("adamw-bf16", 2 + 2 + 4),
        ("adamw-bf16-kahan", 2 + 2 + 4 + 2),
        ("adamw-8bit", 2 + 4 + 4 + 2),
        ("adafactor", 2 + 4 + 4 + 4),
        ("adafactor-factored", 2 + 4 + 4),
        ("lion", 2 + 4 + 4 + 4),
        ("sgd-momentum", 2 + 4 + 4 + 4),
    ],
)
def test_optimizers_in_mixed_precision(name: str, bytes_per_parameter: int) -> None:
    """Bytes per parameter of weight, gradient, master copy and states, by ml-engineering and the optimizers' papers."""
    found = shapewright.fits("llama-3-8b", device="h100-sxm-80gb", optimizer=name).busiest
    total_bytes = found.weights_bytes + found.gradients_bytes + found.optimizer_bytes
    assert total_bytes == bytes_per_parameter * LLAMA_3_8B_PARAMETERS


def test_muon_leaves_embeddings_to_adamw() -> None:
    """Muon keeps one momentum of each matrix and two moments of each embedding: 4 bytes more of those."""
    muon, lion = (
        shapewright.fits("llama-3-8b", device="h100-sxm-80gb", optimizer=name).busiest for name in ("muon", "lion")
    )
    assert muon.optimizer_bytes - lion.optimizer_bytes == 4 * LLAMA_3_8B_EMBEDDINGS


@pytest.mark.parametrize(("name", "bytes_per_parameter"), [("adamw", 16), ("adamw-8bit", 10), ("sgd-momentum", 12)])
def test_fp32_training_has_no_separate_master(name: str, bytes_per_parameter: int) -> None:
    """In fp32 the weight takes 4 bytes without a separate master copy."""
    recipe = find_recipe(name, "fp32")
    assert recipe.weight_bytes + recipe.gradient_bytes + recipe.optimizer_bytes == bytes_per_parameter


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_optimizer_has_a_source(optimizer: Optimizer) -> None:
    """No number without a place where it can be looked up."""
    assert "arXiv" in optimizer.source or "/" in optimizer.source


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("adamv", "bf16", "unknown optimizer 'adamv'; did you mean"),
        ("zzz", "bf16", "choose one of adamw, "),
        ("adamw-bf16", "fp32", "cannot train in dtype=fp32"),
    ],
)
def test_unknown_optimizers_are_rejected(name: str, dtype: str, words: str) -> None:
    """The error names the value and what there is."""
    with pytest.raises(WorkloadError, match=words):
        find_recipe(name, dtype)


def memory_of(optimizer: str, **workload: object) -> MemoryEstimate:
    """Memory of LLaMA 7B with a batch of 256 tokens, as arXiv 2403.03507 gives it."""
    config = read_model("llama-7b").config
    job = Workload(micro_batch_size=1, seq_len=256, optimizer=optimizer, **workload)  # type: ignore[arg-type]
    return estimate_memory(config, job, ParallelLayout())


def test_llama_7b_in_bf16_needs_58_gb() -> None:
    """Section 1 of arXiv 2403.03507: 14 GB of parameters, 42 GB of Adam states and gradients, 58 GB in all."""
    found = memory_of("adamw-bf16")
    assert found.weights_bytes == pytest.approx(14e9, rel=0.05)
    assert found.gradients_bytes + found.optimizer_bytes == pytest.approx(42e9, rel=0.05)
    assert found.total_bytes == pytest.approx(58e9, rel=0.05)


def test_galore_fits_llama_7b_on_24_gb() -> None:
    """The abstract of arXiv 2403.03507: optimizer memory less by up to 82.5 %, total by 63.3 %, and 7B within 24 GB."""
    baseline, galore = memory_of("adamw-bf16"), memory_of("galore-8bit")
    assert galore.total_bytes < 24e9
    assert 1.0 - galore.optimizer_bytes / baseline.optimizer_bytes == pytest.approx(0.825, abs=0.01)
    assert 1.0 - galore.total_bytes / baseline.total_bytes == pytest.approx(0.633, abs=0.02)


def test_q_galore_fits_llama_7b_on_16_gb() -> None:
    """The abstract of arXiv 2407.08296: Llama-7B trained on a card of 16 GB, with weights in 8 bits."""
    q_galore, galore = memory_of("q-galore"), memory_of("galore-8bit")
    assert q_galore.total_bytes < 16e9
    assert q_galore.weights_bytes == galore.weights_bytes / 2


def test_projected_states_equal_a_hand_count() -> None:
    """Rank 128 of GPT-2 small: (768 x 128 + 128 x l) elements of P and moments for each matrix, full ones elsewhere."""
    found = estimate_memory(
        read_model("gpt2").config, Workload(optimizer="galore", galore_rank=128, micro_batch_size=1), ParallelLayout()
    )
    sides = (3 * 768, 768, 4 * 768, 4 * 768)
    states = 12 * sum(2 * 768 * 128 + 4 * 128 * long for long in sides)
    outside = 4 * (50257 * 768 + 1024 * 768 + 2 * 768)
    # Norms and biases of the layers are counted at the average of their layer's matrices.
    assert found.optimizer_bytes == pytest.approx(states + outside, rel=0.003)


def test_projections_and_their_svd_take_time() -> None:
    """Each matrix has a GEMM to project its gradient, one to expand the update, and the SVD's share of a step."""
    config = read_model("llama-7b").config
    often, seldom = (
        [
            one
            for one in lower(config, Workload(optimizer="galore", galore_interval=interval), ParallelLayout())
            if one.role.startswith("galore_")
        ]
        for interval in (100, 200)
    )
    assert len(often) == 3 * 7
    project = next(one for one in often if one.name == "galore.mlp.up.project")
    assert isinstance(project, Gemm)
    assert (project.m, project.n, project.k, project.repeats) == (1024, 11008, 4096, 32)
    svd_flops = [sum(one.flops for one in found if one.role == "galore_svd") for found in (often, seldom)]
    assert svd_flops[0] == pytest.approx(2 * svd_flops[1], rel=0.001)


@pytest.mark.parametrize("name", ["adam", "lora-plus"])
def test_same_states_as_adamw(name: str) -> None:
    """Adam, and AdamW with LoRA+'s learning rates, keep what AdamW keeps."""
    assert find_recipe(name, "bf16") == find_recipe("adamw", "bf16")


def test_projected_gradients_are_of_whole_matrices() -> None:
    """GaLore does not combine with adapters, and its fields need it."""
    with pytest.raises(WorkloadError, match="does not combine"):
        Workload(optimizer="galore", finetune="lora")
    with pytest.raises(WorkloadError, match="galore_rank=8 requires optimizer='galore'"):
        Workload(galore_rank=8)


def test_learning_rates_of_adapters_need_adapters() -> None:
    """LoRA+ without adapters would be AdamW under another name."""
    assert Workload(optimizer="lora-plus", finetune="qlora").optimizer == "lora-plus"
    with pytest.raises(WorkloadError, match="optimizer='lora-plus' sets learning rates of LoRA adapters"):
        Workload(optimizer="lora-plus")
