"""Prediction, check and reports of a trace, without PyTorch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import shapewright
from command_line import run
from shapewright.app.cli.console import make_console
from shapewright.app.cli.trace_options import TracedJob
from shapewright.app.report.traced.outputs import (
    traced_check_output,
    traced_memory_output,
    traced_mfu_output,
    traced_predict_output,
)
from shapewright.app.report.traced.report import (
    describe_trace,
    memory_page_of_trace,
    print_traced_mfu,
    review_page_of_trace,
)
from shapewright.core.errors import WorkloadError
from shapewright.core.units import format_seconds
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.torch_trace.inputs import count_tokens, describe_inputs, parse_inputs
from shapewright.lowering.torch_trace.trace import Trace, TracedModule, merge_paths
from shapewright.prediction.traced import explain_traced_step
from shapewright.pricing.operations import price_operations
from small_traces import small_trace

H100 = load_device("h100-sxm-80gb")
FLOPS = 3 * 2 * 2 * 2.0 * 8192 * 4096 * 1024  # passes x layers x GEMMs of a layer x 2 m n k


def test_a_step_is_the_sum_of_its_operations_and_of_the_optimizer() -> None:
    """Time, FLOPs and memory add up; AdamW moves 16 bytes in and 14 out per bf16 weight, and keeps 16 bytes."""
    prediction = shapewright.predict(small_trace(), device=H100)
    weights = 4 * 4096 * 1024
    optimizer = prediction.operations[-1].operation

    assert 0.0 < prediction.step_time_low_s < prediction.step_time_s < prediction.step_time_high_s
    assert prediction.model_flops == FLOPS == prediction.hardware_flops
    assert prediction.step_time_s == pytest.approx(sum(one.total_time_s for one in prediction.operations))
    assert (optimizer.name, optimizer.num_bytes) == ("optimizer", 30.0 * weights)
    assert prediction.optimizer_bytes == 16.0 * weights  # master, two moments, fp32 gradient buffer
    assert prediction.total_bytes == pytest.approx(prediction.memory.peak_bytes + 16.0 * weights + 0.9e9)
    assert prediction.mfu == pytest.approx(FLOPS / prediction.step_time_s / H100.peak_flops_per_s("bf16"))


def test_unknown_operators_widen_the_interval() -> None:
    """The upper end covers a tenth of the bandwidth; the same bytes as a norm are narrow."""
    unknown, *_ = (
        one for one in shapewright.predict(small_trace(), device=H100).operations if "scan" in one.operation.name
    )
    norm = small_trace()
    known = replace(
        norm, operations=tuple(one.changed(operation="other") if "scan" in one.name else one for one in norm.operations)
    )
    other, *_ = (one for one in shapewright.predict(known, device=H100).operations if "scan" in one.operation.name)

    assert unknown.price.time_s == other.price.time_s
    assert unknown.price.high_s == pytest.approx(10.0 * other.price.high_s)


def test_forward_passes_have_no_optimizer() -> None:
    """Without a backward pass there is nothing to update, and an optimizer is refused."""
    trace = small_trace(is_training=False)

    assert shapewright.predict(trace, device=H100).optimizer_bytes == 0.0
    with pytest.raises(WorkloadError, match="optimizer=adamw has no effect"):
        shapewright.predict(trace, device=H100, workload={"optimizer": "adamw"})


def test_collectives_are_placed_on_nodes() -> None:
    """Eight ranks share a node of eight, sixteen do not."""
    for ranks, together in ((8, 8), (16, 8)):
        one = Collective(
            name="sum", op_name="all_reduce", axis="data", message_bytes=1e6, num_ranks=ranks, ranks_per_node=ranks
        )
        trace = replace(small_trace(), operations=(one,))
        placed = shapewright.predict(trace, device=shapewright.with_nodes(H100, node_size=8)).operations[0].operation
        assert isinstance(placed, Collective)
        assert placed.ranks_per_node == together


def test_misaligned_widths_cost_time_and_aligned_ones_do_not() -> None:
    """Both layers of an odd width are found, with the nearest multiples of 64; the aligned model has no finding."""
    odd = shapewright.check(small_trace(width=4095), device=H100)
    even = shapewright.check(small_trace(width=4096), device=H100)

    assert [finding.field for finding in odd.findings] in (
        ["layers.0-1.up.out_features", "layers.0-1.down.in_features"],
        ["layers.0-1.down.in_features", "layers.0-1.up.out_features"],
    )
    assert odd.findings[0].suggestions[0].title.endswith("=4096")
    assert odd.findings[0].severity == "error"
    # One of 4095 columns of one of two matrices of equal size.
    assert odd.findings[0].suggestions[0].parameters_change_fraction == pytest.approx(1 / (2 * 4095))
    assert even.findings == ()


def test_odd_heads_and_full_memory_are_found() -> None:
    """Head dimensions of 100 are padded by fused attention; a step that does not fit is an error without a cost."""
    attention = Attention(
        name="layers.0-1.attn.scaled_dot_product_attention", batch_size=64, query_len=2048, kv_len=2048, num_heads=16,
        num_kv_heads=16, head_dim=100, v_head_dim=100, repeats=2, is_training=True,
    )  # fmt: skip
    trace = small_trace()
    trace = replace(trace, operations=(*trace.operations, attention), memory=replace(trace.memory, peak_bytes=1e12))
    found = {finding.code: finding for finding in shapewright.check(trace, device=H100).findings}

    assert found["TC103"].message.startswith("layers.0-1.attn: head_dim=100 is not aligned")
    # Two layers with heads of 100 take longer than with as many parameters in heads of 104.
    narrow, wide = price_operations([attention, attention.changed(head_dim=104, v_head_dim=104)], H100)
    assert found["TC103"].cost_s == pytest.approx(2 * (narrow.time_s - wide.time_s * 100 / 104))
    assert found["ME101"].severity == "error"
    assert found["ME101"].cost_s is None


def test_odd_heads_that_cost_next_to_nothing_are_no_finding() -> None:
    """As in a check of a config: heads of 100 in one sequence of 16 tokens beside two large layers are no warning."""
    attention = Attention(
        name="layers.0-1.attn.scaled_dot_product_attention", batch_size=1, query_len=16, kv_len=16, num_heads=16,
        num_kv_heads=16, head_dim=100, v_head_dim=100, repeats=2, is_training=True,
    )  # fmt: skip
    trace = small_trace()
    trace = replace(trace, operations=(*trace.operations, attention))
    step_s = shapewright.predict(trace, device=H100).step_time_s
    narrow, wide = price_operations([attention, attention.changed(head_dim=104, v_head_dim=104)], H100)

    assert 0.0 < 2 * (narrow.time_s - wide.time_s * 100 / 104) < 0.002 * step_s
    assert shapewright.check(trace, device=H100).findings == ()


def test_a_measured_step_is_divided() -> None:
    """The parts and what is unexplained add up to the measured time."""
    found = explain_traced_step(shapewright.predict(small_trace(), device=H100), 0.01)
    output = traced_mfu_output(found)

    assert sum(part.time_s for part in output.parts) + output.unexplained_s == pytest.approx(0.01)
    assert output.mfu == pytest.approx(FLOPS / 0.01 / H100.peak_flops_per_s("bf16"))
    with pytest.raises(WorkloadError, match="positive"):
        explain_traced_step(found.prediction, 0.0)


def test_a_step_faster_than_predicted_is_no_rest_of_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """What is unexplained is negative in the headline, as it is in the table."""
    prediction = shapewright.predict(small_trace(), device=H100)
    output = traced_mfu_output(explain_traced_step(prediction, prediction.step_time_s / 2.0))
    print_traced_mfu(output, make_console())

    assert capsys.readouterr().out.count(format_seconds(-prediction.step_time_s / 2.0)) == 2


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [("--seconds=0.05", 0.05), ("--steps-per-s=20", 0.05), ("--tokens-per-s=81920", 0.1),
     ("--tokens-per-s-per-gpu=81920", 0.1)],
)  # fmt: skip
def test_a_measured_step_is_given_as_a_rate(
    measured: str, seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its time, steps per second, or tokens per second of a step of 8192."""
    job = TracedJob(small_trace(), H100, None)
    monkeypatch.setattr("shapewright.app.cli.commands.mfu.pop_traced_job", lambda *_, **__: job)
    code, out, _ = run(["mfu", "mlp.py:build", "--device", "h100-sxm-80gb", measured, "--json"], capsys)
    refused, _, err = run(["mfu", "mlp.py:build", "--device", "h100-sxm-80gb", measured, "--gpus", "2"], capsys)

    assert (code, json.loads(out)["measured_time_s"]) == (0, pytest.approx(seconds))
    assert (refused, "the traced module runs on one device" in err) == (2, True)


@pytest.mark.parametrize("measured", ["--tokens-per-s=655360", "--tokens-per-s-per-gpu=40960"])
def test_a_rate_of_a_job_of_several_ranks_is_that_of_all(
    measured: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 16 ranks in pairs that share the inputs, 8 take 8,192 tokens each: 65,536 in a step of 0.1 s."""
    job = TracedJob(replace(small_trace(), num_ranks=16, num_replicas=8), H100, None)
    monkeypatch.setattr("shapewright.app.cli.commands.mfu.pop_traced_job", lambda *_, **__: job)
    given = ["mfu", "mlp.py:build", "--device", "h100-sxm-80gb", measured]
    code, out, _ = run([*given, "--gpus", "16", "--json"], capsys)
    refused, _, err = run([*given, "--gpus", "8"], capsys)

    assert (code, json.loads(out)["measured_time_s"]) == (0, pytest.approx(0.1))
    assert (refused, "runs on 16 devices" in err) == (2, True)


@pytest.mark.parametrize(("counts_samples", "refused"), [(True, "tokens-per-s"), (False, "images-per-s")])
def test_a_rate_of_what_a_module_does_not_take_is_refused(
    counts_samples: bool, refused: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens of a module of images, and images of a module of tokens."""
    job = TracedJob(replace(small_trace(), counts_samples=counts_samples), H100, None)
    monkeypatch.setattr("shapewright.app.cli.commands.mfu.pop_traced_job", lambda *_, **__: job)
    code, _, err = run(["mfu", "mlp.py:build", "--device", "h100-sxm-80gb", f"--{refused}=9"], capsys)

    assert code == 2
    assert f"--{refused} has no effect on a module whose inputs are" in err


def test_the_memory_of_a_module_holds_that_of_unlike_parts() -> None:
    """Four equal blocks have an MLP of 8 bytes in the first and of 16 in the others, and norms in the first two."""
    rows = [("layers.0-3", 4, 1.0), ("layers.0.mlp", 1, 8.0), ("layers.1-3.mlp", 3, 16.0), ("layers.0-1.norm", 2, 2.0)]
    rows += [("head", 1, 100.0)]
    modules = tuple(
        TracedModule(path=path, type_name="Module", count=count, peak_bytes=num_bytes)
        for path, count, num_bytes in rows
    )
    output = traced_memory_output(shapewright.predict(replace(small_trace(), modules=modules), device=H100))
    totals = {one.path: one.total_bytes for one in output.modules}

    assert totals == {
        "layers.0-3": 4 + 8 + 3 * 16 + 2 * 2, "layers.0.mlp": 8, "layers.1-3.mlp": 48, "layers.0-1.norm": 4,
        "head": 100,
    }  # fmt: skip


def test_pages_hold_modules_and_findings() -> None:
    """The pages of memory and of the review name the modules."""
    output = traced_check_output(shapewright.check(small_trace(width=4095), device=H100))
    text = memory_page_of_trace(output.memory) + review_page_of_trace(output)

    assert "layers.0-1.up" in text
    assert "out_features=4095" in text
    assert output.memory.modules[0].count == 2


def test_a_trace_survives_json() -> None:
    """Text and back gives the same trace."""
    trace = small_trace()

    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_paths_of_equal_layers_are_merged() -> None:
    """Indices become ranges, each position by itself."""
    assert merge_paths(["a.0.b.3", "a.0.b.4", "a.1.b.3", "a.1.b.4"]) == "a.0-1.b.3-4"
    assert merge_paths(["head"]) == "head"


def test_inputs_are_read_and_written() -> None:
    """Names, formats by alias, numbers and truth values; tokens are those of the first integer input."""
    inputs = parse_inputs("images=bf16[8, 3,32,32] , tokens=long[4,128],n=3, flag=true, scale=0.5")

    assert describe_inputs(inputs) == "images=bfloat16[8,3,32,32], tokens=int64[4,128], n=3, flag=True, scale=0.5"
    assert count_tokens(inputs) == (512, False)
    assert count_tokens(parse_inputs("float32[8,3]")) == (8, True)
    assert count_tokens(parse_inputs("float32[8,3,16]")) == (24, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt2", "--inputs", "int64[2]"], "--inputs has no effect without FILE.py:CALLABLE or --trace"),
        (["gpt2", "--fused"], "--fused has no effect"),
        (["model.py:build", "--inputs", "int64[2]", "--tp", "2"], "--tp has no effect on a traced module"),
        (["model.py:build", "--inputs", "int64[2]", "--sweep", "seq_len=1,2"], "--sweep has no effect"),
        (["model.py:build", "--inputs", "int64[2]", "--value", "x"], "not of the form FILE.py:LINE=N"),
        (["model.py:build", "--inputs", "int64[2]"], "no file 'model.py'"),
        (["--trace", "--hidden-size", "64"], "--trace needs CONFIG"),
    ],
)
def test_wrong_calls_are_refused(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options that cannot be combined with a trace are named in one line."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(["predict", *arguments, "--device", "h100-sxm-80gb"], capsys)

    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_width_that_leaves_tiles_empty_takes_neighbors_that_fill_them() -> None:
    """2112 is a multiple of 64, but its GEMMs leave half of the last tile of 128 empty; 2048 and 2176 fill it."""
    (found,) = shapewright.check(small_trace(width=2112), device=H100).findings

    assert found.code == "WQ103"
    assert [suggestion.title for suggestion in found.suggestions] == ["use out_features=2048", "use out_features=2176"]


def test_the_heading_says_whose_step_it_is() -> None:
    """A module that is distributed is that of one rank."""
    for ranks, words in ((1, "; one device"), (8, "; one of 8 ranks")):
        prediction = shapewright.predict(replace(small_trace(), num_ranks=ranks), device=H100)
        assert describe_trace(traced_predict_output(prediction)).endswith(words)
