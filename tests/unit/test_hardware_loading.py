"""Loading: files of one's own, names nobody knows, detection by what a driver reports, and any malformed text."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapewright.errors import DeviceError, UnknownDeviceError
from shapewright.hardware import detect_device, device_template, list_devices, load_device
from shapewright.hardware.catalogue import read_device_text
from shapewright.hardware.fileformat import AMOUNT_KEYS, COUNT_KEYS, KEYS, REQUIRED_KEYS, parse_device
from shapewright.hardware.loader import LARGEST_FILE_BYTES

H100 = read_device_text("h100-sxm-80gb")
_MEMORY = next(line.partition("  #")[0] for line in H100.splitlines() if line.startswith("memory_bytes = "))


def write(folder: Path, text: str | bytes, name: str = "mine.toml") -> str:
    """Write a device file and return its path."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def complaint(text: str) -> str:
    """Return the one line that a malformed file is refused with."""
    with pytest.raises(DeviceError) as caught:
        parse_device(text, where="device file 'mine.toml'", complete=False)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith("device file 'mine.toml'")
    return message


def test_template_loads_as_it_stands(tmp_path: Path) -> None:
    """The template is a whole device file, and says of itself that nothing in it has a source."""
    device = load_device(write(tmp_path, device_template()))
    assert device.name == "my-device-80gb"
    assert device.peak_flops_per_s("bf16") == pytest.approx(100 * 1024 * 2 * 1.5e9)
    assert "memory_bytes" in device.unsourced


def test_template_names_every_number() -> None:
    """A number that the template left out would never be given."""
    named = {line.lstrip("# ").split("=")[0].strip() for line in device_template().splitlines() if "=" in line}
    assert {*AMOUNT_KEYS, *COUNT_KEYS, *REQUIRED_KEYS} - {"dense_flops_per_s"} <= named


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
    """A file in this folder is found by its suffix, one elsewhere by its separator, whatever its suffix."""
    write(tmp_path, H100)
    write(tmp_path, H100, "device.txt")
    monkeypatch.chdir(tmp_path)
    assert load_device("mine.toml").name == load_device("./device.txt").name == "h100-sxm-80gb"


def test_own_file_with_the_name_of_a_known_device_is_read_and_not_the_known_one(tmp_path: Path) -> None:
    """A path always wins over a name, so that a corrected sheet is used."""
    path = write(tmp_path, H100.replace(_MEMORY, "memory_bytes = 94e9"))
    assert load_device(path).memory_bytes == 94e9
    assert load_device("h100-sxm-80gb").memory_bytes < 86e9


def test_file_is_read_again_when_it_changed(tmp_path: Path) -> None:
    """Files of one's own are not cached: edit, run again."""
    path = write(tmp_path, H100)
    assert load_device(path).tdp_watts == 700
    write(tmp_path, H100.replace("tdp_watts = 700", "tdp_watts = 650"))
    assert load_device(path).tdp_watts == 650


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00binary", "not UTF-8"),
        (b"x" * (LARGEST_FILE_BYTES + 1), "more than"),
        (b"a = " + b"[" * 5000, "not valid TOML"),
        (b"", "lacks name"),
        (b"name = 'x'\nname = 'y'", "not valid TOML"),
        (b"a = 1" + b"0" * 5000, "not valid TOML"),
    ],
)
def test_files_that_are_no_device_files(tmp_path: Path, content: bytes, reason: str) -> None:
    """Binary, huge, nested, empty, contradictory: each is refused in one line that says what it is."""
    with pytest.raises(DeviceError, match=reason) as caught:
        load_device(write(tmp_path, content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing.toml", "./missing", "folder/", "bad\0name.toml"])
def test_paths_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A missing file, a folder or an impossible path is one line with what to do."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeviceError, match="cannot be read") as caught:
        load_device(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("num_sms = 132", "num_sm = 132", "unknown key 'num_sm'; did you mean 'num_sms'"),
        ("num_sms = 132", "num_sms = 132.0", "num_sms=132.0 must be a whole number"),
        ("num_sms = 132", "num_sms = 0", "num_sms=0 must be a whole number"),
        ("num_sms = 132", "num_sms = true", "num_sms=True must be a whole number"),
        (_MEMORY, "memory_bytes = -80e9", "must be a positive number"),
        (_MEMORY, "memory_bytes = nan", "memory_bytes=nan must be a positive number"),
        (_MEMORY, "memory_bytes = inf", "memory_bytes=inf must be a positive number"),
        (_MEMORY, "memory_bytes = 80", "80 GB is 80e9"),
        (_MEMORY, "memory_bytes = '80 GB'", "must be a number"),
        (_MEMORY, "", "lacks memory_bytes"),
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
        ('read = "2026-11-21"', 'read = "yesterday"', "give the date as"),
        ("[sources.ml-engineering]", "[sources.other]", "which [sources] lacks"),
        ("num_sms = { source", "num_sm = { source", "is of a number that the file does not give"),
    ],
)
def test_one_wrong_thing_is_named(old: str, new: str, expected: str | None) -> None:
    """Each kind of slip is found, named with its value, and answered with what is allowed."""
    assert old in H100
    text = H100.replace(old, new, 1)
    if expected is None:
        parse_device(text, where="x", complete=False)
    else:
        assert expected in complaint(text)


def test_package_file_without_provenance_of_one_number_is_refused() -> None:
    """Files of the package must source every number; the same text is fine as a file of one's own."""
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
    """An unknown name is an error with close names and the way to describe a device of one's own."""
    with pytest.raises(UnknownDeviceError) as caught:
        load_device(given_name)
    assert part in str(caught.value)
    assert "devices template" in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(name=st.text(max_size=300))
def test_any_text_as_a_name_is_one_line(name: str) -> None:
    """Whatever is typed as a device, the answer is a device or one printable line."""
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
def test_detection_of_what_drivers_report(gpu_name: str, num_sms: int, memory_bytes: float, expected: str) -> None:
    """Name, units and memory together find the file, although drivers count memory in binary and keep some back."""
    assert detect_device(gpu_name, num_sms, memory_bytes).name == expected


@pytest.mark.parametrize(
    ("gpu_name", "num_sms", "memory_bytes", "reason"),
    [
        ("NVIDIA H100 80GB HBM3", 114, 85e9, "h100-sxm-80gb has 132 SMs"),  # a slice, or another SKU of that name
        ("NVIDIA H100 80GB HBM3", 132, 40e9, "no device file is of"),
        ("NVIDIA H999", 132, 85e9, "devices template"),
        ("", 132, 85e9, "no device file is of"),
    ],
)
def test_detection_never_guesses(gpu_name: str, num_sms: int, memory_bytes: float, reason: str) -> None:
    """One thing that does not agree is an error that shows what the file has."""
    with pytest.raises(UnknownDeviceError, match=reason):
        detect_device(gpu_name, num_sms, memory_bytes)


def test_detection_refuses_two_matches() -> None:
    """A name that lies within those of two SKUs alike in units and memory is an error that names both."""
    with pytest.raises(UnknownDeviceError, match="could be any of a100-pcie-40gb, a100-sxm-40gb"):
        detect_device("a100", 108, 40e9)


def test_no_device_of_the_package_is_detected_as_another() -> None:
    """The sheet's own title name, units and memory lead back to the same file for every alias of it."""
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
def test_mutated_files_load_or_complain_in_one_line(data: st.DataObject) -> None:
    """Lines of a real file dropped, doubled, renamed or given other values never end in a traceback."""
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
