"""Files with the loss law of a user's own recipe, which ``shapewright calibrate --losses`` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.core.files import read_start
from shapewright.prediction.loss.law import LossLaw, parse_law, using_law

FILE_KIND = "shapewright loss law"
FILE_SCHEMA_VERSION = 1
_LARGEST_FILE_BYTES = 2**20


def law_file_content(law: LossLaw) -> dict[str, Any]:
    """Content of a file that holds one law, for ``read_loss_law``."""
    return {
        "schema_version": FILE_SCHEMA_VERSION,
        "kind": FILE_KIND,
        "recipe": law.name,
        "law": {
            "coefficients": dict(law.coefficients),
            "covariance": law.covariance.tolist(),
            "scatter_nats": law.scatter_nats,
            "scatter_length": law.scatter_length,
            "parameters_range": list(law.parameters_range),
            "tokens_range": list(law.tokens_range),
        },
        "provenance": dict(law.provenance),
    }


def read_loss_law(path: str | Path) -> LossLaw:
    """Read the law of a user's own recipe, as 'shapewright calibrate --losses' writes it.

    Raises:
        CalibrationError: the file cannot be read, is something else, or is malformed.
    """
    hint = "give a file that 'shapewright calibrate --losses' has written"
    try:
        content = read_start(path, _LARGEST_FILE_BYTES + 1)
        raw = json.loads(content.decode("utf-8")) if len(content) <= _LARGEST_FILE_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise CalibrationError(f"loss law {path} cannot be read ({reason}); {hint}") from error
    if not isinstance(raw, dict) or raw.get("kind") != FILE_KIND or not isinstance(raw.get("law"), dict):
        raise CalibrationError(f"{path} is not a loss law; {hint}")
    if raw.get("schema_version") != FILE_SCHEMA_VERSION:
        raise CalibrationError(
            f"loss law {path} has schema version {raw.get('schema_version')!r}, known here is {FILE_SCHEMA_VERSION}; "
            "fit it again with 'shapewright calibrate --losses'"
        )
    provenance = raw.get("provenance")
    law = parse_law(str(raw.get("recipe", "")), raw["law"], provenance if isinstance(provenance, dict) else {})
    numbers = [*law.coefficients.values(), *law.covariance.flat, law.scatter_nats, law.scatter_length]
    if not np.all(np.isfinite(numbers)) or law.scatter_nats < 0.0 or law.scatter_length <= 0.0:
        raise CalibrationError(f"loss law {path} has numbers out of range; {hint}")
    return law


@contextmanager
def using_loss_law(path: str | Path) -> Iterator[None]:
    """Judge losses by the law of a user's own recipe, in this thread.

    Args:
        path: File that 'shapewright calibrate --losses' has written.

    Raises:
        CalibrationError: the file cannot be read, is something else, or is malformed.
    """
    with using_law(read_loss_law(path)):
        yield
