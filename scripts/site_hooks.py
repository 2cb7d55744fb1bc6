"""Hooks of the documentation site: a page for each rule and device, and links that leave docs/.

MkDocs calls these while it builds; what they add exists on the site alone, made from rule and device files.
"""

from __future__ import annotations

import re
from typing import Any

from markdown_parts import markdown_table
from mkdocs.structure.files import File

from shapewright.app.report.catalogue import device_number_columns
from shapewright.app.report.outputs.catalogue import describe_calibration
from shapewright.hardware.loader import list_devices, load_device
from shapewright.lint.rule import list_rules, rule_page

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:src|tests|scripts|benchmarks)/[^)]*\)")
_RULE_FILE = re.compile(r"\[([A-Z]{2}\d+)\]\(\.\./src/shapewright/lint/rules/\w+\.py\)")
_DEVICE_FILE = re.compile(r"\]\(\.\./src/shapewright/hardware/data/([\w.-]+)\.toml\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of rules and devices."""
    pages = {f"rules/{rule.code}.md": rule_page(rule.code) for rule in list_rules()}
    pages |= {f"devices/{name}.md": device_page(name) for name in list_devices()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to rule and device files to their pages; show other files outside docs/ as the paths they are."""
    markdown = _RULE_FILE.sub(r"[\1](rules/\1.md)", markdown)
    markdown = _DEVICE_FILE.sub(r"](devices/\1.md)", markdown)
    return _OUTSIDE.sub(lambda found: f"`{found[1].strip('`')}`", markdown)


def device_page(name: str) -> str:
    """A device: every number with its source."""
    device = load_device(name)
    columns = device_number_columns(device)
    rows = [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)]
    notes = f"\n{device.notes}\n" if device.notes else ""
    also = f"\nAlso known as {', '.join(f'`{alias}`' for alias in device.aliases)}.\n" if device.aliases else ""
    return (
        f"# {device.title}\n\n`--device {name}`: {device.vendor} {device.architecture}, numbers per {device.scope}; "
        f"measured here: {describe_calibration(device)}.\n{also}{notes}\n"
        f"{markdown_table([column.name for column in columns], rows)}\n"
    )
