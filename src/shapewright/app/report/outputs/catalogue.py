"""Outputs of ``devices``, ``models`` and ``rule``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shapewright.app.report.outputs.model import Output, described, optional, plain, take, text_only
from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass
from shapewright.hardware.device import PRICING_FIELDS, Device
from shapewright.hardware.loader import list_devices, load_device
from shapewright.lint.rule import get_rule, list_rules, rule_page
from shapewright.models.parameters import count_parameters
from shapewright.models.read import load_preset, read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.pricing.calibration.records import FORMAT_RECORD_KINDS, RECORD_KINDS, load_record
from shapewright.pricing.calibration.transfer import without_bridge

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, kw_only=True)
class Donor:
    """Calibration donor of one kind of operation."""

    device: str = described("device whose calibration record is used")
    distance: str = described("how far it is from this device")
    words: str = described("that distance as text")
    lent_as: str = described("rule by which it was selected")


@dataclass(frozen=True, kw_only=True)
class DeviceOutput(Output):
    """One device: the fields of its file, and its calibration."""

    fields: Mapping[str, Any] = described(
        "fields of a device file, which `shapewright devices template` describes, with `provenance` and `sources`",
        is_flat=True,
    )
    measured: str = described("kinds of operation with a calibration record of their own")
    borrowed: dict[str, Donor] = described("calibration donor by kind of operation without one")
    pcie_collectives: str | None = optional("calibration donor of collectives of more devices than the link connects")
    device: Device = text_only()


@dataclass(frozen=True, kw_only=True)
class DevicesOutput(Output):
    """All devices."""

    devices: list[DeviceOutput] = described("the devices; `devices show NAME` prints the keys of one of them")


def device_output(device: Device) -> DeviceOutput:
    """Output of one device."""
    numbers = {name: value for name, value in plain(device).items() if name not in PRICING_FIELDS}
    measured, borrowed = describe_calibration(device), borrowed_records(device)
    is_bridged = borrowed and device.link_group_size
    unbridged = without_bridge(device, load_record("collectives", device)) if is_bridged else None
    return DeviceOutput(
        fields=numbers,
        measured=measured,
        borrowed=borrowed,
        pcie_collectives=unbridged and unbridged[1].device,
        device=device,
    )


def describe_calibration(device: Device) -> str:
    """Kinds of operation with a calibration record of the device's own, as text."""
    if device.roofline_only or device.num_sms is None:
        return "roofline only"
    measured = [kind for kind in (*RECORD_KINDS, *FORMAT_RECORD_KINDS) if _is_measured(kind, device)]
    return ", ".join(measured) or "none"


def _is_measured(kind: str, device: Device) -> bool:
    try:
        return load_record(kind, device).transfer == "exact"
    except CalibrationError:
        return False


def borrowed_records(device: Device) -> dict[str, Donor]:
    """Calibration donor by kind of operation without a record of the device's own."""
    if device.roofline_only or device.num_sms is None:
        return {}
    found = {}
    for kind in RECORD_KINDS:
        try:
            record = load_record(kind, device)
        except CalibrationError:
            continue
        if record.transfer != "exact":
            found[kind] = take(Donor, record, words=record.distance_words, lent_as=record.donor_reason)
    return found


def devices_output() -> DevicesOutput:
    """Output of all devices."""
    return DevicesOutput(devices=[device_output(load_device(name)) for name in list_devices()])


@dataclass(frozen=True, kw_only=True)
class PresetOutput:
    """One model preset."""

    name: str = described("name of the preset")
    title: str = described("name in reports")
    source: str = described("where the preset was taken from")
    parameters: int
    config: TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ModelsOutput(Output):
    """Model presets."""

    models: list[PresetOutput] = described("the presets")


def models_output(names: Iterable[str]) -> ModelsOutput:
    """Output of the named presets."""
    configs = {name: read_model(name).config for name in names}
    return ModelsOutput(
        models=[
            take(PresetOutput, load_preset(name), name=name, parameters=count_parameters(config).total, config=config)
            for name, config in configs.items()
        ]
    )


@dataclass(frozen=True, kw_only=True)
class RuleOutput:
    """One rule."""

    code: str = described("code of the rule")
    name: str = described("name of the rule")
    family: str = described("family, the first letters of the code")
    since: str = described("version that introduced it")
    reads: list[str] = described("fields that it reads")
    summary: str = described("what it finds")
    page: str | None = optional("its page as Markdown; with CODE only")


@dataclass(frozen=True, kw_only=True)
class RulesOutput(Output):
    """Rules of `check`."""

    rules: list[RuleOutput] = described("the rules")


def rules_output(code: str | None = None) -> RulesOutput:
    """Output of one rule with its page, or of all rules."""
    if code is None:
        return RulesOutput(rules=[take(RuleOutput, rule, page=None) for rule in list_rules()])
    rule = get_rule(code)
    return RulesOutput(rules=[take(RuleOutput, rule, page=rule_page(rule.code))])
