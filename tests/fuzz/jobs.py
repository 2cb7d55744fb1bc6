"""Hostile traces of requests, launch lines, and files of trainers."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from random import Random

from fuzz.spoil import as_json, spoil_bytes
from shapewright.app.formats.registry import FORMATS, parse_job, read_job, write_format
from shapewright.core.errors import ShapewrightError
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.optimize.serving.traffic.trace import read_trace

REQUESTS_CSV = b"arrival_s,input_len,output_len,prefix_id,prefix_len\n" + b"".join(
    b"%d.5,%d,20,a,10\n" % (number, 100 + number) for number in range(20)
)
REQUESTS_JSON = b"".join(
    as_json({"arrival_s": number, "input_length": 100, "output_length": 9}) + b"\n" for number in range(20)
)


def make_requests(chance: Random) -> bytes:
    """A csv file of requests with spoilt bytes."""
    return spoil_bytes(REQUESTS_CSV, chance)


def make_requests_json(chance: Random) -> bytes:
    """A JSON Lines file of requests with spoilt bytes."""
    return spoil_bytes(REQUESTS_JSON, chance)


def use_requests(path: Path, _chance: Random) -> None:
    """Read the requests; arrivals are finite and in order."""
    arrivals = read_trace(path).arrival_s
    assert all(map(math.isfinite, arrivals.tolist()))
    assert (arrivals[1:] >= arrivals[:-1]).all()


LAUNCH_LINES = (
    b"vllm serve meta-llama/Llama-3.1-70B -tp 4 --pipeline-parallel-size=2 --max-model-len 8192 --max-num-seqs 64\n",
    b"python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 16 --dp 8 --context-length 4096\n",
    b'{"train_batch_size": 64, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}\n',
    b"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\nfsdp_config: {fsdp_sharding_strategy: 1}\n",
    b"n_layer = 12\nn_head = 12\nn_embd = 768\nblock_size = 1024\nbatch_size = 12\n",
    b"python pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048\n",
)


@cache
def jobs() -> list[bytes]:
    """Launch lines, and files of every trainer."""
    written = []
    for name in FORMATS:
        for preset in ("llama-2-7b", "gpt2", "mixtral-8x7b"):
            try:
                written.append(write_format(name, read_model(preset).config).encode())
            except ShapewrightError:
                continue
    return [*LAUNCH_LINES, *written]


def make_job(chance: Random) -> bytes:
    """A launch line or a file of a trainer with spoilt bytes."""
    return spoil_bytes(chance.choice(jobs()), chance)


def use_job(path: Path, _chance: Random) -> None:
    """Read the job by its name and by its text, and its model where it has one."""
    found = read_job(path)
    assert repr(parse_job(path.read_bytes().decode("utf-8", "replace"))) == repr(found)  # NaN differs from itself
    if found.fields:
        count_parameters(read_model(None, found.fields).config)
