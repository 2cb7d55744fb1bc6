"""The baseline of a search by size: a public model, scaled to the requested parameter count."""

from __future__ import annotations

import pytest

from shapewright.core.errors import ConfigError
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.optimize.search.baseline import scale_model, usual_model


@pytest.mark.parametrize("family", ["llama", "gpt", "qwen2.5", "pythia"])
@pytest.mark.parametrize("num_parameters", [200_000_000, 3_000_000_000, 40_000_000_000])
def test_default_model_has_the_requested_size(family: str, num_parameters: int) -> None:
    """Scaled public models come within 2 % of any size, with whole heads and usual proportions."""
    config = usual_model(num_parameters, family).config

    assert count_parameters(config).total == pytest.approx(num_parameters, rel=0.02)
    assert config.num_heads % config.num_kv_heads == 0
    assert 10 < config.hidden_size / config.num_layers < 300


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt3-2.7b", "qwen3-0.6b", "gemma-7b"])
@pytest.mark.parametrize("factor", [0.3, 0.9, 3.0])
def test_scaled_models_keep_their_proportions(name: str, factor: float) -> None:
    """Heads keep their width, their groups, and their share of the stream where they are wider than it.

    Width and MLP come in units of public models, the MLP within a tenth and a unit of its ratio, and the depth stays
    in proportion to the width.
    """
    config = read_model(name).config
    scaled = scale_model(read_model(name), round(factor * count_parameters(config).total)).config
    unit = 128 if scaled.hidden_size > 1024 else 8

    assert scaled.head_dim == config.head_dim
    assert scaled.num_heads * config.num_kv_heads == config.num_heads * scaled.num_kv_heads
    assert scaled.num_heads * config.head_dim / scaled.hidden_size == pytest.approx(
        config.num_heads * config.head_dim / config.hidden_size, rel=0.1
    )
    assert scaled.intermediate_size % unit == 0
    wanted = config.intermediate_size / config.hidden_size * scaled.hidden_size
    assert abs(scaled.intermediate_size - wanted) <= 0.1 * wanted + 2 * unit
    proportion = scaled.hidden_size / scaled.num_layers / config.hidden_size * config.num_layers
    assert 0.6 < proportion < 1.7


@pytest.mark.parametrize(("family", "degree"), [("llama", 8), ("llama", 16), ("qwen3", 8), ("gpt", 6)])
def test_a_scaled_model_can_be_cut_as_the_layout_asks(family: str, degree: int) -> None:
    """Thirty billion of Llama are 50 heads, which eight devices cannot share: with a tensor axis the heads can be."""
    config = usual_model(30_000_000_000, family, degree).config

    assert config.num_heads % degree == 0
    assert config.num_kv_heads % degree == 0 or degree % config.num_kv_heads == 0
    assert count_parameters(config).total == pytest.approx(30e9, rel=0.02)


def test_a_degree_that_no_number_of_heads_near_allows() -> None:
    """If no number of heads nearby fits the degree, the model stays and the layout check reports it."""
    assert usual_model(3_000_000_000, "llama", 97).config == usual_model(3_000_000_000, "llama").config


def test_a_model_that_is_near_enough_is_not_scaled() -> None:
    """Within 2 % of 8.03 billion the model stays; beyond that it is scaled and noted."""
    model = read_model("llama-3-8b")

    assert scale_model(model, 8_180_000_000) is model
    assert scale_model(model, 7_880_000_000) is model
    for num_parameters in (8_220_000_000, 7_860_000_000):
        scaled = scale_model(model, num_parameters)
        assert scaled.config != model.config
        assert scaled.source.endswith(", scaled")
        assert "scaled to" in scaled.notes[-1]


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("gpt3-2.7b", 2.7e9), ("qwen3-30b-a3b", 30e9), ("llama-3.1-405b", 400e9), ("llama-3-8b", 8e9)],
)
def test_the_size_in_a_models_name_is_its_own(name: str, num_parameters: float) -> None:
    """A model asked for by the rounded size in its name is that model, not another number of layers."""
    model = read_model(name)

    assert scale_model(model, int(num_parameters)) is model


def test_a_size_that_embeddings_exceed_is_refused() -> None:
    """128,256 words of the least width are more than 20 million parameters: nothing is searched at another size."""
    with pytest.raises(
        ConfigError,
        match=r"num_parameters=25,000,000: the nearest .* has [\d,]+ parameters, with",
    ):
        usual_model(25_000_000, "llama")
    with pytest.raises(ConfigError, match=r"num_parameters=60,000,000: .*give num_parameters \d+, or a model"):
        scale_model(read_model("llama-3.2-1b"), 60_000_000)
    assert count_parameters(usual_model(25_000_000, "gpt").config).total == pytest.approx(25e6, rel=0.05)
    # What is advised works.
    with pytest.raises(ConfigError) as caught:
        usual_model(60_000_000, "llama")
    advised = int(str(caught.value).partition("give num_parameters ")[2].partition(",")[0])
    assert count_parameters(usual_model(advised, "llama").config).total == pytest.approx(advised, rel=0.05)


def test_a_family_may_be_named_by_its_first_letters() -> None:
    """No preset is called qwen, and those that begin with it are meant; one that is called so comes first."""
    assert usual_model(8_000_000_000, "qwen").config.title.casefold().startswith("qwen")
    assert usual_model(8_000_000_000, "QWEN2.5").config.title.casefold().startswith("qwen2.5")


def test_models_that_cannot_be_scaled_are_errors() -> None:
    """Latent attention, encoders and unknown families are refused in one line."""
    for name in ("deepseek-v3", "t5-large"):
        with pytest.raises(ConfigError, match="only decoders without latent or compressed attention are scaled"):
            scale_model(read_model(name), 10**9)
    own = read_model("t5-large")
    with pytest.raises(ConfigError, match=f"give num_parameters {count_parameters(own.config).total}, or a config"):
        scale_model(own, 10**9)
    assert scale_model(own, count_parameters(own.config).total) is own
    with pytest.raises(ConfigError, match="no dense decoder preset begins with it"):
        usual_model(10**9, "lama")


@pytest.mark.parametrize(
    ("name", "num_parameters", "active"),
    [
        # 100 of 235 billion are 9.4 of its 22 in use.
        ("qwen3-235b-a22b", 100e9, 9.4e9),
        ("mixtral-8x7b", 20e9, 5.5e9),
        ("glm-4.5-air", 50e9, 6.5e9),
        ("llama-4-scout", 50e9, 8.5e9),
    ],
)
def test_mixtures_keep_their_experts(name: str, num_parameters: float, active: float) -> None:
    """A scaled mixture has as many experts, as many in use, its pattern of dense layers, and its share in use."""
    config = read_model(name).config
    scaled = scale_model(read_model(name), round(num_parameters)).config
    count = count_parameters(scaled)

    assert count.total == pytest.approx(num_parameters, rel=0.01)
    assert count.active == pytest.approx(active, rel=0.07)
    assert (scaled.num_experts, scaled.num_experts_per_token) == (config.num_experts, config.num_experts_per_token)
    assert scaled.moe_intermediate_size % 64 == 0
    assert [scaled.is_moe_layer(layer) for layer in range(3)] == [config.is_moe_layer(layer) for layer in range(3)]
    one_width = config.moe_intermediate_size == config.intermediate_size
    assert (scaled.moe_intermediate_size == scaled.intermediate_size) == one_width


@pytest.mark.parametrize("family", ["mixtral", "bert", "dit"])
def test_a_family_without_dense_decoders_is_named(family: str) -> None:
    """A family that is there is not mistaken for a misspelled one."""
    with pytest.raises(ConfigError, match=f"family='{family}': its presets are no dense decoders of text"):
        usual_model(10**9, family)
