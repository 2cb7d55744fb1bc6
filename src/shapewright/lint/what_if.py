"""WhatIf: a model on a device doing some work, and the same with some fields changed, each predicted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from shapewright.config.transformer import TransformerConfig
from shapewright.errors import ShapewrightError
from shapewright.layout import ParallelLayout
from shapewright.memory import estimate_memory
from shapewright.perf.software import TUNED
from shapewright.predict import predict
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.predict import Prediction

    Memo = dict[tuple[TransformerConfig, Workload, ParallelLayout], Prediction | ShapewrightError]

_CONFIG_FIELDS = frozenset(spec.name for spec in fields(TransformerConfig))
_WORKLOAD_FIELDS = frozenset(spec.name for spec in fields(Workload))
_LAYOUT_FIELDS = frozenset(spec.name for spec in fields(ParallelLayout))


class WhatIf:
    """One situation. Changed copies share what has been predicted so far, so that asking twice costs nothing.

    Attributes:
        config: The model.
        device: The device.
        workload: What is run.
        layout: How it is spread.
    """

    def __init__(
        self,
        config: TransformerConfig,
        device: Device,
        workload: Workload,
        layout: ParallelLayout,
        *,
        uncalibrated: bool = False,
        software: str = TUNED,
        memo: Memo | None = None,
    ) -> None:
        self.config, self.device, self.workload, self.layout = config, device, workload, layout
        self._uncalibrated, self._software = uncalibrated, software
        self._memo: Memo = {} if memo is None else memo

    def __repr__(self) -> str:
        return f"WhatIf({self.config!r}, {self.device.name}, {self.workload!r}, {self.layout!r})"

    def changed(self, changes: Mapping[str, Any]) -> WhatIf | None:
        """The same with other values of some fields; None where the values contradict each other.

        Args:
            changes: New values by field name; the names of config, workload and layout do not overlap.
        """
        workload = {name: value for name, value in changes.items() if name in _WORKLOAD_FIELDS}
        try:
            return WhatIf(
                replace(self.config, **{name: value for name, value in changes.items() if name in _CONFIG_FIELDS}),
                self.device,
                replace(self.workload.with_recompute(workload.get("recompute", self.workload.recompute)), **workload),
                replace(self.layout, **{name: value for name, value in changes.items() if name in _LAYOUT_FIELDS}),
                uncalibrated=self._uncalibrated,
                software=self._software,
                memo=self._memo,
            )
        except ShapewrightError:
            return None

    @property
    def outcome(self) -> Prediction | ShapewrightError:
        """The prediction, or why there can be none."""
        key = (self.config, self.workload, self.layout)
        if key not in self._memo:
            try:
                self._memo[key] = predict(
                    self.config,
                    device=self.device,
                    workload=self.workload,
                    layout=self.layout,
                    uncalibrated=self._uncalibrated,
                    software=self._software,
                )
            except ShapewrightError as error:
                self._memo[key] = error
        return self._memo[key]

    @property
    def is_possible(self) -> bool:
        """Whether there is a prediction: the layout divides the model and the device has the dtype."""
        return not isinstance(self.outcome, ShapewrightError)

    @property
    def prediction(self) -> Prediction:
        """The prediction.

        Raises:
            ShapewrightError: there can be none.
        """
        outcome = self.outcome
        if isinstance(outcome, ShapewrightError):
            raise outcome
        return outcome

    @property
    def num_predictions(self) -> int:
        """How many different situations have been predicted so far."""
        return len(self._memo)

    @property
    def time_per_token_s(self) -> float:
        """Device time that one token takes, comparable between batches and layouts. [s]"""
        return 1.0 / self.prediction.tokens_per_s_per_device

    @property
    def fits(self) -> bool:
        """Whether the step's memory is within the device's, and the step possible.

        Memory is asked first: it costs a fraction of a prediction.
        """
        known = self._memo.get((self.config, self.workload, self.layout))
        if known is None:
            memory = estimate_memory(self.config, self.workload, self.layout)
            if memory.total_bytes > self.device.memory_bytes:
                return False
        return self.is_possible and self.prediction.memory.total_bytes <= self.device.memory_bytes

    @property
    def setting(self) -> str:
        """Dtype and device, as messages name them."""
        return f"{self.workload.dtype} on {self.device.name}"
