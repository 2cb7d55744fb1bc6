"""Chart of an operation sweep: predicted and measured throughput against one dimension, with ends of waves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.app.figures.chart import Band, Line, Mark, Points, XYChart
from shapewright.app.figures.measured import PricedSample, Sample, price_samples
from shapewright.core.records import dataclass
from shapewright.core.units import GIGA, MEGA, TERA
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.pricing.pointwise import GATED_READ_RATIO
from shapewright.pricing.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.hardware.device import Device

# Least number of sizes of a sweep.
MIN_SIZES = 4
# Marked ends of waves: the largest relative drops of the rate, each at least 3 %.
_MAX_WAVE_MARKS, _MIN_DROP = 8, 0.03
# Longer predicted curves have no points for alignment classes.
_MAX_CLASS_POINTS = 80
# Swept dimensions by kind of operation, in order of preference.
_DIMENSIONS = {
    "gemm": ("n", "k", "m", "batch"),
    "attention": ("head_dim", "kv_len", "query_len", "num_heads", "batch_size"),
    "pointwise": ("num_bytes",),
}
# Hidden sizes are rounded to this: num_heads * head_dim is not always exact. [element]
_HIDDEN_SIZE_STEP = 256
# Axis labels of dimensions.
_LABELS = {
    "head_dim": "head_dim (elements)",
    "kv_len": "keys (tokens)",
    "query_len": "queries (tokens)",
    "num_heads": "heads",
    "batch_size": "sequences",
    "num_bytes": "bytes moved (MB)",
}
_ATTENTION_LETTERS = {
    "batch_size": "b", "query_len": "s", "num_heads": "a", "num_kv_heads": "a_kv", "head_dim": "d",
}  # fmt: skip


@dataclass(frozen=True)
class OperationSweep:
    """Samples that differ in one dimension only.

    Attributes:
        kind: Kind of the operations.
        name: Name of the samples in their suite.
        dimension: The varied dimension.
        fixed: Common values of the other dimensions, by name.
        samples: Samples by ascending dimension.
    """

    kind: str
    name: str
    dimension: str
    fixed: Mapping[str, Any]
    samples: tuple[Sample, ...]


def find_operation_sweeps(samples: Iterable[Sample]) -> list[OperationSweep]:
    """Group samples into sweeps, longest first; samples of no sweep are dropped.

    Each sample belongs to the longest sweep that it fits; samples with different names are never grouped.
    """
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        kind = sample.operation.kind
        for dimension in _DIMENSIONS.get(kind, ()):
            fixed = _fixed(sample, dimension)
            groups.setdefault((kind, sample.name, dimension, tuple(sorted(fixed.items()))), []).append(sample)
    ranked = sorted(groups.items(), key=lambda item: (-_num_sizes(item[1], item[0][2]), _rank(item[0])))
    found, taken = [], set[int]()
    for (kind, name, dimension, fixed), members in ranked:
        free = [sample for sample in members if id(sample) not in taken]
        if _num_sizes(free, dimension) < MIN_SIZES:
            continue
        # A sample at the intersection of two sweeps is shown in both.
        ordered = tuple(sorted(members, key=lambda sample: size_of(sample, dimension)))
        found.append(OperationSweep(kind, name, dimension, dict(fixed), ordered))
        taken.update(id(sample) for sample in members)
    return found


def size_of(sample: Sample, dimension: str) -> float:
    """Value of a dimension of the operation of a sample."""
    return float(getattr(sample.operation, dimension))


def operation_sweep_chart(
    sweep: OperationSweep,
    device: Device,
    *,
    measured_name: str = "measured",
    measured_scale: float = 1.0,
    measured_extra_s: float = 0.0,
) -> XYChart:
    """Draw one sweep.

    Args:
        measured_scale: Factor on predicted times to match the measuring setup, such as an older library.
        measured_extra_s: Overhead per call of the measuring setup, added to predicted times. [s]
    """
    priced = price_samples(sweep.samples, device)
    is_rate = sweep.kind != "pointwise"

    def amount(entry: PricedSample) -> float:
        return _work(entry.operation) / (TERA if is_rate else GIGA)

    def time_s(value: Any) -> float:
        return float(value) * measured_scale + measured_extra_s

    x = [_axis_value(entry.sample, sweep.dimension) for entry in priced]
    predicted = [amount(entry) / time_s(entry.price.time_s) for entry in priced]
    low = [amount(entry) / time_s(entry.price.high_s) for entry in priced]
    high = [amount(entry) / time_s(entry.price.low_s) for entry in priced]
    roof = [amount(entry) / float(entry.price.roofline_s) for entry in priced]
    series: list[Line | Points | Band] = [
        Band("90 % interval", x, low, high, color="#0072b2"),
        Line("predicted", x, predicted, color="#0072b2"),
    ]
    if is_rate:
        series.append(Line("roofline", x, roof, dashed=True, color="#7f7f7f"))
    series += _points(priced, x, amount, measured_name)
    unit = "TFLOP/s" if is_rate else "GB/s"
    count = sum(entry.sample.measured_s is not None for entry in priced)
    return XYChart(
        title=f"{sweep_title(sweep)}, {device.title}",
        x_label=_LABELS.get(sweep.dimension, sweep.dimension),
        y_label=unit,
        series=series,
        alt=(
            f"{unit} against {sweep.dimension} of {sweep_title(sweep)} on {device.title}: predicted from "
            f"{min(predicted, default=0.0):.3g} to {max(predicted, default=0.0):.3g}"
            + (f", with {count} measured points" if count else ", no measurements")
        ),
        marks=_wave_marks(priced, x, predicted),
        x_log=sweep.kind == "pointwise",
        y_from_zero=True,
    )


def sweep_title(sweep: OperationSweep) -> str:
    """Title of a sweep: operation, sizes and dtype."""
    fixed = sweep.fixed
    if sweep.kind == "gemm":
        shape = " x ".join(letter if letter == sweep.dimension else str(fixed[letter]) for letter in ("m", "n", "k"))
        batch = "" if fixed.get("batch") == 1 else f"{fixed.get('batch', 'batch')} x "
        return f"GEMM {batch}{shape}, {fixed['dtype']} {fixed['layout']}"
    if sweep.kind == "attention":
        direction = " backward" if fixed["is_backward"] else ""
        words = " ".join(f"{letter}={fixed[name]}" for name, letter in _ATTENTION_LETTERS.items() if name in fixed)
        kernel = f" {fixed['variant']}" if fixed.get("variant") else ""
        return f"attention{direction}{kernel} {words}, {fixed['dtype']}"
    return f"{fixed['operation']}, {fixed['dtype']}"


def _work(operation: Any) -> float:
    """FLOPs, or bytes for pointwise operations; for attention only FLOPs that the mask leaves."""
    if isinstance(operation, Attention):
        return float(operation.executed_flops)
    return float(operation.num_bytes if isinstance(operation, Pointwise) else operation.flops)


def _fixed(sample: Sample, dimension: str) -> dict[str, Any]:
    """Values that all samples of a sweep along a dimension share."""
    operation = sample.operation
    if isinstance(operation, Gemm):
        names: Sequence[str] = ("m", "n", "k", "batch", "layout", "dtype")
    elif isinstance(operation, Attention):
        names = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "causal", "is_backward",
                 "window_size", "dtype")  # fmt: skip
    else:
        names = ("operation", "dtype")
    found = {name: getattr(operation, name) for name in names if name != dimension}
    if isinstance(operation, Attention):
        found["variant"] = sample.variant
        if dimension == "head_dim":
            # Head counts follow from the width at a fixed hidden size.
            del found["num_heads"], found["num_kv_heads"]
            found["hidden_size"] = round(int(operation.num_heads) * int(operation.head_dim) / _HIDDEN_SIZE_STEP)
        if dimension in ("kv_len", "query_len"):
            found.pop("kv_len", None)
            found.pop("query_len", None)
            del found["batch_size"]
            found["is_decode"] = int(operation.query_len) == 1
    if isinstance(operation, Pointwise):
        found["gated"] = float(operation.read_bytes) > GATED_READ_RATIO * float(operation.written_bytes)
    return found


def _num_sizes(samples: Iterable[Sample], dimension: str) -> int:
    return len({size_of(sample, dimension) for sample in samples})


def _rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sort key of sweeps of equal length."""
    kind, name, dimension, fixed = key
    return kind, name, _DIMENSIONS[kind].index(dimension), str(fixed)


def _axis_value(sample: Sample, dimension: str) -> float:
    value = size_of(sample, dimension)
    return value / MEGA if dimension == "num_bytes" else value


def _points(priced: Sequence[PricedSample], x: Sequence[float], amount: Any, name: str) -> Iterator[Points]:
    """Measured points, or predicted ones if unmeasured; points of GEMMs are grouped by alignment class."""
    seen = [at for at, entry in enumerate(priced) if entry.sample.measured_s is not None]
    classes: dict[int, list[int]] = {}
    for at in seen or range(len(priced)):
        price = priced[at].price
        classes.setdefault(int(float(price.alignment_bytes)) if isinstance(price, GemmPrice) else 0, []).append(at)
    if not seen and (len(classes) < 2 or len(priced) > _MAX_CLASS_POINTS):
        return
    for align in sorted(classes, reverse=True):
        places = classes[align]
        times = [priced[at].sample.measured_s if seen else float(priced[at].price.time_s) for at in places]
        values = [amount(priced[at]) / float(time_s or 1.0) for at, time_s in zip(places, times, strict=True)]
        series_name = name if seen else "predicted"
        label = f"{series_name}, {align} B aligned" if len(classes) > 1 and align else series_name
        yield Points(label, [x[at] for at in places], values, color=None if len(classes) > 1 else "#d55e00")


def _wave_marks(priced: Sequence[PricedSample], x: Sequence[float], rates: Sequence[float]) -> tuple[Mark, ...]:
    """Marks at the last sizes before the rate of a GEMM drops because its tiles need another wave."""
    drops: list[tuple[float, Mark]] = []
    for at in range(1, len(priced)):
        before, after = priced[at - 1].price, priced[at].price
        if not (isinstance(before, GemmPrice) and isinstance(after, GemmPrice)):
            return ()
        same_class = before.alignment_factor == after.alignment_factor
        drop = 1.0 - rates[at] / rates[at - 1]
        if same_class and drop >= _MIN_DROP and float(before.wave_efficiency) > float(after.wave_efficiency):
            count = int(float(before.num_waves))
            tile = f"{float(before.tile_m):.0f}x{float(before.tile_n):.0f}"
            if float(before.split_k) > 1.0:
                tile += f"/{float(before.split_k):.0f}"
            drops.append((drop, Mark("x", x[at - 1], f"{count} wave{'s' * (count > 1)} of {tile}")))
    deepest = sorted(drops, key=lambda entry: -entry[0])[:_MAX_WAVE_MARKS]
    return tuple(mark for _, mark in sorted(deepest, key=lambda entry: entry[1].value))
