"""Which kernels a library took for a call, as a graph of the call tells; no profiler is needed."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend

# A kernel of cudaGraphDebugDotPrint: its name, then grid, block and shared memory, with braces around what has several
# dimensions. Source: files that it writes (CUDA 12.8, 13.0).
_KERNEL = re.compile(r"\(topoId: \d+\) \| (.+?)\\<\\<\\<(.+?)\\>\\>\\>")
# Names of templates can be thousands of characters long.
_LONGEST_NAME = 160


def list_kernels(backend: Backend, run: Callable[[], object]) -> list[str]:
    """Kernels that some calls launch, each with its grid, as a graph of them shows; none where it does not tell.

    Args:
        backend: A GPU; it is told if the capture breaks.
        run: Makes the calls, all warm and known to be captured without harm.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    graph.enable_debug_mode()
    backend.synchronize()
    try:
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
    except RuntimeError as error:
        backend.broken_captures.append(str(error))
        return []
    # Torch warns that this is for debugging.
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), suppress(RuntimeError, OSError):
        warnings.simplefilter("ignore")
        path = Path(folder) / "graph.dot"
        graph.debug_dump(str(path))
        return read_kernels(path.read_text(encoding="utf-8", errors="replace"))
    return []


def read_kernels(dot: str) -> list[str]:
    r"""Kernels of a graph that was written down, each with its launch, in the order of the file.

    Args:
        dot: What cudaGraphDebugDotPrint wrote, verbose.

    >>> read_kernels(r"| {ID | 0 (topoId: 0) | nvjet_tst_256x128\<\<\<\{66,2\},384,99\>\>\>}")
    ['nvjet_tst_256x128<<<{66,2},384,99>>>']
    """
    return [f"{name[:_LONGEST_NAME]}<<<{launch}>>>".replace("\\", "") for name, launch in _KERNEL.findall(dot)]
