"""Evaluate paper_layers.csv: transformer layers of arXiv 2401.14489, fp16, forward: single GEMMs, blocks, whole layers.

Legend (Megatron's layer): b micro-batch, s sequence, h hidden size, a heads, t tensor parallel degree.

    qkv     [b s, h] [h, 3h/t]        score [s, h/a] [h/a, s], b a / t of them     up   [b s, h] [h, 4h/t]
    proj    [b s, h/t] [h/t, h]       aov   [s, s] [s, h/a], b a / t of them       down [b s, 4h/t] [4h/t, h]

Single GEMMs are the slowest of 100-200 iterations, blocks and layers are medians; each was followed by one host
synchronization. Layers are predicted from the operations that a one-layer GPT lowers to, with dropout after attention
and MLP (in training mode; unfused, dropout of the attention weights did not run). Fused attention is priced with the
kernel of that time, which includes dropout of the weights, if the device's record has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.units import TERA, format_seconds
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.accuracy.chunk import Alternatives, Chunk, Prices, price_step, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.gemm import (
    GEMMS_ALONE,
    PAPER_DTYPE,
    PAPER_LIBRARY,
    SAME_SIZE_FACTOR,
    noted_overhead_s,
    paper_library,
    price_gemms,
)
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.composition.stages import PricedOperation
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.gemm.price import price_gemms as price_shaped
from shapewright.pricing.operations import price_operations
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.context import Context
    from shapewright.pricing.price import Price

    Array = NDArray[np.float64]

GEMMS = ("qkv", "score", "aov", "proj", "mlp_up", "mlp_down")
BATCHED_GEMMS = ("score", "aov")
"""GEMMs that are batched over heads: their slowest iterations are the farthest from the mean."""
_BLOCKS = ("attention", "mlp", "layer")
FORMAT = Format(
    numbers={"num_heads": 1, "hidden_size": 1, "micro_batch_size": 1, "seq_len": 1, "tensor_parallel": 1},
    labels=("log", "gpu", "flash_attention"),
    optional=(
        *(f"{name}_tflops" for name in GEMMS),
        *(f"{name}_{unit}" for name in _BLOCKS for unit in ("s", "tflops")),
    ),
)
_VOCAB_SIZE = 51200
# Above any value of a log: combines size and these in one number.
_MOST = {"micro_batch_size": 2.0**8, "seq_len": 2.0**20, "tensor_parallel": 2.0**8}
# That many rows of different sizes within this factor are not a coincidence.
_FEWEST_AT_FLOOR, _FLOOR_WIDTH = 20, 1.002
# Limit of attention plus MLP over layer: 0.94 to 1.06 in consistent rows, up to 1.6 in the others.
_LONGEST_PARTS = 1.1
# Placeholder for a missing throughput. [TFLOP/s]
_PLACEHOLDER_TFLOPS = 1.0
_REPEATED = "{} of a row that another log holds too: each measurement is counted once"


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every measured quantity; parts are logs, tables are quantities."""
    repeats = find_repeats(columns)
    for name in GEMMS:
        is_there = columns.numbers[f"{name}_tflops"] > 0.0
        if (is_there & repeats).any():
            context.skipped[_REPEATED.format(f"{name}_tflops")] += int((is_there & repeats).sum())
        yield from _price_gemms(name, columns.take(is_there & ~repeats), context)
    for name in _BLOCKS:
        yield from _price_blocks(name, columns, context)
    if columns.num_rows:
        context.note("paper_layers: single GEMMs are the slowest of 100-200 iterations, layers are medians")


def layer_gemm(name: str, sizes: Mapping[str, Any]) -> Gemm:
    """Return one GEMM of the layers, as arrays."""
    a, h, b, s, t = (sizes[column] for column in FORMAT.numbers)
    one = np.ones_like(h)
    heads, width = b * np.maximum(np.floor(a / t), 1.0), np.maximum(np.floor(h / a), 1.0)
    m, n, k, batch, layout = {
        "qkv": (b * s, 3.0 * h / t, h, one, "NT"),
        "score": (s, s, width, heads, "NN"),
        "aov": (s, width, s, heads, "NN"),
        "proj": (b * s, h, h / t, one, "NT"),
        "mlp_up": (b * s, 4.0 * h / t, h, one, "NT"),
        "mlp_down": (b * s, h, 4.0 * h / t, one, "NT"),
    }[name]
    return Gemm(name=name, dtype=PAPER_DTYPE, layout=layout, m=m, n=n, k=k, batch=batch)


def _price_gemms(name: str, chosen: Columns, context: Context) -> Iterator[Chunk]:
    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        if name in BATCHED_GEMMS:
            extra_s = noted_slowest_extra_s(device, context)
        else:
            extra_s = noted_overhead_s("paper_layers", device, context)
        library = paper_library(context.record("gemm", device), words[1], GEMMS_ALONE)
        return price_gemms(
            layer_gemm(name, rows.numbers), device, context, library=library, extra_s=extra_s, older_software=True
        )

    for rows, device, _, prices in context.price_groups(chosen, ("gpu", "log"), price_group):
        seconds = np.asarray(layer_gemm(name, rows.numbers).flops) / (rows.numbers[f"{name}_tflops"] * TERA)
        names = (device.name, PAPER_DTYPE, PAPER_LIBRARY)
        alternatives = _same_size_layers(rows)
        yield from split_chunks(
            f"paper_layers/{name}", names, rows.labels["log"], seconds, prices, alternatives=alternatives
        )


def noted_slowest_extra_s(device: Device, context: Context) -> float:
    """Return the extra time of the slowest of 100 to 200 iterations of a batched GEMM, and note it. [s]

    Fitted with the kernels of batched GEMMs (measure.refit.gemm.batch_kernels). If the record has none, the cost of the
    synchronization.
    """
    sections = context.record("gemm", device).provenance.get("sections", {})
    found = [section.get("alignment", {}).get("slowest_batch_extra_s") for section in sections.values()]
    extra_s = next((float(extra) for extra in found if extra is not None), None)
    if extra_s is None:
        return noted_overhead_s("paper_layers", device, context)
    context.note(
        f"paper_layers on {device.name}: {format_seconds(extra_s)} added to score and aov for the slowest iteration, "
        f"as fitted with its record"
    )
    return extra_s


def _same_size_layers(rows: Columns) -> Alternatives:
    """Group layers of equal tokens and parameters (12 h^2, within 3 %): they differ in heads, and slightly in h."""
    h = rows.numbers["hidden_size"]
    group = np.floor(np.log(h**2) / np.log(SAME_SIZE_FACTOR))
    for name, most in _MOST.items():
        group = group * most + rows.numbers[name]
    return Alternatives(group, h**2)


def _price_blocks(name: str, columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price attention, MLP or layer; fused attention is a quantity of its own."""
    seconds, rate = columns.numbers[f"{name}_s"], columns.numbers[f"{name}_tflops"]
    is_there = seconds > 0.0
    is_placeholder = is_there & (np.isnan(rate) | (rate == _PLACEHOLDER_TFLOPS))
    # These layers ran unsharded on one device while their FLOPs were divided.
    is_unsharded = is_there & ~is_placeholder & (columns.numbers["tensor_parallel"] > 1.0)
    is_stuck = is_there & ~is_placeholder & ~is_unsharded & find_floors(columns.labels["log"].codes, seconds)
    is_too_long = np.zeros(columns.num_rows, dtype=bool)
    if name == "attention":
        is_too_long = is_there & ~is_placeholder & ~is_unsharded & ~is_stuck & find_misfits(columns)
    is_repeat = is_there & ~is_placeholder & ~is_unsharded & ~is_stuck & ~is_too_long & find_repeats(columns)
    for reason, rows in (
        (f"{name}_tflops is missing or the placeholder 1.000", is_placeholder),
        (f"{name}_s of a layer with tensor_parallel > 1, which ran unsharded", is_unsharded),
        (f"{name}_s is the minimum of its log at any size: a slow start in the slowest iteration", is_stuck),
        (f"{name}_s and mlp_s exceed the time of their layer by more than a tenth", is_too_long),
        (_REPEATED.format(f"{name}_s"), is_repeat),
    ):
        if rows.any():
            context.skipped[reason] += int(rows.sum())

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        # A few hundred layers, each a list of operations.
        is_flash, found = _is_flash(words[1]), []
        for row in range(rows.num_rows):
            layer = PaperLayer.of(rows, row)
            priced = price_block(name, layer, device, is_flash=is_flash, context=context)
            found.append(price_step(priced, layer.config, layer.workload(is_flash=is_flash)))
        overhead_s = noted_overhead_s("paper_layers", device, context)
        time_s, low_s, high_s, floor_s = np.array(found, dtype=float).T
        return Prices(time_s + overhead_s, low_s + overhead_s, high_s + overhead_s, floor_s)

    chosen = columns.take(is_there & ~is_placeholder & ~is_unsharded & ~is_stuck & ~is_too_long & ~is_repeat)
    for rows, device, words, prices in context.price_groups(chosen, ("gpu", "flash_attention"), price_group):
        table = f"paper_layers/{name}{'-flash' if _is_flash(words[1]) else ''}"
        names = (device.name, PAPER_DTYPE, PAPER_LIBRARY)
        alternatives = _same_size_layers(rows)
        yield from split_chunks(
            table, names, rows.labels["log"], rows.numbers[f"{name}_s"], prices, alternatives=alternatives
        )


def find_floors(logs: NDArray[np.int64], seconds: Array) -> NDArray[np.bool_]:
    """Find rows at the minimum time of their log, although their sizes differ.

    The MI250X logs hold the slowest iteration, and one takes 289 ms even at h = 128.
    """
    is_stuck = np.zeros(len(seconds), dtype=bool)
    for log in np.unique(logs[seconds > 0.0]):
        rows = (logs == log) & (seconds > 0.0)
        times = np.sort(seconds[rows])
        neighbours = np.searchsorted(times, times * _FLOOR_WIDTH) - np.searchsorted(times, times / _FLOOR_WIDTH)
        if neighbours.max() >= _FEWEST_AT_FLOOR:
            is_stuck |= rows & (seconds <= times[neighbours.argmax()] * _FLOOR_WIDTH)
    return is_stuck


def find_repeats(columns: Columns) -> NDArray[np.bool_]:
    """Find rows that an earlier log holds too, to the last digit of every time: a copy, not another measurement.

    55 of the 72 rows of MI250X's second log are those of its first.
    """
    words = [column.codes.astype(float) for name, column in columns.labels.items() if name != "log"]
    cells = np.stack([*columns.numbers.values(), *words])
    _, first, row_of = np.unique(np.nan_to_num(cells, nan=-1.0), axis=1, return_index=True, return_inverse=True)
    logs = columns.labels["log"].codes
    repeats: NDArray[np.bool_] = logs != logs[first[row_of.reshape(-1)]]
    return repeats


def find_misfits(columns: Columns) -> NDArray[np.bool_]:
    """Find rows whose attention block and MLP take a tenth longer than the layer that contains them.

    MLP blocks agree with their GEMMs, so attention was timed in another state of the device.
    """
    attention_s, mlp_s, layer_s = (columns.numbers[f"{name}_s"] for name in _BLOCKS)
    misfits: NDArray[np.bool_] = attention_s + mlp_s > _LONGEST_PARTS * layer_s
    return misfits


class PaperLayer(NamedTuple):
    """Sizes of a measured layer, in the order of the format."""

    num_heads: int
    hidden_size: int
    micro_batch_size: int
    seq_len: int
    tensor_parallel: int

    @classmethod
    def of(cls, columns: Columns, row: int) -> PaperLayer:
        """Return the sizes of one row."""
        return cls(*(int(columns.numbers[name][row]) for name in cls._fields))

    @property
    def config(self) -> TransformerConfig:
        """A GPT with this single layer."""
        return TransformerConfig(
            hidden_size=self.hidden_size,
            num_layers=1,
            num_heads=self.num_heads,
            vocab_size=_VOCAB_SIZE,
            fused_qkv=True,
            qkv_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            norm_bias=True,
            hidden_dropout=0.1,
            position_embedding="learned",
        )

    def workload(self, *, is_flash: bool) -> Workload:
        """Return the workload that was run."""
        return Workload(
            micro_batch_size=self.micro_batch_size,
            seq_len=self.seq_len,
            dtype=PAPER_DTYPE,
            attention="flash" if is_flash else "unfused",
        )


def _as_timed(operation: Operation) -> list[Operation]:
    """Return the operations that the paper's code ran for a lowered one: dropout is separate from the addition."""
    if not isinstance(operation, Pointwise) or not operation.fuses_dropout:
        return [operation]
    branch_bytes = operation.read_bytes / 2.0
    return [
        operation.changed(name="dropout", operation="dropout", read_bytes=branch_bytes),
        operation.changed(name="residual", written_bytes=branch_bytes),
    ]


def price_block(
    name: str, layer: PaperLayer, device: Device, *, is_flash: bool, context: Context
) -> list[PricedOperation]:
    """Price the operations of a block (``attention``, ``mlp`` or the whole ``layer``) with the kernels of that time."""
    operations = [
        operation
        for lowered in lower(layer.config, layer.workload(is_flash=is_flash), ParallelLayout())
        for operation in _as_timed(lowered)
        if operation.pass_name == "forward" and operation.stage == "every" and name in ("layer", operation.block)
    ]
    prices = price_operations(operations, context.with_pricing(device).without_residuals)
    gemms = [operation for operation in operations if isinstance(operation, Gemm)]
    record = context.record("gemm", device, older_software=True)
    of_that_time = iter(price_shaped(gemms, device, record, library=paper_library(record)))

    def price_of(operation: Operation, price: Price) -> Price:
        if isinstance(operation, Gemm):
            return next(of_that_time)
        if isinstance(operation, Attention):
            return price_attention(operation, device, context.record("attention", device), library=PAPER_LIBRARY)
        return price

    return [
        PricedOperation(operation, price_of(operation, price))
        for operation, price in zip(operations, prices, strict=True)
    ]


def _is_flash(word: str) -> bool:
    """Whether a layer ran fused attention; files spell truth values in several ways."""
    return word.strip().lower() in ("1", "1.0", "true", "yes")
