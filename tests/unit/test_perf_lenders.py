"""Who lends to a device that nobody measured: groups by what sheets say, in them the nearest, whatever the order."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shapewright
from shapewright.hardware import load_device
from shapewright.perf.calibration import list_records, load_record
from shapewright.perf.lenders import Sheet, choose_lender
from shapewright.report.devices import borrowed_records

KINDS = ("gemm", "moe", "attention", "collectives")


def test_balance_is_flops_per_byte_in_16_bits() -> None:
    """A100 of 80 GB does 312 TFLOP/s on 2.04 TB/s, 153 a byte; H100 989 on 3.35, 295; H200 the same on 4.8, 206."""
    a100, h100, h200 = (Sheet.of(load_device(name)) for name in ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb"))

    assert a100.balance_distance(h100) == pytest.approx(0.657, abs=0.01)  # ln(295 / 153)
    assert a100.balance_distance(h200) == pytest.approx(0.298, abs=0.01)  # ln(206 / 153)
    assert h100.balance_distance(h200) == pytest.approx(0.360, abs=0.01)
    assert h100.balance_distance(h200) == pytest.approx(h200.balance_distance(h100))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("device", "lender"), [("a100-sxm-80gb", "h200-sxm-141gb"), ("b200-sxm-180gb", "h100-sxm-80gb")]
)
def test_of_another_family_the_nearest_balance_lends(device: str, lender: str, kind: str) -> None:
    """A100's 153 FLOPs a byte are nearer H200's 206 than H100's 295, B200's 281 nearer H100's; for every kind alike."""
    record = load_record(kind, load_device(device), uncalibrated=True)

    assert (record.device, record.transfer) == (lender, "generic")
    assert record.lent_as == "the nearest family measured, of it the nearest in FLOPs per byte"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a100-sxm-80gb", "b200-sxm-180gb", "gh200-141gb", "a40", "t4", "mi300x", "tpu-v5p"])
def test_the_order_of_the_files_decides_nothing(name: str, kind: str) -> None:
    """Read from the last file to the first, the same record is lent."""
    device = load_device(name)
    measured = [Sheet.of(load_device(record.device)) for record in list_records(kind) if name not in record.devices]
    found = choose_lender(kind, Sheet.of(device), measured)

    assert found == choose_lender(kind, Sheet.of(device), measured[::-1])
    assert found.device == load_record(kind, device, uncalibrated=True).device


def test_devices_as_near_as_each_other_go_by_name() -> None:
    """Two sheets that differ by their names alone: the first name lends."""
    sheet = Sheet.of(load_device("b200-sxm-180gb"))
    twins = [Sheet.of(load_device("h100-sxm-80gb"))._replace(name=name) for name in ("twin-b", "twin-a")]

    assert choose_lender("gemm", sheet, twins).device == "twin-a"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("gh200-141gb", "gemm", "its nearest in bandwidth and rate"),
        ("rtx-3090", "moe", "of the same multiprocessors"),
        ("a40", "collectives", "of its architecture, with other multiprocessors"),
        ("mi300x", "gemm", "the nearest family measured"),
        ("t4", "collectives", "the only one joined alike"),
        ("l40s", "gemm", ""),
    ],
)
def test_why_a_record_is_lent(name: str, kind: str, words: str) -> None:
    """Each group of lenders has its words; an own record has none."""
    assert load_record(kind, load_device(name)).lent_as == words


def test_a_makers_new_generation_borrows_from_its_nearest_in_size() -> None:
    """Between B200 and H100 in bandwidth and rate, a chip of an unknown generation takes the nearer one."""
    h100 = load_device("h100-sxm-80gb")
    fields = {"architecture": "other", "compute_capability": "11.0", "name": "new"}
    small = replace(h100, **fields)
    record = load_record("gemm", small)

    assert (record.device, record.lent_as) == ("h100-sxm-80gb", "its maker's nearest in bandwidth and rate")


def test_the_warning_says_whose_record_and_why() -> None:
    """A step on an A40 names each record that it borrows, with the rule that chose it."""
    prediction = shapewright.predict("gpt2", device="a40")
    (words,) = [words for words in prediction.warnings if words.startswith("uncalibrated on a40")]

    assert "gemm (borrows gemm/l40s/" in words
    assert ": of the same multiprocessors)" in words
    assert borrowed_records(load_device("a40"))["gemm"]["lent_as"] == "of the same multiprocessors"
