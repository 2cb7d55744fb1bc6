"""Servers: what an inference engine of one version runs by default, and how its kernels differ from those of records.

    time of an operation   min(price, start + roofline / fraction)   for kernels that the engine has of its own
                           price x factor                            for kernels of the record that it runs differently
                           at least elements x instructions / rate   for decode kernels bound by arithmetic on the cache
    time of a pass         operations + host, at least launches x launch cost where the pass is not a CUDA graph

``data/servers/defaults.toml`` has one table per server and version, with values that its engine documents
(``sources``). ``data/servers/ENGINE.json`` holds what ``python -m shapewright.measure.refit servers`` fits to published
serving throughput, judged with whole (model, device) pairs left out (docs/decisions/0021).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import field, replace
from functools import cache
from importlib import resources
from math import inf
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import WorkloadError, close_names
from shapewright.core.records import dataclass
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.pricing.calibration.donors import has_link
from shapewright.pricing.operations import price_operations

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.pricing.price import Price

_FOLDER = "data/servers"
_DEFAULTS = "defaults.toml"


@dataclass(frozen=True, kw_only=True)
class KernelFit:
    """How a class of kernels of a server differs from the records'.

    Attributes:
        factor: Factor on the price.
        fraction: Fraction of the bound (bandwidth or peak rate) that the server's own kernel reaches; 0 without one.
        start_s: Fixed cost of the server's own kernel. [s]
        instructions_per_element: Instructions of a decode kernel for each element of the keys and values that it reads,
            to convert it and to multiply it with the queries of its group; 0 if bandwidth alone bounds it.
    """

    factor: float = 1.0
    fraction: float = 0.0
    start_s: float = 0.0
    instructions_per_element: float = 0.0

    def adjusted_s(self, price: Price) -> float:
        """Return the time of one execution. [s]"""
        time_s = float(price.time_s)
        if self.fraction:
            time_s = min(time_s, self.start_s + float(price.roofline_s) / self.fraction)
        return self.factor * time_s


_AS_PRICED = KernelFit()
# Rows from which a GEMM is a class of its own: it is bound by arithmetic, one of decoding sequences by its weights.
_LARGE_GEMM = 1024
# Messages from which a collective is a class of its own.
_LARGE_MESSAGE_BYTES = 2.0**26
# Vendor of the only devices that an engine runs on; the others run on devices of several.
_ONLY_VENDOR = {"trtllm": "NVIDIA"}
# Engines without kernels for devices that have no fused attention: TensorRT-LLM's hardware table begins with Ampere
# (nvidia.github.io/TensorRT-LLM, reference/support-matrix).
_FUSED_ATTENTION_ALONE = ("trtllm",)
# Engines whose GEMMs in 8 and 4 bits were measured, by the names of those records.
_MEASURED_GEMMS = ("vllm", "sglang")


@dataclass(frozen=True, kw_only=True)
class Server:
    """An inference engine of one version, with its defaults.

    Attributes:
        name: Name and version that select it, such as ``vllm-0.10``.
        title: Name for people.
        fused_projections: Whether queries, keys and values are one GEMM, and gate and up projection another.
        cuda_graphs: Whether decode passes are CUDA graphs; otherwise the host launches every kernel.
        most_graph_sequences: Largest decode batch with a graph.
        chunked_prefill: Whether prompts are cut to the token budget of a pass.
        mixes_prefill: Whether passes may prefill and decode together; otherwise prefill passes run alone.
        pass_tokens: Token budget of a pass.
        most_sequences: Most sequences that decode at once on a replica.
        scheduler_steps: Decode passes from one look for new requests to the next (num-scheduler-steps of vLLM 0.6).
        most_grouped_heads: Most query heads of a group for which the decode kernel reads keys and values once; it reads
            them once per query head in larger groups. 0 for any.
        reserves_context: Whether memory is kept for a prefill pass over the longest context of the model.
        reserves_answers: Whether a request starts only if its whole answer fits in the cache, so that none is evicted.
        kv_cache_dtype: Format of the cache by format of the weights; where it is not listed, that of the activations.
        block_tokens: Tokens of a cache block.
        memory_fraction: Share of the device's memory for weights, activations and cache.
        fraction_of_free: Whether that share is of the memory that weights and activations leave free, for the cache.
        read_windows: Kinds of attention windows whose layers read their window alone; layers of other kinds read
            everything.
        kept_windows: Kinds of them whose layers also cache their window alone.
        gathers_experts: Whether devices that share experts gather each other's tokens and add up the results
            (all-gather, reduce-scatter) instead of exchanging the rows of each expert; in racks they exchange.
        attention_data_parallel: Whether mixtures of experts are served with replicated attention and experts spread
            over all devices (DEP) where the layout is not given.
        expert_kernel: Kernel of experts by format, in words.
        time_factor: Factor on the time of all operations.
        host_s: Time of a pass that the host adds: scheduling and sampling that do not overlap. [s]
        host_per_sequence_s: The same for each decoding sequence. [s]
        host_per_rank_s: The same for each device of a tensor group, to whose processes the host sends the pass one
            after the other. [s]
        prefill_host_s: The same for each pass with a prompt, besides host_s. [s]
        launch_s: Time that the host needs to launch a kernel without CUDA graphs. [s]
        prompt_experts_fraction: Fraction of the memory's bandwidth at which passes with more tokens than any CUDA graph
            go through the weights of experts, where the kernels of records are faster; 0 for theirs.
        kernels: Differences from the records by class of kernel, see kernel_class.
        interval: 5 % and 95 % quantile of measured / predicted throughput of held-out (model, device) pairs, for
            ``dense`` models and for ``moe``, and of other quantities, as in ``dense.ttft_s``; missing where none of
            the version or an earlier one is known.
        interval_of: Earlier version whose intervals these are; empty if they are those of the version itself.
        sources: Sources of the values, by field.
    """

    name: str = "current"
    title: str = "current engines, with defaults on which they agree"
    fused_projections: bool = True
    cuda_graphs: bool = True
    most_graph_sequences: int = 512
    chunked_prefill: bool = True
    mixes_prefill: bool = True
    pass_tokens: int = 8192
    most_sequences: int = 1024
    scheduler_steps: int = 1
    most_grouped_heads: int = 0
    reserves_context: bool = False
    reserves_answers: bool = False
    kv_cache_dtype: Mapping[str, str] = field(default_factory=dict)
    block_tokens: int = 16
    memory_fraction: float = 0.9
    fraction_of_free: bool = False
    read_windows: tuple[str, ...] = ("sliding", "chunked")
    kept_windows: tuple[str, ...] = ("sliding", "chunked")
    gathers_experts: bool = False
    attention_data_parallel: bool = False
    expert_kernel: Mapping[str, str] = field(default_factory=dict)
    time_factor: float = 1.0
    host_s: float = 0.0
    host_per_sequence_s: float = 0.0
    host_per_rank_s: float = 0.0
    prefill_host_s: float = 0.0
    launch_s: float = 0.0
    prompt_experts_fraction: float = 0.0
    kernels: Mapping[str, KernelFit] = field(default_factory=dict)
    interval: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    interval_of: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """Name of the engine without its version: ``trtllm``, ``vllm``, ``sglang`` or ``current``."""
        return self.name.partition("-")[0]

    @property
    def version(self) -> str:
        """Version of the engine; empty for ``current``."""
        return self.name.partition("-")[2]

    @property
    def gemm_library(self) -> str:
        """Name and version by which records know its GEMMs in 8 and 4 bits; empty where its engine was not measured."""
        return f"{self.engine} {self.version}" if self.engine in _MEASURED_GEMMS else ""

    def changes_prices(self, device: Device) -> bool:
        """Whether it changes the time of any operation on a device: PCIe matters where no link joins all of a node."""
        is_linked = has_link(device) and (device.link_group_size or device.node_size) >= device.node_size
        if self.time_factor != 1.0 or self.most_grouped_heads or self.prompt_experts_fraction:
            return True
        return any(not (is_linked and name.endswith(".pcie")) for name in self.kernels)

    def cache_dtype(self, dtype: str, weight_dtype: str) -> str:
        """Return the format of the cache for formats of GEMMs and weights."""
        found = self.kv_cache_dtype.get(weight_dtype, dtype)
        return found if get_dtype(found).bits >= get_dtype("fp8").bits else "fp8"

    def adjust(self, operation: Operation, price: Price, device: Device) -> Price:
        """Return the price of an operation as this server runs it.

        An all-reduce with a fit of its own is compared with NCCL's, as it was in the fit.
        """
        fit, reads = self.kernel_fit(kernel_class(operation, device)), self.cache_reads(operation)
        if fit.fraction and isinstance(operation, Collective) and operation.is_served:
            (price,) = price_operations([operation.changed(is_served=False)], device)
        slow = self.prompt_experts_fraction
        weights_s = self.weights_s(operation, device) / slow if slow else 0.0
        if not price.time_s or (fit is _AS_PRICED and self.time_factor == reads == 1.0 and not weights_s):
            return price
        own_s = max(fit.adjusted_s(price), float(price.roofline_s), weights_s) * reads
        if fit.instructions_per_element:
            own_s = max(own_s, fit.instructions_per_element * instruction_s(operation, device))
        time_s = own_s * self.time_factor
        scale = time_s / float(price.time_s)
        return replace(price, time_s=time_s, low_s=price.low_s * scale, high_s=price.high_s * scale)

    def kernel_fit(self, name: str) -> KernelFit:
        """Return the fit of a class of kernels, or of the wider class that it is part of, as in ``gemm.fp8.large``."""
        while name and name not in self.kernels:
            name = name.rpartition(".")[0]
        return self.kernels[name] if name else _AS_PRICED

    def weights_s(self, operation: Operation, device: Device) -> float:
        """Return the time to read the weights of experts in a pass too large for a CUDA graph, otherwise 0. [s]"""
        if not isinstance(operation, GroupedGemm) or int(operation.tokens or 0) <= self.most_graph_sequences:
            return 0.0
        return float(operation.changed(m=0).num_bytes) / device.memory_bandwidth_bytes_per_s

    def cache_reads(self, operation: Operation) -> float:
        """Return how often a decode kernel reads the keys and values of a group of query heads."""
        if not isinstance(operation, Attention) or int(operation.query_len) != 1 or not self.most_grouped_heads:
            return 1.0
        group = float(operation.num_heads / operation.num_kv_heads)
        return group if group > self.most_grouped_heads else 1.0

    def pass_host_s(
        self, num_sequences: int, num_kernels: int, device_s: float, *, is_decode: bool, num_ranks: int = 1
    ) -> float:
        """Return the time that the host adds to a pass. [s]

        Args:
            device_s: Time of the pass on the device. [s]
            is_decode: Whether the pass only decodes, so that it may be a CUDA graph.
            num_ranks: Devices of a tensor group.
        """
        is_graph = self.cuda_graphs and is_decode and num_sequences <= self.most_graph_sequences
        idle_s = 0.0 if is_graph else max(self.launch_s * num_kernels - device_s, 0.0)
        prefill_s = 0.0 if is_decode else self.prefill_host_s
        ranks_s = self.host_per_rank_s * num_ranks
        return idle_s + self.host_s + prefill_s + ranks_s + self.host_per_sequence_s * num_sequences


def kind_without(engine: str, device: Device) -> str:
    """Return the kind of the device if an engine, such as ``trtllm``, does not run on it; empty if it does."""
    if _ONLY_VENDOR.get(engine, device.vendor) != device.vendor:
        return f"devices of {device.vendor}"
    is_old = engine in _FUSED_ATTENTION_ALONE and not device.architecture_facts.has_fused_attention
    return f"{device.architecture} devices" if is_old else ""


CURRENT_SERVER = Server(
    kernels={
        "all_reduce.pcie": KernelFit(fraction=0.63, start_s=7e-5),
        "alltoall.pcie": KernelFit(fraction=1.0, start_s=1.8e-4),
    }
)
"""Server where none is named. Blocks of 16 tokens are vLLM's (arXiv 2309.06180, section 4.3, finds 16 to 128 equal);
messages over PCIe as fitted to L40S, A100 PCIe and RTX PRO 6000 (docs/decisions/0021), exchanges when those of
TensorRT-LLM were taken for such. Its host adds no time."""


def is_linked(device: Device, num_ranks: int) -> bool:
    """Whether a link other than PCIe joins the devices of a group of one node."""
    return has_link(device) and num_ranks <= (device.link_group_size or 2**30)


def kernel_class(operation: Operation, device: Device) -> str:
    """Class of an operation's kernel, as in ``Server.kernels``; a name that ends with another word is part of a class.

    Args:
        device: Where it runs: links, PCIe and the network between nodes are different classes.
    """
    if isinstance(operation, Attention):
        cache = "narrow" if get_dtype(operation.kv_cache_dtype or operation.dtype).bits <= 8 else "wide"
        if int(operation.query_len) > 1:
            return f"prefill_attention.{cache}"
        return f"decode_attention.{cache}{'.grouped' if operation.num_heads > operation.num_kv_heads else ''}"
    if isinstance(operation, GroupedGemm):
        facts, stored = device.architecture_facts, operation.weight_dtype or operation.dtype
        words = stored if stored == operation.dtype else f"{operation.dtype}:{stored}"
        return f"experts.{words}.{facts.family or device.architecture}"
    if isinstance(operation, Gemm):
        return f"gemm.{operation.weight_dtype or operation.dtype}{'.large' if operation.m >= _LARGE_GEMM else ''}"
    if isinstance(operation, Collective):
        link = "link" if is_linked(device, int(operation.num_ranks)) else "pcie"
        if int(operation.num_ranks) > int(operation.ranks_per_node):
            link = "network"  # engines' own all-reduces read the memory of the other devices of a node
        # Both halves of an all-reduce: tokens are gathered for experts, and their results are added up.
        is_half = operation.axis == "expert" and operation.op_name in ("all_gather", "reduce_scatter")
        op_name = "all_reduce" if is_half else operation.op_name
        return f"{op_name}.{link}{'.large' if operation.message_bytes >= _LARGE_MESSAGE_BYTES else ''}"
    return ""


def instruction_s(operation: Operation, device: Device) -> float:
    """Return the time of one instruction for each element of the keys and values that a decode kernel reads. [s]

    A core runs half as many instructions as fp32 operations at its peak, where each is a multiply-add. 0 for other
    operations, and if the device's rate is unknown.
    """
    if not isinstance(operation, Attention) or int(operation.query_len) != 1:
        return 0.0
    width = int(operation.head_dim) + int(operation.v_head_dim)
    elements = float(operation.batch_size) * int(operation.num_kv_heads) * int(operation.kv_len) * width
    return elements / (device.dense_flops_per_s.get("fp32", inf) / 2.0)


def load_server(name: str) -> Server:
    """Load a server by name; an engine without a version is its newest one, a patch release its minor version.

    Raises:
        WorkloadError: there is no such server.

    >>> load_server("trtllm").engine, load_server("vllm-0.10.2").version
    ('trtllm', '0.10')
    """
    known = {CURRENT_SERVER.name: CURRENT_SERVER, **_read_servers()}
    folded = name.strip().casefold()
    minor = ".".join(folded.split(".")[:2])
    newest = [each for each in known if each.partition("-")[0] == folded]
    if minor not in known and not newest:
        hint = close_names(folded, known)
        raise WorkloadError(
            f"unknown server {name!r}; {hint + ' ' if hint else ''}choose one of {', '.join(known)}", field="server"
        )
    return known[minor] if minor in known else known[newest[-1]]


def server_names() -> tuple[str, ...]:
    """Names of all servers, the default first, then by engine and version."""
    return (CURRENT_SERVER.name, *_read_servers())


@cache
def _read_servers() -> dict[str, Server]:
    """Read all servers, in the order of the file."""
    folder = resources.files("shapewright.pricing") / _FOLDER
    defaults = tomllib.loads((folder / _DEFAULTS).read_text(encoding="utf-8"))
    fitted: dict[str, dict[str, Any]] = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".json"):
            fitted.update(json.loads(entry.read_text(encoding="utf-8"))["servers"])
    return make_servers(defaults, fitted)


def make_servers(
    defaults: Mapping[str, Mapping[str, Any]], fitted: Mapping[str, Mapping[str, Any]]
) -> dict[str, Server]:
    """Make the servers of all versions from their defaults and what is fitted.

    A version without fitted values has the intervals of the closest earlier version of its engine that has some.

    Args:
        defaults: Fields of each server, the versions of an engine in order; those under ``all`` hold for every server.
        fitted: Fitted fields by server.
    """
    common = defaults["all"]
    tables = ("expert_kernel", "sources")
    servers: dict[str, Server] = {}
    latest: dict[str, str] = {}
    for name, own in defaults.items():
        if name == "all":
            continue
        engine = name.partition("-")[0]
        values = fitted.get(name)
        if values is not None:
            latest[engine] = name
        elif engine in latest:
            values = {"interval": fitted[latest[engine]]["interval"], "interval_of": latest[engine]}
        merged = {key: {**common[key], **own.get(key, {})} for key in tables}
        servers[name] = _parse(name, {**common, **own, **(values or {}), **merged})
    return servers


def _parse(name: str, own: Mapping[str, Any]) -> Server:
    kernels = {key: KernelFit(**fit) for key, fit in own.get("kernels", {}).items()}
    windows = {key: tuple(own[key]) for key in ("read_windows", "kept_windows") if key in own}
    return Server(**{**own, "name": name, "kernels": kernels, **windows})
