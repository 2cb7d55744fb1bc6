"""From a store to a calibration file to a prediction: what is fitted is found again."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration_files import write_late_calibration
from shapewright.app.cli.main import main
from shapewright.core.errors import CalibrationError, DeviceError
from shapewright.hardware.architectures import find_architecture
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.evaluate import summarize
from shapewright.measure.accuracy.stores import price
from shapewright.measure.fit.attention_record import _Call, _predictor
from shapewright.measure.fit.calibrate import CalibrationResult, calibrate_rows
from shapewright.measure.fit.gemm_section import FitParameters, alignment_entries
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import Case, Row, Run, row_facts
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.file import calibrated_device, device_table, read_calibration
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.operations import price_operations

H100 = load_device("h100-sxm-80gb")
# A stand-in for a processor: 4 threads of 25 GFLOP/s, 20 GB/s.
TRUTH_FLOPS_PER_S, TRUTH_BYTES_PER_S, TRUTH_START_S = 1e11, 2e10, 4e-6


def make_run(device: str) -> Run:
    """A run on a device."""
    return Run(
        run_id=f"r-{device}", started_utc="", command="", suite="s", device=device,
        device_facts={"num_threads": 4, "memory_bytes": 16e9, "processor": "Some CPU"}, driver="", runtime="",
        torch_version="", library="l", shapewright_version="",
    )  # fmt: skip


def make_row(case: Case, device: str, median_s: float, *, is_cold: bool = True) -> Row:
    """A good row."""
    facts = row_facts(case, make_run(device))
    return Row(**facts, measured_utc="", status="ok", median_s=median_s, is_cold=is_cold)


def needs_fit_extra() -> None:
    """Skip the test where the libraries of the fits are missing."""
    for name in ("scipy", "pandas"):
        pytest.importorskip(name, reason="fitting needs the fit extra")


def fit_rows(rows: list[Row], devices: Sequence[str] = (H100.name,), *, device: str = "") -> CalibrationResult:
    """Fit rows of runs on these devices."""
    needs_fit_extra()
    return calibrate_rows(rows, [make_run(name) for name in devices], device=device)


def simple_time_s(operation: Gemm | Pointwise | Attention) -> float:
    """A device of one rate, one bandwidth and one start."""
    flops = operation.executed_flops if isinstance(operation, Attention) else operation.flops
    return TRUTH_START_S + max(float(flops) / TRUTH_FLOPS_PER_S, float(operation.num_bytes) / TRUTH_BYTES_PER_S)


def cpu_cases() -> list[Case]:
    """GEMMs, pointwise operations and attention as in a small suite."""
    cases = [
        Case(operation=Gemm(name="x", dtype="fp32", m=m, n=n, k=k, layout=layout))
        for m, n, k, layout in ((64, 64, 64, "NT"), (128, 256, 128, "NN"), (256, 257, 256, "TN"), (256, 512, 128, "NT"))
    ]
    cases += [Case(operation=Gemm(name="x", dtype="fp32", m=256, n=n, k=192)) for n in range(128, 512, 48)]
    for kind in ("residual", "norm"):
        cases += [
            Case(
                operation=Pointwise(name=kind, dtype="fp32", operation=kind, read_bytes=2.0**s, written_bytes=2.0**s),
                row_width=64,
            )
            for s in (16, 18, 20, 22)
        ]
    sizes = {"batch_size": 1, "num_heads": 4, "num_kv_heads": 4}
    cases += [
        Case(
            operation=Attention(
                name="a", dtype="fp32", query_len=s, kv_len=s, head_dim=d, v_head_dim=d, is_backward=back, **sizes
            )
        )
        for s in (64, 128) for d in (32, 64) for back in (False, True)
    ]  # fmt: skip
    return cases


@pytest.fixture(scope="module")
def cpu_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the stand-in, made by the command."""
    needs_fit_extra()
    folder = tmp_path_factory.mktemp("calibrate")
    with Store(folder / "s.db") as store:
        rows = [make_row(case, "cpu", simple_time_s(case.operation)) for case in cpu_cases()]
        store.add_all([make_run("cpu")], rows)
    message = (folder / "said.json").open("w", encoding="utf-8")
    with message, contextlib.redirect_stdout(message), pytest.raises(SystemExit) as stop:
        main(["calibrate", "--store", str(folder / "s.db"), "-o", str(folder / "cpu.json"), "--json"])
    assert stop.value.code == 0
    return folder / "cpu.json"


def test_a_cpu_is_described_by_its_rows(cpu_file: Path) -> None:
    """A CPU's rates are the best measured ones, its SMs are threads, its memory is that of the run."""
    device = calibrated_device("cpu", cpu_file)
    best = max(float(case.operation.flops) / simple_time_s(case.operation) for case in cpu_cases()[:12])

    assert device.dense_flops_per_s == {"fp32": pytest.approx(best, rel=1e-3)}
    assert (device.num_sms, device.memory_bytes, device.title) == (4, 16e9, "Some CPU")
    assert set(device.own_records) == {"gemm", "pointwise", "attention"}


def test_measured_operations_are_predicted(cpu_file: Path) -> None:
    """Prices of the very shapes come back within a few percent, labelled with the records of one's own."""
    device = calibrated_device("cpu", cpu_file)
    operations = [case.operation for case in cpu_cases()]
    prices = price_operations(operations, device)
    off = [abs(float(p.time_s) / simple_time_s(o) - 1.0) for p, o in zip(prices, operations, strict=True)]

    assert np.median(off) < 0.05
    assert np.mean(off) < 0.12
    assert all(price.calibration.label.startswith("own/") for price in prices)


def test_held_out_errors_are_printed(cpu_file: Path) -> None:
    """--json has the errors of rows that no fit saw, and words on what was taken for granted."""
    facts = json.loads(cpu_file.with_name("said.json").read_text(encoding="utf-8"))
    rows = {(entry["kind"], entry["part"]): entry["rows"] for entry in facts["errors"]}

    assert rows == {("gemm", "fp32"): 12, ("pointwise", "pointwise"): 8, ("attention", "prefill"): 8}
    assert any("no data sheet" in remark for remark in facts["remarks"])
    assert set(facts["records"]) == {"gemm", "pointwise", "attention"}


@pytest.mark.parametrize("command", ["predict", "check", "memory"])
def test_commands_take_a_calibration(command: str, cpu_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device without a device file is priced by its calibration, in the format that it has."""
    with pytest.raises(SystemExit) as stop:
        main([command, "gpt2", "--device", "cpu", "--calibration", str(cpu_file), "--seq-len", "64", "--json"])
    facts = json.loads(capsys.readouterr().out)

    assert stop.value.code in {0, 1}
    if command == "predict":
        assert facts["workload"]["dtype"] == "fp32"
        assert facts["calibration"].startswith("own/gemm/cpu/")
        assert not [words for words in facts["warnings"] if words.startswith(("gemm", "attention", "pointwise"))]


def test_calibration_file_takes_precedence(tmp_path: Path) -> None:
    """The file prices GEMMs, the package all other kinds; --uncalibrated ignores the file."""
    device = calibrated_device("H100_SXM", write_late_calibration(tmp_path / "h100.json", 3.0))
    tiny = [Gemm(name="x", m=16, n=64, k=64), Pointwise(name="p", operation="norm", read_bytes=1e6, written_bytes=1e6)]
    (own, norm), (usual, usual_norm) = price_operations(tiny, device), price_operations(tiny, H100)

    assert float(own.time_s) > 1.5 * float(usual.time_s)
    assert norm.time_s == usual_norm.time_s
    assert price_operations(tiny, device.with_pricing(uncalibrated=True))[0].calibration.is_uncalibrated


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: {**raw, "kind": "x"}, "is not a calibration file"),
        (lambda raw: {**raw, "schema_version": 9}, "schema version 9, known here is 2; upgrade shapewright"),
        (lambda raw: {**raw, "schema_version": 1}, "schema version 1, known here is 2; fit it again"),
        (lambda raw: {**raw, "records": {}}, "lacks its device or its records"),
        (lambda raw: {**raw, "records": {"sums": {}}}, "a record of kind 'sums'"),
        (lambda raw: {**raw, "records": {"gemm": {"id": "x"}}}, "lacks 'devices'"),
        (lambda raw: {**raw, "device": {**raw["device"], "memory_bytes": -1}}, "memory_bytes"),
    ],
)
def test_bad_calibrations_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    """An invalid calibration file is reported in one line."""
    path = write_late_calibration(tmp_path / "h100.json", 1.0)
    path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    with pytest.raises((CalibrationError, DeviceError), match=words) as caught:
        read_calibration(path)

    assert "\n" not in str(caught.value)


def test_calibrations_are_of_one_device(tmp_path: Path) -> None:
    """Another device's calibration, a missing file and a CPU without one are refused with the way out."""
    path = write_late_calibration(tmp_path / "h100.json", 1.0)
    for name, file, words in (
        ("l40s", path, "is of h100-sxm-80gb, not of l40s"),
        ("cpu", path, "as the calibration"),
        ("l40s", tmp_path / "none.json", "cannot be read"),
    ):
        with pytest.raises((CalibrationError, DeviceError), match=words):
            calibrated_device(name, file)


def test_uncalibrated_contradicts_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two options together are an error."""
    path = str(write_late_calibration(tmp_path / "h100.json", 1.0))
    with pytest.raises(SystemExit) as stop:
        main(["predict", "gpt2", "--device", "h100_sxm", "--calibration", path, "--uncalibrated"])

    assert (stop.value.code, "cannot be combined" in capsys.readouterr().err) == (2, True)


def test_a_described_device_reads_back() -> None:
    """The table of a device is a device file's, and gives the same device."""
    from shapewright.hardware.device_file import build_device

    back = build_device(device_table(H100), where="x", complete=False)

    assert replace(H100, provenance={}, sources={}) == back
    assert isinstance(back, Device)


@pytest.mark.parametrize(
    ("rows", "device", "words"),
    [
        ([], "", "no valid row"),
        ([("cpu", 1), ("l40s", 1)], "", "name one with device"),
        ([("cpu", 1)], "l40s", "no valid row of l40s"),
        ([("cpu", 1)], "", "too few GEMMs"),
        ([("NVIDIA Foo", 9)], "", "no device file for 'NVIDIA Foo'"),
    ],
)
def test_stores_that_cannot_be_fit_rows(rows: list[tuple[str, int]], device: str, words: str) -> None:
    """Too few rows, several devices, or an unknown one give a one-line error."""
    listed = [
        make_row(Case(operation=Gemm(name="x", dtype="fp32", m=64, n=64 + index, k=64)), name, 1e-4)
        for name, count in rows
        for index in range(count)
    ]
    with pytest.raises(CalibrationError, match=words):
        fit_rows(listed, [name for name, _ in rows], device=device)


@pytest.mark.parametrize("devices", [["--device", "h100_sxm"], ["--devices", "l40s,h100_sxm"]], ids=["one", "several"])
def test_search_takes_records(devices: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search ranks with the records of one's own, alone and among several devices."""
    found = []
    for own in ([], ["--calibration", str(write_late_calibration(tmp_path / "h100.json", 50.0))]):
        with pytest.raises(SystemExit) as stop:
            main(["search", "gpt3-125m", *devices, "--vary", "vocab", "--json", *own])
        assert stop.value.code == 0
        found.append(json.loads(capsys.readouterr().out)["candidates"][0])
    usual, late = (one["on_devices"]["h100-sxm-80gb"] if "l40s" in devices[1] else one for one in found)

    assert late["speedup"] != usual["speedup"]


def test_compare_takes_records_for_one_of_its_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The device of the file is priced with its records, the others are not; a file of none of them is refused."""
    path = str(write_late_calibration(tmp_path / "h100.json", 2.0))

    def times(*words: str) -> tuple[int, dict[str, float], str]:
        arguments = ["compare", "gpt2", "--devices", "h100_sxm,l40s", "--phase", "prefill", "--json", *words]
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        message = capsys.readouterr()
        rows = json.loads(message.out)["devices"] if message.out else []
        assert isinstance(stop.value.code, int)
        return stop.value.code, {row["name"]: row["step_time_s"] for row in rows}, message.err

    (_, plain, _), (_, own, _) = times(), times("--calibration", path)
    code, _, message = times("--calibration", path, "--devices", "l40s,a100-sxm-80gb")

    assert own["h100-sxm-80gb"] != plain["h100-sxm-80gb"]
    assert own["l40s"] == plain["l40s"]
    assert (code, message.count("\n")) == (2, 1)
    assert "is of h100-sxm-80gb, which is not among the compared devices" in message
    assert times("--calibration", path, "--uncalibrated")[0] == 2


def test_random_gemms_for_evaluation_are_never_fit_rows() -> None:
    """The held-out half of the random suite changes the reported error, and no fitted parameter."""
    grid = [Gemm(name="x", dtype="bf16", m=m, n=n, k=1024) for m in (256, 512, 1024) for n in (512, 1024, 2048)]
    plain = [make_row(Case(operation=entry), H100.name, 1e-5 + entry.flops / 5e14) for entry in grid]
    drawn = [Gemm(name="random", dtype="bf16", m=300 + 2 * index, n=640, k=512) for index in range(120)]

    def with_random(factor: float) -> Any:
        rows = [make_row(Case(operation=entry), H100.name, factor * (1e-5 + entry.flops / 5e14)) for entry in drawn]
        return fit_rows([*plain, *(replace(row, suite="random") for row in rows)])

    right, late = with_random(1.0), with_random(3.0)
    alone = fit_rows(plain)
    parameters = [found.content["records"]["gemm"]["parameters"] for found in (right, late, alone)]

    assert parameters[0] == parameters[1] == parameters[2]
    assert [error["rows"] for error in right.errors] == [120]
    assert late.errors[0]["mape"] == pytest.approx(1.0 - (1.0 + right.errors[0]["bias"]) / 3.0, abs=0.1)


@pytest.mark.parametrize(("quick", "own"), [("flash", False), ("cudnn", False), ("flash", True)])
def test_an_attention_record_is_of_one_kernel(quick: str, own: bool) -> None:
    """Of explicitly chosen kernels the fastest is fitted, unless the library's own choice was measured."""
    gemms = [Gemm(name="x", dtype="bf16", m=m, n=n, k=1024) for m in (256, 512, 1024) for n in (512, 1024, 2048)]
    rows = [make_row(Case(operation=entry), H100.name, 1e-5 + entry.flops / 5e14) for entry in gemms]
    sizes = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "v_head_dim": 128, "batch_size": 4}
    calls = [Attention(name="a", dtype="bf16", query_len=s, kv_len=s, **sizes) for s in (512, 1024, 2048, 4096, 8192)]
    for kernel, factor in (("flash", 1.0), ("cudnn", 1.0), *((("", 2.0),) if own else ())):
        time = factor * (1.0 if kernel in (quick, "") else 3.0)
        rows += [
            make_row(Case(operation=call, variant=kernel), H100.name, time * (1e-5 + float(call.executed_flops) / 4e14))
            for call in calls
        ]
    found = fit_rows(rows)
    report = found.content["records"]["attention"]["provenance"]["sections"]["prefill"]

    assert report["kernel"] == ("the library's choice" if own else quick)
    assert (report["rows"], report["rows_of_other_kernels"]) == (5, 10 if own else 5)
    assert any(f"describes {report['kernel']}" in remark for remark in found.remarks)


def test_layernorm_and_rmsnorm_are_fitted_apart() -> None:
    """The bench times both as norms, RMSNorm as a variant: a third as fast, it has a third of LayerNorm's bandwidth."""
    gemms = [Gemm(name="x", dtype="bf16", m=m, n=n, k=1024) for m in (256, 512, 1024) for n in (512, 1024, 2048)]
    rows = [make_row(Case(operation=entry), H100.name, 1e-5 + entry.flops / 5e14) for entry in gemms]
    for size in (2.0**s for s in range(26, 32)):
        norm = Pointwise(name="norm", dtype="bf16", operation="norm", read_bytes=size, written_bytes=size)
        for variant, bytes_per_s in (("", 1.8e12), ("rms_norm", 0.6e12)):
            rows.append(make_row(Case(operation=norm, variant=variant), H100.name, 2e-6 + 2.0 * size / bytes_per_s))
    kinds = fit_rows(rows).content["records"]["pointwise"]["parameters"]["kinds"]
    ratio = kinds["layernorm"]["bandwidth_fraction"] / kinds["norm"]["bandwidth_fraction"]

    assert ratio == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("differs", [{"kv_cache_dtype": "fp8"}, {"values_in_keys": True}])
def test_calls_of_another_cache_do_not_change_each_other(differs: dict[str, Any]) -> None:
    """Calls with a narrow cache, or whose values are in the keys, have the times that they have alone."""
    sizes = {"batch_size": 64, "kv_len": 8192, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    plain = Attention(name="a", dtype="bf16", query_len=1, **sizes)  # type: ignore[arg-type]
    other = replace(plain, **differs)
    section = load_record("attention", H100).parameters["sections"]["16bit"]
    constants = section["kernels"][section["usual_kernel"]]["decode"]

    def times_s(calls: Sequence[Attention]) -> list[float]:
        cold = [_Call(call, is_cold=True) for call in calls]
        found: list[float] = _predictor("decode", cold, constants, H100)({}).tolist()
        return found

    together = times_s([plain, other])
    assert together == pytest.approx([*times_s([plain]), *times_s([other])])
    assert together[1] < 0.7 * together[0]  # half of the cache is read


def test_calls_of_two_runs_are_all_fitted() -> None:
    """A call that two runs measured counts twice, as GEMMs do; neither row is one of another kernel."""
    gemms = [Gemm(name="x", dtype="bf16", m=m, n=n, k=1024) for m in (256, 512, 1024) for n in (512, 1024, 2048)]
    rows = [make_row(Case(operation=entry), H100.name, 1e-5 + entry.flops / 5e14) for entry in gemms]
    sizes = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "v_head_dim": 128, "batch_size": 4}
    calls = [Attention(name="a", dtype="bf16", query_len=s, kv_len=s, **sizes) for s in (512, 1024, 2048, 4096, 8192)]
    rows += [
        make_row(Case(operation=call), H100.name, factor * (1e-5 + float(call.executed_flops) / 4e14))
        for factor in (1.0, 1.1)
        for call in calls
    ]
    found = fit_rows(rows)
    report = found.content["records"]["attention"]["provenance"]["sections"]["prefill"]

    assert (report["rows"], report["rows_of_other_kernels"]) == (10, 0)
    assert not any("other kernels" in remark for remark in found.remarks)


def test_decode_outside_of_the_cache_is_fitted_as_such() -> None:
    """Rows that read their keys and values from memory, as the package's record prices them, leave its constants."""
    record = load_record("attention", H100.with_pricing(physics_only=True))
    gemms = [Gemm(name="x", dtype="bf16", m=m, n=n, k=1024) for m in (256, 512, 1024) for n in (512, 1024, 2048)]
    calls = [
        Attention(
            name="a", dtype="bf16", query_len=1, kv_len=keys, batch_size=batch, num_heads=32, num_kv_heads=heads,
            head_dim=128, v_head_dim=128,
        )
        for keys in (1024, 4096) for batch in (1, 4, 16) for heads in (4, 8)
    ]  # fmt: skip
    rows = [make_row(Case(operation=entry), H100.name, 1e-5 + entry.flops / 5e14) for entry in gemms]
    for call in calls:
        time_s = float(price_attention(call, H100, record, hot_cache=False).time_s)
        rows.append(replace(make_row(Case(operation=call), H100.name, time_s), is_cold=True))
    report = fit_rows(rows).content["records"]["attention"]["provenance"]["sections"]["decode"]

    assert report["held_out"]["mean_absolute_error"] < 1e-3
    assert report["factors"] == pytest.approx(dict.fromkeys(report["factors"], 1.0), rel=0.01)


@pytest.mark.parametrize(
    ("tile", "device"), [(32, "cpu"), (64, "cpu"), (32, "a100-sxm-80gb")], ids=["small", "usual", "on a GPU"]
)
def test_attention_of_an_unknown_architecture_may_have_smaller_tiles(tile: int, device: str) -> None:
    """PyTorch's kernel for CPUs takes 32 queries at a time: with tiles of 64, 32 queries cost as much as 64."""

    def time_s(call: Attention) -> float:
        blocks = math.ceil(int(call.query_len) / tile)
        visited = tile**2 * blocks * (blocks + 1) / 2
        return 1e-6 + int(call.num_heads) * visited * 4 * int(call.head_dim) / (0.1 * TRUTH_FLOPS_PER_S)

    sizes = [(heads, head_dim, length) for heads in (4, 8) for head_dim in (64, 128) for length in (32, 96, 160, 320)]
    calls = [
        Attention(
            name="a", dtype="fp32" if device == "cpu" else "bf16", batch_size=1, query_len=length, kv_len=length,
            num_heads=heads, num_kv_heads=heads, head_dim=head_dim, v_head_dim=head_dim,
        )
        for heads, head_dim, length in sizes
    ]  # fmt: skip
    gemms = [Gemm(name="x", dtype=calls[0].dtype, m=m, n=n, k=512) for m in (128, 256, 512) for n in (256, 512, 1024)]
    rows = [make_row(Case(operation=one), device, simple_time_s(one)) for one in gemms]
    rows += [make_row(Case(operation=one), device, time_s(one)) for one in calls]
    result = fit_rows(rows, [device])
    report = result.content["records"]["attention"]["provenance"]["sections"]["prefill"]

    if device != "cpu":
        assert "forms" not in report
        return
    assert report["form"] == f"a tile of {tile} queries"
    assert report["held_out"]["mean_absolute_error"] < 0.1
    assert any(f"attention prefill: a tile of {tile} queries is" in remark for remark in result.remarks)


def test_a_store_is_judged_as_its_calibration_was_fitted(tmp_path: Path) -> None:
    """Operands may lie in the cache, the interval is the record's own, and the name of the library is none of its."""

    def time_s(operation: Gemm, index: int) -> float:
        bandwidth = TRUTH_BYTES_PER_S * (4.0 if index % 4 else 1.0)
        noise = 1.0 if index % 3 else 1.6
        return noise * (TRUTH_START_S + float(operation.num_bytes) / bandwidth)

    sizes = [(m, n, k) for m in (1, 2, 4) for n in range(96, 1200, 112) for k in (128, 512)]
    gemms = [Gemm(name="x", dtype="fp32", m=m, n=n, k=k) for m, n, k in sizes]
    rows = [
        make_row(Case(operation=one), "cpu", time_s(one, index), is_cold=index % 4 == 0)
        for index, one in enumerate(gemms)
    ]
    needs_fit_extra()
    run = replace(make_run("cpu"), device_facts={**make_run("cpu").device_facts, "l2_bytes": 64e6})
    result = calibrate_rows(rows, [run])
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(result.content), encoding="utf-8")
    context = Context(own={"cpu": calibrated_device("cpu", path)})
    (found,) = summarize(price(rows, context))
    report = result.content["records"]["gemm"]["provenance"]["sections"]["fp32"]

    assert found.mape == pytest.approx(report["fitted"]["mean_ape"], rel=0.02)
    assert found.coverage_90 >= 0.85


@pytest.mark.parametrize(
    ("name", "donor"),
    [("h100-sxm-80gb", "a100-sxm-80gb"), ("v100-pcie-16gb", "v100-sxm2-16gb"), ("a100-sxm-80gb", None)],
)
def test_a_section_names_the_donor_of_its_alignment(name: str, donor: str | None) -> None:
    """Aligned GEMMs do not determine alignment factors: the donor's factors stay, and the donor is named."""
    gemms = [Gemm(name="x", dtype="fp16", m=m, n=n, k=1024) for m in (256, 512, 1024) for n in (512, 1024, 2048)]
    rows = [make_row(Case(operation=entry), name, 1e-5 + entry.flops / 5e13) for entry in gemms]

    (section,) = fit_rows(rows).content["records"]["gemm"]["parameters"]["dtypes"].values()

    assert section.get("alignment_from") == donor


@pytest.mark.parametrize(("power", "kept"), [(1e-4, 1.0), (3.0, 3.0), (1e6, 32.0)])
def test_arithmetic_and_traffic_take_no_longer_than_one_after_the_other(power: float, kept: float) -> None:
    """(c^p + t^p)^(1/p) is above c + t for p below 1, which no kernel is; small p would overflow besides."""
    form = FitParameters(
        [(128, 128)], hot=False, alignment=alignment_entries(find_architecture("volta").alignment_factors_guess)
    )
    x = form.start()
    x[[name for name, _, _ in form.entries].index("overlap_power")] = np.log(power)

    assert form.section(x, None)["overlap_power"] == pytest.approx(kept)


def gemm_rows(time_s: Callable[[Gemm], float]) -> list[Row]:
    """GEMMs of a stand-in whose times follow a formula."""
    sizes = [(m, n, k) for m in (64, 200, 384, 640) for n in range(96, 1200, 112) for k in (128, 512)]
    cases = [Case(operation=Gemm(name="x", dtype="fp32", m=m, n=n, k=k)) for m, n, k in sizes]
    return [make_row(case, "cpu", time_s(case.operation)) for case in cases if isinstance(case.operation, Gemm)]


def tiled_time_s(operation: Gemm) -> float:
    """A device of 4 SMs that computes whole tiles of 256 x 128 in whole waves."""
    tiles = math.ceil(int(operation.m) / 256) * math.ceil(int(operation.n) / 128)
    waves = math.ceil(tiles / 4)
    return TRUTH_START_S + waves * 4 * 2 * 256 * 128 * int(operation.k) / TRUTH_FLOPS_PER_S


@pytest.mark.parametrize(
    ("time_s", "form"), [(simple_time_s, "roofline with fitted rates"), (tiled_time_s, "tiles and waves")]
)
def test_the_simplest_form_that_suffices_is_taken(time_s: Callable[[Gemm], float], form: str) -> None:
    """A device without tiles is described by a roofline, one with tiles by tiles; a remark says so."""
    result = fit_rows(gemm_rows(time_s), ["cpu"])
    report = result.content["records"]["gemm"]["provenance"]["sections"]["fp32"]

    assert report["form"] == form
    assert report["forms"][form] <= 1.03 * min(report["forms"].values())
    assert any(f"gemm fp32: {form} is" in remark for remark in result.remarks)


def test_a_cpu_with_gemms_only_prices_traffic_by_them() -> None:
    """Without pointwise rows, traffic is that of the GEMMs, not that of a GPU of the package; the interval is wide."""
    content = fit_rows(gemm_rows(simple_time_s), ["cpu"]).content
    gemm, pointwise = (content["records"][kind] for kind in ("gemm", "pointwise"))
    residual = pointwise["parameters"]["kinds"]["residual"]

    section = gemm["parameters"]["dtypes"]["fp32"]
    assert residual["bandwidth_fraction"] == pytest.approx(section["bandwidth_fraction"], rel=1e-3)
    assert residual["start_s"] == pytest.approx(section["start_s"], rel=1e-3)
    assert pointwise["interval"]["high"][0] / pointwise["interval"]["low"][0] > 10.0


def test_a_cpu_with_gemms_only_prices_attention_by_them(tmp_path: Path) -> None:
    """Without rows of attention, its two GEMMs and the softmax count at measured rates."""
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(fit_rows(gemm_rows(simple_time_s), ["cpu"]).content), encoding="utf-8")
    device = calibrated_device("cpu", path)
    call = Attention(
        name="a", dtype="fp32", batch_size=2, num_heads=8, num_kv_heads=8, head_dim=64, v_head_dim=64, query_len=256,
        kv_len=256, causal=False,
    )  # fmt: skip
    gemms = [
        Gemm(name="s", dtype="fp32", batch=16, m=256, n=256, k=64),
        Gemm(name="v", dtype="fp32", batch=16, m=256, n=64, k=256, layout="NN"),
    ]
    (price,) = price_operations([call], device)
    at_least_s = sum(float(one.time_s) for one in price_operations(gemms, device))

    assert at_least_s < float(price.time_s) < 6.0 * at_least_s
    assert price.calibration.record_id.startswith("own/gemm/cpu")
    (backward,) = price_operations([call.changed(is_backward=True)], device)
    work = call.changed(is_backward=True).executed_flops / call.executed_flops
    assert float(backward.time_s) > 1.2 * work * float(price.time_s)
    (decode,) = price_operations([call.changed(query_len=1, kv_len=4096, num_kv_heads=2)], device)
    assert float(decode.time_s) >= float(decode.roofline_s)
