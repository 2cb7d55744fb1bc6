"""The refits of the package's calibration records, in the order in which they build on each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass

PACKAGE = "shapewright.measure.refit"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One refit.

    Attributes:
        name: Name on the command line.
        module: Module under ``shapewright.measure.refit``.
        function: Function of that module; takes the data folder and ``options``.
        tables: Files that it reads from the data folder.
        writes: What it writes, relative to the folder of records.
        reason: Why it stands where it does in the order.
        options: Command-line options that restrict it, such as ``device``.
        replaces_record: It writes records from scratch; later steps add sections and reports to them.
        on_request: It runs only if it is named.
    """

    name: str
    module: str
    function: str = "refit"
    tables: tuple[str, ...]
    writes: str
    reason: str
    options: tuple[str, ...] = ()
    replaces_record: bool = False
    on_request: bool = False

    def load(self) -> Callable[..., None]:
        """Import the module and return the function; needs the ``fit`` extra."""
        function: Callable[..., None] = getattr(import_module(f"{PACKAGE}.{self.module}"), self.function)
        return function


_PAPER_TABLES = ("paper_gemm.csv", "paper_layers.csv")
_ATTENTION_TABLES = ("attention_prefill.parquet", "attention_decode.parquet")
_KERNEL_TABLES = (
    "attention_training.csv",
    "attention_encoder.parquet",
    "mla.parquet",
    "norms.csv",
    "fused_ops.csv",
    "quantize.parquet",
    "linear_attention.parquet",
    "sparse_attention.parquet",
)

STEPS: tuple[Step, ...] = (
    Step(
        name="gemm",
        module="gemm.physics",
        tables=("gemm.parquet", *_PAPER_TABLES),
        writes="gemm/*.json",
        reason="every other refit uses GEMM times",
        options=("device",),
        replaces_record=True,
    ),
    Step(
        name="gemm-alignment",
        module="gemm.physics",
        function="refit_alignment",
        tables=_PAPER_TABLES,
        writes="gemm/*.json, alignment factors",
        reason="a part of gemm",
        on_request=True,
    ),
    Step(
        name="gemm-alignment-borrowed",
        module="gemm.physics",
        function="copy_alignment",
        tables=(),
        writes="gemm/*.json, alignment factors of the devices that borrow them",
        reason="a part of gemm-alignment",
        on_request=True,
    ),
    Step(
        name="gemm-older-libraries",
        module="gemm.older_libraries",
        tables=("linear_layers.parquet",),
        writes="gemm/a100-sxm-80gb.json, section of the 2024 libraries",
        reason="starts from the section of the current libraries",
    ),
    Step(
        name="best-rates",
        module="gemm.best_rates",
        tables=("mamf.csv",),
        writes="best_rates.json",
        reason="scales the record of MI250X",
    ),
    Step(
        name="gemm-residual",
        module="gemm.residual",
        tables=("gemm.parquet",),
        writes="gemm/*.json and gemm/*.npz, learned tables",
        reason="learns the residual of the GEMM formulas",
        options=("architecture", "dtype"),
    ),
    Step(
        name="gemm-amd",
        module="gemm.amd",
        tables=("gemm_amd.parquet", "mamf.csv"),
        writes="gemm/mi300x, mi308x, mi355x: .json and .npz",
        reason="",
        options=("device",),
        replaces_record=True,
    ),
    Step(
        name="gemm-fp32",
        module="gemm.fp32",
        tables=("gemm_fp32.parquet",),
        writes="gemm-fp32/*.json and *.npz",
        reason="",
        options=("device",),
        replaces_record=True,
    ),
    Step(
        name="gemm-fp32-intervals",
        module="gemm.fp32",
        function="refit_intervals",
        tables=("gemm_fp32.parquet",),
        writes="intervals/gemm-fp32.json",
        reason="prices each device of gemm-fp32 with the record of another",
    ),
    Step(
        name="attention",
        module="attention.physics",
        tables=_ATTENTION_TABLES,
        writes="attention/*.json",
        reason="",
        options=("device",),
        replaces_record=True,
    ),
    Step(
        name="attention-residual",
        module="attention.residual",
        tables=_ATTENTION_TABLES,
        writes="attention/*.json and attention/*.npz, learned tables",
        reason="learns the residual of the attention formulas",
        options=("device",),
    ),
    Step(
        name="attention-paper",
        module="attention.physics",
        function="refit_paper",
        tables=("paper_layers.csv",),
        writes="attention/a100-sxm-80gb.json, section of the 2023 kernel",
        reason="starts from the current kernel and subtracts predicted GEMMs",
    ),
    Step(
        name="pointwise",
        module="pointwise",
        tables=("pointwise.parquet", "paper_layers.csv"),
        writes="pointwise/a100-sxm.json",
        reason="subtracts predicted GEMMs and attention from measured layers",
    ),
    Step(
        name="pointwise-fp32",
        module="pointwise_fp32",
        tables=("pointwise_fp32.parquet",),
        writes="pointwise-fp32/*.json",
        reason="takes the start of kernels from pointwise",
        options=("device",),
    ),
    Step(
        name="pointwise-fp32-intervals",
        module="pointwise_fp32",
        function="refit_intervals",
        tables=("pointwise_fp32.parquet",),
        writes="intervals/pointwise-fp32.json",
        reason="prices each device of pointwise-fp32 with the record of another",
    ),
    Step(
        name="collectives",
        module="collectives",
        tables=("collectives.parquet",),
        writes="collectives/*.json",
        reason="",
    ),
    Step(
        name="kernels",
        module="kernels",
        tables=_KERNEL_TABLES,
        writes=", ".join(f"{name.partition('.')[0]}/*" for name in _KERNEL_TABLES),
        reason="",
        options=("kind",),
        replaces_record=True,
    ),
    Step(
        name="tuned-experts",
        module="experts.tuned_shapes",
        tables=(),
        writes="tuned_experts.json",
        reason="before moe, when a serving library was released; DIR holds its packages",
        on_request=True,
    ),
    Step(
        name="moe",
        module="experts.physics",
        tables=("moe.parquet",),
        writes="moe/*.json",
        reason="uses the alignment factors of gemm and the times of pointwise",
        options=("device", "kernel"),
        replaces_record=True,
    ),
    Step(
        name="moe-residual",
        module="experts.residual",
        tables=("moe.parquet",),
        writes="moe/*.json and moe/*.npz, learned tables",
        reason="learns the residual of the expert formulas",
        options=("device",),
    ),
    Step(
        name="servers",
        module="servers",
        tables=("serving_throughput.csv", "serving_static.csv"),
        writes="servers/*.json",
        reason="prices passes with all other records",
    ),
    Step(
        name="software",
        module="software",
        tables=("published_training_throughput.csv",),
        writes="software/*.json",
        reason="predicts whole steps with all records above",
    ),
    Step(
        name="loss",
        module="loss",
        tables=("loss_by_shape.csv",),
        writes="prediction/loss/data/loss_law.json",
        reason="",
    ),
    Step(
        name="intervals",
        module="intervals.interval_files",
        tables=(
            "gemm.parquet",
            *_ATTENTION_TABLES,
            "moe.parquet",
            "collectives.parquet",
            "linear_layers.parquet",
            "mamf.csv",
            *_PAPER_TABLES,
        ),
        writes="intervals/*.json",
        reason="compares all records above with rows that their fits did not see",
        options=("kind",),
    ),
)


def find_steps(names: Sequence[str]) -> list[Step]:
    """Steps of these names in their order; those that run by default if no name is given.

    Raises:
        CalibrationError: a name is unknown.
    """
    known = [step.name for step in STEPS]
    if unknown := [name for name in names if name not in known]:
        raise CalibrationError(f"unknown refit {', '.join(map(repr, unknown))}; choose from {', '.join(known)}")
    return [step for step in STEPS if (step.name in names if names else not step.on_request)]
