"""Search of instances: layouts and formats whose memory holds a sequence, with their capacity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.core.ranges import check_integer
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, joined, with_fields
from shapewright.core.units import format_bytes
from shapewright.lowering.checks import validate_layout
from shapewright.optimize.serving.point import Instance
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.serving.request import ServingFormat, ServingRequest
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.workload import Workload

MOST_STAGES = 8
# Most devices that a model is split over, to report what it needs if it does not fit.
_LARGEST_INSTANCE = 1024
_MOST_LAYOUTS_PRICED = 32
# Most tokens of the pass beside which capacities are computed.
_CAPACITY_PASS_TOKENS = 2048
_DEGREES = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel", "expert_tensor_parallel")


@dataclass(frozen=True, kw_only=True)
class InstanceCapacity:
    """Memory and cache of one instance.

    Attributes:
        format: Element formats.
        layout: Layout of the model.
        weights_bytes: Weights, resident adapters and a draft model on one device of the fullest stage. [byte]
        free_bytes: Memory for the cache on that device, beside weights and a pass. [byte]
        cache_bytes_per_token: Cache of one token on that device. [byte]
        cache_tokens: Tokens that the caches of the instance hold.
        most_sequences: Sequences of prompt and answer that the instance holds at once.
    """

    format: ServingFormat
    layout: ParallelLayout
    weights_bytes: float
    free_bytes: float
    cache_bytes_per_token: float
    cache_tokens: int
    most_sequences: int


@dataclass(frozen=True, kw_only=True)
class InstanceSearch:
    """Search of the instances of a model whose memory holds at least one sequence.

    Attributes:
        scenario: Model, device and kind of attention; layout, phase, batch, lengths and formats are replaced.
        request: Lengths, limits and devices.
        given: Degrees that are fixed, by field name.
    """

    scenario: Scenario
    request: ServingRequest
    given: Mapping[str, int]

    def find(self, formats: Sequence[ServingFormat], notes: list[str]) -> tuple[list[Instance], list[InstanceCapacity]]:
        """Return the instances that hold at least one sequence, with their capacities.

        If no number of devices is given and a format does not fit on a node, the number is doubled until it does.

        Args:
            formats: Element formats; the first is the requested one.
            notes: Receives notes on formats that do not fit, and on layouts that are left out.

        Raises:
            LayoutError: no layout divides the model.
            WorkloadError: no instance holds a sequence in the requested format.
        """
        # A node, or as many devices as the fixed degrees need.
        most = self.request.num_devices or max(self.scenario.device.node_size, _fewest_devices(self.given))
        instances: list[Instance] = []
        capacities: list[InstanceCapacity] = []
        for one in formats:
            limit = most
            fitting = self._list_fitting(one, limit)
            while not fitting and self.request.num_devices is None and limit < _LARGEST_INSTANCE:
                limit *= 2
                fitting = self._list_fitting(one, limit)
            if not fitting:
                reason = self._explain_misfit(one, most)
                if one is formats[0]:
                    raise WorkloadError(reason + self._suggest_formats(formats[1:], most))
                notes.append(reason)
            if len(fitting) > _MOST_LAYOUTS_PRICED:
                notes.append(
                    f"{one.name}: {_MOST_LAYOUTS_PRICED} of {len(fitting)} layouts are priced, for each number of "
                    f"devices those with fewest stages; fix a degree of the layout to try others"
                )
            for instance, capacity in _limit_per_size(fitting, _MOST_LAYOUTS_PRICED):
                instances.append(instance)
                capacities.append(capacity)
        return instances, capacities

    def _list_fitting(self, one: ServingFormat, most_devices: int) -> list[tuple[Instance, InstanceCapacity]]:
        """Return instances of a format that hold a sequence for each pipeline stage, fewest devices first."""
        scenario = self.scenario
        layouts = list(candidate_layouts(scenario, most_devices, self.given))
        if not layouts and self.given:
            check_divides(scenario.config, scenario.workload, self.given)
            degrees = ", ".join(f"{name}={value}" for name, value in self.given.items())
            raise LayoutError(
                f"no layout of at most {most_devices} devices with {degrees} divides this model",
                advice=with_fields("leave a degree out, or give more {num_devices}"),
            )
        fitting = []
        for layout in layouts:
            instance = Instance(scenario.replace(layout=layout), one, self.request)
            capacity = _capacity_of(instance)
            if capacity.most_sequences >= instance.num_streams:
                fitting.append((instance, capacity))
        return fitting

    def _explain_misfit(self, one: ServingFormat, most: int) -> str:
        """Return that the model does not fit, and how many devices it would need."""
        device = self.scenario.device
        job = f"{self.scenario.config.title} with one sequence of {self.request.total_len} tokens in {one.name}"
        limit = most
        while limit < _LARGEST_INSTANCE:
            limit *= 2
            fitting = self._list_fitting(one, limit)
            if fitting:
                nearest = fitting[0][0].layout
                degrees = {name: getattr(nearest, name) for name in _DEGREES if getattr(nearest, name)}
                if nearest.data_parallel == 1:
                    del degrees["data_parallel"]
                shown = ", ".join(f"{name}={value}" for name, value in degrees.items())
                return (
                    f"{job} does not fit on {most} x {device.name} ({format_bytes(device.memory_bytes)} "
                    f"each); it needs {nearest.num_devices} ({shown}): "
                    + with_fields("give {num_devices} {number}", number=nearest.num_devices)
                )
        fewer = "fewer LoRA adapters, " if self.request.adapters else ""
        return (
            f"{job} does not fit on up to {_LARGEST_INSTANCE} x {device.name}, in tensor groups inside a node of "
            f"{device.node_size} and at most {MOST_STAGES} stages; "
            + with_fields(
                "give {fewer}{tensor_parallel} or {pipeline_parallel} for more, a shorter {prompt_len} or "
                "{output_len}, or a device with more memory",
                fewer=fewer,
            )
        )

    def _suggest_formats(self, others: Sequence[ServingFormat], most: int) -> str:
        """Return advice with the fields that select other formats that fit; empty if none does."""
        fitting = [_fields_of(one, self.scenario.workload) for one in others if self._list_fitting(one, most)]
        return ", or " + joined(fitting, " or ") + ", which fits" if fitting else ""


def candidate_layouts(scenario: Scenario, most_devices: int, given: Mapping[str, Any]) -> Iterator[ParallelLayout]:
    """Yield the layouts of one instance, fewest devices first.

    Tensor degrees stay inside a node. An instance holds the experts of a layer once. They are either split like other
    matrices (each device of the expert axis is then a replica of the attention, with sequences of its own), or left
    whole, so that the expert axis includes the tensor axis of one or several replicas.

    Args:
        scenario: Model, device and an inference workload.
        given: Degrees that are fixed, by field name.
    """
    config, device = scenario.config, scenario.device
    tensors = _list_degrees(given, "tensor_parallel", min(device.node_size, most_devices))
    stages = _list_degrees(given, "pipeline_parallel", min(MOST_STAGES, config.num_layers, most_devices))
    experts = _list_degrees(given, "expert_parallel", most_devices if config.num_experts else 1)
    found = []
    for tensor, pipeline, expert in product(tensors, stages, experts):
        for expert_tensor in _list_expert_tensor_degrees(config, tensor, given):
            replicas, rest = divmod(expert * expert_tensor, tensor)
            if rest or replicas != given.get("data_parallel", replicas) or tensor * pipeline * replicas > most_devices:
                continue
            try:
                layout = ParallelLayout(
                    tensor_parallel=tensor,
                    pipeline_parallel=pipeline,
                    data_parallel=replicas,
                    expert_parallel=expert,
                    expert_tensor_parallel=None if expert_tensor == tensor else expert_tensor,
                )
                validate_layout(config, scenario.workload, layout)
            except LayoutError:
                continue
            found.append(layout)
    yield from sorted(found, key=lambda layout: (layout.num_devices, layout.pipeline_parallel, layout.expert_parallel))


def check_given(config: TransformerConfig, given: Mapping[str, Any]) -> None:
    """Check the fixed degrees of an instance.

    Raises:
        LayoutError: a degree is not searched, is not a positive integer, or splits the experts of a dense model.
    """
    for name, value in given.items():
        if name in _DEGREES:
            check_integer(name, value, 1, error=LayoutError, hint="leave it out to try all degrees")
        if name not in _DEGREES:
            raise LayoutError(
                with_fields("{name} is not a choice of a serving plan", name=FieldName(name)),
                advice=with_fields(
                    "it chooses {degrees} ({num_devices} adds replicas of an instance)",
                    degrees=joined(map(FieldName, _DEGREES), ", "),
                ),
            )
        if name in ("data_parallel", "expert_tensor_parallel") and value > 1 and not config.num_experts:
            raise LayoutError(
                f"{name}={value} needs a model with experts, but num_experts=0",
                advice=with_fields("leave it out ({num_devices} adds replicas of an instance)"),
            )


def check_divides(config: TransformerConfig, workload: Workload, given: Mapping[str, int]) -> None:
    """Check that each fixed degree divides the model.

    Raises:
        LayoutError: one of them does not.
    """
    for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
        value = given.get(name, 1)
        more = {"data_parallel": value} if name == "expert_parallel" else {}
        degrees: dict[str, Any] = {name: value, **more}
        validate_layout(config, workload, ParallelLayout(**degrees))


def _fewest_devices(given: Mapping[str, int]) -> int:
    """Return the devices that an instance with the fixed degrees needs, whatever the tensor degree of its experts."""
    tensor, pipeline, replicas, experts = (given.get(name, 1) for name in _DEGREES[:4])
    return tensor * pipeline * max(replicas, experts)


def _list_expert_tensor_degrees(config: TransformerConfig, tensor: int, given: Mapping[str, Any]) -> list[int]:
    """Return the tensor degrees of experts to try: that of the tensor axis and 1, or the fixed one."""
    if not config.num_experts:
        return [tensor]
    return sorted({given.get("expert_tensor_parallel", degree) for degree in (tensor, 1)}, reverse=True)


def _list_degrees(given: Mapping[str, Any], name: str, most: int) -> list[int]:
    """Return the powers of two up to a limit, or the fixed degree."""
    if given.get(name) is not None:
        return [given[name]]
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _fields_of(one: ServingFormat, wanted: Workload) -> str:
    """Return the fields of a workload that select a format."""
    fields = []
    if one.dtype != wanted.dtype:
        fields.append(f"dtype {one.dtype}")
    if one.weight_dtype != one.dtype:
        fields.append(with_fields("{weight_dtype} ") + one.weight_dtype)
    if one.kv_cache_dtype != one.dtype:
        fields.append(with_fields("{kv_cache_dtype} ") + one.kv_cache_dtype)
    return joined(fields, " ")


def _limit_per_size(
    fitting: Sequence[tuple[Instance, InstanceCapacity]], most: int
) -> list[tuple[Instance, InstanceCapacity]]:
    """Return up to ``most`` instances in their order, evenly from the first ones of each number of devices."""
    ranks: dict[int, int] = {}
    ranked = []
    for index, (instance, _) in enumerate(fitting):
        size = instance.layout.num_devices
        ranks[size] = ranks.get(size, -1) + 1
        ranked.append((ranks[size], index))
    return [fitting[index] for index in sorted(index for _, index in sorted(ranked)[:most])]


def _capacity_of(instance: Instance) -> InstanceCapacity:
    """Return the memory and cache of an instance, on its stage that holds the fewest sequences."""
    pass_tokens = min(instance.request.new_len, _CAPACITY_PASS_TOKENS)
    stages = instance.stage_estimates(pass_tokens)
    free = instance.free_bytes(pass_tokens)
    cache = instance.cache_bytes(instance.request.total_len)
    tightest = min(range(len(stages)), key=lambda stage: free[stage] / cache[stage] if cache[stage] else float("inf"))
    return InstanceCapacity(
        format=instance.format,
        layout=instance.layout,
        weights_bytes=(1.0 + instance.request.draft_memory_fraction) * stages[tightest].weights_bytes
        + instance.adapters_bytes,
        free_bytes=free[tightest],
        cache_bytes_per_token=cache[tightest] / instance.request.total_len,
        cache_tokens=instance.cache_tokens(pass_tokens),
        most_sequences=instance.most_sequences(pass_tokens) * instance.layout.data_parallel,
    )
