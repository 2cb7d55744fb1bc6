"""Suites of decoder layers, of whole steps, and of the distinct operations of one model's step.

Legend: h hidden size, a heads, f intermediate size, b sequences, s tokens per sequence, v vocabulary size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import BenchError
from shapewright.core.records import dataclass
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.bench.operations.attention import require_sdpa_support
from shapewright.measure.bench.operations.layers import COMPILED
from shapewright.measure.bench.operations.pointwise import LOSS, require_proxy_kernel
from shapewright.measure.store.record import Case
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig, with_changes
from shapewright.prediction.model_runs import LAYER_PASSES, layer_run, step_run
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.lowering.operations.operation import Operation
    from shapewright.workload.layout import ParallelLayout

_GPT3 = ("125m", "350m", "760m", "1.3b", "2.7b", "6.7b", "13b", "175b")
_PYTHIA = ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")
_LLAMA = (
    "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3.2-1b", "llama-3.2-3b", "tinyllama-1.1b",
    "mistral-7b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-72b",
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "llama-30b", "llama-65b",
)  # fmt: skip
# Head counts that divide each hidden size. Source of those at 2560: arXiv 2401.14489, figure 1.
_HEADS = {2048: (8, 16, 32, 64), 2560: (20, 32, 40, 64, 80), 4096: (16, 32, 64, 128)}
_HEADS_OF_GPT3_2_7B = (20, 32, 40, 64, 80)
# Intermediate sizes around 8/3 of 4096 (10922.67): odd, even, multiples of 8, 16, 32, 64 and 128.
_SWIGLU_WIDTHS = (10880, 10912, 10920, 10922, 10923, 10924, 10928, 10944, 11008, 11264)
_TOKENS: dict[str, Any] = {"micro_batch_size": 4, "seq_len": 2048}
_COMPILED = ("gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "pythia-1b", "llama-2-7b", "llama-3-8b", "llama-3.2-1b")

# For CPUs: the same kinds of model at a thousandth of the size.
_SMALL_TOKENS: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 32}
_SMALL_GPT = TransformerConfig(
    hidden_size=96, num_layers=2, num_heads=6, vocab_size=331, fused_qkv=True, position_embedding="learned",
    qkv_bias=True, attention_out_bias=True, mlp_bias=True, norm_bias=True, tied_embeddings=True, name="small-gpt",
)  # fmt: skip
_SMALL_LLAMA = TransformerConfig(
    hidden_size=96, num_layers=2, num_heads=6, num_kv_heads=2, vocab_size=331, intermediate_size=256, gated_mlp=True,
    activation="silu", norm="rmsnorm", name="small-llama",
)  # fmt: skip


def layer_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Layers of models, head counts and intermediate sizes; forward, and forward with backward."""
    tokens = _SMALL_TOKENS if small else _TOKENS
    fused, unfused = (Workload(dtype=dtype, attention=kind, **tokens) for kind in ("flash", "unfused"))
    families = _families(small=small)
    return [
        [_layer(config, workload, passes) for config in configs]
        for name, configs in families.items()
        for workload in ((fused, unfused) if name in ("gpt3", "heads") else (fused,))
        for passes in LAYER_PASSES
    ]


def compiled_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Layers under torch.compile; compiling one takes longer than measuring it."""
    if small:
        return [[_layer(_SMALL_GPT, Workload(dtype=dtype, **_SMALL_TOKENS), LAYER_PASSES[1], COMPILED)]]
    workload = Workload(dtype=dtype, **_TOKENS)
    return [[_layer(_preset(name), workload, LAYER_PASSES[1], COMPILED) for name in _COMPILED]]


def model_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Training steps with their optimizer: GPT-3 2.7B with five head counts, GPT-2 vocabularies, and other models."""
    if small:
        gpts = [_SMALL_GPT, *(with_changes(_SMALL_GPT, {"num_heads": a}) for a in (2, 12))]
        workloads = [Workload(dtype=dtype, attention=kind, **_SMALL_TOKENS) for kind in ("flash", "unfused")]
        return [[_step(config, workload) for config in [*gpts, _SMALL_LLAMA]] for workload in workloads]
    gpt = with_changes(_preset("gpt3-2.7b"), {"vocab_size": 50304})
    heads = [with_changes(gpt, {"num_heads": a}) for a in _HEADS_OF_GPT3_2_7B]
    # The score matrices of unfused attention leave memory for one sequence only.
    fused = Workload(dtype=dtype, **_TOKENS)
    unfused = Workload(dtype=dtype, attention="unfused", micro_batch_size=1, seq_len=2048)
    short = Workload(dtype=dtype, micro_batch_size=8, seq_len=1024)
    gpt2s = [
        with_changes(_preset(name), {"vocab_size": v})
        for name in ("gpt2", "gpt2-medium", "gpt2-xl")
        for v in (50257, 50304)
    ]
    others = ["pythia-410m", "pythia-1b", "pythia-1.4b", "tinyllama-1.1b", "llama-3.2-1b", "qwen2.5-0.5b", "gpt3-1.3b"]
    return [
        [_step(config, fused) for config in heads],
        [_step(config, unfused) for config in heads],
        [_step(_preset("gpt3-2.7b"), fused)],
        [_step(config, short) for config in gpt2s],
        [_step(_preset(name), fused) for name in others],
    ]


def decode_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Prefills, and decode steps with KV caches of several lengths, by batch size."""
    configs = (
        [_SMALL_GPT, _SMALL_LLAMA]
        if small
        else [_preset(name) for name in ("llama-3.2-1b", "llama-3-8b", "llama-2-7b", "gpt3-2.7b", "qwen2.5-7b")]
    )
    prompts, contexts, batches = ((16, 32), (15, 63), (1, 4)) if small else ((512, 2048), (511, 2047), (1, 8, 32))
    sweeps = []
    for config in configs:
        sweeps.append(
            [
                _step(config, Workload(phase="prefill", dtype=dtype, micro_batch_size=b, seq_len=s))
                for s in prompts for b in batches[:2]
            ]
        )  # fmt: skip
        sweeps.append(
            [
                _step(config, Workload(phase="decode", dtype=dtype, micro_batch_size=b, context_len=c))
                for c in contexts for b in batches
            ]
        )  # fmt: skip
    return sweeps


def memory_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Activation bytes of a layer by batch size and length, with and without dropout; peak memory of steps by batch."""
    configs = [_SMALL_GPT, _SMALL_LLAMA] if small else [_preset(name) for name in ("gpt3-1.3b", "llama-3.2-1b")]
    configs.append(with_changes(configs[0], {"hidden_dropout": 0.1, "attention_dropout": 0.1}))
    lengths = (16, 32) if small else (1024, 2048, 4096)
    sweeps = []
    for config in configs:
        for attention in ("flash", "unfused"):
            workloads = [
                Workload(dtype=dtype, attention=attention, micro_batch_size=b, seq_len=s)
                for s in lengths for b in (1, 2)
            ]  # fmt: skip
            sweeps.append([_layer(config, workload, LAYER_PASSES[1]) for workload in workloads])
        sweeps.append(
            [
                _step(config, Workload(dtype=dtype, micro_batch_size=b, seq_len=lengths[1]))
                for b in (1, 2, 4)
            ]
        )  # fmt: skip
    return sweeps


def _families(*, small: bool) -> dict[str, Sequence[TransformerConfig]]:
    """Models whose layers are measured, by family."""
    if small:
        return {
            "gpt3": [_SMALL_GPT],
            "llama": [_SMALL_LLAMA],
            "heads": [with_changes(_SMALL_GPT, {"num_heads": a}) for a in (1, 2, 3, 12)],
            "swiglu": [with_changes(_SMALL_LLAMA, {"intermediate_size": f}) for f in (248, 255, 257)],
        }
    return {
        "gpt3": [_preset(f"gpt3-{size}") for size in _GPT3],
        "pythia": [_preset(f"pythia-{size}") for size in _PYTHIA],
        "llama": [_preset(name) for name in _LLAMA],
        "heads": [
            with_changes(_preset("gpt3-2.7b"), {"hidden_size": h, "num_heads": a, "intermediate_size": 4 * h})
            for h, counts in _HEADS.items() for a in counts
        ],
        "swiglu": [with_changes(_preset("llama-2-7b"), {"intermediate_size": f}) for f in _SWIGLU_WIDTHS],
    }  # fmt: skip


@cache
def _preset(name: str) -> TransformerConfig:
    return read_model(name, None).config


def _layer(config: TransformerConfig, workload: Workload, passes: str, variant: str = "") -> Case:
    return Case(operation=layer_run(config, workload, passes=passes), variant=variant)


def _step(config: TransformerConfig, workload: Workload) -> Case:
    return Case(operation=step_run(config, workload))


@dataclass(frozen=True)
class ModelCases:
    """The measurable operations of one step of a model.

    Attributes:
        cases: Distinct operations, in the order of the step.
        names: Executions per step of each operation that a case stands for, by the case's key without device and
            library, and by name: equal ones are measured once.
        skipped: Reason why an operation cannot be measured, by its name.
    """

    cases: tuple[Case, ...]
    names: dict[str, Counter[str]]
    skipped: dict[str, str]

    def repeats_of(self, case: Case) -> int:
        """Executions of a case per step."""
        return self.names[case.key("", "")].total()


def list_model_cases(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> ModelCases:
    """List the operations of one step on one device as cases; collectives are skipped."""
    cases: dict[str, Case] = {}
    names: dict[str, Counter[str]] = {}
    skipped: dict[str, str] = {}
    for operation in lower(config, workload, layout):
        case = Case(operation=operation, row_width=_row_width(operation, config, workload))
        reason = _reason_to_skip(operation)
        if reason:
            skipped[operation.name] = reason
            continue
        key = case.key("", "")
        cases.setdefault(key, case)
        names.setdefault(key, Counter())[operation.name] += int(operation.repeats)
    return ModelCases(tuple(cases.values()), names, skipped)


def largest_first(cases: Iterable[Case]) -> list[Case]:
    """Cases in descending order of FLOPs, then bytes, so that a small budget covers the most expensive ones."""
    return sorted(cases, key=lambda case: (-float(case.operation.flops), -float(case.operation.num_bytes)))


def _row_width(operation: Operation, config: TransformerConfig, workload: Workload) -> int:
    """Elements per row of a pointwise operation; 0 for other kinds."""
    if not isinstance(operation, Pointwise):
        return 0
    if operation.operation == "softmax":
        return workload.kv_len
    if operation.operation == LOSS:
        return config.vocab_size
    return config.intermediate_size if operation.operation == "activation" else config.hidden_size


def _reason_to_skip(operation: Operation) -> str:
    """Why an operation cannot be measured on one device; empty if it can."""
    if isinstance(operation, Collective):
        return "collectives need several devices"
    try:
        if isinstance(operation, Attention):
            require_sdpa_support(operation)
        elif isinstance(operation, Pointwise):
            require_proxy_kernel(operation)
    except BenchError as error:
        return str(error)
    return ""
