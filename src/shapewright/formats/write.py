"""write_format: a shape in the words of a training framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.errors import ConfigError, close_names
from shapewright.formats import accelerate, deepspeed, megatron, nanogpt, neox, torchtitan
from shapewright.formats.form import refuse_inexpressible, refuse_offload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.config import TransformerConfig
    from shapewright.formats.form import Form
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload

FORMATS: dict[str, Form] = {form.name: form for form in (megatron.FORM, neox.FORM, torchtitan.FORM, nanogpt.FORM)}
"""Every format of a shape by the name that ``--format`` takes."""

RUN_FORMATS: dict[str, Form] = {form.name: form for form in (deepspeed.FORM, accelerate.FORM)}
"""Formats that say how a step is run, and leave the model to the training script."""


def write_format(
    name: str,
    config: TransformerConfig,
    *,
    workload: Workload | None = None,
    layout: ParallelLayout | None = None,
) -> str:
    """Write a model, and where given its batch and layout, as a framework reads them.

    Args:
        name: A key of FORMATS or of RUN_FORMATS; the latter write workload and layout alone.
        config: The shape.
        workload: Batch, sequence length, dtype and recomputation of a training step.
        layout: How it is spread.

    Returns:
        Text of the file, with a newline at its end.

    Raises:
        ConfigError: no such format, or one that cannot express the shape.
        WorkloadError: it cannot express the workload.
        LayoutError: it cannot express the layout.
    """
    form = RUN_FORMATS[name] if name in RUN_FORMATS else check_format(name)
    if workload is not None:
        refuse_offload(form, workload)
    if name not in RUN_FORMATS:
        refuse_inexpressible(form, config)
    return form.write(config, workload, layout)


def check_format(name: str, *, also: Iterable[str] = ("hf",)) -> Form:
    """Look up a format.

    Args:
        name: Its name.
        also: What the caller takes beside the formats here, for the message.

    Raises:
        ConfigError: no such format.
    """
    form = FORMATS.get(name)
    if form is None:
        known = (*also, *FORMATS)
        hint = close_names(name, known)
        raise ConfigError(
            f"--format {name!r} is not known; {hint + ' ' if hint else ''}choose one of {', '.join(known)}"
        )
    return form
