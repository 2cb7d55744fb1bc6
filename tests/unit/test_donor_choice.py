"""Donor selection: groups by data-sheet facts, the nearest device in a group, independent of file order."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shapewright
from shapewright.app.report.outputs.catalogue import borrowed_records
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.donors import DeviceSpec, choose_donor
from shapewright.pricing.calibration.records import list_records, load_record

KINDS = ("gemm", "moe", "attention", "collectives")


def test_balance_is_flops_per_byte_in_16_bits() -> None:
    """A100 of 80 GB does 312 TFLOP/s on 2.04 TB/s, 153 a byte; H100 989 on 3.35, 295; H200 the same on 4.8, 206."""
    a100, h100, h200 = (
        DeviceSpec.of(load_device(name)) for name in ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb")
    )

    assert a100.balance_distance(h100) == pytest.approx(0.657, abs=0.01)  # ln(295 / 153)
    assert a100.balance_distance(h200) == pytest.approx(0.298, abs=0.01)  # ln(206 / 153)
    assert h100.balance_distance(h200) == pytest.approx(0.360, abs=0.01)
    assert h100.balance_distance(h200) == pytest.approx(h200.balance_distance(h100))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("device", "donor"), [("a100-sxm-80gb", "h200-sxm-141gb"), ("b200-sxm-180gb", "h100-sxm-80gb")]
)
def test_nearest_balance_decides_among_other_architectures(device: str, donor: str, kind: str) -> None:
    """A100's 153 FLOPs a byte are nearer H200's 206 than H100's 295, B200's 281 nearer H100's; for every kind."""
    record = load_record(kind, load_device(device).with_pricing(uncalibrated=True))

    assert (record.device, record.transfer) == (donor, "generic")
    assert record.donor_reason == "the nearest measured architecture, its nearest in FLOPs per byte"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a100-sxm-80gb", "b200-sxm-180gb", "gh200-141gb", "a40", "t4", "mi300x", "tpu-v5p"])
def test_file_order_does_not_matter(name: str, kind: str) -> None:
    """Reading the records in reverse order gives the same donor."""
    device = load_device(name)
    measured = [
        DeviceSpec.of(load_device(record.device)) for record in list_records(kind) if name not in record.devices
    ]
    found = choose_donor(kind, DeviceSpec.of(device), measured)

    assert found == choose_donor(kind, DeviceSpec.of(device), measured[::-1])
    assert found.device == load_record(kind, device.with_pricing(uncalibrated=True)).device


def test_devices_as_near_as_each_other_go_by_name() -> None:
    """Among two candidates that differ by name only, the first name is chosen."""
    spec = DeviceSpec.of(load_device("b200-sxm-180gb"))
    twins = [DeviceSpec.of(load_device("h100-sxm-80gb"))._replace(name=name) for name in ("twin-b", "twin-a")]

    assert choose_donor("gemm", spec, twins).device == "twin-a"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("gh200-141gb", "gemm", "its nearest in bandwidth and rate"),
        ("rtx-3090", "moe", "with the same SM"),
        ("a40", "collectives", "of its architecture, with another SM"),
        ("mi325x", "gemm", "its nearest in bandwidth and rate"),
        ("t4", "gemm", "the nearest measured architecture"),
        ("t4", "collectives", "the only one with this kind of link"),
        ("l40s", "gemm", ""),
    ],
)
def test_reason_for_the_donor(name: str, kind: str, words: str) -> None:
    """Each donor group has its reason text; an own record has none."""
    assert load_record(kind, load_device(name)).donor_reason == words


def test_an_unlisted_architecture_borrows_from_its_vendors_nearest_device() -> None:
    """A device of an unlisted architecture between B200 and H100 in size borrows from the nearer one."""
    h100 = load_device("h100-sxm-80gb")
    fields = {"architecture": "other", "compute_capability": "11.0", "name": "new"}
    small = replace(h100, **fields)
    record = load_record("gemm", small)

    assert (record.device, record.donor_reason) == ("h100-sxm-80gb", "its vendor's nearest in bandwidth and rate")


def test_the_warning_names_the_donor_and_the_reason() -> None:
    """A step on an A40 names each record that it borrows, with the rule that chose it."""
    prediction = shapewright.predict("gpt2", device="a40")
    (words,) = [words for words in prediction.warnings if words.startswith("uncalibrated on a40")]

    assert "gemm (borrows gemm/l40s/" in words
    assert ": with the same SM)" in words
    assert borrowed_records(load_device("a40"))["gemm"].lent_as == "with the same SM"


def test_the_warning_names_what_later_operations_borrow() -> None:
    """T4 has a record of fp32 norms, which come first in a DiT; its other elementwise operations borrow A100's."""
    prediction = shapewright.predict("dit-xl-2", device="t4", workload={"phase": "train", "dtype": "fp32"})
    (words,) = [words for words in prediction.warnings if words.startswith("uncalibrated on t4")]
    used = {one.price.calibration.record_id for one in prediction.operations if one.operation.kind == "pointwise"}

    assert {record.partition("/")[0] for record in used} == {"pointwise", "pointwise-fp32"}
    assert "pointwise (borrows pointwise/a100-sxm/" in words
    assert all(record in prediction.calibration["pointwise"].label for record in used)
    assert prediction.calibration["pointwise"].label.startswith("pointwise-fp32/t4/")
