"""The pointwise record against the table it was fitted to, and each model against a fit of the others."""

from __future__ import annotations

import numpy as np
import pytest
from judging import ALL_LIMITS, load_refit, mean_error, measured_file

from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.tables.pointwise import SIZES, operation_of
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.pointwise import price_pointwise

LIMITS = ALL_LIMITS["pointwise"]


@pytest.mark.parametrize("model", ["Llama-2-7b-hf", "Qwen-72B", "phi-2"])
def test_held_out_models(model: str) -> None:
    """Fitted on the other two models, the mean error on this one stays within the limit."""
    script = load_refit("pointwise")
    import pandas as pd

    rows = script.with_work(pd.read_parquet(measured_file("pointwise.parquet")))
    device = load_device("a100-sxm-80gb")
    others, held_out = rows[rows.model != model], rows[rows.model == model]
    held_out = held_out[held_out.kind.isin(others.kind)]
    predicted = script.predict(script.fit(others, device), held_out, device)

    assert mean_error(predicted, held_out.latency_s.to_numpy()) <= LIMITS[model]


def test_record_reproduces_its_fit() -> None:
    """The package prices the table as the refit predicts it."""
    import pandas as pd

    rows = pd.read_parquet(measured_file("pointwise.parquet"))
    device = load_device("a100-sxm-80gb")
    record = load_record("pointwise", device)
    for name, of_operation in rows.groupby("operation"):
        errors = []
        for model, part in of_operation.groupby("model"):
            sizes = {size: part[size].to_numpy(float) for size in SIZES}
            price = price_pointwise(operation_of(sizes, name, model, element_bytes=2.0), device, record)
            errors.append(np.abs(price.time_s / part.latency_s.to_numpy() - 1.0))
        error = float(np.mean(np.concatenate(errors)))

        assert error == pytest.approx(record.provenance["reports"][f"fit {name}"]["mean_absolute_error"], rel=0.02)
