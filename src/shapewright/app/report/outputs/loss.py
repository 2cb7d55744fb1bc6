"""Outputs about loss: proxy models, the law fitted to them, and experiments that would decide between shapes."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shapewright.app.report.outputs.model import Output, described, take
from shapewright.core.records import dataclass
from shapewright.optimize.experiments.propose import Question

if TYPE_CHECKING:
    from shapewright.measure.fit.loss_runs import LossCalibration
    from shapewright.measure.proxy.run import ProxyOutcome, ProxyResult
    from shapewright.measure.proxy.text import ByteText
    from shapewright.optimize.experiments.propose import ExperimentPlan


@dataclass(frozen=True, kw_only=True)
class ProxyLoss:
    """Loss and time of one model and seed, at its latest record."""

    name: str = described("name of the model")
    seed: int = described("seed of the initial weights and of the order of the text")
    state: str = described("`finished`, `unfinished`, `failed`, or `in another process` that trains it now")
    num_parameters: int = described("parameters outside the embeddings and the logit matrix")
    hidden_size: int = described("width of the residual stream")
    num_layers: int = described("layers")
    num_heads: int = described("query heads")
    num_kv_heads: int = described("key-value heads")
    head_dim: int = described("width of a head")
    intermediate_size: int = described("inner width of the MLP")
    train_tokens: int = described("tokens of the whole run")
    trained_tokens: int = described("tokens until the latest record; 0 before the first one")
    loss_nats: float | None = described("mean loss on held-out text, nats per token; null before the first record")
    loss_standard_error_nats: float | None = described(
        "its standard error over windows of text; they are the same for all models"
    )
    train_loss_nats: float | None = described("mean training loss since the record before, nats per token")
    step_s: float | None = described("median time of a step")
    error: str = described("why it failed; empty otherwise")


@dataclass(frozen=True, kw_only=True)
class ProxyOutput(Output):
    """Proxy models, their losses, and what they were trained on."""

    device: str = described("device that they were trained on")
    library: str = described("library and versions")
    dtype: str = described("element format of the GEMMs")
    store: str = described("store of the losses")
    text: str = described("first digits of the SHA-256 of the text")
    text_bytes: int = described("size of the text")
    num_left: int = described("models and seeds that are not finished; the same command goes on with them")
    runs: list[ProxyLoss] = described("one entry per model and seed")


def proxy_output(outcome: ProxyOutcome, text: ByteText, store_path: str) -> ProxyOutput:
    """Output of a call of ``proxy``."""
    runs = [_proxy_loss(result) for result in outcome.results]
    return ProxyOutput(
        device=outcome.facts.name,
        library=outcome.facts.library,
        dtype=outcome.dtype,
        store=store_path,
        text=text.digest,
        text_bytes=text.num_bytes,
        num_left=sum(run.state not in ("finished", "failed") for run in runs),
        runs=runs,
    )


def _proxy_loss(result: ProxyResult) -> ProxyLoss:
    config, rows = result.spec.config, [row for row in result.rows if row.status == "ok"]
    last = rows[-1] if rows else None
    figures = last.figures if last is not None else {}
    return take(
        ProxyLoss,
        result,
        result.spec,
        config,
        trained_tokens=last.sizes["training"]["trained_tokens"] if last is not None else 0,
        loss_nats=figures.get("loss_nats"),
        loss_standard_error_nats=figures.get("loss_standard_error_nats"),
        train_loss_nats=figures.get("train_loss_nats"),
        step_s=last.median_s if last is not None else None,
        error=result.rows[-1].error if result.rows else "",
    )


@dataclass(frozen=True, kw_only=True)
class FittedCoefficient:
    """One coefficient of the law, before and after the fit."""

    name: str = described("coefficient")
    before: float = described("value of the reference")
    before_standard_deviation: float = described("its standard deviation")
    after: float = described("fitted value")
    after_standard_deviation: float = described("its standard deviation")


@dataclass(frozen=True, kw_only=True)
class LossCalibrationOutput(Output):
    """The law of loss by shape, fitted to own losses.

    The file has `schema_version` 2, `kind`, `recipe`, `law` and `provenance`.
    """

    output: str = described("the file")
    recipe: str = described("source, schedule, data and batch of the losses")
    num_losses: int = described("losses fitted")
    mean_error_nats: float = described("mean of abs(fitted - measured)")
    left_out_mean_error_nats: float | None = described(
        "the same for models that the fit did not see, each left out in turn; null with fewer than four"
    )
    coefficients: list[FittedCoefficient] = described("coefficients of the law")
    skipped: Mapping[str, int] = described("rows left out by reason")
    notes: list[str] = described("remarks, one line each")


def loss_calibration_output(result: LossCalibration, path: str) -> LossCalibrationOutput:
    """Output of a fit of the law to own losses."""
    law, prior, rows, left_out = result.law, result.prior, result.rows, result.left_out_errors_nats
    fitted = law.loss_nats(rows.shape, rows.tokens)
    return LossCalibrationOutput(
        output=path,
        recipe=law.name,
        num_losses=len(rows),
        mean_error_nats=float(abs(fitted - rows.loss_nats).mean()),
        left_out_mean_error_nats=sum(map(abs, left_out)) / len(left_out) if left_out else None,
        coefficients=[
            FittedCoefficient(
                name=name,
                before=prior.coefficients[name],
                before_standard_deviation=float(max(prior.covariance[place, place], 0.0)) ** 0.5,
                after=law.coefficients[name],
                after_standard_deviation=float(max(law.covariance[place, place], 0.0)) ** 0.5,
            )
            for place, name in enumerate(law.coefficients)
        ],
        skipped=result.skipped,
        notes=list(result.notes),
    )


@dataclass(frozen=True, kw_only=True)
class ExperimentOutput:
    """A small model to train."""

    name: str = described("name in the file of runs")
    num_parameters: int = described("parameters without embeddings")
    hidden_size: int = described("width of the residual stream")
    num_layers: int = described("layers")
    num_heads: int = described("query heads")
    num_kv_heads: int = described("key-value heads")
    intermediate_size: int = described("inner width of the MLP")
    train_tokens: float = described("tokens of one seed")
    num_seeds: int = described("seeds to train")
    gpu_hours: float = described("predicted time of all seeds on one device, in hours")


@dataclass(frozen=True, kw_only=True)
class ExperimentsOutput:
    """The cheapest small models that would settle undecided shapes."""

    file: str = described("file of runs for `shapewright proxy`; empty if none is proposed")
    why_none: str = described("why no run is proposed; empty if some are")
    num_seeds: int = described("seeds to train, for `--seeds`")
    gpu_hours: float = described("predicted time of all of them on one device, in hours")
    full_gpu_hours: float = described("predicted device hours of training the baseline at full size")
    experiments: list[ExperimentOutput] = described("models to train, the smallest first")
    questions: list[Question] = described("the undecided shapes, best first")
    notes: list[str] = described("remarks, one line each")


def experiments_output(plan: ExperimentPlan, path: str) -> ExperimentsOutput:
    """Output of proposed experiments, whose runs are written to a file."""
    return take(
        ExperimentsOutput,
        plan,
        file=path if plan.experiments else "",
        num_seeds=max((run.num_seeds for run in plan.experiments), default=1),
        experiments=[take(ExperimentOutput, run, run.config) for run in plan.experiments],
        notes=list(plan.notes),
    )


def runs_file(plan: ExperimentPlan) -> str:
    """CSV file of the runs that ``shapewright proxy`` is to train."""
    rows = [run.run_columns() for run in plan.experiments]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
