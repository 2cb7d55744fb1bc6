"""Element formats by name."""

from __future__ import annotations

import pytest

from shapewright.core.dtypes import DTYPE_NAMES, get_dtype
from shapewright.core.errors import WorkloadError


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("fp32", 4.0), ("tf32", 4.0), ("fp16", 2.0), ("bf16", 2.0), ("fp8", 1.0), ("int8", 1.0), ("fp4", 0.5)],
)
def test_width_in_memory(name: str, num_bytes: float) -> None:
    """One element has its bits over eight bytes; tf32 is stored as fp32."""
    assert get_dtype(name).num_bytes == num_bytes


def test_all_names_are_known() -> None:
    """Every listed name gives a format of that name."""
    assert [get_dtype(name).name for name in DTYPE_NAMES] == list(DTYPE_NAMES)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), (" Float16", "fp16"), ("half", "fp16"), ("NVFP4", "fp4")],
)
def test_aliases(spelling: str, name: str) -> None:
    """Names used by PyTorch and vendors give the same formats."""
    assert get_dtype(spelling).name == name


def test_unknown_name_is_explained() -> None:
    """An unknown name is an error with similar names, or with all names."""
    with pytest.raises(WorkloadError, match=r"unknown dtype 'bf61'; did you mean 'bf16'"):
        get_dtype("bf61")
    with pytest.raises(WorkloadError, match=r"unknown dtype 'zzz'; choose one of fp32, tf32, .*fp4"):
        get_dtype("zzz")
