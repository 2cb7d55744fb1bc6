"""The device files of the package: complete provenance, consistent numbers, unique names."""

from __future__ import annotations

import csv
import math
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

import shapewright
from shapewright.core.errors import ShapewrightError, UnknownRateError
from shapewright.hardware.architectures import ARCHITECTURE_NAMES
from shapewright.hardware.device import Device
from shapewright.hardware.loader import (
    find_aliases,
    list_devices,
    load_device,
    normalize_name,
    note_on_board,
    read_device_text,
)

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"

# What other people call a device, and the file it must find: the spellings of measured tables, of published
# throughput and of drivers. Written out, so that a renamed file cannot take its test along.
EXPECTED_NAMES = {
    # measured tables
    "a100_sxm": "a100-sxm-80gb",
    "a100_pcie": "a100-pcie-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h100_pcie": "h100-pcie-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200-sxm-180gb",
    "b300_sxm": "b300-sxm-288gb",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "l40": "l40",
    "l4": "l4",
    "rtx_pro_6000_server": "rtx-pro-6000",
    "b60": "arc-pro-b60",
    "a40": "a40",
    "a30": "a30",
    "mi250x": "mi250x-gcd",
    "mi300x": "mi300x",
    "mi308x": "mi308x",
    "mi355x": "mi355x",
    "mi100": "mi100",
    "p4": "p4",
    "p100_pcie": "p100-pcie-16gb",
    # published throughput
    "A100-SXM-80GB": "a100-sxm-80gb",
    "A100-SXM-40GB": "a100-sxm-40gb",
    "A100-SXM-40GB (DGX A100)": "a100-sxm-40gb",
    "H100-SXM-80GB": "h100-sxm-80gb",
    "H100-SXM-96GB-HBM2e (500W, 2.4TB/s)": "h100-sxm-96gb",
    "H200-SXM-141GB": "h200-sxm-141gb",
    "B200-SXM": "b200-sxm-180gb",
    "B300-SXM": "b300-sxm-288gb",
    "V100-SXM2-16GB": "v100-sxm2-16gb",
    "V100-SXM-32GB (DGX-2)": "v100-sxm2-32gb",
    "TPU-v4": "tpu-v4",
    # drivers
    "Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla T4": "t4",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA H200": "h200-sxm-141gb",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA B200": "b200-sxm-180gb",
    "NVIDIA GB200": "gb200",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10G": "a10g",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "AMD Instinct MI250X/MI250": "mi250x-gcd",
    "AMD Instinct MI300X": "mi300x",
    # other spellings of a canonical name
    "H100_SXM_80GB": "h100-sxm-80gb",
    " h100 sxm  80gb ": "h100-sxm-80gb",
    "MI250X (card)": "mi250x-card",
}

# Bare names that several SKUs share; guessing one would be a silent default.
AMBIGUOUS_NAMES = {
    "a100": {"a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-40gb", "a100-pcie-80gb"},
    "v100": {"v100-sxm2-16gb", "v100-sxm2-32gb", "v100-pcie-16gb", "v100-pcie-32gb"},
    "H100": {"h100-sxm-80gb", "h100-sxm-96gb", "h100-pcie-80gb", "h100-nvl-94gb"},
    "h200": {"h200-sxm-141gb", "h200-nvl-141gb"},
    "gh200": {"gh200-96gb", "gh200-141gb"},
}

# Rates of data sheets, typed from the sheets' tables independently of the files.  [TFLOP/s or TOP/s]
SHEET_RATES = [
    ("v100-sxm2-16gb", "fp16", 125),
    ("a100-sxm-40gb", "bf16", 312),
    ("a100-sxm-80gb", "tf32", 156),
    ("h100-sxm-80gb", "bf16", 989.4),
    ("h100-sxm-80gb", "fp8", 1979),
    ("h200-sxm-141gb", "fp16", 989.4),
    ("b200-sxm-180gb", "bf16", 2250),
    ("l40s", "fp16", 362),
    ("rtx-4090", "fp16", 165.2),
    ("mi250x-card", "fp16", 383),
    ("mi250x-gcd", "fp16", 191.5),
    ("mi300x", "bf16", 1307.4),
]


@pytest.fixture(params=list_devices())
def device(request: pytest.FixtureRequest) -> Device:
    """Every device of the package."""
    return load_device(request.param)


def test_every_number_has_provenance_and_every_entry_a_number(device: Device) -> None:
    """Numbers and provenance match one to one."""
    written = set(device.numbers)
    if "node_size" not in tomllib.loads(read_device_text(device.name)):
        written.discard("node_size")
    assert set(device.provenance) == written


def test_every_source_is_used_and_resolves(device: Device) -> None:
    """Every source id that is used is defined, and every defined one is used."""
    assert {entry["source"] for entry in device.provenance.values()} == set(device.sources)
    assert all(source.get("url", "https://").startswith("https://") for source in device.sources.values())


def test_recalled_numbers_have_no_date(device: Device) -> None:
    """Entries of kind recalled, and only those, have 'not re-read' in place of a date."""
    for number, entry in device.provenance.items():
        assert (entry["kind"] == "recalled") == (entry["read"] == "not re-read"), number


def test_units_times_fma_times_clock_is_the_rate(device: Device) -> None:
    """SMs x FMA x 2 x clock is within 1 % of the 16-bit rate, or the file gives a reason; unneeded reasons fail.

    108 x 1024 x 2 x 1.41 GHz = 311.9 TFLOP/s for the A100.
    """
    if device.num_sms is None or device.boost_clock_hz is None or device.tensor_fma_per_sm_per_clock is None:
        pytest.skip("the file lacks units, FMA or clock")
    if "derived" in (device.provenance[number]["kind"] for number in ("boost_clock_hz", "tensor_fma_per_sm_per_clock")):
        pytest.skip("the clock or the FMA count is derived from the rate")
    computed = device.num_sms * device.tensor_fma_per_sm_per_clock * 2 * device.boost_clock_hz
    sheet = max(device.dense_flops_per_s.get(dtype, 0.0) for dtype in ("fp16", "bf16"))
    assert (abs(computed / sheet - 1) > 0.01) == bool(device.peak_mismatch), computed / sheet


# Largest step of the rate from one format to a narrower one: the ordinary cores to tensor cores, then twice per
# halving of the width. Sheets round, so that 733 stands beside 362 (L40S); block formats share exponents (BFP8, 3.7 x);
# GeForce halves its fp8 but not its fp4.
LARGEST_STEPS = (("fp32", "tf32", 16.0), ("tf32", "bf16", 4.0), ("bf16", "fp8", 2.05), ("fp8", "fp4", 4.0))


def test_rates_by_element_width(device: Device) -> None:
    """A narrower format is not slower, and not faster by the additional factor of two of a sparse rate."""
    rates = device.dense_flops_per_s
    for wide, narrow, largest in LARGEST_STEPS:
        if wide in rates and narrow in rates and (narrow != "fp8" or device.vendor != "Tenstorrent"):
            assert 1.0 <= rates[narrow] / rates[wide] <= largest, (wide, narrow)


def test_numbers_are_of_a_plausible_size(device: Device) -> None:
    """Numbers are in the range of known devices, which catches mistaken units."""
    assert 1e8 < device.memory_bytes < 1e12
    assert 1e11 < device.memory_bandwidth_bytes_per_s < 1e17
    assert all(1e12 < rate < 2e16 for rate in device.dense_flops_per_s.values())
    assert device.boost_clock_hz is None or 5e8 < device.boost_clock_hz < 4e9
    assert device.intra_node_bandwidth_bytes_per_s is None or 1e10 < device.intra_node_bandwidth_bytes_per_s < 2e12
    assert all(math.isfinite(value) for value in device.numbers.values())


def test_file_name_and_family(device: Device) -> None:
    """The file has the name of the device, its architecture is known, and a tile model has SMs or is waived."""
    assert device.architecture in ARCHITECTURE_NAMES
    assert device.architecture != "other"
    assert load_device(device.name).name == device.name
    assert device.roofline_only == (device.num_sms is None and device.vendor != "Google")


def test_text_of_a_file_is_ascii(device: Device) -> None:
    """Device files are ASCII."""
    assert read_device_text(device.name).isascii()


def test_sparse_rates_are_twice_the_dense_rates(device: Device) -> None:
    """A 2:4 sparse rate is twice the dense one, up to rounding in data sheets.

    Blackwell Ultra's fp4 was made faster without sparsity alone: 1.3 times.
    """
    for dtype, sparse in device.sparse_flops_per_s.items():
        ratio = sparse / device.dense_flops_per_s[dtype]
        if (device.architecture, dtype) == ("blackwell-ultra", "fp4"):
            assert 1.2 < ratio < 1.4
        else:
            assert ratio == pytest.approx(2.0, rel=0.015), dtype


def test_sparse_rates_are_not_used(device: Device) -> None:
    """A prediction does not depend on sparse rates and the number of dies."""
    plain = replace(device, sparse_flops_per_s={}, num_dies=None)
    workload = {"dtype": next(iter(device.dense_flops_per_s), "bf16")}
    steps = []
    for one in (device, plain):
        try:
            steps.append(shapewright.predict("gpt2", device=one, workload=workload).step_time_s)
        except ShapewrightError as error:
            steps.append(str(error))
    assert steps[0] == steps[1]


def test_devices_with_sparse_rates() -> None:
    """NVIDIA from Ampere on and AMD from CDNA 3 on have sparse rates; other devices have none."""
    families = {load_device(name).architecture for name in list_devices() if load_device(name).sparse_flops_per_s}
    expected = {"ampere", "ada", "hopper", "blackwell", "blackwell-ultra", "blackwell-consumer", "cdna3", "cdna4"}
    assert families == expected


def test_names_are_unique() -> None:
    """Canonical names and aliases of all files are distinct after normalization."""
    seen: dict[str, str] = {}
    for name in list_devices():
        aliases = tomllib.loads(read_device_text(name)).get("aliases", [])
        for folded in {name, *map(normalize_name, aliases)}:
            assert seen.setdefault(folded, name) == name, folded


def test_alias_scan_agrees_with_the_parser() -> None:
    """Extracting aliases from the text gives the same as parsing every file."""
    parsed = {normalize_name(alias): name for name in list_devices() for alias in load_device(name).aliases}
    assert find_aliases() == parsed


@pytest.mark.parametrize(("given", "expected"), EXPECTED_NAMES.items())
def test_names_used_elsewhere(given: str, expected: str) -> None:
    """Names used by other tools find the device, in any case and with any separators."""
    assert load_device(given).name == expected


@pytest.mark.parametrize(("given", "candidates"), AMBIGUOUS_NAMES.items())
def test_names_of_several_boards_name_the_others(given: str, candidates: set[str]) -> None:
    """A name shared by several SKUs is one of them, and a note lists the others."""
    chosen = load_device(given).name

    assert chosen in candidates
    assert all(candidate in note_on_board(given) for candidate in candidates - {chosen})


@pytest.mark.parametrize(("name", "dtype", "sheet"), SHEET_RATES)
def test_rates_of_the_data_sheets(name: str, dtype: str, sheet: float) -> None:
    """Dense rates equal those of the data sheet up to its rounding."""
    assert load_device(name).peak_flops_per_s(dtype) == pytest.approx(sheet * 1e12, rel=2e-3)


def test_unknown_rate_is_an_error() -> None:
    """Volta has no bf16: the error lists the rates that it has."""
    with pytest.raises(UnknownRateError, match=r"v100-sxm2-16gb has no bf16 rate .*fp16"):
        load_device("v100-sxm2-16gb").peak_flops_per_s("bf16")


def test_die_is_half_of_its_card() -> None:
    """Every extensive number of the MI250X card is twice that of one die."""
    card, die = load_device("mi250x-card"), load_device("mi250x-gcd")
    assert (card.scope, die.scope) == ("card", "die")
    for number in ("num_sms", "memory_bytes", "l2_bytes", "tdp_watts", "dense_flops_per_s.fp16", "node_size"):
        ratio = card.numbers[number] / die.numbers[number]
        assert ratio == pytest.approx(0.5 if number == "node_size" else 2.0), number


def test_files_travel_with_the_package() -> None:
    """The data folder is read as package data, not by a path of the checkout."""
    folder = resources.files("shapewright.hardware") / "data"
    assert sum(entry.name.endswith(".toml") for entry in folder.iterdir()) == len(list_devices()) >= 60


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared reference data are not beside this checkout")
@pytest.mark.parametrize(
    ("file", "column"),
    [("device_specs.csv", "name"), ("published_training_throughput.csv", "gpu"), ("mamf.csv", "accelerator")],
)
def test_every_name_of_the_reference_data_resolves(file: str, column: str) -> None:
    """Every device named in the reference data has a device file."""
    with (SHARED_DATA / file).open(encoding="utf-8") as handle:
        names = {row[column] for row in csv.DictReader(handle) if row[column]}
    assert names
    for name in names:
        load_device(name)


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the shared reference data are not beside this checkout")
def test_capacities_and_rates_agree_with_the_reference_table() -> None:
    """Bandwidth, 16-bit rates and power equal those of the reference table."""
    with (SHARED_DATA / "device_specs.csv").open(encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            numbers = load_device(row["name"]).numbers
            for column, number, scale in (
                ("mem_bw_gbps", "memory_bandwidth_bytes_per_s", 1e9),
                ("fp16_tflops", "dense_flops_per_s.fp16", 1e12),
                ("bf16_tflops", "dense_flops_per_s.bf16", 1e12),
                ("fp8_tflops", "dense_flops_per_s.fp8", 1e12),
                ("tdp_w", "tdp_watts", 1.0),
                ("boost_clock_mhz", "boost_clock_hz", 1e6),
            ):
                if number == "boost_clock_hz" and load_device(row["name"]).roofline_only:
                    continue
                expected = float(row[column]) * scale if row[column] else None
                assert numbers.get(number) == (None if expected is None else pytest.approx(expected, rel=2e-3)), (
                    row["name"],
                    number,
                )
