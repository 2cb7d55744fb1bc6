"""Read launch lines of vLLM and SGLang.

Sources: the engine arguments of vLLM (vllm/engine/arg_utils.py) and SGLang (srt/server_args.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shapewright.app.formats.reading import Reading, Values, given
from shapewright.app.formats.shell import arguments_of, read_script
from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.records import dataclass

# Heading of an instance in a script of serve-plan.
_ROLES = re.compile(r"^# (?:\d+ )?(?:(prefill|decode) )?instances?\b", re.MULTILINE)
_AUTO = "auto"  # left to the engine
# The word before the arguments: the program, or a container that starts it.
_VLLM_PROGRAM = re.compile(r"serve|vllm\.entrypoints\.openai\.api_server|(?:\S+/)?vllm-openai(?:[:@]\S+)?")
_SGLANG_PROGRAM = re.compile(r"sglang\.launch_server")
_VLLM = {
    "tensor_parallel_size": "tensor_parallel", "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel", "dp": "data_parallel",
}  # fmt: skip
_SGLANG = {
    "tp_size": "tensor_parallel", "tensor_parallel_size": "tensor_parallel", "tp": "tensor_parallel",
    "pp_size": "pipeline_parallel", "pipeline_parallel_size": "pipeline_parallel", "pp": "pipeline_parallel",
    "dp_size": "data_parallel", "data_parallel_size": "data_parallel", "dp": "data_parallel",
    "ep_size": "expert_parallel", "expert_parallel_size": "expert_parallel", "ep": "expert_parallel",
}  # fmt: skip
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32", "float32": "fp32"}
# Method of --quantization -> formats of GEMMs and weights; others need the checkpoint to be known.
_QUANTIZED: dict[str, dict[str, str]] = {
    "fp8": {"dtype": "fp8"}, "w8a8_fp8": {"dtype": "fp8"}, "w8a8_int8": {"dtype": "int8"},
    "awq": {"weight_dtype": "int4"}, "awq_marlin": {"weight_dtype": "int4"}, "gptq": {"weight_dtype": "int4"},
    "gptq_marlin": {"weight_dtype": "int4"}, "modelopt_fp4": {"dtype": "fp4"}, "mxfp4": {"weight_dtype": "fp4"},
}  # fmt: skip


def read_vllm(text: str, part: str = "") -> Reading:
    """Read a launch line of vLLM.

    Args:
        part: Which of several instances: prefill, decode or its number; by default the one that decodes.
    """
    instance = _instance(text, _VLLM_PROGRAM, part)
    values = instance.values
    layout: dict[str, Any] = values.pick(_VLLM)
    model = str(values.get("model", default=instance.word))
    if values.flag("enable_expert_parallel"):
        layout["expert_parallel"] = layout.get("tensor_parallel", 1) * layout.get("data_parallel", 1)
    sequences = _per_pass(values.number("max_num_seqs"), layout.get("pipeline_parallel", 1))
    workload = _served(values, instance.role, values.number("max_model_len"), sequences)
    unread = (*instance.others, *values.unread(), *_unknown_formats(values))
    return Reading(format="vllm", model=model, workload=workload, layout=layout, unread=unread)


def read_sglang(text: str, part: str = "") -> Reading:
    """Read a launch line of SGLang; its tensor degree and its sequences are those of the whole instance.

    Args:
        part: As in ``read_vllm``.
    """
    instance = _instance(text, _SGLANG_PROGRAM, part)
    values = instance.values
    layout: dict[str, Any] = values.pick(_SGLANG)
    groups = layout.get("pipeline_parallel", 1)
    if values.flag("enable_dp_attention") and layout.get("data_parallel"):
        layout["tensor_parallel"] = max(1, layout.get("tensor_parallel", 1) // layout["data_parallel"])
        groups *= layout["data_parallel"]
    sequences = _per_pass(values.number("max_running_requests"), groups)
    workload = _served(values, instance.role, values.number("context_length"), sequences)
    model = str(values.get("model_path", "model", default=""))
    unread = (*instance.others, *values.unread(), *_unknown_formats(values))
    return Reading(format="sglang", model=model, workload=workload, layout=layout, unread=unread)


@dataclass(frozen=True)
class _Instance:
    """One command of a launch script.

    Attributes:
        values: Its arguments.
        word: The word after the program.
        role: prefill, decode or empty.
        others: What to say of the other instances.
    """

    values: Values
    word: str
    role: str
    others: tuple[str, ...] = ()


def _instance(text: str, programs: re.Pattern[str], part: str) -> _Instance:
    """Command of a launch script that starts one of some programs.

    Raises:
        ConfigError: the script has no such instance.
    """
    found = []
    for words in read_script(text).commands:
        program = next(filter(programs.fullmatch, words), "")
        if program:
            rest = words[words.index(program) + 1 :]
            word = rest[0] if rest and not rest[0].startswith("-") else ""
            found.append((arguments_of([program, *rest]), word))
    commented = _ROLES.findall(text)
    if len(commented) != len(found):
        commented = [""] * len(found)
    roles = [_role(arguments) or role for (arguments, _), role in zip(found, commented, strict=True)]
    names = [role if role and roles.count(role) == 1 else str(place + 1) for place, role in enumerate(roles)]
    if part and part not in names:
        raise ConfigError(f"no instance {short_repr(part)}; the file has {', '.join(names) or 'none'}")
    if not found:
        return _Instance(Values({}), "", "")
    chosen = names.index(part or next((name for name in names if name == "decode"), names[0]))
    others = tuple(
        f"instance {name} (FILE::{name}; this is instance {names[chosen]})" for name in names if name != names[chosen]
    )
    arguments, word = found[chosen]
    return _Instance(Values(arguments), word, roles[chosen], others)


def _role(arguments: Mapping[str, Any]) -> str:
    """Whether an instance prefills or decodes alone, as its flags say; empty if they do not."""
    mode = str(arguments.get("disaggregation_mode", ""))
    transfer = str(arguments.get("kv_transfer_config", ""))
    return {"prefill": "prefill", "decode": "decode"}.get(mode) or next(
        (role for word, role in {"kv_producer": "prefill", "kv_consumer": "decode"}.items() if word in transfer), ""
    )


def _per_pass(sequences: int | None, groups: int) -> int | None:
    """Sequences of one pass, of those that run at once in groups: pipeline stages and replicas of the attention."""
    return sequences if sequences is None else max(1, sequences // groups)


def _served(values: Values, role: str, length: int | None, sequences: int | None) -> dict[str, Any]:
    """Workload at the limits of the server: of prompts where it only prefills, of decoding otherwise."""
    workload: dict[str, Any] = {"phase": "decode", "context_len": length, "micro_batch_size": sequences}
    if role == "prefill":
        workload = {"phase": "prefill", "seq_len": length, "micro_batch_size": sequences}
    dtype = _DTYPES.get(str(values.get("dtype")))
    workload |= {"dtype": dtype, **_QUANTIZED.get(str(values.get("quantization")), {})}
    cache = str(values.get("kv_cache_dtype", default=_AUTO))
    workload["kv_cache_dtype"] = "fp8" if cache.startswith("fp8") else None
    return given(workload)


def _unknown_formats(values: Values) -> Iterator[str]:
    """Flags of formats that are not priced, as only the checkpoint says their bits, or as they are unknown."""
    method, cache = str(values.get("quantization", default="")), str(values.get("kv_cache_dtype", default=_AUTO))
    if method and method not in _QUANTIZED:
        yield f"quantization={method}"
    if not cache.startswith("fp8") and cache not in (_AUTO, *_DTYPES):
        yield f"kv_cache_dtype={cache}"
