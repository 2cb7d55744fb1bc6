"""Train one proxy model: AdamW with a width-aware learning rate, cosine schedule, fixed seeds and data order.

Training can be stopped after any step and resumed from a checkpoint with the same results.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from shapewright.core.errors import BenchError, first_line
from shapewright.core.files import open_file
from shapewright.core.records import dataclass
from shapewright.measure.bench.operations.torch_model import Decoder

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend
    from shapewright.measure.proxy.runs import ProxyRecipe, ProxySpec
    from shapewright.measure.proxy.text import ByteText

# Fan-in at which a matrix has the recipe's learning rate; a common base width of muP (arXiv 2203.03466).
_BASE_FAN_IN = 256
_BETAS, _EPSILON = (0.9, 0.95), 1e-8
_MAX_GRADIENT_NORM = 1.0
# Standard deviation of embeddings that are also the logit matrix, as in GPT-2; others have the scale of activations.
_TIED_DEVIATION = 0.02
# Losses are recorded so many times per run; the last one is the result.
NUM_RECORDS = 5
HELD_OUT_TOKENS = 2**17
# Time between checkpoints: what a killed process loses at most. [s]
_CHECKPOINT_EVERY_S = 60.0
# Queries per block of compiled attention on a CPU; the fastest of 64, 128 and 256 for most models of 256 tokens.
_CPU_QUERY_BLOCK = 128
# Longest sequence for it: its scores are kept for the backward pass, and each block adds code to compile.
_MAX_BLOCKED_SEQ_LEN = 1024
_MOMENTS = ("exp_avg", "exp_avg_sq")
# What reading a damaged checkpoint raises.
_DAMAGES = (OSError, EOFError, KeyError, NotImplementedError, TypeError, ValueError, BadZipFile, zlib.error)


class DivergedError(BenchError):
    """The loss of a run is not finite."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """State of a run after a step.

    Attributes:
        step: Steps done.
        train_loss_nats: Loss of the step's batch.
        step_s: Duration of the step.
    """

    step: int
    train_loss_nats: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class LossRecord:
    """Loss and time of the steps since the last record.

    Attributes:
        step: Steps done since the start of the run.
        loss_nats: Mean loss on held-out text. [nat per token]
        standard_error_nats: Its standard error over windows; windows are the same for all models, so differences
            between models have a smaller one.
        train_loss_nats: Mean training loss. [nat per token]
        steps_s: Time of each step, on the clock of the device.
        elapsed_s: Wall-clock time of the steps.
    """

    step: int
    loss_nats: float
    standard_error_nats: float
    train_loss_nats: float
    steps_s: list[float]
    elapsed_s: float


class Trainer:
    """A proxy model in training.

    Args:
        spec: What to train.
        seed: Seed of the initial weights and of the order of the text.
        text: Text to train on.
        backend: Device.
        dtype: ``fp32``, or ``bf16`` for GEMMs in bf16 (autocast) with weights in fp32.
        checkpoint: File to resume from and to write to.
        compiles: Whether to compile the model with ``torch.compile``.

    Raises:
        BenchError: the checkpoint is damaged.
    """

    def __init__(
        self,
        spec: ProxySpec,
        *,
        seed: int,
        text: ByteText,
        backend: Backend,
        dtype: str,
        checkpoint: Path,
        compiles: bool = False,
    ) -> None:
        import torch

        self.spec, self.seed, self.text, self.backend, self.dtype = spec, seed, text, backend, dtype
        self.checkpoint, self.step = checkpoint, 0
        self._decoder = make_decoder(spec, seed, backend.torch_device)
        self._context = self._decoder.pass_context()
        if compiles and not backend.is_cuda and spec.recipe.seq_len <= _MAX_BLOCKED_SEQ_LEN:
            self._context = replace(self._context, query_block=_CPU_QUERY_BLOCK)
        self._run = torch.compile(self._decoder.run) if compiles else self._decoder.run
        self._optimizer = make_optimizer(self._decoder, spec.recipe)
        self._losses: list[float] = []
        self._steps_s: list[float] = []
        self._elapsed_s = 0.0
        if checkpoint.exists():
            self._restore()

    def train(self, keep_going: Callable[[], bool], on_step: Callable[[Progress], None]) -> Iterator[LossRecord]:
        """Train to the end of the run, or until a stop is requested after a step.

        Yields:
            Losses, at equal distances. The caller stores each one before it asks for the next: only then is the
            training past it checkpointed.

        Raises:
            DivergedError: the loss is not finite.
            BenchError: a checkpoint cannot be written.
        """
        num_steps = self.spec.num_steps
        record_at = record_steps(num_steps)
        saved_s = time.monotonic()
        while self.step < num_steps:
            if not keep_going():
                if self.step:  # before the first step there is nothing to keep
                    self._save()
                return
            begin_s = time.monotonic()
            progress = self._train_step()
            self._elapsed_s += time.monotonic() - begin_s
            on_step(progress)
            if not math.isfinite(progress.train_loss_nats):
                raise DivergedError(
                    f"the loss is {progress.train_loss_nats} at step {self.step}; lower learning_rate="
                    f"{self.spec.recipe.learning_rate:g} or raise warmup_fraction"
                )
            if self.step in record_at:
                yield self._record()
                self._losses, self._steps_s, self._elapsed_s = [], [], 0.0
                saved_s = -math.inf
            if time.monotonic() - saved_s > _CHECKPOINT_EVERY_S:
                self._save()
                saved_s = time.monotonic()

    def _train_step(self) -> Progress:
        recipe = self.spec.recipe
        tokens = self.text.batch(self.step, seed=self.seed, batch_size=recipe.batch_size, seq_len=recipe.seq_len)
        factor = learning_rate_factor(self.step, self.spec.num_steps, recipe)
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * group["scale"] * factor
        losses: list[float] = []
        step_s = self.backend.elapsed_s(lambda: losses.append(self._update(tokens)))
        self.step += 1
        self._losses.append(losses[0])
        self._steps_s.append(step_s)
        return Progress(step=self.step, train_loss_nats=losses[0], step_s=step_s)

    def _update(self, tokens: Any) -> float:
        """Run forward, backward and optimizer; returns the mean loss of the batch. [nat per token]"""
        import torch

        batch, total = self._on_device(tokens), 0.0
        for part in batch.split(self._decoder.workload.micro_batch_size):
            share = len(part) / len(batch)
            loss = self._token_losses(part).mean() * share
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._decoder.parameters(), _MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def _token_losses(self, tokens: Any) -> Any:
        """Cross-entropy of each next token, of the shape of the tokens without their first column. [nat]"""
        import torch
        from torch.nn import functional

        with torch.autocast(self.backend.torch_device.type, dtype=torch.bfloat16, enabled=self.dtype == "bf16"):
            logits = self._run(tokens[:, :-1], self._context)
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        return losses.view(len(tokens), -1)

    def _record(self) -> LossRecord:
        import torch

        windows = self._on_device(self.text.held_out(HELD_OUT_TOKENS, self.spec.recipe.seq_len))
        with torch.no_grad():
            parts = [
                self._token_losses(part).mean(1) for part in windows.split(self._decoder.workload.micro_batch_size)
            ]
        means = torch.cat(parts).double().cpu().numpy()
        return LossRecord(
            step=self.step,
            loss_nats=float(means.mean()),
            standard_error_nats=float(means.std(ddof=1) / math.sqrt(means.size)) if means.size > 1 else 0.0,
            train_loss_nats=float(np.mean(self._losses)),
            steps_s=list(self._steps_s),
            elapsed_s=self._elapsed_s,
        )

    def _on_device(self, tokens: Any) -> Any:
        import torch

        return torch.from_numpy(tokens.astype(np.int64)).to(self.backend.torch_device)

    def _save(self) -> None:
        """Write the checkpoint atomically, as plain arrays."""
        arrays: dict[str, Any] = {"step": np.array(self.step), "elapsed_s": np.array(self._elapsed_s)}
        arrays |= {"losses": np.array(self._losses), "steps_s": np.array(self._steps_s)}
        for index, weight in enumerate(self._decoder.parameters()):
            arrays[f"{index}.weight"] = weight.detach().cpu().numpy()
            for name in _MOMENTS:
                arrays[f"{index}.{name}"] = self._optimizer.state[weight][name].cpu().numpy()
        draft = self.checkpoint.with_suffix(".draft")
        try:
            with draft.open("wb") as file:
                np.savez(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.checkpoint)
        except OSError as error:
            raise BenchError(
                f"cannot write the checkpoint {self.checkpoint}: {error.strerror or error}; free space on its disk; "
                "losses recorded before are in the store"
            ) from error

    def _restore(self) -> None:
        import torch

        weights = list(self._decoder.parameters())
        try:
            arrays = self._read_arrays(weights)
        except _DAMAGES as error:
            raise BenchError(
                f"the checkpoint {self.checkpoint} is damaged ({first_line(error)}); delete it to train this model "
                "again"
            ) from error
        self.step = int(arrays["step"])
        for index, weight in enumerate(weights):
            with torch.no_grad():
                weight.copy_(torch.from_numpy(arrays[f"{index}.weight"]))
            state = {name: torch.from_numpy(arrays[f"{index}.{name}"]).to(weight.device) for name in _MOMENTS}
            self._optimizer.state[weight] = {"step": torch.tensor(float(self.step), device=weight.device), **state}
        self._losses, self._steps_s = arrays["losses"].tolist(), arrays["steps_s"].tolist()
        self._elapsed_s = float(arrays["elapsed_s"])

    def _read_arrays(self, weights: Sequence[Any]) -> dict[str, Any]:
        """Read the checkpoint.

        Raises:
            Exception: of _DAMAGES: an array is missing, or is not of the kind or shape that _save writes.
        """
        with open_file(self.checkpoint) as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        wanted: dict[str, tuple[type, tuple[int, ...]]] = {
            f"{index}.{name}": (np.float32, tuple(weight.shape))
            for index, weight in enumerate(weights)
            for name in ("weight", *_MOMENTS)
        }
        since_record = (np.float64, (arrays["losses"].size,))
        wanted |= {
            "losses": since_record,
            "steps_s": since_record,
            "elapsed_s": (np.float64, ()),
            "step": (np.int64, ()),
        }
        for name, (dtype, shape) in wanted.items():
            if arrays[name].dtype != dtype or arrays[name].shape != shape:
                raise ValueError(f"array {name} has another type or shape")
        if not 0 < arrays["step"] <= self.spec.num_steps:
            raise ValueError(f"it ends at step {arrays['step']} of {self.spec.num_steps}")
        return arrays

    def forget(self) -> None:
        """Delete the checkpoint of a finished run."""
        with suppress(OSError):
            self.checkpoint.unlink(missing_ok=True)


def record_steps(num_steps: int) -> list[int]:
    """Steps after which a run records its loss.

    >>> record_steps(10)
    [2, 4, 6, 8, 10]
    """
    return sorted({max(1, round(num_steps * (index + 1) / NUM_RECORDS)) for index in range(NUM_RECORDS)})


def make_decoder(spec: ProxySpec, seed: int, torch_device: Any) -> Decoder:
    """Make a model with trainable fp32 weights, drawn on the host so that they are the same on all devices.

    Matrices have variance 1 / fan-in, and those that end a residual branch 1 / (2 L) of that (GPT-2). An untied logit
    matrix starts at zero, as muP allows (arXiv 2203.03466, appendix D.2), so that the first loss is ln(256).
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    config = spec.config

    def make(shape: tuple[int, ...], deviation: float) -> Any:
        if deviation == 0.0:
            return torch.ones(shape)
        # One-dimensional weights with a deviation are biases.
        return torch.randn(shape, generator=generator) * deviation if len(shape) > 1 else torch.zeros(shape)

    decoder = Decoder(config, spec.workload("fp32"), make)
    for name in ("embedding", "positions"):
        if name in decoder.outer and not config.tied_embeddings:
            decoder.outer[name] *= 1.0 / _TIED_DEVIATION
    if "logits" in decoder.outer:
        decoder.outer["logits"].zero_()
    for layer in decoder.layers:
        for name in ("out", "down"):
            layer[name] *= (2.0 * config.num_layers) ** -0.5
    for weights in (decoder.outer, *decoder.layers):
        for name in weights:
            weights[name] = weights[name].to(torch_device).requires_grad_()
    return decoder


def make_optimizer(decoder: Decoder, recipe: ProxyRecipe) -> Any:
    """AdamW whose learning rate for a matrix is proportional to 1 / fan-in (arXiv 2203.03466, table 8).

    Weight decay per step is the same for all matrices: torch multiplies it by the learning rate, so it is divided by
    the same scale. Vectors and embeddings have the unscaled learning rate and no decay.
    """
    import torch

    groups: dict[float, list[Any]] = {}
    for weights in (decoder.outer, *decoder.layers):
        for name, weight in weights.items():
            is_matrix = weight.dim() > 1 and name not in ("embedding", "positions")
            groups.setdefault(_BASE_FAN_IN / weight.shape[1] if is_matrix else 0.0, []).append(weight)
    return torch.optim.AdamW(
        [
            {"params": group, "scale": scale or 1.0, "weight_decay": recipe.weight_decay / scale if scale else 0.0}
            for scale, group in groups.items()
        ],
        lr=recipe.learning_rate,
        betas=_BETAS,
        eps=_EPSILON,
        fused=True,
    )


def learning_rate_factor(step: int, num_steps: int, recipe: ProxyRecipe) -> float:
    """Learning rate of a step over the peak: a linear warm-up, then a cosine down to the final fraction."""
    warmup = round(recipe.warmup_fraction * num_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, num_steps - warmup)
    return recipe.final_fraction + (1.0 - recipe.final_fraction) * 0.5 * (1.0 + math.cos(math.pi * done))
