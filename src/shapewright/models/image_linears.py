"""Linear layers and other weights of image models before and after their layers.

Legend: h hidden_size, f intermediate_size.

Parameters, operations and their gradients follow from one list of linear layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shapewright.models.images import Patches, Projector
    from shapewright.models.transformer import TransformerConfig

_TIMESTEP_FREQUENCIES = 256
"""Width of the sinusoidal embedding of a timestep. Source: facebookresearch/DiT, models.py (TimestepEmbedder)."""

_MODULATIONS = 6
"""Vectors of a conditioned layer: shift, scale and gate of attention and of the MLP (arXiv 2212.09748, figure 3)."""


_TILE_TABLES = 3
"""Tables of tiles, and so their gates. Source: transformers 5.24, modeling_mllama.py."""


class EndLinear(NamedTuple):
    """A linear layer before or after the stack of layers.

    Attributes:
        role: Name in the operations.
        rows: What each row is: a ``patch``, ``token``, ``merged`` group of patches, ``image``, ``side`` of an image or
            token of a ``caption``.
        inputs: Input width.
        outputs: Output width.
        has_bias: Whether it has a bias.
        num_weights: Number of such layers.
        num_runs: Executions of all of them together per pass.
        has_activation: Whether an activation follows.
        is_start: Whether it is before the layers.
        reads_data: Whether its input is data, which needs no gradient.
    """

    role: str
    rows: str
    inputs: int
    outputs: int
    has_bias: bool = True
    num_weights: int = 1
    num_runs: int = 1
    has_activation: bool = False
    is_start: bool = False
    reads_data: bool = False

    @property
    def num_parameters(self) -> int:
        """Weights and biases."""
        return self.num_weights * (self.inputs + self.has_bias) * self.outputs


def list_end_linears(config: TransformerConfig) -> tuple[EndLinear, ...]:
    """List the linear layers before and after the layers of an image model, in the order in which they run."""
    patches = config.patches
    assert patches is not None
    return (*_start_linears(config, patches), *_final_linears(config, patches))


def _start_linears(config: TransformerConfig, patches: Patches) -> Iterator[EndLinear]:
    h, condition = config.hidden_size, patches.condition
    values = patches.channels * patches.frames * patches.side**2
    yield EndLinear("patches", "patch", values, h, patches.has_bias, is_start=True, reads_data=True)
    if condition is None:
        return
    # diffusers embeds once more before the last linear layer, with the weights of the first layer.
    runs = condition.num_embedders + (condition.num_embedders > 1)
    embedders = [("timestep", "image", h, condition.num_embedders, runs)]
    if condition.embeds_resolution:
        embedders += [("resolution", "side", h // 3, 1, 1), ("aspect_ratio", "image", h // 3, 1, 1)]
    for name, rows, width, count, num_runs in embedders:
        first = EndLinear(f"{name}_up", rows, _TIMESTEP_FREQUENCIES, width, num_weights=count, num_runs=num_runs)
        yield first._replace(has_activation=True, is_start=True, reads_data=True)
        yield first._replace(role=f"{name}_down", inputs=width, is_start=True)
    if condition.is_shared:
        yield EndLinear("modulation", "image", h, _MODULATIONS * h, is_start=True)
    if condition.caption_width:
        yield EndLinear(
            "caption_up", "caption", condition.caption_width, h, has_activation=True, is_start=True, reads_data=True
        )
        yield EndLinear("caption_down", "caption", h, h, is_start=True)


def _final_linears(config: TransformerConfig, patches: Patches) -> Iterator[EndLinear]:
    h, f, projector = config.hidden_size, config.intermediate_size, patches.projector
    if patches.pools:
        yield EndLinear("pool_q", "image", h, h)
        yield EndLinear("pool_kv", "token", h, 2 * h)
        yield EndLinear("pool_out", "image", h, h)
        yield EndLinear("pool_up", "image", h, f, has_activation=True)
        yield EndLinear("pool_down", "image", f, h)
    if patches.num_classes:
        yield EndLinear("classes", "image", h * (1 + patches.classifies_mean), patches.num_classes)
    if patches.output_channels:
        if patches.condition is not None and not patches.condition.is_shared:
            yield EndLinear("modulation", "image", h, 2 * h)
        yield EndLinear("pixels", "patch", h, patches.side**2 * patches.output_channels)
    if projector is not None:
        width, rows = _merged_width(h, projector), "token" if projector.keeps_class else "merged"
        if projector.merges_linearly:
            yield EndLinear("merge", rows, width, h, has_bias=False)
            width = h
        count = 1 + projector.num_intermediate
        for index, (output, bias) in enumerate(zip(projector.widths, projector.biases, strict=True), start=1):
            outputs = width if output < 0 else output
            is_last = index == len(projector.widths)
            linear = EndLinear(f"project_{index}", rows, width, outputs, bias, num_weights=count, num_runs=count)
            yield linear._replace(has_activation=not is_last)
            width = outputs


def _merged_width(h: int, projector: Projector) -> int:
    return h if projector.averages else h * projector.merge**2 * projector.num_features


def count_end_parameters(config: TransformerConfig) -> tuple[int, int]:
    """Count the parameters before and after the layers of an image model, without norms of the residual stream."""
    patches, h = config.patches, config.hidden_size
    assert patches is not None
    start = (patches.num_class_tokens + patches.has_mask_token + patches.num_positions) * h
    start += 2 * patches.num_gated_layers
    if patches.tile_shapes:
        # Tables of tiles before and after the layers, and of their positions, each with a gate; a row is for no image.
        rows = patches.tiles * (2 + patches.num_positions)
        start += (patches.tile_shapes + 1) * rows * h + _TILE_TABLES
    final = 0
    norm = config.norm_affine + config.norm_bias
    if patches.pools:  # the query, and a norm before the MLP
        final += h + norm * h
    if patches.condition is not None:
        start += patches.condition.num_embedders * patches.condition.num_classes * h
        final += 2 * h * patches.condition.is_shared
    if patches.projector is not None:
        final += patches.projector.num_vectors * patches.projector.widths[-1]
    if patches.projector is not None and patches.projector.norm:
        merged = _merged_width(h, patches.projector)
        first = merged if patches.projector.norm == "after" else h
        final += (1 + patches.projector.norm_bias) * (first + merged * patches.projector.num_intermediate)
    linears = list_end_linears(config)
    start += sum(each.num_parameters for each in linears if each.is_start)
    return start, final + sum(each.num_parameters for each in linears if not each.is_start)


def count_scaling_parameters(config: TransformerConfig) -> int:
    """Count the parameters of one layer that scale, shift or gate its branches."""
    patches, h = config.patches, config.hidden_size
    if patches is None:
        return 0
    if patches.condition is None:
        return 2 * h * patches.scales_layers
    return _MODULATIONS * h * (1 if patches.condition.is_shared else h + 1)


def modulation_width(config: TransformerConfig) -> int:
    """Output width of the linear layer that computes the scales, shifts and gates of one layer; 0 without one."""
    condition = config.patches.condition if config.patches is not None else None
    return 0 if condition is None or condition.is_shared else _MODULATIONS * config.hidden_size
