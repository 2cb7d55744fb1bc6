"""Answers that list models, devices, rules and fields; cached, since they do not change."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from shapewright import __version__
from shapewright.app.explorer.views.outputs import AboutOutput, PresetPage, RulePages
from shapewright.app.figures.sweep_values import SWEPT_FIELDS
from shapewright.app.report.outputs.catalogue import devices_output, models_output
from shapewright.core.errors import UnknownModelError, close_names
from shapewright.core.fields import documented_fields
from shapewright.core.units import format_count
from shapewright.lint.rule import list_rules, rule_page
from shapewright.models.read import list_presets, load_preset
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.search.request import DEFAULT_VARIED, VARIED
from shapewright.pricing.software import load_software, software_names
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.optimizers import OPTIMIZERS
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.app.explorer.device_lookup import DeviceLookup

Answer = dict[str, Any]

# Keys of a device in the list.
_LISTED = ("name", "title", "vendor", "measured")


def answer_about(lookup: DeviceLookup) -> Answer:
    """Version, and everything that the page's forms offer."""
    calibrated = lookup.to_json()
    return {**_about(), "devices": _listed_devices(calibrated), "calibration": calibrated}


def _listed_devices(calibrated: dict[str, str] | None) -> list[Answer]:
    """Listed devices; the calibrated one replaces its entry, or is appended if it has no device file."""
    listed = [{key: one[key] for key in _LISTED} for one in _devices()["devices"]]
    if calibrated is None:
        return listed
    short = {key: calibrated[key] for key in _LISTED}
    found = [short if one["name"] == calibrated["name"] else one for one in listed]
    return found if short in found else [*found, short]


@cache
def _about() -> Answer:
    found = AboutOutput(
        name="shapewright",
        version=__version__,
        fields={
            "model": _fields(TransformerConfig),
            "workload": _fields(Workload),
            "layout": _fields(ParallelLayout),
        },
        optimizers=list(OPTIMIZERS),
        vary=list(VARIED),
        vary_default=list(DEFAULT_VARIED),
        swept=list(SWEPT_FIELDS),
        software=[{"name": name, "title": load_software(name).title} for name in software_names()],
        models=[
            {"name": one["name"], "title": one["title"], "family": one["family"], "text": one["text"]}
            for one in answer_models()["models"]
        ],
        rules=[{"code": rule.code, "name": rule.name, "summary": rule.summary} for rule in list_rules()],
    )
    return found.to_json()


def _fields(cls: type) -> list[Answer]:
    return [
        {
            "name": spec.name,
            "type": str(spec.type).removesuffix(" | None"),
            "symbol": note.symbol,
            "help": note.help,
            "choices": list(note.choices),
            "has_no_value": spec.default is None,
        }
        for spec, note in documented_fields(cls)
    ]


@cache
def answer_models() -> Answer:
    """JSON output of ``models``, with the formatted size of each."""
    answer = models_output(list_presets()).to_json()
    for entry in answer["models"]:
        entry["text"] = format_count(entry["parameters"])
        entry["family"] = load_preset(entry["name"]).family
    return answer


def answer_model(name: str) -> Answer:
    """A preset with its config.json object.

    Raises:
        UnknownModelError: no preset of that name.
    """
    if name not in list_presets():
        hint = close_names(name, list_presets()) or "GET /api/v1/models lists all"
        raise UnknownModelError(f"no preset {ascii(name)[:100]}; {hint}")
    preset = load_preset(name)
    found = PresetPage(
        name=preset.name, title=preset.title, source=preset.source, notes=preset.notes, config=preset.config
    )
    return found.to_json()


def answer_devices(lookup: DeviceLookup) -> Answer:
    """JSON output of ``devices``, and the device of the calibration file."""
    return {**_devices(), "calibration": lookup.to_json()}


@cache
def _devices() -> Answer:
    return devices_output().to_json()


@cache
def answer_rules() -> Answer:
    """All rules with their pages."""
    pages = [
        {"code": rule.code, "name": rule.name, "summary": rule.summary, "page": rule_page(rule.code)}
        for rule in list_rules()
    ]
    return RulePages(rules=pages).to_json()
