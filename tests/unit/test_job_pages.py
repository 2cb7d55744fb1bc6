"""Pictures of a job: pages of memory, utilization and devices; what is reachable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shapewright
from command_line import run
from shapewright.app.figures.devices import comparison_chart, worth_charts
from shapewright.app.figures.step import memory_chart, waterfall_chart
from shapewright.app.report.outputs.compare import compare_output
from shapewright.app.report.outputs.memory import memory_output
from shapewright.app.report.outputs.mfu import mfu_output
from shapewright.core.units import GIB
from shapewright.prediction.utilization.explain import Utilization
from shapewright.prediction.utilization.rates import LOSSES, MITIGATIONS

JOBS = {
    "memory": ["memory", "llama-3-8b", "--device", "h100-sxm-80gb", "--tp", "2", "--pp", "2"],
    "mfu": [
        "mfu",
        "llama-3-8b",
        "--device",
        "h100-sxm-80gb",
        "--seconds",
        "3.6",
        "--gpus",
        "8",
        "--global-batch",
        "128",
    ],
    "compare": ["compare", "llama-3-8b", "--devices", "a100-sxm-80gb,h100-sxm-80gb,v100-sxm2-32gb"],
}
JOBS["mfu"] += ["--global-batch", "128"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory", ("Memory of one device", "stage 1", "optimizer", "largest micro_batch_size")),
        ("mfu", ("From the dense peak to this step", "What is reachable", "without", "megatron-causal")),
        ("compare", ("The same job on each device", "a100-sxm-80gb", "tokens/s")),
    ],
)
def test_pages_are_complete(
    name: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One self-contained file with picture, tables and notes; what is printed stays as it is."""
    page = tmp_path / "page.html"
    _, plain, _ = run(JOBS[name], capsys)
    code, printed, err = run([*JOBS[name], "--html", str(page)], capsys)
    written = page.read_text(encoding="utf-8")

    assert (code, printed, err) == (0, plain, f"wrote {page}\n")
    assert "echarts" in written
    for word in words:
        assert word in written


def test_figure_of_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare -o draws an SVG that names the devices; another ending and a folder that is not there are refused."""
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    target = tmp_path / "devices.svg"
    code, _, err = run([*JOBS["compare"], "-o", str(target)], capsys)
    assert (code, err) == (0, f"wrote {target}\n")
    assert "h100-sxm-80gb" in target.read_text(encoding="utf-8")
    for output, words in (("devices.txt", "does not end in .png"), ("/nowhere/at/all.svg", "cannot write")):
        code, out, err = run([*JOBS["compare"], "-o", output], capsys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_bars_are_the_numbers() -> None:
    """Stacked bars add up: memory to each stage's total, devices to each step, the waterfall to the measured step."""
    capacity = shapewright.fits("llama-3-8b", device="h100-sxm-80gb", layout={"pipeline_parallel": 2})
    chart = memory_chart(memory_output(capacity))
    for index, stage in enumerate(capacity.stages):
        assert sum(part.values[index] for part in chart.parts) == pytest.approx(stage.total_bytes / GIB)
    of_one = memory_chart(memory_output(shapewright.fits("llama-3-8b", device="h100-sxm-80gb")))
    for part, of_stages in zip(of_one.parts, chart.parts, strict=True):
        assert part.texts
        assert part.name == f"{of_stages.name} {part.texts[0]}"

    found = shapewright.compare("llama-3-8b", devices=["a100-sxm-80gb", "h100-sxm-80gb"])
    drawn = comparison_chart(compare_output(found))
    for index, row in enumerate(found.rows):
        assert row.prediction is not None
        assert sum(part.values[index] for part in drawn.parts) == pytest.approx(row.prediction.step_time_s * 1e3)

    waterfall = waterfall_chart(mfu_output(measured()))
    assert sum(part.values[-1] for part in waterfall.parts) == pytest.approx(3.6e3, rel=0.01)


def measured() -> Utilization:
    """Llama-3-8B on eight H100s, slower than predicted."""
    return shapewright.mfu("llama-3-8b", device="h100-sxm-80gb", seconds=3.6, num_devices=8, global_batch_size=128)


def test_reachable_without_each_loss() -> None:
    """The predicted step first; each other row is that step less one part of the waterfall, with the MFU of that."""
    found = measured()
    parts = {part.name: part.time_s for part in found.waterfall}
    first, *others = found.reachable
    assert found.prediction is not None

    assert set(MITIGATIONS) == set(LOSSES)
    assert (first.without, first.step_time_s) == ("unexplained", found.prediction.step_time_s)
    assert [one.step_time_s for one in others] == sorted(one.step_time_s for one in others)
    for one in others:
        assert one.step_time_s == pytest.approx(found.prediction.step_time_s - parts[one.without])
        assert one.mfu * one.step_time_s == pytest.approx(found.result.mfu * found.seconds)
        assert one.mfu >= first.mfu


def test_json_of_reachable_and_offload(capsys: pytest.CaptureFixture[str]) -> None:
    """Both are in the JSON, with units in their keys."""
    _, out, _ = run([*JOBS["mfu"], "--json"], capsys)
    without = json.loads(out)["reachable"]["without"]
    assert without[0]["without"] == "unexplained"
    assert set(without[0]) == {"without", "step_time_s", "mfu", "way_out"}
    _, out, _ = run([*JOBS["memory"], "--json"], capsys)
    offload = json.loads(out)["offload"]
    assert offload["moved_bytes"] > 0
    assert offload["fits"] in (True, False)


def test_comparison_shows_job_cost_and_energy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page names model and batch, and draws tokens per dollar and per joule of devices whose price is known."""
    page = tmp_path / "page.html"
    command = ["compare", "llama-3-8b", "--devices", "a100-sxm-80gb,h100-sxm-80gb,tpu-v5p", "--micro-batch-size", "1"]
    command += ["--dp", "16", "--zero-stage", "3", "--usd-per-hour", "a100-sxm-80gb=1.2,h100-sxm-80gb=2.4"]
    code, _, _ = run([*command, "--html", str(page)], capsys)
    written = page.read_text(encoding="utf-8")

    assert code == 0
    assert "llama-3-8b (8.03 B parameters): train, b=1 B=" in written
    assert "Tokens for a dollar" in written
    assert "Tokens for a joule, at board power" in written
    found = shapewright.compare("llama-3-8b", devices=["a100-sxm-80gb", "h100-sxm-80gb"])
    assert [chart.title for chart in worth_charts(compare_output(found))] == ["Tokens for a joule, at board power"]


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "mi300x", "tpu-v5p", "trainium2", "gaudi3", "b200-sxm-180gb"])
def test_six_vendors_run_a_job_of_several_nodes(device: str) -> None:
    """Files of the usual training platforms give the network between their nodes."""
    layout = {"tensor_parallel": 8, "data_parallel": 4, "zero_stage": 1}
    found = shapewright.compare("llama-3-8b", devices=[device], layout=layout)
    assert [row.refusal for row in found.rows] == [None]
    assert found.rows[0].bound_by
