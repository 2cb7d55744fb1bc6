"""The law of loss by shape: values by hand, differences, tokens to a loss, and net speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.core.errors import CalibrationError
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.loss.effect import net_speedup
from shapewright.prediction.loss.law import LossLaw, TokensRatio, load_loss_law, loss_recipes
from shapewright.prediction.loss.terms import COEFFICIENTS, ShapeForLoss, derivatives, evaluate_terms

GPT = ShapeForLoss.of(TransformerConfig(hidden_size=2560, num_layers=32, num_heads=32, vocab_size=50257))
TOKENS = 300e9


def simple_law(**changes: float) -> LossLaw:
    """A law of round numbers without any uncertainty: 2 + 1 (N / 1e8)^-0.5 + 0.1 (D / 1e10)^-0.5."""
    coefficients = dict.fromkeys(COEFFICIENTS, 0.0)
    coefficients |= {"floor_nats": 2.0, "capacity_exponent": 0.5, "log_token_nats": np.log(0.1), "token_exponent": 0.5}
    size = len(COEFFICIENTS)
    return LossLaw(
        name="simple",
        coefficients=coefficients | changes,
        covariance=np.zeros((size, size)),
        scatter_nats=0.0,
        scatter_length=1.0,
        parameters_range=(1e6, 1e9),
        tokens_range=(1e9, 1e11),
    )


def shape_of(num_parameters: float, **changes: float) -> ShapeForLoss:
    """A shape of 64 wide heads and as many widths as layers."""
    fields = {"hidden_size": 512, "num_layers": 8, "head_dim": 64, "intermediate_size": 2048, "num_heads": 8}
    return ShapeForLoss(num_parameters=num_parameters, **{**fields, "num_kv_heads": 8, **changes})  # type: ignore[arg-type]


def test_loss_by_hand() -> None:
    """4e8 parameters halve the first term, 9e10 tokens third the second: 2 + 0.5 + 0.0333."""
    assert simple_law().loss_nats(shape_of(4e8), 9e10) == pytest.approx(2.5 + 0.1 / 3.0)


def test_wide_shapes_lose_parameters() -> None:
    """Three units off the best ln(width / layers) cost 2 (sqrt(10) - 1) curvatures of ln N."""
    law = simple_law(curvature=0.1, log_best_width_per_layer=np.log(64.0) - 3.0)

    effective = 1e8 * np.exp(-0.1 * 2.0 * (np.sqrt(10.0) - 1.0))
    assert law.loss_nats(shape_of(1e8), 1e10) == pytest.approx(2.1 + (effective / 1e8) ** -0.5)


def test_tokens_make_up_for_size() -> None:
    """A model 2 % worse at 1e10 tokens needs (0.1 / (0.1 - difference))^2 as many for the same loss."""
    law = simple_law()
    small, large = shape_of(0.98e8), shape_of(1e8)
    difference = 0.98**-0.5 - 1.0

    ratio = law.tokens_ratio(small, large, 1e10)

    assert law.difference(small, large, 1e10).mean_nats == pytest.approx(difference)
    assert ratio.ratio == pytest.approx((0.1 / (0.1 - difference)) ** 2)
    assert law.tokens_to_reach(small, 3.1) == pytest.approx(1e10 * ratio.ratio)


def test_unreachable_losses_need_infinite_tokens() -> None:
    """A model whose loss without the token term is above the target never reaches it, and is never faster."""
    law = simple_law()
    tiny, large = shape_of(1e7), shape_of(1e8)

    ratio = law.tokens_ratio(tiny, large, 1e10)
    net = net_speedup(2.0, ratio)

    assert ratio.ratio == np.inf
    assert law.tokens_to_reach(tiny, 3.1) == np.inf
    assert (net.mean, net.high, net.chance_better) == (0.0, 0.0, 0.0)


def test_derivatives_are_those_of_the_law() -> None:
    """Each derivative agrees with a small step of its coefficient."""
    law = load_loss_law()
    shape = replace(GPT, num_kv_heads=8, total_parameters=3.0 * GPT.num_parameters, expert_width=2560)
    exact = derivatives(law.coefficients, evaluate_terms(law.coefficients, shape, TOKENS))

    for name, slope in zip(COEFFICIENTS, exact, strict=True):
        ends = [
            replace(law, coefficients={**law.coefficients, name: law.coefficients[name] + step}).loss_nats(
                shape, TOKENS
            )
            for step in (-1e-5, 1e-5)
        ]
        assert slope == pytest.approx((ends[1] - ends[0]) / 2e-5, rel=1e-4, abs=1e-8)


def test_fewer_larger_experts_are_worse_by_a_prior_that_is_unsure() -> None:
    """A quarter of the experts for a token, four times as wide, leave 4^-0.2 of the parameters, give or take that."""
    law = load_loss_law()
    own = replace(GPT, total_parameters=8.0 * GPT.num_parameters, intermediate_size=6144, expert_width=768)
    difference = law.difference(replace(own, expert_width=3072), own, TOKENS)
    exponent = law.coefficients["capacity_exponent"]
    capacity_nats = float(evaluate_terms(law.coefficients, own, TOKENS).capacity_nats)

    assert difference.mean_nats == pytest.approx(capacity_nats * (4.0 ** (0.2 * exponent) - 1.0))
    assert difference.standard_deviation_nats >= capacity_nats * exponent * 0.2 * np.log(4.0)
    assert difference.low_nats < 0.0 < difference.high_nats


def test_arrays_equal_scalars() -> None:
    """A table of shapes gives what its shapes give one by one."""
    law = load_loss_law()
    widths = [1280, 2560, 5120]
    many = replace(GPT, hidden_size=np.array(widths))

    ratios = law.tokens_ratio(many, GPT, TOKENS)

    for index, width in enumerate(widths):
        one = law.tokens_ratio(replace(GPT, hidden_size=width), GPT, TOKENS)
        assert np.asarray(ratios.ratio)[index] == pytest.approx(one.ratio)
        assert np.asarray(ratios.log_standard_deviation)[index] == pytest.approx(one.log_standard_deviation)


def test_shape_compared_with_itself_has_no_difference() -> None:
    """Equal shapes have neither a difference nor an uncertainty."""
    difference = load_loss_law().difference(GPT, GPT, TOKENS)

    assert (difference.mean_nats, difference.standard_deviation_nats) == (0.0, 0.0)


@pytest.mark.parametrize("recipe", loss_recipes())
def test_more_parameters_and_more_tokens_never_hurt(recipe: str) -> None:
    """From 10 tokens per parameter on, loss falls with tokens and with size at one ratio of width to depth."""
    law = load_loss_law(recipe)
    sizes = np.geomspace(*law.parameters_range, 20)
    tokens = 10.0 * sizes[-1] * np.geomspace(1.0, 100.0, 20)[:, None]
    width = np.cbrt(sizes / 12.0 * 50.0)
    shape = ShapeForLoss(
        num_parameters=sizes,
        hidden_size=width,
        num_layers=width / 50.0,
        head_dim=128,
        intermediate_size=4 * width,
        num_heads=width / 128,
        num_kv_heads=width / 128,
    )
    loss = np.asarray(law.loss_nats(shape, tokens))

    assert np.all(np.diff(loss, axis=0) < 0.0)
    assert np.all(np.diff(loss, axis=1) < 0.0)


def test_the_interval_grows_outside_the_data() -> None:
    """The same change of depth is less certain at 70 B than at 1 B."""
    law = load_loss_law()
    deviations = []
    for size in (1e9, 7e10, 1e12):
        wide, deep = (
            shape_of(size, hidden_size=h, num_layers=n, num_heads=h // 64) for h, n in ((4096, 16), (2048, 64))
        )
        deviations.append(float(law.difference(wide, deep, 1e12).standard_deviation_nats) / _slope(law, size))

    assert deviations == sorted(deviations)


def _slope(law: LossLaw, size: float) -> float:
    """Loss per ln N. [nats]"""
    return float(law.loss_nats(shape_of(size), 1e12) - law.loss_nats(shape_of(1.01 * size), 1e12)) / np.log(1.01)


def test_net_speed_joins_both_sides() -> None:
    """1.3 times as fast with 1.2 times the tokens is 1.083 times as fast; without uncertainty that is certain."""
    net = net_speedup(1.3, TokensRatio(ratio=1.2, log_standard_deviation=0.0))

    assert net.mean == pytest.approx(1.3 / 1.2)
    assert (net.low, net.high, net.chance_better) == (net.mean, net.mean, 1.0)


def test_net_speed_adds_variances() -> None:
    """Deviations of 3 % and 4 % make 5 %; a gain of one deviation is better with 84.1 %."""
    net = net_speedup(
        np.exp(0.05), TokensRatio(ratio=1.0, log_standard_deviation=0.03), step_log_standard_deviation=0.04
    )

    assert np.log(net.high / net.mean) == pytest.approx(1.645 * 0.05, rel=1e-3)
    assert net.chance_better == pytest.approx(0.8413, abs=1e-4)


def test_unknown_recipes_are_refused() -> None:
    """The message lists the recipes."""
    with pytest.raises(CalibrationError, match=r"unknown loss recipe 'gemston'.*reference"):
        load_loss_law("gemston")


@pytest.mark.parametrize(("name", "num_layers"), [("nemotron-h-8b", 26), ("mamba2-2.7b", 32), ("llama-3-8b", 32)])
def test_a_layer_of_the_law_has_a_mixer_and_an_mlp(name: str, num_layers: int) -> None:
    """Nemotron-H lists 24 Mamba mixers, 4 of attention and 24 MLPs as 52 layers; Mamba-2 has 64 mixers alone."""
    assert ShapeForLoss.of(read_model(name).config).num_layers == num_layers
