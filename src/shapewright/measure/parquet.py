"""Access to pyarrow for reading parquet files, with its errors translated into errors of this package."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from shapewright.core.errors import MeasuredFileError, MissingExtraError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType


@contextmanager
def reading_parquet(path: Path) -> Iterator[ModuleType]:
    """Provide ``pyarrow.parquet`` to read a file, and translate its errors.

    Raises:
        MeasuredFileError: the file does not exist, or is not valid parquet.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError(
            f"reading {path.name} needs pyarrow, which is not installed; run: pip install 'shapewright[fit]'"
        ) from error
    try:
        yield pq
    except MeasuredFileError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise MeasuredFileError(f"{path} cannot be read as parquet ({first_line(error)}); replace the file") from error
