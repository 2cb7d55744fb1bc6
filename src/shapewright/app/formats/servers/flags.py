"""Flags of one instance for each engine, with warnings where the engine cannot do what the plan assumes.

Sources of the flags: see engines.toml; tests parse what is written here by the engines' recorded option lists
(tests/unit/server_grammars.json).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from math import floor
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.app.formats.servers.instance import CHECKPOINT, format_key
from shapewright.core.numeric import round_up
from shapewright.core.units import format_number_of

if TYPE_CHECKING:
    from shapewright.app.formats.servers.instance import Engine, LaunchedInstance
    from shapewright.optimize.serving.adapters import Adapters

_VLLM_GRAPH_SEQUENCES = 512
"""Largest batch with a CUDA graph if vLLM is not told otherwise (vllm/config/scheduler.py)."""
_SGLANG_SPARE_TOKENS = 8
"""Tokens that SGLang keeps free of the context length, rounded up (tp_worker.py)."""
_SGLANG_PREFILL_TOKENS = 16384
"""Prompt tokens from which SGLang adds no further prompt to a pass if it is not told otherwise (server_args.py)."""
_CHECKPOINT_FORMATS = {"fp8": "fp8", "mxfp4": "fp4"}
"""Format of the weights by the method of a checkpoint, where the method has one only (transformers 5.23)."""
_PORTS = {"both": 8000, "prefill": 8100, "decode": 8200}
_DRAFT_MODEL = "DRAFT_MODEL"


_LORA_MODULES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
_LORA_MODULES |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
"""Modules with adapters as SGLang names them, by role."""


class Flag(NamedTuple):
    """A flag and its value; None for a switch, a list for several."""

    name: str
    value: object = None


class Command(NamedTuple):
    """A command that starts one instance.

    Attributes:
        program: Words before the flags.
        flags: The flags.
        settings: Values of a YAML file that the command reads; empty for none.
    """

    program: str
    flags: list[Flag]
    settings: dict[str, Any]


def _fraction(value: float) -> float:
    """Round a share of memory down to a tenth of a percent."""
    return floor(value * 1000.0 + 1e-9) / 1000.0


def _quantization(engine: Engine, one: LaunchedInstance) -> str:
    method = engine.formats[format_key(one.format)]
    return "" if one.quantization or method == CHECKPOINT else method


def _cache_format(engine: Engine, one: LaunchedInstance) -> str:
    return engine.cache_formats[one.format.kv_cache_dtype] if one.has_own_cache_format else "auto"


def vllm_command(engine: Engine, one: LaunchedInstance) -> Command:
    """Return the command of vLLM for an instance."""
    return Command(f"vllm serve {shlex.quote(one.model)}", list(_vllm_flags(engine, one)), {})


def _vllm_flags(engine: Engine, one: LaunchedInstance) -> Iterator[Flag]:
    layout, request = one.layout, one.request
    yield Flag("--port", _PORTS[one.role])
    yield Flag("--tensor-parallel-size", layout.tensor_parallel)
    yield Flag("--pipeline-parallel-size", layout.pipeline_parallel)
    if layout.data_parallel > 1:
        yield Flag("--data-parallel-size", layout.data_parallel)
    if layout.tensor_parallel * layout.pipeline_parallel > one.node_size:
        yield Flag("--distributed-executor-backend", "ray")
    elif one.num_nodes > 1:
        local = one.node_size // (layout.tensor_parallel * layout.pipeline_parallel)
        yield Flag("--data-parallel-size-local", local)
        yield Flag("--data-parallel-address", "$HEAD_ADDRESS")
        yield Flag("--data-parallel-hybrid-lb")
        yield Flag("--data-parallel-start-rank", f"$((NODE_RANK * {local}))")
    if layout.expert_parallel > 1:
        yield Flag("--enable-expert-parallel")
    yield Flag("--dtype", one.act_dtype)
    if method := _quantization(engine, one):
        yield Flag("--quantization", method)
    yield Flag("--kv-cache-dtype", _cache_format(engine, one))
    if request.block_tokens in engine.block_tokens:
        yield Flag("--block-size", request.block_tokens)
    yield Flag("--max-model-len", request.total_len)
    yield Flag("--max-num-seqs", one.num_sequences)
    # vLLM refuses fewer tokens of a pass than sequences.
    yield Flag("--max-num-batched-tokens", max(one.pass_tokens, one.num_sequences))
    yield Flag("--gpu-memory-utilization", _fraction(one.used_fraction))
    yield Flag("--enable-chunked-prefill")
    yield Flag("--enable-prefix-caching" if request.cached_len else "--no-enable-prefix-caching")
    if one.num_images:
        yield Flag("--limit-mm-per-prompt", json.dumps({"image": one.num_images}))
    if one.batch_size > _VLLM_GRAPH_SEQUENCES and one.role != "prefill":
        name = "--cuda-graph-sizes" if engine.version.startswith("0.10.") else "--max-cudagraph-capture-size"
        yield Flag(name, one.batch_size)
    if request.speculation and one.role != "prefill":
        draft = {
            "method": "eagle",
            "model": _DRAFT_MODEL,
            "num_speculative_tokens": request.speculation.num_draft_tokens,
        }
        yield Flag("--speculative-config", json.dumps(draft))
    if request.adapters:
        yield Flag("--enable-lora")
        yield Flag("--max-loras", request.adapters.num_resident)
        yield Flag("--max-lora-rank", next((rank for rank in engine.lora_ranks if rank >= request.adapters.rank), 0))
    if one.role != "both":
        yield Flag("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}))


def sglang_command(engine: Engine, one: LaunchedInstance) -> Command:
    """Return the command of SGLang for an instance."""
    return Command("python -m sglang.launch_server", list(_sglang_flags(engine, one)), {})


def _sglang_flags(engine: Engine, one: LaunchedInstance) -> Iterator[Flag]:
    layout, request = one.layout, one.request
    replicas = layout.data_parallel
    is_mixed = one.role == "both" and layout.pipeline_parallel == 1 and not request.speculation
    yield Flag("--model-path", one.model)
    yield Flag("--port", _PORTS[one.role])
    yield Flag("--tp-size", one.num_stage_devices)
    yield Flag("--pp-size", layout.pipeline_parallel)
    if replicas > 1:
        yield Flag("--dp-size", replicas)
        yield Flag("--enable-dp-attention")
    if layout.expert_parallel > 1:
        yield Flag("--ep-size", layout.expert_parallel)
        if replicas > 1:
            yield Flag("--moe-a2a-backend", "deepep")
    if one.num_nodes > 1:
        yield Flag("--nnodes", one.num_nodes)
        yield Flag("--node-rank", "$NODE_RANK")
        yield Flag("--dist-init-addr", "$HEAD_ADDRESS:20000")
    yield Flag("--dtype", one.act_dtype)
    if method := _quantization(engine, one):
        yield Flag("--quantization", method)
    yield Flag("--kv-cache-dtype", _cache_format(engine, one))
    yield Flag("--page-size", request.block_tokens)
    yield Flag("--context-length", request.total_len + _SGLANG_SPARE_TOKENS)
    # Both are for all replicas together; SGLang divides them (tp_worker.py, server_args.py).
    yield Flag("--max-running-requests", one.num_sequences * replicas)
    if one.role != "decode":
        # In mixed passes SGLang takes the decoding sequences off both limits (schedule_policy.py).
        tokens = one.pass_tokens if is_mixed else one.prefill_tokens
        chunk = round_up(tokens, request.block_tokens)
        yield Flag("--chunked-prefill-size", chunk * replicas)
        if chunk >= _SGLANG_PREFILL_TOKENS:
            yield Flag("--max-prefill-tokens", chunk + 1)
    yield Flag("--mem-fraction-static", _fraction(one.static_fraction))
    if one.role != "prefill":
        yield Flag("--cuda-graph-max-bs", one.batch_size)
    if layout.pipeline_parallel > 1:
        yield Flag("--disable-overlap-schedule")
    elif is_mixed:
        yield Flag("--enable-mixed-chunk")
    if not request.cached_len:
        yield Flag("--disable-radix-cache")
    if request.speculation and one.role != "prefill" and layout.pipeline_parallel == 1:
        drafted = request.speculation.num_draft_tokens
        yield Flag("--speculative-algorithm", "EAGLE")
        yield Flag("--speculative-draft-model-path", _DRAFT_MODEL)
        yield Flag("--speculative-num-steps", drafted)
        yield Flag("--speculative-eagle-topk", 1)
        yield Flag("--speculative-num-draft-tokens", drafted + 1)
    if request.adapters:
        yield Flag("--enable-lora")
        yield Flag("--max-loras-per-batch", request.adapters.num_resident)
        yield Flag("--max-lora-rank", request.adapters.rank)
        yield Flag("--lora-target-modules", _lora_modules(request.adapters))
    if one.role != "both":
        yield Flag("--disaggregation-mode", one.role)


def _lora_modules(adapters: Adapters) -> list[str]:
    blocks = {role: "mlp" if role in ("gate", "up", "down") else "attention" for role in _LORA_MODULES}
    return [name for role, name in _LORA_MODULES.items() if adapters.adapts(blocks[role], role)]


def trtllm_command(engine: Engine, one: LaunchedInstance) -> Command:
    """Return the command of TensorRT-LLM for an instance."""
    layout, request = one.layout, one.request
    file = "engine.yaml" if one.role == "both" else f"{one.role}.yaml"
    flags = [
        Flag("--backend", "pytorch"),
        Flag("--port", _PORTS[one.role]),
        Flag("--tp_size", one.num_stage_devices),
        Flag("--pp_size", layout.pipeline_parallel),
        *([Flag("--ep_size", layout.expert_parallel)] if layout.expert_parallel > 1 else []),
        Flag("--max_batch_size", one.num_sequences),
        Flag("--max_num_tokens", max(one.pass_tokens, one.num_sequences)),
        Flag("--max_seq_len", request.total_len),
        Flag("--kv_cache_free_gpu_memory_fraction", _fraction(one.free_fraction)),
        Flag("--extra_llm_api_options", file),
    ]
    settings: dict[str, Any] = {
        "enable_attention_dp": layout.data_parallel > 1,
        "enable_chunked_prefill": one.is_chunked,
        "kv_cache_config": {"dtype": _cache_format(engine, one), "enable_block_reuse": bool(request.cached_len)},
    }
    if one.role != "prefill":
        settings["cuda_graph_config"] = {"enable_padding": True, "max_batch_size": one.batch_size}
    if one.role != "both":
        settings["cache_transceiver_config"] = {"backend": "default", "max_tokens_in_buffer": request.prompt_len}
        settings["disable_overlap_scheduler"] = one.role == "prefill"
    if request.speculation and one.role != "prefill":
        settings["speculative_config"] = {
            "decoding_type": "DraftTarget",
            "max_draft_len": request.speculation.num_draft_tokens,
            "speculative_model_dir": _DRAFT_MODEL,
        }
    if request.adapters:
        settings["enable_lora"] = True
        settings["lora_config"] = {
            "max_lora_rank": request.adapters.rank,
            "max_loras": request.adapters.num_resident,
            "max_cpu_loras": request.adapters.num_resident,
        }
    launcher = ""
    if one.num_nodes > 1:
        launcher = f"mpirun -n {layout.num_devices} --npernode {one.node_size} --hostfile HOSTS trtllm-llmapi-launch "
    return Command(f"{launcher}trtllm-serve {shlex.quote(one.model)}", flags, settings)


COMMANDS = {"vllm": vllm_command, "sglang": sglang_command, "trtllm": trtllm_command}


def layout_problem(engine: Engine, one: Any) -> str:
    """Return why an engine cannot have a layout; empty if it can."""
    world, experts, each = one.tensor_parallel * one.data_parallel, one.expert_parallel, one.expert_tensor_degree
    if engine.name == "vllm" and experts > 1 and (experts, each) != (world, 1):
        return f"experts over EP {experts} x ETP {each}: vLLM has EP = TP x DP = {world} or none"
    if engine.name == "vllm" and experts == 1 and one.data_parallel > 1:
        return f"DP {one.data_parallel} of the attention without expert parallelism"
    if engine.name == "trtllm" and one.data_parallel > 1 and one.tensor_parallel > 1:
        return f"attention of TP {one.tensor_parallel} x DP {one.data_parallel}: it is either split or replicated"
    return ""


def warnings_of(engine: Engine, one: LaunchedInstance) -> Iterator[str]:
    """Yield what an instance of the engine does differently from what the plan assumes."""
    layout, request = one.layout, one.request
    if problem := layout_problem(engine, layout):
        yield f"{engine.heading} cannot have {problem}"
    if engine.formats[format_key(one.format)] == CHECKPOINT and not one.quantization:
        yield (
            f"{engine.heading} serves {one.format.name} only from a checkpoint in this format: replace {one.model} "
            f"with a quantized one"
        )
    stored = _CHECKPOINT_FORMATS.get(one.quantization)
    if stored and stored != one.format.weight_dtype:
        yield (
            f"{one.model} is a checkpoint in {one.quantization} and served as such, not in {one.format.name} as "
            f"planned: plan in {stored}"
        )
    if engine.block_tokens and request.block_tokens not in engine.block_tokens:
        known = ", ".join(map(str, engine.block_tokens))
        yield f"cache blocks of {format_number_of(request.block_tokens, 'token')}: {engine.heading} has {known}"
    if engine.name == "vllm" and layout.tensor_parallel * layout.pipeline_parallel > one.node_size:
        yield f"{engine.heading} spans nodes with Ray: start a Ray cluster over {one.num_nodes} nodes, then run it once"
    if request.speculation and one.role != "prefill":
        yield f"replace {_DRAFT_MODEL} with a draft model (EAGLE for vLLM and SGLang) whose acceptance is as assumed"
    if engine.name == "sglang" and layout.pipeline_parallel > 1:
        yield (
            f"{engine.heading} with pipeline stages has neither mixed passes nor overlapped scheduling: tokens take "
            f"longer than predicted"
        )
        if request.speculation:
            yield f"{engine.heading} has no speculative decoding with pipeline stages: it is left out"
    elif engine.name == "sglang" and request.speculation and one.role == "both":
        yield f"{engine.heading} has no mixed passes with speculative decoding: prompts and answers take turns"
    if engine.name == "vllm" and layout.data_parallel > 1:
        yield (
            f"{engine.heading} exchanges tokens of experts by broadcast unless VLLM_ALL2ALL_BACKEND names another way, "
            f"such as deepep_high_throughput for prompts and deepep_low_latency for answers"
        )
    if engine.name == "vllm" and request.speculation and layout.pipeline_parallel > 1:
        yield f"{engine.heading} has no speculative decoding with pipeline stages"
