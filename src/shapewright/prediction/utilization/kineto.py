"""Read traces of torch.profiler (Kineto's Chrome trace format) as a stream: kernels, their times and their operators.

A trace is one JSON object whose ``traceEvents`` has an entry per operator of the host, kernel of the device and
annotation. Events are decoded one at a time from a buffer of bounded size, so that a trace of gigabytes takes memory
for its kernels and operators only; ``.gz`` files are decompressed while they are read.

Kernels are attributed to the operator that launched them by ``External id``. In a trace of a CPU, which has no kernels,
the operators take their place, each with its own time: without that of the operators that it calls. A trace of a GPU
can lack its kernels too, where the profiler dropped their records: launches without kernels are refused.

Source: pytorch/kineto, libkineto/src/output_json.cpp (names of categories and arguments; ``Collective name`` of NCCL's
kernels); issue 996 (lost kernels).
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from io import TextIOWrapper
from os import PathLike
from pathlib import Path
from typing import IO, Any, NamedTuple

from shapewright.core.errors import MeasuredFileError, plain_text
from shapewright.core.files import open_file, read_start
from shapewright.core.notes import Note
from shapewright.core.records import dataclass

_CHUNK_CHARACTERS = 1 << 20
_MOST_EVENT_CHARACTERS = 4 << 20
_MOST_HEADER_CHARACTERS = 16 << 20
MOST_CHARACTERS = 8 << 30
"""Most characters of a trace after decompression: some minutes of training of a large model with shapes."""
MOST_EVENTS = 2_000_000
"""Most kernels and operators that are kept."""
_MOST_NAME_CHARACTERS = 200
_SEPARATORS = re.compile(r"[ \t\r\n,]*")
_US = 1e-6

_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")  # the last two: PyTorch 1.8
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver", "xpu_runtime", "runtime")
_COLLECTIVE = re.compile(r"nccl|rccl|AllReduce|AllGather|ReduceScatter|SendRecv|AllToAll", re.IGNORECASE)
_FORWARD_OPERATORS = ("aten::linear", "aten::scaled_dot_product_attention", "aten::layer_norm", "aten::rms_norm")
CONVOLUTION_OPERATOR = re.compile(r"aten::\w*conv(?!ert)")
"""Operators of convolutions: those of libraries run under ``aten::convolution``."""
_CONVOLUTION = "aten::convolution"
_CONVOLUTIONS = (_CONVOLUTION, "aten::convolution_backward")
_WRAPPERS = (*_FORWARD_OPERATORS, "aten::matmul")
"""Operators that call others: their own time is host time, not computation."""
_BACKWARD = "autograd::engine::evaluate_function"
_CHECKPOINT = "CheckpointFunctionBackward"


class Operator(NamedTuple):
    """An operator of the host, with what is known of the kernels that it launches.

    Attributes:
        name: Name, such as ``aten::mm``.
        dims: Dimensions of its tensor inputs; empty without ``record_shapes``.
        dtype: Type of its first input, such as ``c10::BFloat16``; empty if unknown.
        is_recomputed: Whether it is a forward operator that runs again inside the backward pass.
        arguments: Its other arguments as text, of convolutions alone; empty without ``record_shapes``.
    """

    name: str
    dims: tuple[tuple[int, ...], ...]
    dtype: str
    is_recomputed: bool
    arguments: tuple[str, ...] = ()


class Kernel(NamedTuple):
    """A kernel of a device, or an operator of a CPU, with its interval on the timeline.

    Attributes:
        name: Name of the kernel.
        start_s: Start. [s]
        end_s: End. [s]
        time_s: Duration; of an operator, without the operators that it calls. [s]
        operator: The operator that launched it; None if unknown.
        is_collective: Whether it communicates with other devices.
        collective: What it communicates, as the trace names it; NCCL runs an all-to-all as sends. Empty if unknown.
    """

    name: str
    start_s: float
    end_s: float
    time_s: float
    operator: Operator | None
    is_collective: bool
    collective: str = ""


@dataclass(frozen=True)
class Trace:
    """Kernels and steps of one device in a trace.

    Attributes:
        path: File.
        kernels: Kernels of the device, by start.
        num_steps: Steps that it covers: its ``ProfilerStep`` annotations, or 1.
        marks_steps: Whether it has such annotations.
        span_s: Time from the first kernel or step to the last. [s]
        is_cpu: Whether it holds operators of a CPU instead of kernels.
        device_name: Device as the trace names it; empty if it does not.
        world_size: Devices of the job, as the trace states; None if it does not.
        batch: Sequences and tokens per sequence of the token embedding's input; None if unknown.
        num_microbatches: Forward passes per step, by the token embedding; 0 if unknown.
    """

    path: Path
    kernels: tuple[Kernel, ...]
    num_steps: int
    marks_steps: bool
    span_s: float
    is_cpu: bool
    device_name: str
    world_size: int | None
    batch: tuple[int, int] | None
    num_microbatches: int

    @property
    def notes(self) -> tuple[Note, ...]:
        """A note where the steps cannot be told apart."""
        if self.marks_steps:
            return ()
        text = (
            f"{self.path.name} marks no steps and is taken as one; if it holds several, call step() of the profiler "
            "after each"
        )
        return (Note(text, "unmarked-steps", "trace"),)


def read_trace(path: str | PathLike[str]) -> Trace:
    """Read a trace.

    Args:
        path: JSON file of torch.profiler, plain or gzip.

    Raises:
        MeasuredFileError: the file is missing, is no trace, is cut off, is too large, holds no kernel or operator, or
            holds launches of kernels without the kernels.
    """
    path = Path(path)
    if not path.is_file():
        raise MeasuredFileError(
            f"{str(path)!r} is not a file; give a trace written by export_chrome_trace", field="trace"
        )
    try:
        with _open(path) as stream:
            reader = _EventReader(stream, path)
            return _collect(reader, path)
    except RecursionError:
        raise MeasuredFileError(f"{path.name} is nested too deeply to be a trace", field="trace") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise MeasuredFileError(f"{path.name} cannot be read: {error}", field="trace") from error


def _open(path: Path) -> IO[str]:
    """Open a plain or a gzip file as text."""
    if read_start(path, 2) == b"\x1f\x8b":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return TextIOWrapper(open_file(path), encoding="utf-8", errors="replace")


class _EventReader:
    """Iterates over the events of a trace with a bounded buffer, and keeps the text before them."""

    def __init__(self, stream: IO[str], path: Path) -> None:
        self._stream, self._path = stream, path
        self._buffer, self._position, self._total = "", 0, 0
        self._decoder = json.JSONDecoder()
        self.header = self._read_header()
        self.tail = ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self._skip_separators()
            if self._position >= len(self._buffer):
                raise MeasuredFileError(f"{self._path.name} is cut off: its list of events does not end", field="trace")
            if self._buffer[self._position] == "]":
                self.tail = self._buffer[self._position + 1 :]
                return
            yield self._decode()

    def _read_header(self) -> str:
        """Read up to the list of events and return the text before it."""
        while True:
            found = re.search(r'"traceEvents"\s*:\s*\[', self._buffer)
            start = self._buffer.lstrip()
            if start.startswith("["):
                self._position = self._buffer.index("[") + 1
                return ""
            if found:
                self._position = found.end()
                return self._buffer[: found.start()]
            if (
                (start and not start.startswith("{"))
                or len(self._buffer) > _MOST_HEADER_CHARACTERS
                or not self._read_chunk()
            ):
                raise MeasuredFileError(
                    f"{self._path.name} is no trace of torch.profiler: it has no list 'traceEvents'; write one with "
                    f"export_chrome_trace",
                    field="trace",
                )

    def _skip_separators(self) -> None:
        """Skip separators, and read another chunk where the buffer ends."""
        start = self._total
        while True:
            separators = _SEPARATORS.match(self._buffer, self._position)
            self._position = separators.end() if separators else self._position
            if self._position < len(self._buffer) or not self._read_chunk():
                return
            if self._total - start > _MOST_HEADER_CHARACTERS:
                raise MeasuredFileError(f"{self._path.name} is no trace: it has megabytes of blanks", field="trace")

    def _decode(self) -> dict[str, Any]:
        """Decode one event, and read chunks until it is complete."""
        while True:
            try:
                event, self._position = self._decoder.raw_decode(self._buffer, self._position)
            except ValueError as error:
                is_large = len(self._buffer) - self._position > _MOST_EVENT_CHARACTERS
                if is_large or not self._read_chunk():
                    done = self._total - len(self._buffer) + self._position
                    raise MeasuredFileError(
                        f"{self._path.name} is malformed or cut off in the event after {done} characters: {error}",
                        field="trace",
                    ) from None
            else:
                return event if isinstance(event, dict) else {}

    def _read_chunk(self) -> bool:
        """Read another chunk into the buffer and drop its consumed part; False at the end of the file."""
        chunk = self._stream.read(_CHUNK_CHARACTERS)
        self._total += len(chunk)
        if self._total > MOST_CHARACTERS:
            raise MeasuredFileError(
                f"{self._path.name} has more than {MOST_CHARACTERS >> 30} Gi characters; profile fewer steps",
                field="trace",
            )
        self._buffer, self._position = self._buffer[self._position :] + chunk, 0
        return bool(chunk)


class _KernelEvent(NamedTuple):
    """A kernel's event on a device, before its operator is known."""

    category: str
    name: str
    start_us: float
    end_us: float
    device: str
    external_id: Any
    collective: str


class _Span(NamedTuple):
    """An operator's event on a thread of the host."""

    thread: tuple[Any, Any]
    start_us: float
    end_us: float
    name: str
    args: dict[str, Any]


def _collect(reader: _EventReader, path: Path) -> Trace:
    """Collect kernels, operators and steps of a trace."""
    kernel_events: list[_KernelEvent] = []
    spans: list[_Span] = []
    steps: list[tuple[float, float]] = []
    num_launches = 0
    origin_us: float | None = None
    for event in reader:
        if event.get("ph") != "X":
            continue
        category, name = _clean_name(str(event.get("cat", ""))).lower(), _clean_name(str(event.get("name", "")))
        start_us, duration_us = _number(event.get("ts")), _number(event.get("dur"))
        if start_us is None or duration_us is None or duration_us < 0.0:
            continue
        # Times since 1970 in seconds have a resolution of a quarter of a microsecond only.
        origin_us = start_us if origin_us is None else origin_us
        start_us -= origin_us
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if category in _KERNELS:
            device = _clean_name(str(args.get("device", event.get("pid"))))
            external_id = _external_id(args.get("External id", args.get("external id")))
            collective = _clean_name(str(args.get("Collective name", "")))
            end_us = start_us + duration_us
            kernel_events.append(
                _KernelEvent(_clean_name(category), name, start_us, end_us, device, external_id, collective)
            )
        elif name.startswith("ProfilerStep") and category in ("user_annotation", "cpu_op", ""):
            steps.append((start_us, start_us + duration_us))
        elif category in ("cpu_op", "operator") and not name.startswith("ProfilerStep"):
            kept = {key: args[key] for key in ("External id", "Input Dims", "Input type") if key in args}
            settings = args.get("Concrete Inputs")
            if name in _CONVOLUTIONS and isinstance(settings, list):
                kept["Concrete Inputs"] = tuple(str(one)[:_MOST_NAME_CHARACTERS] for one in settings[:20])
            spans.append(_Span((event.get("pid"), event.get("tid")), start_us, start_us + duration_us, name, kept))
        elif category in _LAUNCH_CATEGORIES and "launch" in name.lower():
            num_launches += 1
        if len(kernel_events) + len(spans) > MOST_EVENTS:
            raise MeasuredFileError(
                f"{path.name} has more than {MOST_EVENTS:,} kernels and operators; profile fewer steps", field="trace"
            )
    if num_launches and not kernel_events:
        raise MeasuredFileError(
            f"{path.name} holds launches of kernels ({num_launches:,}) but no kernels: the profiler dropped their "
            "records, and times of the host are not those of the device; profile again, with warm-up steps in the "
            "schedule",
            field="trace",
        )
    operators, host_kernels = _attribute_time(spans)
    kernels = _device_kernels(kernel_events, operators) if kernel_events else host_kernels
    if not kernels:
        raise MeasuredFileError(
            f"{path.name} holds neither kernels nor operators; profile with ProfilerActivity.CUDA or CPU", field="trace"
        )
    intervals = [(kernel.start_s, kernel.end_s) for kernel in kernels] + [
        (start * _US, end * _US) for start, end in steps
    ]
    num_steps = max(len(steps), 1)
    embeddings = [one.dims[1] for one in operators.values() if one.name == "aten::embedding" and len(one.dims) > 1]
    tokens = [dims for dims in embeddings if len(dims) == 2]
    return Trace(
        path=path,
        kernels=tuple(sorted(kernels, key=lambda kernel: kernel.start_s)),
        num_steps=num_steps,
        marks_steps=bool(steps),
        span_s=max(end for _, end in intervals) - min(start for start, _ in intervals),
        is_cpu=not kernel_events,
        device_name=_device_name(reader.header),
        world_size=_world_size(reader.header + reader.tail),
        batch=(tokens[0][0], tokens[0][1]) if tokens else None,
        num_microbatches=round(len(tokens) / num_steps),
    )


@lru_cache(maxsize=1 << 16)
def _clean_name(text: str) -> str:
    """Return a name in a printable and limited form; the cache makes equal names one object, which saves memory."""
    return plain_text(text[:_MOST_NAME_CHARACTERS])


def _number(value: Any) -> float | None:
    """Return a number of an event, which may be written as text; None where it is not a number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1e300 else None


def _external_id(value: Any) -> Any:
    """Return the external id of an event; None where the value cannot be an id."""
    return value if isinstance(value, int | str) else None


def _attribute_time(spans: list[_Span]) -> tuple[dict[Any, Operator], list[Kernel]]:
    """Return the operators by external id, and the operators that compute as kernels with their own time."""
    operators: dict[Any, Operator] = {}
    host_kernels: list[Kernel] = []
    stack: list[tuple[_Span, list[float], bool, bool]] = []  # span, time of inner spans, in backward, recomputed
    calling: set[int] = set()  # depths of operators that call a convolution

    def close() -> None:
        span, inner_us, _, is_recomputed = stack.pop()
        is_convolution = bool(CONVOLUTION_OPERATOR.match(span.name))
        is_wrapper = is_convolution and len(stack) in calling
        calling.discard(len(stack))
        if is_convolution:
            calling.add(len(stack) - 1)
        if stack:
            stack[-1][1].append(span.end_us - span.start_us)
        # The kernels of a convolution take their sizes from the one operator that all libraries run under.
        outer = next((one[0] for one in stack if one[0].name in _CONVOLUTIONS), span) if is_convolution else span
        arguments = outer.args.get("Concrete Inputs", ())
        operator = Operator(span.name, _dims(outer.args), _dtype(outer.args), is_recomputed, arguments)
        operators[_external_id(span.args.get("External id")) or f"operator {len(operators)}"] = operator
        own_us = span.end_us - span.start_us - sum(inner_us)
        is_wrapper |= span.name in _WRAPPERS and bool(inner_us)
        if span.name.startswith(("aten::", "c10d::")) and own_us > 0.0 and not is_wrapper:
            is_collective = bool(_COLLECTIVE.search(span.name))
            host_kernels.append(
                Kernel(span.name, span.start_us * _US, span.end_us * _US, own_us * _US, operator, is_collective)
            )

    spans.sort(key=lambda span: (str(span.thread), span.start_us, -span.end_us))
    for span in spans:
        while stack and (stack[-1][0].thread != span.thread or stack[-1][0].end_us <= span.start_us):
            close()
        in_backward = bool(stack and stack[-1][2]) or span.name.startswith(_BACKWARD) or _CHECKPOINT in span.name
        is_recomputed = bool(stack and stack[-1][3]) or (
            in_backward and span.name in (*_FORWARD_OPERATORS, _CONVOLUTION)
        )
        stack.append((span, [], in_backward, is_recomputed))
    while stack:
        close()
    return operators, host_kernels


def _device_kernels(events: list[_KernelEvent], operators: dict[Any, Operator]) -> list[Kernel]:
    """Return the kernels of the device that ran most of them."""
    ((busiest, _),) = Counter(event.device for event in events).most_common(1)
    return [
        Kernel(
            event.name,
            event.start_us * _US,
            event.end_us * _US,
            (event.end_us - event.start_us) * _US,
            operators.get(event.external_id),
            event.category == "kernel" and bool(_COLLECTIVE.search(event.name)),
            event.collective,
        )
        for event in events
        if event.device == busiest
    ]


_LARGEST = 2**48


def _dims(args: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the dimensions of the tensor inputs."""
    found = args.get("Input Dims")
    if not isinstance(found, list):
        return ()
    return tuple(
        tuple(int(size) for size in each)
        for each in found
        if isinstance(each, list) and each and all(isinstance(size, int) and 0 <= size < _LARGEST for size in each)
    )


def _dtype(args: dict[str, Any]) -> str:
    """Return the type of the first input; empty if unknown."""
    found = args.get("Input type")
    return str(found[0]) if isinstance(found, list) and found else ""


def _device_name(header: str) -> str:
    # computeProperties: PyTorch 1.8.
    found = re.search(r'"(?:device|compute)Properties".*?"name"\s*:\s*"([^"\\]{1,100})"', header, re.DOTALL)
    return found[1] if found else ""


def _world_size(text: str) -> int | None:
    found = re.search(r'"world_size"\s*:\s*(\d{1,7})', text)
    return int(found[1]) if found else None
