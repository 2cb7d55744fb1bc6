"""The bench's layers and models run the GEMMs, and have the parameters, that the lowering lists."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the trace extra (torch)")

from traced_gemms import TracedGemm, record_gemms, turn

from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.bench.operations.torch_layer import make_layer, make_pass_context, run_layer
from shapewright.measure.bench.operations.torch_model import Decoder
from shapewright.models.parameters import count_parameters
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.model_runs import layer_run
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

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
    """Make a weight on the meta device."""
    return torch.empty(shape, device="meta", requires_grad=True)


def lowered(operations: Any, *passes: str) -> Counter[TracedGemm]:
    """GEMMs of operations, with their layouts."""
    gemms: Counter[TracedGemm] = Counter()
    for operation in operations:
        if operation.pass_name in passes and isinstance(operation, Gemm):
            sizes = (operation.batch, operation.m, operation.n, operation.k)
            gemms[turn(*sizes, layout=operation.layout)] += operation.repeats
    return gemms


@pytest.mark.parametrize("key", CONFIGS)
def test_a_training_step_runs_the_lowered_gemms(key: str) -> None:
    """Forward and backward passes run every lowered GEMM, with its layout and as often as lowered."""
    config = TransformerConfig(**BASE, **CONFIGS[key])
    workload = Workload(micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, attention="unfused", dtype="fp32")
    model = Decoder(config, workload, make)
    tokens = torch.zeros(BATCH_SIZE, SEQ_LEN + 1, dtype=torch.long, device="meta")
    with record_gemms() as recorder:
        loss = model.loss(tokens, model.pass_context())
        forward = recorder.gemms
        loss.backward()
    operations = lower(config, workload, ParallelLayout())

    assert forward == lowered(operations, "forward")
    assert recorder.gemms == lowered(operations, "forward", "backward")


@pytest.mark.parametrize("key", CONFIGS)
def test_weights_are_the_models(key: str) -> None:
    """The number of parameters equals that of the model."""
    config = TransformerConfig(**BASE, **CONFIGS[key])
    model = Decoder(config, Workload(seq_len=SEQ_LEN), make)

    assert sum(weight.numel() for weight in model.parameters()) == count_parameters(config).total


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("key", ["gpt", "llama", "parallel", "narrow"])
def test_prefill_and_decode_run_the_lowered_gemms(key: str, phase: str) -> None:
    """Prefill and decode run the lowered GEMMs, with logits of the last tokens and with cached keys."""
    config = TransformerConfig(**BASE, **CONFIGS[key])
    lengths = {"prefill": {"seq_len": SEQ_LEN}, "decode": {"context_len": CONTEXT_LEN}}[phase]
    workload = Workload(phase=phase, micro_batch_size=BATCH_SIZE, attention="unfused", dtype="fp32", **lengths)
    model = Decoder(config, workload, make)
    tokens = torch.zeros(BATCH_SIZE, workload.query_len, dtype=torch.long, device="meta")
    with torch.no_grad(), record_gemms() as recorder:
        logits = model.run(tokens, model.pass_context(), model.make_cache())
    expected = lowered(lower(config, workload, ParallelLayout()), "forward")

    assert logits.shape == (BATCH_SIZE, config.vocab_size)
    assert {gemm._replace(layout="") for gemm in recorder.gemms} == {gemm._replace(layout="") for gemm in expected}
    assert sum(recorder.gemms.values()) == sum(expected.values())


@pytest.mark.parametrize("key", CONFIGS)
def test_a_layer_runs_the_gemms_of_one_layer(key: str) -> None:
    """A single layer runs the GEMMs of a layer, without those of the embedding and logits."""
    config = TransformerConfig(**BASE, **CONFIGS[key])
    workload = Workload(micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, attention="unfused", dtype="fp32")
    x = torch.empty(BATCH_SIZE, SEQ_LEN, config.hidden_size, device="meta", requires_grad=True)
    weights = make_layer(config, make)
    with record_gemms() as recorder:
        run_layer(weights, x, make_pass_context(config, workload, x)).backward(torch.empty_like(x))

    assert recorder.gemms == lowered(layer_run(config, workload).operations(), "forward", "backward")


def test_fused_attention_is_called_once_per_layer() -> None:
    """Each layer calls fused attention once, and its other GEMMs are those of the lowering."""
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
        model.loss(tokens, model.pass_context())
    (core,) = {
        entry for entry in lower(config, workload, ParallelLayout())
        if isinstance(entry, Attention) and entry.pass_name == "forward"
    }  # fmt: skip

    assert len(calls) == core.repeats == config.num_layers
    assert set(calls) == {((3, 6, 40, 8), (3, 2, 40, 8), True, True)}


@pytest.mark.parametrize("key", ["gpt", "llama", "sandwich", "neox"])
def test_decode_agrees_with_one_pass(key: str) -> None:
    """Logits of the last token are equal with one pass over all tokens and with a cache and one more token.

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
        found.append(model.run(tokens, make_pass_context(config, whole, model.outer["embedding"]), model.make_cache()))
        cache = model.make_cache()
        prefill = replace(whole, seq_len=length - 1)
        model.run(tokens[:, :-1], make_pass_context(config, prefill, model.outer["embedding"]), cache)
        last = make_pass_context(config, replace(decode, attention=attention), model.outer["embedding"])
        found.append(model.run(tokens[:, -1:], last, cache))

    for logits in found[1:]:
        torch.testing.assert_close(logits, found[0])
