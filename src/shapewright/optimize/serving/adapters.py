"""LoRA adapters in a server: the memory of resident adapters, and their GEMMs in each pass.

Legend: N resident adapters, r their rank, S sequences of a pass, T its new tokens, W[n,k] an adapted weight as one
device holds it.

    memory                        N r (n + k) elements of 16 bits for each adapted weight
    adapters in a pass            a = N (1 - (1 - 1/N)^S): sequences choose among all with equal chance
    GEMMs of each weight          a x (T/a, k) (k, r) and a x (T/a, r) (r, n)

The tokens of a pass are sorted by adapter, as in the segmented kernels of Punica, which vLLM and SGLang run. The GEMMs
are priced as batched GEMMs with the records of 16-bit GEMMs: tall and thin, they are bound by memory. The second one
adds to the output of the weight's GEMM; reading that output is left out. A tensor axis that splits n splits B[n,r], one
that splits k splits A[r,k] (lowering.adapters). A fused projection has an adapter for each of its parts. Routed experts
have none: neither vLLM 0.10 nor SGLang 0.5 adapts them.

Source: arXiv 2310.18547 (Punica), section 4; arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.core.errors import WorkloadError
from shapewright.core.ranges import check_integer
from shapewright.core.records import dataclass
from shapewright.lowering.counts import layers_per_stage
from shapewright.lowering.operations.gemm import Gemm
from shapewright.workload.finetuning import ADAPTER_IN, ADAPTER_OUT, is_target, read_targets
from shapewright.workload.linears import Linear, check_targets, count_adapter, list_linears

if TYPE_CHECKING:
    from shapewright.lowering.operations.operation import Operation
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout

MOST_RANK = 4096
MOST_ADAPTERS = 100_000
_ADAPTER_DTYPE = "bf16"
_ADAPTER_BYTES = 2.0
_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Parts of fused projections; each has adapters of its own."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """LoRA adapters of a server.

    Attributes:
        rank: Rank of each.
        num_resident: Adapters that each device holds in memory.
        targets: Modules that have adapters, as ``lora_targets`` of a training step.

    Raises:
        WorkloadError: a value is out of range.
    """

    rank: int
    num_resident: int
    targets: str = "all-linear"

    def __post_init__(self) -> None:
        for name, most in (("rank", MOST_RANK), ("num_resident", MOST_ADAPTERS)):
            hint = "give the rank of the adapters, such as 16" if name == "rank" else "give how many are resident"
            check_integer(f"adapters.{name}", getattr(self, name), 1, most, error=WorkloadError, hint=hint)
        object.__setattr__(self, "targets", read_targets(self.targets))

    def check(self, config: TransformerConfig) -> None:
        """Check that a model has the adapted modules.

        Raises:
            WorkloadError: it does not.
        """
        check_targets(config, self.targets)

    def adapts(self, block: str, role: str) -> bool:
        """Return whether a GEMM has adapters."""
        return block != "moe" and is_target(self.targets, block, role)

    def list_adapted(self, config: TransformerConfig, layout: ParallelLayout) -> list[list[Linear]]:
        """Return the adapted weights of one layer of each kind on one device, with projections unfused."""
        unfused = replace(config, fused_qkv=False, fused_gate_up=False)
        return [
            [linear for linear in list_linears(unfused, layout, kind) if self.adapts(linear.block, linear.role)]
            for kind in unfused.count_kinds(range(unfused.num_layers))
        ]

    def weights_bytes(self, config: TransformerConfig, layout: ParallelLayout) -> float:
        """Return the resident adapters on one device of the fullest stage. [byte]"""
        per_layer = max(
            sum(count_adapter(linear, self.rank, has_magnitude=False) for linear in linears)
            for linears in self.list_adapted(config, layout)
        )
        return _ADAPTER_BYTES * self.num_resident * per_layer * layers_per_stage(config, layout)

    def num_active(self, num_sequences: int) -> int:
        """Return the expected number of adapters that some sequences use, rounded.

        >>> Adapters(rank=16, num_resident=8).num_active(1), Adapters(rank=16, num_resident=8).num_active(64)
        (1, 8)
        """
        idle_fraction = (1.0 - 1.0 / self.num_resident) ** num_sequences
        return max(1, round(self.num_resident * (1.0 - idle_fraction)))

    def add_to(
        self, operations: Iterable[Operation], num_sequences: int, config: TransformerConfig, layout: ParallelLayout
    ) -> tuple[Operation, ...]:
        """Return the operations of a pass with those of the adapters.

        Args:
            config: The model that they were lowered from.
        """
        active = self.num_active(num_sequences)
        widths = {
            (linear.block, linear.role): linear.n for kind in self.list_adapted(config, layout) for linear in kind
        }
        found: list[Operation] = []
        for operation in operations:
            found.append(operation)
            if isinstance(operation, Gemm):
                parts = _FUSED.get(operation.role, (operation.role,))
                own = [widths[operation.block, part] for part in parts if (operation.block, part) in widths]
                found += self._operations_of(operation, active, own) if own else []
        return tuple(found)

    def _operations_of(self, gemm: Gemm, active: int, widths: Sequence[int]) -> list[Operation]:
        """Return the two GEMMs of the adapters of one weight, or of some parts of a fused one."""
        common = {"dtype": _ADAPTER_DTYPE, "weight_dtype": None, "batch": active, "m": -(-int(gemm.m) // active)}
        return [
            gemm.changed(name=gemm.name + ending, role=gemm.role + ending, n=n, k=k, **common)
            for ending, n, k in (
                (ADAPTER_IN, self.rank * len(widths), gemm.k),
                (ADAPTER_OUT, sum(widths), self.rank),
            )
        ]
