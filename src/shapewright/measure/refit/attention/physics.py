"""Fit the attention records from measured prefill and decode tables.

The data folder holds attention_prefill.parquet and attention_decode.parquet. One fifth of the head layouts (num_heads,
num_kv_heads, head_dim) is held out of every fit and choice, and its errors stand in the record. Intervals come from
cross-validation among the other layouts. About four minutes on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from shapewright.hardware import Device, load_device
from shapewright.measure.refit.attention.kernel_fit import (
    CACHE_COPY_CONSTANTS,
    ENOUGH_LAYOUTS,
    Source,
    calibrate_family,
)
from shapewright.measure.refit.attention.rows import OTHER_SECTIONS, PHASES, SECTIONS, read_rows
from shapewright.measure.refit.record_files import DEVICES, SAME_CHIP, SOURCE, command, write_record
from shapewright.pricing.attention.sections import SMALL_GROUPS, WIDEST_FLASH_HEAD, kernel_family


class Library:
    """Sections of one library; each table is fitted once, and an unmeasured phase takes the one of another format."""

    def __init__(self, data: Path, device: Device, alias: str) -> None:
        self.data, self.device, self.alias = data, device, alias
        self.done: dict[tuple[str, Source], dict[str, Any]] = {}

    def phase(self, phase: str, source: Source) -> dict[str, Any]:
        """Return the kernels of one phase by name; decode computes in 16 bits whatever the arithmetic of prefill."""
        key = (phase, source if phase == "prefill" else (source[0], "bf16", source[2]))
        if key not in self.done:
            rows = read_rows(self.data, phase, self.alias, key[1])
            flat, wide = rows[rows.head_dim <= WIDEST_FLASH_HEAD], rows[rows.head_dim > WIDEST_FLASH_HEAD]
            found = self.fit_families(phase, key[1], flat, {})
            known: dict[str, float] = {}
            if (
                phase == "prefill"
                and found
                and len(wide[["num_heads", "num_kv_heads"]].drop_duplicates()) < ENOUGH_LAYOUTS
            ):
                usual = found[max(found, key=lambda name: found[name]["report"]["fit"]["rows"])]["parameters"]
                known = {name: usual[name] for name in CACHE_COPY_CONSTANTS}
            found |= self.fit_families(phase, key[1], wide, known)
            self.done[key] = found
        return self.done[key]

    def fit_families(self, phase: str, source: Source, rows: pd.DataFrame, known: dict[str, float]) -> dict[str, Any]:
        """Fit the kernels of the families in these rows, and return them by name."""
        found: dict[str, Any] = {}
        for family, ours in rows.groupby("family"):
            fits = calibrate_family(self.device, source, phase, ours.reset_index(drop=True), known)
            found |= {f"{family}_{width}": fit for width, fit in fits.items()}
        return found

    def section(self, source: Source) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
        """Return content, intervals and reports of a section; None if neither phase was measured."""
        library, _, kv_dtype = source
        own = {phase: self.phase(phase, source) for phase in PHASES}
        if not own["decode"]:
            return None
        fallback = {
            "prefill": self.phase("prefill", (library, "bf16", "bfloat16")),
            "decode": self.phase("decode", (library, "bf16", kv_dtype)),
        }
        for _, family in SMALL_GROUPS:  # one kernel in prefill, whatever the group
            for table in (own, fallback):
                usual_family = {
                    name.replace("flashinfer", family): fit
                    for name, fit in table["prefill"].items()
                    if name.startswith("flashinfer_") and name.replace("flashinfer", family) in table["decode"]
                }
                table["prefill"] = table["prefill"] | usual_family
        names = sorted({*own["prefill"], *own["decode"]})
        names = [name for name in names if all(name in own[phase] or name in fallback[phase] for phase in PHASES)]
        kernels: dict[str, Any] = {name: {} for name in names}
        intervals, reports = {}, {}
        for name, phase in product(names, PHASES):
            is_measured = name in own[phase]
            fit = own[phase][name] if is_measured else fallback[phase][name]
            kernels[name][phase] = fit["parameters"]
            intervals[f"{name}/{phase}"] = fit["interval"]
            reports[f"{name}/{phase}"] = fit["report"] if is_measured else {"borrowed": "16-bit cache and arithmetic"}
        rows = read_rows(self.data, "decode", self.alias, (library, "bf16", kv_dtype))
        rows = rows.assign(name=rows.kernel.map(kernel_family) + "_" + rows.head_dim.astype(str))
        rows = rows[rows.name.isin(names)]
        usual = {int(width): str(part.name.mode().iloc[0]) for width, part in rows.groupby("head_dim")}
        flat = rows[rows.head_dim <= WIDEST_FLASH_HEAD]
        content = {
            "kernels": kernels,
            "kernel_of_head_dim": usual,
            "usual_kernel": usual[int(flat.head_dim.mode().iloc[0])],
        }
        return content, intervals, reports


def calibrate(name: str, data: Path) -> dict[str, Any]:
    """Return the record of one device."""
    device = load_device(name)
    fits = Library(data, device, DEVICES[name])
    version = str(read_rows(data, "decode", DEVICES[name], OTHER_SECTIONS["16bit"]).library.unique()[0])
    sections: dict[str, Any] = {}
    libraries: dict[str, Any] = {version: {}}
    intervals: dict[str, Any] = {}
    reports: dict[str, Any] = {}
    for prefix, into, sources in (("", sections, SECTIONS), (f"{version}/", libraries[version], OTHER_SECTIONS)):
        for section, source in sources.items():
            found = fits.section(source)
            if found is None:
                continue
            into[section] = found[0]
            for table, entries in ((intervals, found[1]), (reports, found[2])):
                table.update({f"{prefix}{section}/{path}": entry for path, entry in entries.items()})
    return {
        "devices": [name, *SAME_CHIP.get(name, ())],
        "architecture": device.architecture,
        "parameters": {"sections": sections, "libraries": libraries},
        "interval": intervals,
        "provenance": {
            "source": SOURCE,
            "files": ["attention_prefill.parquet", "attention_decode.parquet"],
            "rows": "per section the libraries named in the reports; one query token counts as decode",
            "split": "one fifth of the head layouts (num_heads, num_kv_heads, head_dim) held out whole, by crc32",
            "command": command("attention"),
            "assumptions": {
                "backward_rate_fraction": "no public table; arXiv 2307.08691 section 4.1",
                "kernel_head_dims": "flash-attn's compiled head widths; only 64, 128, 192, 256, 512 are measured",
                "cache_write_start_s": "smallest kernel of the GEMM table",
                "head widths not measured": "interpolated in the logarithm, held constant beyond the ends",
            },
            "reports": reports,
        },
    }


def refit(data: Path, devices: Sequence[str] = ()) -> None:
    """Fit every attention record, or those of some devices."""
    for name in devices or DEVICES:
        print(write_record("attention", name, calibrate(name, data)))
