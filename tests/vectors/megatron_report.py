"""NVIDIA/Megatron-LM's memory report, reimplemented: megatron/training/theoretical_memory_usage.py at d98e8a6.

Legend: b micro-batch, s tokens, h width, f inner width of the MLP, a heads, L layers, V vocabulary, t tensor, p
pipeline, d data parallel degree, v interleave, E experts. Everything in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MegatronJob:
    """Inputs of the report."""

    h: int
    f: int
    a: int
    a_kv: int
    L: int
    V: int
    s: int
    b: int
    t: int = 1
    p: int = 1
    v: int | None = None
    d: int = 1
    E: int = 1
    gated: bool = False
    tied: bool = True

    def count_parameters_of_fullest_shard(self) -> float:
        """Blocks over stages, the embedding on the first, both over the tensor axis."""
        gate = 1.5 if self.gated else 1.0
        matrices = 2 * self.h**2 * (1 + self.a_kv / self.a + self.f / self.h * self.E * gate)
        # Norms are whole on every tensor rank; a LayerNorm has a shift beside its scale.
        norms = (2 * self.L + 1) * self.h * (1 if self.gated else 2)
        tables = self.V * self.h
        # A second table stands on the same shard where there is one stage alone.
        return (self.L * matrices / self.p + tables * (1 if self.tied or self.p > 1 else 2)) / self.t + norms / self.p

    def state_bytes(self, *, is_sharded: bool) -> float:
        """18 bytes a parameter, or with the distributed optimizer 6 and 12 over the replicas."""
        return self.count_parameters_of_fullest_shard() * (6 + 12 / self.d if is_sharded else 18)

    def layer_bytes(self) -> float:
        """A layer with sequence parallelism and selective recomputation; experts and gates have no part in it."""
        return self.s * self.b * self.h * (18 + 4 * self.f / self.h)

    def activation_bytes(self) -> float:
        """The first stage: layers, token ids, the embedding's dropout, and with one stage final norm and logits."""
        total = self.layer_bytes() * self.L
        total += 8 * self.s * self.b * self.p + self.s * self.b * self.h * self.p
        if self.v is not None:
            total *= 1 + (self.p - 1) / (self.p * self.v)
        if self.p == 1:
            total += self.s * self.b * self.h * 4 * (1 + self.V / self.h)
        return total / self.t
