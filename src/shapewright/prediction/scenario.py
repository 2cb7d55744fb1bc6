"""Scenario: the model, device, workload, layout and training software of a prediction, with a cache of its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import ShapewrightError, WorkloadError, close_names
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.memory.estimate import estimate_memory
from shapewright.models.read import Model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.predict import predict
from shapewright.pricing.software import TUNED_SOFTWARE, Software
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.memory.estimate import MemoryEstimate
    from shapewright.prediction.predict import Prediction

    Outcomes = dict[tuple[TransformerConfig, Workload, ParallelLayout], Prediction | ShapewrightError]

_CONFIG_FIELDS = frozenset(spec.name for spec in fields(TransformerConfig))
_WORKLOAD_FIELDS = frozenset(spec.name for spec in fields(Workload))
_LAYOUT_FIELDS = frozenset(spec.name for spec in fields(ParallelLayout))
_PARTS = ("model", "device", "workload", "layout", "software", "remarks")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that a prediction depends on.

    Copies made by ``replace`` with the same device and software share a cache of predictions.

    Attributes:
        model: The model, with its source.
        device: The device; it carries its calibration (``own_records``, ``uncalibrated``, ``physics_only``).
        workload: The workload.
        layout: The parallel layout.
        software: Generation of the training software.
        remarks: Options given that have no effect, and values that were assumed.
    """

    model: Model
    device: Device
    workload: Workload
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    software: Software = TUNED_SOFTWARE
    remarks: tuple[Note, ...] = ()
    _outcomes: Outcomes = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        config: TransformerConfig,
        device: Device,
        workload: Workload,
        layout: ParallelLayout | None = None,
        software: Software = TUNED_SOFTWARE,
    ) -> Scenario:
        """Build a scenario from a config that was built in Python."""
        model = Model(config=config, raw=None, source="TransformerConfig")
        return cls(model=model, device=device, workload=workload, layout=layout or ParallelLayout(), software=software)

    @property
    def config(self) -> TransformerConfig:
        """The config of the model."""
        return self.model.config

    @property
    def notes(self) -> tuple[Note, ...]:
        """How the config was read, which options have no effect, and which values were assumed."""
        of_model = (text if isinstance(text, Note) else Note(text, "model") for text in self.model.notes)
        return (*of_model, *self.remarks)

    def replace(self, **changes: Any) -> Scenario:
        """Copy the scenario with changed values.

        Args:
            changes: New values by field of TransformerConfig, Workload or ParallelLayout (their names do not overlap),
                or whole parts: ``model``, ``device``, ``workload``, ``layout``, ``software``, ``remarks``. Changing the
                recomputation mode resets the number of recomputed layers, which was set for the old mode.

        Raises:
            WorkloadError: a field is unknown.
            ShapewrightError: the values contradict each other.
        """
        parts = {name: value for name, value in changes.items() if name in _PARTS}
        for name in changes.keys() - parts.keys() - _CONFIG_FIELDS - _WORKLOAD_FIELDS - _LAYOUT_FIELDS:
            known = sorted(_CONFIG_FIELDS | _WORKLOAD_FIELDS | _LAYOUT_FIELDS)
            raise WorkloadError(f"unknown field {name!r} of a scenario; {close_names(name, known)}".rstrip("; "))
        config = {name: value for name, value in changes.items() if name in _CONFIG_FIELDS}
        workload = {name: value for name, value in changes.items() if name in _WORKLOAD_FIELDS}
        layout = {name: value for name, value in changes.items() if name in _LAYOUT_FIELDS}
        if config:
            model = parts.get("model", self.model)
            parts["model"] = replace(model, config=replace(model.config, **config))
        if workload:
            before = parts.get("workload", self.workload)
            mode = workload.get("recompute", before.recompute)
            parts["workload"] = replace(before.with_recompute(mode), **workload)
        if layout:
            parts["layout"] = replace(parts.get("layout", self.layout), **layout)
        changed = replace(self, **parts)
        if changed.device is self.device and changed.software is self.software:
            object.__setattr__(changed, "_outcomes", self._outcomes)
        return changed

    def try_replace(self, changes: Mapping[str, Any]) -> Scenario | None:
        """Copy the scenario with changed values; None where they contradict each other."""
        try:
            return self.replace(**changes)
        except ShapewrightError:
            return None

    def predict(self) -> Prediction:
        """Predict the step.

        Raises:
            ShapewrightError: the layout does not divide the model, or the device cannot run or price it.
        """
        outcome = self.outcome
        if isinstance(outcome, ShapewrightError):
            raise outcome.with_traceback(None)  # kept for later calls, each of which would add its frames
        return outcome

    @cached_property
    def outcome(self) -> Prediction | ShapewrightError:
        """The prediction, or the error that predicting raises."""
        key = (self.config, self.workload, self.layout)
        known = self._outcomes.get(key)
        if known is not None:
            return known
        try:
            outcome: Prediction | ShapewrightError = predict(
                self.config,
                device=self.device,
                workload=self.workload,
                layout=self.layout,
                software=self.software,
            )
        except ShapewrightError as error:
            outcome = error
        self._outcomes[key] = outcome
        return outcome

    @property
    def is_possible(self) -> bool:
        """Whether the step can be predicted: the layout divides the model and the device has the dtype."""
        return not isinstance(self.outcome, ShapewrightError)

    def estimate_memory(self) -> MemoryEstimate:
        """Estimate the memory of one device of the fullest pipeline stage."""
        return estimate_memory(self.config, self.workload, self.layout)

    @cached_property
    def fits(self) -> bool:
        """Whether the step can run and its memory is within the device's."""
        if (self.config, self.workload, self.layout) not in self._outcomes:  # memory is estimated faster than time
            return self.estimate_memory().total_bytes <= self.device.memory_bytes and self.is_possible
        return self.is_possible and self.predict().memory.total_bytes <= self.device.memory_bytes

    @property
    def time_per_token_s(self) -> float:
        """Device time per token, comparable between batch sizes and layouts. [s]"""
        return 1.0 / self.predict().tokens_per_s_per_device

    @property
    def dtype_and_device(self) -> str:
        """Element format and device, as messages name them."""
        return f"{self.workload.dtype} on {self.device.name}"


class ScenarioResult:
    """Base class of results of one scenario, with the parts of the scenario as properties."""

    scenario: Scenario

    @property
    def config(self) -> TransformerConfig:
        """The model."""
        return self.scenario.config

    @property
    def device(self) -> Device:
        """The device."""
        return self.scenario.device

    @property
    def workload(self) -> Workload:
        """The workload of the scenario, without the fields that a result chooses."""
        return self.scenario.workload
