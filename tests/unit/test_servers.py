"""Servers: inference engines by name and version, their defaults, and how they change prices and passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shapewright
from served import BF16, make_instance, plan
from shapewright.core.errors import WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.models.read import read_model
from shapewright.optimize.serving.pass_times import PassShape, predict_passes
from shapewright.optimize.serving.point import Instance, model_as_served
from shapewright.optimize.serving.request import ServingFormat, ServingRequest
from shapewright.prediction.build import build_scenario
from shapewright.pricing.operations import price_operations
from shapewright.pricing.servers import (
    CURRENT_SERVER,
    KernelFit,
    Server,
    instruction_s,
    kernel_class,
    load_server,
    make_servers,
    server_names,
)
from shapewright.workload.layout import ParallelLayout


def test_an_engine_alone_is_its_newest_version() -> None:
    """Names are folded; every name of the list loads and states its sources."""
    assert load_server("vLLM") == load_server("vllm-0.19")
    assert all(load_server(name).name == name for name in server_names())
    assert all(load_server(name).sources for name in server_names()[1:])


def test_a_version_without_rows_scatters_as_the_one_before() -> None:
    """No throughput of vLLM 0.19 is published; its intervals are those of 0.16."""
    assert load_server("vllm-0.19").interval == load_server("vllm-0.16").interval
    assert load_server("vllm-0.19").interval_of == "vllm-0.16"
    assert load_server("vllm-0.16").interval_of == ""
    assert load_server("vllm-0.19").kernels == {}


def test_only_earlier_versions_lend_their_intervals() -> None:
    """Never a later version nor another engine; the closest earlier one of several."""
    common = {"kept_windows": [], "expert_kernel": {}, "sources": {}}
    names = ("a-1.0", "a-2.0", "a-3.0", "a-4.0", "a-5.0", "b-1.0")
    fitted = {name: {"interval": {"dense": [low, 1.1]}} for name, low in (("a-2.0", 0.5), ("a-3.0", 0.7))}

    servers = make_servers({"all": common, **{name: {} for name in names}}, {**fitted, "a-5.0": {"interval": {}}})

    assert {name: server.interval_of for name, server in servers.items() if server.interval_of} == {"a-4.0": "a-3.0"}
    assert servers["a-4.0"].interval == {"dense": [0.7, 1.1]}
    assert servers["a-1.0"].interval == servers["b-1.0"].interval == {}


@pytest.mark.parametrize(
    ("given", "name"),
    [("vllm-0.10.2", "vllm-0.10"), ("SGLang-0.5.3", "sglang-0.5"), ("trtllm-1.0.0rc6", "trtllm-1.0")],
)
def test_a_patch_release_is_its_minor_version(given: str, name: str) -> None:
    """Engines state their version with a patch number, as pip does."""
    assert load_server(given).name == name
    with pytest.raises(WorkloadError, match=r"unknown server 'vllm-0\.11\.2'"):
        load_server("vllm-0.11.2")


def test_an_unknown_server_is_refused_with_the_known_ones() -> None:
    """The message gives close names and all names."""
    with pytest.raises(WorkloadError, match=r"unknown server 'trtllm-9'.*trtllm-1\.0"):
        load_server("trtllm-9")


def test_projections_are_fused_but_latents_are_not() -> None:
    """A server fuses QKV and gate with up; MLA's latents have no QKV."""
    llama, latent = (read_model(name).config for name in ("llama-3-8b", "deepseek-v3"))

    assert model_as_served(llama, CURRENT_SERVER).fused_qkv
    assert model_as_served(llama, CURRENT_SERVER).fused_gate_up
    assert not model_as_served(latent, CURRENT_SERVER).fused_qkv


def served(model: str, device: str, server: str, **degrees: int) -> Instance:
    """An instance of a server, in 16 bits."""
    request = ServingRequest(prompt_len=1000, output_len=1000, server=load_server(server))
    question = build_scenario(model, device, workload={"phase": "prefill"})
    return Instance(question.replace(layout=ParallelLayout(**degrees)), BF16, request)


@pytest.mark.parametrize(("model", "window"), [("gpt-oss-20b", 128), ("llama-4-scout", 8192)])
def test_windows_are_read_alone_but_cached_whole(model: str, window: int) -> None:
    """TensorRT-LLM 1.0 reads the window of a layer, sliding or chunked, and caches all tokens; vLLM the window."""
    whole, windowed = (served(model, "b200-sxm-180gb", name, tensor_parallel=2) for name in ("trtllm-1.0", "vllm-0.19"))
    lengths = {int(one.kv_len) for one in whole.passes.decode(8, 20_000).operations if isinstance(one, Attention)}
    per_token = whole.cache_bytes(64_000)[0] / 64_000
    heads, layers = whole.config.num_kv_heads, whole.config.num_layers

    assert min(lengths) <= window < max(lengths)
    assert per_token == pytest.approx(2 * layers * heads * whole.config.head_dim * 2 / 2, rel=0.01)
    assert windowed.cache_bytes(64_000)[0] < 0.7 * whole.cache_bytes(64_000)[0]


@pytest.mark.parametrize(
    ("device", "server", "names"),
    [
        ("b200-sxm-180gb", "trtllm-1.0", {"all_gather", "reduce_scatter"}),
        ("gb200", "trtllm-1.0", {"alltoall"}),
        ("b200-sxm-180gb", "vllm-0.16", {"alltoall"}),
    ],
)
def test_tokens_are_gathered_for_experts_in_a_node(device: str, server: str, names: set[str]) -> None:
    """TensorRT-LLM 1.0 gathers 32 tokens of each of 4 replicas, 2,048 numbers of 16 bits, and adds up the results."""
    instance = served("qwen3-30b-a3b", device, server, data_parallel=4, expert_parallel=4)
    sent = [one for one in instance.passes.decode(32, 1000).operations if isinstance(one, Collective)]
    own, per_token = 32 * 2048 * 2, 8

    assert {one.op_name for one in sent} == names
    expected = own * (per_token if "alltoall" in names else 4)
    assert {one.message_bytes for one in sent} == {expected}
    if "alltoall" not in names:
        assert {kernel_class(one, instance.scenario.device) for one in sent} == {"all_reduce.link"}


def test_kernels_of_the_server_replace_slower_ones_only() -> None:
    """A kernel of its own takes start + roofline / fraction, where that is faster than the record's."""
    instance = make_instance()
    decode = instance.passes.decode(64, 4000)
    (attention,) = [one for one in decode.operations if one.role == "fused"]
    (price,) = price_operations([attention], instance.scenario.device)
    device = instance.scenario.device

    def with_fraction(fraction: float) -> float:
        kernels = {"decode_attention.wide": KernelFit(fraction=fraction, start_s=1e-6)}
        return float(replace(CURRENT_SERVER, kernels=kernels).adjust(attention, price, device).time_s)

    assert with_fraction(0.99) == pytest.approx(1e-6 + float(price.roofline_s) / 0.99)
    assert with_fraction(0.01) == price.time_s


def test_decode_kernels_may_be_bound_by_their_instructions() -> None:
    """Half of 67 TFLOP/s in fp32: 40 instructions for each element take longer than to read it, 20 do not."""
    instance = make_instance()
    device = instance.scenario.device
    operations = instance.passes.decode(64, 4000).operations
    (attention,) = [one for one in operations if one.role == "fused"]
    (price,) = price_operations([attention], device)
    elements = 64 * 8 * int(attention.kv_len) * (128 + 128)

    def with_instructions(count: float) -> float:
        kernels = {"decode_attention.wide": KernelFit(instructions_per_element=count)}
        return float(replace(CURRENT_SERVER, kernels=kernels).adjust(attention, price, device).time_s)

    assert with_instructions(40.0) == pytest.approx(40 * elements / (67e12 / 2))
    assert with_instructions(20.0) == price.time_s
    prompt, *_ = [one for one in instance.passes.prefill(1, 4096).operations if one.role == "fused"]
    assert instruction_s(prompt, device) == instruction_s(operations[0], device) == 0.0
    assert instruction_s(attention, replace(device, dense_flops_per_s={})) == 0.0


def test_classes_have_the_fit_of_the_class_they_are_part_of() -> None:
    """Large GEMMs and grouped queries have a fit of their own where one is known, else that of all of their kind."""
    instance = make_instance()
    device, prompt, decode = (
        instance.scenario.device,
        instance.passes.prefill(1, 4096),
        instance.passes.decode(64, 4000),
    )
    (attention,) = [one for one in decode.operations if one.role == "fused"]
    gemms = [next(one for one in each.operations if isinstance(one, Gemm)) for each in (prompt, decode)]

    names = [kernel_class(one, device) for one in (attention, *gemms)]
    assert names == ["decode_attention.wide.grouped", "gemm.bf16.large", "gemm.bf16"]
    known = {"gemm.bf16": KernelFit(factor=0.9), "decode_attention.wide.grouped": KernelFit(factor=2.0)}
    assert [replace(CURRENT_SERVER, kernels=known).kernel_fit(name).factor for name in names] == [2.0, 0.9, 0.9]
    assert replace(CURRENT_SERVER, kernels={}).kernel_fit(names[0]).factor == 1.0


def test_large_messages_are_a_class_of_their_own() -> None:
    """An all-reduce of 4,096 tokens of 8,192 numbers has the fit of large messages, one of half as many has not."""
    instance = make_instance("llama-3-70b", tensor_parallel=8)
    names = [
        {kernel_class(one, instance.scenario.device) for one in passed.operations if isinstance(one, Collective)}
        for passed in (instance.passes.prefill(1, tokens) for tokens in (2048, 4096))
    ]

    assert "all_reduce.link" in names[0]
    assert "all_reduce.link.large" not in names[0]
    assert "all_reduce.link.large" in names[1]


@pytest.mark.parametrize("op_name", ["all_reduce", "all_gather", "alltoall"])
def test_kernels_of_the_server_end_at_the_node(op_name: str) -> None:
    """Inside a node an all-reduce of 64 KiB takes 8 us and 2 x 7/8 of it at 0.45 of 450 GB/s; two nodes take NCCL."""
    device, server = load_device("h100-sxm-80gb"), load_server("trtllm-1.0")

    def call(num_ranks: int) -> Collective:
        return Collective(
            name="sent",
            dtype="bf16",
            op_name=op_name,
            axis="expert",
            message_bytes=2**16,
            num_ranks=num_ranks,
            ranks_per_node=8,
            is_served=True,
        )

    inside, across = call(8), call(16)
    prices = price_operations([inside, across], device)
    inside_s, across_s = (
        float(server.adjust(one, price, device).time_s) for one, price in zip((inside, across), prices, strict=True)
    )

    if op_name == "all_reduce":
        assert inside_s == pytest.approx(8e-6 + 2 * 7 / 8 * 2**16 / (0.45 * 450e9))
    assert across_s == prices[1].time_s > inside_s


def test_slow_experts_hold_up_prompts_but_not_graphs() -> None:
    """Beyond its CUDA graphs a server may take its time for the weights of experts, however few the tokens."""
    instance = make_instance("mixtral-8x7b", tensor_parallel=4)
    slow = replace(CURRENT_SERVER, prompt_experts_fraction=0.01)
    weights_bytes = 32 * 8 * 3 * 4096 * 14336 / 4 * 2

    def pass_s(server: Server, shape: PassShape) -> float:
        changed = replace(instance, request=replace(instance.request, server=server))
        return predict_passes(changed, [shape])[0].middle_s

    prompt, decode = PassShape(prefill_tokens=4096), PassShape(64, 1000)
    bandwidth = instance.scenario.device.memory_bandwidth_bytes_per_s
    assert pass_s(slow, decode) == pass_s(CURRENT_SERVER, decode)
    assert pass_s(slow, prompt) - pass_s(CURRENT_SERVER, prompt) == pytest.approx(
        weights_bytes / (0.01 * bandwidth), rel=0.05
    )


def test_the_host_adds_its_time_to_a_pass() -> None:
    """Fixed, per decoding sequence and per rank; without a graph at least the launches of all kernels."""
    slow = replace(CURRENT_SERVER, host_s=1e-3, host_per_sequence_s=1e-5)
    request = ServingRequest(prompt_len=1000, output_len=101)
    plain, hosted = (
        predict_passes(
            make_instance(request=replace(request, server=server)), [PassShape(8, 1000), PassShape(8, 1000, 256)]
        )
        for server in (CURRENT_SERVER, slow)
    )

    assert [one.middle_s - other.middle_s for one, other in zip(hosted, plain, strict=True)] == pytest.approx(
        [1.08e-3] * 2
    )
    ranked = replace(slow, host_per_rank_s=2e-3)
    for degree in (1, 4):
        one, other = (
            predict_passes(
                make_instance(request=replace(request, server=server), tensor_parallel=degree), [PassShape(8, 1000)]
            )[0].middle_s
            for server in (slow, ranked)
        )
        assert other - one == pytest.approx(degree * 2e-3)
    eager = replace(slow, cuda_graphs=False, launch_s=1e-3)
    assert eager.pass_host_s(1, 100, 0.03, is_decode=True) == pytest.approx(0.07 + 1e-3 + 1e-5)


def test_a_plan_takes_the_defaults_of_the_server() -> None:
    """Memory, blocks and the cache's format are the server's unless given."""
    found = plan(server="trtllm-1.0", workload={"dtype": "fp8"})

    assert found.request.block_tokens == 32
    assert found.request.server.name == "trtllm-1.0"
    assert plan(server="trtllm-1.0", block_tokens=64).request.block_tokens == 64


def test_a_fused_projection_is_faster_than_three() -> None:
    """Single tokens of a model with fused projections are never slower."""
    separate = replace(CURRENT_SERVER, fused_projections=False)
    request = ServingRequest(prompt_len=1000, output_len=101)
    fused_s, separate_s = (
        predict_passes(make_instance(request=replace(request, server=one)), [PassShape(1, 1000)])[0].middle_s
        for one in (CURRENT_SERVER, separate)
    )

    assert fused_s < separate_s


def test_mxfp4_is_stored_where_it_cannot_be_multiplied() -> None:
    """On Hopper fp4 means stored weights under 16-bit activations, with a note; Blackwell multiplies it."""
    hopper = plan("gpt-oss-20b", "h200-sxm-141gb", workload={"dtype": "fp4"})
    blackwell = plan("gpt-oss-20b", "b200-sxm-180gb", workload={"dtype": "fp4"})

    assert hopper.formats[0].name == "bf16:fp4"
    assert any("stored weights (MXFP4)" in note for note in hopper.notes)
    assert blackwell.formats[0].dtype == "fp4"


def test_a_single_token_in_fp8_is_not_slower_than_in_bf16() -> None:
    """A small fp8 GEMM is measured to be slower, but a whole pass over one token is not."""
    request = ServingRequest(prompt_len=1000, output_len=101)
    fp8_s, bf16_s = (
        predict_passes(replace(instance, format=format), [PassShape(1, 1000)])[0].middle_s
        for instance in [make_instance("llama-3.1-70b", request, tensor_parallel=8)]
        for format in (ServingFormat("fp8", "fp8", "bf16"), ServingFormat("bf16", "bf16", "bf16"))
    )

    assert fp8_s < bf16_s


def test_memory_is_a_share_of_what_weights_leave_free() -> None:
    """TensorRT-LLM's fraction is of the free memory, so its cache beside nearly full weights is larger."""
    request = ServingRequest(prompt_len=1000, output_len=101)
    free = replace(CURRENT_SERVER, fraction_of_free=True)
    of_all, of_free = (
        min(make_instance(request=replace(request, server=one)).free_bytes(2048)) for one in (CURRENT_SERVER, free)
    )

    assert of_free > of_all


def test_windows_that_a_server_does_not_keep_are_cached_whole() -> None:
    """Engines of TensorRT-LLM 0.17 cache and read all tokens of layers with sliding windows."""
    request = ServingRequest(prompt_len=16000, output_len=101)
    kept, whole = (
        make_instance("gemma-2-9b", replace(request, server=load_server(name))) for name in ("vllm-0.10", "trtllm-0.17")
    )

    assert min(whole.cache_bytes(16000)) > 1.5 * min(kept.cache_bytes(16000))


def test_servers_run_expert_kernels_of_their_own() -> None:
    """The slow measured kernel of the records applies to none of them, unless it is asked for."""
    kernels = [
        plan("mixtral-8x7b", num_devices=1, server=server, workload={"dtype": "fp8", **given}).workload.expert_kernel
        for server in ("trtllm-0.17", None)
        for given in ({}, {"expert_kernel": "measured"})
    ]

    assert kernels == ["as-16-bit", "measured"] * 2


def test_a_scenario_of_a_step_does_not_choose_the_expert_kernel_of_a_plan() -> None:
    """Its default is that of steps; the plan of a scenario is the plan of its model."""
    scenario = build_scenario("mixtral-8x7b", "h100-sxm-80gb", workload={"dtype": "fp8"})
    lengths = {"prompt_len": 1000, "output_len": 200, "num_devices": 1, "formats": []}

    assert shapewright.serve_plan(scenario, **lengths).workload.expert_kernel == "as-16-bit"
    asked = shapewright.serve_plan(scenario, workload={"expert_kernel": "measured"}, **lengths)
    assert asked.workload.expert_kernel == "measured"


def test_the_engine_has_little_effect_on_the_best_plan_of_experts() -> None:
    """A plan for no engine gives at least half of vLLM's tokens: fp8 experts were priced at a fifteenth without one."""
    question = {"device": "h100-sxm-80gb", "num_devices": 8, "prompt_len": 2000, "output_len": 400, "formats": []}
    limits = {"ttft_limit_s": 1.0, "tpot_limit_s": 0.03, "workload": {"dtype": "fp8"}}
    unnamed, vllm = (
        shapewright.serve_plan("qwen3-235b-a22b", server=server, **question, **limits).best()
        for server in (None, "vllm-0.19")
    )

    assert unnamed is not None
    assert vllm is not None
    assert unnamed.tokens_per_s_per_device > 0.5 * vllm.tokens_per_s_per_device


def test_sources_of_a_server_add_to_those_of_all() -> None:
    """A source of its own does not hide the common ones."""
    assert {"fused_projections", "block_tokens"} <= set(load_server("trtllm-1.0").sources)


def test_old_decode_kernels_read_the_cache_for_each_query_head() -> None:
    """Groups of more heads than the kernel shares take as many reads; prefill and smaller groups do not."""
    instance = make_instance()
    (decode,) = [one for one in instance.passes.decode(64, 4000).operations if one.role == "fused"]
    (prefill,) = [one for one in instance.passes.prefill(1, 4000).operations if one.role == "fused"]
    device = instance.scenario.device
    prices = price_operations([decode, prefill], device)

    def ratios(most: int) -> list[float]:
        server = replace(CURRENT_SERVER, most_grouped_heads=most)
        pairs = zip((decode, prefill), prices, strict=True)
        return [float(server.adjust(one, price, device).time_s / price.time_s) for one, price in pairs]

    # Llama-3-8B has 32 query heads and 8 of keys and values.
    assert ratios(1) == pytest.approx([4.0, 1.0])
    assert ratios(4) == pytest.approx([1.0, 1.0])


def test_prompts_cost_the_host_more() -> None:
    """The time of passes with prompts is added to those alone."""
    slow = replace(CURRENT_SERVER, prefill_host_s=0.01)
    shapes = [PassShape(8, 1000), PassShape(prefill_tokens=500), PassShape(8, 1000, 500)]

    def times(server: Server) -> list[float]:
        request = ServingRequest(prompt_len=1000, output_len=101, server=server)
        return [one.middle_s for one in predict_passes(make_instance(request=request), shapes)]

    added = [after - before for before, after in zip(times(CURRENT_SERVER), times(slow), strict=True)]
    assert added == pytest.approx([0.0, 0.01, 0.01])
