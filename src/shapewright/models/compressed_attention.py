"""Layers of compressed attention: their projections, compressors and indexer.

Legend: h hidden_size, a num_heads, d head_dim, r_q q_lora_rank, m tokens of a compressed entry, w compressed_window,
g out_groups, r_o out_lora_rank, a_i and d_i heads of the indexer and their width.

One head of width d is the key and the value of all query heads. A query attends to the latest w tokens and to earlier
ones in entries of m tokens: the sum of their values, weighted by a softmax of gates over the tokens. In
``compressed_sparse_attention`` the entries overlap (each token has a part in its own entry and one in the next, so that
values and gates are 2 d wide), and an indexer with entries of its own, of width d_i, selects some for each query.

Source: modeling_deepseek_v4.py of transformers 5.24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.models.layers import HEAVILY_COMPRESSED, SPARSE_COMPRESSED
from shapewright.models.mixers import Projection

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """What makes entries of a layer, or of its indexer.

    Attributes:
        ratio: Tokens of one entry.
        head_dim: Width of an entry. [element]
        overlap: Entries that a token has a part in: 1 or 2.
    """

    ratio: int
    head_dim: int
    overlap: int

    @property
    def width(self) -> int:
        """Width of a token's values, and of its gates. [element]"""
        return self.overlap * self.head_dim

    @property
    def num_others(self) -> int:
        """Parameters of the bias of each place in an entry, and of the norm of entries."""
        return self.ratio * self.width + self.head_dim

    @property
    def state_elements(self) -> int:
        """Values and gates of the tokens that do not fill an entry yet, and of those that the next one overlaps with.

        The most that one sequence keeps, as a server allocates it.
        """
        return 2 * self.ratio * (self.width + (self.overlap - 1) * self.head_dim)


@dataclass(frozen=True, kw_only=True)
class CompressedAttention:
    """A layer of compressed attention on one device of the tensor axis, which splits query heads and output groups.

    Attributes:
        projections: Linear layers but for the first output projection, in order.
        num_groups: Groups of the first output projection on this device.
        group_width: Width of one group before that projection. [element]
        group_rank: Its width after it. [element]
        compressor: Makes entries of earlier tokens; None without.
        indexer: Linear layers of the indexer; empty without.
        index_compressor: Makes its entries.
        num_others: Parameters of norms, sinks and compressors.
    """

    projections: tuple[Projection, ...]
    num_groups: int
    group_width: int
    group_rank: int
    compressor: Compressor | None
    indexer: tuple[Projection, ...] = ()
    index_compressor: Compressor | None = None
    num_others: int

    @property
    def num_parameters(self) -> int:
        """Parameters of the layer without the norms and mixing of the residual stream."""
        linear = sum(each.num_parameters for each in (*self.projections, *self.indexer))
        return linear + self.num_groups * self.group_width * self.group_rank + self.num_others

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """Those of the layer and of its indexer."""
        return tuple(each for each in (self.compressor, self.index_compressor) if each is not None)


def make_compressed(config: TransformerConfig, kind: str, degree: int = 1) -> CompressedAttention:
    """Describe a layer of a model.

    Args:
        kind: One of COMPRESSED_LAYERS.
        degree: Devices of the tensor axis. Keys, compressors and the indexer are complete on each.
    """
    h, d, heads, rank = config.hidden_size, config.head_dim, config.num_heads // degree, config.q_lora_rank
    groups = config.out_groups // degree
    compressor = index_compressor = None
    own, indexer = [], []
    if kind == SPARSE_COMPRESSED:
        compressor = Compressor(ratio=config.sparse_compress_ratio, head_dim=d, overlap=2)
        index_compressor = Compressor(ratio=config.sparse_compress_ratio, head_dim=config.index_head_dim, overlap=2)
        indexer = [
            *_joined(config, "kv_gate", {"kv": index_compressor.width, "gate": index_compressor.width}),
            Projection("q", rank, config.index_num_heads * config.index_head_dim),
            Projection("weights", h, config.index_num_heads),
        ]
    elif kind == HEAVILY_COMPRESSED:
        compressor = Compressor(ratio=config.heavy_compress_ratio, head_dim=d, overlap=1)
    if compressor is not None:
        widths = {"compressed_kv": compressor.width, "compressed_gate": compressor.width}
        own = _joined(config, "compressed", widths)
    num_others = rank + d + config.num_heads // degree * config.attention_sinks
    num_others += sum(each.num_others for each in (compressor, index_compressor) if each is not None)
    return CompressedAttention(
        projections=(
            *_joined(config, "qkv_a", {"q_a": rank, "kv_a": d}),
            *own,
            Projection("q_b", rank, heads * d),
            Projection("out", groups * config.out_lora_rank, h),
        ),
        num_groups=groups,
        group_width=config.num_heads // config.out_groups * d,
        group_rank=config.out_lora_rank,
        compressor=compressor,
        indexer=tuple(indexer),
        index_compressor=index_compressor,
        num_others=num_others,
    )


def _joined(config: TransformerConfig, role: str, widths: dict[str, int]) -> list[Projection]:
    """Projections of the layer's input, of which servers make one GEMM (``fused_qkv``)."""
    if config.fused_qkv:
        widths = {role: sum(widths.values())}
    return [Projection(name, config.hidden_size, width) for name, width in widths.items()]


def count_entries(compressor: Compressor | None, num_tokens: int) -> int:
    """Count the compressed entries of a number of tokens, all of which must have come; 0 without a compressor."""
    return num_tokens // compressor.ratio if compressor is not None else 0
