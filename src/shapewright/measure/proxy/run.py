"""Train all runs of a file, seed by seed, and store every recorded loss at once."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from shapewright.core.errors import BenchError, first_line
from shapewright.core.records import dataclass
from shapewright.measure.bench.device.open_device import open_backend
from shapewright.measure.bench.device.timer import quantile
from shapewright.measure.bench.measuring import now_utc, unmeasured_row
from shapewright.measure.bench.operations.torch_layer import require_supported
from shapewright.measure.bench.run import make_run
from shapewright.measure.proxy.train import DivergedError, LossRecord, Progress, Trainer, record_steps
from shapewright.measure.store.database import Store, require_writable
from shapewright.measure.store.record import FAILED, OK, Case, Row, Run, row_facts

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend, DeviceFacts
    from shapewright.measure.proxy.runs import ProxySpec
    from shapewright.measure.proxy.text import ByteText

SUITE = "proxy"
FINISHED, UNFINISHED, IN_OTHER_PROCESS = "finished", "unfinished", "in another process"
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class ProxyRequest:
    """What to train, and how to report it.

    Attributes:
        specs: Models to train.
        text: Text to train on.
        num_seeds: Seeds per model: 0, 1, ... The first seed of all models comes first.
        cpu: Train on the CPU.
        device_index: Index of the GPU among the visible ones.
        dtype: One of DTYPES; empty for bf16 on GPUs that support it and fp32 elsewhere.
        compiles: Whether to compile the models.
        budget_s: Time after which training stops, to be resumed later. [s]
        retry_failed: Whether to train models again whose training failed.
        command: Command line, for the store.
        on_step: Called after each step with the model, its seed and its progress.
    """

    specs: Sequence[ProxySpec]
    text: ByteText
    num_seeds: int = 1
    cpu: bool = False
    device_index: int = 0
    dtype: str = ""
    compiles: bool = False
    budget_s: float = float("inf")
    retry_failed: bool = False
    command: str = ""
    on_step: Callable[[ProxySpec, int, Progress], None] = field(default=lambda _spec, _seed, _progress: None)


@dataclass(frozen=True, kw_only=True)
class ProxyResult:
    """State of one model and seed at the end of a call.

    Attributes:
        spec: The model.
        seed: Its seed.
        state: FINISHED, FAILED, UNFINISHED or IN_OTHER_PROCESS.
        rows: Its rows in the store, in the order of training; the last one of a finished run has the final loss.
    """

    spec: ProxySpec
    seed: int
    state: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class ProxyOutcome:
    """Outcome of a call.

    Attributes:
        facts: The device.
        dtype: Element format of the GEMMs.
        results: One per model and seed, in the order of training.
    """

    facts: DeviceFacts
    dtype: str
    results: tuple[ProxyResult, ...]


def train_proxies(request: ProxyRequest, store_path: str | Path) -> ProxyOutcome:
    """Train the runs that the store does not contain yet.

    Each loss is committed to the store when it is measured, and then the training state is written to a checkpoint in
    the folder ``STORE.proxy``: a killed process loses at most the steps since the last checkpoint, and the next call
    repeats them with the same result. Several processes can share a store and a file of runs.

    Raises:
        ShapewrightError: the device, the text or the store cannot be used.
    """
    require_writable(store_path)
    backend = open_backend(cpu=request.cpu, device_index=request.device_index)
    dtype = request.dtype or ("bf16" if backend.is_cuda and "bf16" in backend.dtypes else "fp32")
    backend.require_dtypes((dtype,))
    for spec in request.specs:
        require_supported(spec.config, spec.workload(dtype))
        request.text.num_windows(spec.recipe.seq_len)
    run = make_run(backend.describe(), suite=SUITE, command=request.command)
    end_s = time.monotonic() + request.budget_s
    jobs = [_Job(spec, seed, dtype, run, request) for seed in range(request.num_seeds) for spec in request.specs]
    with Store(store_path) as store:
        for job in jobs:
            if time.monotonic() >= end_s:
                break
            _train(job, backend, store, end_s)
        results = tuple(job.result(store) for job in jobs)
    return ProxyOutcome(facts=backend.describe(), dtype=dtype, results=results)


class _Job:
    """One model and seed, with the rows that it has in the store."""

    def __init__(self, spec: ProxySpec, seed: int, dtype: str, run: Run, request: ProxyRequest) -> None:
        self.spec, self.seed, self.dtype, self.run, self.request = spec, seed, dtype, run, request
        self.is_elsewhere = False

    def case(self, step: int) -> Case:
        """Identity of the loss after a step."""
        operation = self.spec.run(self.dtype, self.request.text.digest, step)
        return Case(operation=operation, variant="compiled" if self.request.compiles else "", repetition=self.seed)

    @property
    def final_key(self) -> str:
        return self.case(self.spec.num_steps).key(self.run.device, self.run.library)

    def result(self, store: Store) -> ProxyResult:
        """State of the run by its rows."""
        steps = record_steps(self.spec.num_steps)
        keys = [self.case(step).key(self.run.device, self.run.library) for step in steps]
        rows = {row.key: row for row in store.rows(keys=keys)}
        last = rows.get(keys[-1])
        state = UNFINISHED if last is None else FINISHED if last.status == OK else FAILED
        if last is None and self.is_elsewhere:
            state = IN_OTHER_PROCESS
        return ProxyResult(
            spec=self.spec, seed=self.seed, state=state, rows=tuple(rows[key] for key in keys if key in rows)
        )


def _train(job: _Job, backend: Backend, store: Store, end_s: float) -> None:
    request, spec = job.request, job.spec
    folder = store.path.with_name(f"{store.path.name}.{SUITE}")
    name = hashlib.sha256(job.final_key.encode()).hexdigest()[:16]
    with _locked(folder, name) as is_mine:
        job.is_elsewhere = not is_mine
        done = store.finished_keys(statuses=(OK,) if request.retry_failed else (OK, FAILED))
        if not is_mine or job.final_key in done:
            return
        store.add_run(job.run)
        try:
            trainer = Trainer(
                spec, seed=job.seed, text=request.text, backend=backend, dtype=job.dtype,
                checkpoint=folder / f"{name}.npz", compiles=request.compiles,
            )  # fmt: skip
            for record in trainer.train(
                lambda: time.monotonic() < end_s, lambda step: request.on_step(spec, job.seed, step)
            ):
                store.add(_row(job, record, backend))
            if trainer.step == spec.num_steps:
                trainer.forget()
        except DivergedError as error:
            store.add(_failed_row(job, str(error)))
            trainer.forget()
        except (RuntimeError, MemoryError) as error:
            # torch raises RuntimeError on lack of memory and on failures of kernels.
            advice = "; set a smaller micro_batch_size" if "memory" in str(error) else ""
            store.add(_failed_row(job, f"{first_line(error)}{advice}"))


def _row(job: _Job, record: LossRecord, backend: Backend) -> Row:
    times_s = sorted(record.steps_s)
    tokens = job.spec.recipe.batch_tokens
    return Row(
        **row_facts(job.case(record.step), job.run),
        measured_utc=now_utc(),
        status=OK,
        method=backend.eager_method,
        median_s=statistics.median(times_s),
        min_s=times_s[0],
        max_s=times_s[-1],
        q1_s=quantile(times_s, 0.25),
        q3_s=quantile(times_s, 0.75),
        num_samples=len(times_s),
        calls_per_sample=1,
        state_after=backend.read_state(),
        figures={
            "loss_nats": record.loss_nats,
            "loss_standard_error_nats": record.standard_error_nats,
            "train_loss_nats": record.train_loss_nats,
            "tokens_per_s": tokens / statistics.median(times_s),
            "elapsed_s": record.elapsed_s,
        },
    )


def _failed_row(job: _Job, error: str) -> Row:
    return unmeasured_row(job.case(job.spec.num_steps), job.run, error)


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[bool]:
    """Whether this process alone trains a model; the lock ends with the process, however that ends."""
    try:
        folder.mkdir(exist_ok=True)
        file = (folder / f"{name}.lock").open("w", encoding="ascii")
    except OSError as error:
        raise BenchError(f"cannot write to {folder}: {error.strerror or error}; give a store elsewhere") from error
    with file:
        try:
            import fcntl
        except ImportError:  # Windows: one process at a time
            yield True
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
