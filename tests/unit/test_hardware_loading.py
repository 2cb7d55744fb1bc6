"""Loading devices: users' device files, unknown names, detection, and malformed text."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapewright.core.errors import DeviceError, UnknownDeviceError
from shapewright.hardware.device import Device
from shapewright.hardware.device_file import KEYS, REQUIRED_KEYS, device_template, parse_device
from shapewright.hardware.loader import MAX_FILE_BYTES, detect_device, list_devices, load_device, read_device_text

H100 = read_device_text("h100-sxm-80gb")
_MEMORY = next(line.partition("  #")[0] for line in H100.splitlines() if line.startswith("memory_bytes = "))


def write(folder: Path, text: str | bytes, name: str = "mine.toml") -> str:
    """Write a device file and return its path."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def complaint(text: str) -> str:
    """Parse a malformed file and return the error message, which has one line."""
    with pytest.raises(DeviceError) as caught:
        parse_device(text, where="device file 'mine.toml'", complete=False)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith("device file 'mine.toml'")
    return message


def test_template_loads_without_changes(tmp_path: Path) -> None:
    """The template is a complete device file whose numbers have no source."""
    device = load_device(write(tmp_path, device_template()))
    assert device.name == "my-device-80gb"
    assert device.peak_flops_per_s("bf16") == pytest.approx(100 * 1024 * 2 * 1.5e9)
    assert "memory_bytes" in device.unsourced


def test_template_names_every_number() -> None:
    """The template mentions every number that a device file may have."""
    named = {line.lstrip("# ").split("=")[0].strip() for line in device_template().splitlines() if "=" in line}
    numbers = {spec.name for spec in fields(Device) if str(spec.type).startswith(("int", "float"))}
    assert {*numbers, *REQUIRED_KEYS} - {"dense_flops_per_s"} <= named


def test_commented_lines_of_the_template_are_valid_too() -> None:
    """Uncommenting every optional number and the provenance gives a file that loads."""
    lines = []
    for line in device_template().splitlines():
        bare = line.removeprefix("# ").removeprefix("#")
        is_code = "=" in bare.split("#")[0] or bare.startswith("[")
        lines.append(bare if line.startswith("#") and is_code else line)
    device = parse_device("\n".join(lines), where="template", complete=False)
    assert device.node_size == 8
    assert device.provenance["dense_flops_per_s.fp16"]["kind"] == "datasheet"


def test_path_is_a_path_by_suffix_or_separator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is a path if it ends in .toml or has a separator."""
    write(tmp_path, H100)
    write(tmp_path, H100, "device.txt")
    monkeypatch.chdir(tmp_path)
    assert load_device("mine.toml").name == load_device("./device.txt").name == "h100-sxm-80gb"


def test_a_path_takes_precedence_over_a_name(tmp_path: Path) -> None:
    """A file whose device has a known name is read, so that a corrected data sheet is used."""
    path = write(tmp_path, H100.replace(_MEMORY, "memory_bytes = 94e9"))
    assert load_device(path).memory_bytes == 94e9
    assert load_device("h100-sxm-80gb").memory_bytes < 86e9


def test_device_files_are_not_cached(tmp_path: Path) -> None:
    """A changed file is read again."""
    path = write(tmp_path, H100)
    assert load_device(path).tdp_watts == 700
    write(tmp_path, H100.replace("tdp_watts = 700", "tdp_watts = 650"))
    assert load_device(path).tdp_watts == 650


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00binary", "not UTF-8"),
        (b"x" * (MAX_FILE_BYTES + 1), "is larger than"),
        (b"a = " + b"[" * 5000, "not valid TOML"),
        (b"", "lacks the required key name"),
        (b"name = 'x'\nname = 'y'", "not valid TOML"),
        (b"a = 1" + b"0" * 5000, "not valid TOML"),
        (b"a" + b".a" * 30_000 + b" = 1", "more than 200 dots"),
    ],
)
def test_invalid_files(tmp_path: Path, content: bytes, reason: str) -> None:
    """Binary, huge, nested, empty or contradictory files are errors on one line."""
    with pytest.raises(DeviceError, match=reason) as caught:
        load_device(write(tmp_path, content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.toml", "./missing", "folder/", "bad\0name.toml"])
def test_paths_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A missing file, a folder or an invalid path is an error on one line."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeviceError, match="cannot be read") as caught:
        load_device(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("num_sms = 132", "num_sm = 132", "unknown key 'num_sm'; did you mean 'num_sms'"),
        ("num_sms = 132", "num_sms = 132.0", "num_sms=132.0 must be an integer"),
        ("num_sms = 132", "num_sms = 0", "num_sms=0 must be an integer"),
        ("num_sms = 132", "num_sms = true", "num_sms=True must be an integer"),
        (_MEMORY, "memory_bytes = -80e9", "must be a number from"),
        (_MEMORY, "memory_bytes = nan", "memory_bytes=nan must be a number from"),
        (_MEMORY, "memory_bytes = inf", "memory_bytes=inf must be a number from"),
        (_MEMORY, "memory_bytes = 80", "80 GB is 80e9"),
        (_MEMORY, "memory_bytes = '80 GB'", "must be a number"),
        (_MEMORY, "", "lacks the required key memory_bytes"),
        ("memory_bandwidth_bytes_per_s = 3.35e12", "memory_bandwidth_bytes_per_s = 3350", "3.35 TB/s is 3.35e12"),
        ("fp16 = 989.4e12", "fp16 = 989.4", "989 TFLOP/s is 989e12"),
        ("fp16 = 989.4e12", "fp17 = 989.4e12", "fp17 is not one of"),
        ("fp16 = 989.4e12", "bfloat = 1e12", "bfloat is not one of"),
        ('architecture = "hopper"', 'architecture = "hoper"', "did you mean 'hopper'"),
        ('scope = "card"', 'scope = "chip"', "scope='chip' is not known"),
        ('name = "h100-sxm-80gb"', 'name = "My GPU"', "lower-case words"),
        ("tdp_watts = 700", 'tdp_watts = 700\nroofline_only = "no"', "must be true or false"),
        ("tdp_watts = 700", "tdp_watts = 700\nlink_group_size = 2", None),
        ('kind = "secondary" }', 'kind = "guess" }', "kind='guess'; choose one of"),
        ('read = "2026-11-21"', 'read = "yesterday"', "give a date such as"),
        ("[sources.ml-engineering]", "[sources.other]", "which [sources] lacks"),
        ("num_sms = { source", "num_sm = { source", "belongs to a number that the file lacks"),
    ],
)
def test_invalid_entries(old: str, new: str, expected: str | None) -> None:
    """Each kind of mistake is reported with its value and what is allowed."""
    assert old in H100
    text = H100.replace(old, new, 1)
    if expected is None:
        parse_device(text, where="x", complete=False)
    else:
        assert expected in complaint(text)


def test_package_files_need_provenance() -> None:
    """A number without provenance is an error in the package's files and accepted in users' files."""
    entry = next(line for line in H100.splitlines() if line.startswith("tdp_watts = {"))
    text = H100.replace(entry + "\n", "")
    with pytest.raises(DeviceError, match="tdp_watts has no entry in"):
        parse_device(text, where="x", complete=True)
    assert parse_device(text, where="x", complete=False).unsourced == ("tdp_watts",)


@pytest.mark.parametrize(
    ("given_name", "part"),
    [
        ("h100-sxm-80g", "'h100-sxm-80gb'"),
        ("rtx4091", "rtx"),
        ("mi300", "'mi300x'"),
        ("zzz", "devices template"),
        ("", ""),
    ],
)
def test_unknown_names_suggest_close_ones_and_the_template(given_name: str, part: str) -> None:
    """An unknown name is an error with similar names and a pointer to the template."""
    with pytest.raises(UnknownDeviceError) as caught:
        load_device(given_name)
    assert part in str(caught.value)
    assert "devices template" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(name=st.text(max_size=300))
def test_any_text_as_a_name_is_one_line(name: str) -> None:
    """Any text as a name gives a device or an error of one printable line."""
    message = ""
    try:
        load_device(name)
    except DeviceError as error:
        message = str(error)
    assert not message or message.isprintable()


@pytest.mark.parametrize(
    ("gpu_name", "num_sms", "memory_bytes", "expected"),
    [
        # What drivers report: name, multiprocessors, total memory.
        ("NVIDIA A100-SXM4-40GB", 108, 42405855232, "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", 108, 85.1e9, "a100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", 132, 85.0e9, "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", 114, 85.0e9, "h100-pcie-80gb"),
        ("NVIDIA H200", 132, 150.1e9, "h200-sxm-141gb"),
        ("Tesla V100-SXM2-16GB", 80, 16.9e9, "v100-sxm2-16gb"),
        ("NVIDIA L40S", 142, 47.7e9, "l40s"),
        ("NVIDIA GB200", 152, 198.7e9, "gb200"),
        ("NVIDIA GeForce RTX 4090", 128, 25.4e9, "rtx-4090"),
        ("AMD Instinct MI250X/MI250", 110, 64 * 2**30, "mi250x-gcd"),
        ("AMD Instinct MI300X", 304, 192 * 2**30, "mi300x"),
    ],
)
def test_detection_by_driver_names(gpu_name: str, num_sms: int, memory_bytes: float, expected: str) -> None:
    """Name, SMs and memory identify the device, although drivers report binary units and reserve some memory."""
    assert detect_device(gpu_name, num_sms, memory_bytes).name == expected


@pytest.mark.parametrize(
    ("gpu_name", "num_sms", "memory_bytes", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", 114, 85e9, "h100-sxm-80gb has 132 SMs"),  # a slice, or another SKU of that name
        ("NVIDIA H100 80GB HBM3", 132, 40e9, "no device file matches"),
        ("NVIDIA H999", 132, 85e9, "devices template"),
        ("", 132, 85e9, "no device file matches"),
    ],
)
def test_detection_never_guesses(gpu_name: str, num_sms: int, memory_bytes: float, reason: str) -> None:
    """A mismatch is an error that shows the numbers of the device file."""
    with pytest.raises(UnknownDeviceError, match=reason):
        detect_device(gpu_name, num_sms, memory_bytes)


def test_ambiguous_detection() -> None:
    """A name that matches two SKUs with equal SMs and memory is an error that names both."""
    with pytest.raises(UnknownDeviceError, match="could be any of a100-pcie-40gb, a100-sxm-40gb"):
        detect_device("a100", 108, 40e9)


def test_no_device_of_the_package_is_detected_as_another() -> None:
    """Every alias of a device, with its SMs and memory, is detected as that device."""
    for name in list_devices():
        device = load_device(name)
        if device.num_sms is None:
            continue
        for alias in device.aliases:
            assert detect_device(alias, device.num_sms, device.memory_bytes) is device


# Values that a careless hand or a broken tool may put after an equals sign.
_VALUES = st.one_of(
    st.sampled_from(
        ["nan", "inf", "-1", "0", "10e400", "1" + "0" * 40, "true", "[]", "{}", "[[1]]", "2026-01-01", "''"]
    ),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.text(max_size=20).map(repr),
)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_mutated_files(data: st.DataObject) -> None:
    """Dropped, doubled, renamed or changed lines never cause a traceback."""
    lines = H100.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.integers(0, len(lines) - 1))
        key = lines[row].split("=")[0].strip()
        action = data.draw(st.sampled_from(["drop", "double", "value", "key", "cut", "noise"]))
        if action == "drop":
            lines[row] = ""
        elif action == "double":
            lines.insert(row, lines[row])
        elif action == "value":
            lines[row] = f"{key} = {data.draw(_VALUES)}"
        elif action == "key":
            lines[row] = lines[row].replace(key, data.draw(st.sampled_from([*KEYS, "x", "bf17", "a.b.c"])), 1)
        elif action == "cut":
            lines[row] = lines[row][: data.draw(st.integers(0, len(lines[row])))]
        else:
            lines[row] += data.draw(st.text(max_size=10))
    text = "\n".join(lines)
    device, message = None, ""
    try:
        device = parse_device(text, where="device file 'mine.toml'", complete=False)
    except DeviceError as error:
        message = str(error)
    if device is None:
        assert message.isprintable()
        assert 0 < len(message) < 2000
    else:
        assert all(value > 0 for value in device.numbers.values())
        assert set(tomllib.loads(text)) <= set(KEYS)
