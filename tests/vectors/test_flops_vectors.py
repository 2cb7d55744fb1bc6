"""Published FLOPs and rates from public functions; where a peer differs, by how much and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vector_models import TOKENS, fairseq_moe, gpt

from shapewright.lowering.flops import count_convention_flops, count_hardware_flops
from shapewright.models.read import read_model
from shapewright.prediction.calculators.flops import count_flops
from shapewright.workload.workload import Workload


@pytest.mark.parametrize(("passes", "zetta"), [(4, 429.44), (3, 322.18), (1, 107.64)])
def test_cookbook_counts_the_flops_of_gpt_3(passes: int, zetta: float) -> None:
    """calc_flops -l 96 -hs 12288, 300 B tokens: 4 passes with recomputation, 3 without, 1 in inference.

    It takes embedding and logits once, T (4 h + 2 h V), however many passes there are; they are run in each.
    """
    found = count_flops(gpt(96, 12288, 96), Workload(seq_len=2048))
    parts = {term.name: term.value for term in found.terms}
    layers = parts["layers, forward"] + parts["attention, forward"]
    theirs = TOKENS * (passes * layers + parts["logits, forward"] + 4 * 12288)

    assert theirs / 1e21 == pytest.approx(zetta, abs=0.01)
    assert pytest.approx(104.37, abs=0.01) == TOKENS * 4 * 2 * 3 * 96 * 12288**2 / 1e21
    assert TOKENS * 4 * parts["attention, forward"] / 2e21 == pytest.approx(5.8, abs=0.01)
    assert TOKENS * parts["logits, forward"] / 1e18 == pytest.approx(377.5, abs=0.1)


def test_cookbook_counts_the_flops_of_fairseq_moe() -> None:
    """calc_flops -l 12 -hs 768 --moe -e 512, in EFLOPs: 50.96 + 16.99 + 135.9 of weights, 2 x 45.3 of attention.

    Its router has 5.66, half of what a multiplication and an addition for each weight are.
    """
    found = count_flops(fairseq_moe(), Workload(seq_len=2048))
    parts = {term.name: term.value for term in found.terms}
    weights = TOKENS * 4 * parts["layers, forward"] / 1e18
    router = TOKENS * 4 * 2 * 12 * 768 * 512 / 1e18

    assert weights - router == pytest.approx(50.96 + 16.99 + 135.9, abs=0.02)
    assert TOKENS * 4 * parts["attention, forward"] / 1e18 == pytest.approx(2 * 45.3, abs=0.02)
    assert TOKENS * (parts["logits, forward"] + 4 * 768) / 1e18 == pytest.approx(23.59, abs=0.01)
    assert router / 2 == pytest.approx(5.66, abs=0.01)


@pytest.mark.parametrize(
    ("layers", "h", "heads", "devices", "batch", "seconds", "tflops"),
    [
        (24, 1920, 15, 1, 8, 1.121, 71.896),
        (24, 1920, 15, 1, 16, 1.076, 149.805),
        (42, 4096, 32, 8, 8, 1.407, 52.199),
        (42, 4096, 32, 8, 16, 1.343, 109.373),
    ],
)
def test_megatron_readme_of_2020(
    layers: int, h: int, heads: int, devices: int, batch: int, seconds: float, tflops: float
) -> None:
    """TFLOP/s of a device by eq. 3 of arXiv 2104.04473 at s = 1024; published as 71.9, 149.8, 52.2 and 109.3."""
    step = Workload(seq_len=1024, micro_batch_size=batch, global_batch_size=batch, recompute="full")
    flops = count_hardware_flops(replace(gpt(layers, h, heads), tied_embeddings=True), step)
    assert flops / (devices * seconds * 1e12) == pytest.approx(tflops, abs=0.001)


def test_speed_ups_of_selective_recomputation() -> None:
    """29.1, 31.9, 29.7 and 32.1 %: full over selective step times of arXiv 2205.05198, table 5."""
    measured = {"22B": (1.42, 1.10), "175B": (18.13, 13.75), "530B": (49.05, 37.83), "1T": (94.42, 71.49)}
    published = {"22B": 29.1, "175B": 31.9, "530B": 29.7, "1T": 32.1}
    shapes = {"22B": (48, 6144, 64), "175B": (96, 12288, 96), "530B": (105, 20480, 128), "1T": (128, 25600, 160)}
    for name, (full_s, selective_s) in measured.items():
        flops = count_convention_flops(gpt(*shapes[name]), Workload(seq_len=2048), 1, "megatron").model_flops
        rates = flops / selective_s, flops / full_s
        assert 100 * (rates[0] / rates[1] - 1) == pytest.approx(published[name], abs=0.06)


@pytest.mark.parametrize(
    ("model", "tokens_per_s", "gflops_per_token", "percent"),
    [("llama-3-8b", 2904, 61.06, 56.8), ("llama-2-13b", 2162, 88.2, 61.1)],
)
def test_torchtitan_on_a100(model: str, tokens_per_s: float, gflops_per_token: float, percent: float) -> None:
    """6 N + 12 L h s with both embeddings in N; s = 8192 and 4096, 312 TFLOP/s."""
    seq_len = 8192 if model == "llama-3-8b" else 4096
    flops = (
        count_convention_flops(read_model(model).config, Workload(seq_len=seq_len), 1, "torchtitan").model_flops
        / seq_len
    )
    assert flops / 1e9 == pytest.approx(gflops_per_token, rel=2e-3)
    assert 100 * tokens_per_s * flops / 312e12 == pytest.approx(percent, abs=0.1)
