"""GPTs whose training steps Megatron-LM published, as models and as measurements."""

from __future__ import annotations

import shapewright
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.utilization.explain import Utilization

# arXiv 2205.05198, tables 3 and 5, s = 2048, v = 51200. Layers, width, heads, devices, batch, tensor, pipeline and
# virtual degrees, micro-batch; seconds with full recomputation, and with sequence parallelism and the selective one.
PUBLISHED = {
    "22B": ((48, 6144, 64), 8, 4, (8, 1, 1, 4), (1.42, 1.10)),
    "175B": ((96, 12288, 96), 64, 64, (8, 8, 3, 1), (18.13, 13.75)),
    "530B": ((105, 20480, 128), 280, 280, (8, 35, 3, 1), (49.05, 37.83)),
    "1T": ((128, 25600, 160), 512, 512, (8, 64, 1, 1), (94.42, 71.49)),
}


def gpt(num_layers: int, hidden_size: int, num_heads: int, vocab_size: int = 51200) -> TransformerConfig:
    """Return a GPT with a tied embedding and an MLP of four times the width."""
    return TransformerConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=vocab_size,
        tied_embeddings=True,
    )


def measured(name: str, recompute: str) -> Utilization:
    """Return the paper's measurement of one model, in its layout."""
    shape, num_devices, batch, (tensor, pipeline, virtual, micro_batch), seconds = PUBLISHED[name]
    return shapewright.mfu(
        gpt(*shape),
        device="a100-sxm-80gb",
        seconds=seconds[recompute == "selective"],
        num_devices=num_devices,
        global_batch_size=batch,
        workload={"recompute": recompute, "micro_batch_size": micro_batch, "seq_len": 2048},
        layout={"tensor_parallel": tensor, "pipeline_parallel": pipeline, "virtual_pipeline": virtual},
    )
