"""Figures show measured and predicted values at the right positions, and state what is missing."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import shapewright
from shapewright.app.cli.main import main
from shapewright.app.figures.chart import Band, HeatMap, Line, Points, XYChart
from shapewright.app.figures.devices import throughput_chart
from shapewright.app.figures.echarts import chart_option
from shapewright.app.figures.field_sweep import field_sweep_chart, pair_with_current
from shapewright.app.figures.heat_maps import measured_layer_map
from shapewright.app.figures.measured import Sample, samples_from_rows
from shapewright.app.figures.operation_sweep import find_operation_sweeps, operation_sweep_chart
from shapewright.app.figures.registry import FIGURE_NAMES, FigureRequest, draw_figure
from shapewright.app.figures.step import describe_ceilings, step_roofline_chart
from shapewright.app.figures.sweep_values import sweep_field
from shapewright.app.report.measured import print_rows
from shapewright.app.report.outputs.compare import compare_output
from shapewright.app.report.outputs.measure import BenchRow
from shapewright.core.errors import MeasuredFileError
from shapewright.hardware.loader import load_device
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import Case, Row, Run, row_facts
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.build import build_scenario
from shapewright.prediction.model_runs import layer_run
from shapewright.pricing.operations import price_operations
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

A100 = load_device("a100-sxm-40gb")
RUN = Run(
    run_id="r", started_utc="", command="", suite="s", device=A100.name, device_facts={}, driver="", runtime="",
    torch_version="", library="l", shapewright_version="",
)  # fmt: skip


def make_row(case: Case, median_s: float | None, **fields: object) -> Row:
    """A row of the A100."""
    facts = {**row_facts(case, RUN), "status": "ok", "median_s": median_s, **fields}
    return Row(**facts, measured_utc="")


def request(samples: tuple[Sample, ...] = (), rows: tuple[Row, ...] = ()) -> FigureRequest:
    """A request for GPT-2 on the A100."""
    question = build_scenario("gpt2", A100, workload={"dtype": "fp16", "seq_len": 512})
    return FigureRequest(
        device=A100, dtype="fp16", config=question.config, workload=question.workload,
        operations=lower(question.config, question.workload, ParallelLayout()), samples=samples, rows=rows,
    )  # fmt: skip


def widths(*sizes: int, measured_s: float | None = None, **dims: int) -> list[Sample]:
    """GEMMs that differ in n."""
    fixed = {"m": 2304, "k": 4096, **dims}
    return [Sample(Gemm(name="x", dtype="fp16", n=n, **fixed), measured_s, name="x") for n in sizes]


def test_samples_fall_into_sweeps() -> None:
    """GEMMs that differ in one dimension form a sweep along it; too few, or of another name, do not."""
    named = [Sample(Gemm(name="y", dtype="fp16", m=8, n=8, k=k), name="y") for k in (8, 16, 24, 32)]
    found = find_operation_sweeps([*widths(512, 128, 384, 256, 640), *widths(128, 256, 384, m=64), *named])

    assert [(sweep.name, sweep.dimension, len(sweep.samples)) for sweep in found] == [("x", "n", 5), ("y", "k", 4)]
    assert [int(sample.operation.n) for sample in found[0].samples] == [128, 256, 384, 512, 640]
    assert found[0].fixed["m"] == 2304


def test_attention_and_pointwise_are_swept_too() -> None:
    """Head widths at one hidden size, lengths, and bytes of a kind are dimensions."""
    attention = [
        Sample(
            Attention(
                name="a", dtype="fp16", batch_size=4, query_len=2048, kv_len=2048, num_heads=4096 // d,
                num_kv_heads=4096 // d, head_dim=d, v_head_dim=d,
            )
        )
        for d in (32, 64, 128, 256)
    ]  # fmt: skip
    moved = [
        Sample(Pointwise(name="p", dtype="fp16", operation="norm", read_bytes=2.0**s, written_bytes=2.0**s))
        for s in (16, 18, 20, 22)
    ]
    found = {sweep.kind: sweep for sweep in find_operation_sweeps([*attention, *moved])}

    assert (found["attention"].dimension, found["pointwise"].dimension) == ("head_dim", "num_bytes")
    chart = operation_sweep_chart(found["pointwise"], A100)
    assert (chart.y_label, chart.x_log) == ("GB/s", True)
    assert operation_sweep_chart(found["attention"], A100).y_label == "TFLOP/s"


def test_points_are_measured_and_lines_predicted() -> None:
    """Each point is the FLOPs over its median, the line FLOPs over the price, inside its band and under the roof."""
    samples = widths(1024, 1536, 1600, 2048, measured_s=1e-4)
    (sweep,) = find_operation_sweeps(samples)
    chart = operation_sweep_chart(sweep, A100)
    band, line, roof, *points = chart.series
    assert isinstance(band, Band)
    assert isinstance(line, Line)
    assert isinstance(roof, Line)
    prices = price_operations([sample.operation for sample in samples], A100)

    sizes = (1024, 1536, 1600, 2048)
    flops = [2.0 * 2304 * n * 4096 / 1e12 for n in sizes]
    measured = [(x, y) for part in points if isinstance(part, Points) for x, y in zip(part.x, part.y, strict=True)]
    assert sorted(measured) == [
        (n, pytest.approx(f / 1e-4)) for n, f in zip((1024, 1536, 1600, 2048), flops, strict=True)
    ]
    assert line.y == pytest.approx([f / float(price.time_s) for f, price in zip(flops, prices, strict=True)])
    for low, value, high, most in zip(band.low, line.y, band.high, roof.y, strict=True):
        assert value is not None
        assert most is not None
        assert low < value < high <= most * (1 + 1e-9)


def test_wave_ends_are_marked_where_the_rate_falls() -> None:
    """The paper's falls after 1536, 3072 and 4608 are marks."""
    (sweep,) = find_operation_sweeps(widths(*range(512, 6145, 64)))
    marks = {mark.value: mark.text for mark in operation_sweep_chart(sweep, A100).marks}

    assert {1536.0, 3072.0, 4608.0} <= set(marks)
    assert "1 wave of" in marks[1536.0]


def test_alignment_classes_are_distinguished() -> None:
    """Points of different alignment are series of their own, the widest first."""
    sizes = [4096, 4097, 4098, 4100, 4104]
    (sweep,) = find_operation_sweeps([Sample(Gemm(name="x", dtype="fp16", m=8192, n=4096, k=k), 1e-3) for k in sizes])
    names = [part.name for part in operation_sweep_chart(sweep, A100).series if isinstance(part, Points)]

    assert names == ["measured, 128 B aligned", "measured, 16 B aligned", "measured, 8 B aligned",
                     "measured, 4 B aligned", "measured, 2 B aligned"]  # fmt: skip


def test_collectors_overhead_moves_the_curve_alone() -> None:
    """A factor and a fixed cost of the collector change predictions, not points."""
    (sweep,) = find_operation_sweeps(widths(1024, 2048, 3072, 4096, measured_s=1e-3))
    plain = operation_sweep_chart(sweep, A100)
    moved = operation_sweep_chart(sweep, A100, measured_scale=2.0, measured_extra_s=1e-4)

    for before, after in zip(plain.series, moved.series, strict=True):
        if isinstance(before, Points):
            assert before == after
        if isinstance(before, Line) and isinstance(after, Line) and before.name == "predicted":
            assert all(2.0 * (b or 0.0) < (a or 0.0) for a, b in zip(before.y, after.y, strict=True))


@pytest.mark.parametrize("name", [name for name in FIGURE_NAMES if name != "scatter"])
def test_figures_need_no_store(name: str) -> None:
    """Every figure but the scatter shows predictions alone, with a sentence of what there is to see."""
    for chart in draw_figure(name, request()):
        assert chart.alt
        assert A100.title in chart.title
        if isinstance(chart, XYChart):
            assert all(len(part.x) > 1 for part in chart.series if isinstance(part, Line))


def test_vocabulary_shows_the_saw_tooth() -> None:
    """50304 is several times as fast as 50257."""
    (chart,) = draw_figure("vocabulary", request())
    assert isinstance(chart, XYChart)
    line = next(part for part in chart.series if isinstance(part, Line) and part.name == "predicted")
    rate = dict(zip(line.x, line.y, strict=True))

    assert (rate[50304] or 0.0) > 2.0 * (rate[50257] or 1e9)


def test_heads_are_read_from_gemms() -> None:
    """A batch of 4 x 32 GEMMs of width 64 is read as a = 32, h = 2048, with measured and predicted rate."""
    operation = Gemm(name="s", dtype="fp16", m=2048, n=2048, k=64, batch=128)
    (chart,) = draw_figure("heads", request((Sample(operation, 1e-3), Sample(Gemm(name="x", m=8, n=8, k=8), 1.0))))
    assert isinstance(chart, XYChart)
    line, points = chart.series

    assert (line.name, points.name) == ("a=32 predicted", "a=32 measured")
    assert isinstance(points, Points)
    assert (points.x, points.y) == ([2048.0], [pytest.approx(float(operation.flops) / 1e-3 / 1e12)])


def test_scatter_shows_the_mean_error() -> None:
    """Times twice the predicted ones are 50 % off, and nothing measured is an error."""
    samples = widths(1024, 2048, 4096)
    prices = price_operations([sample.operation for sample in samples], A100)
    doubled = tuple(Sample(s.operation, 2.0 * float(p.time_s)) for s, p in zip(samples, prices, strict=True))
    (chart,) = draw_figure("scatter", request(doubled))
    assert isinstance(chart, XYChart)

    assert chart.series[0].name == "gemm, fp16: 50 % mean error over 3"
    layer = layer_run(TransformerConfig(hidden_size=1024, num_layers=1, num_heads=8, vocab_size=9), Workload())
    (with_layer,) = draw_figure("scatter", request(doubled, (make_row(Case(operation=layer), 1e-3),)))
    assert isinstance(with_layer, XYChart)
    assert with_layer.series[1].name.startswith("layer, bf16: ")
    with pytest.raises(MeasuredFileError, match="nothing to draw for scatter"):
        draw_figure("scatter", request())


def test_measured_layers_have_a_map() -> None:
    """Layers forward and backward fill the cells of their (a, h), the fastest counts; forward alone does not."""
    config = TransformerConfig(hidden_size=1024, num_layers=2, num_heads=16, vocab_size=1000)
    workload = Workload(dtype="fp16", seq_len=512)
    layer = layer_run(config, workload)
    rows = [
        make_row(Case(operation=layer), 2e-3),
        make_row(Case(operation=layer, variant="compiled"), 1e-3),
        make_row(Case(operation=layer_run(config, workload, passes="forward")), 1e-6),
    ]
    chart = measured_layer_map(rows, A100)
    assert isinstance(chart, HeatMap)

    assert (chart.x_values, chart.y_values) == (["1024"], ["16"])
    assert chart.values == [[pytest.approx(layer.flops / 1e-3 / 1e12)]]
    assert measured_layer_map(rows[2:], A100) is None


def test_samples_are_good_rows_of_one_device() -> None:
    """Failed rows, repetitions, layers and other devices are no samples."""
    gemm = Case(operation=Gemm(name="x", m=8, n=8, k=8))
    layer = layer_run(TransformerConfig(hidden_size=64, num_layers=1, num_heads=4, vocab_size=9), Workload())
    rows = [
        make_row(gemm, 1.0),
        make_row(gemm, None, status="failed"),
        make_row(gemm, 1.0, repetition=1),
        make_row(Case(operation=layer), 1.0),
    ]

    assert [sample.measured_s for sample in samples_from_rows(rows, device=A100.name)] == [1.0]
    assert samples_from_rows(rows, device="l40s") == []


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of one sweep."""
    with Store(tmp_path / "s.db") as opened:
        cases = [Case(operation=Gemm(name="x", dtype="fp16", m=256, n=n, k=256)) for n in range(256, 1281, 128)]
        opened.add_all([RUN], [make_row(case, 1e-5, suite="tiles") for case in cases])
    return tmp_path / "s.db"


def plot(*arguments: str) -> int:
    """Run the command; give the exit code."""
    with pytest.raises(SystemExit) as stop:
        main(["plot", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_pages_are_complete_in_themselves(store: Path, tmp_path: Path) -> None:
    """The store's one device needs no name, and the page has the chart's title and fetches nothing."""
    assert plot("tiles", "--store", str(store), "-o", str(tmp_path / "x.html")) == 0
    page = (tmp_path / "x.html").read_text(encoding="utf-8")

    assert "GEMM 256 x n x 256, fp16 NT" in page
    assert "9 measured points" in page
    assert "src=" not in page.partition("<script")[0]


def test_pictures_are_numbered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several charts of one figure become several files."""
    pytest.importorskip("matplotlib", reason="drawing needs the plot extra")
    code = plot("alignment", "--device", "a100-sxm-40gb", "--dtype", "fp16", "-o", str(tmp_path / "a.svg"))

    assert (code, capsys.readouterr().out.count("wrote")) == (0, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1.svg", "a-2.svg", "a-3.svg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tils", "--device", "l40s", "-o", "x.html"], "did you mean 'tiles'"),
        (["waves", "--device", "l40s", "-o", "x.pdf"], "must end in one of"),
        (["waves", "-o", "x.html"], "give a device"),
        (["scatter", "--device", "l40s", "-o", "x.html"], "give them with --store"),
        (["waves", "--device", "l40s", "--dtype", "fp4", "-o", "x.html"], "no fp4 rate"),
        (["waves", "--device", "l40s", "--store", "none.db", "-o", "x.html"], "no store at"),
        (["heads", "--store", "STORE", "-o", "x.html"], "nothing to draw for heads"),
        (["paper", "--store", "STORE", "-o", "x.html"], "nothing to draw for suite paper"),
        (["tiles", "--store", "STORE", "-o", "none/x.html"], "cannot write"),
    ],
)
def test_invalid_input_writes_no_figure(
    arguments: list[str], words: str, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2, no file."""
    monkeypatch.chdir(store.parent)
    code = plot(*(str(store) if word == "STORE" else word for word in arguments))
    message = capsys.readouterr().err

    assert (code, message.count("\n")) == (2, 1)
    assert words in message
    assert {path.name for path in store.parent.iterdir()} <= {"s.db", "s.db-wal", "s.db-shm"}


def test_a_short_span_has_a_linear_axis() -> None:
    """A logarithmic axis below a factor of ten would have one tick or two; bands and gaps count as values."""

    def chart(*parts: Line | Points | Band) -> XYChart:
        return XYChart(title="t", x_label="x", y_label="y", series=parts, alt="a", y_log=True)

    assert not chart(Line("a", [1, 2], [3.0, 29.0])).has_log_y
    assert chart(Line("a", [1, 2], [3.0, 30.0])).has_log_y
    assert chart(Line("a", [1, 2], [3.0, None]), Points("b", [1], [30.0])).has_log_y
    assert chart(Band("a", [1], [2.0], [20.0])).has_log_y
    assert not replace(chart(Line("a", [1, 2], [1.0, 100.0])), y_log=False).has_log_y
    assert chart_option(chart(Line("a", [1, 2], [3.0, 29.0])))["yAxis"]["type"] == "value"


def test_roofline_counts_the_work_of_a_mask() -> None:
    """Causal attention is drawn at the rate that the table of operations prints, which is half of the whole square."""
    prediction = build_scenario("llama-3-8b", device="h100-sxm-80gb").predict()
    (fused,) = (one for one in prediction.operations if one.operation.name == "attention.fused")
    assert isinstance(fused.operation, Attention)
    drawn = {
        name: rate
        for series in step_roofline_chart(prediction).series
        if isinstance(series, Points) and series.labels
        for name, rate in zip(series.labels, series.y, strict=True)
    }

    rates = [rate for name, rate in drawn.items() if name.startswith("attention.fused (forward)")]
    assert rates == pytest.approx([float(fused.operation.executed_flops) / float(fused.price.time_s) / 1e12])
    assert rates[0] < 0.6 * prediction.device.peak_flops_per_s("bf16") / 1e12


def test_roofline_has_a_ceiling_for_each_format() -> None:
    """A step in fp8 has attention and logits in bf16: half the rate of the H100, which has 1,979 and 989.5 TFLOP/s."""
    prediction = shapewright.predict("llama-3-8b", device="h100-sxm-80gb", workload={"dtype": "fp8"})
    chart = step_roofline_chart(prediction)
    lines = [series for series in chart.series if isinstance(series, Line)]
    points = {series.name: series for series in chart.series if isinstance(series, Points)}

    assert {line.name: line.y[-1] for line in lines} == {
        "fp8 peak and memory": pytest.approx(1979, rel=1e-3),
        "bf16 peak and memory": pytest.approx(989.5, rel=1e-3),
    }
    assert set(points) == {"gemm, fp8", "gemm, bf16", "attention, bf16"}
    assert all(label.startswith("logits") for label in points["gemm, bf16"].labels)
    assert set(describe_ceilings(prediction)) == {line.name for line in lines}


def test_roofline_is_bandwidth_below_the_ridge() -> None:
    """Between two points of the line, too, where a short span has a linear axis: 3,350 GB/s times the intensity."""
    chart = step_roofline_chart(shapewright.predict("llama-3-8b", device="h100-sxm-80gb"))
    (line,) = (series for series in chart.series if isinstance(series, Line))
    ridge = 989.5e12 / 3.35e12
    middle = math.sqrt(line.x[0] * ridge)

    assert not chart.has_log_y
    drawn = np.interp(np.log(middle), np.log(line.x), np.array(line.y, dtype=float))
    assert drawn == pytest.approx(3.35 * middle, rel=0.03)


def test_numbers_of_four_digits_have_no_exponent() -> None:
    """A GEMM of 2560 x 10240 x 8192 in 16 bits does 1638.4 FLOPs per byte; one of 8192^3 has 10,995 GFLOP."""
    chart = step_roofline_chart(shapewright.predict("gpt3-2.7b", device="a100-sxm-80gb"))
    labels = [label for series in chart.series if isinstance(series, Points) for label in series.labels]
    (down,) = (label for label in labels if label.startswith("mlp.down.wgrad "))
    row = make_row(Case(operation=Gemm(name="x", dtype="fp16", m=8192, n=8192, k=8192)), 1e-4)
    text = io.StringIO()
    print_rows([BenchRow(row=row, predicted_s=None, predicted_figures={})], Console(file=text, width=300))

    assert ", 1,638 FLOPs per byte, " in down
    assert text.getvalue().split()[-2:] == ["10,995", "4,027"]
    assert not any("e+" in words for words in (*labels, text.getvalue()))


def test_colors_of_cliffs_have_one_meaning_each() -> None:
    """No alignment class has the colour of the shape or of the local maxima."""
    scenario = build_scenario("llama-3-8b", device="h100-sxm-80gb")
    sweep = sweep_field(scenario, "hidden_size")
    chart = field_sweep_chart(sweep, "step", pair_with_current(sweep))
    colors = [series.color for series in chart.series if not isinstance(series, Band)]

    assert {"this shape", "local maxima"} <= {series.name for series in chart.series}
    assert len(colors) == len(set(colors))


def test_bars_of_devices_have_their_values() -> None:
    """A bar says its tokens per second, in the series of devices that the job fits on or of the others."""
    output = compare_output(shapewright.compare("gpt3-2.7b", devices=["a100-sxm-80gb", "l40s"]))
    chart = throughput_chart(output)

    assert [part.texts for part in chart.parts] == [
        [f"{output.devices[0].tokens_per_s:,.0f}", ""],
        ["", f"{output.devices[1].tokens_per_s:,.0f}"],
    ]
    assert not chart.texts_inside
