"""Memory as papers and calculators published it, from public functions."""

from __future__ import annotations

import pytest

import shapewright
from shapewright.core.units import GIB, MIB
from shapewright.memory.estimate import estimate_memory, estimate_stages
from shapewright.memory.saved_tensors import list_saved_tensors
from shapewright.memory.tensors import select_kept_tensors
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

# arXiv 2205.05198, Figure 1 and Table 2: parameters with optimizer states, then activations of the first stage in GiB
# with tensor and sequence parallelism and selective recomputation, with tensor parallelism alone, with full
# recomputation. Layers, width, heads, stages, chunks, micro-batch.
FIRST_STAGES = {
    "22B": ((48, 6144, 64, 1, 1, 4), 45.5625, 9.5625, 59.25, 4.50),
    "175B": ((96, 12288, 96, 8, 3, 1), 45.5625, 12.3515625, 66.84375, 5.81),
    "530B": ((105, 20480, 128, 35, 3, 1), 31.640625, 23.076171875, 114.0234375, 10.86),
    "1T": ((128, 25600, 160, 64, 1, 1), 32.958984375, 26.5625, 131.25, 12.50),
}


def first_stage_gib(name: str, recompute: str, *, sequence_parallel: bool) -> float:
    """Activations of the layers of the first stage. [GiB]"""
    (num_layers, hidden_size, num_heads, stages, chunks, batch), *_ = FIRST_STAGES[name]
    config = TransformerConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=51200,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        tied_embeddings=True,
    )
    workload = Workload(
        micro_batch_size=batch,
        seq_len=2048,
        attention="unfused",
        recompute=recompute,
        global_batch_size=4 * stages * batch,
    )
    layout = ParallelLayout(
        tensor_parallel=8, pipeline_parallel=stages, virtual_pipeline=chunks, sequence_parallel=sequence_parallel
    )
    both_ends = estimate_stages(config, workload, layout)[0].activations_bytes
    # Beside the layers: a mask of the embedding's dropout of every micro-batch in flight, one byte an element, and
    # without a pipeline the inputs of the final norm and of the logits.
    elements = 2048 * batch * hidden_size / (8 if sequence_parallel else 1)
    in_flight = 1 if stages == 1 else stages * (1 + (stages - 1) / (stages * chunks) * (chunks > 1))
    return (both_ends - elements * in_flight - 4 * elements * (stages == 1)) / GIB


@pytest.mark.parametrize("name", FIRST_STAGES)
def test_first_stage_totals_of_the_paper(name: str) -> None:
    """Formula of a layer, times the layers, times what interleaving adds: exact."""
    _, _, selective, tensor_alone, full = FIRST_STAGES[name]

    assert first_stage_gib(name, "selective", sequence_parallel=True) == pytest.approx(selective, rel=1e-9)
    assert first_stage_gib(name, "none", sequence_parallel=False) == pytest.approx(tensor_alone, rel=1e-9)
    assert first_stage_gib(name, "full", sequence_parallel=False) == pytest.approx(full, abs=0.005)


@pytest.mark.parametrize("name", FIRST_STAGES)
def test_states_of_the_paper(name: str) -> None:
    """18 bytes for each of the 12 L h^2 weights over t p devices, in GiB."""
    (num_layers, hidden_size, num_heads, stages, _, _), states_gib, *_ = FIRST_STAGES[name]
    config = TransformerConfig(
        hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads, vocab_size=8, norm_affine=False
    )
    layout = ParallelLayout(tensor_parallel=8, pipeline_parallel=stages)
    middle = estimate_stages(config, Workload(micro_batch_size=1), layout)[stages // 2]
    total_bytes = middle.weights_bytes + middle.gradients_bytes + middle.optimizer_bytes
    assert total_bytes / GIB == pytest.approx(states_gib * _most_layers(num_layers, stages), rel=1e-3)


def _most_layers(num_layers: int, stages: int) -> float:
    """Layers of the fullest stage over those of an average one."""
    return -(-num_layers // stages) * stages / num_layers


@pytest.mark.parametrize(
    ("name", "parameters_billion", "states_mib"),
    [("22B", 2.7584, 19729.78), ("175B", 2.7971, 20006.74), ("530B", 2.0188, 14439.27), ("1T", 2.1301, 15235.85)],
)
def test_sharded_states_agree_with_megatrons_calculator(
    name: str, parameters_billion: float, states_mib: float
) -> None:
    """Parameters of the most loaded rank, and its states over 8 replicas: 6 + 12/8 bytes each (Megatron-LM d98e8a6)."""
    (num_layers, hidden_size, num_heads, stages, chunks, _), *_ = FIRST_STAGES[name]
    config = TransformerConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=51200,
        norm_bias=True,
        tied_embeddings=True,
    )
    layout = ParallelLayout(
        tensor_parallel=8, pipeline_parallel=stages, virtual_pipeline=chunks, data_parallel=8, zero_stage=1
    )
    first = estimate_stages(config, Workload(micro_batch_size=1), layout)[0]
    total_bytes = first.weights_bytes + first.gradients_bytes + first.optimizer_bytes

    assert first.weights_bytes / 2 / 1e9 == pytest.approx(parameters_billion, abs=1e-4)
    assert total_bytes / MIB == pytest.approx(states_mib, abs=0.1)


@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("22B", (100, 66.84, 49.42, 16.18, 7.64)),
        ("175B", (100, 62.04, 56.53, 18.49, 8.71)),
        ("530B", (100, 58.31, 62.04, 20.27, 9.42)),
        ("1T", (100, 58.31, 62.04, 20.27, 9.42)),
    ],
)
def test_share_of_tensor_parallel_activations(name: str, percent: tuple[float, ...]) -> None:
    """Figure 7 of arXiv 2205.05198, read off to 0.15: TP, with sequence parallelism, with selective, both, full."""
    (_, hidden_size, num_heads, _, _, _), *_ = FIRST_STAGES[name]
    config = TransformerConfig(
        hidden_size=hidden_size,
        num_layers=1,
        num_heads=num_heads,
        vocab_size=8,
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )

    def layer_bytes(recompute: str, sequence_parallel: bool) -> float:
        workload = Workload(micro_batch_size=1, seq_len=2048, attention="unfused", recompute=recompute)
        layout = ParallelLayout(tensor_parallel=8, sequence_parallel=sequence_parallel)
        return sum(
            saved.num_bytes for saved in select_kept_tensors(list_saved_tensors(config, workload, layout), recompute)
        )

    # The last is full recomputation with its input on every rank.
    schemes = (("none", False), ("none", True), ("selective", False), ("selective", True), ("full", False))
    shares = [100 * layer_bytes(*scheme) / layer_bytes("none", False) for scheme in schemes]
    assert shares == pytest.approx(percent, abs=0.15)


def test_gpt_2_xl_states() -> None:
    """1.5 B parameters take 3 GB of fp16 weights and at least 24 GB of states (arXiv 1910.02054, section 3.1)."""
    found = shapewright.fits("gpt2-xl", device="a100-sxm-80gb", optimizer="adamw-narrow-gradients").busiest
    assert found.weights_bytes / 1e9 == pytest.approx(3.1, abs=0.1)
    assert found.weights_bytes + found.gradients_bytes + found.optimizer_bytes > 24e9


def test_cache_of_keys_and_values() -> None:
    """Width 4096, 32 layers, 4096 tokens, all heads: 2 GiB. EleutherAI/cookbook prints 1: it leaves values out."""
    config = TransformerConfig(hidden_size=4096, num_layers=32, num_heads=32, vocab_size=50257)
    workload = Workload(phase="prefill", micro_batch_size=1, seq_len=4096)
    assert estimate_memory(config, workload, ParallelLayout()).kv_cache_bytes == 2 * GIB
