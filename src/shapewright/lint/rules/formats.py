"""Rules on element formats and kernels that a device does not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.lint.rule import Fix, Violation, rule

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

_WIDE_BITS = 16
_FALLBACK_DTYPES = ("bf16", "fp16", "tf32", "fp32")  # best first


@rule("TC107", "dtype-unsupported", reads=("workload.dtype", "device.dense_flops_per_s"))
def dtype_unsupported(scenario: Scenario) -> Iterator[Violation]:
    """The matrix units of the device do not support the dtype.

    ## What it does

    Fires when the data sheet of the device gives no dense rate for `dtype`: bf16, tf32 and fp8 on V100 and T4, fp8 on
    A100.

    ## Why it is slow

    Other formats run on the vector units, by emulation, or not at all. A V100 reached 88.5 TFLOP/s in fp16 (8192 x 8192
    x 4096, logs of arXiv 2401.14489); the peak of its vector units is 15.7 TFLOP/s in fp32, and they emulate bf16.

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC107", device="v100-sxm2-16gb", dtype="bf16")
    True

    ## Use instead

    >>> fires("TC107", device="v100-sxm2-16gb", dtype="fp16")
    False

    ## Fix safety

    `runtime`. fp16 has a narrow range, so training needs loss scaling; fp8 needs scaling factors.

    ## When it does not matter

    Never: without a rate there is no prediction.

    ## References

    - The device file: `shapewright devices show NAME`.
    """
    rates, dtype = scenario.device.dense_flops_per_s, scenario.workload.dtype
    if dtype in rates:
        return
    known = ", ".join(sorted(rates)) or "none"
    yield Violation(
        field="workload.dtype",
        actual=dtype,
        wanted=f"one of {known}",
        problem=f"has no matrix units on {scenario.device.name} (it has {known})",
        fixes=tuple(
            Fix(kind="runtime", title=f"use {name}", changes={"dtype": name})
            for name in _FALLBACK_DTYPES
            if name in rates
        )[:1],
        least_severity="error",
    )


@rule("TC108", "fp32-outside-matrix-units", reads=("workload.dtype", "device.dense_flops_per_s"))
def fp32_outside_matrix_units(scenario: Scenario) -> Iterator[Violation]:
    """fp32 GEMMs do not use the matrix units.

    ## What it does

    Fires when `dtype` is fp32 on a device with faster matrix units for tf32, bf16 or fp16.

    ## Why it is slow

    Tensor cores do not support fp32, which runs on the vector units. The peak rates of an A100 are 19.5 TFLOP/s in
    fp32, 156 in tf32 and 312 in bf16 (data sheet); 251.5 TFLOP/s were measured in fp16 for 8192 x 8192 x 4096 (logs of
    arXiv 2401.14489).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC108", dtype="fp32")
    True

    ## Use instead

    `torch.set_float32_matmul_precision("high")` for tf32, or autocast to bf16.

    >>> fires("TC108", dtype="bf16")
    False

    ## Fix safety

    `runtime`. tf32 has the range of fp32 and 10 mantissa bits; bf16 needs fp32 master weights, as in mixed-precision
    training.

    ## When it does not matter

    Where full fp32 precision is needed, such as in tests of another implementation.

    ## References

    - NVIDIA A100 data sheet; PyTorch, "TensorFloat-32 (TF32) on Ampere devices".
    """
    rates = scenario.device.dense_flops_per_s
    if scenario.workload.dtype != "fp32":
        return
    faster = [name for name in ("tf32", "bf16", "fp16") if rates.get(name, 0.0) > rates.get("fp32", 0.0)]
    if not faster:
        return
    yield Violation(
        field="workload.dtype",
        actual="fp32",
        wanted="a format that the matrix units support",
        problem=f"does not run on the matrix units of {scenario.device.name}",
        fixes=tuple(Fix(kind="runtime", title=f"use {name}", changes={"dtype": name}) for name in faster),
    )


@rule("TC109", "fused-attention-unsupported", reads=("workload.attention", "device.architecture"))
def fused_attention_unsupported(scenario: Scenario) -> Iterator[Violation]:
    """There are no fused attention kernels for the device.

    ## What it does

    Fires when the step can run with `attention="unfused"` only, as on V100 and T4.

    ## Why it is slow

    The step cannot run: FlashAttention-2 requires Ampere or newer. Unfused attention writes all scores to memory and
    reads them back, so long sequences cost much more: on an A100, softmax and dropout took 18 % of the time of a layer
    with h = 3072 and 2048 tokens (latency shares of arXiv 2401.14489, logs in jahatef/TransformerSizing).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC109", device="v100-sxm2-32gb", attention="flash")
    True

    ## Use instead

    >>> fires("TC109", device="v100-sxm2-32gb", attention="unfused")
    False

    ## Fix safety

    `runtime`: the same function. Unfused attention stores the scores for the backward pass; see
    `recompute="selective"`.

    ## When it does not matter

    Never: the step cannot run.

    ## References

    - Dao-AILab/flash-attention, README, "NVIDIA CUDA Support".
    """
    if scenario.workload.attention != "flash" or scenario.is_possible:
        return
    changes = {"attention": "unfused"}
    unfused = scenario.try_replace(changes)
    if unfused is None or not unfused.is_possible:
        return
    yield Violation(
        field="workload.attention",
        actual="flash",
        wanted="unfused",
        problem=f"has no kernels for {scenario.device.name} ({scenario.device.architecture})",
        fixes=(Fix(kind="runtime", title="use attention=unfused", changes=changes),),
        least_severity="error",
    )


@rule("TC111", "narrow-format-slower", reads=("workload.dtype", "device.dense_flops_per_s"))
def narrow_format_slower(scenario: Scenario) -> Iterator[Violation]:
    """The step takes longer in 8 or 4 bits than in 16.

    ## What it does

    Fires when `dtype` is fp8, int8 or fp4 and the same step is predicted to be faster in bf16 (fp16 where there is no
    bf16).

    ## Why it is slow

    Inputs are cast before each GEMM, and kernels with scales take longer to start than those in 16 bits. GEMMs with a
    small n or k do not win that back: on an H200, 2560 x 1024 x 1024 takes 30 us in fp8 and 10 us in bf16 with vLLM
    0.24, and 15 and 13 us with SGLang 0.5 (tables of ai-dynamo/aiconfigurator). Some devices have no higher rate in the
    narrow format, such as int8 on a B300.

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC111", device="h200-sxm-141gb", dtype="fp8", phase="prefill", hidden_size=1024, num_heads=8)
    True

    ## Use instead

    >>> fires("TC111", device="h200-sxm-141gb", dtype="bf16", phase="prefill", hidden_size=1024, num_heads=8)
    False

    ## Fix safety

    `runtime`. Weights in 16 bits take more memory than in 8; `weight_dtype` stores them in fewer.

    ## When it does not matter

    Where the format is there to hold more weights or sequences, not for speed.

    ## References

    - ai-dynamo/aiconfigurator, tables of GEMMs timed with vLLM 0.24 and SGLang 0.5 on H200.
    """
    rates, dtype = scenario.device.dense_flops_per_s, scenario.workload.dtype
    if get_dtype(dtype).bits >= _WIDE_BITS or dtype not in rates:
        return
    wide = next((name for name in ("bf16", "fp16") if name in rates), None)
    if wide is None:
        return
    narrow = {"narrow_inputs": False} if scenario.workload.narrow_inputs else {}
    yield Violation(
        field="workload.dtype",
        actual=dtype,
        wanted=wide,
        problem=(
            "casts its inputs and starts slower kernels, which GEMMs of this size do not win back"
            if rates[dtype] > rates[wide]
            else f"has no higher matrix rate than {wide} on {scenario.device.name}, and casts its inputs"
        ),
        fixes=(Fix(kind="runtime", title=f"use {wide}", changes={"dtype": wide} | narrow),),
    )
