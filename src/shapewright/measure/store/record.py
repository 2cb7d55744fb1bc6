"""Cases to measure, and the rows and runs of a store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from typing import TYPE_CHECKING, Any

from shapewright.core.records import dataclass
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.base import UNPRICED_FIELDS
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.prediction.model_runs import LayerRun, ProxyRun, StepRun

if TYPE_CHECKING:
    from shapewright.lowering.operations.operation import Operation

    Measurable = Operation | LayerRun | StepRun

OK, FAILED, WRONG = "ok", "failed", "wrong"
SCHEMA_VERSION = 3
"""Version of the tables of a store, whose columns are the fields of Row and Run."""
STATUSES = (OK, FAILED, WRONG)

_KINDS: Mapping[str, type[Gemm | GroupedGemm | Attention | Pointwise | Collective | LayerRun | StepRun]] = {
    cls.kind: cls for cls in (Gemm, GroupedGemm, Attention, Pointwise, Collective, LayerRun, StepRun, ProxyRun)
}

# Fields that operations gained later, left out at their default: rows measured before keep their keys.
_LATER_FIELDS: Mapping[tuple[str, str], Any] = {
    ("pointwise", "is_chain"): False,
    ("pointwise", "is_backward"): False,
    ("gemm", "is_training"): False,
    ("gemm", "library"): "",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One benchmark case.

    Attributes:
        operation: One operation, a decoder layer or a whole step.
        variant: Requested kernel, such as ``flash``; empty for the library's default.
        row_width: Elements per row of a pointwise operation, which itself records its bytes only; 0 for others.
        repetition: Index of the measurement among several of the same case.
    """

    operation: Measurable
    variant: str = ""
    row_width: int = 0
    repetition: int = 0

    def sizes(self) -> dict[str, Any]:
        """Sizes and flags of the operation, by field name, without dtype and layout.

        Whether an activation has a gate follows from its bytes, by which the measured kernel is chosen.
        """
        skipped, kind = {*UNPRICED_FIELDS, "dtype", "layout", "is_gated"}, self.operation.kind
        found = {spec.name: _plain(getattr(self.operation, spec.name)) for spec in fields(self.operation)}
        sizes = {
            name: value
            for name, value in found.items()
            if name not in skipped and ((kind, name) not in _LATER_FIELDS or value != _LATER_FIELDS[kind, name])
        }
        return {**sizes, "row_width": self.row_width} if self.row_width else sizes

    def key(self, device: str, library: str) -> str:
        """Identity of a measurement as JSON text: device, library, and everything that affects the time."""
        operation = self.operation
        return json.dumps(
            {
                "device": device,
                "library": library,
                "kind": operation.kind,
                "dtype": operation.dtype,
                "layout": getattr(operation, "layout", ""),
                "variant": self.variant,
                "repetition": self.repetition,
                "sizes": self.sizes(),
            },
            sort_keys=True,
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the bench, or one import; rows refer to it.

    Attributes:
        run_id: Random, so that runs of several hosts can share a store.
        started_utc: Start time in ISO 8601.
        command: Command line.
        suite: Name of the suite, or a label with the model's name.
        device: Canonical name of the device file, or the name that the driver reports.
        device_facts: Properties that the driver reports.
        driver: Driver version; empty on a CPU.
        runtime: CUDA or ROCm with its version, or the processor and its threads.
        torch_version: Version of PyTorch.
        library: Library and versions, as in measured tables.
        shapewright_version: Version of this package.
    """

    run_id: str
    started_utc: str
    command: str
    suite: str
    device: str
    device_facts: Mapping[str, Any]
    driver: str
    runtime: str
    torch_version: str
    library: str
    shapewright_version: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One finished measurement.

    Attributes:
        key: See Case.key.
        run_id: Run that measured it.
        measured_utc: Time of the measurement in ISO 8601.
        suite: Suite that it was measured for.
        kind: Kind of operation.
        name: Name of the operation in the suite or model.
        dtype: Element format.
        layout: Memory layout of a GEMM, two letters; empty for others.
        variant: Requested kernel; see Case.
        repetition: Index of the measurement; see Case.
        sizes: Sizes and flags of the operation.
        m: Rows of a GEMM's result; None for others.
        n: Columns of a GEMM's result; None for others.
        k: Contracted dimension of a GEMM; None for others.
        batch: Number of GEMMs in a batch; None for others.
        flops: Arithmetic of the operation. [flop]
        num_bytes: Memory traffic of the operation. [byte]
        device: Canonical device name.
        library: Library and versions.
        kernel: Kernel that ran.
        status: One of STATUSES.
        error: Why it failed or is wrong; empty otherwise.
        relative_error: Norm of the difference to the reference over its norm; None if it was not computed.
        method: ``graph`` (replayed, without launch cost), ``eager`` (with launch cost), ``host`` (CPU wall time) or
            ``processor`` (CPU time of a single thread).
        median_s: Median of the samples; a sample is the mean of several calls. [s]
        min_s: Smallest sample. [s]
        max_s: Largest sample. [s]
        q1_s: Lower quartile. [s]
        q3_s: Upper quartile. [s]
        ci_half_width_s: Half the width of the median's 95 % confidence interval. [s]
        num_samples: Number of samples.
        calls_per_sample: Calls whose mean is one sample.
        launch_s: Launch cost of an individually issued call; None if not measured. [s]
        num_inputs: Number of input sets that calls rotate over.
        is_cold: Whether the input sets exceed the last-level cache, so that no call finds its inputs in it.
        state_before: Clocks, power and temperature before the row, as far as the device reports them.
        state_after: The same after the samples, on a GPU while it still executes the same calls.
        figures: Quantities other than the time, by names with their units, such as ``peak_memory_bytes``.
    """

    key: str
    run_id: str
    measured_utc: str
    suite: str
    kind: str
    name: str
    dtype: str
    layout: str
    variant: str
    repetition: int
    sizes: Mapping[str, Any]
    m: int | None = None
    n: int | None = None
    k: int | None = None
    batch: int | None = None
    flops: float = 0.0
    num_bytes: float = 0.0
    device: str
    library: str
    kernel: str = ""
    status: str
    error: str = ""
    relative_error: float | None = None
    method: str = ""
    median_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    q1_s: float | None = None
    q3_s: float | None = None
    ci_half_width_s: float | None = None
    num_samples: int = 0
    calls_per_sample: int = 0
    launch_s: float | None = None
    num_inputs: int = 0
    is_cold: bool = False
    state_before: Mapping[str, float] = field(default_factory=dict)
    state_after: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)

    @property
    def is_layernorm(self) -> bool:
        """Whether the bench ran LayerNorm for a norm, as it does unless a variant requests RMSNorm."""
        return self.kind == "pointwise" and self.sizes["operation"] == "norm" and not self.variant

    def operation(self) -> Measurable:
        """The measured operation, layer or step."""
        cls = _KINDS[self.kind]
        known = {**self.sizes, "layout": self.layout, "name": self.name, "dtype": self.dtype}
        facts: dict[str, Any] = {spec.name: known[spec.name] for spec in fields(cls) if spec.name in known}
        return cls(**facts)


def row_facts(case: Case, run: Run) -> dict[str, Any]:
    """Fields of a row that are known before the measurement."""
    operation = case.operation
    sizes = case.sizes()
    return {
        "key": case.key(run.device, run.library),
        "run_id": run.run_id,
        "suite": run.suite,
        "kind": operation.kind,
        "name": operation.name,
        "dtype": operation.dtype,
        "layout": getattr(operation, "layout", ""),
        "variant": case.variant,
        "repetition": case.repetition,
        "sizes": sizes,
        **{letter: sizes.get(letter) for letter in ("m", "n", "k", "batch")},
        "flops": float(operation.flops),
        "num_bytes": float(operation.num_bytes),
        "device": run.device,
        "library": run.library,
    }


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number."""
    return value.item() if hasattr(value, "item") else value
