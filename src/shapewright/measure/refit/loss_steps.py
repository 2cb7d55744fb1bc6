"""Measured steps of the table of losses: the Gemstones models, trained on MI250X."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from shapewright.hardware import load_device
from shapewright.measure.accuracy.tables.training import PublishedRun
from shapewright.models import TransformerConfig
from shapewright.workload import ParallelLayout, Workload

TABLE, SOURCE = "loss_by_shape.csv", "gemstones"
SOFTWARE = "fsdp-rocm-2024"
BATCH_TOKENS, SEQ_LEN = 4_194_304, 2048
_DEVICE = "mi250x-gcd"
# The table names one long run per shape; its other runs continue it with the same step time.
_RUN = "hot_100b+"
# Not published; errors of left-out widths are within 0.005 of each other for 4 and 8 and for ZeRO 0 and 3.
_MICRO_BATCH_SIZE, _ZERO_STAGE = 4, 3
_FIELDS = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")


def read_measured_steps(data: Path) -> dict[str, PublishedRun]:
    """Runs of the table of losses that have a step time, by width and depth in words."""
    found = {}
    with (data / TABLE).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["source"] != SOURCE or not row["run"].startswith(_RUN):
                continue
            num_devices = int(row["num_devices"])
            sizes: dict[str, Any] = {name: int(row[name]) for name in _FIELDS}
            found[f"{row['hidden_size']}x{row['num_layers']}"] = PublishedRun(
                source=SOURCE,
                software=SOFTWARE,
                device=load_device(_DEVICE),
                config=TransformerConfig(
                    **sizes, v_head_dim=sizes["head_dim"], gated_mlp=True, norm="rmsnorm", position_embedding="rotary",
                    tied_embeddings=False, max_position_embeddings=SEQ_LEN,
                ),
                workload=Workload(
                    micro_batch_size=_MICRO_BATCH_SIZE, global_batch_size=BATCH_TOKENS // SEQ_LEN, seq_len=SEQ_LEN,
                    dtype="bf16",
                ),
                layout=ParallelLayout(data_parallel=num_devices, zero_stage=_ZERO_STAGE),
                tokens_per_s_per_device=BATCH_TOKENS / (float(row["seconds_per_step"]) * num_devices),
            )  # fmt: skip
    return found
