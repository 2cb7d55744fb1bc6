"""The layers and models that the bench measures against what lowering lists: product by product, weight by weight."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the trace extra (torch)")

from traced_products import Product, ProductRecorder, turn

from shapewright.bench.torch_layer import make_layer, make_pass, run_layer
from shapewright.bench.torch_model import Decoder
from shapewright.config import TransformerConfig, count_parameters
from shapewright.layout import ParallelLayout
from shapewright.lowering import lower
from shapewright.operations import Attention, Gemm
from shapewright.whole import layer_run
from shapewright.workload import Workload

pytestmark = pytest.mark.oracle

# Unequal to each other and to every width.
BATCH_SIZE, SEQ_LEN, CONTEXT_LEN = 3, 40, 44
BASE = {"hidden_size": 48, "num_layers": 2, "num_heads": 6, "vocab_size": 101}
LLAMA = {"norm": "rmsnorm", "gated_mlp": True, "activation": "silu", "num_kv_heads": 2, "intermediate_size": 88}
BIASES = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "norm_bias": True, "lm_head_bias": True}
CONFIGS = {
    "gpt": {"position_embedding": "learned", "fused_qkv": True, "tied_embeddings": True, **BIASES},
    "llama": LLAMA,
    "fused gate": {**LLAMA, "fused_gate_up": True, "fused_qkv": True, "qk_norm": "per-head"},
    "parallel": {"parallel_attention_mlp": True, "num_norms_per_layer": 1, "num_kv_heads": 1},
    "neox": {"parallel_attention_mlp": True, **BIASES, "fused_qkv": True},
    "sandwich": {**LLAMA, "num_norms_per_layer": 4},
    "narrow": {"embedding_size": 24, "head_dim": 16, "v_head_dim": 12},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}


def make(shape: tuple[int, ...], _deviation: float) -> Any:
    """A weight that has a shape and nothing else."""
    return torch.empty(shape, device="meta", requires_grad=True)


def lowered(operations: Any, *passes: str) -> Counter[Product]:
    """Products of operations, with their layouts."""
    products: Counter[Product] = Counter()
    for operation in operations:
        if operation.pass_name in passes and isinstance(operation, Gemm):
            sizes = (operation.batch, operation.m, operation.n, operation.k)
            products[turn(*sizes, layout=operation.layout)] += operation.repeats
    return products


@pytest.mark.parametrize("key", CONFIGS)
def test_a_training_step_runs_the_lowered_products(key: str) -> None:
    """Forward, and forward with backward, every product with its layout, as often as lowering lists it."""
    config = TransformerConfig(**BASE, **CONFIGS[key])
    workload = Workload(micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, attention="unfused", dtype="fp32")
    model = Decoder(config, workload, make)
    tokens = torch.zeros(BATCH_SIZE, SEQ_LEN + 1, dtype=torch.long, device="meta")
    with ProductRecorder() as recorder:
        loss = model.loss(tokens, model.shared())
        forward = recorder.products.copy()
        loss.backward()
    operations = lower(config, workload, ParallelLayout())

    assert forward == lowered(operations, "forward")
    assert recorder.products == lowered(operations, "forward", "backward")


@pytest.mark.parametrize("key", CONFIGS)
def test_weights_are_the_models(key: str) -> None:
    """As many parameters as the model counts."""
    config = TransformerConfig(**BASE, **CONFIGS[key])
    model = Decoder(config, Workload(seq_len=SEQ_LEN), make)

    assert sum(weight.numel() for weight in model.parameters()) == count_parameters(config).total


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("key", ["gpt", "llama", "parallel", "narrow"])
def test_prefill_and_decode_run_the_lowered_products(key: str, phase: str) -> None:
    """A prompt, and one token after a cache: last tokens' logits, products with the cached keys."""
    config = TransformerConfig(**BASE, **CONFIGS[key])
    lengths = {"prefill": {"seq_len": SEQ_LEN}, "decode": {"context_len": CONTEXT_LEN}}[phase]
    workload = Workload(phase=phase, micro_batch_size=BATCH_SIZE, attention="unfused", dtype="fp32", **lengths)
    model = Decoder(config, workload, make)
    tokens = torch.zeros(BATCH_SIZE, workload.query_len, dtype=torch.long, device="meta")
    with torch.no_grad(), ProductRecorder() as recorder:
        logits = model.run(tokens, model.shared(), model.make_cache())
    expected = lowered(lower(config, workload, ParallelLayout()), "forward")

    assert logits.shape == (BATCH_SIZE, config.vocab_size)
    assert {product._replace(layout="") for product in recorder.products} == {
        product._replace(layout="") for product in expected
    }
    assert sum(recorder.products.values()) == sum(expected.values())


@pytest.mark.parametrize("key", CONFIGS)
def test_a_layer_runs_its_part_of_the_step(key: str) -> None:
    """One layer alone has the products of a layer: those of embedding and logits are not among them."""
    config = TransformerConfig(**BASE, **CONFIGS[key])
    workload = Workload(micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, attention="unfused", dtype="fp32")
    x = torch.empty(BATCH_SIZE, SEQ_LEN, config.hidden_size, device="meta", requires_grad=True)
    weights = make_layer(config, make)
    with ProductRecorder() as recorder:
        run_layer(weights, x, make_pass(config, workload, x)).backward(torch.empty_like(x))

    assert recorder.products == lowered(layer_run(config, workload).operations(), "forward", "backward")


def test_fused_attention_is_called_once_a_layer() -> None:
    """With fused attention the products are those beside it, and each layer calls it once."""
    config = TransformerConfig(**BASE, **LLAMA)
    workload = Workload(micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, dtype="fp32")
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counted(q: Any, k: Any, v: Any, **options: Any) -> Any:
        calls.append((q.shape, k.shape, options["is_causal"], options.get("enable_gqa", False)))
        return original(q, k, v, **options)

    model = Decoder(config, workload, make)
    tokens = torch.zeros(BATCH_SIZE, SEQ_LEN + 1, dtype=torch.long, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        model.loss(tokens, model.shared())
    (core,) = {
        entry for entry in lower(config, workload, ParallelLayout())
        if isinstance(entry, Attention) and entry.pass_name == "forward"
    }  # fmt: skip

    assert len(calls) == core.repeats == config.num_layers
    assert set(calls) == {((3, 6, 40, 8), (3, 2, 40, 8), True, True)}


@pytest.mark.parametrize("key", ["gpt", "llama", "sandwich", "neox"])
def test_decode_continues_what_prefill_began(key: str) -> None:
    """Logits of the last token are the same from one pass over all tokens and from a cache and one token more.

    Fused and unfused attention agree too, in float64.
    """
    config = TransformerConfig(**BASE, **CONFIGS[key])
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], deviation: float) -> Any:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn * deviation if deviation else 1.0 + 0.1 * drawn

    length = 7
    decode = Workload(phase="decode", micro_batch_size=2, context_len=length - 1, dtype="fp32")
    model = Decoder(config, decode, random)
    tokens = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    found = []
    for attention in ("flash", "unfused"):
        model.workload = whole = Workload(phase="prefill", seq_len=length, attention=attention, micro_batch_size=2)
        found.append(model.run(tokens, make_pass(config, whole, model.ends["embedding"]), model.make_cache()))
        cache = model.make_cache()
        prefill = replace(whole, seq_len=length - 1)
        model.run(tokens[:, :-1], make_pass(config, prefill, model.ends["embedding"]), cache)
        last = make_pass(config, replace(decode, attention=attention), model.ends["embedding"])
        found.append(model.run(tokens[:, -1:], last, cache))

    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0])
