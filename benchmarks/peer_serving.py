"""Compare held-out errors of serving throughput with those of aiconfigurator 0.12 on the same published rows.

    python peer_serving.py predict DIR/serving_throughput.csv peer.csv      # with aiconfigurator installed, and alone
    python benchmarks/peer_serving.py compare DIR peer.csv [--json FILE]    # with shapewright[fit]

DIR holds serving_throughput.csv and serving_static.csv. Rows are offline throughput on TensorRT-LLM. aiconfigurator
takes its newest tables of the device, the layout of the row, and the batch with the highest throughput that its cache
holds; for experts, whose layout most rows leave open, the layout with the least error. Shapewright's terms of the
server are fitted without the pair of model and device. Configs come from aiconfigurator or the Hugging Face hub.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import write_record

MODELS = {
    "llama3-8b": ("llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B"),
    "mistral-7b": ("mistral-7b", ""),
    "llama3-70b": ("llama-3.1-70b", "meta-llama/Meta-Llama-3.1-70B"),
    "llama3.1-405b": ("llama-3.1-405b", "meta-llama/Meta-Llama-3.1-405B"),
    "mixtral-8x7b": ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
    "llama4-maverick": ("llama-4-maverick", "meta-llama/Llama-4-Maverick-17B-128E-Instruct"),
    "llama4-scout": ("llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    "qwen3-235b-a22b": ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B"),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B"),
    "deepseek-r1": ("deepseek-v3", "deepseek-ai/DeepSeek-R1"),
    "gpt-oss-120b": ("gpt-oss-120b", "openai/gpt-oss-120b"),
    "gpt-oss-20b": ("gpt-oss-20b", "openai/gpt-oss-20b"),
}
"""Preset and name in aiconfigurator of each model of the table."""
MISTRAL_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
"""Sizes of Mistral-7B, which aiconfigurator does not know, as the Llama that it is but for its window."""
DENSE = ("llama3-8b", "mistral-7b", "llama3-70b", "llama3.1-405b")
SYSTEMS = {
    "a100_sxm": ("a100-sxm-80gb", "a100_sxm"),
    "b200_sxm": ("b200-sxm-180gb", "b200_sxm"),
    "gb200": ("gb200", "gb200"),
    "h100_sxm": ("h100-sxm-80gb", "h100_sxm"),
    "h200_sxm": ("h200-sxm-141gb", "h200_sxm"),
    "l40s": ("l40s", "l40s"),
    "rtx_pro_6000": ("rtx-pro-6000", "rtx_pro_6000_server"),
}
"""Device file and system of aiconfigurator of each device of the table."""
BATCHES = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
PASS_TOKENS = 8192
"""Token budget of a pass in TensorRT-LLM; prompts one by one are tried too."""
BACKEND = "trtllm"
HOPPER = ("h100_sxm", "h200_sxm")


@dataclass(frozen=True)
class Layout:
    """How an instance is split: degrees of tensors, attention replicas, and experts by width and by number."""

    name: str
    tensor: int
    replicas: int = 1
    expert_tensor: int | None = None
    experts: int | None = None


def main() -> None:
    """Predict with aiconfigurator, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("predict")
    command.add_argument("table", type=Path)
    command.add_argument("output", type=Path)
    command.set_defaults(run=lambda given: predict(given.table, given.output))
    command = commands.add_parser("compare")
    command.add_argument("data", type=Path)
    command.add_argument("peer", type=Path)
    command.add_argument("--json", type=Path)
    command.set_defaults(run=lambda given: compare(given.data, given.peer, given.json))
    arguments = parser.parse_args()
    arguments.run(arguments)


def predict(table: Path, output: Path) -> None:
    """Write aiconfigurator's tokens per second of each row and layout that it answers."""
    logging.disable(logging.CRITICAL)
    with table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if is_compared(row)]
    peer = Peer()
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", "device", "measured", "layout", "predicted"))
        for index, row in enumerate(rows):
            print(f"{index + 1} of {len(rows)}: {row['model_id']} on {row['device']}", flush=True)
            for layout in layouts_of(row):
                tokens_per_s = peer.tokens_per_s(row, layout)
                if tokens_per_s is not None:
                    facts = row["model_id"], row["device"], row["output_tokens_per_s"], layout.name, tokens_per_s
                    writer.writerow(facts)


def is_compared(row: dict[str, str]) -> bool:
    """Whether a row is offline throughput on TensorRT-LLM of what both know."""
    return (
        row["metric"] == "offline_max_throughput"
        and row["framework"].startswith("TensorRT-LLM")
        and row["device"] in SYSTEMS
        and row["model_id"] in MODELS
    )


def layouts_of(row: dict[str, str]) -> Iterator[Layout]:
    """Yield the layout of a dense row, and those that a row of experts can have."""
    stages = degree(row["pp"])
    devices = degree(row["num_gpus"]) // stages
    if row["model_id"] in DENSE:
        yield Layout("tensors", degree(row["tp"]) if row["tp"] else devices)
        return
    yield Layout("experts split", devices, expert_tensor=devices, experts=1)
    yield Layout("experts apart", devices, expert_tensor=1, experts=devices)
    if devices > 1:
        yield Layout("attention replicas", 1, devices, expert_tensor=1, experts=devices)


def degree(cell: str) -> int:
    """Return a parallel degree, of which an empty cell has 1."""
    return round(float(cell)) if cell else 1


class Peer:
    """aiconfigurator with the tables and models that it has loaded."""

    def __init__(self) -> None:
        self._databases: dict[tuple[str, str], Any] = {}
        self._sessions: dict[tuple[Any, ...], Any] = {}
        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "config.json").write_text(json.dumps(MISTRAL_7B), encoding="utf-8")

    def tokens_per_s(self, row: dict[str, str], layout: Layout) -> float | None:
        """Return the highest throughput over batches; measured tables first, then their extrapolation."""
        for mode in ("SILICON", "HYBRID"):
            with suppress(Exception):  # of many types: tables that lack the model, formats, sizes
                found = self._highest(row, layout, mode)
                if found:
                    return found
        return None

    def _highest(self, row: dict[str, str], layout: Layout, mode: str) -> float:
        from aiconfigurator.sdk.config import RuntimeConfig

        session = self._session(row, layout, mode)
        prompt, answer = round(float(row["input_len"])), round(float(row["output_len"]))
        instances = degree(row["num_gpus"]) / (layout.tensor * layout.replicas * degree(row["pp"]))
        most = float(row["num_requests"]) if row["num_requests"] else math.inf
        best = 0.0
        for budget in {prompt, max(prompt, PASS_TOKENS)}:
            for batch in BATCHES:
                if best and batch * layout.replicas * instances > most:
                    break
                summary = session.run_agg(RuntimeConfig(isl=prompt, osl=answer, batch_size=batch), ctx_tokens=budget)
                if summary.check_oom() or summary.check_kv_cache_oom():
                    break
                best = max(best, float(summary.get_result_dict()["tokens/s"]) * instances)
        return best

    def _session(self, row: dict[str, str], layout: Layout, mode: str) -> Any:
        """Return the model with a layout on the tables of a device."""
        from aiconfigurator.cli import api
        from aiconfigurator.sdk import config_builders, models, perf_database
        from aiconfigurator.sdk.backends.factory import get_backend
        from aiconfigurator.sdk.inference_session import InferenceSession

        system, name = SYSTEMS[row["device"]][1], MODELS[row["model_id"]][1] or self._folder.name
        if (system, mode) not in self._databases:
            version = perf_database.get_latest_database_version(system=system, backend=BACKEND)
            self._databases[system, mode] = perf_database.get_database_view(
                system, BACKEND, version, allow_missing_data=mode != "SILICON", database_mode=mode
            )
        database = self._databases[system, mode]
        key = (name, system, row["weight_dtype"], layout, row["pp"], mode)
        if key not in self._sessions:
            config = config_builders.build_model_config(
                layout.tensor, degree(row["pp"]), layout.replicas, layout.expert_tensor, layout.experts,
                *formats_of(row), None,
            )  # fmt: skip
            api.resolve_context_fmha_by_data(config, name, database, BACKEND, is_context_role=True)
            self._sessions[key] = InferenceSession(
                models.get_model(name, config, BACKEND), database, get_backend(BACKEND)
            )
        return self._sessions[key]


def formats_of(row: dict[str, str]) -> tuple[str, str, str, str]:
    """Return aiconfigurator's formats of GEMMs, cache, attention and experts."""
    weights = row["weight_dtype"]
    if weights in ("fp16", "bf16"):
        return ("bfloat16",) * 4
    if weights == "mxfp4":
        if row["device"] in HOPPER:
            return "bfloat16", "bfloat16", "bfloat16", "w4a16_mxfp4"
        return "bfloat16", "fp8", "fp8", "w4a8_mxfp4_mxfp8"
    if row["model_id"].startswith("deepseek"):
        return "fp8_block", "fp8", "bfloat16", "fp8_block"
    return weights, "fp8", "fp8", weights


def compare(data: Path, peer: Path, record: Path | None) -> None:
    """Print errors of both by model and device, on the rows that both answer."""
    held_out = held_out_errors(data)
    found: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with peer.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            measured = float(row["measured"])
            pair = MODELS[row["model"]][0], SYSTEMS[row["device"]][0]
            errors = abs(float(row["predicted"]) / measured - 1.0), held_out.get((*pair, measured))
            if errors[1] is not None:
                found[pair][row["layout"]].append((errors[0], errors[1]))
    print("| model | device | rows | aiconfigurator | Shapewright, held out |\n| --- | --- | --- | --- | --- |")
    results = []
    for (model, device), layouts in sorted(found.items()):
        best = min(layouts.values(), key=lambda errors: statistics.mean(peer_error for peer_error, _ in errors))
        theirs, ours = (statistics.mean(errors) for errors in zip(*best, strict=True))
        print(f"| {model} | {device} | {len(best)} | {theirs:.1%} | {ours:.1%} |")
        results.append({"model": model, "device": device, "rows": len(best), "peer_error": theirs, "own_error": ours})
    better = sum(row["own_error"] < row["peer_error"] for row in results)
    print(f"\nShapewright's error is the smaller of {better} of {len(results)} pairs.")
    write_record(record, results=results)


def held_out_errors(data: Path) -> dict[tuple[str, str, float], float]:
    """Relative error of each row by model, device and measured value, by a fit without its model and device."""
    import numpy as np

    from shapewright.measure.refit.servers import ENGINES, Prices, fit, held_out_ratios, read_rows

    (engine,) = (one for one in ENGINES if one.name == BACKEND)
    rows = [row for row in read_rows(data) if row.server.name in engine.servers]
    prices = Prices(rows, engine.quantities)
    errors = np.abs(np.exp(held_out_ratios(prices, engine, fit(prices, engine))) - 1.0)
    return {
        (*row.pair, row.measured[quantity]): float(error)
        for (row, quantity), error in zip(prices.rows, errors, strict=True)
    }


if __name__ == "__main__":
    main()
