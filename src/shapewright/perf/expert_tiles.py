"""Which tile a serving library runs an expert layer with: the fastest where somebody tuned the shape, a default else.

vllm's and sglang's triton kernels look a file up by the device, its number of experts and their inner width. Where
there is one, it holds the fastest tile found for each number of tokens. Where there is none, a rule chooses by the
number of tokens alone, whatever the rows of an expert: sglang 0.5 and vllm up to 0.16 take 16 x 32 for no more tokens
than experts and 64 x 64 from there on, at less than half of the rate of tuned tiles on Hopper; vllm 0.17 and later have
five steps.

A section of a record that was measured with such kernels holds the steps of its library's rule (``untuned``), each with
a tile, its rate, bandwidth and feed; the menu of the section is that of tuned shapes. ``data/tuned_experts.json`` says
which shapes are tuned, by library, format and device (docs/decisions/0007-moe.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError
from shapewright.perf.expert_kernels import expert_kernel_family, has_defaults, has_same_defaults
from shapewright.perf.gemm_menu import GemmParameters, read_parameters
from shapewright.perf.libraries import nearest_library

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

TUNED = -1
"""Place of tuned shapes among a rule's steps."""
# Above any inner width, so that experts and width make one number.
_WIDEST = 2.0**24


@dataclass(frozen=True, kw_only=True, eq=False)
class TileRule:
    """How a library chooses where nobody tuned.

    Attributes:
        library: Library and version, as the list of tuned shapes has it.
        per_expert: Whether tokens are counted for each expert of the device.
        up_to: Most tokens of every step but the last, rising.
        steps: Kernel of each step.
    """

    library: str
    per_expert: bool
    up_to: Array
    steps: tuple[GemmParameters, ...]

    def choose(self, tokens: Any, experts: Any, inner: Any, tuned: NDArray[np.float64]) -> NDArray[np.intp]:
        """Step of each layer, TUNED for tuned shapes.

        Args:
            tokens: Tokens that reach the device. Of one shape with the others, or scalars.
            experts: Experts of the device.
            inner: Width between an expert's two products. [element]
            tuned: See tuned_shapes.
        """
        counted = np.asarray(tokens / experts if self.per_expert else tokens, dtype=float)
        step = np.searchsorted(self.up_to, counted, side="left")
        return np.where(np.isin(experts * _WIDEST + inner, tuned), TUNED, step)

    def holds_for(self, library: str, transfer: str) -> bool:
        """Whether what runs chooses its tiles so.

        Kernels of another family do not, nor does a release with other defaults: by the rule of vllm 0.14 on A100, vllm
        0.24 on L40S was 49 % off, without it 25 %. On a device of another family an unknown library has none.

        Args:
            library: Library, version and kernel that run; empty if unknown.
            transfer: As of the record that holds the rule.
        """
        name, _, kernel = library.partition("/")
        if expert_kernel_family(kernel) not in ("", "triton"):
            return False
        return has_same_defaults(name, self.library) or (transfer != "generic" and not has_defaults(name))

    def of(self, library: str) -> TileRule:
        """The rule with the tuned shapes of a library of the same defaults, where they are listed.

        Args:
            library: Library, version and kernel that run; empty if unknown.
        """
        own = nearest_library(library.partition("/")[0], _read_lists())
        return replace(self, library=own) if own and has_same_defaults(own, self.library) else self


def read_rule(raw: Mapping[str, Any]) -> TileRule | None:
    """The rule of a section of a record; None where its kernels have none.

    Raises:
        CalibrationError: a key is missing.
    """
    if "untuned" not in raw:
        return None
    rule = raw["untuned"]
    try:
        steps = tuple(read_parameters({**raw, **step}) for step in rule["steps"])
        return TileRule(
            library=rule["library"], per_expert=rule["per_expert"], up_to=np.array(rule["up_to"], float), steps=steps
        )
    except (KeyError, TypeError) as error:
        raise CalibrationError(f"moe calibration lacks {error} in 'untuned'") from error


@cache
def tuned_shapes(library: str, dtype: str, device: str) -> Array:
    """Shapes that a library has tuned tiles for, as experts * 2^24 + inner width, ascending.

    Raises:
        CalibrationError: the list is malformed.
    """
    try:
        shapes = _read_lists().get(library, {}).get("bf16" if dtype == "fp16" else dtype, {}).get(device, [])
        return np.array([experts * _WIDEST + inner for experts, inner in shapes])
    except (TypeError, ValueError, AttributeError) as error:
        raise CalibrationError(f"the list of tuned experts cannot be read: {error}") from error


@cache
def _read_lists() -> Mapping[str, Any]:
    """Tuned shapes by library and version."""
    path = resources.files("shapewright.perf") / "data" / "tuned_experts.json"
    try:
        lists: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["libraries"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"the list of tuned experts cannot be read: {error}") from error
    return lists
