"""LoRA adapters in serving: memory, the GEMMs of each pass, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from command_line import run as run_command
from served import make_instance, plan
from shapewright.core.errors import WorkloadError
from shapewright.lowering.operations.gemm import Gemm
from shapewright.optimize.serving.adapters import Adapters
from shapewright.optimize.serving.point import Instance
from shapewright.optimize.serving.request import ServingRequest

RANK = 16
ADAPTERS = Adapters(rank=RANK, num_resident=8)


def instance_with(adapters: Adapters | None, **degrees: int) -> Instance:
    """An instance of Llama 3 8B on H100s."""
    return make_instance(request=ServingRequest(prompt_len=1000, output_len=101, adapters=adapters), **degrees)


def thin_gemms(operations: Any) -> list[Gemm]:
    """The GEMMs of adapters."""
    return [operation for operation in operations if isinstance(operation, Gemm) and operation.is_adapter]


def test_memory_by_hand() -> None:
    """Llama 3 8B: r (n + k) of seven matrices in 32 layers, 2 bytes each, eight times; the cache has that much less."""
    attention = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096)
    mlp = 3 * (4096 + 14336)
    expected = 8 * RANK * 32 * (attention + mlp) * 2.0
    plain, adapted = instance_with(None), instance_with(ADAPTERS)

    assert adapted.adapters_bytes == expected
    assert plain.free_bytes(512)[0] - adapted.free_bytes(512)[0] == pytest.approx(expected)


def test_a_tensor_axis_splits_one_of_both_matrices() -> None:
    """On two devices B of column-parallel and A of row-parallel weights are halved, the others are whole."""
    halves = (4096 + 2048) + 2 * (4096 + 512) + (2048 + 4096) + 2 * (4096 + 7168) + (7168 + 4096)
    assert instance_with(ADAPTERS, tensor_parallel=2).adapters_bytes == 8 * RANK * 32 * halves * 2.0


def test_passes_have_two_thin_gemms_beside_each_weight() -> None:
    """64 sequences use all eight adapters: eight batched GEMMs of 8 tokens, as many weights as the model has."""
    plain = instance_with(None).passes.decode(64, 1000)
    adapted = instance_with(ADAPTERS).passes.decode(64, 1000)
    thin = thin_gemms(adapted.operations)
    weights = [
        operation for operation in plain.operations if isinstance(operation, Gemm) and operation.stage == "every"
    ]

    assert len(adapted.operations) == len(plain.operations) + len(thin)
    assert len(thin) == 2 * len(weights)
    assert {(gemm.batch, gemm.m) for gemm in thin} == {(8, 8)}
    (inner,) = (gemm for gemm in thin if gemm.role == "down.lora_a")
    (outer,) = (gemm for gemm in thin if gemm.role == "down.lora_b")
    assert (inner.n, inner.k, outer.n, outer.k) == (RANK, 14336, 4096, RANK)
    fused = next(gemm for gemm in thin if gemm.role == "qkv.lora_a")
    assert fused.n == 3 * RANK


def test_a_part_of_a_fused_projection_has_adapters_of_its_own() -> None:
    """With adapters on queries and values alone, the fused projection has two: 4096 and 1024 of its 6144 outputs."""
    targets = Adapters(rank=RANK, num_resident=8, targets="q_proj,v_proj")
    inner, outer = thin_gemms(instance_with(targets).passes.decode(64, 1000).operations)
    assert (inner.role, inner.n, outer.n) == ("qkv.lora_a", 2 * RANK, 4096 + 1024)


def test_mixed_passes_use_the_adapters_of_all_their_sequences() -> None:
    """A prompt alone uses one adapter; with 63 decoding sequences in its pass, all eight."""
    passes = instance_with(ADAPTERS).passes
    prefill, decode = passes.prefill(1, 512), passes.decode(63, 1000)
    mixed = passes.mixed(decode, prefill)

    assert {gemm.batch for gemm in thin_gemms(prefill.operations)} == {1}
    assert {(gemm.batch, gemm.m) for gemm in thin_gemms(mixed.operations)} == {(8, -(-(512 + 63) // 8))}
    assert len(thin_gemms(mixed.operations)) == len(thin_gemms(decode.operations))


@pytest.mark.parametrize(("num_sequences", "expected"), [(1, 1), (2, 2), (8, 5), (1000, 8)])
def test_adapters_of_a_pass_are_those_that_its_sequences_choose(num_sequences: int, expected: int) -> None:
    """8 (1 - (7/8)^S): 1, 1.9, 5.3 and 8."""
    assert ADAPTERS.num_active(num_sequences) == expected


def test_adapters_cost_time_and_sequences() -> None:
    """More adapters and larger ranks never serve more, and hold fewer sequences; targets decide how much."""
    layout = {"tensor_parallel": 1, "pipeline_parallel": 1}

    def best(adapters: dict[str, Any] | None) -> tuple[float, int]:
        found = plan(adapters=adapters, layout=layout)
        point = found.best()
        assert point is not None
        return point.tokens_per_s_per_device, found.capacities[0].most_sequences

    none = best(None)
    some = best({"rank": 16, "num_resident": 4, "targets": "q_proj,v_proj"})
    more = best({"rank": 64, "num_resident": 64})
    assert none[0] > some[0] > more[0]
    assert none[1] > some[1] > more[1]


def test_experts_have_no_adapters() -> None:
    """The adapters of a mixture of experts are those of its attention, and a note says so."""
    found = plan("mixtral-8x7b", adapters={"rank": 16, "num_resident": 2}, num_devices=4)
    assert any("routed experts have no LoRA adapters" in note for note in found.notes)
    decode = make_instance("mixtral-8x7b", found.request).passes.decode(4, 10)
    assert {gemm.block for gemm in thin_gemms(decode.operations)} == {"attention"}


def test_command_shows_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON and text name rank, number and modules."""
    job = ["serve-plan", "llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "500", "--osl", "100", "--tp", "1"]
    job += ["--formats", "none", "--gpus", "1", "--lora-rank", "8", "--lora-adapters", "3", "--lora-targets", "q_proj"]
    _, text, _ = run_command(job, capsys)
    _, out, _ = run_command([*job, "--json"], capsys)

    assert json.loads(out)["adapters"] == {"rank": 8, "num_resident": 3, "targets": "q"}
    assert "3 resident" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora-rank", "8"], "--lora-rank and --lora-adapters belong together"),
        (["--lora-rank", "0", "--lora-adapters", "1"], "rank=0 must be an integer from 1"),
        (["--lora-rank", "8", "--lora-adapters", "1", "--lora-targets", "q_porj"], "is unknown"),
        (["--lora-rank", "8", "--arrivals", "1/s"], "--lora-rank has no effect on simulated traffic"),
        (["--lora-rank", "4096", "--lora-adapters", "5000"], "give fewer LoRA adapters, --tensor-parallel or"),
    ],
)
def test_bad_adapters_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    job = ["serve-plan", "llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "500", "--osl", "100", "--gpus", "1"]
    code, out, err = run_command([*job, *arguments], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_bad_mappings_are_errors() -> None:
    """In Python, a mapping without a rank or with other keys names the keys."""
    with pytest.raises(WorkloadError, match="adapters has rank; give rank and num_resident"):
        plan(adapters={"rank": 8})
