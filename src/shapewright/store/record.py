"""Records: what one measured row says, and the run it comes from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from shapewright.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.whole import LayerRun, StepRun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.operations import Operation

    Measurable = Operation | LayerRun | StepRun

OK, FAILED, WRONG = "ok", "failed", "wrong"
STATUSES = (OK, FAILED, WRONG)

_KINDS: Mapping[str, type[Gemm | GroupedGemm | Attention | Pointwise | Collective | LayerRun | StepRun]] = {
    cls.kind: cls for cls in (Gemm, GroupedGemm, Attention, Pointwise, Collective, LayerRun, StepRun)
}
# Fields that say where and how often an operation runs, and nothing about how long one execution takes.
_PLACE = ("name", "pass_name", "stage", "repeats")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure.

    Attributes:
        operation: What runs: one operation, a layer or a whole step.
        variant: Which of the library's kernels is asked for, such as ``flash``; empty leaves it to the library.
        row_width: Elements of one row, for pointwise operations, which know their bytes alone; 0 for others.
        repetition: 0, or which further measurement of the same thing this is.
    """

    operation: Measurable
    variant: str = ""
    row_width: int = 0
    repetition: int = 0

    def sizes(self) -> dict[str, Any]:
        """Sizes and flags of the operation, by field name, without dtype and layout."""
        skipped = {*_PLACE, "dtype", "layout"}
        found = {spec.name: _plain(getattr(self.operation, spec.name)) for spec in fields(self.operation)}
        sizes = {name: value for name, value in found.items() if name not in skipped}
        return {**sizes, "row_width": self.row_width} if self.row_width else sizes

    def key(self, device: str, library: str) -> str:
        """What makes a measurement the same one: device, library, and everything that decides the time."""
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
    """One call of the bench.

    Attributes:
        run_id: Random, so that runs of several hosts can share a store.
        started_utc: ISO 8601.
        command: What was asked for.
        suite: Suite, or the model whose shapes were taken.
        device: Name of the device file, or what the driver calls it.
        device_facts: Properties that the driver reports.
        driver: Version of the driver; empty where there is none.
        runtime: CUDA or ROCm with its version, or the processor and its threads.
        torch_version: Version of PyTorch.
        library: What measured tables call it: PyTorch and runtime with their versions.
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
        run_id: The run that made it.
        measured_utc: ISO 8601.
        suite: Suite it was measured for.
        kind: Kind of operation.
        name: What the suite or model calls the operation.
        dtype: Element format.
        layout: Two letters for products, empty for others.
        variant: Kernel asked for.
        repetition: 0, or which further measurement of the same thing.
        sizes: Sizes and flags of the operation.
        m: Rows of a product; None for others.
        n: Columns of a product; None for others.
        k: Contracted dimension; None for others.
        batch: Equal products in one launch; None for others.
        flops: By the operation's own count. [flop]
        num_bytes: By the operation's own count. [byte]
        device: Canonical device name.
        library: Library and versions.
        kernel: What ran.
        status: One of STATUSES.
        error: Why it failed or is wrong; empty otherwise.
        relative_error: Norm of the difference to the reference over its norm; None where none was computed.
        method: ``graph`` (replayed, without launch), ``eager`` (launch included), ``host`` (a CPU by the time of day)
            or ``processor`` (a CPU by the time that its one thread ran).
        median_s: See Summary. [s]
        min_s: [s]
        max_s: [s]
        q1_s: [s]
        q3_s: [s]
        ci_half_width_s: [s]
        num_samples: Samples.
        calls_per_sample: Calls that one sample is the mean of.
        launch_s: What issuing calls one by one adds to each; None where it was not told apart. [s]
        num_inputs: Sets of inputs that calls rotate over.
        is_cold: Whether those sets together exceed the last-level cache so far that none stays in it.
        state_before: Clocks, power and temperature before, as far as the device tells.
        state_after: The same after; on a GPU while it goes on with the same calls.
        figures: What was measured beside the time, by a name with its unit, such as ``peak_memory_bytes``.
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
        """Every field by its name."""
        return asdict(self)

    def operation(self) -> Measurable:
        """What was measured, as the package's own object."""
        cls = _KINDS[self.kind]
        known = {**self.sizes, "layout": self.layout, "name": self.name, "dtype": self.dtype}
        facts: dict[str, Any] = {spec.name: known[spec.name] for spec in fields(cls) if spec.name in known}
        return cls(**facts)


def row_facts(case: Case, run: Run) -> dict[str, Any]:
    """The fields of a row that are known before anything runs."""
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
    """A NumPy scalar as a number of Python's own."""
    return value.item() if hasattr(value, "item") else value
