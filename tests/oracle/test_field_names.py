"""Types without a table: a field that changes the model of transformers is read, noted or refused, never ignored."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the trace extra: PyTorch")
pytest.importorskip("transformers", reason="needs the trace extra: transformers")

from hf_models import TINY_CONFIGS, build_on_meta, count_built_parameters, hf_config, model_type_of, tiny_config
from test_gemms import TRAINED
from traced_gemms import trace_training

from shapewright.core.errors import ConfigError
from shapewright.lowering.flops import count_model_flops
from shapewright.models.families.fallback import transformers_types
from shapewright.models.families.registry import FAMILIES
from shapewright.models.hf_config import read_hf_config
from shapewright.models.parameters import count_parameters
from shapewright.workload.workload import Workload

pytestmark = pytest.mark.oracle

READ = {name: entry for name, entry in transformers_types().items() if "defaults" in entry}
# Language models of transformers' causal mapping; the others have other heads.
CAUSAL = sorted(name for name, entry in READ.items() if entry["defaults"].get("is_encoder_decoder") is False)
SAMPLED = sorted(random.Random(22).sample(CAUSAL, 8))
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def filled(model_type: str, **given: Any) -> dict[str, Any]:
    """Every field of a type's config, as transformers fills them in."""
    from transformers import AutoConfig

    values: dict[str, Any] = AutoConfig.for_model(model_type, **given).to_dict()
    return values


@pytest.mark.parametrize("model_type", SAMPLED)
def test_counts_differ_as_noted(model_type: str) -> None:
    """A default model has the noted difference of parameters from that of transformers, with and without its fields."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("has no causal language head")
    built = count_built_parameters(build_on_meta({"model_type": model_type}))
    for values in (filled(model_type), {"model_type": model_type, **READ[model_type]["defaults"]}):
        here = count_parameters(read_hf_config(values).config).total
        assert here / built - 1.0 == pytest.approx(READ[model_type]["error_fraction"], abs=0.02)


@pytest.mark.parametrize("model_type", sorted(READ))
def test_absent_fields_have_the_defaults_of_transformers(model_type: str) -> None:
    """A config with only its type is read as the default config of transformers."""
    needed = {key: filled(model_type)[key] for key in READ[model_type]["needed"]}
    short = read_hf_config({"model_type": model_type, **needed}).config
    full = read_hf_config(filled(model_type)).config

    assert count_parameters(short).total == count_parameters(full).total


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_defaults_of_families_are_those_of_transformers(model_type: str) -> None:
    """A config with only its type is the model of one that spells out every default: saved configs leave them out."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip("transformers has no config of this type")
    if model_type == "deepseek_v2":
        pytest.skip("its default of zero experts a token is refused")
    full, short = read_hf_config(filled(model_type)).config, read_hf_config({"model_type": model_type}).config
    # The name of the part that holds the text model; and in Qwen3-VL the whole model decides whether weights are tied.
    unequal = {"model_type"} | ({"tied_embeddings"} if model_type == "qwen3_vl_moe_text" else set())

    for spec in fields(full):
        if spec.name not in unequal:
            assert getattr(short, spec.name) == getattr(full, spec.name), spec.name


@pytest.mark.parametrize("model_type", sorted(name for name, entry in READ.items() if entry["unread"]))
def test_unread_fields_are_refused(model_type: str) -> None:
    """A field that changes the model and is not read must have its default."""
    for key, value in READ[model_type]["unread"].items():
        other = not value if isinstance(value, bool) else value + 64
        with pytest.raises(ConfigError, match=f"{key}=.* changes its layers in a way that is not read"):
            read_hf_config({**filled(model_type), key: other})


@pytest.mark.parametrize("model_type", sorted(set(transformers_types()) - set(READ)))
def test_misread_types_are_refused(model_type: str) -> None:
    """A type whose count would be far off is refused, with the difference."""
    with pytest.raises(ConfigError, match=r"would have \d+% (more|fewer) parameters|is not supported"):
        read_hf_config(filled(model_type))


@pytest.mark.parametrize("model_type", sorted(name for name, entry in READ.items() if entry["needed"]))
def test_derived_fields_must_be_given(model_type: str) -> None:
    """A field that transformers derives from others is not guessed."""
    with pytest.raises(ConfigError, match="is missing in the config of"):
        read_hf_config({"model_type": model_type})


def test_shared_layers_are_refused() -> None:
    """ALBERT's layers share their weights: counted one by one they would be 12 times the model."""
    with pytest.raises(ConfigError, match="layers that share their weights"):
        read_hf_config(filled("albert"))


def test_unequal_stacks_are_refused() -> None:
    """An encoder and a decoder of different widths are not read as equal."""
    with pytest.raises(ConfigError, match="encoder_ffn_dim=128 must equal decoder_ffn_dim=4096"):
        read_hf_config({**filled("bart"), "encoder_ffn_dim": 128})


def test_multi_query_of_starcoder() -> None:
    """StarCoder's 48 query heads share one key-value head, regardless of other keys."""
    config = {"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40, "multi_query": True}
    shared = read_hf_config(config).config

    assert (shared.num_kv_heads, shared.num_heads) == (1, 48)
    assert read_hf_config({**config, "multi_query": False}).config.num_kv_heads == 48


# Multimodal wrappers, whose own keys are not those of the text model.
WRAPPERS = ("gemma3", "llama4")
TABLED = sorted(
    {model_type_of(key): key for key in reversed(TINY_CONFIGS) if model_type_of(key) not in WRAPPERS}.items()
)
# Without effect on parameters and FLOPs.
NEUTRAL = (
    "token_id", "use_cache", "output_", "return_dict", "chunk_size_feed", "num_labels", "is_encoder_decoder",
    "is_decoder", "cross_attention", "pretraining_tp", "id2label", "label2id",
)  # fmt: skip
# Read otherwise than transformers builds them: MPT as in the code published with it, of which transformers leaves parts
# out; untied logits that transformers ties, or the reverse, where no published model has them.
READ_OTHERWISE = {
    ("mpt", "expansion_ratio"), ("mpt", "attn_config.qk_ln"), ("mpt", "attn_config.alibi"), ("mpt", "no_bias"),
    ("bert", "tie_word_embeddings"), ("roberta", "tie_word_embeddings"), ("kimi_linear", "tie_word_embeddings"),
    ("nemotron_h", "tie_word_embeddings"),
}  # fmt: skip


def switches(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Path and value of every integer and truth value of a config."""
    for key, value in values.items():
        if any(words in key for words in NEUTRAL):
            continue
        if isinstance(value, dict):
            yield from switches(value, (*above, key))
        elif isinstance(value, int):
            yield (*above, key), value


def changed_configs(base: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Configs with one number doubled or one truth value reversed, and the path to it."""
    for path, value in switches(base):
        config = deepcopy(base)
        inner = config
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = not value if isinstance(value, bool) else 2 * value or 1
        if (base["model_type"], ".".join(path)) not in READ_OTHERWISE:
            yield path, config


# All of them with HYPOTHESIS_PROFILE=explore.
EXPLORES = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
NUM_TYPES = len(TABLED) if EXPLORES else 8


@pytest.mark.parametrize(("model_type", "key"), random.Random(22).sample(TABLED, NUM_TYPES))
def test_no_field_of_a_type_with_a_table_is_ignored(model_type: str, key: str) -> None:
    """Each number doubled and each truth value reversed changes the count as in transformers, or is refused."""
    base = {**hf_config(tiny_config(key)).to_dict(), "model_type": model_type}
    num_compared = 0
    for path, config in changed_configs(base):
        here = built = None
        with suppress(Exception):  # a model that cannot be built
            built = count_built_parameters(build_on_meta(deepcopy(config)))
        with suppress(ConfigError):
            here = count_parameters(read_hf_config(config).config).total
        if built is None or here is None:
            continue
        assert here == built, path
        num_compared += 1

    assert num_compared > 3


STEPPED = [(model_type, key) for model_type, key in TABLED if key in TRAINED]


@pytest.mark.parametrize(("model_type", "key"), STEPPED if EXPLORES else random.Random(22).sample(STEPPED, 2))
def test_no_field_changes_flops_unnoticed(model_type: str, key: str) -> None:
    """The same for the FLOPs of a training step, which windows, routers and scans change without any parameter."""
    base = {**hf_config(tiny_config(key)).to_dict(), "model_type": model_type}
    num_compared = 0
    for path, config in changed_configs(base):
        here = traced = None
        with suppress(Exception):  # a model that cannot be built or run
            traced = trace_training(build_on_meta(deepcopy(config), dtype="bfloat16"), 3, 40).whole_flops
        with suppress(ConfigError):
            here = count_model_flops(
                read_hf_config(config).config, Workload(micro_batch_size=3, seq_len=40, attention="unfused")
            )
        if traced is None or here is None:
            continue
        assert here == traced, path
        num_compared += 1

    assert num_compared > 3


@pytest.mark.parametrize(("model_type", "key"), [("deepseek_v2", "mlp_bias"), ("ernie4_5_moe", "use_bias")])
def test_biases_of_mixtures_are_refused(model_type: str, key: str) -> None:
    """Biases in experts are not counted, so that configs with them are refused."""
    config = {**tiny_config(model_type), key: True}

    with pytest.raises(ConfigError, match=f"{key}=True .* changes its layers in a way that is not read"):
        read_hf_config(config)


def test_the_width_of_mamba_is_read() -> None:
    """A width that is not a multiple of the hidden size is that of the scan, as transformers builds it."""
    config = {**hf_config(tiny_config("mamba")).to_dict(), "intermediate_size": 192}

    assert count_parameters(read_hf_config(config).config).total == count_built_parameters(build_on_meta(config))


def test_a_gate_that_contradicts_its_name_is_refused() -> None:
    """T5 describes its MLP twice; transformers follows is_gated_act."""
    with pytest.raises(ConfigError, match="is_gated_act=True contradicts feed_forward_proj='relu'"):
        read_hf_config({"model_type": "t5", "feed_forward_proj": "relu", "is_gated_act": True})
