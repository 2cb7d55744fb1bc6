"""Formats by name: write a model, workload and layout as a trainer reads them, and read what a file describes.

Files are data: Python is parsed, never run, and checkpoints are not opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shapewright.app.formats import accelerate, deepspeed, litgpt, megatron, nanogpt, neox, torchtitan
from shapewright.app.formats.accelerate import read_accelerate
from shapewright.app.formats.deepspeed import read_deepspeed
from shapewright.app.formats.launch_lines import read_sglang, read_vllm
from shapewright.app.formats.litgpt import read_litgpt
from shapewright.app.formats.megatron_reader import read_arguments
from shapewright.app.formats.nanogpt import read_nanogpt
from shapewright.app.formats.neox import read_neox
from shapewright.app.formats.output_format import check_model, check_offload, check_recompute, check_unwritten
from shapewright.app.formats.reading import Reading
from shapewright.app.formats.torchtitan import read_flavor, read_torchtitan
from shapewright.core.errors import (
    ConfigError,
    ShapewrightError,
    WorkloadError,
    close_names,
    first_line,
    short_path,
    short_repr,
)
from shapewright.models.config_file import read_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.app.formats.output_format import OutputFormat, Untimed
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload


FORMATS: dict[str, OutputFormat] = {
    target.name: target for target in (megatron.FORM, neox.FORM, torchtitan.FORM, nanogpt.FORM, litgpt.FORM)
}
"""Formats that describe the model, by name."""

RUN_FORMATS: dict[str, OutputFormat] = {target.name: target for target in (deepspeed.FORM, accelerate.FORM)}
"""Formats that describe only workload and layout; the training script defines the model."""


def write_format(
    name: str,
    config: TransformerConfig,
    *,
    workload: Workload | None = None,
    layout: ParallelLayout | None = None,
    untimed: Untimed | None = None,
) -> str:
    """Write a model and optionally its workload and layout in the format of a framework.

    Args:
        name: A key of FORMATS or RUN_FORMATS; the latter write only workload and layout.
        workload: Batch, sequence length, dtype and recomputation of a training step.
        untimed: Values that the model, workload and layout do not have: those of ``models.untimed_values``, the fields
            of a ``RunSchedule`` where the length of the run is known, and the ``node_size`` of the device.

    Returns:
        Text of the file, with a trailing newline.

    Raises:
        ConfigError: unknown format, or one that cannot express the model.
        WorkloadError: the format cannot express the workload.
        LayoutError: the format cannot express the layout.
    """
    target = find_format(name)
    if workload is not None:
        check_offload(target, workload)
        check_recompute(target, workload)
        check_unwritten(target, workload)
    if name not in RUN_FORMATS:
        check_model(target, config)
        if workload is not None and not workload.trains_all:
            raise WorkloadError(
                f"format {name} describes full training, not finetune={workload.finetune!r}; use one of "
                f"{', '.join(RUN_FORMATS)}, with which the training script defines what is trained, or finetune='full'",
                field="finetune",
            )
    return target.write(config, workload, layout, untimed or {})


def find_format(name: str) -> OutputFormat:
    """Look up a format of FORMATS or RUN_FORMATS.

    Raises:
        ConfigError: unknown format.
    """
    return RUN_FORMATS[name] if name in RUN_FORMATS else check_format(name, also=RUN_FORMATS)


def check_format(name: str, *, also: Iterable[str] = ("hf",)) -> OutputFormat:
    """Look up a format of FORMATS.

    Args:
        also: Further formats that the caller supports, for the error message.

    Raises:
        ConfigError: unknown format.
    """
    target = FORMATS.get(name)
    if target is None:
        known = (*also, *FORMATS)
        hint = close_names(name, known)
        raise ConfigError(f"unknown format {name!r}; {hint + ' ' if hint else ''}choose one of {', '.join(known)}")
    return target


READERS: dict[str, Callable[[str], Reading]] = {
    "megatron-args": read_arguments,
    "neox-yaml": read_neox,
    "torchtitan-toml": read_torchtitan,
    "nanogpt": read_nanogpt,
    "litgpt-yaml": read_litgpt,
    "deepspeed-json": read_deepspeed,
    "accelerate-yaml": read_accelerate,
    "vllm": read_vllm,
    "sglang": read_sglang,
}
"""Function that reads each format, by name; most are formats that can be written too."""

# What a file of each format has, in the order in which they are tried.
_SIGNS: tuple[tuple[str, str], ...] = (
    ("vllm", r"\bvllm serve\b|vllm\.entrypoints|\bvllm-openai\b"),
    ("sglang", r"sglang\.launch_server"),
    ("nanogpt", r"^(n_embd|n_layer|block_size|gradient_accumulation_steps|init_from) *="),
    ("torchtitan-toml", r"^\[(model|parallelism|training)\]"),
    ("megatron-args", r"--num-layers|--tensor-model-parallel-size|\bnum_layers \.{3,}|\"ffn_hidden_size\""),
    ("accelerate-yaml", r"^(distributed_type|compute_environment):"),
    ("litgpt-yaml", r"^[ \t]*(n_embd|n_layer|mlp_class_name|padded_vocab_size|model_config|model_name):"),
    ("neox-yaml", r"\b(num[-_]layers|pipe[-_]parallel[-_]size|gpt[-_]j[-_]residual)[\"']?\s*:"),
    ("deepspeed-json", r"\"(zero_optimization|train_batch_size|train_micro_batch_size_per_gpu)\""),
)
MAX_JOB_BYTES = 128 * 2**10
"""Largest file of a trainer, which mostly has a few kB; a megabyte of YAML takes 10 s. Logs may be longer, as they
begin with the arguments."""
_IS_LOG = re.compile(r"\bnum_layers \.{3,}")
# A flavor of a Python file, or an instance of a launch script.
_PART = re.compile(r"(.+?)::(.+)")
_WITH_PARTS = {"vllm": read_vllm, "sglang": read_sglang}


def find_format_of(text: str) -> str:
    """Name of the format of a text; empty if it is none of READERS."""
    return next((name for name, sign in _SIGNS if re.search(sign, text, re.MULTILINE)), "")


def is_job_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a file that read_job reads; false for a config.json of Hugging Face.

    Raises:
        ConfigError: there is a file, but it cannot be read.
    """
    part = _PART.fullmatch(os.fspath(path))
    file = Path(part[1] if part else path)
    if not file.is_file():
        return False
    text = read_file(file).decode("utf-8-sig", errors="replace")
    if re.search(r"\"(model_type|architectures|_class_name)\"\s*:", text):
        return False
    return bool(part) or (file.suffix == ".py" and "ModelArgs(" in text) or bool(find_format_of(text))


def read_job(path: str | os.PathLike[str], *, format_name: str = "") -> Reading:
    """Read the model, workload and layout that a file of a trainer or an inference engine describes.

    Args:
        path: The file; ``FILE.py::FLAVOR`` for a flavor of torchtitan, ``FILE::prefill``, ``FILE::decode`` or
            ``FILE::NUMBER`` for one of several instances of a launch script.
        format_name: A key of READERS; empty to find it out.

    Raises:
        ConfigError: the file cannot be read, or is of no known format.
    """
    found = _PART.fullmatch(os.fspath(path))
    file, part = (found[1], found[2]) if found else (os.fspath(path), "")
    content = read_file(Path(file))
    text = content[:MAX_JOB_BYTES].decode("utf-8-sig", errors="replace")  # some editors write a byte order mark
    if len(content) > MAX_JOB_BYTES and not _IS_LOG.search(text):
        raise ConfigError(f"{short_path(file)} is larger than {MAX_JOB_BYTES // 2**10} KiB; give a config file")
    try:
        if file.endswith(".py") and (part or "ModelArgs(" in text):
            return _read_with(lambda of: read_flavor(of, part), text)
        return parse_job(text, format_name=format_name, part=part)
    except ConfigError as error:
        raise ConfigError(f"in {short_path(file)}: " + error.text) from None


def parse_job(text: str, *, format_name: str = "", part: str = "") -> Reading:
    """Read a text as read_job does a file.

    Args:
        part: Which instance of a launch script.
    """
    name = format_name or find_format_of(text)
    if name not in READERS:
        known = ", ".join(READERS)
        raise ConfigError(f"the format {name or 'of the file'} is not known; known are {known}")
    if part:
        if name not in _WITH_PARTS:
            raise ConfigError(f"a file of {name} has no parts such as {short_repr(part)}; omit it")
        return _read_with(lambda of: _WITH_PARTS[name](of, part), text)
    return _read_with(READERS[name], text)


def _read_with(reader: Callable[[str], Reading], text: str) -> Reading:
    """Read a text; values that are of another type or outside of what their format allows are errors of the file."""
    try:
        return reader(text)
    except ShapewrightError:
        raise
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:
        words = short_repr(first_line(error), 80)
        raise ConfigError(
            f"a value does not fit its key ({words}); check that numbers and lists are complete"
        ) from None
