"""Interval choice: own sections, other libraries, older software, siblings and other architectures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration import intervals
from shapewright.pricing.calibration.intervals import (
    OTHER_LIBRARY_WIDENING,
    Interval,
    choose_interval,
    combine_errors,
    find_residual_group,
    read_residual_groups,
    widen_for_format,
    widest,
)
from shapewright.pricing.calibration.libraries import LibraryMatch
from shapewright.pricing.calibration.records import TRANSFER_WIDENING, CalibrationRecord, load_record
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.gemm.section import prepare_gemm_pricing

OWN = {"edges_s": [], "low": [0.9], "high": [1.1]}
H100 = load_device("h100-sxm-80gb")


def group(high: float) -> dict[str, list[float]]:
    """A group with one regime."""
    return {"edges_s": [], "low": [0.5], "high": [high]}


def both(*ends: float) -> float:
    """End of a price that is wrong about two independent things."""
    return float(np.exp(np.hypot(*np.log(ends))))


GROUPS: dict[str, Any] = {
    "own/made-up/bf16": group(1.01),
    "own/made-up/bf16 of old 1.0": group(1.11),
    "other library/here/bf16": group(1.02),
    "other library/bf16": group(1.03),
    "other library/bf16/without there": group(1.12),
    "older software": group(1.04),
    "architecture/bf16": group(1.05),
    "architecture/bf16/without there": group(1.06),
    "generic": group(1.07),
    "generic/fp4": group(1.08),
    "generic/fp4/without there": None,
    "generic/fp8/without there": group(1.09),
    "foreign": group(1.10),
}
NEAR = {"transfer": "architecture"}
FAR = {"transfer": "generic"}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups made up for these tests."""
    monkeypatch.setattr(intervals, "read_residual_groups", lambda _: GROUPS)


def record(**fields: Any) -> CalibrationRecord:
    """A record of a device named here."""
    base = {
        "id": "made-up", "kind": "gemm", "device": "here", "devices": ("here",), "architecture": "hopper",
        "parameters": {}, "interval": {}, "provenance": {},
    }  # fmt: skip
    return CalibrationRecord(**{**base, **fields})


def chosen(
    formats: tuple[str, ...] = ("bf16",), *, library: LibraryMatch = "own", section: str = "bf16", **fields: Any
) -> Interval:
    """Interval of a section of a record, if no other that of bf16."""
    return choose_interval(record(**fields), OWN, section, formats, library=library)


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("fields", "high"),
    [
        ({}, 1.01),
        ({"id": "refitted"}, 1.1),
        ({"library": "other"}, 1.02),
        ({"library": "other", "device": "elsewhere"}, 1.03),
        ({"library": "version"}, (1.01 * 1.02) ** 0.5),
        ({"older_software": True}, 1.04),
        ({"older_software": True, "section": "bf16 of old 1.0"}, 1.11),
        ({"older_software": True, "section": "bf16 of another 1.0"}, 1.04),
        ({**NEAR, "recipient": "anyone"}, 1.05),
        ({**NEAR, "recipient": "there"}, 1.06),
        ({**NEAR, "recipient": "anyone", "distance_override": "generic"}, 1.07),
        ({**NEAR, "recipient": "anyone", "library": "other"}, both(1.05, 1.03)),
        ({**NEAR, "recipient": "there", "library": "other"}, both(1.06, 1.12)),
        ({**NEAR, "recipient": "anyone", "library": "version"}, 1.05),
        ({**FAR, "recipient": "anyone", "library": "other"}, both(1.07, 1.03)),
        ({**FAR, "recipient": "anyone"}, 1.07),
        ({**FAR, "recipient": "anyone", "formats": ("fp4", "fp8")}, 1.08),
        ({**FAR, "recipient": "there", "formats": ("fp4", "fp8")}, 1.09),
        ({**FAR, "recipient": "anyone", "distance_override": "foreign"}, 1.10),
        ({**FAR, "recipient": "anyone", "older_software": True}, both(1.07, 1.04)),
    ],
)
def test_case_finds_its_group(fields: dict[str, Any], high: float) -> None:
    """Device, library, age and distance select the group; an uncalibrated device gets the one without itself."""
    assert list(chosen(**fields).quantiles["high"]) == pytest.approx([high])


@pytest.mark.usefixtures("groups")
def test_a_class_without_held_out_devices_is_wider_than_the_nearer_one() -> None:
    """Without a group for two generations apart, that of one generation is used, widened by 3.5 / 2.5."""
    found = chosen(**FAR, recipient="anyone", distance_override="distant")

    assert list(found.quantiles["high"]) == [1.07]
    assert found.widening == pytest.approx(3.5 / 2.5)


@pytest.mark.parametrize(
    ("device", "kind", "distance", "words"),
    [
        ("gb200", "gemm", "architecture", "a sibling"),
        ("l4", "moe", "generic", "a sibling of another size"),
        ("rtx-pro-6000", "attention", "generic", "another architecture"),
        ("v100-sxm2-16gb", "attention", "distant", "an architecture two generations away"),
        ("v100-sxm2-16gb", "pointwise", "generic", "another architecture"),
        ("arc-pro-b60", "gemm", "foreign", "another vendor's, or with another kind of link"),
        ("h100-sxm-80gb", "gemm", "exact", "itself"),
    ],
)
def test_distances_in_words(device: str, kind: str, distance: str, words: str) -> None:
    """The transfer distance decides the interval and has a text."""
    found = load_record(kind, load_device(device))

    assert (found.distance, found.distance_words) == (distance, words)


def test_other_links_are_foreign() -> None:
    """An uncalibrated L40S borrows collectives from devices with links of their own, a foreign transfer."""
    borrowed = load_record("collectives", load_device("l40s").with_pricing(uncalibrated=True))

    assert borrowed.distance == "foreign"
    assert load_record("attention", load_device("l40s").with_pricing(uncalibrated=True)).distance == "generic"


def test_a_device_is_held_out_by_the_name_of_its_record() -> None:
    """A100 40 GB shares the record of A100 80 GB; uncalibrated, it uses the groups made without that device."""
    assert (
        load_record("gemm", load_device("a100-sxm-40gb").with_pricing(uncalibrated=True)).recipient == "a100-sxm-80gb"
    )
    assert load_record("gemm", load_device("gb200")).recipient == "gb200"


def test_a_format_widens_no_more_than_independent_errors_add() -> None:
    """1.25 becomes 1.25^1.6; 4 becomes e^sqrt(ln(4)^2 + ln(1.5)^2) and not 4^1.6 = 9.2; 2.5 adds more in 4 bits."""
    near, far = (Interval({"edges_s": [], "low": [1 / high], "high": [high]}, 1.0) for high in (1.25, 4.0))
    times_s = np.array([1e-3])

    assert widen_for_format(near).factors(times_s)[1] == pytest.approx(1.25**1.6)
    by_hand = np.exp(np.hypot(np.log(4.0), np.log(1.5)))
    assert np.array(widen_for_format(far).factors(times_s)).ravel() == pytest.approx([1 / by_hand, by_hand])
    assert widen_for_format(far, 2.5).factors(times_s)[1] > widen_for_format(far).factors(times_s)[1]


def test_errors_that_operations_share_add_as_variances_do() -> None:
    """Of ends of 0.4, a quarter of the variance a device's bias, and of 0.3: 0.25 x 0.16 of 0.25; alone a quarter."""
    device = Interval({"edges_s": [1e-4], "low": [0.5, 0.5], "high": [np.exp(0.4)] * 2, "shared": [0.25, 1.0]}, 1.0)
    software = Interval({"edges_s": [], "low": [0.5], "high": [np.exp(0.3)]}, 1.0)
    times_s = np.array([1e-5, 1e-3])

    assert list(device.shared_error(times_s)) == [0.25, 1.0]
    assert list(software.shared_error(times_s)) == [0.0, 0.0]
    assert list(combine_errors(device, software).shared_error(times_s)) == pytest.approx([0.16, 0.64])
    assert list(widen_for_format(device).shared_error(times_s)) == pytest.approx([0.25, 1.0])


def test_the_wider_end_of_two_intervals_counts() -> None:
    """The donor's interval is wider for short times, the class's for long ones; shared variance is scaled accordingly.

    Of the class's upper end of 1.2, squared as a logarithm, the half that is bias is 0.0166, of 2.0's 0.48 0.035.
    """
    siblings = Interval({"edges_s": [], "low": [0.8], "high": [1.2], "shared": [0.5]}, 1.0, "bf16")
    donor = Interval({"edges_s": [1e-4], "low": [0.6, 0.9], "high": [2.0, 1.1]}, 1.0)
    times_s = np.array([1e-5, 1e-3])
    found = widest(siblings, donor)
    low, high = found.factors(times_s)

    assert list(low) == pytest.approx([0.6, 0.8])
    assert list(high) == pytest.approx([2.0, 1.2])
    assert list(found.shared_error(times_s)) == pytest.approx([0.5 * (np.log(1.2) / np.log(2.0)) ** 2, 0.5])
    assert found.format == "bf16"
    assert widest(siblings, donor._replace(quantiles={"edges_s": [], "low": [0.9], "high": [1.1]})) is siblings


@pytest.mark.parametrize(
    ("donor", "recipient"), [("b200-sxm-180gb", "gb200"), ("l40s", "rtx-6000-ada"), ("h100-sxm-80gb", "h800-sxm-80gb")]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_borrowed_price_is_no_more_certain_than_its_donors(donor: str, recipient: str, dtype: str) -> None:
    """A borrowed price's interval is at least as wide as on the donor, at the same predicted time."""
    times_s = np.geomspace(3e-6, 1e-2, 8)
    measured, copied = (
        prepare_gemm_pricing(dtype, None, device, load_record("gemm", device)).section
        for device in (load_device(donor), load_device(recipient))
    )
    assert measured is not None
    assert copied is not None
    ends = [np.abs(np.log(section.residual_interval.factors(times_s))) for section in (copied, measured)]

    assert (ends[0] >= ends[1] * (1.0 - 1e-6)).all()


def test_error_of_another_vendors_record_is_mostly_shared() -> None:
    """Shared error is 0 for an own record, partial for a sibling's, and most of the variance for another vendor's."""
    shares = [
        price_gemm(Gemm(name="x", m=4096, n=4096, k=4096), device, load_record("gemm", device)).shared_error
        for device in map(load_device, ("h100-sxm-80gb", "gh200-141gb", "gaudi2"))
    ]

    assert shares[0] == 0.0
    assert 0.0 < shares[1] < 0.6 < shares[2] < 1.0


def test_without_groups_judgement_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was measured the record's own interval is widened by a stated factor."""
    monkeypatch.setattr(intervals, "read_residual_groups", lambda _: {})

    assert chosen() == Interval(OWN, 1.0)
    assert chosen(library="other").widening == OTHER_LIBRARY_WIDENING
    assert chosen(**FAR, recipient="anyone").widening == TRANSFER_WIDENING["generic"]


def test_kinds_without_a_file_have_no_groups() -> None:
    """A kind that no file is of has no groups, which is no error."""
    assert read_residual_groups("unheard of") == {}
    assert find_residual_group("unheard of", ("generic",)) is None


@pytest.mark.parametrize("kind", ["gemm", "attention", "moe", "collectives", "pointwise"])
def test_groups_hold_their_prediction(kind: str) -> None:
    """Every shipped interval lies around 1, with one pair of ends more than edges, which rise."""
    found = {name: entry for name, entry in read_residual_groups(kind).items() if entry is not None}

    assert found
    for name, entry in found.items():
        assert len(entry["low"]) == len(entry["high"]) == len(entry["edges_s"]) + 1, name
        assert list(entry["edges_s"]) == sorted(entry["edges_s"]), name
        assert all(0.0 < low <= 1.0 <= high < 100.0 for low, high in zip(entry["low"], entry["high"], strict=True)), (
            name
        )


def width(price_record: CalibrationRecord, device: Any = H100, **fields: Any) -> float:
    """Logarithmic width of the interval of a large GEMM."""
    sizes = {"m": 8192, "n": 8192, "k": 8192, **fields}
    library = sizes.pop("library", "")
    price = price_gemm(Gemm(name="x", **sizes), device, price_record, library=library)
    return float(np.log(price.high_s / price.low_s))


def test_width_grows_with_distance() -> None:
    """Own library, unspecified library, another version, another library, sibling, other architecture: ever wider."""
    own = load_record("gemm", H100)
    far = load_device("a100-sxm-80gb")
    widths = [
        width(own, library="vllm 0.24.0"),
        width(own),
        width(own, library="vllm 0.19.0"),
        width(own, library="someone 1.0"),
        width(load_record("gemm", H100.with_pricing(uncalibrated=True))),
        width(load_record("gemm", far.with_pricing(uncalibrated=True)), far),
    ]

    own_library, none, version, other, sibling, family = widths
    assert own_library < none < other < family
    assert own_library < version < other
    assert sibling < family


def test_batches_are_less_certain() -> None:
    """Batches were measured in old logs alone."""
    own = load_record("gemm", H100)

    assert width(own, m=2048, n=2048, k=128, batch=64) > width(own)


def test_sibling_of_another_size_is_far() -> None:
    """An H100 NVL is an H100; an L4 has not half the multiprocessors of the L40S whose record it borrows."""
    near, far = (load_record("gemm", load_device(name)) for name in ("h100-nvl-94gb", "l4"))

    assert (near.transfer, near.distance) == ("architecture", "architecture")
    assert (far.transfer, far.distance) == ("architecture", "generic")
    assert near.interval_widening < far.interval_widening
