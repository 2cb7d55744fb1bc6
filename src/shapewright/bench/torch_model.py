"""A whole decoder in torch: embedding, layers, logits, loss and optimiser, or prefill and decode with a KV cache.

Legend: b sequences, s tokens of one pass, v vocabulary, e embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shapewright.bench.torch_layer import Pass, Weights, linear, make_layer, make_norm, make_pass, run_layer, run_norm

if TYPE_CHECKING:
    from shapewright.bench.torch_layer import MakeTensor
    from shapewright.config import TransformerConfig
    from shapewright.workload import Workload

_LEARNING_RATE = 1e-5
_LARGEST_NORM = 1.0


class Decoder:
    """Weights of a decoder and its passes.

    Args:
        config: The model.
        workload: What is run.
        make: Makes the weights.
    """

    def __init__(self, config: TransformerConfig, workload: Workload, make: MakeTensor) -> None:
        self.config, self.workload = config, workload
        e, h = config.embedding_size, config.hidden_size
        self.ends: Weights = {"embedding": make((config.vocab_size, e), 0.02)}
        if config.position_embedding == "learned":
            rows = max(config.max_position_embeddings, workload.kv_len) + config.position_offset
            self.ends["positions"] = make((rows, h), 0.02)
        if config.embedding_norm:
            self.ends |= make_norm(config, "embedding_norm", h, make)
        if e != h:
            self.ends |= {"project_in": make((h, e), e**-0.5), "project_out": make((e, h), h**-0.5)}
        self.layers = [make_layer(config, make) for _ in range(config.num_layers)]
        if config.has_final_norm:
            self.ends |= make_norm(config, "final_norm", h, make)
        if not config.tied_embeddings:
            self.ends["logits"] = make((config.vocab_size, e), e**-0.5)
        if config.lm_head_bias:
            self.ends["logits.bias"] = make((config.vocab_size,), 0.02)

    def parameters(self) -> list[Any]:
        """Every weight once."""
        return [*self.ends.values(), *(weight for layer in self.layers for weight in layer.values())]

    def shared(self) -> Pass:
        """What the layers of one pass share."""
        return make_pass(self.config, self.workload, self.ends["embedding"])

    def make_cache(self) -> list[tuple[Any, Any]]:
        """Keys and values of every layer, with room for those to come."""
        config, workload, table = self.config, self.workload, self.ends["embedding"]
        widths = (config.head_dim, config.v_head_dim)
        lead = (workload.micro_batch_size, config.num_kv_heads, workload.kv_len)
        return [(table.new_zeros(*lead, widths[0]), table.new_zeros(*lead, widths[1])) for _ in self.layers]

    def run(self, tokens: Any, shared: Pass, cache: list[tuple[Any, Any]] | None = None) -> Any:
        """Logits of (b, s) tokens; with a cache those of each last token alone."""
        import torch
        from torch.nn import functional

        ends, config = self.ends, self.config
        x = functional.embedding(tokens, ends["embedding"])
        if "project_in" in ends:
            x = linear(ends, "project_in", x)
        if "positions" in ends:
            first = shared.context_len + config.position_offset
            places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
            x = x + functional.embedding(places, ends["positions"])
        if config.embedding_norm:
            x = run_norm(ends, "embedding_norm", x, config)
        if self.workload.is_training and config.hidden_dropout > 0.0:
            x = functional.dropout(x, config.hidden_dropout)
        for index, layer in enumerate(self.layers):
            x = run_layer(layer, x, shared, cache[index] if cache is not None else None)
        if config.has_final_norm:
            x = run_norm(ends, "final_norm", x, config)
        if "project_out" in ends:
            x = linear(ends, "project_out", x)
        if cache is not None:
            x = x[:, -1]
        return functional.linear(x, ends.get("logits", ends["embedding"]), ends.get("logits.bias"))

    def loss(self, tokens: Any, shared: Pass) -> Any:
        """Cross-entropy of the next tokens, from logits in fp32."""
        from torch.nn import functional

        logits = self.run(tokens[:, :-1], shared)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_optimizer_step(parameters: list[Any], *, fused: bool) -> Callable[[], None]:
    """AdamW in fp32 with clipped gradients, as training frameworks do it.

    16-bit weights have fp32 master copies: gradients are widened, the step is taken there, and the result is copied
    back. Gradients are dropped afterwards.

    Args:
        parameters: The model's weights, with gradients when the result is called.
        fused: Whether the device has the one-kernel form.
    """
    import torch

    is_wide = parameters[0].dtype == torch.float32
    masters = parameters if is_wide else [weight.detach().float() for weight in parameters]
    if not is_wide:
        for master in masters:
            master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, lr=_LEARNING_RATE, fused=fused)

    def step() -> None:
        with torch.no_grad():
            if not is_wide:
                torch._foreach_copy_([master.grad for master in masters], [weight.grad for weight in parameters])
            torch.nn.utils.clip_grad_norm_(masters, _LARGEST_NORM, foreach=True)
            optimizer.step()
            if not is_wide:
                torch._foreach_copy_(parameters, masters)
        for weight in parameters:
            weight.grad = None

    return step
