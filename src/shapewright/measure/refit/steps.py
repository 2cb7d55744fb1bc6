"""The refits of the package's calibration records, in the order in which they build on each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass
from shapewright.measure.accuracy.tables.registry import KERNEL_TABLES

PACKAGE = "shapewright.measure.refit"


@dataclass(frozen=True)
class Step:
    """One refit.

    Attributes:
        name: Name on the command line.
        function: Module under ``shapewright.measure.refit`` and its function, which takes the data folder and
            ``options``.
        tables: Files that it reads from the data folder.
        writes: What it writes, relative to the folder of records.
        reason: Why it stands where it does in the order.
        options: Command-line options that restrict it, such as ``device``.
        replaces_record: It writes records from scratch; later steps add sections and reports to them.
        on_request: It runs only if it is named.
    """

    name: str
    function: str
    tables: tuple[str, ...]
    writes: str
    reason: str = ""
    options: tuple[str, ...] = ()
    replaces_record: bool = False
    on_request: bool = False

    def load(self) -> Callable[..., None]:
        """Import the module and return the function; needs the ``fit`` extra."""
        module, _, name = self.function.partition(":")
        function: Callable[..., None] = getattr(import_module(f"{PACKAGE}.{module}"), name)
        return function


_PAPER_TABLES = ("paper_gemm.csv", "paper_layers.csv")
_ATTENTION_TABLES = ("attention_prefill.parquet", "attention_decode.parquet")

STEPS: tuple[Step, ...] = (
    Step("gemm", "gemm.physics:refit", ("gemm.parquet", *_PAPER_TABLES), "gemm/*.json",
         reason="every other refit uses GEMM times", options=("device",), replaces_record=True),
    Step("gemm-alignment", "gemm.physics:refit_alignment", _PAPER_TABLES, "gemm/*.json, alignment factors",
         reason="a part of gemm", on_request=True),
    Step("gemm-alignment-borrowed", "gemm.physics:copy_alignment", (),
         "gemm/*.json, alignment factors of the devices that borrow them", reason="a part of gemm-alignment",
         on_request=True),
    Step("gemm-older-libraries", "gemm.older_libraries:refit", ("linear_layers.parquet",),
         "gemm/a100-sxm-80gb.json, section of the 2024 libraries",
         reason="starts from the section of the current libraries"),
    Step("best-rates", "gemm.best_rates:refit", ("mamf.csv",), "best_rates.json",
         reason="scales the record of MI250X"),
    Step("gemm-residual", "gemm.residual:refit", ("gemm.parquet",), "gemm/*.json and gemm/*.npz, learned tables",
         reason="learns the residual of the GEMM formulas", options=("architecture", "dtype")),
    Step("gemm-amd", "gemm.amd:refit", ("gemm_amd.parquet", "mamf.csv"),
         "gemm/mi300x, mi308x, mi355x: .json and .npz", options=("device",), replaces_record=True),
    Step("gemm-fp32", "gemm.fp32:refit", ("gemm_fp32.parquet",), "gemm-fp32/*.json and *.npz", options=("device",),
         replaces_record=True),
    Step("gemm-fp32-intervals", "gemm.fp32:refit_intervals", ("gemm_fp32.parquet",), "intervals/gemm-fp32.json",
         reason="prices each device of gemm-fp32 with the record of another"),
    Step("attention", "attention.physics:refit", _ATTENTION_TABLES, "attention/*.json", options=("device",),
         replaces_record=True),
    Step("attention-residual", "attention.residual:refit", _ATTENTION_TABLES,
         "attention/*.json and attention/*.npz, learned tables",
         reason="learns the residual of the attention formulas", options=("device",)),
    Step("attention-paper", "attention.physics:refit_paper", ("paper_layers.csv",),
         "attention/a100-sxm-80gb.json, section of the 2023 kernel",
         reason="starts from the current kernel and subtracts predicted GEMMs"),
    Step("pointwise", "pointwise:refit", ("pointwise.parquet", "norms.csv", "paper_layers.csv"),
         "pointwise/a100-sxm.json",
         reason="subtracts predicted GEMMs and attention from measured layers"),
    Step("pointwise-fp32", "pointwise_fp32:refit", ("pointwise_fp32.parquet",), "pointwise-fp32/*.json",
         reason="takes the start of kernels from pointwise", options=("device",)),
    Step("pointwise-fp32-intervals", "pointwise_fp32:refit_intervals", ("pointwise_fp32.parquet",),
         "intervals/pointwise-fp32.json", reason="prices each device of pointwise-fp32 with the record of another"),
    Step("collectives", "collectives:refit", ("collectives.parquet",), "collectives/*.json"),
    Step("kernels", "kernels:refit", tuple(table.file_name for table in KERNEL_TABLES),
         ", ".join(f"{table.name}/*" for table in KERNEL_TABLES), options=("kind",),
         replaces_record=True),
    Step("tuned-experts", "experts.tuned_shapes:refit", (), "tuned_experts.json",
         reason="before moe, when a serving library was released; DIR holds its packages", on_request=True),
    Step("moe", "experts.physics:refit", ("moe.parquet",), "moe/*.json",
         reason="uses the alignment factors of gemm and the times of pointwise", options=("device", "kernel"),
         replaces_record=True),
    Step("moe-residual", "experts.residual:refit", ("moe.parquet",), "moe/*.json and moe/*.npz, learned tables",
         reason="learns the residual of the expert formulas", options=("device",)),
    Step("servers", "servers:refit", ("serving_throughput.csv", "serving_static.csv"), "servers/*.json",
         reason="prices passes with all other records"),
    Step("software", "software:refit", ("published_training_throughput.csv", "loss_by_shape.csv"), "software/*.json",
         reason="predicts whole steps with all records above"),
    Step("loss", "loss:refit", ("loss_by_shape.csv",), "prediction/loss/data/loss_law.json"),
    Step("intervals", "intervals.interval_files:refit",
         ("gemm.parquet", *_ATTENTION_TABLES, "moe.parquet", "collectives.parquet", "linear_layers.parquet",
          "mamf.csv", *_PAPER_TABLES),
         "intervals/*.json", reason="compares all records above with rows that their fits did not see",
         options=("kind",)),
)  # fmt: skip


def find_steps(names: Sequence[str]) -> list[Step]:
    """Steps of these names in their order; those that run by default if no name is given.

    Raises:
        CalibrationError: a name is unknown.
    """
    known = [step.name for step in STEPS]
    if unknown := [name for name in names if name not in known]:
        raise CalibrationError(f"unknown refit {', '.join(map(repr, unknown))}; choose from {', '.join(known)}")
    return [step for step in STEPS if (step.name in names if names else not step.on_request)]
