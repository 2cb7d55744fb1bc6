"""Callback of Lightning: logs measured against predicted steps, and warns of costly shapes at the start."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Callback

from shapewright.app.api.parts import takes_scenario
from shapewright.app.integrations.measured_steps import StepMonitor

_LOGGER = logging.getLogger("shapewright")
_DTYPES = {"bf16": "bf16", "16": "fp16", "32": "fp32", "transformer-engine": "fp8"}


class LightningCallback(Callback):  # type: ignore[misc]
    """Log step time, MFU and the waterfall beside their prediction every N steps, through the trainer's loggers.

    Args:
        config: The model: what ``shapewright.predict`` takes, or a module of transformers; None for the attribute
            ``model`` of the LightningModule.
        device: Device name, alias or file; None for the GPU that PyTorch sees.
        every: Steps between two comparisons.
        micro_batch_size: Sequences of a micro-batch; None for the batch size of the data loader.
        seq_len: Tokens of a sequence; None for the usual number, of which a warning tells.
        parts: Other keywords of ``shapewright.predict``: layout, workload, overrides, software.

    Raises:
        TypeError: a keyword is unknown.
        WorkloadError: ``every`` is not an integer of at least 1.
    """

    @takes_scenario
    def __init__(
        self,
        config: Any = None,
        device: Any = None,
        *,
        every: int = 50,
        micro_batch_size: int | None = None,
        seq_len: int | None = None,
        **parts: Any,
    ) -> None:
        self._monitor = StepMonitor(every=every, warn=_LOGGER.warning, device=device, **parts)
        self._config, self._micro_batch_size, self._seq_len = config, micro_batch_size, seq_len
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take batch, format and model from the trainer, and warn of costly findings."""
        micro_batch = self._micro_batch_size or getattr(trainer.train_dataloader, "batch_size", None) or 1
        workload = {
            "micro_batch_size": micro_batch,
            "seq_len": self._seq_len,
            "dtype": next((dtype for word, dtype in _DTYPES.items() if str(trainer.precision).startswith(word)), None),
        }
        config = self._config if self._config is not None else getattr(pl_module, "model", pl_module)
        self._monitor.start(config, trainer.world_size, workload, passes=trainer.accumulate_grad_batches)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:  # noqa: ARG002
        """Count an optimizer step; log the comparison at the end of a window."""
        if trainer.global_step == self._step:
            return  # gradients are still accumulated
        self._step = trainer.global_step
        metrics = self._monitor.finish_step()
        if metrics is not None and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=self._step)
            trainer.callback_metrics.update(metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Drop the window that an evaluation interrupted."""
        self._monitor.restart()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002
        """Drop the window that a checkpoint interrupted."""
        self._monitor.restart()
