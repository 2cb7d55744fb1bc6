"""Reader of measurement campaigns: JSON lines of a measuring script that preceded 'shapewright bench'.

A line is {"block", "case": {arguments}, ... times}; environment.jsonl in the same folder describes the GPU and the
versions. The same rows in parquet contain the case as a struct or as JSON text. Layers are pre-norm blocks with
LayerNorm and GELU, or with RMSNorm and SwiGLU if they are gated; models add an embedding, learned positions unless
gated, and an untied output head, and are timed with one step of AdamW.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from shapewright.core.records import dataclass
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.store.imports.measured import Measurement, Overrides, detected_device, positive
from shapewright.measure.store.record import FAILED, OK, Case
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.model_runs import FORWARD, FORWARD_BACKWARD, layer_run, step_run
from shapewright.workload.workload import Workload

Record = Mapping[str, Any]
# Memory layout of each GEMM of a linear layer.
_LAYOUTS = {"forward": "NT", "dgrad": "NN", "wgrad": "TN"}
# Kind of pointwise operation, elements read and written per element of the tensor, and number of kernels.
_POINTWISE = {
    "layer_norm": ("norm", 1.0, 1.0, 1),
    "rms_norm": ("norm", 1.0, 1.0, 1),
    "softmax": ("softmax", 1.0, 1.0, 1),
    "gelu": ("activation", 1.0, 1.0, 1),
    "silu_mul": ("activation", 1.0, 0.5, 2),
    "add": ("residual", 2.0, 1.0, 1),
    "dropout": ("dropout", 1.0, 1.5, 1),  # a mask of one byte per 2-byte element
    "copy": ("permute", 1.0, 1.0, 1),
    "cross_entropy": ("cross_entropy", 1.0, 0.0, 1),
    "adamw": ("optimizer", 4.0, 3.0, 1),  # parameters, gradients and two moments, in fp32; all but gradients written
}
# Of kernels with the same kind and bytes, the default one; the others are variants.
_DEFAULT_KERNELS = ("layer_norm", "softmax", "gelu", "add", "dropout", "adamw")
# Number of learned positions in the script's models.
_MODEL_POSITIONS = 16384


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Contents of environment.jsonl.

    Attributes:
        device: Canonical name of the GPU; ``cpu`` if the file names none.
        library: torch and CUDA with their versions.
        runtime: CUDA with its version.
        driver: Driver version.
        measured_utc: Start time of the first block.
        facts: Properties that the driver reported.
    """

    device: str = ""
    library: str = ""
    runtime: str = ""
    driver: str = ""
    measured_utc: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_environment(lines: Iterable[str]) -> Environment:
    """Read environment.jsonl, of which only the first line is used."""
    for line in lines:
        if not line.strip():
            continue
        facts = json.loads(line)
        runtime = f"cuda {facts['cuda']}" if facts.get("cuda") else ""
        gpu = str(facts.get("gpu") or "")
        return Environment(
            device=detected_device(gpu, int(facts["num_sms"]), float(facts["memory_bytes"])) if gpu else "cpu",
            library=f"torch {facts.get('torch', '')} {runtime}".strip(),
            runtime=runtime,
            driver=str((facts.get("nvidia_smi") or {}).get("driver_version") or ""),
            measured_utc=str(facts.get("time") or ""),
            facts={name: facts[name] for name in ("gpu", "num_sms", "memory_bytes", "nvidia_smi") if name in facts},
        )
    return Environment()


def read_lines(text: str) -> Iterator[Record]:
    """Read the records of a .jsonl file; a truncated last line is ignored.

    Raises:
        ValueError: a line in the middle is not JSON.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            raise ValueError(f"line {number} is not JSON") from error


def read_campaign(
    records: Iterable[Record], environment: Environment, overrides: Overrides, skipped: Counter[str]
) -> Iterator[Measurement]:
    """Convert records into measurements; records that are not operations are counted in ``skipped``."""
    rows = [{**record, "case": _case_of(record["case"])} for record in records]
    device = overrides.device or environment.device
    forward_s = {_attention_key(row): row.get("time_s") for row in rows if row["block"] == "attention"}
    for row in rows:
        block, case = str(row["block"]), row["case"]
        # On a CPU the script uses fp32 for every case, whatever its dtype.
        dtype = overrides.dtype or ("fp32" if device == "cpu" else str(case.get("dtype") or "bf16"))
        make = _MAKERS.get(block.split("_", maxsplit=1)[0])
        if make is None:
            skipped[f"{block}: unknown block"] += 1
            continue
        made = make(case, dtype)
        time_s = row.get("time_s")
        facts: dict[str, Any] = {}
        if block == "attention" and case["backward"]:
            # The script times forward and backward together; the time of the forward pass is subtracted.
            forward_only_s = forward_s.get(_attention_key({**row, "case": {**case, "backward": False}}))
            if time_s is None or forward_only_s is None or time_s <= forward_only_s:
                skipped["attention backward without its forward row"] += 1
                continue
            time_s -= forward_only_s
            facts = {"kernel": f"sdpa {case['backend']} backward, both passes less forward"}
        yield Measurement(
            case=made,
            device=device,
            library=overrides.library or environment.library,
            suite=f"campaign {block}",
            median_s=positive(time_s),
            status=FAILED if row.get("error") else OK,
            facts={**_facts(row, environment, derived=bool(facts)), **facts},
            runtime=environment.runtime,
            driver=environment.driver,
            device_facts=environment.facts,
        )


def _case_of(value: Any) -> dict[str, Any]:
    """Arguments of a case from a mapping or JSON text, without the None values of a parquet struct."""
    found = json.loads(value) if isinstance(value, str) else dict(value)
    return {name: entry for name, entry in found.items() if entry is not None}


def _attention_key(row: Record) -> str:
    return json.dumps(row["case"], sort_keys=True)


def _facts(row: Record, environment: Environment, *, derived: bool) -> dict[str, Any]:
    if row.get("error"):
        return {"error": str(row["error"]), "measured_utc": environment.measured_utc}
    spread = {} if derived else {"min_s": positive(row.get("time_min_s")), "max_s": positive(row.get("time_max_s"))}
    return {
        "method": str(row.get("method") or ""),
        "num_samples": int(row.get("samples") or 0),
        "calls_per_sample": int(row.get("calls") or 0),
        "num_inputs": int(row.get("inputs") or 0),
        "measured_utc": environment.measured_utc,
        "figures": {"peak_memory_bytes": peak_bytes} if (peak_bytes := positive(row.get("peak_memory_bytes"))) else {},
        **spread,
    }


def _linear(case: Record, dtype: str) -> Case:
    tokens, fan_in, fan_out = int(case["tokens"]), int(case["fan_in"]), int(case["fan_out"])
    kind = str(case["kind"])
    m, n, k = {
        "forward": (tokens, fan_out, fan_in),
        "dgrad": (tokens, fan_in, fan_out),
        "wgrad": (fan_out, fan_in, tokens),
    }[kind]
    return Case(operation=Gemm(name=f"linear.{kind}", dtype=dtype, m=m, n=n, k=k, layout=_LAYOUTS[kind]))


def _batched(case: Record, dtype: str) -> Case:
    seq, width = int(case["seq"]), int(case["head_dim"])
    is_score = case["which"] == "score"
    n, k = (seq, width) if is_score else (width, seq)
    operation = Gemm(
        name=f"attention.{case['which']}",
        dtype=dtype,
        m=seq,
        n=n,
        k=k,
        batch=int(case["batch"]),
        layout="NT" if is_score else "NN",
    )
    return Case(operation=operation)


def _attention(case: Record, dtype: str) -> Case:
    seq, width = int(case["seq"]), int(case["head_dim"])
    operation = Attention(
        name=f"attention.{case['backend']}{'.backward' if case['backward'] else ''}",
        dtype=dtype,
        batch_size=int(case["micro_batch"]),
        query_len=seq,
        kv_len=seq,
        num_heads=int(case["num_heads"]),
        num_kv_heads=int(case["num_kv_heads"]),
        head_dim=width,
        v_head_dim=width,
        causal=bool(case["causal"]),
        is_backward=bool(case["backward"]),
    )
    return Case(operation=operation, variant=str(case["backend"]))


def _pointwise(case: Record, dtype: str) -> Case:
    name, tokens, width = str(case["operation"]), int(case["tokens"]), int(case["width"])
    dtype = "fp32" if name == "adamw" else dtype
    elements, element_bytes = float(tokens) * width, 4.0 if dtype in ("fp32", "tf32") else 2.0
    kind, reads, writes, launches = _POINTWISE[name]
    operation = Pointwise(
        name=name,
        dtype=dtype,
        operation=kind,
        read_bytes=reads * elements * element_bytes,
        written_bytes=writes * elements * element_bytes,
        num_kernels=launches,
    )
    return Case(operation=operation, row_width=width, variant="" if name in _DEFAULT_KERNELS else name)


def _layer(case: Record, dtype: str) -> Case:
    shape = TransformerConfig(**_block_shape(case), vocab_size=1, num_layers=1, position_embedding="none")
    passes = FORWARD_BACKWARD if case["backward"] else FORWARD
    layer = layer_run(shape, _workload(case, dtype), passes=passes)
    return Case(operation=layer, variant="compiled" if case.get("compiled") else "")


def _model(case: Record, dtype: str) -> Case:
    shape = TransformerConfig(
        **_block_shape(case),
        vocab_size=int(case["vocab"]),
        num_layers=int(case["num_layers"]),
        position_embedding="none" if case["gated"] else "learned",
        max_position_embeddings=_MODEL_POSITIONS,
    )
    return Case(operation=step_run(shape, _workload(case, dtype)))


def _block_shape(case: Record) -> dict[str, Any]:
    """Config fields of the script's layer."""
    gated = bool(case["gated"])
    has_bias = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "norm_bias": True}
    return {
        "name": "campaign",
        "hidden_size": int(case["hidden"]),
        "num_heads": int(case["num_heads"]),
        "num_kv_heads": int(case["num_kv_heads"]),
        "head_dim": int(case["hidden"]) // int(case["num_heads"]),
        "intermediate_size": int(case["ffn"]),
        "fused_qkv": True,
        **({"norm": "rmsnorm", "gated_mlp": True, "fused_gate_up": True, "activation": "silu"} if gated else has_bias),
    }


def _workload(case: Record, dtype: str) -> Workload:
    return Workload(
        micro_batch_size=int(case["micro_batch"]),
        seq_len=int(case["seq"]),
        dtype=dtype,
        attention="flash" if case["attention"] == "fused" else "unfused",
    )


_MAKERS: Mapping[str, Callable[[Record, str], Case]] = {
    "linear": _linear,
    "batched": _batched,
    "attention": _attention,
    "pointwise": _pointwise,
    "layer": _layer,
    "model": _model,
}
