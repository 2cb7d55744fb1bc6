"""Parameter counts equal those of the models that transformers builds on the meta device, exactly."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the trace extra: PyTorch")
pytest.importorskip("transformers", reason="needs the trace extra: transformers")

from hf_models import TINY_CONFIGS, build_on_meta, count_built_parameters, hf_config, model_type_of, tiny_config

from shapewright.models.hf_config import read_hf_config
from shapewright.models.parameters import count_parameters
from shapewright.models.read import list_presets, load_preset

# Families whose config says of each layer whether it slides, as transformers reads it.
WITH_KINDS_OF_LAYERS = (
    "cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "olmo3", "qwen2", "qwen2_moe", "qwen3",
    "smollm3",
)  # fmt: skip

pytestmark = pytest.mark.oracle

LANGUAGE_MODELS = [
    name
    for name in list_presets()
    if (values := load_preset(name).config).get("vocab_size") and "vision_config" not in values
]
MODEL_TYPES = sorted({model_type_of(key) for key in TINY_CONFIGS})

# First match wins. Names are those of the state dicts that transformers 5.23 builds.
COMPONENTS = (
    ("router", r"(\.gate|\.router|mlp\.gate)\.(weight|bias)$"),
    ("shared_experts", r"shared_expert"),
    ("experts", r"\.experts\."),
    ("head", r"^lm_head|^cls\."),
    ("embedding", r"^shared|wte|wpe|embed|project_(in|out)|relative_attention_bias"),
    ("cross_attention", r"EncDecAttention"),
    ("linear", r"linear_attn\.|\.mamba\.|\.conv\."),
    ("attention", r"attn\.|attention\.|SelfAttention"),
    ("final_norms", r"(model\.norm|decoder\.final_layer_norm|encoder\.final_layer_norm|ln_f)\.(weight|bias)$"),
    ("norms", r"norm|\.ln_\d"),
    ("mlp", r"mlp|DenseReluDense|\.fc\d|feed_forward|intermediate\.dense|output\.dense"),
)


@pytest.mark.parametrize("name", [name for name in list_presets() if "vocab_size" in str(load_preset(name).config)])
def test_a_preset_names_the_class_that_reads_its_type(name: str) -> None:
    """Servers refuse a config.json without ``architectures``, so presets and what is written from them have it."""
    import transformers

    config = load_preset(name).config
    (architecture,) = config["architectures"]

    assert getattr(transformers, architecture).config_class.model_type == config["model_type"]


@pytest.mark.parametrize("key", TINY_CONFIGS)
def test_tiny_models(key: str) -> None:
    """Every family and variant, in sizes that differ from each other, has transformers' count."""
    config = tiny_config(key)
    assert count_parameters(read_hf_config(config).config).total == count_built_parameters(build_on_meta(config))


@pytest.mark.parametrize("key", TINY_CONFIGS)
def test_implied_values(key: str) -> None:
    """Values absent from a config, such as the window of each layer, are derived as in transformers."""
    config = tiny_config(key)
    filled = hf_config(config).to_dict()
    implied, explicit = read_hf_config(config).config, read_hf_config(filled).config
    assert replace(implied, model_type="") == replace(explicit, model_type="")


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_presets(name: str) -> None:
    """Every preset of a language model has transformers' count; test_images compares those with images."""
    config = load_preset(name).config
    assert count_parameters(read_hf_config(config).config).total == count_built_parameters(build_on_meta(config))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults(model_type: str) -> None:
    """A config with only a model type is read with the defaults of transformers' config class."""
    from transformers import AutoConfig

    # DeepSeek-V2 has no default for the experts per token, and no model runs without; Granite 4.0's layers are Mamba.
    given: dict[str, Any] = {
        "deepseek_v2": {"num_experts_per_tok": 6},
        "granitemoehybrid": {"layer_types": ["full_attention"] * 32},
    }.get(model_type, {})
    filled = AutoConfig.for_model(model_type, **given).to_dict()
    implicit = read_hf_config({"model_type": model_type, **given}).config
    explicit = read_hf_config(filled).config
    assert replace(implicit, model_type="") == replace(explicit, model_type="")


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_hidden_layers": 7}, {"max_window_layers": 1}, {"no_rope_layer_interval": 3}],
    ids=lambda changes: next(iter(changes), "window"),
)
@pytest.mark.parametrize("key", WITH_KINDS_OF_LAYERS)
def test_windows_of_each_layer(key: str, changes: dict[str, Any]) -> None:
    """Layers with sliding or chunked attention equal those of transformers for every pattern."""
    raw = {**tiny_config(key), "sliding_window": 8, "use_sliding_window": True, **changes}
    theirs = hf_config(raw)
    sizes = {
        "full_attention": 0,
        "sliding_attention": getattr(theirs, "sliding_window", None) or 0,
        "chunked_attention": getattr(theirs, "attention_chunk_size", None) or 0,
    }
    config = read_hf_config(raw).config
    pattern = config.attention_windows or (0,)
    assert [pattern[index % len(pattern)] for index in range(config.num_layers)] == [
        sizes[each] for each in theirs.layer_types
    ]


# What transformers needs to build a model and has no default for.
_WITHOUT_DEFAULT: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 32},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "nemotron": {"num_key_value_heads": 8},
    "phimoe": {"num_experts_per_tok": 2},
}


@pytest.mark.parametrize("model_type", [each for each in MODEL_TYPES if each != "bloom"])
def test_default_sized_models(model_type: str) -> None:
    """The real-sized model that a family's defaults describe has transformers' count."""
    config = {"model_type": model_type, "num_experts_per_tok": 4, **_WITHOUT_DEFAULT.get(model_type, {})}
    assert count_parameters(read_hf_config(config).config).total == count_built_parameters(build_on_meta(config))


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_with_its_indexer(model_type: str) -> None:
    """DeepSeek's sparse attention is read with the indexers of all layers."""
    reading = read_hf_config({"model_type": model_type})

    assert count_parameters(reading.config).total == count_built_parameters(build_on_meta({"model_type": model_type}))
    assert "index_topk=2048" in " ".join(reading.notes)


@pytest.mark.parametrize("model_type", ["helium", "internlm3", "jais2", "minicpm3", "ministral3", "solar_open"])
def test_types_without_a_table(model_type: str) -> None:
    """Reading by field names is exact for families fully described by their fields."""
    from transformers import AutoConfig

    filled = {**AutoConfig.for_model(model_type).to_dict(), "model_type": model_type}
    reading = read_hf_config(filled)
    assert "read by field names" in reading.notes[0]
    assert count_parameters(reading.config).total == count_built_parameters(build_on_meta({"model_type": model_type}))


@pytest.mark.parametrize(
    "key",
    [
        "gpt2",
        "opt/projected",
        "llama/biased",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "gemma3_text",
        "olmo2",
        "deepseek_v2/lite",
        "deepseek_v3",
        "gpt_oss",
        "llama4_text",
        "t5",
    ],
)
def test_components(key: str) -> None:
    """The breakdown by component is that of the modules, not only their sum."""
    config = tiny_config(key)
    sums = dict.fromkeys((name for name, _ in COMPONENTS), 0)
    for name, parameter in build_on_meta(config).named_parameters():
        component = next(component for component, pattern in COMPONENTS if re.search(pattern, name))
        sums[component] += parameter.numel()
    assert count_parameters(read_hf_config(config).config).by_component == sums


def test_similar_configs_differ() -> None:
    """The comparison can fail: a bias more is noticed."""
    config = tiny_config("llama")
    biased = read_hf_config({**config, "mlp_bias": True}).config
    assert count_parameters(biased).total != count_built_parameters(build_on_meta(config))
