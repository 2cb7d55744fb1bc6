"""What an engine's flags need of one instance of a serving plan, and the engine's own table."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Literal

from shapewright.core.dtypes import get_dtype
from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from shapewright.optimize.serving.plan import ServingPlan
    from shapewright.optimize.serving.point import Instance, OperatingPoint
    from shapewright.optimize.serving.request import ServingFormat, ServingRequest
    from shapewright.pricing.servers import Server
    from shapewright.workload.layout import ParallelLayout

Role = Literal["both", "prefill", "decode"]
CHECKPOINT = "checkpoint"
"""Value in ``Engine.formats`` of a format that only a checkpoint in it has."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One version of an inference engine.

    Attributes:
        name: Name of the format.
        title: Name for people.
        version: Version that the flags are of.
        later: Later versions whose option lists were checked too.
        sources: Where its tables are from.
        model_types: Model types of config.json that it knows.
        formats: Formats of GEMMs and weights that it knows, see engines.toml.
        cache_formats: Value of its flag by format of the cache, except the format of the activations.
        block_tokens: Tokens of a cache block that it can have; empty for any.
        lora_ranks: Largest ranks of adapters that it can be started with; empty for any.
    """

    name: str
    title: str
    version: str
    later: tuple[str, ...]
    sources: tuple[str, ...]
    model_types: frozenset[str]
    formats: Mapping[str, str]
    cache_formats: Mapping[str, str]
    block_tokens: tuple[int, ...]
    lora_ranks: tuple[int, ...]

    @property
    def heading(self) -> str:
        """Name and version, such as ``vLLM 0.10.2``."""
        return f"{self.title} {self.version}"

    def at_version_of(self, server: Server) -> Engine:
        """Return the engine at the version of a server, if that version's option list was checked."""
        is_same = server.engine == self.name
        found = [version for version in self.later if is_same and version.startswith(f"{server.version}.")]
        return replace(self, version=found[0]) if found else self

    @property
    def server_name(self) -> str:
        """Name of the server whose kernels a plan for this engine is priced with, such as ``vllm-0.10``."""
        return f"{self.name}-{'.'.join(self.version.split('.')[:2])}"


@cache
def read_engines() -> dict[str, Engine]:
    """Read the tables of all engines."""
    text = (resources.files("shapewright.app.formats.servers") / "engines.toml").read_text(encoding="utf-8")
    return {
        name: Engine(
            name=name,
            title=own["title"],
            version=own["version"],
            later=tuple(own.get("later", ())),
            sources=tuple(own["sources"]),
            model_types=frozenset(own["model_types"]),
            formats=own["formats"],
            cache_formats=own["cache_formats"],
            block_tokens=tuple(own["block_tokens"]),
            lora_ranks=tuple(own["lora_ranks"]),
        )
        for name, own in tomllib.loads(text).items()
    }


def format_key(one: ServingFormat) -> str:
    """Key of ``Engine.formats``.

    >>> from shapewright.optimize.serving.request import read_format
    >>> format_key(read_format("bf16:int4")), format_key(read_format("fp8"))
    ('16:int4', 'fp8:fp8')
    """
    return ":".join("16" if get_dtype(name).bits == 16 else name for name in (one.dtype, one.weight_dtype))


@dataclass(frozen=True, kw_only=True)
class LaunchedInstance:
    """One instance of an operating point, as an engine is started.

    Attributes:
        model: Hub id or folder of the checkpoint.
        role: Whether it prefills, decodes, or both.
        layout: Its layout.
        format: Element formats.
        request: Lengths, cache block, speculative decoding and adapters.
        num_sequences: Sequences at once on a replica of the attention, over all pipeline stages.
        batch_size: Sequences of one decode pass on a replica.
        prefill_tokens: Prompt tokens of one pass on a replica.
        pass_tokens: Tokens of the largest pass on a replica.
        static_fraction: Weights and cache over the device's memory, without those of a draft model.
        free_fraction: Cache over what weights and a pass leave free of the device's memory.
        used_fraction: Weights, a pass and the cache over the device's memory.
        node_size: Devices of a node.
        quantization: Method of a checkpoint in a narrow format, such as ``mxfp4``; empty for one in 16 or 32 bits.
        is_chunked: Whether prompts are cut over passes.
        num_images: Images of a prompt.
    """

    model: str
    role: Role
    layout: ParallelLayout
    format: ServingFormat
    request: ServingRequest
    num_sequences: int
    batch_size: int
    prefill_tokens: int
    pass_tokens: int
    static_fraction: float
    free_fraction: float
    used_fraction: float
    node_size: int
    quantization: str
    is_chunked: bool
    num_images: int

    @property
    def num_stage_devices(self) -> int:
        """Devices of a pipeline stage."""
        return self.layout.tensor_parallel * self.layout.data_parallel

    @property
    def num_nodes(self) -> int:
        """Nodes of the instance."""
        return -(-self.layout.num_devices // self.node_size)

    @property
    def act_dtype(self) -> str:
        """Format of activations outside GEMMs in narrow formats, as engines name it."""
        names = {"fp16": "float16", "fp32": "float32"}
        return names.get(self.format.dtype, "bfloat16")

    @property
    def has_own_cache_format(self) -> bool:
        """Whether the cache is narrower than the activations."""
        return get_dtype(self.format.kv_cache_dtype).bits < 16


def launched_instance(
    plan: ServingPlan, point: OperatingPoint, instance: Instance, role: Role, model: str
) -> LaunchedInstance:
    """Return the facts of one instance of an operating point.

    Args:
        instance: The instance, with the layout of its role.
        model: Hub id or folder of the checkpoint.
    """
    request, layout, device = plan.request, instance.layout, plan.device
    prompts = max(point.prefill_tokens // request.new_len, 1)
    batch_size = prompts if role == "prefill" else point.batch_size
    decode_tokens = 0 if role == "prefill" else batch_size * request.query_len
    prefill_tokens = 0 if role == "decode" else point.prefill_tokens
    pass_tokens = prefill_tokens + decode_tokens
    stages, free = instance.stage_estimates(pass_tokens), instance.free_bytes(pass_tokens)
    cache = instance.cache_bytes(request.total_len)
    tightest = min(range(len(stages)), key=lambda stage: free[stage] / cache[stage] if cache[stage] else float("inf"))
    memory_bytes, fraction = device.memory_bytes, request.memory_fraction
    own_cache_bytes = free[tightest] / (1.0 + request.draft_memory_fraction)
    # What weights and a pass leave: the cache takes a share of it, or leaves a share of the whole memory unused.
    takes_share = request.server.fraction_of_free
    left_bytes = free[tightest] / fraction if takes_share else free[tightest] + (1.0 - fraction) * memory_bytes
    return LaunchedInstance(
        model=model,
        role=role,
        layout=layout,
        format=point.format,
        request=request,
        num_sequences=batch_size * layout.pipeline_parallel,
        batch_size=batch_size,
        prefill_tokens=prefill_tokens,
        pass_tokens=pass_tokens,
        static_fraction=(stages[tightest].weights_bytes + instance.adapters_bytes + own_cache_bytes) / memory_bytes,
        free_fraction=free[tightest] / left_bytes,
        used_fraction=1.0 - (left_bytes - free[tightest]) / memory_bytes,
        node_size=device.node_size,
        quantization=plan.scenario.model.quantization,
        is_chunked=role == "both" and point.prefill_tokens < request.new_len,
        num_images=plan.workload.images,
    )
