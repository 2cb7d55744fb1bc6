"""The page for a design review, and results in a notebook."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest

import shapewright
from shapewright.app.cli import main
from shapewright.app.report.outputs.search import search_output
from shapewright.app.report.page import Table, find_browser
from shapewright.app.report.review import gather_review, review_sections
from shapewright.core.notebook import PRINTERS
from shapewright.prediction.build import build_scenario
from small_traces import small_trace

QUESTION = ["gpt3-2.7b", "--device", "a100-sxm-40gb", "--dtype", "fp16", "--attention", "unfused"]


def run(*arguments: str) -> int:
    """Exit code of a command."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0)


def shown_text(page: str) -> str:
    """Text of a page without its scripts, styles and marks."""
    without = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]+>", " ", without))


def test_report_agrees_with_predict_check_and_search(tmp_path: Path) -> None:
    """Step, findings and the best shape are on the page with the digits that the commands print."""
    target = tmp_path / "review.html"
    assert run("report", *QUESTION, "-o", str(target)) == 0
    text = shown_text(target.read_text(encoding="utf-8"))
    workload = {"dtype": "fp16", "attention": "unfused"}
    prediction = shapewright.predict("gpt3-2.7b", device="a100-sxm-40gb", workload=workload)
    assert f"{prediction.tokens_per_s_per_device:,.0f}" in text
    for code in ("ME101", "TC103", "TC101"):
        assert code in text
    found = search_output(shapewright.search("gpt3-2.7b", device="a100-sxm-40gb", workload=workload))
    best = found.candidates[0]
    assert f"{best.speedup:.3f}x" in text
    assert f"shape of this size {found.verdict.text}" in " ".join(text.split())
    assert "fastest shape" not in text
    assert prediction.calibration["gemm"].label in text
    assert "312 TFLOP/s in fp16 above 201 FLOPs per byte, 1,555 GB/s below" in text


def test_report_puts_the_loss_before_the_speed() -> None:
    """The verdict is the search's, which keeps Llama-3-8B: its fastest shape takes longer to the same loss."""
    table = review_sections(gather_review(build_scenario("llama-3-8b", "h100-sxm-80gb")))[0]
    assert isinstance(table, Table)
    rows = dict(table.rows)

    assert rows["shape of this size"].startswith("keep your shape")
    assert "fastest shape of this size" not in rows


def test_report_names_the_records_of_the_step() -> None:
    """Training attention of an H100 is priced by a record of the H200, not by the H100's record of a forward pass."""
    review = gather_review(build_scenario("llama-3-8b", "h100-sxm-80gb"), no_search=True)
    (table,) = [one for one in review_sections(review) if getattr(one, "title", "") == "Calibration records"]
    assert isinstance(table, Table)
    rows = {row[0]: row[1:] for row in table.rows}

    assert rows["attention"][0].startswith("attention_training/h200-sxm-141gb/")
    assert rows["attention"][1] == "borrowed from h200-sxm-141gb"
    assert rows["gemm"][1] == "this device"
    assert "collective" not in rows  # of one device


def test_report_of_a_shape_that_cannot_run_has_the_reason(tmp_path: Path) -> None:
    """A config that contradicts its layout still gets a page, with the reason on top and no invented numbers."""
    target = tmp_path / "review.html"
    assert run("report", "gpt2", "--device", "h100-sxm-80gb", "--tp", "5", "-o", str(target)) == 0
    text = shown_text(target.read_text(encoding="utf-8"))
    assert "Cannot run" in text
    assert "PL101" in text
    assert "tokens/s/device" not in text


def test_report_escapes_a_hostile_name(tmp_path: Path) -> None:
    """Names from a config are escaped in HTML."""
    config = {
        "model_type": "llama",
        "_name_or_path": "<script>alert(1)</script>",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 2816,
        "vocab_size": 32000,
    }
    source, target = tmp_path / "config.json", tmp_path / "review.html"
    source.write_text(json.dumps(config), encoding="utf-8")
    assert run("report", str(source), "--device", "h100-sxm-80gb", "--no-search", "-o", str(target)) == 0
    assert "<script>alert(1)" not in target.read_text(encoding="utf-8")


def test_unwritable_report_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not there is one line and exit code 2."""
    target = tmp_path / "missing" / "review.html"
    assert run("report", *QUESTION, "--no-search", "-o", str(target)) == 2
    assert "cannot write" in capsys.readouterr().err


def test_pdf_without_a_browser_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is written; the missing browser is one line and exit code 2."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    target = tmp_path / "review.html"
    assert run("report", *QUESTION, "--no-search", "-o", str(target), "--pdf", str(tmp_path / "review.pdf")) == 2
    assert "no browser" in capsys.readouterr().err
    assert target.exists()


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium, Chrome or Edge")
def test_pdf_is_printed(tmp_path: Path) -> None:
    """Where a browser is, the page becomes a PDF of several pages with the figures in it."""
    target, pdf = tmp_path / "review.html", tmp_path / "review.pdf"
    assert run("report", *QUESTION, "--no-search", "-o", str(target), "--pdf", str(pdf)) == 0
    assert pdf.read_bytes().startswith(b"%PDF-")
    assert pdf.stat().st_size > 50_000


def test_results_show_themselves_as_the_command_prints_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook a result is what the command line prints, escaped and ready to embed."""
    monkeypatch.setenv("COLUMNS", "120")
    device = "a100-sxm-40gb"
    results = [
        shapewright.predict("gpt2", device=device),
        shapewright.check("gpt2", device=device),
        shapewright.fits("gpt2", device=device),
        shapewright.compare("gpt2", devices=[device, "h100-sxm-80gb"]),
        shapewright.mfu("gpt2", device=device, seconds=1.0, num_devices=1, global_batch_size=8),
        shapewright.search("gpt2", device=device, vary=["vocab"]),
        shapewright.plan("gpt2", device=device, num_devices=8, global_batch_size=64),
        shapewright.design("gpt2", device=device, num_devices=8, num_parameters=150_000_000, train_tokens=10**10),
        shapewright.serve_plan("gpt2", device=device, prompt_len=512, output_len=128),
        shapewright.serve_traffic(
            "gpt2", device=device, arrivals="2/s", prompt_len=64, output_len=16, num_requests=200
        ),
        shapewright.sweep("gpt2", device=device, axes={"micro_batch_size": [1, 2]}),
        shapewright.serve_traffic("gpt2", device=device, arrivals="2/s", prompt_len=64, output_len=8, num_requests=20),
        small_trace(),
        shapewright.predict(small_trace(), device=device),
        shapewright.check(small_trace(), device=device),
    ]
    assert {type(result).__name__ for result in results} == set(PRINTERS)
    for result in results:
        assert result._repr_html_().startswith("<pre")
    run("predict", "gpt2", "--device", device)
    printed = capsys.readouterr().out.partition("next: ")[0]  # the next command is for a shell
    shown = shown_text(results[0]._repr_html_())
    assert shown.split() == printed.partition("next: ")[0].split()
