"""Exceptions of the user's code: its innermost line, one line of text, and its traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shapewright.core.errors import ShapewrightError, TraceError, first_line
from shapewright.core.texts import with_fields

_OWN_FOLDER = str(Path(__file__).parent)
_LIBRARY_PARTS = ("/contextlib.py", "/functools.py", "/importlib/", "/numpy/", "<frozen")


def is_user_frame(filename: str) -> bool:
    """Whether a frame belongs to the user's code or a library of models, not to PyTorch or to this package."""
    import torch

    folders = (_OWN_FOLDER, str(Path(torch.__file__).parent))
    return not filename.startswith(folders) and not any(part in filename for part in _LIBRARY_PARTS)


def user_line() -> str:
    """Innermost line of the user's code that runs now, as ``file.py:12``."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_frame(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "?"


@contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into one line with its place, and keep its traceback."""
    try:
        yield
    except ShapewrightError as error:
        if isinstance(error, TraceError) and not error.user_traceback:
            error.user_traceback = _user_traceback(error)
        raise
    except SystemExit as error:
        text = _user_traceback(error)
        raise TraceError(f"{what} exits (sys.exit({error.code}))", advice=_WHERE, user_traceback=text) from None
    except Exception as error:
        raise describe_error(error, what) from None


_WHERE = with_fields("{user_traceback} shows where")
_CUDA_WORDS = ("CUDA", "cuda", "NVIDIA", "HIP")
_VALUE_WORDS = ("meta tensor", "Meta tensor", "data-dependent", "nonzero")


def describe_error(error: BaseException, what: str) -> TraceError:
    """One line for an exception of the user's code.

    Args:
        what: What ran: the builder, or the module's forward function.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_user_frame(frame.filename)]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}: " if own else f"{what}: "
    words = first_line(error)
    advice: str = _WHERE
    if isinstance(error, MemoryError) or "allocate" in words:
        words, advice = "allocates real memory", "make tensors on the meta device: leave the device out"
    elif "process group has not been initialized" in words or "env:// rendezvous" in words:
        words = "the module asks for other ranks, and there is no process group"
        advice = (
            "in the builder: torch.distributed.init_process_group('fake', rank=0, world_size=8, store=FakeStore()), "
            "from torch.testing._internal.distributed.fake_pg, and init_device_mesh('cpu', (8,))"
        )
    elif any("/distributed/fsdp/" in frame.filename or "/parallel/distributed" in frame.filename for frame in frames):
        words = "FullyShardedDataParallel and DistributedDataParallel do not run on the meta device"
        advice = "wrap the module with fully_shard (FSDP2), which is traced, or trace it without"
    elif "to_empty() instead of" in words:
        words = "the module is moved to a device"
        advice = "a trace runs on the meta device: leave the device out (.to(), .cuda(), .cpu())"
    elif any(word in words for word in _CUDA_WORDS):
        words = f"asks for CUDA ({words})"
        advice = "a trace runs on the meta device; leave the device out, or take it from an input (x.device)"
    elif any(word in words for word in _VALUE_WORDS):
        words = f"needs the value of a tensor, which the meta device does not have ({words})"
        advice = with_fields("make small constants with device='cpu', or pass sizes as numbers ({inputs:length=128})")
    elif (
        "expanded size" in words or "must match" in words or "cannot be multiplied" in words or "reduction dim" in words
    ):
        advice = "check the sizes of the inputs; " + _WHERE
    return TraceError(f"{place}{type(error).__name__}: {words}", advice=advice, user_traceback=_user_traceback(error))


def _user_traceback(error: BaseException) -> str:
    """Traceback from the first line of the user's code."""
    start = error.__traceback__
    while start is not None and not is_user_frame(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start or error.__traceback__))
