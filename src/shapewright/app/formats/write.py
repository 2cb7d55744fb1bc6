"""write_format: write a model, workload and layout in the config format of a training framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.formats import accelerate, deepspeed, litgpt, megatron, nanogpt, neox, torchtitan
from shapewright.app.formats.output_format import check_model, check_offload
from shapewright.core.errors import ConfigError, WorkloadError, close_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.app.formats.output_format import OutputFormat, Untimed
    from shapewright.models import TransformerConfig
    from shapewright.workload import ParallelLayout, Workload

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
        config: The model.
        workload: Batch, sequence length, dtype and recomputation of a training step.
        layout: Parallel layout.
        untimed: Values that no prediction depends on: those of ``models.untimed_values``, and the fields of a
            ``RunSchedule`` where the length of the run is known.

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
        name: Name of the format.
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
