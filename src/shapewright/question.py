"""Question: a model, a device, a workload and a layout, completed with defaults that fit them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from shapewright.config import Model, TransformerConfig, read_model
from shapewright.dtypes import get_dtype
from shapewright.errors import LayoutError, ShapewrightError, WorkloadError, close_names
from shapewright.fields import noted_fields
from shapewright.hardware import Device, load_device
from shapewright.hardware.nodes import check_units
from shapewright.layout import ParallelLayout
from shapewright.lowering import possible_degrees, validate_lengths
from shapewright.perf.calibration import load_record
from shapewright.perf.expert_kernels import has_poor_kernel, leave_poor_matches
from shapewright.perf.software import TUNED, software_of
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.predict import Prediction

ModelLike = str | PathLike[str] | Mapping[str, Any] | Model | TransformerConfig | None
"""A model, or what names one: preset, config.json, its folder or what it holds, hub id; None for overrides alone."""

DeviceLike = str | PathLike[str] | Device
"""A device, or what names one: name, alias, device file."""

# Longest sequence taken by default; models made for less get their own maximum. It is the paper's length.
_DEFAULT_SEQ_LEN = 2048
_DEFAULT_MICRO_BATCH_SIZE: Mapping[str, int] = {"train": 4, "prefill": 1, "decode": 8}
# The first that the device has a rate for.
_USUAL_DTYPES = ("bf16", "fp16", "fp32")
# Fused attention needs the asynchronous copies and register files of later generations (FlashAttention-2's README).
_ARCHITECTURES_WITHOUT_FUSED_ATTENTION = ("volta", "turing")


class Terms(TypedDict):
    """What a config is priced on: the keyword arguments that predict, check_model and their siblings share."""

    device: Device
    workload: Workload
    layout: ParallelLayout
    uncalibrated: bool
    software: str


@dataclass(frozen=True)
class Question:
    """What is asked of the model: everything a prediction needs, nothing left open.

    Attributes:
        model: The model, in the form that it was read in.
        device: The device, with records of its own where it was measured.
        workload: What is run.
        layout: How it is spread.
        remarks: What has no effect, one line each.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software.
    """

    model: Model
    device: Device
    workload: Workload
    layout: ParallelLayout
    remarks: tuple[str, ...] = ()
    uncalibrated: bool = False
    software: str = TUNED

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say about the question: how the config was read, and what has no effect."""
        return (*self.model.notes, *self.remarks)

    @property
    def config(self) -> TransformerConfig:
        """The shape that is asked about."""
        return self.model.config

    @property
    def terms(self) -> Terms:
        """All but the config, to be passed on: ``check_model(question.config, **question.terms)``."""
        return Terms(
            device=self.device,
            workload=self.workload,
            layout=self.layout,
            uncalibrated=self.uncalibrated,
            software=self.software,
        )

    def predict(self) -> Prediction:
        """Predict the step."""
        from shapewright.predict import predict

        return predict(self.config, **self.terms)


def ask(
    source: ModelLike,
    device: DeviceLike,
    *,
    overrides: Mapping[str, object] | None = None,
    workload: Mapping[str, Any] | Workload | None = None,
    layout: Mapping[str, Any] | ParallelLayout | None = None,
    uncalibrated: bool = False,
    software: str = TUNED,
    physics_only: bool = False,
) -> Question:
    """Complete a question.

    Args:
        source: Preset, path, hub id, what a config.json holds, a Model or TransformerConfig, or None for a model of
            overrides alone.
        device: Name, alias, path of a device file, or a Device.
        overrides: TransformerConfig fields to change.
        workload: A Workload, or some of its fields; the rest gets defaults that fit model and device: bf16 where the
            device has it and else fp16, fused attention where the device has kernels for it, at most 2048 tokens.
        layout: A ParallelLayout, or some of its fields.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software.
        physics_only: Leave aside what was learned beyond the formulas (perf.residual, perf.attention_residual).

    Raises:
        ShapewrightError: whatever is wrong with any of them.
    """
    overrides, workload, layout = _plain(overrides), _plain(workload), _plain(layout)
    model = find_model(source, overrides)
    found = find_device(device, physics_only=physics_only)
    remarks: tuple[str, ...] = ()
    if not isinstance(workload, Workload):
        _refuse_unknown(workload or {}, Workload, WorkloadError)
        remarks = _ignored_fields(model.config, workload or {}, software)
        given = dict(workload or {})
        if given.get("expert_kernel") is None and _leaves_expert_kernel(model, found, given, uncalibrated=uncalibrated):
            given["expert_kernel"] = "as-16-bit"
        workload = complete_workload(model.config, found, given)
    if not isinstance(layout, ParallelLayout):
        _refuse_unknown(layout or {}, ParallelLayout, LayoutError)
        remarks += say_idle_cut(model.config, layout or {})
        layout = ParallelLayout(**(layout or {}))
    # Refused here, before anything is priced.
    software_of(software, workload.phase)
    validate_lengths(model.config, workload)
    degrees = possible_degrees(model.config, layout)
    check_units(layout.num_devices, found, words=_count_devices(layout), allowed=degrees)
    return Question(model, found, workload, layout, remarks, uncalibrated, software)


def _leaves_expert_kernel(model: Model, device: Device, given: Mapping[str, Any], *, uncalibrated: bool) -> bool:
    """Whether served experts in fp8 run other kernels than the slow one that was measured on the device.

    That one takes a scale for each tensor; checkpoints with a scale for each block run in DeepGEMM or triton.
    """
    is_served = given.get("phase") in ("prefill", "decode")
    if not (model.has_block_scales and model.config.is_moe and is_served) or device.roofline_only:
        return False
    return has_poor_kernel(leave_poor_matches(load_record("moe", device, uncalibrated=uncalibrated)), "fp8")


def _count_devices(layout: ParallelLayout) -> str:
    """Devices of a layout, and the degrees whose product they are."""
    names = [f"{axis}_parallel" for axis in ("tensor", "pipeline", "data", "context")]
    degrees = {name: getattr(layout, name) for name in names if getattr(layout, name) > 1}
    if len(degrees) == 1:
        return "".join(f"{name}={degree}" for name, degree in degrees.items())
    return f"{' * '.join(degrees)} = {' * '.join(map(str, degrees.values()))} = {layout.num_devices}"


def plain_value(value: Any) -> Any:
    """A value of a field, NumPy's numbers as Python's: a script may walk through a range of them."""
    return value.item() if isinstance(value, np.generic) else value


def _plain(given: Any) -> Any:
    """Fields with plain values; anything but fields as it is."""
    return {name: plain_value(value) for name, value in given.items()} if isinstance(given, Mapping) else given


def find_model(source: ModelLike, overrides: Mapping[str, object] | None = None) -> Model:
    """The model that is meant; a Model is taken as it is, overrides and all.

    Raises:
        ShapewrightError: there is no such model, or it makes no sense.
    """
    if isinstance(source, TransformerConfig):
        return Model(config=source, raw=None, source="TransformerConfig")
    return source if isinstance(source, Model) else read_model(source, overrides)


def find_device(device: DeviceLike, *, physics_only: bool = False) -> Device:
    """The device that is meant, priced by physics alone where that is asked.

    Raises:
        DeviceError: there is no such device.
    """
    found = device if isinstance(device, Device) else load_device(str(device))
    return found.by_physics if physics_only else found


def complete_workload(config: TransformerConfig, device: Device, given: Mapping[str, Any]) -> Workload:
    """Fill in the fields of a workload that were not given.

    Raises:
        WorkloadError: a field makes no sense.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    if config.stack == "encoder" and fields.get("phase") == "decode":
        raise WorkloadError(f"{config.title} is an encoder and does not decode; use --phase prefill or train")
    phase = fields.setdefault("phase", "train")
    fields.setdefault("micro_batch_size", _DEFAULT_MICRO_BATCH_SIZE.get(phase, 1))
    longest = min(_DEFAULT_SEQ_LEN, config.max_position_embeddings)
    fields.setdefault("seq_len", longest)
    if phase == "decode":
        fields.setdefault("context_len", max(longest - 1, 0))
    usual = (dtype for dtype in _USUAL_DTYPES if dtype in device.dense_flops_per_s)
    fields.setdefault("dtype", next(usual, _USUAL_DTYPES[0]))
    fused = device.architecture not in _ARCHITECTURES_WITHOUT_FUSED_ATTENTION
    fields.setdefault("attention", "flash" if fused else "unfused")
    return Workload(**fields)


def _refuse_unknown(given: Mapping[str, Any], cls: type, error: type[ShapewrightError]) -> None:
    """Name a field that does not exist, and those that do."""
    known = [spec.name for spec, _ in noted_fields(cls)]
    for name in given:
        if name not in known:
            hint = close_names(str(name), known)
            raise error(
                f"{cls.__name__} has no field {str(name)!r}; {hint + ' ' if hint else ''}it has {', '.join(known)}"
            )


def _ignored_fields(config: TransformerConfig, given: Mapping[str, Any], software: str) -> tuple[str, ...]:
    """One line for each field that was given and changes nothing."""
    phase, lines = given.get("phase") or "train", []
    if phase == "decode" and config.stack == "decoder" and given.get("seq_len") is not None:
        lines.append(f"seq_len={given['seq_len']} has no effect in decode; context_len says how long the cache is")
    if phase != "train" and given.get("optimizer") is not None:
        lines.append(f"optimizer={given['optimizer']} has no effect in {phase}")
    if given.get("expert_kernel") is not None and (phase == "train" or not config.is_moe):
        reason = "train, whose stacks have kernels of their own" if phase == "train" else "a model without experts"
        lines.append(f"expert_kernel={given['expert_kernel']} has no effect in {reason}")
    elif given.get("expert_kernel") is not None and get_dtype(given.get("dtype") or _USUAL_DTYPES[0]).bits >= 16:
        lines.append(f"expert_kernel={given['expert_kernel']} has no effect on experts in 16 bits or more")
    decided = software_of(software, phase).workload
    lines += [
        f"{name}={given[name]} has no effect: software={software!r} decides it, {name}={value}"
        for name, value in decided.items()
        if given.get(name) not in (None, value)
    ]
    if given.get("fused_experts") is False and not (phase == "train" and (config.expert_bias or config.expert_clamp)):
        reason = "a model whose experts have neither biases nor a clamp" if phase == "train" else phase
        lines.append(f"fused_experts=False has no effect in {reason}")
    if given.get("recompute_modules") is not None:
        if phase != "train" or given.get("recompute") != "selective":
            lines.append(
                f"recompute_modules={given['recompute_modules']} changes selective recomputation alone (--recompute "
                f"selective)"
            )
        else:
            lines += say_idle_modules(config, given["recompute_modules"])
    if given.get("narrow_dispatch") is False and not (config.is_moe and given.get("dtype") == "fp8"):
        lines.append("narrow_dispatch=False has no effect but on experts in fp8: other rows travel as activations do")
    if phase == "train":
        lines += [
            f"{name}={given[name]} has no effect in train, which keeps no cache"
            for name in ("kv_cache_dtype", "kv_block_tokens")
            if given.get(name) is not None
        ]
    return tuple(lines)


def say_idle_modules(config: TransformerConfig, modules: str) -> tuple[str, ...]:
    """One line where a part that selective recomputation is to take is not in the model."""
    named = f"recompute_modules={modules}"
    if "moe" in modules and not config.is_moe:
        return (f"{named}: moe has no effect in a model without experts",)
    if "shared_experts" in modules and not config.shared_expert_intermediate_size:
        return (f"{named}: shared_experts has no effect in a model without any",)
    if "mla_up_proj" in modules and not config.is_mla:
        return (f"{named}: mla_up_proj has no effect without latent attention",)
    return ()


def say_idle_cut(config: TransformerConfig, layout: Mapping[str, Any]) -> tuple[str, ...]:
    """One line where a model without experts is told how to cut them."""
    cut = layout.get("expert_tensor_parallel")
    return (
        ()
        if cut is None or config.is_moe
        else (f"expert_tensor_parallel={cut} has no effect in a model without experts",)
    )
