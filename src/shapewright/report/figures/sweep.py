"""Throughput against one dimension: measured points by alignment class, predicted line and band, ends of full waves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shapewright.operations import Attention, Gemm, Pointwise
from shapewright.perf.pointwise import GATED_READ_RATIO
from shapewright.perf.price import GemmPrice
from shapewright.report.charts import Band, Line, Mark, Points, XYChart
from shapewright.report.figures.samples import PricedSample, Sample, price_samples
from shapewright.units import GIGA, MEGA, TERA

if TYPE_CHECKING:
    from shapewright.hardware import Device

# Fewer sizes than these are no sweep.
FEWEST_SIZES = 4
# Ends of waves that are marked: the deepest falls of the rate, each at least this share of it.
_MOST_WAVE_MARKS, _LEAST_DROP = 8, 0.03
# Longer curves without measurements are drawn without points for their alignment.
_MOST_CLASS_POINTS = 80
# Dimensions that a sweep may go along, in the order in which a tie is decided, by kind.
_DIMENSIONS = {
    "gemm": ("n", "k", "m", "batch"),
    "attention": ("head_dim", "kv_len", "query_len", "num_heads", "batch_size"),
    "pointwise": ("num_bytes",),
}
# Hidden sizes nearer than this are one: heads times width does not always give the same. [element]
_SAME_WIDTH = 256
# What a dimension is called on an axis.
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
class Sweep:
    """Samples that differ in one dimension alone.

    Attributes:
        kind: Kind of the operations.
        name: What the suite calls them.
        dimension: The one that varies.
        fixed: What all have in common, by name.
        samples: By rising dimension.
    """

    kind: str
    name: str
    dimension: str
    fixed: Mapping[str, Any]
    samples: tuple[Sample, ...]


def find_sweeps(samples: Iterable[Sample]) -> list[Sweep]:
    """Sort samples into sweeps, the longest first; what belongs to none is left out.

    Each sample goes into the longest sweep that it fits; a name keeps sweeps of different suites apart.
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
        if _num_sizes(free, dimension) < FEWEST_SIZES:
            continue
        # Of a sweep's corner that another one has taken too, this one still shows it.
        ordered = tuple(sorted(members, key=lambda sample: size_of(sample, dimension)))
        found.append(Sweep(kind, name, dimension, dict(fixed), ordered))
        taken.update(id(sample) for sample in members)
    return found


def size_of(sample: Sample, dimension: str) -> float:
    """Value of a dimension of a sample's operation."""
    return float(getattr(sample.operation, dimension))


def sweep_chart(
    sweep: Sweep,
    device: Device,
    *,
    uncalibrated: bool = False,
    measured_name: str = "measured",
    measured_scale: float = 1.0,
    measured_extra_s: float = 0.0,
) -> XYChart:
    """Chart of one sweep.

    Args:
        sweep: What to draw; without measurements the prediction stands alone.
        device: What to predict for.
        uncalibrated: Predict as if nobody had measured the device.
        measured_name: What the points are called.
        measured_scale: Factor on predicted times for how the points were collected, such as an older library.
        measured_extra_s: Fixed cost that the collector adds to every call. [s]
    """
    priced = price_samples(sweep.samples, device, uncalibrated=uncalibrated)
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
        title=f"{title_of(sweep)}, {device.title}",
        x_label=_LABELS.get(sweep.dimension, sweep.dimension),
        y_label=unit,
        series=series,
        alt=(
            f"{unit} against {sweep.dimension} of {title_of(sweep)} on {device.title}: predicted from "
            f"{min(predicted, default=0.0):.3g} to {max(predicted, default=0.0):.3g}"
            + (f", with {count} measured points" if count else ", nothing measured")
        ),
        marks=_wave_marks(priced, x, predicted),
        x_log=sweep.kind == "pointwise",
        y_from_zero=True,
    )


def title_of(sweep: Sweep) -> str:
    """What a sweep is of: its sizes with the one that varies, its format."""
    fixed = sweep.fixed
    if sweep.kind == "gemm":
        shape = " x ".join(letter if letter == sweep.dimension else str(fixed[letter]) for letter in ("m", "n", "k"))
        batch = "" if fixed.get("batch") == 1 else f"{fixed.get('batch', 'batch')} x "
        return f"GEMM {batch}{shape}, {fixed['dtype']} {fixed['layout']}"
    if sweep.kind == "attention":
        way = " backward" if fixed["is_backward"] else ""
        words = " ".join(f"{letter}={fixed[name]}" for name, letter in _ATTENTION_LETTERS.items() if name in fixed)
        kernel = f" {fixed['variant']}" if fixed.get("variant") else ""
        return f"attention{way}{kernel} {words}, {fixed['dtype']}"
    return f"{fixed['operation']}, {fixed['dtype']}"


def _work(operation: Any) -> float:
    """FLOPs, or bytes of what computes next to nothing; attention's are those that the mask leaves."""
    if isinstance(operation, Attention):
        return float(operation.executed_flops)
    return float(operation.num_bytes if isinstance(operation, Pointwise) else operation.flops)


def _fixed(sample: Sample, dimension: str) -> dict[str, Any]:
    """What samples of a sweep along a dimension share."""
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
            found["hidden_size"] = round(int(operation.num_heads) * int(operation.head_dim) / _SAME_WIDTH)
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
    """Order of sweeps of one length."""
    kind, name, dimension, fixed = key
    return kind, name, _DIMENSIONS[kind].index(dimension), str(fixed)


def _axis_value(sample: Sample, dimension: str) -> float:
    value = size_of(sample, dimension)
    return value / MEGA if dimension == "num_bytes" else value


def _points(priced: Sequence[PricedSample], x: Sequence[float], amount: Any, name: str) -> Iterator[Points]:
    """Measured points, those of products by alignment class; without any, the classes along the predicted curve."""
    seen = [at for at, entry in enumerate(priced) if entry.sample.measured_s is not None]
    classes: dict[int, list[int]] = {}
    for at in seen or range(len(priced)):
        price = priced[at].price
        classes.setdefault(int(float(price.alignment_bytes)) if isinstance(price, GemmPrice) else 0, []).append(at)
    if not seen and (len(classes) < 2 or len(priced) > _MOST_CLASS_POINTS):
        return
    for align in sorted(classes, reverse=True):
        places = classes[align]
        times = [priced[at].sample.measured_s if seen else float(priced[at].price.time_s) for at in places]
        values = [amount(priced[at]) / float(time_s or 1.0) for at, time_s in zip(places, times, strict=True)]
        what = name if seen else "predicted"
        label = f"{what}, {align} B aligned" if len(classes) > 1 and align else what
        yield Points(label, [x[at] for at in places], values, color=None if len(classes) > 1 else "#d55e00")


def _wave_marks(priced: Sequence[PricedSample], x: Sequence[float], rates: Sequence[float]) -> tuple[Mark, ...]:
    """Last sizes before the rate of a product falls because its tiles need another pass over the device."""
    drops: list[tuple[float, Mark]] = []
    for at in range(1, len(priced)):
        before, after = priced[at - 1].price, priced[at].price
        if not (isinstance(before, GemmPrice) and isinstance(after, GemmPrice)):
            return ()
        same_class = before.alignment_factor == after.alignment_factor
        drop = 1.0 - rates[at] / rates[at - 1]
        if same_class and drop >= _LEAST_DROP and float(before.wave_efficiency) > float(after.wave_efficiency):
            count = int(float(before.num_waves))
            tile = f"{float(before.tile_m):.0f}x{float(before.tile_n):.0f}"
            if float(before.split_k) > 1.0:
                tile += f"/{float(before.split_k):.0f}"
            drops.append((drop, Mark("x", x[at - 1], f"{count} wave{'s' * (count > 1)} of {tile}")))
    deepest = sorted(drops, key=lambda entry: -entry[0])[:_MOST_WAVE_MARKS]
    return tuple(mark for _, mark in sorted(deepest, key=lambda entry: entry[1].value))
