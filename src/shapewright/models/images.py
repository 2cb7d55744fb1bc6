"""Images as the input of a stack of layers: patches, projectors to a language model, and conditioning.

A vision transformer (arXiv 2010.11929) embeds patches of an image and classifies one token. The tower of a
vision-language model ends in a projector to the width of the language model. A diffusion transformer (DiT, arXiv
2212.09748) returns the values of its patches, and a timestep and a class scale and shift what its layers normalize.
"""

from __future__ import annotations

from shapewright.core.errors import WorkloadError
from shapewright.core.numeric import round_up
from shapewright.core.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Projector:
    """Linear layers from the tokens of a tower to those of a language model, with an activation between them.

    Attributes:
        widths: Output width of each linear layer; -1 for the width of its input.
        biases: Whether each has a bias.
        merge: Side of the square of patches that become one token.
        averages: Whether those patches are averaged; otherwise they are concatenated.
        merges_linearly: Whether a linear layer without bias maps concatenated patches back to the tower's width.
        norm: Where a normalization is: ``before`` or ``after`` patches are merged; empty for none.
        norm_bias: Whether it has a bias.
        num_intermediate: Further projectors of this form, of the outputs of earlier layers (deepstack).
        keeps_class: Whether class tokens are projected too.
        num_features: Outputs of layers that are concatenated for each token, the last one among them.
        num_vectors: Learned vectors between the projected tokens, such as the one at the end of a row of patches.
    """

    widths: tuple[int, ...]
    biases: tuple[bool, ...]
    merge: int = 1
    averages: bool = False
    merges_linearly: bool = False
    norm: str = ""
    norm_bias: bool = False
    num_intermediate: int = 0
    keeps_class: bool = False
    num_vectors: int = 0
    num_features: int = 1


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Conditioning of a diffusion transformer by its normalizations.

    Attributes:
        num_classes: Rows of the class embedding, the one for no class included; 0 for none.
        num_embedders: Embeddings of timestep and class: 1, or one in each layer (diffusers).
        is_shared: Whether one projection serves all layers, each of which adds a learned table (PixArt-alpha, arXiv
            2310.00426, section 2.3).
        embeds_resolution: Whether height, width and aspect ratio of the image are embedded too.
        caption_width: Width of the caption's tokens, which the layers attend to; 0 without captions.
        caption_len: Tokens of a caption.
    """

    num_classes: int = 0
    num_embedders: int = 1
    is_shared: bool = False
    embeds_resolution: bool = False
    caption_width: int = 0
    caption_len: int = 0


@dataclass(frozen=True, kw_only=True)
class Patches:
    """The image side of a stack of layers.

    Attributes:
        side: Side of a patch. [pixel of the input]
        image_size: Height and width of the default image. [pixel]
        channels: Channels of the input.
        frames: Frames of one patch; an image is repeated.
        pixels_per_input: Pixels of the image per pixel of the input along a side: 8 for the latents of a diffusion
            model's autoencoder.
        has_bias: Whether the embedding of patches has a bias.
        num_class_tokens: Tokens without a patch: class tokens and registers.
        has_mask_token: Whether there is a learned vector for masked patches.
        num_positions: Rows of the table of learned positions; 0 without one.
        scales_layers: Whether attention and MLP outputs are multiplied by a learned vector (LayerScale).
        num_classes: Outputs of the classifier; 0 without one.
        classifies_mean: Whether the classifier reads the mean of the patches beside the class token.
        pools: Whether a learned query attends to all tokens after the last layer (SigLIP).
        tiles: Tiles of an image, which attend to each other; the image size is that of one.
        tile_shapes: Arrangements of tiles that have positions of their own; 0 without tiles.
        token_multiple: Multiple to which the tokens of a tile are padded.
        num_gated_layers: Layers with a learned factor of attention and one of the MLP.
        output_channels: Channels of each patch's output; 0 if the model returns none.
        projector: From the tokens to those of a language model.
        condition: Conditioning of a diffusion transformer.
    """

    side: int
    image_size: tuple[int, int]
    channels: int = 3
    frames: int = 1
    pixels_per_input: int = 1
    has_bias: bool = True
    num_class_tokens: int = 0
    has_mask_token: bool = False
    num_positions: int = 0
    scales_layers: bool = False
    num_classes: int = 0
    classifies_mean: bool = False
    pools: bool = False
    tiles: int = 1
    tile_shapes: int = 0
    token_multiple: int = 1
    num_gated_layers: int = 0
    output_channels: int = 0
    projector: Projector | None = None
    condition: Condition | None = None

    @property
    def num_scalings_per_layer(self) -> int:
        """Multiplications by a vector in each layer: of both branches, and with conditioning of both norms."""
        return 4 if self.condition is not None else 2 * self.scales_layers

    def count_patches(self, image_size: tuple[int, int] | None = None) -> int:
        """Count the patches of an image or tile; a remainder at its edges is cut off, as a convolution does.

        Raises:
            WorkloadError: the image is smaller than a patch, its patches cannot be merged, or its tiles have another
                size.

        >>> Patches(side=14, image_size=(384, 384)).count_patches()
        729
        """
        height, width = image_size or self.image_size
        if self.tiles > 1 and (height, width) != self.image_size:
            own = ",".join(map(str, self.image_size))
            raise WorkloadError(
                f"image_size={height},{width} is not that of a tile, into {self.tiles} of which this model cuts every "
                f"image; use {own}, or leave it out",
                field="image_size",
            )
        pixels = self.side * self.pixels_per_input
        rows, columns = height // pixels, width // pixels
        merge = self.projector.merge if self.projector else 1
        if rows < merge or columns < merge:
            token = pixels * merge
            raise WorkloadError(
                f"image_size={height},{width} is smaller than one token of {token} x {token} pixels; use a larger one",
                field="image_size",
            )
        if rows % merge or columns % merge:
            step = pixels * merge
            near = ",".join(str(max(round(edge / step), 1) * step) for edge in (height, width))
            raise WorkloadError(
                f"image_size={height},{width} must be multiples of {step} ({merge} patches of {pixels}); try {near}",
                field="image_size",
            )
        return rows * columns

    def count_tokens(self, image_size: tuple[int, int] | None = None) -> int:
        """Count the tokens of an image in the stack of layers."""
        tokens = self.count_patches(image_size) + self.num_class_tokens
        return self.tiles * round_up(tokens, self.token_multiple)

    def count_projected(self, image_size: tuple[int, int] | None = None) -> int:
        """Count the tokens of an image in the language model."""
        if self.projector is None:
            return self.count_tokens(image_size)
        kept = self.num_class_tokens * self.projector.keeps_class
        return self.tiles * (self.count_patches(image_size) // self.projector.merge**2 + kept)
