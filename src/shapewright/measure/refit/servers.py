"""Fit what servers run differently from the records, from published serving throughput and static batches.

The data folder holds serving_throughput.csv and serving_static.csv. Fitted are, by engine: fractions of the bound that
its own kernels reach, factors on kernels of the records, and the time that its host adds to a pass. Each parameter has
a prior, so that a few rows move it little; each (model, device) pair of an engine counts alike, whatever its rows.
Errors and intervals are those of pairs left out, each in turn. Some ten minutes on one core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.lowering.operations.collective import Collective
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.serving.rows import FORMAT, STATIC_FORMAT, ServedRow, read_served, read_static
from shapewright.measure.accuracy.tables.serving.table import quantity_of
from shapewright.measure.fit.shared import Array
from shapewright.measure.refit.record_files import command, write_record
from shapewright.optimize.serving.pass_times import lower_pass
from shapewright.pricing.operations import price_operations
from shapewright.pricing.servers import instruction_s, kernel_class

TABLES = ("serving_throughput.csv", "serving_static.csv")
QUANTILES = (0.05, 0.95)
# Pairs from which a server has intervals of its own; otherwise those of its engine.
LEAST_PAIRS = 3
LEAST_WIDE = (0.9, 1.1)
# Weight of a prior over that of a row, on logarithms.
PRIOR = 0.1
# Relative residual beyond which a row counts less, and relative step of the derivatives.
OUTLIER, STEP = 0.1, 0.02
MOST_STEPS, MOST_STEPS_HELD_OUT = 15, 20


@dataclass(frozen=True)
class Engine:
    """Servers that are fitted together.

    Attributes:
        name: Name of their record.
        servers: Names of the servers.
        quantities: Weight of each measured quantity that is fitted; the others have intervals alone.
        priors: Prior value of each parameter: ``fraction.CLASS``, ``start_s.CLASS``, ``factor.CLASS``,
            ``instructions_per_element.CLASS``, ``host_s``, ``host_per_sequence_s``, ``host_per_rank_s``,
            ``prefill_host_s``, ``launch_s`` and ``time_factor``, for all of the servers or, as in ``host_s@SERVER``,
            for one.
        given: Parameters that are not fitted.
        why: Reason for these parameters.
    """

    name: str
    servers: tuple[str, ...]
    quantities: Mapping[str, float]
    priors: Mapping[str, float]
    given: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


# The all-reduce of serving libraries inside a node with NVLink, in CUDA graphs: TensorRT-LLM, vLLM and SGLang take 3 to
# 7 us for small messages, and half of the link's bandwidth at 16 MB (collectives_more.parquet). With the records of
# those kernels alone, which do not wait for late ranks, held-out pairs of every engine are 0.1 to 3 points worse.
OWN_ALL_REDUCE = {"start_s.all_reduce.link": 8e-6, "fraction.all_reduce.link": 0.45}
# Over PCIe: from the fit of TensorRT-LLM on L40S, A100 PCIe and RTX PRO 6000.
_PCIE = {"fraction.all_reduce.pcie": 0.6, "start_s.all_reduce.pcie": 5e-5}
# Medians of first tokens and times per token under load jump between two modes, so they count less.
LOADED = {"output_tokens_per_s": 1.0, "ttft_s": 0.3, "tpot_s": 0.3}
_TRTLLM = ("trtllm-0.5", "trtllm-0.9", "trtllm-0.14", "trtllm-0.17", "trtllm-1.0")

ENGINES = (
    Engine(
        name="trtllm",
        servers=_TRTLLM,
        quantities={"output_tokens_per_s": 1.0},
        priors={
            "fraction.decode_attention.narrow": 0.85,
            "fraction.decode_attention.wide": 0.85,
            **_PCIE,
            "factor.alltoall.link": 1.3,
            "instructions_per_element.decode_attention.narrow.grouped@trtllm-0.9": 10.0,
            "instructions_per_element.decode_attention.wide.grouped@trtllm-0.9": 10.0,
            "factor.decode_attention.wide.grouped@trtllm-0.14": 1.3,
            "factor.gemm.fp8": 0.9,
            "factor.gemm.fp8.large": 0.9,
            "factor.experts.fp4.blackwell": 1.0,
            "factor.experts.fp8:fp4.blackwell": 1.5,
            "factor.experts.bf16:fp4.hopper": 1.5,
            "factor.experts.fp8.hopper@trtllm-1.0": 1.5,
            "time_factor@trtllm-0.14": 1.0,
            **{f"host_s@{name}": 5e-4 for name in _TRTLLM},
            "host_per_sequence_s": 3e-6,
        },
        given=OWN_ALL_REDUCE,
        why="records hold the kernels of vLLM and SGLang: TensorRT-LLM has its own attention of decoding, GEMMs in fp8 "
        "and expert kernels; engines of version 1.0 run experts in PyTorch",
    ),
    Engine(
        name="vllm-2023",
        servers=("vllm-0.2",),
        quantities=dict.fromkeys(("e2e_s", "ttft_s", "tpot_s"), 1.0),
        priors={
            "host_s@vllm-0.2": 5e-3,
            "host_per_sequence_s@vllm-0.2": 1e-5,
            "host_per_rank_s@vllm-0.2": 1e-3,
            "launch_s@vllm-0.2": 1e-5,
            "time_factor@vllm-0.2": 1.2,
            "factor.all_reduce.link.large": 2.0,
            "fraction.decode_attention.wide": 0.7,
            "prefill_host_s@vllm-0.2": 5e-3,
        },
        given=OWN_ALL_REDUCE,
        why="kernels are launched one by one; kernels of 2023",
    ),
    Engine(
        name="vllm",
        servers=("vllm-0.6", "vllm-0.10", "vllm-0.16"),
        quantities=LOADED,
        priors={
            "prefill_host_s": 0.01,
            "prefill_host_s@vllm-0.16": 0.05,
            "prompt_experts_fraction@vllm-0.16": 0.02,
            "time_factor@vllm-0.6": 1.1,
            "factor.experts.bf16:fp4.xe2": 0.5,
        },
        # Tokens that no prompt holds up take 13.6 to 16 ms (MiniMax) and 16 to 17.5 ms (Qwen), kernels 9 to 13 ms.
        given={**OWN_ALL_REDUCE, "host_s": 1e-3, "host_s@vllm-0.16": 4e-3},
        why="kernels are those of the records; passes with prompts are not CUDA graphs; few pairs",
    ),
    Engine(
        name="sglang",
        servers=("sglang-0.3", "sglang-0.4", "sglang-0.5"),
        quantities=LOADED,
        priors={
            "time_factor": 1.1,
            "time_factor@sglang-0.4": 1.1,
            "prefill_host_s": 0.03,
            "prefill_host_s@sglang-0.4": 0.03,
            "prefill_host_s@sglang-0.5": 0.03,
        },
        given={**OWN_ALL_REDUCE, "host_s": 1e-3},
        why="kernels are those of the records; passes with prompts are not CUDA graphs; three pairs",
    ),
)


class Prices:
    """Rows with the prices of the operations of their passes, as arrays over operations.

    Attributes:
        rows: Each row with one measured quantity.
        pairs: Server family and (model, device) pair of each.
    """

    def __init__(self, rows: Sequence[ServedRow], quantities: Mapping[str, float]) -> None:
        self.rows: list[tuple[ServedRow, str]] = []
        self._classes: dict[tuple[str, str], int] = {}
        self._spans: list[tuple[int, int]] = []
        columns: list[list[Array]] = [[], [], [], [], [], [], []]
        self._servers: list[str] = []
        sequences: list[int] = []
        ranks: list[int] = []
        graphs: list[bool] = []
        prompts: list[bool] = []
        for row in rows:
            try:
                passes = [self._price(row, shape) for shape in row.load.shapes]
            except ShapewrightError:
                continue
            for quantity in row.measured:
                first = len(sequences)
                for shape, arrays in zip(row.load.shapes, passes, strict=True):
                    for column, values in zip(columns, (*arrays, np.full(len(arrays[0]), len(sequences))), strict=True):
                        column.append(values)
                    sequences.append(shape.decode_batch)
                    ranks.append(row.instance.layout.tensor_parallel)
                    prompts.append(bool(shape.prefill_tokens))
                    graphs.append(row.server.cuda_graphs and not shape.prefill_tokens)
                    self._servers.append(row.server.name)
                self._spans.append((first, len(sequences)))
                self.rows.append((row, quantity))
        self._time_s, self._bound_s, self._repeats, kinds, self._weights_s, self._instruction_s, passes_of = (
            np.concatenate(one) for one in columns
        )
        self._kinds, self._passes = kinds.astype(int), passes_of.astype(int)
        self._sequences, self._is_graph = np.array(sequences, dtype=float), np.array(graphs)
        self._ranks = np.array(ranks, dtype=float)
        self._has_prompts = np.array(prompts)
        self._kernels = np.bincount(self._passes, self._repeats, minlength=len(sequences))
        self.measured = np.array([row.measured[quantity] for row, quantity in self.rows])
        self.pairs = [row.pair for row, _ in self.rows]
        counts = Counter((row.server.name, quantity, row.pair) for row, quantity in self.rows)
        weights = np.array(
            [
                quantities.get(quantity, 0.0) * counts[row.server.name, quantity, row.pair] ** -0.5
                for row, quantity in self.rows
            ]
        )
        self.is_fitted = weights > 0.0
        self.weights = weights / weights[self.is_fitted].mean()

    def _price(self, row: ServedRow, shape: Any) -> tuple[Array, ...]:
        device, stages = row.instance.scenario.device, row.instance.layout.pipeline_parallel
        operations = [
            one.changed(is_served=False) if isinstance(one, Collective) else one
            for one in lower_pass(row.instance, shape).operations
        ]
        prices = price_operations(operations, device)
        repeats = np.array([int(one.repeats) * (stages if one.stage == "every" else 1) for one in operations], float)
        kinds = [
            self._classes.setdefault((kernel_class(one, device), row.server.name), len(self._classes))
            for one in operations
        ]
        reads = repeats * [row.server.cache_reads(one) for one in operations]
        time_s, bound_s = (np.array([float(getattr(one, name)) for one in prices]) for name in ("time_s", "roofline_s"))
        weights_s = np.array([row.server.weights_s(one, device) for one in operations])
        instructions_s = repeats * [instruction_s(one, device) for one in operations]
        return time_s * reads, bound_s * reads, repeats, np.array(kinds), weights_s, instructions_s

    def log_ratios(self, parameters: Mapping[str, float]) -> Array:
        """Return ln(predicted / measured) of each row."""
        seconds = self._pass_s(parameters)
        predicted = [
            quantity_of(row.load.combine(list(seconds[first:last])), quantity, row.instance.request.output_len)
            for (row, quantity), (first, last) in zip(self.rows, self._spans, strict=True)
        ]
        ratios: Array = np.log(np.array(predicted) / self.measured)
        return ratios

    def _pass_s(self, parameters: Mapping[str, float]) -> Array:
        def of_class(name: str, default: float) -> Array:
            found = [_of_widest(parameters, name, kind, server, default) for kind, server in self._classes]
            values: Array = np.array(found)[self._kinds]
            return values

        def of_server(name: str, default: float) -> Array:
            common = parameters.get(name, default)
            values = {server: parameters.get(f"{name}@{server}", common) for server in set(self._servers)}
            return np.array([values[server] for server in self._servers])

        fraction = of_class("fraction", np.inf)
        own_s = of_class("start_s", 0.0) * self._repeats + self._bound_s / fraction
        time_s = np.where(np.isinf(fraction), self._time_s, np.minimum(self._time_s, own_s)) * of_class("factor", 1.0)
        weights_s = self._weights_s / of_server("prompt_experts_fraction", np.inf)[self._passes]
        bound_s = np.maximum(self._bound_s, weights_s * self._repeats)
        bound_s = np.maximum(bound_s, of_class("instructions_per_element", 0.0) * self._instruction_s)
        sums: Any = np.bincount(self._passes, np.maximum(time_s, bound_s), minlength=len(self._servers))
        device_s = sums * of_server("time_factor", 1.0)
        launches_s = np.where(self._is_graph, 0.0, of_server("launch_s", 0.0) * self._kernels)
        added_s = of_server("host_s", 0.0) + of_server("host_per_sequence_s", 0.0) * self._sequences
        added_s += of_server("prefill_host_s", 0.0) * self._has_prompts
        added_s += of_server("host_per_rank_s", 0.0) * self._ranks
        total: Array = np.maximum(device_s, launches_s) + added_s
        return total


def _of_widest(parameters: Mapping[str, float], name: str, kind: str, server: str, default: float) -> float:
    """Return a parameter of a class of kernels, or else of the class that it is part of, as Server.kernel_fit does."""
    while kind:
        for key in (f"{name}.{kind}@{server}", f"{name}.{kind}"):
            if key in parameters:
                return parameters[key]
        kind = kind.rpartition(".")[0]
    return default


def fit(
    prices: Prices, engine: Engine, kept: Array | None = None, start: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Fit the parameters of an engine.

    Args:
        engine: Priors and given parameters.
        kept: Rows to fit on; None for all. [rows]
        start: Parameters to start from; None for the priors.
    """
    from scipy.optimize import least_squares

    names = list(engine.priors)
    priors = np.log([engine.priors[name] for name in names])
    mask: Any = np.ones(len(prices.rows), dtype=bool) if kept is None else kept

    def residuals(logs: Array) -> Array:
        parameters = {**engine.given, **dict(zip(names, np.exp(logs), strict=True))}
        errors = (prices.weights * prices.log_ratios(parameters))[mask & prices.is_fitted]
        return np.concatenate([errors, PRIOR * (logs - priors)])

    first = priors if start is None else np.log([start[name] for name in names])
    most = MOST_STEPS if start is None else MOST_STEPS_HELD_OUT
    found = least_squares(residuals, first, loss="soft_l1", f_scale=OUTLIER, diff_step=STEP, max_nfev=most)
    fitted = {name: float(np.exp(log)) for name, log in zip(names, found.x, strict=True)}
    # No kernel is faster than its bound.
    bounded = {name: min(value, 1.0) if name.startswith("fraction.") else value for name, value in fitted.items()}
    return {**engine.given, **bounded}


def held_out_ratios(prices: Prices, engine: Engine, fitted: Mapping[str, float]) -> Array:
    """Return ln(predicted / measured) of each row, fitted without its (model, device) pair."""
    ratios = np.zeros(len(prices.rows))
    for pair in sorted(set(prices.pairs)):
        is_out = np.array([each == pair for each in prices.pairs])
        parameters = fit(prices, engine, ~is_out, fitted)
        ratios[is_out] = prices.log_ratios(parameters)[is_out]
    return ratios


def read_rows(data: Path) -> list[ServedRow]:
    """Return all rows of both tables that can be completed."""
    readers = ((TABLES[0], FORMAT, read_served), (TABLES[1], STATIC_FORMAT, read_static))
    # Layouts of MLPerf are chosen by prediction, so its rows are not fitted.
    return [
        row
        for name, layout, read in readers
        for row in read(read_columns(data / name, layout, Counter()), Context())
        if not row.metric.startswith("mlperf")
    ]


def refit(data: Path) -> None:
    """Fit every engine and write its record."""
    rows = read_rows(data)
    for engine in ENGINES:
        prices = Prices([row for row in rows if row.server.name in engine.servers], engine.quantities)
        fitted = fit(prices, engine)
        ratios = held_out_ratios(prices, engine, fitted)
        write_record("servers", engine.name, make_record(engine, prices, fitted, ratios))
        mean = np.mean(np.abs(np.exp(ratios[prices.is_fitted]) - 1.0))
        print(engine.name, f"{mean:.3f} mean error of held-out pairs", flush=True)


def make_record(engine: Engine, prices: Prices, fitted: Mapping[str, float], ratios: Array) -> dict[str, Any]:
    """Return the record of an engine: parameters by server, intervals, and errors of held-out pairs."""
    is_moe = np.array([row.instance.scenario.config.is_moe for row, _ in prices.rows])
    in_sample = prices.log_ratios(fitted)
    errors = {}
    judged = np.array([quantity == "output_tokens_per_s" for _, quantity in prices.rows])
    for name, own in (("dense", ~is_moe), ("moe", is_moe)):
        # Of throughput; of all quantities where none is measured.
        mask = own & (judged if judged.any() else prices.is_fitted)
        if mask.any():
            errors[name] = {
                "rows": int(mask.sum()),
                "pairs": len({pair for pair, each in zip(prices.pairs, mask, strict=True) if each}),
                "held_out_mean_error": float(np.mean(np.abs(np.exp(ratios[mask]) - 1.0))),
                "held_out_median_error": float(np.median(np.abs(np.exp(ratios[mask]) - 1.0))),
                "fitted_mean_error": float(np.mean(np.abs(np.exp(in_sample[mask]) - 1.0))),
            }
    servers = {*engine.servers, *(name.partition("@")[2] for name in fitted if "@" in name)}
    return {
        "servers": {
            server: {**dict(_parameters_of(server, fitted)), "interval": _intervals_of(server, prices, ratios)}
            for server in sorted(servers)
        },
        "provenance": {
            "source": "published serving throughput, named per row",
            "files": list(TABLES),
            "command": command("servers"),
            "split": "each (model, device) pair left out in turn",
            "why": engine.why,
            "priors": dict(engine.priors),
            "given": dict(engine.given),
            "errors": errors,
        },
    }


def _intervals_of(server: str, prices: Prices, ratios: Array) -> dict[str, list[float]]:
    """Return the 5 and 95 % quantile of measured / predicted of held-out pairs, by kind of model and quantity.

    The kind alone is that of throughput. A server with few pairs of its own has those of all servers of its engine.
    Where these are few too, they tell how large the error of a new pair may be, but not its sign.
    """
    groups: dict[str, list[tuple[str, tuple[str, str], float]]] = {}
    for (row, quantity), pair, ratio in zip(prices.rows, prices.pairs, ratios, strict=True):
        kind = "moe" if row.instance.scenario.config.is_moe else "dense"
        name = kind if quantity == "output_tokens_per_s" else f"{kind}.{quantity}"
        groups.setdefault(name, []).append((row.server.name, pair, float(ratio)))
    found = {}
    for name, rows in sorted(groups.items()):
        own = [each for each in rows if each[0] == server]
        chosen = own if len({pair for _, pair, _ in own}) >= LEAST_PAIRS else rows
        errors = np.array([ratio for _, _, ratio in chosen])
        if len({pair for _, pair, _ in chosen}) < LEAST_PAIRS:
            errors = np.concatenate([errors, -errors])
        low, high = np.exp(-np.quantile(errors, QUANTILES[::-1]))
        found[name] = [min(float(low), LEAST_WIDE[0]), max(float(high), LEAST_WIDE[1])]
    return found


def _parameters_of(server: str, fitted: Mapping[str, float]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a server: host times, time factor and kernels."""
    kernels: dict[str, dict[str, float]] = {}
    for name, value in fitted.items():
        words, _, of = name.partition("@")
        if of and of != server:
            continue
        key, _, kind = words.partition(".")
        if kind:
            kernels.setdefault(kind, {})[key] = value
        else:
            yield key, value
    # A class has what is fitted to the class that it is part of.
    yield "kernels", {kind: {**kernels.get(kind.rpartition(".")[0], {}), **own} for kind, own in kernels.items()}
