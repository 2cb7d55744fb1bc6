"""Configs of every family, built by transformers and traced, against what their tables lower them to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="tracing needs the trace extra (torch)")
pytest.importorskip("transformers", reason="tracing configs needs the trace extra (transformers)")

from hf_models import TINY_CONFIGS, model_type_of, tiny_config
from traced_gemms import count_gemms, without_layout
from transformers.models.gptj.modeling_gptj import GPTJPreTrainedModel

import shapewright
from shapewright.hardware.loader import load_device
from shapewright.lowering.flops import sum_flops
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.scan import Scan
from shapewright.lowering.torch_trace.huggingface import trace_built_model
from shapewright.models.hf_config import read_hf_config

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.lowering.operations.operation import Operation
    from shapewright.prediction.composition.stages import PricedOperation

pytestmark = pytest.mark.oracle

BATCH_SIZE, SEQ_LEN = 3, 40
H100 = load_device("h100-sxm-80gb")
PASSES = ("forward", "backward")

# transformers runs every expert of Llama 4 on every token, and loops over the experts of DBRX with two matrices where
# tables have one.
_OWN_EXPERTS = {"llama4", "llama4_text", "dbrx"}
# It runs lightning attention in PyTorch, chunk by chunk; tables hold the fused kernel.
_OWN_SCANS = {"minimax"}
# These have attention of their own, without a fused kernel; GPT-J until transformers 5.23.
_OWN_GPTJ = set() if getattr(GPTJPreTrainedModel, "_supports_sdpa", False) else {"gptj"}
_UNFUSED = {"bloom", "mpt", "gpt_neo", *_OWN_GPTJ}
# Its streams are mixed in GEMMs.
_MIXED_STREAMS = {"deepseek_v4"}
# Of these the scores are multiplied in fp32, which tables have in the format of the model.
_FP32_SCORES = {"gpt_neo", *_OWN_GPTJ}


def compute_s(operations: Iterable[PricedOperation]) -> float:
    """Time of the GEMMs, attention, scans and convolutions of forward and backward pass. [s]"""
    kinds = ("gemm", "grouped_gemm", "attention", "scan", "convolution")
    chosen = [one for one in operations if one.operation.kind in kinds and one.operation.pass_name != "step"]
    return sum(one.total_time_s for one in chosen)


def is_compared(operation: Operation, model_type: str) -> bool:
    """Whether transformers runs an operation as tables have it."""
    if model_type in _OWN_EXPERTS and isinstance(operation, Gemm | GroupedGemm):
        return isinstance(operation, Gemm) and ".experts" not in operation.name
    if model_type in _OWN_SCANS and operation.pass_name != "step":
        return not isinstance(operation, Scan) and getattr(operation, "batch", 1) == 1
    return True


@pytest.mark.parametrize("key", sorted(TINY_CONFIGS))
def test_time_of_a_traced_config_is_that_of_its_table(key: str) -> None:
    """Its GEMMs are those lowered from the config, one by one; all that computes takes as long; FLOPs are equal."""
    model_type = model_type_of(key)
    found = trace_built_model(tiny_config(key), source=key, batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
    workload = {
        "micro_batch_size": BATCH_SIZE,
        "seq_len": SEQ_LEN,
        "attention": "unfused" if model_type in _UNFUSED else "flash",
        "kernels": "torch" if model_type in _MIXED_STREAMS else None,
    }
    lowered = shapewright.predict(read_hf_config(tiny_config(key)).config, device=H100, workload=workload)
    kept = [one for one in found.operations if is_compared(one, model_type)]
    if model_type in _FP32_SCORES:
        kept = [one.changed(dtype="bf16") if isinstance(one, Gemm) else one for one in kept]
    traced = shapewright.predict(replace(found, operations=tuple(kept)), device=H100)
    expected = [one for one in lowered.operations if is_compared(one.operation, model_type)]

    for passes in (("forward",), ("forward", "backward")):
        assert without_layout(count_gemms(kept, *passes)) == without_layout(
            count_gemms((one.operation for one in expected), *passes)
        )
    assert compute_s(traced.operations) == pytest.approx(compute_s(expected), rel=0.02)
    assert traced.model_flops == pytest.approx(sum_flops((one.operation for one in expected), PASSES), rel=1e-9)
    if model_type not in _OWN_EXPERTS | _OWN_SCANS:
        assert traced.model_flops == pytest.approx(lowered.model_flops_per_s * lowered.step_time_s, rel=1e-9)
    assert found.num_parameters == lowered.parameters.total
    assert found.unknown_operators == ()


@pytest.mark.parametrize("key", ["gpt2", "llama/biased", "mixtral", "deepseek_v3"])
def test_muon_of_a_trace_is_that_of_its_config(key: str) -> None:
    """The same matrices are orthogonalized; embeddings, logits and vectors are left to AdamW."""
    found = trace_built_model(tiny_config(key), source=key, batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
    workload = {"optimizer": "muon", "micro_batch_size": BATCH_SIZE, "seq_len": SEQ_LEN}
    config = read_hf_config(tiny_config(key)).config
    lowered, traced = (
        count_gemms((one.operation for one in prediction.operations), "step")
        for prediction in (
            shapewright.predict(config, device=H100, workload=workload),
            shapewright.predict(found, device=H100, workload={"optimizer": "muon"}),
        )
    )

    assert traced == lowered != Counter()
