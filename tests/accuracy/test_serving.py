"""Servers under load against published throughput and static batches, by server and on pairs left out."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from judging import ALL_LIMITS, load_refit, measured_file

from shapewright.measure.accuracy.evaluate import Accuracy, evaluate_folder
from shapewright.pricing.servers import load_server

LIMITS = ALL_LIMITS["serving"]
TABLES = ("serving_throughput", "serving_static")
# Interval of held-out pairs, of which two thirds of the rows were fitted: wider than 90 % on all rows.
COVERAGE = (0.85, 0.99)


@cache
def errors() -> dict[str, Accuracy]:
    """Errors by table and server."""
    folder = measured_file("serving_throughput.csv").parent
    measured_file("serving_static.csv")
    rows = evaluate_folder(folder, tables=TABLES, by=("library",)).rows
    return {f"{row.table}/{row.library}": row for row in rows}


@cache
def priced(name: str) -> tuple[ModuleType, Any, Any]:
    """The refit module, the rows of an engine with prices, and the engine."""
    folder = measured_file("serving_throughput.csv").parent
    script = load_refit("servers")
    engine = next(each for each in script.ENGINES if each.name == name)
    rows = [row for row in script.read_rows(folder) if row.server.name in engine.servers]
    return script, script.Prices(rows, engine.quantities), engine


@pytest.mark.parametrize("name", LIMITS["mean"])
def test_mean_error_by_server(name: str) -> None:
    """The mean error of all rows of a server stays within its limit."""
    assert errors()[name].mape <= LIMITS["mean"][name]


@pytest.mark.parametrize("name", LIMITS["disorder"])
def test_order_of_rows(name: str) -> None:
    """Predicted throughput puts the rows of a server in about the measured order."""
    tau = errors()[name].kendall_tau

    assert tau is not None
    assert 1.0 - tau <= LIMITS["disorder"][name]


@pytest.mark.parametrize("name", ["serving_throughput/trtllm-1.0", "serving_throughput/moe/trtllm-1.0"])
def test_intervals_cover(name: str) -> None:
    """Intervals come from held-out pairs and cover the rows, without being so wide that they cover all."""
    assert COVERAGE[0] <= errors()[name].coverage_90 <= COVERAGE[1]
    assert errors()[name].interval_width < np.log(2.0)


@pytest.mark.parametrize(
    ("engine_name", "name"), [(engine, name) for engine, pairs in LIMITS["held_out"].items() for name in pairs]
)
def test_pairs_left_out(engine_name: str, name: str) -> None:
    """Fitted without a pair of model and device, the mean error of its throughput stays within the limit."""
    script, prices, engine = priced(engine_name)
    is_out = np.array(["/".join(pair) == name for pair in prices.pairs])
    fitted = script.fit(prices, engine, ~is_out)
    is_rate = np.array([quantity == "output_tokens_per_s" for _, quantity in prices.rows])
    held_out = np.abs(np.exp(prices.log_ratios(fitted)[is_out & is_rate]) - 1.0)

    assert is_out.any()
    assert float(np.mean(held_out)) <= LIMITS["held_out"][engine_name][name]


def test_committed_parameters_price_as_the_fit() -> None:
    """The record of TensorRT-LLM, priced by the package, gives the errors that the refit reports."""
    script, prices, engine = priced("trtllm")
    record = load_server("trtllm-1.0")
    fitted = {f"{key}.{kind}": getattr(fit, key) for kind, fit in record.kernels.items() for key in ("fraction",)}
    assert {name: value for name, value in fitted.items() if value} == pytest.approx(
        {
            name: value
            for name, value in script.fit(prices, engine).items()
            if name.startswith("fraction.") and "@" not in name
        },
        rel=0.05,
    )
