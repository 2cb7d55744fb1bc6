"""Checks of layouts: micro-batches of a step, layers of a stage, and layouts that do not divide the model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.lowering.checks import (
    MAX_SEQUENCE_TOKENS,
    describe_long_sequence,
    possible_degrees,
    validate_layout,
    validate_lengths,
)
from shapewright.lowering.counts import layers_per_stage, num_microbatches
from shapewright.lowering.model import lower
from shapewright.lowering.operations.operation import Operation
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

CONFIG = TransformerConfig(
    hidden_size=64, num_heads=8, num_kv_heads=4, num_layers=4, vocab_size=96, intermediate_size=160, fused_qkv=True
)
WORKLOAD = Workload(micro_batch_size=2, seq_len=32)


@pytest.mark.parametrize(
    ("workload", "layout", "expected"),
    [
        ({"micro_batch_size": 4, "global_batch_size": 128}, {"data_parallel": 8}, 4),
        ({"micro_batch_size": 1, "global_batch_size": 8}, {"data_parallel": 2, "tensor_parallel": 2}, 4),
        ({"micro_batch_size": 4}, {"pipeline_parallel": 6, "data_parallel": 3}, 6),
        ({"micro_batch_size": 4, "phase": "prefill", "global_batch_size": 7}, {"data_parallel": 3}, 1),
    ],
)  # fmt: skip
def test_micro_batches_of_a_step(workload: dict[str, Any], layout: dict[str, int], expected: int) -> None:
    """GBS = MBS * DP * accumulation; by default one micro-batch per stage; in inference a pass is a step."""
    assert num_microbatches(Workload(**workload), ParallelLayout(**layout)) == expected


def test_indivisible_global_batch_is_rejected() -> None:
    """Both numbers and the nearest that work."""
    with pytest.raises(WorkloadError, match=r"global_batch_size=100 .* 4 \* 8; try 96 or 128"):
        num_microbatches(Workload(micro_batch_size=4, global_batch_size=100), ParallelLayout(data_parallel=8))
    with pytest.raises(WorkloadError, match=r"global_batch_size=3 .* 4 \* 8; try 32"):
        num_microbatches(Workload(micro_batch_size=4, global_batch_size=3), ParallelLayout(data_parallel=8))


@pytest.mark.parametrize(("num_layers", "stages", "expected"), [(96, 8, 12), (61, 16, 4), (4, 4, 1), (5, 1, 5)])
def test_layers_of_the_busiest_stage(num_layers: int, stages: int, expected: int) -> None:
    """Rounded up."""
    config = TransformerConfig(hidden_size=64, num_heads=4, num_layers=num_layers, vocab_size=96)
    assert layers_per_stage(config, ParallelLayout(pipeline_parallel=stages)) == expected


EXPERTS = TransformerConfig(
    hidden_size=64, num_heads=8, num_layers=4, vocab_size=96, num_experts=6, num_experts_per_token=2,
    moe_intermediate_size=44, intermediate_size=160, moe_layers=(False, True),
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (CONFIG, {"tensor_parallel": 6}, "tensor_parallel=6 must divide num_heads=8; try 4 or 8"),
        (CONFIG, {"tensor_parallel": 16}, "tensor_parallel=16 must divide num_heads=8; try 8"),
        (EXPERTS, {"tensor_parallel": 8}, "tensor_parallel=8 must divide moe_intermediate_size=44; try 4"),
        (
            replace(CONFIG, intermediate_size=164),
            {"tensor_parallel": 8},
            "tensor_parallel=8 must divide intermediate_size=164; try 4",
        ),
        (
            replace(EXPERTS, moe_intermediate_size=48, shared_expert_intermediate_size=44),
            {"tensor_parallel": 8},
            "tensor_parallel=8 must divide shared_expert_intermediate_size=44; try 4",
        ),
        (
            EXPERTS,
            {"expert_parallel": 4, "data_parallel": 4},
            "expert_parallel=4 must divide num_experts=6; try 3 or 6",
        ),
        (
            CONFIG,
            {"expert_parallel": 2, "data_parallel": 2},
            "expert_parallel=2 requires a model with experts, but num_experts=0; use expert_parallel=1",
        ),
        (
            CONFIG,
            {"pipeline_parallel": 5},
            "pipeline_parallel * virtual_pipeline = 5 * 1 must not exceed num_layers=4; lower pipeline_parallel to 4",
        ),
        (
            CONFIG,
            {"pipeline_parallel": 2, "virtual_pipeline": 3},
            "pipeline_parallel * virtual_pipeline = 2 * 3 must not exceed num_layers=4; lower pipeline_parallel, or "
            "count both ends as layers with account_for_embedding_in_pipeline_split and "
            "account_for_loss_in_pipeline_split",
        ),
        (
            CONFIG,
            {"context_parallel": 5, "tensor_parallel": 4, "sequence_parallel": False},
            "seq_len=32 must be a multiple of context_parallel=5; try seq_len 30 or 35",
        ),
        (
            CONFIG,
            {"context_parallel": 8, "tensor_parallel": 8},
            "seq_len=32 must be a multiple of context_parallel * tensor_parallel = 8 * 8; "
            "try seq_len 64, or set sequence_parallel=False",
        ),
    ],
)
def test_layout_that_does_not_divide_the_model_is_rejected(
    config: TransformerConfig, layout: dict[str, int], message: str
) -> None:
    """One line with what is wrong, both numbers and the nearest values that work for every field at once."""
    with pytest.raises(LayoutError) as caught:
        validate_layout(config, WORKLOAD, ParallelLayout(**layout))
    assert str(caught.value) == message


def test_key_value_heads_must_split_or_replicate_evenly() -> None:
    """6 key-value heads on 4 devices can be neither split nor replicated evenly; 12 query heads allow 3 or 6."""
    config = TransformerConfig(hidden_size=96, num_heads=12, num_kv_heads=6, num_layers=1, vocab_size=96)
    with pytest.raises(LayoutError, match=r"tensor_parallel=4 must divide num_kv_heads=6 or be a multiple.*try 2$"):
        validate_layout(config, WORKLOAD, ParallelLayout(tensor_parallel=4))


def test_decode_does_not_check_the_sequence_length() -> None:
    """A decode step has no sequence to split: 33 tokens of context on 2 devices are fine."""
    decode = Workload(phase="decode", micro_batch_size=1, seq_len=33, context_len=33)
    operations: tuple[Operation, ...] = lower(CONFIG, decode, ParallelLayout(context_parallel=2))
    assert operations


def test_equal_refusals_have_equal_reasons() -> None:
    """Shapes of other sizes that a degree does not divide are counted together: the reason leaves out the size."""
    reasons = set()
    for num_heads in (10, 14):
        with pytest.raises(LayoutError) as caught:
            validate_layout(
                replace(CONFIG, num_heads=num_heads, num_kv_heads=num_heads, hidden_size=64 * num_heads),
                WORKLOAD,
                ParallelLayout(tensor_parallel=4),
            )
        reasons.add(caught.value.reason)

    assert reasons == {"tensor_parallel=4 must divide num_heads"}


LAST, LORA = {"finetune": "last-layers"}, {"finetune": "lora"}
LEARNED = replace(CONFIG, position_embedding="learned", max_position_embeddings=64)


@pytest.mark.parametrize(
    ("config", "workload", "layout", "field", "most"),
    [
        (CONFIG, LORA, {}, "lora_rank", 64),  # the hidden size
        (CONFIG, LAST, {}, "last_layers", 4),
        (CONFIG, {}, {}, "pipeline_parallel", 4),
        (CONFIG, {}, {"pipeline_parallel": 2}, "virtual_pipeline", 2),
        (replace(CONFIG, vocab_size=4), {}, {}, "tensor_parallel", 4),
        (LEARNED, {}, {}, "seq_len", 64),
        (LEARNED, {"phase": "prefill", "context_len": 60}, {}, "seq_len", 4),
        (LEARNED, {"phase": "decode"}, {}, "context_len", 63),  # and the new token
        (CONFIG, {}, {}, "seq_len", MAX_SEQUENCE_TOKENS),
        (
            replace(CONFIG, max_position_embeddings=MAX_SEQUENCE_TOKENS + 1),
            {},
            {},
            "seq_len",
            MAX_SEQUENCE_TOKENS + 1,
        ),
    ],
)
def test_the_largest_value_is_allowed_and_the_next_refused(
    config: TransformerConfig, workload: dict[str, Any], layout: dict[str, int], field: str, most: int
) -> None:
    """A rank as wide as the model, all of its layers, a stage of one layer, a part of one token of the vocabulary."""
    names = {each.name for each in fields(Workload)}

    def check(value: int) -> None:
        of_workload = workload | ({field: value} if field in names else {})
        of_layout = layout | ({field: value} if field not in names else {})
        job = Workload(**{"micro_batch_size": 1, "seq_len": 32} | of_workload)
        validate_layout(config, job, ParallelLayout(**of_layout))
        validate_lengths(config, job)

    check(most)
    with pytest.raises((LayoutError, WorkloadError), match=r"exceed|longer"):
        check(2 * most if field.endswith("parallel") else most + 1)


def test_positions_beyond_the_stated_maximum_are_noted() -> None:
    """65 rotary positions of a model with 64."""
    config = replace(CONFIG, max_position_embeddings=64)
    noted = [describe_long_sequence(config, Workload(seq_len=length)) for length in (64, 65)]

    assert noted[0] == []
    assert [str(note) for note in noted[1]] == ["65 positions exceed the model's max_position_embeddings=64"]


def test_degrees_of_a_layout_with_one_axis() -> None:
    """Stages of equally many of 4 layers, or what divides 8 heads and 4 key-value heads or is a multiple of them."""
    pipeline, chunked, tensor, both = (
        possible_degrees(CONFIG, ParallelLayout(**degrees))
        for degrees in (
            {"pipeline_parallel": 3},
            {"pipeline_parallel": 3, "virtual_pipeline": 2},
            {"tensor_parallel": 3},
            {"tensor_parallel": 2, "pipeline_parallel": 2},
        )
    )

    assert (pipeline, chunked, tensor, both) == ((1, 2, 4), (1, 2), (1, 2, 4, 8), ())
