"""A whole decoder in torch: training with loss and optimizer, or prefill and decode with a KV cache.

Legend: b sequences, s tokens of one pass, e embedding size, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shapewright.measure.bench.operations.torch_layer import (
    PassContext,
    Weights,
    dropout,
    linear,
    make_layer,
    make_norm,
    make_pass_context,
    run_layer,
    run_norm,
)

if TYPE_CHECKING:
    from shapewright.measure.bench.operations.torch_layer import MakeTensor
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.workload import Workload

_LEARNING_RATE = 1e-5
_MAX_GRADIENT_NORM = 1.0


class Decoder:
    """The weights of a decoder, and its forward pass.

    Args:
        config: The model.
        workload: What is run.
        make: Makes the weight tensors.
    """

    def __init__(self, config: TransformerConfig, workload: Workload, make: MakeTensor) -> None:
        self.config, self.workload = config, workload
        e, h = config.embedding_size, config.hidden_size
        self.outer: Weights = {"embedding": make((config.vocab_size, e), 0.02)}
        if config.position_embedding == "learned":
            rows = max(config.max_position_embeddings, workload.kv_len) + config.position_offset
            self.outer["positions"] = make((rows, h), 0.02)
        if config.embedding_norm:
            self.outer |= make_norm(config, "embedding_norm", h, make)
        if e != h:
            self.outer |= {"project_in": make((h, e), e**-0.5), "project_out": make((e, h), h**-0.5)}
        self.layers = [make_layer(config, make) for _ in range(config.num_layers)]
        if config.has_final_norm:
            self.outer |= make_norm(config, "final_norm", h, make)
        if not config.tied_embeddings:
            self.outer["logits"] = make((config.vocab_size, e), e**-0.5)
        if config.lm_head_bias:
            self.outer["logits.bias"] = make((config.vocab_size,), 0.02)

    def parameters(self) -> list[Any]:
        """All weights, each once."""
        return [*self.outer.values(), *(weight for layer in self.layers for weight in layer.values())]

    def pass_context(self) -> PassContext:
        """What the layers of one pass share."""
        return make_pass_context(self.config, self.workload, self.outer["embedding"])

    def make_cache(self) -> list[tuple[Any, Any]]:
        """Key and value tensors of every layer, with space for the new tokens."""
        config, workload, table = self.config, self.workload, self.outer["embedding"]
        widths = (config.head_dim, config.v_head_dim)
        lead = (workload.micro_batch_size, config.num_kv_heads, workload.kv_len)
        return [(table.new_zeros(*lead, widths[0]), table.new_zeros(*lead, widths[1])) for _ in self.layers]

    def run(self, tokens: Any, context: PassContext, cache: list[tuple[Any, Any]] | None = None) -> Any:
        """Logits of (b, s) tokens; with a cache, of the last token of each sequence only."""
        import torch
        from torch.nn import functional

        outer, config = self.outer, self.config
        x = functional.embedding(tokens, outer["embedding"])
        if "project_in" in outer:
            x = linear(outer, "project_in", x)
        if "positions" in outer:
            first = context.context_len + config.position_offset
            positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
            x = x + functional.embedding(positions, outer["positions"])
        if config.embedding_norm:
            x = run_norm(outer, "embedding_norm", x, config)
        x = dropout(x, context)
        for index, layer in enumerate(self.layers):
            x = run_layer(layer, x, context, cache[index] if cache is not None else None)
        if config.has_final_norm:
            x = run_norm(outer, "final_norm", x, config)
        if "project_out" in outer:
            x = linear(outer, "project_out", x)
        if cache is not None:
            x = x[:, -1]
        return functional.linear(x, outer.get("logits", outer["embedding"]), outer.get("logits.bias"))

    def loss(self, tokens: Any, context: PassContext) -> Any:
        """Cross-entropy of the next tokens, computed from logits in fp32."""
        from torch.nn import functional

        logits = self.run(tokens[:, :-1], context)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_optimizer_step(parameters: list[Any]) -> Callable[[], None]:
    """Make an AdamW step in fp32 with clipped gradients, as in training frameworks.

    16-bit weights have fp32 master copies: gradients are converted to fp32, the step updates the master weights, and
    the result is copied back. Gradients are dropped afterwards.

    Args:
        parameters: The model's weights; they must have gradients when the step is called.
    """
    import torch

    is_wide = parameters[0].dtype == torch.float32
    masters = parameters if is_wide else [weight.detach().float() for weight in parameters]
    if not is_wide:
        for master in masters:
            master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, lr=_LEARNING_RATE, fused=True)

    def step() -> None:
        with torch.no_grad():
            if not is_wide:
                torch._foreach_copy_([master.grad for master in masters], [weight.grad for weight in parameters])
            torch.nn.utils.clip_grad_norm_(masters, _MAX_GRADIENT_NORM, foreach=True)
            optimizer.step()
            if not is_wide:
                torch._foreach_copy_(parameters, masters)
        for weight in parameters:
            weight.grad = None

    return step
