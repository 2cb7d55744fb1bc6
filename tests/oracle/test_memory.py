"""Activation memory against the tensors that autograd saves, and the KV cache against a real one."""

from __future__ import annotations

from typing import Any

import pytest
from hf_models import hf_config, tiny_config

from shapewright.memory.estimate import count_cached_elements, estimate_kv_cache, estimate_layer_state
from shapewright.memory.saved_tensors import list_saved_tensors
from shapewright.models.hf_config import read_hf_config
from shapewright.models.layers import LayerKind
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

torch = pytest.importorskip("torch", reason="needs the trace extra", exc_type=ImportError)
transformers = pytest.importorskip("transformers", reason="needs the trace extra", exc_type=ImportError)

from traced_gemms import cache_name

pytestmark = pytest.mark.oracle

BATCH_SIZE, SEQ_LEN = 4, 64
DROPOUT = {"resid_pdrop": 0.1, "attn_pdrop": 0.1}
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0}
# A chain of pointwise operations keeps what one kernel would not; the fused spelling is what training uses.
FUSED_GELU = {"activation_function": "gelu_pytorch_tanh"}

# Model, attention, layer, elements a token that are left out, changes. Left out are small vectors of each row: mean and
# deviation of norms (2 each), log-sum-exp of fused attention (1 a head), tables of rotary positions and ALiBi, and of
# experts the chosen ones, their places and weights. Eager attention where the model's own code copies around the fused
# kernel.
CASES = [
    ("llama", "sdpa", 0, 16, {}),
    ("llama", "eager", 0, 12, {}),
    ("gpt2", "sdpa", 0, 8, {**FUSED_GELU, **NO_DROPOUT}),
    ("gpt2", "eager", 0, 4, {**FUSED_GELU, **NO_DROPOUT}),
    ("gpt2", "eager", 0, 4, {**FUSED_GELU, **DROPOUT}),
    ("opt", "sdpa", 0, 8, {"dropout": 0.0}),
    ("phi3", "eager", 0, 12, {"sliding_window": None}),
    ("cohere", "sdpa", 0, 14, {}),
    ("granite", "sdpa", 0, 16, {}),
    ("bloom", "eager", 0, 4, {}),
    ("mpt", "eager", 0, 20, {}),
    ("gptj", "eager", 0, 10, FUSED_GELU),
    ("qwen3_moe", "sdpa", 1, 51, {}),
    (
        "starcoder2",
        "sdpa",
        0,
        16,
        {"hidden_act": "gelu_pytorch_tanh", "residual_dropout": 0.0, "sliding_window": None},
    ),
    ("deepseek_v2/lite", "eager", 0, 8, {}),
    ("gpt_neox", "eager", 0, 6, {}),
    ("phi", "eager", 0, 6, {"hidden_act": "gelu_pytorch_tanh"}),
    ("qwen3", "sdpa", 0, 32, {}),
    ("gemma3_text", "eager", 0, 32, {}),
    ("olmo2", "eager", 0, 16, {}),
    ("mixtral", "sdpa", 0, 38, {}),
    ("qwen2_moe", "sdpa", 1, 36, {}),
    ("deepseek_v3", "eager", 0, 12, {}),
    ("deepseek_v3", "eager", 1, 56, {}),
]


def measure_saved_bytes(
    config: dict[str, Any], attention: str, layer_index: int, *, dtype: Any = torch.float32, own_norms: bool = False
) -> int:
    """Bytes of the storages that one layer's forward pass keeps for its backward pass, parameters left out."""
    model = transformers.AutoModelForCausalLM.from_config(hf_config(config), attn_implementation=attention)
    model = model.to(dtype)
    for parent in [] if own_norms else list(model.modules()):
        for child_name, child in list(parent.named_children()):
            # The models' own norms are chains of operations, and torch's RMSNorm is one on the CPU; training uses one
            # kernel, as torch's LayerNorm is everywhere.
            if type(child).__name__.endswith("Norm") and not isinstance(child, torch.nn.LayerNorm):
                setattr(parent, child_name, torch.nn.LayerNorm(child.weight.shape, bias=False))
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[layer_index]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}
    is_inside = False

    def enter(*_: object) -> None:
        nonlocal is_inside
        is_inside = True

    def leave(*_: object) -> None:
        nonlocal is_inside
        is_inside = False

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if is_inside and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor
        return tensor

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave)
    model.train()
    tokens = torch.randint(2, 300, (BATCH_SIZE, SEQ_LEN))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=tokens, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("key", "attention", "layer_index", "left_out", "changes"), CASES)
def test_layer_bytes_equal_autograd(
    key: str, attention: str, layer_index: int, left_out: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listed tensors are all that a layer of the real model saves, but for small vectors of each row."""

    def dropout(states: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        # What accelerators run, with a mask of one byte; on the CPU the mask is as wide as the states.
        del inplace
        return torch.native_dropout(states, p, True)[0] if training and p else states

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    raw = {**tiny_config(key), **changes}
    measured = measure_saved_bytes(raw, attention, layer_index)
    config = read_hf_config(raw).config
    workload = Workload(
        micro_batch_size=BATCH_SIZE,
        seq_len=SEQ_LEN,
        dtype="fp32",
        attention="flash" if attention == "sdpa" else "unfused",
        fused_activation=False,
    )
    tensors = list_saved_tensors(config, workload, ParallelLayout(), has_experts=config.is_moe_layer(layer_index))
    missing = (measured - sum(tensor.num_bytes for tensor in tensors)) / (4.0 * BATCH_SIZE * SEQ_LEN)
    assert 0.0 <= missing <= left_out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", ["llama", "qwen2"])
def test_chains_of_kernels_save_what_autograd_keeps(key: str) -> None:
    """With kernels="torch" the listed tensors are those of the model's own norms and gated MLP in bf16."""
    raw = tiny_config(key)
    measured = measure_saved_bytes(raw, "sdpa", 0, dtype=torch.bfloat16, own_norms=True)
    workload = Workload(micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, kernels="torch")
    expected = sum(
        tensor.num_bytes for tensor in list_saved_tensors(read_hf_config(raw).config, workload, ParallelLayout())
    )
    assert 0.0 <= (measured - expected) / (BATCH_SIZE * SEQ_LEN) <= 64.0  # small vectors of each row
    assert expected > sum(
        tensor.num_bytes
        for tensor in list_saved_tensors(
            read_hf_config(raw).config, Workload(micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN), ParallelLayout()
        )
    )


@pytest.mark.filterwarnings("ignore")
def test_compressed_cache_is_as_large_as_a_real_one() -> None:
    """Keys and entries of a prompt, those of the indexer as well, are as large as in transformers.

    Keys are values there too, but for a copy in layers that slide alone, and a window keeps one token fewer. What is
    kept to fill the next entry is counted as large as it can become.
    """
    raw = tiny_config("deepseek_v4")
    model = transformers.AutoModelForCausalLM.from_config(hf_config(raw), attn_implementation="eager").eval()
    with torch.no_grad():
        output = model(input_ids=torch.randint(2, 300, (BATCH_SIZE, SEQ_LEN)), use_cache=True)
    layers = output[cache_name(model)].layers
    compressed = [getattr(layer, "compressed_kv", {}) for layer in layers]
    entries_bytes = sum(each.nbytes for layer in compressed for each in layer.values())
    parts = ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")
    waiting = [each for layer in layers for part in parts for each in getattr(layer, part, {}).values()]
    token_bytes = 4 * BATCH_SIZE * raw["head_dim"] * len(layers)
    config = read_hf_config(raw).config
    workload = Workload(phase="prefill", micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, dtype="fp32")
    kinds = list(config.count_kinds(range(config.num_layers)).items())
    states_bytes = BATCH_SIZE * sum(
        count * estimate_layer_state(config, workload, kind.layer_type) for kind, count in kinds
    )
    estimated = estimate_kv_cache(config, workload, ParallelLayout(), kinds)

    assert [layer.values is layer.keys for layer in layers] == [bool(each) for each in compressed]
    assert estimated - states_bytes == sum(layer.keys.nbytes for layer in layers) + token_bytes + entries_bytes
    assert 0 < sum(each.nbytes for each in waiting if each is not None) <= states_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", ["llama", "gpt2", "qwen3", "mixtral", "falcon"])
def test_kv_cache_is_as_large_as_a_real_one(key: str) -> None:
    """Bytes of the cache after a prefill equal those of the model's own cache."""
    raw = tiny_config(key)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(raw)).eval()
    with torch.no_grad():
        output = model(input_ids=torch.randint(2, 300, (BATCH_SIZE, SEQ_LEN)), use_cache=True)
    cache = output[cache_name(model)]
    measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    config = read_hf_config(raw).config
    workload = Workload(phase="prefill", micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, dtype="fp32")
    kinds = [(LayerKind(group.layer_type, group.window, "dense"), group.num_layers) for group in config.layer_groups()]
    assert estimate_kv_cache(config, workload, ParallelLayout(), kinds) == measured
    assert count_cached_elements(config) * 4 * BATCH_SIZE * SEQ_LEN * config.num_layers == measured
