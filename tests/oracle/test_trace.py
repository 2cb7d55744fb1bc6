"""Traced modules of users: what PyTorch runs, as operations, memory and findings."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="tracing needs the trace extra (torch)")
pytest.importorskip("transformers", reason="tracing configs needs the trace extra (transformers)")

from more_models import Mixture, Perceiver, Rwkv, Unet
from own_models import Choosy, Dit, Frozen, Gpt, MambaBlock, Vit
from traced_gemms import count_flops, count_gemms, turn

import shapewright
from shapewright.app.report.traced.outputs import traced_mfu_output
from shapewright.core.errors import ShapewrightError, TraceError, WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.torch_trace.fused_kernels import flex_attention as _replacement
from shapewright.lowering.torch_trace.library_kernels import REPLACED, replacements_of
from shapewright.lowering.torch_trace.trace import Trace
from shapewright.prediction.traced import explain_traced_step
from shapewright.prediction.utilization.kineto import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.oracle

H100 = load_device("h100-sxm-80gb")

OWN_MODELS: dict[str, tuple[Any, str]] = {
    "gpt": (Gpt, "tokens=int64[2,32], targets=int64[2,32]"),
    "mamba": (MambaBlock, "x=float32[2,16,32]"),
    "vit": (Vit, "images=float32[2,3,32,32]"),
    "dit": (Dit, "latents=float32[2,4,16,16], steps=int64[2], labels=int64[2]"),
    "rwkv": (Rwkv, "x=float32[2,16,64]"),
    "unet": (Unet, "x=float32[2,4,16,16], steps=int64[2]"),
    "perceiver": (Perceiver, "x=float32[2,128,48], labels=int64[2]"),
}


def build(make: Any, **options: Any) -> Any:
    """Build a module on the meta device."""
    with torch.device("meta"):
        return make(**options)


@pytest.mark.parametrize("key", OWN_MODELS)
def test_models_that_users_write_are_traced(key: str) -> None:
    """FLOPs equal those that PyTorch counts, every operation has a module path, and nothing is unknown."""
    make, inputs = OWN_MODELS[key]
    module = build(make)
    with count_flops(has_convolutions=key != "mamba") as counter:  # its depthwise convolution is memory traffic here
        found = shapewright.trace(module, inputs)
    # PyTorch's counter does not see the attention that stands for its own.
    traced_flops = sum(one.flops * one.repeats for one in found.operations if not isinstance(one, Attention))

    assert traced_flops == counter.get_total_flops()
    assert found.unknown_operators == ()
    assert found.num_parameters == sum(one.numel() for one in module.parameters())
    assert all(one.name for one in found.operations)
    # The traffic of chains can only fall where they are merged; all else stays.
    merged = shapewright.trace(module, inputs, fused=True)
    assert moved_bytes(merged) < moved_bytes(found)
    assert gemms_of(merged) == gemms_of(found)
    prediction = shapewright.predict(found, device=H100)
    assert prediction.step_time_low_s < prediction.step_time_s < prediction.step_time_high_s
    assert Trace.from_json(json.loads(json.dumps(found.to_json()))) == found


def moved_bytes(found: Trace) -> float:
    """Bytes of the memory-bound operations."""
    return sum(one.num_bytes * one.repeats for one in found.operations if isinstance(one, Pointwise))


def gemms_of(found: Trace) -> Counter[Any]:
    """GEMMs with their names."""
    return Counter({one: one.repeats for one in found.operations if isinstance(one, Gemm)})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of parts of torch that torch.compile imports
def test_compiled_modules_are_run_as_they_are() -> None:
    """A module wrapped by torch.compile is traced without compilation, under its own module names."""
    plain, compiled = (
        shapewright.trace(module, "tokens=int64[2,32]") for module in (build(Gpt), torch.compile(build(Gpt)))
    )

    assert compiled.operations == plain.operations
    assert compiled.module_type == "Gpt"
    assert any("torch.compile" in note for note in compiled.notes)
    assert not any("torch.compile" in note for note in plain.notes)


def test_operations_name_their_module_and_gradient() -> None:
    """A linear layer's GEMMs are named by its path, also in the backward pass, in the layouts of PyTorch."""
    found = {one.name: one for one in shapewright.trace(build(Gpt), "tokens=int64[2,32]").operations}
    forward, dgrad, wgrad = (found[f"layers.0-3.up_proj{suffix}"] for suffix in ("", ".dgrad", ".wgrad"))

    assert [(one.m, one.n, one.k, one.layout, one.repeats) for one in (forward, dgrad, wgrad)] == [
        (64, 256, 64, "NT", 4),
        (64, 64, 256, "NN", 4),
        (256, 64, 64, "TN", 4),
    ]
    assert wgrad.is_weight_gradient
    assert found["layers.0-3.scaled_dot_product_attention.backward"].is_backward
    assert not any("_backward" in name for name in found)
    assert "layers.0-3.ln_1.native_layer_norm" in found


def test_frozen_weights_have_no_gradient() -> None:
    """A frozen layer passes gradients on and has none of its own; the first layer passes none on."""
    names = {one.name for one in shapewright.trace(build(Frozen), "x=float32[4,64]").operations}

    assert {"base", "base.dgrad", "last.dgrad", "last.wgrad", "first.wgrad"} <= names
    assert not names & {"base.wgrad", "first.dgrad"}
    whole = shapewright.predict(shapewright.trace(build(Frozen), "x=float32[4,64]"), device=H100)
    trained = 64 * 96 + 96 + 128 * 32 + 32
    assert whole.trace.num_trainable == trained
    assert whole.optimizer_bytes == 8.0 * trained  # two fp32 moments


def test_checkpointing_is_traced() -> None:
    """Checkpointed layers run again in the backward pass, and less is kept for it."""
    plain = shapewright.trace(build(Gpt), "tokens=int64[2,32]")
    module = build(Gpt)
    module.checkpointed = True
    found = shapewright.trace(module, "tokens=int64[2,32]")
    again = {one.name for one in found.operations if one.pass_name == "recompute"}
    forward_flops = sum(
        one.flops * one.repeats
        for one in plain.operations
        if one.pass_name == "forward" and one.name.startswith("layers")
    )
    recomputed_flops = sum(one.flops * one.repeats for one in found.operations if one.pass_name == "recompute")

    assert "layers.0-3.up_proj" in again
    # The last GEMM of a layer is not needed for its gradients, and PyTorch stops before it.
    assert recomputed_flops == forward_flops - 4 * 2 * 64 * 256 * 64
    assert found.memory.saved_bytes < 0.5 * plain.memory.saved_bytes
    prediction = shapewright.predict(found, device=H100)
    assert prediction.hfu > prediction.mfu


def test_memory_by_module() -> None:
    """Saved tensors are those of the modules that make them, and the parts add up to the peak."""
    found = shapewright.trace(build(Gpt), "tokens=int64[2,32], targets=int64[2,32]")
    memory, by_path = found.memory, {one.path: one for one in found.modules}
    parts = (
        memory.weights_bytes
        + memory.inputs_bytes
        + memory.gradients_bytes
        + memory.activations_bytes
        + memory.workspace_bytes
    )

    # 64 tokens of 256 fp32 elements before the activation; after it, they belong to the block.
    assert by_path["layers.0-3.up_proj"].saved_bytes == 64 * 256 * 4
    assert by_path["wte"].num_parameters == 320 * 64
    assert "lm_head" not in {one.path for one in found.modules if one.num_parameters}  # tied
    assert parts == pytest.approx(memory.peak_bytes)
    assert max(memory.timeline_bytes) == memory.peak_bytes
    assert sum(one.count * one.saved_bytes for one in found.modules) == pytest.approx(memory.saved_bytes)


def test_a_module_with_memory_is_left_as_it_is() -> None:
    """Parameters with values keep them, gradients included, and the trace is that of the meta device."""
    torch.manual_seed(0)
    module = Gpt(layers=1)
    module(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    before = {name: (one.clone(), one.grad.clone()) for name, one in module.named_parameters() if one.grad is not None}
    module.eval()
    found = shapewright.trace(module, {"tokens": torch.zeros(2, 32, dtype=torch.long)}, dtype="bf16")

    assert found.operations == shapewright.trace(build(Gpt, layers=1), "int64[2,32]", dtype="bf16").operations
    assert found.dtype == "bf16"
    assert not module.training
    after = dict(module.named_parameters())
    assert all(
        torch.equal(after[name], one) and torch.equal(after[name].grad, grad) for name, (one, grad) in before.items()
    )


def test_findings_name_the_module() -> None:
    """An odd width of one layer is found with its path, its price and a better width."""
    module = build(Gpt, vocab=50257, width=768, inner=3072, odd_inner=3071)
    report = shapewright.check(shapewright.trace(module, "tokens=int64[4,128]", dtype="bf16"), device=H100)
    messages = {finding.field: finding for finding in report.findings}

    assert messages["layers.3.up_proj.out_features"].message.startswith("layers.3.up_proj: out_features=3071 is not")
    assert messages["layers.3.up_proj.out_features"].suggestions[0].title == "use out_features=3072"
    assert messages["layers.3.down_proj.in_features"].code == "TC105"
    assert messages["lm_head.out_features"].code == "TC101"
    assert not any(name.startswith("layers.0") for name in messages)
    fewer = shapewright.check(report.prediction.trace, device=H100, ignore=["TC101"])
    assert fewer.num_suppressed == 1


def test_convolutions_are_told_their_output_channels() -> None:
    """Their contraction is channels times kernel, which is no width that could be chosen."""
    module = build(Unet, width=72)
    report = shapewright.check(shapewright.trace(module, OWN_MODELS["unet"][1]), device=H100)
    fields = {finding.field for finding in report.findings}

    assert "conv.out_channels" in fields
    assert not any(
        field.endswith("features") for field in fields if field.startswith(("start", "conv", "down", "up", "end"))
    )


def test_fp32_is_found() -> None:
    """A module in fp32 is told what 16 bits would save."""
    report = shapewright.check(shapewright.trace(build(Gpt, width=512), "tokens=int64[8,128]"), device=H100)

    assert "TC108" in {finding.code for finding in report.findings}


def test_autocast_decides_the_format() -> None:
    """Under autocast GEMMs and attention run in 16 bits, forward and backward; weights stay in fp32."""

    class Mixed(torch.nn.Module):  # type: ignore[misc]
        """Runs a GPT and an encoder layer under autocast, as training loops do."""

        def __init__(self) -> None:
            super().__init__()
            self.gpt = Gpt()
            self.layer = torch.nn.TransformerEncoderLayer(320, 4, 64, batch_first=True)

        def forward(self, tokens: Any) -> Any:
            """Loss of the last layer's outputs."""
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return self.layer(self.gpt(tokens)).float().mean()

    found = shapewright.trace(build(Mixed), "tokens=int64[2,32]")
    formats = {one.dtype for one in found.operations if isinstance(one, Gemm | Attention)}

    assert formats == {"bf16"}
    assert (found.dtype, found.parameter_dtype) == ("bf16", "fp32")
    plain = shapewright.trace(build(Gpt), "tokens=int64[2,32]")
    assert {one.dtype for one in plain.operations} == {"fp32"}


def test_flex_attention_reads_its_mask() -> None:
    """The function of a block mask says whether attention is causal and how far it reaches."""
    from torch.nn.attention import flex_attention as flex

    class Windowed(torch.nn.Module):  # type: ignore[misc]
        """Causal window of eight tokens."""

        def forward(self, q: Any) -> Any:
            """Attend."""
            mask = flex.create_block_mask(
                lambda _b, _h, i, j: (i >= j) & (i - j < 8), None, None, q.shape[-2], q.shape[-2], device=q.device
            )
            return flex.flex_attention(q, q, q, block_mask=mask)

    original = flex.flex_attention.__code__
    found = shapewright.trace(Windowed(), "float32[2,4,256,16]", phase="prefill")
    (attention,) = (one for one in found.operations if isinstance(one, Attention))

    assert (attention.causal, attention.window_size, attention.num_heads, attention.query_len) == (True, 8, 4, 256)
    assert flex.flex_attention.__code__ is original
    assert _replacement is not flex.flex_attention


def attention_of(function: Callable[[Any], Any]) -> Attention:
    """The attention of a function of 4 heads of 1,024 queries."""

    class Module(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any) -> Any:
            return function(q)

    found = shapewright.trace(Module(), "float32[1,4,1024,16]", phase="prefill")
    (attention,) = (one for one in found.operations if isinstance(one, Attention))
    return attention


def test_a_causal_mask_of_chunks_has_as_many_pairs() -> None:
    """Tokens that attend within chunks of 128 have 64.5 keys on average, not the 128 of a window."""
    from torch.nn.attention import flex_attention as flex

    def attend(q: Any) -> Any:
        mask = flex.create_block_mask(
            lambda _b, _h, i, j: (i >= j) & (i // 128 == j // 128), None, None, 1024, 1024, device=q.device
        )
        return flex.flex_attention(q, q, q, block_mask=mask)

    assert attention_of(attend).attended_pairs == pytest.approx(4 * 1024 * 64.5, rel=0.02)


@pytest.mark.parametrize(
    ("causal", "sides", "expected"),
    [
        (True, (63, 63), (True, 64)),
        (True, (-1, -1), (True, 0)),
        (False, (-1, -1), (False, 0)),
        (False, (64, 64), (False, 129)),
        (False, (63, 0), (True, 64)),
    ],
)
def test_windows_of_flash_attention_have_two_sides(
    causal: bool, sides: tuple[int, int], expected: tuple[bool, int]
) -> None:
    """A window has keys to the left and to the right, both inclusive; a causal mask takes the right ones away."""
    flash = REPLACED["flash_attn_func"]
    found = attention_of(lambda q: flash(*(3 * [q.transpose(1, 2)]), causal=causal, window_size=sides))

    assert (found.causal, found.window_size) == expected


def test_arguments_of_flash_attention_3_have_other_places() -> None:
    """Without dropout the mask is the fifth argument, and four of scales stand before the window."""
    functions = replacements_of("flash_attn_interface")
    flash, packed = functions["flash_attn_func"], functions["flash_attn_qkvpacked_func"]
    scales = (None, None, None)
    for call, expected in (
        (lambda q: flash(q, q, q, 0.125, True), (True, 0)),
        (lambda q: flash(q, q, q, None, False, None, *scales, (63, 0)), (True, 64)),
        (lambda q: packed(torch.stack(3 * [q], 2), None, True), (True, 0)),
        (lambda q: packed(torch.cat(3 * [q], 2), None, True, *scales, (31, 0), num_heads_q=q.shape[2]), (True, 32)),
    ):
        found = attention_of(lambda q, call=call: call(q.transpose(1, 2)))
        assert (found.causal, found.window_size) == expected
    assert functions["chunk_kda"] is REPLACED["chunk_kda"]


def test_operators_of_lists_write_each_tensor_of_the_first() -> None:
    """Two tensors of 4 MiB are read and written; only the first counted as written."""

    class Summed(torch.nn.Module):  # type: ignore[misc]
        """Adds a number to two tensors in place."""

        def forward(self, x: Any) -> Any:
            """Add."""
            halves = [x * 2, x * 3]
            torch._foreach_add_(halves, 1.0)
            return halves[0]

    found = shapewright.trace(Summed(), "float32[1024,1024]", phase="prefill")
    (added,) = (each for each in found.operations if "foreach" in each.name)
    assert (added.read_bytes, added.written_bytes) == (2**23, 2**23)


def test_unknown_operators_are_listed_and_priced() -> None:
    """An operator of a library is listed with its share of bytes, and its interval is wide."""
    library = torch.library.Library("shapewright_test", "DEF")
    library.define("scan(Tensor x) -> Tensor")
    library.impl("scan", torch.empty_like, "Meta")

    class Scanned(torch.nn.Module):  # type: ignore[misc]
        """Calls the operator."""

        def forward(self, x: Any) -> Any:
            """Scan."""
            return torch.ops.shapewright_test.scan(x) + 1

    found = shapewright.trace(Scanned(), "float32[1024,1024]", phase="prefill")
    prediction = shapewright.predict(found, device=H100)
    entry, other = prediction.operations

    assert [(one.name, one.count, one.bytes_fraction) for one in found.unknown_operators] == [
        ("shapewright_test::scan", 1, 0.5)
    ]
    assert entry.price.high_s / entry.price.time_s > 5 * other.price.high_s / other.price.time_s
    assert any("shapewright_test::scan (1 calls, 50 % of the bytes)" in note for note in prediction.warnings)


def test_tensor_parallel_modules_are_traced_as_one_rank() -> None:
    """Placements of DTensors give sharded GEMMs and the collectives between them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Mlp(torch.nn.Module):  # type: ignore[misc]
        """Two linear layers."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False)

        def forward(self, x: Any) -> Any:
            """Up and down."""
            return self.down(torch.relu(self.up(x)))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        module = build(Mlp)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(module, init_device_mesh("cpu", (4,)), plan)
        found = shapewright.trace(module, "float32[32,64]")
    finally:
        dist.destroy_process_group()
    gemms = {(one.m, one.n, one.k) for one in found.operations if isinstance(one, Gemm) and one.pass_name == "forward"}
    (collective,) = (one for one in found.operations if isinstance(one, Collective) and one.pass_name == "forward")

    assert gemms == {(32, 64, 64)}  # 256 / 4
    assert (collective.op_name, collective.num_ranks, collective.message_bytes) == ("all_reduce", 4, 32 * 64 * 4)
    assert (collective.axis, found.num_ranks) == ("tensor", 4)


def test_values_are_asked_for_by_line() -> None:
    """Control flow that depends on values names its line, and takes the number of rows that is given for it."""
    with pytest.raises(TraceError, match=r"own_models.py:\d+: the size .* values own_models.py:\d+=ROWS") as caught:
        shapewright.trace(build(Choosy), "x=float32[16,8]")
    line = str(caught.value).partition(": ")[0]
    found = shapewright.trace(build(Choosy), "x=float32[16,8]", values={line: 5, "own_models.py:1": 2})

    assert any(one.num_bytes for one in found.operations)
    unused = "the value given for own_models.py:1 was not used: nothing there depends on a tensor's value"
    assert found.notes == (unused,)


def test_a_profile_is_matched_to_the_operations_of_a_module(tmp_path: Path) -> None:
    """Each GEMM of a step that ran on a CPU is one of the trace, and nearly all time belongs to known operations."""
    profiler = importlib.import_module("torch.profiler")
    module, tokens = Gpt(), torch.zeros(2, 32, dtype=torch.long)
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        module(tokens, tokens).backward()
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    found = shapewright.trace(build(Gpt), "tokens=int64[2,32], targets=int64[2,32]")
    explained = explain_traced_step(
        shapewright.predict(found, device=H100), None, read_trace(tmp_path / "profile.json")
    )
    comparison = explained.comparison
    assert comparison is not None
    gemms = [(one.num_measured, one.num_predicted) for one in comparison.groups if one.kind == "gemm"]

    assert sum(predicted for _, predicted in gemms) == sum(gemms_of(found).values())
    assert all(measured == predicted for measured, predicted in gemms)
    assert explained.measured_time_s == comparison.step_s
    assert comparison.matched_fraction > 0.9
    assert any("marks no steps" in text for text in traced_mfu_output(explained).warnings)
    assert not any("runs the module" in text for text in traced_mfu_output(explained).warnings)
    (entropy,) = (one for one in comparison.groups if "nll_loss_forward" in one.name)
    assert entropy.name == "_log_softmax, nll_loss_forward, nll_loss.backward, _log_softmax.backward"
    assert next(one for one in comparison.losses if one.name == "slow_kernels").fix.startswith("these operators ran on")


def test_a_profile_of_accumulated_gradients_is_noted(tmp_path: Path) -> None:
    """A step that runs the module three times has three times the model FLOPs of the predicted one."""
    profiler = importlib.import_module("torch.profiler")
    module, tokens = Gpt(), torch.zeros(2, 32, dtype=torch.long)
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in range(3):
            module(tokens, tokens).backward()
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    predicted = shapewright.predict(
        shapewright.trace(build(Gpt), "tokens=int64[2,32], targets=int64[2,32]"), device=H100
    )
    explained = explain_traced_step(predicted, None, read_trace(tmp_path / "profile.json"))

    assert explained.comparison is not None
    assert explained.comparison.num_runs == 3
    assert any("runs the module 3 times" in text for text in traced_mfu_output(explained).warnings)


@pytest.mark.parametrize("way", ["where", "one_hot", "mask", "counts"])
def test_loops_over_experts_need_no_values(way: str) -> None:
    """However the tokens of an expert are found, each of eight gets a quarter: two of them run for each token."""
    found = shapewright.trace(build(Mixture, way=way), "x=float32[120,64]")
    gemms = count_gemms((one for one in found.operations if "experts" in one.name), "forward")

    assert gemms == Counter({turn(1, 30, 128, 64, layout="NT"): 8, turn(1, 30, 64, 128, layout="NT"): 8})
    assert any("equal numbers of tokens" in note for note in found.notes)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("tokens=int64[2,32", "cannot be read"),
        ("tokens=int65[2,32]", "unknown dtype 'int65'"),
        ("words=int64[2,32]", "Gpt.forward has no input 'words'.*it takes tokens, targets"),
        ("tokens=int64[0,32]", "sizes must be positive"),
        ("tokens=int64[2,32], tokens=int64[2,32]", "twice"),
        ("targets=int64[2,32]", "do not fit"),
        ("", "cannot be read"),
    ],
)
def test_wrong_inputs_are_refused(inputs: str, words: str) -> None:
    """Inputs that cannot be read or do not fit the module are refused in one line."""
    with pytest.raises(TraceError, match=words):
        shapewright.trace(build(Gpt), inputs)


def test_a_square_mask_of_a_transformer_is_causal() -> None:
    """torch.nn.Transformer compares the values of its mask: a square one is causal, one of another form is not."""

    class Translator(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Transformer(64, 4, 1, 1, 128, batch_first=True)

        def forward(self, source: Any, target: Any) -> Any:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.body(source, target, tgt_mask=mask)

    found = shapewright.trace(build(Translator), "source=float32[2,32,64], target=float32[2,16,64]")
    calls = [one for one in found.operations if isinstance(one, Attention) and not one.is_backward]

    assert sorted((one.query_len, one.kv_len, one.causal) for one in calls) == [
        (16, 16, True),
        (16, 32, False),
        (32, 32, False),
    ]
    assert any("taken as causal" in note for note in found.notes)


def test_padded_encoders_run_in_eval_mode_too() -> None:
    """The forward pass of torch.nn.TransformerEncoder has all tokens, as in training; its setting is restored."""
    body = build(lambda: torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True), 2))
    inputs = "src=float32[2,32,64], src_key_padding_mask=bool[2,32]"
    forward = shapewright.trace(body.eval(), inputs, phase="prefill")
    training = shapewright.trace(body, inputs)

    assert gemms_of(forward) <= gemms_of(training)
    assert sum(one.repeats for one in forward.operations if isinstance(one, Attention)) == 2
    assert torch.backends.mha.get_fastpath_enabled()


def test_whole_numbers_are_no_input_of_a_linear_layer() -> None:
    """The meta device multiplies integers by floating weights; other devices do not."""
    with pytest.raises(TraceError, match=r"own_models.py:\d+: a GEMM of int64 and float32"):
        shapewright.trace(build(Frozen), "x=int64[4,64]")


@pytest.mark.parametrize("optimizer", ["muon", "galore", "galore-8bit", "q-galore"])
def test_optimizers_of_matrices_equal_those_of_the_config(optimizer: str) -> None:
    """A traced Llama's step of Muon or GaLore has the GEMMs, and GaLore the bytes, that its config has."""
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 704}
    raw = {"vocab_size": 1000, "max_position_embeddings": 128, "num_key_value_heads": 4, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**sizes, **raw)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    found = shapewright.trace(module, "input_ids=int64[4,128], labels=int64[4,128]", dtype="bf16")
    workload = {"optimizer": optimizer, "micro_batch_size": 4, "seq_len": 128}
    traced = shapewright.predict(found, device=H100, workload={"optimizer": optimizer})
    lowered = shapewright.predict(config.to_dict(), device=H100, workload=workload)

    def work(prediction: Any) -> float:
        steps = (one.operation for one in prediction.operations if one.operation.pass_name == "step")
        return sum(one.flops * int(one.repeats) for one in steps if isinstance(one, Gemm))

    assert work(traced) == pytest.approx(work(lowered), rel=0.01)
    if optimizer != "muon":
        assert traced.optimizer_bytes == pytest.approx(lowered.memory.optimizer_bytes, rel=0.05)
        assert traced.total_bytes < shapewright.predict(found, device=H100).total_bytes


def test_other_parts_of_a_scenario_are_refused() -> None:
    """A trace is of one run: layouts and workloads cannot be given with it."""
    found = shapewright.trace(build(Frozen), "x=float32[4,64]")
    with pytest.raises(WorkloadError, match="layout"):
        shapewright.predict(found, device=H100, layout={"tensor_parallel": 2})
    with pytest.raises(ShapewrightError, match="no device"):
        shapewright.predict(found)
    with pytest.raises(TraceError, match=r"torch.nn.Module"):
        shapewright.trace("model", "x=float32[4,64]")
