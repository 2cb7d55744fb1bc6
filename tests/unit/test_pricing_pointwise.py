"""Pointwise operations: traffic over achieved bandwidth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowered import ONE_DEVICE, gpt, named
from shapewright.hardware.loader import load_device
from shapewright.lowering.model import lower
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.pricing.calibration.records import FP32_POINTWISE, CalibrationRecord, load_record
from shapewright.pricing.operations import price_operations
from shapewright.pricing.pointwise import price_pointwise, price_pointwises
from shapewright.pricing.price import Price
from shapewright.workload.workload import Workload

# Half of the bandwidth for everything, 1 us a kernel, no cache; gated activations at a quarter, and norms of Ada whole.
PLAIN = {"bandwidth_fraction": 0.5, "start_s": 1e-6, "in_table": True}
ROUND_RECORD = CalibrationRecord(
    id="pointwise/round/2026-11-21",
    kind="pointwise",
    device="x",
    devices=("x",),
    architecture="x",
    parameters={
        "kinds": {
            "norm": PLAIN,
            "activation": PLAIN,
            "gated_activation": {"bandwidth_fraction": 0.25, "start_s": 2e-6},
            "ada_norm": {**PLAIN, "bandwidth_fraction": 1.0, "device": "l40"},
            "other": PLAIN,
        },
        "l2_reach_fraction": 1e-9,
        "l2_speedup": 1.0,
    },
    interval={"edges_s": [], "low": [0.8], "high": [1.25]},
    provenance={},
)


def price(operation: str, read: float, written: float, num_kernels: int = 1) -> Price:
    """Price on an A100 80 GB (2.039 TB/s) with the round record."""
    work = Pointwise(name="x", operation=operation, read_bytes=read, written_bytes=written, num_kernels=num_kernels)
    return price_pointwise(work, load_device("a100-sxm-80gb"), ROUND_RECORD)


def test_traffic_by_hand() -> None:
    """2.039 GB at half of 2.039 TB/s take 2 ms, and three kernels start in 3 us."""
    found = price("norm", 1.0195e9, 1.0195e9, num_kernels=3)

    assert found.time_s == pytest.approx(2e-3 + 3e-6)
    assert (found.low_s, found.high_s) == pytest.approx((0.8 * found.time_s, 1.25 * found.time_s))
    assert found.bound_by == "memory"


def test_small_gemms_are_bound_by_kernel_start() -> None:
    """A kilobyte costs the start of a kernel."""
    assert price("norm", 512.0, 512.0).bound_by == "latency"


def test_gate_is_recognized_by_its_reads() -> None:
    """An activation that reads twice what it writes is gated, with constants of its own."""
    plain, gated = price("activation", 1e9, 1e9), price("activation", 2e9, 1e9)

    assert gated.memory_s / plain.memory_s == pytest.approx(1.5 * 2.0)


@pytest.mark.parametrize(("gated_mlp", "fraction"), [(False, 0.5), (True, 0.25)])
def test_gradients_of_activations_run_the_kernel_of_their_activation(gated_mlp: bool, fraction: float) -> None:
    """Both read more than they write: that of GELU x and dy for dx, that of a gate three inputs for two gradients."""
    config = gpt(hidden_size=64, num_heads=4, gated_mlp=gated_mlp, intermediate_size=160)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    device = load_device("a100-sxm-80gb")
    for name, pass_name in (("mlp.activation", "forward"), ("mlp.activation.backward", "backward")):
        one = named(operations, name, pass_name)
        seconds = one.num_bytes / device.memory_bandwidth_bytes_per_s / fraction
        assert price_pointwise(one, device, ROUND_RECORD).memory_s == pytest.approx(seconds)


def test_casts_and_chains_of_norms_have_no_gate() -> None:
    """A cast of 2 bytes to 1, and the gradient of a chain, which reads 72 bytes and writes 20, as plain activations."""
    config = gpt(hidden_size=64, num_heads=4, norm="rmsnorm")
    for fields, role in (({"dtype": "fp8", "finetune": "lora"}, "quantize"), ({"kernels": "torch"}, "norm")):
        job = Workload(micro_batch_size=2, seq_len=8, **fields)  # type: ignore[arg-type]
        for one in lower(config, job, ONE_DEVICE):
            if isinstance(one, Pointwise) and role in one.name:
                found = price_pointwise(one, load_device("a100-sxm-80gb"), ROUND_RECORD)
                assert found.memory_s == pytest.approx(2.0 * found.roofline_s)


def test_kernels_of_an_architecture_price_its_devices() -> None:
    """Also those of another architecture's record; gradients that were not measured take five passes for three.

    A norm with a gate, which reads as much as a gradient, is none.
    """
    norm = Pointwise(name="x", operation="norm", read_bytes=1e9, written_bytes=1e9)
    gradient, gated = norm.changed(read_bytes=2e9, is_backward=True), norm.changed(read_bytes=2e9)
    for name, fraction in (("l40s", 1.0), ("a100-sxm-80gb", 0.5)):
        device = load_device(name)
        forward, backward, with_gate = price_pointwises([norm, gradient, gated], device, ROUND_RECORD)
        assert forward.memory_s == pytest.approx(2e9 / device.memory_bandwidth_bytes_per_s / fraction)
        assert with_gate.memory_s == pytest.approx(3.0 / 2.0 * forward.memory_s)
        if device.architecture != "ada":
            assert backward.memory_s == pytest.approx(5.0 / 2.0 * forward.memory_s)


@pytest.mark.parametrize(
    ("name", "forward_us", "backward_us"),
    [("h200-sxm-141gb", (64.0, 102.0), (114.0, 260.0)), ("gb200", (44, 54), (77, 177))],
)
def test_norms_of_newer_devices_take_what_libraries_take(
    name: str, forward_us: tuple[float, float], backward_us: tuple[float, float]
) -> None:
    """RMS norms of 8192 x 8192 in bf16: compiled PyTorch, cuDNN and PyTorch's own (NVIDIA/cudnn-frontend @3929da2)."""
    num_bytes = 8192.0 * 8192.0 * 2.0
    norm = Pointwise(name="x", operation="norm", read_bytes=num_bytes, written_bytes=num_bytes)
    gradient = norm.changed(read_bytes=2.0 * num_bytes, num_kernels=2, is_backward=True)
    for one, (least_us, most_us) in ((norm, forward_us), (gradient, backward_us)):
        (found,) = price_operations([one], load_device(name))
        assert least_us <= found.time_s * 1e6 <= most_us


def test_reads_and_writes_count_as_traffic() -> None:
    """Below the ratio of a gate it does not matter which way bytes go; priced many at once they take as long."""
    device = load_device("a100-sxm-80gb")
    works = [
        Pointwise(name="x", operation="norm", read_bytes=read, written_bytes=written, num_kernels=number)
        for read, written, number in ((1e9, 1e9, 1), (0.5e9, 1.5e9, 1), (0.0, 2e9, 2), (3e9, 1e8, 3))
    ]
    apart = [price_pointwise(work, device, ROUND_RECORD) for work in works]

    assert apart[0].time_s == apart[1].time_s == pytest.approx(apart[2].time_s - 1e-6)
    assert price_pointwises(works, device, ROUND_RECORD) == apart


@pytest.mark.parametrize(("traffic", "share_of_cold"), [(1e-3, 0.25), (1.0, 0.625), (1e3, 1.0)])
def test_operands_in_the_cache_are_faster(traffic: float, share_of_cold: float) -> None:
    """The whole speed-up of 4 far inside the cache's reach, half of it at the reach, none far beyond."""
    device = load_device("a100-sxm-80gb")
    assert device.l2_bytes is not None
    hot = replace(ROUND_RECORD, parameters={**ROUND_RECORD.parameters, "l2_reach_fraction": 0.5, "l2_speedup": 4.0})
    one_way = traffic * 0.5 * device.l2_bytes / 2.0
    work = Pointwise(name="x", operation="norm", read_bytes=one_way, written_bytes=one_way)
    cold, warm = (price_pointwise(work, device, record) for record in (ROUND_RECORD, hot))

    assert warm.memory_s / cold.memory_s == pytest.approx(share_of_cold, rel=2e-3)


def test_a_borrowed_kernel_keeps_its_cycles_beyond_streaming() -> None:
    """With the donor's SMs and half of its bandwidth, half as much of the time beyond streaming remains visible."""
    donor = load_device("a100-sxm-80gb")
    kinds = {"norm": {"bandwidth_fraction": 0.5, "start_s": 0.0}, "other": {"bandwidth_fraction": 1.0, "start_s": 0.0}}
    record = replace(
        ROUND_RECORD,
        device=donor.name,
        transfer="architecture",
        parameters={**ROUND_RECORD.parameters, "kinds": kinds},
    )
    half = replace(donor, memory_bandwidth_bytes_per_s=donor.memory_bandwidth_bytes_per_s / 2.0)
    double = replace(donor, memory_bandwidth_bytes_per_s=donor.memory_bandwidth_bytes_per_s * 2.0)
    work = Pointwise(name="x", operation="norm", read_bytes=1e9, written_bytes=1e9)
    fractions = [
        found.roofline_s / found.memory_s
        for found in (price_pointwise(work, device, record) for device in (donor, half, double))
    ]

    # 1/f = 1 + 1 of the donor; half of the second 1 with half of the memory; more memory for each SM changes nothing.
    assert fractions == pytest.approx([1 / 2, 1 / 1.5, 1 / 2], rel=1e-6)


def test_unlisted_kinds_take_the_common_fraction() -> None:
    """A kind that the record does not list is priced as any other."""
    assert price("router", 1e9, 1e9).time_s == price("norm", 1e9, 1e9).time_s


def test_kinds_outside_the_table_have_wider_intervals() -> None:
    """What rests on a likeness is less certain than what was measured."""
    measured, assumed = price("norm", 1e9, 1e9), price("router", 1e9, 1e9)

    assert assumed.time_s == measured.time_s
    assert assumed.high_s > measured.high_s


def test_softmax_and_mask_of_the_paper() -> None:
    """Scale, mask and softmax over 4 x 24 x 2048 x 2048 fp16 scores: 2.651 ms on A100 40 GB (arXiv 2401.14489)."""
    device = load_device("a100-sxm-40gb")
    record = load_record("pointwise", device)
    scores_bytes = 4 * 24 * 2048 * 2048 * 2.0
    chain_s = sum(
        price_pointwise(
            Pointwise(name=kind, operation=kind, read_bytes=scores_bytes, written_bytes=scores_bytes), device, record
        ).time_s
        for kind in ("mask", "softmax")
    )

    assert chain_s == pytest.approx(2.651e-3, rel=0.02)


@pytest.mark.parametrize("kind", ["layer_norm", "norm", "softmax", "residual"])
def test_searches_and_predictions_price_fp32_alike(kind: str) -> None:
    """An fp32 operation has the same price alone, as a search prices it, and among those of a step."""
    device = load_device("v100-sxm2-32gb")
    record = load_record("pointwise", device)
    wide = Pointwise(name="x", operation=kind, read_bytes=1e9, written_bytes=1e9, dtype="fp32")
    narrow = replace(wide, dtype="fp16")
    alone = [price_pointwise(each, device, record).time_s for each in (narrow, wide)]

    assert [price.time_s for price in price_pointwises([narrow, wide], device, record)] == pytest.approx(alone)


def test_sums_in_fp32_have_rates_of_their_own() -> None:
    """An addition reaches 80 % of an A100's bandwidth in fp32, where it was measured; the optimizer was in neither."""
    a100 = load_device("a100-sxm-80gb")
    times = {}
    for kind in ("add", "optimizer"):
        for dtype in ("fp32", "bf16"):
            operation = Pointwise(name="x", operation=kind, dtype=dtype, read_bytes=1e8, written_bytes=1e8)
            (price,) = price_operations([operation], a100)
            times[kind, dtype] = float(price.time_s)

    assert 2e8 / a100.memory_bandwidth_bytes_per_s / times["add", "fp32"] > 0.8
    assert times["add", "bf16"] > 2 * times["add", "fp32"]
    assert times["optimizer", "bf16"] == times["optimizer", "fp32"]


@pytest.mark.parametrize("name", ["a100-pcie-40gb", "mi100", "p100-pcie-16gb", "t4", "v100-pcie-16gb"])
def test_a_measured_fp32_kernel_lies_in_the_interval_of_a_borrowed_record(name: str) -> None:
    """Priced as unmeasured, a device has the interval of devices left out, in which its measured addition lies."""
    device = load_device(name)
    addition = Pointwise(name="x", operation="add", read_bytes=2e9, written_bytes=1e9, dtype="fp32")
    measured, borrowed = (
        price_pointwise(addition, device, load_record(FP32_POINTWISE, own))
        for own in (device, device.with_pricing(uncalibrated=True))
    )

    assert borrowed.low_s <= measured.time_s <= borrowed.high_s
    assert borrowed.shared_error > 0.0
