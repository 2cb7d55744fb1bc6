"""Callback of transformers' Trainer: logs measured against predicted steps, and warns of costly shapes at the start."""

from __future__ import annotations

import logging
from typing import Any

from transformers import Trainer, TrainerCallback

from shapewright.app.api.parts import takes_scenario
from shapewright.app.integrations.measured_steps import StepMonitor

# Without mixed precision, the format of the weights.
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
_LOGGER = logging.getLogger("shapewright")


class TransformersCallback(TrainerCallback):  # type: ignore[misc]
    """Log step time, MFU and the waterfall beside their prediction every N steps.

    ``TransformersCallback(...).attach(trainer)`` logs through the trainer, to W&B, TensorBoard or wherever it reports.
    Given as ``Trainer(callbacks=[...])``, the metrics join the trainer's next own log line, after its other reporters.

    Args:
        device: Device name, alias or file; None for the GPU that PyTorch sees.
        config: What ``shapewright.predict`` takes; None for the model of the trainer, if it is one of transformers.
        every: Steps between two comparisons.
        seq_len: Tokens of a sequence; None for the maximum length in the trainer's arguments, or the usual one, of
            which a warning tells.
        parts: Other keywords of ``shapewright.predict``: layout, workload, overrides, software.

    Raises:
        TypeError: a keyword is unknown.
        WorkloadError: ``every`` is not an integer of at least 1.
    """

    @takes_scenario
    def __init__(
        self,
        device: Any = None,
        *,
        config: Any = None,
        every: int = 50,
        seq_len: int | None = None,
        **parts: Any,
    ) -> None:
        self._monitor = StepMonitor(every=every, warn=_LOGGER.warning, device=device, **parts)
        self._config, self._seq_len = config, seq_len
        self._trainer: Trainer | None = None
        self._pending: dict[str, float] = {}

    def attach(self, trainer: Trainer) -> TransformersCallback:
        """Add the callback to a trainer, and log through it."""
        self._trainer = trainer
        trainer.add_callback(self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:  # noqa: ARG002
        """Take batch, format and model from the trainer, and warn of costly findings."""
        lengths = (getattr(args, name, None) for name in ("max_length", "max_seq_length"))
        workload = {
            "micro_batch_size": args.per_device_train_batch_size,
            "seq_len": self._seq_len or next(filter(None, lengths), None),
            "dtype": "bf16" if args.bf16 else "fp16" if args.fp16 else _DTYPES.get(str(found["model"].dtype)),
            "recompute": "full" if args.gradient_checkpointing else None,
        }
        model = found["model"] if self._config is None else self._config
        self._monitor.start(model, args.world_size, workload, passes=args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Count a step; log the comparison at the end of a window."""
        metrics = self._monitor.finish_step()
        if metrics is None or not state.is_world_process_zero:
            return
        if self._trainer is None:
            self._pending = metrics
        else:
            self._trainer.log(metrics)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Add metrics that wait to a log line of the trainer."""
        if self._pending and logs is not None:
            logs.update(self._pending)
            state.log_history[-1].update(self._pending)
            self._pending = {}

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Drop the window that an evaluation interrupted."""
        self._monitor.restart()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Drop the window that a checkpoint interrupted."""
        self._monitor.restart()
