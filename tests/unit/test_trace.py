"""mfu --trace: traces of torch.profiler against predictions, and files that are none."""

from __future__ import annotations

import gzip
import importlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.core.errors import MeasuredFileError
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.utilization import kineto
from shapewright.prediction.utilization.kineto import read_trace
from shapewright.prediction.utilization.trace_losses import TraceComparison, compare_trace
from shapewright.prediction.utilization.trace_match import kernel_keys

LAYERS, WIDTH, INNER, HEADS, VOCAB, BATCH, TOKENS = 2, 64, 256, 4, 512, 2, 32
MODEL = TransformerConfig(
    hidden_size=WIDTH, num_layers=LAYERS, num_heads=HEADS, intermediate_size=INNER, vocab_size=VOCAB,
    max_position_embeddings=64, fused_qkv=True, position_embedding="learned", tied_embeddings=False,
)  # fmt: skip


def event(category: str, name: str, start_us: float, duration_us: float, **args: Any) -> dict[str, Any]:
    """A complete event as Kineto writes it."""
    return {
        "ph": "X", "cat": category, "name": name, "ts": start_us, "dur": duration_us, "pid": 0, "tid": 1, "args": args,
    }  # fmt: skip


def gpu_events() -> list[dict[str, Any]]:
    """One step of 1,000 us: a GEMM in fp32, a gap, an all-reduce half hidden by a GEMM, and attention."""
    dims = [[BATCH * TOKENS, WIDTH], [WIDTH, INNER]]
    up = {"Input Dims": dims, "Input type": ["float", "float"]}
    return [
        event("user_annotation", "ProfilerStep#3", 0, 1000),
        event("cpu_op", "aten::embedding", 0, 5, **{"External id": 1, "Input Dims": [[VOCAB, WIDTH], [BATCH, TOKENS]]}),
        event("cpu_op", "aten::mm", 10, 20, **{"External id": 2}, **up),
        event("cpu_op", "aten::mm", 40, 20, **{"External id": 3}, **up),
        event("cpu_op", "aten::_flash_attention_forward", 70, 20, **{"External id": 4}),
        event("kernel", "sgemm_128x64", 100, 200, **{"External id": 2, "device": 0}),
        event("kernel", "sgemm_128x64", 500, 100, **{"External id": 3, "device": 0}),
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16", 550, 150, device=0),
        event("kernel", "flash_fwd_kernel", 700, 300, **{"External id": 4, "device": 0}),
        event("kernel", "other_device", 0, 9000, device=1),
    ]


def write(path: Path, events: list[dict[str, Any]], **header: Any) -> Path:
    """Write a trace."""
    path.write_text(json.dumps({"schemaVersion": 1, **header, "traceEvents": events}), encoding="utf-8")
    return path


def compare(path: Path, **workload: Any) -> TraceComparison:
    """Compare a trace of the small model with its prediction on an H100."""
    found = shapewright.mfu(MODEL, device="h100-sxm-80gb", trace=path, workload=workload).comparison
    assert found is not None
    return found


def test_losses_of_a_step_are_told_apart(tmp_path: Path) -> None:
    """Of 1,000 us the device idles for 300 and communicates alone for 100."""
    header = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "distributedInfo": {"world_size": 2}}
    path = write(tmp_path / "trace.json", gpu_events(), **header)
    trace = read_trace(path)
    assert (trace.num_steps, trace.batch, trace.world_size, trace.device_name) == (1, (2, 32), 2, "NVIDIA H100")
    assert trace.span_s == pytest.approx(1e-3)

    found = compare(path)
    losses = {loss.name: loss for loss in found.losses}
    # Busy: 100 to 300, 500 to 1,000; alone in communication: 600 to 700.
    assert losses["host_gaps"].time_s == pytest.approx(300e-6)
    assert losses["exposed_communication"].time_s == pytest.approx(100e-6)
    gemm = next(group for group in found.groups if "mlp.up" in group.name)
    assert (gemm.num_measured, gemm.measured_s, gemm.in_fp32) == (2, pytest.approx(300e-6), True)
    attention = next(group for group in found.groups if group.name == "attention.fused")
    assert attention.measured_s == pytest.approx(300e-6)
    assert found.best_fix is not None
    assert found.best_fix.name == "slow_kernels"


@pytest.mark.parametrize(
    ("layout", "kernel", "collective", "operation"),
    [
        # NCCL runs an all-to-all as sends; the trace names what they are part of.
        ({"data_parallel": 2, "expert_parallel": 2}, "ncclDevKernel_SendRecv", "all_to_allv", "moe.dispatch.alltoall"),
        ({"data_parallel": 2, "expert_parallel": 2}, "ncclKernel_AllToAll", "", "moe.dispatch.alltoall"),
        ({"pipeline_parallel": 2}, "ncclDevKernel_SendRecv", "send", "pipeline"),
    ],
)
def test_communication_is_matched_to_its_axis(
    layout: dict[str, int], kernel: str, collective: str, operation: str, tmp_path: Path
) -> None:
    """Exchanges of experts and of pipeline stages belong to the predicted ones, not to unpredicted kernels."""
    named = {"Collective name": collective} if collective else {}
    events = [*gpu_events(), event("kernel", kernel, 300, 50, device=0, **named)]
    path = write(tmp_path / "trace.json", events, distributedInfo={"world_size": 2})
    model = replace(MODEL, num_experts=4, num_experts_per_token=2, moe_intermediate_size=64)
    workload = {"micro_batch_size": 2, "seq_len": 32, "global_batch_size": 8}
    found = shapewright.mfu(model, device="h100-sxm-80gb", trace=path, layout=layout, workload=workload).comparison
    assert found is not None
    (group,) = [one for one in found.groups if one.kernel == kernel]

    assert operation in group.name
    assert (group.num_measured, group.measured_s) == (1, pytest.approx(50e-6))
    assert group.predicted_s > 0.0


def test_a_trace_without_marks_of_steps_says_that_it_is_one_step(tmp_path: Path) -> None:
    """A profile of several steps without step() would be read as one step several times as long."""
    events = gpu_events()
    found = [
        shapewright.mfu(MODEL, device="h100-sxm-80gb", trace=write(tmp_path / "t.json", kept)).notes
        for kept in (events, events[1:])
    ]
    said = [[note for note in notes if "marks no steps" in note] for notes in found]

    assert [len(notes) for notes in said] == [0, 1]
    assert said[1][0].startswith("t.json marks no steps and is taken as one")


def test_gemms_without_shapes_are_one_group(tmp_path: Path) -> None:
    """A trace without record_shapes compares all GEMMs together."""
    events = [one for one in gpu_events() if one["cat"] != "cpu_op"]
    found = compare(write(tmp_path / "t.json", events), micro_batch_size=2, seq_len=32)
    gemms = [group for group in found.groups if group.kind == "gemm"]
    assert [group.num_measured for group in gemms] == [2]
    assert gemms[0].num_predicted > 2


def test_gzip_and_bare_lists_are_read(tmp_path: Path) -> None:
    """A gzip file, and a file that is a list of events, give the same kernels."""
    plain = read_trace(write(tmp_path / "a.json", gpu_events()))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(gpu_events()), encoding="utf-8")
    for name in ("b.json.gz", "c.json"):
        assert read_trace(tmp_path / name).kernels == plain.kernels


def test_events_across_chunks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that end in another chunk of the file than they begin in are read as others are."""
    path = write(tmp_path / "a.json", gpu_events())
    whole = read_trace(path).kernels
    monkeypatch.setattr(kineto, "_CHUNK_CHARACTERS", 7)
    assert read_trace(path).kernels == whole


def test_memory_does_not_grow_with_other_events(tmp_path: Path) -> None:
    """20 MB of events that are not kept take a few MB."""
    filler = json.dumps(event("python_function", "f" * 200, 1, 1)) + ","
    body = filler * 60_000 + json.dumps(gpu_events()[5])
    (tmp_path / "large.json").write_text(f'{{"traceEvents": [{body}]}}', encoding="utf-8")
    tracemalloc.start()
    try:
        assert len(read_trace(tmp_path / "large.json").kernels) == 1
        assert tracemalloc.get_traced_memory()[1] < 16e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "traceEvents"),
        ("not json", "traceEvents"),
        ('{"a": 1}', "traceEvents"),
        ('{"traceEvents": []}', "neither kernels nor operators"),
        ('{"traceEvents": [{"ph": "X"', "cut off"),
        ('{"traceEvents": [{"ph": "X"}', "cut off"),
        ('{"traceEvents": [{"ph": }]}', "malformed"),
        ('{"traceEvents": [' + "[" * 200_000 + "]}", "trace|nested"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1' + "0" * 5000 + ', "dur": 1}]}', "t.json"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "NaN", "dur": 1}, 7, null]}', "neither"),
    ],
)
def test_files_that_are_no_traces_are_refused_in_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each gives exit code 2 and one line, in bounded time and memory."""
    path = tmp_path / "t.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(MeasuredFileError, match=words):
        read_trace(path)
    code, out, err = run(["mfu", "gpt2", "--device", "h100-sxm-80gb", "--trace", str(path)], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)


def lost_kernels_events(*launches: tuple[str, str]) -> list[dict[str, Any]]:
    """A profile of a GPU whose kernels are missing: operators, and launches under ids of their own."""
    dims = [[WIDTH], [BATCH * TOKENS, WIDTH], [WIDTH, WIDTH], [], []]
    return [
        event("user_annotation", "model_inference", 0, 200),
        event("cpu_op", "aten::addmm", 100, 40, **{"External id": 2, "Input Dims": dims}),
        *(event(category, name, 120, 10, **{"External id": 102, "correlation": 102}) for category, name in launches),
    ]


@pytest.mark.parametrize(
    ("category", "name"),
    [
        ("cuda_runtime", "cudaLaunchKernel"),
        ("cuda_runtime", "cudaGraphLaunch"),
        ("cuda_runtime", "hipExtModuleLaunchKernel"),
        ("cuda_driver", "cuLaunchKernel"),
        ("xpu_runtime", "urEnqueueKernelLaunch"),
        ("Runtime", "cudaLaunchKernel"),
    ],
)
def test_a_gpu_profile_that_lost_its_kernels_is_no_cpu_profile(
    category: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host's times of its operators would be compared as kernels: an MFU of thousands of percent."""
    launches = [("cuda_runtime", "cudaStreamIsCapturing"), (category, name), (category, name)]
    properties = [{"id": 0, "name": "NVIDIA A100 80GB PCIe"}]
    path = write(tmp_path / "t.json", lost_kernels_events(*launches), deviceProperties=properties)
    code, out, err = run(["mfu", "gpt2", "--device", "a100-pcie-80gb", "--trace", str(path)], capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "launches of kernels (2) but no kernels" in err


def test_calls_that_launch_nothing_leave_a_cpu_profile(tmp_path: Path) -> None:
    """A step on a CPU may ask for devices, and is read as before."""
    path = write(tmp_path / "t.json", lost_kernels_events(("cuda_runtime", "cudaGetDeviceCount")))
    found = read_trace(path)
    assert (found.is_cpu, [kernel.name for kernel in found.kernels]) == (True, ["aten::addmm"])


def test_odd_events_are_harmless(tmp_path: Path) -> None:
    """Ids, sizes and types of the wrong kind are left out without an error."""
    odd = event("kernel", "[red]gemm\x1b[31m", 5, 5, **{"External id": [1], "device": {"a": 1}})
    strange = event("cpu_op", "aten::mm", 1, 2, **{"External id": {}, "Input Dims": [[-1, "a"], 3], "Input type": 7})
    path = write(tmp_path / "odd.json", [odd, strange, {"ph": "X", "args": []}])
    assert "\x1b" not in read_trace(path).kernels[0].name


def test_a_bomb_of_zeros_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decompression stops at the limit."""
    monkeypatch.setattr(kineto, "MOST_CHARACTERS", 10_000_000)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 30_000_000))
    with pytest.raises(MeasuredFileError, match="profile fewer steps"):
        read_trace(tmp_path / "bomb.json.gz")


def test_a_bomb_of_blanks_is_refused(tmp_path: Path) -> None:
    """Blanks between events, which compress a thousandfold, end long before the limit of a trace."""
    (tmp_path / "blanks.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 30_000_000 + b"]}"))
    with pytest.raises(MeasuredFileError, match="megabytes of blanks"):
        read_trace(tmp_path / "blanks.json.gz")


def test_equal_names_are_stored_once(tmp_path: Path) -> None:
    """Millions of kernels with a few names do not take memory for each name."""
    one, other = read_trace(
        write(tmp_path / "two.json", [event("kernel", "gemm", start, 5) for start in (1, 9)])
    ).kernels
    assert one.name is other.name


def profile_cpu(path: Path, *, checkpoint: bool) -> None:
    """Profile two training steps of the small model on this CPU."""
    torch = pytest.importorskip("torch", reason="profiling needs torch")
    profiler = importlib.import_module("torch.profiler")
    functional = importlib.import_module("torch.nn.functional")
    recompute = importlib.import_module("torch.utils.checkpoint").checkpoint
    nn = torch.nn
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    layers = [
        nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()}
                      | {name: nn.LayerNorm(WIDTH) for name in ("first", "second")})
        for _ in range(LAYERS)
    ]  # fmt: skip
    ends = nn.ModuleList([nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH), nn.LayerNorm(WIDTH)])
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    optimizer = torch.optim.AdamW([*nn.ModuleList(layers).parameters(), *ends.parameters(), *head.parameters()])

    def layer(block: Any, x: Any) -> Any:
        parts = block["qkv"](block["first"](x)).split(WIDTH, -1)
        q, k, v = (one.view(BATCH, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2) for one in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + block["out"](mixed.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        return x + block["down"](functional.gelu(block["up"](block["second"](x))))

    def step() -> None:
        tokens = torch.randint(0, VOCAB, (BATCH, TOKENS))
        x = ends[0](tokens) + ends[1](torch.arange(TOKENS))
        for block in layers:
            x = recompute(layer, block, x, use_reentrant=False) if checkpoint else layer(block, x)
        functional.cross_entropy(head(ends[2](x)).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        record_shapes=True,
        schedule=profiler.schedule(wait=0, warmup=1, active=2),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as found:
        for _ in range(3):
            step()
            found.step()


@pytest.mark.filterwarnings("ignore")
def test_a_trace_of_torch_runs_the_predicted_gemms(tmp_path: Path) -> None:
    """Every GEMM that PyTorch runs is predicted, as often as it runs; batch and steps are read from the trace."""
    profile_cpu(tmp_path / "cpu.json", checkpoint=False)
    found = compare(tmp_path / "cpu.json", dtype="fp32", attention="flash")
    assert (found.trace.num_steps, found.trace.batch, found.trace.is_cpu) == (2, (BATCH, TOKENS), True)
    gemms = [group for group in found.groups if group.kind in ("gemm", "attention")]
    assert {group.name: group.num_measured for group in gemms} == {group.name: group.num_predicted for group in gemms}
    assert sum(group.num_predicted for group in gemms) == 3 * (4 * LAYERS + 1) + 2 * LAYERS
    assert found.matched_fraction > 0.99
    assert "recomputation" not in {loss.name for loss in found.losses}


@pytest.mark.filterwarnings("ignore")
def test_convolutions_of_torch_match_their_gemms(tmp_path: Path) -> None:
    """Patches, groups and a transposed convolution, forward and backward: each GEMM is measured, and no other.

    The first one has no gradient of its input; a depthwise convolution is memory traffic.
    """
    torch = pytest.importorskip("torch", reason="profiling needs torch")
    profiler = importlib.import_module("torch.profiler")
    nn = torch.nn
    module = nn.Sequential(
        nn.Conv2d(3, 64, 16, stride=16), nn.Conv2d(64, 32, 3, padding=1, groups=2), nn.GELU(),
        nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32), nn.ConvTranspose2d(32, 16, 2, stride=2),
    )  # fmt: skip
    images = torch.randn(2, 3, 64, 64)
    traced = shapewright.trace(module, {"input": images}, phase="train")
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        module(images).sum().backward()
    profile.export_chrome_trace(str(tmp_path / "conv.json"))
    prediction = shapewright.predict(traced, device="h100-sxm-80gb")
    found = compare_trace(read_trace(tmp_path / "conv.json"), prediction)

    # 2 x 16 patches of 3 x 16 x 16 values; two groups of 16 channels from 32 x 3 x 3; 32 channels to 16 x 2 x 2.
    sizes = {("gemm", 1, 32, 64, 768), ("gemm", 1, 64, 768, 32), ("gemm", 2, 16, 32, 288), ("gemm", 2, 32, 288, 16)}
    sizes |= {("gemm", 2, 16, 288, 32), ("gemm", 1, 32, 64, 32), ("gemm", 1, 32, 32, 64), ("gemm", 1, 32, 64, 32)}
    measured = {key for kernel in found.trace.kernels for key in kernel_keys(kernel) if key[0] == "gemm"}
    gemms = [group for group in found.groups if group.kind == "gemm"]
    assert measured == sizes
    assert all(group.num_measured == group.num_predicted > 0 for group in gemms)


def test_kernels_of_a_convolution_are_told_apart(tmp_path: Path) -> None:
    """On a GPU the two gradients have kernels of their own; those that convert layouts are no GEMMs."""
    sizes = {"Input Dims": [[2, 64, 4, 4], [2, 3, 64, 64], [64, 3, 16, 16], [], []], "Input type": ["c10::BFloat16"]}
    sizes["Concrete Inputs"] = ["", "", "", "[64]", "[16, 16]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1",
                                "[True, True, True]"]  # fmt: skip
    names = ("sm80_xmma_dgrad_implicit_gemm_bf16", "cutlass_tensorop_bf16_s16816wgrad_optimized", "nchwToNhwcKernel")
    kernels = [event("kernel", name, 100 + 10 * at, 5, **{"External id": 1}) for at, name in enumerate(names)]
    operator = event("cpu_op", "aten::convolution_backward", 0, 20, **{"External id": 1}, **sizes)
    found = read_trace(write(tmp_path / "conv.json", [operator, *kernels]))

    assert [kernel_keys(kernel) for kernel in found.kernels] == [
        [("gemm", 1, 32, 768, 64)], [("gemm", 1, 64, 768, 32)], [("pointwise", "elementwise")]
    ]  # fmt: skip
    for broken in ({"Concrete Inputs": ["x"] * 11}, {"Input Dims": [[1], [2]]}):
        hostile = event("cpu_op", "aten::convolution_backward", 0, 20, **{"External id": 1, **sizes, **broken})
        first, *_ = read_trace(write(tmp_path / "broken.json", [hostile, *kernels])).kernels
        assert kernel_keys(first) == [("gemm",)]


@pytest.mark.filterwarnings("ignore")
def test_recomputation_is_seen_as_it_is_applied(tmp_path: Path) -> None:
    """Checkpointed layers run their forward operators again, which are counted apart from predicted ones."""
    profile_cpu(tmp_path / "checkpointed.json", checkpoint=True)
    found = compare(tmp_path / "checkpointed.json", dtype="fp32", attention="flash")
    gemms = [group for group in found.groups if group.kind == "gemm"]
    assert all(group.num_measured == group.num_predicted for group in gemms)
    loss = next(loss for loss in found.losses if loss.name == "recomputation")
    assert loss.time_s > 0.0
    assert "checkpointing off" in loss.fix


def test_json_has_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command needs no other measurement than the trace, and gives losses, groups and the best fix as JSON."""
    path = write(tmp_path / "trace.json", gpu_events())
    code, out, _ = run(["mfu", "gpt2", "--device", "h100-sxm-80gb", "--trace", str(path), "--json"], capsys)
    assert code == 0
    trace = json.loads(out)["trace"]
    assert {loss["name"] for loss in trace["losses"]} >= {"host_gaps", "exposed_communication", "unpredicted_kernels"}
    assert trace["best_fix"]["fix"]


def test_a_measurement_is_still_needed_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --trace the command asks for what it needs, in one line."""
    code, _, err = run(["mfu", "gpt2", "--device", "h100-sxm-80gb", "--seconds", "1"], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "--gpus" in err
