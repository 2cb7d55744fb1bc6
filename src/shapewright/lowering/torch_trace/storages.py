"""Which tensors exist when: storages of traced tensors, from their first use to the release of their last reference."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, NamedTuple

from shapewright.core.numeric import round_up
from shapewright.lowering.torch_trace.trace import TracedMemory

# PyTorch's allocator on GPUs rounds every block up to this.
_BLOCK_BYTES = 512
_TIMELINE_POINTS = 400

WEIGHTS, INPUTS, GRADIENTS, ACTIVATIONS, WORKSPACE = "weights", "inputs", "gradients", "activations", "workspace"


class Storage:
    """One storage: its size, the module that made it, and what it is for."""

    __slots__ = ("category", "is_saved", "num_bytes", "path")

    def __init__(self, num_bytes: int, path: str, category: str) -> None:
        self.num_bytes, self.path, self.category = num_bytes, path, category
        self.is_saved = False


class _Event(NamedTuple):
    serial: int
    is_made: bool
    place: str = ""


class Storages:
    """Serial numbers of storages, and a log of when each is made and released."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self._serials: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._events: list[_Event] = []
        self._backward_start: int | None = None

    def serial_of(self, tensor: Any, path: str = "", category: str = ACTIVATIONS, place: str = "") -> int:
        """Serial number of a tensor's storage; an unknown storage is entered with its path and category."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        serial = self._serials.get(key)
        if serial is None:
            serial = self._serials[key] = len(self.storages)
            num_bytes = round_up(storage.nbytes(), _BLOCK_BYTES)
            self.storages.append(Storage(num_bytes, path, category))
            self._events.append(_Event(serial, is_made=True, place=place))
            self._references[serial] = weakref.ref(storage, lambda _: self._release(key, serial))
        return serial

    def _release(self, key: int, serial: int) -> None:
        self._references.pop(serial, None)
        if self._serials.get(key) == serial:
            del self._serials[key]
        self._events.append(_Event(serial, is_made=False))

    def start_backward(self) -> None:
        """Mark the tensors that exist now as saved for the backward pass."""
        self._backward_start = len(self._events)
        for serial in self._serials.values():
            self.storages[serial].is_saved = True

    def close(self) -> None:
        """Stop watching."""
        self._references.clear()

    def saved_by_path(self) -> Counter[str]:
        """Bytes that exist between the passes by the module that made them, without weights and inputs. [byte]"""
        saved: Counter[str] = Counter()
        for storage in self.storages:
            if storage.is_saved and storage.category == ACTIVATIONS:
                saved[storage.path] += storage.num_bytes
        return saved

    def summarize(self) -> tuple[TracedMemory, Counter[str]]:
        """Replay the log: memory of the step, and the bytes at its peak by module, without weights and inputs."""
        total = peak = 0
        peak_index = -1
        series = []
        for index, event in enumerate(self._events):
            total += self.storages[event.serial].num_bytes * (1 if event.is_made else -1)
            series.append(total)
            if total > peak:
                peak, peak_index = total, index
        alive: set[int] = set()
        for event in self._events[: peak_index + 1]:
            (alive.add if event.is_made else alive.discard)(event.serial)
        parts: Counter[str] = Counter()
        by_path: Counter[str] = Counter()
        for serial in alive:
            storage = self.storages[serial]
            parts[storage.category] += storage.num_bytes
            if storage.category not in (WEIGHTS, INPUTS):
                by_path[storage.path] += storage.num_bytes
        step = max(1, len(series) // _TIMELINE_POINTS)
        boundary = len(series) if self._backward_start is None else self._backward_start
        # The largest value of each interval, so that the peak shows.
        timeline = [max(series[start : start + step]) for start in range(0, len(series), step)]
        summary = TracedMemory(
            weights_bytes=float(sum(one.num_bytes for one in self.storages if one.category == WEIGHTS)),
            inputs_bytes=float(parts[INPUTS]),
            gradients_bytes=float(parts[GRADIENTS]),
            activations_bytes=float(parts[ACTIVATIONS]),
            workspace_bytes=float(parts[WORKSPACE]),
            saved_bytes=float(sum(self.saved_by_path().values())),
            peak_bytes=float(peak),
            peak_operation=self._events[peak_index].place if series else "",
            timeline_bytes=tuple(map(float, timeline)),
            backward_start=boundary // step,
        )
        return summary, by_path
