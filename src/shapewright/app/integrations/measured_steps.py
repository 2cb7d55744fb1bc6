"""Compare measured training steps with their prediction: explain_step for plain loops, and what the callbacks share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from shapewright.app.api.parts import ScenarioParts, given_fields, takes_scenario
from shapewright.app.api.steps import mfu
from shapewright.core.errors import DeviceError, ShapewrightError, WorkloadError
from shapewright.core.ranges import check_integer
from shapewright.core.records import dataclass
from shapewright.hardware.loader import detect_device
from shapewright.lint.check import check_scenario
from shapewright.lint.rule import Finding
from shapewright.prediction.build import build_scenario

if TYPE_CHECKING:
    from shapewright.prediction.utilization.explain import Utilization

WARNED_FROM_FRACTION = 0.02
"""Findings that cost at least this share of the step are warned of."""
PREFIX = "shapewright/"
"""Start of the names of all metrics."""


@dataclass(frozen=True)
class StepExplanation:
    """A measured step beside its prediction; ``print`` shows it as ``shapewright mfu`` does.

    Attributes:
        utilization: MFU and HFU by every convention, and the waterfall from the peak to the measured time.
        findings: Findings about shape, batch and layout that cost at least ``WARNED_FROM_FRACTION`` of the step.
    """

    utilization: Utilization
    findings: tuple[Finding, ...]

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger: measured and predicted step time [s], MFU, and the waterfall as shares of the step."""
        return metrics_of(self.utilization)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        from shapewright.app.report.mfu import print_utilization
        from shapewright.app.report.outputs.mfu import mfu_output

        console = Console(file=StringIO(), record=True, width=110, color_system=None, emoji=False, highlight=False)
        print_utilization(mfu_output(self.utilization), console)
        lines = [console.export_text(styles=False).rstrip()]
        return "\n".join([*lines, *(warning_of(finding) for finding in self.findings)])


def metrics_of(found: Utilization) -> dict[str, float]:
    """Numbers of a measured step for a logger, see StepExplanation.metrics."""
    metrics = {"step_time_s": found.seconds, "mfu": found.result.mfu}
    step = found.prediction
    if step is not None:
        metrics |= {
            "predicted_step_time_s": step.step_time_s,
            "predicted_step_time_low_s": step.step_time_low_s,
            "predicted_step_time_high_s": step.step_time_high_s,
            "predicted_mfu": found.mfu_at(step.step_time_s),
            "measured_over_predicted": found.seconds / step.step_time_s,
        }
    metrics |= {f"waterfall/{part.name}_fraction": part.time_s / found.seconds for part in found.waterfall}
    return {PREFIX + name: float(value) for name, value in metrics.items()}


def warning_of(finding: Finding) -> str:
    """One line on a finding and its cost."""
    return f"{finding.code} costs {100.0 * (finding.cost_fraction or 0.0):.1f} % of the step: {finding.message}"


@takes_scenario
def explain_step(
    config: Any,
    *,
    seconds: float,
    num_devices: int | None = None,
    global_batch_size: int | None = None,
    **parts: Unpack[ScenarioParts],
) -> StepExplanation:
    """Explain the time of a training step that was just measured, in a training loop.

    Args:
        config: What ``predict`` takes, or a PyTorch module of transformers, wrapped or not.
        seconds: Measured time of one optimizer step. [s]
        num_devices: Devices of the job; by default the environment's ``WORLD_SIZE``, or 1.
        global_batch_size: Sequences of the step over all replicas; by default one micro-batch on each replica.
        parts: See ScenarioParts. Without ``device``, the GPU that PyTorch sees.

    Returns:
        The measured step beside its prediction: ``print(...)`` it, or log its ``metrics()``.

    Raises:
        ShapewrightError: an argument is invalid, or no known GPU is present.
    """
    devices = num_devices or int(os.environ.get("WORLD_SIZE") or 1)
    model = describe_module(config)
    parts["device"] = parts.get("device") or find_local_device()
    workload = given_fields(parts.get("workload"))
    replicas = devices // _model_degree(given_fields(parts.get("layout")))
    if global_batch_size is None and workload.get("global_batch_size") is None:
        micro_batch = workload.get("micro_batch_size") or build_scenario(model, **parts).workload.micro_batch_size
        global_batch_size = micro_batch * max(1, replicas)
    found = mfu(
        model,
        seconds=seconds,
        num_devices=devices,
        global_batch_size=global_batch_size or workload["global_batch_size"],
        **parts,
    )
    layout = found.layout if found.layout is not None else parts.get("layout")
    return StepExplanation(found, costly_findings(model, **{**parts, "workload": found.workload, "layout": layout}))


def _model_degree(layout: Mapping[str, Any]) -> int:
    """Devices of one replica."""
    degree = 1
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        degree *= int(layout.get(name) or 1)
    return degree


def costly_findings(config: Any, **parts: Any) -> tuple[Finding, ...]:
    """Findings of a scenario that cost at least WARNED_FROM_FRACTION of its step, the costliest first."""
    report = check_scenario(build_scenario(config, **parts), search_shapes=False)
    return tuple(each for each in report.findings if (each.cost_fraction or 0.0) >= WARNED_FROM_FRACTION)


def describe_module(module: Any) -> Any:
    """The config.json object of a PyTorch module of transformers, wrapped or not; anything else as it is."""
    for wrapper in ("module", "_orig_mod"):
        module = getattr(module, wrapper, module)
    config = getattr(module, "config", module)
    if hasattr(config, "to_dict") and hasattr(config, "model_type"):
        return dict(config.to_dict())
    return module


def find_local_device() -> str:
    """Name of the GPU that PyTorch sees.

    Raises:
        DeviceError: there is none, or no device file matches it.
    """
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        raise DeviceError("no GPU is present to compare with; give the device, such as 'h100-sxm-80gb'")
    seen = torch.cuda.get_device_properties(0)
    return detect_device(seen.name, seen.multi_processor_count, seen.total_memory).name


class StepMonitor:
    """Times windows of training steps and compares them with the prediction.

    A prediction that fails, for whatever reason, never stops a training: it is warned of once.

    Args:
        every: Steps of a window.
        warn: Called with each warning.
        parts: See ScenarioParts; ``device`` None for the GPU that PyTorch sees.

    Raises:
        WorkloadError: ``every`` is not an integer of at least 1.
    """

    def __init__(self, *, every: int, warn: Callable[[str], None], **parts: Any) -> None:
        check_integer("every", every, 1, error=WorkloadError, hint="give the steps between two comparisons")
        self.every, self._print_warning, self._parts = every, warn, parts
        self._config: Any = None
        self._num_devices, self._workload = 1, dict[str, Any]()
        self._num_steps = -1  # the first step compiles kernels and fills caches
        self._start_s = 0.0

    def start(self, config: Any, num_devices: int, workload: Mapping[str, Any], *, passes: int = 1) -> None:
        """Take the model and the batch of a training that begins, and warn of costly findings.

        Args:
            workload: Fields of Workload that the trainer knows; those given to the monitor come first.
            passes: Micro-batches of each replica per step.
        """
        given = given_fields(self._parts.get("workload"))
        self._num_devices, self._num_steps = num_devices, -1
        self._workload = {**{name: value for name, value in workload.items() if value is not None}, **given}
        micro_batch = self._workload.get("micro_batch_size")
        if micro_batch and self._workload.get("global_batch_size") is None:
            replicas = max(1, num_devices // _model_degree(given_fields(self._parts.get("layout"))))
            self._workload["global_batch_size"] = micro_batch * passes * replicas
        try:
            self._config = describe_module(config)
            self._parts["device"] = self._parts.get("device") or find_local_device()
            one = {name: value for name, value in self._workload.items() if name != "global_batch_size"}
            parts = {**self._parts, "workload": one}
            if "seq_len" not in one:
                assumed = build_scenario(self._config, **parts).workload.seq_len
                self._warn(f"sequences of {assumed} tokens are assumed; give seq_len where they have others")
            for finding in costly_findings(self._config, **parts):
                self._warn(warning_of(finding))
        except Exception as error:
            self._give_up(error)

    def restart(self) -> None:
        """Drop the window that was interrupted, by an evaluation or a checkpoint; the first step stays untimed."""
        self._num_steps = min(self._num_steps, 0)
        self._start_s = now_s()

    def finish_step(self) -> dict[str, float] | None:
        """Count an optimizer step; at the end of a window return its metrics."""
        if self._config is None:
            return None
        self._num_steps += 1
        if self._num_steps == 0:
            self.restart()
        if self._num_steps < self.every:
            return None
        seconds = (now_s() - self._start_s) / self._num_steps
        self.restart()
        try:
            return metrics_of(self._explain(seconds))
        except Exception as error:
            self._give_up(error)
            return None

    def _explain(self, seconds: float) -> Utilization:
        parts = {**self._parts, "workload": self._workload}
        global_batch = self._workload.get("global_batch_size") or self._num_devices
        return mfu(
            self._config, seconds=seconds, num_devices=self._num_devices, global_batch_size=global_batch, **parts
        )

    def _warn(self, words: str) -> None:
        self._print_warning(f"shapewright: {words}")  # loggers may not print their names

    def _give_up(self, error: Exception) -> None:
        self._config = None
        kind = "" if isinstance(error, ShapewrightError) else f"{type(error).__name__}: "
        self._warn(f"no prediction to compare the training with: {kind}{error}")


def now_s() -> float:
    """Time after all work of the GPU is done. [s]"""
    try:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except ImportError:
        pass
    return time.perf_counter()
