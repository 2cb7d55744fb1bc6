"""Which instances hold a model: layouts and formats in which a sequence at least fits, and what each holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.errors import LayoutError, WorkloadError
from shapewright.serving.instance import Instance
from shapewright.serving.layouts import MOST_STAGES, candidate_layouts, check_divides, degrees_of, least_devices
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.serving.request import ServingFormat, ServingRequest
    from shapewright.workload import Workload

# Devices up to which a model that does not fit is spread, to say what it would need.
_LARGEST_INSTANCE = 1024
_MOST_LAYOUTS_PRICED = 32
# Tokens of the pass that the table of capacities leaves room for.
_CAPACITY_PASS_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class InstanceCapacity:
    """What one instance holds.

    Attributes:
        format: Element formats.
        layout: How the model is spread.
        weights_bytes: Weights on one device of the fullest stage. [byte]
        free_bytes: What weights and a pass leave for the cache there. [byte]
        cache_bytes_per_token: Cache of one token on one device of that stage. [byte]
        cache_tokens: Tokens that the caches of the instance hold.
        most_sequences: Sequences of prompt and answer that fit at once in the instance.
    """

    format: ServingFormat
    layout: ParallelLayout
    weights_bytes: float
    free_bytes: float
    cache_bytes_per_token: float
    cache_tokens: int
    most_sequences: int


@dataclass(frozen=True, kw_only=True)
class InstanceFinder:
    """Looks for the instances of a model that hold a sequence.

    Attributes:
        config: The model.
        device: What it runs on.
        workload: Kind of attention; its phase, batch, lengths and formats are replaced.
        request: Lengths, limits and devices.
        given: Degrees that are fixed.
    """

    config: TransformerConfig
    device: Device
    workload: Workload
    request: ServingRequest
    given: Mapping[str, int]

    def find(self, formats: Sequence[ServingFormat], said: list[str]) -> tuple[list[Instance], list[InstanceCapacity]]:
        """Instances that hold a sequence at least, and what each holds.

        Where no number of devices is given and a node is not enough for a format, twice as many are looked at, and so
        on.

        Args:
            formats: Element formats; the first is the wanted one.
            said: Gets what there is to say of formats that do not fit, and of layouts that are left out.

        Raises:
            LayoutError: no layout divides the model.
            WorkloadError: none holds a sequence in the wanted format.
        """
        # A node, or as many devices as the fixed degrees need.
        most = self.request.num_devices or max(self.device.node_size, least_devices(self.given))
        instances: list[Instance] = []
        capacities: list[InstanceCapacity] = []
        for one in formats:
            limit = most
            held = self._hold(one, limit)
            while not held and self.request.num_devices is None and limit < _LARGEST_INSTANCE:
                limit *= 2
                held = self._hold(one, limit)
            if not held:
                words = self._misfit_words(one, most)
                if one is formats[0]:
                    raise WorkloadError(words + self._words_on_narrower(formats[1:], most))
                said.append(words)
            if len(held) > _MOST_LAYOUTS_PRICED:
                said.append(
                    f"{one.name}: {_MOST_LAYOUTS_PRICED} of {len(held)} layouts are priced, of every number of GPUs "
                    f"those with fewest stages; fix --tp, --pp, --dp, --ep or --etp to look at others"
                )
            for instance, capacity in _spread_over_sizes(held, _MOST_LAYOUTS_PRICED):
                instances.append(instance)
                capacities.append(capacity)
        return instances, capacities

    def _hold(self, one: ServingFormat, most_devices: int) -> list[tuple[Instance, InstanceCapacity]]:
        """Instances of a format that hold a sequence for each pipeline stage, fewest devices first."""
        layouts = list(candidate_layouts(self.config, self.device, self.workload, most_devices, self.given))
        if not layouts and self.given:
            check_divides(self.config, self.workload, self.given)
            words = ", ".join(f"{name}={value}" for name, value in self.given.items())
            raise LayoutError(
                f"no layout of at most {most_devices} devices with {words} divides this model; leave a degree out, or "
                f"give more --gpus"
            )
        held = []
        for layout in layouts:
            instance = Instance(self.config, self.device, self.workload, layout, one, self.request)
            capacity = _capacity_of(instance)
            if capacity.most_sequences >= instance.num_streams:
                held.append((instance, capacity))
        return held

    def _misfit_words(self, one: ServingFormat, most: int) -> str:
        """What a model that does not fit would need."""
        job = f"{self.config.title} with one sequence of {self.request.total_len} tokens in {one.name}"
        limit = most
        while limit < _LARGEST_INSTANCE:
            limit *= 2
            held = self._hold(one, limit)
            if held:
                nearest = held[0][0].layout
                told = {name: value for name, value in degrees_of(nearest).items() if value}
                if nearest.data_parallel == 1:
                    del told["data_parallel"]
                degrees = ", ".join(f"{name}={value}" for name, value in told.items())
                return (
                    f"{job} does not fit on {most} x {self.device.name} ({format_bytes(self.device.memory_bytes)} "
                    f"each); it needs {nearest.num_devices} ({degrees}): give --gpus {nearest.num_devices}"
                )
        return (
            f"{job} fits on none of up to {_LARGEST_INSTANCE} x {self.device.name}, in tensor groups inside a node of "
            f"{self.device.node_size} and at most {MOST_STAGES} stages; give --tp or --pp for more, a shorter --isl or "
            f"--osl, or a device with more memory"
        )

    def _words_on_narrower(self, others: Sequence[ServingFormat], most: int) -> str:
        """The options that take those of other formats that do fit; nothing where none does."""
        fitting = [_options_of(one, self.workload) for one in others if self._hold(one, most)]
        return f", or {' or '.join(fitting)}, which fits" if fitting else ""


def _options_of(one: ServingFormat, wanted: Workload) -> str:
    """Options of the command that make a format the wanted one."""
    options = []
    if one.dtype != wanted.dtype:
        options.append(f"--dtype {one.dtype}")
    if one.weight_dtype != one.dtype:
        options.append(f"--weight-dtype {one.weight_dtype}")
    if one.kv_cache_dtype != one.dtype:
        options.append(f"--kv-cache-dtype {one.kv_cache_dtype}")
    return " ".join(options)


def _spread_over_sizes(
    held: Sequence[tuple[Instance, InstanceCapacity]], most: int
) -> list[tuple[Instance, InstanceCapacity]]:
    """At most some of the instances, in their order: of every number of devices as many, the first of each."""
    ranks: dict[int, int] = {}
    ranked = []
    for place, (instance, _) in enumerate(held):
        size = instance.layout.num_devices
        ranks[size] = ranks.get(size, -1) + 1
        ranked.append((ranks[size], place))
    return [held[place] for place in sorted(place for _, place in sorted(ranked)[:most])]


def _capacity_of(instance: Instance) -> InstanceCapacity:
    pass_tokens = min(instance.request.new_len, _CAPACITY_PASS_TOKENS)
    stages = instance.stage_estimates(pass_tokens)
    free = instance.free_bytes(pass_tokens)
    cache = instance.cache_bytes(instance.request.total_len)
    tightest = min(range(len(stages)), key=lambda stage: free[stage] / cache[stage] if cache[stage] else float("inf"))
    return InstanceCapacity(
        format=instance.format,
        layout=instance.layout,
        weights_bytes=stages[tightest].weights_bytes,
        free_bytes=free[tightest],
        cache_bytes_per_token=cache[tightest] / instance.request.total_len,
        cache_tokens=instance.cache_tokens(pass_tokens),
        most_sequences=instance.most_sequences(pass_tokens) * instance.layout.data_parallel,
    )
