"""Compressed attention and parallel residual streams: sizes by hand, what is cached, trained and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import shapewright
from shapewright.core.errors import BenchError, ConfigError, LayoutError
from shapewright.hardware.loader import load_device
from shapewright.lowering.flops import count_model_flops
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.measure.bench.operations.torch_layer import require_supported
from shapewright.memory.estimate import estimate_kv_cache, estimate_memory
from shapewright.models.hf_config import read_hf_config
from shapewright.models.layers import COMPRESSED_LAYERS, describe_pattern
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.models.write import to_config_json
from shapewright.optimize.search.memory import kv_bytes_per_token
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.kernels.sparse import price_sparse_attention
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from shapewright.models.transformer import TransformerConfig

H100 = load_device("h100-sxm-80gb")
NO_EXPERTS: dict[str, Any] = {
    "num_experts_per_token": 0, "moe_intermediate_size": 0, "shared_expert_intermediate_size": 0,
}  # fmt: skip
RAW: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "head_dim": 128,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 128,
    "moe_intermediate_size": 512,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 32,
    "sliding_window": 64,
    "vocab_size": 8192,
    "qk_rope_head_dim": 32,
    "compress_ratios": [0, 128, 4, 128, 4, 128],
}
ONE = ParallelLayout()


def model(**changes: Any) -> TransformerConfig:
    """Read the config with some keys changed."""
    return read_hf_config({**RAW, **changes}).config


@pytest.mark.parametrize(("share", "width"), [(0.5, 64), (0.25, 32)])
def test_the_rotary_part_is_a_share_of_the_head(share: float, width: int) -> None:
    """A share decides, whatever width is there beside it; without both it is an eighth of a head of 512."""
    assert model(partial_rotary_factor=share).qk_rope_head_dim == width
    assert model(qk_rope_head_dim=None, head_dim=512).qk_rope_head_dim == 64


def test_layers_are_read_by_ratio_by_name_or_by_default() -> None:
    """Older configs list ratios, with those of unbuilt layers after them; newer ones names; without, every other."""
    window, sparse, heavy = COMPRESSED_LAYERS

    assert model().layer_types == (window, heavy, sparse, heavy, sparse, heavy)
    assert model(compress_ratios=[0, 128, 4, 128, 4, 128, 0]).layer_types == model().layer_types
    names = ["sliding_attention", *["heavily_compressed_attention", "compressed_sparse_attention"] * 2]
    named = model(compress_ratios=None, layer_types=[*names, "heavily_compressed_attention"])
    assert named.layer_types == model().layer_types
    assert model(compress_ratios=None).layer_types == (heavy, heavy, heavy, sparse)[:2] + (heavy, sparse) * 2
    assert describe_pattern(model().layer_types) == (
        "window_attention in 1 of 6, compressed_sparse_attention in 2 of 6, heavily_compressed_attention in 3 of 6"
    )


def test_what_one_sequence_caches() -> None:
    """A window of keys, which are values, an entry for 4 or 128 tokens, and what fills the next entry."""
    config, length = model(), 1000
    workload = Workload(phase="decode", micro_batch_size=2, context_len=length - 1, dtype="bf16")
    kinds = list(config.count_kinds(range(6)).items())
    # 64 tokens of a head of 128 in 6 layers, 250 entries of the head and of the indexer (64 wide) in 2, 7 entries in 3
    cached = 6 * 64 * 128 + 2 * 250 * (128 + 64) + 3 * 7 * 128
    # values and gates of 4 tokens, twice as wide, and the half of 4 earlier ones; of 128 tokens without overlap
    states = 2 * (2 * 4 * (256 + 128) + 2 * 4 * (128 + 64)) + 3 * 2 * 128 * 128

    assert estimate_kv_cache(config, workload, ONE, kinds) == 2 * 2 * (cached + states)
    narrow = replace(workload, kv_cache_dtype="fp8")
    assert estimate_kv_cache(config, narrow, ONE, kinds) == 2 * (cached + 2 * states)
    # every device of the tensor axis has all keys
    assert estimate_kv_cache(config, workload, ParallelLayout(tensor_parallel=4), kinds) == 4 * (cached + states)
    assert kv_bytes_per_token(config, workload) == 2 * (2 * (128 + 64) / 4 + 3 * 128 / 128)


@pytest.mark.parametrize(("context_len", "num_selected"), [(120, 30), (400, 32)])
def test_an_indexer_selects_once_there_are_more_entries_than_it_keeps(context_len: int, num_selected: int) -> None:
    """Of 100 entries 32 are read, with the window; of 30 all are, without scores."""
    workload = Workload(phase="decode", micro_batch_size=3, context_len=context_len)
    sparse = [one for one in lower(model(), workload, ONE) if isinstance(one, SparseAttention)]
    cores = {(one.repeats, one.kv_len, one.selected) for one in sparse if one.part == "attention"}
    scores = [one for one in sparse if one.part != "attention"]

    # the window alone; an entry for 128 tokens; one for 4
    heavy, light = (context_len + 1) // 128, (context_len + 1) // 4
    assert cores == {(1, 64, 64), (3, 64 + heavy, 64 + heavy), (2, 64 + light, 64 + num_selected)}
    if num_selected == light:
        assert not scores
    else:
        assert [(one.part, one.kv_len, one.num_heads, one.head_dim) for one in scores] == [
            (part, 100, 8, 64) for part in ("logits", "selection")
        ]


def test_attention_to_entries_grows_with_what_is_read() -> None:
    """Its price follows window and entries, not the context; heads below 64 are padded."""
    record = load_record("sparse_attention", H100)

    def price(selected: int, num_heads: int = 64) -> float:
        sizes = {"batch_size": 64, "query_len": 1, "kv_len": 10**5, "head_dim": 512, "v_head_dim": 512, "window": 128}
        one = SparseAttention(name="x", part="attention", selected=selected, num_heads=num_heads, **sizes)
        return float(price_sparse_attention(one, H100, record).time_s.item())

    assert price(128) < price(256) < price(640)
    assert price(640, 8) == price(640)


def test_servers_join_projections_of_one_input() -> None:
    """Where a server fuses projections, those of the layer's input are three GEMMs, of equal width together."""
    workload = Workload(phase="decode", context_len=4096)
    widths: list[dict[str, int]] = []
    for fused in (False, True):
        found = lower(replace(model(), fused_qkv=fused), workload, ONE)
        widths.append({f"{one.block}.{one.role}": one.n for one in found if isinstance(one, Gemm) and one.k == 1024})
    apart, joined = widths

    assert joined["attention.qkv_a"] == apart["attention.q_a"] + apart["attention.kv_a"] == 256 + 128
    assert joined["attention.compressed"] == apart["attention.compressed_kv"] + apart["attention.compressed_gate"]
    assert joined["indexer.kv_gate"] == apart["indexer.kv"] + apart["indexer.gate"] == 2 * 128
    assert count_parameters(replace(model(), fused_qkv=True)).total == count_parameters(model()).total


def test_long_prompts_have_finite_prices() -> None:
    """A prompt of more tokens than entries is priced, and a longer one takes longer."""
    times = [
        shapewright.predict(
            model(), device="h100-sxm-80gb", workload={"phase": "prefill", "seq_len": length}
        ).step_time_s
        for length in (2048, 8192, 32768)
    ]

    assert 0.0 < times[0] < times[1] < times[2] < float("inf")


def test_the_indexer_has_no_gradient() -> None:
    """Nothing flows back through a choice; all else has its gradients, as the count of FLOPs says."""
    workload = Workload(seq_len=512)
    operations = lower(model(), workload, ONE)
    indexer = [one for one in operations if one.block == "indexer" and one.pass_name != "step"]
    forward, backward = (
        sum(
            one.flops * one.repeats for one in operations if one.pass_name == name and isinstance(one, Gemm | Attention)
        )
        for name in ("forward", "backward")
    )
    untrained = sum(one.flops * one.repeats for one in indexer if isinstance(one, Gemm))

    assert {one.pass_name for one in indexer} == {"forward"}
    assert any(isinstance(one, Gemm) and one.role == "index_logits" for one in indexer)
    assert backward == 2.0 * (forward - untrained)
    assert count_model_flops(model(), workload) > forward + backward  # those of experts


@pytest.mark.parametrize("kernels", ["torch", None])
def test_reduced_gradients_are_those_of_the_weights(kernels: str | None) -> None:
    """Products of activations, such as an indexer's scores and mixed streams, have no gradients to reduce."""
    config = model()
    operations = lower(config, Workload(seq_len=512, kernels=kernels), ParallelLayout(data_parallel=2))
    reduced = {
        one.name: one.message_bytes * one.repeats
        for one in operations
        if isinstance(one, Collective) and one.block == "replicas"
    }
    counts = count_parameters(config)
    experts = counts.by_component["experts"]
    embeddings = 2 * counts.token_embedding
    # vectors, such as those of norms, are left out
    assert reduced["layers.gradients.all_reduce"] == pytest.approx(
        2.0 * (counts.total - experts - embeddings), rel=0.01
    )


def test_tensor_parallelism_splits_heads_and_groups() -> None:
    """Keys, compressors and the indexer are complete on each device; degrees divide the groups."""
    one, four = (estimate_memory(model(), Workload(phase="decode"), ParallelLayout(tensor_parallel=t)) for t in (1, 4))
    gemms = {
        (each.role, each.batch, each.n, each.k)
        for each in lower(model(), Workload(seq_len=512), ParallelLayout(tensor_parallel=4))
        if isinstance(each, Gemm) and each.block == "attention" and each.pass_name == "forward"
    }

    assert one.weights_bytes / 4 < four.weights_bytes < one.weights_bytes / 2
    assert {("q_b", 1, 512, 256), ("out_a", 1, 128, 512), ("out", 1, 1024, 128), ("kv_a", 1, 128, 1024)} <= gemms
    with pytest.raises(LayoutError, match="must divide out_groups=4"):
        lower(model(), Workload(seq_len=512), ParallelLayout(tensor_parallel=8))
    with pytest.raises(LayoutError, match=r"context_parallel=2 is not supported for window_attention layers"):
        lower(model(), Workload(seq_len=512), ParallelLayout(context_parallel=2))


def test_streams_are_sent_between_stages_and_kept() -> None:
    """Four residual streams are four times as much to send, and to keep under full recomputation."""
    layout, workload = ParallelLayout(pipeline_parallel=2), Workload(seq_len=512, recompute="full")
    sent = {
        streams: next(
            one.message_bytes for one in lower(model(hc_mult=streams), workload, layout) if one.block == "pipeline"
        )
        for streams in (1, 4)
    }

    assert sent[4] == 4 * sent[1]


def test_adapters_are_those_of_linear_layers() -> None:
    """Neither the grouped output projection nor the indexer has an adapter; frozen weights have no gradient."""
    workload = Workload(seq_len=512, finetune="lora", lora_rank=8, lora_targets="attention")
    adapted = {
        one.role.partition(".")[0]
        for one in lower(model(), workload, ONE)
        if one.is_adapter and one.block in ("attention", "indexer")
    }

    assert adapted == {"q_a", "q_b", "kv_a", "compressed_kv", "compressed_gate", "out"}


def test_a_changed_model_is_written_as_it_was_read(tmp_path: Path) -> None:
    """More layers continue the pattern, under the key that the file has."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(RAW), encoding="utf-8")
    read = read_model(str(path))
    deeper = shapewright.models.transformer.with_changes(read.config, {"num_layers": 8})
    written = to_config_json(read, deeper)

    assert written["compress_ratios"] == [0, 128, 4, 128, 4, 128, 128, 128]
    assert read_hf_config(written).config == replace(deeper, name="")


def test_layers_are_not_measured_as_those_of_plain_decoders() -> None:
    """Whole layers are measured for softmax attention alone."""
    with pytest.raises(BenchError, match="got layer_types=compressed_sparse_attention, heavily_compressed"):
        require_supported(replace(model(), attention_sinks=False, num_experts=0, **NO_EXPERTS), Workload(seq_len=512))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress_ratios": [0, 16, 4, 128, 4, 128]}, "compress_ratios has 16; known are 0, 4, 128"),
        ({"compress_ratios": [0]}, "compress_ratios has 1 entries but num_hidden_layers=6"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types has 'full_attention'; known are sliding_attention"),
        ({"o_groups": 3}, "out_groups=3 must divide num_heads=16; try out_groups=1"),
        ({"num_key_value_heads": 2}, "compressed attention has one key-value head"),
        ({"sliding_window": 0}, "compressed_window must be at least 1"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor=2 must be a number from 0 to 1"),
        ({"qk_rope_head_dim": 128}, "qk_rope_head_dim=128 must be below head_dim=128"),
        ({"compress_rates": {"compressed_sparse_attention": 4}}, "compress_rates lacks heavily_compressed_attention"),
        ({"mlp_bias": True}, "mlp_bias=True of model_type 'deepseek_v4' changes its layers"),
        ({"index_topk": 0}, "index_topk=0 must be"),
    ],
)
def test_other_values_are_refused(changes: dict[str, Any], words: str) -> None:
    """A value that is not possible is named with what is."""
    with pytest.raises(ConfigError, match=words):
        model(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out_groups": 2}, "out_groups=2 needs layers of compressed attention"),
        ({"residual_streams": 4, "stack": "encoder"}, "residual_streams=4 needs a decoder"),
        ({"layer_types": ("window_attention", "attention"), "num_kv_heads": 1}, "must be at least 1"),
        (
            {
                "layer_types": ("window_attention", "attention"),
                "num_kv_heads": 1,
                "compressed_window": 8,
                "out_groups": 1,
                "out_lora_rank": 8,
            },
            "beside 'attention', which is not supported",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], words: str) -> None:
    """The fields of compressed attention need its layers, and all of them."""
    with pytest.raises(ConfigError, match=words):
        shapewright.TransformerConfig(hidden_size=64, num_layers=2, num_heads=4, vocab_size=100, **changes)


def moved_bytes(workload: Workload) -> dict[str, set[tuple[float, float]]]:
    """Bytes that elementwise operations of attention and indexer read and write, by name, one pair for a kind."""
    found: dict[str, set[tuple[float, float]]] = {}
    for one in lower(model(), workload, ONE):
        if isinstance(one, Pointwise) and one.block in ("attention", "indexer") and one.pass_name == "forward":
            found.setdefault(one.name, set()).add((float(one.read_bytes), float(one.written_bytes)))
    return found


def test_what_a_layer_moves_in_training_by_hand() -> None:
    """1,024 tokens of two sequences in 16 bits: values and gates of each, an entry for 4 or 128 of them.

    Scores of 8 heads and 128 entries are in 32 bits, as is what is chosen: their sum, and 32 of the entries.
    """
    moved = moved_bytes(Workload(micro_batch_size=2, seq_len=512, kernels="fused"))
    tokens, scores = 1024, 4 * 1024 * 128

    assert moved["attention.compress"] == {
        (2 * 2 * 256 * tokens, 2 * 128 * tokens / 4),
        (2 * 2 * 128 * tokens, 2 * 128 * tokens / 128),
    }
    assert moved["indexer.compress"] == {(2 * 2 * 128 * tokens, 2 * 64 * tokens / 4)}
    assert moved["indexer.index_topk"] == {(9 * scores, scores + 4 * 32 * tokens)}
    # 16 heads and the key, of whose 128 elements 32 are turned; the output is turned back.
    assert moved["attention.rotary"] == {(2 * 17 * 32 * tokens, 2 * 17 * 32 * tokens)}
    assert moved["attention.rotary_out"] == {(2 * 16 * 32 * tokens, 2 * 16 * 32 * tokens)}
    assert moved["attention.qk_norm"] == {(2 * 17 * 128 * tokens, 2 * 17 * 128 * tokens)}
    assert moved["attention.q_a_norm"] == {(2 * 256 * tokens, 2 * 256 * tokens)}


def test_what_a_layer_moves_in_decode_by_hand() -> None:
    """Three tokens: a server also keeps values and gates of entries that are not full; the cache has 8 bits here."""
    moved = moved_bytes(Workload(phase="decode", micro_batch_size=3, context_len=400, kv_cache_dtype="fp8"))

    assert moved["attention.compress"] == {
        (2 * 3 * 512, 2 * 3 * (128 / 4 + 512)),
        (2 * 3 * 256, 2 * 3 * (128 / 128 + 256)),
    }
    assert moved["indexer.compress"] == {(2 * 3 * 256, 2 * 3 * (64 / 4 + 256))}
    # A key of 128, with its share of an entry of the layer and of the indexer.
    assert moved["attention.cache_write"] == {
        (2 * 3 * width, 3 * width) for width in (128, 128 + 128 / 128, 128 + 128 / 4 + 64 / 4)
    }


@pytest.mark.parametrize(
    ("job", "dtype"),
    [({"kernels": "fused"}, "bf16"), ({"kernels": "torch"}, "fp32"), ({"attention": "unfused"}, "fp32")],
)
def test_scores_of_the_indexer_by_hand(job: dict[str, Any], dtype: str) -> None:
    """Each of 512 tokens multiplies 8 heads of 64 with 128 entries; PyTorch does so in 32 bits."""
    (scores,) = {
        (one.dtype, one.batch, one.m, one.n, one.k)
        for one in lower(model(), Workload(micro_batch_size=1, seq_len=512, **job), ONE)
        if isinstance(one, Gemm) and one.role == "index_logits"
    }

    assert scores == (dtype, 512, 8, 128, 64)


@pytest.mark.parametrize(("cached", "entries"), [(0, 64), (400, 32)])
def test_attention_over_window_and_entries_in_a_prompt(cached: int, entries: int) -> None:
    """512 tokens, of which some are cached: a query sees 64 and on average half of the entries, or the chosen 32."""
    new = 512 - cached
    job = Workload(phase="prefill", micro_batch_size=1, seq_len=new, context_len=cached)
    cores = {
        (one.repeats, one.kv_len, one.selected)
        for one in lower(model(index_topk=32 if cached else 200), job, ONE)
        if isinstance(one, SparseAttention) and one.part == "attention"
    }
    nearest = min(512, new + 63)

    assert (1, nearest, 64) in cores
    assert (2, nearest + 128, 64 + entries) in cores
    # Entries of 128 tokens: of 1 to 512 none to 4, of 401 to 512 three to 4.
    assert (3, nearest + 4, 64 + (3 if cached else 2)) in cores


@pytest.mark.parametrize(
    ("batch_size", "query_len", "context_len", "measured_s"),
    [(1, 16, 262160, 7.14e-5), (1, 256, 131328, 8.78e-5), (2, 2048, 264192, 1.9796e-3), (16, 16, 12304, 5.57e-5)],
)
def test_attention_to_entries_takes_as_long_as_measured(
    batch_size: int, query_len: int, context_len: int, measured_s: float
) -> None:
    """Within 10 % of DeepSeek-V4-Flash on an H100 (vLLM 0.24): 128 nearest tokens, and an entry for 128 tokens."""
    one = SparseAttention(
        name="x",
        part="attention",
        selected=128 + context_len // 128,
        num_heads=64,
        batch_size=batch_size,
        query_len=query_len,
        kv_len=context_len,
        head_dim=512,
        v_head_dim=512,
        window=128,
    )

    price = price_sparse_attention(one, H100, load_record("sparse_attention", H100))
    assert float(price.time_s.item()) == pytest.approx(measured_s, rel=0.1)
