"""Tile choice of serving libraries for expert layers: the fastest tile for tuned shapes, a default rule for others.

vllm's and sglang's triton kernels look up a file by device, number of experts and inner width. For a tuned shape it
holds the fastest tile for each number of tokens. For others a rule chooses by the number of tokens alone, regardless of
the rows per expert: sglang 0.5 and vllm up to 0.16 use 16 x 32 for at most as many tokens as experts and 64 x 64 above,
at less than half of the rate of tuned tiles on Hopper; vllm 0.17 and later have five steps.

A record section that was measured with such kernels holds the steps of its library's rule (``untuned``), each with a
tile, its rate, bandwidth and feed; the section's candidate kernels are those of tuned shapes.
``data/tuned_experts.json`` lists the tuned shapes by library, format and device (docs/decisions/0007).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.records import dataclass
from shapewright.pricing.calibration.libraries import nearest_library
from shapewright.pricing.experts.kernels import expert_kernel_family, has_defaults, has_same_defaults
from shapewright.pricing.gemm.parameters import GemmParameters, read_parameters

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    PerShape = Float[np.ndarray, "tuned"]

TUNED = -1
"""Step index of tuned shapes."""
# Above any inner width, so that experts and width can be packed into one number.
_WIDEST = 2.0**24


@dataclass(frozen=True, kw_only=True, eq=False)
class TileRule:
    """Default tile rule of a library for shapes that are not tuned.

    Attributes:
        library: Library and version, as in the list of tuned shapes.
        per_expert: Whether tokens are counted per expert of the device.
        up_to: Largest number of tokens of every step but the last, ascending.
        steps: Constants of each step's kernel.
    """

    library: str
    per_expert: bool
    up_to: Float[np.ndarray, " edges"]
    steps: tuple[GemmParameters, ...]

    def choose(self, tokens: Any, experts: Any, inner: Any, tuned: PerShape) -> Int[np.ndarray, " layers"]:
        """Choose the step of each layer, TUNED for tuned shapes.

        Args:
            tokens: Tokens that reach the device. Same shape as the others, or scalar.
            inner: Width between an expert's two GEMMs. [element]
        """
        counted = np.asarray(tokens / experts if self.per_expert else tokens, dtype=float)
        step = np.searchsorted(self.up_to, counted, side="left")
        return np.where(np.isin(experts * _WIDEST + inner, tuned), TUNED, step)

    def applies_to(self, library: str, transfer: str) -> bool:
        """Whether the running kernels choose their tiles by this rule.

        Kernels of another family do not, nor does a release with other defaults: with the rule of vllm 0.14 on A100,
        vllm 0.24 on L40S was 49 % off, without it 25 %. On another architecture the rule does not apply to unknown
        libraries.

        Args:
            library: Running library, version and kernel; empty if unknown.
            transfer: CalibrationRecord.transfer of the rule's record.
        """
        name, _, kernel = library.partition("/")
        if expert_kernel_family(kernel) not in ("", "triton"):
            return False
        return has_same_defaults(name, self.library) or (transfer != "generic" and not has_defaults(name))

    def for_library(self, library: str) -> TileRule:
        """Return the rule with the tuned shapes of a library with the same defaults, where they are listed.

        Args:
            library: Running library, version and kernel; empty if unknown.
        """
        own = nearest_library(library.partition("/")[0], _read_tuned_shapes())
        return replace(self, library=own) if own and has_same_defaults(own, self.library) else self


def read_rule(raw: Mapping[str, Any]) -> TileRule | None:
    """Read the tile rule of a record's section; None where its kernels have none."""
    if "untuned" not in raw:
        return None
    rule = raw["untuned"]
    steps = tuple(read_parameters({**raw, **step}) for step in rule["steps"])
    return TileRule(
        library=rule["library"], per_expert=rule["per_expert"], up_to=np.array(rule["up_to"], float), steps=steps
    )


@cache
def tuned_shapes(library: str, dtype: str, device: str) -> PerShape:
    """Shapes with tuned tiles in a library, as experts * 2^24 + inner width, ascending."""
    shapes = _read_tuned_shapes().get(library, {}).get("bf16" if dtype == "fp16" else dtype, {}).get(device, [])
    return np.array([experts * _WIDEST + inner for experts, inner in shapes])


@cache
def _read_tuned_shapes() -> Mapping[str, Any]:
    """Read tuned shapes by library and version."""
    path = resources.files("shapewright.pricing") / "data" / "tuned_experts.json"
    lists: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["libraries"]
    return lists
