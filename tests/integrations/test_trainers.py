"""Callbacks of trainers and explain_step, with a tiny model on the CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="trainers need PyTorch")
transformers = pytest.importorskip("transformers", reason="trainers need the trace extra")

import shapewright
from shapewright.app.integrations.measured_steps import PREFIX, StepMonitor

DEVICE = "h100-sxm-80gb"
SEQ_LEN = 16


def tiny_model() -> Any:
    """A GPT-2 of two layers whose vocabulary is not aligned."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=8191, n_positions=SEQ_LEN)
    )


class Tokens(torch.utils.data.Dataset):
    """Random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, 8191, (SEQ_LEN,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def check_metrics(metrics: dict[str, float]) -> None:
    """Measured and predicted times, MFU, and a waterfall that adds up to the measured step."""
    of = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
    shares = [value for name, value in of.items() if name.startswith("waterfall/")]

    assert of["step_time_s"] > of["predicted_step_time_s"] > 0.0  # a CPU is slower than an H100
    assert of["predicted_step_time_low_s"] < of["predicted_step_time_s"] < of["predicted_step_time_high_s"]
    assert 0.0 < of["mfu"] < of["predicted_mfu"] < 1.0
    assert of["measured_over_predicted"] == pytest.approx(of["step_time_s"] / of["predicted_step_time_s"])
    assert sum(shares) == pytest.approx(1.0)
    assert of["waterfall/model_flops_fraction"] == pytest.approx(of["mfu"])


def train(folder: Path, attach: Any) -> Any:
    """Train nine steps with transformers' Trainer."""
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=9, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = attach(transformers.Trainer, model=tiny_model(), args=arguments, train_dataset=Tokens())
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer_logs_the_comparison(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Attached, it logs every four steps after the first through the trainer, and warns of the small batch once."""
    seen: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):
        """Stand-in for W&B or TensorBoard."""

        def on_log(self, *_arguments: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    def attach(make: Any, **keywords: Any) -> Any:
        trainer = make(callbacks=[Reporter()], **keywords)
        shapewright.TransformersCallback(DEVICE, every=4, seq_len=SEQ_LEN, workload={"dtype": "bf16"}).attach(trainer)
        return trainer

    with caplog.at_level(logging.WARNING, "shapewright"):
        train(tmp_path, attach)
    logged = [entry for entry in seen if f"{PREFIX}mfu" in entry]

    assert len(logged) == 2
    check_metrics(logged[-1])
    warnings = [record.message for record in caplog.records if record.name == "shapewright"]
    assert sum("WQ101" in line and "micro_batch_size=2" in line for line in warnings) == 1


@pytest.mark.filterwarnings("ignore")
def test_transformers_callback_joins_log_lines(tmp_path: Path) -> None:
    """Given to the constructor, its metrics are part of the trainer's own history."""

    def attach(make: Any, **keywords: Any) -> Any:
        return make(callbacks=[shapewright.TransformersCallback(DEVICE, every=2, seq_len=SEQ_LEN)], **keywords)

    history = train(tmp_path, attach).state.log_history
    logged = [entry for entry in history if f"{PREFIX}mfu" in entry]

    assert len(logged) >= 2
    assert "loss" in logged[0]
    check_metrics(logged[0])


@pytest.mark.filterwarnings("ignore")
def test_unknown_models_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A training whose step cannot be predicted goes on, with one warning."""

    def attach(make: Any, **keywords: Any) -> Any:
        return make(callbacks=[shapewright.TransformersCallback("no-such-device", every=1)], **keywords)

    with caplog.at_level(logging.WARNING, "shapewright"):
        trainer = train(tmp_path, attach)
    warnings = [record.message for record in caplog.records if record.name == "shapewright"]

    assert trainer.state.global_step == 9
    assert len(warnings) == 1
    assert "no-such-device" in warnings[0]


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_the_comparison(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It logs through the trainer's logger at optimizer steps, and warns at the start."""
    pytest.importorskip("lightning", reason="needs Lightning, which the test extra installs")
    from lightning import pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    class Module(pl.LightningModule):  # type: ignore[misc]
        """A language model."""

        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model()

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    callback = shapewright.LightningCallback(device=DEVICE, every=3, seq_len=SEQ_LEN)
    trainer = pl.Trainer(
        max_steps=8, accelerator="cpu", accumulate_grad_batches=2, callbacks=[callback], log_every_n_steps=1,
        logger=CSVLogger(tmp_path, name="", version=""), enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "shapewright"):
        trainer.fit(Module(), torch.utils.data.DataLoader(Tokens(), batch_size=2))
    written = (tmp_path / "metrics.csv").read_text(encoding="utf-8")

    check_metrics({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert f"{PREFIX}predicted_step_time_s" in written.splitlines()[0]
    assert any("TC108" in record.message for record in caplog.records)  # fp32, the trainer's default


def test_an_assumed_length_is_warned_of() -> None:
    """A length of sequences that neither trainer nor user gives would put every comparison off without a word."""
    warnings: list[str] = []
    for given in ({}, {"seq_len": SEQ_LEN}):
        monitor = StepMonitor(every=1, warn=warnings.append, device=DEVICE)
        monitor.start(tiny_model(), 1, {"micro_batch_size": 2, "dtype": "bf16", **given})
    lengths = [line for line in warnings if "seq_len" in line]

    assert lengths == [f"shapewright: sequences of {SEQ_LEN} tokens are assumed; give seq_len where they have others"]


def test_the_first_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles kernels, also after Lightning's sanity check, after a first evaluation and in a second training."""
    now = iter(range(1000))
    monkeypatch.setattr("shapewright.app.integrations.measured_steps.now_s", lambda: float(next(now)))
    monitor = StepMonitor(every=2, warn=str, device=DEVICE)
    for evaluate in (monitor.restart, monitor.restart):
        evaluate()  # Lightning checks the validation loop before the training starts
        monitor.start(tiny_model(), 1, {"micro_batch_size": 2, "seq_len": SEQ_LEN})
        monitor.restart()  # eval_on_start of transformers
        found = [monitor.finish_step() for _ in range(3)]

        assert [metrics is None for metrics in found] == [True, True, False]


@pytest.mark.parametrize(("layout", "batch"), [({}, 2 * 3 * 8), ({"tensor_parallel": 4}, 2 * 3 * 2)])
def test_devices_of_a_replica_share_its_batch(layout: dict[str, int], batch: int) -> None:
    """The batch of a step is that of the replicas, as explain_step has it; devices of one replica have the same."""
    monitor = StepMonitor(every=1, warn=str, device=DEVICE, layout=layout)
    monitor.start("llama-3-8b", 8, {"micro_batch_size": 2, "seq_len": SEQ_LEN, "dtype": "bf16"}, passes=3)

    assert monitor._explain(1.0).workload.global_batch_size == batch


def test_explain_step_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module, or what predict takes; devices come from WORLD_SIZE, the batch from the micro-batch on each."""
    workload = {"seq_len": SEQ_LEN, "micro_batch_size": 2}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    one = shapewright.explain_step(tiny_model(), seconds=0.5, device=DEVICE, workload=workload)
    monkeypatch.setenv("WORLD_SIZE", "4")
    four = shapewright.explain_step("gpt2", seconds=0.5, device=DEVICE, workload={"micro_batch_size": 2})

    check_metrics(one.metrics())
    assert "TC101" in str(one)
    assert "500 ms per step of 2 x 16 tokens" in str(one)
    assert (four.utilization.num_devices, four.utilization.workload.global_batch_size) == (4, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_explain_step_needs_a_device() -> None:
    """Without a GPU the device must be given."""
    with pytest.raises(shapewright.ShapewrightError, match="give the device"):
        shapewright.explain_step("gpt2", seconds=0.5)


@pytest.mark.parametrize(
    ("package", "name"), [("transformers", "TransformersCallback"), ("lightning", "LightningCallback")]
)
@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"evry": 2}, TypeError, r"Callback\(\) has no argument 'evry'; did you mean 'every'"),
        ({"tp": 2}, TypeError, "layout=.*tensor_parallel"),
        ({"every": "50"}, shapewright.ShapewrightError, "every='50' must be an integer"),
        ({"every": 0}, shapewright.ShapewrightError, "every=0 must be an integer"),
        ({"every": 2.5}, shapewright.ShapewrightError, r"every=2\.5 must be an integer"),
    ],
)
def test_callbacks_refuse_wrong_keywords_when_they_are_made(
    package: str, name: str, keywords: dict[str, Any], error: type[Exception], words: str
) -> None:
    """A mistake is found before the training starts, and not by it."""
    pytest.importorskip(package, reason=f"needs {package}")
    make = getattr(shapewright, name)
    with pytest.raises(error, match=words):
        make(device="h100-sxm-80gb", **keywords)


def test_no_error_of_a_prediction_stops_a_training() -> None:
    """Whatever a prediction raises, it is warned of once, and the training goes on."""
    warnings: list[str] = []
    monitor = StepMonitor(every=1, warn=warnings.append, device=object())
    monitor.start({"model_type": "gpt2"}, 1, {"micro_batch_size": 1})

    assert [monitor.finish_step() for _ in range(3)] == [None, None, None]
    (warning,) = warnings
    assert warning.startswith("shapewright: no prediction to compare the training with: ")
