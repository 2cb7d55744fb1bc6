"""Readers of text logs: EleutherAI/cookbook's sizing benchmarks and mamf-finder of stas00/ml-engineering.

The cookbook multiplies (m, n) by (n, k): its n is the contracted dimension. The readers rename its letters to
C[m,n] = A[m,k] B[k,n]. mamf-finder uses BLAS letters and multiplies by a transposed B.

Source: benchmarks/sizing of EleutherAI/cookbook @27dff48 (what its scripts print, and its sample results);
compute/accelerator/benchmarks/mamf-finder.py of stas00/ml-engineering @0359db8 and the two versions before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from shapewright.core.records import dataclass
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.store.imports.measured import Measurement, Overrides, detected_device, measurement_of_rate

_RATE = r"(?P<rate>[0-9.]+)"
# "Throughput (in TFLOP/s) for 1024x1280x1024: 68.985"
_PLAIN = re.compile(rf"^Throughput \(in TFLOP/s\) for (?P<sizes>\d+x\d+x\d+): {_RATE}")
# "Throughput (in TFLOP/s) for mlp_h_to_4h (4x4096x16384, b=2048): 241.128"
_WITH_ROWS = re.compile(
    rf"^Throughput \(in TFLOP/s\) for (?P<label>\S+) \((?P<sizes>\d+x\d+x\d+), b=(?P<b>\d+)\): {_RATE}"
)
# "Throughput (in TFLOP/s) for bmm (128x1024x2048x1024): 243.258"
_BATCHED = re.compile(rf"^Throughput \(in TFLOP/s\) for (?P<label>\S+) \((?P<sizes>\d+x\d+x\d+x\d+)\): {_RATE}")
# "  18 |  756.1(mean)  758.2(median)  762.3(max) @ 256x4096x4096   | best: ..."
_MAMF_LINE = re.compile(
    rf"^\s*\d+ \|\s*[0-9.]+\(mean\)\s+{_RATE}\(median\)\s+[0-9.]+\(max\) @ (?P<sizes>\d+x\d+x\d+)\b"
)
# The first version: "   1 |  614.5 TFLOPS @ 1024x1024x1024 | best: ...", a mean.
_MAMF_FIRST = re.compile(rf"^\s*\d+ \|\s*{_RATE} TFLOPS @ (?P<sizes>\d+x\d+x\d+)\b")
# The third and later: "    18  3072x2816x20480     828.4  828.6  831.6  828.4   506  1980", mean, median, largest.
_MAMF_TABLE = re.compile(rf"^\s*\d+\s+(?P<sizes>\d+x\d+x\d+)\s+[0-9.]+\s+{_RATE}\s+[0-9.]+\s")
# "median: 22.3 TFLOPS @ 3072x3072x1024 (MxNxK)"; where only the summary was kept, the mean and the median.
_MAMF_BEST = re.compile(rf"^(?P<which>mean|median):\s*{_RATE} TFLOPS @ (?P<sizes>\d+x\d+x\d+) \(MxNxK\)")
# Device properties as torch prints them, in the headers of both.
_PROPERTIES = re.compile(
    r"DeviceProperties\(name='(?P<name>[^']+)'.*?total_memory=(?P<mb>\d+)MB.*?multi_processor_count=(?P<sms>\d+)"
)
_TORCH = re.compile(r"^-?\s*torch=(?P<version>\S+)", re.MULTILINE)
_DTYPE = re.compile(r"^\*\* Dtype: (?P<dtype>\S+)", re.MULTILINE)
# Substrings of lines that match a pattern above, except _MAMF_TABLE: other lines of a log, possibly gigabytes, are
# skipped.
_MARKERS = ("TFLOP", "(median)", "(MxNxK)", "DeviceProperties(", "torch=", "** Dtype: ")
_MIB = 2.0**20
# The cookbook does not print its format; its source calls .half().
COOKBOOK_DTYPE = "fp16"


@dataclass(frozen=True)
class LogHeader:
    """Header of a log; fields that the log lacks are empty.

    Attributes:
        device: Canonical name, or the name that torch reports.
        library: torch and its version.
        dtype: Element format.
    """

    device: str
    library: str
    dtype: str


def filter_log(lines: Iterable[str]) -> str:
    """Keep the lines of a log that a reader below may use, as one text."""
    return "".join(line for line in lines if any(marker in line for marker in _MARKERS) or _MAMF_TABLE.match(line))


def read_header(text: str) -> LogHeader:
    """Read device, torch version and element format from a log."""
    found = _PROPERTIES.search(text)
    device = detected_device(found["name"], int(found["sms"]), float(found["mb"]) * _MIB) if found else ""
    torch_version, dtype = _TORCH.search(text), _DTYPE.search(text)
    return LogHeader(
        device, f"torch {torch_version['version']}" if torch_version else "", dtype["dtype"] if dtype else ""
    )


def is_cookbook(text: str) -> bool:
    """Whether a text is a log of EleutherAI/cookbook."""
    return "Throughput (in TFLOP/s) for " in text


def is_mamf(text: str) -> bool:
    """Whether a text is the output of mamf-finder."""
    return "(MxNxK)" in text or any(_mamf_line(line) for line in text.splitlines())


def read_cookbook(text: str, overrides: Overrides) -> Iterator[Measurement]:
    """Read the GEMMs of a cookbook log; bmm_flops.py and transformer_flops.py print their slowest iteration.

    ``4x4096x12288, b=2048`` is one GEMM of 4 x 2048 rows, since all sequences share the weight.
    """
    for line in text.splitlines():
        for pattern in (_PLAIN, _WITH_ROWS, _BATCHED):
            found = pattern.match(line.strip())
            if found is None:
                continue
            groups = found.groupdict()
            *batch, m, contracted, columns = (int(size) for size in groups["sizes"].split("x"))
            rows = m * int(groups.get("b") or 1)
            # torch.nn.functional.linear stores W[out, in]; operands of torch.mm and torch.bmm are not transposed.
            layout = "NT" if pattern is _WITH_ROWS else "NN"
            operation = Gemm(
                name=groups.get("label") or "mm",
                dtype=overrides.dtype or COOKBOOK_DTYPE,
                m=rows,
                n=columns,
                k=contracted,
                batch=batch[0] if batch else 1,
                layout=layout,
            )
            yield _from_rate(operation, groups["rate"], overrides, "cookbook")


def read_mamf(text: str, overrides: Overrides) -> Iterator[Measurement]:
    """Read the GEMMs that mamf-finder measured; from a log with the summary only, the fastest ones."""
    found_any = False
    seen: set[tuple[str, str]] = set()
    for line in text.replace("\r", "\n").splitlines():
        found = _mamf_line(line)
        if found is not None and (found["sizes"], found["rate"]) not in seen:
            seen.add((found["sizes"], found["rate"]))
            found_any = True
            yield _mamf(found, overrides)
    if not found_any:
        for line in text.splitlines():
            best = _MAMF_BEST.match(line.strip())
            if best is not None and (best["sizes"], best["rate"]) not in seen:
                seen.add((best["sizes"], best["rate"]))
                yield _mamf(best, overrides)


def _mamf_line(line: str) -> re.Match[str] | None:
    return _MAMF_LINE.match(line) or _MAMF_FIRST.match(line) or _MAMF_TABLE.match(line)


def _mamf(found: re.Match[str], overrides: Overrides) -> Measurement:
    m, n, k = (int(size) for size in found["sizes"].split("x"))
    operation = Gemm(name="mamf", dtype=overrides.dtype or "bf16", m=m, n=n, k=k, layout="NT")
    return _from_rate(operation, found["rate"], overrides, "mamf")


def _from_rate(operation: Gemm, rate: str, overrides: Overrides, suite: str) -> Measurement:
    return measurement_of_rate(
        operation, float(rate), device=overrides.device, library=overrides.library, suite=suite, method="eager"
    )
