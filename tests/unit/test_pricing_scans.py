"""Prices of scans, short convolutions, and of attention whose kernels have records of their own."""

from __future__ import annotations

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.scan import SCAN_RULES, CausalConv, Scan
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.kernels.scans import BACKWARD_RATIO, price_scan
from shapewright.pricing.operations import price_operations


def scan(rule: str = "gated_delta_net", **changes: object) -> Scan:
    """Build a scan of Qwen3-Next's sizes over 8192 tokens of a prompt."""
    sizes = {
        "batch_size": 1, "seq_len": 8192, "num_k_heads": 16, "num_v_heads": 32, "k_head_dim": 128, "v_head_dim": 128,
    }  # fmt: skip
    return Scan(name="x", rule=rule, **{"has_cache": True, **sizes, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "a100-sxm-80gb", "mi300x", "v100-sxm2-32gb"])
@pytest.mark.parametrize("rule", SCAN_RULES)
def test_every_rule_has_a_price_on_every_device(device: str, rule: str) -> None:
    """Prompts, new tokens and gradients are priced above the roofline, inside their interval."""
    calls = [scan(rule), scan(rule, batch_size=64, seq_len=1), scan(rule, has_cache=False, is_backward=True)]
    calls += [CausalConv(name="y", rule=rule, batch_size=2, seq_len=512, channels=8192, width=4)]

    for price in price_operations(calls, load_device(device)):
        assert price.roofline_s <= price.time_s
        assert price.low_s <= price.time_s <= price.high_s


def test_rules_without_a_table_have_wider_intervals() -> None:
    """Mamba-2's scan borrows the kernel of gated delta nets, and its interval spans a factor of two at least."""
    own, borrowed = price_operations([scan(), scan("mamba2")], load_device("h100-sxm-80gb"))

    assert own.high_s / own.time_s < 1.5
    assert borrowed.high_s / borrowed.time_s >= 2.0
    assert borrowed.time_s / borrowed.low_s >= 2.0


def test_decode_does_not_depend_on_the_context_and_grows_with_the_states() -> None:
    """A new token reads and writes the state of its sequence: twice the sequences take about twice as long."""
    one, two = price_operations(
        [scan(batch_size=256, seq_len=1), scan(batch_size=512, seq_len=1)], load_device("h200-sxm-141gb")
    )

    assert (
        one.time_s
        >= scan(batch_size=256, seq_len=1).num_bytes / load_device("h200-sxm-141gb").memory_bandwidth_bytes_per_s
    )
    assert two.time_s == pytest.approx(2.0 * one.time_s, rel=0.15)


def test_backward_takes_its_ratio() -> None:
    """Gradients of a scan take the assumed multiple of its forward pass."""
    forward, backward = (scan(has_cache=False, is_backward=each) for each in (False, True))
    first, second = price_operations([forward, backward], load_device("h100-sxm-80gb"))

    assert second.time_s == pytest.approx(BACKWARD_RATIO * first.time_s)


@pytest.mark.parametrize("rule", ["gated_delta_net", "mamba2", "lightning_attention"])
@pytest.mark.parametrize(("heads", "batch_size"), [(32, 1), (32, 16), (128, 4)])
def test_more_bandwidth_makes_no_training_scan_slower(rule: str, heads: int, batch_size: int) -> None:
    """H200 has the SMs of H100 and more bandwidth; rows that were measured beside other work had it take three times.

    What borrows from Hopper does so from the same rows, whichever of both is nearer.
    """
    sizes = {"has_cache": False, "num_v_heads": heads, "batch_size": batch_size}
    conv = CausalConv(name="y", rule=rule, channels=8192, width=4, batch_size=16, seq_len=8192, has_cache=False)
    calls = [scan(rule, **sizes), conv]
    (h100, h100_conv), (h200, h200_conv), borrowed = (
        price_operations(calls, load_device(name)) for name in ("h100-sxm-80gb", "h200-sxm-141gb", "h20-96gb")
    )

    assert 0.6 * h100.time_s < h200.time_s < 1.05 * h100.time_s
    assert 0.6 * h100_conv.time_s < h200_conv.time_s < 1.05 * h100_conv.time_s
    assert {price.calibration.record_id.rpartition("/")[0] for price in borrowed} == {"linear_attention/h100-sxm-80gb"}


def test_arrays_of_sizes_are_priced_like_single_scans() -> None:
    """The search prices columns of sizes; each entry equals the price of that size alone."""
    device = load_device("b200-sxm-180gb")
    lengths = np.array([512, 2048, 8192])
    together = price_scan(scan(seq_len=lengths), device, load_record("linear_attention", device))
    alone = price_operations([scan(seq_len=int(length)) for length in lengths], device)

    assert list(together.time_s) == pytest.approx([price.time_s for price in alone])


def attention(**changes: object) -> Attention:
    """Build absorbed decode attention of DeepSeek-V3 over 4096 cached tokens."""
    sizes = {
        "batch_size": 32, "query_len": 1, "kv_len": 4096, "num_heads": 16, "num_kv_heads": 1, "head_dim": 576,
        "v_head_dim": 512, "values_in_keys": True,
    }  # fmt: skip
    return Attention(name="x", **{**sizes, **changes})  # type: ignore[arg-type]


EXPANDED = {"query_len": 4096, "num_kv_heads": 16, "head_dim": 192, "v_head_dim": 128, "values_in_keys": False}
ENCODER = {"query_len": 729, "kv_len": 729, "num_kv_heads": 16, "head_dim": 72, "v_head_dim": 72, "causal": False}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "mla"),
        (EXPANDED, "mla"),
        ({**ENCODER, "values_in_keys": False}, "attention_encoder"),
        ({**ENCODER, "values_in_keys": False, "head_dim": 96, "v_head_dim": 96}, "attention"),
        ({**EXPANDED, "is_backward": True}, "attention"),
        ({**EXPANDED, "head_dim": 128}, "attention"),
    ],
)
def test_attention_takes_the_record_of_its_kernel(changes: dict[str, object], kind: str) -> None:
    """Latent attention and encoders are priced by their own kernels where measured, other calls by the formulas."""
    (price,) = price_operations([attention(**changes)], load_device("h100-sxm-80gb"))

    assert price.calibration.record_id.startswith(f"{kind}/")


def test_other_architectures_keep_their_formulas() -> None:
    """An RTX 4090 has no measured latent kernel of its own family: the fused kernels of serving price it."""
    (price,) = price_operations([attention(batch_size=8)], load_device("rtx-4090"))
    (sibling,) = price_operations([attention(batch_size=8)], load_device("h200-sxm-141gb"))

    assert price.calibration.record_id.startswith("attention/") or price.calibration.transfer == "architecture"
    assert sibling.calibration.transfer == "exact"
