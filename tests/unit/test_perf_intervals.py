"""Which residuals make an interval: own sections, other libraries, older software, siblings and strangers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapewright.errors import CalibrationError
from shapewright.hardware import load_device
from shapewright.operations import Gemm
from shapewright.perf import intervals
from shapewright.perf.calibration import TRANSFER_WIDENING, CalibrationRecord, load_record
from shapewright.perf.gemm import price_gemm
from shapewright.perf.gemm_job import make_gemm_job
from shapewright.perf.intervals import (
    OTHER_LIBRARY_WIDENING,
    Interval,
    added,
    at_least,
    choose_interval,
    find_group,
    read_groups,
    widened_for_format,
)
from shapewright.perf.libraries import LibraryMatch

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
    monkeypatch.setattr(intervals, "read_groups", lambda _: GROUPS)


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
        ({**NEAR, "borrower": "anyone"}, 1.05),
        ({**NEAR, "borrower": "there"}, 1.06),
        ({**NEAR, "borrower": "anyone", "farther": "generic"}, 1.07),
        ({**NEAR, "borrower": "anyone", "library": "other"}, both(1.05, 1.03)),
        ({**NEAR, "borrower": "there", "library": "other"}, both(1.06, 1.12)),
        ({**NEAR, "borrower": "anyone", "library": "version"}, 1.05),
        ({**FAR, "borrower": "anyone", "library": "other"}, both(1.07, 1.03)),
        ({**FAR, "borrower": "anyone"}, 1.07),
        ({**FAR, "borrower": "anyone", "formats": ("fp4", "fp8")}, 1.08),
        ({**FAR, "borrower": "there", "formats": ("fp4", "fp8")}, 1.09),
        ({**FAR, "borrower": "anyone", "farther": "foreign"}, 1.10),
        ({**FAR, "borrower": "anyone", "older_software": True}, both(1.07, 1.04)),
    ],
)
def test_case_finds_its_group(fields: dict[str, Any], high: float) -> None:
    """Device, library, age and distance choose; a measured device left out gets what the others alone say."""
    assert list(chosen(**fields).quantiles["high"]) == pytest.approx([high])


@pytest.mark.usefixtures("groups")
def test_a_class_that_nobody_left_out_is_wider_than_the_nearer_one() -> None:
    """Two generations away there is no group: that of one generation counts, 3.5 / 2.5 as wide."""
    found = chosen(**FAR, borrower="anyone", farther="distant")

    assert list(found.quantiles["high"]) == [1.07]
    assert found.widening == pytest.approx(3.5 / 2.5)


@pytest.mark.parametrize(
    ("device", "kind", "distance", "words"),
    [
        ("gb200", "gemm", "architecture", "a sibling"),
        ("l4", "moe", "generic", "a sibling of another size"),
        ("rtx-pro-6000", "attention", "generic", "another family"),
        ("v100-sxm2-16gb", "attention", "distant", "a family two generations away"),
        ("v100-sxm2-16gb", "pointwise", "generic", "another family"),
        ("arc-pro-b60", "gemm", "foreign", "another maker's, or joined by other links"),
        ("h100-sxm-80gb", "gemm", "exact", "itself"),
    ],
)
def test_distances_in_words(device: str, kind: str, distance: str, words: str) -> None:
    """How far a lender is decides the interval and is said in words."""
    found = load_record(kind, load_device(device))

    assert (found.distance, found.distance_words) == (distance, words)


def test_other_links_are_foreign() -> None:
    """L40S without its record borrows collectives of devices that have links of their own: nobody tells of PCIe."""
    lent = load_record("collectives", load_device("l40s"), uncalibrated=True)

    assert lent.distance == "foreign"
    assert load_record("attention", load_device("l40s"), uncalibrated=True).distance == "generic"


def test_a_device_is_left_out_by_the_name_it_was_measured_under() -> None:
    """A100 of 40 GB has the record of A100 of 80 GB; without it, it takes the groups made without that one."""
    assert load_record("gemm", load_device("a100-sxm-40gb"), uncalibrated=True).borrower == "a100-sxm-80gb"
    assert load_record("gemm", load_device("gb200")).borrower == "gb200"


def test_a_format_widens_no_more_than_independent_errors_add() -> None:
    """1.25 becomes 1.25^1.6; 4 becomes e^sqrt(ln(4)^2 + ln(1.5)^2) and not 4^1.6 = 9.2; 2.5 adds more in 4 bits."""
    near, far = (Interval({"edges_s": [], "low": [1 / high], "high": [high]}, 1.0) for high in (1.25, 4.0))
    times_s = np.array([1e-3])

    assert widened_for_format(near).factors(times_s)[1] == pytest.approx(1.25**1.6)
    by_hand = np.exp(np.hypot(np.log(4.0), np.log(1.5)))
    assert np.array(widened_for_format(far).factors(times_s)).ravel() == pytest.approx([1 / by_hand, by_hand])
    assert widened_for_format(far, 2.5).factors(times_s)[1] > widened_for_format(far).factors(times_s)[1]


def test_errors_that_operations_share_add_as_variances_do() -> None:
    """Of ends of 0.4, a quarter of the variance a device's bias, and of 0.3: 0.25 x 0.16 of 0.25; alone a quarter."""
    device = Interval({"edges_s": [1e-4], "low": [0.5, 0.5], "high": [np.exp(0.4)] * 2, "shared": [0.25, 1.0]}, 1.0)
    software = Interval({"edges_s": [], "low": [0.5], "high": [np.exp(0.3)]}, 1.0)
    times_s = np.array([1e-5, 1e-3])

    assert list(device.shared_error(times_s)) == [0.25, 1.0]
    assert list(software.shared_error(times_s)) == [0.0, 0.0]
    assert list(added(device, software).shared_error(times_s)) == pytest.approx([0.16, 0.64])
    assert list(widened_for_format(device).shared_error(times_s)) == pytest.approx([0.25, 1.0])


def test_the_farther_end_of_two_counts() -> None:
    """Short times by the lender, who scatters 2.0 and 0.6, long ones by the class; its bias is a part of what is wider.

    Of the class's upper end of 1.2, squared as a logarithm, the half that is bias is 0.0166, of 2.0's 0.48 0.035.
    """
    siblings = Interval({"edges_s": [], "low": [0.8], "high": [1.2], "shared": [0.5]}, 1.0, "bf16")
    lender = Interval({"edges_s": [1e-4], "low": [0.6, 0.9], "high": [2.0, 1.1]}, 1.0)
    times_s = np.array([1e-5, 1e-3])
    found = at_least(siblings, lender)
    low, high = found.factors(times_s)

    assert list(low) == pytest.approx([0.6, 0.8])
    assert list(high) == pytest.approx([2.0, 1.2])
    assert list(found.shared_error(times_s)) == pytest.approx([0.5 * (np.log(1.2) / np.log(2.0)) ** 2, 0.5])
    assert found.format == "bf16"
    assert at_least(siblings, lender._replace(quantiles={"edges_s": [], "low": [0.9], "high": [1.1]})) is siblings


@pytest.mark.parametrize(
    ("lender", "borrower"), [("b200-sxm-180gb", "gb200"), ("l40s", "rtx-6000-ada"), ("h100-sxm-80gb", "h800-sxm-80gb")]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_nobody_is_surer_of_a_copy(lender: str, borrower: str, dtype: str) -> None:
    """A product priced by another device's record is no surer than on that device, at one predicted time."""
    times_s = np.geomspace(3e-6, 1e-2, 8)
    measured, copied = (
        make_gemm_job(dtype, None, device, load_record("gemm", device)).section
        for device in (load_device(lender), load_device(borrower))
    )
    assert measured is not None
    assert copied is not None
    ends = [np.abs(np.log(section.residual_interval.factors(times_s))) for section in (copied, measured)]

    assert (ends[0] >= ends[1] * (1.0 - 1e-6)).all()


def test_another_makers_chip_errs_alike_in_all_products() -> None:
    """An own record knows its device; a sibling's scatters; another maker's is wrong about the whole chip first."""
    shares = [
        price_gemm(Gemm(name="x", m=4096, n=4096, k=4096), device, load_record("gemm", device)).shared_error
        for device in map(load_device, ("h100-sxm-80gb", "gh200-141gb", "gaudi2"))
    ]

    assert shares[0] == 0.0
    assert 0.0 < shares[1] < 0.6 < shares[2] < 1.0


def test_without_groups_judgement_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was measured the record's own interval is widened by a stated factor."""
    monkeypatch.setattr(intervals, "read_groups", lambda _: {})

    assert chosen() == Interval(OWN, 1.0)
    assert chosen(library="other").widening == OTHER_LIBRARY_WIDENING
    assert chosen(**FAR, borrower="anyone").widening == TRANSFER_WIDENING["generic"]


def test_kinds_without_a_file_have_no_groups() -> None:
    """A kind that no file is of has no groups, which is no error."""
    assert read_groups("unheard of") == {}
    assert find_group("unheard of", ("generic",)) is None


def test_malformed_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A broken file names its kind."""
    (tmp_path / "data/intervals").mkdir(parents=True)
    (tmp_path / "data/intervals/broken.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(intervals.resources, "files", lambda _: tmp_path)

    with pytest.raises(CalibrationError, match="intervals of broken are malformed"):
        read_groups("broken")


@pytest.mark.parametrize("kind", ["gemm", "attention", "moe", "collectives", "pointwise"])
def test_groups_hold_their_prediction(kind: str) -> None:
    """Every shipped interval lies around 1, with one pair of ends more than edges, which rise."""
    found = {name: entry for name, entry in read_groups(kind).items() if entry is not None}

    assert found
    for name, entry in found.items():
        assert len(entry["low"]) == len(entry["high"]) == len(entry["edges_s"]) + 1, name
        assert list(entry["edges_s"]) == sorted(entry["edges_s"]), name
        assert all(0.0 < low <= 1.0 <= high < 100.0 for low, high in zip(entry["low"], entry["high"], strict=True)), (
            name
        )


def width(price_record: CalibrationRecord, device: Any = H100, **fields: Any) -> float:
    """Logarithmic width of the interval of a large product."""
    sizes = {"m": 8192, "n": 8192, "k": 8192, **fields}
    library = sizes.pop("library", "")
    price = price_gemm(Gemm(name="x", **sizes), device, price_record, library=library)
    return float(np.log(price.high_s / price.low_s))


def test_width_grows_with_distance() -> None:
    """Own library, no library, another version, another library, a sibling, another family: less and less certain."""
    own = load_record("gemm", H100)
    far = load_device("a100-sxm-80gb")
    widths = [
        width(own, library="vllm 0.24.0"),
        width(own),
        width(own, library="vllm 0.19.0"),
        width(own, library="someone 1.0"),
        width(load_record("gemm", H100, uncalibrated=True)),
        width(load_record("gemm", far, uncalibrated=True), far),
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
