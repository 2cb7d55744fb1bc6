"""Tracing in a child process: a user's file, or a config of transformers, with limits on time and memory.

Running a file runs its code. Only a path that the user writes (``file.py:callable``) is ever run; a config.json or a
repository of the hub cannot name one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shapewright.core.child_process import child_environment, python_command
from shapewright.core.errors import MissingExtraError, ShapewrightError, TraceError, short_path
from shapewright.core.texts import FieldName, Text, with_fields
from shapewright.lowering.torch_trace import DEFAULT_TIME_LIMIT_S, TARGET
from shapewright.lowering.torch_trace.trace import Trace

# Address space of the child; importing torch takes about 3 GB of it.
MEMORY_LIMIT_BYTES = 12 * 2**30
_SECONDS_TO_DUMP = 0.5
_ADVICE_ON_TIME = {
    "file": "look for a loop that does not end, or allow more with {time_limit_s}",
    "config": "models that run token by token take long: give a shorter {seq_len}, or allow more with {time_limit_s}",
}
_STARTED = "PyTorch imported"


def trace_target(
    target: str,
    inputs: str,
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    **options: Any,
) -> Trace:
    """Trace the module that a callable of a Python file returns. This runs the file.

    Args:
        target: ``file.py:callable``; the callable takes no arguments and returns a torch.nn.Module.
        inputs: Inputs of the module as text, such as ``tokens=int64[4,2048]``.
        time_limit_s: Time after which the child is ended. [s]
        options: phase, dtype, fused and values, as trace_module takes them.

    Raises:
        TraceError: the file cannot be imported, or its module cannot be traced.
    """
    found = re.fullmatch(TARGET, target)
    assert found is not None, target
    file = Path(found["file"]).expanduser()
    if not file.is_file():
        raise TraceError(f"no file {short_path(found['file'])}", advice="give file.py:callable")
    request = {"kind": "file", "file": str(file.resolve()), "name": found["name"], "source": target, "inputs": inputs}
    return _run(request | {"options": options}, time_limit_s)


def trace_config(
    config: Mapping[str, Any],
    source: str,
    *,
    batch_size: int,
    seq_len: int,
    inputs: str | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    **options: Any,
) -> Trace:
    """Trace the model that transformers or diffusers builds from a config.json object, without weights and remote code.

    Args:
        source: Where it was read from.
        inputs: Inputs as text; by default token ids, and labels in training.
        time_limit_s: Time after which the child is ended. [s]
        options: phase, dtype, fused and values, as trace_module takes them.

    Raises:
        TraceError: it cannot be built, or it cannot be traced.
    """
    request: dict[str, Any] = {"kind": "config", "config": dict(config), "source": source, "inputs": inputs}
    request |= {"batch_size": batch_size, "seq_len": seq_len, "options": options}
    return _run(request, time_limit_s)


def _run(request: dict[str, Any], time_limit_s: float) -> Trace:
    """Run a request in a child process."""
    if not time_limit_s > 0.0:
        raise TraceError(f"time limit of {time_limit_s} s; give a positive number of seconds")
    with tempfile.TemporaryDirectory(prefix="shapewright-trace-") as folder:
        result, place = Path(folder, "result.json"), Path(folder, "place.txt")
        request |= {"result": str(result), "place": str(place)}
        process = subprocess.Popen(
            python_command(f"{__package__}.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=child_environment() | {"CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        with process:  # closes its pipes, and waits for it
            try:
                _, errors = process.communicate(json.dumps(request).encode(), timeout=time_limit_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(AttributeError, ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)  # it writes where it is
                    time.sleep(_SECONDS_TO_DUMP)
                text = place.read_text(encoding="utf-8", errors="replace") if place.is_file() else ""
                raise TraceError(
                    f"the trace did not finish within {time_limit_s:g} s{_place_of(text, request)}",
                    advice=with_fields(_ADVICE_ON_TIME[request["kind"]]),
                    user_traceback=text.removeprefix(_STARTED).lstrip(),
                ) from None
            finally:
                # The child may have children of its own, and an interrupt must not leave it behind.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        if not result.is_file():
            words = errors.decode(errors="replace").strip()
            reason = words.splitlines()[-1][:200] if words else f"exit status {process.returncode}"
            raise TraceError(
                f"the process that ran the module ended without a result ({reason})",
                advice=f"it may use {MEMORY_LIMIT_BYTES // 2**30} GiB of memory; make tensors on the meta device",
                user_traceback=words,
            )
        answer = json.loads(result.read_text(encoding="utf-8"))
    if "error" in answer:
        if answer["code"] == MissingExtraError.code:
            raise MissingExtraError("".join(answer["error"]))
        text = Text(*(part if isinstance(part, str) else FieldName(*part) for part in answer["error"]))
        raise TraceError(text, user_traceback=answer["traceback"], field=answer["field"])
    return Trace.from_json(answer["trace"])


def _place_of(text: str, request: Mapping[str, Any]) -> str:
    """Line of the user's file that the child was at, from the dump of its stack."""
    if not text.startswith(_STARTED):
        return ", in which PyTorch was not imported yet"
    file = request.get("file")
    for name, line in re.findall(r'File "([^"]+)", line (\d+)', text):
        if name == file:
            return f"; it was at {Path(name).name}:{line}"
    return ""


def main() -> None:
    """Read a request from standard input, and write the result to the file that it names."""
    from shapewright.lowering.torch_trace.run import require_torch

    request = json.loads(sys.stdin.buffer.read())
    _limit_memory()
    with Path(request["place"]).open("w", encoding="utf-8") as place:
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, file=place, all_threads=False)
        try:
            require_torch()
            print(_STARTED, file=place, flush=True)
            answer: dict[str, Any] = {"trace": _answer(request).to_json()}
        except ShapewrightError as error:
            parts = [(part.field, part.value) if isinstance(part, FieldName) else part for part in error.text.parts]
            text = getattr(error, "user_traceback", "")
            answer = {"error": parts, "code": error.code, "field": error.field, "traceback": text}
    target = Path(request["result"])
    target.with_suffix(".part").write_text(json.dumps(answer), encoding="utf-8")
    target.with_suffix(".part").replace(target)
    # Threads and exit handlers of the user's code must not keep the process.
    os._exit(0)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))


def _answer(request: Mapping[str, Any]) -> Trace:
    from shapewright.lowering.torch_trace.run import trace_module

    options = request["options"]
    if request["kind"] == "file":
        module, given = _build(request["file"], request["name"])
        inputs = request["inputs"] or given
        if not inputs:
            raise TraceError(
                "the inputs of the module are not known",
                advice=with_fields("give {example}", example=FieldName("inputs", "tokens=int64[4,2048]")),
                field="inputs",
            )
        return trace_module(module, inputs, source=request["source"], **options)
    from shapewright.lowering.torch_trace.huggingface import trace_built_model

    return trace_built_model(
        request["config"],
        request["inputs"],
        source=request["source"],
        batch_size=request["batch_size"],
        seq_len=request["seq_len"],
        **options,
    )


def _build(file: str, name: str) -> tuple[Any, Any]:
    """Import a file and call its builder on the meta device; return the module, and inputs if it returns them too."""
    import importlib.util

    import torch

    from shapewright.lowering.torch_trace.errors import user_errors
    from shapewright.lowering.torch_trace.library_kernels import import_missing_libraries

    import_missing_libraries()
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    imported = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = imported
    with user_errors(f"{path.name} cannot be imported"), _no_exit_at_import(path.name):
        spec.loader.exec_module(imported)
    found: Any = imported
    for part in name.split("."):
        if not hasattr(found, part):
            known = [one for one, value in vars(imported).items() if callable(value) and not one.startswith("_")]
            raise TraceError(f"{path.name} has no {name!r}", advice=f"it has {', '.join(known[:20]) or 'no callable'}")
        found = getattr(found, part)
    if not isinstance(found, torch.nn.Module):
        if not callable(found):
            raise TraceError(f"{name} of {path.name} is a {type(found).__name__}; name a function or a class")
        with user_errors(f"{path.name}:{name}"), torch.device("meta"):
            found = found()
    module, inputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, torch.nn.Module):
        raise TraceError(
            f"{name} of {path.name} returned {type(module).__name__!r}; it has to return a torch.nn.Module"
        )
    _refuse_real_memory(module)
    return module, inputs


@contextlib.contextmanager
def _no_exit_at_import(file: str) -> Any:
    """Treat an exit of the user's file as an error."""
    try:
        yield
    except SystemExit as error:
        raise TraceError(
            f"{file} exits (sys.exit({error.code})) when it is imported",
            advice="put what it runs under if __name__ == '__main__'",
        ) from None


# Constants such as tables of positions may be on the CPU.
_MOST_REAL_BYTES = 64 * 2**20


def _refuse_real_memory(module: Any) -> None:
    """Refuse a module whose parameters have memory: builders run under torch.device("meta")."""
    real = [
        (name, one)
        for name, one in (*module.named_parameters(), *module.named_buffers())
        if not one.is_meta and one.numel() * one.element_size() > 0
    ]
    total = sum(one.numel() * one.element_size() for _, one in real)
    if total > _MOST_REAL_BYTES:
        name, one = max(real, key=lambda entry: entry[1].numel() * entry[1].element_size())
        raise TraceError(
            f"the builder allocates real memory: {name!r} of {type(module).__name__} has {list(one.shape)} elements on "
            f"{one.device}",
            advice="build without .to(), .cuda(), from_numpy and loaded weights: it runs under torch.device('meta')",
        )


if __name__ == "__main__":
    main()
