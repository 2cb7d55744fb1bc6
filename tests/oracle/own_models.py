"""Models as users write them, from papers: a GPT, a Mamba block, a vision transformer, a diffusion transformer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class CausalBlock(nn.Module):
    """Pre-norm GPT block (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Any) -> Any:
        """Attention and MLP."""
        b, t, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down_proj(functional.gelu(self.up_proj(self.ln_2(x))))


class Gpt(nn.Module):
    """Decoder with tied embeddings and a loss; ``odd_layer`` has an MLP of another width."""

    def __init__(
        self, vocab: int = 320, width: int = 64, inner: int = 256, layers: int = 4, odd_inner: int = 0
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(128, width)
        widths = [odd_inner if odd_inner and index == 3 else inner for index in range(layers)]
        self.layers = nn.ModuleList(CausalBlock(width, 4, inner) for inner in widths)
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        self.checkpointed = False

    def forward(self, tokens: Any, targets: Any = None) -> Any:
        """Logits, or the loss."""
        from torch.utils.checkpoint import checkpoint

        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        logits = self.lm_head(self.ln_f(x))
        return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class MambaBlock(nn.Module):
    """Selective state space block (arXiv 2312.00752, algorithm 2), with the scan over time written out."""

    def __init__(self, width: int = 32, state: int = 8, expansion: int = 2, rank: int = 4) -> None:
        super().__init__()
        inner = expansion * width
        self.norm, self.in_proj = nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
        self.A_log, self.D = nn.Parameter(torch.zeros(inner, state)), nn.Parameter(torch.ones(inner))
        self.out_proj, self.rank, self.state = nn.Linear(inner, width, bias=False), rank, state

    def forward(self, x: Any) -> Any:
        """Convolution, input-dependent recurrence, gate."""
        u, z = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        u = functional.silu(self.conv1d(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, b, c = self.x_proj(u).split((self.rank, self.state, self.state), dim=-1)
        step = functional.softplus(self.dt_proj(step))
        decay = torch.exp(step[..., None] * -torch.exp(self.A_log))
        drive = (step * u)[..., None] * b[:, :, None, :]
        h, outputs = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + drive[:, t]
            outputs.append((h * c[:, t, None, :]).sum(-1))
        y = torch.stack(outputs, dim=1) + u * self.D
        return x + self.out_proj(y * functional.silu(z))


class Vit(nn.Module):
    """Vision transformer (arXiv 2010.11929) with PyTorch's own encoder layers and a convolution for the patches."""

    def __init__(self, side: int = 32, patch: int = 8, width: int = 48, layers: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Any) -> Any:
        """Class scores."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class DitBlock(nn.Module):
    """Diffusion transformer block with adaLN-Zero (arXiv 2212.09748, section 3.2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Any, c: Any) -> Any:
        """Attention and MLP, modulated by the condition."""
        a, b, g, d, e, f = self.modulation(c)[:, None].chunk(6, dim=-1)
        y = self.norm1(x) * (1 + b) + a
        x = x + g * self.attn(y, y, y, need_weights=False)[0]
        return x + f * self.mlp(self.norm2(x) * (1 + e) + d)


class Dit(nn.Module):
    """Diffusion transformer over latents, conditioned on time step and class."""

    def __init__(self, width: int = 48, patch: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.patch, self.width = patch, width
        self.embed = nn.Conv2d(4, width, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(DitBlock(width, 4) for _ in range(layers))
        self.out = nn.Linear(width, patch * patch * 4)

    def forward(self, latents: Any, steps: Any, labels: Any) -> Any:
        """Predicted noise."""
        b, c, h, w = latents.shape
        x = self.embed(latents).flatten(2).transpose(1, 2)
        frequencies = torch.exp(-math.log(1e4) * torch.arange(self.width // 2, device=latents.device) / self.width)
        angles = steps[:, None].float() * frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype)) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition)
        x = self.out(x).view(b, h // self.patch, w // self.patch, self.patch, self.patch, c)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)


class Frozen(nn.Module):
    """A frozen linear layer between two that train, as adapters have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.base, self.last = nn.Linear(64, 96), nn.Linear(96, 128), nn.Linear(128, 32)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: Any) -> Any:
        """The three layers."""
        return self.last(self.base(self.first(x)))


class Choosy(nn.Module):
    """A module whose control flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        """Rows with a positive first element."""
        y = self.linear(x)
        return y[y[:, 0] > 0]
