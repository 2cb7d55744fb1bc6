"""Build scenarios: model, device, workload and layout by name or by fields, completed with defaults that fit them."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import (
    ConfigError,
    DeviceError,
    LayoutError,
    ShapewrightError,
    UnknownRateError,
    WorkloadError,
    close_names,
    short_repr,
)
from shapewright.core.fields import documented_fields
from shapewright.core.notes import Note
from shapewright.core.ranges import check_text
from shapewright.core.texts import FieldName, joined, with_fields
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device, note_on_board
from shapewright.hardware.nodes import check_allocation
from shapewright.lowering.checks import possible_degrees, validate_lengths
from shapewright.lowering.shard import activation_dtype
from shapewright.models.read import Model, ModelLike, read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.scenario import Scenario
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.experts.kernels import drop_poor_kernels_if_transferred, has_poor_kernel
from shapewright.pricing.software import TUNED, Software, software_of
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload, read_image_size

DeviceLike = str | PathLike[str] | Device
"""A device, or its name, alias or device file."""

# Default sequence length, as in the paper; models with shorter max_position_embeddings take that instead.
_DEFAULT_SEQ_LEN = 2048
_DEFAULT_MICRO_BATCH_SIZE: Mapping[str, int] = {"train": 4, "prefill": 1, "decode": 8}
# Default formats, in order of preference.
_USUAL_DTYPES = ("bf16", "fp16", "fp32")


def build_scenario(
    source: ModelLike | Scenario,
    device: DeviceLike | None = None,
    *,
    overrides: Mapping[str, object] | None = None,
    workload: Mapping[str, Any] | Workload | None = None,
    layout: Mapping[str, Any] | ParallelLayout | None = None,
    uncalibrated: bool = False,
    software: str | Software | None = None,
    physics_only: bool = False,
) -> Scenario:
    """Build a scenario; fields that are not given get defaults that suit model and device.

    Args:
        source: Preset, path, hub id, content of a config.json, a Model or TransformerConfig, or None for a model of
            overrides alone. Also a Scenario: the other arguments then replace its parts and fields.
        device: Name, alias, path of a device file, or a Device; required unless ``source`` is a Scenario.
        workload: A Workload, or some of its fields. Defaults of the others: bf16 where the device has it, otherwise
            fp16; fused attention where the device has kernels for it; at most 2048 tokens.
        layout: A ParallelLayout, or some of its fields.
        uncalibrated: Price without the device's own measurements.
        software: Generation of the training software; by default ``tuned``.
        physics_only: Price by formulas alone, without learned residuals.

    Raises:
        ShapewrightError: one of the arguments is invalid, or they contradict each other.
    """
    overrides, workload, layout = _plain_values(overrides), _plain_values(workload), _plain_values(layout)
    _check_type("overrides", overrides, Mapping, ConfigError)
    _check_type("workload", workload, Mapping | Workload, WorkloadError)
    _check_type("layout", layout, Mapping | ParallelLayout, LayoutError)
    _check_type("software", software, str | Software, WorkloadError, "the name of a generation, such as fsdp-2024")
    remarks: tuple[Note, ...] = ()
    if isinstance(source, Scenario):
        workload, layout = _replace_fields(source, workload), _replace_fields(source, layout, of_layout=True)
        device = source.device if device is None else device
        software = source.software if software is None else software
        remarks, source = source.remarks, source.model
    if device is None:
        raise DeviceError("no device given; 'shapewright devices' lists all")
    software = TUNED if software is None else software
    model = read_model(source, overrides)
    images = workload.images if isinstance(workload, Workload) else (workload or {}).get("images")
    if images and model.config.vision is None:
        if model.config.patches is not None:
            raise WorkloadError(f"{model.config.title} has an image in each sequence; omit images", field="images")
        model = model.with_vision()
    found = find_device(device, uncalibrated=uncalibrated, physics_only=physics_only)
    board = note_on_board(device) if isinstance(device, str) else ""
    if not isinstance(workload, Workload):
        _check_field_names(workload or {}, Workload, WorkloadError)
        remarks = _find_ignored_fields(model.config, workload or {}, software)
        given = dict(workload or {})
        if given.get("expert_kernel") is None and _skips_measured_expert_kernel(model, found, given):
            given["expert_kernel"] = "as-16-bit"
        workload = complete_workload(model.config, found, given)
    if not isinstance(layout, ParallelLayout):
        _check_field_names(layout or {}, ParallelLayout, LayoutError)
        remarks += find_ignored_expert_split(model.config, layout or {})
        layout = ParallelLayout(**(layout or {}))
    # Invalid combinations are refused before anything is priced.
    stack = software_of(software, workload.phase)
    validate_lengths(model.config, workload)
    _check_activations(found, workload)
    degrees = possible_degrees(model.config, layout)
    check_allocation(layout.num_devices, found, words=_describe_devices(layout), allowed=degrees)
    remarks += (Note(board, "device"),) if board else ()
    return Scenario(model=model, device=found, workload=workload, layout=layout, software=stack, remarks=remarks)


def _check_type(
    name: str, given: object, kinds: Any, error: type[ShapewrightError], advice: str = "a dictionary of its fields"
) -> None:
    """Raise an error that says what an argument of another type should be."""
    if given is not None and not isinstance(given, kinds):
        raise error(f"{name}={short_repr(given)} must be {advice}")


def _check_activations(device: Device, workload: Workload) -> None:
    """Refuse a format of GEMMs whose activations are in one that the device has no rate for."""
    dtype, rates = workload.dtype, device.dense_flops_per_s
    activations = activation_dtype(dtype)
    if dtype not in rates or activations in rates:
        return
    wide = " or ".join(sorted(name for name in rates if get_dtype(name).bits >= 16))
    advice = with_fields("set {dtype} to {wide}", wide=wide)
    if workload.phase != "train":
        advice += with_fields(", with {weights} for narrow weights", weights=FieldName("weight_dtype", dtype))
    raise UnknownRateError(
        f"runs {dtype} GEMMs, but their activations are in {activations}, for which its data sheet has no rate",
        subject=device.name,
        field="dtype",
        advice=advice if wide else "give the rate in a device file of your own",
    )


def _replace_fields(scenario: Scenario, given: Any, *, of_layout: bool = False) -> Any:
    """Return the workload or layout of a scenario with the given fields changed; one given as a whole replaces it."""
    if given is not None and not isinstance(given, Mapping):
        return given
    changes = dict(given or {})
    _check_field_names(changes, *((ParallelLayout, LayoutError) if of_layout else (Workload, WorkloadError)))
    changed = scenario.replace(**changes)
    return changed.layout if of_layout else changed.workload


def _skips_measured_expert_kernel(model: Model, device: Device, given: Mapping[str, Any]) -> bool:
    """Whether served fp8 experts run other kernels than the slow one that was measured on the device.

    The measured kernel uses one scale per tensor; checkpoints with block scales run in DeepGEMM or triton.
    """
    is_served = given.get("phase") in ("prefill", "decode")
    if not (model.has_block_scales and model.config.is_moe and is_served) or device.roofline_only:
        return False
    return has_poor_kernel(drop_poor_kernels_if_transferred(load_record("moe", device)), "fp8")


def _describe_devices(layout: ParallelLayout) -> str:
    """Format the number of devices of a layout as the product of its degrees."""
    names = [f"{axis}_parallel" for axis in ("tensor", "pipeline", "data", "context")]
    degrees = {name: getattr(layout, name) for name in names if getattr(layout, name) > 1}
    if len(degrees) == 1:
        return "".join(f"{name}={degree}" for name, degree in degrees.items())
    product = " * ".join(map(str, degrees.values()))
    return joined(map(FieldName, degrees), " * ") + f" = {product} = {layout.num_devices}"


def plain_value(value: Any) -> Any:
    """Convert NumPy scalars, such as elements of a range, to Python numbers."""
    return value.item() if isinstance(value, np.generic) else value


def _plain_values(given: Any) -> Any:
    """Apply plain_value to the values of a mapping; other objects are returned unchanged."""
    return {name: plain_value(value) for name, value in given.items()} if isinstance(given, Mapping) else given


def find_device(device: DeviceLike, *, uncalibrated: bool = False, physics_only: bool = False) -> Device:
    """Load a device and set its pricing options.

    Raises:
        DeviceError: the device is unknown.
    """
    found = device if isinstance(device, Device) else load_device(str(device))
    return found.with_pricing(uncalibrated=uncalibrated, physics_only=physics_only)


def complete_workload(config: TransformerConfig, device: Device, given: Mapping[str, Any]) -> Workload:
    """Build a workload; fields that are not given get defaults that suit model and device.

    Raises:
        WorkloadError: a field is invalid.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    if config.stack == "encoder" and fields.get("phase") == "decode":
        raise WorkloadError(f"{config.title} is an encoder and does not decode; use phase='prefill' or 'train'")
    phase = check_text("phase", fields.setdefault("phase", "train"), error=WorkloadError)
    fields.setdefault("micro_batch_size", _DEFAULT_MICRO_BATCH_SIZE.get(phase, 1))
    longest = min(_DEFAULT_SEQ_LEN, config.max_position_embeddings)
    if config.patches is not None:
        if fields.get("seq_len") is not None:
            raise WorkloadError(
                f"seq_len={fields['seq_len']}: the tokens of {config.title} are those of an image",
                advice=with_fields("give {image_size}"),
                field="seq_len",
            )
        image_size = fields.get("image_size")
        pixels = (
            None if image_size is None else read_image_size(check_text("image_size", image_size, error=WorkloadError))
        )
        longest = config.patches.count_tokens(pixels)
    fields.setdefault("seq_len", longest)
    if phase == "decode":
        fields.setdefault("context_len", max(longest - 1, 0))
    usual = (dtype for dtype in _USUAL_DTYPES if dtype in device.dense_flops_per_s)
    fields.setdefault("dtype", next(usual, _USUAL_DTYPES[0]))
    fused = device.architecture_facts.has_fused_attention
    fields.setdefault("attention", "flash" if fused else "unfused")
    return Workload(**fields)


def _check_field_names(given: Mapping[str, Any], cls: type, error: type[ShapewrightError]) -> None:
    """Raise an error that names an unknown field and lists the known ones."""
    known = [spec.name for spec, _ in documented_fields(cls)]
    for name in given:
        if name not in known:
            hint = close_names(str(name), known)
            raise error(
                f"{cls.__name__} has no field {str(name)!r}; {hint + ' ' if hint else ''}it has {', '.join(known)}"
            )


def _find_ignored_fields(
    config: TransformerConfig, given: Mapping[str, Any], software: str | Software
) -> tuple[Note, ...]:
    """Return a note for each given field that has no effect."""
    phase = check_text("phase", given.get("phase") or "train", error=WorkloadError)
    reasons: dict[str, str] = {}
    if phase == "decode" and config.stack == "decoder" and given.get("seq_len") is not None:
        reasons["seq_len"] = with_fields("has no effect in decode; {context_len} is the length of the cache")
    if phase != "train" and given.get("optimizer") is not None:
        reasons["optimizer"] = f"has no effect in {phase}"
    if given.get("expert_kernel") is not None and (phase == "train" or not config.is_moe):
        where = "train, whose stacks have their own kernels" if phase == "train" else "a model without experts"
        reasons["expert_kernel"] = f"has no effect in {where}"
    elif given.get("expert_kernel") is not None and get_dtype(given.get("dtype") or _USUAL_DTYPES[0]).bits >= 16:
        reasons["expert_kernel"] = "has no effect on experts in 16 bits or more"
    notes = [_no_effect_note(given, name, reason) for name, reason in reasons.items()]
    notes += [
        _no_effect_note(given, name, f"has no effect: software={software!r} sets {name}={value}")
        for name, value in software_of(software, phase).workload.items()
        if given.get(name) not in (None, value)
    ]
    if given.get("fused_experts") is False and not (phase == "train" and (config.expert_bias or config.expert_clamp)):
        where = "a model whose experts have neither biases nor a clamp" if phase == "train" else phase
        notes.append(_no_effect_note(given, "fused_experts", f"has no effect in {where}"))
    if given.get("recompute_modules") is not None:
        if phase != "train" or given.get("recompute") != "selective":
            reason = "affects selective recomputation only (recompute='selective')"
            notes.append(_no_effect_note(given, "recompute_modules", reason))
        else:
            notes += find_ignored_modules(config, given["recompute_modules"])
    if given.get("narrow_dispatch") is False and not (config.is_moe and given.get("dtype") == "fp8"):
        reason = "affects fp8 experts only: other rows are sent in the format of the activations"
        notes.append(_no_effect_note(given, "narrow_dispatch", reason))
    if phase == "train":
        notes += [
            _no_effect_note(given, name, "has no effect in train, which has no KV cache")
            for name in ("kv_cache_dtype", "kv_block_tokens")
            if given.get(name) is not None
        ]
    return tuple(notes)


def _no_effect_note(given: Mapping[str, Any], field: str, reason: str) -> Note:
    return Note(f"{field}={given[field]} " + reason, "no-effect", field)


def find_ignored_modules(config: TransformerConfig, modules: str) -> tuple[Note, ...]:
    """Return a note where selective recomputation names a module that the model does not have."""
    if "moe" in modules and not config.is_moe:
        reason = "moe has no effect in a model without experts"
    elif "shared_experts" in modules and not config.shared_expert_intermediate_size:
        reason = "shared_experts has no effect in a model without shared experts"
    elif "mla_up_proj" in modules and not config.is_mla:
        reason = "mla_up_proj has no effect without latent attention"
    else:
        return ()
    return (Note(f"recompute_modules={modules}: {reason}", "no-effect", "recompute_modules"),)


def find_ignored_expert_split(config: TransformerConfig, layout: Mapping[str, Any]) -> tuple[Note, ...]:
    """Return a note where a layout splits the experts of a model that has none."""
    if layout.get("expert_tensor_parallel") is None or config.is_moe:
        return ()
    return (_no_effect_note(layout, "expert_tensor_parallel", "has no effect in a model without experts"),)
