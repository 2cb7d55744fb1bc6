"""Published parameter counts from public functions; where a peer differs, by how much and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vector_models import fairseq_moe, gpt

from shapewright.models.parameters import count_parameters
from shapewright.prediction.calculators.parameters import explain_parameters


@pytest.mark.parametrize(
    ("h", "layers", "heads", "billions"),
    [
        (2304, 24, 24, 1.65),
        (3072, 30, 32, 3.56),
        (4096, 36, 32, 7.47),
        (6144, 40, 48, 18.45),
        (8192, 48, 64, 39.10),
        (10240, 60, 80, 76.05),
        (12288, 80, 96, 145.62),
        (16384, 96, 128, 310.13),
        (20480, 105, 128, 529.60),
        (25600, 128, 160, 1008.04),
    ],
)
def test_every_row_of_the_megatron_table(h: int, layers: int, heads: int, billions: float) -> None:
    """Table 1 of arXiv 2104.04473: 12 L h^2 + 13 L h + (V + s) h, and 2 h of the final norm that it leaves out."""
    config = replace(gpt(layers, h, heads), tied_embeddings=True, qkv_bias=True, attention_out_bias=True, mlp_bias=True)
    total = count_parameters(config).total
    assert total == 12 * layers * h * h + 13 * layers * h + (51200 + 2048) * h + 2 * h
    assert total / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize(
    ("h", "layers", "heads", "billions"),
    [(6144, 48, 64, 22.06), (12288, 96, 96, 174.58), (20480, 105, 128, 529.54), (25600, 128, 160, 1007.96)],
)
def test_totals_of_megatrons_report(h: int, layers: int, heads: int, billions: float) -> None:
    """Its totals leave out positions and the biases of matrices: 12 L h^2 + 4 L h + V h + 2 h."""
    config = replace(gpt(layers, h, heads), tied_embeddings=True, position_embedding="none")
    assert count_parameters(config).total / 1e9 == pytest.approx(billions, abs=0.005)


def test_cookbook_counts_gpt_3() -> None:
    """calc_params -l 96 -hs 12288: 57.98 B attention, 115.96 B MLP, 175.24 B in all.

    It counts 8 L h for the norms, which have 4 L h: two norms of two vectors a layer, once.
    """
    config = gpt(96, 12288, 96)
    terms = {term.name: term.value for term in explain_parameters(config)}

    assert terms["attention"] / 1e9 == pytest.approx(57.98, abs=0.005)
    assert terms["mlp"] / 1e9 == pytest.approx(115.96, abs=0.005)
    assert (terms["embedding"] - 2048 * 12288 + terms["head"]) / 1e9 == pytest.approx(1.26, abs=0.005)
    assert terms["norms"] == 4 * 96 * 12288
    assert (sum(terms.values()) + terms["norms"]) / 1e9 == pytest.approx(175.24, abs=0.01)


@pytest.mark.parametrize(("every", "experts_b", "router_m"), [(1, 28.99, 4.72), (2, 14.52, 2.36)])
def test_cookbook_counts_fairseq_moe(every: int, experts_b: float, router_m: float) -> None:
    """calc_params -l 12 -hs 768 --moe -e 512: experts on all layers, or with -ei 2 on every second one."""
    terms = {term.name: term.value for term in explain_parameters(fairseq_moe(every))}

    assert terms["attention"] / 1e6 == pytest.approx(28.31, abs=0.01)
    assert (terms["experts"] + terms.get("mlp", 0)) / 1e9 == pytest.approx(experts_b, abs=0.01)
    assert terms["router"] / 1e6 == pytest.approx(router_m, abs=0.01)
    assert (terms["embedding"] + terms["head"]) / 1e6 == pytest.approx(78.64, abs=0.02)
