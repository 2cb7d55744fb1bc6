"""What a step takes: its time, its memory, and what a measured one means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.perf.software import TUNED
from shapewright.question import ask, plain_value

if TYPE_CHECKING:
    from shapewright.capacity import Capacity
    from shapewright.layout import ParallelLayout
    from shapewright.predict import Prediction
    from shapewright.question import DeviceLike, ModelLike
    from shapewright.sweep import Sweep
    from shapewright.utilization import Utilization
    from shapewright.workload import Workload


def predict(
    config: ModelLike,
    *,
    device: DeviceLike,
    workload: Workload | Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
    software: str = TUNED,
    physics_only: bool = False,
) -> Prediction:
    """Predict the time, throughput and memory of one step.

    Args:
        config: Preset name, config.json, its folder or what it holds, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        workload: Workload, or some of its fields.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software, such as ``fsdp-2024``; by default a tuned stack of today.
        physics_only: Leave aside what was learned beyond the formulas.

    Returns:
        The step: its time with a 90 % interval, throughput, memory, every operation with its price, and what
        was used.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line.
    """
    question = ask(
        config,
        device,
        overrides=overrides,
        workload=workload,
        layout=layout,
        uncalibrated=uncalibrated,
        software=software,
        physics_only=physics_only,
    )
    return question.predict()


def sweep(
    config: ModelLike,
    *,
    device: DeviceLike,
    axes: Mapping[str, Sequence[Any]],
    workload: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    uncalibrated: bool = False,
    software: str = TUNED,
    physics_only: bool = False,
) -> Sweep:
    """Predict a step for every combination of some fields' values.

    Args:
        config: Preset name, config.json, its folder or what it holds, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        axes: Values by field name of Workload or ParallelLayout, or of a size of the model, such as
            ``{"micro_batch_size": [1, 2, 4]}`` or ``{"hidden_size": [4096, 4097]}``.
        workload: Some fields of Workload.
        layout: Some fields of ParallelLayout.
        overrides: TransformerConfig fields to change on top of ``config``.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software, such as ``fsdp-2024``; by default a tuned stack of today.
        physics_only: Leave aside what was learned beyond the formulas.

    Returns:
        A row for each combination, the last field fastest; one that cannot run has the reason in its row.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line; a combination that cannot run has its reason in
            its row, unless none can.
    """
    from shapewright.sweep import predict_sweep

    question = ask(
        config,
        device,
        overrides=overrides,
        workload=workload,
        layout=layout,
        uncalibrated=uncalibrated,
        software=software,
        physics_only=physics_only,
    )
    values = {name: [plain_value(value) for value in given] for name, given in axes.items()}
    return predict_sweep(question.config, **question.terms, axes=values, notes=question.notes)


def fits(
    config: ModelLike,
    *,
    device: DeviceLike,
    workload: Workload | Mapping[str, Any] | None = None,
    layout: ParallelLayout | Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    optimizer: str | None = None,
    uncalibrated: bool = False,
    software: str = TUNED,
    physics_only: bool = False,
) -> Capacity:
    """Say whether a job fits in memory, what is the largest that does, and what to change if it does not.

    Args:
        config: Preset name, config.json, its folder or what it holds, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        workload: Workload, or some of its fields.
        layout: ParallelLayout, or some of its fields.
        overrides: TransformerConfig fields to change on top of ``config``.
        optimizer: A key of ``shapewright.memory.OPTIMIZERS``, instead of the workload's.
        uncalibrated: Price remedies as if nobody had measured the device.
        software: Generation of the training software that remedies are priced with; by default a tuned stack of today.
        physics_only: Leave aside what was learned beyond the formulas.

    Returns:
        Memory of each stage against the device, the largest micro-batch and sequence that fit, and remedies
        where the job does not.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line.
    """
    from shapewright.capacity import estimate_capacity

    question = ask(
        config,
        device,
        overrides=overrides,
        workload=workload,
        layout=layout,
        uncalibrated=uncalibrated,
        software=software,
        physics_only=physics_only,
    )
    return estimate_capacity(question.config, **question.terms, optimizer=optimizer, notes=question.notes)


def mfu(
    config: ModelLike,
    *,
    device: DeviceLike,
    seconds: float | None = None,
    tokens_per_s: float | None = None,
    tokens_per_s_per_device: float | None = None,
    num_devices: int,
    global_batch_size: int,
    workload: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    overrides: Mapping[str, object] | None = None,
    convention: str = "megatron",
    uncalibrated: bool = False,
    software: str = TUNED,
    physics_only: bool = False,
) -> Utilization:
    """Say what a measured training step means: MFU and HFU by every convention, and where the rest went.

    Args:
        config: Preset name, config.json, its folder or what it holds, hub id, Model or TransformerConfig.
        device: Device name, alias, file, or Device.
        seconds: Measured time of one optimiser step; or one of the next two instead. [s]
        tokens_per_s: Measured tokens of a second over the whole job. [token/s]
        tokens_per_s_per_device: The same, divided by the devices. [token/s]
        num_devices: Devices of the whole job.
        global_batch_size: Sequences of the step over all replicas.
        workload: Some fields of Workload, such as seq_len and recompute.
        layout: Some fields of ParallelLayout; without degrees the fastest plain layout that fits is assumed.
        overrides: TransformerConfig fields to change on top of ``config``.
        convention: FLOP convention of the headline, a key of ``shapewright.lowering.conventions.CONVENTIONS``.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software that ran it; by default it is held against a tuned stack of today.
        physics_only: Leave aside what was learned beyond the formulas.

    Returns:
        Utilization by every convention, and a waterfall of parts that add up to the measured time where there
        can be one.

    Raises:
        ShapewrightError: what is wrong with any of them, in one line.
    """
    from shapewright.assumed_layout import assume_layout
    from shapewright.utilization import explain_utilization, read_measurement

    fields = {**(workload or {}), "global_batch_size": global_batch_size}
    question = ask(
        config,
        device,
        overrides=overrides,
        workload=fields,
        uncalibrated=uncalibrated,
        software=software,
        physics_only=physics_only,
    )
    measured = {
        "seconds": plain_value(seconds),
        "tokens_per_s": plain_value(tokens_per_s),
        "tokens_per_s_per_device": plain_value(tokens_per_s_per_device),
    }
    read_measurement(question.workload, num_devices, **measured)  # before a layout is looked for, which takes longer
    job = assume_layout(
        question.config,
        question.device,
        question.workload,
        num_devices,
        layout or {},
        keep_micro_batch=fields.get("micro_batch_size") is not None,
    )
    return explain_utilization(
        question.config,
        device=question.device,
        workload=job.workload,
        **measured,
        num_devices=num_devices,
        layout=job.layout,
        convention=convention,
        notes=(*question.notes, *job.notes),
        uncalibrated=uncalibrated,
        software=software,
    )
