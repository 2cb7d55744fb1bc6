"""Optimizers: bytes of states a parameter, sources, and names that are none."""

from __future__ import annotations

import pytest

import shapewright
from shapewright.core.errors import WorkloadError
from shapewright.memory import OPTIMIZERS, find_recipe
from shapewright.workload.optimizers import Optimizer

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
    """Weight, gradient, master and states, by the tables of ml-engineering and the optimizers' papers."""
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
        ("adam", "bf16", "unknown optimizer 'adam'; did you mean 'adamw'"),
        ("zzz", "bf16", "choose one of adamw, "),
        ("adamw-bf16", "fp32", "cannot train in dtype=fp32"),
    ],
)
def test_unknown_optimizers_are_rejected(name: str, dtype: str, words: str) -> None:
    """The error names the value and what there is."""
    with pytest.raises(WorkloadError, match=words):
        find_recipe(name, dtype)
