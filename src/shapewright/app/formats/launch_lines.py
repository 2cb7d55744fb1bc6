"""Read launch lines of vLLM and SGLang.

Sources: the engine arguments of vLLM (vllm/engine/arg_utils.py) and SGLang (srt/server_args.py).
"""

from __future__ import annotations

from typing import Any

from shapewright.app.formats.reading import Reading, Values, given
from shapewright.app.formats.shell import arguments_of, read_script

_AUTO = "auto"  # left to the engine
_VLLM = {
    "tensor_parallel_size": "tensor_parallel", "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel", "dp": "data_parallel",
}  # fmt: skip
_SGLANG = {
    "tp_size": "tensor_parallel", "tensor_parallel_size": "tensor_parallel", "tp": "tensor_parallel",
    "pp_size": "pipeline_parallel", "pp": "pipeline_parallel", "dp_size": "data_parallel", "dp": "data_parallel",
    "ep_size": "expert_parallel", "ep": "expert_parallel",
}  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32", "float32": "fp32"}
# Method of --quantization -> formats of GEMMs and weights; others need the checkpoint to be known.
_QUANTIZED: dict[str, dict[str, str]] = {
    "fp8": {"dtype": "fp8"}, "w8a8_fp8": {"dtype": "fp8"}, "w8a8_int8": {"dtype": "int8"},
    "awq": {"weight_dtype": "int4"}, "awq_marlin": {"weight_dtype": "int4"}, "gptq": {"weight_dtype": "int4"},
    "gptq_marlin": {"weight_dtype": "int4"}, "modelopt_fp4": {"dtype": "fp4"}, "mxfp4": {"weight_dtype": "fp4"},
}  # fmt: skip


def read_vllm(text: str) -> Reading:
    """Read a launch line of vLLM."""
    values, model = _launch(text, "serve")
    layout: dict[str, Any] = values.pick(_VLLM)
    model = str(values.get("model", default=model))
    if values.flag("enable_expert_parallel"):
        layout["expert_parallel"] = layout.get("tensor_parallel", 1) * layout.get("data_parallel", 1)
    workload = _served(values, values.number("max_model_len"), values.number("max_num_seqs"))
    return Reading(format="vllm", model=model, workload=workload, layout=layout, unread=values.unread())


def read_sglang(text: str) -> Reading:
    """Read a launch line of SGLang; its tensor degree is that of the whole instance."""
    values, _ = _launch(text, "sglang.launch_server")
    layout: dict[str, Any] = values.pick(_SGLANG)
    if values.flag("enable_dp_attention") and layout.get("data_parallel"):
        layout["tensor_parallel"] = max(1, layout.get("tensor_parallel", 1) // layout["data_parallel"])
    workload = _served(values, values.number("context_length"), values.number("max_running_requests"))
    model = str(values.get("model_path", "model", default=""))
    return Reading(format="sglang", model=model, workload=workload, layout=layout, unread=values.unread())


def _launch(text: str, program: str) -> tuple[Values, str]:
    """Arguments of the first command with a program, and the word after it."""
    commands = [words for words in read_script(text).commands if program in words or f"vllm.{program}" in words]
    words = commands[0] if commands else []
    place = words.index(program) if program in words else len(words)
    after = words[place + 1 : place + 2]
    values = Values(arguments_of(words[place:]))
    return values, "" if not after or after[0].startswith("-") else after[0]


def _served(values: Values, length: int | None, sequences: int | None) -> dict[str, Any]:
    """Workload of decoding at the limits of the server."""
    workload: dict[str, Any] = {"phase": "decode", "context_len": length, "micro_batch_size": sequences}
    dtype = _DTYPES.get(str(values.get("dtype")))
    workload |= {"dtype": dtype, **_QUANTIZED.get(str(values.get("quantization")), {})}
    cache = str(values.get("kv_cache_dtype", default=_AUTO))
    workload["kv_cache_dtype"] = "fp8" if cache.startswith("fp8") else None
    return given(workload)
