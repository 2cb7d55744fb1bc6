"""More models as users write them: mixtures of experts in four ways, RWKV, a U-Net, a Perceiver, library kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Mixture(nn.Module):
    """Top-2 mixture (arXiv 2401.04088, section 2) that finds the tokens of each expert in one of four ways."""

    def __init__(self, way: str, width: int = 64, experts: int = 8, inner: int = 128) -> None:
        super().__init__()
        self.way, self.gate = way, nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(experts)
        )

    def forward(self, x: Any) -> Any:
        """Route, run the experts, add up."""
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        if self.way == "counts":
            counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
            order = chosen.flatten().argsort()
            parts = [expert(part) for expert, part in zip(self.experts, x[order // 2].split(counts), strict=True)]
            return out.index_add_(0, order // 2, torch.cat(parts) * weights.flatten()[order, None])
        hot = functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            if self.way == "mask":
                mask = (chosen == index).any(-1)
                if mask.any():
                    out[mask] = out[mask] + expert(x[mask])
                continue
            if self.way == "one_hot":
                which, rows = torch.where(hot[index])
            else:
                rows, which = torch.where(chosen == index)
            if rows.numel():
                out[rows] += weights[rows, which, None] * expert(x[rows])
        return out


class Rwkv(nn.Module):
    """Time mixing of RWKV-4 (arXiv 2305.13048, equations 11 to 18), token by token."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.mix = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(3))
        self.r, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.decay, self.bonus = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Any) -> Any:
        """Shifted projections, then the recurrence."""
        before = functional.pad(x, (0, 0, 1, -1))
        mixed = (one(x * mu + before * (1 - mu)) for one, mu in zip((self.r, self.k, self.v), self.mix, strict=True))
        gate, key, value = mixed
        above = below = torch.zeros_like(key[:, 0])
        outputs = []
        for t in range(x.shape[1]):
            now = torch.exp(self.bonus + key[:, t])
            outputs.append((above + now * value[:, t]) / (below + now))
            kept, new = torch.exp(-self.decay.exp()), torch.exp(key[:, t])
            above, below = kept * above + new * value[:, t], kept * below + new
        return self.out(torch.sigmoid(gate) * torch.stack(outputs, 1))


class Unet(nn.Module):
    """One level of a denoising U-Net (arXiv 2006.11239, appendix B) with attention at its bottom."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.start, self.time = nn.Conv2d(4, width, 3, padding=1), nn.Linear(64, width)
        self.norm, self.conv = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.down, self.up = nn.Conv2d(width, 64, 3, 2, 1), nn.ConvTranspose2d(64, width, 2, 2)
        self.attn, self.end = nn.MultiheadAttention(64, 4, batch_first=True), nn.Conv2d(2 * width, 4, 3, padding=1)

    def forward(self, x: Any, steps: Any) -> Any:
        """Predicted noise."""
        angles = steps[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(32, device=x.device) / 32)
        skip = self.start(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        skip = skip + self.conv(functional.silu(self.norm(skip)))
        low = self.down(skip)
        tokens = low.flatten(2).transpose(1, 2)
        tokens = tokens + self.attn(tokens, tokens, tokens, need_weights=False)[0]
        return self.end(torch.cat([self.up(tokens.transpose(1, 2).reshape(low.shape)), skip], 1))


class Perceiver(nn.Module):
    """Latents that attend to many inputs, then to each other (arXiv 2103.03206, section 3)."""

    def __init__(self, width: int = 64, latents: int = 16, inputs: int = 48) -> None:
        super().__init__()
        self.latents, self.q = nn.Parameter(torch.zeros(latents, width)), nn.Linear(width, width)
        self.kv, self.head = nn.Linear(inputs, 2 * width), nn.Linear(width, 10)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Any, labels: Any) -> Any:
        """Loss of the class."""
        q = self.q(self.latents).expand(x.shape[0], -1, -1)
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (q, *self.kv(x).chunk(2, -1)))
        read = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return functional.cross_entropy(self.head(self.encoder(read).mean(1)), labels)


LIBRARY_FILE = """
import torch
from causal_conv1d import causal_conv1d_fn
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from flash_attn import flash_attn_func
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.gates = nn.Linear(64, 192), nn.Linear(64, 8)
        self.conv, self.x = nn.Conv1d(64, 64, 4, groups=64), nn.Linear(64, 64 + 2 * 16)
        self.A = nn.Parameter(torch.empty(64, 16))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, 16).unbind(2)
        y = flash_attn_func(q, k, v, causal=True).reshape(b, t, d)
        u = causal_conv1d_fn(y.transpose(1, 2), self.conv.weight.squeeze(1), self.conv.bias, activation="silu")
        step, B, C = self.x(u.transpose(1, 2)).split([d, 16, 16], -1)
        y = selective_scan_fn(u, step.transpose(1, 2), -self.A.exp(), B.transpose(1, 2), C.transpose(1, 2))
        g, beta = self.gates(x).chunk(2, -1)
        out, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta.sigmoid())
        return y.transpose(1, 2) + out.reshape(b, t, d)
"""
"""A file that imports kernels of libraries, which need not be installed."""
