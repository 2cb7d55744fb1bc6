"""What there is to choose from: models, devices, rules, fields and words; made once, for none of it changes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from shapewright import __version__
from shapewright.config import TransformerConfig, list_presets, load_preset
from shapewright.errors import UnknownModelError, close_names
from shapewright.fields import noted_fields
from shapewright.figures.sweep import SWEPT_FIELDS
from shapewright.layout import ParallelLayout
from shapewright.lint import list_rules, rule_page
from shapewright.memory import OPTIMIZERS
from shapewright.perf.software import load_software, software_names
from shapewright.report.devices import devices_to_json
from shapewright.report.models import models_to_json
from shapewright.report.prediction_json import SCHEMA_VERSION
from shapewright.search.request import DEFAULT_VARIED, VARIED
from shapewright.units import format_count
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.explorer.known_devices import KnownDevices

Answer = dict[str, Any]

# What a list of devices says of each.
_SHORT = ("name", "title", "vendor", "measured")


def answer_about(known: KnownDevices) -> Answer:
    """The program and what its forms consist of."""
    own = known.to_json()
    return {**_about(), "devices": _listed_devices(own), "calibration": own}


def _listed_devices(own: dict[str, str] | None) -> list[Answer]:
    """Devices in short; the one with records of its own in its place, or at the end where no file describes it."""
    listed = [{key: one[key] for key in _SHORT} for one in _devices()["devices"]]
    if own is None:
        return listed
    short = {key: own[key] for key in _SHORT}
    found = [short if one["name"] == own["name"] else one for one in listed]
    return found if short in found else [*found, short]


@cache
def _about() -> Answer:
    return {
        "schema_version": SCHEMA_VERSION,
        "name": "shapewright",
        "version": __version__,
        "fields": {
            "model": _fields(TransformerConfig),
            "workload": _fields(Workload),
            "layout": _fields(ParallelLayout),
        },
        "optimizers": list(OPTIMIZERS),
        "vary": list(VARIED),
        "vary_default": list(DEFAULT_VARIED),
        "swept": list(SWEPT_FIELDS),
        "software": [{"name": name, "title": load_software(name).title} for name in software_names()],
        "models": [
            {"name": one["name"], "title": one["title"], "family": one["family"], "text": one["text"]}
            for one in answer_models()["models"]
        ],
        "rules": [{"code": rule.code, "name": rule.name, "summary": rule.summary} for rule in list_rules()],
    }


def _fields(cls: type) -> list[Answer]:
    return [
        {
            "name": spec.name,
            "type": str(spec.type).removesuffix(" | None"),
            "symbol": note.symbol,
            "help": note.help,
            "choices": list(note.choices),
        }
        for spec, note in noted_fields(cls)
    ]


@cache
def answer_models() -> Answer:
    """What ``models --json`` prints, with the size of each in words."""
    answer = models_to_json(None)
    for entry in answer["models"]:
        entry["text"] = format_count(entry["parameters"])
        entry["family"] = load_preset(entry["name"]).family
    return answer


def answer_model(name: str) -> Answer:
    """One preset with its config.json object.

    Raises:
        UnknownModelError: there is no such preset.
    """
    if name not in list_presets():
        hint = close_names(name, list_presets()) or "GET /api/v1/models lists all"
        raise UnknownModelError(f"no preset {ascii(name)[:100]}; {hint}")
    preset = load_preset(name)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": preset.name,
        "title": preset.title,
        "source": preset.source,
        "notes": preset.notes,
        "config": preset.config,
    }


def answer_devices(known: KnownDevices) -> Answer:
    """What ``devices --json`` prints, and the device that has records of its own."""
    return {**_devices(), "calibration": known.to_json()}


@cache
def _devices() -> Answer:
    return devices_to_json()


@cache
def answer_rules() -> Answer:
    """Every rule with its page."""
    return {
        "schema_version": SCHEMA_VERSION,
        "rules": [
            {"code": rule.code, "name": rule.name, "summary": rule.summary, "page": rule_page(rule.code)}
            for rule in list_rules()
        ],
    }
