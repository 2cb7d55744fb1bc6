"""List the expert shapes for which serving libraries ship tuned tiles, in tuned_experts.json.

    pip download --no-deps sglang==0.5.14 ... and the source archive of vllm==0.24.0, into one folder

Both libraries (Apache-2.0) keep one file per number of experts, inner width and tuned device, and run default tiles
otherwise. Only the names of these files are read: a name states a tuned shape.
"""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from shapewright.measure.refit.record_files import RECORDS

# Names of devices in libraries, after "NVIDIA_", and canonical names.
DEVICES = {
    "A100-SXM4-40GB": ("a100-sxm-40gb",),
    "A100-SXM4-80GB": ("a100-sxm-80gb",),
    "A800-SXM4-80GB": ("a800-sxm-80gb",),
    "B200": ("b200-sxm-180gb",),
    "B300_SXM6_AC": ("b300-sxm-288gb",),
    "GB200": ("gb200",),
    "H100_80GB_HBM3": ("h100-sxm-80gb",),
    "H100_PCIe": ("h100-pcie-80gb",),
    "H20": ("h20-96gb",),
    "H20-3e": ("h20-141gb",),
    "H200": ("h200-sxm-141gb",),
    "H800": ("h800-sxm-80gb",),
    "L20": ("l20",),
    "L40": ("l40",),
    "L40S": ("l40s",),
    "GeForce_RTX_4090": ("rtx-4090",),
    "RTX_6000_Ada_Generation": ("rtx-6000-ada",),
}
# Names of element formats; without one the GEMM is in 16 bits. Block scales are a kernel of their own.
FORMATS = {None: "bf16", "fp8_w8a8": "fp8"}
NAME = re.compile(r".*/configs/.*E=(\d+),N=(\d+),device_name=NVIDIA_([^,]+?)(?:,dtype=(\w+))?\.json")


def file_names(archive: Path) -> list[str]:
    """Return the names of the files in a wheel or a source archive."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as opened:
        return opened.getnames()


def tuned_shapes(names: Iterable[str]) -> dict[str, dict[str, list[list[int]]]]:
    """Return experts and inner width of every tuned file, by element format and device."""
    found: dict[str, dict[str, set[tuple[int, int]]]] = {}
    for name in names:
        match = NAME.fullmatch(name)
        if match and match[4] in FORMATS:
            for device in DEVICES.get(match[3], ()):
                own = found.setdefault(FORMATS[match[4]], {}).setdefault(device, set())
                own.add((int(match[1]), int(match[2])))
    return {
        dtype: {device: [list(shape) for shape in sorted(shapes)] for device, shapes in sorted(devices.items())}
        for dtype, devices in sorted(found.items())
    }


def refit(data: Path) -> None:
    """List the tuned shapes of all packages in a folder."""
    folder = data
    libraries = {}
    for archive in sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")]):
        name, version = archive.name.removesuffix(".tar.gz").split("-")[:2]
        libraries[f"{name} {version}"] = tuned_shapes(file_names(archive))
        print(f"{name} {version}: {sum(len(own) for each in libraries[f'{name} {version}'].values() for own in each)}")
    text = json.dumps({"source": "names of the tuned files in each package (Apache-2.0)", "libraries": libraries})
    # One device per line.
    text = re.sub(r' ?("[a-z0-9-]+": \[\[)', r"\n   \1", text).replace(', "', ',\n "')
    (RECORDS / "tuned_experts.json").write_text(text + "\n", encoding="utf-8")
