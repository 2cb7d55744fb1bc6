"""A diffusion transformer written from its paper: DiT with adaLN-Zero blocks (arXiv 2212.09748, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Block(nn.Module):
    """Attention and MLP whose norms are shifted, scaled and gated by the conditioning."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return the next residual stream."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate_1 * self._attend(self.norm_1(x) * (1 + scale_1) + shift_1)
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.flatten(1, 2)
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        return self.out((weights @ value).view(batch, self.num_heads, length, -1).transpose(1, 2).reshape(x.shape))


class DiffusionTransformer(nn.Module):
    """DiT over latents of four channels; it returns noise and its variance."""

    def __init__(
        self, *, hidden_size: int, depth: int, num_heads: int, patch_size: int, input_size: int, num_classes: int
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(4, hidden_size, patch_size, patch_size)
        self.register_buffer("positions", torch.zeros(1, (input_size // patch_size) ** 2, hidden_size))
        self.timestep = nn.Sequential(nn.Linear(256, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))
        self.classes = nn.Embedding(num_classes + 1, hidden_size)
        self.blocks = nn.ModuleList(_Block(hidden_size, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))
        self.pixels = nn.Linear(hidden_size, patch_size**2 * 8)

    def forward(self, latents: Tensor, timesteps: Tensor, classes: Tensor) -> Tensor:
        """Predict the noise of each patch."""
        frequencies = torch.arange(128, device=latents.device, dtype=latents.dtype)
        angles = timesteps[:, None] * frequencies
        condition = self.timestep(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.classes(classes)
        x = self.embed(latents).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return self.pixels(self.norm(x) * (1 + scale) + shift)
